//! Changing, moving and deleting a link.

use std::fmt;

use netlink_packet_core::{DefaultNla, NLA_F_NESTED, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage, Prop};

use super::{
    IFLA_ALT_IFNAME, IFLA_IFALIAS, IFLA_IFNAME, IFLA_INFO_DATA, IFLA_INFO_KIND, IFLA_LINKINFO,
    IFLA_XDP, Link, RTM_DELLINK, RTM_NEWLINK, RTM_SETLINK, XdpMode, message, named,
};
use crate::{Name, Namespace, Result, Socket, attribute::Raw, socket::on_errno};

const RTM_NEWLINKPROP: u16 = 108;
const RTM_DELLINKPROP: u16 = 109;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_INET_CONF: u16 = 1;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
/// `IPV4_DEVCONF_*` of settings that have no effect when they are set but to be read later
/// (`devinet_conf_proc()` has more to do for others).
const DEVCONF: [(&str, u16); 3] = [("arp_announce", 18), ("arp_ignore", 19), ("arp_notify", 22)];
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;

/// What is to become of a link, in one request. Everything left at its default stays.
#[derive(Clone, Debug, Default)]
pub struct Change<'a> {
    /// Another namespace. The link is down afterwards, without addresses and routes.
    pub netns: Option<&'a Namespace>,
    /// The index in that namespace; by default the present one, or another where that is taken.
    pub new_index: Option<u32>,
    pub name: Option<&'a [u8]>,
    /// In bytes.
    pub mtu: Option<u32>,
    pub mac: Option<&'a [u8]>,
    /// `ifalias`; an empty one removes it.
    pub alias: Option<&'a [u8]>,
    /// The flags named in the second, set as in the first.
    pub flags: Option<(LinkFlags, LinkFlags)>,
}

impl<'a> Change<'a> {
    /// Another name, and nothing else.
    pub fn name(name: &'a [u8]) -> Self {
        Change {
            name: Some(name),
            ..Change::default()
        }
    }

    pub fn up() -> Self {
        Change {
            flags: Some((LinkFlags::Up, LinkFlags::Up)),
            ..Change::default()
        }
    }

    pub fn down() -> Self {
        Change {
            flags: Some((LinkFlags::empty(), LinkFlags::Up)),
            ..Change::default()
        }
    }
}

/// Changes a link.
///
/// # Errors
/// The kernel's refusal; the link may then be changed in part. EBUSY: the index or an index of that
/// number is taken in the new namespace.
pub fn change(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    change: &Change<'_>,
) -> Result<()> {
    let mut message = message(index, Vec::new());
    if let Some((flags, mask)) = change.flags {
        message.header.flags = flags;
        message.header.change_mask = mask;
    }
    let attributes = &mut message.attributes;
    attributes.extend(change.netns.map(|netns| LinkAttribute::NetNsFd(netns.fd())));
    let new_index = change.new_index.map(u32::cast_signed);
    attributes.extend(new_index.map(LinkAttribute::NewIfIndex));
    attributes.extend(change.name.map(|name| named(IFLA_IFNAME, name)));
    attributes.extend(change.mtu.map(LinkAttribute::Mtu));
    attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
    let alias = change
        .alias
        .map(|alias| DefaultNla::new(IFLA_IFALIAS, alias.to_vec()));
    attributes.extend(alias.map(LinkAttribute::Other));
    socket.request(what, RTM_SETLINK, 0, &message)
}

/// Gives a link these attributes.
pub fn set(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    attributes: Vec<LinkAttribute>,
) -> Result<()> {
    socket.request(what, RTM_SETLINK, 0, &message(index, attributes))
}

/// Sets an attribute that the kind of a link says of itself.
pub fn set_info(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    kind: &str,
    (attribute, value): (u16, &[u8]),
) -> Result<()> {
    let info = Raw::default()
        .with(IFLA_INFO_KIND, &Name::from(kind).to_attribute())
        .nest(IFLA_INFO_DATA, &Raw::default().with(attribute, value));
    let message = message(index, vec![nested(IFLA_LINKINFO, &info)]);
    // Without a flag that allows creation it changes the link that is there.
    socket.request(what, RTM_NEWLINK, 0, &message)
}

/// Settings of an interface that one request can carry; each is also a file below `/proc/sys/net`,
/// which costs the kernel a path of new inodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InetSettings {
    /// By `IPV4_DEVCONF_*` (`linux/ip.h`).
    ipv4: Vec<(u16, u32)>,
    /// `addr_gen_mode`.
    addr_gen_mode: Option<u8>,
}

impl InetSettings {
    /// Whether the request can carry a setting, by the directory and the name of its file; if so
    /// it will.
    pub fn add(&mut self, group: &str, key: &str, value: &str) -> bool {
        let ipv4 = DEVCONF.iter().find(|(name, _)| *name == key);
        if let ("ipv4/conf", Some((_, number)), Ok(value)) = (group, ipv4, value.parse()) {
            self.ipv4.push((*number, value));
            true
        } else if let ("ipv6/conf", "addr_gen_mode", Ok(mode)) = (group, key, value.parse()) {
            self.addr_gen_mode = Some(mode);
            true
        } else {
            false
        }
    }
}

/// Sets settings of an interface, all or none; answers whether it has all families that they are of:
/// IPv6 may be off, or the MTU too small for it.
pub fn set_inet(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    settings: &InetSettings,
) -> Result<bool> {
    let mut families = Raw::default();
    if !settings.ipv4.is_empty() {
        let numbers = settings.ipv4.iter();
        let numbers = numbers.fold(Raw::default(), |list, (number, value)| {
            list.with(*number, &value.to_ne_bytes())
        });
        families = families.nest(AF_INET, &Raw::default().nest(IFLA_INET_CONF, &numbers));
    }
    if let Some(mode) = settings.addr_gen_mode {
        let inet6 = Raw::default().with(IFLA_INET6_ADDR_GEN_MODE, &[mode]);
        families = families.nest(AF_INET6, &inet6);
    }
    if families.as_bytes().is_empty() {
        return Ok(true);
    }
    let set = set(socket, what, index, vec![nested(IFLA_AF_SPEC, &families)]);
    on_errno(set.map(|()| true), &[libc::EAFNOSUPPORT], false)
}

/// Detaches the XDP program of one mode.
///
/// # Errors
/// The kernel's refusal: EBUSY for one that a BPF link holds (`dev_xdp_attach()`).
pub fn detach_xdp(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    mode: XdpMode,
) -> Result<()> {
    let detach = Raw::default()
        .with(IFLA_XDP_FD, &(-1i32).to_ne_bytes())
        .with(IFLA_XDP_FLAGS, &mode.flag.to_ne_bytes());
    set(socket, what, index, vec![nested(IFLA_XDP, &detach)])
}

/// Deletes a link; one that is gone is deleted.
pub fn delete(socket: &mut Socket, link: &Link) -> Result<()> {
    let message = message(link.index, Vec::new());
    let deleted = socket.request(
        format_args!("delete {}", link.name),
        RTM_DELLINK,
        0,
        &message,
    );
    on_errno(deleted, &[libc::ENODEV], ())
}

/// Gives a link an alternative name; one that it has is given.
///
/// # Errors
/// The kernel's refusal: EEXIST when another link has it.
pub fn add_altname(socket: &mut Socket, link: &Link, name: &Name) -> Result<()> {
    if link.altnames.contains(name) {
        return Ok(());
    }
    let what = format_args!("give alternative name {name} of {}", link.name);
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    socket.request(what, RTM_NEWLINKPROP, flags, &altname(link, name))
}

/// Takes an alternative name from a link.
pub fn remove_altname(socket: &mut Socket, link: &Link, name: &Name) -> Result<()> {
    let what = format_args!("take alternative name {name} of {}", link.name);
    socket.request(what, RTM_DELLINKPROP, 0, &altname(link, name))
}

fn altname(link: &Link, name: &Name) -> LinkMessage {
    let property = Prop::Other(DefaultNla::new(IFLA_ALT_IFNAME, name.to_attribute()));
    message(link.index, vec![LinkAttribute::PropList(vec![property])])
}

/// An attribute that holds others.
fn nested(kind: u16, inner: &Raw) -> LinkAttribute {
    let inner = inner.as_bytes().to_vec();
    LinkAttribute::Other(DefaultNla::new(kind | NLA_F_NESTED, inner))
}
