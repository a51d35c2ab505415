//! Which of the free units the kubelet is advised to take: a pure function, the same answer for
//! the same question.
//!
//! Units are taken from groups, one unit at a time, each time from the group that is best by the
//! pool's policy. A group is what the load of one unit falls on: the HCA of a slot, the physical
//! function of an exclusive HCA (two VFs of one card share its wire). Whole HCAs under policy
//! `numa` are chosen as a set by [`hca::topology`], which also keeps switches and NUMA nodes whole
//! for the pods to come.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use hca::topology::{Request, choose};

use crate::config::{Policy, Sharing};
use crate::snapshot::{Member, Snapshot, Unit};

/// Chooses `size` of `available`, with all of `required` among them.
///
/// Units that the resource does not have are never chosen; if fewer than `size` are left, the
/// answer is as long as it can be, which the kubelet completes by itself.
pub(crate) fn prefer(
    snapshot: &Snapshot,
    available: &[String],
    required: &[String],
    size: usize,
) -> Vec<String> {
    let policy = match snapshot.pool().sharing {
        Sharing::Pooled { .. } | Sharing::Late(_) => {
            return lowest_first(available, required, size);
        }
        Sharing::Slots { policy, .. } | Sharing::Exclusive { policy } => policy,
    };
    if policy == Policy::Numa
        && !snapshot.pool().sharing.is_shared()
        && let Some(chosen) = as_a_set(snapshot, available, required, size)
    {
        return chosen;
    }
    let mut groups = Groups::of(snapshot, available, required);
    let mut chosen: Vec<String> = required.iter().take(size).cloned().collect();
    let node = (policy == Policy::Numa)
        .then(|| groups.roomiest_node(size))
        .flatten();
    while chosen.len() < size {
        let left = size - chosen.len();
        let best = groups.best(policy, left, node);
        let Some(unit) = best.and_then(|at| groups.take(at)) else {
            break;
        };
        chosen.push(unit);
    }
    chosen
}

/// Units of a pool that all stand for the same are taken in their order.
fn lowest_first(available: &[String], required: &[String], size: usize) -> Vec<String> {
    let mut free: Vec<&String> = available
        .iter()
        .filter(|id| !required.contains(id))
        .collect();
    free.sort_by_key(|id| (id.len(), id.as_str()));
    required.iter().chain(free).take(size).cloned().collect()
}

/// Free units by what carries them.
struct Groups<'s> {
    snapshot: &'s Snapshot,
    groups: Vec<Group<'s>>,
}

struct Group<'s> {
    /// A member that stands for the group.
    member: &'s Member,
    /// Free units, lowest last.
    free: Vec<&'s String>,
    /// Units in all.
    all: usize,
    /// Units chosen for this container.
    mine: usize,
}

impl<'s> Groups<'s> {
    fn of(snapshot: &'s Snapshot, available: &'s [String], required: &[String]) -> Self {
        let is_shared = snapshot.pool().sharing.is_shared();
        let carrier = |member: &Member| match member.hca.owner().filter(|_| !is_shared) {
            Some(pf) => pf.to_string(),
            None => member.hca.id.to_string(),
        };
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        let mut groups: Vec<Group<'s>> = Vec::new();
        for member in snapshot.members() {
            let at = *places.entry(carrier(member)).or_insert_with(|| {
                groups.push(Group {
                    member,
                    free: Vec::new(),
                    all: 0,
                    mine: 0,
                });
                groups.len() - 1
            });
            if let Some(group) = groups.get_mut(at) {
                group.all += usize::try_from(member.slots).unwrap_or(usize::MAX);
            }
        }
        let place = |id: &str| match snapshot.unit(id)? {
            Unit::Member(member) => places.get(&carrier(member)).copied(),
            Unit::Pool | Unit::Slot(_) => None,
        };
        let required_ids: BTreeSet<&str> = required.iter().map(String::as_str).collect();
        for id in available
            .iter()
            .filter(|id| !required_ids.contains(id.as_str()))
        {
            if let Some(group) = place(id).and_then(|at| groups.get_mut(at)) {
                group.free.push(id);
            }
        }
        for id in required {
            if let Some(group) = place(id).and_then(|at| groups.get_mut(at)) {
                group.mine += 1;
            }
        }
        for group in &mut groups {
            group
                .free
                .sort_by_key(|id| Reverse((id.len(), id.as_str())));
        }
        Self { snapshot, groups }
    }

    /// The NUMA node that can serve most of a request, with different HCAs if it can.
    fn roomiest_node(&self, size: usize) -> Option<u32> {
        let mine = self.groups.iter().find(|group| group.mine > 0);
        if let Some(node) = mine.and_then(|group| group.member.hca.numa_node()) {
            return Some(node);
        }
        let mut nodes: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for group in self.groups.iter().filter(|group| !group.free.is_empty()) {
            if let Some(node) = group.member.hca.numa_node() {
                let (carriers, units) = nodes.entry(node).or_default();
                *carriers += 1;
                *units += group.free.len();
            }
        }
        let best = nodes.iter().max_by_key(|(node, (carriers, units))| {
            (
                (*units).min(size),
                (*carriers).min(size),
                *units,
                Reverse(**node),
            )
        });
        best.map(|(node, _)| *node)
    }

    /// The group to take the next unit from.
    fn best(&self, policy: Policy, left: usize, node: Option<u32>) -> Option<usize> {
        let anchor = self.groups.iter().filter(|group| group.mine > 0);
        let anchors: Vec<&Group<'_>> = anchor.collect();
        let node = node.or_else(|| {
            anchors
                .first()
                .and_then(|group| group.member.hca.numa_node())
        });
        let mut candidates: Vec<usize> = (0..self.groups.len()).collect();
        candidates.retain(|at| {
            self.groups
                .get(*at)
                .is_some_and(|group| !group.free.is_empty())
        });
        candidates.into_iter().min_by_key(|at| {
            let Some(group) = self.groups.get(*at) else {
                return Cost::MAX;
            };
            let away = node.is_some() && group.member.hca.numa_node() != node;
            let used = group.all.saturating_sub(group.free.len());
            let distance: usize = anchors
                .iter()
                .filter_map(|other| self.snapshot.distance(group.member, other.member))
                .map(|distance| usize::from(distance.class.rank()))
                .sum();
            let [first, second] = match policy {
                Policy::Spread | Policy::Pack => [group.mine, usize::from(away)],
                Policy::Numa => [usize::from(away), group.mine],
                // The HCA that already serves this container, else one that can serve it all.
                Policy::SameHca => [
                    usize::MAX - group.mine,
                    usize::from(group.free.len() < left),
                ],
            };
            let load = if policy == Policy::Pack {
                usize::MAX - used
            } else {
                used
            };
            Cost([first, second, distance, load, *at])
        })
    }

    fn take(&mut self, at: usize) -> Option<String> {
        let group = self.groups.get_mut(at)?;
        group.mine += 1;
        group.free.pop().cloned()
    }
}

/// What a group costs; the first difference decides.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Cost([usize; 5]);

impl Cost {
    const MAX: Self = Self([usize::MAX; 5]);
}

/// Whole HCAs chosen together by their places; `None` where the machine does not show them.
fn as_a_set(
    snapshot: &Snapshot,
    available: &[String],
    required: &[String],
    size: usize,
) -> Option<Vec<String>> {
    let machine = snapshot.machine();
    let names: Vec<String> = machine.nics.iter().map(|nic| nic.hca.to_string()).collect();
    let position = |id: &String| names.iter().position(|name| name == id);
    let include: BTreeSet<usize> = required.iter().map(position).collect::<Option<_>>()?;
    let free: BTreeSet<usize> = available.iter().filter_map(position).collect();
    let of_pool: BTreeSet<usize> = snapshot
        .members()
        .iter()
        .filter_map(|m| position(&m.hca.id.to_string()))
        .collect();
    let taken = |at: &usize| of_pool.contains(at) && !free.contains(at) && !include.contains(at);
    let request = Request {
        count: size,
        taken: (0..names.len()).filter(taken).collect(),
        barred: (0..names.len())
            .filter(|at| !of_pool.contains(at))
            .collect(),
        include,
        ..Request::default()
    };
    let choice = choose(machine, &request).ok()?;
    choice
        .nics
        .iter()
        .map(|at| names.get(*at).cloned())
        .collect()
}

#[cfg(test)]
mod tests;
