//! Permanent neighbours, and proxies: addresses answered for on behalf of others.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};

use super::{Result, Socket, socket};

/// `sizeof(struct ndmsg)`
const HEADER_BYTES: usize = 12;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

/// The permanent neighbours of a link, both families.
///
/// # Errors
/// The kernel's refusal.
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
///
/// # Errors
/// The kernel's refusal.
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

/// Adds a neighbour, or corrects the one that is there.
///
/// # Errors
/// The kernel's refusal.
pub fn replace(socket: &mut Socket, what: &str, neighbour: &NeighbourMessage) -> Result<()> {
    socket.request(what, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, neighbour)
}
