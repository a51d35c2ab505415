//! An HCA: everything that one identity covers.
//!
//! Usually it is one RDMA device, but some drivers register several on one PCI function, and they
//! cannot be handed out apart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Inventory;
use crate::netdev::Netdev;
use crate::pci::{PciAddress, PciFunction, Sriov};
use crate::port::{LinkLayer, Port};
use crate::rdma::{RdmaDevice, Reserved};
use crate::sub_device;
use crate::topology::PciLocation;
use crate::unit::{self, HcaId};

/// One HCA, visible or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hca {
    /// Identity that its units carry.
    pub id: HcaId,
    /// Its RDMA devices that carry data, in order of name; never empty. Of one that is not visible,
    /// the name and the verbs node alone.
    pub rdma_devices: Vec<RdmaDevice>,
    /// RDMA devices for management alone, such as `smi1` of a multi-plane HCA.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sub_devices: Vec<RdmaDevice>,
    /// Whether it is in another network namespace, as an HCA that a pod holds in exclusive mode.
    pub elsewhere: bool,
    /// Why it cannot be read, if it cannot: what was read and what the kernel said.
    pub fault: Option<String>,
    /// Netdevs of it, in the order in which the kernel made them; empty for InfiniBand without IPoIB.
    /// That of a port can stand on another PCI function.
    pub netdevs: Vec<Netdev>,
    /// The bond on its netdevs, and that bond's other members without an HCA of their own.
    pub bond_names: Vec<String>,
    /// The PCI function it is, or (sub-functions) is part of.
    pub pci: Option<PciFunction>,
    /// Netdevs of the physical function that owns a VF or SF; of the function itself for a PF.
    pub pf_netdevs: Vec<String>,
}

/// The function that an [`Hca`] is, with the number of a VF or SF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// Physical, virtual or scalable, or not on a bus at all.
    pub kind: FunctionKind,
    /// VF number on the PF, or number of the SF.
    pub index: Option<u32>,
}

/// A kind of function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

impl FunctionKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Pf, Self::Vf, Self::Sf, Self::Software];

    /// Its word in configurations.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Pf => "pf",
            Self::Vf => "vf",
            Self::Sf => "sf",
            Self::Software => "software",
        }
    }
}

impl fmt::Display for Function {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.kind.word())?;
        self.index
            .map_or(Ok(()), |index| write!(formatter, " {index}"))
    }
}

/// An RDMA device that has no identity to be offered by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unusable {
    /// The device; of one that is not visible, the name and the verbs node alone.
    pub device: RdmaDevice,
    /// Whether it is in another network namespace.
    pub elsewhere: bool,
    /// Why it cannot be offered.
    pub reason: String,
}

impl Hca {
    /// An HCA of which no more is known than its identity.
    #[must_use]
    pub fn new(id: HcaId, pci: Option<PciFunction>) -> Self {
        Self {
            id,
            rdma_devices: Vec::new(),
            sub_devices: Vec::new(),
            elsewhere: false,
            fault: None,
            netdevs: Vec::new(),
            bond_names: Vec::new(),
            pci,
            pf_netdevs: Vec::new(),
        }
    }

    /// Whether all its RDMA devices could be read. One of another network namespace, or one that
    /// does not answer, is known by its name alone, and has no port here.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.rdma_devices
            .iter()
            .all(|device| !device.ports.is_empty())
    }

    /// Whether all its netdevs are in sight, as far as is known: an Ethernet port has one.
    #[must_use]
    pub fn shows_netdevs(&self) -> bool {
        !self.netdevs.is_empty()
            || self.is_read()
                && !self
                    .ports()
                    .any(|(_, port)| port.link_layer == LinkLayer::Ethernet)
    }

    /// Why no pod can have it, if that is so.
    #[must_use]
    pub fn reserved(&self) -> Option<&Reserved> {
        let mut devices = self.rdma_devices.iter();
        devices.find_map(|device| device.reserved.as_ref())
    }

    /// Names of its RDMA devices.
    #[must_use]
    pub fn rdma_names(&self) -> Vec<&str> {
        let devices = self.rdma_devices.iter();
        devices.map(|device| device.name.as_str()).collect()
    }

    /// Names of its netdevs on the host.
    pub fn netdev_names(&self) -> impl Iterator<Item = &str> {
        self.netdevs.iter().map(|netdev| netdev.name.as_str())
    }

    /// The ports that carry data, with their RDMA devices.
    pub fn ports(&self) -> impl Iterator<Item = (&RdmaDevice, &Port)> {
        let ports = self.rdma_devices.iter();
        let ports = ports.flat_map(|device| device.ports.iter().map(move |port| (device, port)));
        ports.filter(|(_, port)| port.carries_data)
    }

    /// The ports that programs are to use, as `mlx5_0:1`: the active ones, or all while none is. Of a
    /// device whose ports are not known, the name.
    #[must_use]
    pub fn port_names(&self) -> Vec<String> {
        let is_active = self.ports().any(|(_, port)| port.is_active());
        let used = self
            .ports()
            .filter(|(_, port)| port.is_active() || !is_active);
        let names = used.map(|(device, port)| format!("{}:{}", device.name, port.number));
        let devices = self.rdma_devices.iter();
        let unread = devices.filter(|device| device.ports.is_empty());
        names
            .chain(unread.map(|device| device.name.clone()))
            .collect()
    }

    /// Link layer of its ports.
    #[must_use]
    pub fn link_layer(&self) -> LinkLayer {
        let mut layers = self.ports().map(|(_, port)| port.link_layer);
        let known = layers.find(|layer| *layer != LinkLayer::Unknown);
        known.unwrap_or(LinkLayer::Unknown)
    }

    /// Rate of all its active ports together, in Mb/s; `None` while none is active.
    #[must_use]
    pub fn rate_mbps(&self) -> Option<u64> {
        let active = self.ports().filter(|(_, port)| port.is_active());
        let rates = active.filter_map(|(_, port)| Some(u64::from(port.rate.as_ref()?.mbps)));
        Some(rates.sum()).filter(|rate| *rate > 0)
    }

    /// The netdev of a port, where it is visible.
    #[must_use]
    pub fn netdev_of(&self, port: &Port) -> Option<&Netdev> {
        let name = port.netdev.as_deref()?;
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    /// Physical, virtual or scalable function, or not on a bus at all.
    #[must_use]
    pub fn function(&self) -> Function {
        let (kind, index) = match (&self.id, &self.pci) {
            (HcaId::Auxiliary(name), _) => {
                let mut devices = self.rdma_devices.iter();
                let number = devices.find_map(|device| device.subfunction);
                let by_name = || name.as_str().rsplit('.').next()?.parse().ok();
                let index = number.or_else(by_name).unwrap_or_default();
                (FunctionKind::Sf, Some(index))
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
    #[must_use]
    pub fn virtual_functions(&self) -> usize {
        match (&self.id, self.pci.as_ref().map(|pci| &pci.sriov)) {
            (HcaId::Pci(_), Some(Sriov::Physical { functions, .. })) => functions.len(),
            _ => 0,
        }
    }

    /// Drivers of its function and of what its RDMA devices stand on (`mlx5_core`,
    /// `mlx5_core.sf`, `rdma_rxe`).
    #[must_use]
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
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.pci.as_ref()?.numa_node
    }

    /// Its place among PCI functions.
    #[must_use]
    pub fn place(&self) -> Option<PciLocation> {
        self.pci.as_ref().map(PciLocation::of)
    }

    /// The physical function that owns a VF or SF; the function itself for a PF.
    #[must_use]
    pub fn pf(&self) -> Option<PciAddress> {
        self.pci.as_ref().map(PciFunction::physical)
    }

    /// The physical function that owns it, when that is another one.
    #[must_use]
    pub fn owner(&self) -> Option<PciAddress> {
        self.pf().filter(|pf| self.id != HcaId::Pci(*pf))
    }
}

/// An RDMA device as it was found, before it is known what it is part of.
pub(super) struct Found {
    pub(super) device: RdmaDevice,
    pub(super) id: Option<HcaId>,
    pub(super) elsewhere: bool,
    pub(super) fault: Option<String>,
}

/// Groups RDMA devices by identity, in the order in which they were found.
pub(super) fn group(found: Vec<Found>) -> (Vec<Hca>, Vec<Unusable>) {
    let mut names: BTreeMap<&HcaId, Vec<&str>> = BTreeMap::new();
    for one in &found {
        if let Some(id) = &one.id {
            names.entry(id).or_default().push(&one.device.name);
        }
    }
    let together = names.into_values();
    let management: BTreeSet<String> = together
        .flat_map(|all| sub_device::among(all.into_iter()))
        .collect();
    let mut hcas: Vec<Hca> = Vec::new();
    let mut unusable = Vec::new();
    for one in found {
        let Some(id) = one.id else {
            let reason = match one.elsewhere {
                true => {
                    "it is in another network namespace and on no bus, so its identity cannot be \
                     seen from here"
                }
                false => "it has neither a PCI function, nor an auxiliary device, nor a node GUID",
            };
            unusable.push(Unusable {
                device: one.device,
                elsewhere: one.elsewhere,
                reason: one.fault.unwrap_or_else(|| reason.to_owned()),
            });
            continue;
        };
        let known = hcas.iter().position(|hca| hca.id == id);
        let at = known.unwrap_or_else(|| {
            hcas.push(Hca::new(id, one.device.pci.clone()));
            hcas.len() - 1
        });
        let Some(hca) = hcas.get_mut(at) else {
            continue;
        };
        if management.contains(&one.device.name) {
            hca.sub_devices.push(one.device);
            continue;
        }
        hca.elsewhere |= one.elsewhere;
        hca.fault = one.fault.or(hca.fault.take());
        hca.rdma_devices.push(one.device);
    }
    (hcas, unusable)
}

impl Inventory {
    /// Gives each HCA its netdevs and their bonds.
    pub(super) fn assign_netdevs(&mut self) {
        let mut hcas = std::mem::take(&mut self.hcas);
        let claimed: BTreeSet<String> = hcas
            .iter()
            .flat_map(|hca| &hca.rdma_devices)
            .flat_map(RdmaDevice::netdevs)
            .map(str::to_owned)
            .collect();
        for hca in &mut hcas {
            let netdevs = self.netdevs_of_hca(hca);
            let bonds = netdevs
                .iter()
                .flat_map(|netdev| self.bond_names(netdev, &claimed));
            hca.bond_names = bonds.map(str::to_owned).collect();
            hca.netdevs = netdevs.into_iter().cloned().collect();
            let of_pf = hca
                .pf()
                .into_iter()
                .flat_map(|pf| self.netdevs_on_pci(pf))
                .filter(|netdev| netdev.is_port_netdev());
            hca.pf_netdevs = of_pf.map(|netdev| netdev.name.clone()).collect();
        }
        self.hcas = hcas;
    }

    /// Netdevs on a PCI function, its sub-functions left out.
    pub fn netdevs_on_pci(&self, address: PciAddress) -> impl Iterator<Item = &Netdev> {
        self.netdevs.iter().filter(move |netdev| {
            netdev.pci == Some(address)
                && !netdev
                    .auxiliary
                    .as_deref()
                    .is_some_and(unit::is_subfunction)
        })
    }

    /// The netdevs of an HCA, in order of interface index; the same answer as
    /// [`crate::lookup::on_hca`]'s.
    fn netdevs_of_hca(&self, hca: &Hca) -> Vec<&Netdev> {
        let on_hardware: Vec<&Netdev> = match &hca.id {
            HcaId::Pci(address) => self.netdevs_on_pci(*address).collect(),
            HcaId::Auxiliary(name) => {
                let is_on = |n: &&Netdev| n.auxiliary.as_deref() == Some(name.as_str());
                self.netdevs.iter().filter(is_on).collect()
            }
            HcaId::NodeGuid(_) => Vec::new(),
        };
        let of_ports = hca.rdma_devices.iter().flat_map(RdmaDevice::netdevs);
        let of_ports = of_ports.filter_map(|name| self.netdev(name));
        let mut found = on_hardware;
        found.retain(|netdev| netdev.is_port_netdev());
        found.extend(of_ports);
        found.sort_by_key(|netdev| netdev.ifindex);
        found.dedup_by_key(|netdev| netdev.ifindex);
        found
    }

    /// What else a netdev of an HCA is known by: the bond on it, and that bond's other members that
    /// have no RDMA device of their own, because the HCA stands for all of them (RDMA LAG).
    fn bond_names<'i>(&'i self, netdev: &Netdev, claimed: &BTreeSet<String>) -> Vec<&'i str> {
        let master = netdev.master.as_deref().and_then(|name| self.netdev(name));
        let Some(bond) = master.filter(|master| master.kind.as_deref() == Some("bond")) else {
            return Vec::new();
        };
        let members = bond.lowers.iter().map(String::as_str);
        let others = members.filter(|name| *name != netdev.name && !claimed.contains(*name));
        std::iter::once(bond.name.as_str()).chain(others).collect()
    }
}
