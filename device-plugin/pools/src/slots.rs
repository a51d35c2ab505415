//! The units of a pool with late binding: which slots there are, and the state of each that the
//! daemon reports to the kubelet. Pure.
//!
//! A slot names no HCA. What the kubelet counts must be true all the same: on each NUMA node as many
//! free and healthy slots as HCAs that are free and healthy. So slots and HCAs are matched one to
//! one at each scan. A bound slot has the NUMA node and the health of its HCA. The others take those
//! of the HCAs that are not bound, and keep the node they had where that is possible: the kubelet
//! may have given one to a pod by it a moment ago.

use std::collections::{BTreeMap, BTreeSet};

use hca::HcaId;

use crate::snapshot::{Member, Slot, UnhealthyReason};

/// The slots of a pool with these members. `bound` are its bindings, the newest last where a slot
/// has two; `held` are slots that pods hold; `before` are the slots as they were.
pub fn assign(
    members: &[Member],
    bound: &[(u32, HcaId)],
    held: &BTreeSet<u32>,
    before: &[Slot],
) -> Vec<Slot> {
    let member = |hca: &HcaId| members.iter().find(|member| member.hca.id == *hca);
    let mut slots: BTreeMap<u32, Slot> = BTreeMap::new();
    for (number, hca) in bound {
        let Some(member) = member(hca) else { continue };
        slots.insert(*number, of_member(*number, member, Some(hca.clone())));
    }
    let mut free: Vec<&Member> = members
        .iter()
        .filter(|member| !bound.iter().any(|(_, hca)| *hca == member.hca.id))
        .collect();
    // Healthy ones first, so that what is broken makes the last slots unhealthy.
    free.sort_by_key(|member| !member.health.is_healthy());
    let all = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let known = |number: u32| before.iter().find(|slot| slot.number == number);
    let mut unbound: Vec<u32> = (0..all)
        .filter(|number| !slots.contains_key(number))
        .collect();
    // One that was unhealthy takes no HCA from one that was not.
    unbound.sort_by_key(|number| {
        let was_healthy = known(*number).is_some_and(|slot| slot.health.is_healthy());
        (!held.contains(number), !was_healthy, *number)
    });
    unbound.truncate(free.len());
    // A slot that a pod has waits for its HCA, so those are served before free ones.
    let (of_pods, others): (Vec<u32>, Vec<u32>) = unbound
        .into_iter()
        .partition(|number| held.contains(number));
    for group in [of_pods, others] {
        let mut left = Vec::new();
        for number in group {
            let same = known(number).and_then(|known| {
                free.iter().position(|member| {
                    member.health.is_healthy() && member.hca.numa_node() == known.numa_node
                })
            });
            match same {
                Some(at) => drop(slots.insert(number, of_member(number, free.remove(at), None))),
                None => left.push(number),
            }
        }
        let rest = free.drain(..left.len().min(free.len()));
        for (number, member) in left.into_iter().zip(rest) {
            slots.insert(number, of_member(number, member, None));
        }
    }
    slots.into_values().collect()
}

fn of_member(number: u32, member: &Member, bound: Option<HcaId>) -> Slot {
    // The kubelet would align processors with an HCA that is not there.
    let is_gone = member.health.has(|reason| *reason == UnhealthyReason::Gone);
    Slot {
        number,
        numa_node: member.hca.numa_node().filter(|_| !is_gone),
        health: member.health.clone(),
        bound,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::example::{function, named};
    use crate::snapshot::Health;
    use hca::Hca;

    fn member(index: usize, numa_node: Option<u32>, healthy: bool) -> Member {
        let address = format!("0000:{index:02x}:00.0");
        Member {
            health: (!healthy)
                .then_some(UnhealthyReason::Gone)
                .into_iter()
                .into(),
            ..Member::example(Hca {
                pci: Some(function(&address, numa_node)),
                ..named(&address, &[])
            })
        }
    }

    /// Healthy slots that are not bound, by NUMA node.
    fn free_by_node(slots: &[Slot]) -> BTreeMap<Option<u32>, usize> {
        let mut counts = BTreeMap::new();
        for slot in slots {
            if slot.bound.is_none() && slot.health.is_healthy() {
                *counts.entry(slot.numa_node).or_default() += 1;
            }
        }
        counts
    }

    #[test]
    fn slots_are_numbered_by_hca_first() {
        let members = [
            member(1, Some(0), true),
            member(2, Some(0), true),
            member(3, Some(1), true),
        ];
        let slots = assign(&members, &[], &BTreeSet::new(), &[]);
        let nodes: Vec<_> = slots.iter().map(|s| (s.number, s.numa_node)).collect();
        assert_eq!(nodes, [(0, Some(0)), (1, Some(0)), (2, Some(1))]);
    }

    #[test]
    fn a_slot_bound_to_another_node_is_listed_there_and_a_free_one_takes_its_place() {
        let members = [
            member(1, Some(0), true),
            member(2, Some(0), true),
            member(3, Some(1), true),
            member(4, Some(1), true),
        ];
        let before = assign(&members, &[], &BTreeSet::new(), &[]);
        // Slot 0 was listed on node 0, and its pod's GPU is on node 1.
        let bound = [(0, members[2].hca.id.clone())];
        let held = BTreeSet::from([0, 1]);
        let slots = assign(&members, &bound, &held, &before);
        let nodes: Vec<_> = slots.iter().map(|s| s.numa_node).collect();
        // Slot 1 is held and keeps its node; a free slot of node 1 went over to node 0.
        assert_eq!(nodes, [Some(1), Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn a_broken_hca_makes_a_free_slot_unhealthy_and_a_bound_one_its_own() {
        let mut members = vec![member(1, Some(0), true), member(2, Some(0), true)];
        let before = assign(&members, &[], &BTreeSet::new(), &[]);
        members[0].health = Health::from([UnhealthyReason::Gone]);
        let held = BTreeSet::from([0]);
        let healthy =
            |slots: &[Slot]| -> Vec<bool> { slots.iter().map(|s| s.health.is_healthy()).collect() };
        let free = assign(&members, &[], &held, &before);
        assert_eq!(healthy(&free), [true, false]);
        assert_eq!(free[1].numa_node, None, "it has no HCA");
        let bound = [(0, members[0].hca.id.clone())];
        let own = assign(&members, &bound, &held, &before);
        assert_eq!(healthy(&own), [false, true]);
    }

    proptest! {
        #[test]
        fn free_healthy_slots_are_as_many_as_free_healthy_hcas_on_each_node(
            hcas in proptest::collection::vec((0_u32..3, any::<bool>(), any::<bool>()), 0..12),
            held in proptest::collection::btree_set(0_u32..12, 0..6),
            numbers in Just((0_u32..12).collect::<Vec<_>>()).prop_shuffle(),
            nodes_before in proptest::collection::vec(0_u32..3, 0..12),
        ) {
            let members: Vec<Member> = hcas
                .iter()
                .enumerate()
                .map(|(index, (node, healthy, _))| member(index, Some(*node), *healthy))
                .collect();
            let bound: Vec<(u32, HcaId)> = members
                .iter()
                .zip(&hcas)
                .filter(|(_, (_, _, bound))| *bound)
                .zip(&numbers)
                .map(|((member, _), number)| (*number, member.hca.id.clone()))
                .collect();
            let before: Vec<Slot> = (0_u32..)
                .zip(&nodes_before)
                .map(|(number, node)| Slot {
                    number,
                    numa_node: Some(*node),
                    health: Health::default(),
                    bound: None,
                })
                .collect();
            let slots = assign(&members, &bound, &held, &before);
            let mut expected = BTreeMap::new();
            for (node, healthy, is_bound) in &hcas {
                if *healthy && !is_bound {
                    *expected.entry(Some(*node)).or_default() += 1;
                }
            }
            prop_assert_eq!(free_by_node(&slots), expected);
            let listed: BTreeSet<u32> = slots.iter().map(|slot| slot.number).collect();
            prop_assert_eq!(listed.len(), slots.len());
            for (number, hca) in &bound {
                let slot = slots.iter().find(|slot| slot.number == *number).unwrap();
                prop_assert_eq!(slot.bound.as_ref(), Some(hca));
            }
            // The same again changes nothing.
            prop_assert_eq!(assign(&members, &bound, &held, &slots), slots);
        }
    }
}
