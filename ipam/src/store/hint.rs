//! Which shards to read first: a file of shards that were found full.
//!
//! Lowest-free-first must not mean reading every shard below. So an ADD that
//! finds a shard full records that, with the shard's stamp as it was before
//! the read; whoever frees an address changes the stamp of its shard. A shard is
//! read last while the stamp is unchanged and nothing in it has rested enough.
//! What is recorded is of the addresses that the ADD could take in the shard: the
//! stamp is mixed with them. So one file serves a space, whatever the exclusions of a
//! range, and whichever blocks of it the node has.
//!
//! All of this is advice. Nothing is decided by it: an address is taken by
//! creating its name, and a pool is called exhausted only after every shard was
//! read. So the file is written in place, unsynced, by anyone at any
//! time, and may be lost, torn or removed; the price is a longer way, or an
//! address that is not the lowest. Shards may have one entry, as those of ranges that
//! overlap have: it is believed for the one that wrote it last.

use super::dir::{Dir, DirError};
use super::name::shard_number;
use crate::range::{Range, Span};
use node::random::random64;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

const NAME: &str = "full";
/// Enough for all of a /8 of IPv4; shards beyond share entries.
const ENTRIES: u64 = 1 << 16;
/// Numbers of 32 bits: the stamp, which releases write; the mixed stamp of a shard that was full;
/// Unix seconds from when something may have rested enough, where 0 knows nothing.
const ENTRY_BYTES: usize = 12;
/// So much of the file is read at one time.
const PAGE_ENTRIES: u64 = 341;
/// Nothing in the shard is resting.
const NEVER: u32 = u32::MAX;

/// What is believed about the shards of a range.
#[derive(Debug)]
pub(crate) struct Hints<'r> {
    dir: Option<Rc<Dir>>,
    range: &'r Range,
    writes: bool,
    file: Option<File>,
    /// The page that was read last, by its number.
    page: Option<(u64, Vec<u8>)>,
}

impl<'r> Hints<'r> {
    /// What is believed about `range` in a space's hint directory.
    pub(crate) fn load(dir: Option<Rc<Dir>>, range: &'r Range, writes: bool) -> Self {
        let open = |dir: &Rc<Dir>| dir.open_hint(NAME, false).ok()?;
        Self {
            file: dir.as_ref().and_then(open),
            page: None,
            range,
            writes,
            dir,
        }
    }

    /// Whether a shard need not be read now, in Unix milliseconds.
    pub(crate) fn is_full(&mut self, shard: u128, now: u64) -> bool {
        let [stamp, full, until] = self.entry(shard);
        u64::from(until) > now / 1000 && full == self.mixed(stamp, shard)
    }

    /// The stamp of a shard; to be read before the shard itself, how long before does not matter.
    pub(crate) fn stamp(&mut self, shard: u128) -> u32 {
        let [stamp, ..] = self.entry(shard);
        self.mixed(stamp, shard)
    }

    /// Writes down that a shard was full when it had `stamp`, and until when at
    /// least (Unix milliseconds).
    pub(crate) fn mark_full(&mut self, shard: u128, stamp: u32, until: Option<u64>) {
        let until = until.map_or(NEVER, |ms| u32::try_from(ms / 1000).unwrap_or(NEVER - 1));
        let [_, full, known] = self.entry(shard);
        if !self.writes || [full, known] == [stamp, until] {
            return;
        }
        if self.file.is_none() {
            let open = |dir: &Rc<Dir>| dir.open_hint(NAME, true).ok().flatten();
            self.file = self.dir.as_ref().and_then(open);
        }
        if let Some(file) = &self.file {
            let entry = (u64::from(until) << 32 | u64::from(stamp)).to_le_bytes();
            // Advice that could not be written is advice that is not there.
            let _ = file.write_all_at(&entry, offset(shard) + 4);
        }
    }

    /// What the file says of a shard; what is not there is zero.
    fn entry(&mut self, shard: u128) -> [u32; 3] {
        let Some(file) = &self.file else {
            return [0; 3];
        };
        let (page, at) = (
            entry_of(shard) / PAGE_ENTRIES,
            entry_of(shard) % PAGE_ENTRIES,
        );
        if self.page.as_ref().is_none_or(|(number, _)| *number != page) {
            let bytes = PAGE_ENTRIES * ENTRY_BYTES as u64;
            self.page = Some((page, read_at(file, page * bytes, bytes)));
        }
        let mut entries = self
            .page
            .iter()
            .flat_map(|(_, bytes)| bytes.as_chunks::<ENTRY_BYTES>().0);
        let entry = usize::try_from(at).ok().and_then(|at| entries.nth(at));
        let entry = entry.unwrap_or(&[0; ENTRY_BYTES]);
        [0, 4, 8].map(|at| number(entry.get(at..).unwrap_or_default()))
    }

    /// A stamp for the addresses of the range in a shard alone.
    fn mixed(&self, stamp: u32, shard: u128) -> u32 {
        let whole = Span {
            first: shard << 8,
            last: shard << 8 | 0xff,
        };
        let spans = self.range.spans();
        let from = spans.partition_point(|span| span.last < whole.first);
        let spans = spans.iter().skip(from);
        let parts = spans.map_while(|span| span.intersection(whole));
        let numbers = parts.flat_map(|part| [part.first & 0xff, part.last & 0xff]);
        let mix = [shard & 0xffff_ffff].into_iter().chain(numbers);
        let mix = mix.fold(0u32, |mix, number| {
            let number = u32::try_from(number).unwrap_or(0);
            (mix ^ number).wrapping_mul(0x9e37_79b1).rotate_left(15)
        });
        stamp ^ mix
    }
}

/// Says that an address of a shard was freed. To be called after it was.
pub(crate) fn released(dir: &Dir, address: u128) -> Result<(), DirError> {
    if let Some(file) = dir.open_hint(NAME, true)? {
        let stamp = random64().to_le_bytes();
        // As above: advice.
        let _ = file.write_all_at(&stamp[..4], offset(shard_number(address)));
    }
    Ok(())
}

/// Neighbours are neighbours; what is 2^16 shards away is anywhere. An ADD asks for each full shard.
fn entry_of(shard: u128) -> u64 {
    let low = |number: u128| u64::try_from(number & u128::from(u64::MAX)).unwrap_or(0);
    let high = shard >> 16;
    let mut anywhere = low(high) ^ low(high >> 64).rotate_left(32);
    for _ in 0..2 {
        anywhere = (anywhere ^ anywhere >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }
    low(shard).wrapping_add(anywhere >> 48) & (ENTRIES - 1)
}

fn offset(shard: u128) -> u64 {
    entry_of(shard) * ENTRY_BYTES as u64
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default())
}

fn read_at(file: &File, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + filled as u64) {
            Ok(0) | Err(_) => break,
            Ok(n) => filled += n,
        }
    }
    bytes.truncate(filled);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::{Spec, bits};
    use node::policy::Profile;

    const NOW: u64 = 1_000_000_000;

    fn range(text: &str) -> Range {
        Range::new(
            &Spec {
                range: text,
                ..Spec::default()
            },
            Profile::Strict,
        )
        .unwrap()
    }

    fn load<'r>(place: &tempfile::TempDir, range: &'r Range) -> Hints<'r> {
        let dir = Dir::open_path(place.path()).unwrap();
        Hints::load(Some(Rc::new(dir)), range, true)
    }

    fn mark(hints: &mut Hints<'_>, shard: u128, until: Option<u64>) {
        let stamp = hints.stamp(shard);
        hints.mark_full(shard, stamp, until);
    }

    fn full(mut hints: Hints<'_>, shards: impl Iterator<Item = u128>, now: u64) -> Vec<u128> {
        shards.filter(|shard| hints.is_full(*shard, now)).collect()
    }

    #[test]
    fn a_full_shard_is_passed_over_until_something_is_freed_in_it() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.200.0.0/22");
        let first = range.spans()[0].first >> 8;
        let shards = || first..first + 4;
        let mut hints = load(&place, &range);
        assert!(shards().all(|shard| !hints.is_full(shard, NOW)));
        mark(&mut hints, first, None);
        mark(&mut hints, first + 2, Some(NOW + 5_000));
        let full = |now| full(load(&place, &range), shards(), now);
        assert_eq!(full(NOW), [first, first + 2]);
        assert_eq!(full(NOW + 5_000), [first], "it has rested");
        let dir = Dir::open_path(place.path()).unwrap();
        released(&dir, (first << 8) + 77).unwrap();
        assert_eq!(full(NOW), [first + 2]);
        let mut hints = load(&place, &range);
        mark(&mut hints, first, None);
        assert_eq!(full(NOW), [first, first + 2]);
    }

    #[test]
    fn a_release_while_the_shard_is_read_is_not_missed() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24");
        let mut hints = load(&place, &range);
        let before = hints.stamp(0x0a_0000);
        released(&Dir::open_path(place.path()).unwrap(), 0x0a00_0005).unwrap();
        hints.mark_full(0x0a_0000, before, None);
        assert!(!load(&place, &range).is_full(0x0a_0000, NOW));
    }

    #[test]
    fn garbage_is_bad_advice_and_nothing_worse() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/23");
        let garbage = vec![0xff; usize::try_from(offset(0x0a_0001)).unwrap() + 7];
        std::fs::write(place.path().join(NAME), garbage).unwrap();
        assert!(full(load(&place, &range), 0x0a_0000..0x0a_0002, NOW).is_empty());
        let none = Hints::load(None, &range, true);
        assert!(full(none, 0..9, NOW).is_empty());
    }

    #[test]
    fn a_shard_that_is_full_for_one_set_of_addresses_is_read_for_another() {
        let place = tempfile::tempdir().unwrap();
        let all = range("10.0.0.0/23");
        let first = 0x0a_0000;
        let block = |block: &str| all.within(&[block.parse().unwrap()]);
        let one = block("10.0.0.16/28");
        let mut hints = load(&place, &one);
        mark(&mut hints, first, None);
        let is_full = |range: &Range| load(&place, range).is_full(first, NOW);
        assert!(is_full(&one));
        for other in [block("10.0.0.16/27"), block("10.0.0.32/28"), all.clone()] {
            assert!(!is_full(&other), "{other:?}");
        }
    }

    #[test]
    fn shards_with_one_entry_are_told_apart() {
        let place = tempfile::tempdir().unwrap();
        let all = range("fd00::/64");
        let first = bits("fd00::".parse().unwrap()) >> 8;
        let mut beyond = (1u128..).map(|n| first + (n << 16));
        let other = beyond.find_map(|far| {
            let mut near = far..far + u128::from(ENTRIES);
            near.find(|shard| entry_of(*shard) == entry_of(first))
        });
        let mut hints = load(&place, &all);
        mark(&mut hints, first, None);
        let shards = [first, other.unwrap()];
        assert_eq!(full(load(&place, &all), shards.into_iter(), NOW), [first]);
    }

    #[test]
    fn ranges_of_both_families_and_of_many_rails_have_entries_of_their_own() {
        let ranges = [
            "fd00::",
            "fd00:0:0:1::",
            "10.0.0.0",
            "10.1.0.0",
            "11.0.0.0",
            "192.168.0.0",
        ];
        let firsts = ranges.map(|first| bits(first.parse().unwrap()) >> 8);
        let shards = firsts.iter().flat_map(|first| *first..first + 256);
        let entries: std::collections::BTreeSet<u64> = shards.map(entry_of).collect();
        assert_eq!(entries.len(), ranges.len() * 256);
    }
}
