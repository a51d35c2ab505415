//! Which NICs to give to a pod, for the GPUs it has.
//!
//! Each GPU gets a NIC as near as possible, and as much as possible stays whole for later pods. Sets
//! are compared by these costs in order. With GPUs: the worst class of a GPU to its NIC; the sum of
//! those classes; for further NICs the distances to their nearest GPU; damage; differences of rail and
//! GPU numbers; the lowest rails. Without GPUs: NUMA nodes; switches; damage; the lowest rails.
//!
//! Damage is 10 for each wholly free NUMA node, and 1 for each wholly free switch or card, that becomes
//! partly used. With fewer NICs than GPUs, each NIC serves its share, rounded up.
//!
//! A set is grown from a NIC of each switch, and its NICs are exchanged one by one while it improves. Of
//! the sets that this finds, the cheapest is taken. The answer depends on the input alone.

mod task;

use std::collections::BTreeSet;

use self::task::Task;
use super::distance::{Class, Distance};
use super::machine::Machine;
use super::nic::Nic;

/// What is asked for. GPUs and NICs are positions in [`Machine::gpus`] and [`Machine::nics`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// NICs in all.
    pub count: usize,
    /// GPUs of the pod; none if they are not known.
    pub gpus: BTreeSet<usize>,
    /// NICs that have to be among the chosen (the kubelet's `must_include`).
    pub include: BTreeSet<usize>,
    /// NICs that another pod has.
    pub taken: BTreeSet<usize>,
    /// NICs that cannot be given for another reason: unhealthy, or not of the pool.
    pub barred: BTreeSet<usize>,
    /// Refuse rather than give a GPU a NIC that is beyond `PXB` and farther than it need be on
    /// this machine.
    pub strict: bool,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The NICs, by rail.
    pub nics: Vec<usize>,
    /// Which NIC serves each GPU, by GPU.
    pub pairs: Vec<Pair>,
}

/// A GPU and the NIC that serves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The GPU.
    pub gpu: usize,
    /// The NIC.
    pub nic: usize,
    /// How far they are apart.
    pub distance: Distance,
    /// The NIC reads and writes the GPU's memory without a copy through host memory.
    pub direct: bool,
    /// The nearest NIC of the machine, free or not, is not nearer than this; or this one is
    /// near enough that it does not matter.
    pub aligned: bool,
}

/// Chooses NICs.
///
/// # Errors
/// Which requirement cannot be met, and by what.
pub fn choose(machine: &Machine, request: &Request) -> Result<Choice, String> {
    let usable = usable(machine, request)?;
    let task = Task::new(machine, request, usable);
    let mut nics = task.best();
    let pairs = task.pairs(&nics);
    if request.strict
        && let Some(pair) = pairs.iter().find(|pair| !pair.aligned)
        && let (Some(gpu), Some(nic)) = (machine.gpus.get(pair.gpu), machine.nics.get(pair.nic))
    {
        let (ordinal, title, distance) = (gpu.ordinal, nic.title(), pair.distance);
        let nearest = machine.nearest(gpu).unwrap_or(Class::Sys);
        return Err(format!(
            "the nearest free NIC for GPU {ordinal} is {title} at {distance}, where {nearest} can be had \
             on this machine"
        ));
    }
    nics.sort_by_key(|nic| by_rail(machine, *nic));
    Ok(Choice { nics, pairs })
}

/// NICs that may be given, by rail.
fn usable(machine: &Machine, request: &Request) -> Result<Vec<usize>, String> {
    let Request {
        count,
        include,
        taken,
        barred,
        ..
    } = request;
    if include.len() > *count {
        let included = include.len();
        return Err(format!(
            "{included} NICs have to be included, but only {count} are wanted"
        ));
    }
    let is_usable = |nic: &usize| !taken.contains(nic) && !barred.contains(nic);
    let other = include.iter().find(|nic| !is_usable(nic));
    if let Some(nic) = other.and_then(|nic| machine.nics.get(*nic)) {
        let title = nic.title();
        return Err(format!(
            "{title} has to be included, but it is taken or unhealthy"
        ));
    }
    let all = machine.nics.len();
    let mut usable: Vec<usize> = (0..all).filter(is_usable).collect();
    if usable.len() < *count {
        let (usable, barred) = (usable.len(), barred.difference(taken).count());
        let taken = taken.len();
        return Err(format!(
            "{count} NICs are wanted, {usable} can be given: of {all}, {taken} are taken, {barred} are \
             unhealthy or of another pool"
        ));
    }
    usable.sort_by_key(|nic| by_rail(machine, *nic));
    Ok(usable)
}

/// Rail, then address: NICs are in the order of that.
fn by_rail(machine: &Machine, nic: usize) -> (u32, usize) {
    let known = machine.nics.get(nic);
    (known.map_or(u32::MAX, Nic::rail_order), nic)
}
