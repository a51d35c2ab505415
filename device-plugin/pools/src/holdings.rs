//! Which pods hold which units, by the kubelet's list (PodResources) and by its checkpoint.
//!
//! Not known is not the same as nobody: until one of them has answered there are no [`Holdings`].
//!
//! A unit is freed on evidence alone. A kubelet that has just started lists no pod of the API server
//! until that has answered (`pkg/kubelet/kubelet_pods.go`, `GetPods`), then adds the pods one by one,
//! each when the one before is admitted (`pkg/kubelet/kubelet.go`, `HandlePodAdditions`). Their
//! containers run all the time. So a unit that a list lacks is held until
//!
//! - the checkpoint lacks it as well, or
//! - another list, at least [`CONFIRMATION_PERIOD`] later, lacks it as well: the checkpoint has the
//!   units of ended pods until the kubelet writes it again.
//!
//! A list without a pod of the API server shows what is held, and not what is free.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::{HcaId, UnitId};
use kubelet_api::client::PodDevices;

use super::checkpoint::{Checkpoint, Owners};
use crate::config::ResourceName;

/// How far apart two lists are at least that free a unit which the checkpoint still has.
const CONFIRMATION_PERIOD: Duration = Duration::from_secs(15);

/// Units that pods hold.
#[derive(Debug, Clone)]
pub struct Holdings {
    units: Units,
    asked: Instant,
    /// UIDs of the holders; `None` where the checkpoint was not read.
    owners: Option<Arc<Owners>>,
    /// What the kubelet's answer lacks: it did not answer, lists no pods yet, or its checkpoint cannot
    /// be read.
    pub fault: Option<String>,
}

/// By resource and ID.
type Units = BTreeMap<String, BTreeMap<String, HeldUnit>>;

#[derive(Debug, Clone, PartialEq, Eq)]
struct HeldUnit {
    holder: Holder,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Listed, or in the checkpoint while there is no whole list.
    Held,
    /// Not listed since then.
    Unlisted(Instant),
    /// Not listed twice. Kept as long as the checkpoint has it.
    Free,
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

impl Holder {
    fn of_uid(uid: &str, container: &str) -> Self {
        Self {
            namespace: String::new(),
            pod: uid.to_owned(),
            container: container.to_owned(),
        }
    }
}

impl Holdings {
    /// What the kubelet's list and its checkpoint show, after what was known `before`. `node` is the
    /// node's name, which is in the names of static pods.
    ///
    /// # Errors
    /// Nothing was known before, and neither shows anything: what came back instead of an answer.
    pub fn update(
        before: Option<&Self>,
        list: &Result<Vec<PodDevices>, String>,
        checkpoint: &Result<Option<Checkpoint>, String>,
        node: &str,
        asked: Instant,
    ) -> Result<Self, String> {
        let pods = list.as_deref().unwrap_or_default();
        let is_whole = !pods.iter().all(|pod| is_static(pod, node));
        let none = "the kubelet lists no pod of the API server yet".to_owned();
        let none = (list.is_ok() && !is_whole).then_some(&none);
        let faults = [list.as_ref().err(), none, checkpoint.as_ref().err()];
        let faults: Vec<&str> = faults.into_iter().flatten().map(String::as_str).collect();
        let fault = (!faults.is_empty()).then(|| faults.join(", and "));
        let is_answer = is_whole || checkpoint.is_ok();
        let asked = match (is_answer, before) {
            (true, _) => asked,
            (false, Some(before)) => before.asked,
            (false, None) => return Err(fault.unwrap_or_default()),
        };
        let kept = checkpoint.as_ref().ok().and_then(Option::as_ref);
        let owners = kept.map(|kept| kept.owners.clone());
        let mut units = listed_units(pods, owners.as_deref());
        let mut add = |resource: &str, id: &str, unit: HeldUnit| {
            let of_resource = units.entry(resource.to_owned()).or_default();
            of_resource.entry(id.to_owned()).or_insert(unit);
        };
        let not_listed = match is_whole {
            true => State::Unlisted(asked),
            false => State::Held,
        };
        for (before, resource, id, was) in before.iter().flat_map(|before| before.iter()) {
            let uids = |of: &Option<Arc<Owners>>| {
                of.as_ref().map(|owners| owners.uids(resource, id).cloned())
            };
            let state = match (uids(&owners), was.state) {
                // The checkpoint lacks it, too.
                (Some(None), _) | (None, State::Free) => continue,
                // Another pod's by now.
                (Some(now), _) if uids(&before.owners).is_some_and(|was| was != now) => continue,
                (_, State::Held) => not_listed,
                (_, State::Unlisted(since))
                    if is_whole && asked.duration_since(since) >= CONFIRMATION_PERIOD =>
                {
                    State::Free
                }
                (_, state) => state,
            };
            let holder = was.holder.clone();
            add(resource, id, HeldUnit { holder, state });
        }
        for (resource, id, uids) in owners.iter().flat_map(|owners| owners.iter()) {
            if let Some((uid, container)) = uids.first_key_value() {
                let holder = Holder::of_uid(uid, container);
                let state = not_listed;
                add(resource, id, HeldUnit { holder, state });
            }
        }
        Ok(Self {
            units,
            asked,
            owners,
            fault,
        })
    }

    fn iter(&self) -> impl Iterator<Item = (&Self, &str, &str, &HeldUnit)> {
        self.units.iter().flat_map(move |(resource, units)| {
            units
                .iter()
                .map(move |(id, unit)| (self, resource.as_str(), id.as_str(), unit))
        })
    }

    /// Units that are held: resource, ID, holder.
    fn held(&self) -> impl Iterator<Item = (&str, &str, &Holder)> {
        let held = self.iter().filter(|(.., unit)| unit.state != State::Free);
        held.map(|(_, resource, id, unit)| (resource, id, &unit.holder))
    }

    /// Units of a resource, with their holders.
    pub fn of(&self, resource: &ResourceName) -> impl Iterator<Item = (&str, &Holder)> {
        let units = self.units.get(resource.as_str()).into_iter().flatten();
        let held = units.filter(|(_, unit)| unit.state != State::Free);
        held.map(|(id, unit)| (id.as_str(), &unit.holder))
    }

    /// The pod that a unit is listed for.
    pub fn holder(&self, resource: &str, unit: &str) -> Option<&Holder> {
        let unit = self.units.get(resource)?.get(unit)?;
        (unit.state == State::Held).then_some(&unit.holder)
    }

    /// Units of a resource without their holders.
    pub fn units(&self, resource: &ResourceName) -> BTreeSet<String> {
        self.of(resource).map(|(unit, _)| unit.to_owned()).collect()
    }

    /// Resources of which something is held.
    pub fn resources(&self) -> impl Iterator<Item = ResourceName> {
        let resources: BTreeSet<&str> = self.held().map(|(resource, ..)| resource).collect();
        resources
            .into_iter()
            .filter_map(|name| ResourceName::parse(name).ok())
    }

    /// The UID of the only pod that has all of these units, by the checkpoint.
    pub fn uid(&self, resource: &str, units: &[String]) -> Option<String> {
        self.owners.as_ref()?.uid(resource, units)
    }

    /// When the kubelet was asked: what it allocated later is not in here.
    pub fn asked(&self) -> Instant {
        self.asked
    }

    /// Whether the same pods hold the same units, and the same of them are listed.
    pub fn says_the_same(&self, other: &Self) -> bool {
        self.units == other.units
    }

    /// HCAs that units in pods' hands name, whichever resource and device plugin they are of: the
    /// SR-IOV device plugin's units are PCI addresses, too. Units of a whole pool and slots name none.
    pub fn hcas(&self) -> BTreeMap<HcaId, Vec<HcaAllocation>> {
        let mut hcas: BTreeMap<HcaId, Vec<HcaAllocation>> = BTreeMap::new();
        for (resource, id, holder) in self.held() {
            let (hca, exclusive) = match id.parse() {
                Ok(UnitId::Exclusive(hca)) => (hca, true),
                Ok(UnitId::Shared { hca, .. }) => (hca, false),
                Ok(UnitId::Pool { .. } | UnitId::Slot { .. }) | Err(_) => continue,
            };
            hcas.entry(hca).or_default().push(HcaAllocation {
                resource: resource.to_owned(),
                exclusive,
                late: false,
                holder: holder.clone(),
            });
        }
        hcas
    }

    /// UIDs of the pods that have HCAs for themselves, by the checkpoint.
    pub fn exclusive_uids(&self) -> impl Iterator<Item = (HcaId, String)> {
        let owned = self.owners.iter().flat_map(|owners| owners.iter());
        owned.flat_map(|(_, id, uids)| {
            let hca = match id.parse() {
                Ok(UnitId::Exclusive(hca)) => Some(hca),
                _ => None,
            };
            let uids = uids.keys().cloned();
            hca.into_iter()
                .flat_map(move |hca| uids.clone().map(move |uid| (hca.clone(), uid)))
        })
    }

    /// Who holds units that stand for all HCAs of a pool, by resource.
    pub fn of_whole_pools(&self) -> impl Iterator<Item = (&str, &Holder)> {
        let of_pool = |id: &str| matches!(id.parse(), Ok(UnitId::Pool { .. }));
        let units = self.held().filter(move |(_, id, _)| of_pool(id));
        units.map(|(resource, _, holder)| (resource, holder))
    }

    /// Whether the checkpoint has a unit as that of pods with other UIDs alone.
    pub fn is_of_another_uid(&self, uid: &str, resource: &str, unit: &str) -> bool {
        let owners = self.owners.as_ref();
        let uids = owners.and_then(|owners| owners.uids(resource, unit));
        uids.is_some_and(|uids| !uids.contains_key(uid))
    }
}

/// What is listed, with what the checkpoint has of the listed pods besides: the list lacks init
/// containers that ended. A pod is recognized by a unit that is its alone.
fn listed_units(pods: &[PodDevices], owners: Option<&Owners>) -> Units {
    let mut units = Units::new();
    let mut add = |resource: &str, id: &str, holder: &Holder| {
        let of_resource = units.entry(resource.to_owned()).or_default();
        of_resource
            .entry(id.to_owned())
            .or_insert_with(|| HeldUnit {
                holder: holder.clone(),
                state: State::Held,
            });
    };
    let mut known: BTreeMap<&str, &PodDevices> = BTreeMap::new();
    for pod in pods {
        for held in &pod.held {
            let holder = Holder {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                container: held.container.clone(),
            };
            for id in &held.ids {
                add(&held.resource, id, &holder);
                let uids = owners.and_then(|owners| owners.uids(&held.resource, id));
                if let Some((uid, _)) = uids
                    .filter(|uids| uids.len() == 1)
                    .and_then(|uids| uids.first_key_value())
                {
                    known.insert(uid, pod);
                }
            }
        }
    }
    for (resource, id, uids) in owners.into_iter().flat_map(Owners::iter) {
        for (uid, container) in uids {
            if let Some(pod) = known.get(uid.as_str()) {
                let holder = Holder {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.clone(),
                };
                add(resource, id, &holder);
            }
        }
    }
    units
}

/// Whether a pod is of a file on the node: its name ends with the node's name
/// (`pkg/kubelet/config/common.go`, `generatePodName`), in lower case.
fn is_static(pod: &PodDevices, node: &str) -> bool {
    let stem = pod.name.len().checked_sub(node.len());
    let stem = stem.and_then(|at| pod.name.split_at_checked(at));
    stem.is_some_and(|(stem, end)| stem.ends_with('-') && end.eq_ignore_ascii_case(node))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kubelet_api::client::Held;
    use node::file::FileId;

    use super::*;

    impl Holdings {
        pub fn with_owners(self, owners: Owners) -> Self {
            let owners = Some(Arc::new(owners));
            Self { owners, ..self }
        }

        /// What a whole list shows.
        pub fn listed(all: Vec<Held>, asked: Instant) -> Self {
            let mut pods: Vec<PodDevices> = all.into_iter().map(listed_pod).collect();
            pods.push(of_a_daemon_set());
            let checkpoint = Err("not read".to_owned());
            Self::update(None, &Ok(pods), &checkpoint, "n1", asked).unwrap()
        }
    }

    fn listed_pod(held: Held) -> PodDevices {
        PodDevices {
            namespace: held.namespace.clone(),
            name: held.pod.clone(),
            held: vec![held],
            claimed: Vec::new(),
        }
    }

    fn of_a_daemon_set() -> PodDevices {
        PodDevices {
            name: "node-network-x7k2p".into(),
            ..PodDevices::default()
        }
    }

    fn held(pod: &str, resource: &str, container: &str, ids: &[&str]) -> Held {
        Held {
            namespace: "ml".into(),
            pod: pod.into(),
            container: container.into(),
            resource: resource.into(),
            ids: ids.iter().map(ToString::to_string).collect(),
        }
    }

    /// A kubelet that is asked again and again.
    struct Kubelet {
        holdings: Option<Holdings>,
        started: Instant,
    }

    type Checkpointed<'c> = Result<&'c [(&'c str, &'c str, &'c str)], &'c str>;

    impl Kubelet {
        fn new() -> Self {
            Self {
                holdings: None,
                started: Instant::now(),
            }
        }

        /// Asks `seconds` after the start: pods with their units of rdma/a, or an error; UIDs with
        /// resource and unit. Returns what is held of rdma/a.
        fn ask(
            &mut self,
            seconds: u64,
            list: Result<&[(&str, &[&str])], &str>,
            checkpoint: Checkpointed<'_>,
        ) -> Vec<String> {
            let later = Duration::from_secs(seconds);
            let asked = self.started + later;
            let list = list.map_err(str::to_owned).map(|pods| {
                let pods = pods.iter();
                let pods = pods.map(|(pod, ids)| listed_pod(held(pod, "rdma/a", "main", ids)));
                pods.collect()
            });
            let checkpoint = checkpoint.map_err(str::to_owned).map(|entries| {
                Some(Checkpoint {
                    file: FileId::of(Path::new("/")).unwrap(),
                    owners: Arc::new(Owners::of(entries)),
                })
            });
            let before = self.holdings.as_ref();
            match Holdings::update(before, &list, &checkpoint, "n1", asked) {
                Ok(holdings) => self.holdings = Some(holdings),
                Err(_) => assert!(self.holdings.is_none()),
            }
            let resource = ResourceName::parse("rdma/a").unwrap();
            let units = self.holdings.iter().flat_map(|all| all.of(&resource));
            units
                .map(|(id, holder)| format!("{id} {}", holder.pod))
                .collect()
        }
    }

    const DAEMON: (&str, &[&str]) = ("node-network-x7k2p", &[]);

    #[test]
    fn units_are_found_with_their_holders() {
        let holdings = Holdings::listed(
            vec![
                held(
                    "train-0",
                    "rdma/a",
                    "worker",
                    &["0000:3b:00.2", "0000:3b:00.3"],
                ),
                held("train-0", "nvidia.com/gpu", "worker", &["GPU-1"]),
                held("train-0", "rdma/a", "worker", &["0000:3b:00.4"]),
                held(
                    "s",
                    "rdma/s",
                    "main",
                    &["0000:86:00.0_3e71787e_17", "pool_3e71787e_17"],
                ),
            ],
            Instant::now(),
        );
        let resource = ResourceName::parse("rdma/a").unwrap();
        let units: Vec<&str> = holdings.of(&resource).map(|(unit, _)| unit).collect();
        assert_eq!(units, ["0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"]);
        assert_eq!(holdings.of(&resource).next().unwrap().1.pod, "train-0");
        assert_eq!(holdings.resources().count(), 3);
        assert_eq!(holdings.of_whole_pools().count(), 1);
        let hcas = holdings.hcas();
        let exclusive: Vec<bool> = hcas.values().map(|all| all[0].exclusive).collect();
        assert_eq!(exclusive, [true, true, true, false]);
        let none = ResourceName::parse("rdma/b").unwrap();
        assert!(holdings.units(&none).is_empty());
    }

    #[test]
    fn a_unit_is_freed_by_two_lists_or_by_list_and_checkpoint() {
        let pod: (&str, &[&str]) = ("train-0", &["x"]);
        let has: Checkpointed<'_> = Ok(&[("u1", "rdma/a", "x")]);
        let damaged: Checkpointed<'_> = Err("it is damaged");
        for checkpoint in [has, damaged] {
            let mut kubelet = Kubelet::new();
            let mut ask = |seconds, pods: &[_]| kubelet.ask(seconds, Ok(pods), checkpoint);
            assert_eq!(ask(0, &[DAEMON, pod]), ["x train-0"]);
            assert_eq!(ask(10, &[DAEMON]), ["x train-0"]);
            assert_eq!(ask(24, &[DAEMON]), ["x train-0"]);
            // It was not listed yet.
            assert_eq!(ask(25, &[DAEMON, pod]), ["x train-0"]);
            assert_eq!(ask(26, &[DAEMON]), ["x train-0"]);
            assert_eq!(ask(41, &[DAEMON]), [""; 0]);
            // The kubelet has not written its checkpoint again.
            assert_eq!(ask(42, &[DAEMON]), [""; 0]);
            assert_eq!(ask(43, &[DAEMON, ("train-1", &["x"])]), ["x train-1"]);
        }
        let mut kubelet = Kubelet::new();
        kubelet.ask(0, Ok(&[DAEMON, pod]), has);
        assert_eq!(kubelet.ask(1, Ok(&[DAEMON]), Ok(&[])), [""; 0]);
    }

    #[test]
    fn what_is_not_an_answer_frees_nothing() {
        let pod: (&str, &[&str]) = ("train-0", &["x"]);
        let has: Checkpointed<'_> = Ok(&[("u1", "rdma/a", "x")]);
        let mut kubelet = Kubelet::new();
        // Not known.
        kubelet.ask(0, Err("no kubelet"), Err("no checkpoint"));
        kubelet.ask(0, Ok(&[("etcd-N1", &[])]), Err("no checkpoint"));
        assert!(kubelet.holdings.is_none());
        assert_eq!(kubelet.ask(1, Err("no kubelet"), has), ["x u1"]);
        assert_eq!(kubelet.ask(2, Ok(&[DAEMON, pod]), has), ["x train-0"]);
        kubelet.ask(3, Ok(&[DAEMON]), has);
        for seconds in [4, 60, 120] {
            for list in [
                Err("no kubelet"),
                Ok(&[][..]),
                Ok(&[("etcd-n1", &[][..])][..]),
            ] {
                let errors = kubelet.ask(seconds, list, Err("no checkpoint"));
                assert_eq!(errors, ["x train-0"], "{list:?}");
                assert_eq!(kubelet.ask(seconds, list, has), ["x train-0"], "{list:?}");
                let fault = &kubelet.holdings.as_ref().unwrap().fault;
                assert!(fault.is_some(), "{list:?}");
            }
        }
        assert_eq!(kubelet.ask(121, Err("no kubelet"), Ok(&[])), [""; 0]);
    }

    #[test]
    fn an_answer_is_as_old_as_what_was_read_last() {
        let mut kubelet = Kubelet::new();
        kubelet.ask(1, Ok(&[DAEMON]), Ok(&[]));
        let asked = |kubelet: &Kubelet| kubelet.holdings.as_ref().unwrap().asked();
        let before = asked(&kubelet);
        kubelet.ask(9, Err("no kubelet"), Err("no checkpoint"));
        assert_eq!(asked(&kubelet), before);
        kubelet.ask(10, Err("no kubelet"), Ok(&[]));
        assert!(asked(&kubelet) > before);
    }

    #[test]
    fn a_unit_that_went_over_to_another_pod_is_that_pods() {
        let mut kubelet = Kubelet::new();
        let first: Checkpointed<'_> = Ok(&[("u1", "rdma/a", "x")]);
        let second: Checkpointed<'_> = Ok(&[("u2", "rdma/a", "x")]);
        kubelet.ask(0, Ok(&[DAEMON, ("train-0", &["x"])]), first);
        kubelet.ask(1, Ok(&[DAEMON]), first);
        assert_eq!(kubelet.ask(2, Err("no kubelet"), second), ["x u2"]);
        // The list that lacks it is older than the second pod.
        assert_eq!(kubelet.ask(16, Ok(&[DAEMON]), second), ["x u2"]);
        assert_eq!(kubelet.ask(31, Ok(&[DAEMON]), second), [""; 0]);
    }

    #[test]
    fn what_an_init_container_alone_has_is_held() {
        let listed = listed_pod(held("train-0", "nvidia.com/gpu", "main", &["GPU-1"]));
        let owners = Owners::of(&[
            ("u1", "nvidia.com/gpu", "GPU-1"),
            ("u1", "rdma/a", "0000:3b:00.2"),
        ]);
        let units = listed_units(&[listed], Some(&owners));
        let unit = &units["rdma/a"]["0000:3b:00.2"];
        assert_eq!(unit.holder.pod, "train-0");
        assert_eq!(unit.state, State::Held);
    }
}
