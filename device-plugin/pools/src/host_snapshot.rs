//! Reads the host once: everything that pools and health are decided from, as plain data.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hca::Host;
use hca::chardev::{CharDevice, Node};
use hca::inventory::Inventory;
use hca::topology::{Gpu, Machine};
use hca::uplink::Uplinks;
use netlink::{Socket, uplink};

use crate::config::Gate;

/// What a late scan is called.
pub const SCAN: &str = "the scan of the host";

/// One scan of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshot {
    /// RDMA devices, netdevs, the namespace mode.
    pub inventory: Inventory,
    /// State of each character device's node, by its name below the device directory.
    pub nodes: BTreeMap<String, Node>,
    /// Where NICs sit, and GPUs if they were asked for.
    pub machine: Machine,
    /// Why the machine is empty: one of its objects could not be read.
    pub machine_fault: Option<String>,
    /// Whether this host has the devices that `needVhostNet` asks for.
    pub vhost_net: bool,
    /// Netdevs that the node itself needs.
    pub uplinks: Uplinks,
    /// What could not be read, beside RDMA devices.
    pub faults: Vec<String>,
    /// What pools wait for and is not there.
    pub missing: BTreeSet<Gate>,
}

impl HostSnapshot {
    /// Reads the host, and whether what pools wait for is there. `node_addresses` are those that the
    /// cluster knows the node by. `gpus` is what is read of GPUs: a driver of theirs may hang, and no
    /// pool needs their names.
    ///
    /// # Errors
    /// [`hca::Error`] if sysfs as such cannot be read; the previous scan is then better than
    /// half a new one.
    pub fn scan(
        host: &Host,
        node_addresses: &[IpAddr],
        gates: &[Gate],
        gpus: impl FnOnce(&Host) -> hca::Result<Vec<Gpu>>,
    ) -> hca::Result<Self> {
        let inventory = hca::inventory(host)?;
        let mut faults = inventory.unreadable_netdevs.clone();
        let machine = gpus(host).and_then(|gpus| Machine::read(host, &inventory, gpus));
        let (machine, machine_fault) = match machine {
            Ok(machine) => (machine, None),
            // Unplugged between the two reads.
            Err(error) if error.is_missing() => (Machine::default(), Some(error.to_string())),
            Err(error) if error.is_of_one_object() => {
                faults.push(error.to_string());
                (Machine::default(), Some(error.to_string()))
            }
            Err(error) => return Err(error),
        };
        let nodes = inventory
            .char_devices()
            .map(|device| (device.dev_name(), device.node()))
            .collect();
        Ok(Self {
            inventory,
            nodes,
            machine,
            machine_fault,
            vhost_net: is_there(host, "vhost-net", "vhost-net") && is_there(host, "net/tun", "tun"),
            uplinks: uplinks(host, node_addresses),
            faults,
            missing: gates
                .iter()
                .filter(|gate| !is_open(host, gate))
                .cloned()
                .collect(),
        })
    }

    /// What stands in the way of handing a node to a container, if anything does.
    pub fn obstacle(&self, device: &CharDevice) -> Option<String> {
        obstacle(&self.nodes, device)
    }
}

/// What stands in the way of handing a node to a container, if anything does.
pub fn obstacle(states: &BTreeMap<String, Node>, device: &CharDevice) -> Option<String> {
    let name = device.dev_name();
    match states.get(&name) {
        Some(Node::Ready) => None,
        Some(Node::Stale { found }) => Some(format!(
            "node /dev/{name} is device {found}, the kernel says {}; udev has not followed yet",
            device.number
        )),
        Some(Node::Missing) | None => Some(format!("node /dev/{name} does not exist")),
    }
}

/// The host's uplinks; unknown to a process that is not in the host's network namespace.
fn uplinks(host: &Host, node_addresses: &[IpAddr]) -> Uplinks {
    match is_in_host_network(host) {
        true => uplinks_here(node_addresses),
        false => Uplinks::Unknown(
            "this process is not in the host's network namespace; set hostNetwork: true".into(),
        ),
    }
}

/// Whether netlink of this process is about the host.
pub fn is_in_host_network(host: &Host) -> bool {
    // A network namespace's files have inodes of their own, the same in each mount of proc. Process
    // 1 is the host's for every reader; where it is not shown the mount's own view serves.
    let inode = |net: &Path| std::fs::metadata(net.join("dev")).map(|file| file.ino());
    let of_host = inode(&host.proc.join("1/net")).or_else(|_| inode(&host.proc.join("net")));
    matches!((inode(Path::new("/proc/self/net")), of_host), (Ok(here), Ok(there)) if here == there)
}

/// The uplinks of the network namespace that this process is in.
fn uplinks_here(node_addresses: &[IpAddr]) -> Uplinks {
    let asked = Socket::open().and_then(|mut socket| {
        let addresses = uplink::addresses(&mut socket)?;
        uplink::uplinks(&mut socket, None, node_addresses, &addresses)
    });
    match asked {
        Ok(uplinks) => Uplinks::Known(uplinks),
        Err(error) => Uplinks::Unknown(error.to_string()),
    }
}

/// Whether what a pool waits for is there. A module that is still being loaded is not
/// (`Documentation/ABI/stable/sysfs-module`, initstate); one that is built in has no such file.
fn is_open(host: &Host, gate: &Gate) -> bool {
    match gate {
        Gate::File(path) => {
            hca::host::show(path);
            path.exists()
        }
        Gate::Module(name) => {
            let module = host.sys.join("module").join(name);
            match std::fs::read_to_string(module.join("initstate")) {
                Ok(state) => state.trim() == "live",
                Err(_) => module.is_dir(),
            }
        }
    }
}

/// Whether a misc device exists: by its node, which `kmod` may make before the module is loaded, or
/// by what the kernel says, where the container does not see that node.
fn is_there(host: &Host, node: &str, misc: &str) -> bool {
    host.dev.join(node).exists() || host.sys.join("class/misc").join(misc).exists()
}
