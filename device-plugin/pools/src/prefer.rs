//! Which of the free units the kubelet is advised to take: a pure function, the same answer for
//! the same question.
//!
//! Units are taken from groups, one unit at a time, each time from the group that is best by the
//! pool's policy. A group is what the load of one unit falls on: the HCA of a share, the physical
//! function of an exclusive HCA (two VFs of one card share its wire). Whole HCAs under policy
//! `numa` are chosen as a set by [`hca::topology`], which also keeps switches and NUMA nodes whole
//! for the pods to come.
//!
//! A unit costs one comparison of the groups. What a group costs changes only when a unit is taken
//! from it, or from a group for the first time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use hca::HcaId;
use hca::topology::{Request, choose};

use crate::config::{Policy, Sharing};
use crate::snapshot::{Member, Snapshot};

/// Chooses `size` of `available`, with all of `required` among them.
///
/// Units that the resource does not have are never chosen; if fewer than `size` are left, the
/// answer is as long as it can be, which the kubelet completes by itself.
pub fn prefer(
    snapshot: &Snapshot,
    available: &[String],
    required: &[String],
    size: usize,
) -> Vec<String> {
    let policy = match snapshot.pool().sharing {
        Sharing::Pooled { .. } | Sharing::Late(_) => {
            return lowest_first(available, required, size);
        }
        Sharing::Shares { policy, .. } | Sharing::Exclusive { policy } => policy,
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
        let Some(unit) = groups.take_best(policy, size - chosen.len(), node) else {
            break;
        };
        chosen.push(unit);
    }
    chosen
}

/// Units of a pool that all stand for the same are taken in their order.
fn lowest_first(available: &[String], required: &[String], size: usize) -> Vec<String> {
    let is_required: HashSet<&String> = required.iter().collect();
    let mut free: Vec<&String> = available
        .iter()
        .filter(|id| !is_required.contains(id))
        .collect();
    free.sort_unstable_by_key(|id| (id.len(), id.as_str()));
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
    numa_node: Option<u32>,
    /// Free units, lowest last.
    free: Vec<&'s String>,
    /// Units in all.
    all: usize,
    /// Units chosen for this container.
    mine: usize,
    /// Sum of the distances to the groups of which units are chosen.
    distance: usize,
}

impl<'s> Groups<'s> {
    fn of(snapshot: &'s Snapshot, available: &'s [String], required: &[String]) -> Self {
        let is_shared = snapshot.pool().sharing.is_shared();
        let mut carriers: BTreeMap<String, usize> = BTreeMap::new();
        let mut of_hca: HashMap<&HcaId, usize> = HashMap::new();
        let mut groups: Vec<Group<'s>> = Vec::new();
        for member in snapshot.members() {
            let carrier = match member.hca.owner().filter(|_| !is_shared) {
                Some(pf) => pf.to_string(),
                None => member.hca.id.to_string(),
            };
            let at = *carriers.entry(carrier).or_insert_with(|| {
                groups.push(Group {
                    member,
                    numa_node: member.hca.numa_node(),
                    free: Vec::new(),
                    all: 0,
                    mine: 0,
                    distance: 0,
                });
                groups.len() - 1
            });
            of_hca.insert(&member.hca.id, at);
            if let Some(group) = groups.get_mut(at) {
                group.all += usize::try_from(member.shares).unwrap_or(usize::MAX);
            }
        }
        // By what their names begin with: to read each name costs ten times as much.
        let prefixes = snapshot.members().iter().filter_map(|member| {
            let at = of_hca.get(&member.hca.id)?;
            Some((snapshot.unit_prefix(member), (*at, member.shares)))
        });
        let prefixes: HashMap<String, (usize, u32)> = prefixes.collect();
        let group = |id: &String| match is_shared {
            true => {
                let (prefix, number) = id.split_at(id.rfind('_')? + 1);
                let (at, shares) = prefixes.get(prefix)?;
                let share: u32 = number.parse().ok()?;
                let is_plain = number == "0" || !number.starts_with(['0', '+']);
                (is_plain && share < *shares).then_some(*at)
            }
            false => prefixes.get(id).map(|(at, _)| *at),
        };
        let is_required: HashSet<&String> = required.iter().collect();
        for id in available.iter().filter(|id| !is_required.contains(id)) {
            if let Some(group) = group(id).and_then(|at| groups.get_mut(at)) {
                group.free.push(id);
            }
        }
        for group in &mut groups {
            group
                .free
                .sort_unstable_by_key(|id| Reverse((id.len(), id.as_str())));
        }
        let mut groups = Self { snapshot, groups };
        for at in required.iter().filter_map(group) {
            groups.note_chosen(at);
        }
        groups
    }

    /// Takes note that a unit of a group is chosen.
    fn note_chosen(&mut self, at: usize) {
        let Some(group) = self.groups.get_mut(at) else {
            return;
        };
        group.mine += 1;
        if group.mine > 1 {
            return;
        }
        let anchor = group.member;
        for group in &mut self.groups {
            let distance = self.snapshot.distance(group.member, anchor);
            group.distance += distance.map_or(0, |one| usize::from(one.class.rank()));
        }
    }

    /// The NUMA node of the first group of which a unit is chosen.
    fn chosen_node(&self) -> Option<u32> {
        let mut chosen = self.groups.iter().filter(|group| group.mine > 0);
        chosen.next()?.numa_node
    }

    /// The NUMA node that can serve most of a request, with different HCAs if it can.
    fn roomiest_node(&self, size: usize) -> Option<u32> {
        if let Some(node) = self.chosen_node() {
            return Some(node);
        }
        let mut nodes: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for group in self.groups.iter().filter(|group| !group.free.is_empty()) {
            if let Some(node) = group.numa_node {
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

    /// Takes a unit from the group that costs least; `left` are still to be chosen.
    fn take_best(&mut self, policy: Policy, left: usize, node: Option<u32>) -> Option<String> {
        let node = node.or_else(|| self.chosen_node());
        let groups = self.groups.iter().enumerate();
        let free = groups.filter(|(_, group)| !group.free.is_empty());
        let (at, _) = free.min_by_key(|(_, group)| group.cost(policy, left, node))?;
        let unit = self.groups.get_mut(at)?.free.pop()?.clone();
        self.note_chosen(at);
        Some(unit)
    }
}

impl Group<'_> {
    /// What a unit of this group costs; the first difference decides.
    fn cost(&self, policy: Policy, left: usize, node: Option<u32>) -> [usize; 4] {
        let away = usize::from(node.is_some() && self.numa_node != node);
        let used = self.all.saturating_sub(self.free.len());
        let [first, second] = match policy {
            Policy::Spread | Policy::Pack => [self.mine, away],
            Policy::Numa => [away, self.mine],
            // The HCA that already serves this container, else one that can serve it all.
            Policy::SameHca => [usize::MAX - self.mine, usize::from(self.free.len() < left)],
        };
        let load = match policy {
            Policy::Pack => usize::MAX - used,
            _ => used,
        };
        [first, second, self.distance, load]
    }
}

/// Whole HCAs chosen together by their places; `None` where the machine does not show them.
fn as_a_set(
    snapshot: &Snapshot,
    available: &[String],
    required: &[String],
    size: usize,
) -> Option<Vec<String>> {
    let machine = snapshot.machine();
    let names: Vec<String> = machine
        .nics
        .iter()
        .map(|nic| nic.hca.id.to_string())
        .collect();
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
