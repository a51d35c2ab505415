//! Routes.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE};
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteMessage},
};

use super::{
    Result, Socket,
    socket::{self, on_errno},
};

/// `sizeof(struct rtmsg)`
const HEADER_BYTES: usize = 12;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;

pub const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

/// All routes of a family that leave through a link, in every table, in the kernel's order.
pub fn list(socket: &mut Socket, family: AddressFamily, link: u32) -> Result<Vec<RouteMessage>> {
    dump(socket, family, RouteAttribute::Oif(link), |_| true)
}

/// The routes of a family in one table whose destination has a prefix length that is `wanted`. The
/// others, of which there may be very many, are not parsed.
pub fn list_table(
    socket: &mut Socket,
    family: AddressFamily,
    table: u32,
    wanted: impl Fn(u8) -> bool,
) -> Result<Vec<RouteMessage>> {
    let listed = dump(socket, family, RouteAttribute::Table(table), wanted);
    // A table that nothing was ever put into does not exist.
    on_errno(listed, &[libc::ENOENT], Vec::new())
}

/// The IPv4 routes to 0.0.0.0, with any prefix length, in one table of the socket's namespace, which the
/// thread must be in. They come first in the kernel's list, which is in the order of destinations (`fib_table_dump()`,
/// `net/ipv4/fib_trie.c`), so of the others only the first few are read.
pub fn list_first(socket: &mut Socket, table: u32) -> Result<Vec<RouteMessage>> {
    let query = query(AddressFamily::Inet, RouteAttribute::Table(table));
    let what = "list first routes";
    let listed = socket.dump_start(what, RTM_GETROUTE, &query, |payload| {
        let route = socket::parse_leniently::<RouteMessage>(payload, HEADER_BYTES)?;
        let is_first = destination(&route).is_none_or(|to| to.is_unspecified());
        Ok(is_first.then_some(route))
    });
    on_errno(listed, &[libc::ENOENT], Vec::new())
}

/// `RT_TABLE_MAIN`
pub const MAIN: u32 = 254;

/// `None` if it is not an IP address.
pub fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

/// Where a route leads; none for everywhere.
pub fn destination(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(to) => ip(to),
        _ => None,
    })
}

/// The table of a route.
pub fn table_of(route: &RouteMessage) -> u32 {
    let table = route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    table.unwrap_or(route.header.table.into())
}

fn query(family: AddressFamily, filter: RouteAttribute) -> RouteMessage {
    let mut query = RouteMessage::default();
    query.header.address_family = family;
    query.attributes.push(filter);
    query
}

fn dump(
    socket: &mut Socket,
    family: AddressFamily,
    filter: RouteAttribute,
    wanted: impl Fn(u8) -> bool,
) -> Result<Vec<RouteMessage>> {
    let query = query(family, filter);
    socket.dump("list routes", RTM_GETROUTE, &query, |payload| {
        // `rtm_dst_len`, the second byte of `struct rtmsg`.
        match payload.get(1).is_some_and(|length| wanted(*length)) {
            true => socket::parse_leniently::<RouteMessage>(payload, HEADER_BYTES).map(Some),
            false => Ok(None),
        }
    })
}

/// Adds a route; beside one to the same destination it becomes another next hop or a later
/// choice, as `ip route append` does. The very same route that is there is added.
pub fn append(socket: &mut Socket, what: &str, route: &RouteMessage) -> Result<()> {
    let added = socket.request(what, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_APPEND, route);
    on_errno(added, &[libc::EEXIST], ())
}
