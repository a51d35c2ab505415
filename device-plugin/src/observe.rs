//! Looks at the host once: everything that pools and health are decided from, as plain data.

mod routes;

use std::collections::{BTreeMap, BTreeSet};

use hca::chardev::{CharDevice, Node};
use hca::inventory::Inventory;
use hca::topology::{Machine, Wanted};
use hca::{Host, PciAddress, PciFunction, netdev, pci};

/// One look at the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// RDMA devices, netdevs, the namespace mode.
    pub inventory: Inventory,
    /// PCI functions of RDMA devices that are in another network namespace.
    pub functions: BTreeMap<PciAddress, PciFunction>,
    /// State of each character device's node, by its name below the device directory.
    pub nodes: BTreeMap<String, Node>,
    /// Where GPUs and NICs sit.
    pub machine: Machine,
    /// Whether this host has the devices that `needVhostNet` asks for.
    pub vhost_net: bool,
    /// Netdevs that carry a default route, and those they stand on.
    pub uplinks: BTreeSet<String>,
}

impl Observation {
    /// Looks at the host.
    ///
    /// # Errors
    /// [`hca::Error`] if sysfs cannot be read; the previous observation is then better than half a
    /// new one.
    pub fn make(host: &Host) -> hca::Result<Self> {
        let inventory = hca::inventory(host)?;
        let mut functions = BTreeMap::new();
        for address in inventory.elsewhere.iter().filter_map(|away| away.pci) {
            match pci::read(host, address) {
                Ok(function) => {
                    functions.insert(address, function);
                }
                // Unplugged between the two looks.
                Err(error) if error.is_missing() => {}
                Err(error) => return Err(error),
            }
        }
        let machine = Machine::look(host, &inventory, &Wanted::default())?;
        let nodes = char_devices(&inventory)
            .map(|device| (device.dev_name(), device.node()))
            .collect();
        Ok(Self {
            inventory,
            functions,
            nodes,
            machine,
            vhost_net: is_there(host, "vhost-net", "vhost-net") && is_there(host, "net/tun", "tun"),
            uplinks: uplinks(host)?,
        })
    }

    /// What stands in the way of handing a node to a container, if anything does.
    pub fn obstacle(&self, device: &CharDevice) -> Option<String> {
        let name = device.dev_name();
        match self.nodes.get(&name) {
            Some(Node::Ready) => None,
            Some(Node::Stale { found }) => Some(format!(
                "node /dev/{name} is device {found}, the kernel says {}; udev has not followed yet",
                device.number
            )),
            Some(Node::Missing) | None => Some(format!("node /dev/{name} does not exist")),
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

/// A default route over a bond, bridge or VLAN also makes uplinks of the netdevs below it.
fn uplinks(host: &Host) -> hca::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut next: Vec<String> = routes::default_netdevs(&host.proc);
    while let Some(name) = next.pop() {
        if found.contains(&name) {
            continue;
        }
        match netdev::read(host, &name) {
            Ok(netdev) => next.extend(netdev.lowers),
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error),
        }
        found.insert(name);
    }
    Ok(found)
}
