//! Which netdevs of the host the node itself needs, by the one definition of [`hca::uplink`] and
//! netlink's facts. Only reads.

use std::collections::BTreeMap;
use std::net::IpAddr;

use attachment::netdev::replay;
use hca::uplink::{self, Network, Why};
use netlink::{
    Socket, address,
    link::{self, By, Link},
    route,
};
use netlink_packet_route::{
    AddressFamily,
    address::AddressAttribute,
    link::InfoKind,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};

use crate::error::Error;

/// Why taking `asked` would cut the node off; none when it would not. `node_addresses` are those the
/// node is known by, beside the source addresses towards the outside.
///
/// # Errors
/// The kernel's refusal.
pub(super) fn of(
    socket: &mut Socket,
    asked: &Link,
    node_addresses: &[IpAddr],
) -> Result<Option<Why>, Error> {
    let mut facts = Network {
        node_addresses: node_addresses.to_vec(),
        ..Network::default()
    };
    let mut names = Names::default();
    for family in route::FAMILIES {
        let mut indexes = Vec::new();
        for default in route::list_table(socket, family, replay::MAIN)? {
            if replay::is_default(&default) && default.header.kind == RouteType::Unicast {
                indexes.extend(interfaces_of(&default));
            }
        }
        let way = way_out(socket, family)?;
        indexes.extend(way.index);
        facts.node_addresses.extend(way.source);
        for index in indexes {
            facts.ways_out.extend(names.of(socket, index)?);
        }
    }
    for message in address::list_all(socket)? {
        for attribute in &message.attributes {
            if let AddressAttribute::Local(ip) | AddressAttribute::Address(ip) = attribute
                && facts.node_addresses.contains(ip)
                && let Some(name) = names.of(socket, message.header.index)?
            {
                facts.addresses.push((name, *ip));
            }
        }
    }
    let uplinks = uplink::uplinks(&facts, |name| match names.index(name) {
        Some(index) => lowers(socket, &mut names, index),
        None => Ok(Vec::new()),
    })?;
    Ok(names
        .known
        .get(&asked.index)
        .and_then(|name| uplinks.get(name).cloned()))
}

/// Names of links by their indexes, as far as they were asked for.
#[derive(Default)]
struct Names {
    known: BTreeMap<u32, String>,
}

impl Names {
    fn of(&mut self, socket: &mut Socket, index: u32) -> Result<Option<String>, Error> {
        if let Some(name) = self.known.get(&index) {
            return Ok(Some(name.clone()));
        }
        let Some(link) = link::get(socket, By::Index(index))? else {
            // Gone since it was listed.
            return Ok(None);
        };
        Ok(Some(self.add(&link)))
    }

    fn add(&mut self, link: &Link) -> String {
        let name = link.name.to_string();
        self.known.insert(link.index, name.clone());
        name
    }

    fn index(&self, name: &str) -> Option<u32> {
        let mut all = self.known.iter();
        all.find_map(|(index, known)| (known == name).then_some(*index))
    }
}

/// The links directly below one: its parent in this namespace, and its ports.
fn lowers(socket: &mut Socket, names: &mut Names, index: u32) -> Result<Vec<String>, Error> {
    let Some(upper) = link::get(socket, By::Index(index))? else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    if let (Some(parent), None) = (upper.parent, upper.parent_netns)
        && parent != index
    {
        found.extend(names.of(socket, parent)?);
    }
    if has_ports(&upper) {
        for port in link::list(socket)? {
            if port.controller == Some(index) {
                found.push(names.add(&port));
            }
        }
    }
    Ok(found)
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

/// Indexes of the links that a route leaves through.
fn interfaces_of(message: &RouteMessage) -> Vec<u32> {
    let attributes = message.attributes.iter();
    attributes
        .flat_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => vec![*index],
            RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
            _ => Vec::new(),
        })
        .collect()
}

/// How the kernel would leave the node.
#[derive(Default)]
struct WayOut {
    index: Option<u32>,
    source: Option<IpAddr>,
}

/// The kernel's answer for addresses of documentation (RFC 5737, RFC 3849).
fn way_out(socket: &mut Socket, family: AddressFamily) -> Result<WayOut, Error> {
    let (outside, bits): (IpAddr, u8) = match family {
        AddressFamily::Inet => ([192, 0, 2, 1].into(), 32),
        _ => ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(), 128),
    };
    let mut query = RouteMessage::default();
    query.header.address_family = family;
    query.header.destination_prefix_length = bits;
    query
        .attributes
        .push(RouteAttribute::Destination(outside.into()));
    let mut way = WayOut::default();
    for attribute in route::get(socket, &query)?
        .iter()
        .flat_map(|r| &r.attributes)
    {
        match attribute {
            RouteAttribute::Oif(index) => way.index = Some(*index),
            RouteAttribute::PrefSource(RouteAddress::Inet(source)) => {
                way.source = Some((*source).into());
            }
            RouteAttribute::PrefSource(RouteAddress::Inet6(source)) => {
                way.source = Some((*source).into());
            }
            _ => {}
        }
    }
    // Unreachable routes have no interface, and their source says nothing.
    if way.index.is_none() {
        way.source = None;
    }
    Ok(way)
}
