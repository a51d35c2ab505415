//! The inventory of machines laid out of files: adapters that no virtual machine has.

#![expect(clippy::unwrap_used, reason = "a test may stop at what it cannot do")]

mod apart;
mod functions;
mod limits;
mod ports;
mod several;

use hca::{HcaId, Inventory, PciAddress, PortId};
use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree};

struct Machine {
    _directory: tempfile::TempDir,
    tree: Tree,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.rdma_core(true);
        Self {
            _directory: directory,
            tree,
        }
    }

    /// The inventory, after checking that the fast lookup of the netdev of every port agrees with it.
    fn inventory(&self) -> Inventory {
        let inventory = hca::inventory(&self.tree.host()).unwrap();
        for device in inventory.rdma_devices() {
            for port in &device.ports {
                let Some(netdev) = &port.netdev else { continue };
                let name = format!("{}/{}", device.name, port.number);
                assert!(self.ports_of(netdev).contains(&name), "{name}: {netdev}");
            }
        }
        inventory
    }

    fn ports_of(&self, netdev: &str) -> Vec<String> {
        let found = hca::lookup::hardware_of_netdev(&self.tree.host(), netdev).unwrap();
        found.ports.iter().map(PortId::to_string).collect()
    }

    fn on_pci(&self, address: &str) -> (Vec<String>, Vec<String>) {
        let found = hca::lookup::on_hca(&self.tree.host(), &HcaId::Pci(pci(address))).unwrap();
        (
            found.netdevs.into_iter().map(|n| n.name).collect(),
            found.rdma_devices,
        )
    }
}

fn pci(address: &str) -> PciAddress {
    address.parse().unwrap()
}

const PF0: &str = "0000:3b:00.0";
const PF1: &str = "0000:3b:00.1";

/// Entries of a port's partition table.
fn pkeys(port: &hca::Port) -> Vec<(u32, u16)> {
    let entries = port.pkeys.iter();
    entries.map(|pkey| (pkey.index, pkey.key)).collect()
}

/// A dual-port ConnectX: two functions, each with a netdev and an RDMA device of one port.
fn two_functions(machine: &Machine) {
    for (address, netdev, phys, rdma, guid, mac, dev_port) in [
        (
            PF0,
            "ens1f0np0",
            "p0",
            "mlx5_0",
            "b859:9f03:0000:0001",
            "b8:59:9f:00:00:01",
            0,
        ),
        (
            PF1,
            "ens1f1np1",
            "p1",
            "mlx5_1",
            "b859:9f03:0000:0002",
            "b8:59:9f:00:00:02",
            1,
        ),
    ] {
        machine.tree.pci(&PciSpec {
            address,
            numa_node: 1,
            ..PciSpec::MLX5
        });
        machine.tree.netdev(&NetdevSpec {
            name: netdev,
            on: On::Pci(address),
            mac,
            phys_port_name: phys,
            dev_port,
            ..NetdevSpec::default()
        });
        machine.tree.rdma(&RdmaSpec {
            name: rdma,
            on: On::Pci(address),
            node_guid: guid,
            ..RdmaSpec::default()
        });
    }
}
