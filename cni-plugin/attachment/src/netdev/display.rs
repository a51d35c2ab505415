//! Addresses, routes, rules and neighbours as a person writes them, for messages and for the
//! reader of a journal.

use netlink::{address, route, rule};
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
    route::{RouteAttribute, RouteMessage},
    rule::{RuleAttribute, RuleMessage},
};

use super::replay;

/// `10.0.0.1/24`
pub fn address(message: &AddressMessage) -> String {
    let address = address::own(message);
    match address {
        Some(address) => format!("{address}/{}", message.header.prefix_len),
        None => "an address".to_owned(),
    }
}

/// `10.1.0.0/16 via 10.0.0.1 metric 50 table 100`
pub fn route(message: &RouteMessage) -> String {
    let mut text = match (route::destination(message), message.header.address_family) {
        (Some(to), _) => format!("{to}/{}", message.header.destination_prefix_length),
        (None, AddressFamily::Inet6) => "default (IPv6)".to_owned(),
        (None, _) => "default".to_owned(),
    };
    if let Some(gateway) = replay::gateway(message) {
        text += &format!(" via {gateway}");
    }
    for attribute in &message.attributes {
        text += &match attribute {
            RouteAttribute::MultiPath(hops) => format!(" over {} next hops", hops.len()),
            RouteAttribute::PrefSource(source) => match route::ip(source) {
                Some(source) => format!(" src {source}"),
                None => continue,
            },
            RouteAttribute::Priority(number) => format!(" metric {number}"),
            _ => continue,
        };
    }
    match route::table_of(message) {
        route::MAIN => text,
        table => format!("{text} table {table}"),
    }
}

/// `100: from 10.0.0.1/32 iif eth1 lookup 101`
pub fn rule(message: &RuleMessage) -> String {
    let mut priority = 0;
    let mut text = String::new();
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::Source(from) => {
                text += &format!(" from {from}/{}", message.header.src_len);
            }
            RuleAttribute::Destination(to) => {
                text += &format!(" to {to}/{}", message.header.dst_len);
            }
            RuleAttribute::Iifname(name) => text += &format!(" iif {name}"),
            RuleAttribute::Oifname(name) => text += &format!(" oif {name}"),
            _ => {}
        }
    }
    format!("{priority}:{text} lookup {}", rule::table_of(message))
}

/// `10.0.0.2 at 02:00:00:00:00:02`
pub fn neighbour(message: &NeighbourMessage) -> String {
    let mut text = String::from("a neighbour");
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                text = address.to_string();
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                text = address.to_string();
            }
            NeighbourAttribute::LinkLayerAddress(mac) => {
                text += &format!(" at {}", hca::MacAddress::new(mac.as_slice()));
            }
            _ => {}
        }
    }
    text
}
