//! A binding: which HCA a slot of a pod became.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use crate::words::word;
use hca::HcaId;
use node_wire::Pod;
use node_wire::status::BindingStatus;
pub use node_wire::status::{RefusedBinding, ServedGpu};
use serde::{Deserialize, Serialize};

/// The version of the files.
pub const VERSION: u32 = 1;

/// An HCA and the slot that it is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Binding {
    /// The version of the file.
    pub version: u32,
    /// The HCA.
    pub hca: HcaId,
    /// The slot.
    pub unit: String,
    /// The resource that the slot is of.
    pub resource: String,
    /// Name of the container that asked for it.
    pub container: String,
    /// The pod.
    pub pod: Pod,
    /// The sandbox that it was bound for; none where the pod has no network attachment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// How far it is.
    pub stage: Stage,
    /// Seconds since 1970 when it was bound, or later: see [`Bindings::next_created`].
    pub created: u64,
    /// The HCA's rail.
    pub rail: u32,
    /// The GPUs that it serves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ServedGpu>,
    /// The index of its interface's GID, once it is attached and as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u32>,
    /// The pod's cgroup below that of the node, once it was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Since when this process knows it: what the kubelet said before is not about it.
    #[serde(skip)]
    pub since: Since,
}

/// A moment that makes no difference between two bindings; none in a file.
#[derive(Debug, Clone, Copy, Default)]
pub struct Since(pub Option<Instant>);

impl PartialEq for Since {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Since {}

/// How far a binding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Decided.
    Bound,
    /// The CNI plugin has moved the devices, and its journal says so.
    Attached,
    /// The CNI plugin has returned the devices. The pod may still run, and have the device nodes.
    Detached,
    /// The first container of a pod without network attachment has started.
    Started,
}

impl Binding {
    /// A binding, not yet on disk.
    pub fn new(hca: &HcaId, unit: &str, pod: &Pod, sandbox: Option<&str>) -> Self {
        Self {
            version: VERSION,
            hca: hca.clone(),
            unit: unit.to_owned(),
            resource: String::new(),
            container: String::new(),
            pod: pod.clone(),
            sandbox: sandbox.map(str::to_owned),
            stage: Stage::Bound,
            created: 0,
            rail: 0,
            gpus: Vec::new(),
            gid_index: None,
            cgroup: None,
            since: Since::default(),
        }
    }

    /// As the daemon answers it; `ended`: why the pod does not have the slot any more.
    pub fn status(&self, ended: Option<&str>) -> BindingStatus {
        BindingStatus {
            resource: self.resource.clone(),
            unit: self.unit.clone(),
            hca: self.hca.to_string(),
            pod: self.pod.clone(),
            container: self.container.clone(),
            stage: word(&self.stage),
            rail: self.rail,
            gpus: self.gpus.clone(),
            ended: ended.map(str::to_owned),
        }
    }

    /// Whether it is this pod's: the same UID where both are known.
    pub fn is_of(&self, pod: &Pod) -> bool {
        let same_uid = match (&self.pod.uid, &pod.uid) {
            (Some(own), Some(other)) => own == other,
            _ => true,
        };
        same_uid && self.pod.namespace == pod.namespace && self.pod.name == pod.name
    }
}

/// What is on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings {
    /// Bindings by HCA.
    pub all: BTreeMap<HcaId, Binding>,
    /// HCAs whose file cannot be read, and why. They are bound to somebody.
    pub unreadable: BTreeMap<HcaId, String>,
    /// HCAs that nobody has, and that a process of an ended pod still uses.
    pub in_use: BTreeMap<HcaId, String>,
    /// HCAs by resource that are free and near a GPU; none while the GPUs are not known.
    pub free_aligned: BTreeMap<String, usize>,
    /// Bindings whose pods do not have their slots any more, as far as that was found out.
    pub ended: BTreeMap<HcaId, Ended>,
    /// Pods whose slots could not be bound a moment ago, and when, by name.
    pub refused: BTreeMap<String, (RefusedBinding, Since)>,
}

/// A binding whose slot the kubelet's list lacks for its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub why: &'static str,
    /// When the first such list was asked for.
    pub since: Since,
}

impl Bindings {
    /// Whether no HCA is bound.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty() && self.unreadable.is_empty()
    }

    /// Whether an HCA is bound, to whomever.
    pub fn has(&self, hca: &HcaId) -> bool {
        self.all.contains_key(hca) || self.unreadable.contains_key(hca)
    }

    /// The newest binding of a pod's slot.
    pub fn newest(&self, pod: &Pod, unit: &str) -> Option<&Binding> {
        let of_slot = self.all.values().filter(|one| one.unit == unit);
        of_slot
            .filter(|one| one.is_of(pod))
            .max_by_key(|one| one.created)
    }

    /// When a binding of a slot is created: `now`, but after all others of the slot, because the newest
    /// one counts and the clock may have been set back.
    pub fn next_created(&self, unit: &str, now: u64) -> u64 {
        let of_unit = self.all.values().filter(|one| one.unit == unit);
        let next = of_unit.map(|one| one.created.saturating_add(1));
        next.fold(now, u64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: Option<&str>) -> Pod {
        Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: uid.map(str::to_owned),
        }
    }

    fn binding(hca: &str, unit: &str) -> Binding {
        Binding::new(&hca.parse().unwrap(), unit, &pod(Some("u1")), Some("s1"))
    }

    #[test]
    fn a_binding_is_newer_than_all_others_of_its_slot() {
        let created = |hca: &str, unit: &str, created| Binding {
            created,
            ..binding(hca, unit)
        };
        let all = [
            created("0000:3b:00.0", "x", 100),
            created("0000:3b:00.1", "x", 200),
            created("0000:3b:00.2", "y", 300),
        ];
        let bindings = Bindings {
            all: all.map(|one| (one.hca.clone(), one)).into(),
            ..Bindings::default()
        };
        for (unit, now, expected) in [
            ("x", 1000, 1000),
            // In the same second, and after the clock was set back.
            ("x", 200, 201),
            ("x", 50, 201),
            ("z", 50, 50),
        ] {
            assert_eq!(bindings.next_created(unit, now), expected, "{unit} {now}");
        }
    }

    #[test]
    fn a_pod_of_the_same_name_with_another_uid_is_another_pod() {
        let own = binding("0000:3b:00.0", "x");
        assert!(own.is_of(&pod(Some("u1"))) && own.is_of(&pod(None)));
        assert!(!own.is_of(&pod(Some("u2"))));
    }
}
