//! What a bind does, decided whole: which bindings are freed, kept and created for all slots of a pod.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hca::HcaId;
use hca::topology::Machine;
use node_wire::{Failure, FailureKind, Pod, PodUnits};

use super::decide::{self, Assigned, Container, Refused};
use super::record::{Binding, ServedGpu, Since};
use super::state::{Asker, Evidence, Owner, State, binding_state, is_adoptable, owner};
use crate::config::Late;
use crate::gpus::PodGpus;
use crate::snapshot::{Member, Snapshot};

/// A pool with late binding, and what the pod has of it.
#[derive(Debug, Clone)]
pub struct PoolRequest {
    pub snapshot: Arc<Snapshot>,
    /// A closer HCA that is not free rejects the pod.
    pub strict: bool,
    /// Containers of the pod, those without slots of this pool included.
    pub containers: Vec<Container>,
}

impl PoolRequest {
    pub fn slots(&self) -> impl Iterator<Item = &String> {
        self.containers.iter().flat_map(|one| &one.slots)
    }
}

/// What a bind does, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BindPlan {
    /// Over: the CDI file goes first, then the binding.
    pub free: Vec<Binding>,
    /// The pod's own, with a sandbox that was not known before.
    pub adopt: Vec<Binding>,
    pub create: Vec<Binding>,
    /// The pod's own, as they are.
    pub keep: Vec<Binding>,
    pub warnings: Vec<String>,
}

/// Why nothing is bound.
#[derive(Debug)]
pub struct NotBound {
    pub failure: Failure,
    /// Whether that changes as soon as processes of an ended pod are gone.
    pub is_ending: bool,
}

impl From<Failure> for NotBound {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            is_ending: false,
        }
    }
}

/// Refuses a unit that the kubelet did not allocate to the pod, or that is not a slot of ours.
pub fn belongs(
    pod: &Pod,
    unit: &str,
    units: &PodUnits,
    pools: &[Arc<Snapshot>],
) -> Result<(), Failure> {
    let mut held = units.allocations.iter();
    let held = held.find(|one| one.units.iter().any(|id| id == unit));
    let Some(held) = held else {
        let why = format!("the kubelet did not allocate {unit} to pod {pod}");
        return Err(Failure::new(FailureKind::NotAllocated, why));
    };
    let resource = &held.resource;
    match late_pool(resource, pools) {
        Some((snapshot, _)) if snapshot.slot_number(unit).is_some() => Ok(()),
        Some(_) => Err(Failure::new(
            FailureKind::NotAllocated,
            format!("{unit} is not a slot of {resource}"),
        )),
        None => Err(Failure::new(
            FailureKind::CannotBind,
            format!(
                "{resource} is not a pool with binding late of this node now, or its HCAs have not \
                 been scanned yet"
            ),
        )),
    }
}

pub fn late_pool(resource: &str, pools: &[Arc<Snapshot>]) -> Option<(Arc<Snapshot>, Late)> {
    let mut pools = pools.iter();
    let snapshot = pools.find(|pool| pool.resource().as_str() == resource)?;
    Some((snapshot.clone(), snapshot.late()?))
}

/// What a pod has of each pool with late binding, by resource.
pub fn requests(units: &PodUnits, pools: &[Arc<Snapshot>]) -> Vec<PoolRequest> {
    let allocations = units.allocations.iter();
    let resources: BTreeSet<&String> = allocations.clone().map(|one| &one.resource).collect();
    let pools = resources.into_iter().filter_map(|resource| {
        let (snapshot, late) = late_pool(resource, pools)?;
        let mut containers: BTreeMap<&str, Container> = BTreeMap::new();
        let claimed = units.claims.iter().map(|claim| claim.container.as_str());
        for name in allocations
            .clone()
            .map(|one| one.container.as_str())
            .chain(claimed)
        {
            containers.entry(name).or_default().name = name.to_owned();
        }
        for one in allocations.clone().filter(|one| one.resource == *resource) {
            let container = containers.entry(one.container.as_str()).or_default();
            for unit in &one.units {
                let Some(number) = snapshot.slot_number(unit) else {
                    continue;
                };
                container.slots.push(unit.clone());
                let mut listed = snapshot.slots().iter();
                let listed = listed.find(|slot| slot.number == number);
                let node = listed.and_then(|slot| slot.numa_node);
                let node = node.filter(|_| !snapshot.pool().exclude_topology);
                container
                    .nodes
                    .extend(node.map(|node| (unit.clone(), node)));
            }
        }
        for container in containers.values_mut() {
            let slots = &mut container.slots;
            slots.sort_by_key(|slot| snapshot.slot_number(slot));
        }
        Some(PoolRequest {
            strict: late.strict,
            snapshot,
            containers: containers.into_values().collect(),
        })
    });
    pools.collect()
}

/// The binding of one of the asker's slots that stays.
pub fn kept<'w>(evidence: &'w Evidence, asker: &Asker, slot: &str) -> Option<&'w Binding> {
    let newest = evidence.bindings.newest(&asker.pod, slot)?;
    let is_of_sandbox = asker.sandbox.is_none() || newest.sandbox == asker.sandbox;
    (is_of_sandbox || is_adoptable(newest)).then_some(newest)
}

/// Decides for all slots of a pod. `placed` are its GPUs and the machine with all GPUs; not needed where
/// each slot is bound.
///
/// # Errors
/// There are no HCAs as they must be; nothing is to be done then.
pub fn bind_plan(
    asker: &Asker,
    pools: &[PoolRequest],
    placed: Option<&(PodGpus, Machine)>,
    evidence: &Evidence,
) -> Result<BindPlan, NotBound> {
    let mut plan = BindPlan::default();
    let is_over = |one: &&Binding| matches!(binding_state(one, evidence), State::Over(_));
    plan.free
        .extend(evidence.bindings.all.values().filter(is_over).cloned());
    for one in asker
        .slots
        .iter()
        .filter_map(|slot| kept(evidence, asker, slot))
    {
        match asker.sandbox.is_some() && is_adoptable(one) {
            true => plan.adopt.push(Binding {
                sandbox: asker.sandbox.clone(),
                ..one.clone()
            }),
            false => plan.keep.push(one.clone()),
        }
    }
    if plan.keep.len() + plan.adopt.len() == asker.slots.len() {
        return Ok(plan);
    }
    let Some((of_pod, machine)) = placed else {
        let why = "the pod's bindings changed in this moment; try again";
        return Err(Failure::new(FailureKind::BindingsUnavailable, why.to_owned()).into());
    };
    plan.warnings.extend(of_pod.warnings.iter().cloned());
    for pool in pools {
        let own = plan.keep.iter().chain(&plan.adopt);
        let own = own.map(|one| (one.unit.clone(), one.hca.clone())).collect();
        let assigned = choose(pool, machine, of_pod, &own, evidence, &mut plan.warnings)?;
        let new = assigned.iter().filter(|one| !own.contains_key(&one.slot));
        let new: Vec<Binding> = new
            .map(|one| new_binding(one, pool, asker, machine, evidence))
            .collect();
        plan.create.extend(new);
    }
    Ok(plan)
}

/// Decides for one pool.
fn choose(
    pool: &PoolRequest,
    machine: &Machine,
    of_pod: &PodGpus,
    own: &BTreeMap<String, HcaId>,
    evidence: &Evidence,
    warnings: &mut Vec<String>,
) -> Result<Vec<Assigned>, NotBound> {
    let resource = pool.snapshot.resource();
    let cannot =
        |why: String| Failure::new(FailureKind::CannotBind, format!("bind {resource}: {why}"));
    if !of_pod.unknown.is_empty() {
        let unknown = of_pod.unknown.join("; ");
        let why = format!("GPUs of the pod are not known: {unknown}");
        if pool.strict {
            let why = format!("{why}; strict: false for this pool binds all the same");
            return Err(cannot(why).into());
        }
        warnings.push(why);
    }
    let members = pool.snapshot.members().iter();
    let is_own = |member: &&Member| own.values().any(|hca| *hca == member.hca.id);
    let owned = members.filter(|member| !is_own(member));
    let owned: Vec<(&Member, Owner<'_>)> = owned
        .map(|member| (member, owner(&member.hca.id, evidence)))
        .collect();
    let is_usable = |(member, owner): &&(&Member, Owner<'_>)| is_usable(member, owner, machine);
    let usable: Vec<HcaId> = owned
        .iter()
        .filter(is_usable)
        .map(|(member, _)| member.hca.id.clone())
        .collect();
    let slots: BTreeSet<&String> = pool.slots().collect();
    let own = own.iter().filter(|(slot, _)| slots.contains(slot));
    let own = own.map(|(slot, hca)| (slot.clone(), hca.clone())).collect();
    let mut containers = pool.containers.clone();
    for container in &mut containers {
        let gpus = of_pod.of_container.get(&container.name);
        container.gpus = gpus.cloned().unwrap_or_default();
    }
    let decided = decide::decide(machine, &usable, &own, &containers, pool.strict);
    decided.map_err(|refused| {
        let others = owned.iter().filter(|one| !is_usable(one));
        let others: Vec<String> = others
            .map(|(member, owner)| unusable(member, owner))
            .collect();
        let mut why = refused.to_string();
        if matches!(refused, Refused::Choice(_)) {
            let free = decide::free_aligned(machine, &usable);
            why += &format!(
                "; {free} HCAs of this pool are free and near a GPU of this node, and the kubelet \
                 tries again here as long as the pod exists: delete it, and a new one may go elsewhere"
            );
        }
        if !matches!(refused, Refused::NoPlace(_)) {
            why += &others.iter().map(|other| format!("; {other}")).collect::<String>();
        }
        NotBound {
            failure: cannot(why),
            is_ending: owned.iter().any(|(_, owner)| owner.is_ending()),
        }
    })
}

/// Whether a pod can be bound to an HCA.
fn is_usable(member: &Member, owner: &Owner<'_>, machine: &Machine) -> bool {
    let mut nics = machine.nics.iter();
    let is_away = nics.any(|nic| nic.hca.id == member.hca.id && nic.hca.elsewhere);
    member.health.is_healthy() && owner.is_free() && !is_away
}

/// [`decide::free_aligned`] of a pool.
pub fn free_aligned(snapshot: &Snapshot, machine: &Machine, evidence: &Evidence) -> usize {
    let members = snapshot.members().iter();
    let usable = members.filter(|one| is_usable(one, &owner(&one.hca.id, evidence), machine));
    let usable: Vec<HcaId> = usable.map(|one| one.hca.id.clone()).collect();
    decide::free_aligned(machine, &usable)
}

/// Why a pod cannot be bound to an HCA.
fn unusable(member: &Member, owner: &Owner<'_>) -> String {
    let hca = &member.hca.id;
    match (owner, member.health.worst()) {
        (owner, _) if !owner.is_free() => format!("{hca}: {owner}"),
        (_, Some(reason)) => format!("{hca}: {reason}"),
        (_, None) => format!("{hca}: it is in another network namespace"),
    }
}

fn new_binding(
    one: &Assigned,
    pool: &PoolRequest,
    asker: &Asker,
    machine: &Machine,
    evidence: &Evidence,
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
        resource: pool.snapshot.resource().to_string(),
        container: one.container.clone(),
        rail: one.rail,
        gpus: gpus.collect(),
        created: evidence.bindings.next_created(&one.slot, evidence.seconds),
        cgroup: evidence.cgroup.clone(),
        since: Since(Some(evidence.now)),
        ..Binding::new(&one.hca, &one.slot, &asker.pod, asker.sandbox.as_deref())
    }
}

#[cfg(test)]
mod tests;
