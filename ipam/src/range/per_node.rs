//! `perNode`: each node has one network of a range to itself.

use super::span::without;
use super::{Span, bits, from_bits, usable};
use crate::space::{longest, network_around};
use ipnetwork::IpNetwork;
use node_wire::{Gateway, PerNode};
use std::net::IpAddr;

/// A node's network has at most two to this many addresses, as a block.
const MAX_HOST_BITS: u8 = 16;

/// The addresses of a network that hosts can have.
pub(super) fn hosts(network: IpNetwork) -> Span {
    usable(network).unwrap_or_else(|| Span::of(network))
}

/// The gateway of a node's network.
#[must_use]
pub fn gateway_in(per_node: PerNode, network: IpNetwork) -> Option<IpAddr> {
    let hosts = hosts(network);
    let gateway = match per_node.gateway? {
        Gateway::First => hosts.first,
        Gateway::Last => hosts.last,
        Gateway::Number(number) => bits(network.network()).checked_add(number.into())?,
    };
    Some(from_bits(network.is_ipv4(), gateway))
}

/// The addresses for pods of a node's network, or of a part of it; all of a larger network.
pub(super) fn of_pods(per_node: PerNode, part: IpNetwork) -> Vec<Span> {
    let network = network_around(part.network(), per_node.prefix);
    let Some(network) = network.filter(|_| part.prefix() >= per_node.prefix) else {
        return vec![Span::of(part)];
    };
    let gateway = gateway_in(per_node, network).map(|gateway| Span::single(bits(gateway)));
    let hosts = hosts(network).intersection(Span::of(part));
    let of_pods = hosts.map(|hosts| without(hosts, gateway.into_iter().collect()));
    of_pods.unwrap_or_default()
}

/// # Errors
/// Why a range cannot be divided so.
pub(super) fn check(per_node: PerNode, range: IpNetwork) -> Result<(), String> {
    let (prefix, longest) = (per_node.prefix, longest(range.is_ipv4()));
    let shortest = range.prefix().max(longest - MAX_HOST_BITS);
    let network = network_around(range.network(), prefix);
    let Some(network) = network.filter(|_| prefix >= shortest) else {
        return Err(format!(
            "prefix {prefix} is not between {shortest} and {longest}, the lengths of a node's network in {range}"
        ));
    };
    match gateway_in(per_node, network) {
        Some(_) if prefix == longest => Err(format!(
            "a network of /{prefix} has one address, which cannot be both gateway and pod: leave gateway out"
        )),
        Some(gateway) if !hosts(network).contains(bits(gateway)) => Err(format!(
            "gateway {gateway} is not the address of a host in {network}"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::{Range, Spec};
    use node::policy::Profile;

    fn per_node(prefix: u8, gateway: Option<Gateway>) -> PerNode {
        PerNode { prefix, gateway }
    }

    fn divided(range: &str, per_node: PerNode) -> Result<Range, String> {
        let spec = Spec {
            range,
            per_node: Some(per_node),
            ..Spec::default()
        };
        Range::new(&spec, Profile::Strict).map_err(|error| error.to_string())
    }

    #[test]
    fn a_network_gives_its_hosts_without_the_gateway() {
        use Gateway::{First, Last, Number};
        for (range, prefix, gateway, network, pods) in [
            ("10.0.0.0/24", 31, Some(First), "10.0.0.0/31", "10.0.0.1"),
            ("10.0.0.0/24", 31, Some(Last), "10.0.0.0/31", "10.0.0.0"),
            (
                "10.0.0.0/24",
                31,
                Some(Number(0)),
                "10.0.0.254/31",
                "10.0.0.255",
            ),
            ("10.0.0.0/24", 31, None, "10.0.0.2/31", "10.0.0.2-10.0.0.3"),
            ("10.0.0.0/24", 32, None, "10.0.0.0/32", "10.0.0.0"),
            ("10.0.0.0/24", 30, Some(First), "10.0.0.4/30", "10.0.0.6"),
            (
                "10.0.0.0/24",
                29,
                Some(Last),
                "10.0.0.8/29",
                "10.0.0.9-10.0.0.13",
            ),
            (
                "10.0.0.0/24",
                29,
                Some(Number(6)),
                "10.0.0.8/29",
                "10.0.0.9-10.0.0.13",
            ),
            (
                "10.0.0.0/24",
                24,
                Some(Number(1)),
                "10.0.0.0/24",
                "10.0.0.2-10.0.0.254",
            ),
            ("fd00::/64", 127, Some(First), "fd00::2/127", "fd00::3"),
            (
                "fd00::/64",
                120,
                Some(First),
                "fd00::100/120",
                "fd00::102-fd00::1fe",
            ),
        ] {
            let network: IpNetwork = network.parse().unwrap();
            let per_node = per_node(prefix, gateway);
            let range = divided(range, per_node).unwrap();
            let part = range.within(&[network]);
            let shown: Vec<String> = part
                .spans()
                .iter()
                .map(|s| s.show(network.is_ipv4()))
                .collect();
            assert_eq!(shown, [pods], "{network} {per_node}");
            assert_eq!(part.prefix(), prefix);
            let address = part.lowest().unwrap();
            assert_eq!(range.gateway_of(address), gateway_in(per_node, network));
            assert_eq!(range.size_within(network), part.size());
            assert!(range.may_be_requested(address));
            // The first network has an example, whatever the range's first address is.
            assert_eq!(
                range.example().map(|one| range.network_of(one).prefix()),
                Some(prefix)
            );
        }
    }

    #[test]
    fn a_part_of_a_network_has_neither_gateway_nor_broadcast_address() {
        let range = divided("10.0.0.0/24", per_node(28, Some(Gateway::First))).unwrap();
        for (address, is_given) in [
            (0, false),
            (1, false),
            (2, true),
            (14, true),
            (15, false),
            (18, true),
        ] {
            let single = IpNetwork::from(std::net::IpAddr::from([10, 0, 0, address]));
            assert_eq!(range.size_within(single) == 1, is_given, "{single}");
        }
        assert!(!range.may_be_requested([10, 0, 0, 15].into()));
        assert!(!range.may_be_requested([10, 0, 0, 16].into()));
    }

    #[test]
    fn what_is_excluded_leaves_other_networks() {
        let spec = Spec {
            range: "10.0.0.0/24",
            exclude: &["10.0.0.0/29", "10.0.0.9"],
            per_node: Some(per_node(31, Some(Gateway::First))),
            ..Spec::default()
        };
        let range = Range::new(&spec, Profile::Strict).unwrap();
        assert_eq!(range.size_within("10.0.0.8/31".parse().unwrap()), 0);
        assert_eq!(range.example(), Some([10, 0, 0, 11].into()));
    }

    #[test]
    fn networks_that_no_node_can_use_are_refused() {
        for (range, prefix, gateway, why) in [
            (
                "10.0.0.0/24",
                23,
                None,
                "perNode: prefix 23 is not between 24 and 32",
            ),
            ("10.0.0.0/24", 33, None, "between 24 and 32"),
            ("10.0.0.0/8", 15, None, "between 16 and 32"),
            ("fd00::/64", 64, None, "between 112 and 128"),
            ("10.0.0.0/24", 32, Some(Gateway::First), "one address"),
            ("fd00::/64", 128, Some(Gateway::Number(0)), "one address"),
            (
                "10.0.0.0/24",
                30,
                Some(Gateway::Number(0)),
                "10.0.0.0 is not the address of a host",
            ),
            (
                "10.0.0.0/24",
                30,
                Some(Gateway::Number(3)),
                "10.0.0.3 is not the address of a host",
            ),
            (
                "10.0.0.0/24",
                31,
                Some(Gateway::Number(2)),
                "10.0.0.2 is not the address of a host",
            ),
        ] {
            let error = divided(range, per_node(prefix, gateway)).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
