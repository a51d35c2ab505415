//! Which netdevs the node itself needs: its uplinks. A pod that got one would cut the node off.
//!
//! One definition for pools, preflight checks and network plugins, pure over facts that `netlink`
//! reads. A netdev is an uplink when
//!
//! 1. the node reaches the outside by it, in a family of its addresses: it is a next hop of the
//!    [default route](is_default) that the kernel would choose, the one with the lowest metric of a
//!    table that the node's own packets are looked up in;
//! 2. it has an address that the node is known by; an address of its own subnet alone does not make
//!    an uplink of a rail;
//! 3. it lies below one of these: a member of the bond or bridge, the parent of the VLAN or macvlan.
//!
//! Each NIC of some clouds learns a default route from router advertisements. Those count only while
//! nothing else shows which netdev is the node's: neither a static or leased default route nor an
//! address of the node.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

/// Whether a route with this prefix length is a default route, alone or with a few others: halves of
/// the address space are a VPN's way to be preferred, and `2000::/3` is all of the Internet. A part of
/// IPv4's counts only if it starts at 0.0.0.0.
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

/// Netdevs that the node itself needs, or why they are not known.
///
/// Not knowing is not the same as none: an exclusive pool then offers no HCA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uplinks {
    /// By name, with what makes each one an uplink.
    Known(BTreeMap<String, Why>),
    /// This process is in another network namespace, or the kernel does not answer.
    Unknown(String),
}

impl Uplinks {
    /// Why a netdev is an uplink, if it is known to be one.
    #[must_use]
    pub fn why(&self, netdev: &str) -> Option<&Why> {
        match self {
            Self::Known(uplinks) => uplinks.get(netdev),
            Self::Unknown(_) => None,
        }
    }
}

/// A default route of a table that the node's own packets are looked up in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRoute {
    /// Netdevs of its next hops.
    pub netdevs: Vec<String>,
    /// Where to, with its prefix length: 0 or a few bits.
    pub destination: (IpAddr, u8),
    /// The table.
    pub table: u32,
    /// The kernel takes the lowest.
    pub metric: u32,
    /// The source address that it gives to packets.
    pub source: Option<IpAddr>,
    /// It was learned from a router advertisement.
    pub advertised: bool,
}

/// What is known of the node's network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// Default routes.
    pub defaults: Vec<DefaultRoute>,
    /// Addresses, each with its netdev.
    pub addresses: Vec<(String, IpAddr)>,
    /// Addresses that the node is known by in its cluster; empty where nobody says so.
    pub node_addresses: Vec<IpAddr>,
}

/// Netdevs with addresses that no pod can be given: the node's address is on it on some hosts.
const LOOPBACK: &str = "lo";

impl Network {
    fn carriers<'a>(&'a self, of_node: &[IpAddr]) -> Vec<(&'a str, IpAddr)> {
        let of_node = |(_, address): &&(String, IpAddr)| of_node.contains(address);
        let carriers = self.addresses.iter().filter(of_node);
        carriers
            .map(|(netdev, address)| (netdev.as_str(), *address))
            .filter(|(netdev, _)| *netdev != LOOPBACK)
            .collect()
    }

    /// The default routes that the kernel would choose, one of each table and destination unless
    /// several have the same metric.
    fn chosen(&self) -> Vec<&DefaultRoute> {
        let of_node = |route: &&DefaultRoute| {
            let v4 = route.destination.0.is_ipv4();
            self.node_addresses.is_empty()
                || self.node_addresses.iter().any(|node| node.is_ipv4() == v4)
        };
        let mut routes: Vec<&DefaultRoute> = self.defaults.iter().filter(of_node).collect();
        if !self.carriers(&self.node_addresses).is_empty()
            || routes.iter().any(|route| !route.advertised)
        {
            routes.retain(|route| !route.advertised);
        }
        let is_best = |route: &&DefaultRoute| {
            let mut rivals = routes.iter().filter(|rival| {
                (rival.destination, rival.table) == (route.destination, route.table)
            });
            rivals.all(|rival| rival.metric >= route.metric)
        };
        routes.iter().copied().filter(is_best).collect()
    }
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
    let chosen = network.chosen();
    let sources = chosen.iter().filter_map(|route| route.source);
    let of_node: Vec<IpAddr> = network
        .node_addresses
        .iter()
        .copied()
        .chain(sources)
        .collect();
    let by_route = chosen.iter().flat_map(|route| &route.netdevs);
    let by_route = by_route.map(|name| (name.clone(), Why::DefaultRoute));
    let by_address = network.carriers(&of_node).into_iter();
    let by_address = by_address.map(|(name, address)| (name.to_owned(), Why::NodeAddress(address)));
    let mut found = BTreeMap::new();
    let mut next: Vec<(String, Why)> = by_route.chain(by_address).collect();
    next.reverse();
    while let Some((name, why)) = next.pop() {
        if name == LOOPBACK || found.contains_key(&name) {
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

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn names(network: &Network) -> Vec<String> {
        uplinks(network, lowers).unwrap().into_keys().collect()
    }

    #[test]
    fn the_default_route_and_all_below_it_are_uplinks() {
        let route = DefaultRoute {
            netdevs: vec!["bond0.7".into()],
            destination: (address("0.0.0.0"), 0),
            table: 254,
            metric: 0,
            source: None,
            advertised: false,
        };
        let network = Network {
            defaults: vec![route],
            ..Network::default()
        };
        let found = uplinks(&network, lowers).unwrap();
        assert_eq!(names(&network), ["bond0", "bond0.7", "eno1", "eno2"]);
        assert_eq!(found["eno2"], Why::Below("bond0".into()));
        assert_eq!(found["bond0.7"], Why::DefaultRoute);
    }

    #[test]
    fn the_nodes_address_makes_an_uplink() {
        let network = Network {
            defaults: Vec::new(),
            addresses: vec![
                ("lo".into(), address("10.0.0.7")),
                ("ens3".into(), address("10.0.0.7")),
                ("rail0".into(), address("192.168.0.7")),
                ("ens4".into(), address("fd00::7")),
            ],
            node_addresses: vec![address("10.0.0.7"), address("fd00::7")],
        };
        let found = uplinks(&network, lowers).unwrap();
        assert_eq!(names(&network), ["ens3", "ens4"]);
        assert_eq!(
            found["ens3"].to_string(),
            "it has the node's address 10.0.0.7"
        );
    }
}
