//! Which HCA each slot of a pod becomes. Pure.
//!
//! All slots of a resource are decided together: first the best set of HCAs for all GPUs of the pod
//! ([`hca::topology::choose`]), then who of the pod's containers gets which of them. A container is
//! served for its own GPUs. One without GPUs of its own is served for those that are in containers
//! without slots: the containers of a pod share their network, and a GPU's traffic may leave
//! through any of them. A pod without GPUs keeps the NUMA nodes of its slots: the kubelet has aligned its
//! processors with them.

use std::collections::{BTreeMap, BTreeSet};

use hca::HcaId;
use hca::topology::{Class, Machine, Nic, Pair, Request, choose};

/// A container of the pod, and what it has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its slots of the resource, in the order in which they are numbered.
    pub slots: Vec<String>,
    /// Its GPUs, as positions in [`Machine::gpus`].
    pub gpus: BTreeSet<usize>,
    /// The NUMA nodes that its slots were listed on.
    pub nodes: BTreeMap<String, u32>,
}

/// A slot and the HCA that it becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assigned {
    /// The slot.
    pub slot: String,
    /// Name of the container that asked for it.
    pub container: String,
    /// The HCA.
    pub hca: HcaId,
    /// The HCA's rail; its position among those without a place in the PCI tree.
    pub rail: u32,
    /// The GPUs that it serves.
    pub pairs: Vec<Pair>,
}

/// Why slots cannot be bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There are not enough HCAs.
    #[error("{wanted} HCAs are asked for, and {free} of this pool are healthy and free")]
    TooFew {
        /// Slots of the pod.
        wanted: usize,
        /// HCAs that could be given.
        free: usize,
    },
    /// The machine does not show where HCAs are.
    #[error(
        "how far {0} is from the pod's GPUs is not known: it has no place in the PCI tree; \
         strict: false for this pool takes it all the same"
    )]
    NoPlace(HcaId),
    /// No set of HCAs is as it must be.
    #[error("{0}; strict: false for this pool takes what there is")]
    Choice(String),
}

/// Decides. `usable` are the HCAs that the pod may be given, `kept` what its slots became already.
///
/// # Errors
/// [`Refused`].
pub fn decide(
    machine: &Machine,
    usable: &[HcaId],
    kept: &BTreeMap<String, HcaId>,
    containers: &[Container],
    strict: bool,
) -> Result<Vec<Assigned>, Refused> {
    let wanted: usize = containers.iter().map(|one| one.slots.len()).sum();
    let position = |hca: &HcaId| machine.nics.iter().position(|nic| nic.hca.id == *hca);
    let given = usable.iter().chain(kept.values());
    let (placed, unplaced): (BTreeSet<&HcaId>, BTreeSet<&HcaId>) =
        given.partition(|hca| position(hca).is_some());
    let free = placed.len() + unplaced.len();
    if free < wanted {
        return Err(Refused::TooFew { wanted, free });
    }
    let all_gpus: BTreeSet<usize> = containers.iter().flat_map(|one| one.gpus.clone()).collect();
    let kept_unplaced = kept.values().filter(|hca| unplaced.contains(hca)).count();
    let from_tree = placed.len().min(wanted - kept_unplaced.min(wanted));
    if let (true, false, Some(hca)) = (strict, all_gpus.is_empty(), unplaced.first())
        && from_tree < wanted
    {
        return Err(Refused::NoPlace((*hca).clone()));
    }
    let positions: BTreeSet<usize> = placed.iter().filter_map(|hca| position(hca)).collect();
    let barred: BTreeSet<usize> = (0..machine.nics.len())
        .filter(|at| !positions.contains(at))
        .collect();
    let mut include: BTreeSet<usize> = kept.values().filter_map(position).collect();
    if all_gpus.is_empty() {
        let nodes = nodes_of_unbound(kept, containers);
        include.extend(on_nodes(machine, nodes, &positions, &include)?);
    }
    let request = Request {
        count: from_tree,
        gpus: all_gpus,
        include,
        barred,
        ..Request::default()
    };
    let choice = choose(machine, &request).map_err(Refused::Choice)?;
    let shares = share_out(machine, &choice.nics, &choice.pairs, kept, containers);
    let mut rest: Vec<HcaId> = unplaced
        .into_iter()
        .filter(|hca| !kept.values().any(|known| known == *hca))
        .cloned()
        .collect();
    rest.reverse();
    let mut assigned = Vec::new();
    for (container, mut nics) in containers.iter().zip(shares) {
        let pairs = serve(
            machine,
            container,
            containers,
            &nics,
            &request.barred,
            strict,
        )?;
        nics.reverse();
        for slot in &container.slots {
            let hca = match kept.get(slot) {
                Some(hca) => hca.clone(),
                None => {
                    let node = container
                        .nodes
                        .get(slot)
                        .filter(|_| request.gpus.is_empty());
                    let next = next_nic(machine, &mut nics, kept, node).or_else(|| rest.pop());
                    next.ok_or(Refused::TooFew { wanted, free })?
                }
            };
            let at = position(&hca);
            let nic = at.and_then(|at| machine.nics.get(at));
            // A NIC that is on no rail, such as one for storage, is numbered behind the others.
            let rail = nic.and_then(|nic| Some(nic.rail.as_ref()?.number));
            let rail = rail.unwrap_or_else(|| assigned.len().try_into().unwrap_or(u32::MAX));
            assigned.push(Assigned {
                slot: slot.clone(),
                container: container.name.clone(),
                rail,
                pairs: pairs
                    .iter()
                    .filter(|pair| Some(pair.nic) == at)
                    .copied()
                    .collect(),
                hca,
            });
        }
    }
    Ok(assigned)
}

/// How many HCAs out of `usable` are near a GPU: a pod with that GPU is bound to one of them also where
/// the pool is strict.
pub fn free_aligned(machine: &Machine, usable: &[HcaId]) -> usize {
    let is_usable = |nic: &&Nic| usable.contains(&nic.hca.id);
    let is_near_a_gpu = |nic: &&Nic| {
        machine.gpus.iter().any(|gpu| {
            let class = machine.distance(&gpu.place, &nic.place).class;
            class.is_peer_to_peer() || machine.nearest(gpu) == Some(class)
        })
    };
    let nics = machine.nics.iter().filter(is_usable);
    nics.filter(is_near_a_gpu).count()
}

/// How many slots without an HCA were listed on each NUMA node.
fn nodes_of_unbound(
    kept: &BTreeMap<String, HcaId>,
    containers: &[Container],
) -> BTreeMap<u32, usize> {
    let mut nodes = BTreeMap::new();
    let slots = containers.iter().flat_map(|one| &one.nodes);
    for (_, node) in slots.filter(|(slot, _)| !kept.contains_key(*slot)) {
        *nodes.entry(*node).or_default() += 1;
    }
    nodes
}

/// NICs on these nodes, as many as are wanted and free on each.
fn on_nodes(
    machine: &Machine,
    nodes: BTreeMap<u32, usize>,
    free: &BTreeSet<usize>,
    kept: &BTreeSet<usize>,
) -> Result<BTreeSet<usize>, Refused> {
    let mut all = BTreeSet::new();
    for (node, wanted) in nodes {
        let here =
            |at: &usize| free.contains(at) && !kept.contains(at) && is_on(machine, *at, node);
        let (here, barred): (BTreeSet<usize>, BTreeSet<usize>) =
            (0..machine.nics.len()).partition(here);
        let request = Request {
            count: wanted.min(here.len()),
            barred,
            ..Request::default()
        };
        all.extend(choose(machine, &request).map_err(Refused::Choice)?.nics);
    }
    Ok(all)
}

fn is_on(machine: &Machine, at: usize, node: u32) -> bool {
    let nic = machine.nics.get(at);
    nic.is_some_and(|nic| nic.place.numa == Some(node))
}

/// The next HCA of a container that no slot of it has yet, on the slot's `node` if it matters.
fn next_nic(
    machine: &Machine,
    nics: &mut Vec<usize>,
    kept: &BTreeMap<String, HcaId>,
    node: Option<&u32>,
) -> Option<HcaId> {
    nics.retain(|at| !kept.values().any(|known| is(machine, *at, known)));
    let near = nics
        .iter()
        .rposition(|at| node.is_some_and(|node| is_on(machine, *at, *node)));
    let next = near.or(nics.len().checked_sub(1))?;
    Some(machine.nics.get(nics.remove(next))?.hca.id.clone())
}

/// Which container gets which of the chosen NICs: those that serve its GPUs first, then the nearest
/// of the rest. Each container's are in the order of the choice, which is that of rails.
fn share_out(
    machine: &Machine,
    nics: &[usize],
    pairs: &[Pair],
    kept: &BTreeMap<String, HcaId>,
    containers: &[Container],
) -> Vec<Vec<usize>> {
    let mut left: Vec<usize> = nics.to_vec();
    let mut shares: Vec<Vec<usize>> = vec![Vec::new(); containers.len()];
    let take = |share: &mut Vec<usize>, left: &mut Vec<usize>, nic: usize| {
        if let Some(at) = left.iter().position(|one| *one == nic) {
            share.push(left.remove(at));
        }
    };
    for (share, container) in shares.iter_mut().zip(containers) {
        for hca in container.slots.iter().filter_map(|slot| kept.get(slot)) {
            if let Some(nic) = nics.iter().find(|at| is(machine, **at, hca)) {
                take(share, &mut left, *nic);
            }
        }
    }
    for (share, container) in shares.iter_mut().zip(containers) {
        for pair in pairs
            .iter()
            .filter(|pair| container.gpus.contains(&pair.gpu))
        {
            if share.len() < container.slots.len() {
                take(share, &mut left, pair.nic);
            }
        }
    }
    // Those with GPUs of their own before those that only carry for others.
    let mut order: Vec<usize> = (0..containers.len()).collect();
    order.sort_by_key(|at| containers.get(*at).is_some_and(|one| one.gpus.is_empty()));
    for at in order {
        let (Some(share), Some(container)) = (shares.get_mut(at), containers.get(at)) else {
            continue;
        };
        let gpus = served_gpus(container, containers);
        while share.len() < container.slots.len() {
            let nearest = |nic: &usize| {
                let nic = machine.nics.get(*nic)?;
                let gpus = gpus.iter().filter_map(|gpu| machine.gpus.get(*gpu));
                gpus.map(|gpu| machine.distance(&gpu.place, &nic.place).class)
                    .min()
            };
            // Without GPUs the first on a node of its slots.
            let is_near = |nic: usize| {
                container
                    .nodes
                    .values()
                    .any(|one| is_on(machine, nic, *one))
            };
            let best = left
                .iter()
                .copied()
                .min_by_key(|nic| (nearest(nic).map_or(u8::MAX, Class::rank), !is_near(*nic)));
            let Some(best) = best else { break };
            take(share, &mut left, best);
        }
    }
    for share in &mut shares {
        share.sort_by_key(|nic| nics.iter().position(|one| one == nic));
    }
    shares
}

fn is(machine: &Machine, at: usize, hca: &HcaId) -> bool {
    machine.nics.get(at).is_some_and(|nic| nic.hca.id == *hca)
}

/// The GPUs that a container's HCAs are for.
fn served_gpus(container: &Container, containers: &[Container]) -> BTreeSet<usize> {
    if !container.gpus.is_empty() {
        return container.gpus.clone();
    }
    let without_slots = containers.iter().filter(|one| one.slots.is_empty());
    without_slots.flat_map(|one| one.gpus.clone()).collect()
}

/// Which of a container's NICs serves which GPU.
fn serve(
    machine: &Machine,
    container: &Container,
    containers: &[Container],
    nics: &[usize],
    barred: &BTreeSet<usize>,
    strict: bool,
) -> Result<Vec<Pair>, Refused> {
    if nics.is_empty() {
        return Ok(Vec::new());
    }
    let request = Request {
        count: nics.len(),
        gpus: served_gpus(container, containers),
        include: nics.iter().copied().collect(),
        barred: barred.clone(),
        strict,
        ..Request::default()
    };
    Ok(choose(machine, &request).map_err(Refused::Choice)?.pairs)
}

#[cfg(test)]
mod tests;
