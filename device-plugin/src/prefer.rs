//! Which of the free units the kubelet is advised to take: a pure function, the same answer for
//! the same question.

use std::collections::BTreeMap;

use crate::config::Policy;
use crate::snapshot::{Shape, Snapshot, Unit};

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
    let mut chosen: Vec<String> = required.iter().take(size).cloned().collect();
    let policy = match snapshot.shape() {
        Shape::Pooled { .. } => Policy::Pack,
        Shape::Slots { policy } | Shape::Exclusive { policy } => policy,
    };
    // Free units of each member, by its place in the snapshot; a unit of the whole pool is at 0.
    let mut free: BTreeMap<usize, Vec<&String>> = BTreeMap::new();
    let place = |id: &str| match snapshot.unit(id)? {
        Unit::Pool => Some(0),
        Unit::Member(member) => snapshot.members().iter().position(|m| m.id == member.id),
    };
    for id in available.iter().filter(|id| !required.contains(id)) {
        if let Some(place) = place(id) {
            free.entry(place).or_default().push(id);
        }
    }
    let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
    for id in &chosen {
        if let Some(place) = place(id) {
            *taken.entry(place).or_default() += 1;
        }
    }
    for units in free.values_mut() {
        units.sort_by_key(|id| std::cmp::Reverse((id.len(), id.as_str())));
    }
    let numa = |place: usize| {
        snapshot
            .members()
            .get(place)
            .and_then(|member| member.numa_node)
    };
    while chosen.len() < size {
        let home = taken.keys().find_map(|place| numa(*place));
        let best = free
            .iter()
            .filter(|(_, units)| !units.is_empty())
            .min_by_key(|(place, units)| {
                let mine = taken.get(place).copied().unwrap_or_default();
                let away = home.is_some() && numa(**place) != home;
                let free = units.len();
                match policy {
                    Policy::Spread => (mine, false, usize::MAX - free, **place),
                    Policy::Pack => (mine, false, free, **place),
                    Policy::Numa => (mine, away, usize::MAX - free, **place),
                    Policy::SameHca => (usize::MAX - mine, false, usize::MAX - free, **place),
                }
            });
        let Some(place) = best.map(|(place, _)| *place) else {
            break;
        };
        if let Some(id) = free.get_mut(&place).and_then(Vec::pop) {
            chosen.push(id.clone());
            *taken.entry(place).or_default() += 1;
        }
    }
    chosen
}
