//! Addresses, neighbours, routes and rules, in the order in which the kernel takes them.

use netlink::{address, clock, neighbour, route, rule};
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::{AddressFamily, address::AddressMessage, route::RouteMessage};

use super::{Entries, Entry, Netdev, Restoration, Written};
use crate::netdev::{
    display, replay,
    snapshot::{Message, Snapshot, parse_hex},
};

pub const ADDRESS: &str = "address";
/// Permanent ones.
pub const NEIGHBOUR: &str = "neighbour";
/// In every table, but for those that the kernel makes.
pub const ROUTE: &str = "route";
pub const RULE: &str = "rule";

type Read = netlink::Result<Entries>;

fn messages<T: Emitable>(list: &[T], display: impl Fn(&T) -> String) -> Entries {
    let message = |one| {
        let message = Message::of(one, display(one));
        (message.text, message.message)
    };
    list.iter().map(message).collect()
}

/// All but autoconfigured ones, in an order of writes that leaves the kernel's list as it was: an IPv6
/// address goes before those of its scope (`ipv6_link_dev_addr()`), an IPv4 one behind.
pub(super) fn read_addresses(netdev: &mut Netdev<'_>) -> Read {
    let mut addresses = address::list(netdev.socket, netdev.link.index)?;
    addresses.retain(|address| !replay::is_autoconfigured(address));
    let is_v6 = |address: &AddressMessage| address.header.family == AddressFamily::Inet6;
    let v6 = addresses.extract_if(.., |address| is_v6(address));
    let v6: Vec<AddressMessage> = v6.collect();
    addresses.extend(v6.into_iter().rev());
    Ok(messages(&addresses, display::address))
}

pub(super) fn read_neighbours(netdev: &mut Netdev<'_>) -> Read {
    let neighbours = neighbour::list_permanent(netdev.socket, netdev.link.index)?;
    Ok(messages(&neighbours, display::neighbour))
}

/// Those without a gateway first.
pub(super) fn read_routes(netdev: &mut Netdev<'_>) -> Read {
    let mut routes = Vec::new();
    for family in route::FAMILIES {
        routes.extend(route::list(netdev.socket, family, netdev.link.index)?);
    }
    routes.retain(|route| !replay::is_kernel_made(route));
    let table = |route: &RouteMessage| (route.header.address_family, route::table_of(route));
    netdev.tables.extend(routes.iter().map(table));
    routes.sort_by_key(replay::has_gateway);
    Ok(messages(&routes, display::route))
}

pub(super) fn read_rules(netdev: &mut Netdev<'_>) -> Read {
    let name = String::from_utf8_lossy(netdev.link.name.as_bytes());
    let mut rules = Vec::new();
    for family in route::FAMILIES {
        let tables = netdev.tables.iter().filter(|(of, _)| *of == family);
        let tables: Vec<u32> = tables.map(|(_, table)| *table).collect();
        let mut found = rule::list(netdev.socket, family)?;
        found.retain(|rule| replay::rule_concerns(rule, &name, &tables));
        rules.extend(found);
    }
    Ok(messages(&rules, display::rule))
}

pub(super) fn restore_address(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let (index, passed) = (to.netdev.link.index, passed_since(to.before)?);
    match replay::aged(&replay::address(&message(entry)?, index), passed) {
        Some(address) => address::replace(to.netdev.socket, entry.what, &address),
        None => {
            let (text, name) = (entry.name, &to.before.name);
            let over = format!("address {text} of {name} is not restored: its lifetime is over");
            to.report.notes.push(over);
            Ok(())
        }
    }
}

pub(super) fn restore_neighbour(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let neighbour = replay::neighbour(&message(entry)?, to.netdev.link.index);
    neighbour::replace(to.netdev.socket, entry.what, &neighbour)
}

pub(super) fn restore_route(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let (known, now) = (to.before.identity.index, to.netdev.link.index);
    let route = replay::route(&message(entry)?, known, now);
    route::append(to.netdev.socket, entry.what, &route)
}

pub(super) fn restore_rule(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let name = String::from_utf8_lossy(to.before.name.as_bytes());
    let rule = replay::rule(&message(entry)?, &name, &name);
    rule::add(to.netdev.socket, entry.what, &rule)
}

impl Restoration<'_> {
    /// Takes away addresses that a renaming gave another label (`inetdev_changename()`), which
    /// replacing them does not change.
    pub(super) fn remove_mislabelled(&mut self) {
        let before = self.before.state.entries(ADDRESS).iter();
        let before: Vec<AddressMessage> = before.filter_map(|(_, m)| parse_hex(m).ok()).collect();
        let now = address::list(self.netdev.socket, self.netdev.link.index);
        let now = now.unwrap_or_else(|e| {
            self.attempt(Err(e));
            Vec::new()
        });
        for now in now {
            let was = before.iter().find(|was| replay::is_same(was, &now));
            if was.is_some_and(|was| replay::label(was) != replay::label(&now)) {
                let what = format!("restore the label of {}", display::address(&now));
                let deleted = address::delete(self.netdev.socket, &what, &now);
                self.attempt(deleted);
            }
        }
    }
}

fn message<T: Parseable<[u8]>>(entry: Entry<'_>) -> netlink::Result<T> {
    parse_hex(entry.value).map_err(|_| entry.damaged())
}

/// How many seconds of its addresses' lifetimes have passed since a snapshot was taken. Those of
/// static addresses begin again: the address was in use as the node's, and what renews it on the host
/// could not.
fn passed_since(before: &Snapshot) -> netlink::Result<u64> {
    if before.static_addresses {
        return Ok(0);
    }
    let now = clock::since_boot()?.as_secs();
    Ok(now.saturating_sub(before.taken_at))
}
