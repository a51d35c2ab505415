//! Pods with a GPU for which a nearer NIC exists.
//!
//! A pod is measured against the best that this machine can give to as many GPUs and NICs: one NIC
//! for eight GPUs is far from some of them whichever it is, and that is not misaligned.

use std::collections::{BTreeMap, BTreeSet};

use hca::topology::{Choice, Machine, Request, choose};

use crate::holders::Holders;

/// Judges every pod that holds at least one GPU and one NIC of this machine. A unit that stands
/// for all HCAs of its pool names no NIC, and its pod is not judged. A sentence for each pod
/// (`namespace/name`) for one of whose GPUs a nearer NIC exists.
pub(crate) fn misaligned(machine: &Machine, holders: &Holders) -> BTreeMap<String, String> {
    let mut of_pod: BTreeMap<String, (BTreeSet<usize>, BTreeSet<usize>)> = BTreeMap::new();
    for (index, gpu) in machine.gpus.iter().enumerate() {
        for pod in holders.gpu(gpu) {
            of_pod.entry(pod).or_default().0.insert(index);
        }
    }
    for (index, nic) in machine.nics.iter().enumerate() {
        for pod in holders.nic(nic) {
            of_pod.entry(pod).or_default().1.insert(index);
        }
    }
    of_pod.retain(|_, (gpus, nics)| !gpus.is_empty() && !nics.is_empty());
    let pods = of_pod.into_iter();
    let misaligned = pods.filter_map(|(pod, (gpus, nics))| {
        let sentence = judge(machine, &pod, &gpus, &nics)?;
        Some((pod, sentence))
    });
    misaligned.collect()
}

fn judge(
    machine: &Machine,
    pod: &str,
    gpus: &BTreeSet<usize>,
    nics: &BTreeSet<usize>,
) -> Option<String> {
    let request = |include: BTreeSet<usize>| Request {
        count: nics.len(),
        gpus: gpus.clone(),
        include,
        ..Request::default()
    };
    let far = |choice: &Choice| choice.pairs.iter().filter(|pair| !pair.aligned).count();
    let own = choose(machine, &request(nics.clone())).ok()?;
    let best = choose(machine, &request(BTreeSet::new())).ok()?;
    if far(&own) <= far(&best) {
        return None;
    }
    let pair = own.pairs.iter().find(|pair| !pair.aligned)?;
    let gpu = machine.gpus.get(pair.gpu)?;
    Some(format!(
        "pod {pod}: GPU {} is served by {} at {}, where {} can be had on this machine",
        gpu.ordinal,
        machine.nics.get(pair.nic)?.title(),
        pair.distance.class,
        machine.nearest(gpu)?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holders::example::holders;
    use hca_trees::{Tree, machine};

    fn a4() -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::a4(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        Machine::read(
            &tree.host(),
            &inventory,
            hca::topology::gpu::read(&tree.host()).unwrap(),
        )
        .unwrap()
    }

    fn judged(held: &[(&str, &str)]) -> Vec<String> {
        let machine = a4();
        let misaligned = misaligned(&machine, &holders(&machine.gpus, held));
        misaligned.into_values().collect()
    }

    #[test]
    fn a_nic_of_the_other_socket_is_misaligned() {
        let alignment = judged(&[("t/far", "0000:8f:00.0"), ("t/far", "0000:ce:00.0")]);
        let expected =
            "pod t/far: GPU 0 is served by mlx5_7 at SYS, where PIX can be had on this machine";
        assert_eq!(alignment, [expected]);
    }

    #[test]
    fn a_nic_of_the_same_switch_is_aligned() {
        let held = [
            ("t/near", "0000:8f:00.0"),
            ("t/near", "0000:92:00.0"),
            ("t/gpu-only", "0000:90:00.0"),
            ("t/nic-only", "0000:99:00.0"),
        ];
        let alignment = judged(&held);
        assert!(alignment.is_empty(), "{alignment:?}");
    }

    #[test]
    fn one_nic_for_gpus_of_both_sockets_is_as_good_as_it_gets() {
        let held = [
            ("t/two", "0000:8f:00.0"),
            ("t/two", "0000:cc:00.0"),
            ("t/two", "0000:91:00.0"),
        ];
        assert!(judged(&held).is_empty());
        let other = [
            ("t/two", "0000:8f:00.0"),
            ("t/two", "0000:90:00.0"),
            ("t/two", "0000:99:00.0"),
        ];
        assert_eq!(judged(&other).len(), 1, "another switch has both near");
    }
}
