//! What ADDs of this node wait for: room of a range.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipam::range::Range;
use ipam::subnet::{Document, Part};
use ipnetwork::IpNetwork;
use node_wire::{Failure, FailureKind, Room};
use tokio::sync::oneshot;

use crate::decide::{Candidate, pause};
use crate::reserve;

/// The pass after one that found nothing reads other subnets first.
const SUBNETS_OF_PASS: usize = 8;
/// For how long a claim goes on behind the last ADD that waited for it.
const LINGER: Duration = Duration::from_secs(30);

/// An ADD that waits.
#[derive(Debug)]
pub struct Waiting {
    /// How many addresses it lacks.
    pub count: u64,
    pub deadline: Instant,
    pub reply: oneshot::Sender<Result<(), Failure>>,
}

/// Which step of getting room comes next.
#[derive(Debug)]
pub enum Phase {
    /// For a network: documents are read in which this node may have one.
    Scan(Option<Vec<IpNetwork>>),
    /// The next subnet to claim in, by its number in the node's order.
    Claim(usize),
    /// No piece is free: other nodes are asked for room.
    Ask(Box<Asking>),
}

#[derive(Debug)]
pub struct Asking {
    /// The ID that the piece will have.
    pub id: String,
    pub since: Instant,
    /// Parts to ask, the next one last, and those that were asked.
    pub next: Vec<Candidate>,
    pub asked: Vec<Candidate>,
    /// How often a part was not asked, because enough nodes ask for it.
    pub crowded: usize,
    /// Which document of `asked` is read next.
    pub poll: usize,
}

/// Room of one range.
#[derive(Debug)]
pub struct Goal {
    pub range: Range,
    pub room: Room,
    pub waiting: Vec<Waiting>,
    /// What those lacked whose time is over: they ask again.
    lingering: u64,
    pub phase: Phase,
    /// The ID of the next claim.
    pub id: String,
    /// Parts that can be asked, found in this pass.
    pub candidates: Vec<Candidate>,
    /// Subnets without a free address, once that was asked.
    pub full: Option<BTreeSet<IpNetwork>>,
    /// A held piece of the range, seen in this pass.
    pub held: Option<IpNetwork>,
    /// From which subnet, by its number in the node's order, the next pass goes.
    pub first: usize,
    pub lost: u32,
    pub due: Instant,
    /// When it is dropped.
    pub until: Instant,
    /// Why the last step failed.
    pub fault: Option<String>,
    failures: u32,
    paused: Option<(Instant, Failure)>,
}

impl Goal {
    #[must_use]
    pub fn new(range: Range, room: Room, id: String, now: Instant) -> Self {
        Self {
            range,
            room,
            waiting: Vec::new(),
            lingering: 0,
            phase: Self::first_phase(room),
            id,
            candidates: Vec::new(),
            full: None,
            first: 0,
            held: None,
            lost: 0,
            due: now,
            until: now,
            fault: None,
            failures: 0,
            paused: None,
        }
    }

    fn first_phase(room: Room) -> Phase {
        match room {
            Room::Network(_) => Phase::Scan(None),
            Room::Addresses(_) | Room::Exact(_) => Phase::Claim(0),
        }
    }

    /// Whether a question is about this room, however many addresses it wants.
    #[must_use]
    pub fn is(&self, range: &Range, room: Room) -> bool {
        let same = match (self.room, room) {
            (Room::Addresses(_), Room::Addresses(_)) => true,
            (own, other) => own == other,
        };
        same && self.range == *range
    }

    /// One more ADD waits, unless it is known that it would wait for nothing.
    pub fn wait(&mut self, waiting: Waiting, now: Instant) {
        if let Some((until, failure)) = &self.paused {
            if *until > now {
                let _ = waiting.reply.send(Err(failure.clone()));
                return;
            }
            self.paused = None;
        }
        self.until = self.until.max(waiting.deadline + LINGER);
        self.lingering = 0;
        self.waiting.push(waiting);
        // Who was backing off goes on doing so.
        if self.lost == 0 {
            self.due = self.due.min(now);
        }
    }

    /// How many addresses are missing beside those that are free; those that suffice are answered.
    pub fn serve(&mut self, mut free: u64) -> u64 {
        let mut missing = 0;
        for waiting in std::mem::take(&mut self.waiting) {
            // In their order: who wants many is not passed by others again and again.
            if missing == 0 && waiting.count <= free {
                free -= waiting.count;
                let _ = waiting.reply.send(Ok(()));
            } else {
                missing += waiting.count;
                self.waiting.push(waiting);
            }
        }
        let missing = missing.max(self.lingering).saturating_sub(free);
        if missing == 0 {
            self.restart();
            self.failures = 0;
        }
        missing
    }

    /// Begins a new pass, when there is a next question.
    fn restart(&mut self) {
        self.phase = Self::first_phase(self.room);
        self.candidates.clear();
        self.full = None;
        self.held = None;
        self.lost = 0;
        self.lingering = 0;
        self.fault = None;
    }

    /// Nobody who waits gets room.
    pub fn fail(&mut self, kind: FailureKind, why: &str, now: Instant) {
        let failure = Failure::new(kind, why);
        for waiting in self.waiting.drain(..) {
            let _ = waiting.reply.send(Err(failure.clone()));
        }
        self.failures = self.failures.saturating_add(1);
        let until = now + pause(self.failures);
        self.paused = Some((until, failure));
        self.until = self.until.max(until + LINGER);
        self.first = self.first.wrapping_add(SUBNETS_OF_PASS);
        self.restart();
    }

    /// Answers those whose time is over.
    pub fn expire(&mut self, now: Instant) {
        if self.waiting.iter().all(|waiting| waiting.deadline > now) {
            return;
        }
        let failure = Failure::new(FailureKind::TryAgain, self.reason());
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (late, rest) = waiting.partition(|waiting| waiting.deadline <= now);
        self.waiting = rest;
        let late: Vec<Waiting> = late;
        self.lingering = late.iter().map(|waiting| waiting.count).sum();
        for waiting in late {
            let _ = waiting.reply.send(Err(failure.clone()));
        }
    }

    /// What it waits for.
    fn reason(&self) -> String {
        let range = self.range.subnet();
        match (&self.fault, &self.phase) {
            (Some(fault), _) => format!("{range}: {fault}"),
            (None, Phase::Ask(asking)) if !asking.asked.is_empty() => {
                let mut nodes: Vec<&str> = asking.asked.iter().map(|one| &*one.node).collect();
                nodes.sort_unstable();
                nodes.dedup();
                format!("{range}: asked {} for room; try again", nodes.join(", "))
            }
            (None, Phase::Ask(asking)) if asking.crowded > 0 => {
                format!("{range}: other nodes ask for the same addresses already; try again")
            }
            (None, _) => format!(
                "{range}: other nodes change its documents at the same time, {} attempts were lost; try again",
                self.lost
            ),
        }
    }

    /// Notes what is held of the range in a document.
    pub fn note_held(&mut self, document: &Document) {
        let held = |part: &Part| part.reserved.as_deref().is_some_and(reserve::is_held);
        let mut parts = document.parts.iter();
        let found = parts.find(|(piece, part)| held(part) && self.range.size_within(**piece) > 0);
        self.held = self.held.or(found.map(|(piece, _)| *piece));
    }

    /// Whether there is something to do.
    #[must_use]
    pub fn is_active(&self, now: Instant) -> bool {
        let is_paused = self.paused.as_ref().is_some_and(|(until, _)| *until > now);
        !is_paused && (!self.waiting.is_empty() || self.lingering > 0)
    }

    #[must_use]
    pub fn is_over(&self, now: Instant) -> bool {
        self.waiting.is_empty() && self.until <= now
    }
}
