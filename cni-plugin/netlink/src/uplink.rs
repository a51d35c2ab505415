//! Which netdevs of the host the node itself needs, by the one definition of [`hca::uplink`] and
//! netlink's facts. Only reads.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hca::uplink::{self, DefaultRoute, Network, Why};
use netlink_packet_route::{
    AddressFamily,
    link::InfoKind,
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteType},
    rule::{RuleAttribute, RuleFlags, RuleMessage},
};

use super::{
    Result, Socket, address,
    link::{self, By, Link},
    nexthop, route, rule,
};

/// All addresses of the namespace, each with the index of its link. A peer's is not among them.
pub fn addresses(socket: &mut Socket) -> Result<Vec<(u32, IpAddr)>> {
    let all = address::list(socket, 0)?.into_iter();
    let own = all.filter_map(|message| Some((message.header.index, address::own(&message)?)));
    Ok(own.collect())
}

/// The netdevs by name that would cut the node off if they were taken, and why. `socket` is of the
/// namespace that the thread is in. `node_addresses` are those the node is known by; `addresses` are
/// [`addresses`]. `asked` is a link that need not be read again.
pub fn uplinks(
    socket: &mut Socket,
    asked: Option<&Link>,
    node_addresses: &[IpAddr],
    addresses: &[(u32, IpAddr)],
) -> Result<BTreeMap<String, Why>> {
    let mut links = Links::default();
    if let Some(link) = asked {
        links.add(link.clone());
    }
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
        for message in default_routes(socket, family, &tables(&rules, family))? {
            let route = default_route(socket, &mut links, &message)?;
            facts.defaults.push(route);
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
pub fn default_route_link(socket: &mut Socket) -> Result<Option<Link>> {
    for family in route::FAMILIES {
        let mut links = Links::default();
        let mut routes = Vec::new();
        for message in default_routes(socket, family, &BTreeSet::from([route::MAIN]))? {
            routes.push(default_route(socket, &mut links, &message)?);
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

/// The default routes of tables that take packets. They are listed: a lookup of
/// the kernel shows neither routes for a source alone, nor those of a second link with the same metric,
/// nor one whose cable is out.
///
/// Of IPv4's tables, which may have very many routes, only the first routes are read.
fn default_routes(
    socket: &mut Socket,
    family: AddressFamily,
    tables: &BTreeSet<u32>,
) -> Result<Vec<RouteMessage>> {
    let mut found = Vec::new();
    for table in tables {
        found.extend(match family {
            AddressFamily::Inet => route::list_first(socket, *table)?,
            _ => route::list_table(socket, family, *table, uplink::is_default)?,
        });
    }
    found.retain(|RouteMessage { header, .. }| {
        header.kind == RouteType::Unicast && uplink::is_default(header.destination_prefix_length)
    });
    Ok(found)
}

/// Facts of a route of [`default_routes`].
fn default_route(
    socket: &mut Socket,
    links: &mut Links,
    message: &RouteMessage,
) -> Result<DefaultRoute> {
    let header = &message.header;
    let everywhere: IpAddr = match header.address_family {
        AddressFamily::Inet6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    let destination = route::destination(message).unwrap_or(everywhere);
    let mut found = DefaultRoute {
        netdevs: Vec::new(),
        destination: (destination, header.destination_prefix_length),
        table: route::table_of(message),
        metric: 0,
        source: None,
        advertised: header.protocol == RouteProtocol::Ra,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Priority(metric) => found.metric = *metric,
            RouteAttribute::PrefSource(source) => found.source = route::ip(source),
            _ => {}
        }
    }
    for index in interfaces_of(socket, message)? {
        found.netdevs.extend(links.name(socket, index)?);
    }
    Ok(found)
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
const TABLES_WITHOUT_DEFAULT: [u32; 2] = [0, 255];

/// The tables in which the node's own packets are looked up whatever their source: the main one, and
/// those of rules that select by nothing, or by mark, user or protocol. Rules with a source, a
/// destination or an interface are source routing of rails and of pods. Pure.
fn tables(rules: &[RuleMessage], family: AddressFamily) -> BTreeSet<u32> {
    let of_family = rules.iter().filter(|rule| rule.header.family == family);
    let all = of_family.filter(|rule| is_for_the_node(rule));
    let mut tables: BTreeSet<u32> = all.map(rule::table_of).collect();
    tables.retain(|table| !TABLES_WITHOUT_DEFAULT.contains(table));
    tables.insert(route::MAIN);
    tables
}

fn is_for_the_node(rule: &RuleMessage) -> bool {
    let by_interface = |attribute: &RuleAttribute| match attribute {
        // The interface of the node's own packets.
        RuleAttribute::Iifname(name) => name != "lo",
        RuleAttribute::Oifname(_) => true,
        _ => false,
    };
    let selects = rule.header.src_len > 0
        || !uplink::is_default(rule.header.dst_len)
        || rule.attributes.iter().any(by_interface);
    // One that is inverted is for all but those.
    !selects || rule.header.flags.contains(RuleFlags::Invert)
}

/// The links directly below one: its parent in this namespace, and its ports.
fn lowers(socket: &mut Socket, links: &mut Links, upper: &Link) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if let (Some(parent), None) = (upper.parent, upper.parent_netns)
        && parent != upper.index
    {
        found.extend(links.name(socket, parent)?);
    }
    if has_ports(upper) {
        for port in link::ports(socket, upper.index)? {
            found.push(links.add(port));
        }
    }
    Ok(found)
}

/// Whether links of this kind have others as ports. Hardware, VLANs and their like have none.
fn has_ports(link: &Link) -> bool {
    use InfoKind::{Dummy, IpVlan, MacVlan, Veth, Vlan, Vxlan};
    let kind = link.kind.as_ref();
    kind.is_some_and(|kind| !matches!(kind, Vlan | MacVlan | IpVlan | Veth | Vxlan | Dummy))
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

#[cfg(test)]
mod tests {
    use netlink_packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
    };

    use super::*;
    use crate::fake::Kernel;

    #[test]
    fn a_peers_address_is_not_the_nodes_own() {
        let kernel = Kernel::default();
        let host = kernel.namespace("host");
        let [own, peer]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let mut message = AddressMessage::default();
        message.header.index = 1;
        message.attributes = vec![
            AddressAttribute::Address(peer),
            AddressAttribute::Local(own),
        ];
        kernel.add("host", &RouteNetlinkMessage::NewAddress(message));
        let mut socket = host.socket(&host).unwrap();
        assert_eq!(addresses(&mut socket).unwrap(), [(1, own)]);
    }

    #[test]
    fn rules_of_rails_and_pods_lead_to_no_uplink() {
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
        assert!(rule(&|r| r
            .attributes
            .push(RuleAttribute::Iifname("lo".into()))));
        assert!(!rule(&|r| r
            .attributes
            .push(RuleAttribute::Oifname("a".into()))));
    }
}
