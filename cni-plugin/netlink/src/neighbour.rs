//! Permanent neighbours, proxies (addresses answered for on behalf of others), and the addresses of the
//! link layer that a link receives.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily,
    neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
};

use super::{Result, Socket, socket};

/// `sizeof(struct ndmsg)`
const HEADER_BYTES: usize = 12;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

/// The permanent neighbours of a link, both families.
pub fn list_permanent(socket: &mut Socket, link: u32) -> Result<Vec<NeighbourMessage>> {
    let mut filter = NeighbourMessage::default();
    filter.attributes.push(NeighbourAttribute::IfIndex(link));
    socket.dump("list neighbours", RTM_GETNEIGH, &filter, |payload| {
        let neighbour = socket::parse_leniently::<NeighbourMessage>(payload, HEADER_BYTES)?;
        let kept =
            neighbour.header.ifindex == link && neighbour.header.state == NeighbourState::Permanent;
        Ok(kept.then_some(neighbour))
    })
}

/// The proxies of a link, both families.
pub fn list_proxies(socket: &mut Socket, link: u32) -> Result<Vec<NeighbourMessage>> {
    let mut filter = NeighbourMessage::default();
    filter.header.flags = NeighbourFlags::Proxy;
    filter.attributes.push(NeighbourAttribute::IfIndex(link));
    socket.dump("list proxies", RTM_GETNEIGH, &filter, |payload| {
        let neighbour = socket::parse_leniently::<NeighbourMessage>(payload, HEADER_BYTES)?;
        let kept = neighbour.header.ifindex == link
            && neighbour.header.flags.contains(NeighbourFlags::Proxy);
        Ok(kept.then_some(neighbour))
    })
}

/// The unicast addresses that a link receives beside its own (`ndo_dflt_fdb_dump()`): those of
/// macvlans and ipvlans on it that are up, in whatever namespace, and those that somebody added.
pub fn list_unicast(socket: &mut Socket, link: u32) -> Result<Vec<Vec<u8>>> {
    let mut filter = NeighbourMessage::default();
    filter.header.family = AddressFamily::Bridge;
    filter.attributes.push(NeighbourAttribute::IfIndex(link));
    socket.dump(
        "list addresses received",
        RTM_GETNEIGH,
        &filter,
        |payload| {
            let entry = socket::parse_leniently::<NeighbourMessage>(payload, HEADER_BYTES)?;
            let of_link =
                entry.header.ifindex == link && entry.header.flags.contains(NeighbourFlags::Own);
            let address = entry
                .attributes
                .into_iter()
                .find_map(|attribute| match attribute {
                    NeighbourAttribute::LinkLayerAddress(address) => Some(address),
                    _ => None,
                });
            // IEEE 802: the lowest bit of the first byte makes it an address of several.
            let is_unicast =
                |address: &Vec<u8>| address.first().is_some_and(|first| first & 1 == 0);
            Ok(address.filter(|address| of_link && is_unicast(address)))
        },
    )
}

/// Adds a neighbour, or corrects the one that is there.
pub fn replace(socket: &mut Socket, what: &str, neighbour: &NeighbourMessage) -> Result<()> {
    socket.request(what, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, neighbour)
}
