//! What pools choose from: one entry per HCA, with the facts that selectors ask about.
//!
//! An HCA here is everything that one unit identity covers: usually one RDMA device, but some
//! drivers register several on one PCI function, and they cannot be handed out apart.

use std::collections::BTreeMap;

use hca::inventory::{Elsewhere, Inventory};
use hca::pci::{PciFunction, Sriov};
use hca::unit::HcaId;
use hca::{GidType, LinkLayer, PciAddress, netdev};

/// One HCA as pools see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Identity that its units carry.
    pub id: HcaId,
    /// RDMA devices on it, in name order; never empty.
    pub rdma_devices: Vec<RdmaDevice>,
    /// Whether it is in another network namespace, as an HCA that a pod holds in exclusive mode.
    pub elsewhere: bool,
    /// Netdevs on it, in name order; empty for InfiniBand without IPoIB.
    pub netdevs: Vec<Netdev>,
    /// The PCI function it is, or (scalable functions) hangs below.
    pub pci: Option<Pci>,
    /// Physical, virtual or scalable function, or not on a bus at all.
    pub function: Function,
    /// The physical function that owns a VF or SF; the function itself for a PF.
    pub pf: Option<Pf>,
    /// NUMA node, where the firmware says one.
    pub numa_node: Option<u32>,
}

/// One RDMA device of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u32,
    /// `ether` or `infiniband`.
    pub link_type: LinkType,
    /// Rate in Mb/s, where known.
    pub rate_mbps: Option<u32>,
    /// Partition keys with the membership bit masked out; InfiniBand only.
    pub pkeys: Vec<u16>,
    /// Port GUID, sixteen lower-case hex digits, from GID 0.
    pub guid: Option<String>,
    /// Size of the GID table and how many kinds of GID each address takes in it.
    pub gid_table: GidTable,
}

/// How many addresses a port can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GidTable {
    /// Slots, used and free.
    pub slots: usize,
    /// Entries that one address takes: 2 where RoCE v1 and v2 both get one.
    pub kinds_per_address: usize,
}

/// Addresses of a pod's interface that get a GID: one IPv4 or IPv6 address and the link-local one.
const ADDRESSES_PER_POD: usize = 2;

impl GidTable {
    /// Pods with an interface of their own on this port that find room in the table, next to the
    /// host's own addresses; `None` where pods take no entry (InfiniBand).
    pub fn pods(self) -> Option<u32> {
        if self.slots == 0 || self.kinds_per_address == 0 {
            return None;
        }
        let pods = (self.slots / self.kinds_per_address / ADDRESSES_PER_POD).saturating_sub(1);
        u32::try_from(pods.max(1)).ok()
    }
}

/// A netdev of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netdev {
    /// Name on the host.
    pub name: String,
    /// Encapsulation.
    pub link_type: LinkType,
}

/// PCI facts of a [`Candidate`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pci {
    /// `0000:3b:00.0`.
    pub address: String,
    /// Vendor, four lower-case hex digits.
    pub vendor: String,
    /// Device, four lower-case hex digits.
    pub device: String,
    /// Bound driver, empty when none is.
    pub driver: String,
    /// Content of `acpi_index`, where the firmware gives one.
    pub acpi_index: Option<String>,
}

/// The physical function above a VF or SF.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pf {
    /// PCI address.
    pub address: String,
    /// Netdevs of it.
    pub netdevs: Vec<String>,
    /// VFs configured on it.
    pub vf_count: u32,
}

/// What kind of function a [`Candidate`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// An RDMA device that no pool can use, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Its name.
    pub rdma_device: String,
    /// Why it cannot be offered.
    pub reason: String,
}

/// Groups the RDMA devices of a host by identity, in the host's own order of device names.
///
/// `functions` are the PCI functions of devices that are in another network namespace.
pub fn list(
    inventory: &Inventory,
    functions: &BTreeMap<PciAddress, PciFunction>,
) -> (Vec<Candidate>, Vec<Unusable>) {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut unusable = Vec::new();
    for device in &inventory.rdma_devices {
        match HcaId::of(device) {
            Ok(id) => {
                let rdma = rdma_device(device);
                match candidates.iter_mut().find(|candidate| candidate.id == id) {
                    Some(known) => known.rdma_devices.push(rdma),
                    None => candidates.push(here(id, device, rdma, inventory)),
                }
            }
            Err(error) => unusable.push(Unusable {
                rdma_device: device.name.clone(),
                reason: error.to_string(),
            }),
        }
    }
    for away in &inventory.elsewhere {
        match identity_elsewhere(away) {
            Some(id) => {
                let rdma = RdmaDevice::known_by_name(&away.rdma_device);
                match candidates.iter_mut().find(|candidate| candidate.id == id) {
                    Some(known) => known.rdma_devices.push(rdma),
                    None => candidates.push(away_candidate(id, away, rdma, functions, inventory)),
                }
            }
            None => unusable.push(Unusable {
                rdma_device: away.rdma_device.clone(),
                reason: "it is in another network namespace and on no bus, so its identity \
                         cannot be seen from here"
                    .into(),
            }),
        }
    }
    (candidates, unusable)
}

fn here(id: HcaId, device: &hca::RdmaDevice, rdma: RdmaDevice, inventory: &Inventory) -> Candidate {
    let function = match (&id, &device.pci) {
        (HcaId::Auxiliary(_), _) => Function::Scalable(device.subfunction.unwrap_or_default()),
        (_, Some(pci)) => function_of(pci),
        (_, None) => Function::Software,
    };
    let netdevs = netdevs_of(&id, device, inventory);
    Candidate {
        rdma_devices: vec![rdma],
        elsewhere: false,
        netdevs,
        pf: device
            .pci
            .as_ref()
            .map(|pci| owner(pci.physical(), inventory)),
        function,
        numa_node: device.numa_node(),
        pci: device.pci.as_ref().map(Pci::of),
        id,
    }
}

fn away_candidate(
    id: HcaId,
    away: &Elsewhere,
    rdma: RdmaDevice,
    functions: &BTreeMap<PciAddress, PciFunction>,
    inventory: &Inventory,
) -> Candidate {
    let pci = away.pci.and_then(|address| functions.get(&address));
    let function = match (&id, pci) {
        (HcaId::Auxiliary(name), _) => Function::Scalable(auxiliary_number(name.as_str())),
        (_, Some(pci)) => function_of(pci),
        (_, None) => Function::Software,
    };
    Candidate {
        rdma_devices: vec![rdma],
        elsewhere: true,
        netdevs: Vec::new(),
        pf: pci.map(|pci| owner(pci.physical(), inventory)),
        function,
        numa_node: pci.and_then(|pci| pci.numa_node),
        pci: pci.map(Pci::of),
        id,
    }
}

fn identity_elsewhere(away: &Elsewhere) -> Option<HcaId> {
    match (&away.auxiliary, away.pci) {
        (Some(name), _) => name.parse().ok().map(HcaId::Auxiliary),
        (None, Some(address)) => Some(HcaId::Pci(address)),
        (None, None) => None,
    }
}

fn auxiliary_number(name: &str) -> u32 {
    name.rsplit('.')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}

fn function_of(pci: &PciFunction) -> Function {
    match pci.sriov {
        Sriov::Virtual { index, .. } => Function::Virtual(index.unwrap_or(u32::MAX)),
        Sriov::None | Sriov::Physical { .. } => Function::Physical,
    }
}

fn owner(address: PciAddress, inventory: &Inventory) -> Pf {
    let netdevs = inventory
        .netdevs_on_pci(address)
        .filter(|netdev| !netdev.is_representor() && !netdev.is_child())
        .map(|netdev| netdev.name.clone())
        .collect();
    let functions = inventory
        .rdma_on_pci(address)
        .filter_map(|device| device.pci.as_ref());
    let vfs = functions.filter_map(|pci| match &pci.sriov {
        Sriov::Physical { functions, .. } => u32::try_from(functions.len()).ok(),
        _ => None,
    });
    Pf {
        address: address.to_string(),
        netdevs,
        vf_count: vfs.max().unwrap_or_default(),
    }
}

/// The netdevs of the hardware itself, and those its ports name (soft RoCE has only these).
fn netdevs_of(id: &HcaId, device: &hca::RdmaDevice, inventory: &Inventory) -> Vec<Netdev> {
    let on_hardware: Vec<&hca::Netdev> = match id {
        HcaId::Pci(address) => inventory.netdevs_on_pci(*address).collect(),
        HcaId::Auxiliary(name) => inventory
            .netdevs
            .iter()
            .filter(|netdev| netdev.auxiliary.as_deref() == Some(name.as_str()))
            .collect(),
        HcaId::NodeGuid(_) => Vec::new(),
    };
    let named = device.netdevs().filter_map(|name| inventory.netdev(name));
    let mut found: Vec<Netdev> = Vec::new();
    for netdev in on_hardware.into_iter().chain(named) {
        let known = found.iter().any(|known| known.name == netdev.name);
        if !known && !netdev.is_representor() && !netdev.is_child() {
            found.push(Netdev {
                name: netdev.name.clone(),
                link_type: match netdev.link_type {
                    netdev::link_type::ETHERNET => LinkType::Ether,
                    netdev::link_type::INFINIBAND => LinkType::Infiniband,
                    _ => LinkType::Other,
                },
            });
        }
    }
    found
}

fn rdma_device(device: &hca::RdmaDevice) -> RdmaDevice {
    RdmaDevice {
        name: device.name.clone(),
        node_guid: device
            .node_guid
            .map(|guid| format!("{:016x}", guid.0))
            .unwrap_or_default(),
        firmware: device.firmware.clone().unwrap_or_default(),
        board_id: device.board_id.clone().unwrap_or_default(),
        ports: device.ports.iter().map(port).collect(),
    }
}

fn port(port: &hca::Port) -> Port {
    let entries = &port.gids.entries;
    let first = entries.iter().find(|entry| entry.index == 0);
    Port {
        number: port.number,
        link_type: match port.link_layer {
            LinkLayer::Ethernet => LinkType::Ether,
            LinkLayer::InfiniBand => LinkType::Infiniband,
            LinkLayer::Unknown => LinkType::Other,
        },
        rate_mbps: port.rate.as_ref().map(|rate| rate.mbps),
        pkeys: port.pkeys.iter().map(|(_, key)| key & 0x7fff).collect(),
        guid: first.map(|entry| {
            let [.., a, b, c, d, e, f, g, h] = entry.gid.0;
            format!("{:016x}", u64::from_be_bytes([a, b, c, d, e, f, g, h]))
        }),
        gid_table: match port.link_layer {
            LinkLayer::Ethernet => GidTable {
                slots: port.gids.slots,
                kinds_per_address: {
                    let has = |kind| {
                        entries
                            .iter()
                            .any(|entry| entry.kind.as_ref() == Some(kind))
                    };
                    let both = has(&GidType::IbOrRoceV1) && has(&GidType::RoceV2);
                    if both { 2 } else { 1 }
                },
            },
            LinkLayer::InfiniBand | LinkLayer::Unknown => GidTable::default(),
        },
    }
}

impl RdmaDevice {
    fn known_by_name(name: &str) -> Self {
        Self {
            name: name.into(),
            node_guid: String::new(),
            firmware: String::new(),
            board_id: String::new(),
            ports: Vec::new(),
        }
    }
}

impl Pci {
    fn of(function: &PciFunction) -> Self {
        Self {
            address: function.address.to_string(),
            vendor: format!("{:04x}", function.vendor),
            device: format!("{:04x}", function.device),
            driver: function.driver.clone().unwrap_or_default(),
            acpi_index: None,
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
