//! Which shards to read first: a table of shards that were found full.
//!
//! Lowest-free-first must not mean reading every shard below. So an ADD that
//! finds a shard full records that, with the shard's stamp as it was before
//! the read; whoever frees an address changes the stamp of its shard. A shard is
//! passed over while the stamp is unchanged and nothing in it has rested enough.
//!
//! All of this is advice. Nothing is decided by it: an address is taken by
//! creating its name, and a pool is called exhausted only after every shard was
//! read. So these files are written in place, unsynced, by anyone at any
//! time, and may be lost, torn or removed; the price is a longer way, or an
//! address that is not the lowest. One stamp serves shards 2^16 apart.

use super::dir::{Dir, DirError};
use super::name::{hash64, shard_number};
use crate::range::{Range, Span};
use node::random::random64;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

const STAMPS: &str = "released";
/// Enough for all of a /8 of IPv4; what lies beyond is read every time.
const MAX_ENTRIES: usize = 1 << 16;
/// Nothing in the shard is resting.
const NEVER: u32 = u32::MAX;

/// What is believed about the shards of one set of addresses.
#[derive(Debug)]
pub(crate) struct Hints {
    dir: Option<Rc<Dir>>,
    name: String,
    entries: Vec<Entry>,
    stamps: Option<File>,
    table: Option<File>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    stamp: u32,
    /// Unix seconds from when something may have rested enough; 0 knows nothing.
    until: u32,
}

impl Hints {
    /// What is believed about `range` in a space's hint directory.
    pub(crate) fn load(dir: Option<Rc<Dir>>, range: &Range) -> Self {
        let mut hints = Self {
            name: table_name(range),
            dir,
            entries: Vec::new(),
            stamps: None,
            table: None,
        };
        hints.read();
        hints
    }

    fn read(&mut self) {
        let Some(dir) = &self.dir else { return };
        self.stamps = dir.open_hint(STAMPS, false).ok().flatten();
        self.table = dir.open_hint(&self.name, false).ok().flatten();
        let Some(table) = &self.table else { return };
        let length = table.metadata().map_or(0, |meta| meta.len());
        let length = usize::try_from(length)
            .unwrap_or(usize::MAX)
            .min(MAX_ENTRIES * 8);
        let bytes = read_at(table, 0, length);
        self.entries = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(Entry::from_bytes)
            .collect();
    }

    /// Which of the first shards, by their order in the range, need not be read now.
    pub(crate) fn full(&self, shards: impl Iterator<Item = u128>, now: u64) -> Vec<bool> {
        let slots: Vec<usize> = shards.take(self.entries.len()).map(slot).collect();
        let (Some(low), Some(high)) = (slots.iter().min(), slots.iter().max()) else {
            return Vec::new();
        };
        let stamps = match &self.stamps {
            Some(file) => read_at(file, low * 4, (high - low + 1) * 4),
            None => Vec::new(),
        };
        let stamps = stamps.as_chunks::<4>().0;
        let now = now / 1000;
        self.entries
            .iter()
            .zip(&slots)
            .map(|(entry, slot)| {
                let stamp = stamps
                    .get(slot - low)
                    .map_or(0, |bytes| u32::from_le_bytes(*bytes));
                entry.stamp == stamp && u64::from(entry.until) > now
            })
            .collect()
    }

    /// The stamp of a shard; to be read before the shard itself.
    pub(crate) fn stamp(&self, shard: u128) -> u32 {
        let Some(stamps) = &self.stamps else { return 0 };
        let bytes = read_at(stamps, slot(shard) * 4, 4);
        bytes
            .first_chunk::<4>()
            .map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    /// Writes down that a shard was full when it had `stamp`, and until when at
    /// least (Unix milliseconds).
    pub(crate) fn mark_full(&mut self, order: usize, stamp: u32, until: Option<u64>) {
        if order >= MAX_ENTRIES {
            return;
        }
        let until = until.map_or(NEVER, |ms| u32::try_from(ms / 1000).unwrap_or(NEVER - 1));
        let entry = Entry { stamp, until };
        if self.entries.get(order) == Some(&entry) {
            return;
        }
        if self.table.is_none() {
            self.table = self
                .dir
                .as_ref()
                .and_then(|d| d.open_hint(&self.name, true).ok().flatten());
        }
        if let (Some(table), Ok(order)) = (&self.table, u64::try_from(order)) {
            // Advice that could not be written is advice that is not there.
            let _ = table.write_all_at(&entry.to_bytes(), order * 8);
        }
    }
}

impl Entry {
    fn from_bytes(bytes: &[u8; 8]) -> Self {
        let word = u64::from_le_bytes(*bytes);
        let low = u32::try_from(word & 0xffff_ffff).unwrap_or(0);
        Self {
            stamp: low,
            until: u32::try_from(word >> 32).unwrap_or(0),
        }
    }

    fn to_bytes(self) -> [u8; 8] {
        (u64::from(self.until) << 32 | u64::from(self.stamp)).to_le_bytes()
    }
}

/// Says that an address of a shard was freed. To be called after it was.
pub(crate) fn released(dir: &Dir, address: u128) -> Result<(), DirError> {
    if let Some(stamps) = dir.open_hint(STAMPS, true)? {
        let offset = slot(shard_number(address)) * 4;
        // As above: advice.
        let _ = stamps.write_all_at(&random32().to_le_bytes(), offset as u64);
    }
    Ok(())
}

/// The file of one set of addresses: another set has other beliefs.
pub(crate) fn table_name(range: &Range) -> String {
    let spans: Vec<String> = range.spans().iter().map(span_text).collect();
    format!(
        "{:016x}",
        hash64(&format!("{} {}", range.subnet(), spans.join(",")))
    )
}

fn span_text(span: &Span) -> String {
    format!("{:x}-{:x}", span.first, span.last)
}

fn slot(shard: u128) -> usize {
    usize::try_from(shard & 0xffff).unwrap_or(0)
}

fn read_at(file: &File, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, (offset + filled) as u64) {
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

    fn load(place: &tempfile::TempDir, range: &Range) -> Hints {
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
        hints.mark_full(0, hints.stamp(first), None);
        hints.mark_full(2, hints.stamp(first + 2), Some(NOW + 5_000));
        let full = |now| load(&place, &range).full(shards(), now);
        assert_eq!(full(NOW), [true, false, true]);
        assert_eq!(full(NOW + 5_000), [true, false, false], "it has rested");
        let dir = Dir::open_path(place.path()).unwrap();
        released(&dir, (first << 8) + 77).unwrap();
        assert_eq!(full(NOW), [false, false, true]);
        let mut hints = load(&place, &range);
        hints.mark_full(0, hints.stamp(first), None);
        assert_eq!(full(NOW), [true, false, true]);
    }

    #[test]
    fn a_release_while_the_shard_is_read_is_not_missed() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24");
        let mut hints = load(&place, &range);
        let before = hints.stamp(0x0a_0000);
        released(&Dir::open_path(place.path()).unwrap(), 0x0a00_0005).unwrap();
        hints.mark_full(0, before, None);
        assert_eq!(
            load(&place, &range).full(std::iter::once(0x0a_0000), NOW),
            [false]
        );
    }

    #[test]
    fn garbage_is_bad_advice_and_nothing_worse() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/23");
        std::fs::write(place.path().join(table_name(&range)), [0xff; 19]).unwrap();
        std::fs::write(place.path().join(STAMPS), [0xff; 3]).unwrap();
        assert_eq!(
            load(&place, &range).full(0x0a_0000..0x0a_0002, NOW),
            [false, false]
        );
        assert!(Hints::load(None, &range).full(0..9, NOW).is_empty());
    }

    #[test]
    fn other_sets_of_addresses_have_other_beliefs() {
        let exclude = ["10.0.0.7"];
        let other = Spec {
            range: "10.0.0.0/24",
            exclude: &exclude,
            ..Spec::default()
        };
        let other = Range::new(&other, Profile::Strict).unwrap();
        assert_ne!(table_name(&range("10.0.0.0/24")), table_name(&other));
    }
}
