//! Creating a link on another one.

use std::hash::{BuildHasher, Hasher, RandomState};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoMacVlan, LinkAttribute, LinkInfo, MacVlanMode,
};

use super::{By, IFLA_IFNAME, Link, RTM_DELLINK, RTM_NEWLINK, get, message, named};
use crate::{Result, Socket};

/// A child to be made.
#[derive(Clone, Debug)]
pub struct NewLink<'a> {
    pub name: &'a str,
    /// In the namespace of the socket.
    pub index: u32,
    /// As [`LinkInfo::Kind`] has it.
    pub kind: &'static str,
    /// Kind and options.
    pub info: Vec<LinkInfo>,
    /// Index of the link that it is on.
    pub parent: u32,
    /// The number by which the socket's namespace knows the parent's; none when they are one.
    pub parent_netns: Option<i32>,
    /// MTU in bytes; none for the parent's.
    pub mtu: Option<u32>,
    /// Hardware address; none for one of the kernel's making.
    pub mac: Option<Vec<u8>>,
}

fn random() -> [u8; 8] {
    RandomState::new().build_hasher().finish().to_ne_bytes()
}

/// An index from 2^20 upwards. The kernel gives small ones, so that hardly a link has it.
pub fn random_index() -> u32 {
    let [a, b, c, d, ..] = random();
    u32::from_ne_bytes([a, b, c, d]) & 0x7fff_ffff | 1 << 20
}

/// A locally administered MAC address, not of a group (IEEE 802).
pub fn random_mac() -> [u8; 6] {
    let [a, b, c, d, e, f, ..] = random();
    [a & 0xfc | 0x02, b, c, d, e, f]
}

/// Creates a child and returns it as it is then; none when it is gone already.
///
/// Made from a socket inside the namespace it is to be in, it has its final name at once and
/// meets no netdev of the host that has that name.
///
/// # Errors
/// The kernel's refusal: EEXIST when the name or the index is taken, EBUSY when the parent is in other
/// use.
pub fn create(socket: &mut Socket, new: &NewLink<'_>) -> Result<Option<Link>> {
    let name = new.name.as_bytes();
    let mut attributes = vec![named(IFLA_IFNAME, name), LinkAttribute::Link(new.parent)];
    attributes.extend(new.parent_netns.map(LinkAttribute::LinkNetNsId));
    attributes.extend(new.mtu.map(LinkAttribute::Mtu));
    attributes.extend(new.mac.clone().map(LinkAttribute::Address));
    attributes.push(LinkAttribute::LinkInfo(new.info.clone()));
    let message = message(new.index, attributes);
    let what = format_args!("create {} {}", new.kind, new.name);
    let flags = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO;
    // Kernels before 6.2 do not echo the new link.
    match socket.ask(what, RTM_NEWLINK, flags, &message, Link::parse)? {
        None => get(socket, By::Name(name)),
        link => Ok(link),
    }
}

/// Whether an Ethernet link of the socket's namespace carries a macvlan, an ipvlan or a `macsec` link, in
/// whichever namespace that is, up or down. A VLAN does not count.
///
/// Asks for a macvlan of mode passthru, which a link can have alone: EINVAL beside another macvlan
/// (`macvlan_common_newlink()`), EBUSY where another kind has the link's handler of received frames
/// (`netdev_rx_handler_register()`). On a link without a child the kernel refuses the name, which it
/// looks at last (`register_netdevice()`). So nothing is made, and nobody is notified.
///
/// # Errors
/// The kernel's refusal: EOPNOTSUPP without macvlan.
pub fn carries_child(socket: &mut Socket, link: &Link) -> Result<bool> {
    // With that of a link the kernel would answer as for a link without a child.
    let unused = random_index();
    let mode = vec![InfoMacVlan::Mode(MacVlanMode::Passthrough)];
    let passthru = vec![
        LinkInfo::Kind(InfoKind::MacVlan),
        LinkInfo::Data(InfoData::MacVlan(mode)),
    ];
    let attributes = vec![
        named(IFLA_IFNAME, b"lo"),
        LinkAttribute::Link(link.index),
        LinkAttribute::LinkInfo(passthru),
    ];
    let message = message(unused, attributes);
    let what = format_args!("ask whether {} has a child", link.name);
    match socket.request(what, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &message) {
        Err(e) if e.is(libc::EEXIST) => Ok(false),
        Err(e) if e.is(libc::EINVAL) => Ok(true),
        // A port of a bridge or bond has that handler without a child.
        Err(e) if e.is(libc::EBUSY) => Ok(link.controller.is_none()),
        Err(e) => Err(e),
        // No link is called lo.
        Ok(()) => {
            let made = super::message(unused, Vec::new());
            let deleted = socket.request("delete lo", RTM_DELLINK, 0, &made);
            deleted.map(|()| false)
        }
    }
}
