//! One space: the questions of ADDs first, then its documents. Everything blocks here; a step reads at
//! most one document that is not about a question.
//!
//! - this file: the loop, and what follows from a document that was read;
//! - `room`: questions of ADDs;
//! - `gone`: parts of nodes that are gone;
//! - `administer`: an administrator's word.

mod administer;
mod gone;
mod room;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipam::leases::{Leases, Use, since_boot};
use ipam::owned::{self, Owned};
use ipam::range::Range;
use ipam::space::AddressSpace;
use ipam::subnet::{Change, Changed, Document, change, piece, subnet_of};
use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{Failure, FailureKind, PartsChange, PartsChanged, Room};
use tokio::sync::oneshot;

use crate::backend::{Backend, BackendError, Pace, Read, Swap};
use crate::decide::{self, Busy, Decision, History, Ids, Inputs, Mode, ThisNode};
use crate::goal::{Goal, Phase, Waiting};
use crate::reserve::{Outcome, Reservation};

/// A space's thread sleeps no longer.
const MAX_SLEEP: Duration = Duration::from_secs(8);
/// How often a restored document is read in which another node has what this one had.
const UNSETTLED_INTERVAL: Duration = Duration::from_mins(1);
/// How long to wait after a failure of the store.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long an old document is not believed.
const RESTORED_REST: Duration = Duration::from_mins(15);
/// More ranges than this are not claimed for at a time: who writes networks chooses how many there are.
const MAX_GOALS: usize = 256;

/// What all spaces of a node share.
#[derive(Debug, Clone)]
pub struct Context {
    pub node: ThisNode,
    /// Below it is `run`.
    pub root: PathBuf,
    pub state_dir: PathBuf,
    pub cooldown: Duration,
    /// How long a part of a node that is gone is marked before it is taken; shorter in tests.
    pub grace: Duration,
}

/// How a space is doing, for pages. Written by its thread, read by others.
#[derive(Debug, Clone, Default)]
pub struct SpaceStatus {
    /// The thread ends, and reads no message any more.
    pub is_over: bool,
    /// Since when a call of the store goes on.
    pub calling: Option<Instant>,
    /// Why the last call of the store failed.
    pub fault: Option<String>,
    /// Documents with parts that overlap, that are older than one that was read before, or that do not give
    /// this node what its pods have.
    pub doubts: BTreeMap<IpNetwork, String>,
    pub parts: u64,
    pub addresses: u64,
    /// Compare-and-swaps that were accepted, and those that were lost.
    pub writes: u64,
    pub lost: u64,
}

/// To a space's thread.
#[derive(Debug)]
pub enum Message {
    Room(Range, Room, Waiting),
    /// Something in the document of a subnet waits for this node, or has come.
    News(IpNetwork),
    /// News may have been missed.
    Missed,
    Parts(PartsChange, oneshot::Sender<Result<PartsChanged, Failure>>),
    /// Reserved addresses of a network in one subnet.
    Reserve(
        IpNetwork,
        Reservation,
        oneshot::Sender<Result<Outcome, Failure>>,
    ),
}

impl Message {
    pub fn refuse(self, failure: Failure) {
        match self {
            Self::Room(_, _, waiting) => drop(waiting.reply.send(Err(failure))),
            Self::News(_) | Self::Missed => {}
            Self::Parts(_, reply) => drop(reply.send(Err(failure))),
            Self::Reserve(_, _, reply) => drop(reply.send(Err(failure))),
        }
    }
}

/// What became of a compare-and-swap of this node.
#[derive(Debug)]
enum Swapped {
    /// The document as it is now.
    Won(Read),
    Lost,
    /// The cluster does not allow the change, and says why.
    Denied(String),
}

/// Why a step did not do what it was to do.
type Fault = String;

#[derive(Debug)]
pub struct Space {
    context: Arc<Context>,
    space: AddressSpace,
    backend: Backend,
    leases: Leases,
    ids: Ids,
    history: History,
    goals: Vec<Goal>,
    /// When each document is read next.
    watched: BTreeMap<IpNetwork, Instant>,
    /// Documents in which others ask, as they were read last, in a store that announces changes.
    asked: BTreeMap<IpNetwork, Read>,
    pending: BTreeSet<String>,
    restored: BTreeMap<IpNetwork, Instant>,
    /// What the store said of itself last.
    store_restored: Option<u64>,
    marks: gone::Marks,
    /// When each other node was asked for, and why it is gone, if it is.
    nodes: BTreeMap<String, (Instant, Option<String>)>,
    status: Arc<Mutex<SpaceStatus>>,
}

impl Space {
    /// Opens a space; reads nothing of its store.
    ///
    /// # Errors
    /// The node's own files cannot be used.
    pub fn open(
        context: Arc<Context>,
        space: AddressSpace,
        backend: Backend,
        status: Arc<Mutex<SpaceStatus>>,
        now: Instant,
    ) -> anyhow::Result<Self> {
        let leases = Leases::open(&context.root, &context.node.boot)?;
        let new = format!("{:08x}", random64() >> 32);
        let owned = owned::change(&leases, &context.state_dir, &space, |owned, _| {
            if owned.node != context.node.name {
                // Another name, another node: its parts are not this one's.
                owned.parts.clear();
                owned.versions.clear();
                owned.node.clone_from(&context.node.name);
                owned.claimant = new;
            }
            owned.clone()
        })?;
        let leased = leases.list()?.leases;
        let leased = leased
            .into_iter()
            .filter(|lease| AddressSpace::new(&lease.store, lease.network_name.as_deref()) == space)
            .map(|lease| lease.address);
        let own = owned.parts.keys().map(IpNetwork::ip);
        let watched = own.chain(leased).map(|address| (subnet_of(address), now));
        Ok(Self {
            watched: watched.collect(),
            ids: Ids {
                claimant: owned.claimant,
                next: u32::try_from(random64() >> 32).unwrap_or(0),
            },
            context,
            space,
            backend,
            leases,
            history: History::default(),
            goals: Vec::new(),
            asked: BTreeMap::new(),
            pending: BTreeSet::new(),
            restored: BTreeMap::new(),
            store_restored: None,
            marks: gone::Marks::default(),
            nodes: BTreeMap::new(),
            status,
        })
    }

    /// Takes a question. Most are answered by a step.
    pub fn ask(&mut self, message: Message, now: Instant) {
        match message {
            Message::Room(range, room, waiting) => {
                let known = self.goals.iter().position(|goal| goal.is(&range, room));
                if known.is_none() {
                    if self.goals.len() >= MAX_GOALS {
                        // What nobody waits for can begin anew.
                        self.goals.retain(|goal| !goal.waiting.is_empty());
                    }
                    if self.goals.len() >= MAX_GOALS {
                        let why = "this node claims for too many ranges at once; try again";
                        let failure = Failure::new(FailureKind::TryAgain, why);
                        return Message::Room(range, room, waiting).refuse(failure);
                    }
                    self.goals
                        .push(Goal::new(range, room, self.ids.new_id(), now));
                }
                let at = known.unwrap_or(self.goals.len() - 1);
                if let Some(goal) = self.goals.get_mut(at) {
                    goal.wait(waiting, now);
                }
            }
            Message::Missed => self.read_all(now),
            Message::News(subnet) => {
                self.asked.remove(&subnet);
                self.watched.insert(subnet, now);
            }
            Message::Parts(change, reply) => {
                let _ = reply.send(self.administer(&change, now));
            }
            Message::Reserve(network, reservation, reply) => {
                let _ = reply.send(self.reserve(network, &reservation));
            }
        }
    }

    /// Does one thing that is due; returns how long nothing is.
    pub fn step(&mut self, now: Instant) -> Duration {
        let restored = self.backend.restored();
        if restored != self.store_restored {
            // What this node has is written before others claim it.
            self.read_all(now);
        }
        self.store_restored = restored;
        for goal in &mut self.goals {
            goal.expire(now);
        }
        let is_due = |goal: &Goal| goal.is_active(now) && goal.due <= now;
        if let Some(at) = self.goals.iter().position(is_due) {
            // Behind the others next time.
            let mut goal = self.goals.remove(at);
            if let Err(fault) = self.pursue(&mut goal, now) {
                goal.fault = Some(fault);
                goal.due = now + RETRY_INTERVAL;
            }
            self.goals.push(goal);
            return Duration::ZERO;
        }
        if let Some(at) = self.goals.iter().position(|goal| goal.is_over(now)) {
            let goal = self.goals.swap_remove(at);
            if let Phase::Ask(asking) = goal.phase {
                self.withdraw(&asking);
            }
            return Duration::ZERO;
        }
        let due = self.watched.iter().find(|(_, due)| **due <= now);
        if let Some((subnet, _)) = due.map(|(subnet, due)| (*subnet, *due)) {
            self.watched.insert(subnet, now + self.pace().look);
            // The fault is in the status.
            let _ = match self.asked.remove(&subnet) {
                Some(read) => self.settle(read, Mode::Usual, now),
                None => self.visit(subnet, Mode::Usual, now),
            };
            return Duration::ZERO;
        }
        let goals = self
            .goals
            .iter()
            .filter(|goal| goal.is_active(now))
            .map(|goal| goal.due);
        let deadlines = self
            .goals
            .iter()
            .flat_map(|goal| &goal.waiting)
            .map(|one| one.deadline);
        let looks = self.watched.values().copied();
        let all = goals.chain(deadlines).chain(looks);
        let next = all
            .min()
            .map_or(MAX_SLEEP, |next| next.saturating_duration_since(now));
        next.min(MAX_SLEEP)
    }

    /// Every document of this node is due.
    fn read_all(&mut self, now: Instant) {
        self.asked.clear();
        self.watched.values_mut().for_each(|due| *due = now);
    }

    /// Whether nothing of this node is in the space.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.goals.is_empty() && self.watched.is_empty()
    }

    /// Ends. Without parts its file goes: who writes networks chooses how many spaces there are.
    pub fn close(self) {
        if let Err(error) = owned::remove_empty(&self.leases, &self.context.state_dir, &self.space)
        {
            tracing::warn!(space = %self.space, %error, "a file without parts stays");
        }
    }

    fn pace(&self) -> Pace {
        self.backend.pace()
    }

    /// Whether the document of a subnet is older than one that was read before.
    fn is_restored(&self, subnet: IpNetwork) -> bool {
        self.restored.contains_key(&subnet) || self.backend.restored().is_some()
    }

    fn note(&self, note: impl FnOnce(&mut SpaceStatus)) {
        note(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Calls the store, which may hang.
    fn call<T>(&self, call: impl FnOnce(&Backend) -> Result<T, BackendError>) -> Result<T, Fault> {
        self.note(|status| status.calling = Some(Instant::now()));
        #[cfg(test)]
        tests::kill::point()?;
        let result = call(&self.backend).map_err(|error| error.to_string());
        #[cfg(test)]
        tests::kill::point()?;
        self.note(|status| {
            status.calling = None;
            let fault = result.as_ref().err().cloned();
            if let Some(fault) = fault.as_ref().filter(|_| status.fault != fault) {
                tracing::warn!(space = %self.space, fault, "cannot use the store; trying again");
            }
            status.fault = fault;
        });
        result
    }

    fn owned(&self) -> Result<Owned, Fault> {
        Owned::read(&self.context.state_dir, &self.space).map_err(|error| error.to_string())
    }

    fn busy(&self, network: IpNetwork) -> Result<BTreeMap<std::net::IpAddr, Busy>, Fault> {
        let uses = self
            .leases
            .uses(&self.space, network)
            .map_err(|error| error.to_string())?;
        Ok(decide::busy(&uses, since_boot(), self.context.cooldown))
    }

    /// Ranges from which pods of this node have addresses, or were asked for lately.
    fn in_use(&self) -> Result<Vec<Range>, Fault> {
        let pools = self.leases.pools().map_err(|error| error.to_string())?;
        let pools = pools.iter().filter(|pool| pool.space.space == self.space);
        let pools = pools.filter_map(|pool| Range::of_parts(pool.range, &pool.spans).ok());
        let goals = self
            .goals
            .iter()
            .filter(|goal| matches!(goal.room, Room::Addresses(_)));
        Ok(pools.chain(goals.map(|goal| goal.range.clone())).collect())
    }

    /// Reads a document and does what follows from it. Returns it as it is afterwards.
    fn visit(&mut self, subnet: IpNetwork, mode: Mode, now: Instant) -> Result<Read, Fault> {
        self.asked.remove(&subnet);
        let read = self.call(|backend| backend.read(&self.space, subnet))?;
        self.settle(read, mode, now)
    }

    fn settle(&mut self, mut read: Read, mode: Mode, now: Instant) -> Result<Read, Fault> {
        let subnet = read.document.subnet;
        loop {
            let decision = self.decide(&read, mode, now)?;
            let mut next = read.document.clone();
            for one in &decision.changes {
                // What is refused is decided anew when the document is read again.
                if let Ok(Changed {
                    document: Some(document),
                    ..
                }) = change(&next, one)
                {
                    next = document;
                }
            }
            let pace = self.pace();
            let interval = [
                (decision.is_asked, pace.asked),
                (decision.is_full, pace.full),
                (decision.is_unsettled, UNSETTLED_INTERVAL),
            ]
            .into_iter()
            .filter_map(|(holds, interval)| holds.then_some(interval))
            .fold(pace.look, Duration::min);
            match decision.is_watched {
                true => self.watched.insert(subnet, now + interval),
                false => self.watched.remove(&subnet),
            };
            if next == read.document {
                if (decision.is_asked || decision.is_full) && pace.is_told {
                    self.asked.insert(subnet, read.clone());
                }
                return Ok(read);
            }
            let news: Vec<String> = decision.changes.iter().filter_map(new_id).collect();
            match self.swap(&read, next, news)? {
                Swapped::Won(written) => read = written,
                Swapped::Denied(why) => {
                    tracing::warn!(space = %self.space, %subnet, why, "a change is not allowed");
                    self.watched.insert(subnet, now + UNSETTLED_INTERVAL);
                    return Ok(read);
                }
                Swapped::Lost => {
                    let wait = decide::backoff(0, random64());
                    self.watched.insert(subnet, now + wait);
                    return self.call(|backend| backend.read(&self.space, subnet));
                }
            }
        }
    }

    /// Makes a compare-and-swap, by which the node may get parts with these IDs; the document afterwards.
    fn swap(&mut self, read: &Read, next: Document, ids: Vec<String>) -> Result<Swapped, Fault> {
        // Before the attempt: if its answer is lost, they are asked for.
        self.pending.extend(ids.iter().cloned());
        self.watched.insert(next.subnet, Instant::now());
        self.asked.remove(&next.subnet);
        match self.call(|backend| backend.swap(&self.space, read, &next))? {
            Swap::Won(version) => {
                self.note(|status| status.writes += 1);
                let written = self.backend.written(&self.space, read, next, version);
                Ok(Swapped::Won(written))
            }
            Swap::Denied(why) => Ok(Swapped::Denied(why)),
            // Perhaps another node went on from it, so they stay asked for.
            Swap::Lost => {
                self.note(|status| status.lost += 1);
                Ok(Swapped::Lost)
            }
        }
    }

    /// Decides about a document, and writes what the node owns of it.
    fn decide(&mut self, read: &Read, mode: Mode, now: Instant) -> Result<Decision, Fault> {
        #[cfg(test)]
        tests::kill::point()?;
        let in_use = self.in_use()?;
        let subnet = read.document.subnet;
        let (context, space, leases) = (self.context.clone(), &self.space, &self.leases);
        let (pending, history, ids) = (&self.pending, &mut self.history, &mut self.ids);
        let (restored, is_store_restored) = (&mut self.restored, self.backend.restored().is_some());
        let time = jiff::Timestamp::now().to_string();
        let decided = owned::change(leases, &context.state_dir, space, |owned, leased| {
            let uses = leased.of(subnet).map_err(|error| error.to_string())?;
            if owned.node != context.node.name {
                owned.node.clone_from(&context.node.name);
                owned.claimant.clone_from(&ids.claimant);
            }
            let known = owned.versions.get(&subnet).copied().unwrap_or(0);
            if read.version < known {
                restored.entry(subnet).or_insert(now);
            }
            // Also while its versions catch up.
            restored.retain(|_, since| now.saturating_duration_since(*since) < RESTORED_REST);
            let is_restored = is_store_restored || restored.contains_key(&subnet);
            let decision = decide::decide(
                &Inputs {
                    node: &context.node,
                    document: &read.document,
                    owned,
                    busy: &decide::busy(&uses, since_boot(), context.cooldown),
                    pending,
                    in_use: &in_use,
                    now,
                    time: &time,
                    mode: if is_restored { Mode::Restored } else { mode },
                },
                history,
                ids,
            );
            owned
                .parts
                .retain(|part, _| !piece::is_piece(subnet, *part));
            owned.parts.extend(decision.parts.clone());
            match (is_restored, decision.parts.is_empty()) {
                (true, _) => {}
                (false, true) => drop(owned.versions.remove(&subnet)),
                (false, false) => drop(owned.versions.insert(subnet, read.version)),
            }
            let outside = uses.iter().filter(|(address, used)| {
                let mut parts = decision.parts.keys();
                *used == Use::Leased && !parts.any(|part| part.contains(*address))
            });
            let outside = outside.map(|(address, _)| *address).next();
            Ok::<_, Fault>((decision, owned.clone(), is_restored, outside))
        });
        let (decision, owned, is_restored, outside) =
            decided.map_err(|error| error.to_string())??;
        #[cfg(test)]
        tests::kill::point()?;
        let got = |id: &String| !decision.parts.values().any(|part| part.id == *id);
        // A piece that came of itself was handed over.
        if self.pending.len() > self.pending.iter().filter(|id| got(id)).count() {
            let asks = |goal: &&mut Goal| matches!(goal.phase, Phase::Ask(_));
            for goal in self.goals.iter_mut().filter(asks) {
                goal.due = goal.due.min(now);
            }
        }
        self.pending.retain(got);
        let doubt = read.document.in_doubt();
        self.note(|status| {
            let sizes = owned.parts.keys().map(|part| piece::size(*part) as u64);
            (status.parts, status.addresses) = (owned.parts.len() as u64, sizes.sum());
            let why = match (is_restored, doubt.is_empty()) {
                (true, _) => Some("it is older than one that was read before".to_owned()),
                (_, false) => Some(format!("parts overlap: {doubt:?}")),
                _ => outside.map(|address| {
                    format!("a pod of this node has {address}, which is not in a part of this node")
                }),
            };
            match why {
                Some(why) => drop(status.doubts.insert(subnet, why)),
                None => drop(status.doubts.remove(&subnet)),
            }
        });
        Ok(decision)
    }
}

/// The ID by which a change gives this node a part.
fn new_id(change: &Change) -> Option<String> {
    match change {
        Change::NotOver { by, .. } | Change::Claim { by, .. } | Change::Take { by, .. } => {
            Some(by.id.clone())
        }
        _ => None,
    }
}
