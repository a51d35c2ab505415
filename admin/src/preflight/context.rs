//! What all checks read from: roots, the node's devices, and what the administrator expects.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use hca::topology::Machine;
use hca::{Host, PciAddress};
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use pools::host_snapshot::HostSnapshot;

use super::engine::{Fact, Unread};
use super::link::{PortFacts, ports};

/// Roots, and what is expected.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Prefix of the host's files.
    pub root: PathBuf,
    /// The kubelet's directory of device plugins.
    pub device_plugin_dir: PathBuf,
    /// The node policy.
    pub policy: PathBuf,
    /// Checks are of the container this process runs in, not of the node: drivers, hardware, kubelet.
    pub in_pod: bool,
    /// How many HCAs that can be used the administrator expects.
    pub expected: Option<usize>,
}

/// Everything that checks read from.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) settings: Settings,
    /// The host's kernel file systems.
    pub(super) host: Host,
    /// What was read of the host.
    pub(super) snapshot: HostSnapshot,
    /// The pools of the daemon's configuration; `None` without one.
    pub(super) pools: Option<ConfiguredPools>,
    /// Ports of RDMA devices.
    pub(super) ports: Vec<PortFacts>,
    /// Addresses of the namespace that is checked.
    pub(super) addresses: Fact<Vec<(String, IpAddr)>>,
    /// The running kernel may be asked as well: it is the one whose files are read, and this process
    /// is in the network namespace that they show.
    pub(super) live: bool,
}

/// The pools of a configuration, resolved against this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ConfiguredPools {
    /// The pools of each RDMA device that is in one.
    pub of_device: BTreeMap<String, Vec<Membership>>,
    /// By resource.
    pub by_resource: BTreeMap<String, HostPool>,
    /// Some pool delivers by CDI.
    pub cdi: bool,
}

/// A pool on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HostPool {
    pub hcas: Vec<PoolHca>,
    /// A node may have none of it.
    pub optional: bool,
    /// How many HCAs that can be used the configuration expects.
    pub expected: Option<usize>,
}

/// An HCA of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PoolHca {
    /// The name it has on the node.
    pub id: String,
    /// Why it cannot be used, if it cannot.
    pub fault: Option<String>,
}

impl PoolHca {
    pub(super) fn new(id: &str, fault: Option<&str>) -> Self {
        Self {
            id: id.to_owned(),
            fault: fault.map(str::to_owned),
        }
    }
}

/// A pool that has an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Membership {
    /// The resource.
    pub resource: String,
    /// Several pods may use the device.
    pub shared: bool,
    /// Units on this device.
    pub units: u32,
}

impl Context {
    /// From one scan of the host.
    /// `in_host_namespace`: this process is in the network namespace that the host's `/sys` shows.
    pub(super) fn new(
        settings: Settings,
        snapshot: HostSnapshot,
        in_host_namespace: bool,
        pools: Option<ConfiguredPools>,
    ) -> Self {
        let host = Host::at(&settings.root);
        let live = is_running_kernel(&settings.root) && in_host_namespace;
        Self {
            ports: ports(&snapshot, pools.as_ref()),
            addresses: match live {
                true => own_addresses(),
                false => Err(Unread(
                    "addresses: this process is not in the host's network namespace".into(),
                )),
            },
            settings,
            host,
            snapshot,
            pools,
            live,
        }
    }

    /// Where NICs and GPUs sit.
    pub(super) fn machine(&self) -> Fact<&Machine> {
        match &self.snapshot.machine_fault {
            Some(why) => Err(Unread(format!("PCI tree: {why}"))),
            None => Ok(&self.snapshot.machine),
        }
    }

    /// A path of the host.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.settings
            .root
            .join(path.strip_prefix("/").unwrap_or(path))
    }

    /// This process is in a container on the host whose files are below the root.
    pub(super) fn in_container(&self) -> bool {
        self.settings.root != Path::new("/") && is_running_kernel(&self.settings.root)
    }

    /// The directory of a PCI function.
    pub(super) fn pci(&self, address: PciAddress) -> PathBuf {
        self.host
            .sys
            .join("bus/pci/devices")
            .join(address.to_string())
    }
}

/// Whether the files below `root` are the running kernel's: on the host itself, or in a container
/// with the host's mounted there. A tree that was copied from a machine has another boot's id or none
/// (`Documentation/admin-guide/sysctl/kernel.rst`, random).
pub(super) fn is_running_kernel(root: &Path) -> bool {
    let boot = |root: &Path| fs::read(root.join("proc/sys/kernel/random/boot_id")).ok();
    let here = Path::new("/");
    root == here || boot(root).is_some_and(|id| boot(here) == Some(id))
}

/// A directory or file of the host that the `DaemonSet` mounts at its own place: below `root`, or
/// there if it is this machine's and not below `root`.
pub(super) fn mounted(root: &Path, path: &Path) -> PathBuf {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let (below, own) = (root.join(relative), Path::new("/").join(relative));
    if !below.exists() && own.exists() && is_running_kernel(root) {
        own
    } else {
        below
    }
}

/// Addresses of the namespace this process is in, with their netdevs.
fn own_addresses() -> Fact<Vec<(String, IpAddr)>> {
    let address = |interface: InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().into());
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|v6| v6.ip().into()));
        Some((interface.interface_name, ip?))
    };
    let all = getifaddrs().map_err(|error| Unread(format!("addresses: {error}")))?;
    Ok(all.filter_map(address).collect())
}
