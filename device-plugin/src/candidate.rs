//! What pools choose from: one entry per HCA, with the facts that selectors ask about.
//!
//! An HCA here is everything that one unit identity covers: usually one RDMA device, but some
//! drivers register several on one PCI function, and they cannot be handed out apart.

pub mod gather;
pub mod memory;

use crate::words::word;
use hca::rdma::NodeType;
use hca::topology::PciLocation;
use hca::{
    HcaId, LinkLayer, Netdev, PciAddress, PciFunction, Port, RdmaDevice, Reserved, pci::Sriov,
};
use serde::{Deserialize, Serialize};

/// One HCA as pools see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Identity that its units carry.
    pub id: HcaId,
    /// RDMA devices on it, in name order; never empty. Of one that is not visible, the name alone.
    pub rdma_devices: Vec<RdmaDevice>,
    /// Whether it is in another network namespace, as an HCA that a pod holds in exclusive mode.
    pub elsewhere: bool,
    /// Why it cannot be read, if it cannot: what was read and what the kernel said.
    pub fault: Option<String>,
    /// Netdevs of it, in the order in which the kernel made them; empty for InfiniBand without IPoIB.
    pub netdevs: Vec<Netdev>,
    /// The bond on its netdevs, and that bond's other members without an HCA of their own.
    pub bond_names: Vec<String>,
    /// The PCI function it is, or (scalable functions) hangs below.
    pub pci: Option<PciFunction>,
    /// Netdevs of the physical function that owns a VF or SF; of the function itself for a PF.
    pub pf_netdevs: Vec<String>,
}

/// The function that a [`Candidate`] is, with the number of a VF or SF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// Physical, virtual or scalable, or not on a bus at all.
    pub kind: FunctionKind,
    /// VF number on the PF, or number of the SF.
    pub index: Option<u32>,
}

/// A kind of function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FunctionKind {
    /// A PCI function that is not virtual.
    Pf,
    /// An SR-IOV virtual function.
    Vf,
    /// An auxiliary device (`sf`).
    Sf,
    /// Soft RoCE or soft iWARP on a netdev without a bus.
    Software,
}

impl Candidate {
    /// Whether all its RDMA devices could be read. One of another network namespace, or one that
    /// does not answer, is known by its name alone, and has no port here.
    pub fn is_read(&self) -> bool {
        self.rdma_devices
            .iter()
            .all(|device| !device.ports.is_empty())
    }

    /// Whether all its netdevs are in sight, as far as is known: an Ethernet port has one.
    pub fn shows_netdevs(&self) -> bool {
        !self.netdevs.is_empty()
            || self.is_read()
                && !self
                    .ports()
                    .any(|port| port.link_layer == LinkLayer::Ethernet)
    }

    /// Why no pod can have it, if that is so.
    pub fn reserved(&self) -> Option<&Reserved> {
        let mut devices = self.rdma_devices.iter();
        devices.find_map(|device| device.reserved.as_ref())
    }

    /// Names of its RDMA devices.
    pub fn rdma_names(&self) -> Vec<&str> {
        let devices = self.rdma_devices.iter();
        devices.map(|device| device.name.as_str()).collect()
    }

    /// Names of its netdevs on the host.
    pub fn netdev_names(&self) -> impl Iterator<Item = &str> {
        self.netdevs.iter().map(|netdev| netdev.name.as_str())
    }

    /// The ports of its RDMA devices.
    pub fn ports(&self) -> impl Iterator<Item = &Port> {
        self.rdma_devices.iter().flat_map(|device| &device.ports)
    }

    /// Physical, virtual or scalable function, or not on a bus at all.
    pub fn function(&self) -> Function {
        let (kind, index) = match (&self.id, &self.pci) {
            (HcaId::Auxiliary(name), _) => {
                let mut devices = self.rdma_devices.iter();
                let number = devices.find_map(|device| device.subfunction);
                let by_name = || name.as_str().rsplit('.').next()?.parse().ok();
                (
                    FunctionKind::Sf,
                    Some(number.or_else(by_name).unwrap_or_default()),
                )
            }
            (_, Some(pci)) => match pci.sriov {
                Sriov::Virtual { index, .. } => (FunctionKind::Vf, Some(index.unwrap_or(u32::MAX))),
                Sriov::None | Sriov::Physical { .. } => (FunctionKind::Pf, None),
            },
            (_, None) => (FunctionKind::Software, None),
        };
        Function { kind, index }
    }

    /// VFs of a physical function.
    pub fn virtual_functions(&self) -> usize {
        match (
            self.function().kind,
            self.pci.as_ref().map(|pci| &pci.sriov),
        ) {
            (FunctionKind::Pf, Some(Sriov::Physical { functions, .. })) => functions.len(),
            _ => 0,
        }
    }

    /// Drivers of its function and of what its RDMA devices stand on (`mlx5_core`,
    /// `mlx5_core.sf`, `rdma_rxe`).
    pub fn drivers(&self) -> Vec<String> {
        let function = self.pci.iter().filter_map(|pci| pci.driver.clone());
        let devices = self.rdma_devices.iter();
        let mut drivers: Vec<String> = function
            .chain(devices.filter_map(|device| device.driver.clone()))
            .collect();
        drivers.dedup();
        drivers
    }

    /// NUMA node, where the firmware says one.
    pub fn numa_node(&self) -> Option<u32> {
        self.pci.as_ref()?.numa_node
    }

    /// Its place among PCI functions.
    pub fn place(&self) -> Option<PciLocation> {
        self.pci.as_ref().map(PciLocation::of)
    }

    /// The physical function that owns a VF or SF; the function itself for a PF.
    pub fn pf(&self) -> Option<PciAddress> {
        self.pci.as_ref().map(PciFunction::physical)
    }

    /// The physical function that owns it, when that is another one.
    pub fn owner(&self) -> Option<PciAddress> {
        self.pf().filter(|pf| self.id != HcaId::Pci(*pf))
    }
}

impl std::fmt::Display for Function {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.index {
            Some(index) => write!(formatter, "{} {index}", word(&self.kind)),
            None => formatter.write_str(&word(&self.kind)),
        }
    }
}

/// Why `rdma_cm` does not work with an RDMA device of a VF, and the remedy: its node GUID is zero.
pub fn without_node_guid(device: &RdmaDevice) -> Option<(&'static str, String)> {
    let pci = device.pci.as_ref()?;
    if device.node_guid.is_some() || device.node_type != NodeType::ChannelAdapter {
        return None;
    }
    let remedy = match pci.sriov {
        Sriov::Virtual { physical, index } => {
            let number = index.map_or("N".to_owned(), |index| index.to_string());
            format!(
                "ip link set PF vf {number} node_guid GUID, with the netdev of {physical} as PF, \
                 or echo GUID > /sys/bus/pci/devices/{physical}/sriov/{number}/node; then bind \
                 the VF's driver again"
            )
        }
        // In a VM its PF is not visible.
        Sriov::None => {
            "set the VF's node GUID on the host of this VM, then start the VM again".to_owned()
        }
        Sriov::Physical { .. } => return None,
    };
    Some((
        "its node GUID is zero: verbs work, programs that use rdma_cm crash",
        remedy,
    ))
}

/// The word of configuration files, in both peers as well, for what a port or netdev speaks. No
/// configuration can name the third one.
pub fn link_type(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::Ethernet => "ether",
        LinkLayer::InfiniBand => "infiniband",
        LinkLayer::Unknown => "other",
    }
}

#[cfg(test)]
pub mod example {
    //! HCAs for tests, as sysfs would describe them.

    use hca::gid::GidTable;
    use hca::netdev::link_type;
    use hca::port::Pkey;
    use hca::{GidEntry, Guid, PortState};

    use super::*;

    /// An HCA that is nothing but its identity and RDMA devices of these names.
    pub fn named(id: &str, rdma_devices: &[&str]) -> Candidate {
        let device = |name: &&str| RdmaDevice {
            name: (*name).into(),
            ..RdmaDevice::default()
        };
        Candidate {
            id: id.parse().unwrap(),
            rdma_devices: rdma_devices.iter().map(device).collect(),
            elsewhere: false,
            fault: None,
            netdevs: Vec::new(),
            bond_names: Vec::new(),
            pci: None,
            pf_netdevs: Vec::new(),
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
        }
    }

    /// VF 3 of `ens1f0np0`, with a netdev and one active RoCE port at 100 Gb/s.
    pub fn virtual_function() -> Candidate {
        let gids = GidTable {
            slots: 256,
            entries: vec![GidEntry {
                index: 0,
                gid: "fe80::5054:00ff:fe00:00a5".parse().unwrap(),
                kind: None,
                netdev: Some("ens1f0v3".into()),
            }],
        };
        Candidate {
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
    pub fn infiniband() -> Candidate {
        Candidate {
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
}
