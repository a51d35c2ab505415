//! How much a node claims, and in which subnet it looks first.

use super::subnet_of;
use crate::range::{Range, from_bits};
use crate::space::hash;
use ipnetwork::IpNetwork;

/// The largest first part of a range, in addresses.
const MAX_FIRST: u128 = 16;
/// The largest further part.
const MAX_FURTHER: u128 = 64;
/// Of its first so many subnets a range is served; one of IPv6 can have 2^64.
const MAX_SUBNETS: u128 = 4096;

/// How many addresses a node claims at once of a range, a power of two: `usable` ones has the range,
/// `nodes` Nodes the cluster, if that is known, `own` addresses of the range the node.
#[must_use]
pub fn claim_size(usable: u128, nodes: Option<u64>, own: u128) -> u16 {
    let size = match own {
        0 => {
            let nodes = nodes.map_or(1, |nodes| u128::from(nodes.max(1)));
            let share = (usable / 64).min(usable / (2 * nodes));
            share.clamp(1, MAX_FIRST)
        }
        own => own.min(MAX_FURTHER),
    };
    // At most 64.
    u16::try_from(1u128 << size.ilog2()).unwrap_or(1)
}

/// The subnets with usable addresses of a range, each node's from a start of its own and so many behind it. At
/// most 4,096.
pub fn subnets(
    range: &Range,
    node: &str,
    behind: usize,
) -> impl Iterator<Item = IpNetwork> + use<> {
    let v4 = range.subnet().is_ipv4();
    let mut runs: Vec<(u128, u128)> = Vec::new();
    let mut count = 0;
    for span in range.spans() {
        let (first, last) = (span.first >> 8, span.last >> 8);
        let first = match runs.last() {
            Some((_, before)) if *before >= first => first + 1,
            _ => first,
        };
        if first > last || count >= MAX_SUBNETS {
            continue;
        }
        let last = last.min(first + (MAX_SUBNETS - count - 1));
        count += last - first + 1;
        runs.push((first, last));
    }
    let start = u128::from(hash(node)) + behind as u128;
    let start = start.checked_rem(count).unwrap_or(0);
    (0..count).filter_map(move |number| {
        let mut number = (start + number) % count;
        for (first, last) in &runs {
            let length = last - first + 1;
            if number < length {
                return Some(subnet_of(from_bits(v4, (first + number) << 8)));
            }
            number -= length;
        }
        None
    })
}
