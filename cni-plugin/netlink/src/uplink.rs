//! Which netdevs of the host the node itself needs, by the one definition of [`hca::uplink`] and
//! netlink's facts. Only reads.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hca::uplink::{self, DefaultRoute, Network, Why};
use netlink_packet_route::{
    AddressFamily,
    address::AddressAttribute,
    link::InfoKind,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteType},
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use super::{
    Result, Socket, address, attribute,
    link::{self, By, Link},
    nexthop, route, rule,
};

/// All addresses of the namespace, each with the index of its link.
///
/// # Errors
/// The kernel's refusal.
pub fn addresses(socket: &mut Socket) -> Result<Vec<(u32, IpAddr)>> {
    let mut found = Vec::new();
    for message in address::list_all(socket)? {
        for attribute in &message.attributes {
            if let AddressAttribute::Local(ip) | AddressAttribute::Address(ip) = attribute {
                found.push((message.header.index, *ip));
            }
        }
    }
    Ok(found)
}

/// The netdevs by name that would cut the node off if they were taken, and why. `node_addresses` are
/// those the node is known by; `addresses` are [`addresses`]. `asked` is one of them that need not be
/// read again.
///
/// # Errors
/// The kernel's refusal.
pub fn uplinks(
    socket: &mut Socket,
    asked: Option<&Link>,
    node_addresses: &[IpAddr],
    addresses: &[(u32, IpAddr)],
) -> Result<BTreeMap<String, Why>> {
    let mut links = Links::default();
    links
        .known
        .extend(asked.map(|link| (link.index, link.clone())));
    let mut facts = Network {
        node_addresses: node_addresses.to_vec(),
        ..Network::default()
    };
    let rules = rule::list(socket, AddressFamily::Unspec)?;
    for family in route::FAMILIES {
        // The definition asks for a way out in the families of the node's addresses.
        let v4 = family == AddressFamily::Inet;
        if !node_addresses.is_empty() && node_addresses.iter().all(|ip| ip.is_ipv4() != v4) {
            continue;
        }
        for table in tables(&rules, family) {
            for message in default_routes(socket, &rules, family, table)? {
                let route = default_route(socket, &mut links, &message, table)?;
                facts.defaults.push(route);
            }
        }
    }
    let sources = facts.defaults.iter().filter_map(|route| route.source);
    let of_node: BTreeSet<IpAddr> = sources.chain(node_addresses.iter().copied()).collect();
    for (index, address) in addresses {
        if of_node.contains(address)
            && let Some(name) = links.name(socket, *index)?
        {
            facts.addresses.push((name, *address));
        }
    }
    uplink::uplinks(&facts, |name| match links.named(name) {
        Some(upper) => lowers(socket, &mut links, &upper),
        None => Ok(Vec::new()),
    })
}

/// The link of the main table's default route with the lowest metric; none for one of several links.
///
/// # Errors
/// The kernel's refusal.
pub fn way_out(socket: &mut Socket) -> Result<Option<Link>> {
    let rules = rule::list(socket, AddressFamily::Unspec)?;
    for family in route::FAMILIES {
        let mut links = Links::default();
        let mut routes = Vec::new();
        for message in default_routes(socket, &rules, family, MAIN)? {
            routes.push(default_route(socket, &mut links, &message, MAIN)?);
        }
        routes.retain(|route| route.destination.1 == 0);
        let best = routes.iter().min_by_key(|route| route.metric);
        if let Some([only]) = best.map(|route| route.netdevs.as_slice())
            && let Some(link) = links.named(only)
        {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// The default routes of a table that take packets: of the main table where possible those alone that
/// the kernel would choose, since it may have any number of other routes.
fn default_routes(
    socket: &mut Socket,
    rules: &[RuleMessage],
    family: AddressFamily,
    table: u32,
) -> Result<Vec<RouteMessage>> {
    // A lookup has no source address, so it passes over IPv6 routes that are for a source alone.
    let may_ask = table == MAIN && family == AddressFamily::Inet && leads_to_main(rules, family);
    let chosen = match may_ask {
        true => chosen(socket, family),
        false => None,
    };
    let mut routes = match chosen {
        Some(chosen) => chosen,
        None => route::list_table(socket, family, table)?,
    };
    routes.retain(|route| {
        uplink::is_default(route.header.destination_prefix_length)
            && route.header.kind == RouteType::Unicast
    });
    Ok(routes)
}

/// The default routes that the kernel would choose, by what it takes to an address in each eighth of
/// the address space: a default route covers one of them whole. None where that may hide one: behind
/// narrower routes to all addresses asked about, behind halves of the address space, behind a route
/// that refuses packets, or, of advertised ones, behind another router's.
fn chosen(socket: &mut Socket, family: AddressFamily) -> Option<Vec<RouteMessage>> {
    let mut found: Vec<RouteMessage> = Vec::new();
    let mut is_whole = false;
    for eighth in 0..8 {
        let mut entry = None;
        for address in addresses_in(family, eighth) {
            entry = route::entry(socket, address).ok()?;
            let is_narrow =
                |route: &RouteMessage| !uplink::is_default(route.header.destination_prefix_length);
            if !entry.as_ref().is_some_and(is_narrow) {
                break;
            }
        }
        let Some(route) = entry else {
            // Nothing is to everywhere.
            is_whole = true;
            continue;
        };
        let header = &route.header;
        let is_known = uplink::is_default(header.destination_prefix_length)
            && header.kind == RouteType::Unicast
            && header.protocol != RouteProtocol::Ra
            && route::table_of(&route) == MAIN;
        if !is_known {
            return None;
        }
        is_whole |= header.destination_prefix_length == 0;
        // One that covers several eighths comes several times.
        if found
            .iter()
            .all(|known| known.header != route.header || destination(known) != destination(&route))
        {
            found.push(route);
        }
    }
    (is_whole && !found.is_empty()).then_some(found)
}

/// Addresses of an eighth of the address space that hardly any network has. Pure.
fn addresses_in(family: AddressFamily, eighth: u8) -> [IpAddr; 2] {
    let first = eighth << 5;
    match family {
        AddressFamily::Inet6 => [0x0f, 0x1e].map(|rest| Ipv6Addr::from([first | rest; 16]).into()),
        _ => [0x16, 0x1e].map(|rest| Ipv4Addr::new(first | rest, 255, 255, 254).into()),
    }
}

fn destination(route: &RouteMessage) -> Option<IpAddr> {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(to) => ip(to),
            _ => None,
        })
}

/// Facts of a route of [`default_routes`].
fn default_route(
    socket: &mut Socket,
    links: &mut Links,
    message: &RouteMessage,
    table: u32,
) -> Result<DefaultRoute> {
    let header = &message.header;
    let everywhere: IpAddr = match header.address_family {
        AddressFamily::Inet6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    let mut found = DefaultRoute {
        netdevs: Vec::new(),
        destination: (
            destination(message).unwrap_or(everywhere),
            header.destination_prefix_length,
        ),
        table,
        metric: 0,
        source: None,
        advertised: header.protocol == RouteProtocol::Ra,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Priority(metric) => found.metric = *metric,
            RouteAttribute::PrefSource(source) => found.source = ip(source),
            _ => {}
        }
    }
    for index in interfaces_of(socket, message)? {
        found.netdevs.extend(links.name(socket, index)?);
    }
    Ok(found)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

/// Links by their indexes, as far as they were asked for.
#[derive(Default)]
struct Links {
    known: BTreeMap<u32, Link>,
}

impl Links {
    /// None when it is gone since it was listed.
    fn name(&mut self, socket: &mut Socket, index: u32) -> Result<Option<String>> {
        if let Some(link) = self.known.get(&index) {
            return Ok(Some(link.name.to_string()));
        }
        let found = link::get(socket, By::Index(index))?;
        Ok(found.map(|link| self.add(link)))
    }

    fn add(&mut self, link: Link) -> String {
        let name = link.name.to_string();
        self.known.insert(link.index, link);
        name
    }

    fn named(&self, name: &str) -> Option<Link> {
        let mut all = self.known.values();
        all.find(|link| link.name == name).cloned()
    }
}

/// `RT_TABLE_UNSPEC`, of rules that look up none or that of a VRF, and `RT_TABLE_LOCAL`.
const NO_WAY_OUT: [u32; 2] = [0, 255];

/// `RT_TABLE_DEFAULT` and `RT_TABLE_MAIN`
const DEFAULT: u32 = 253;
const MAIN: u32 = 254;

/// The tables in which the node's own packets are looked up whatever their source: the main one, and
/// those of rules that select by nothing, or by mark, user or protocol. Rules with a source, a
/// destination or an interface are source routing of rails and of pods. Pure.
fn tables(rules: &[RuleMessage], family: AddressFamily) -> BTreeSet<u32> {
    let of_family = rules.iter().filter(|rule| rule.header.family == family);
    let all = of_family.filter(|rule| is_for_the_node(rule));
    let mut tables: BTreeSet<u32> = all.map(rule::table_of).collect();
    tables.retain(|table| !NO_WAY_OUT.contains(table));
    tables.insert(MAIN);
    tables
}

/// Whether a packet without source, mark and interface is looked up in the main table, after the
/// local one: each rule names a table of the kernel's own, or does not match such a packet. Pure.
fn leads_to_main(rules: &[RuleMessage], family: AddressFamily) -> bool {
    let mut of_family = rules.iter().filter(|rule| rule.header.family == family);
    let mains = of_family.clone();
    of_family.all(|rule| is_for_all(rule) || is_for_others(rule))
        && mains.into_iter().any(|rule| rule::table_of(rule) == MAIN)
}

/// Whether a rule looks up a table of the kernel's own for each packet, or that of a packet's VRF.
fn is_for_all(rule: &RuleMessage) -> bool {
    let header = &rule.header;
    let is_kernels = [NO_WAY_OUT[1], MAIN, DEFAULT].contains(&rule::table_of(rule));
    let of_vrf = |a: &RuleAttribute| *a == RuleAttribute::L3MDev(true);
    header.action == RuleAction::ToTable
        && !header.flags.contains(RuleFlags::Invert)
        && (header.src_len, header.dst_len, header.tos) == (0, 0, 0)
        && (is_kernels || rule.attributes.iter().any(of_vrf))
        && rule.attributes.iter().all(|attribute| {
            of_vrf(attribute)
                || matches!(
                    attribute,
                    RuleAttribute::Table(_)
                        | RuleAttribute::Priority(_)
                        | RuleAttribute::Protocol(_)
                        | RuleAttribute::SuppressPrefixLen(u32::MAX)
                        | RuleAttribute::SuppressIfGroup(u32::MAX)
                )
        })
}

/// `FIB_RULE_FIND_SADDR`: the rule looks for the source of a packet without one.
const FIND_SOURCE: u32 = 0x1_0000;

/// Whether a rule is for packets alone that have a source, a mark or an interface. `lo` is that of the
/// node's own packets.
fn is_for_others(rule: &RuleMessage) -> bool {
    let mut mask = u32::MAX;
    for attribute in &rule.attributes {
        if let RuleAttribute::FwMask(bits) = attribute {
            mask = *bits;
        }
    }
    let selects = |attribute: &RuleAttribute| match attribute {
        RuleAttribute::Source(ip) => rule.header.src_len > 0 && !ip.is_unspecified(),
        RuleAttribute::FwMark(mark) => mark & mask != 0,
        RuleAttribute::Iifname(name) => name != "lo",
        RuleAttribute::Oifname(_) => true,
        _ => false,
    };
    !rule.header.flags.contains(RuleFlags::Invert)
        && rule.header.flags.bits() & FIND_SOURCE == 0
        && rule.attributes.iter().any(selects)
}

fn is_for_the_node(rule: &RuleMessage) -> bool {
    let by_interface = |attribute: &RuleAttribute| {
        matches!(
            attribute,
            RuleAttribute::Iifname(_) | RuleAttribute::Oifname(_)
        )
    };
    let selects = rule.header.src_len > 0
        || !uplink::is_default(rule.header.dst_len)
        || rule.attributes.iter().any(by_interface);
    // One that is inverted is for all but those.
    !selects || rule.header.flags.contains(RuleFlags::Invert)
}

/// The links directly below one: its parent in this namespace, its ports, and for a tunnel the link
/// that its packets leave through.
fn lowers(socket: &mut Socket, links: &mut Links, upper: &Link) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if let (Some(parent), None) = (upper.parent, upper.parent_netns)
        && parent != upper.index
    {
        found.extend(links.name(socket, parent)?);
    }
    for below in below_tunnel(socket, upper)? {
        found.extend(links.name(socket, below)?);
    }
    if has_ports(upper) {
        for port in link::ports(socket, upper.index)? {
            found.push(links.add(port));
        }
    }
    Ok(found)
}

/// `IFLA_VXLAN_LINK` (`include/uapi/linux/if_link.h`)
const IFLA_VXLAN_LINK: u16 = 3;

/// The attributes of a tunnel that have the address of its other end: `IFLA_VXLAN_GROUP` and
/// `_GROUP6`, `IFLA_GENEVE_REMOTE` and `_REMOTE6`, `IFLA_GRE_REMOTE`, `IFLA_IPTUN_REMOTE`. The link
/// of the last two is their parent.
fn remote_attributes(kind: &str) -> &'static [u16] {
    match kind {
        "vxlan" => &[2, 16],
        "geneve" => &[2, 7],
        "gre" | "gretap" | "erspan" | "ip6gre" | "ip6gretap" => &[7],
        "ipip" | "sit" | "ip6tnl" => &[3],
        _ => &[],
    }
}

/// The links that a tunnel sends through: the one it is bound to, and the one that its other end is
/// reached by.
fn below_tunnel(socket: &mut Socket, tunnel: &Link) -> Result<Vec<u32>> {
    let kind = tunnel.kind.as_ref().map(ToString::to_string);
    let kind = kind.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    if kind == "vxlan" {
        let bound = tunnel.info.get(&IFLA_VXLAN_LINK);
        let bound = bound.and_then(|value| attribute::number(value));
        found.extend(bound.filter(|index| *index != 0));
    }
    for remote in remotes(kind, &tunnel.info) {
        found.extend(way_to(socket, remote)?);
    }
    found.retain(|index| *index != tunnel.index);
    Ok(found)
}

/// Pure.
fn remotes(kind: &str, info: &BTreeMap<u16, Vec<u8>>) -> Vec<IpAddr> {
    let values = remote_attributes(kind).iter().filter_map(|a| info.get(a));
    let address = |value: &Vec<u8>| {
        let four = <[u8; 4]>::try_from(value.as_slice()).map(IpAddr::from);
        let sixteen = <[u8; 16]>::try_from(value.as_slice()).map(IpAddr::from);
        four.or(sixteen).ok().filter(|ip| !ip.is_unspecified())
    };
    values.filter_map(address).collect()
}

/// Whether links of this kind have others as ports. Hardware, VLANs and their like have none.
fn has_ports(link: &Link) -> bool {
    !matches!(
        link.kind,
        None | Some(
            InfoKind::Vlan
                | InfoKind::MacVlan
                | InfoKind::IpVlan
                | InfoKind::Veth
                | InfoKind::Vxlan
                | InfoKind::Dummy
        )
    )
}

/// Indexes of the links that a route leaves through. Of one with a nexthop object the kernel
/// reports them only where `nexthop_compat_mode` is set (`fib_dump_info()`).
fn interfaces_of(socket: &mut Socket, message: &RouteMessage) -> Result<Vec<u32>> {
    let mut indexes = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => indexes.push(*index),
            RouteAttribute::MultiPath(hops) => {
                indexes.extend(hops.iter().map(|hop| hop.interface_index));
            }
            RouteAttribute::NhId(id) => indexes.extend(nexthop::links(socket, *id)?),
            _ => {}
        }
    }
    Ok(indexes)
}

/// The link that the kernel would send through to an address.
fn way_to(socket: &mut Socket, remote: IpAddr) -> Result<Option<u32>> {
    let route = route::get(socket, remote)?;
    let mut attributes = route.iter().flat_map(|route| &route.attributes);
    Ok(attributes.find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_rails_and_pods_are_not_the_nodes_way_out() {
        let rule = |change: &dyn Fn(&mut RuleMessage)| {
            let mut rule = RuleMessage::default();
            change(&mut rule);
            is_for_the_node(&rule)
        };
        assert!(rule(&|_| {}));
        assert!(rule(&|r| r.attributes.push(RuleAttribute::FwMark(7))));
        assert!(!rule(&|r| r.header.src_len = 32));
        assert!(rule(&|r| {
            r.header.src_len = 32;
            r.header.flags = RuleFlags::Invert;
        }));
        assert!(!rule(&|r| r.header.dst_len = 16));
        assert!(!rule(&|r| r
            .attributes
            .push(RuleAttribute::Iifname("a".into()))));
        assert!(!rule(&|r| r
            .attributes
            .push(RuleAttribute::Oifname("a".into()))));
    }

    #[test]
    fn a_lookup_stands_for_the_main_table_unless_a_rule_may_lead_elsewhere() {
        let rule = |table: u8, attributes: Vec<RuleAttribute>| {
            let mut rule = RuleMessage::default();
            rule.header.family = AddressFamily::Inet;
            rule.header.action = RuleAction::ToTable;
            rule.header.table = table;
            rule.attributes = attributes;
            rule
        };
        let kernels = |more: Option<RuleMessage>| {
            let unset = || vec![RuleAttribute::SuppressPrefixLen(u32::MAX)];
            let mut rules = vec![rule(255, unset()), rule(254, unset()), rule(253, unset())];
            rules.extend(more);
            leads_to_main(&rules, AddressFamily::Inet)
        };
        assert!(kernels(None));
        assert!(!leads_to_main(
            &[rule(255, Vec::new())],
            AddressFamily::Inet
        ));
        let mut of_rail = rule(100, vec![RuleAttribute::Source([10, 9, 0, 1].into())]);
        of_rail.header.src_len = 32;
        assert!(kernels(Some(of_rail.clone())));
        of_rail.header.flags = RuleFlags::Invert;
        assert!(!kernels(Some(of_rail)));
        assert!(kernels(Some(rule(100, vec![RuleAttribute::FwMark(7)]))));
        assert!(kernels(Some(rule(0, vec![RuleAttribute::L3MDev(true)]))));
        let leaves = RuleAttribute::Oifname("nic0".into());
        assert!(kernels(Some(rule(100, vec![leaves]))));
        for attributes in [
            vec![],
            vec![RuleAttribute::Iifname("lo".into())],
            vec![RuleAttribute::FwMark(1), RuleAttribute::FwMask(2)],
        ] {
            assert!(!kernels(Some(rule(100, attributes))));
        }
        let suppressed = vec![RuleAttribute::SuppressPrefixLen(0)];
        assert!(!kernels(Some(rule(254, suppressed))));
        let mut refusing = rule(254, Vec::new());
        refusing.header.action = RuleAction::Unreachable;
        assert!(!kernels(Some(refusing)));
    }

    #[test]
    fn each_eighth_of_the_address_space_is_asked_about() {
        for (family, of_family) in [(AddressFamily::Inet, 4), (AddressFamily::Inet6, 16)] {
            for eighth in 0..8 {
                for address in addresses_in(family, eighth) {
                    let bytes = match address {
                        IpAddr::V4(ip) => ip.octets().to_vec(),
                        IpAddr::V6(ip) => ip.octets().to_vec(),
                    };
                    assert_eq!((bytes.len(), bytes[0] >> 5), (of_family, eighth));
                    assert!(!address.is_loopback() && !address.is_multicast());
                }
            }
        }
    }

    #[test]
    fn the_far_end_of_a_tunnel_is_read_by_kind() {
        let six: Ipv6Addr = "fd00::1".parse().unwrap();
        let info = BTreeMap::from([
            (2, vec![10, 0, 0, 1]),
            (3, vec![0; 4]),
            (7, six.octets().to_vec()),
            (16, vec![0; 16]),
        ]);
        let four = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(remotes("vxlan", &info), [four]);
        assert_eq!(remotes("geneve", &info), [four, IpAddr::V6(six)]);
        assert_eq!(remotes("ip6gre", &info), [IpAddr::V6(six)]);
        assert!(remotes("ipip", &info).is_empty(), "any other end");
        assert!(remotes("vlan", &info).is_empty());
    }
}
