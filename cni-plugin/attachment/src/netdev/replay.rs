//! A message in which the kernel described an address, a route, a rule or a neighbour, made fit
//! to be sent back: with another interface, without what the kernel adds of itself.
//!
//! Attributes this program does not know are passed on as they came, so that nothing an
//! administrator set is lost because it is newer. Pure: nothing here talks to the kernel.

use std::net::IpAddr;

use netlink::{address, route, rule};
use netlink_packet_route::{
    address::{
        AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressProtocol,
        AddressScope,
    },
    neighbour::{NeighbourAttribute, NeighbourMessage},
    route::{RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteVia},
    rule::{RuleAttribute, RuleFlags, RuleMessage},
};

/// `RT_TABLE_LOCAL`
const LOCAL: u32 = 255;
/// `RT_TABLE_DEFAULT`
const DEFAULT: u32 = 253;

/// The flags of an address; the header has room for eight of them only.
fn flags_of(address: &AddressMessage) -> AddressFlags {
    address
        .attributes
        .iter()
        .find_map(|a| match a {
            AddressAttribute::Flags(flags) => Some(*flags),
            _ => None,
        })
        .unwrap_or(AddressFlags::from_bits_retain(
            address.header.flags.bits().into(),
        ))
}

/// Whether an address is under the kernel's own care: made from router advertisements, a
/// temporary one of privacy extensions, or the link-local one of the interface. It comes again
/// by itself.
pub fn is_autoconfigured(address: &AddressMessage) -> bool {
    let v6 = address.header.family == netlink_packet_route::AddressFamily::Inet6;
    let flags = flags_of(address);
    let of_kernel = AddressFlags::Managetempaddr | AddressFlags::Secondary;
    let is_of_kernel = |protocol: &AddressProtocol| {
        matches!(
            protocol,
            AddressProtocol::RouterAnnouncement | AddressProtocol::LinkLocal
        )
    };
    let by_kernel =
        |a: &AddressAttribute| matches!(a, AddressAttribute::Protocol(p) if is_of_kernel(p));
    v6 && (flags.intersects(of_kernel) || address.attributes.iter().any(by_kernel))
}

/// Whether an address is of link scope (`fe80::/10`, `169.254.0.0/16` where it is set so).
pub fn is_link_local(address: &AddressMessage) -> bool {
    address.header.scope == AddressScope::Link
}

/// How long an address is preferred and valid, in seconds from when it was read; none for one
/// without an end. A preference without an end is [`u32::MAX`].
pub fn lifetime(address: &AddressMessage) -> Option<(u32, u32)> {
    address.attributes.iter().find_map(|a| match a {
        AddressAttribute::CacheInfo(info) if info.ifa_valid != u32::MAX => {
            Some((info.ifa_preferred, info.ifa_valid))
        }
        _ => None,
    })
}

/// Gives an address no end.
pub fn without_lifetime(address: &mut AddressMessage) {
    address
        .attributes
        .retain(|a| !matches!(a, AddressAttribute::CacheInfo(_)));
}

/// An address with what is left of its lifetime after this many seconds; none when it is over.
pub fn aged(message: &AddressMessage, seconds: u64) -> Option<AddressMessage> {
    let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
    let left = |lifetime: u32| match lifetime {
        u32::MAX => u32::MAX,
        lifetime => lifetime.saturating_sub(seconds),
    };
    let mut copy = message.clone();
    for attribute in &mut copy.attributes {
        if let AddressAttribute::CacheInfo(info) = attribute {
            info.ifa_preferred = left(info.ifa_preferred);
            info.ifa_valid = left(info.ifa_valid);
            if info.ifa_valid == 0 {
                return None;
            }
        }
    }
    Some(copy)
}

/// The label of an IPv4 address.
pub fn label(address: &AddressMessage) -> Option<&str> {
    address.attributes.iter().find_map(|a| match a {
        AddressAttribute::Label(label) => Some(label.as_str()),
        _ => None,
    })
}

/// Whether two messages are of one address of an interface.
pub fn is_same(one: &AddressMessage, other: &AddressMessage) -> bool {
    address::own(one).is_some()
        && address::own(one) == address::own(other)
        && one.header.prefix_len == other.header.prefix_len
}

/// Whether an address' subnet has another.
fn covers(address: &AddressMessage, other: IpAddr) -> bool {
    let host_bits = |bits: u8| u32::from(bits.saturating_sub(address.header.prefix_len));
    let network = |address: IpAddr| match address {
        IpAddr::V4(a) => u128::from(a.to_bits()).checked_shr(host_bits(32)),
        IpAddr::V6(a) => a.to_bits().checked_shr(host_bits(128)),
    };
    address::own(address)
        .is_some_and(|own| own.is_ipv4() == other.is_ipv4() && network(own) == network(other))
}

/// Whether a route has one of these addresses as its source, or a gateway that is reached by their
/// subnets alone, not by those of `others`.
pub fn needs_one_of(
    route: &RouteMessage,
    these: &[AddressMessage],
    others: &[AddressMessage],
) -> bool {
    route.attributes.iter().any(|a| match a {
        RouteAttribute::PrefSource(source) => {
            let source = route::ip(source);
            these.iter().any(|address| address::own(address) == source)
        }
        _ => false,
    }) || gateway(route).is_some_and(|gateway| {
        let reach = |list: &[AddressMessage]| list.iter().any(|a| covers(a, gateway));
        reach(these) && !reach(others)
    })
}

/// Whether a rule is about packets from one of these addresses.
pub fn is_from_one_of(rule: &RuleMessage, these: &[AddressMessage]) -> bool {
    let single = [32, 128].contains(&rule.header.src_len);
    single
        && rule.attributes.iter().any(|a| match a {
            RuleAttribute::Source(source) => these.iter().any(|a| address::own(a) == Some(*source)),
            _ => false,
        })
}

/// An address to be put on the interface with this index, as it was.
pub fn address(message: &AddressMessage, index: u32) -> AddressMessage {
    // The rest is the kernel's: what it found out about the address, and what follows from its
    // lifetime.
    let kept = AddressFlags::Noprefixroute
        | AddressFlags::Mcautojoin
        | AddressFlags::Homeaddress
        | AddressFlags::Nodad;
    with_flags(message, index, flags_of(message) & kept)
}

/// The same for an interface of another name, whose label would carry the old one. IPv6 ones
/// are in use at once: until now they were in use here.
pub fn address_elsewhere(message: &AddressMessage, index: u32) -> AddressMessage {
    let mut copy = address(message, index);
    copy.attributes
        .retain(|a| !matches!(a, AddressAttribute::Label(_)));
    if message.header.family == netlink_packet_route::AddressFamily::Inet6 {
        let flags = flags_of(&copy) | AddressFlags::Nodad;
        copy = with_flags(&copy, index, flags);
    }
    copy
}

fn with_flags(message: &AddressMessage, index: u32, flags: AddressFlags) -> AddressMessage {
    let mut copy = message.clone();
    copy.header.index = index;
    copy.header.flags = AddressHeaderFlags::empty();
    copy.attributes.retain(|a| {
        !matches!(
            a,
            AddressAttribute::Flags(_) | AddressAttribute::TargetNetNsId(_)
        )
    });
    copy.attributes.push(AddressAttribute::Flags(flags));
    copy
}

/// Whether a route comes by itself, or ends by itself: the kernel makes it out of an address or of the
/// interface being up, or it expires, as those of router advertisements do. One of that origin without an
/// end was made by an agent of the cloud.
pub fn is_kernel_made(route: &RouteMessage) -> bool {
    let expires = has(
        route,
        |a| matches!(a, RouteAttribute::CacheInfo(info) if info.expires != 0),
    );
    let is_multicast = |to: IpAddr| to.is_ipv6() && to.is_multicast();
    route.header.protocol == RouteProtocol::Kernel
        || expires
        || route.header.flags.contains(RouteFlags::Cloned)
        || route::destination(route).is_some_and(is_multicast)
}

fn has(route: &RouteMessage, is: impl Fn(&RouteAttribute) -> bool) -> bool {
    route.attributes.iter().any(is)
}

/// Whether a route needs another one to reach its gateway.
pub fn has_gateway(route: &RouteMessage) -> bool {
    gateway(route).is_some()
}

/// A route's next hop, of its own family or of another.
pub fn gateway(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Gateway(via) => route::ip(via),
        RouteAttribute::Via(RouteVia::Inet(via)) => Some((*via).into()),
        RouteAttribute::Via(RouteVia::Inet6(via)) => Some((*via).into()),
        _ => None,
    })
}

/// Whether a route is to everywhere.
pub fn is_default(route: &RouteMessage) -> bool {
    route.header.destination_prefix_length == 0
}

/// Whether a route has several next hops.
pub fn is_multipath(route: &RouteMessage) -> bool {
    has(route, |a| matches!(a, RouteAttribute::MultiPath(_)))
}

/// Whether a route leaves through a nexthop object.
pub fn has_nexthop_object(route: &RouteMessage) -> bool {
    has(route, |a| matches!(a, RouteAttribute::NhId(_)))
}

/// A route out of the interface with index `to`, where it was out of `from`.
pub fn route(message: &RouteMessage, from: u32, to: u32) -> RouteMessage {
    let mut copy = message.clone();
    copy.header.flags &= RouteFlags::Onlink;
    copy.attributes
        .retain(|a| !matches!(a, RouteAttribute::CacheInfo(_) | RouteAttribute::Iif(_)));
    for attribute in &mut copy.attributes {
        if let RouteAttribute::Oif(index) = attribute
            && *index == from
        {
            *index = to;
        }
    }
    copy
}

/// Whether a rule is about an interface: by its name, or because it looks up a table that has
/// routes out of it and is not one of the common tables.
pub fn rule_concerns(rule: &RuleMessage, name: &str, tables: &[u32]) -> bool {
    let mut attributes = rule.attributes.iter();
    let by_name = attributes
        .any(|a| matches!(a, RuleAttribute::Iifname(n) | RuleAttribute::Oifname(n) if n == name));
    let table = rule::table_of(rule);
    by_name || (!matches!(table, LOCAL | route::MAIN | DEFAULT) && tables.contains(&table))
}

/// A rule about the interface `to` that was about `from`.
pub fn rule(message: &RuleMessage, from: &str, to: &str) -> RuleMessage {
    let mut copy = message.clone();
    copy.header.flags &= RuleFlags::Invert;
    for attribute in &mut copy.attributes {
        match attribute {
            RuleAttribute::Iifname(name) | RuleAttribute::Oifname(name) if name == from => {
                to.clone_into(name);
            }
            _ => {}
        }
    }
    copy
}

/// A permanent neighbour on the interface with this index.
pub fn neighbour(message: &NeighbourMessage, index: u32) -> NeighbourMessage {
    let mut copy = message.clone();
    copy.header.ifindex = index;
    copy.attributes.retain(|a| {
        !matches!(
            a,
            NeighbourAttribute::CacheInfo(_) | NeighbourAttribute::Probes(_)
        )
    });
    copy
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::{
        AddressFamily,
        address::CacheInfo,
        route::{RouteAddress, RouteCacheInfo, RouteType},
    };

    use super::*;

    fn plain_route(attributes: Vec<RouteAttribute>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.table = 254;
        route.header.protocol = RouteProtocol::Static;
        route.header.kind = RouteType::Unicast;
        route.attributes = attributes;
        route
    }

    #[test]
    fn an_address_keeps_prefix_scope_and_lifetime_and_loses_the_kernels_marks() {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet6;
        message.header.prefix_len = 64;
        message.header.index = 3;
        message.header.flags = AddressHeaderFlags::Permanent | AddressHeaderFlags::Tentative;
        let mut lifetime = CacheInfo::default();
        (lifetime.ifa_preferred, lifetime.ifa_valid) = (0, 600);
        message.attributes = vec![
            AddressAttribute::Address("fd00::1".parse().unwrap()),
            AddressAttribute::Label("eth1:0".into()),
            AddressAttribute::CacheInfo(lifetime),
            AddressAttribute::Flags(AddressFlags::Tentative | AddressFlags::Noprefixroute),
        ];
        let copy = address(&message, 7);
        assert_eq!(copy.header.index, 7);
        assert_eq!(copy.header.prefix_len, 64);
        assert!(copy.header.flags.is_empty());
        assert_eq!(flags_of(&copy), AddressFlags::Noprefixroute);
        assert!(
            copy.attributes
                .contains(&AddressAttribute::CacheInfo(lifetime))
        );
        assert!(
            copy.attributes
                .contains(&AddressAttribute::Label("eth1:0".into()))
        );
        let elsewhere = address_elsewhere(&message, 7);
        assert_eq!(
            flags_of(&elsewhere),
            AddressFlags::Noprefixroute | AddressFlags::Nodad
        );
        assert!(
            !elsewhere
                .attributes
                .contains(&AddressAttribute::Label("eth1:0".into()))
        );
    }

    #[test]
    fn autoconfigured_addresses_are_left_to_the_kernel() {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet6;
        assert!(!is_autoconfigured(&message));
        message.attributes = vec![AddressAttribute::Flags(AddressFlags::Managetempaddr)];
        assert!(is_autoconfigured(&message));
        message.attributes = vec![AddressAttribute::Protocol(
            AddressProtocol::RouterAnnouncement,
        )];
        assert!(is_autoconfigured(&message));
        // On IPv4 the same bit marks the second address of a subnet.
        message.header.family = AddressFamily::Inet;
        message.attributes = vec![AddressAttribute::Flags(AddressFlags::Secondary)];
        assert!(!is_autoconfigured(&message));
    }

    #[test]
    fn kernel_made_routes_are_distinguished_from_administrators() {
        let mut route = plain_route(vec![]);
        assert!(!is_kernel_made(&route));
        route.header.protocol = RouteProtocol::Kernel;
        assert!(is_kernel_made(&route));
        let mut advertised = plain_route(vec![]);
        advertised.header.protocol = RouteProtocol::Ra;
        assert!(!is_kernel_made(&advertised), "an agent's, without an end");
        let mut bytes = [0; 32];
        bytes[8] = 30;
        let info = RouteCacheInfo::parse(&bytes).unwrap();
        advertised.attributes.push(RouteAttribute::CacheInfo(info));
        assert!(is_kernel_made(&advertised));
        let mut local = plain_route(vec![RouteAttribute::Table(255)]);
        local.header.kind = RouteType::Local;
        assert!(!is_kernel_made(&local), "an administrator's");
        local.header.protocol = RouteProtocol::Kernel;
        assert!(is_kernel_made(&local));
        let group = RouteAddress::Inet6("ff00::".parse().unwrap());
        assert!(is_kernel_made(&plain_route(vec![
            RouteAttribute::Destination(group)
        ])));
    }

    #[test]
    fn a_route_moves_to_another_interface_with_all_it_says() {
        let mut message = plain_route(vec![
            RouteAttribute::Oif(3),
            RouteAttribute::Priority(50),
            RouteAttribute::Table(1000),
        ]);
        message.header.flags = RouteFlags::Onlink | RouteFlags::Linkdown;
        let copy = route(&message, 3, 8);
        assert_eq!(copy.header.flags, RouteFlags::Onlink);
        assert_eq!(route::table_of(&copy), 1000);
        assert!(copy.attributes.contains(&RouteAttribute::Oif(8)));
        assert!(copy.attributes.contains(&RouteAttribute::Priority(50)));
    }

    #[test]
    fn rules_concern_an_interface_by_name_or_by_table() {
        let mut by_table = RuleMessage::default();
        by_table.header.table = 101;
        assert!(rule_concerns(&by_table, "eth1", &[101]));
        assert!(!rule_concerns(&by_table, "eth1", &[102]));
        by_table.header.table = 254;
        assert!(
            !rule_concerns(&by_table, "eth1", &[254]),
            "main is everybody's"
        );
        let mut by_name = RuleMessage::default();
        by_name.attributes = vec![RuleAttribute::Iifname("eth1".into())];
        assert!(rule_concerns(&by_name, "eth1", &[]));
        let copy = rule(&by_name, "eth1", "net1");
        assert_eq!(copy.attributes, [RuleAttribute::Iifname("net1".into())]);
    }
}
