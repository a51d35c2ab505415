//! What containers get from their runtime (R): locked memory, capabilities, device nodes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hca::RdmaDevice;
use hca::chardev::{CharDevice, Node};

use super::check::{Findings, checks, need};
use super::container_runtime::{self, Cdi};
use super::context::Context;
use crate::verdict::{FOR_THE_CONTAINER, Finding, NO_NIC};
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The container's checks are made.
    pub in_pod: bool,
    /// RDMA devices on this node.
    pub devices: usize,
    /// Processes that containers inherit their limits from, or this one, with the soft limit of
    /// locked memory.
    pub locked: Vec<(String, Option<Limit>)>,
    /// Effective capabilities of this process.
    pub capabilities: Option<u64>,
    /// Device nodes: those of the node's RDMA devices, or those in this container.
    pub nodes: Vec<NodeFacts>,
    /// RDMA devices that the plugin said this container got (`RDMA_DEVICES_…`); `None` if it
    /// said nothing.
    pub allocated: Option<Vec<String>>,
    /// What the runtime's configuration says about CDI.
    pub cdi: Cdi,
}

/// A limit of locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// None.
    Unlimited,
    /// Bytes.
    Bytes(u64),
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeFacts {
    /// `infiniband/uverbs0`.
    pub name: String,
    /// The RDMA device it belongs to; `None` for the connection manager.
    pub device: Option<String>,
    /// Its netdev is in this namespace.
    pub netdev_here: bool,
    /// Whether the node is there and is what the kernel says.
    pub state: Node,
    /// Permission bits; `None` if it is not there.
    pub mode: Option<u32>,
    /// How opening it for reading and writing went, if it was tried.
    pub opened: Option<Result<(), String>>,
}

const CAP_IPC_LOCK: u64 = 1 << 14;
/// Runtimes by the first fifteen bytes of their names.
const RUNTIMES: [&str; 4] = ["containerd", "crio", "dockerd", "k3s-server"];

checks! {
    "R01" "containers may lock memory" r01_locked;
    "R02" "the container may lock memory beyond its limit" r02_capability;
    "R04" "device nodes are there, and no others" r04_nodes;
    "R05" "device nodes can be opened" r05_open;
    "R06" "the runtime reads CDI files" r06_cdi;
}

/// Reads the host, or at the container.
pub(super) fn read(context: &Context) -> Facts {
    let proc = &context.host.proc;
    let own = |name: &str| files::text(&proc.join("self").join(name)).unwrap_or_default();
    Facts {
        in_pod: context.settings.in_pod,
        devices: context.snapshot.inventory.rdma_devices.len(),
        locked: if context.settings.in_pod {
            vec![("this process".to_owned(), locked(&own("limits")))]
        } else {
            runtimes(proc)
        },
        capabilities: capabilities(&own("status")),
        nodes: nodes(context),
        allocated: allocated(std::env::vars()),
        cdi: cdi(context),
    }
}

fn runtimes(proc: &Path) -> Vec<(String, Option<Limit>)> {
    let mut runtimes = files::processes(proc);
    runtimes.retain(|process| RUNTIMES.contains(&process.name.as_str()));
    let limits = |process: files::Process| {
        let limits = files::text(&proc.join(process.pid.to_string()).join("limits"));
        let name = format!("{} ({})", process.name, process.pid);
        (name, locked(&limits.unwrap_or_default()))
    };
    runtimes.into_iter().map(limits).collect()
}

/// The soft limit in `/proc/PID/limits`.
fn locked(limits: &str) -> Option<Limit> {
    let mut lines = limits.lines();
    let line = lines.find(|line| line.starts_with("Max locked memory"))?;
    match line.split_whitespace().nth(3)? {
        "unlimited" => Some(Limit::Unlimited),
        bytes => bytes.parse().ok().map(Limit::Bytes),
    }
}

/// `CapEff` of `/proc/PID/status`.
fn capabilities(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(value.trim(), 16).ok()
}

fn nodes(context: &Context) -> Vec<NodeFacts> {
    let inventory = &context.snapshot.inventory;
    let here = |name: &str| inventory.netdev(name).is_some();
    let verbs = inventory.rdma_devices.iter().filter_map(|device| {
        let uverbs = device.char_devices.uverbs.as_ref()?;
        Some((Some(device), uverbs))
    });
    let all = verbs.chain(inventory.rdma_cm.as_ref().map(|cm| (None, cm)));
    // Opening a verbs node makes an empty context that ends with the file.
    let open = |node: &CharDevice| {
        let opened = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&node.path);
        opened.map(drop).map_err(|error| error.to_string())
    };
    let facts = |(device, node): (Option<&RdmaDevice>, &CharDevice)| NodeFacts {
        name: node.dev_name(),
        device: device.map(|device| device.name.clone()),
        netdev_here: device.is_some_and(|device| device.netdevs().any(here)),
        state: node.node(),
        mode: (std::fs::metadata(&node.path).ok()).map(|meta| meta.permissions().mode() & 0o777),
        opened: (context.settings.in_pod && node.path.exists()).then(|| open(node)),
    };
    all.map(facts).collect()
}

/// RDMA devices in the variables that the plugin sets.
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

fn cdi(context: &Context) -> Cdi {
    let root = &context.settings.root;
    let known = match container_runtime::of_running_runtime(root, &context.host.proc) {
        Cdi::NoRuntime => container_runtime::of_configured_runtime(root),
        known => known,
    };
    // In the daemon's container the node's /etc is not mounted: no file there says nothing.
    let elsewhere = *root != Path::new("/") && !root.join("etc/containerd").is_dir();
    match known {
        Cdi::NoRuntime if elsewhere => Cdi::OutOfSight("of the node".to_owned()),
        known => known,
    }
}

fn r01_locked(facts: &Facts) -> Findings {
    need(facts.devices > 0, NO_NIC)?;
    if facts.locked.is_empty() {
        let why = "no container runtime is in sight (hostPID shows it)";
        return Err(Finding::unknown(why));
    }
    let may_exceed = facts.in_pod && facts.capabilities.is_some_and(|c| c & CAP_IPC_LOCK != 0);
    let judge = |(process, limit): &(String, Option<Limit>)| {
        let finding = match limit {
            None => Finding::unknown("its limits cannot be read"),
            Some(Limit::Unlimited) => Finding::pass("without limit").read("limit", "unlimited"),
            Some(Limit::Bytes(bytes)) if may_exceed => {
                Finding::pass("CAP_IPC_LOCK goes beyond the limit").read("limit", bytes)
            }
            Some(Limit::Bytes(bytes)) => Finding::warn(
                format!(
                    "{} KiB: containers inherit it, and registering more memory fails with \
                         \"Couldn't allocate MR\"",
                    bytes >> 10
                ),
                "LimitMEMLOCK=infinity in the runtime's systemd unit, or CAP_IPC_LOCK in the pod",
            )
            .read("limit", bytes),
        };
        finding.on(process)
    };
    Ok(facts.locked.iter().map(judge).collect())
}

fn r02_capability(facts: &Facts) -> Findings {
    need(facts.in_pod, FOR_THE_CONTAINER)?;
    let mut limits = facts.locked.iter().map(|(_, limit)| *limit);
    let unlimited = limits.any(|limit| limit == Some(Limit::Unlimited));
    Ok(vec![match facts.capabilities {
        None => Finding::unknown("capabilities cannot be read"),
        Some(set) if set & CAP_IPC_LOCK != 0 => Finding::pass("CAP_IPC_LOCK is in effect"),
        Some(_) if unlimited => Finding::pass("not needed: there is no limit (R01)"),
        Some(_) => Finding::warn(
            "CAP_IPC_LOCK is not in effect: a user other than root has it only with a limit raised, \
             whatever the pod asks for",
            "capabilities: add: [IPC_LOCK] and run as root, or raise the runtime's limit (R01)",
        ),
    }
    .read("CapEff", facts.capabilities.map_or("unreadable".to_owned(), |set| format!("{set:016x}")))])
}

fn r04_nodes(facts: &Facts) -> Findings {
    let judge = |node: &NodeFacts| -> Option<Finding> {
        let mode = node
            .mode
            .map_or("not there".to_owned(), |mode| format!("{mode:04o}"));
        let finding = match node.state {
            Node::Stale { found } => Finding::fail(
                format!("it is device {found} by now: the RDMA device was registered anew"),
                if facts.in_pod {
                    "restart the pod"
                } else {
                    "udevadm trigger --subsystem-match=infiniband_verbs"
                },
            ),
            Node::Missing if facts.in_pod => missing_in_pod(facts, node)?,
            Node::Missing => Finding::fail(
                "neither devtmpfs nor udev made it",
                "udevadm trigger --subsystem-match=infiniband_verbs; check /dev's mount",
            ),
            Node::Ready if facts.in_pod && surplus(facts, node) => Finding::warn(
                "it belongs to a NIC that this container did not get",
                "see D07; privileged containers get all of them",
            ),
            Node::Ready if node.mode.is_some_and(|mode| mode & 0o006 != 0o006) => Finding::warn(
                "only root may open it",
                "mode 0666 by udev (rdma-core's 90-rdma-umad.rules), or run as root",
            ),
            Node::Ready => Finding::pass("as it should be"),
        };
        Some(finding.on(&node.name).read("mode", mode))
    };
    need(facts.devices > 0, NO_NIC)?;
    Ok(facts.nodes.iter().filter_map(judge).collect())
}

/// Of a container's absent nodes only those of its own NICs are missed.
fn missing_in_pod(facts: &Facts, node: &NodeFacts) -> Option<Finding> {
    let own = match (&node.device, &facts.allocated) {
        (Some(device), Some(allocated)) => allocated.contains(device),
        (Some(_), None) => node.netdev_here,
        (None, allocated) => {
            allocated.is_some() || facts.nodes.iter().any(|n| n.state == Node::Ready)
        }
    };
    own.then(|| {
        Finding::fail(
            "this container has the NIC but not its node",
            "ask for the device plugin's resource in this container's limits",
        )
    })
}

fn surplus(facts: &Facts, node: &NodeFacts) -> bool {
    match (&node.device, &facts.allocated) {
        (Some(device), Some(allocated)) => !allocated.contains(device),
        _ => false,
    }
}

fn r05_open(facts: &Facts) -> Findings {
    need(facts.in_pod, FOR_THE_CONTAINER)?;
    let judge = |node: &NodeFacts| {
        let finding = match node.opened.as_ref()? {
            Ok(()) => Finding::pass("it can"),
            Err(error) => Finding::fail(
                format!("open: {error}"),
                "\"Operation not permitted\" is the device cgroup: ask for the resource; \
                 \"Permission denied\" is the file's mode (R04)",
            ),
        };
        Some(finding.on(&node.name))
    };
    Ok(facts.nodes.iter().filter_map(judge).collect())
}

fn r06_cdi(facts: &Facts) -> Findings {
    Ok(vec![match &facts.cdi {
        Cdi::NoRuntime => Finding::not_applicable("no containerd or CRI-O is configured here"),
        Cdi::On(place) => Finding::pass("it does").read(place, "enabled"),
        Cdi::CriO => Finding::pass("CRI-O always does"),
        Cdi::OutOfSight(place) => {
            Finding::unknown(format!(
                "the container runtime's configuration ({place}) is not mounted here: check on the \
                 node"
            ))
        }
        Cdi::Silent(place) => Finding::pass(
            "containerd does so from 2.0 on; older ones get device nodes directly, which works as well",
        )
        .read(place, "enable_cdi is not set"),
        Cdi::Off(place) => Finding::warn(
            "switched off: containers with a CDI name are refused",
            "enable_cdi = true, or let the device plugin hand over nodes instead of CDI names",
        )
        .read(place, "enable_cdi = false"),
    }])
}

#[cfg(test)]
mod tests;
