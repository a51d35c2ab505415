//! Links: what the kernel says of one, and reading it.
//!
//! - `below`: what one stands on
//! - `change`: changing, moving and deleting one
//! - `child`: creating one on another, and whether one carries any
//! - `vf`: what a physical function says of its virtual ones
//! - `number`: the numbers by which one namespace knows another, in which a link's parent may be

mod below;
mod change;
mod child;
mod number;
mod vf;

pub use below::PAIRED_KINDS;
pub use change::{
    Change, InetSettings, add_altname, change, delete, detach_xdp, remove_altname, set, set_inet,
    set_info,
};
pub use child::{NewLink, carries_child, create, random_index};
pub use number::{known_number, namespace_number};
pub use vf::{vf_properties, vfs, without_driver};

use std::{collections::BTreeMap, fmt};

use hca::MacAddress;
use netlink_packet_core::{DecodeError, DefaultNla};
use netlink_packet_route::link::{
    InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage, State,
};

use super::{Name, Result, Socket, attribute, name::LONGEST_NAME_BYTES, socket};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;

/// `sizeof(struct ifinfomsg)`
const HEADER_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_PHYS_PORT_NAME: u16 = 38;
const IFLA_XDP: u16 = 43;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const ARPHRD_ETHER: u16 = 1;
const ARPHRD_LOOPBACK: u16 = 772;

/// How an XDP program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpMode {
    pub name: &'static str,
    /// Of an answer that names a program attached so (`IFLA_XDP_*_PROG_ID`).
    attribute: u16,
    /// `XDP_FLAGS_*_MODE` (`include/uapi/linux/if_link.h`)
    flag: u32,
}

const XDP_MODES: [XdpMode; 3] = [
    XdpMode::new("driver", 5, 4),
    XdpMode::new("generic", 6, 2),
    XdpMode::new("hardware", 7, 8),
];

impl XdpMode {
    const fn new(name: &'static str, attribute: u16, flag: u32) -> Self {
        XdpMode {
            name,
            attribute,
            flag,
        }
    }
}

/// `ALTIFNAMSIZ` less the NUL.
const LONGEST_ALTNAME_BYTES: usize = 127;

/// A link as the kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// In its namespace.
    pub index: u32,
    pub name: Name,
    pub altnames: Vec<Name>,
    /// `ifalias`.
    pub alias: Option<Name>,
    /// Hardware type (`ARPHRD_*`): 1 Ethernet, 32 InfiniBand.
    pub hardware: u16,
    pub mac: Vec<u8>,
    /// Burnt-in hardware address, where the driver has one.
    pub permanent_mac: Vec<u8>,
    /// In bytes.
    pub mtu: u32,
    /// In packets.
    pub tx_queue_length: u32,
    /// The largest MTU the driver takes; 0 when it names none.
    pub max_mtu: u32,
    /// `IFF_*`.
    pub flags: LinkFlags,
    /// Whether it can carry traffic: `IF_OPER_UP`, or unknown for drivers that never say.
    pub carrier: bool,
    /// `macvlan`, `veth`, ...; none for hardware without a link type of its own.
    pub kind: Option<InfoKind>,
    /// The link below (of a macvlan, a vlan; the peer of a veth), in the namespace of `parent_netns`.
    pub parent: Option<u32>,
    /// Where the link below is, when it is in another namespace.
    pub parent_netns: Option<i32>,
    /// The bridge, bond or VRF it is a port of.
    pub controller: Option<u32>,
    /// What its being a port is called: `bridge`, `bond`, `vrf`.
    pub port_kind: Option<String>,
    /// The device below on its bus: a PCI address or an auxiliary device's name.
    pub bus_device: Option<String>,
    /// That device's bus: `pci`, `auxiliary`, `virtio`.
    pub bus: Option<String>,
    /// The driver's name of the port, where a device has several.
    pub port: Option<String>,
    /// What the kind says of itself, attribute by attribute.
    pub info: BTreeMap<u16, Vec<u8>>,
    /// XDP programs with their IDs.
    pub xdp: Vec<(XdpMode, u32)>,
}

impl Link {
    /// Whether it is administratively up.
    pub fn is_up(&self) -> bool {
        self.flags.contains(LinkFlags::Up)
    }

    /// Whether it is the netdev of a device on a bus, not a link that software made. An IPoIB netdev
    /// of a port has a kind as its children have, which stand on it (`ipoib_link_ops`).
    pub fn is_hardware(&self) -> bool {
        self.bus_device.is_some()
            && (self.kind.is_none() || self.is_infiniband() && self.parent.is_none())
    }

    /// The present hardware address as text.
    pub fn mac_text(&self) -> String {
        MacAddress::new(self.mac.as_slice()).to_string()
    }

    pub fn is_ethernet(&self) -> bool {
        self.hardware == ARPHRD_ETHER
    }

    /// Whether it is IP over InfiniBand.
    pub fn is_infiniband(&self) -> bool {
        self.hardware == 32
    }

    fn parse(payload: &[u8]) -> std::result::Result<Link, DecodeError> {
        let message: LinkMessage = socket::parse_leniently(payload, HEADER_BYTES)?;
        let mut link = Link {
            index: message.header.index,
            hardware: message.header.link_layer_type.into(),
            flags: message.header.flags,
            carrier: true,
            ..Link::default()
        };
        link.parse_bytes(payload);
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::Address(mac) => link.mac = mac,
                LinkAttribute::PermAddress(mac) => link.permanent_mac = mac,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::TxQueueLen(length) => link.tx_queue_length = length,
                LinkAttribute::MaxMtu(mtu) => link.max_mtu = mtu,
                LinkAttribute::Link(index) => link.parent = Some(index),
                LinkAttribute::LinkNetNsId(id) => link.parent_netns = Some(id),
                LinkAttribute::Controller(index) => link.controller = Some(index),
                LinkAttribute::ParentDevName(name) => link.bus_device = Some(name),
                LinkAttribute::ParentDevBusName(name) => link.bus = Some(name),
                LinkAttribute::OperState(state) => {
                    link.carrier = matches!(state, State::Up | State::Unknown);
                }
                _ => {}
            }
        }
        Ok(link)
    }

    /// What a reader of text would refuse, and the kind, without which a virtual link would pass
    /// for hardware: read one by one, so that none of them hides another.
    fn parse_bytes(&mut self, payload: &[u8]) {
        let attributes = payload.get(HEADER_BYTES..).unwrap_or_default();
        attribute::each(attributes, |kind, value| match kind {
            IFLA_IFNAME => self.name = Name::of_attribute(value),
            IFLA_IFALIAS => {
                let alias = Name::of_attribute(value);
                self.alias = (!alias.is_empty()).then_some(alias);
            }
            IFLA_PROP_LIST => attribute::each(value, |kind, property| {
                if kind == IFLA_ALT_IFNAME {
                    self.altnames.push(Name::of_attribute(property));
                }
            }),
            IFLA_LINKINFO => attribute::each(value, |kind, info| match kind {
                IFLA_INFO_KIND => {
                    let kind = Name::of_attribute(info).to_string();
                    self.kind = Some(InfoKind::from(kind.as_str()));
                }
                IFLA_INFO_DATA => attribute::each(info, |kind, data| {
                    self.info.insert(kind, data.to_vec());
                }),
                IFLA_INFO_SLAVE_KIND => {
                    self.port_kind = Some(Name::of_attribute(info).to_string());
                }
                _ => {}
            }),
            IFLA_PHYS_PORT_NAME => {
                self.port = Some(Name::of_attribute(value).to_string());
            }
            IFLA_XDP => attribute::each(value, |kind, xdp| {
                let mut modes = XDP_MODES.into_iter();
                let mode = modes.find(|mode| mode.attribute == kind);
                self.xdp.extend(mode.zip(attribute::number(xdp)));
            }),
            _ => {}
        });
    }
}

/// How a link is named to the kernel.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    /// Its primary or an alternative name.
    Name(&'a [u8]),
    Index(u32),
}

impl fmt::Display for By<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            By::Name(name) => write!(f, "netdev {}", Name::from(*name)),
            By::Index(index) => write!(f, "netdev with index {index}"),
        }
    }
}

fn named(kind: u16, name: &[u8]) -> LinkAttribute {
    LinkAttribute::Other(DefaultNla::new(kind, Name::from(name).to_attribute()))
}

/// Counters are half of an answer and are not read here.
fn without_counters() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

/// Reads one link; none when there is none of that name or index.
pub fn get(socket: &mut Socket, by: By<'_>) -> Result<Option<Link>> {
    let mut message = LinkMessage::default();
    match by {
        By::Index(index) => message.header.index = index,
        // No link has such a name, and the kernel would cut it at the NUL or refuse its length.
        By::Name(name) if name.contains(&0) || name.len() > LONGEST_ALTNAME_BYTES => {
            return Ok(None);
        }
        By::Name(name) if name.len() > LONGEST_NAME_BYTES => {
            message.attributes.push(named(IFLA_ALT_IFNAME, name));
        }
        By::Name(name) => message.attributes.push(named(IFLA_IFNAME, name)),
    }
    message.attributes.push(without_counters());
    let what = format_args!("read {by}");
    match socket.get(what, RTM_GETLINK, &message, Link::parse) {
        Ok(link) => Ok(Some(link)),
        Err(e) if e.is(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// All links of a namespace.
pub fn list(socket: &mut Socket) -> Result<Vec<Link>> {
    list_of(socket, None, |_| true)
}

/// All links of the namespace that the socket's knows by this number. Needs `CAP_NET_ADMIN`, and not
/// `CAP_SYS_ADMIN` as entering it does. Numbers of namespaces in the answer are the socket's.
pub fn list_in(socket: &mut Socket, number: i32) -> Result<Vec<Link>> {
    list_of(socket, Some(LinkAttribute::IfNetnsId(number)), |_| true)
}

/// All links but loopback and those that are one of a pair: these stand on no other link, and a node
/// has one for each pod. They are not parsed.
pub fn list_unpaired(socket: &mut Socket) -> Result<Vec<Link>> {
    list_of(socket, None, |payload| !is_paired_or_loopback(payload))
}

fn is_paired_or_loopback(payload: &[u8]) -> bool {
    let (header, attributes) = payload.split_at_checked(HEADER_BYTES).unwrap_or_default();
    let hardware = header.get(2..4).and_then(<[u8]>::first_chunk);
    let mut found = hardware.is_some_and(|bytes| u16::from_ne_bytes(*bytes) == ARPHRD_LOOPBACK);
    attribute::each(attributes, |kind, value| {
        if kind == IFLA_LINKINFO {
            attribute::each(value, |kind, info| {
                let is = |pair: &&str| info.strip_suffix(&[0]) == Some(pair.as_bytes());
                found |= kind == IFLA_INFO_KIND && PAIRED_KINDS.iter().any(is);
            });
        }
    });
    found
}

/// The ports of a bond, bridge or VRF, by its index.
pub fn ports(socket: &mut Socket, controller: u32) -> Result<Vec<Link>> {
    let ports = LinkAttribute::Controller(controller);
    list_of(socket, Some(ports), |_| true)
}

fn list_of(
    socket: &mut Socket,
    filter: Option<LinkAttribute>,
    wanted: impl Fn(&[u8]) -> bool,
) -> Result<Vec<Link>> {
    let mut message = LinkMessage::default();
    message.attributes.push(without_counters());
    message.attributes.extend(filter);
    socket.dump(
        "list netdevs",
        RTM_GETLINK,
        &message,
        |payload| match wanted(payload) {
            true => Link::parse(payload).map(Some),
            false => Ok(None),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_stand_on_no_other_are_not_parsed() {
        let left_out = |hardware: u16, kind: Option<&str>| {
            let mut header = [0; HEADER_BYTES];
            header[2..4].copy_from_slice(&hardware.to_ne_bytes());
            let mut message = attribute::Raw::new(&header).with(IFLA_IFNAME, b"veth\0");
            if let Some(kind) = kind {
                let kind = format!("{kind}\0");
                let info = attribute::Raw::default().with(IFLA_INFO_KIND, kind.as_bytes());
                message = message.nest(IFLA_LINKINFO, &info);
            }
            is_paired_or_loopback(message.as_bytes())
        };
        assert!(left_out(ARPHRD_LOOPBACK, None));
        assert!(PAIRED_KINDS.iter().all(|kind| left_out(1, Some(kind))));
        assert!(!left_out(1, None), "hardware");
        assert!(!left_out(1, Some("vethx")));
        assert!(!left_out(1, Some("macvlan")));
        assert!(!left_out(32, Some("ipoib")));
    }
}
