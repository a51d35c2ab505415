//! Routes and addresses of a network namespace, and the uplinks among its netdevs.
//!
//! From `/proc/<pid>/net`, which a container sees of the host through a mount, and which a tree of
//! files can hold. IPv4 addresses are put together from the local table and the connected routes.
//! It shows neither rules nor the IPv4 routes of other tables than the main one; of IPv6 it shows the
//! routes of all tables, so a default route of any of them counts. A process in the host's namespace
//! asks the kernel by netlink instead.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use crate::uplink::{self, DefaultRoute, Why};
use crate::{Host, netdev};

/// A route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The netdev it leads out of.
    pub netdev: String,
    /// Where to.
    pub destination: IpAddr,
    /// Bits of the destination that count.
    pub prefix: u8,
    /// Through a gateway.
    pub gateway: bool,
    /// The kernel takes the lowest.
    pub metric: u32,
    /// It was learned from a router advertisement.
    pub advertised: bool,
}

impl Route {
    /// True for a default route.
    #[must_use]
    pub fn is_default(&self) -> bool {
        uplink::is_default(self.prefix)
    }
}

/// An address of a netdev.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The netdev.
    pub netdev: String,
    /// The address.
    pub ip: IpAddr,
    /// Bits of its subnet.
    pub prefix: u8,
    /// Another host has it too (IPv6 duplicate address detection).
    pub duplicate: bool,
}

/// What is known of a network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// Routes of the main table.
    pub routes: Vec<Route>,
    /// Addresses.
    pub addresses: Vec<Address>,
}

/// Netdevs that the node itself needs, or why they are not known.
///
/// Not knowing is not the same as none: an exclusive pool then offers no HCA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uplinks {
    /// By name, with what makes each one an uplink.
    Known(BTreeMap<String, Why>),
    /// The routes cannot be read, or what lies below an uplink cannot.
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

    /// The host's uplinks. `node_addresses` are those the cluster knows the node by.
    #[must_use]
    pub fn of_host(host: &Host, node_addresses: &[IpAddr]) -> Self {
        match Network::read(&of_host(&host.proc)) {
            Ok(network) => network.uplinks(host, node_addresses),
            Err(reason) => Self::Unknown(reason),
        }
    }
}

impl Network {
    /// Reads what a directory such as `/proc/1/net` says.
    ///
    /// # Errors
    /// What cannot be read, and why. A kernel without IPv6 has no tables of it, which is no error.
    pub fn read(directory: &Path) -> Result<Self, String> {
        let text = |name: &str, needed: bool| {
            let path = directory.join(name);
            match std::fs::read_to_string(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && !needed => {
                    Ok(String::new())
                }
                read => read.map_err(|error| format!("read {}: {error}", path.display())),
            }
        };
        let mut routes = ipv4_routes(&text("route", true)?);
        let mut addresses = ipv6_addresses(&text("if_inet6", false)?);
        addresses.extend(ipv4_addresses(&text("fib_trie", false)?, &routes));
        routes.extend(ipv6_routes(&text("ipv6_route", false)?));
        Ok(Self { routes, addresses })
    }

    /// The netdevs that the node itself needs, by the one definition of [`crate::uplink`].
    #[must_use]
    pub fn uplinks(&self, host: &Host, node_addresses: &[IpAddr]) -> Uplinks {
        let defaults = self.routes.iter().filter(|route| route.is_default());
        let default = |route: &Route| DefaultRoute {
            netdevs: vec![route.netdev.clone()],
            destination: (route.destination, route.prefix),
            table: 0,
            metric: route.metric,
            source: None,
            advertised: route.advertised,
        };
        let facts = uplink::Network {
            defaults: defaults.map(default).collect(),
            addresses: self
                .addresses
                .iter()
                .map(|address| (address.netdev.clone(), address.ip))
                .collect(),
            node_addresses: node_addresses.to_vec(),
        };
        let lowers = |name: &str| match netdev::read(host, name) {
            Ok(netdev) => Ok(netdev.lowers),
            // In another namespace, or gone since the routes were read.
            Err(error) if error.is_missing() => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        match uplink::uplinks(&facts, lowers) {
            Ok(uplinks) => Uplinks::Known(uplinks),
            Err(error) => Uplinks::Unknown(error.to_string()),
        }
    }

    /// Addresses of a netdev.
    pub fn of<'a>(&'a self, netdev: &'a str) -> impl Iterator<Item = &'a Address> {
        self.addresses
            .iter()
            .filter(move |address| address.netdev == netdev)
    }
}

/// `net` of the host's namespace: process 1 is the host's for every reader; where there is no such
/// directory (another user, a tree of files) the mount's own view serves.
#[must_use]
pub fn of_host(proc: &Path) -> PathBuf {
    let of_init = proc.join("1/net");
    if of_init.join("route").exists() {
        of_init
    } else {
        proc.join("net")
    }
}

/// `/proc/net/route`: numbers are in the machine's order, as the kernel prints a `__be32`.
fn ipv4_routes(text: &str) -> Vec<Route> {
    let route = |line: &str| -> Option<Route> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok();
        let (destination, mask) = (number(1)?, number(7)?);
        let flags = number(3)?;
        // RTF_UP, and not RTF_REJECT (include/uapi/linux/route.h).
        (flags & 1 != 0 && flags & 0x200 == 0).then_some(())?;
        Some(Route {
            netdev: fields.first().map(ToString::to_string).unwrap_or_default(),
            destination: Ipv4Addr::from(destination.to_ne_bytes()).into(),
            prefix: u8::try_from(mask.count_ones()).unwrap_or_default(),
            gateway: flags & 2 != 0,
            metric: fields.get(6)?.parse().ok()?,
            advertised: false,
        })
    };
    text.lines().skip(1).filter_map(route).collect()
}

/// `/proc/net/ipv6_route`.
fn ipv6_routes(text: &str) -> Vec<Route> {
    let route = |line: &str| -> Option<Route> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let netdev = (*fields.get(9)?).to_owned();
        let flags = u32::from_str_radix(fields.get(8)?, 16).ok()?;
        (flags & 1 != 0 && flags & 0x200 == 0 && netdev != "lo").then_some(())?;
        Some(Route {
            netdev,
            destination: ipv6(fields.first()?)?.into(),
            prefix: u8::from_str_radix(fields.get(1)?, 16).ok()?,
            gateway: flags & 2 != 0,
            // Of which table it is, is not shown: no route is preferred to one of another table.
            metric: 0,
            // RTF_ADDRCONF (include/uapi/linux/ipv6_route.h).
            advertised: flags & 0x4_0000 != 0,
        })
    };
    text.lines().filter_map(route).collect()
}

/// `/proc/net/if_inet6`.
fn ipv6_addresses(text: &str) -> Vec<Address> {
    let address = |line: &str| -> Option<Address> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // IFA_F_DADFAILED (include/uapi/linux/if_addr.h).
        let flags = u32::from_str_radix(fields.get(4)?, 16).ok()?;
        Some(Address {
            netdev: (*fields.get(5)?).to_owned(),
            ip: ipv6(fields.first()?)?.into(),
            prefix: u8::from_str_radix(fields.get(2)?, 16).ok()?,
            duplicate: flags & 0x08 != 0,
        })
    };
    text.lines().filter_map(address).collect()
}

fn ipv6(digits: &str) -> Option<Ipv6Addr> {
    (digits.len() == 32)
        .then(|| u128::from_str_radix(digits, 16).ok())?
        .map(Ipv6Addr::from)
}

/// Local addresses of `/proc/net/fib_trie`, each on the netdev whose connected route holds it.
fn ipv4_addresses(trie: &str, routes: &[Route]) -> Vec<Address> {
    let mut addresses: Vec<Address> = Vec::new();
    let mut last = None;
    for line in trie.lines() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("|-- ") {
            last = text.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL"
            && let Some(ip) = last
            && let Some(route) = connected(ip, routes)
            && !addresses.iter().any(|known| known.ip == IpAddr::V4(ip))
        {
            addresses.push(Address {
                netdev: route.netdev.clone(),
                ip: ip.into(),
                prefix: route.prefix,
                duplicate: false,
            });
        }
    }
    addresses
}

/// The narrowest route without a gateway that holds the address; `None` if those of several
/// netdevs do, as with rails in one subnet: its netdev is not known then.
fn connected(ip: Ipv4Addr, routes: &[Route]) -> Option<&Route> {
    let holds = |route: &&Route| match route.destination {
        IpAddr::V4(network) if !route.gateway && route.prefix > 0 => {
            let shift = 32_u32.saturating_sub(u32::from(route.prefix));
            u32::from(ip).checked_shr(shift) == u32::from(network).checked_shr(shift)
        }
        _ => false,
    };
    let narrowest = routes
        .iter()
        .filter(holds)
        .max_by_key(|route| route.prefix)?;
    let mut others = routes
        .iter()
        .filter(holds)
        .filter(|r| r.prefix == narrowest.prefix);
    others
        .all(|route| route.netdev == narrowest.netdev)
        .then_some(narrowest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a kernel on a little-endian machine prints them.
    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
        eth0\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n\
        rail0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

    #[test]
    #[cfg(target_endian = "little")]
    fn ipv4_routes_read_as_the_kernel_prints_them() {
        let routes = ipv4_routes(ROUTES);
        assert_eq!(routes.len(), 3);
        assert!(routes[0].is_default() && routes[0].gateway);
        assert_eq!(routes[2].destination, IpAddr::from([192, 168, 1, 0]));
        assert_eq!((routes[2].prefix, routes[2].gateway), (24, false));
        let network = Network {
            routes,
            addresses: Vec::new(),
        };
        let uplinks = network.uplinks(&Host::at("/nonexistent"), &[]);
        let Uplinks::Known(uplinks) = uplinks else {
            panic!("{uplinks:?}")
        };
        assert_eq!(uplinks.keys().collect::<Vec<_>>(), ["eth0"]);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn a_local_address_is_on_the_netdev_of_its_subnet() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 192.168.1.0\n        /24 link UNICAST\n\
            Local:\n     |-- 192.168.1.7\n        /32 host LOCAL\n     |-- 127.0.0.1\n        \
            /32 host LOCAL\n     |-- 192.168.1.255\n        /32 link BROADCAST\n";
        let addresses = ipv4_addresses(trie, &ipv4_routes(ROUTES));
        assert_eq!(addresses.len(), 1, "{addresses:?}");
        assert_eq!(addresses[0].netdev, "rail0");
        assert_eq!(addresses[0].ip, IpAddr::from([192, 168, 1, 7]));
    }

    #[test]
    fn ipv6_routes_and_addresses_are_read() {
        let zero = "0".repeat(32);
        let text = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 1 0 00000003 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200 lo\n\
             fe800000000000000000000000000000 40 {zero} 00 {zero} 00000100 1 0 00000001 rail0\n"
        );
        let routes = ipv6_routes(&text);
        assert_eq!(routes.len(), 2);
        assert!(routes[0].is_default());
        assert_eq!(routes[1].prefix, 64);

        let text = "fe80000000000000505400fffe000001 02 40 20 80 rail0\n\
            fd000000000000000000000000000001 02 40 00 08 rail0\n";
        let addresses = ipv6_addresses(text);
        assert_eq!(addresses.len(), 2);
        assert!(!addresses[0].duplicate && addresses[1].duplicate);
    }

    #[test]
    fn tables_that_cannot_be_read_are_not_taken_for_no_uplink() {
        let host = Host::at("/nonexistent");
        let Uplinks::Unknown(reason) = Uplinks::of_host(&host, &[]) else {
            panic!("known")
        };
        assert!(reason.contains("/nonexistent/proc/net/route"), "{reason}");
        // A kernel without IPv6 has no table of it.
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("proc/1/net")).unwrap();
        std::fs::write(dir.path().join("proc/1/net/route"), ROUTES).unwrap();
        let host = Host::at(dir.path());
        assert!(Uplinks::of_host(&host, &[]).why("eth0").is_some());
        // One that is there and refuses to be read is something else.
        std::fs::create_dir(dir.path().join("proc/1/net/ipv6_route")).unwrap();
        assert!(matches!(Uplinks::of_host(&host, &[]), Uplinks::Unknown(_)));
    }

    #[test]
    fn lines_of_another_form_are_passed_over() {
        assert!(ipv4_routes("Iface\nx\nx y z").is_empty());
        assert!(ipv6_routes("x").is_empty());
        assert!(ipv6_addresses("x y").is_empty());
        assert!(ipv4_addresses("/32 host LOCAL", &[]).is_empty());
    }
}
