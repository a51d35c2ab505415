//! Which shards to read first: a table of shards that were found full.
//!
//! Lowest-free-first must not mean reading every shard below. So an ADD that finds a shard full
//! writes until when it will be, and whoever frees an address of it overwrites that. An entry counts
//! for one set of addresses of its shard, which is mixed into it. So one table serves a space, whatever
//! the ranges, their exclusions, and the blocks that the node has.
//!
//! All of this is advice. Nothing is decided by it: an address is taken by creating its name, and a
//! pool is called exhausted only after every shard was read. So the table is written in place,
//! unsynced, by anyone at any time, and may be lost, torn or removed. The price is a longer way, or an
//! address that is not the lowest. Shards 2^16 apart have one entry.

use super::dir::{Dir, DirError};
use super::name::shard_number;
use crate::range::{Range, Span};
use node::random::random64;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

const TABLE: &str = "full";
/// Enough for all of a /8 of IPv4; shards beyond share entries.
const SLOTS: u64 = 1 << 16;
/// So much of the table is read at one time, in bytes.
const PAGE_BYTES: usize = 4096;
/// Nothing in the shard is cooling down.
const NEVER: u32 = u32::MAX;

/// What is believed about the shards of a range.
#[derive(Debug)]
pub(crate) struct Hints<'r> {
    dir: Option<Rc<Dir>>,
    range: &'r Range,
    table: Option<File>,
    /// The part of the table that was read last, and its number.
    page: (u64, Vec<u8>),
}

/// The set of addresses that was found full, and until when in Unix seconds; 0 says nothing.
pub(crate) type Entry = [u8; 8];

fn entry(set: u32, until: u32) -> Entry {
    (u64::from(until) << 32 | u64::from(set)).to_le_bytes()
}

impl<'r> Hints<'r> {
    /// What is believed about `range` in a space's hint directory.
    pub(crate) fn load(dir: Option<Rc<Dir>>, range: &'r Range) -> Self {
        let open = |dir: &Rc<Dir>| dir.open_hint(TABLE, false).ok()?;
        Self {
            table: dir.as_ref().and_then(open),
            page: (u64::MAX, Vec::new()),
            range,
            dir,
        }
    }

    /// The same, of which nothing is written.
    pub(crate) fn read_only(self) -> Self {
        Self { dir: None, ..self }
    }

    /// Whether a shard need not be read now, in Unix milliseconds.
    pub(crate) fn is_full(&mut self, shard: u128, now: u64) -> bool {
        let entry = u64::from_le_bytes(self.entry(shard));
        entry >> 32 > now / 1000 && entry & 0xffff_ffff == u64::from(self.set_in(shard))
    }

    /// The entry of a shard; to be read before the shard itself.
    pub(crate) fn entry(&mut self, shard: u128) -> Entry {
        let Some(table) = &self.table else {
            return Entry::default();
        };
        let at = offset(shard);
        let page = at / PAGE_BYTES as u64;
        if self.page.0 != page {
            self.page = (page, read_at(table, page * PAGE_BYTES as u64, PAGE_BYTES));
        }
        let entries = self.page.1.as_chunks::<8>().0;
        let number = usize::try_from(at % PAGE_BYTES as u64).unwrap_or(0) / 8;
        entries.get(number).copied().unwrap_or_default()
    }

    /// Writes that a shard was full, and until when at least (Unix milliseconds), unless its entry
    /// is another one by now: something was freed meanwhile.
    pub(crate) fn mark_full(&mut self, shard: u128, before: Entry, until: Option<u64>) {
        let until = until.map_or(NEVER, |ms| u32::try_from(ms / 1000).unwrap_or(NEVER - 1));
        let full = entry(self.set_in(shard), until);
        let Some(dir) = self.dir.as_ref().filter(|_| full != before) else {
            return;
        };
        if self.table.is_none() {
            self.table = dir.open_hint(TABLE, true).ok().flatten();
        }
        if let Some(table) = &self.table {
            let there = read_at(table, offset(shard), 8);
            if there.is_empty() || there == before {
                // Advice that could not be written is advice that is not there.
                let _ = table.write_all_at(&full, offset(shard));
            }
        }
    }

    /// Stands for the addresses of the range in a shard.
    fn set_in(&self, shard: u128) -> u32 {
        let whole = Span {
            first: shard << 8,
            last: shard << 8 | 0xff,
        };
        let spans = self.range.spans();
        let from = spans.partition_point(|span| span.last < whole.first);
        let spans = spans.iter().skip(from);
        let parts = spans.map_while(|span| span.intersection(whole));
        let numbers = parts.flat_map(|part| [part.first & 0xff, part.last & 0xff]);
        let family = u128::from(self.range.subnet().is_ipv4());
        let mix = [shard & 0xffff_ffff, family].into_iter().chain(numbers);
        mix.fold(0u32, |mix, number| {
            let number = u32::try_from(number).unwrap_or(0);
            (mix ^ number).wrapping_mul(0x9e37_79b1).rotate_left(15)
        })
    }
}

/// Says that an address of a shard was freed. To be called after it was.
pub(crate) fn released(dir: &Dir, address: u128) -> Result<(), DirError> {
    if let Some(table) = dir.open_hint(TABLE, true)? {
        let random = u32::try_from(random64() >> 32).unwrap_or(1);
        // As above: advice.
        let _ = table.write_all_at(&entry(random, 0), offset(shard_number(address)));
    }
    Ok(())
}

/// Where the entry of a shard is.
fn offset(shard: u128) -> u64 {
    u64::try_from(shard & u128::from(SLOTS - 1)).unwrap_or(0) * 8
}

fn read_at(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
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
        Hints::load(Some(Rc::new(Dir::open_path(place.path()).unwrap())), range)
    }

    fn mark(hints: &mut Hints<'_>, shard: u128, until: Option<u64>) {
        let before = hints.entry(shard);
        hints.mark_full(shard, before, until);
    }

    #[test]
    fn a_full_shard_is_passed_over_until_something_is_freed_in_it() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.200.0.0/22");
        let first = range.spans()[0].first >> 8;
        let full = |now| {
            let mut hints = load(&place, &range);
            [0, 1, 2].map(|number| hints.is_full(first + number, now))
        };
        assert_eq!(full(NOW), [false; 3]);
        mark(&mut load(&place, &range), first, None);
        mark(&mut load(&place, &range), first + 2, Some(NOW + 5_000));
        assert_eq!(full(NOW), [true, false, true]);
        assert_eq!(full(NOW + 5_000), [true, false, false], "it has rested");
        let dir = Dir::open_path(place.path()).unwrap();
        released(&dir, (first << 8) + 77).unwrap();
        assert_eq!(full(NOW), [false, false, true]);
        mark(&mut load(&place, &range), first, None);
        assert_eq!(full(NOW), [true, false, true]);
    }

    #[test]
    fn a_release_while_the_shard_is_read_is_not_missed() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24");
        let mut hints = load(&place, &range);
        let before = hints.entry(0x0a_0000);
        released(&Dir::open_path(place.path()).unwrap(), 0x0a00_0005).unwrap();
        hints.mark_full(0x0a_0000, before, None);
        assert!(!load(&place, &range).is_full(0x0a_0000, NOW));
    }

    #[test]
    fn garbage_is_bad_advice_and_nothing_worse() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/23");
        std::fs::write(place.path().join(TABLE), [0xff; 19]).unwrap();
        assert!((0x0a_0000..0x0a_0002).all(|shard| !load(&place, &range).is_full(shard, NOW)));
        assert!(!Hints::load(None, &range).is_full(0, NOW));
    }

    #[test]
    fn a_shard_that_is_full_for_one_set_of_addresses_is_read_for_another() {
        let place = tempfile::tempdir().unwrap();
        let all = range("10.0.0.0/23");
        let first = 0x0a_0000;
        let block = |block: &str| all.within(&[block.parse().unwrap()]);
        let one = block("10.0.0.16/28");
        mark(&mut load(&place, &one), first, None);
        let full = |range: &Range| load(&place, range).is_full(first, NOW);
        assert!(full(&one));
        for other in [block("10.0.0.16/27"), block("10.0.0.32/28"), all.clone()] {
            assert!(!full(&other), "{other:?}");
        }
    }

    #[test]
    fn shards_with_one_entry_are_told_apart() {
        let place = tempfile::tempdir().unwrap();
        let all = range("fd00::/64");
        let first = bits("fd00::".parse().unwrap()) >> 8;
        mark(&mut load(&place, &all), first + 5, None);
        assert!(load(&place, &all).is_full(first + 5, NOW));
        assert!(!load(&place, &all).is_full(first + 5 + u128::from(SLOTS), NOW));
    }
}
