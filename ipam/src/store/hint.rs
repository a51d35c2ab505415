//! Which shards to read first: a table of shards that were found full.
//!
//! Lowest-free-first must not mean reading every shard below. So an ADD that
//! finds a shard full records that, with the shard's stamp as it was before
//! the read; whoever frees an address changes the stamp of its shard. A shard is
//! passed over while the stamp is unchanged and nothing in it has rested enough.
//! What is recorded is of the addresses that the ADD could take in the shard: the
//! stamp is mixed with them. So one table serves a network, whatever its exclusions,
//! and whichever blocks of it the node has.
//!
//! All of this is advice. Nothing is decided by it: an address is taken by
//! creating its name, and a pool is called exhausted only after every shard was
//! read. So these files are written in place, unsynced, by anyone at any
//! time, and may be lost, torn or removed; the price is a longer way, or an
//! address that is not the lowest. Shards 2^16 apart have one stamp and one entry.

use super::dir::{Dir, DirError};
use super::name::{hash64, shard_number};
use crate::range::{Range, Span, bits};
use ipnetwork::IpNetwork;
use node::random::random64;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

const STAMPS: &str = "released";
/// Enough for all of a /8 of IPv4; shards beyond share entries.
const SLOTS: u64 = 1 << 16;
/// So much of a file is read at one time, in bytes.
const PAGE_BYTES: usize = 4096;
/// Nothing in the shard is resting.
const NEVER: u32 = u32::MAX;

/// What is believed about the shards of a range.
#[derive(Debug)]
pub(crate) struct Hints<'r> {
    dir: Option<Rc<Dir>>,
    range: &'r Range,
    is_read_only: bool,
    stamps: Option<File>,
    table: Option<File>,
    /// What was read of the table.
    entries: Page<8>,
}

/// Says of a shard that it is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    stamp: u32,
    /// Unix seconds from when something may have rested enough; 0 knows nothing.
    until: u32,
}

impl<'r> Hints<'r> {
    /// What is believed about `range` in a space's hint directory.
    pub(crate) fn load(dir: Option<Rc<Dir>>, range: &'r Range) -> Self {
        let open = |name: &str| dir.as_ref()?.open_hint(name, false).ok()?;
        Self {
            stamps: open(STAMPS),
            table: open(&table_name(range.subnet())),
            entries: Page::default(),
            range,
            is_read_only: false,
            dir,
        }
    }

    /// The same, of which nothing is written.
    pub(crate) fn read_only(self) -> Self {
        Self {
            is_read_only: true,
            ..self
        }
    }

    /// Which of some shards need not be read now.
    pub(crate) fn full(&mut self, shards: impl Iterator<Item = u128>, now: u64) -> Vec<bool> {
        let Some(table) = &self.table else {
            return Vec::new();
        };
        // A range of IPv6 has more shards than anybody can go through.
        let entries = table.metadata().map_or(0, |meta| meta.len() / 8).min(SLOTS);
        let shards = shards.take(usize::try_from(entries).unwrap_or(0));
        let (now, mut stamps) = (now / 1000, Page::<4>::default());
        let mut full = Vec::new();
        for shard in shards {
            let bytes = self.entries.get(self.table.as_ref(), self.slot(shard));
            let entry = Entry::from_bytes(bytes);
            let is_full = u64::from(entry.until) > now && {
                let stamp = stamps.get(self.stamps.as_ref(), slot(shard));
                entry.stamp == self.mixed(stamp, shard)
            };
            full.push(is_full);
        }
        full
    }

    /// The stamp of a shard; to be read before the shard itself.
    pub(crate) fn stamp(&self, shard: u128) -> u32 {
        let stamps = self.stamps.as_ref();
        let bytes = stamps.map(|stamps| read_at(stamps, slot(shard) * 4, 4));
        let stamp = bytes.as_deref().and_then(<[u8]>::first_chunk::<4>);
        self.mixed(stamp.copied().unwrap_or_default(), shard)
    }

    /// Writes down that a shard was full when it had `stamp`, and until when at
    /// least (Unix milliseconds).
    pub(crate) fn mark_full(&mut self, shard: u128, stamp: u32, until: Option<u64>) {
        let until = until.map_or(NEVER, |ms| u32::try_from(ms / 1000).unwrap_or(NEVER - 1));
        let (slot, entry) = (self.slot(shard), Entry { stamp, until }.to_bytes());
        if self.is_read_only || self.entries.get(self.table.as_ref(), slot) == entry {
            return;
        }
        if self.table.is_none() {
            let name = table_name(self.range.subnet());
            let open = |dir: &Rc<Dir>| dir.open_hint(&name, true).ok().flatten();
            self.table = self.dir.as_ref().and_then(open);
        }
        if let Some(table) = &self.table {
            // Advice that could not be written is advice that is not there.
            let _ = table.write_all_at(&entry, slot * 8);
        }
    }

    /// The place of a shard in the table, by its distance from the network's first one.
    fn slot(&self, shard: u128) -> u64 {
        slot(shard.wrapping_sub(shard_number(bits(self.range.subnet().network()))))
    }

    /// A stamp for the addresses of the range in a shard alone.
    fn mixed(&self, stamp: [u8; 4], shard: u128) -> u32 {
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
        u32::from_le_bytes(stamp) ^ mix
    }
}

impl Entry {
    fn from_bytes(bytes: [u8; 8]) -> Self {
        let [a, b, c, d, until @ ..] = bytes;
        Self {
            stamp: u32::from_le_bytes([a, b, c, d]),
            until: u32::from_le_bytes(until),
        }
    }

    fn to_bytes(self) -> [u8; 8] {
        (u64::from(self.until) << 32 | u64::from(self.stamp)).to_le_bytes()
    }
}

/// The page of a file of numbers of `N` bytes that was read last; what is not there is zero.
#[derive(Debug, Default)]
struct Page<const N: usize> {
    number: Option<u64>,
    bytes: Vec<u8>,
}

impl<const N: usize> Page<N> {
    fn get(&mut self, file: Option<&File>, slot: u64) -> [u8; N] {
        let Some(file) = file else { return [0; N] };
        let of_page = (PAGE_BYTES / N) as u64;
        let page = slot / of_page;
        if self.number != Some(page) {
            self.number = Some(page);
            self.bytes = read_at(file, page * PAGE_BYTES as u64, PAGE_BYTES);
        }
        let at = usize::try_from(slot % of_page).unwrap_or(0);
        let numbers = self.bytes.as_chunks::<N>().0;
        numbers.get(at).copied().unwrap_or([0; N])
    }
}

/// Says that an address of a shard was freed. To be called after it was.
pub(crate) fn released(dir: &Dir, address: u128) -> Result<(), DirError> {
    if let Some(stamps) = dir.open_hint(STAMPS, true)? {
        let offset = slot(shard_number(address)) * 4;
        // As above: advice.
        let _ = stamps.write_all_at(&random32().to_le_bytes(), offset);
    }
    Ok(())
}

/// The table of a network.
pub(crate) fn table_name(subnet: IpNetwork) -> String {
    format!("{:016x}", hash64(&subnet.to_string()))
}

fn slot(shard: u128) -> u64 {
    u64::try_from(shard & u128::from(SLOTS - 1)).unwrap_or(0)
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

fn random32() -> u32 {
    u32::try_from(random64() >> 32).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::Spec;
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

    #[test]
    fn a_full_shard_is_passed_over_until_something_is_freed_in_it() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.200.0.0/22");
        let first = range.spans()[0].first >> 8;
        let shards = || first..first + 4;
        let mut hints = load(&place, &range);
        assert!(hints.full(shards(), NOW).is_empty());
        hints.mark_full(first, hints.stamp(first), None);
        hints.mark_full(first + 2, hints.stamp(first + 2), Some(NOW + 5_000));
        let full = |now| load(&place, &range).full(shards(), now);
        assert_eq!(full(NOW), [true, false, true]);
        assert_eq!(full(NOW + 5_000), [true, false, false], "it has rested");
        let dir = Dir::open_path(place.path()).unwrap();
        released(&dir, (first << 8) + 77).unwrap();
        assert_eq!(full(NOW), [false, false, true]);
        let mut hints = load(&place, &range);
        hints.mark_full(first, hints.stamp(first), None);
        assert_eq!(full(NOW), [true, false, true]);
    }

    #[test]
    fn a_release_while_the_shard_is_read_is_not_missed() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24");
        let mut hints = load(&place, &range);
        let before = hints.stamp(0x0a_0000);
        released(&Dir::open_path(place.path()).unwrap(), 0x0a00_0005).unwrap();
        hints.mark_full(0x0a_0000, before, None);
        assert_eq!(
            load(&place, &range).full(std::iter::once(0x0a_0000), NOW),
            [false]
        );
    }

    #[test]
    fn garbage_is_bad_advice_and_nothing_worse() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/23");
        std::fs::write(place.path().join(table_name(range.subnet())), [0xff; 19]).unwrap();
        std::fs::write(place.path().join(STAMPS), [0xff; 3]).unwrap();
        assert_eq!(
            load(&place, &range).full(0x0a_0000..0x0a_0002, NOW),
            [false, false]
        );
        assert!(Hints::load(None, &range).full(0..9, NOW).is_empty());
    }

    #[test]
    fn a_shard_that_is_full_for_one_set_of_addresses_is_read_for_another() {
        let place = tempfile::tempdir().unwrap();
        let all = range("10.0.0.0/23");
        let first = 0x0a_0000;
        let block = |block: &str| all.within(&[block.parse().unwrap()]);
        let one = block("10.0.0.16/28");
        let mut hints = load(&place, &one);
        hints.mark_full(first, hints.stamp(first), None);
        let full = |range: &Range| load(&place, range).full(std::iter::once(first), NOW);
        assert_eq!(full(&one), [true]);
        for other in [block("10.0.0.16/27"), block("10.0.0.32/28"), all.clone()] {
            assert_eq!(full(&other), [false], "{other:?}");
        }
    }

    #[test]
    fn shards_with_one_entry_are_told_apart() {
        let place = tempfile::tempdir().unwrap();
        let all = range("fd00::/64");
        let first = bits("fd00::".parse().unwrap()) >> 8;
        let mut hints = load(&place, &all);
        hints.mark_full(first + 5, hints.stamp(first + 5), None);
        let shards = [first + 5, first + 5 + u128::from(SLOTS)];
        assert_eq!(
            load(&place, &all).full(shards.into_iter(), NOW),
            [true, false]
        );
    }
}
