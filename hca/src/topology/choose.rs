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
use crate::pci::PciAddress;

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

/// Why no NICs can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There are not enough.
    #[error(
        "{wanted} NICs are wanted, {usable} can be given: of {all}, {taken} are taken, {barred} \
         are unhealthy or of another pool"
    )]
    TooFew {
        /// NICs wanted.
        wanted: usize,
        /// NICs that could be given.
        usable: usize,
        /// All NICs of the machine.
        all: usize,
        /// Held by other pods.
        taken: usize,
        /// Unhealthy, or not of the pool.
        barred: usize,
    },
    /// More NICs have to be included than are wanted.
    #[error("{included} NICs have to be included, but only {wanted} are wanted")]
    TooManyIncluded {
        /// NICs to be included.
        included: usize,
        /// NICs wanted.
        wanted: usize,
    },
    /// A NIC that has to be included cannot be given.
    #[error("{nic} has to be included, but it is taken or unhealthy")]
    Included {
        /// Name of the NIC.
        nic: String,
    },
    /// The best that is free is too far, and that was not wanted.
    #[error(
        "the nearest free NIC for GPU {gpu} is {nic} at {distance}, where {nearest} can be had on \
         this machine"
    )]
    TooFar {
        /// Ordinal of the GPU.
        gpu: u32,
        /// Name of the NIC.
        nic: String,
        /// Their distance.
        distance: Distance,
        /// The nearest any NIC is to that GPU.
        nearest: Class,
    },
}

/// Chooses NICs.
///
/// # Errors
/// A [`Refusal`] says which requirement cannot be met.
pub fn choose(machine: &Machine, request: &Request) -> Result<Choice, Refusal> {
    check(machine, request)?;
    let usable = usable(machine, request)?;
    let task = Task::new(machine, request, usable);
    let set = task.best();
    let pairs = task.pairs(&set);
    if request.strict {
        refuse_far(machine, &pairs)?;
    }
    let mut nics = set;
    nics.sort_by_key(|nic| rail_order(machine, *nic));
    Ok(Choice { nics, pairs })
}

fn check(machine: &Machine, request: &Request) -> Result<(), Refusal> {
    if request.include.len() > request.count {
        return Err(Refusal::TooManyIncluded {
            included: request.include.len(),
            wanted: request.count,
        });
    }
    let mut not_free = request
        .include
        .iter()
        .filter(|n| request.taken.contains(n) || request.barred.contains(n));
    match not_free.next().and_then(|nic| machine.nics.get(*nic)) {
        Some(nic) => Err(Refusal::Included { nic: nic.title() }),
        None => Ok(()),
    }
}

/// NICs that may be given, by rail.
fn usable(machine: &Machine, request: &Request) -> Result<Vec<usize>, Refusal> {
    let all = machine.nics.len();
    let is_usable = |nic: &usize| !request.taken.contains(nic) && !request.barred.contains(nic);
    let mut usable: Vec<usize> = (0..all).filter(is_usable).collect();
    if usable.len() < request.count {
        return Err(Refusal::TooFew {
            wanted: request.count,
            usable: usable.len(),
            all,
            taken: request.taken.len(),
            barred: request.barred.difference(&request.taken).count(),
        });
    }
    usable.sort_by_key(|nic| rail_order(machine, *nic));
    Ok(usable)
}

fn rail_order(machine: &Machine, nic: usize) -> (u32, Option<PciAddress>, usize) {
    let known = machine.nics.get(nic);
    (
        known.map_or(u32::MAX, Nic::rail_order),
        known.map(|nic| nic.place.address),
        nic,
    )
}

fn refuse_far(machine: &Machine, pairs: &[Pair]) -> Result<(), Refusal> {
    let Some(pair) = pairs.iter().find(|pair| !pair.aligned) else {
        return Ok(());
    };
    let (Some(gpu), Some(nic)) = (machine.gpus.get(pair.gpu), machine.nics.get(pair.nic)) else {
        return Ok(());
    };
    Err(Refusal::TooFar {
        gpu: gpu.ordinal,
        nic: nic.title(),
        distance: pair.distance,
        nearest: machine.nearest(gpu).unwrap_or(Class::Sys),
    })
}
