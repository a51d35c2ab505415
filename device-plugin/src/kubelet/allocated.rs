//! Which pod holds which units, from the kubelet's PodResources service.
//!
//! Asked for now and then, never while the kubelet waits for us. Not knowing is not the same as
//! no pod with units: until the service or the checkpoint has answered once there is no
//! [`AllocatedUnits`] at all.
//!
//! A kubelet that has just started lists no pod of the API server until that has answered
//! (`pkg/kubelet/kubelet_pods.go`, `GetPods`), though their containers run and hold what they held.
//! Until its list has such a pod, what the checkpoint has besides counts as held, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use hca::{HcaId, UnitId};
use kubelet_api::client::{Held, PodDevices};

use super::checkpoint::{Kept, Owner, Owners};
use crate::config::ResourceName;

/// Units that pods hold.
#[derive(Debug, Clone)]
pub(crate) struct AllocatedUnits {
    units: BTreeMap<String, BTreeMap<String, Holder>>,
    /// When the kubelet was asked.
    asked: AskedAt,
    /// Whether some holders are from the checkpoint, which knows no names of pods.
    by_uid: bool,
    /// UIDs of the holders; none where the checkpoint was not read.
    owners: Option<Arc<Owners>>,
}

/// When the kubelet was asked, by two clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AskedAt {
    /// That of files.
    pub time: SystemTime,
    /// The one that nobody sets.
    pub at: Instant,
}

impl AskedAt {
    pub(crate) fn now() -> Self {
        Self {
            time: SystemTime::now(),
            at: Instant::now(),
        }
    }
}

/// Who holds an HCA, by the name of a unit: how it is held, and of which resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HcaAllocation {
    /// The resource, of whichever device plugin.
    pub resource: String,
    /// Whether the pod has the HCA for itself.
    pub exclusive: bool,
    /// Whether it was bound late: no unit names it.
    pub late: bool,
    /// The pod.
    pub holder: Holder,
}

/// The pod that holds a unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub pod: String,
    /// Container.
    pub container: String,
}

impl fmt::Display for Holder {
    /// A pod of the kubelet's checkpoint has a UID for its name, and no namespace.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "the pod with UID {}", self.pod),
            namespace => write!(f, "pod {namespace}/{}", self.pod),
        }
    }
}

impl AllocatedUnits {
    /// Units of a resource, with their holders.
    pub(crate) fn of(&self, resource: &ResourceName) -> impl Iterator<Item = (&str, &Holder)> {
        let units = self.units.get(resource.as_str()).into_iter().flatten();
        units.map(|(unit, holder)| (unit.as_str(), holder))
    }

    /// Who holds a unit.
    pub(crate) fn holder(&self, resource: &str, unit: &str) -> Option<&Holder> {
        self.units.get(resource)?.get(unit)
    }

    /// The same without the holders.
    pub(crate) fn units(&self, resource: &ResourceName) -> BTreeSet<String> {
        self.of(resource).map(|(unit, _)| unit.to_owned()).collect()
    }

    /// Resources of which something is held.
    pub(crate) fn resources(&self) -> impl Iterator<Item = ResourceName> {
        self.units
            .keys()
            .filter_map(|name| ResourceName::parse(name).ok())
    }

    /// When the kubelet was asked: what it allocated later is not in here.
    pub(crate) fn asked(&self) -> AskedAt {
        self.asked
    }

    /// Whether both say the same.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        self.units == other.units
    }

    /// HCAs that units in pods' hands name, whichever resource and device plugin they are of: the
    /// SR-IOV device plugin's units are PCI addresses, too. Units of a whole pool and slots name none.
    pub(crate) fn hcas(&self) -> BTreeMap<HcaId, Vec<HcaAllocation>> {
        let mut hcas: BTreeMap<HcaId, Vec<HcaAllocation>> = BTreeMap::new();
        for (resource, units) in &self.units {
            for (unit, holder) in units {
                let (hca, exclusive) = match unit.parse() {
                    Ok(UnitId::Exclusive(hca)) => (hca, true),
                    Ok(UnitId::Shared { hca, .. }) => (hca, false),
                    Ok(UnitId::Pool { .. } | UnitId::Slot { .. }) | Err(_) => continue,
                };
                hcas.entry(hca).or_default().push(HcaAllocation {
                    resource: resource.clone(),
                    exclusive,
                    late: false,
                    holder: holder.clone(),
                });
            }
        }
        hcas
    }

    /// Who holds units that stand for all HCAs of a pool, by resource.
    pub(crate) fn of_whole_pools(&self) -> impl Iterator<Item = (&str, &Holder)> {
        self.units.iter().flat_map(|(resource, units)| {
            let of_pool = |unit: &String| matches!(unit.parse(), Ok(UnitId::Pool { .. }));
            let units = units.iter().filter(move |(unit, _)| of_pool(unit));
            units.map(|(_, holder)| (resource.as_str(), holder))
        })
    }

    /// What a call of the kubelet found. What it does not list, or not yet, its checkpoint has: that is
    /// as new, but names pods by UID alone. `node` is the node's name, which is in the names of static
    /// pods.
    ///
    /// # Errors
    /// Neither says anything: what came back instead of an answer.
    pub(crate) fn of_call(
        listed: &Result<Vec<PodDevices>, String>,
        kept: &Result<Option<Kept>, String>,
        node: &str,
        asked: AskedAt,
    ) -> Result<Self, String> {
        let held = |pods: &[PodDevices]| -> Vec<Held> {
            pods.iter().flat_map(|pod| pod.held.clone()).collect()
        };
        let found = match (listed, kept) {
            (Ok(pods), kept) if is_complete(pods, node) => {
                let mut all = held(pods);
                let kept = kept.as_ref().ok().and_then(Option::as_ref);
                let more = kept.map(|kept| of_init_containers(&all, &kept.held));
                all.extend(more.unwrap_or_default());
                Ok(Self::listed(all, asked))
            }
            (Ok(_), Err(error)) => Err(format!(
                "the kubelet lists no pod of the API server yet, and {error}"
            )),
            (Err(error), Err(_) | Ok(None)) => Err(error.clone()),
            (listed, Ok(kept)) => {
                let mut all = held(listed.as_deref().unwrap_or_default());
                all.extend(kept.iter().flat_map(|kept| kept.held.iter().cloned()));
                let by_uid = true;
                let listed = Self::listed(all, asked);
                Ok(Self { by_uid, ..listed })
            }
        };
        let owners = kept.as_ref().ok().and_then(Option::as_ref);
        let owners = owners.map(|kept| kept.owners.clone());
        found.map(|found| Self { owners, ..found })
    }

    /// Whether the checkpoint has a unit as that of pods with other UIDs alone.
    pub(crate) fn is_of_another_uid(&self, uid: &str, resource: &str, unit: &str) -> bool {
        self.owner(uid, resource, unit) == Some(Owner::Another)
    }

    fn owner(&self, uid: &str, resource: &str, unit: &str) -> Option<Owner> {
        let owners = self.owners.as_ref()?;
        Some(owners.owner(uid, resource, unit))
    }

    /// What the kubelet listed.
    pub(crate) fn listed(all: Vec<Held>, asked: AskedAt) -> Self {
        let mut held: BTreeMap<String, BTreeMap<String, Holder>> = BTreeMap::new();
        for one in all {
            let holder = Holder {
                namespace: one.namespace,
                pod: one.pod,
                container: one.container,
            };
            let units = held.entry(one.resource).or_default();
            for id in one.ids {
                units.entry(id).or_insert_with(|| holder.clone());
            }
        }
        Self {
            units: held,
            asked,
            by_uid: false,
            owners: None,
        }
    }

    /// The same with the names of the pods that are known, where the checkpoint says nothing else
    /// than what is known.
    pub(crate) fn with_names_of(mut self, known: Option<&Self>) -> Self {
        if let Some(known) = known.filter(|known| self.by_uid && self.has_units_of(known)) {
            self.units.clone_from(&known.units);
        }
        self
    }

    fn has_units_of(&self, other: &Self) -> bool {
        let keys = |all: &Self| -> Vec<(String, String)> {
            let units = all.units.iter();
            units
                .flat_map(|(resource, units)| units.keys().map(|id| (resource.clone(), id.clone())))
                .collect()
        };
        keys(self) == keys(other)
    }
}

/// What the checkpoint has of pods that are listed, because the list lacks init containers that ended. A
/// pod is recognized by a unit that both have. Any other pod of the checkpoint may have ended.
fn of_init_containers(listed: &[Held], kept: &[Held]) -> Vec<Held> {
    let is_listed = |kept: &&Held| {
        listed.iter().find(|one| {
            one.resource == kept.resource && one.ids.iter().any(|id| kept.ids.contains(id))
        })
    };
    let pods: BTreeMap<&str, &Held> = kept
        .iter()
        .filter_map(|one| Some((one.pod.as_str(), is_listed(&one)?)))
        .collect();
    let named = kept.iter().filter_map(|one| {
        let pod = pods.get(one.pod.as_str())?;
        Some(Held {
            namespace: pod.namespace.clone(),
            pod: pod.pod.clone(),
            ..one.clone()
        })
    });
    named.collect()
}

/// Whether a list is that of a kubelet that has heard from the API server: it names a pod that is
/// no static one, whose name ends with the node's (`pkg/kubelet/config/common.go`,
/// `generatePodName`).
fn is_complete(pods: &[PodDevices], node: &str) -> bool {
    let is_static = |pod: &PodDevices| {
        let stem = pod.name.strip_suffix(node);
        stem.is_some_and(|stem| stem.ends_with('-'))
    };
    !pods.iter().all(is_static)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use node::file::FileId;

    use super::*;

    impl AllocatedUnits {
        pub(crate) fn with_owners(self, owners: Owners) -> Self {
            let owners = Some(Arc::new(owners));
            Self { owners, ..self }
        }
    }

    #[test]
    fn units_are_found_with_their_holders() {
        let held = |resource: &str, ids: &[&str]| Held {
            namespace: "ml".into(),
            pod: "train-0".into(),
            container: "worker".into(),
            resource: resource.into(),
            ids: ids.iter().map(ToString::to_string).collect(),
        };
        let allocated = AllocatedUnits::listed(
            vec![
                held("rdma/a", &["0000:3b:00.2", "0000:3b:00.3"]),
                held("nvidia.com/gpu", &["GPU-1"]),
                held("rdma/a", &["0000:3b:00.4"]),
                held("rdma/s", &["0000:86:00.0_3e71787e_17", "pool_3e71787e_17"]),
            ],
            AskedAt::now(),
        );
        let resource = ResourceName::parse("rdma/a").unwrap();
        let units: Vec<&str> = allocated.of(&resource).map(|(unit, _)| unit).collect();
        assert_eq!(units, ["0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"]);
        assert_eq!(allocated.of(&resource).next().unwrap().1.pod, "train-0");
        assert_eq!(allocated.resources().count(), 3);
        let hcas = allocated.hcas();
        let exclusive: Vec<bool> = hcas.values().map(|all| all[0].exclusive).collect();
        assert_eq!(exclusive, [true, true, true, false]);
        assert!(
            allocated
                .units(&ResourceName::parse("rdma/b").unwrap())
                .is_empty()
        );
    }

    fn held(pod: &str, ids: &[&str]) -> Held {
        Held {
            namespace: String::new(),
            pod: pod.into(),
            container: "main".into(),
            resource: "rdma/a".into(),
            ids: ids.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_list_without_a_pod_of_the_api_server_is_not_complete() {
        let pods = |names: &[&str]| -> Vec<PodDevices> {
            let pod = |name: &&str| PodDevices {
                name: (*name).into(),
                ..PodDevices::default()
            };
            names.iter().map(pod).collect()
        };
        assert!(!is_complete(&[], "n1"));
        assert!(!is_complete(&pods(&["etcd-n1", "proxy-n1"]), "n1"));
        assert!(is_complete(&pods(&["etcd-n1", "train-0"]), "n1"));
        assert!(is_complete(&pods(&["train-xn1"]), "n1"));
    }

    #[test]
    fn what_an_init_container_alone_has_is_held() {
        let unit = |resource: &str, pod: &str, container: &str, id: &str| Held {
            container: container.into(),
            resource: resource.into(),
            ..held(pod, &[id])
        };
        let listed = PodDevices {
            name: "train-0".into(),
            held: vec![unit("nvidia.com/gpu", "train-0", "main", "GPU-1")],
            ..PodDevices::default()
        };
        let kept = Kept {
            file: FileId::of(Path::new("/")).unwrap(),
            owners: Arc::default(),
            held: Arc::new(vec![
                unit("nvidia.com/gpu", "u1", "main", "GPU-1"),
                unit("rdma/a", "u1", "check", "0000:3b:00.2"),
                // It may have ended.
                unit("rdma/a", "u2", "main", "0000:3b:00.3"),
            ]),
        };
        let call =
            |kept| AllocatedUnits::of_call(&Ok(vec![listed.clone()]), &kept, "n1", AskedAt::now());
        let found = call(Ok(Some(kept))).unwrap();
        let holder = found.holder("rdma/a", "0000:3b:00.2").unwrap();
        assert_eq!(
            (holder.pod.as_str(), holder.container.as_str()),
            ("train-0", "check")
        );
        assert_eq!(found.hcas().len(), 1);
        assert_eq!(call(Err("it is damaged".into())).unwrap().hcas().len(), 0);
    }

    #[test]
    fn a_pod_keeps_its_name_while_the_checkpoint_says_the_same() {
        let known = AllocatedUnits::listed(vec![held("train-0", &["x", "y"])], AskedAt::now());
        let holder = |held: Vec<Held>| {
            let kept = AllocatedUnits {
                by_uid: true,
                ..AllocatedUnits::listed(held, AskedAt::now())
            };
            let read = kept.with_names_of(Some(&known));
            read.units["rdma/a"].values().next().unwrap().pod.clone()
        };
        assert_eq!(holder(vec![held("uid", &["x", "y"])]), "train-0");
        assert_eq!(holder(vec![held("uid", &["x"])]), "uid");
        // What is listed comes before what the checkpoint has of the same unit.
        assert_eq!(
            holder(vec![held("train-1", &["x"]), held("uid", &["x", "z"])]),
            "train-1"
        );
    }
}
