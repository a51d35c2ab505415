//! The slots that a pod has of each pool with late binding, and the decision for all slots of a pool
//! together ([`super::decide`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::nccl;
use hca::HcaId;
use hca::topology::Machine;
use node_wire::{Failure, FailureKind, Pod, PodUnits};

use super::decide::{self, Assigned, Container};
use super::gpus::PodGpus;
use super::store::{Binding, Bindings, ServedGpu};
use crate::config::{Late, TopologyConfig};
use crate::node_paths::NodePaths;
use crate::rails::by_policy;
use crate::report::Report;
use crate::snapshot::{Member, Snapshot};

/// A pool with late binding, and what the pod has of it.
pub(super) struct Asked {
    pub(super) snapshot: Arc<Snapshot>,
    late: Late,
    /// Containers of the pod, those without slots of this pool included.
    containers: Vec<Container>,
}

/// Refuses a unit that the kubelet did not allocate to the pod, or that is not a slot of ours.
pub(super) fn belongs(
    pod: &Pod,
    unit: &str,
    units: &PodUnits,
    report: &Report,
) -> Result<(), Failure> {
    let held = units
        .allocations
        .iter()
        .find(|one| one.units.iter().any(|id| id == unit));
    let Some(held) = held else {
        return Err(Failure::new(
            FailureKind::NotAllocated,
            format!("the kubelet did not allocate {unit} to pod {pod}"),
        ));
    };
    match late_pool(&held.resource, report) {
        Some((snapshot, _)) if snapshot.slot_number(unit).is_some() => Ok(()),
        Some(_) => Err(Failure::new(
            FailureKind::NotAllocated,
            format!("{unit} is not a slot of {}", held.resource),
        )),
        None => Err(Failure::new(
            FailureKind::CannotBind,
            format!(
                "{} is not a pool with binding late of this node now, or its HCAs have not been \
                 scanned yet",
                held.resource
            ),
        )),
    }
}

pub(super) fn late_pool(resource: &str, report: &Report) -> Option<(Arc<Snapshot>, Late)> {
    let pool = report
        .pools
        .iter()
        .find(|pool| pool.resource.as_str() == resource)?;
    let snapshot = pool.snapshot.clone()?;
    let late = snapshot.late()?;
    Some((snapshot, late))
}

/// What a pod has of each pool with late binding, by resource.
pub(super) fn pools_of(units: &PodUnits, report: &Report) -> Vec<Asked> {
    let resources: BTreeSet<&str> = units
        .allocations
        .iter()
        .map(|one| one.resource.as_str())
        .collect();
    let pools = resources.into_iter().filter_map(|resource| {
        let (snapshot, late) = late_pool(resource, report)?;
        let mut containers: BTreeMap<&str, Container> = BTreeMap::new();
        let claimed = units.claims.iter().map(|claim| claim.container.as_str());
        let allocated = units.allocations.iter().map(|one| one.container.as_str());
        for name in allocated.chain(claimed) {
            let container = containers.entry(name).or_default();
            container.name = name.to_owned();
        }
        for one in units
            .allocations
            .iter()
            .filter(|one| one.resource == resource)
        {
            if let Some(container) = containers.get_mut(one.container.as_str()) {
                container.slots.extend(one.units.iter().cloned());
            }
        }
        for container in containers.values_mut() {
            container
                .slots
                .retain(|slot| snapshot.slot_number(slot).is_some());
            container
                .slots
                .sort_by_key(|slot| snapshot.slot_number(slot));
        }
        Some(Asked {
            snapshot,
            late,
            containers: containers.into_values().collect(),
        })
    });
    pools.collect()
}

pub(super) fn slots_of(asked: &Asked) -> Vec<String> {
    let containers = asked.containers.iter();
    containers
        .flat_map(|one| one.slots.iter().cloned())
        .collect()
}

/// Decides for one pool.
pub(super) fn choose<'b>(
    asked: &Asked,
    machine: &Machine,
    of_pod: &PodGpus,
    bindings: &Bindings,
    taken: &BTreeSet<HcaId>,
    kept: impl Fn(&str) -> Option<&'b Binding>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Assigned>, Failure> {
    let resource = asked.snapshot.resource();
    let cannot =
        |why: String| Failure::new(FailureKind::CannotBind, format!("bind {resource}: {why}"));
    if !of_pod.unknown.is_empty() {
        let why = format!(
            "GPUs of the pod are not known: {}",
            of_pod.unknown.join("; ")
        );
        if asked.late.strict {
            return Err(cannot(format!(
                "{why}; strict: false for this pool binds all the same"
            )));
        }
        warnings.push(why);
    }
    let elsewhere = |hca: &HcaId| {
        let nic = machine.nics.iter().find(|nic| nic.hca == *hca);
        nic.is_some_and(|nic| nic.elsewhere)
    };
    let is_usable = |member: &&Member| {
        let hca = &member.hca.id;
        member.health.is_healthy() && !bindings.has(hca) && !taken.contains(hca) && !elsewhere(hca)
    };
    let members = asked.snapshot.members().iter();
    let usable: Vec<HcaId> = members
        .filter(is_usable)
        .map(|one| one.hca.id.clone())
        .collect();
    let mut kept_hcas = BTreeMap::new();
    for slot in slots_of(asked) {
        if let Some(hca) = kept(&slot).and_then(|one| one.hca.parse().ok()) {
            kept_hcas.insert(slot, hca);
        }
    }
    let mut containers = asked.containers.clone();
    for container in &mut containers {
        let gpus = of_pod.of_container.get(&container.name);
        container.gpus = gpus.cloned().unwrap_or_default();
    }
    decide::decide(machine, &usable, &kept_hcas, &containers, asked.late.strict).map_err(
        |refused| {
            let why = match &refused {
                decide::Refused::TooFew { .. } => unhealthy(asked.snapshot.members()),
                decide::Refused::NoPlace(_) | decide::Refused::Choice(_) => String::new(),
            };
            cannot(format!("{refused}{why}"))
        },
    )
}

/// Why HCAs of a pool cannot be given, each reason once.
fn unhealthy(members: &[Member]) -> String {
    let reasons = members.iter().filter_map(|member| member.health.worst());
    let reasons: BTreeSet<String> = reasons.map(ToString::to_string).collect();
    reasons.iter().map(|reason| format!("; {reason}")).collect()
}

pub(super) fn binding(
    one: &Assigned,
    asked: &Asked,
    pod: &Pod,
    sandbox: Option<&str>,
    machine: &Machine,
    bindings: &Bindings,
) -> Binding {
    let gpus = one.pairs.iter().filter_map(|pair| {
        let gpu = machine.gpus.get(pair.gpu)?;
        Some(ServedGpu {
            gpu: gpu.place.address.to_string(),
            class: pair.distance.class.label().to_owned(),
            peer_to_peer: pair.direct,
            aligned: pair.aligned,
        })
    });
    Binding {
        resource: asked.snapshot.resource().to_string(),
        container: one.container.clone(),
        rail: one.rail,
        gpus: gpus.collect(),
        created: bindings.next_created(&one.slot, attachment::node::now()),
        ..Binding::new(&one.hca, &one.slot, pod, sandbox)
    }
}

/// Puts GPUs and NICs where the administrator says, and NICs on the rails of the node's policy.
pub(super) fn placed(
    mut machine: Machine,
    topology: &TopologyConfig,
    paths: &NodePaths,
) -> Result<Machine, String> {
    if let Some(file) = &topology.nccl_topology {
        let places = nccl::read(file).map_err(|error| format!("{error:#}"))?;
        machine.place(&places);
    }
    by_policy(&mut machine, &paths.host, &paths.node.policy)?;
    Ok(machine)
}
