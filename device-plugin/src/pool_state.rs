//! The state of the pools: from scans of the host to snapshots.
//!
//! Pure but for the log and for what it remembers; the time is given to it.

mod offers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::HcaId;

use crate::binding::store::Bindings;
use crate::candidate::memory::Memory;
use crate::config::{Config, ResourceName};
use crate::health::Damper;
use crate::host_snapshot::HostSnapshot;
use crate::kubelet::allocated::{AllocatedUnits, HcaAllocation, Holder};
use crate::pool::{self, Excluded, Reason};
use crate::slots;
use crate::snapshot::{Health, Slot, Snapshot, UnhealthyReason};
use hca::Hca;
use offers::Offers;

/// The pools, and what they were made from.
#[derive(Debug, Default)]
pub(crate) struct PoolStates {
    /// What is known of HCAs, for the next daemon.
    pub memory: Memory,
    damper: Damper,
    offers: Offers,
    /// The pools, in the order of the configuration.
    pub snapshots: Vec<Arc<Snapshot>>,
    /// What an administrator should know about the way the configuration meets this host.
    pub remarks: Vec<String>,
    /// HCAs that a pool chooses and does not have.
    pub excluded: Vec<Excluded>,
    /// How often health changed.
    pub transitions: Transitions,
    /// Who holds what, once known.
    pub allocated: Option<Arc<AllocatedUnits>>,
    /// Why containers do not get what CDI files say.
    pub cdi_obstacle: Option<String>,
    /// HCAs whose netdev returned from a pod that left a child on it, and what is to be said of it.
    pub children: BTreeMap<HcaId, String>,
    /// Slots that are bound.
    pub bindings: Arc<Bindings>,
    /// Whether they could not be read at this scan.
    pub bindings_unread: bool,
    /// Since when HCAs are not seen any more.
    gone: BTreeMap<HcaId, Instant>,
}

/// How long a VF or SF that is gone stays listed while its PF is there: a reset of a function takes
/// seconds, a function that was removed does not come back.
const FORGET_GRACE_PERIOD: Duration = Duration::from_secs(600);
/// How soon to scan again for what a pool waits for.
pub(crate) const GATE_INTERVAL: Duration = Duration::from_secs(2);

/// How often HCAs of a resource became healthy or unhealthy.
pub(crate) type Transitions = BTreeMap<(ResourceName, &'static str), u64>;

impl PoolStates {
    /// No pools yet. `memory` is what an earlier daemon knew.
    pub(crate) fn new(memory: Memory) -> Self {
        Self {
            memory,
            ..Self::default()
        }
    }

    /// Assembles the pools from a new scan. Returns when to scan again at the latest, because a
    /// port will have been up or down for long enough then.
    pub(crate) fn update(
        &mut self,
        config: &Config,
        seen: &HostSnapshot,
        now: Instant,
    ) -> Option<Instant> {
        let (candidates, unusable) = self.memory.list(seen);
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
            for hca in self.memory.pooled(resource) {
                held.entry(hca.clone()).or_default().push(HcaAllocation {
                    resource: resource.to_owned(),
                    exclusive: false,
                    late: false,
                    holder: holder.clone(),
                });
            }
        }
        let node = pool::Node {
            held,
            cdi_obstacle: self.cdi_obstacle.clone(),
            children: self.children.clone(),
        };
        let mut pools = pool::assemble_on(config, &candidates, seen, &self.snapshots, &node);
        self.forget_removed_functions(&mut pools.snapshots, &candidates, now);
        let gated = !seen.missing.is_empty();
        let mut again = now.checked_add(GATE_INTERVAL).filter(|_| gated);
        for snapshot in &mut pools.snapshots {
            let due = self.damper.damp(snapshot, &config.damping, now);
            again = again.into_iter().chain(due).min();
        }
        let asked = self.allocated.as_ref().map(|held| held.asked().at);
        let bindings_read = !self.bindings_unread;
        if self.offers.note(&mut pools.snapshots, asked, bindings_read) {
            let soon = now.checked_add(GATE_INTERVAL);
            again = again.into_iter().chain(soon).min();
        }
        let all = pools.snapshots.iter_mut();
        for snapshot in all.filter(|one| one.late().is_some()) {
            let slots = self.slots(snapshot);
            snapshot.set_slots(slots);
        }
        for snapshot in &pools.snapshots {
            let before = self
                .snapshots
                .iter()
                .find(|old| old.resource() == snapshot.resource());
            note_changes(before.map(Arc::as_ref), snapshot, &mut self.transitions);
        }
        let pooled = pools.snapshots.iter().filter(|pool| pool.is_pooled());
        let pooled = pooled.map(|pool| {
            let excluded = Health::Unhealthy(UnhealthyReason::Excluded);
            let members = pool.members().iter();
            let members =
                members.filter(move |one| !one.waits_for_kubelet() && one.health != excluded);
            let hcas = members.map(|member| member.hca.id.clone());
            (pool.resource().to_string(), hcas.collect())
        });
        // Where it is not known what is held, nothing is forgotten.
        let held = self.allocated.as_ref().map(|held| {
            let resources = held.of_whole_pools().map(|(resource, _)| resource);
            resources.collect::<BTreeSet<&str>>()
        });
        let offers = &self.offers;
        self.memory.note_pooled(pooled.collect(), |resource, hca| {
            let is_held = held.as_ref().is_none_or(|held| held.contains(resource));
            is_held || offers.has(resource, hca)
        });
        // An unchanged pool keeps its snapshot, so that no session sends it again.
        self.snapshots = pools
            .snapshots
            .into_iter()
            .map(
                |new| match self.snapshots.iter().find(|old| ***old == new) {
                    Some(old) => old.clone(),
                    None => Arc::new(new),
                },
            )
            .collect();
        let unusable = unusable.into_iter();
        let unusable =
            unusable.map(|one| format!("{} cannot be offered: {}", one.device.name, one.reason));
        self.remarks = pools.remarks.into_iter().chain(unusable).collect();
        self.excluded = pools.excluded;
        again
    }

    /// The slots of a pool with late binding, by its members as they are now.
    fn slots(&self, snapshot: &Snapshot) -> Vec<Slot> {
        let resource = snapshot.resource();
        let mut bindings: Vec<_> = self.bindings.all.iter().collect();
        bindings.sort_by_key(|(_, one)| one.created);
        let bound: Vec<(u32, HcaId)> = bindings
            .into_iter()
            .filter(|(_, one)| one.resource == resource.as_str())
            .filter_map(|(hca, one)| Some((snapshot.slot_number(&one.unit)?, hca.clone())))
            .collect();
        let held = self.allocated.iter().flat_map(|held| held.units(resource));
        let held = held
            .filter_map(|unit| snapshot.slot_number(&unit))
            .collect();
        let mut before = self.snapshots.iter();
        let before = before.find(|before| before.resource() == resource);
        let before = before.map(|before| before.slots()).unwrap_or_default();
        slots::assign(snapshot.members(), &bound, &held, before)
    }

    /// Drops VFs and SFs that were removed for good: their PF is there, they are not for a long time,
    /// and no pod holds a unit of theirs. What is merely broken stays listed and unhealthy.
    fn forget_removed_functions(
        &mut self,
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
                .filter(|member| member.health == Health::Unhealthy(UnhealthyReason::Gone))
                .filter(|member| member.hca.owner().is_some_and(is_here))
                .map(|member| member.hca.id.clone())
                .filter(|id| {
                    let since = *gone.entry(id.clone()).or_insert(now);
                    now.saturating_duration_since(since) >= FORGET_GRACE_PERIOD
                })
                .collect();
            let Some(allocated) = self.allocated.as_ref().filter(|_| !over.is_empty()) else {
                continue;
            };
            let held = allocated.hcas();
            snapshot.forget(|member| {
                let is_held = held.contains_key(&member.hca.id) || self.bindings.has(&member.hca.id);
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
    pub(crate) fn sent(&mut self, now: Instant) {
        self.offers.sent(now);
    }

    /// Takes note of slots that are bound.
    pub(crate) fn set_bindings(&mut self, bindings: Bindings) {
        if *self.bindings != bindings {
            self.bindings = Arc::new(bindings);
        }
    }

    /// Forgets pools whose configuration changed: what they consisted of says nothing about what
    /// they will. HCAs that are only gone from the host for the moment go with them.
    pub(crate) fn keep_only(&mut self, unchanged: impl Fn(&ResourceName) -> bool) {
        self.snapshots
            .retain(|snapshot| unchanged(snapshot.resource()));
    }

    /// HCAs that a pod may have from another pool than theirs.
    pub(crate) fn handed_over(&self) -> impl Iterator<Item = &HcaId> {
        let members = self.snapshots.iter().flat_map(|pool| pool.members());
        let members = members.filter(|member| member.waits_for_kubelet());
        members.map(|member| &member.hca.id)
    }

    /// HCAs that no pod may have, as far as a pool selects them.
    pub(crate) fn reserved(&self) -> impl Iterator<Item = &HcaId> {
        let reserved = |one: &&Excluded| matches!(one.reason, Reason::Reserved(_));
        self.excluded.iter().filter(reserved).map(|one| &one.id)
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
        let word = match (&member.health, old.map(|old| &old.health)) {
            (now, Some(before)) if now == before => continue,
            (Health::Unhealthy(UnhealthyReason::Handover(reason)), _) => {
                tracing::info!(%resource, hca = %member.hca.id, devices, reason, "HCA in the pool soon");
                continue;
            }
            (Health::Healthy, None | Some(Health::Unhealthy(UnhealthyReason::Handover(_)))) => {
                tracing::info!(%resource, hca = %member.hca.id, devices, "HCA in the pool");
                continue;
            }
            (Health::Healthy, Some(_)) => {
                tracing::info!(%resource, hca = %member.hca.id, devices, "HCA is healthy again");
                "healthy"
            }
            (Health::Unhealthy(unhealthy_reason), was) => {
                tracing::warn!(
                    %resource, hca = %member.hca.id, devices, reason = %unhealthy_reason, "HCA is unhealthy"
                );
                if was.is_some_and(|was| !was.is_healthy()) {
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
