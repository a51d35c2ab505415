//! The kubelet, Multus, other plugins, the CNI programs and the address store (K).

pub(super) mod read;

use std::collections::BTreeMap;

use kubelet_api::client;

use super::check::{Findings, checks, need};
use crate::verdict::{Finding, words};

pub(super) use read::read;

/// What is read.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// There is a kubelet's directory on this host.
    pub kubelet: bool,
    /// The directory of device plugins; `None` if it is not there.
    pub plugin_dir: Option<PluginDir>,
    /// How asking for PodResources went.
    pub pod_resources: Result<(), client::Error>,
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

checks! {
    "K01" "device plugins can register" k01_plugins;
    "K02" "the kubelet reports which pod has what" k02_pod_resources;
    "K03" "the kubelet aligns devices" k03_alignment;
    "K07" "no NIC is offered twice" k07_twice;
    "K08" "CNI programs are of this version" k08_programs;
    "K09" "address stores can be reached" k09_stores;
}

fn need_kubelet(facts: &Facts) -> Result<(), Finding> {
    need(facts.kubelet, "no kubelet's directory on this host")
}

fn k01_plugins(facts: &Facts) -> Findings {
    need_kubelet(facts)?;
    let Some(directory) = &facts.plugin_dir else {
        return Err(Finding::fail(
            "the kubelet's directory of device plugins is not there",
            "start the kubelet, or name its directory with --device-plugin-dir",
        ));
    };
    let finding = if !directory.writable {
        Finding::fail("it is not writable", "mount it read-write, and run as root")
    } else if directory.socket {
        Finding::pass("the kubelet's socket is there")
    } else {
        let why = "the kubelet's socket is not there";
        Finding::fail(why, "systemctl status kubelet")
    };
    Ok(vec![finding.on(&directory.path)])
}

fn k02_pod_resources(facts: &Facts) -> Findings {
    need_kubelet(facts)?;
    Ok(vec![match &facts.pod_resources {
        Ok(()) => Finding::pass("it answers"),
        Err(client::Error::NoSocket(_)) => Finding::fail(
            "pod-resources/kubelet.sock is not there: Multus cannot assign devices to networks",
            "mount the kubelet's pod-resources directory; kubelets before 1.20 need \
             KubeletPodResources",
        ),
        Err(error) => Finding::fail(error.to_string(), "run as root; check the kubelet's log"),
    }])
}

fn k03_alignment(facts: &Facts) -> Findings {
    need_kubelet(facts)?;
    let Some(policies) = &facts.policies else {
        let why = "the kubelet's configuration is not in sight";
        return Err(Finding::unknown(why));
    };
    let strict = ["restricted", "single-numa-node"].contains(&policies.topology.as_str());
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
    let finding = finding
        .read("topologyManagerPolicy", &policies.topology)
        .read("topologyManagerScope", &policies.scope)
        .read("cpuManagerPolicy", &policies.cpu);
    Ok(vec![finding])
}

/// Resources that have a device of the same hardware.
fn k07_twice(facts: &Facts) -> Findings {
    let why = "no device plugin has registered, or the kubelet's checkpoint is not in sight";
    need(!facts.registered.is_empty(), why)?;
    let is_of = |id: &String, nic: &str| {
        let unit = id.parse::<hca::UnitId>().ok();
        unit.is_some_and(|unit| unit.hca().is_some_and(|hca| hca.to_string() == nic))
    };
    let judge = |nic: &String| {
        let offers = |ids: &Vec<String>| ids.iter().any(|id| is_of(id, nic));
        let by = facts.registered.iter().filter(|(_, ids)| offers(ids));
        let whole = by.clone().any(|(_, ids)| ids.contains(nic));
        let by: Vec<&str> = by.map(|(resource, _)| resource.as_str()).collect();
        let finding = match by.len() > 1 && whole {
            true => Finding::fail(
                "two resources offer it, and at least one of them whole: two pods would have it",
                "take it out of one of the configurations (selectors), and restart that plugin",
            ),
            false => Finding::pass("offered once, or shared by all"),
        };
        finding.on(nic).read("resources", words(&by, ", "))
    };
    Ok(facts.nics.iter().map(judge).collect())
}

fn k08_programs(facts: &Facts) -> Findings {
    need_kubelet(facts)?;
    if !facts.programs_in_sight {
        return Err(Finding::unknown(
            "the directory of CNI programs is not mounted here: check on the node, or name where it \
             is mounted with --cni-bin-dir",
        ));
    }
    let remedy = "rdma-device-plugin install, or let the DaemonSet's init container do it";
    let judge = |(program, version): &(String, Option<String>)| {
        let finding = match version {
            None => Finding::warn("it is not there, or does not run", remedy),
            Some(version) if *version == facts.version => Finding::pass("the same version"),
            Some(version) => Finding::warn(
                format!("version {version}, the device plugin is {}", facts.version),
                remedy,
            ),
        };
        finding.on(program)
    };
    let mut findings: Vec<Finding> = facts.programs.iter().map(judge).collect();
    if facts.configurations_in_sight && facts.cni_configurations.is_empty() {
        findings.push(Finding::warn(
            "no CNI configuration: the node has no pod network yet",
            "install the cluster's network; name its directory with --cni-conf-dir",
        ));
    }
    Ok(findings)
}

fn k09_stores(facts: &Facts) -> Findings {
    let stores = facts.stores.as_ref().map_err(|error| {
        let remedy = "correct the node's policy; without it no pod gets an interface";
        Finding::fail(error, remedy)
    })?;
    let judge = |(name, opened): &(String, Opened)| {
        let finding = match opened {
            Ok(what) => Finding::pass(what),
            Err((error, remedy)) => Finding::fail(error, remedy),
        };
        finding.on(format!("store {name}"))
    };
    Ok(stores.iter().map(judge).collect())
}

#[cfg(test)]
mod tests;
