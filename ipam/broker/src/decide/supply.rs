//! When a node needs another block, and when it can do without one.

use std::time::Duration;

use ipnetwork::IpNetwork;

/// A node claims ahead when this part of what it has in a range is leased: three of four.
const AHEAD: (u128, u128) = (3, 4);
/// The most blocks that are claimed ahead at one time.
const MOST_AHEAD: u128 = 16;

/// One of the node's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnBlock {
    pub block: IpNetwork,
    /// Whether it has neither a lease nor an address that cools down, and for how long it was seen
    /// so.
    pub empty_for: Option<Duration>,
    /// Another node asks for it.
    pub wanted: bool,
}

/// What the node has of one range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeUse {
    /// Its blocks that have addresses of the range, and how many each.
    pub blocks: Vec<(IpNetwork, u128)>,
    /// Addresses of the range that are leased.
    pub used: u128,
    /// How many were leased ten seconds ago.
    pub used_before: u128,
    /// Addresses of the longest of these blocks; 1 of a small range, of which nothing is claimed ahead.
    pub block_size: u128,
}

impl RangeUse {
    fn total(&self) -> u128 {
        self.blocks.iter().map(|(_, size)| size).sum()
    }

    fn is_single(&self) -> bool {
        self.block_size <= 1
    }

    fn is_full(used: u128, total: u128) -> bool {
        used.saturating_mul(AHEAD.1) >= total.saturating_mul(AHEAD.0)
    }

    /// How many blocks to claim before they are needed.
    #[must_use]
    pub fn ahead(&self) -> u128 {
        let total = self.total();
        // A range that no ADD has asked of is not begun here.
        if self.is_single() || total == 0 || !Self::is_full(self.used, total) {
            return 0;
        }
        let growth = self.used.saturating_sub(self.used_before);
        growth.div_ceil(self.block_size).clamp(1, MOST_AHEAD)
    }

    /// Whether the node can do without a block and would not claim another one at once.
    fn spares(&self, block: IpNetwork) -> bool {
        let Some((_, size)) = self.blocks.iter().find(|(own, _)| *own == block) else {
            return true;
        };
        // Of a small range nobody keeps an address for later.
        if self.is_single() {
            return true;
        }
        let rest = self.total() - size;
        rest > 0 && !Self::is_full(self.used, rest)
    }

    fn without(&mut self, block: IpNetwork) {
        self.blocks.retain(|(own, _)| *own != block);
    }
}

/// What to do for those who ask, and for nobody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Returns {
    pub give_back: Vec<IpNetwork>,
    /// Another node asks for them, and they have leases: it gets one of the others, and the mark is
    /// taken off.
    pub unmark: Vec<IpNetwork>,
}

/// Which blocks to give back: unasked those that are empty for `empty_time`. `ranges` are those that
/// ADDs of this node used in the last day.
#[must_use]
pub fn returns(own: &[OwnBlock], ranges: &[RangeUse], empty_time: Duration) -> Returns {
    let mut ranges = ranges.to_vec();
    let mut returns = Returns::default();
    let give = |block: IpNetwork, ranges: &mut Vec<RangeUse>, returns: &mut Returns| {
        ranges.iter_mut().for_each(|range| range.without(block));
        returns.give_back.push(block);
    };
    for one in own.iter().filter(|one| one.wanted) {
        if one.empty_for.is_some() {
            give(one.block, &mut ranges, &mut returns);
        }
    }
    for one in own
        .iter()
        .filter(|one| one.wanted && one.empty_for.is_none())
    {
        // Nobody counts how full another node's block is to the moment.
        let alike = |other: &&OwnBlock| {
            other.empty_for.is_some()
                && other.block.is_ipv4() == one.block.is_ipv4()
                && other.block.prefix() == one.block.prefix()
                && !returns.give_back.contains(&other.block)
        };
        if let Some(other) = own.iter().find(alike) {
            give(other.block, &mut ranges, &mut returns);
        }
        returns.unmark.push(one.block);
    }
    for one in own {
        let long = one.empty_for.is_some_and(|time| time >= empty_time);
        let spared = || ranges.iter().all(|range| range.spares(one.block));
        if long && !returns.give_back.contains(&one.block) && spared() {
            give(one.block, &mut ranges, &mut returns);
        }
    }
    returns
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EMPTY_TIME: Duration = Duration::from_secs(600);

    fn network(number: u8) -> IpNetwork {
        format!("10.0.{}.{}/28", number / 16, number % 16 * 16)
            .parse()
            .unwrap()
    }

    fn range(blocks: u8, used: u128, used_before: u128) -> RangeUse {
        RangeUse {
            blocks: (0..blocks).map(|number| (network(number), 16)).collect(),
            used,
            used_before,
            block_size: 16,
        }
    }

    fn own(number: u8, empty: Option<u64>, wanted: bool) -> OwnBlock {
        OwnBlock {
            block: network(number),
            empty_for: empty.map(Duration::from_secs),
            wanted,
        }
    }

    #[test]
    fn a_block_is_claimed_ahead_at_three_of_four_and_more_in_a_burst() {
        assert_eq!(range(1, 11, 11).ahead(), 0);
        assert_eq!(range(1, 12, 12).ahead(), 1);
        assert_eq!(range(4, 60, 12).ahead(), 3);
        assert_eq!(range(100, 1600, 0).ahead(), 16);
        assert_eq!(range(0, 0, 0).ahead(), 0);
        let single = RangeUse {
            block_size: 1,
            ..range(1, 16, 0)
        };
        assert_eq!(single.ahead(), 0);
    }

    #[test]
    fn an_empty_block_goes_back_after_ten_minutes_while_another_has_room() {
        let ranges = [range(2, 5, 5)];
        let given =
            |own: &[OwnBlock], ranges: &[RangeUse]| returns(own, ranges, EMPTY_TIME).give_back;
        let used = own(0, None, false);
        assert_eq!(
            given(&[used.clone(), own(1, Some(599), false)], &ranges),
            []
        );
        assert_eq!(
            given(&[used.clone(), own(1, Some(600), false)], &ranges),
            [network(1)]
        );
        // The other one is nearly full.
        assert_eq!(
            given(&[used, own(1, Some(600), false)], &[range(2, 12, 12)]),
            []
        );
        // Of two empty ones one stays, unless no range is in use.
        let both = [own(0, Some(600), false), own(1, Some(600), false)];
        assert_eq!(given(&both, &[range(2, 0, 0)]), [network(0)]);
        assert_eq!(given(&both, &[]), [network(0), network(1)]);
    }

    #[test]
    fn who_asks_gets_an_empty_block_at_once() {
        let ranges = [range(2, 5, 5)];
        let asked = returns(
            &[own(0, None, true), own(1, Some(0), false)],
            &ranges,
            EMPTY_TIME,
        );
        assert_eq!(asked.give_back, [network(1)]);
        assert_eq!(asked.unmark, [network(0)]);
        let asked = returns(
            &[own(0, Some(0), true), own(1, Some(0), false)],
            &ranges,
            EMPTY_TIME,
        );
        assert_eq!((asked.give_back, asked.unmark), (vec![network(0)], vec![]));
        let asked = returns(&[own(0, None, true)], &ranges, EMPTY_TIME);
        assert_eq!((asked.give_back, asked.unmark), (vec![], vec![network(0)]));
    }

    proptest! {
        #[test]
        fn what_goes_back_is_empty_and_is_not_claimed_again_at_once(
            blocks in proptest::collection::vec((proptest::option::of(0u64..1200), any::<bool>()), 0..12),
            used in 0u128..16,
        ) {
            let own: Vec<OwnBlock> = (0u8..).zip(&blocks)
                .map(|(number, (empty, wanted))| super::tests::own(number, *empty, *wanted))
                .collect();
            let count = u8::try_from(own.len()).unwrap();
            let held = own.iter().filter(|one| one.empty_for.is_none()).count() as u128;
            let before = RangeUse { used: used * held, ..range(count, 0, 0) };
            let returns = returns(&own, std::slice::from_ref(&before), EMPTY_TIME);
            let mut after = before.clone();
            for block in &returns.give_back {
                let one = own.iter().find(|one| one.block == *block).unwrap();
                prop_assert!(one.empty_for.is_some());
                after.without(*block);
            }
            let unasked = own.iter().all(|one| !one.wanted);
            if unasked && !returns.give_back.is_empty() {
                prop_assert!(after.total() > 0 && after.ahead() == 0);
            }
            let mut seen = returns.give_back.clone();
            seen.sort();
            seen.dedup();
            prop_assert_eq!(seen.len(), returns.give_back.len());
        }
    }
}
