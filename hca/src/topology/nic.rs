//! NICs: pieces of hardware that RDMA devices stand on.

use std::collections::BTreeMap;

use serde::Serialize;

use super::data_direct;
use super::distance::PciLocation;
use super::link::PcieLink;
use super::rail::{self, Clues, Rail};
use crate::host::{self, Host, Result};
use crate::inventory::{Hca, Inventory};
use crate::pci::{self, PciAddress, PciFunction};
use crate::port::LinkLayer;
use crate::unit::HcaId;

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

    /// An HCA at its place.
    fn of(
        hca: &Hca,
        function: &PciFunction,
        place: PciLocation,
        link: PcieLink,
        rail: Option<Rail>,
    ) -> Self {
        let owned = |name: &str| name.to_owned();
        let slice = function.is_vf() || matches!(hca.id, HcaId::Auxiliary(_));
        let card = PciAddress {
            function: 0,
            ..function.address
        };
        let mut layers = hca.ports().map(|(_, port)| port.link_layer);
        let known = layers.find(|layer| *layer != LinkLayer::Unknown);
        let active = hca.ports().filter(|(_, port)| port.is_active());
        let rates = active.filter_map(|(_, port)| Some(u64::from(port.rate.as_ref()?.mbps)));
        let rate_mbps = rates.sum();
        Self {
            hca: hca.id.clone(),
            place,
            physical: function.physical(),
            card: (!slice).then_some(card),
            rdma_devices: hca.rdma_names().into_iter().map(owned).collect(),
            elsewhere: hca.elsewhere,
            netdevs: hca.netdev_names().map(owned).collect(),
            link_layer: known.unwrap_or(LinkLayer::Unknown),
            rate_mbps: Some(rate_mbps).filter(|rate| *rate > 0),
            link,
            rail,
        }
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
    let mut found: BTreeMap<(PciAddress, &HcaId), (PciFunction, &Hca)> = BTreeMap::new();
    let unusable = inventory.unusable.iter();
    let mut unplaced: Vec<String> = unusable.map(|one| one.device.name.clone()).collect();
    let for_pods = |hca: &&Hca| hca.reserved().is_none();
    for hca in inventory.hcas.iter().filter(for_pods) {
        match function_of(host, hca)? {
            Some(function) => {
                found.insert((function.address, &hca.id), (function, hca));
            }
            None => unplaced.extend(hca.rdma_names().into_iter().map(str::to_owned)),
        }
    }
    let places = places(host, found.values().map(|(function, _)| function))?;
    let netdevs: Vec<Vec<String>> = found
        .values()
        .map(|(_, hca)| hca.netdev_names().map(str::to_owned).collect())
        .collect();
    let clues: Vec<Clues<'_>> = found
        .values()
        .zip(&netdevs)
        .map(|((function, _), netdevs)| Clues {
            address: function.physical(),
            netdevs,
            near_gpu: places.get(&function.address).is_some_and(&near_gpu),
        })
        .collect();
    let rails = rail::number(&clues);
    let nics = found.values().zip(rails).map(|((function, hca), rail)| {
        let address = function.address;
        let directory = host.bus_entry("PCI device", "pci", &address.to_string())?;
        let place = places.get(&address).cloned();
        let place = place.unwrap_or_else(|| PciLocation::of(function));
        Ok(Nic::of(
            hca,
            function,
            place,
            PcieLink::read(&directory)?,
            rail,
        ))
    });
    Ok((nics.collect::<Result<_>>()?, unplaced))
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

/// The function that an HCA is, or that the netdev of a soft device stands on.
fn function_of(host: &Host, hca: &Hca) -> Result<Option<PciFunction>> {
    if let Some(function) = &hca.pci {
        return Ok(Some(function.clone()));
    }
    match hca.netdevs.iter().find_map(|netdev| netdev.pci) {
        Some(address) => host::present(pci::read(host, address)),
        None => Ok(None),
    }
}
