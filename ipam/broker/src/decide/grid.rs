//! How a range is cut into blocks, and which ranges contradict each other.
//!
//! Each address of a range is in one block: the network of the range's block length around it, or the
//! address alone in a static network. Ranges of one space that overlap must cut what they have in common
//! alike, so that each address of the space is in one block, and the name of a block stands for all of
//! its addresses.

use std::collections::BTreeSet;

use ipam::block::{AddressSpace, longest, network_around, overlap, single};
use ipnetwork::IpNetwork;
use std::net::IpAddr;

use crate::api::document::RangeSpec;

impl RangeSpec {
    /// A range that is not confirmed, with those of the static networks that matter to it.
    #[must_use]
    pub fn new(
        space: &AddressSpace,
        range: IpNetwork,
        block_prefix: u8,
        static_networks: &[IpNetwork],
    ) -> Self {
        let mut spec = Self {
            store: space.store.clone(),
            network_name: space.network_name.clone(),
            range,
            block_prefix,
            per_node: None,
            static_networks: Vec::new(),
            confirmed: false,
        };
        if !spec.is_of_single_addresses() {
            let area = spec.area();
            let fixed: BTreeSet<IpNetwork> = static_networks
                .iter()
                .filter(|network| overlap(**network, area))
                .copied()
                .collect();
            spec.static_networks = fixed.into_iter().collect();
        }
        spec
    }

    #[must_use]
    pub fn is_of_single_addresses(&self) -> bool {
        self.block_prefix == longest(self.range.is_ipv4())
    }

    /// The addresses of all blocks: the range, or the block around one that is shorter.
    fn area(&self) -> IpNetwork {
        let prefix = self.range.prefix().min(self.block_prefix);
        network_around(self.range.network(), prefix).unwrap_or(self.range)
    }

    /// The block of an address; `None` if a part of it is static, so that no node can have it.
    #[must_use]
    pub fn block_of(&self, address: IpAddr) -> Option<IpNetwork> {
        let mut fixed = self.static_networks.iter();
        if fixed.any(|network| network.contains(address)) {
            return Some(single(address));
        }
        let block = network_around(address, self.block_prefix)?;
        let mut fixed = self.static_networks.iter();
        (!fixed.any(|network| overlap(*network, block))).then_some(block)
    }

    #[must_use]
    pub fn overlaps(&self, block: IpNetwork) -> bool {
        overlap(self.area(), block)
    }

    /// Whether its blocks are networks of nodes, if it has those. An object that a person wrote may
    /// have other blocks.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        let mut per_node = self.per_node.iter();
        per_node.all(|per_node| per_node.prefix == self.block_prefix)
    }

    /// Whether a block has addresses of the range and is not one of its blocks.
    #[must_use]
    pub fn contradicts(&self, block: IpNetwork) -> bool {
        let is_block = self.is_consistent() && self.block_of(block.network()) == Some(block);
        self.overlaps(block) && !is_block
    }

    /// Whether two ranges of one space overlap, and cut what they have in common differently.
    #[must_use]
    pub fn disagrees(&self, other: &Self) -> bool {
        let (ours, theirs) = (self.area(), other.area());
        let common = match ours.prefix() > theirs.prefix() {
            true => ours,
            false => theirs,
        };
        let fixed = |range: &Self| -> BTreeSet<IpNetwork> {
            let fixed = range.static_networks.iter().copied();
            fixed.filter(|network| overlap(*network, common)).collect()
        };
        // A node with a network in each of two ranges would have two in the larger one.
        let is_divided = self.per_node.or(other.per_node).is_some();
        overlap(ours, theirs)
            && (self.block_prefix != other.block_prefix
                || fixed(self) != fixed(other)
                || self.per_node != other.per_node
                || (is_divided && self.range != other.range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_wire::{Gateway, PerNode};
    use proptest::prelude::*;

    fn network(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn range(text: &str, prefix: u8, fixed: &[&str]) -> RangeSpec {
        let fixed: Vec<IpNetwork> = fixed.iter().map(|text| network(text)).collect();
        let space = AddressSpace::new("default", None);
        RangeSpec::new(&space, network(text), prefix, &fixed)
    }

    #[test]
    fn ranges_that_overlap_must_have_blocks_of_one_length_and_the_same_static_networks() {
        let wide = range("10.0.0.0/16", 28, &["10.0.2.5/32", "10.9.0.0/16"]);
        assert_eq!(wide.static_networks, [network("10.0.2.5/32")]);
        for (other, disagrees) in [
            (range("10.0.3.0/24", 28, &[]), false),
            (range("10.0.2.0/23", 28, &["10.0.2.5/32"]), false),
            (range("10.0.2.0/23", 28, &["10.0.2.0/24"]), true),
            (range("10.0.2.0/23", 28, &[]), true),
            (range("10.0.3.0/29", 32, &[]), true),
            (range("10.0.0.0/15", 27, &["10.0.2.5/32"]), true),
            (range("10.1.0.0/29", 32, &[]), false),
            (range("fd00::/64", 122, &[]), false),
        ] {
            assert_eq!(wide.disagrees(&other), disagrees, "{other:?}");
            assert_eq!(other.disagrees(&wide), disagrees, "{other:?}");
        }
        let divided = |text: &str, gateway| RangeSpec {
            per_node: Some(PerNode {
                prefix: 31,
                gateway,
            }),
            ..range(text, 31, &[])
        };
        let of_nodes = divided("10.3.0.0/16", Some(Gateway::First));
        assert!(!of_nodes.disagrees(&of_nodes));
        for other in [
            range("10.3.0.0/16", 31, &[]),
            divided("10.3.0.0/16", Some(Gateway::Last)),
            divided("10.3.7.0/24", Some(Gateway::First)),
        ] {
            assert!(of_nodes.disagrees(&other) && other.disagrees(&of_nodes));
        }
        assert!(!of_nodes.contradicts(network("10.3.0.2/31")));
        // Written by hand.
        let inconsistent = RangeSpec {
            block_prefix: 28,
            ..of_nodes.clone()
        };
        assert!(of_nodes.is_consistent() && !inconsistent.is_consistent());
        for block in ["10.3.0.2/31", "10.3.0.16/28"] {
            assert!(inconsistent.contradicts(network(block)), "{block}");
        }
        // The block around a range that is shorter has its neighbours' addresses.
        let short = range("10.0.0.0/30", 28, &[]);
        assert!(short.disagrees(&range("10.0.0.8/29", 32, &[])));
        assert!(!short.disagrees(&range("10.0.0.16/29", 32, &[])));
    }

    #[test]
    fn a_block_with_a_static_address_is_no_nodes() {
        let range = range("10.0.0.0/16", 28, &["10.0.2.5/32"]);
        let block = |address: &str| range.block_of(address.parse().unwrap());
        assert_eq!(block("10.0.2.5"), Some(network("10.0.2.5/32")));
        assert_eq!(block("10.0.2.9"), None);
        assert_eq!(block("10.0.2.16"), Some(network("10.0.2.16/28")));
        for (block, contradicts) in [
            ("10.0.2.16/28", false),
            ("10.0.2.5/32", false),
            ("10.0.2.0/28", true),
            ("10.0.2.6/32", true),
            ("10.0.2.0/27", true),
            ("10.0.0.0/8", true),
            ("10.1.0.0/27", false),
            ("fd00::/122", false),
        ] {
            assert_eq!(range.contradicts(network(block)), contradicts, "{block}");
        }
    }

    proptest! {
        #[test]
        fn ranges_that_agree_have_each_address_in_one_block(
            ranges in proptest::collection::vec((0u8..4, 22u8..=31, 26u8..=32, any::<bool>()), 2),
            address: [u8; 2],
        ) {
            let fixed = ["10.0.1.8/29", "10.0.2.64/32"];
            let ranges: Vec<RangeSpec> = ranges
                .into_iter()
                .map(|(third, length, prefix, with)| {
                    let around = network_around([10, 0, third, 64].into(), length).unwrap();
                    range(&around.to_string(), prefix, if with { &fixed } else { &[] })
                })
                .collect();
            let address = IpAddr::from([10, 0, address[0] % 4, address[1]]);
            let blocks: Vec<Option<IpNetwork>> = ranges
                .iter()
                .filter(|range| range.area().contains(address))
                .map(|range| range.block_of(address))
                .collect();
            if let [one, other] = blocks.as_slice()
                && !ranges[0].disagrees(&ranges[1])
            {
                prop_assert_eq!(one, other);
            }
            for block in blocks.into_iter().flatten() {
                let agreed = !ranges[0].disagrees(&ranges[1]);
                prop_assert!(!agreed || ranges.iter().all(|range| !range.contradicts(block)));
            }
        }
    }
}
