//! One space: the questions of ADDs first, then its documents. Everything blocks here; a step reads at
//! most one document that is not about a question.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipam::block::{AddressSpace, single};
use ipam::leases::{Leases, since_boot};
use ipam::owned::{self, Owned, OwnedPart};
use ipam::range::{Range, gateway_in};
use ipam::subnet::{
    Change, Changed, Document, Holder, OwnNetwork, Part, Refused, Want, Wanted, change, claim_size,
    piece, subnet_of, subnets,
};
use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{Failure, FailureKind, PartsChange, PartsChanged, Room};
use tokio::sync::oneshot;

use crate::backend::Backend;
use crate::decide::{
    self, Busy, Candidate, Decision, History, Ids, Inputs, MAX_ASKED, Mode, ThisNode, WANT_LIMIT,
};
use crate::directory::{Read, Swap};
use crate::goal::{Asking, Goal, Phase, Waiting};

/// How often a document of the node is read: who asks for room in it has it within ten seconds.
const LOOK_INTERVAL: Duration = Duration::from_secs(8);
/// The same while somebody asks for room in it.
const URGENT_INTERVAL: Duration = Duration::from_secs(2);
/// How often a claimant reads documents in which it asked for room.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long the first nodes that were asked are waited for, before others are asked, too.
const ROUND: Duration = Duration::from_secs(10);
/// How long to wait after a failure of the store.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long an old document is not believed.
const RESTORED_REST: Duration = Duration::from_mins(15);
/// More ranges than this are not claimed for at a time: who writes networks chooses how many there are.
const MAX_GOALS: usize = 256;
/// How often an administrator's change is tried.
const MAX_ATTEMPTS: usize = 16;

/// What all spaces of a node share.
#[derive(Debug, Clone)]
pub struct Context {
    pub node: ThisNode,
    /// Below it is `run`.
    pub root: PathBuf,
    pub state_dir: PathBuf,
    pub cooldown: Duration,
}

/// How a space is doing, for pages. Written by its thread, read by others.
#[derive(Debug, Clone, Default)]
pub struct SpaceStatus {
    /// Since when a call of the store goes on.
    pub calling: Option<Instant>,
    /// Why the last call of the store failed.
    pub fault: Option<String>,
    /// Documents with parts that overlap, or that are older than one that was read before.
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
    Parts(PartsChange, oneshot::Sender<Result<PartsChanged, Failure>>),
}

impl Message {
    pub fn refuse(self, failure: Failure) {
        match self {
            Self::Room(_, _, waiting) => drop(waiting.reply.send(Err(failure))),
            Self::Parts(_, reply) => drop(reply.send(Err(failure))),
        }
    }
}

/// Why a step did not do what it was to do.
type Fault = String;

/// What became of an attempt to claim.
enum Attempt {
    /// Something changed: see what is owned now.
    Again,
    NoRoom(Document),
    Refused(Refused, Document),
}

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
    /// Whether all documents were listed that may name this node.
    is_listed: bool,
    pending: BTreeSet<String>,
    restored: BTreeMap<IpNetwork, Instant>,
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
        let watched = owned.parts.keys().map(|part| (subnet_of(part.ip()), now));
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
            is_listed: false,
            pending: BTreeSet::new(),
            restored: BTreeMap::new(),
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
            Message::Parts(change, reply) => {
                let _ = reply.send(self.administer(&change, now));
            }
        }
    }

    /// Does one thing that is due; returns how long nothing is.
    pub fn step(&mut self, now: Instant) -> Duration {
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
        if !self.is_listed && self.list(now).is_err() {
            return RETRY_INTERVAL;
        }
        let due = self.watched.iter().find(|(_, due)| **due <= now);
        if let Some((subnet, _)) = due.map(|(subnet, due)| (*subnet, *due)) {
            self.watched.insert(subnet, now + LOOK_INTERVAL);
            // The fault is in the status.
            let _ = self.visit(subnet, Mode::Usual, now);
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
        let all = goals.chain(deadlines).chain(self.watched.values().copied());
        let next = all
            .min()
            .map_or(LOOK_INTERVAL, |next| next.saturating_duration_since(now));
        next.min(LOOK_INTERVAL)
    }

    /// Whether nothing of this node is in the space.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.goals.is_empty() && self.watched.is_empty() && self.is_listed
    }

    fn note(&self, note: impl FnOnce(&mut SpaceStatus)) {
        note(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Calls the store, which may hang.
    fn call<T, E: ToString>(
        &self,
        call: impl FnOnce(&Backend) -> Result<T, E>,
    ) -> Result<T, Fault> {
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

    fn list(&mut self, now: Instant) -> Result<(), Fault> {
        for subnet in self.call(|backend| backend.subnets(&self.space))? {
            self.watched.entry(subnet).or_insert(now);
        }
        self.is_listed = true;
        Ok(())
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
        let pools = pools.iter().filter(|pool| {
            let space = pool.space.as_ref();
            space.is_some_and(|of| of.space == self.space)
        });
        let pools = pools.filter_map(|pool| Range::of_parts(pool.range, &pool.spans).ok());
        let goals = self
            .goals
            .iter()
            .filter(|goal| matches!(goal.room, Room::Addresses(_)));
        Ok(pools.chain(goals.map(|goal| goal.range.clone())).collect())
    }

    /// Reads a document and does what follows from it. Returns it as it is afterwards.
    fn visit(&mut self, subnet: IpNetwork, mode: Mode, now: Instant) -> Result<Read, Fault> {
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
            let interval = match decision.is_urgent {
                true => URGENT_INTERVAL,
                false => LOOK_INTERVAL,
            };
            match decision.is_watched {
                true => self.watched.insert(subnet, now + interval),
                false => self.watched.remove(&subnet),
            };
            if next == read.document {
                return Ok(read);
            }
            let news: Vec<String> = decision.changes.iter().filter_map(new_id).collect();
            match self.swap(&read, next.clone(), news)? {
                Some(version) => {
                    read = Read {
                        document: next,
                        version,
                    }
                }
                None => {
                    let wait = decide::backoff(0, random64());
                    self.watched.insert(subnet, now + wait);
                    return self.call(|backend| backend.read(&self.space, subnet));
                }
            }
        }
    }

    /// Makes a compare-and-swap, by which the node may get parts with these IDs; the new version.
    fn swap(
        &mut self,
        read: &Read,
        next: Document,
        ids: Vec<String>,
    ) -> Result<Option<u64>, Fault> {
        // Before the attempt: if its answer is lost, they are asked for.
        self.pending.extend(ids.iter().cloned());
        self.watched.insert(next.subnet, Instant::now());
        match self.call(|backend| backend.swap(&self.space, read.version, &next))? {
            Swap::Won(version) => {
                self.note(|status| status.writes += 1);
                Ok(Some(version))
            }
            // Perhaps another node went on from it, so they stay asked for.
            Swap::Lost => {
                self.note(|status| status.lost += 1);
                Ok(None)
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
        let restored = &mut self.restored;
        let time = jiff::Timestamp::now().to_string();
        let decided = owned::change(leases, &context.state_dir, space, |owned, leased| {
            let uses = leased.of(subnet).map_err(|error| error.to_string())?;
            if owned.node != context.node.name {
                owned.node.clone_from(&context.node.name);
                owned.claimant.clone_from(&ids.claimant);
            }
            let known = owned.versions.get(&subnet).copied().unwrap_or(0);
            let since = match read.version < known {
                true => Some(*restored.entry(subnet).or_insert(now)),
                false => restored.remove(&subnet).and(None),
            };
            let is_restored =
                since.is_some_and(|since| now.saturating_duration_since(since) < RESTORED_REST);
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
            Ok::<_, Fault>((decision, owned.clone(), is_restored))
        });
        let (decision, owned, is_restored) = decided.map_err(|error| error.to_string())??;
        #[cfg(test)]
        tests::kill::point()?;
        let got = |id: &String| !decision.parts.values().any(|part| part.id == *id);
        self.pending.retain(got);
        let doubt = read.document.in_doubt();
        self.note(|status| {
            let sizes = owned.parts.keys().map(|part| piece::size(*part) as u64);
            (status.parts, status.addresses) = (owned.parts.len() as u64, sizes.sum());
            let why = match (is_restored, doubt.is_empty()) {
                (true, _) => Some("it is older than one that was read before".to_owned()),
                (_, false) => Some(format!("parts overlap: {doubt:?}")),
                _ => None,
            };
            match why {
                Some(why) => drop(status.doubts.insert(subnet, why)),
                None => drop(status.doubts.remove(&subnet)),
            }
        });
        Ok(decision)
    }

    /// One step towards room of a range.
    fn pursue(&mut self, goal: &mut Goal, now: Instant) -> Result<(), Fault> {
        goal.fault = None;
        let owned = self.owned()?;
        let boot = &self.context.node.boot;
        let unconfirmed = owned
            .parts
            .iter()
            .find(|(piece, part)| part.boot != *boot && goal.range.size_within(**piece) > 0);
        if let Some((piece, _)) = unconfirmed {
            let subnet = subnet_of(piece.ip());
            self.visit(subnet, Mode::Usual, now)?;
            let is_restored = self.restored.contains_key(&subnet);
            match is_restored {
                true => return Err(format!("the document of {subnet} is older than before")),
                false => return Ok(()),
            }
        }
        let networks = owned
            .parts
            .iter()
            .filter(|(piece, part)| is_network_of(goal, **piece, part));
        let networks: Vec<IpNetwork> = networks.map(|(piece, _)| *piece).collect();
        self.set_gateways(goal, &networks)?;
        let owned = self.owned()?;
        let of = owned.cut(&goal.range, &self.context.node.name, boot);
        let has = match goal.room {
            Room::Exact(address) => {
                u64::from(owned.has(&goal.range, address, &self.context.node.name, boot))
            }
            Room::Addresses(_) | Room::Network(_) => {
                let parts = owned.parts.keys().map(|piece| subnet_of(piece.ip()));
                let subnets: BTreeSet<IpNetwork> =
                    parts.filter(|subnet| of.size_within(*subnet) > 0).collect();
                let mut busy = BTreeMap::new();
                for subnet in subnets {
                    busy.extend(self.busy(subnet)?);
                }
                decide::free(&of, &busy)
            }
        };
        let asking = matches!(goal.phase, Phase::Ask(_))
            .then(|| std::mem::replace(&mut goal.phase, Phase::Claim(0)));
        let missing = match asking {
            Some(Phase::Ask(asking)) => match goal.serve(has) {
                0 => {
                    self.withdraw(&asking);
                    0
                }
                missing => {
                    goal.phase = Phase::Ask(asking);
                    missing
                }
            },
            _ => goal.serve(has),
        };
        if missing == 0 {
            return Ok(());
        }
        if let Some(network) = networks.first() {
            let why = format!("the network {network} of this node is used up");
            goal.fail(FailureKind::Exhausted, &why, now);
            return Ok(());
        }
        let own = of.size();
        match &mut goal.phase {
            Phase::Scan(left) => {
                let subnet = match left {
                    None => {
                        let all = self.call(|backend| backend.subnets(&self.space))?;
                        let inside = |subnet: &IpNetwork| goal.range.size_within(*subnet) > 0;
                        *left = Some(all.into_iter().filter(inside).collect());
                        return Ok(());
                    }
                    Some(left) => left.pop(),
                };
                match subnet {
                    Some(subnet) => drop(self.visit(subnet, Mode::Usual, now)?),
                    None => goal.phase = Phase::Claim(0),
                }
                Ok(())
            }
            Phase::Claim(at) => {
                let subnet = match goal.room {
                    Room::Exact(address) => (*at == 0).then(|| subnet_of(address)),
                    _ => subnets(&goal.range, &self.context.node.name).nth(*at),
                };
                let Some(subnet) = subnet else {
                    self.ask_others(goal, missing, own, now);
                    return Ok(());
                };
                match self.claim(goal, subnet, missing, own, now)? {
                    Attempt::Again => {}
                    Attempt::NoRoom(document) => {
                        let name = &self.context.node.name;
                        let found = decide::candidates(&document, name, &goal.range);
                        goal.candidates.extend(found);
                        goal.phase = match goal.phase {
                            Phase::Claim(at) => Phase::Claim(at + 1),
                            _ => Phase::Claim(0),
                        };
                    }
                    Attempt::Refused(refused, document) => {
                        self.refused(goal, &refused, &document, now)
                    }
                }
                Ok(())
            }
            Phase::Ask(_) => self.poll(goal, missing, own, now),
        }
    }

    /// The gateway of a node's network is this node's matter, and a part that was assigned has none.
    fn set_gateways(&self, goal: &Goal, networks: &[IpNetwork]) -> Result<(), Fault> {
        let Some(per_node) = goal.range.per_node().filter(|_| !networks.is_empty()) else {
            return Ok(());
        };
        let set = owned::change(
            &self.leases,
            &self.context.state_dir,
            &self.space,
            |owned, _| {
                for (piece, part) in &mut owned.parts {
                    if let Some(network) =
                        part.network.as_mut().filter(|_| networks.contains(piece))
                    {
                        network.gateway = gateway_in(per_node, *piece);
                    }
                }
            },
        );
        set.map_err(|error| error.to_string())
    }

    fn claim(
        &mut self,
        goal: &mut Goal,
        subnet: IpNetwork,
        missing: u64,
        own: u128,
        now: Instant,
    ) -> Result<Attempt, Fault> {
        let before = self.owned()?.parts;
        let read = self.visit(subnet, Mode::Usual, now)?;
        // A piece was handed over, or a claim is done whose answer was lost.
        if self.owned()?.parts != before {
            return Ok(Attempt::Again);
        }
        if self.restored.contains_key(&subnet) {
            return Ok(Attempt::NoRoom(Document::empty("", "", subnet)));
        }
        let size = self.size(goal, missing, own);
        let what = match goal.room {
            Room::Exact(address) => Wanted::Exact(single(address)),
            Room::Network(_) => Wanted::Network(goal.range.clone()),
            Room::Addresses(_) => {
                let range = goal.range.clone();
                Wanted::Size { size, range }
            }
        };
        let by = self.holder(&goal.id);
        match change(&read.document, &Change::Claim { by, what }) {
            Ok(Changed {
                document: Some(next),
                ..
            }) => {
                match self.swap(&read, next.clone(), vec![goal.id.clone()])? {
                    Some(version) => {
                        goal.lost = 0;
                        let read = Read {
                            document: next,
                            version,
                        };
                        self.settle(read, Mode::Usual, now)?;
                        goal.id = self.ids.new_id();
                    }
                    None => {
                        goal.due = now + decide::backoff(goal.lost, random64());
                        goal.lost += 1;
                    }
                }
                Ok(Attempt::Again)
            }
            Ok(_) => {
                goal.id = self.ids.new_id();
                Ok(Attempt::Again)
            }
            Err(Refused::NoRoom { .. }) => Ok(Attempt::NoRoom(read.document)),
            Err(refused) => Ok(Attempt::Refused(refused, read.document)),
        }
    }

    fn size(&self, goal: &Goal, missing: u64, own: u128) -> u16 {
        let missing = u16::try_from(missing.min(64)).unwrap_or(64);
        let missing = missing.checked_next_power_of_two().unwrap_or(64);
        claim_size(goal.range.size(), None, own).max(missing)
    }

    fn holder(&self, id: &str) -> Holder {
        Holder {
            node: self.context.node.name.clone(),
            id: id.to_owned(),
        }
    }

    /// A certain address is another's.
    fn refused(&mut self, goal: &mut Goal, refused: &Refused, document: &Document, now: Instant) {
        match refused {
            Refused::Held { part, node } if *node != self.context.node.name => {
                let mut found = decide::candidates(document, &self.context.node.name, &goal.range);
                found.retain(|one| one.part == *part);
                if let (Some(one), Room::Exact(address)) = (found.first_mut(), goal.room) {
                    one.among = (address, address);
                }
                goal.candidates = found;
                self.ask_others(goal, 1, 0, now);
            }
            Refused::Held { .. } | Refused::Stale { .. } => {
                goal.fault = Some(format!("{refused}; try again"));
                goal.due = now + RETRY_INTERVAL;
            }
            _ => goal.fail(FailureKind::HeldByAnotherNode, &refused.to_string(), now),
        }
    }

    /// No subnet of the range has a free piece.
    fn ask_others(&mut self, goal: &mut Goal, missing: u64, own: u128, now: Instant) {
        let range = goal.range.subnet();
        let mut next = std::mem::take(&mut goal.candidates);
        if next.is_empty() || matches!(goal.room, Room::Network(_)) {
            let why = match goal.room {
                Room::Network(of) => format!("{range} has no free network of length {}", of.prefix),
                _ => format!(
                    "{range} is exhausted: this node has {own} of {} addresses, {missing} more are needed, \
                     and no other node has one",
                    goal.range.size()
                ),
            };
            goal.fail(FailureKind::Exhausted, &why, now);
            return;
        }
        decide::order(&mut next, &self.context.node.name);
        // The next one is the last.
        next.reverse();
        goal.due = now;
        goal.phase = Phase::Ask(Box::new(Asking {
            id: self.ids.new_id(),
            since: now,
            next,
            asked: Vec::new(),
            poll: 0,
        }));
    }

    /// Asks another node, or looks whether one gave something.
    fn poll(
        &mut self,
        goal: &mut Goal,
        missing: u64,
        own: u128,
        now: Instant,
    ) -> Result<(), Fault> {
        let size = self.size(goal, missing, own);
        let Phase::Ask(asking) = &mut goal.phase else {
            return Ok(());
        };
        let age = now.saturating_duration_since(asking.since);
        if age >= WANT_LIMIT {
            let Phase::Ask(asking) = std::mem::replace(&mut goal.phase, Phase::Claim(0)) else {
                return Ok(());
            };
            self.withdraw(&asking);
            let why = format!(
                "{} is exhausted: {} nodes were asked, and none has a free address",
                goal.range.subnet(),
                asking.asked.len()
            );
            goal.fail(FailureKind::Exhausted, &why, now);
            return Ok(());
        }
        let rounds = usize::try_from(age.as_secs() / ROUND.as_secs()).unwrap_or(0) + 1;
        if asking.asked.len() < MAX_ASKED * rounds
            && let Some(one) = asking.next.pop()
        {
            let want = Want {
                node: self.context.node.name.clone(),
                id: asking.id.clone(),
                size: if one.among.0 == one.among.1 { 1 } else { size },
                among: one.among,
            };
            return self.want(goal, one, want, now);
        }
        goal.due = now + POLL_INTERVAL;
        let subnets: BTreeSet<IpNetwork> = asking.asked.iter().map(|one| one.subnet).collect();
        asking.poll += 1;
        let Some(subnet) = subnets.iter().nth(asking.poll % subnets.len().max(1)) else {
            // Nobody could be asked.
            asking.since = now.checked_sub(WANT_LIMIT).unwrap_or(now);
            return Ok(());
        };
        self.claim(goal, *subnet, missing, own, now).map(drop)
    }

    fn want(
        &mut self,
        goal: &mut Goal,
        one: Candidate,
        want: Want,
        now: Instant,
    ) -> Result<(), Fault> {
        let read = self.visit(one.subnet, Mode::Usual, now)?;
        let (part, id) = (one.part, want.id.clone());
        let made = change(&read.document, &Change::Want { part, want });
        let Phase::Ask(asking) = &mut goal.phase else {
            return Ok(());
        };
        if let Ok(Changed {
            document: Some(next),
            ..
        }) = made
        {
            if self.swap(&read, next, vec![id])?.is_none() {
                asking.next.push(one);
                goal.due = now + decide::backoff(goal.lost, random64());
                goal.lost += 1;
                return Ok(());
            }
            goal.lost = 0;
            asking.asked.push(one);
        }
        Ok(())
    }

    /// Asks no more. What is handed over nevertheless is given back when it is empty.
    fn withdraw(&mut self, asking: &Asking) {
        let subnets: BTreeSet<IpNetwork> = asking.asked.iter().map(|one| one.subnet).collect();
        let ids = vec![asking.id.clone()];
        for subnet in subnets {
            // A want that stays ends by its owner's clock.
            let _ = self.edit(subnet, |_| Ok(vec![Change::Unwant { ids: ids.clone() }]));
        }
    }

    /// Makes changes of a document, again where another node was faster.
    fn edit(
        &mut self,
        subnet: IpNetwork,
        changes: impl Fn(&Document) -> Result<Vec<Change>, Failure>,
    ) -> Result<(), Failure> {
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        for attempt in 0..MAX_ATTEMPTS {
            let read = self
                .call(|backend| backend.read(&self.space, subnet))
                .map_err(fault)?;
            let mut next = read.document.clone();
            for one in changes(&read.document)? {
                let changed = change(&next, &one)
                    .map_err(|why| Failure::new(FailureKind::Mismatch, why.to_string()))?;
                next = changed.document.unwrap_or(next);
            }
            if next == read.document || self.swap(&read, next, Vec::new()).map_err(fault)?.is_some()
            {
                return Ok(());
            }
            let wait = decide::backoff(0, random64()) / 8;
            std::thread::sleep(if attempt == 0 { Duration::ZERO } else { wait });
        }
        let why =
            format!("other nodes change the document of {subnet} at the same time; try again");
        Err(Failure::new(FailureKind::TryAgain, why))
    }

    fn administer(&mut self, word: &PartsChange, now: Instant) -> Result<PartsChanged, Failure> {
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        let parse = |text: &str| {
            let piece = text.parse::<IpNetwork>().ok();
            let piece = piece.filter(|piece| piece::is_piece(subnet_of(piece.ip()), *piece));
            let why = format!("{text:?} is not a part of one subnet, as 10.56.3.16/28");
            piece.ok_or(Failure::new(FailureKind::Mismatch, why))
        };
        match word {
            PartsChange::GiveBack => self.leave(now).map_err(fault),
            PartsChange::ReleaseNode(node) if *node == self.context.node.name => {
                let why = "this node's agent runs: to give its parts back, use --this-node; to release one, --part";
                Err(Failure::new(FailureKind::Mismatch, why))
            }
            PartsChange::ReleaseNode(node) => {
                let subnets = self
                    .call(|backend| backend.subnets(&self.space))
                    .map_err(fault)?;
                let mut changed = PartsChanged::default();
                for subnet in subnets {
                    self.release(subnet, &mut changed, |_, part| part.node == *node)?;
                }
                Ok(changed)
            }
            PartsChange::ReleasePart(text) => {
                let piece = parse(text)?;
                self.disown(piece)?;
                let mut changed = PartsChanged::default();
                self.release(subnet_of(piece.ip()), &mut changed, |found, _| {
                    found == piece
                })?;
                if changed.changed.is_empty() {
                    let why = format!("{piece} is not a part: see the document of its subnet");
                    return Err(Failure::new(FailureKind::Mismatch, why));
                }
                Ok(changed)
            }
            PartsChange::Assign { part, node } => {
                let piece = parse(part)?;
                let part = Part {
                    node: node.clone(),
                    network: Some(OwnNetwork::default()),
                    ..Part::default()
                };
                let reserve = Change::Reserve { piece, part };
                self.edit(subnet_of(piece.ip()), |_| Ok(vec![reserve.clone()]))?;
                self.watched.insert(subnet_of(piece.ip()), now);
                Ok(PartsChanged {
                    changed: vec![piece.to_string()],
                    kept: Vec::new(),
                })
            }
        }
    }

    /// Gives back all that has no lease.
    fn leave(&mut self, now: Instant) -> Result<PartsChanged, Fault> {
        let before = self.owned()?;
        let subnets: BTreeSet<IpNetwork> = before
            .parts
            .keys()
            .map(|piece| subnet_of(piece.ip()))
            .collect();
        for subnet in subnets {
            self.visit(subnet, Mode::Leave, now)?;
        }
        let after = self.owned()?;
        let mut changed = PartsChanged::default();
        for piece in before.parts.keys() {
            match after.parts.get(piece) {
                None => changed.changed.push(piece.to_string()),
                Some(part) => {
                    let why = match part.network {
                        Some(_) => "it is this node's network",
                        None => "addresses of it are leased or cool down",
                    };
                    changed.kept.push((piece.to_string(), why.to_owned()));
                }
            }
        }
        Ok(changed)
    }

    /// Frees the parts of a document that an administrator means.
    fn release(
        &mut self,
        subnet: IpNetwork,
        changed: &mut PartsChanged,
        is_meant: impl Fn(IpNetwork, &Part) -> bool,
    ) -> Result<(), Failure> {
        let freed = std::cell::RefCell::new(Vec::new());
        self.edit(subnet, |document| {
            let meant = document
                .parts
                .iter()
                .filter(|(piece, part)| is_meant(**piece, part));
            let changes: Vec<Change> = meant
                .map(|(piece, part)| Change::Unreserve {
                    piece: *piece,
                    part: part.clone(),
                })
                .collect();
            *freed.borrow_mut() = changes.iter().filter_map(piece_of).collect();
            Ok(changes)
        })?;
        changed
            .changed
            .extend(freed.into_inner().iter().map(ToString::to_string));
        Ok(())
    }

    /// Takes a part that an administrator releases out of the node's own file.
    fn disown(&self, piece: IpNetwork) -> Result<(), Failure> {
        let disowned = owned::change(
            &self.leases,
            &self.context.state_dir,
            &self.space,
            |owned, leased| -> Result<bool, Fault> {
                let uses = leased.of(piece).map_err(|error| error.to_string())?;
                let busy = decide::busy(&uses, since_boot(), self.context.cooldown);
                let of_it = |part: &IpNetwork| piece::covers(piece, *part);
                let is_free = busy.is_empty() || !owned.parts.keys().any(of_it);
                if is_free {
                    owned.parts.retain(|part, _| !of_it(part));
                }
                Ok(is_free)
            },
        );
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        let is_free = disowned
            .map_err(|error| fault(error.to_string()))?
            .map_err(fault)?;
        match is_free {
            true => Ok(()),
            false => {
                let why =
                    format!("{piece} is this node's, and addresses of it are leased or cool down");
                Err(Failure::new(FailureKind::Mismatch, why))
            }
        }
    }
}

/// Whether a part is the network of the node's own that a goal asks for.
fn is_network_of(goal: &Goal, piece: IpNetwork, part: &OwnedPart) -> bool {
    matches!(goal.room, Room::Network(of) if of.prefix == piece.prefix())
        && part.network.is_some()
        && goal.range.size_within(piece) > 0
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

fn piece_of(change: &Change) -> Option<IpNetwork> {
    match change {
        Change::Unreserve { piece, .. } => Some(*piece),
        _ => None,
    }
}
