//! Which pod has which GPU and which NIC, from the kubelet's PodResources API.
//!
//! The kubelet knows device IDs, not devices. Ours name the HCA ([`hca::UnitId`]); which GPU an ID
//! means is known by [`Gpus`]. IDs that name nothing here are passed over.

use std::collections::BTreeMap;

use hca::topology::{Gpu, Nic};
use hca::{PciAddress, UnitId};
use kubelet_api::client::Held;
use node_wire::status::DaemonStatus;
use pools::gpus::Gpus;

/// Pods by the names of their devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    gpus: BTreeMap<PciAddress, Vec<String>>,
    /// By HCA.
    nics: BTreeMap<String, Vec<String>>,
}

impl Holders {
    /// Collects pods with the devices they hold.
    pub(crate) fn collect(gpus: &Gpus, held: impl IntoIterator<Item = Held>) -> Self {
        let mut holders = Self::default();
        for one in held {
            let pod = format!("{}/{}", one.namespace, one.pod);
            for id in one.ids {
                holders.add(gpus, &pod, &one.resource, &id);
            }
        }
        holders
    }

    fn add(&mut self, gpus: &Gpus, pod: &str, resource: &str, id: &str) {
        let pods = match gpus.named(resource, id) {
            Some(gpu) => self.gpus.entry(gpu.place.address).or_default(),
            None => {
                let unit = id.parse::<UnitId>().ok();
                let Some(hca) = unit.and_then(|unit| Some(unit.hca()?.to_string())) else {
                    return;
                };
                self.nics.entry(hca).or_default()
            }
        };
        if !pods.iter().any(|known| known == pod) {
            pods.push(pod.to_owned());
        }
    }

    /// Pods that have a GPU.
    pub(crate) fn gpu(&self, gpu: &Gpu) -> Vec<String> {
        let pods = self.gpus.get(&gpu.place.address);
        pods.cloned().unwrap_or_default()
    }

    /// Pods that have a NIC, or a share of it.
    pub(crate) fn nic(&self, nic: &Nic) -> Vec<String> {
        let pods = self.nics.get(&nic.hca.id.to_string());
        pods.cloned().unwrap_or_default()
    }
}

/// Pods with the HCAs that their slots are bound to, for [`Holders::collect`]: the kubelet knows the slots
/// alone.
pub(crate) fn bound(daemon: &DaemonStatus) -> impl Iterator<Item = Held> {
    let bindings = daemon.bindings.iter().filter(|one| one.ended.is_none());
    bindings.map(|one| Held {
        namespace: one.pod.namespace.clone(),
        pod: one.pod.name.clone(),
        container: one.container.clone(),
        resource: one.resource.clone(),
        ids: vec![one.hca.clone()],
    })
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
        let held = held.iter().map(|(pod, id)| {
            let (namespace, pod) = pod.split_once('/').unwrap();
            Held {
                namespace: namespace.to_owned(),
                pod: pod.to_owned(),
                container: "main".to_owned(),
                resource: "rdma/nic".to_owned(),
                ids: vec![(*id).to_owned()],
            }
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
        let share = |share| format!("0000:3b:00.0_{pool}_{share}");
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
    }
}
