//! Candidates from an inventory: RDMA devices grouped by the identity that their units carry.

use hca::inventory::Inventory;
use hca::{HcaId, PciFunction, RdmaDevice};
use serde::{Deserialize, Serialize};

use super::Candidate;

/// An RDMA device that no pool can use, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unusable {
    /// Its name.
    pub rdma_device: String,
    /// Why it cannot be offered.
    pub reason: String,
}

/// Groups the RDMA devices of a host by identity, in the host's own order of device names.
pub fn list(inventory: &Inventory) -> (Vec<Candidate>, Vec<Unusable>) {
    let here = inventory.rdma_devices().map(|device| {
        let id = HcaId::of(device).map_err(|error| error.to_string());
        let hca = id.map(|id| Candidate {
            netdevs: inventory.netdevs_of_hca(&id).into_iter().cloned().collect(),
            ..candidate(id, device.clone(), device.pci.clone(), inventory)
        });
        (&device.name, hca)
    });
    let hidden = inventory.hidden.iter().map(|hidden| {
        let device = RdmaDevice {
            name: hidden.rdma_device.clone(),
            ..RdmaDevice::default()
        };
        let hca = match &hidden.hca {
            Some(id) => Ok(Candidate {
                elsewhere: hidden.uverbs.is_some(),
                fault: hidden.fault.clone(),
                ..candidate(id.clone(), device, hidden.pci.clone(), inventory)
            }),
            // Its identity is an attribute. A pool that had it before knows it by its name.
            None => Err(hidden.fault.clone().unwrap_or_else(|| {
                "it is in another network namespace and on no bus, so its identity cannot be seen \
                 from here"
                    .to_owned()
            })),
        };
        (&hidden.rdma_device, hca)
    });
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut unusable = Vec::new();
    for (name, found) in here.chain(hidden) {
        match found {
            Ok(hca) => match candidates.iter_mut().find(|known| known.id == hca.id) {
                Some(known) => {
                    known.rdma_devices.extend(hca.rdma_devices);
                    known.fault = hca.fault.or(known.fault.take());
                }
                None => candidates.push(hca),
            },
            Err(reason) => unusable.push(Unusable {
                rdma_device: name.clone(),
                reason,
            }),
        }
    }
    for hca in &mut candidates {
        let names = hca.netdevs.iter().flat_map(|one| inventory.bond_names(one));
        hca.bond_names = names.map(str::to_owned).collect();
    }
    (candidates, unusable)
}

fn candidate(
    id: HcaId,
    device: RdmaDevice,
    pci: Option<PciFunction>,
    inventory: &Inventory,
) -> Candidate {
    let pf = pci.as_ref().map(PciFunction::physical);
    let of_pf = pf.into_iter().flat_map(|pf| inventory.netdevs_on_pci(pf));
    let of_pf = of_pf.filter(|netdev| !netdev.is_representor() && !netdev.is_child());
    Candidate {
        id,
        rdma_devices: vec![device],
        elsewhere: false,
        fault: None,
        netdevs: Vec::new(),
        bond_names: Vec::new(),
        pf_netdevs: of_pf.map(|netdev| netdev.name.clone()).collect(),
        pci,
    }
}
