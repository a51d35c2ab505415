//! Which block of a range to try next.
//!
//! Without knowing who has what, a node begins at a place of its own, so that nodes that start at
//! one time seldom want one block. Once it knows the names that are taken, it draws one of the others.

use ipam::block::{Blocks, hash};
use ipnetwork::IpNetwork;

/// Ranges with at most this many blocks are gone through whole; of others a few are drawn.
const MOST_LISTED: u128 = 1 << 16;
/// How many are drawn of a range that is too long to go through. Where nine of ten are taken, one of
/// these is free but for one time in 800.
const DRAWS: u64 = 64;

/// The blocks of a range from a node's own place on, each once.
pub fn from_own_place<'b>(blocks: &'b Blocks, node: &str) -> impl Iterator<Item = IpNetwork> + 'b {
    let count = blocks.count();
    let start = match count {
        0 => 0,
        count => spread(hash(node)) % count,
    };
    // The numbers from `start` to the end, and then those before it; none overflows.
    (start..count)
        .chain(0..start)
        .filter_map(|number| blocks.nth(number))
}

/// 128 bits of 64, so that a long range is used in its whole length.
fn spread(hash: u64) -> u128 {
    (u128::from(hash) << 64 | u128::from(hash.rotate_left(32))) ^ u128::from(hash)
}

/// A block that is not taken, drawn with `random`.
pub fn draw(
    blocks: &Blocks,
    is_taken: impl Fn(IpNetwork) -> bool,
    mut random: impl FnMut() -> u64,
) -> Option<IpNetwork> {
    let count = blocks.count();
    if count == 0 {
        return None;
    }
    if count <= MOST_LISTED {
        let free: Vec<u128> = (0..count)
            .filter(|number| blocks.nth(*number).is_some_and(|block| !is_taken(block)))
            .collect();
        let length = u64::try_from(free.len())
            .ok()
            .filter(|length| *length > 0)?;
        let chosen = usize::try_from(random() % length).ok()?;
        return blocks.nth(*free.get(chosen)?);
    }
    (0..DRAWS)
        .filter_map(|_| blocks.nth((u128::from(random()) << 64 | u128::from(random())) % count))
        .find(|block| !is_taken(*block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::range::Span;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn blocks(addresses: u128) -> Blocks {
        let first = 0x0a00_0000;
        let span = Span {
            first,
            last: first + addresses - 1,
        };
        Blocks::cut(true, &[span], 28, &[])
    }

    #[test]
    fn nodes_begin_at_places_of_their_own() {
        let blocks = blocks(16 * 1024);
        let starts: BTreeSet<IpNetwork> = (0..100)
            .map(|node| {
                from_own_place(&blocks, &format!("node-{node}"))
                    .next()
                    .unwrap()
            })
            .collect();
        // Of 100 in 1024 places some 5 pairs meet.
        assert!(starts.len() > 85, "{}", starts.len());
    }

    #[test]
    fn in_a_long_range_free_blocks_are_drawn_and_no_memory_is_needed() {
        let span = Span {
            first: 0xfd00 << 112,
            last: (0xfd00 << 112) + (1 << 64) - 1,
        };
        let blocks = Blocks::cut(false, &[span], 122, &[]);
        let mut state = 1u64;
        let random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state
        };
        let even = |block: IpNetwork| (ipam_bits(block) / 64).is_multiple_of(2);
        let drawn = draw(&blocks, even, random).unwrap();
        assert!(!even(drawn));
        assert_eq!(draw(&blocks, |_| true, || 7), None);
    }

    fn ipam_bits(block: IpNetwork) -> u128 {
        match block {
            IpNetwork::V4(block) => u128::from(u32::from(block.network())),
            IpNetwork::V6(block) => u128::from(block.network()),
        }
    }

    proptest! {
        #[test]
        fn from_its_own_place_a_node_tries_each_block_once(addresses in 1u128..2000, node in "[a-z]{1,8}") {
            let blocks = blocks(addresses);
            let tried: Vec<IpNetwork> = from_own_place(&blocks, &node).collect();
            prop_assert_eq!(tried.len() as u128, blocks.count());
            prop_assert_eq!(tried.iter().collect::<BTreeSet<_>>().len(), tried.len());
        }

        #[test]
        fn what_is_drawn_is_free_and_some_is_drawn_while_some_is_free(
            addresses in 256u128..2000,
            taken in proptest::collection::btree_set(0u128..200, 0..130),
            random: u64,
        ) {
            let blocks = blocks(addresses);
            let taken: BTreeSet<IpNetwork> = taken.into_iter().filter_map(|n| blocks.nth(n)).collect();
            let drawn = draw(&blocks, |block| taken.contains(&block), || random);
            prop_assert_eq!(drawn.is_some(), (taken.len() as u128) < blocks.count());
            if let Some(drawn) = drawn {
                prop_assert!(!taken.contains(&drawn));
            }
        }
    }
}
