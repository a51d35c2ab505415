//! A node's GPUs and NICs with the distances between them.

use std::collections::BTreeMap;

use super::distance::{self, Class, Distance, PciLocation};
use super::gpu::Gpu;
use super::nic::{self, Nic};
use super::numa::Numa;
use crate::host::{Host, Result};
use crate::inventory::Inventory;
use crate::pci::PciAddress;

/// All that the choice of NICs and the picture of a node need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// GPUs in order of PCI address.
    pub gpus: Vec<Gpu>,
    /// NICs in order of PCI address.
    pub nics: Vec<Nic>,
    /// RDMA devices that are nowhere in the PCI tree.
    pub unplaced: Vec<String>,
    /// NUMA nodes.
    pub numa: Numa,
}

impl Machine {
    /// Reads a node whose inventory was scanned. `gpus` are those that [`super::gpu::read`] found; it asks
    /// their drivers.
    ///
    /// # Errors
    /// [`crate::host::Error::Read`] if sysfs cannot be read.
    pub fn read(host: &Host, inventory: &Inventory, gpus: Vec<Gpu>) -> Result<Self> {
        let numa = Numa::read(host)?;
        let near_gpu = |nic: &PciLocation| {
            let to = |gpu: &Gpu| distance::distance(&gpu.place, nic, &numa).class;
            gpus.iter().any(|gpu| to(gpu).is_peer_to_peer())
        };
        let (nics, unplaced) = nic::read(host, inventory, near_gpu)?;
        Ok(Self {
            gpus,
            nics,
            unplaced,
            numa,
        })
    }

    /// The distance between two places of this machine.
    #[must_use]
    pub fn distance(&self, a: &PciLocation, b: &PciLocation) -> Distance {
        distance::distance(a, b, &self.numa)
    }

    /// The nearest that any NIC is to this GPU: what can be had at all on this machine. Some
    /// have nothing nearer than `PHB` or `NODE`, and lose nothing by it.
    #[must_use]
    pub fn nearest(&self, gpu: &Gpu) -> Option<Class> {
        self.nics
            .iter()
            .map(|nic| self.distance(&gpu.place, &nic.place).class)
            .min()
    }

    /// Puts functions elsewhere in the tree; their NUMA nodes stay where the new place does not
    /// say. A VF goes with its physical function.
    pub fn place(&mut self, places: &BTreeMap<PciAddress, PciLocation>) {
        for gpu in &mut self.gpus {
            if let Some(place) = places.get(&gpu.place.address) {
                move_to(&mut gpu.place, place);
            }
        }
        for nic in &mut self.nics {
            // A file may know a dual-port card by its first function alone.
            let card = (!nic.is_slice()).then_some(nic.place.address.card());
            let names = [Some(nic.place.address), Some(nic.physical()), card];
            let known = names.iter().flatten().find_map(|name| places.get(name));
            if let Some(place) = known {
                move_to(&mut nic.place, place);
            }
        }
    }
}

fn move_to(place: &mut PciLocation, new: &PciLocation) {
    // Who gives a place means the GPU that it is next to: nothing else decides then.
    place.data_direct = None;
    place.root.clone_from(&new.root);
    place.chain.clone_from(&new.chain);
    if let Some(last) = place.chain.last_mut() {
        *last = place.address;
    }
    place.numa = new.numa.or(place.numa);
}
