//! Which pod has which GPU and which NIC, from the kubelet's PodResources API.
//!
//! The kubelet knows device IDs, not devices. Ours name the HCA ([`hca::UnitId`]); which GPU an ID
//! means is known by [`Gpus`]. IDs that name nothing here are passed over.

use std::collections::{BTreeMap, BTreeSet};

use hca::topology::{Gpu, Nic};
use hca::{PciAddress, UnitId};
use rdma_device_plugin::Gpus;

/// Pods by the names of their devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    gpus: BTreeMap<PciAddress, Vec<String>>,
    /// By HCA.
    nics: BTreeMap<String, Vec<String>>,
    /// HCAs held as such.
    whole: BTreeSet<String>,
}

/// A device of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// The pod, `namespace/name`.
    pub pod: String,
    /// The resource that it is of.
    pub resource: String,
    /// Its ID.
    pub id: String,
}

impl Holders {
    /// Collects pods with the devices they hold.
    pub(crate) fn collect(gpus: &Gpus, devices: impl IntoIterator<Item = Held>) -> Self {
        let mut holders = Self::default();
        for Held { pod, resource, id } in devices {
            let pods = match gpus.named(&resource, &id) {
                Some(gpu) => holders.gpus.entry(gpu.place.address).or_default(),
                None => {
                    let unit = id.parse::<UnitId>().ok();
                    let hca = unit.and_then(|unit| Some(unit.hca()?.to_string()));
                    let Some(hca) = hca else { continue };
                    if hca == id {
                        holders.whole.insert(id);
                    }
                    holders.nics.entry(hca).or_default()
                }
            };
            if !pods.contains(&pod) {
                pods.push(pod);
            }
        }
        holders
    }

    /// Pods that have a GPU.
    pub(crate) fn gpu(&self, gpu: &Gpu) -> Vec<String> {
        self.gpus
            .get(&gpu.place.address)
            .cloned()
            .unwrap_or_default()
    }

    /// Pods that have a NIC, or a share of it.
    pub(super) fn nic(&self, nic: &Nic) -> Vec<String> {
        self.nics
            .get(&nic.hca.to_string())
            .cloned()
            .unwrap_or_default()
    }

    /// True if a pod has the NIC itself, not a share of it.
    pub(crate) fn nic_as_a_whole(&self, nic: &Nic) -> bool {
        self.whole.contains(&nic.hca.to_string())
    }
}

#[cfg(test)]
pub(crate) mod example {
    use super::*;

    /// Holders of devices by the names of pods and IDs, whatever resources they are of.
    pub(crate) fn holders(gpus: &[Gpu], held: &[(&str, &str)]) -> Holders {
        let gpus = Gpus {
            all: gpus.to_vec(),
            ..Gpus::default()
        };
        let held = held.iter().map(|(pod, id)| Held {
            pod: (*pod).to_owned(),
            resource: "rdma/nic".to_owned(),
            id: (*id).to_owned(),
        });
        Holders::collect(&gpus, held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_all_kinds_lead_to_their_hca() {
        let pool = hca::unit::PoolTag::of("rdma/shared");
        let share = |slot| format!("0000:3b:00.0_{pool}_{slot}");
        let holders = example::holders(
            &[],
            &[
                ("a/x", &share(0)),
                ("a/x", &share(17)),
                ("a/y", "0000:3b:00.0"),
                ("a/z", "mlx5_core.sf.4"),
                ("a/z", "7"),
            ],
        );
        let expected = [
            ("0000:3b:00.0", vec!["a/x", "a/y"]),
            ("mlx5_core.sf.4", vec!["a/z"]),
        ];
        let expected = expected.map(|(hca, pods)| {
            (
                hca.to_owned(),
                pods.into_iter().map(str::to_owned).collect(),
            )
        });
        assert_eq!(holders.nics, BTreeMap::from(expected));
        assert_eq!(holders.whole.len(), 2);
    }
}
