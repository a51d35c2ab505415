//! Which address to lease: the lowest that is free, and another one when another
//! ADD was faster.
//!
//! A search proposes an address; whether it is leased is decided by [`super::claim`]. The
//! searches of an order propose together, and one record claims what they proposed. What it
//! loses is proposed anew, for another record of the same owner.

use super::claim::{Claim, Intent};
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

/// What a search for an address finds on its way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// The address that would be given; `None` when all are held.
    pub next: Option<IpAddr>,
    /// Addresses before it that are leased.
    pub leased: u128,
    /// Addresses before it that are cooling down since they were released.
    pub cooling_down: u128,
    /// Addresses before it that parts of the order before this one would be given.
    pub of_earlier_parts: u128,
    /// Whether it is cooling down itself, but nothing else is free.
    pub still_cooling_down: bool,
    /// Parts of the range that cannot be read.
    pub unreadable: usize,
}

/// More collisions than this mean that something is wrong with the store.
const MAX_COLLISIONS: usize = 10_000;

/// Before a range is called exhausted it is read once more after each of
/// these, in milliseconds: a contender on a busy node takes so long to withdraw.
const EXHAUSTED_RETRY_INTERVALS_MS: [u64; 3] = [5, 25, 125];
/// A shard in which no name changed for so long, in seconds, has no contender.
const CONTENDED_SECONDS: i64 = 60;

/// A shard by its place in the range's order, and by its number.
type Numbered = (usize, u128);

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

/// What one way through shards came to.
enum Swept {
    Found(Proposal),
    Nothing(Rest),
}

/// What a way through shards that found nothing has seen.
#[derive(Default)]
struct Rest {
    /// The address that was freed first, when, and its shard.
    oldest: Option<(u64, u128, Candidate)>,
    /// The shards, each with the time of the last change of a name in it.
    full: Vec<(Numbered, i64)>,
}

/// An address that a search proposes.
struct Proposal {
    /// Its shard, if that was open.
    dir: Option<Rc<Dir>>,
    number: u128,
    candidate: Candidate,
    requested: bool,
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
    want: Want<'a>,
    goal: Goal,
    /// Which part of the order it is.
    part: usize,
    /// The part whose address has the host number that is to be found, too.
    like: Option<usize>,
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
    /// Takes these out of what may be taken; answers those that were in it.
    fn take_out(&self, want: &Want<'_>, choice: &mut Choice) -> Vec<Candidate> {
        let proposes = |c: &mut Candidate| self.has(want, c.address);
        let mut out: Vec<Candidate> = choice.free.extract_if(.., proposes).collect();
        out.extend(choice.resting.extract_if(.., proposes));
        out
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
    /// Leases one address of a range, and no other.
    ///
    /// # Errors
    /// [`StoreError::Held`] naming the holder, or what failed. An error of a system call may leave a
    /// record that leads the owner's DEL to what was begun.
    pub fn allocate_this(
        &self,
        want: &Want<'_>,
        index: usize,
        address: IpAddr,
    ) -> Result<Lease, StoreError> {
        self.allocate_one(
            Search::new(self, want.clone(), Goal::This(address), 0),
            index,
        )
    }

    fn allocate_one(&self, search: Search<'_>, index: usize) -> Result<Lease, StoreError> {
        let mut made = Made::of(search.want.holder, index);
        match self.allocate_all(&mut [search], &mut made) {
            Ok(mut leases) => leases.pop().ok_or_else(|| self.nothing_leased()),
            Err(failed) => {
                self.release_made(&made, &failed.error);
                Err(failed.error)
            }
        }
    }

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
                search.follow_one_of(proposed.0.iter().chain(leases.values()));
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
        let mut hints = search.hints(false).read_only();
        let candidate = match search.first_free(&mut hints, proposed)? {
            Swept::Found(found) => found.candidate,
            Swept::Nothing(rest) => rest.oldest.ok_or_else(|| search.exhausted())?.2,
        };
        proposed.0.push(want.lease(candidate, false, 0));
        Ok(())
    }

    /// What a search would find on its way now, besides what is proposed already; proposes
    /// it. Writes nothing.
    pub(super) fn survey(
        &self,
        want: &Want<'_>,
        proposed: &mut Proposed,
    ) -> Result<Survey, StoreError> {
        let search = Search::new(self, want.clone(), Goal::Lowest, 0);
        let v4 = want.range.subnet().is_ipv4();
        let mut survey = Survey::default();
        let mut longest: Option<(u64, Candidate)> = None;
        for number in want.shards() {
            let Some(ShardRead { mut choice, .. }) = search.read_shard(number, self.cooldown)?
            else {
                survey.unreadable += 1;
                continue;
            };
            let taken_out = proposed.take_out(want, &mut choice);
            let first = choice.free.first().copied();
            let next = first.map(|free| free.address);
            let below = |address: u128| next.is_none_or(|next| address < next);
            let before = Span {
                first: number << 8,
                last: next.map_or(number << 8 | 0xff, |next| next.saturating_sub(1)),
            };
            let spans = want.range.spans().iter();
            let addresses: u128 = spans
                .filter_map(|span| span.intersection(before))
                .map(Span::size)
                .sum();
            let resting = choice.resting.iter().filter(|c| below(c.address)).count() as u128;
            survey.cooling_down = survey.cooling_down.saturating_add(resting);
            let of_earlier = taken_out.iter().filter(|c| below(c.address)).count() as u128;
            survey.of_earlier_parts = survey.of_earlier_parts.saturating_add(of_earlier);
            let leased = addresses.saturating_sub(resting + of_earlier);
            survey.leased = survey.leased.saturating_add(leased);
            if let (Some(at), Some(first)) = (choice.rested_at, choice.resting.first())
                && longest.is_none_or(|(than, _)| at < than)
            {
                longest = Some((at, *first));
            }
            if let Some(first) = first {
                survey.next = Some(from_bits(v4, first.address));
                proposed.0.push(want.lease(first, false, 0));
                return Ok(survey);
            }
        }
        if let Some((_, first)) = longest {
            survey.next = Some(from_bits(v4, first.address));
            survey.still_cooling_down = true;
            proposed.0.push(want.lease(first, false, 0));
        }
        Ok(survey)
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

impl Rest {
    fn note(&mut self, order: usize, number: u128, read: &ShardRead) {
        self.full.push(((order, number), read.modified));
        let since = read.choice.rested_at.unwrap_or(0);
        if let Some(candidate) = read.choice.resting.first()
            && self.oldest.is_none_or(|(than, ..)| since < than)
        {
            self.oldest = Some((since, number, *candidate));
        }
    }

    /// The shards in which a name changed a moment before `now`, which is the file server's
    /// time, as theirs is: this machine's clock may be off by more than a moment.
    fn contended(self, now: i64) -> impl Iterator<Item = Numbered> {
        let changed = self.full.into_iter();
        changed
            .filter(move |(_, modified)| *modified >= now.saturating_sub(CONTENDED_SECONDS))
            .map(|(shard, _)| shard)
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

    /// Has it search for the host number of another part's address, which is known already or is
    /// found by an earlier search of the same order.
    pub(super) fn follow(&mut self, like: usize, known: Option<&Lease>) {
        match known {
            Some(lease) => self.aim_at_number_of(lease),
            None => self.like = Some(like),
        }
    }

    /// The same, once the other part's address may be among these.
    fn follow_one_of<'l>(&mut self, mut leases: impl Iterator<Item = &'l Lease>) {
        let Some(like) = self.like else { return };
        if let Some(lease) = leases.find(|lease| lease.part == like) {
            self.like = None;
            self.aim_at_number_of(lease);
        }
    }

    fn aim_at_number_of(&mut self, lease: &Lease) {
        let first = |subnet: ipnetwork::IpNetwork| bits(subnet.network());
        let number = bits(lease.address).checked_sub(first(lease.range));
        let address = number.and_then(|n| first(self.want.range.subnet()).checked_add(n));
        if let (Goal::Lowest, Some(address)) = (self.goal, address) {
            self.goal = Goal::Near(address);
        }
    }

    /// The next address to claim.
    fn propose(&mut self, proposed: &Proposed) -> Result<Claim, StoreError> {
        let proposal = match self.goal {
            Goal::Lowest => self.lowest(proposed)?,
            Goal::This(address) => match self.this(bits(address), proposed)? {
                Some(proposal) => proposal,
                None if proposed.has(&self.want, bits(address)) => {
                    let holder = self.want.holder.to_string();
                    return Err(StoreError::Held { address, holder });
                }
                None => return Err(self.store.held_by_another(&self.want, address)),
            },
            Goal::Near(address) => match self.near(address, proposed)? {
                Some(proposal) => proposal,
                None => {
                    self.goal = Goal::Lowest;
                    self.lowest(proposed)?
                }
            },
            Goal::Rather(address) => match self.this(bits(address), proposed)? {
                Some(proposal) => proposal,
                None => {
                    self.goal = Goal::Lowest;
                    self.lowest(proposed)?
                }
            },
        };
        let shard = match proposal.dir {
            Some(dir) => dir,
            None => {
                let space = name::space(self.want.network_name);
                let shard = name::shard(self.want.range.subnet().is_ipv4(), proposal.number);
                self.store.make_below(&["leases", &space, &shard])?
            }
        };
        let lease = (self.want).lease(proposal.candidate, proposal.requested, self.part);
        debug_assert_eq!(self.want.other_class(), super::claim::other_class(&lease));
        Ok(Claim { lease, shard })
    }

    /// Another ADD has what this search proposed.
    fn collided(&mut self) -> Result<(), StoreError> {
        self.collisions += 1;
        match self.collisions > MAX_COLLISIONS {
            true => Err(self.exhausted()),
            false => Ok(()),
        }
    }

    /// Lowest first, then thoroughly, then what is still resting.
    fn lowest(&mut self, proposed: &Proposed) -> Result<Proposal, StoreError> {
        let mut hints = self.hints(true);
        let mut swept = self.first_free(&mut hints, proposed)?;
        loop {
            let rest = match swept {
                Swept::Found(found) => return Ok(found),
                Swept::Nothing(rest) => rest,
            };
            if let Some((_, number, candidate)) = rest.oldest {
                // Nothing has rested.
                return Ok(Proposal {
                    dir: None,
                    number,
                    candidate,
                    requested: false,
                });
            }
            // A held entry may be that of a contender who is about to withdraw.
            let Some(wait) = EXHAUSTED_RETRY_INTERVALS_MS.get(self.waits) else {
                return Err(self.exhausted());
            };
            self.waits += 1;
            let now = server_time(&self.store.root)?;
            let mut contended = rest.contended(now).peekable();
            if contended.peek().is_none() {
                return Err(self.exhausted());
            }
            system::sleep(Duration::from_millis(*wait));
            swept = self.sweep(&mut hints, contended, proposed)?;
        }
    }

    fn hints(&self, make: bool) -> Hints<'a> {
        let space = name::space(self.want.network_name);
        let path = ["hints", space.as_str()];
        let dir = if make {
            self.store.make_below(&path).ok()
        } else {
            self.store.open_below(&path).ok().flatten()
        };
        Hints::load(dir, self.want.range)
    }

    /// The lowest address that is free and has rested: in shards that are not believed to be full,
    /// then in all.
    fn first_free(&self, hints: &mut Hints<'_>, proposed: &Proposed) -> Result<Swept, StoreError> {
        let full = hints.full(self.want.shards(), now());
        if full.contains(&true) {
            let believed = (self.want.shards().enumerate())
                .filter(|(order, _)| full.get(*order) != Some(&true));
            if let found @ Swept::Found(_) = self.sweep(hints, believed, proposed)? {
                return Ok(found);
            }
        }
        self.sweep(hints, self.want.shards().enumerate(), proposed)
    }

    /// One way through shards, by their order and number: finds the first address that is
    /// free and has rested.
    fn sweep(
        &self,
        hints: &mut Hints<'_>,
        shards: impl Iterator<Item = Numbered>,
        proposed: &Proposed,
    ) -> Result<Swept, StoreError> {
        let mut rest = Rest::default();
        for (order, number) in shards {
            let stamp = hints.stamp(number);
            let Some(mut read) = self.read_shard(number, self.store.cooldown)? else {
                continue;
            };
            let own = proposed.take_out(&self.want, &mut read.choice);
            match self.pick(&read.choice.free) {
                Some(candidate) => {
                    return Ok(Swept::Found(Proposal {
                        dir: read.dir,
                        number,
                        candidate,
                        requested: false,
                    }));
                }
                // Full but for what this order is about to take, it need not become full.
                None if !own.is_empty() => rest.note(order, number, &read),
                None => {
                    hints.mark_full(number, stamp, read.choice.rested_at);
                    rest.note(order, number, &read);
                }
            }
        }
        Ok(Swept::Nothing(rest))
    }

    /// One address; `None` when it is held, or cooling down.
    fn near(&self, address: u128, proposed: &Proposed) -> Result<Option<Proposal>, StoreError> {
        if self.collisions > 0 || proposed.has(&self.want, address) {
            return Ok(None);
        }
        let number = name::shard_number(address);
        let Some(read) = self.read_shard(number, self.store.cooldown)? else {
            return Ok(None);
        };
        let mut free = read.choice.free.into_iter();
        let candidate = free.find(|candidate| candidate.address == address);
        Ok(candidate.map(|candidate| Proposal {
            dir: read.dir,
            number,
            candidate,
            requested: false,
        }))
    }

    /// One address; `None` when it is held.
    fn this(&self, address: u128, proposed: &Proposed) -> Result<Option<Proposal>, StoreError> {
        if self.collisions >= MAX_CLAIMS_OF_ONE || proposed.has(&self.want, address) {
            return Ok(None);
        }
        let number = name::shard_number(address);
        let dir = self.open(number)?;
        let names = dir.as_ref().map_or(Ok(Vec::new()), |dir| dir.names())?;
        let shard = self.read(number, &names);
        let Some(candidate) = shard.candidate(address) else {
            return Ok(None);
        };
        if self.conflicts(candidate, dir.as_deref())? {
            return Ok(None);
        }
        Ok(Some(Proposal {
            dir,
            number,
            candidate,
            requested: true,
        }))
    }

    /// A shard's directory and what may be done with its addresses; nothing when
    /// the shard cannot be read because somebody put something in its place.
    fn read_shard(
        &self,
        number: u128,
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
        let shard = self.read(number, &names);
        let mut choice = shard.choose(self.want.range.spans(), now(), cooldown);
        if choice
            .free
            .iter()
            .chain(&choice.resting)
            .any(|c| c.other_class.is_some())
        {
            let mut conflict = |c: &Candidate| self.conflicts(*c, dir.as_deref());
            choice.free = without(choice.free, &mut conflict)?;
            choice.resting = without(choice.resting, &mut conflict)?;
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

    fn open(&self, number: u128) -> Result<Option<Rc<Dir>>, StoreError> {
        let space = name::space(self.want.network_name);
        let shard = name::shard(self.want.range.subnet().is_ipv4(), number);
        self.store.open_below(&["leases", &space, &shard])
    }

    fn read(&self, number: u128, names: &[String]) -> Shard {
        let (class, other_class) = (self.want.class(), self.want.other_class());
        Shard::read(
            number << 8,
            class,
            other_class,
            names.iter().map(String::as_str),
        )
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

fn without(
    candidates: Vec<Candidate>,
    conflicts: &mut impl FnMut(&Candidate) -> Result<bool, StoreError>,
) -> Result<Vec<Candidate>, StoreError> {
    let mut left = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        if candidate.other_class.is_none() || !conflicts(&candidate)? {
            left.push(candidate);
        }
    }
    Ok(left)
}

/// What the kernel answers for a link, a file or a directory of another user in
/// the place of a shard.
fn is_foreign(errno: nix::errno::Errno) -> bool {
    use nix::errno::Errno;
    matches!(errno, Errno::ELOOP | Errno::ENOTDIR | Errno::EPERM)
}

#[cfg(test)]
mod tests;
