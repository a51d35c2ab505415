//! Reads the host once: everything that pools and health are decided from, as plain data.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hca::chardev::{CharDevice, Node};
use hca::inventory::Inventory;
use hca::network::{self, Uplinks};
use hca::topology::{Gpu, Machine, Wanted};
use hca::{Host, PciAddress, PciFunction, pci};
use netlink::{Socket, uplink};

use crate::config::Gate;

/// One scan of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshot {
    /// RDMA devices, netdevs, the namespace mode.
    pub inventory: Inventory,
    /// PCI functions of RDMA devices that are in another network namespace or cannot be read.
    pub functions: BTreeMap<PciAddress, PciFunction>,
    /// State of each character device's node, by its name below the device directory.
    pub nodes: BTreeMap<String, Node>,
    /// Where NICs sit, and GPUs if they were asked for.
    pub machine: Machine,
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
    /// cluster knows the node by. `gpus` is what is read of GPUs. No pool needs them, and a driver of
    /// theirs may hang: only the commands that show them read them.
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
        let mut of_one_object = |error: hca::Error| {
            if error.is_missing() {
                // Unplugged between the two reads.
                return Ok(());
            }
            if error.is_of_one_object() {
                faults.push(error.to_string());
                return Ok(());
            }
            Err(error)
        };
        let mut functions = BTreeMap::new();
        let elsewhere = inventory.elsewhere.iter().map(|away| away.pci);
        let unreadable = inventory.unreadable.iter().map(|device| device.pci);
        for address in elsewhere.chain(unreadable).flatten() {
            match pci::read(host, address) {
                Ok(function) => {
                    functions.insert(address, function);
                }
                Err(error) => of_one_object(error)?,
            }
        }
        let machine =
            gpus(host).and_then(|gpus| Machine::read(host, &inventory, &Wanted::default(), gpus));
        let machine = match machine {
            Ok(machine) => machine,
            Err(error) => {
                of_one_object(error)?;
                Machine::default()
            }
        };
        let nodes = char_devices(&inventory)
            .map(|device| (device.dev_name(), device.node()))
            .collect();
        Ok(Self {
            inventory,
            functions,
            nodes,
            machine,
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
pub(crate) fn obstacle(states: &BTreeMap<String, Node>, device: &CharDevice) -> Option<String> {
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

/// The host's uplinks: by netlink, as the network plugin asks for them, where this process is in the
/// host's network namespace; else as `/proc` shows routes.
fn uplinks(host: &Host, node_addresses: &[IpAddr]) -> Uplinks {
    // A network namespace's files have inodes of their own, the same in each mount of proc.
    let inode = |net: &Path| {
        std::fs::metadata(net.join("dev"))
            .map(|file| file.ino())
            .ok()
    };
    let here = inode(Path::new("/proc/self/net"));
    if here.is_none() || inode(&network::of_host(&host.proc)) != here {
        return Uplinks::of_host(host, node_addresses);
    }
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

fn char_devices(inventory: &Inventory) -> impl Iterator<Item = &CharDevice> {
    let here = inventory
        .rdma_devices
        .iter()
        .flat_map(|device| device.char_devices.iter());
    let away = inventory.elsewhere.iter().map(|away| &away.uverbs);
    here.chain(away).chain(&inventory.rdma_cm)
}
