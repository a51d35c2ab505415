//! Addresses, routes, rules and neighbours as a person writes them, for messages and for the
//! reader of a journal.

use netlink::{address, route, rule};
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia},
    rule::{RuleAttribute, RuleMessage},
};

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
    let mut to = match message.header.address_family {
        AddressFamily::Inet6 => "default (IPv6)".to_owned(),
        _ => "default".to_owned(),
    };
    let (mut via, mut from, mut metric) = (String::new(), String::new(), String::new());
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                let length = message.header.destination_prefix_length;
                to = format!("{}/{length}", route_address(address));
            }
            RouteAttribute::Gateway(gateway) => via = format!(" via {}", route_address(gateway)),
            RouteAttribute::Via(RouteVia::Inet(gateway)) => via = format!(" via {gateway}"),
            RouteAttribute::Via(RouteVia::Inet6(gateway)) => via = format!(" via {gateway}"),
            RouteAttribute::MultiPath(hops) => via = format!(" over {} next hops", hops.len()),
            RouteAttribute::PrefSource(source) => from = format!(" src {}", route_address(source)),
            RouteAttribute::Priority(number) => metric = format!(" metric {number}"),
            _ => {}
        }
    }
    let table = match route::table_of(message) {
        254 => String::new(),
        table => format!(" table {table}"),
    };
    format!("{to}{via}{from}{metric}{table}")
}

fn route_address(address: &RouteAddress) -> String {
    match address {
        RouteAddress::Inet(address) => address.to_string(),
        RouteAddress::Inet6(address) => address.to_string(),
        other => format!("{other:?}"),
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
    let mut at = String::new();
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                text = address.to_string();
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                text = address.to_string();
            }
            NeighbourAttribute::LinkLayerAddress(mac) => {
                at = format!(" at {}", hca::MacAddress::new(mac.as_slice()));
            }
            _ => {}
        }
    }
    text + &at
}
