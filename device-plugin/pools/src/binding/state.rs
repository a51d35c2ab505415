//! Whose an HCA is, and whether a binding is over.
//!
//! A binding is never over for want of evidence. While the CNI plugin's journal has it, or the kubelet
//! lists the slot for its pod, or processes of its pod run, it is in use. A pod whose network was removed
//! may still run, and one that the kubelet does not list any more may hang: its processes have the device
//! nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::HcaId;
use node_wire::Pod;

use super::record::{Binding, Bindings, Ended, Since, Stage};
use crate::holdings::{HcaAllocation, Holder, Holdings};

/// An ADD that binds may run for so long, and its pod has no process meanwhile.
const ADD_TIMEOUT: Duration = Duration::from_secs(60);
/// How far apart two lists of the kubelet must be, where they alone decide.
const LIST_INTERVAL: Duration = Duration::from_secs(15);

const NEW_SANDBOX: &str = "its pod has a new sandbox";
const PROCESSES: &str = "the kubelet lists its slot for it no more, but processes of it run";

/// The processes of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processes {
    /// There are some.
    Running,
    /// There are none: all have ended, or none has started.
    Ended,
    /// The pod's cgroup was never found.
    Unknown,
}

/// What the CNI plugin's journal has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attached {
    /// Sandbox and HCA of every slot and every moved NIC.
    pub slots: BTreeSet<(String, HcaId)>,
    /// Sandboxes of records that cannot be read, and may have any HCA.
    pub unreadable: BTreeSet<String>,
}

impl Attached {
    pub fn has(&self, binding: &Binding) -> bool {
        let sandbox = binding.sandbox.clone().unwrap_or_default();
        self.unreadable.contains(&sandbox) || self.slots.contains(&(sandbox, binding.hca.clone()))
    }

    fn has_elsewhere(&self, hca: &HcaId, sandbox: Option<&str>) -> bool {
        let mut slots = self.slots.iter();
        slots.any(|(container, of)| of == hca && Some(container.as_str()) != sandbox)
    }
}

/// Who asks for a binding: the kubelet gave these slots to this pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    pub pod: Pod,
    /// None at the start of a container, where the sandbox is not known.
    pub sandbox: Option<String>,
    pub slots: BTreeSet<String>,
}

/// What bindings are judged by.
#[derive(Debug, Clone)]
pub struct Evidence {
    pub bindings: Arc<Bindings>,
    pub attached: Attached,
    /// What the kubelet listed last.
    pub held: Option<Arc<Holdings>>,
    /// HCAs that units name, with one of the pods that hold them.
    pub allocated: BTreeMap<HcaId, HcaAllocation>,
    /// The processes of each binding's pod.
    pub processes: BTreeMap<HcaId, Processes>,
    pub asker: Option<Asker>,
    /// The cgroup of the asker's pod, if it was found.
    pub cgroup: Option<PathBuf>,
    pub now: Instant,
    /// Since 1970.
    pub seconds: u64,
}

/// Whether a binding is over, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    InUse(&'static str),
    Over(&'static str),
    Unknown(&'static str),
}

/// Whether a binding is over.
pub fn binding_state(one: &Binding, evidence: &Evidence) -> State {
    if evidence.attached.has(one) {
        return State::InUse("it has the NIC in its network namespace");
    }
    let newest = evidence.bindings.newest(&one.pod, &one.unit);
    if newest.is_some_and(|newest| newest.created > one.created) {
        return State::Over(NEW_SANDBOX);
    }
    let own = evidence.asker.as_ref();
    if let Some(asker) = own.filter(|asker| has_slot(asker, one) && one.is_of(&asker.pod)) {
        // A pod has one sandbox at a time; at the start of a container it is not known.
        let is_earlier = asker.sandbox.is_some() && one.sandbox != asker.sandbox;
        return match is_earlier && !is_adoptable(one) {
            true => State::Over(NEW_SANDBOX),
            false => State::InUse("the kubelet gave it the slot"),
        };
    }
    let processes = evidence.processes.get(&one.hca);
    let Some(why) = why_ended(one, evidence) else {
        return match (processes, listed(one, evidence)) {
            (_, Some(_)) => State::InUse("the kubelet lists its slot for it"),
            (Some(Processes::Running), _) => State::InUse("processes of it run"),
            _ => State::Unknown("the kubelet has not said yet whether it has the slot"),
        };
    };
    match processes {
        Some(Processes::Running) => State::InUse(PROCESSES),
        _ if one.stage == Stage::Bound && is_young(one, evidence.now) => {
            State::Unknown("the ADD that bound it may still run")
        }
        Some(Processes::Ended) => State::Over(why),
        _ if is_confirmed(one, evidence) => State::Over(why),
        _ => State::Unknown(
            "the kubelet lists its slot for it no more, but its cgroup was not found",
        ),
    }
}

/// Whether the ADD that made a binding may still run.
fn is_young(one: &Binding, now: Instant) -> bool {
    one.since.0.is_none_or(|since| now < since + ADD_TIMEOUT)
}

/// Whether a network that is attached to a running pod takes what its containers started with.
pub fn is_adoptable(one: &Binding) -> bool {
    one.sandbox.is_none() && one.stage == Stage::Started
}

fn has_slot(asker: &Asker, one: &Binding) -> bool {
    asker.slots.contains(&one.unit)
}

/// The kubelet's list, if it was asked after a binding was made.
fn listed<'w>(one: &Binding, evidence: &'w Evidence) -> Option<&'w Holdings> {
    let held = evidence.held.as_deref();
    held.filter(|held| one.since.0.is_none_or(|since| held.asked() > since))
}

/// Why the pod of a binding does not have its slot any more, by one list of the kubelet.
fn why_ended(one: &Binding, evidence: &Evidence) -> Option<&'static str> {
    const ANOTHER: &str = "the kubelet lists its slot as another pod's";
    if evidence
        .asker
        .as_ref()
        .is_some_and(|asker| has_slot(asker, one) && !one.is_of(&asker.pod))
    {
        return Some(ANOTHER);
    }
    let held = listed(one, evidence)?;
    // A pod that was made anew has its predecessor's name.
    let is_of_another_uid = || {
        let uid = one.pod.uid.as_deref();
        uid.is_some_and(|uid| held.is_of_another_uid(uid, &one.resource, &one.unit))
    };
    match held.holder(&one.resource, &one.unit) {
        None => Some("the kubelet lists no pod that holds its slot"),
        Some(holder) if is_of(one, holder) && !is_of_another_uid() => None,
        Some(_) => Some(ANOTHER),
    }
}

/// Whether an earlier list of the kubelet says the same. A kubelet that has just started lists its pods
/// one by one.
fn is_confirmed(one: &Binding, evidence: &Evidence) -> bool {
    let first = evidence.bindings.ended.get(&one.hca);
    // It may have been bound anew since.
    let first = first.and_then(|ended| ended.since.0.filter(|first| Some(*first) > one.since.0));
    let held = evidence.held.as_ref();
    held.zip(first)
        .is_some_and(|(held, first)| held.asked() >= first + LIST_INTERVAL)
}

/// A holder out of the kubelet's checkpoint has a UID for its name, and no namespace.
fn is_of(one: &Binding, holder: &Holder) -> bool {
    match holder.namespace.as_str() {
        // A pod whose UID is not known may be this one.
        "" => one.pod.uid.as_ref().is_none_or(|uid| *uid == holder.pod),
        namespace => namespace == one.pod.namespace && holder.pod == one.pod.name,
    }
}

/// Bindings that the kubelet's list lacks now, for [`Bindings::ended`].
pub fn ended(evidence: &Evidence) -> BTreeMap<HcaId, Ended> {
    let asked = evidence.held.as_ref().map(|held| held.asked());
    let ended = evidence.bindings.all.iter().filter_map(|(hca, one)| {
        let why = match binding_state(one, evidence) {
            State::InUse(PROCESSES) => PROCESSES,
            _ => why_ended(one, evidence)?,
        };
        let earlier = evidence.bindings.ended.get(hca).map(|known| known.since);
        let since = earlier.filter(|first| first.0 > one.since.0);
        let since = since.unwrap_or(Since(asked));
        Some((hca.clone(), Ended { why, since }))
    });
    ended.collect()
}

/// Whose an HCA is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner<'w> {
    Nobody,
    /// The pod of a binding.
    Bound(&'w Binding, State),
    /// Some pod: why its binding cannot be read.
    Unreadable(&'w str),
    /// A pod by the CNI plugin's journal alone.
    Attached,
    /// A pod whose unit names the HCA.
    Allocated(&'w HcaAllocation),
    /// A process of a pod that ended.
    Process(&'w str),
}

/// Whose an HCA is.
pub fn owner<'w>(hca: &HcaId, evidence: &'w Evidence) -> Owner<'w> {
    if let Some(one) = evidence.bindings.all.get(hca) {
        return Owner::Bound(one, binding_state(one, evidence));
    }
    if let Some(why) = evidence.bindings.unreadable.get(hca) {
        return Owner::Unreadable(why);
    }
    let sandbox = evidence
        .asker
        .as_ref()
        .and_then(|one| one.sandbox.as_deref());
    if evidence.attached.has_elsewhere(hca, sandbox) {
        return Owner::Attached;
    }
    match (
        evidence.allocated.get(hca),
        evidence.bindings.in_use.get(hca),
    ) {
        (Some(allocated), _) => Owner::Allocated(allocated),
        (None, Some(process)) => Owner::Process(process),
        (None, None) => Owner::Nobody,
    }
}

impl Owner<'_> {
    /// Whether a pod may be bound to the HCA.
    pub fn is_free(&self) -> bool {
        matches!(self, Self::Nobody | Self::Bound(_, State::Over(_)))
    }

    /// Whether the HCA becomes free as soon as processes end.
    pub fn is_ending(&self) -> bool {
        matches!(self, Self::Bound(_, State::InUse(PROCESSES)))
    }
}

impl fmt::Display for Owner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("nobody has it"),
            Self::Bound(one, State::InUse(why) | State::Over(why) | State::Unknown(why)) => {
                write!(f, "pod {} has it: {why}", one.pod)
            }
            Self::Unreadable(why) => write!(f, "{why}; remove the file"),
            Self::Attached => f.write_str("a pod has it, by the CNI plugin's journal"),
            Self::Allocated(one) => write!(f, "{} has it as {}", one.holder, one.resource),
            Self::Process(process) => f.write_str(process),
        }
    }
}

#[cfg(test)]
mod tests;
