//! What containers get from their runtime (R): locked memory, capabilities, device nodes, CDI.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hca::chardev::Node;
use hca::{CharDevice, RdmaDevice};
use kubelet_api::runtime::{Runtime, ask};

use super::context::Context;
use super::engine::{Check, Fact, Findings, Judged, Unread, check, container, each, node};
use super::host_process::{self, HostProcess};
use super::read;
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, NO_NIC};

const CAP_IPC_LOCK: u64 = 1 << 14;
/// Runtimes by the first fifteen bytes of their names.
const RUNTIMES: [&str; 4] = ["containerd", "crio", "dockerd", "k3s-server"];

pub(super) fn checks() -> Vec<Check> {
    vec![
        check(
            "R01",
            "container runtime",
            Warn,
            "containers can lock memory",
        )
        .reads("its limits; in the daemon's container those that this one inherited")
        .remedy("LimitMEMLOCK=infinity in the runtime's systemd unit, or CAP_IPC_LOCK in the pod")
        .all(r01_locked),
        check(
            "R02",
            "container",
            Warn,
            "the container can lock memory beyond its limit",
        )
        .reads("CapEff and locked memory of this process")
        .remedy("capabilities: add: [IPC_LOCK] and run as root, or raise the runtime's limit (R01)")
        .each(container, r02_capability),
        check(
            "R04",
            "device node",
            Fail,
            "device nodes are there, and no others",
        )
        .reads("/dev/infiniband, /sys/class/infiniband_verbs, RDMA_DEVICES_* of this container")
        .remedy("udevadm trigger --subsystem-match=infiniband_verbs; check /dev's mount")
        .all(r04_nodes),
        check("R06", "node", Warn, "the container runtime reads CDI files")
            .reads("Version and Status of the runtime's CRI socket")
            .remedy(
                "enable_cdi = true in containerd's CRI plugin, or let the device plugin hand over \
                 nodes instead of CDI names",
            )
            .each(node, r06_cdi),
    ]
}

/// A limit of locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    Unlimited,
    Bytes(u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlimited => f.write_str("unlimited"),
            Self::Bytes(bytes) => write!(f, "{} KiB", bytes >> 10),
        }
    }
}

/// The soft limit of locked memory of the process in this directory.
fn locked(context: &Context, process: &Path) -> Fact<Limit> {
    let limits = read::required(context, &process.join("limits"))?;
    let mut lines = limits.lines();
    let line = lines.find(|line| line.starts_with("Max locked memory"));
    let limit = line.and_then(|line| match line.split_whitespace().nth(3)? {
        "unlimited" => Some(Limit::Unlimited),
        bytes => bytes.parse().ok().map(Limit::Bytes),
    });
    limit.ok_or_else(|| {
        Unread(format!(
            "{} has no limit of locked memory",
            process.display()
        ))
    })
}

/// The limit of this process, and whether it has `CAP_IPC_LOCK`.
fn r02_capability(context: &Context, check: &Check, container: &()) -> Judged {
    let own = context.host.proc.join("self");
    let status = read::required(context, &own.join("status"))?;
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    let limit = locked(context, &own)?;
    let finding = match set {
        None => return Err(Finding::unknown("/proc/self/status has no CapEff")),
        Some(set) if set & CAP_IPC_LOCK != 0 => Finding::pass("with CAP_IPC_LOCK"),
        Some(_) if limit == Limit::Unlimited => Finding::pass("without CAP_IPC_LOCK, and no limit"),
        Some(_) => check.fault(
            container,
            "without CAP_IPC_LOCK: a user other than root does not get it, whatever the pod requests",
        ),
    };
    Ok(finding.read("limit", limit))
}

fn r01_locked(context: &Context, check: &Check) -> Findings {
    if context.snapshot.inventory.rdma_devices().next().is_none() {
        return Err(Finding::not_applicable(NO_NIC));
    }
    if context.settings.in_pod {
        return Err(Finding::not_applicable("see R02"));
    }
    let processes = match context.in_container() {
        true => vec![HostProcess {
            title: "this container".to_owned(),
            directory: context.host.proc.join("self"),
        }],
        false => host_process::find(context, &RUNTIMES)?,
    };
    each(&processes, |process| {
        let limit = locked(context, &process.directory)?;
        Ok(match limit {
            Limit::Unlimited => Finding::pass("no limit"),
            Limit::Bytes(_) => {
                let why =
                    "registering more memory in a container fails with \"Couldn't allocate MR\"";
                check.fault(process, &format!("{limit}: {why}"))
            }
        })
    })
}

/// RDMA devices in the variables that the plugin sets; `None` if it set none.
fn allocated(variables: impl Iterator<Item = (String, String)>) -> Option<Vec<String>> {
    let own = variables.filter(|(name, _)| name.starts_with("RDMA_DEVICES_"));
    let lists: Vec<String> = own.map(|(_, value)| value).collect();
    let devices = lists.iter().flat_map(|list| list.split(','));
    let devices = devices
        .filter(|device| !device.is_empty())
        .map(str::to_owned);
    let devices: Vec<String> = devices.collect();
    (!devices.is_empty()).then_some(devices)
}

/// The verbs nodes of RDMA devices, and the connection manager's.
fn device_nodes(context: &Context) -> Vec<(Option<&RdmaDevice>, &CharDevice)> {
    let inventory = &context.snapshot.inventory;
    let verbs = inventory.rdma_devices().filter_map(|device| {
        let uverbs = device.char_devices.uverbs.as_ref()?;
        Some((Some(device), uverbs))
    });
    verbs
        .chain(inventory.rdma_cm.as_ref().map(|cm| (None, cm)))
        .collect()
}

fn r04_nodes(context: &Context, check: &Check) -> Findings {
    if context.snapshot.inventory.rdma_devices().next().is_none() {
        return Err(Finding::not_applicable(NO_NIC));
    }
    let in_pod = context.settings.in_pod;
    let dev = context.path("/dev");
    if !in_pod && !dev.is_dir() {
        return Err(Finding::unknown(format!(
            "{} is not mounted here: run rdmactl on the node",
            dev.display()
        )));
    }
    let nodes = device_nodes(context);
    let any_ready = nodes.iter().any(|(_, node)| node.node() == Node::Ready);
    let allocated = allocated(std::env::vars());
    let judge = |(device, node): &(Option<&RdmaDevice>, &CharDevice)| {
        let mode = std::fs::metadata(&node.path).ok();
        let mode = mode.map(|meta| meta.permissions().mode() & 0o777);
        let is_allocated = device
            .zip(allocated.as_ref())
            .map(|(device, all)| all.contains(&device.name));
        let finding = match node.node() {
            Node::Stale { found } => Finding::fail(
                format!("it is device {found}: the RDMA device was registered again"),
                if in_pod {
                    "restart the pod"
                } else {
                    check.remedy
                },
            ),
            Node::Missing if in_pod => {
                let has_netdev = |device: &RdmaDevice| {
                    let mut netdevs = device.netdevs();
                    netdevs.any(|netdev| context.snapshot.inventory.netdev(netdev).is_some())
                };
                let is_missed = match (device, is_allocated) {
                    (Some(_), Some(is_allocated)) => is_allocated,
                    (Some(device), None) => has_netdev(device),
                    (None, _) => allocated.is_some() || any_ready,
                };
                if !is_missed {
                    return None;
                }
                Finding::fail(
                    "this container has the NIC but not its node",
                    "request the device plugin's resource in this container's limits",
                )
            }
            Node::Missing => check.fault(&(), "neither devtmpfs nor udev made it"),
            Node::Ready if in_pod && is_allocated == Some(false) => Finding::warn(
                "it belongs to a NIC that this container was not allocated",
                "see D07; privileged containers get all of them",
            ),
            Node::Ready if mode.is_some_and(|mode| mode & 0o006 != 0o006) => Finding::warn(
                "only root can open it",
                "mode 0666 by udev (rdma-core's 90-rdma-umad.rules), or run as root",
            ),
            Node::Ready => Finding::pass("there"),
        };
        let mode = mode.map_or("not there".to_owned(), |mode| format!("{mode:04o}"));
        Some(finding.on(node.dev_name()).read("mode", mode))
    };
    Ok(nodes.iter().filter_map(judge).collect())
}

/// Where runtimes listen.
const CRI_SOCKETS: [&str; 3] = [
    "run/containerd/containerd.sock",
    "run/k3s/containerd/containerd.sock",
    "run/crio/crio.sock",
];

fn runtime(context: &Context) -> Fact<Runtime> {
    for socket in CRI_SOCKETS {
        let path = context.path(socket);
        match path.try_exists() {
            Ok(false) => {}
            Ok(true) => return ask(&path).map_err(|error| Unread(error.to_string())),
            Err(error) => return Err(read::refused(context, &path, &error)),
        }
    }
    let mount = match context.settings.root == Path::new("/") {
        true => "",
        false => " or it is not mounted here: run rdmactl on the node",
    };
    Err(Unread(format!(
        "no container runtime listens on /{}{mount}",
        CRI_SOCKETS.join(", /")
    )))
}

fn r06_cdi(context: &Context, check: &Check, node: &()) -> Judged {
    if context.pools.as_ref().is_some_and(|pools| !pools.cdi) {
        return Err(Finding::not_applicable("no pool delivers by CDI"));
    }
    let runtime = runtime(context)?;
    let mut finding = cdi(check, node, &runtime)?;
    if context.pools.is_none() && finding.verdict == Warn {
        let why = "whether a pool delivers by CDI is not known (--config-file)";
        finding = Finding::unknown(format!("{}; {why}", finding.why));
    }
    Ok(finding.read("runtime", format!("{} {}", runtime.name, runtime.version)))
}

/// containerd: since 1.7, and off by default there; on by default since 2.0 (`docs/cri/config.md`).
/// CRI-O: since 1.23.
fn cdi(check: &Check, node: &(), runtime: &Runtime) -> Judged {
    let version = runtime.version.trim_start_matches('v');
    let major: Option<u32> = version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok());
    let config = runtime.config.as_deref().unwrap_or_default();
    let config: Option<serde_json::Value> = serde_json::from_str(config).ok();
    let enabled = config.and_then(|config| config.get("enableCDI")?.as_bool());
    Ok(match (runtime.name.as_str(), enabled, major) {
        ("cri-o", ..) => Finding::pass("CRI-O reads CDI files"),
        ("containerd", Some(true), _) => Finding::pass("enable_cdi is true"),
        ("containerd", Some(false), _) => {
            let why = "enable_cdi is false: containers with a CDI name start without its devices";
            check.fault(node, why)
        }
        ("containerd", None, Some(2..)) => Finding::pass("containerd 2 reads CDI files"),
        ("containerd", None, Some(_)) => {
            check.fault(node, "containerd before 1.7 ignores CDI names")
        }
        (name, ..) => {
            return Err(Finding::unknown(format!(
                "whether {name} reads CDI files is not known"
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::engine::catalogue;
    use super::*;
    use crate::verdict::Verdict::{Pass, Unknown};

    #[test]
    fn what_the_plugin_allocated_is_in_its_variables() {
        let variables = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            allocated(pairs.collect::<Vec<_>>().into_iter())
        };
        assert_eq!(
            variables(&[("RDMA_DEVICES_RDMA_A", "mlx5_0,mlx5_1"), ("PATH", "/bin")]),
            Some(vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()])
        );
        assert_eq!(variables(&[("PATH", "/bin"), ("RDMA_DEVICES_X", "")]), None);
    }

    #[test]
    fn cdi_is_known_by_the_runtimes_own_word() {
        let check = catalogue()
            .into_iter()
            .find(|check| check.id == "R06")
            .unwrap();
        for (name, version, enable_cdi, verdict) in [
            ("containerd", "v2.1.4", Some(true), Pass),
            ("containerd", "v2.1.4", None, Pass),
            ("containerd", "v2.1.4", Some(false), Warn),
            ("containerd", "1.7.22", Some(false), Warn),
            ("containerd", "1.7.22", Some(true), Pass),
            ("containerd", "1.6.33", None, Warn),
            ("cri-o", "1.33.0", None, Pass),
            ("docker", "27", None, Unknown),
        ] {
            let runtime = Runtime {
                name: name.to_owned(),
                version: version.to_owned(),
                config: Some(serde_json::json!({"enableCDI": enable_cdi}).to_string()),
            };
            let finding = cdi(&check, &(), &runtime).unwrap_or_else(|early| early);
            assert_eq!(finding.verdict, verdict, "{runtime:?}: {finding:?}");
        }
    }
}
