//! NICs: HCAs that have a place in the PCI tree.

use super::data_direct;
use super::distance::PciLocation;
use super::rail::{self, Clues, Rail};
use crate::host::{self, Host, Result};
use crate::inventory::{FunctionKind, Hca, Inventory};
use crate::pci::{self, PciAddress};

/// An HCA at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// The HCA.
    pub hca: Hca,
    /// Where it sits. A soft device sits where its netdev does.
    pub place: PciLocation,
    /// Its rail; `None` for a NIC that is on none, such as one for storage.
    pub rail: Option<Rail>,
}

impl Nic {
    /// What people call it: its RDMA device.
    #[must_use]
    pub fn title(&self) -> String {
        let device = self.hca.rdma_devices.first();
        device.map_or_else(|| self.hca.id.to_string(), |device| device.name.clone())
    }

    /// Its physical function: its own address but for a VF.
    #[must_use]
    pub fn physical(&self) -> PciAddress {
        self.hca.pf().unwrap_or(self.place.address)
    }

    /// True for a VF whose physical function is on this host, and for a sub-function: one of many that
    /// are made to be given to pods, where a card is worth giving to one pod as a whole.
    #[must_use]
    pub fn is_slice(&self) -> bool {
        let kind = self.hca.function().kind;
        matches!(kind, FunctionKind::Vf | FunctionKind::Sf)
    }

    /// The rail's number for sorting: NICs that are on none come last.
    pub(crate) fn rail_order(&self) -> u32 {
        self.rail.as_ref().map_or(u32::MAX, |rail| rail.number)
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
    let mut nics = Vec::new();
    let unusable = inventory.unusable.iter();
    let mut unplaced: Vec<String> = unusable.map(|one| one.device.name.clone()).collect();
    let for_pods = |hca: &&Hca| hca.reserved().is_none();
    for hca in inventory.hcas.iter().filter(for_pods) {
        match place_of(host, hca)? {
            Some(place) => nics.push(Nic {
                hca: hca.clone(),
                place,
                rail: None,
            }),
            None => unplaced.extend(hca.rdma_names().into_iter().map(str::to_owned)),
        }
    }
    nics.sort_by(|a, b| (a.place.address, &a.hca.id).cmp(&(b.place.address, &b.hca.id)));
    data_direct::assign(host, &mut nics)?;
    let clues: Vec<Clues<'_>> = nics
        .iter()
        .map(|nic| Clues {
            address: nic.physical(),
            netdevs: nic.hca.netdev_names().collect(),
            near_gpu: near_gpu(&nic.place),
        })
        .collect();
    let rails = rail::number(&clues);
    for (nic, rail) in nics.iter_mut().zip(rails) {
        nic.rail = rail;
    }
    Ok((nics, unplaced))
}

/// The place of an HCA, or of the netdev that a soft device is on.
fn place_of(host: &Host, hca: &Hca) -> Result<Option<PciLocation>> {
    let of_netdev = || hca.netdevs.iter().find_map(|netdev| netdev.pci);
    match (hca.place(), of_netdev()) {
        (None, Some(address)) => {
            let function = host::present(pci::read(host, address))?;
            Ok(function.as_ref().map(PciLocation::of))
        }
        (place, _) => Ok(place),
    }
}
