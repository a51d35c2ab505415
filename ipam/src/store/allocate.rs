//! Which address to lease: the lowest that is free, and another one when another
//! ADD was faster.
//!
//! A search proposes an address; whether it is leased is decided by [`super::claim`]. The
//! searches of an order propose together, and one record claims what they proposed. What it
//! loses is proposed anew, for another record of the same owner.

use super::claim::{Intent, PlacedLease};
use super::dir::{Dir, Meta, system};
use super::fsck::server_time;
use super::hint::Hints;
use super::name::{self, Class};
use super::owner::{Content, read};
use super::release::{CoolDown, now, timestamp};
use super::shard::{Candidate, Choice, Shard};
use super::{Store, StoreError};
use crate::lease::{Holder, Lease, Record};
use crate::range::{Range, Span, bits, from_bits};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

/// What one ADD wants from one range.
#[derive(Debug, Clone)]
pub struct Want<'a> {
    /// Which addresses may be given.
    pub range: &'a Range,
    pub network_name: Option<&'a str>,
    pub overlapping: bool,
    pub holder: &'a Holder,
}

/// More collisions than this mean that something is wrong with the store.
const MAX_COLLISIONS: usize = 10_000;

/// Before a range is called exhausted it is read once more after each of
/// these, in milliseconds: a contender on a busy node takes so long to withdraw.
const EXHAUSTED_RETRY_INTERVALS_MS: [u64; 3] = [5, 25, 125];
/// A shard in which no name changed for so long, in seconds, has no contender.
const CONTENDED_SECONDS: i64 = 60;

/// The shards of a range in ascending order, each with its spans.
struct Shards<'a> {
    spans: &'a [Span],
    next: Option<u128>,
}

impl Iterator for Shards<'_> {
    type Item = u128;

    fn next(&mut self) -> Option<u128> {
        let at = self.next?;
        let number = name::shard_number(at);
        // The first address of any span beyond this shard.
        let beyond = (number << 8) | 0xff;
        self.next = self
            .spans
            .iter()
            .find(|span| span.last > beyond)
            .and_then(|span| Some(span.first.max(beyond.checked_add(1)?)));
        Some(number)
    }
}

impl Want<'_> {
    fn shards(&self) -> Shards<'_> {
        let spans = self.range.spans();
        Shards {
            spans,
            next: spans.first().map(|span| span.first),
        }
    }

    fn lease(&self, candidate: Candidate, requested: bool, part: usize) -> Lease {
        let subnet = self.range.subnet();
        Lease {
            address: from_bits(subnet.is_ipv4(), candidate.address),
            prefix: self.range.prefix(),
            range: subnet,
            store: String::new(),
            network_name: self.network_name.map(str::to_owned),
            overlapping: self.overlapping,
            generation: candidate.generation,
            requested,
            part,
            holder: self.holder.clone(),
            created: timestamp(),
        }
    }

    /// Where the pod's hint is: directory and name.
    pub(super) fn pod_entry(&self) -> Option<(String, String)> {
        let pod = self.holder.pod.as_ref()?;
        let subnet = self.range.subnet();
        Some(name::pod(
            self.network_name,
            subnet,
            pod,
            &self.holder.interface,
        ))
    }

    fn class(&self) -> Class {
        Class::of(self.range.subnet(), self.overlapping)
    }

    fn other_class(&self) -> Class {
        Class::of(self.range.subnet(), !self.overlapping)
    }
}

/// A shard as it was found.
struct ShardRead {
    /// Its directory, if there is one yet.
    dir: Option<Rc<Dir>>,
    choice: Choice,
    /// When a name of it changed last, in Unix seconds of the file server.
    modified: i64,
}

/// What a walk over shards saw that found nothing free in them.
#[derive(Default)]
struct Full {
    /// The address that has to cool down for the shortest time yet, and until when.
    next: Option<(u64, Proposal)>,
    /// The shards, each with the time of the last change of a name in it.
    shards: Vec<(u128, i64)>,
}

/// An address that a search proposes.
struct Proposal {
    /// Its shard, if that is there.
    dir: Option<Rc<Dir>>,
    candidate: Candidate,
}

/// What a search looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// The lowest address that is free.
    Lowest,
    /// One address, and no other.
    This(IpAddr),
    /// One address; the lowest when that is held.
    Rather(IpAddr),
    /// One address, if it is free and has rested; else the lowest.
    Near(u128),
}

/// One search for an address.
pub(super) struct Search<'a> {
    store: &'a Store,
    pub(super) want: Want<'a>,
    pub(super) goal: Goal,
    /// Which part of the order it is.
    pub(super) part: usize,
    /// The part whose address has the host number that is to be found, too, until that is known.
    pub(super) like: Option<usize>,
    collisions: usize,
    /// How often it waited for contenders to withdraw.
    waits: usize,
}

/// The records that one call made for an owner.
#[derive(Debug)]
pub(super) struct Made {
    holder: Holder,
    /// Number of the owner's next record.
    next: usize,
    records: Vec<Meta>,
}

impl Made {
    /// None yet, of an owner that has so many.
    pub(super) fn of(holder: &Holder, count: usize) -> Self {
        Self {
            holder: holder.clone(),
            next: count,
            records: Vec::new(),
        }
    }

    pub(super) fn holder(&self) -> &Holder {
        &self.holder
    }
}

/// How often a claim of one address is made again.
const MAX_CLAIMS_OF_ONE: usize = 3;

/// A search that failed, by its position, and why.
pub(super) struct Failed {
    pub(super) search: usize,
    pub(super) error: StoreError,
}

/// Addresses that one order has proposed and has not linked yet: no listing shows them.
#[derive(Default)]
pub(super) struct Proposed(Vec<Lease>);

impl Proposed {
    /// Takes these out of what may be taken; whether any was in it.
    fn take_out(&self, want: &Want<'_>, choice: &mut Choice) -> bool {
        let count = choice.free.len() + choice.resting.len();
        choice.free.retain(|c| !self.has(want, c.address));
        choice.resting.retain(|c| !self.has(want, c.address));
        count > choice.free.len() + choice.resting.len()
    }

    /// Whether a lease of `want` at this address would be one of these, or conflict with it.
    fn has(&self, want: &Want<'_>, address: u128) -> bool {
        let subnet = want.range.subnet();
        self.0.iter().any(|lease| {
            bits(lease.address) == address
                && lease.address.is_ipv4() == subnet.is_ipv4()
                && lease.network_name.as_deref() == want.network_name
                && (lease.range == subnet
                    || Class::of(lease.range, lease.overlapping) == want.class())
        })
    }
}

impl Store {
    /// Leases an address for each search, of one holder, by one record for all, and one more for
    /// those that were lost. Answers them in their order; notes the records that were made, also
    /// when it fails.
    pub(super) fn allocate_all(
        &self,
        searches: &mut [Search<'_>],
        made: &mut Made,
    ) -> Result<Vec<Lease>, Failed> {
        let mut leases: BTreeMap<usize, Lease> = BTreeMap::new();
        while leases.len() < searches.len() {
            let mut claims = Vec::new();
            let mut proposed = Proposed::default();
            let mut pending = Vec::new();
            for (position, search) in searches.iter_mut().enumerate() {
                if leases.contains_key(&position) {
                    continue;
                }
                let mut found = proposed.0.iter().chain(leases.values());
                search.follow(|like| found.find(|lease| lease.part == like));
                let claim = search.propose(&proposed).map_err(|error| Failed {
                    search: position,
                    error,
                })?;
                proposed.0.push(claim.lease.clone());
                claims.push(claim);
                pending.push(position);
            }
            // What fails from here on is of all of them.
            let failed = |error| Failed {
                search: pending.first().copied().unwrap_or(0),
                error,
            };
            let record = Record::of(proposed.0).ok_or_else(|| failed(self.nothing_leased()))?;
            let intent = self.make(&record, made).map_err(failed)?;
            let taken = self.claim(&intent, &claims).map_err(failed)?;
            for ((claim, position), taken) in claims.into_iter().zip(&pending).zip(taken) {
                match (taken, searches.get_mut(*position)) {
                    (false, Some(search)) => search.collided().map_err(|error| Failed {
                        search: *position,
                        error,
                    })?,
                    _ => drop(leases.insert(*position, claim.lease)),
                }
            }
        }
        Ok(leases.into_values().collect())
    }

    /// Gives back what a call that failed with `error` has taken.
    pub(super) fn release_made(&self, made: &Made, error: &StoreError) {
        // The call that overtook this one has the owner's records now.
        if matches!(error, StoreError::Overtaken { .. }) || made.records.is_empty() {
            return;
        }
        let holder = &made.holder;
        let node = &holder.node;
        // The first error is the one to report. What cannot be given back now leads
        // the runtime's DEL to it.
        let Ok(there) = self.owned_at(node, &holder.container, &holder.interface) else {
            return;
        };
        for owned in there.iter().rev() {
            if made.records.iter().any(|record| owned.is_file(record)) {
                let _ = self.release(owned, CoolDown::NeverAnswered);
            }
        }
    }

    fn make(&self, record: &Record, made: &mut Made) -> Result<Intent, StoreError> {
        let intent = self.intend(record, made.next)?;
        made.next += 1;
        made.records.push(intent.meta);
        Ok(intent)
    }

    fn nothing_leased(&self) -> StoreError {
        self.root.failed("lease", "")(nix::errno::Errno::EINVAL).into()
    }

    /// Whether a search would find an address now, besides those that are proposed already;
    /// proposes it. Writes nothing.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`], or what kept it from being read.
    pub(super) fn has_room(
        &self,
        want: &Want<'_>,
        proposed: &mut Proposed,
    ) -> Result<(), StoreError> {
        let search = Search::new(self, want.clone(), Goal::Lowest, 0);
        let mut full = Full::default();
        let free = search.walk(&mut search.hints(false), proposed, &mut full)?;
        let found = free.or_else(|| full.next.map(|(_, next)| next));
        let found = found.ok_or_else(|| search.exhausted())?;
        proposed.0.push(want.lease(found.candidate, false, 0));
        Ok(())
    }

    fn held_by_another(&self, want: &Want<'_>, address: IpAddr) -> StoreError {
        let space = name::space(want.network_name);
        let holder = self
            .holder_of(&space, address)
            .ok()
            .flatten()
            .unwrap_or_else(|| "a holder whose record cannot be read".to_owned());
        StoreError::Held { address, holder }
    }

    /// Who holds an address of a space, for messages.
    fn holder_of(&self, space: &str, address: IpAddr) -> Result<Option<String>, StoreError> {
        let shard = name::shard(address.is_ipv4(), name::shard_number(bits(address)));
        let Some(dir) = self.open_below(&["leases", space, &shard])? else {
            return Ok(None);
        };
        for held in dir
            .names()?
            .iter()
            .filter_map(|n| name::LeaseName::parse(n))
        {
            if held.address == address
                && held.freed.is_none()
                && let Some(Content::Record(record, _)) = read(&dir, &held.name())?
                && let Some(lease) = held.in_record(&record)
            {
                return Ok(Some(format!("{}, since {}", lease.holder, lease.created)));
            }
        }
        Ok(None)
    }
}

impl Full {
    fn note(&mut self, number: u128, read: ShardRead) {
        self.shards.push((number, read.modified));
        let until = read.choice.rested_at.unwrap_or(0);
        if let Some(candidate) = read.choice.resting.first().copied()
            && self.next.as_ref().is_none_or(|(than, _)| until < *than)
        {
            let dir = read.dir;
            self.next = Some((until, Proposal { dir, candidate }));
        }
    }

    /// The shards in which a name changed a moment before `now`, which is the file server's
    /// time, as theirs is: this machine's clock may be off by more than a moment.
    fn contended(self, now: i64) -> Vec<u128> {
        let since = now.saturating_sub(CONTENDED_SECONDS);
        let changed = self.shards.into_iter().filter(|(_, at)| *at >= since);
        changed.map(|(number, _)| number).collect()
    }
}

impl<'a> Search<'a> {
    pub(super) fn new(store: &'a Store, want: Want<'a>, goal: Goal, part: usize) -> Self {
        Self {
            store,
            want,
            goal,
            part,
            like: None,
            collisions: 0,
            waits: 0,
        }
    }

    /// Has it search for the host number of the other part's address, once that is found.
    pub(super) fn follow<'l>(&mut self, find: impl FnOnce(usize) -> Option<&'l Lease>) {
        let Some(lease) = self.like.and_then(find) else {
            return;
        };
        self.like = None;
        let first = |subnet: ipnetwork::IpNetwork| bits(subnet.network());
        let number = bits(lease.address).checked_sub(first(lease.range));
        let address = number.and_then(|n| first(self.want.range.subnet()).checked_add(n));
        if let (Goal::Lowest, Some(address)) = (self.goal, address) {
            self.goal = Goal::Near(address);
        }
    }

    /// The next address to claim.
    fn propose(&mut self, proposed: &Proposed) -> Result<PlacedLease, StoreError> {
        let found = match self.goal {
            Goal::Lowest => None,
            Goal::This(address) => match self.one(bits(address), Duration::ZERO, proposed)? {
                None if proposed.has(&self.want, bits(address)) => {
                    let holder = self.want.holder.to_string();
                    return Err(StoreError::Held { address, holder });
                }
                None => return Err(self.store.held_by_another(&self.want, address)),
                found => found,
            },
            Goal::Near(address) => self.near(address, proposed)?,
            Goal::Rather(address) => self.one(bits(address), Duration::ZERO, proposed)?,
        };
        let requested = found.is_some() && !matches!(self.goal, Goal::Near(_));
        let proposal = match found {
            Some(proposal) => proposal,
            None => {
                self.goal = Goal::Lowest;
                self.lowest(proposed)?
            }
        };
        let shard = match proposal.dir {
            Some(dir) => dir,
            None => {
                let space = name::space(self.want.network_name);
                let number = name::shard_number(proposal.candidate.address);
                let shard = name::shard(self.want.range.subnet().is_ipv4(), number);
                self.store.make_below(&["leases", &space, &shard])?
            }
        };
        let lease = (self.want).lease(proposal.candidate, requested, self.part);
        debug_assert_eq!(self.want.other_class(), super::claim::other_class(&lease));
        Ok(PlacedLease { lease, shard })
    }

    /// Another ADD has what this search proposed.
    fn collided(&mut self) -> Result<(), StoreError> {
        self.collisions += 1;
        match self.collisions > MAX_COLLISIONS {
            true => Err(self.exhausted()),
            false => Ok(()),
        }
    }

    /// The lowest that is free, else what cools down yet.
    fn lowest(&mut self, proposed: &Proposed) -> Result<Proposal, StoreError> {
        let (mut hints, mut full) = (self.hints(true), Full::default());
        let mut found = self.walk(&mut hints, proposed, &mut full)?;
        loop {
            if let Some(found) = found.or_else(|| full.next.take().map(|(_, next)| next)) {
                return Ok(found);
            }
            // A held entry may be that of a contender who is about to withdraw.
            let Some(wait) = EXHAUSTED_RETRY_INTERVALS_MS.get(self.waits) else {
                return Err(self.exhausted());
            };
            self.waits += 1;
            let contended = std::mem::take(&mut full).contended(server_time(&self.store.root)?);
            if contended.is_empty() {
                return Err(self.exhausted());
            }
            system::sleep(Duration::from_millis(*wait));
            found = self.first_free(contended, &mut hints, proposed, &mut full)?;
        }
    }

    /// The hints of the space; with `writes` those that are not there are made.
    fn hints(&self, writes: bool) -> Hints<'a> {
        let space = name::space(self.want.network_name);
        let path = ["hints", space.as_str()];
        let dir = match writes {
            true => self.store.make_below(&path).ok(),
            false => self.store.open_below(&path).ok().flatten(),
        };
        Hints::load(dir, self.want.range, writes)
    }

    /// The one walk over a range: each shard once, those last that are believed to be full. Finds the
    /// first address that is free and has rested, or else notes what is there.
    fn walk(
        &self,
        hints: &mut Hints<'_>,
        proposed: &Proposed,
        full: &mut Full,
    ) -> Result<Option<Proposal>, StoreError> {
        let (now, mut believed) = (now(), Vec::new());
        for number in self.want.shards() {
            if hints.is_full(number, now) {
                believed.push(number);
            } else if let found @ Some(_) = self.first_free([number], hints, proposed, full)? {
                return Ok(found);
            }
        }
        self.first_free(believed, hints, proposed, full)
    }

    /// The same in some shards, whatever is believed.
    fn first_free(
        &self,
        shards: impl IntoIterator<Item = u128>,
        hints: &mut Hints<'_>,
        proposed: &Proposed,
        full: &mut Full,
    ) -> Result<Option<Proposal>, StoreError> {
        for number in shards {
            let stamp = hints.stamp(number);
            let spans = self.want.range.spans();
            let Some(mut read) = self.read_shard(number, spans, self.store.cooldown)? else {
                continue;
            };
            let proposes = proposed.take_out(&self.want, &mut read.choice);
            if let Some(candidate) = self.pick(&read.choice.free) {
                let dir = read.dir;
                return Ok(Some(Proposal { dir, candidate }));
            }
            // Full but for what this order is about to take, it need not become full.
            if !proposes {
                hints.mark_full(number, stamp, read.choice.rested_at);
            }
            full.note(number, read);
        }
        Ok(None)
    }

    /// The address of another part's host number, if the range gives it and it has rested.
    fn near(&self, address: u128, proposed: &Proposed) -> Result<Option<Proposal>, StoreError> {
        let is_given = (self.want.range.spans().iter()).any(|span| span.contains(address));
        match self.collisions == 0 && is_given {
            true => self.one(address, self.store.cooldown, proposed),
            false => Ok(None),
        }
    }

    /// One address, also one that the range does not give unasked; `None` when it is held or was
    /// released less than `cooldown` ago.
    fn one(
        &self,
        address: u128,
        cooldown: Duration,
        proposed: &Proposed,
    ) -> Result<Option<Proposal>, StoreError> {
        if self.collisions >= MAX_CLAIMS_OF_ONE || proposed.has(&self.want, address) {
            return Ok(None);
        }
        let span = Span::single(address);
        let read = self.read_shard(name::shard_number(address), &[span], cooldown)?;
        Ok(read.and_then(|ShardRead { dir, choice, .. }| {
            let candidate = choice.free.first().copied()?;
            Some(Proposal { dir, candidate })
        }))
    }

    /// A shard's directory and what may be done with its addresses in `spans`; nothing when
    /// the shard cannot be read because somebody put something in its place.
    fn read_shard(
        &self,
        number: u128,
        spans: &[Span],
        cooldown: Duration,
    ) -> Result<Option<ShardRead>, StoreError> {
        let dir = match self.open_anew(number) {
            Ok(dir) => dir,
            Err(StoreError::Dir(error)) if is_foreign(error.source) => return Ok(None),
            Err(error) => return Err(error),
        };
        let names = dir.as_ref().map_or(Ok(Vec::new()), Dir::first_names)?;
        let dir = dir.map(Rc::new);
        let modified = dir.as_ref().map_or(i64::MIN, |dir| dir.modified());
        let (class, other_class) = (self.want.class(), self.want.other_class());
        let names = names.iter().map(String::as_str);
        let shard = Shard::read(number << 8, class, other_class, names);
        let mut choice = shard.choose(spans, now(), cooldown);
        for candidates in [&mut choice.free, &mut choice.resting] {
            let mut left = Vec::with_capacity(candidates.len());
            for candidate in candidates.drain(..) {
                if !self.conflicts(candidate, dir.as_deref())? {
                    left.push(candidate);
                }
            }
            *candidates = left;
        }
        Ok(Some(ShardRead {
            dir,
            choice,
            modified,
        }))
    }

    /// A shard's directory, opened for one listing.
    fn open_anew(&self, number: u128) -> Result<Option<Dir>, StoreError> {
        let space = name::space(self.want.network_name);
        let shard = name::shard(self.want.range.subnet().is_ipv4(), number);
        match self.store.open_below(&["leases", &space])? {
            Some(shards) => Ok(shards.open(&shard)?),
            None => Ok(None),
        }
    }

    fn conflicts(&self, candidate: Candidate, dir: Option<&Dir>) -> Result<bool, StoreError> {
        match (candidate.other_class, dir) {
            (Some(generation), Some(dir)) => {
                let lease = self.want.lease(candidate, false, self.part);
                self.store.other_class_conflicts(&lease, generation, dir)
            }
            _ => Ok(false),
        }
    }

    /// The lowest; any other once writers have met, so that they part.
    fn pick(&self, free: &[Candidate]) -> Option<Candidate> {
        if self.collisions == 0 || free.len() < 2 {
            return free.first().copied();
        }
        let count = u64::try_from(free.len()).ok()?;
        let index = usize::try_from(system::random64() % count).ok()?;
        free.get(index).copied()
    }

    fn exhausted(&self) -> StoreError {
        let (first, last) = self.want.range.window();
        let size = self.want.range.size();
        let why = if self.collisions > MAX_COLLISIONS {
            format!("another ADD was faster {} times", self.collisions)
        } else {
            match (size, self.want.range.lowest()) {
                (1, Some(only)) => format!("its only address {only} is leased"),
                _ => format!("all {size} addresses between {first} and {last} are leased"),
            }
        };
        StoreError::Exhausted {
            range: self.want.range.subnet().to_string(),
            why,
        }
    }
}

/// What the kernel answers for a link, a file or a directory of another user in
/// the place of a shard.
fn is_foreign(errno: nix::errno::Errno) -> bool {
    use nix::errno::Errno;
    matches!(errno, Errno::ELOOP | Errno::ENOTDIR | Errno::EPERM)
}

#[cfg(test)]
mod tests;
