//! Inclusive intervals of addresses as numbers.

use super::{bits, from_bits};
use ipnetwork::IpNetwork;
use std::net::IpAddr;

/// All addresses from `first` to `last`, both included; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    pub first: u128,
    pub last: u128,
}

impl Span {
    /// All addresses of a network.
    #[must_use]
    pub fn of(subnet: IpNetwork) -> Self {
        Self {
            first: bits(subnet.network()),
            last: bits(subnet.broadcast()),
        }
    }

    #[must_use]
    pub fn single(address: u128) -> Self {
        Self {
            first: address,
            last: address,
        }
    }

    /// Whether `address` is one of them.
    #[must_use]
    pub fn contains(self, address: u128) -> bool {
        (self.first..=self.last).contains(&address)
    }

    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let both = Self {
            first: self.first.max(other.first),
            last: self.last.min(other.last),
        };
        (both.first <= both.last).then_some(both)
    }

    /// As addresses: `10.0.0.1-10.0.0.9`, or one alone.
    #[must_use]
    pub fn show(self, v4: bool) -> String {
        let (first, last) = (from_bits(v4, self.first), from_bits(v4, self.last));
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    }

    #[must_use]
    pub fn addresses(self, v4: bool) -> (IpAddr, IpAddr) {
        (from_bits(v4, self.first), from_bits(v4, self.last))
    }

    /// How many; `u128::MAX` for all of IPv6, one too few.
    #[must_use]
    pub fn size(self) -> u128 {
        (self.last - self.first).saturating_add(1)
    }
}

/// `whole` without everything in `holes`, ascending and disjoint.
pub(super) fn without(whole: Span, mut holes: Vec<Span>) -> Vec<Span> {
    holes.sort_unstable_by_key(|hole| hole.first);
    let mut left = Vec::new();
    let mut next = whole.first;
    for hole in holes {
        let Some(hole) = hole.intersection(whole) else {
            continue;
        };
        if hole.first > next {
            left.push(Span {
                first: next,
                last: hole.first - 1,
            });
        }
        if hole.last == whole.last {
            return left;
        }
        next = next.max(hole.last + 1);
    }
    left.push(Span {
        first: next,
        last: whole.last,
    });
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span() -> impl Strategy<Value = Span> {
        (0u128..300, 0u128..60).prop_map(|(first, size)| Span {
            first,
            last: first + size,
        })
    }

    proptest! {
        #[test]
        fn what_is_left_is_exactly_what_no_hole_has(
            whole in span(),
            holes in prop::collection::vec(span(), 0..8),
        ) {
            let left = without(whole, holes.clone());
            for address in 0..400 {
                let expected = whole.contains(address) && !holes.iter().any(|h| h.contains(address));
                prop_assert_eq!(left.iter().any(|s| s.contains(address)), expected);
            }
            for pair in left.windows(2) {
                prop_assert!(pair[0].last + 1 < pair[1].first, "not ascending and disjoint");
            }
            let size: u128 = left.iter().map(|s| s.size()).sum();
            prop_assert_eq!(size, (0..400).filter(|a| left.iter().any(|s| s.contains(*a))).count() as u128);
        }
    }

    #[test]
    fn the_edges_of_the_number_space_hold() {
        let all = Span {
            first: 0,
            last: u128::MAX,
        };
        assert_eq!(all.size(), u128::MAX);
        let ends = vec![Span::single(0), Span::single(u128::MAX)];
        assert_eq!(
            without(all, ends),
            [Span {
                first: 1,
                last: u128::MAX - 1
            }]
        );
        assert!(without(all, vec![all]).is_empty());
    }
}
