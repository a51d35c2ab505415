//! Decides what every pool is and offers, from all that is known. Pure but for the log; the time is given.
//!
//! ```text
//!   configuration ┐
//!   host (a scan) ┼─▶ plan() ─▶ Plan: pools, what is excluded and why, when to look again
//!   World         ┤    ▲
//!   History ──────┴────┘ what earlier plans leave for the next one
//! ```
//!
//! A change of who holds what, of a binding or of a delay needs no scan: the last one is kept.

mod offers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use hca::topology::Machine;
use hca::{Hca, HcaId};
use node_wire::status::HostHca;

use crate::binding::record::Bindings;
use crate::config::{Config, ResourceName};
use crate::hardware;
use crate::health::Damper;
use crate::history::{Memory, Missing};
use crate::holdings::{HcaAllocation, Holder, Holdings};
use crate::host_snapshot::HostSnapshot;
use crate::pool::{self, Excluded, Held, Reason};
use crate::slots;
use crate::snapshot::{Slot, Snapshot, UnhealthyReason};
use offers::Offers;

/// What is known beside the configuration and the hardware.
#[derive(Debug, Default)]
pub struct World {
    /// Who holds what, once known.
    pub allocated: Option<Arc<Holdings>>,
    /// Why containers do not get what CDI files say, by resource.
    pub undelivered: BTreeMap<ResourceName, String>,
    /// HCAs whose netdev returned from a pod that left a child on it, and what is to be said of it.
    pub children: BTreeMap<HcaId, String>,
    /// Slots that are bound.
    pub bindings: Arc<Bindings>,
    /// Whether they could not be read last.
    pub bindings_unread: bool,
}

/// What earlier plans leave for the next one.
#[derive(Debug, Default)]
pub struct History {
    /// What is known of HCAs, for the next daemon.
    pub memory: Memory,
    damper: Damper,
    offers: Offers,
    /// The pools of the last plan.
    pools: Vec<Arc<Snapshot>>,
    /// How often health changed.
    pub transitions: Transitions,
    /// Since when HCAs are not seen any more.
    gone: BTreeMap<HcaId, Instant>,
}

/// What is to be offered.
#[derive(Debug, Default)]
pub struct Plan {
    /// The pools, in the order of the configuration.
    pub pools: Vec<Arc<Snapshot>>,
    /// What an administrator should know about the way the configuration meets this host.
    pub remarks: Vec<String>,
    /// HCAs that a pool chooses and does not have.
    pub excluded: Vec<Excluded>,
    /// The hardware.
    pub hcas: Arc<Vec<HostHca>>,
    /// HCAs that were here and are not.
    pub missing: Vec<Missing>,
    /// When to plan again at the latest: a port will have been up or down for long enough.
    pub due: Option<Instant>,
    /// When to scan again at the latest: a pool waits for something of the host.
    pub scan_due: Option<Instant>,
}

/// How long a VF or SF that is gone stays listed while its PF is there: a reset of a function takes
/// seconds, a function that was removed does not come back.
const FORGET_GRACE_PERIOD: Duration = Duration::from_secs(600);
/// How soon to look again for what a pool waits for, and for what a scan that failed was to find.
pub const GATE_INTERVAL: Duration = Duration::from_secs(2);

/// How often HCAs of a resource became healthy or unhealthy.
pub type Transitions = BTreeMap<(ResourceName, &'static str), u64>;

/// Makes the pools anew.
pub fn plan(
    config: &Config,
    seen: &HostSnapshot,
    world: &World,
    history: &mut History,
    now: Instant,
    time: SystemTime,
) -> Plan {
    let configured = config.pools.iter().map(|pool| pool.resource.to_string());
    history.memory.note_resources(configured);
    let (candidates, unusable) = history.memory.list(seen, time);
    let held = world.held(&history.memory);
    let mut pools = pool::assemble_on(config, &candidates, seen, &history.pools, world, &held);
    history.forget_removed_functions(world, &mut pools.snapshots, &candidates, now);
    let mut due = history
        .damper
        .damp(&mut pools.snapshots, &held, &config.damping, now);
    let asked = world.allocated.as_ref().map(|held| held.asked());
    let bindings_read = !world.bindings_unread;
    if history
        .offers
        .note(&mut pools.snapshots, asked, bindings_read)
    {
        let soon = now.checked_add(GATE_INTERVAL);
        due = due.into_iter().chain(soon).min();
    }
    let late = pools
        .snapshots
        .iter_mut()
        .filter(|one| one.late().is_some());
    for snapshot in late {
        let slots = history.slots(world, snapshot);
        snapshot.set_slots(slots);
    }
    for snapshot in &pools.snapshots {
        let before = history.pool(snapshot.resource()).cloned();
        note_changes(before.as_deref(), snapshot, &mut history.transitions);
    }
    history.note_pooled(world, &pools.snapshots);
    history.note_places(&seen.machine, &pools.snapshots);
    let (snapshots, memory) = (&pools.snapshots, &history.memory);
    let hcas = hardware::list(&candidates, &seen.machine, snapshots, memory);
    // An unchanged pool keeps its snapshot, so that no session sends it again.
    let kept = pools.snapshots.into_iter();
    let kept = kept.map(|new| match history.pools.iter().find(|old| ***old == new) {
        Some(old) => old.clone(),
        None => Arc::new(new),
    });
    let kept: Vec<_> = kept.collect();
    history.pools.clone_from(&kept);
    let unusable = unusable.into_iter();
    let unusable =
        unusable.map(|one| format!("{} cannot be offered: {}", one.device.name, one.reason));
    let waits = !seen.missing.is_empty();
    Plan {
        pools: kept,
        remarks: pools.remarks.into_iter().chain(unusable).collect(),
        excluded: pools.excluded,
        hcas: Arc::new(hcas),
        missing: history.memory.missing(),
        due,
        scan_due: now.checked_add(GATE_INTERVAL).filter(|_| waits),
    }
}

impl World {
    /// Who holds each HCA: by units that name it, by a binding, or by units of a whole pool that has
    /// or had it.
    fn held(&self, memory: &Memory) -> Held {
        let held = self.allocated.as_ref().map(|held| held.hcas());
        let mut held = held.unwrap_or_default();
        for (hca, binding) in &self.bindings.all {
            held.entry(hca.clone()).or_default().push(HcaAllocation {
                resource: binding.resource.clone(),
                exclusive: true,
                late: true,
                holder: Holder {
                    namespace: binding.pod.namespace.clone(),
                    pod: binding.pod.name.clone(),
                    container: binding.container.clone(),
                },
            });
        }
        for (resource, holder) in self.allocated.iter().flat_map(|held| held.of_whole_pools()) {
            for hca in memory.pooled(resource) {
                held.entry(hca.clone()).or_default().push(HcaAllocation {
                    resource: resource.to_owned(),
                    exclusive: false,
                    late: false,
                    holder: holder.clone(),
                });
            }
        }
        held
    }
}

impl Plan {
    /// HCAs that a pod may have from another pool than theirs.
    pub fn handed_over(&self) -> impl Iterator<Item = &HcaId> {
        let members = self.pools.iter().flat_map(|pool| pool.members());
        let members = members.filter(|member| member.waits_for_kubelet());
        members.map(|member| &member.hca.id)
    }

    /// HCAs that no pod shares with another one: those of exclusive pools, those that a pod may have
    /// from one, and those that no pod may have, as far as a pool selects them.
    pub fn exclusive(&self) -> BTreeSet<HcaId> {
        let exclusive = self
            .pools
            .iter()
            .filter(|pool| !pool.pool().sharing.is_shared());
        let members = exclusive.flat_map(|pool| pool.members());
        let reserved = |one: &&Excluded| matches!(one.reason, Reason::Reserved(_));
        let reserved = self.excluded.iter().filter(reserved).map(|one| &one.id);
        let members = members.map(|member| &member.hca.id);
        members
            .chain(self.handed_over())
            .chain(reserved)
            .cloned()
            .collect()
    }
}

impl History {
    /// Nothing was planned yet. `memory` is what an earlier daemon knew.
    pub fn new(memory: Memory) -> Self {
        Self {
            memory,
            ..Self::default()
        }
    }

    fn pool(&self, resource: &ResourceName) -> Option<&Arc<Snapshot>> {
        self.pools.iter().find(|pool| pool.resource() == resource)
    }

    /// Remembers the pool and the rail of each HCA.
    fn note_places(&mut self, machine: &Machine, pools: &[Snapshot]) {
        self.memory.note_places(machine, |id| {
            let is_in = |pool: &&Snapshot| {
                let excluded = |reason: &UnhealthyReason| *reason == UnhealthyReason::Excluded;
                let mut members = pool.members().iter();
                members.any(|member| member.hca.id == *id && !member.health.has(excluded))
            };
            Some(pools.iter().find(is_in)?.resource().to_string())
        });
    }

    /// Remembers the HCAs of pools whose units name none.
    fn note_pooled(&mut self, world: &World, pools: &[Snapshot]) {
        let pooled = pools.iter().filter(|pool| pool.is_pooled()).map(|pool| {
            let excluded = |reason: &UnhealthyReason| *reason == UnhealthyReason::Excluded;
            let members = pool.members().iter();
            let members =
                members.filter(move |one| !one.waits_for_kubelet() && !one.health.has(excluded));
            let hcas = members.map(|member| member.hca.id.clone());
            (pool.resource().to_string(), hcas.collect())
        });
        // Where it is not known what is held, nothing is forgotten.
        let held = world.allocated.as_ref().map(|held| {
            let resources = held.of_whole_pools().map(|(resource, _)| resource);
            resources.collect::<BTreeSet<&str>>()
        });
        let offers = &self.offers;
        self.memory.note_pooled(pooled.collect(), |resource, hca| {
            let is_held = held.as_ref().is_none_or(|held| held.contains(resource));
            is_held || offers.has(resource, hca)
        });
    }

    /// The slots of a pool with late binding, by its members as they are now.
    fn slots(&self, world: &World, snapshot: &Snapshot) -> Vec<Slot> {
        let resource = snapshot.resource();
        let mut bindings: Vec<_> = world.bindings.all.iter().collect();
        bindings.sort_by_key(|(_, one)| one.created);
        let bound: Vec<(u32, HcaId)> = bindings
            .into_iter()
            .filter(|(_, one)| one.resource == resource.as_str())
            .filter_map(|(hca, one)| Some((snapshot.slot_number(&one.unit)?, hca.clone())))
            .collect();
        let held = world.allocated.iter().flat_map(|held| held.units(resource));
        let held = held
            .filter_map(|unit| snapshot.slot_number(&unit))
            .collect();
        let before = self.pool(resource).map(|before| before.slots());
        let before = before.unwrap_or_default();
        slots::assign(snapshot.members(), &bound, &held, before)
    }

    /// Drops VFs and SFs that were removed for good: their PF is there, they are not for a long time,
    /// and no pod holds a unit of theirs. What is merely broken stays listed and unhealthy.
    fn forget_removed_functions(
        &mut self,
        world: &World,
        snapshots: &mut [Snapshot],
        candidates: &[Hca],
        now: Instant,
    ) {
        let is_here = |pf| candidates.iter().any(|one| one.id == HcaId::Pci(pf));
        self.gone
            .retain(|id, _| !candidates.iter().any(|one| one.id == *id));
        for snapshot in snapshots {
            let resource = snapshot.resource().clone();
            let gone = &mut self.gone;
            let over: Vec<HcaId> = snapshot
                .members()
                .iter()
                .filter(|member| member.health.has(|reason| *reason == UnhealthyReason::Gone))
                .filter(|member| member.hca.owner().is_some_and(is_here))
                .map(|member| member.hca.id.clone())
                .filter(|id| {
                    let since = *gone.entry(id.clone()).or_insert(now);
                    now.saturating_duration_since(since) >= FORGET_GRACE_PERIOD
                })
                .collect();
            let Some(allocated) = world.allocated.as_ref().filter(|_| !over.is_empty()) else {
                continue;
            };
            let held = allocated.hcas();
            snapshot.forget(|member| {
                let is_held = held.contains_key(&member.hca.id) || world.bindings.has(&member.hca.id);
                let forgotten = over.contains(&member.hca.id) && !is_held;
                if forgotten {
                    tracing::info!(
                        %resource, hca = %member.hca.id, "not listed any more: the function was removed"
                    );
                }
                forgotten
            });
        }
    }

    /// The kubelet was sent the pools as they are now.
    pub fn sent(&mut self, now: Instant) {
        self.offers.sent(now);
    }

    /// Forgets pools whose configuration changed: what they consisted of says nothing about what
    /// they will. HCAs that are only gone from the host for the moment go with them.
    pub fn keep_only(&mut self, unchanged: impl Fn(&ResourceName) -> bool) {
        self.pools.retain(|pool| unchanged(pool.resource()));
    }
}

/// Says what became of each HCA, once for each change, and counts it.
fn note_changes(before: Option<&Snapshot>, after: &Snapshot, transitions: &mut Transitions) {
    let resource = after.resource();
    if after.members().is_empty() && before.is_none() && !after.pool().optional {
        tracing::warn!(%resource, "no HCA of this host is in the pool yet");
    }
    for member in after.members() {
        let old = before.and_then(|old| old.members().iter().find(|m| m.hca.id == member.hca.id));
        let devices = member.hca.rdma_names().join(",");
        if old.is_some_and(|old| old.health == member.health) {
            continue;
        }
        let was_shown = old.is_some_and(|old| !old.waits_for_kubelet());
        let word = match member.health.worst() {
            Some(UnhealthyReason::Handover(reason)) => {
                tracing::info!(%resource, hca = %member.hca.id, devices, reason, "HCA in the pool soon");
                continue;
            }
            None if !was_shown => {
                tracing::info!(%resource, hca = %member.hca.id, devices, "HCA in the pool");
                continue;
            }
            None => {
                tracing::info!(%resource, hca = %member.hca.id, devices, "HCA is healthy again");
                "healthy"
            }
            Some(_) => {
                let reasons = member.health.reasons().iter();
                let reasons: Vec<String> = reasons.map(ToString::to_string).collect();
                let reason = reasons.join("; ");
                tracing::warn!(
                    %resource, hca = %member.hca.id, devices, reason, "HCA is unhealthy"
                );
                if old.is_some_and(|old| !old.health.is_healthy()) {
                    continue;
                }
                "unhealthy"
            }
        };
        *transitions.entry((resource.clone(), word)).or_default() += 1;
    }
}

#[cfg(test)]
mod tests;
