//! Links: what the kernel says of one, and reading it.
//!
//! - `below`: which link is below one
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
pub use child::{NewLink, carries_child, create, random_index, random_mac};
pub use number::{known_number, namespace_number};
pub use vf::{vf_properties, vfs, without_driver};

use std::{collections::BTreeMap, fmt};

use hca::MacAddress;
use netlink_packet_core::{DecodeError, DefaultNla};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage};

use super::{Name, Result, Socket, attribute, name::LONGEST_NAME_BYTES, socket::on_errno};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;

/// `sizeof(struct ifinfomsg)`
const HEADER_BYTES: usize = 16;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_TXQLEN: u16 = 13;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PHYS_PORT_NAME: u16 = 38;
const IFLA_XDP: u16 = 43;
const IFLA_MAX_MTU: u16 = 51;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_PERM_ADDRESS: u16 = 54;
const IFLA_PARENT_DEV_NAME: u16 = 56;
const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const ARPHRD_ETHER: u16 = 1;

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

/// `IF_OPER_UNKNOWN`, of drivers that never say, and `IF_OPER_UP`.
const OPER_UP: [u32; 2] = [0, 6];

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
    /// of a port has a kind as its children have, which are on it (`ipoib_link_ops`).
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

    /// Attribute by attribute, so that none that is unknown or not text hides another.
    fn parse(payload: &[u8]) -> std::result::Result<Link, DecodeError> {
        let (header, attributes) = (payload.split_at_checked(HEADER_BYTES))
            .ok_or_else(|| DecodeError::buffer_too_small(payload.len(), HEADER_BYTES))?;
        let hardware = header.get(2..).and_then(<[u8]>::first_chunk).copied();
        let mut link = Link {
            hardware: u16::from_ne_bytes(hardware.unwrap_or_default()),
            index: attribute::word(header, 4),
            flags: LinkFlags::from_bits_retain(attribute::word(header, 8)),
            carrier: true,
            ..Link::default()
        };
        let text = |value: &[u8]| Name::of_attribute(value).to_string();
        attribute::each(attributes, |kind, value| {
            let number = attribute::number(value);
            match kind {
                IFLA_ADDRESS => link.mac = value.to_vec(),
                IFLA_IFNAME => link.name = Name::of_attribute(value),
                IFLA_MTU => link.mtu = number.unwrap_or_default(),
                IFLA_LINK => link.parent = number,
                IFLA_MASTER => link.controller = number,
                IFLA_TXQLEN => link.tx_queue_length = number.unwrap_or_default(),
                IFLA_OPERSTATE => link.carrier = number.is_some_and(|n| OPER_UP.contains(&n)),
                IFLA_LINKINFO => link.parse_info(value),
                IFLA_IFALIAS => {
                    let alias = Name::of_attribute(value);
                    link.alias = (!alias.is_empty()).then_some(alias);
                }
                IFLA_LINK_NETNSID => link.parent_netns = number.map(u32::cast_signed),
                IFLA_PHYS_PORT_NAME => link.port = Some(text(value)),
                IFLA_XDP => attribute::each(value, |kind, xdp| {
                    let mode = XDP_MODES.into_iter().find(|mode| mode.attribute == kind);
                    link.xdp.extend(mode.zip(attribute::number(xdp)));
                }),
                IFLA_MAX_MTU => link.max_mtu = number.unwrap_or_default(),
                IFLA_PROP_LIST => attribute::each(value, |kind, property| {
                    if kind == IFLA_ALT_IFNAME {
                        link.altnames.push(Name::of_attribute(property));
                    }
                }),
                IFLA_PERM_ADDRESS => link.permanent_mac = value.to_vec(),
                IFLA_PARENT_DEV_NAME => link.bus_device = Some(text(value)),
                IFLA_PARENT_DEV_BUS_NAME => link.bus = Some(text(value)),
                _ => {}
            }
        });
        Ok(link)
    }

    fn parse_info(&mut self, value: &[u8]) {
        let text = |value: &[u8]| Name::of_attribute(value).to_string();
        attribute::each(value, |kind, info| match kind {
            IFLA_INFO_KIND => self.kind = Some(InfoKind::from(text(info).as_str())),
            IFLA_INFO_DATA => attribute::each(info, |kind, data| {
                self.info.insert(kind, data.to_vec());
            }),
            IFLA_INFO_SLAVE_KIND => self.port_kind = Some(text(info)),
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

/// What is said of the link with this index.
fn message(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
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
    let mut attributes = vec![without_counters()];
    let mut index = 0;
    match by {
        By::Index(of_link) => index = of_link,
        // No link has such a name, and the kernel would cut it at the NUL or refuse its length.
        By::Name(name) if name.contains(&0) || name.len() > LONGEST_ALTNAME_BYTES => {
            return Ok(None);
        }
        By::Name(name) if name.len() > LONGEST_NAME_BYTES => {
            attributes.push(named(IFLA_ALT_IFNAME, name));
        }
        By::Name(name) => attributes.push(named(IFLA_IFNAME, name)),
    }
    let (what, message) = (format_args!("read {by}"), message(index, attributes));
    let read = socket.get(what, RTM_GETLINK, &message, Link::parse);
    on_errno(read.map(Some), &[libc::ENODEV], None)
}

/// All links of a namespace.
pub fn list(socket: &mut Socket) -> Result<Vec<Link>> {
    list_of(socket, None)
}

/// All links of the namespace that the socket's knows by this number. Needs `CAP_NET_ADMIN`, and not
/// `CAP_SYS_ADMIN` as entering it does. Numbers of namespaces in the answer are the socket's.
pub fn list_in(socket: &mut Socket, number: i32) -> Result<Vec<Link>> {
    list_of(socket, Some(LinkAttribute::IfNetnsId(number)))
}

/// The ports of a bond, bridge or VRF, by its index.
pub fn ports(socket: &mut Socket, controller: u32) -> Result<Vec<Link>> {
    list_of(socket, Some(LinkAttribute::Controller(controller)))
}

fn list_of(socket: &mut Socket, filter: Option<LinkAttribute>) -> Result<Vec<Link>> {
    let mut attributes = vec![without_counters()];
    attributes.extend(filter);
    let message = message(0, attributes);
    socket.dump("list netdevs", RTM_GETLINK, &message, |payload| {
        Link::parse(payload).map(Some)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_is_not_text_hides_no_other() {
        let mut header = [0; HEADER_BYTES];
        header[2..4].copy_from_slice(&32u16.to_ne_bytes());
        header[4] = 7;
        header[8] = 1;
        let info = attribute::Raw::default()
            .with(IFLA_INFO_KIND, b"ipoib\0")
            .with(IFLA_INFO_DATA, &[6, 0, 1, 0, 0xff, 0x80, 0, 0]);
        let names = attribute::Raw::default().with(IFLA_ALT_IFNAME, b"\xffb\0");
        let message = attribute::Raw::new(&header)
            .with(IFLA_IFNAME, b"a\xff\0")
            .with(IFLA_MTU, &[1])
            .with(IFLA_OPERSTATE, &[2])
            .nest(IFLA_LINKINFO, &info)
            .nest(IFLA_PROP_LIST, &names)
            .with(IFLA_IFALIAS, b"\0")
            .with(IFLA_PARENT_DEV_NAME, b"0000:01:00.0\0");
        let link = Link::parse(message.as_bytes()).unwrap();
        let expected = Link {
            index: 7,
            name: Name::from(&b"a\xff"[..]),
            altnames: vec![Name::from(&b"\xffb"[..])],
            hardware: 32,
            flags: LinkFlags::Up,
            mtu: 1,
            kind: Some(InfoKind::Ipoib),
            info: [(1, vec![0xff, 0x80])].into(),
            bus_device: Some("0000:01:00.0".into()),
            ..Link::default()
        };
        assert_eq!(link, expected);
        assert!(Link::parse(&[0; 15]).is_err());
    }
}
