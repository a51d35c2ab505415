//! Which pod has which GPU and which NIC, from the kubelet's PodResources API.
//!
//! The kubelet knows device IDs, not devices. Ours name the HCA ([`hca::UnitId`]), NVIDIA's the
//! GPU (`GPU-<uuid>`, with `::<n>` behind it when time-sliced); other plugins mostly hand out
//! PCI addresses. IDs that name nothing here are passed over.

use std::collections::{BTreeMap, BTreeSet};

use hca::UnitId;
use hca::topology::{Gpu, Nic};

/// Pods by the names of their devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    by_id: BTreeMap<String, Vec<String>>,
    /// Devices held as such.
    whole: BTreeSet<String>,
}

impl Holders {
    /// Collects pods (`namespace/name`) with the device IDs they hold.
    #[must_use]
    pub(crate) fn collect(devices: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut by_id: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut whole = BTreeSet::new();
        for (pod, id) in devices {
            if device_named_by(&id) == id {
                whole.insert(id.clone());
            }
            let pods = by_id.entry(device_named_by(&id)).or_default();
            if !pods.contains(&pod) {
                pods.push(pod);
            }
        }
        Self { by_id, whole }
    }

    /// Pods that have a GPU.
    #[must_use]
    pub(crate) fn gpu(&self, gpu: &Gpu) -> Vec<String> {
        let address = gpu.place.address.to_string();
        self.of(&[Some(address), gpu.uuid.clone()])
    }

    /// Pods that have a NIC, or a share of it.
    #[must_use]
    pub(super) fn nic(&self, nic: &Nic) -> Vec<String> {
        self.of(&[Some(nic.hca.to_string())])
    }

    /// True if a pod has the NIC itself, not a share of it.
    #[must_use]
    pub(crate) fn nic_as_a_whole(&self, nic: &Nic) -> bool {
        self.whole.contains(&nic.hca.to_string())
    }

    fn of(&self, ids: &[Option<String>]) -> Vec<String> {
        let found = ids.iter().flatten().filter_map(|id| self.by_id.get(id));
        found.flatten().cloned().collect()
    }
}

/// What a device ID names, without the number of a share or slice.
fn device_named_by(id: &str) -> String {
    if let Ok(unit) = id.parse::<UnitId>()
        && let Some(hca) = unit.hca()
    {
        return hca.to_string();
    }
    id.split("::").next().unwrap_or(id).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_all_kinds_lead_to_their_device() {
        let pool = hca::unit::PoolTag::of("rdma/shared");
        for (id, device) in [
            ("0000:3b:00.0".to_owned(), "0000:3b:00.0"),
            (format!("0000:3b:00.0_{pool}_17"), "0000:3b:00.0"),
            ("mlx5_core.sf.4".to_owned(), "mlx5_core.sf.4"),
            ("GPU-1f2e".to_owned(), "GPU-1f2e"),
            ("GPU-1f2e::3".to_owned(), "GPU-1f2e"),
            ("7".to_owned(), "7"),
        ] {
            assert_eq!(device_named_by(&id), device, "{id}");
        }
    }

    #[test]
    fn a_pod_with_two_shares_is_named_once() {
        let pool = hca::unit::PoolTag::of("rdma/shared");
        let share = |pod: &str, slot| (pod.to_owned(), format!("0000:3b:00.0_{pool}_{slot}"));
        let holders = Holders::collect([share("a/x", 0), share("a/x", 1), share("a/y", 2)]);
        assert_eq!(
            holders.of(&[Some("0000:3b:00.0".to_owned())]),
            ["a/x", "a/y"]
        );
    }
}
