//! HCAs for tests, as sysfs would describe them.

#![expect(clippy::unwrap_used, reason = "of tests alone")]

use hca::chardev::Node;
use std::sync::Arc;

use hca::gid::GidTable;
use hca::netdev::link_type;
use hca::pci::Sriov;
use hca::port::Pkey;
use hca::{GidEntry, Guid, Hca, LinkLayer, Netdev, PciFunction, Port, PortState, RdmaDevice};
use hca_trees::Tree;

use crate::checkpoint::Owners;
use crate::host_snapshot::HostSnapshot;
use crate::snapshot::{Health, Member};

/// An HCA that is nothing but its identity and RDMA devices of these names.
pub fn named(id: &str, rdma_devices: &[&str]) -> Hca {
    let device = |name: &&str| RdmaDevice {
        name: (*name).into(),
        ..RdmaDevice::default()
    };
    Hca {
        rdma_devices: rdma_devices.iter().map(device).collect(),
        ..Hca::new(id.parse().unwrap(), None)
    }
}

/// A PCI function of NVIDIA's.
pub fn function(address: &str, numa_node: Option<u32>) -> PciFunction {
    PciFunction {
        address: address.parse().unwrap(),
        vendor: 0x15b3,
        device: 0x101e,
        driver: Some("mlx5_core".into()),
        numa_node,
        ..PciFunction::default()
    }
}

fn port(number: u32, link_layer: LinkLayer, rate: &str, pkey: u16) -> Port {
    Port {
        number,
        state: PortState::Active,
        phys_state: "LinkUp".to_owned(),
        rate: Some(rate.parse().unwrap()),
        link_layer,
        lid: 0,
        sm_lid: 0,
        active_mtu: None,
        gids: GidTable::default(),
        pkeys: vec![Pkey {
            index: 0,
            key: pkey,
        }],
        netdev: None,
        carries_data: true,
    }
}

/// VF 3 of `ens1f0np0`, with a netdev and one active RoCE port at 100 Gb/s.
pub fn virtual_function() -> Hca {
    let gids = GidTable {
        size: 256,
        entries: vec![GidEntry {
            index: 0,
            gid: "fe80::5054:00ff:fe00:00a5".parse().unwrap(),
            kind: None,
            netdev: Some("ens1f0v3".into()),
        }],
    };
    Hca {
        rdma_devices: vec![RdmaDevice {
            name: "mlx5_5".into(),
            node_guid: Some(Guid(0x5054_00ff_fe00_0005)),
            firmware: Some("28.39.1002".into()),
            board_id: Some("MT_0000000838".into()),
            driver: Some("mlx5_core".into()),
            ports: vec![Port {
                gids,
                ..port(1, LinkLayer::Ethernet, "100 Gb/sec (4X EDR)", 0xffff)
            }],
            ..RdmaDevice::default()
        }],
        netdevs: vec![Netdev {
            name: "ens1f0v3".into(),
            link_type: link_type::ETHERNET,
            ..Netdev::default()
        }],
        pci: Some(PciFunction {
            acpi_index: Some(7),
            sriov: Sriov::Virtual {
                physical: "0000:3b:00.0".parse().unwrap(),
                index: Some(3),
            },
            ..function("0000:3b:00.5", Some(1))
        }),
        pf_netdevs: vec!["ens1f0np0".into()],
        ..named("0000:3b:00.5", &[])
    }
}

/// A dual-port InfiniBand HCA without netdevs; port 2 is slower and has another partition.
pub fn infiniband() -> Hca {
    Hca {
        rdma_devices: vec![RdmaDevice {
            name: "mlx4_0".into(),
            node_guid: Some(Guid(0x506b_4b03_00aa_0001)),
            firmware: Some("2.42.5000".into()),
            board_id: Some("MT_1090111019".into()),
            driver: Some("mlx4_core".into()),
            ports: vec![
                port(1, LinkLayer::InfiniBand, "56 Gb/sec (4X FDR)", 0xffff),
                port(2, LinkLayer::InfiniBand, "40 Gb/sec (4X QDR)", 0x8003),
            ],
            ..RdmaDevice::default()
        }],
        pci: Some(PciFunction {
            device: 0x1007,
            driver: Some("mlx4_core".into()),
            ..function("0000:5e:00.0", None)
        }),
        ..named("0000:5e:00.0", &[])
    }
}

/// A scan of a host made of files, whose device nodes are all as they should be.
pub fn scan(tree: &Tree) -> HostSnapshot {
    let mut seen = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
    seen.uplinks = tree.uplinks();
    // Nodes of a tree are plain files.
    seen.nodes.values_mut().for_each(|node| *node = Node::Ready);
    seen
}

impl Member {
    /// A healthy member without nodes.
    pub fn example(hca: Hca) -> Self {
        Self {
            hca: Arc::new(hca),
            nodes: Vec::new(),
            shares: 1,
            health: Health::default(),
        }
    }
}

impl Owners {
    /// Of these devices: pod UID, resource, device ID.
    pub fn of(devices: &[(&str, &str, &str)]) -> Self {
        let mut owners = Self::default();
        for (uid, resource, id) in devices {
            owners.add(resource, id, uid, "main");
        }
        owners
    }
}
