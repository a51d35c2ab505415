//! Which units a pod holds, decided on what the kubelet lists and what its checkpoint says.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kubelet_api::client::{Held, PodDevices};
use node_wire::{Allocation, ClaimedDevice, Failure, FailureKind, Pod, PodUnits};

use pools::checkpoint::Owners;

/// What was read for a question.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// The kubelet's list.
    pub pods: Vec<PodDevices>,
    /// Owners by the kubelet's checkpoint, read after the list; or why it cannot be read.
    pub owners: Result<Arc<Owners>, String>,
}

/// The units of a pod. HCAs are not named yet.
///
/// With a UID and a checkpoint, only units that the checkpoint gives to that UID are listed, and
/// those that it does not know, which makes the answer an unchecked one.
///
/// # Errors
/// The pod is unknown, is another one of the same name, or is one of several.
pub(crate) fn pod_units(pod: &Pod, view: &View) -> Result<PodUnits, Failure> {
    let named = view.pods.iter();
    let named = named.filter(|one| one.namespace == pod.namespace && one.name == pod.name);
    let named: Vec<&PodDevices> = named.collect();
    if named.is_empty() {
        return Err(Failure::new(
            FailureKind::UnknownPod,
            format!("the kubelet lists no pod {pod}"),
        ));
    }
    let held = named.iter().flat_map(|listed| &listed.held);
    let units = held.flat_map(|held| held.ids.iter().map(move |id| (held, id.as_str())));
    let (units, unchecked) = match (&pod.uid, &view.owners) {
        (Some(uid), Ok(owners)) => of_uid(pod, uid, owners, units)?,
        (None, _) => (units.collect(), Some("the question has no UID".to_owned())),
        (Some(_), Err(why)) => (units.collect(), Some(why.clone())),
    };
    // Of two pods of one name, nothing says whose claims these are.
    let claimed = match (named.as_slice(), &unchecked) {
        ([only], _) => only.claimed.as_slice(),
        (_, None) => &[],
        (several, Some(why)) => {
            return Err(Failure::new(
                FailureKind::AmbiguousPod,
                format!(
                    "the kubelet lists {} pods {}/{}, and nothing shows which one is meant: {why}",
                    several.len(),
                    pod.namespace,
                    pod.name
                ),
            ));
        }
    };
    let claims = claimed.iter().map(|one| ClaimedDevice {
        container: one.container.clone(),
        driver: one.driver.clone(),
        device: one.device.clone(),
    });
    Ok(PodUnits {
        uid_checked: unchecked.is_none(),
        uid_note: unchecked,
        allocations: allocations(units),
        claims: claims.collect(),
    })
}

/// A unit's ID, and what it is listed in.
type Unit<'v> = (&'v Held, &'v str);

/// The units of a UID by the checkpoint, and those that it does not know; then also why they are not
/// checked.
fn of_uid<'v>(
    pod: &Pod,
    uid: &str,
    owners: &Owners,
    units: impl Iterator<Item = Unit<'v>>,
) -> Result<(Vec<Unit<'v>>, Option<String>), Failure> {
    let (mut own, mut unknown, mut foreign) = (Vec::new(), Vec::new(), false);
    for (held, id) in units {
        match owners.uids(&held.resource, id) {
            Some(uids) if uids.contains_key(uid) => own.push((held, id)),
            Some(_) => foreign = true,
            None => unknown.push((held, id)),
        }
    }
    if own.is_empty() && unknown.is_empty() && foreign {
        return Err(Failure::new(
            FailureKind::AnotherPod,
            format!(
                "the kubelet's checkpoint gives the units of pod {}/{} to another pod of this name, \
                 and none of them to UID {uid}",
                pod.namespace, pod.name
            ),
        ));
    }
    let why = "the kubelet's checkpoint does not have all of these units";
    let unchecked = (!unknown.is_empty()).then(|| why.to_owned());
    own.extend(unknown);
    Ok((own, unchecked))
}

/// The pod that holds these units of a resource in one container. It has a UID where the kubelet's
/// checkpoint has one for all of them.
///
/// # Errors
/// The kubelet lists none or several.
pub(crate) fn holder(resource: &str, ids: &[String], view: &View) -> Result<Pod, Failure> {
    let holds = |listed: &&PodDevices| {
        // A container's devices with another NUMA node are an entry of their own.
        let mut of_containers: BTreeMap<&str, HashSet<&String>> = BTreeMap::new();
        for held in listed.held.iter().filter(|held| held.resource == resource) {
            let own = of_containers.entry(&held.container).or_default();
            own.extend(&held.ids);
        }
        let mut containers = of_containers.values();
        containers.any(|own| ids.iter().all(|id| own.contains(id)))
    };
    let holders: Vec<&PodDevices> = view.pods.iter().filter(holds).collect();
    let units = ids.join(", ");
    match holders.as_slice() {
        [one] => Ok(Pod {
            namespace: one.namespace.clone(),
            name: one.name.clone(),
            uid: view
                .owners
                .as_ref()
                .ok()
                .and_then(|owners| owners.uid(resource, ids)),
        }),
        [] => Err(Failure::new(
            FailureKind::UnknownPod,
            format!(
                "the kubelet lists no container that has {units} of {resource}; it lists app \
                 containers and init containers that restart, so ask for the resource there and not \
                 in an init container alone"
            ),
        )),
        several => Err(Failure::new(
            FailureKind::AmbiguousPod,
            format!(
                "the kubelet lists {} pods that have {units} of {resource}",
                several.len()
            ),
        )),
    }
}

/// One entry for each container and resource, in the kubelet's order, each unit once.
fn allocations(units: Vec<Unit<'_>>) -> Vec<Allocation> {
    let mut entries: Vec<Allocation> = Vec::new();
    let mut places: HashMap<(&str, &str), usize> = HashMap::new();
    let mut listed: HashSet<(usize, &str)> = HashSet::new();
    for (held, id) in units {
        let place = places.entry((&held.container, &held.resource));
        let at = *place.or_insert_with(|| {
            entries.push(Allocation {
                container: held.container.clone(),
                resource: held.resource.clone(),
                units: Vec::new(),
                hcas: None,
                pool: None,
            });
            entries.len() - 1
        });
        if let Some(entry) = entries.get_mut(at).filter(|_| listed.insert((at, id))) {
            entry.units.push(id.to_owned());
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(uid: Option<&str>) -> Pod {
        Pod {
            namespace: "ml".into(),
            name: "train-0".into(),
            uid: uid.map(str::to_owned),
        }
    }

    fn listed(name: &str, held: &[(&str, &str, &[&str])]) -> PodDevices {
        let held = held.iter().map(|(container, resource, ids)| Held {
            namespace: "ml".into(),
            pod: name.into(),
            container: (*container).into(),
            resource: (*resource).into(),
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
        });
        PodDevices {
            namespace: "ml".into(),
            name: name.into(),
            held: held.collect(),
            claimed: Vec::new(),
        }
    }

    fn view(pods: Vec<PodDevices>, owners: &[(&str, &str, &[&str])]) -> View {
        let devices: Vec<_> = owners
            .iter()
            .flat_map(|(uid, resource, ids)| ids.iter().map(move |id| (*uid, *resource, *id)))
            .collect();
        View {
            pods,
            owners: Ok(Arc::new(Owners::of(&devices))),
        }
    }

    fn without_checkpoint(pods: Vec<PodDevices>) -> View {
        View {
            pods,
            owners: Err("the kubelet's checkpoint /x cannot be read: no such file".into()),
        }
    }

    fn units(answer: &PodUnits) -> Vec<(&str, &str, Vec<&str>)> {
        let entries = answer.allocations.iter();
        entries
            .map(|entry| {
                let units = entry.units.iter().map(String::as_str).collect();
                (entry.container.as_str(), entry.resource.as_str(), units)
            })
            .collect()
    }

    fn kind(answer: Result<PodUnits, Failure>) -> FailureKind {
        answer.unwrap_err().kind
    }

    #[test]
    fn units_of_every_container_and_plugin_are_listed_once() {
        let pods = vec![
            listed("other", &[("c", "rdma/a", &["w"])]),
            listed(
                "train-0",
                &[
                    ("a", "rdma/a", &["x"]),
                    ("a", "rdma/a", &["y"]),
                    // The same device again, for its second NUMA node.
                    ("a", "rdma/a", &["x"]),
                    ("a", "nvidia.com/gpu", &["GPU-1"]),
                    ("b", "rdma/a", &["z"]),
                ],
            ),
        ];
        let owners: &[(_, _, &[_])] = &[
            ("u1", "rdma/a", &["x", "y", "z"]),
            ("u1", "nvidia.com/gpu", &["GPU-1"]),
            ("u9", "rdma/a", &["w"]),
        ];
        let answer = pod_units(&asked(Some("u1")), &view(pods, owners)).unwrap();
        assert!(answer.uid_checked);
        assert_eq!(
            units(&answer),
            [
                ("a", "rdma/a", vec!["x", "y"]),
                ("a", "nvidia.com/gpu", vec!["GPU-1"]),
                ("b", "rdma/a", vec!["z"]),
            ]
        );
    }

    #[test]
    fn pod_without_units_holds_none_and_an_unlisted_pod_is_unknown() {
        let view = view(vec![listed("train-0", &[])], &[("u9", "rdma/a", &["w"])]);
        let answer = pod_units(&asked(Some("u1")), &view).unwrap();
        assert_eq!((answer.uid_checked, units(&answer)), (true, vec![]));
        let elsewhere = Pod {
            namespace: "other".into(),
            ..asked(None)
        };
        assert_eq!(kind(pod_units(&elsewhere, &view)), FailureKind::UnknownPod);
    }

    #[test]
    fn units_of_a_namesake_are_not_given_to_this_uid() {
        let held: &[(_, _, &[_])] = &[("a", "rdma/a", &["x", "y"])];
        let one = vec![listed("train-0", held)];
        let owners: &[(_, _, &[_])] = &[("u1", "rdma/a", &["x", "y"])];
        let another = pod_units(&asked(Some("u2")), &view(one.clone(), owners));
        assert_eq!(kind(another), FailureKind::AnotherPod);
        // A unit that went over from the one to the other is the new one's.
        let owners: &[(_, _, &[_])] = &[("u1", "rdma/a", &["x"]), ("u2", "rdma/a", &["y"])];
        let answer = pod_units(&asked(Some("u2")), &view(one.clone(), owners)).unwrap();
        assert_eq!(units(&answer), [("a", "rdma/a", vec!["y"])]);
        // Two of one name, as after a forced deletion: the checkpoint distinguishes them.
        let two = vec![
            listed("train-0", &[("a", "rdma/a", &["x"])]),
            listed("train-0", &[("a", "rdma/a", &["y"])]),
        ];
        let answer = pod_units(&asked(Some("u2")), &view(two.clone(), owners)).unwrap();
        assert_eq!(units(&answer), [("a", "rdma/a", vec!["y"])]);
        let undecided = [
            pod_units(&asked(None), &view(two.clone(), owners)),
            pod_units(&asked(Some("u2")), &without_checkpoint(two.clone())),
            pod_units(&asked(Some("u2")), &view(two, &[("u1", "rdma/a", &["x"])])),
        ];
        for answer in undecided {
            assert_eq!(kind(answer), FailureKind::AmbiguousPod);
        }
    }

    #[test]
    fn uid_that_cannot_be_checked_is_stated() {
        let one = vec![listed("train-0", &[("a", "rdma/a", &["x"])])];
        let no_uid = pod_units(&asked(None), &view(one.clone(), &[])).unwrap();
        assert_eq!(no_uid.uid_note.as_deref(), Some("the question has no UID"));
        let unreadable = pod_units(&asked(Some("u1")), &without_checkpoint(one.clone())).unwrap();
        let note = unreadable.uid_note.as_deref().unwrap();
        assert!(note.contains("/x cannot be read: no such file"), "{note}");
        // A checkpoint that knows nothing of the unit shows nothing.
        let silent = view(one, &[("u2", "rdma/a", &["w"])]);
        let silent = pod_units(&asked(Some("u1")), &silent).unwrap();
        for answer in [no_uid, unreadable, silent] {
            assert!(!answer.uid_checked && answer.uid_note.is_some());
            assert_eq!(units(&answer), [("a", "rdma/a", vec!["x"])]);
        }
    }
}
