//! When a binding ended without a DEL that reached this daemon. Pure.
//!
//! A binding is never freed for want of evidence. Of a pod with a network attachment the evidence is
//! the CNI plugin's journal: a record was there and is not any more, so DEL has returned the
//! devices. Of others it is the kubelet's list: it shows the slot as allocated to another pod, or to
//! none, and a later list does, too.

use std::collections::BTreeSet;
use std::time::SystemTime;

use super::store::{Binding, Stage};
use crate::kubelet::allocated::Holder;

/// A binding without record that is younger than this is left alone: the CNI call that made it may still run, and the
/// kubelet may list its pod a moment later.
const MIN_AGE_SECONDS: u64 = 60;

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

/// What is known beside the binding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts<'a> {
    /// What the journal has.
    pub attached: &'a Attached,
    /// When the kubelet was asked who holds what, and who holds the slot by its answer; none if it
    /// has not answered.
    pub listed: Option<(SystemTime, Option<&'a Holder>)>,
    /// The kubelet's checkpoint has the slot, and not as one of the pod with the binding's UID: a pod that
    /// was made anew has its predecessor's name.
    pub is_of_another_uid: bool,
    /// Seconds since 1970.
    pub now: u64,
}

/// Evidence that a binding is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Over {
    /// For a person.
    pub why: &'static str,
    /// When the kubelet was asked whose list is the evidence; none where the journal is.
    listed: Option<SystemTime>,
}

impl Over {
    /// Whether it confirms what was seen before. A kubelet's list that is older than the binding says
    /// nothing about it, so a list is confirmed by another one only.
    pub(crate) fn confirms(&self, earlier: &Self) -> bool {
        self.listed.is_none() || self.listed != earlier.listed
    }
}

/// Why a binding is over, if it is. The caller waits until this is confirmed.
pub(crate) fn over(binding: &Binding, facts: Facts<'_>) -> Option<Over> {
    if facts.attached.has(binding) {
        return None;
    }
    let over = |why, listed| Some(Over { why, listed });
    if was_detached(binding, facts.attached) {
        return over("its attachment was undone", None);
    }
    if (0..MIN_AGE_SECONDS).contains(&facts.now.wrapping_sub(binding.created)) {
        return None;
    }
    let (asked, holder) = facts.listed?;
    match holder {
        None => over("the kubelet lists no pod that holds its slot", Some(asked)),
        Some(holder) if is_of(binding, holder) && !facts.is_of_another_uid => None,
        Some(_) => over("the kubelet lists its slot as another pod's", Some(asked)),
    }
}

/// Whether the CNI plugin has returned the devices: its record was there when the binding got its
/// stage, and is not any more.
pub(crate) fn was_detached(binding: &Binding, attached: &Attached) -> bool {
    binding.stage == Stage::Attached && !attached.has(binding)
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
    use node_wire::Pod;

    use super::*;

    fn binding(stage: Stage) -> Binding {
        let pod = Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: Some("u1".into()),
        };
        let hca = "0000:3b:00.0".parse().unwrap();
        Binding {
            stage,
            created: 100,
            ..Binding::new(&hca, "slot_3e71787e_0", &pod, Some("s1"))
        }
    }

    fn holder(namespace: &str, pod: &str) -> Holder {
        Holder {
            namespace: namespace.into(),
            pod: pod.into(),
            container: "main".into(),
        }
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
        let own = holder("ml", "a");
        let (by_uid, foreign_uid) = (holder("", "u1"), holder("", "u2"));
        let foreign = holder("ml", "b");
        use Stage::{Bound, Started};
        const ATTACHED: Stage = Stage::Attached;
        for (stage, journal, kubelet, now, is_over) in [
            // In the journal it is in use, whatever the kubelet says.
            (ATTACHED, &attached, Some(None), 1000, false),
            (Bound, &attached, Some(None), 1000, false),
            (ATTACHED, &unreadable, Some(None), 1000, false),
            // DEL was there, and the daemon was not.
            (ATTACHED, &none, Some(Some(&own)), 1000, true),
            (ATTACHED, &other, None, 1000, true),
            (ATTACHED, &none, Some(None), 150, true),
            // An ADD that died before its record: the pod's next sandbox binds anew.
            (Bound, &none, Some(Some(&own)), 1000, false),
            (Bound, &none, Some(None), 1000, true),
            (Bound, &none, Some(None), 159, false),
            (Bound, &none, Some(Some(&foreign)), 1000, true),
            (Bound, &none, None, 1000, false),
            (Started, &none, Some(Some(&own)), 1000, false),
            (Started, &none, Some(Some(&by_uid)), 1000, false),
            (Started, &none, Some(Some(&foreign_uid)), 1000, true),
            (Started, &none, Some(None), 1000, true),
            (Started, &none, None, 1000, false),
            // A clock that was set back.
            (Bound, &none, Some(None), 50, true),
        ] {
            let facts = Facts {
                attached: journal,
                listed: kubelet.map(|holder| (SystemTime::UNIX_EPOCH, holder)),
                is_of_another_uid: false,
                now,
            };
            let verdict = over(&binding(stage), facts);
            assert_eq!(
                verdict.is_some(),
                is_over,
                "{stage:?} {facts:?}: {verdict:?}"
            );
            // Of a pod of the same name and another UID it is over, unless the journal has it.
            let facts = Facts {
                is_of_another_uid: true,
                ..facts
            };
            let is_held = matches!(kubelet, Some(Some(_)));
            let is_over = is_over || (is_held && std::ptr::eq(journal, &none));
            assert_eq!(over(&binding(stage), facts).is_some(), is_over);
        }
    }

    #[test]
    fn one_list_of_the_kubelet_is_no_evidence_however_often_it_is_read() {
        let none = Attached::default();
        let seen = |stage, asked: u64| {
            let asked = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(asked);
            let facts = Facts {
                attached: &none,
                listed: Some((asked, None)),
                is_of_another_uid: false,
                now: 1000,
            };
            over(&binding(stage), facts).unwrap()
        };
        // The container started after this answer, and the kubelet has not answered since.
        let stale = seen(Stage::Started, 50);
        assert!(!stale.confirms(&stale));
        assert!(seen(Stage::Started, 990).confirms(&stale));
        // The journal needs no list.
        let undone = seen(Stage::Attached, 50);
        assert!(undone.confirms(&undone));
    }
}
