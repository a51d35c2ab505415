//! Candidates from an inventory: RDMA devices grouped by the identity that their units carry.

use std::collections::BTreeMap;

use hca::inventory::Inventory;
use hca::pci::{PciFunction, Sriov};
use hca::topology::Place;
use hca::unit::HcaId;
use hca::{LinkLayer, PciAddress, netdev};

use super::{Candidate, Function, LinkType, Netdev, Pci, Pf, Port, RdmaDevice};

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
                    Some(known) => known.join(rdma, device.driver.as_deref()),
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
        match HcaId::of_elsewhere(away) {
            Ok(Some(id)) => {
                let rdma = RdmaDevice::known_by_name(&away.rdma_device);
                match candidates.iter_mut().find(|candidate| candidate.id == id) {
                    Some(known) => known.rdma_devices.push(rdma),
                    None => {
                        let candidate = by_place(id, away.pci, rdma, functions, inventory);
                        candidates.push(Candidate {
                            elsewhere: true,
                            ..candidate
                        });
                    }
                }
            }
            Ok(None) => unusable.push(Unusable {
                rdma_device: away.rdma_device.clone(),
                reason: "it is in another network namespace and on no bus, so its identity \
                         cannot be seen from here"
                    .into(),
            }),
            Err(error) => unusable.push(Unusable {
                rdma_device: away.rdma_device.clone(),
                reason: error.to_string(),
            }),
        }
    }
    for device in &inventory.unreadable {
        let Ok(Some(id)) = HcaId::of_unreadable(device) else {
            // Its identity is an attribute. A pool that had it before knows it by its name.
            unusable.push(Unusable {
                rdma_device: device.rdma_device.clone(),
                reason: device.reason.clone(),
            });
            continue;
        };
        let rdma = RdmaDevice::known_by_name(&device.rdma_device);
        let fault = Some(device.reason.clone());
        match candidates.iter_mut().find(|candidate| candidate.id == id) {
            Some(known) => {
                known.rdma_devices.push(rdma);
                known.fault = fault;
            }
            None => {
                let candidate = by_place(id, device.pci, rdma, functions, inventory);
                candidates.push(Candidate { fault, ..candidate });
            }
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
    let netdevs = inventory.netdevs_of_hca(&id);
    let bond_names = netdevs.iter().flat_map(|one| inventory.bond_names(one));
    let of_function = device.pci.as_ref().and_then(|pci| pci.driver.clone());
    let mut candidate = Candidate {
        rdma_devices: Vec::new(),
        elsewhere: false,
        fault: None,
        bond_names: bond_names.map(str::to_owned).collect(),
        netdevs: netdevs.into_iter().map(netdev).collect(),
        drivers: of_function.into_iter().collect(),
        place: device.pci.as_ref().map(Place::of),
        pf: device
            .pci
            .as_ref()
            .map(|pci| owner(pci.physical(), inventory)),
        function,
        numa_node: device.numa_node(),
        pci: device.pci.as_ref().map(Pci::of),
        id,
    };
    candidate.join(rdma, device.driver.as_deref());
    candidate
}

/// What the place of an RDMA device shows, where its own attributes cannot be read.
fn by_place(
    id: HcaId,
    address: Option<PciAddress>,
    rdma: RdmaDevice,
    functions: &BTreeMap<PciAddress, PciFunction>,
    inventory: &Inventory,
) -> Candidate {
    let pci = address.and_then(|address| functions.get(&address));
    let function = match (&id, pci) {
        (HcaId::Auxiliary(name), _) => Function::Scalable(auxiliary_number(name.as_str())),
        (_, Some(pci)) => function_of(pci),
        (_, None) => Function::Software,
    };
    Candidate {
        rdma_devices: vec![rdma],
        elsewhere: false,
        fault: None,
        netdevs: Vec::new(),
        bond_names: Vec::new(),
        drivers: pci.and_then(|pci| pci.driver.clone()).into_iter().collect(),
        place: pci.map(Place::of),
        pf: pci.map(|pci| owner(pci.physical(), inventory)),
        function,
        numa_node: pci.and_then(|pci| pci.numa_node),
        pci: pci.map(Pci::of),
        id,
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

fn netdev(netdev: &hca::Netdev) -> Netdev {
    Netdev {
        name: netdev.name.clone(),
        link_type: match netdev.link_type {
            netdev::link_type::ETHERNET => LinkType::Ether,
            netdev::link_type::INFINIBAND => LinkType::Infiniband,
            _ => LinkType::Other,
        },
    }
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
        active: port.is_active(),
        rate_mbps: port.rate.as_ref().map(|rate| rate.mbps),
        pkeys: port.pkeys.iter().map(|(_, key)| key & 0x7fff).collect(),
        guid: first.map(|entry| {
            let [.., a, b, c, d, e, f, g, h] = entry.gid.0;
            format!("{:016x}", u64::from_be_bytes([a, b, c, d, e, f, g, h]))
        }),
        room: match port.link_layer {
            LinkLayer::Ethernet => port.gids.pods(),
            LinkLayer::InfiniBand | LinkLayer::Unknown => None,
        },
    }
}

impl Candidate {
    /// Adds an RDMA device of the same identity.
    fn join(&mut self, rdma: RdmaDevice, driver: Option<&str>) {
        self.rdma_devices.push(rdma);
        if let Some(driver) = driver.filter(|driver| !self.drivers.iter().any(|d| d == driver)) {
            self.drivers.push(driver.into());
        }
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
            acpi_index: function.acpi_index.map(|index| index.to_string()),
        }
    }
}
