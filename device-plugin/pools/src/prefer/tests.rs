//! Advice on real machines.

use hca_trees::machine::a4;
use hca_trees::{On, PciSpec, RdmaSpec, Tree};

use super::*;
use crate::config;
use crate::example;
use crate::host_snapshot::HostSnapshot;
use crate::pool::assemble;

/// A host with its nodes in order.
fn scan(lay: impl FnOnce(&Tree)) -> HostSnapshot {
    let dir = tempfile::tempdir().unwrap();
    let tree = Tree::new(dir.path());
    tree.rdma_core(true);
    lay(&tree);
    example::scan(&tree)
}

/// The snapshot of the only pool of a configuration.
fn pool(seen: &HostSnapshot, text: &str) -> Snapshot {
    let candidates = seen.inventory.hcas.clone();
    assemble(&config::parse(text).unwrap(), &candidates, seen, &[])
        .snapshots
        .remove(0)
}

/// The same for a pool written in our own format.
fn snapshot(lay: impl FnOnce(&Tree), words: &str) -> Snapshot {
    pool(
        &scan(lay),
        &format!("version: 1\npools:\n- {{ resource: rdma/a, {words} }}\n"),
    )
}

fn all(snapshot: &Snapshot) -> Vec<String> {
    snapshot
        .listing()
        .devices
        .into_iter()
        .map(|device| device.id)
        .collect()
}

/// Positions of the chosen units' HCAs among the members.
fn hcas(snapshot: &Snapshot, chosen: &[String]) -> Vec<usize> {
    let place = |id: &String| {
        let hca = id.split('_').next().unwrap();
        snapshot
            .members()
            .iter()
            .position(|member| member.hca.id.to_string() == hca)
            .unwrap()
    };
    chosen.iter().map(place).collect()
}

/// The best unit each time, found by computing the cost of every group from nothing.
fn exhaustive(
    snapshot: &Snapshot,
    free: &[String],
    required: &[String],
    size: usize,
) -> Vec<String> {
    let (Sharing::Shares { policy, .. } | Sharing::Exclusive { policy }) = snapshot.pool().sharing
    else {
        panic!("a pool without a policy");
    };
    let member = |id: &String| match snapshot.unit(id) {
        Some(crate::snapshot::Unit::Member(member)) => Some(member),
        _ => None,
    };
    let mut chosen: Vec<String> = required.iter().take(size).cloned().collect();
    let mut free: Vec<&String> = free.iter().filter(|id| !required.contains(id)).collect();
    free.retain(|id| member(id).is_some());
    free.sort_by_key(|id| (id.len(), id.as_str()));
    let numa_nodes = || -> Option<u32> {
        let nodes = snapshot
            .members()
            .iter()
            .filter_map(|one| one.hca.numa_node());
        let nodes: BTreeSet<u32> = nodes.collect();
        let best = nodes.into_iter().max_by_key(|node| {
            let units = free.iter().filter_map(|id| member(id));
            let units = units.filter(|one| one.hca.numa_node() == Some(*node));
            let hcas: BTreeSet<_> = units.clone().map(|one| &one.hca.id).collect();
            let units = units.count();
            (units.min(size), hcas.len().min(size), units, Reverse(*node))
        });
        best.filter(|_| !free.is_empty())
    };
    let chosen_node = |chosen: &[String]| {
        let mut members = snapshot.members().iter();
        members
            .find(|one| {
                chosen
                    .iter()
                    .any(|id| member(id).is_some_and(|m| m == *one))
            })?
            .hca
            .numa_node()
    };
    let fixed = match policy {
        Policy::Numa => chosen_node(&chosen).or_else(numa_nodes),
        _ => None,
    };
    while chosen.len() < size {
        let node = fixed.or_else(|| chosen_node(&chosen));
        let of = |hca: &Member, ids: &[&String]| {
            ids.iter()
                .filter(|id| member(id).is_some_and(|one| one == hca))
                .count()
        };
        let all: Vec<&String> = chosen.iter().collect();
        let best = snapshot
            .members()
            .iter()
            .filter(|one| of(one, &free) > 0)
            .min_by_key(|one| {
                let (mine, left) = (of(one, &all), of(one, &free));
                let away = usize::from(node.is_some() && one.hca.numa_node() != node);
                let others = snapshot
                    .members()
                    .iter()
                    .filter(|other| of(other, &all) > 0);
                let distances = others.filter_map(|other| snapshot.distance(one, other));
                let distance: usize = distances.map(|one| usize::from(one.class.rank())).sum();
                let used = usize::try_from(one.shares).unwrap() - left;
                match policy {
                    Policy::Spread => [mine, away, distance, used],
                    Policy::Pack => [mine, away, distance, usize::MAX - used],
                    Policy::Numa => [away, mine, distance, used],
                    Policy::SameHca => {
                        let serves_all = left >= size - chosen.len();
                        [usize::MAX - mine, usize::from(!serves_all), distance, used]
                    }
                }
            });
        let Some(best) = best else { break };
        let at = free
            .iter()
            .position(|id| member(id).is_some_and(|one| one == best));
        chosen.push(free.remove(at.unwrap()).clone());
    }
    chosen
}

/// Four NICs, two on each NUMA node, below switches of their own.
fn four_nics(tree: &Tree) {
    for (index, bus) in ["1a", "2a", "9a", "aa"].iter().enumerate() {
        let address = format!("0000:{bus}:00.0");
        let (root, numa_node) = if index < 2 {
            ("pci0000:10", 0)
        } else {
            ("pci0000:90", 1)
        };
        let above = format!("{root}/0000:{}{index}:00.0", &root[8..9]);
        tree.pci(&PciSpec {
            address: &address,
            above: &above,
            numa_node,
            ..PciSpec::MLX5
        });
        let name = format!("mlx5_{index}");
        tree.rdma(&RdmaSpec {
            name: &name,
            on: On::Pci(&address),
            ..RdmaSpec::default()
        });
    }
}

#[test]
fn several_units_come_from_several_hcas_near_each_other() {
    let shared = "mode: shared, shares: 4, select: { functions: [pf] }";
    let snapshot = snapshot(four_nics, shared);
    let free = all(&snapshot);
    let pick = |size| hcas(&snapshot, &prefer(&snapshot, &free, &[], size));
    assert_eq!(pick(1), [0]);
    assert_eq!(pick(2), [0, 1]);
    assert_eq!(pick(4), [0, 1, 2, 3]);
    // A fifth has to share, and stays on the node of the first.
    assert_eq!(pick(5), [0, 1, 2, 3, 0]);
}

#[test]
fn spread_takes_the_least_used_hca_and_pack_the_most_used() {
    let spread = snapshot(
        four_nics,
        "mode: shared, shares: 4, select: { functions: [pf] }",
    );
    let mut free = all(&spread);
    // HCA 0 has three in use, 1 one, 2 none, 3 two.
    let used = |free: &mut Vec<String>, hca: &str, count: usize| {
        for _ in 0..count {
            let at = free.iter().position(|id| id.starts_with(hca)).unwrap();
            free.remove(at);
        }
    };
    used(&mut free, "0000:1a", 3);
    used(&mut free, "0000:2a", 1);
    used(&mut free, "0000:aa", 2);
    assert_eq!(hcas(&spread, &prefer(&spread, &free, &[], 1)), [2]);
    assert_eq!(hcas(&spread, &prefer(&spread, &free, &[], 2)), [2, 3]);
    let pack = snapshot(
        four_nics,
        "mode: shared, shares: 4, policy: pack, select: { functions: [pf] }",
    );
    assert_eq!(hcas(&pack, &prefer(&pack, &free, &[], 1)), [0]);
    assert_eq!(hcas(&pack, &prefer(&pack, &free, &[], 2)), [0, 1]);
}

#[test]
fn numa_keeps_to_one_node_even_if_an_hca_serves_twice() {
    let snapshot = snapshot(
        four_nics,
        "mode: shared, shares: 4, policy: numa, select: { functions: [pf] }",
    );
    let free = all(&snapshot);
    assert_eq!(
        hcas(&snapshot, &prefer(&snapshot, &free, &[], 3)),
        [0, 1, 0]
    );
    // Node 0 has one unit left: node 1 serves both.
    let few: Vec<String> = free
        .iter()
        .filter(|id| {
            id.starts_with("0000:1a") && id.ends_with("_3")
                || id.contains("a:00.0") && !id.starts_with("0000:1a") && !id.starts_with("0000:2a")
        })
        .cloned()
        .collect();
    assert_eq!(hcas(&snapshot, &prefer(&snapshot, &few, &[], 2)), [2, 3]);
}

#[test]
fn same_hca_finds_one_that_can_serve_all() {
    let snapshot = snapshot(
        four_nics,
        "mode: shared, shares: 4, policy: same-hca, select: { functions: [pf] }",
    );
    let free: Vec<String> = all(&snapshot)
        .into_iter()
        .filter(|id| !id.starts_with("0000:1a") || id.ends_with("_3"))
        .collect();
    assert_eq!(
        hcas(&snapshot, &prefer(&snapshot, &free, &[], 3)),
        [1, 1, 1]
    );
}

#[test]
fn what_must_be_included_is_and_draws_the_rest_near() {
    let snapshot = snapshot(
        four_nics,
        "mode: shared, shares: 4, select: { functions: [pf] }",
    );
    let free = all(&snapshot);
    let must = vec![
        free.iter()
            .find(|id| id.starts_with("0000:aa"))
            .unwrap()
            .clone(),
    ];
    let chosen = prefer(&snapshot, &free, &must, 2);
    assert_eq!(chosen[0], must[0]);
    assert_eq!(hcas(&snapshot, &chosen), [3, 2]);
    assert_eq!(prefer(&snapshot, &free, &must, 1), must);
}

#[test]
fn whole_hcas_under_numa_are_chosen_as_a_set() {
    let snapshot = snapshot(
        a4,
        "mode: exclusive, policy: numa, select: { rdmaDevices: [\"*\"] }",
    );
    let everything = all(&snapshot);
    assert_eq!(everything.len(), 8);
    let pick = |free: std::ops::Range<usize>, must: &[usize], size| {
        let must: Vec<String> = must.iter().map(|at| everything[*at].clone()).collect();
        let mut chosen = hcas(
            &snapshot,
            &prefer(&snapshot, &everything[free], &must, size),
        );
        chosen.sort_unstable();
        chosen
    };
    assert_eq!(pick(0..8, &[], 4), [0, 1, 2, 3]);
    assert_eq!(pick(1..8, &[], 4), [4, 5, 6, 7], "the half that is whole");
    assert_eq!(
        pick(1..8, &[], 2),
        [2, 3],
        "a whole switch of the broken half"
    );
    assert_eq!(pick(1..8, &[], 1), [1], "the rest of the broken switch");
    assert_eq!(pick(0..8, &[5], 2), [4, 5]);
    assert_eq!(pick(0..8, &[], 8), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn virtual_functions_come_from_different_cards_or_are_packed() {
    let vfs = |tree: &Tree| {
        for (bus, names) in [("3b", ["a", "b"]), ("86", ["c", "d"])] {
            let pf = format!("0000:{bus}:00.0");
            tree.pci(&PciSpec {
                address: &pf,
                numa_node: 0,
                above: &format!("pci0000:{bus}"),
                ..PciSpec::MLX5
            });
            for (index, name) in names.iter().enumerate() {
                let address = format!("0000:{bus}:00.{}", index + 2);
                let spec = PciSpec {
                    address: &address,
                    numa_node: 0,
                    above: &format!("pci0000:{bus}"),
                    ..PciSpec::MLX5
                };
                tree.vf(&pf, u32::try_from(index).unwrap(), &spec);
                tree.rdma(&RdmaSpec {
                    name,
                    on: On::Pci(&address),
                    ..RdmaSpec::default()
                });
            }
        }
    };
    let spread = snapshot(vfs, "mode: exclusive, select: { functions: [vf] }");
    let free = all(&spread);
    assert_eq!(
        prefer(&spread, &free, &[], 2),
        ["0000:3b:00.2", "0000:86:00.2"]
    );
    let pack = snapshot(
        vfs,
        "mode: exclusive, policy: pack, select: { functions: [vf] }",
    );
    // One of the second card is in use: the next goes there as well.
    assert_eq!(prefer(&pack, &free[..3], &[], 1), ["0000:86:00.2"]);
}

#[test]
fn an_old_pool_counts_up() {
    let text = r#"{"configList": [{"resourceName": "a", "rdmaHcaMax": 12, "selectors": {"vendors": ["15b3"]}}]}"#;
    let old = pool(&scan(four_nics), text);
    let mut free = all(&old);
    free.reverse();
    let chosen = prefer(&old, &free, &[], 11);
    assert!(chosen[0].ends_with("_0") && chosen[2].ends_with("_2") && chosen[10].ends_with("_10"));
}

#[test]
fn foreign_units_and_requests_beyond_what_is_free_do_no_harm() {
    let snapshot = snapshot(
        four_nics,
        "mode: shared, shares: 1, select: { functions: [pf] }",
    );
    let free = all(&snapshot);
    assert_eq!(prefer(&snapshot, &free, &[], 9).len(), 4);
    assert!(prefer(&snapshot, &["0000:99:00.0".into(), String::new()], &[], 1).is_empty());
    assert!(prefer(&snapshot, &free, &[], 0).is_empty());
    assert!(prefer(&snapshot, &[], &[], 3).is_empty());
}

proptest::proptest! {
    #[test]
    fn advice_is_a_subset_of_what_is_free_and_always_the_same(
        keep in proptest::collection::vec(proptest::bool::ANY, 16),
        include in 0usize..3,
        size in 0usize..20,
        policy in 0usize..4,
    ) {
        let word = ["spread", "pack", "numa", "same-hca"][policy];
        static HOST: std::sync::LazyLock<HostSnapshot> = std::sync::LazyLock::new(|| scan(four_nics));
        let snapshot = pool(&HOST, &format!(
            "version: 1
pools:
- {{ resource: rdma/a, mode: shared, shares: 4, policy: {word}, \
             select: {{ functions: [pf] }} }}
"
        ));
        let free: Vec<String> =
            all(&snapshot).into_iter().zip(keep).filter(|(_, keep)| *keep).map(|(id, _)| id).collect();
        let required: Vec<String> = free.iter().rev().take(include).cloned().collect();
        let chosen = prefer(&snapshot, &free, &required, size);
        proptest::prop_assert_eq!(chosen.len(), size.min(free.len()));
        proptest::prop_assert!(chosen.iter().all(|id| free.contains(id)));
        let different: BTreeSet<&String> = chosen.iter().collect();
        proptest::prop_assert_eq!(different.len(), chosen.len());
        let mut turned = free.clone();
        turned.reverse();
        proptest::prop_assert_eq!(prefer(&snapshot, &turned, &required, size), chosen.clone());
        proptest::prop_assert_eq!(exhaustive(&snapshot, &free, &required, size), chosen);
    }
}
