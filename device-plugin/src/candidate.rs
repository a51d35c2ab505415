//! What pools choose from: one entry per HCA, with the facts that selectors ask about.
//!
//! An HCA here is everything that one unit identity covers: usually one RDMA device, but some
//! drivers register several on one PCI function, and they cannot be handed out apart.

pub mod gather;
pub mod memory;

use hca::topology::Place;
use hca::unit::HcaId;
use serde::{Deserialize, Serialize};

/// One HCA as pools see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Identity that its units carry.
    pub id: HcaId,
    /// RDMA devices on it, in name order; never empty.
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
    pub pci: Option<Pci>,
    /// Physical, virtual or scalable function, or not on a bus at all.
    pub function: Function,
    /// The physical function that owns a VF or SF; the function itself for a PF.
    pub pf: Option<Pf>,
    /// Drivers of its function and of what its RDMA devices stand on (`mlx5_core`,
    /// `mlx5_core.sf`, `rdma_rxe`).
    pub drivers: Vec<String>,
    /// NUMA node, where the firmware says one.
    pub numa_node: Option<u32>,
    /// Its place among PCI functions.
    #[serde(skip)]
    pub place: Option<Place>,
}

/// One RDMA device of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// Name, as `mlx5_0`.
    pub name: String,
    /// Node GUID, sixteen lower-case hex digits; empty where the device has none.
    pub node_guid: String,
    /// Firmware version; empty where the driver has none.
    pub firmware: String,
    /// Board or PSID; empty where the driver has none.
    pub board_id: String,
    /// Its ports, in number order.
    pub ports: Vec<Port>,
}

/// One port of an [`RdmaDevice`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Number, from 1.
    pub number: u32,
    /// `ether` or `infiniband`.
    pub link_type: LinkType,
    /// Whether it can carry traffic.
    #[serde(skip)]
    pub active: bool,
    /// Rate in Mb/s, where known. That of a port that is down says nothing about its link.
    pub rate_mbps: Option<u32>,
    /// Partition keys with the membership bit masked out; InfiniBand only.
    pub pkeys: Vec<u16>,
    /// Port GUID, sixteen lower-case hex digits, from GID 0.
    pub guid: Option<String>,
    /// Pods with an interface of their own whose addresses find room in the GID table; none where
    /// pods take no entry (InfiniBand) or its size is not known.
    pub room: Option<u32>,
}

/// A netdev of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netdev {
    /// Name on the host.
    pub name: String,
    /// Encapsulation.
    pub link_type: LinkType,
}

/// PCI facts of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pci {
    /// `0000:3b:00.0`.
    pub address: String,
    /// Vendor, four lower-case hex digits.
    pub vendor: String,
    /// Device, four lower-case hex digits.
    pub device: String,
    /// Content of `acpi_index`, where the firmware gives one.
    pub acpi_index: Option<String>,
}

/// The physical function above a VF or SF.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pf {
    /// PCI address.
    pub address: String,
    /// Netdevs of it.
    pub netdevs: Vec<String>,
    /// VFs configured on it.
    pub vf_count: u32,
}

/// What kind of function a [`Candidate`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Function {
    /// A PCI function that is not virtual.
    Physical,
    /// An SR-IOV virtual function, with its number on the PF.
    Virtual(u32),
    /// An auxiliary device (`sf`), with its number.
    Scalable(u32),
    /// No bus below it: soft RoCE on a virtual netdev.
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
        let mut ports = self.rdma_devices.iter().flat_map(|device| &device.ports);
        !self.netdevs.is_empty()
            || self.is_read() && !ports.any(|port| port.link_type == LinkType::Ether)
    }
}

impl Function {
    /// The word for it in configuration files.
    pub fn word(self) -> &'static str {
        match self {
            Function::Physical => "pf",
            Function::Virtual(_) => "vf",
            Function::Scalable(_) => "sf",
            Function::Software => "software",
        }
    }

    /// VF or SF number.
    pub fn index(self) -> Option<u32> {
        match self {
            Function::Virtual(index) | Function::Scalable(index) => Some(index),
            Function::Physical | Function::Software => None,
        }
    }
}

/// Link encapsulation, in the words both peers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkType {
    /// RoCE, iWARP.
    Ether,
    /// InfiniBand, IPoIB.
    Infiniband,
    /// Anything else, which no configuration can name.
    Other,
}

impl LinkType {
    /// The words that a configuration may use.
    pub const WORDS: [&str; 2] = ["ether", "infiniband"];

    /// The word for it in configuration files.
    pub fn word(self) -> &'static str {
        match self {
            LinkType::Ether => "ether",
            LinkType::Infiniband => "infiniband",
            LinkType::Other => "other",
        }
    }
}

impl std::fmt::Display for Function {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.index() {
            Some(index) => write!(formatter, "{} {index}", self.word()),
            None => formatter.write_str(self.word()),
        }
    }
}

#[cfg(test)]
pub mod example {
    //! HCAs for tests, as sysfs would describe them.

    use super::*;

    /// VF 3 of `ens1f0np0`, with a netdev and one active RoCE port at 100 Gb/s.
    pub fn virtual_function() -> Candidate {
        Candidate {
            id: "0000:3b:00.5".parse().unwrap(),
            rdma_devices: vec![RdmaDevice {
                name: "mlx5_5".into(),
                node_guid: "505400fffe000005".into(),
                firmware: "28.39.1002".into(),
                board_id: "MT_0000000838".into(),
                ports: vec![Port {
                    number: 1,
                    link_type: LinkType::Ether,
                    active: true,
                    rate_mbps: Some(100_000),
                    pkeys: vec![0x7fff],
                    guid: Some("505400fffe0000a5".into()),
                    room: Some(63),
                }],
            }],
            elsewhere: false,
            fault: None,
            netdevs: vec![Netdev {
                name: "ens1f0v3".into(),
                link_type: LinkType::Ether,
            }],
            bond_names: Vec::new(),
            pci: Some(Pci {
                address: "0000:3b:00.5".into(),
                vendor: "15b3".into(),
                device: "101e".into(),
                acpi_index: Some("7".into()),
            }),
            function: Function::Virtual(3),
            pf: Some(Pf {
                address: "0000:3b:00.0".into(),
                netdevs: vec!["ens1f0np0".into()],
                vf_count: 8,
            }),
            drivers: vec!["mlx5_core".into()],
            numa_node: Some(1),
            place: None,
        }
    }

    /// A dual-port InfiniBand HCA without netdevs; port 2 is slower and has another partition.
    pub fn infiniband() -> Candidate {
        let port = |number, rate_mbps, pkey| Port {
            number,
            link_type: LinkType::Infiniband,
            active: true,
            rate_mbps: Some(rate_mbps),
            pkeys: vec![pkey],
            guid: None,
            room: None,
        };
        Candidate {
            id: "0000:5e:00.0".parse().unwrap(),
            rdma_devices: vec![RdmaDevice {
                name: "mlx4_0".into(),
                node_guid: "506b4b0300aa0001".into(),
                firmware: "2.42.5000".into(),
                board_id: "MT_1090111019".into(),
                ports: vec![port(1, 56_000, 0x7fff), port(2, 40_000, 0x0003)],
            }],
            netdevs: Vec::new(),
            pci: Some(Pci {
                address: "0000:5e:00.0".into(),
                vendor: "15b3".into(),
                device: "1007".into(),
                acpi_index: None,
            }),
            function: Function::Physical,
            pf: Some(Pf {
                address: "0000:5e:00.0".into(),
                netdevs: Vec::new(),
                vf_count: 0,
            }),
            drivers: vec!["mlx4_core".into()],
            numa_node: None,
            ..virtual_function()
        }
    }
}
