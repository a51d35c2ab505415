//! When a binding ended. Pure.
//!
//! A binding is never freed for want of evidence. It is in use while the CNI plugin's journal has it.
//! After that the evidence is the kubelet's list: it shows the slot as allocated to another pod, or to
//! none. A pod whose network was removed may still run, and its containers have the device nodes.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use super::store::{Binding, Bindings};
use crate::kubelet::allocated::{AllocatedUnits, Holder};

/// A binding without record that is younger than this is left alone: the CNI call that made it may still run, and the
/// kubelet may list its pod a moment later. One that was created in the future is not young: after the clock was set
/// back it would be left alone for as long. It is freed after two lists, as any other.
const MIN_AGE_SECONDS: u64 = 60;

const NEWER_BINDING: &str = "its slot has a newer binding";

/// What the CNI plugin's journal has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Attached {
    /// Sandbox and HCA of every slot and every moved NIC.
    pub slots: BTreeSet<(String, String)>,
    /// Sandboxes of records that cannot be read, and may have any HCA.
    pub unreadable: BTreeSet<String>,
}

impl Attached {
    /// Whether a binding is in use by a record, or may be.
    pub(crate) fn has(&self, binding: &Binding) -> bool {
        let sandbox = binding.sandbox.clone().unwrap_or_default();
        self.unreadable.contains(&sandbox) || self.slots.contains(&(sandbox, binding.hca.clone()))
    }
}

/// Evidence that a binding is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Over {
    /// For a person.
    pub why: &'static str,
    /// When the kubelet was asked.
    listed: SystemTime,
}

impl Over {
    /// Whether it confirms what was seen before. A kubelet's list that is older than the binding says
    /// nothing about it, so a list is confirmed by another one only.
    pub(crate) fn confirms(&self, earlier: &Self) -> bool {
        self.listed != earlier.listed
    }
}

/// Why a binding is over, if it is: `held` is what the kubelet listed, `now` are seconds since 1970. The
/// caller waits until this is confirmed.
pub(crate) fn over(
    binding: &Binding,
    all: &Bindings,
    attached: &Attached,
    held: &AllocatedUnits,
    now: u64,
) -> Option<Over> {
    let is_young = (0..MIN_AGE_SECONDS).contains(&now.wrapping_sub(binding.created));
    if attached.has(binding) || is_young {
        return None;
    }
    let why = match is_superseded(binding, all) {
        true => NEWER_BINDING,
        false => why_ended(binding, held)?,
    };
    Some(Over {
        why,
        listed: held.asked().time,
    })
}

/// Why the pod of a binding does not have its slot any more, as far as one list of the kubelet shows it:
/// for a person, not for the release of the HCA.
pub(crate) fn ended(
    binding: &Binding,
    all: &Bindings,
    held: Option<&AllocatedUnits>,
) -> Option<&'static str> {
    if is_superseded(binding, all) {
        return Some(NEWER_BINDING);
    }
    // The list may have been made in the second in which the binding was.
    let created = Duration::from_secs(binding.created.saturating_add(1));
    let created = SystemTime::UNIX_EPOCH.checked_add(created)?;
    let held = held.filter(|held| held.asked().time > created)?;
    why_ended(binding, held)
}

/// Whether its slot was bound again since: the pod has a new sandbox, or the slot another pod. The CNI
/// plugin's journal had this one then, so that it stayed.
pub(crate) fn is_superseded(binding: &Binding, all: &Bindings) -> bool {
    let mut others = all.all.values();
    others.any(|other| other.unit == binding.unit && other.created > binding.created)
}

/// Whether one list of the kubelet is enough: its checkpoint was read and does not have the slot as the
/// pod's either, so that it is not a list of a kubelet that does not know all pods yet. The checkpoint
/// says nothing about a pod whose UID is not known.
pub(crate) fn is_given_up(binding: &Binding, held: &AllocatedUnits) -> bool {
    let (resource, unit) = (&binding.resource, &binding.unit);
    let uid = binding.pod.uid.as_deref();
    why_ended(binding, held).is_some() && uid.is_some_and(|uid| held.is_not_of(uid, resource, unit))
}

/// Why the pod of a binding does not have its slot any more, by a list of the kubelet that is newer than
/// the binding.
fn why_ended(binding: &Binding, held: &AllocatedUnits) -> Option<&'static str> {
    let (resource, unit) = (&binding.resource, &binding.unit);
    // A pod that was made anew has its predecessor's name.
    let is_of_another_uid = || {
        let uid = binding.pod.uid.as_deref();
        uid.is_some_and(|uid| held.is_of_another_uid(uid, resource, unit))
    };
    match held.holder(resource, unit) {
        None => Some("the kubelet lists no pod that holds its slot"),
        Some(holder) if is_of(binding, holder) && !is_of_another_uid() => None,
        Some(_) => Some("the kubelet lists its slot as another pod's"),
    }
}

/// A holder out of the kubelet's checkpoint has a UID for its name, and no namespace.
fn is_of(binding: &Binding, holder: &Holder) -> bool {
    match holder.namespace.as_str() {
        // A pod whose UID is not known may be this one.
        "" => binding
            .pod
            .uid
            .as_ref()
            .is_none_or(|uid| *uid == holder.pod),
        namespace => namespace == binding.pod.namespace && holder.pod == binding.pod.name,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kubelet_api::client::Held;
    use node_wire::Pod;

    use super::*;
    use crate::kubelet::allocated::AskedAt;
    use crate::kubelet::checkpoint::Owners;

    fn binding() -> Binding {
        let pod = Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: Some("u1".into()),
        };
        let hca = "0000:3b:00.0".parse().unwrap();
        Binding {
            resource: "rdma/nic".into(),
            created: 100,
            ..Binding::new(&hca, "slot_3e71787e_0", &pod, Some("s1"))
        }
    }

    /// What a kubelet lists that gave the slot to this pod, if to any.
    fn list(holder: Option<(&str, &str)>, asked: u64) -> AllocatedUnits {
        let held = holder.map(|(namespace, pod)| Held {
            namespace: namespace.into(),
            pod: pod.into(),
            container: "main".into(),
            resource: "rdma/nic".into(),
            ids: vec!["slot_3e71787e_0".into()],
        });
        let asked = AskedAt {
            time: SystemTime::UNIX_EPOCH + Duration::from_secs(asked),
            ..AskedAt::now()
        };
        AllocatedUnits::listed(held.into_iter().collect(), asked)
    }

    #[test]
    fn a_binding_is_over_on_evidence_alone() {
        let of = |slots: &[(&str, &str)]| Attached {
            slots: slots
                .iter()
                .map(|(s, hca)| ((*s).into(), (*hca).into()))
                .collect(),
            unreadable: BTreeSet::new(),
        };
        let attached = of(&[("s1", "0000:3b:00.0")]);
        let none = of(&[]);
        let other = of(&[("s1", "0000:3b:00.1"), ("s2", "0000:3b:00.0")]);
        let unreadable = Attached {
            unreadable: BTreeSet::from(["s1".to_owned()]),
            ..Attached::default()
        };
        let own = Some(("ml", "a"));
        for (journal, holder, now, is_over) in [
            // In the journal it is in use, whatever the kubelet says.
            (&attached, None, 1000, false),
            (&unreadable, None, 1000, false),
            // DEL was there. The pod may run without the network, and its containers have the nodes.
            (&none, own, 1000, false),
            (&other, own, 1000, false),
            (&none, Some(("", "u1")), 1000, false),
            (&none, None, 1000, true),
            (&other, None, 1000, true),
            (&none, Some(("ml", "b")), 1000, true),
            (&none, Some(("", "u2")), 1000, true),
            // An ADD that made it may still run.
            (&none, None, 159, false),
            // A clock that was set back.
            (&none, None, 50, true),
        ] {
            let verdict = over(
                &binding(),
                &Bindings::default(),
                journal,
                &list(holder, 0),
                now,
            );
            assert_eq!(
                verdict.is_some(),
                is_over,
                "{journal:?} {holder:?} {now}: {verdict:?}"
            );
        }
    }

    #[test]
    fn a_pod_of_the_same_name_with_another_uid_is_another_one() {
        let owners = |uid: &str| {
            let text = format!(
                r#"{{"Data": {{"PodDeviceEntries": [{{"PodUID": "{uid}", "ContainerName": "main",
                    "ResourceName": "rdma/nic", "DeviceIDs": ["slot_3e71787e_0"]}}]}}}}"#
            );
            Owners::parse(text.as_bytes()).unwrap()
        };
        for (uid, is_over) in [("u1", false), ("u2", true)] {
            let list = list(Some(("ml", "a")), 0).with_owners(owners(uid));
            let verdict = over(
                &binding(),
                &Bindings::default(),
                &Attached::default(),
                &list,
                1000,
            );
            assert_eq!(verdict.is_some(), is_over, "{uid}");
        }
    }

    /// The journal still had the earlier one when the slot was bound again.
    #[test]
    fn a_slot_that_was_bound_again_has_the_newer_binding_alone() {
        let newer = Binding {
            hca: "0000:3b:00.1".into(),
            sandbox: Some("s2".into()),
            created: 101,
            ..binding()
        };
        let all = [binding(), newer.clone()];
        let all = Bindings {
            all: all.map(|one| (one.hca.parse().unwrap(), one)).into(),
            ..Bindings::default()
        };
        let list = list(Some(("ml", "a")), 0);
        let none = Attached::default();
        assert!(over(&binding(), &all, &none, &list, 1000).is_some());
        assert!(over(&newer, &all, &none, &list, 1000).is_none());
        let attached = Attached {
            slots: BTreeSet::from([("s1".to_owned(), binding().hca)]),
            ..Attached::default()
        };
        assert!(over(&binding(), &all, &attached, &list, 1000).is_none());
    }

    #[test]
    fn a_dead_pods_binding_is_shown_as_ended() {
        let all = Bindings::default();
        let ended = |list: Option<&AllocatedUnits>| ended(&binding(), &all, list);
        let other_uid = || Owners::of(&[("u2", "rdma/nic", "slot_3e71787e_0")]);
        let own = list(Some(("ml", "a")), 200);
        assert_eq!(ended(None), None);
        assert_eq!(ended(Some(&own)), None);
        assert!(ended(Some(&own.with_owners(other_uid()))).is_some());
        assert!(ended(Some(&list(None, 200))).is_some());
        // A list that is older than the binding does not have its pod yet.
        assert_eq!(ended(Some(&list(None, 100))), None);
        let future = Binding {
            created: u64::MAX,
            ..binding()
        };
        assert_eq!(super::ended(&future, &all, Some(&list(None, 200))), None);
    }

    #[test]
    fn a_list_that_the_checkpoint_contradicts_is_not_enough() {
        for (uid, is_over) in [("u1", false), ("u2", true)] {
            let owners = Owners::of(&[(uid, "rdma/nic", "slot_3e71787e_0")]);
            let list = list(None, 0).with_owners(owners);
            assert_eq!(is_given_up(&binding(), &list), is_over, "{uid}");
        }
        let with_checkpoint = |list: AllocatedUnits| list.with_owners(Owners::default());
        let lacking = with_checkpoint(list(None, 0));
        assert!(is_given_up(&binding(), &lacking));
        let listed = with_checkpoint(list(Some(("ml", "a")), 0));
        assert!(!is_given_up(&binding(), &listed));
        // A checkpoint that was not read agrees with nothing.
        assert!(!is_given_up(&binding(), &list(None, 0)));
        let mut without_uid = binding();
        without_uid.pod.uid = None;
        assert!(!is_given_up(&without_uid, &lacking));
    }

    #[test]
    fn one_list_of_the_kubelet_is_no_evidence_however_often_it_is_read() {
        let seen = |asked| {
            let list = list(None, asked);
            over(
                &binding(),
                &Bindings::default(),
                &Attached::default(),
                &list,
                1000,
            )
            .unwrap()
        };
        // The container started after this answer, and the kubelet has not answered since.
        assert!(!seen(50).confirms(&seen(50)));
        assert!(seen(990).confirms(&seen(50)));
    }
}
