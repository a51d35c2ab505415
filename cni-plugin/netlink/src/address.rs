//! Addresses of links.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};

use super::{
    Result, Socket,
    socket::{self, on_errno},
};

/// `sizeof(struct ifaddrmsg)`
const HEADER_BYTES: usize = 8;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;

/// All addresses of a link, both families, in the kernel's order; of all links for the index 0.
pub fn list(socket: &mut Socket, index: u32) -> Result<Vec<AddressMessage>> {
    let mut filter = AddressMessage::default();
    filter.header.index = index;
    socket.dump("list addresses", RTM_GETADDR, &filter, |payload| {
        socket::parse_leniently::<AddressMessage>(payload, HEADER_BYTES).map(Some)
    })
}

/// An interface's own address, not its peer's: that stands in `IFA_ADDRESS`, its own then in `IFA_LOCAL`.
pub fn own(message: &AddressMessage) -> Option<IpAddr> {
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(own) => return Some(*own),
            AddressAttribute::Address(address) => found = Some(*address),
            _ => {}
        }
    }
    found
}

/// Adds an address.
///
/// # Errors
/// The kernel's refusal: EEXIST when the link has it.
pub fn add(socket: &mut Socket, what: &str, address: &AddressMessage) -> Result<()> {
    socket.request(what, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, address)
}

/// Adds an address, or gives the one that is there the same flags and lifetimes.
pub fn replace(socket: &mut Socket, what: &str, address: &AddressMessage) -> Result<()> {
    socket.request(what, RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, address)
}

/// Removes an address; one that is not there is removed.
pub fn delete(socket: &mut Socket, what: &str, address: &AddressMessage) -> Result<()> {
    let deleted = socket.request(what, RTM_DELADDR, 0, address);
    on_errno(deleted, &[libc::EADDRNOTAVAIL], ())
}
