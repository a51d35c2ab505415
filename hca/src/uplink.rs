//! Which netdevs the node itself needs: its uplinks. A pod that got one would cut the node off.
//!
//! One definition for pools, preflight checks and network plugins, pure over what each of them finds
//! out in its own way. A netdev is an uplink when
//!
//! 1. the node is left through it: it carries a [default route](is_default) of the main table, or
//!    the kernel's own answer to "which way out?" names it, or a default route of a table that rules
//!    look up whatever the source of a packet; a route that exists to refuse is none, and neither are
//!    default routes of other tables, which are source routing of rails;
//! 2. it has an address that the node is known by; an address of its own subnet alone does not make
//!    an uplink of a rail;
//! 3. it lies below one of these: a member of the bond or bridge, the parent of the VLAN or macvlan.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

/// Whether a route with this prefix length is a default route, alone or with a few others: halves of
/// the address space are a VPN's way to be preferred, and `2000::/3` is all of the Internet.
#[must_use]
pub const fn is_default(prefix: u8) -> bool {
    prefix <= 3
}

/// Why a netdev is an uplink.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// It carries a default route.
    DefaultRoute,
    /// It has an address that the node is known by.
    NodeAddress(IpAddr),
    /// It lies below this netdev, which is an uplink.
    Below(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DefaultRoute => f.write_str("it carries the node's default route"),
            Self::NodeAddress(address) => write!(f, "it has the node's address {address}"),
            Self::Below(upper) => write!(f, "{upper}, the node's way out, is on top of it"),
        }
    }
}

/// What is known of the node's network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// Netdevs through which the node is left.
    pub ways_out: Vec<String>,
    /// Addresses, each with its netdev.
    pub addresses: Vec<(String, IpAddr)>,
    /// Addresses that the node is known by in its cluster.
    pub node_addresses: Vec<IpAddr>,
}

/// The uplinks, each with the first reason that makes it one. `lowers` names the netdevs directly
/// below a netdev; it is asked about uplinks alone.
///
/// # Errors
/// The first error of `lowers`.
pub fn uplinks<E>(
    network: &Network,
    mut lowers: impl FnMut(&str) -> Result<Vec<String>, E>,
) -> Result<BTreeMap<String, Why>, E> {
    let by_route = network
        .ways_out
        .iter()
        .map(|name| (name.clone(), Why::DefaultRoute));
    let by_address = network
        .addresses
        .iter()
        .filter(|(_, address)| network.node_addresses.contains(address))
        .map(|(name, address)| (name.clone(), Why::NodeAddress(*address)));
    let mut found = BTreeMap::new();
    let mut next: Vec<(String, Why)> = by_route.chain(by_address).collect();
    next.reverse();
    while let Some((name, why)) = next.pop() {
        // The loopback device has the node's address on some hosts, and no pod can be given it.
        if name == "lo" || found.contains_key(&name) {
            continue;
        }
        for lower in lowers(&name)? {
            next.push((lower, Why::Below(name.clone())));
        }
        found.insert(name, why);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn lowers(name: &str) -> Result<Vec<String>, Infallible> {
        let lowers: &[&str] = match name {
            "bond0.7" => &["bond0"],
            "bond0" => &["eno1", "eno2"],
            // A VLAN and the bond below each other would be a loop.
            "eno1" => &["bond0"],
            _ => &[],
        };
        Ok(lowers.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_default_route_and_all_below_it_are_uplinks() {
        let network = Network {
            ways_out: vec!["bond0.7".into()],
            ..Network::default()
        };
        let found = uplinks(&network, lowers).unwrap();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["bond0", "bond0.7", "eno1", "eno2"]);
        assert_eq!(found["eno2"], Why::Below("bond0".into()));
        assert_eq!(found["bond0.7"], Why::DefaultRoute);
    }

    #[test]
    fn the_nodes_address_makes_an_uplink() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let network = Network {
            ways_out: Vec::new(),
            addresses: vec![
                ("lo".into(), address("10.0.0.7")),
                ("ens3".into(), address("10.0.0.7")),
                ("rail0".into(), address("192.168.0.7")),
                ("ens4".into(), address("fd00::7")),
            ],
            node_addresses: vec![address("10.0.0.7"), address("fd00::7")],
        };
        let found = uplinks(&network, lowers).unwrap();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["ens3", "ens4"]);
        assert_eq!(
            found["ens3"].to_string(),
            "it has the node's address 10.0.0.7"
        );
    }
}
