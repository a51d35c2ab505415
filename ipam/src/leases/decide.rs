//! Which address of a subnet is leased next. Pure: by what its directory shows.

use super::name::{Subnet, Use, entry};
use crate::range::Span;
use std::collections::BTreeMap;
use std::time::Duration;

/// What the directory of a subnet shows, by the last byte of addresses.
#[derive(Debug, Clone, Default)]
pub(super) struct Shown {
    leased: [u64; 4],
    /// When an address was freed last, since the boot.
    freed: BTreeMap<u8, Duration>,
}

/// What may be leased though it cools down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cooling {
    Wait,
    /// The address that has cooled longest, where no other one is free.
    LastResort,
}

impl Shown {
    pub(super) fn of<'n>(names: impl Iterator<Item = &'n str>) -> Self {
        let mut shown = Self::default();
        for (byte, said) in names.filter_map(entry) {
            match said {
                Use::Leased => shown.lease(byte),
                Use::Freed(at) => {
                    let last = shown.freed.entry(byte).or_default();
                    *last = at.max(*last);
                }
            }
        }
        shown
    }

    /// Notes that an address is leased.
    pub(super) fn lease(&mut self, byte: u8) {
        if let Some(word) = self.leased.get_mut(usize::from(byte) / 64) {
            *word |= 1 << (byte % 64);
        }
    }

    pub(super) fn is_leased(&self, byte: u8) -> bool {
        let word = self.leased.get(usize::from(byte) / 64).copied();
        word.unwrap_or(u64::MAX) & (1 << (byte % 64)) != 0
    }

    /// When an address was freed last, if that is still to be seen.
    pub(super) fn freed_at(&self, byte: u8) -> Option<Duration> {
        self.freed.get(&byte).copied()
    }

    /// Whether an address is free, and has cooled down.
    pub(super) fn is_free(&self, byte: u8, hot: Hot) -> bool {
        !self.is_leased(byte) && self.freed.get(&byte).is_none_or(|at| !hot.is(*at))
    }

    /// The lowest usable address that is free. `usable` ascends.
    pub(super) fn decide(
        &self,
        usable: impl Iterator<Item = u8> + Clone,
        hot: Hot,
        cooling: Cooling,
    ) -> Option<u8> {
        let free = usable.clone().find(|byte| self.is_free(*byte, hot));
        free.or_else(|| match cooling {
            Cooling::Wait => None,
            Cooling::LastResort => self.coolest(usable).map(|(_, byte)| byte),
        })
    }

    /// The usable address that was freed first of those that are not leased, and when.
    pub(super) fn coolest(&self, usable: impl Iterator<Item = u8>) -> Option<(Duration, u8)> {
        let freed = |byte: u8| Some((*self.freed.get(&byte)?, byte));
        usable
            .filter(|byte| !self.is_leased(*byte))
            .filter_map(freed)
            .min()
    }
}

/// How long addresses cool down, at a moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hot {
    pub(super) now: Duration,
    pub(super) cooldown: Duration,
}

impl Hot {
    /// Whether what was freed then cools down still.
    pub(super) fn is(self, freed: Duration) -> bool {
        self.now.saturating_sub(freed) < self.cooldown
    }
}

/// The last bytes of a subnet's addresses that are in spans, which ascend.
pub(super) fn usable(spans: &[Span], subnet: Subnet) -> impl Iterator<Item = u8> + Clone {
    let whole = Span {
        first: subnet.first(),
        last: subnet.last(),
    };
    let parts = spans
        .iter()
        .filter_map(move |span| span.intersection(whole));
    parts.flat_map(|part| {
        let byte = |bits: u128| u8::try_from(bits & 0xff).unwrap_or(0);
        byte(part.first)..=byte(part.last)
    })
}

/// The subnets of spans, ascending, from one on.
pub(super) fn subnets(v4: bool, spans: &[Span], from: u128) -> impl Iterator<Item = Subnet> {
    let at_or_after = move |from: u128| {
        let span = spans.iter().find(|span| span.last >= from);
        span.map(|span| Subnet::at(v4, span.first.max(from)))
    };
    std::iter::successors(at_or_after(from), move |subnet| {
        subnet.last().checked_add(1).and_then(at_or_after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOT: Hot = Hot {
        now: Duration::from_millis(1000),
        cooldown: Duration::from_millis(100),
    };

    fn shown(names: &[&str]) -> Shown {
        Shown::of(names.iter().copied())
    }

    #[test]
    fn the_lowest_address_that_has_cooled_down_is_leased() {
        for (names, wait, last) in [
            (&[][..], Some(1), Some(1)),
            (&["1", "2-950", "3-900"], Some(3), Some(3)),
            (&["1", "2-950", "3-960", "4"], None, Some(2)),
            (&["1", "2", "3", "4"], None, None),
            // Freed twice, leased again before its mark was removed, and names of others.
            (
                &["1", "2-1", "2-990", "3-999", "3", "4", "x"],
                None,
                Some(2),
            ),
        ] {
            let shown = shown(names);
            let decide = |cooling| shown.decide(1..=4, HOT, cooling);
            assert_eq!(decide(Cooling::Wait), wait, "{names:?}");
            assert_eq!(decide(Cooling::LastResort), last, "{names:?}");
        }
    }

    #[test]
    fn a_range_is_walked_from_any_subnet() {
        let span = |first, last| Span { first, last };
        let spans = [span(0x1fe, 0x301), span(0x9f0, 0x9f1)];
        let names = |from| -> Vec<u128> {
            let subnets = subnets(true, &spans, from);
            subnets.map(|subnet| subnet.first() >> 8).collect()
        };
        assert_eq!(names(0), [1, 2, 3, 9]);
        assert_eq!(names(0x200), [2, 3, 9]);
        assert_eq!(names(0x302), [9]);
        assert_eq!(names(0xa00), Vec::<u128>::new());
        let bytes = |first: u128| usable(&spans, Subnet::at(true, first)).collect::<Vec<u8>>();
        assert_eq!(bytes(0x100), [0xfe, 0xff]);
        assert_eq!(bytes(0x300), [0, 1]);
        assert_eq!(bytes(0x400), Vec::<u8>::new());
        let end = [span(u128::MAX - 1, u128::MAX)];
        assert_eq!(subnets(false, &end, 0).count(), 1);
    }
}
