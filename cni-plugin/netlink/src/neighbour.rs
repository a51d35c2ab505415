//! Permanent neighbours, and the addresses of the link layer that a link receives.

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
    let mut all = list(socket, "list neighbours", link, AddressFamily::Unspec)?;
    all.retain(|one| one.header.state == NeighbourState::Permanent);
    Ok(all)
}

fn list(
    socket: &mut Socket,
    what: &str,
    link: u32,
    family: AddressFamily,
) -> Result<Vec<NeighbourMessage>> {
    let mut filter = NeighbourMessage::default();
    filter.header.family = family;
    filter.attributes.push(NeighbourAttribute::IfIndex(link));
    socket.dump(what, RTM_GETNEIGH, &filter, |payload| {
        let entry = socket::parse_leniently::<NeighbourMessage>(payload, HEADER_BYTES)?;
        Ok(Some(entry).filter(|entry| entry.header.ifindex == link))
    })
}

/// The unicast addresses that a link receives beside its own (`ndo_dflt_fdb_dump()`): those of
/// macvlans and ipvlans on it that are up, in whatever namespace, and those that somebody added.
pub fn list_unicast(socket: &mut Socket, link: u32) -> Result<Vec<Vec<u8>>> {
    let all = list(
        socket,
        "list addresses received",
        link,
        AddressFamily::Bridge,
    )?;
    let is_own = |entry: &NeighbourMessage| entry.header.flags.contains(NeighbourFlags::Own);
    let addresses = all.into_iter().filter(is_own).filter_map(|entry| {
        let mut attributes = entry.attributes.into_iter();
        attributes.find_map(|attribute| match attribute {
            // IEEE 802: the lowest bit of the first byte makes it an address of several.
            NeighbourAttribute::LinkLayerAddress(address) if address.first()? & 1 == 0 => {
                Some(address)
            }
            _ => None,
        })
    });
    Ok(addresses.collect())
}

/// Adds a neighbour, or corrects the one that is there.
pub fn replace(socket: &mut Socket, what: &str, neighbour: &NeighbourMessage) -> Result<()> {
    socket.request(what, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, neighbour)
}
