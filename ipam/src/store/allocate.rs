//! Which address to lease: the lowest that is free, and another one when another
//! ADD was faster.

use super::claim::{Intent, other_class};
use super::dir::Dir;
use super::fsck::server_time;
use super::hint::Hints;
use super::name::{self, Class};
use super::owner::{Content, read};
use super::release::{now, timestamp};
use super::shard::{Candidate, Choice, Shard};
use super::{Store, StoreError};
use crate::lease::{Holder, Lease};
use crate::range::{Range, Span, bits, from_bits};
use node::random::random64;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

/// What one ADD wants from one range.
#[derive(Debug, Clone)]
pub struct Want<'a> {
    /// Which addresses may be given.
    pub range: &'a Range,
    /// `network_name`.
    pub network_name: Option<&'a str>,
    /// `enable_overlapping_ranges`.
    pub overlapping: bool,
    /// For whom.
    pub holder: &'a Holder,
    /// Number of the record among the owner's.
    pub index: usize,
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

    fn lease(&self, candidate: Candidate, requested: bool) -> Lease {
        let subnet = self.range.subnet();
        Lease {
            address: from_bits(subnet.is_ipv4(), candidate.address),
            prefix: subnet.prefix(),
            range: subnet,
            network_name: self.network_name.map(str::to_owned),
            overlapping: self.overlapping,
            generation: candidate.generation,
            requested,
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
    Taken(Box<Lease>),
    Nothing(Rest),
}

/// What a way through shards that took nothing has seen.
#[derive(Default)]
struct Rest {
    /// The address that was freed first, when, and its shard.
    oldest: Option<(u64, u128, Candidate)>,
    /// The shards, each with the time of the last change of a name in it.
    full: Vec<(Numbered, i64)>,
}

/// One search for an address.
struct Search<'a> {
    store: &'a Store,
    want: &'a Want<'a>,
    intent: Option<Intent>,
    collisions: usize,
}

impl Store {
    /// Leases the lowest free address of a range.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`] after every shard was read, or what failed.
    /// Nothing is leased then, but an error of a system call may leave a record
    /// that leads the owner's DEL to what was begun.
    pub fn allocate(&self, want: &Want<'_>) -> Result<Lease, StoreError> {
        let mut search = Search {
            store: self,
            want,
            intent: None,
            collisions: 0,
        };
        let found = search.run();
        search.finish(found)
    }

    /// Leases one address of a range, and no other.
    ///
    /// # Errors
    /// [`StoreError::Held`] naming the holder, or what failed.
    pub fn allocate_this(&self, want: &Want<'_>, address: IpAddr) -> Result<Lease, StoreError> {
        let mut search = Search {
            store: self,
            want,
            intent: None,
            collisions: 0,
        };
        let found = match search.this(bits(address)) {
            Ok(Some(lease)) => Ok(lease),
            Ok(None) => Err(self.held_by_another(want, address)),
            Err(error) => Err(error),
        };
        search.finish(found)
    }

    /// Whether [`Store::allocate`] would find an address now.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`], or what kept it from being read.
    pub fn has_room(&self, want: &Want<'_>) -> Result<(), StoreError> {
        let search = Search {
            store: self,
            want,
            intent: None,
            collisions: 0,
        };
        for full in [search.believed_full(), Vec::new()] {
            for (order, number) in want.shards().enumerate() {
                if full.get(order) == Some(&true) {
                    continue;
                }
                let Some(ShardRead { choice, .. }) = search.read_shard(number, self.cooldown)?
                else {
                    continue;
                };
                if !choice.free.is_empty() || !choice.resting.is_empty() {
                    return Ok(());
                }
            }
        }
        Err(search.exhausted())
    }

    /// What [`Store::allocate`] would find on its way now.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn survey(&self, want: &Want<'_>) -> Result<Survey, StoreError> {
        let search = Search {
            store: self,
            want,
            intent: None,
            collisions: 0,
        };
        let v4 = want.range.subnet().is_ipv4();
        let mut survey = Survey::default();
        let mut longest: Option<(u64, u128)> = None;
        for number in want.shards() {
            let Some(ShardRead { choice, .. }) = search.read_shard(number, self.cooldown)? else {
                survey.unreadable += 1;
                continue;
            };
            let next = choice.free.first().map(|free| free.address);
            let below = |address: u128| next.is_none_or(|next| address < next);
            let whole = Span {
                first: number << 8,
                last: number << 8 | 0xff,
            };
            let spans = want
                .range
                .spans()
                .iter()
                .filter_map(|span| span.intersection(whole));
            let addresses: u128 = spans
                .filter_map(|span| {
                    span.intersection(Span {
                        first: 0,
                        last: next.unwrap_or(u128::MAX),
                    })
                })
                .fold(0, |sum, span| sum.saturating_add(span.size()));
            let resting = choice.resting.iter().filter(|c| below(c.address)).count() as u128;
            survey.cooling_down = survey.cooling_down.saturating_add(resting);
            let free = u128::from(next.is_some());
            survey.leased = survey
                .leased
                .saturating_add(addresses.saturating_sub(resting + free));
            if let (Some(at), Some(first)) = (choice.rested_at, choice.resting.first())
                && longest.is_none_or(|(than, _)| at < than)
            {
                longest = Some((at, first.address));
            }
            if let Some(next) = next {
                survey.next = Some(from_bits(v4, next));
                return Ok(survey);
            }
        }
        survey.next = longest.map(|(_, address)| from_bits(v4, address));
        survey.still_cooling_down = longest.is_some();
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
                && let Some(Content::Lease(lease, _)) = read(&dir, &held.name())?
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

impl Search<'_> {
    /// Lowest first, then thoroughly, then what is still resting.
    fn run(&mut self) -> Result<Lease, StoreError> {
        let mut hints = self.hints(true);
        let full = hints.full(self.want.shards(), now());
        let all = || self.want.shards().enumerate();
        if full.contains(&true) {
            let believed = all().filter(|(order, _)| full.get(*order) != Some(&true));
            if let Swept::Taken(lease) = self.sweep(&mut hints, believed)? {
                return Ok(*lease);
            }
        }
        let mut swept = self.sweep(&mut hints, all())?;
        let mut waits = EXHAUSTED_RETRY_INTERVALS_MS.iter();
        loop {
            let rest = match swept {
                Swept::Taken(lease) => return Ok(*lease),
                Swept::Nothing(rest) => rest,
            };
            if let Some((_, number, candidate)) = rest.oldest {
                // Nothing has rested.
                if let Some(lease) = self.take(None, number, candidate, false)? {
                    return Ok(lease);
                }
                swept = self.sweep(&mut hints, all())?;
                continue;
            }
            // A held entry may be that of a contender who is about to withdraw.
            let Some(wait) = waits.next() else {
                return Err(self.exhausted());
            };
            let now = server_time(&self.store.root)?;
            let mut contended = rest.contended(now).peekable();
            if contended.peek().is_none() {
                return Err(self.exhausted());
            }
            std::thread::sleep(Duration::from_millis(*wait));
            swept = self.sweep(&mut hints, contended)?;
        }
    }

    fn hints(&self, make: bool) -> Hints {
        let space = name::space(self.want.network_name);
        let path = ["hints", space.as_str()];
        let dir = if make {
            self.store.make_below(&path).ok()
        } else {
            self.store.open_below(&path).ok().flatten()
        };
        Hints::load(dir, self.want.range)
    }

    fn believed_full(&self) -> Vec<bool> {
        self.hints(false).full(self.want.shards(), now())
    }

    /// One way through shards, by their order and number: takes the first address that is
    /// free and has rested.
    fn sweep(
        &mut self,
        hints: &mut Hints,
        shards: impl Iterator<Item = Numbered>,
    ) -> Result<Swept, StoreError> {
        let mut rest = Rest::default();
        for (order, number) in shards {
            loop {
                let stamp = hints.stamp(number);
                let Some(read) = self.read_shard(number, self.store.cooldown)? else {
                    break;
                };
                let Some(candidate) = self.pick(&read.choice.free) else {
                    hints.mark_full(order, stamp, read.choice.rested_at);
                    rest.note(order, number, &read);
                    break;
                };
                if let Some(lease) = self.take(read.dir, number, candidate, false)? {
                    return Ok(Swept::Taken(Box::new(lease)));
                }
            }
        }
        Ok(Swept::Nothing(rest))
    }

    /// One address; `None` when it is held.
    fn this(&mut self, address: u128) -> Result<Option<Lease>, StoreError> {
        let number = name::shard_number(address);
        for _ in 0..3 {
            let dir = self.open(number)?;
            let names = dir.as_ref().map_or(Ok(Vec::new()), |dir| dir.names())?;
            let shard = self.read(number, &names);
            let Some(candidate) = shard.candidate(address) else {
                return Ok(None);
            };
            if self.conflicts(candidate, dir.as_deref())? {
                return Ok(None);
            }
            if let Some(lease) = self.take(dir, number, candidate, true)? {
                return Ok(Some(lease));
            }
        }
        Ok(None)
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
                let lease = self.want.lease(candidate, false);
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
        let index = usize::try_from(random64() % count).ok()?;
        free.get(index).copied()
    }

    fn take(
        &mut self,
        dir: Option<Rc<Dir>>,
        number: u128,
        candidate: Candidate,
        requested: bool,
    ) -> Result<Option<Lease>, StoreError> {
        let dir = match dir {
            Some(dir) => dir,
            None => {
                let space = name::space(self.want.network_name);
                let shard = name::shard(self.want.range.subnet().is_ipv4(), number);
                self.store.make_below(&["leases", &space, &shard])?
            }
        };
        let lease = self.want.lease(candidate, requested);
        debug_assert_eq!(self.want.other_class(), other_class(&lease));
        let intent = match self.intent.take() {
            Some(intent) => {
                self.store.intend_instead(&intent, &lease)?;
                intent
            }
            None => self.store.intend(&lease, self.want.index)?,
        };
        if self.store.claim(&intent, &lease, &dir)? {
            return Ok(Some(lease));
        }
        self.intent = Some(intent);
        self.collisions += 1;
        if self.collisions > MAX_COLLISIONS {
            return Err(self.exhausted());
        }
        Ok(None)
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

    /// Removes the record of a search that found nothing.
    fn finish(self, found: Result<Lease, StoreError>) -> Result<Lease, StoreError> {
        if found.is_err()
            && let Some(intent) = self.intent
        {
            // The error to report is the first one; what stays here is a record
            // without a lease entry, which DEL removes.
            let _ = self.store.remove_intent(intent);
        }
        found
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
