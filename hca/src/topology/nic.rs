//! NICs: pieces of hardware that RDMA devices stand on.

use std::collections::BTreeMap;

use serde::Serialize;

use super::data_direct;
use super::distance::PciLocation;
use super::link::PcieLink;
use super::rail::{self, Clues, Rail};
use crate::host::{self, Host, Result};
use crate::inventory::Inventory;
use crate::pci::{self, PciAddress, PciFunction};
use crate::port::LinkLayer;
use crate::rdma::RdmaDevice;
use crate::unit::{self, HcaId};

/// A NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Nic {
    /// Its identity: that of the unit it is offered as.
    pub hca: HcaId,
    /// Where it sits.
    pub place: PciLocation,
    /// Its physical function: its own address but for a VF.
    pub physical: PciAddress,
    /// The card that is worth giving to one pod as a whole: address of its first function.
    /// `None` for VFs and sub-functions, which are made to be given to many.
    pub card: Option<PciAddress>,
    /// RDMA devices on it.
    pub rdma_devices: Vec<String>,
    /// Its RDMA devices are in another network namespace: a pod has them.
    pub elsewhere: bool,
    /// Netdevs on it that are in the host's namespace.
    pub netdevs: Vec<String>,
    /// Link layer of its ports.
    pub link_layer: LinkLayer,
    /// Rate of all its active ports together, in Mb/s; `None` while none is active.
    pub rate_mbps: Option<u64>,
    /// Its PCIe link.
    pub link: PcieLink,
    /// Its rail; `None` for a NIC that is on none, such as one for storage.
    pub rail: Option<Rail>,
}

impl Nic {
    /// What people call it: RDMA device, else netdev, else address.
    #[must_use]
    pub fn title(&self) -> String {
        let name = self.rdma_devices.first().or(self.netdevs.first());
        name.cloned().unwrap_or_else(|| self.hca.to_string())
    }

    /// The rail's number for sorting: NICs that are on none come last.
    #[must_use]
    pub(crate) fn rail_order(&self) -> u32 {
        self.rail.as_ref().map_or(u32::MAX, |rail| rail.number)
    }

    /// True for a VF whose physical function is on this host, and for a sub-function.
    #[must_use]
    pub fn is_slice(&self) -> bool {
        self.card.is_none()
    }
}

/// All NICs in order of PCI address, with rails by what is near a GPU, and the RDMA devices that have
/// no place in the PCI tree, such as soft RoCE on a bridge.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn read(
    host: &Host,
    inventory: &Inventory,
    near_gpu: impl Fn(&PciLocation) -> bool,
) -> Result<(Vec<Nic>, Vec<String>)> {
    let mut found: BTreeMap<(PciAddress, HcaId), Found> = BTreeMap::new();
    let mut unplaced = Vec::new();
    let for_pods = |device: &&RdmaDevice| device.reserved.is_none();
    for device in inventory.rdma_devices.iter().filter(for_pods) {
        let Some(function) = function_of(host, inventory, device)? else {
            unplaced.push(device.name.clone());
            continue;
        };
        let hca = identity(device.auxiliary.as_deref(), &function);
        let entry = found
            .entry((function.address, hca))
            .or_insert_with(|| Found::new(function));
        entry.add(device);
    }
    for away in inventory.hidden.iter().filter(|one| one.uverbs.is_some()) {
        let (Some(function), Some(hca)) = (away.pci.clone(), away.hca.clone()) else {
            unplaced.push(away.rdma_device.clone());
            continue;
        };
        let entry = found
            .entry((function.address, hca))
            .or_insert_with(|| Found::new(function));
        entry.rdma_devices.push(away.rdma_device.clone());
        entry.elsewhere = true;
    }
    let places = places(host, found.values().map(|nic| &nic.function))?;
    let clues: Vec<Clues<'_>> = found
        .values()
        .map(|nic| Clues {
            address: nic.function.physical(),
            netdevs: &nic.netdevs,
            near_gpu: places.get(&nic.function.address).is_some_and(&near_gpu),
        })
        .collect();
    let rails = rail::number(&clues);
    let nics = found
        .into_iter()
        .zip(rails)
        .map(|(((address, hca), nic), rail)| {
            let directory = host.bus_entry("PCI device", "pci", &address.to_string())?;
            let place = places.get(&address).cloned();
            let place = place.unwrap_or_else(|| PciLocation::of(&nic.function));
            Ok(nic.finish(hca, rail, place, PcieLink::read(&directory)?))
        })
        .collect::<Result<_>>()?;
    Ok((nics, unplaced))
}

/// Where NICs sit, by function. Vital product data is read only where there are functions to match
/// by it: a device takes milliseconds to give it.
fn places<'a>(
    host: &Host,
    functions: impl Iterator<Item = &'a PciFunction> + Clone,
) -> Result<BTreeMap<PciAddress, PciLocation>> {
    let by_uuid = if functions.clone().any(data_direct::possible) {
        data_direct::read(host)?
    } else {
        BTreeMap::new()
    };
    functions
        .map(|function| {
            let mut place = PciLocation::of(function);
            if !by_uuid.is_empty() && data_direct::possible(function) {
                let directory =
                    host.bus_entry("PCI device", "pci", &function.address.to_string())?;
                let uuid = data_direct::uuid_of(&directory)?;
                let other = uuid.and_then(|uuid| by_uuid.get(&uuid));
                place.data_direct = other.cloned().map(Box::new);
            }
            Ok((function.address, place))
        })
        .collect()
}

/// A NIC's identity by what an RDMA device stands on. Soft RoCE on a NIC is that NIC, though as a
/// unit it goes by its GUID.
fn identity(auxiliary: Option<&str>, function: &PciFunction) -> HcaId {
    let subfunction = auxiliary.filter(|name| unit::is_subfunction(name));
    match subfunction.and_then(|name| name.parse().ok()) {
        Some(name) => HcaId::Auxiliary(name),
        None => HcaId::Pci(function.address),
    }
}

/// The function that an RDMA device stands on, itself or through the netdev of a soft device.
fn function_of(
    host: &Host,
    inventory: &Inventory,
    device: &RdmaDevice,
) -> Result<Option<PciFunction>> {
    if let Some(function) = &device.pci {
        return Ok(Some(function.clone()));
    }
    let below = device
        .netdevs()
        .filter_map(|name| inventory.netdev(name))
        .find_map(|n| n.pci);
    let Some(address) = below else {
        return Ok(None);
    };
    host::present(pci::read(host, address))
}

/// A NIC while its RDMA devices and netdevs are gathered.
struct Found {
    function: PciFunction,
    rdma_devices: Vec<String>,
    elsewhere: bool,
    netdevs: Vec<String>,
    link_layer: LinkLayer,
    rate_mbps: u64,
}

impl Found {
    fn new(function: PciFunction) -> Self {
        Self {
            function,
            rdma_devices: Vec::new(),
            elsewhere: false,
            netdevs: Vec::new(),
            link_layer: LinkLayer::Unknown,
            rate_mbps: 0,
        }
    }

    fn add(&mut self, device: &RdmaDevice) {
        self.rdma_devices.push(device.name.clone());
        for netdev in device.netdevs() {
            if !self.netdevs.iter().any(|known| known == netdev) {
                self.netdevs.push(netdev.to_owned());
            }
        }
        for port in &device.ports {
            if self.link_layer == LinkLayer::Unknown {
                self.link_layer = port.link_layer;
            }
            if port.is_active() {
                self.rate_mbps += port.rate.as_ref().map_or(0, |rate| u64::from(rate.mbps));
            }
        }
    }

    fn finish(self, hca: HcaId, rail: Option<Rail>, place: PciLocation, link: PcieLink) -> Nic {
        let slice = self.function.is_vf() || matches!(hca, HcaId::Auxiliary(_));
        let card = PciAddress {
            function: 0,
            ..self.function.address
        };
        Nic {
            place,
            physical: self.function.physical(),
            card: (!slice).then_some(card),
            rdma_devices: self.rdma_devices,
            elsewhere: self.elsewhere,
            netdevs: self.netdevs,
            link_layer: self.link_layer,
            rate_mbps: Some(self.rate_mbps).filter(|rate| *rate > 0),
            link,
            rail,
            hca,
        }
    }
}
