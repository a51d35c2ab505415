//! The kubelet, Multus, other plugins, the CNI programs and the address store (K).

pub(super) mod read;

use std::collections::BTreeMap;

use super::check::Check;
use crate::verdict::Finding;

pub(super) use read::read;

/// What is read.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// There is a kubelet's directory on this host.
    pub kubelet: bool,
    /// The directory of device plugins; `None` if it is not there.
    pub plugin_dir: Option<PluginDir>,
    /// How asking for PodResources went.
    pub pod_resources: Asked,
    /// Settings of the kubelet; `None` if its configuration is not in sight.
    pub policies: Option<Policies>,
    /// NUMA nodes that have CPUs: what pods can be aligned to.
    pub numa_nodes_with_cpus: usize,
    /// The directory of CNI programs is in sight, or is missing on the host.
    pub programs_in_sight: bool,
    /// The directory of CNI configurations is in sight, or is missing on the host.
    pub configurations_in_sight: bool,
    /// Device IDs by resource, as plugins registered them.
    pub registered: BTreeMap<String, Vec<String>>,
    /// Addresses of RDMA NICs.
    pub nics: Vec<String>,
    /// CNI programs with their versions; `None` for one that is not there or does not run.
    pub programs: Vec<(String, Option<String>)>,
    /// This program's version.
    pub version: String,
    /// CNI configurations found.
    pub cni_configurations: Vec<String>,
    /// Stores of the node's policy, with how opening them went; or why the policy is no good.
    pub stores: Result<Vec<(String, Opened)>, String>,
    /// InfiniBand ports with their partition keys.
    pub pkeys: Vec<(String, Vec<u16>)>,
    /// The partition key that ports should have.
    pub wanted_pkey: Option<u16>,
}

/// What a store is, or what is wrong with it and what to do.
pub(super) type Opened = Result<String, (String, String)>;

/// The directory of device plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PluginDir {
    /// Its path.
    pub path: String,
    /// This process may make a socket in it.
    pub writable: bool,
    /// The kubelet's registration socket is there.
    pub socket: bool,
}

/// How a question to the kubelet went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Asked {
    /// There is no socket.
    #[default]
    NoSocket,
    /// It answered.
    Answered,
    /// It did not.
    Failed(String),
}

/// Settings of the kubelet that decide on alignment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Policies {
    /// `cpuManagerPolicy`.
    pub cpu: String,
    /// `topologyManagerPolicy`.
    pub topology: String,
    /// `topologyManagerScope`.
    pub scope: String,
}

/// The checks.
pub(super) const CHECKS: &[Check<Facts>] = &[
    Check {
        id: "K01",
        title: "device plugins can register",
        judge: k01_plugins,
    },
    Check {
        id: "K02",
        title: "the kubelet reports which pod has what",
        judge: k02_pod_resources,
    },
    Check {
        id: "K03",
        title: "the kubelet aligns devices",
        judge: k03_alignment,
    },
    Check {
        id: "K07",
        title: "no NIC is offered twice",
        judge: k07_twice,
    },
    Check {
        id: "K08",
        title: "CNI programs are of this version",
        judge: k08_programs,
    },
    Check {
        id: "K09",
        title: "address stores can be reached",
        judge: k09_stores,
    },
    Check {
        id: "K10",
        title: "InfiniBand ports have the partition",
        judge: k10_partition,
    },
];

fn no_kubelet(facts: &Facts) -> Option<Vec<Finding>> {
    (!facts.kubelet).then(|| {
        vec![Finding::not_applicable(
            "no kubelet's directory on this host",
        )]
    })
}

fn k01_plugins(facts: &Facts) -> Vec<Finding> {
    if let Some(none) = no_kubelet(facts) {
        return none;
    }
    let Some(directory) = &facts.plugin_dir else {
        return vec![Finding::fail(
            "the kubelet's directory of device plugins is not there",
            "start the kubelet, or name its directory with --device-plugin-dir",
        )];
    };
    let finding = if !directory.writable {
        Finding::fail("it is not writable", "mount it read-write, and run as root")
    } else if directory.socket {
        Finding::pass("the kubelet's socket is there")
    } else {
        Finding::fail(
            "the kubelet's socket is not there",
            "systemctl status kubelet",
        )
    };
    vec![finding.on(&directory.path)]
}

fn k02_pod_resources(facts: &Facts) -> Vec<Finding> {
    if let Some(none) = no_kubelet(facts) {
        return none;
    }
    vec![match &facts.pod_resources {
        Asked::Answered => Finding::pass("it answers"),
        Asked::NoSocket => Finding::fail(
            "pod-resources/kubelet.sock is not there: Multus cannot assign devices to networks",
            "mount the kubelet's pod-resources directory; kubelets before 1.20 need \
             KubeletPodResources",
        ),
        Asked::Failed(error) => Finding::fail(error, "run as root; check the kubelet's log"),
    }]
}

fn k03_alignment(facts: &Facts) -> Vec<Finding> {
    if let Some(none) = no_kubelet(facts) {
        return none;
    }
    let Some(policies) = &facts.policies else {
        return vec![Finding::unknown(
            "the kubelet's configuration is not in sight",
        )];
    };
    let strict = matches!(
        policies.topology.as_str(),
        "restricted" | "single-numa-node"
    );
    let finding = if facts.numa_nodes_with_cpus <= 1 {
        Finding::pass("there is but one NUMA node to align to")
    } else if strict && policies.cpu == "static" {
        Finding::pass("CPUs, GPUs and NICs of a container come from one place")
    } else if strict {
        Finding::warn(
            "devices are aligned, CPUs are not: cpuManagerPolicy is not static",
            "cpuManagerPolicy: static in the kubelet's configuration",
        )
    } else {
        Finding::warn(
            "no promise that GPU and NIC are on one NUMA node",
            "topologyManagerPolicy: restricted or single-numa-node, topologyManagerScope: pod, \
             cpuManagerPolicy: static",
        )
    };
    vec![
        finding
            .read("topologyManagerPolicy", &policies.topology)
            .read("topologyManagerScope", &policies.scope)
            .read("cpuManagerPolicy", &policies.cpu),
    ]
}

/// Resources that have a device of the same hardware.
fn k07_twice(facts: &Facts) -> Vec<Finding> {
    if facts.registered.is_empty() {
        return vec![Finding::not_applicable(
            "no device plugin has registered, or the kubelet's checkpoint is not in sight",
        )];
    }
    let shared = |ids: &[String], nic: &str| {
        ids.iter().any(|id| {
            let unit = id.parse::<hca::UnitId>().ok();
            unit.and_then(|unit| unit.hca().map(ToString::to_string))
                .as_deref()
                == Some(nic)
        })
    };
    facts
        .nics
        .iter()
        .map(|nic| {
            let by: Vec<&str> = facts
                .registered
                .iter()
                .filter(|(_, ids)| shared(ids, nic))
                .map(|(resource, _)| resource.as_str())
                .collect();
            let whole = by.iter().any(|resource| {
                facts.registered.get(*resource).is_some_and(|ids| ids.contains(nic))
            });
            let finding = if by.len() > 1 && whole {
                Finding::fail(
                    "two resources offer it, and at least one of them whole: two pods would have it",
                    "take it out of one of the configurations (selectors), and restart that plugin",
                )
            } else {
                Finding::pass("offered once, or shared by all")
            };
            let by = if by.is_empty() { "none".to_owned() } else { by.join(", ") };
            finding.on(nic).read("resources", by)
        })
        .collect()
}

fn k08_programs(facts: &Facts) -> Vec<Finding> {
    if let Some(none) = no_kubelet(facts) {
        return none;
    }
    if !facts.programs_in_sight {
        return vec![Finding::unknown(
            "the directory of CNI programs is not mounted here: check on the node, or name where it \
             is mounted with --cni-bin-dir",
        )];
    }
    let mut findings: Vec<Finding> = facts
        .programs
        .iter()
        .map(|(program, version)| {
            let remedy = "rdma-device-plugin install, or let the DaemonSet's init container do it";
            let finding = match version {
                None => Finding::warn("it is not there, or does not run", remedy),
                Some(version) if *version == facts.version => Finding::pass("the same version"),
                Some(version) => Finding::warn(
                    format!("version {version}, the device plugin is {}", facts.version),
                    remedy,
                ),
            };
            finding.on(program)
        })
        .collect();
    if facts.configurations_in_sight && facts.cni_configurations.is_empty() {
        findings.push(Finding::warn(
            "no CNI configuration: the node has no pod network yet",
            "install the cluster's network; name its directory with --cni-conf-dir",
        ));
    }
    findings
}

fn k09_stores(facts: &Facts) -> Vec<Finding> {
    match &facts.stores {
        Err(error) => vec![Finding::fail(
            error,
            "correct the node's policy; without it no pod gets an interface",
        )],
        Ok(stores) => stores
            .iter()
            .map(|(name, opened)| {
                let finding = match opened {
                    Ok(what) => Finding::pass(what),
                    Err((error, remedy)) => Finding::fail(error, remedy),
                };
                finding.on(format!("store {name}"))
            })
            .collect(),
    }
}

fn k10_partition(facts: &Facts) -> Vec<Finding> {
    if facts.pkeys.is_empty() {
        return vec![Finding::not_applicable("no InfiniBand port")];
    }
    facts
        .pkeys
        .iter()
        .map(|(port, keys)| {
            let list: Vec<String> = keys.iter().map(|key| format!("{key:#06x}")).collect();
            // The highest bit is full membership.
            let has = |wanted: u16| keys.iter().any(|key| key & 0x7fff == wanted & 0x7fff);
            let finding = match facts.wanted_pkey {
                _ if keys.is_empty() => Finding::fail(
                    "the partition table is empty: nothing can be sent",
                    "check the subnet manager (L04)",
                ),
                Some(wanted) if !has(wanted) => Finding::fail(
                    format!("{wanted:#06x} is not among its partitions"),
                    "add the port's GUID to the partition in the subnet manager's configuration",
                ),
                Some(_) => Finding::pass("it is a member"),
                None => Finding::pass("members of these partitions"),
            };
            let list = if list.is_empty() {
                "none".to_owned()
            } else {
                list.join(" ")
            };
            finding.on(port).read("pkeys", list)
        })
        .collect()
}

#[cfg(test)]
mod tests;
