use hca_trees::{Tree, machine};

use super::*;

fn scan(lay: impl Fn(&Tree)) -> Machine {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    lay(&tree);
    let inventory = hca::inventory(&tree.host()).unwrap();
    Machine::read(
        &tree.host(),
        &inventory,
        hca::topology::gpu::read(&tree.host()).unwrap(),
    )
    .unwrap()
}

fn all(machine: &Machine) -> Vec<HcaId> {
    machine.nics.iter().map(|nic| nic.hca.id.clone()).collect()
}

fn container(name: &str, slots: &[u32], gpus: &[usize]) -> Container {
    Container {
        name: name.into(),
        slots: slots.iter().map(|n| format!("slot_3e71787e_{n}")).collect(),
        gpus: gpus.iter().copied().collect(),
        ..Container::default()
    }
}

fn count(name: &str, slots: u32, gpus: &[usize]) -> Container {
    container(name, &(0..slots).collect::<Vec<_>>(), gpus)
}

/// Positions of the NICs, by slot.
fn nics(machine: &Machine, assigned: &[Assigned]) -> Vec<usize> {
    let position = |hca: &HcaId| machine.nics.iter().position(|nic| nic.hca.id == *hca);
    assigned
        .iter()
        .map(|one| position(&one.hca).unwrap())
        .collect()
}

fn worst(assigned: &[Assigned]) -> Option<Class> {
    let pairs = assigned.iter().flat_map(|one| &one.pairs);
    pairs.map(|pair| pair.distance.class).max()
}

/// The best that can be had for each GPU by any assignment of different NICs: every one is tried.
fn best_possible(machine: &Machine, gpus: &[usize], free: &[usize]) -> Class {
    fn place(machine: &Machine, gpus: &[usize], free: &[usize], so_far: Class) -> Class {
        let Some((gpu, rest)) = gpus.split_first() else {
            return so_far;
        };
        let gpu = &machine.gpus[*gpu].place;
        let each = free.iter().map(|nic| {
            let class = machine.distance(gpu, &machine.nics[*nic].place).class;
            let left: Vec<usize> = free.iter().copied().filter(|one| one != nic).collect();
            place(machine, rest, &left, so_far.max(class))
        });
        each.min().unwrap()
    }
    place(machine, gpus, free, Class::Pix)
}

fn sets_of(n: usize, most: usize) -> Vec<Vec<usize>> {
    (1_u32..1 << n)
        .map(|bits| (0..n).filter(|at| bits >> at & 1 == 1).collect::<Vec<_>>())
        .filter(|set| set.len() <= most)
        .collect()
}

#[test]
fn every_gpu_set_gets_nics_of_the_best_class_that_exists() {
    // Two NUMA nodes with two switches each, below each of them two NICs and two GPUs.
    let machine = scan(machine::a4);
    assert_eq!((machine.gpus.len(), machine.nics.len()), (8, 8));
    let hcas = all(&machine);
    let mut tried = 0;
    // With every NIC free, and with each pair of NICs gone.
    for taken in sets_of(8, 2).into_iter().chain([Vec::new()]) {
        let free: Vec<usize> = (0..8).filter(|at| !taken.contains(at)).collect();
        let usable: Vec<HcaId> = free.iter().map(|at| hcas[*at].clone()).collect();
        for gpus in sets_of(8, 4) {
            let slots = u32::try_from(gpus.len()).unwrap();
            let pod = [count("main", slots, &gpus)];
            let assigned = decide(&machine, &usable, &BTreeMap::new(), &pod, false).unwrap();
            let expected = best_possible(&machine, &gpus, &free);
            assert_eq!(
                worst(&assigned),
                Some(expected),
                "GPUs {gpus:?} of {free:?}: {assigned:?}"
            );
            let mut given = nics(&machine, &assigned);
            given.sort_unstable();
            given.dedup();
            assert_eq!(given.len(), gpus.len(), "no NIC twice");
            assert!(given.iter().all(|nic| free.contains(nic)));
            // Strict refuses exactly what is farther than PXB where nearer ones exist.
            let strict = decide(&machine, &usable, &BTreeMap::new(), &pod, true);
            assert_eq!(
                strict.is_ok(),
                expected.is_peer_to_peer(),
                "{gpus:?} {free:?}"
            );
            tried += 1;
        }
    }
    assert_eq!(tried, 37 * 162);
}

#[test]
fn each_containers_own_gpus_are_served_by_its_own_slots() {
    let machine = scan(machine::a4);
    let usable = all(&machine);
    for one in sets_of(8, 2) {
        for other in sets_of(8, 2) {
            if one.iter().any(|gpu| other.contains(gpu)) {
                continue;
            }
            let first = count("a", u32::try_from(one.len()).unwrap(), &one);
            let second: Vec<u32> = (10..10 + u32::try_from(other.len()).unwrap()).collect();
            let pod = [first, container("b", &second, &other)];
            let assigned = decide(&machine, &usable, &BTreeMap::new(), &pod, true).unwrap();
            let union: Vec<usize> = one.iter().chain(&other).copied().collect();
            let free: Vec<usize> = (0..8).collect();
            assert_eq!(
                worst(&assigned),
                Some(best_possible(&machine, &union, &free)),
                "{one:?} {other:?}: {assigned:?}"
            );
            for (name, gpus) in [("a", &one), ("b", &other)] {
                let of = assigned.iter().filter(|a| a.container == name);
                let mut served: Vec<usize> =
                    of.flat_map(|a| &a.pairs).map(|pair| pair.gpu).collect();
                served.sort_unstable();
                assert_eq!(&served, gpus);
            }
        }
    }
}

/// GPUs, NICs in all, those that are free, those that must be among the chosen, the chosen.
type Vector<'a> = (&'a [usize], u32, Vec<usize>, &'a [usize], &'a [usize]);

#[test]
fn the_seeds_selection_vectors_hold() {
    let machine = scan(machine::a4);
    let hcas = all(&machine);
    let range = |from: usize, to: usize| (from..=to).collect::<Vec<_>>();
    let cases: [Vector<'_>; 19] = [
        (&[0], 1, range(0, 7), &[], &[0]),
        (&[7], 1, range(0, 7), &[], &[7]),
        (&[3], 1, range(0, 7), &[], &[3]),
        (&[0, 1, 6, 7], 4, range(0, 7), &[], &[0, 1, 6, 7]),
        (&[3, 4, 5, 6], 4, range(0, 7), &[], &[3, 4, 5, 6]),
        (&[0, 1], 2, range(1, 7), &[], &[1, 2]),
        (&[0, 1, 2, 3], 2, range(0, 7), &[], &[0, 2]),
        (&[0], 2, range(0, 7), &[], &[0, 1]),
        (&[0], 4, range(0, 7), &[], &[0, 1, 2, 3]),
        (&[4, 5], 2, vec![0, 1, 2, 3, 6, 7], &[], &[6, 7]),
        (&[0], 1, range(4, 7), &[], &[4]),
        (&[], 4, range(0, 7), &[], &[0, 1, 2, 3]),
        (&[], 4, range(1, 7), &[], &[4, 5, 6, 7]),
        (&[], 2, range(1, 7), &[], &[2, 3]),
        (&[], 1, range(1, 7), &[], &[1]),
        (&[], 3, range(0, 7), &[], &[0, 1, 2]),
        (&[], 2, range(0, 7), &[5], &[4, 5]),
        (&[3, 4], 2, range(0, 7), &[], &[3, 4]),
        (&[], 8, range(0, 7), &[], &[0, 1, 2, 3, 4, 5, 6, 7]),
    ];
    for (gpus, slots, free, must, expected) in cases {
        let usable: Vec<HcaId> = free.iter().map(|at| hcas[*at].clone()).collect();
        // What must be included is what the last slots are bound to already.
        let kept = must.iter().rev().zip((0..slots).rev());
        let kept = kept
            .map(|(nic, slot)| (format!("slot_3e71787e_{slot}"), hcas[*nic].clone()))
            .collect();
        let pod = [count("main", slots, gpus)];
        let assigned = decide(&machine, &usable, &kept, &pod, false).unwrap();
        assert_eq!(
            nics(&machine, &assigned),
            expected,
            "GPUs {gpus:?} of {free:?}"
        );
    }
    let quadruples: [&[usize]; 6] = [
        &[0, 1, 6, 7],
        &[2, 3, 4, 5],
        &[0, 1, 2, 7],
        &[3, 4, 5, 6],
        &[0, 5, 6, 7],
        &[1, 2, 3, 4],
    ];
    for gpus in quadruples {
        let pod = [count("main", 4, gpus)];
        let assigned = decide(&machine, &hcas, &BTreeMap::new(), &pod, true).unwrap();
        assert_eq!(worst(&assigned), Some(Class::Pix), "{gpus:?}");
        assert_eq!(nics(&machine, &assigned), gpus, "{gpus:?}");
    }
}

#[test]
fn a_container_without_gpus_carries_for_those_in_containers_without_slots() {
    let machine = scan(machine::a4);
    let pod = [container("gpu", &[], &[6]), count("net", 1, &[])];
    let assigned = decide(&machine, &all(&machine), &BTreeMap::new(), &pod, true).unwrap();
    assert_eq!(worst(&assigned), Some(Class::Pix));
    assert_eq!(assigned[0].container, "net");
    // Beside a container that has its own NIC, it takes what is left without being refused for it.
    let pod = [count("main", 1, &[0]), container("log", &[7], &[])];
    let assigned = decide(&machine, &all(&machine), &BTreeMap::new(), &pod, true).unwrap();
    assert_eq!(assigned[0].pairs.len(), 1);
    assert_eq!(assigned[1].pairs, []);
}

#[test]
fn too_few_hcas_and_those_without_a_place_are_refused() {
    let machine = scan(machine::a4);
    let pod = [count("main", 3, &[0, 1])];
    let two = &all(&machine)[..2];
    let refused = decide(&machine, two, &BTreeMap::new(), &pod, true).unwrap_err();
    assert_eq!(refused, Refused::TooFew { wanted: 3, free: 2 });
    let soft: HcaId = "guid-505400fffe000001".parse().unwrap();
    let usable = [two, std::slice::from_ref(&soft)].concat();
    let refused = decide(&machine, &usable, &BTreeMap::new(), &pod, true).unwrap_err();
    assert_eq!(refused, Refused::NoPlace(soft.clone()));
    let taken = decide(&machine, &usable, &BTreeMap::new(), &pod, false).unwrap();
    assert_eq!(taken[2].hca, soft);
    // Without GPUs there is nothing to be near to.
    let pod = [count("main", 3, &[])];
    assert!(decide(&machine, &usable, &BTreeMap::new(), &pod, true).is_ok());
}

#[test]
fn what_slots_became_is_kept() {
    let machine = scan(machine::a4);
    let usable = all(&machine);
    let pod = [count("main", 3, &[0, 3, 6])];
    let first = decide(&machine, &usable, &BTreeMap::new(), &pod, true).unwrap();
    // Killed after any number of files: the rest becomes what it would have been.
    for done in 0..=3 {
        let kept: BTreeMap<String, HcaId> = first
            .iter()
            .take(done)
            .map(|one| (one.slot.clone(), one.hca.clone()))
            .collect();
        let left: Vec<HcaId> = usable
            .iter()
            .filter(|hca| !kept.values().any(|known| known == *hca))
            .cloned()
            .collect();
        assert_eq!(
            decide(&machine, &left, &kept, &pod, true),
            Ok(first.clone())
        );
    }
}

#[test]
fn a_pod_without_gpus_keeps_the_nodes_of_its_slots() {
    // NICs 0 to 3 are on node 0, 4 to 7 on node 1.
    let machine = scan(machine::a4);
    let hcas = all(&machine);
    let listed = |nodes: &[u32], gpus: &[usize]| {
        let mut container = count("main", u32::try_from(nodes.len()).unwrap(), gpus);
        container.nodes = container
            .slots
            .iter()
            .cloned()
            .zip(nodes.to_vec())
            .collect();
        [container]
    };
    let free = |free: &[usize]| -> Vec<HcaId> { free.iter().map(|at| hcas[*at].clone()).collect() };
    let (none, every) = (BTreeMap::new(), hcas.clone());
    let nodes = |usable: &[HcaId], kept: &BTreeMap<String, HcaId>, pod: &[Container]| -> Vec<u32> {
        let assigned = decide(&machine, usable, kept, pod, true).unwrap();
        let nics = nics(&machine, &assigned);
        nics.iter()
            .map(|nic| machine.nics[*nic].place.numa.unwrap())
            .collect()
    };
    for listed_on in [&[1][..], &[0], &[0, 1], &[1, 0], &[1, 1, 0, 1]] {
        assert_eq!(nodes(&every, &none, &listed(listed_on, &[])), listed_on);
    }
    // The node has no more free ones: another node is better than nothing.
    assert_eq!(
        nodes(&free(&[0, 1, 5]), &none, &listed(&[1, 1], &[])),
        [1, 0]
    );
    let kept = BTreeMap::from([("slot_3e71787e_0".to_owned(), hcas[0].clone())]);
    assert_eq!(nodes(&free(&[1, 5]), &kept, &listed(&[1, 1], &[])), [0, 1]);
    // With GPUs the HCA nearest to them wins.
    assert_eq!(nodes(&every, &none, &listed(&[1], &[0])), [0]);
    // Each container keeps its own.
    let mut pod = [count("a", 1, &[]), container("b", &[7], &[])];
    for (container, node) in pod.iter_mut().zip([1, 0]) {
        container.nodes = BTreeMap::from([(container.slots[0].clone(), node)]);
    }
    assert_eq!(nodes(&every, &none, &pod), [1, 0]);
}

#[test]
fn each_free_hca_near_a_gpu_counts_once() {
    let machine = scan(machine::a4);
    let hcas = all(&machine);
    for free in 0..=8 {
        assert_eq!(
            free_aligned(&machine, &hcas[..free]),
            free,
            "the first {free}"
        );
        assert_eq!(
            free_aligned(&machine, &hcas[8 - free..]),
            free,
            "the last {free}"
        );
    }
    let without_gpus = Machine {
        gpus: Vec::new(),
        ..machine
    };
    assert_eq!(free_aligned(&without_gpus, &hcas), 0);
    let mut far = scan(machine::a4);
    far.gpus.truncate(4);
    // The GPUs of the first NUMA node: HCAs of the other one are near none.
    assert_eq!(free_aligned(&far, &hcas[4..]), 0);
    assert_eq!(free_aligned(&far, &hcas[2..6]), 2);
}
