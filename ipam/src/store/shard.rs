//! What a listing of one shard says about its 256 addresses, and which of them
//! may be taken.
//!
//! Pure. A listing may be old; it only proposes. Taking an address is decided
//! by [`super::claim`].

use super::name::{Class, LeaseName};
use crate::range::{Span, bits};
use std::time::Duration;

/// The state of a shard's addresses for one class of leases.
#[derive(Debug)]
pub(crate) struct Shard {
    first: u128,
    states: Box<[AddressState; 256]>,
}

#[derive(Debug, Clone, Copy, Default)]
struct AddressState {
    /// The highest generation seen; 0 when the address was never used.
    generation: u64,
    /// Whether a name of any generation says held.
    held: bool,
    /// When it was freed last.
    freed: u64,
    /// The generation of a lease of the other class.
    other_class: Option<u64>,
}

/// An address that may be taken, and as which generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) address: u128,
    pub(crate) generation: u64,
    /// The generation of a lease of the other class. It counts as taken when
    /// that one is of the same range.
    pub(crate) other_class: Option<u64>,
}

/// The addresses of a shard that may be taken.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub(crate) free: Vec<Candidate>,
    /// Free but resting, longest rested first, and when the first has rested.
    pub(crate) resting: Vec<Candidate>,
    /// Unix milliseconds from when the first of `resting` is free.
    pub(crate) rested_at: Option<u64>,
}

impl Shard {
    /// Reads a listing of the shard that begins at `first`, for leases of
    /// `class` and held ones of its `other_class`.
    pub(crate) fn read<'n>(
        first: u128,
        class: Class,
        other_class: Class,
        names: impl Iterator<Item = &'n str>,
    ) -> Self {
        let mut shard = Self {
            first,
            states: Box::new([AddressState::default(); 256]),
        };
        for lease_name in names.filter_map(LeaseName::parse) {
            let Some(state) = shard.state(bits(lease_name.address)) else {
                continue;
            };
            if lease_name.class != class {
                if lease_name.class == other_class && lease_name.freed.is_none() {
                    state.other_class = state.other_class.max(Some(lease_name.generation));
                }
                continue;
            }
            // The owner of a held entry may have the address, also by a number
            // that others went beyond: a listing made while names changed may
            // have shown him none of theirs. Or he will withdraw.
            state.held |= lease_name.freed.is_none();
            state.generation = state.generation.max(lease_name.generation);
            // By whatever number: a claim that was withdrawn leaves a higher one.
            state.freed = state.freed.max(lease_name.freed.unwrap_or(0));
        }
        shard
    }

    fn state(&mut self, address: u128) -> Option<&mut AddressState> {
        let offset = usize::try_from(address.checked_sub(self.first)?).ok()?;
        self.states.get_mut(offset)
    }

    /// Sorts the shard's addresses in `spans` by what may be done with them.
    pub(crate) fn choose(&self, spans: &[Span], now: u64, cooldown: Duration) -> Choice {
        let cooldown = u64::try_from(cooldown.as_millis()).unwrap_or(u64::MAX);
        let mut choice = Choice::default();
        let mut resting = Vec::new();
        for (offset, state) in (0u128..).zip(self.states.iter()) {
            let address = self.first | offset;
            if state.held || !spans.iter().any(|span| span.contains(address)) {
                continue;
            }
            let Some(generation) = state.generation.checked_add(1) else {
                continue;
            };
            let candidate = Candidate {
                address,
                generation,
                other_class: state.other_class,
            };
            // Freed in the future, by a node whose clock is ahead: it cools down as well. Addresses that
            // cool down are leased once no other is free.
            if state.freed > 0 && now < state.freed.saturating_add(cooldown) && cooldown > 0 {
                resting.push((state.freed, candidate));
            } else {
                choice.free.push(candidate);
            }
        }
        resting.sort_unstable_by_key(|(freed, candidate)| (*freed, candidate.address));
        choice.rested_at = resting
            .first()
            .map(|(freed, _)| freed.saturating_add(cooldown));
        choice.resting = resting
            .into_iter()
            .map(|(_, candidate)| candidate)
            .collect();
        choice
    }
}

/// What a listing made after a claim says of it. See [`super`] for why that is
/// enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The address is this claim's.
    Alone,
    /// No other claim has the address, but others had it since: it was chosen by an
    /// old listing, and may have to rest.
    Outdated,
    /// Another claim has a held entry of the address, by whatever number.
    Contested,
}

impl Standing {
    pub(crate) fn of<'n>(lease_name: &LeaseName, names: impl Iterator<Item = &'n str>) -> Self {
        let mut standing = Self::Alone;
        for other in names.filter_map(LeaseName::parse) {
            if other.address != lease_name.address
                || other.class != lease_name.class
                || other == *lease_name
            {
                continue;
            }
            if other.freed.is_none() {
                return Self::Contested;
            }
            if other.generation >= lease_name.generation {
                standing = Self::Outdated;
            }
        }
        standing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u128 = 0x0a00_0000;
    const ALL: [Span; 1] = [Span {
        first: FIRST + 1,
        last: FIRST + 6,
    }];

    fn choice(names: &[&str], now: u64) -> (Vec<(u128, u64)>, Vec<u128>) {
        let shard = Shard::read(FIRST, Class::SHARED, Class::SHARED, names.iter().copied());
        let choice = shard.choose(&ALL, now, Duration::from_secs(30));
        let free = choice
            .free
            .iter()
            .map(|c| (c.address - FIRST, c.generation))
            .collect();
        (
            free,
            choice.resting.iter().map(|c| c.address - FIRST).collect(),
        )
    }

    #[test]
    fn free_addresses_ascend_and_resting_ones_wait_their_turn() {
        let names = [
            "10.0.0.1@1",
            "10.0.0.2~3.900000",
            "10.0.0.3~1.995000",
            "10.0.0.4~1.990000",
            "10.0.0.5@2",
            "10.0.0.9~1.1",
            "junk",
            "README",
            "10.0.1.1@1",
        ];
        let (free, resting) = choice(&names, 1_000_000);
        assert_eq!(free, [(2, 4), (6, 1)]);
        assert_eq!(resting, [4, 3]);
    }

    #[test]
    fn the_highest_generation_is_the_truth() {
        let (free, _) = choice(
            &["10.0.0.1~1.5", "10.0.0.1@2", "10.0.0.2@1", "10.0.0.2~2.5"],
            1_000_000,
        );
        assert_eq!(free[0], (3, 1), "held by either number: not free");
        let (free, _) = choice(&["10.0.0.1@2", "10.0.0.1~2.5"], 1_000_000);
        assert_eq!(free[0].0, 2, "the address is still held");
    }

    #[test]
    fn an_address_freed_in_the_future_rests_and_is_not_lost() {
        for freed in ["10.0.0.1~1.9000000", "10.0.0.1~1.1010000"] {
            let (free, resting) = choice(&[freed], 1_000_000);
            assert_eq!((free[0].0, resting.as_slice()), (2, &[1][..]), "{freed}");
        }
        let (free, resting) = choice(&["10.0.0.1~1.995000", "10.0.0.1~2.0"], 1_000_000);
        assert_eq!((free[0].0, resting.as_slice()), (2, &[1][..]), "withdrawn");
        let (free, _) = choice(&["10.0.0.1~1.0"], 1_000_000);
        assert_eq!(free[0], (1, 2), "it was never answered");
    }

    #[test]
    fn leases_of_another_class_are_distinguished() {
        let names = [
            "10.0.0.1+00000001@4",
            "10.0.0.2+00000001~1.5",
            "10.0.0.3@1",
            "10.0.0.4+00000002@1",
        ];
        let other_class = LeaseName::parse(names[0]).unwrap().class;
        let shard = Shard::read(FIRST, Class::SHARED, other_class, names.into_iter());
        let free = shard.choose(&ALL, 0, Duration::ZERO).free;
        assert_eq!(
            free.iter().map(|c| c.other_class).collect::<Vec<_>>(),
            [Some(4), None, None, None, None]
        );
        assert_eq!(free[0].generation, 1);
    }

    #[test]
    fn a_claim_stands_unless_another_has_or_had_the_address() {
        let claim = LeaseName::parse("10.0.0.1@3").unwrap();
        let standing = |names: &[&str]| Standing::of(&claim, names.iter().copied());
        assert_eq!(standing(&["10.0.0.1@3"]), Standing::Alone);
        let others = [
            "10.0.0.1@3",
            "10.0.0.1~2.7",
            "10.0.0.2@9",
            "10.0.0.1+00000001@9",
        ];
        assert_eq!(standing(&others), Standing::Alone);
        for freed in ["10.0.0.1~3.7", "10.0.0.1~9.7"] {
            assert_eq!(standing(&["10.0.0.1@3", freed]), Standing::Outdated);
        }
        for held in ["10.0.0.1@2", "10.0.0.1@4"] {
            let names = ["10.0.0.1~9.7", held, "10.0.0.1@3"];
            assert_eq!(standing(&names), Standing::Contested, "{held}");
        }
    }

    #[test]
    fn the_last_shard_of_ipv6_has_an_end() {
        let first = u128::MAX - 255;
        let shard = Shard::read(first, Class::SHARED, Class::SHARED, std::iter::empty());
        let all = [Span {
            first,
            last: u128::MAX,
        }];
        assert_eq!(shard.choose(&all, 0, Duration::ZERO).free.len(), 256);
    }
}
