//! Links: reading them, creating children, changing, moving and deleting them.

use std::{collections::BTreeMap, fmt, net::Ipv6Addr};

use netlink_packet_core::{
    DecodeError, DefaultNla, NLA_F_NESTED, NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL, Parseable,
};
use netlink_packet_route::link::{
    InfoData, InfoIpVlan, InfoIpoib, InfoKind, InfoMacVlan, IpVlanMode, IpoibMode, LinkAttribute,
    LinkExtentMask, LinkFlags, LinkInfo, LinkMessage, MacVlanMode, Prop, State, VfInfo,
};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};

use super::{
    Error, Name, Namespace, Result, Socket,
    attribute::{self, Raw},
    name::LONGEST_NAME_BYTES,
    socket,
};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;
const RTM_NEWLINKPROP: u16 = 108;
const RTM_DELLINKPROP: u16 = 109;

/// `sizeof(struct ifinfomsg)`
const HEADER_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_PHYS_PORT_NAME: u16 = 38;
const IFLA_PROTO_DOWN: u16 = 39;
const IFLA_XDP: u16 = 43;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_PROTO_DOWN_REASON: u16 = 55;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_PROTO_DOWN_REASON_MASK: u16 = 1;
const IFLA_PROTO_DOWN_REASON_VALUE: u16 = 2;
const IFLA_INET6_TOKEN: u16 = 7;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
const AF_INET6: u16 = 10;

/// A setting of a link that is one number, of 1 or 4 bytes, and that a change of namespaces keeps.
#[derive(Debug)]
struct Number {
    /// As `ip link` calls it.
    name: &'static str,
    attribute: u16,
    bytes: usize,
}

/// Each before those that follow from it: `netif_set_gso_max_size()` sets the limit for IPv4, too.
const NUMBERS: [Number; 7] = [
    Number::new("mode", 17, 1),
    Number::new("group", 27, 4),
    Number::new("gso_max_segs", 40, 4),
    Number::new("gso_max_size", 41, 4),
    Number::new("gso_ipv4_max_size", 63, 4),
    Number::new("gro_max_size", 58, 4),
    Number::new("gro_ipv4_max_size", 64, 4),
];

impl Number {
    const fn new(name: &'static str, attribute: u16, bytes: usize) -> Self {
        Number {
            name,
            attribute,
            bytes,
        }
    }
}

/// How an XDP program is attached (`XDP_FLAGS_*`, `include/uapi/linux/if_link.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In the network stack.
    Generic,
    /// In the driver.
    Driver,
    /// In the NIC.
    Hardware,
}

impl XdpMode {
    /// The attribute of an answer that names a program attached so.
    fn of_attribute(kind: u16) -> Option<Self> {
        match kind {
            5 => Some(XdpMode::Driver),
            6 => Some(XdpMode::Generic),
            7 => Some(XdpMode::Hardware),
            _ => None,
        }
    }

    fn flag(self) -> u32 {
        match self {
            XdpMode::Generic => 2,
            XdpMode::Driver => 4,
            XdpMode::Hardware => 8,
        }
    }
}

impl fmt::Display for XdpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            XdpMode::Generic => "generic",
            XdpMode::Driver => "driver",
            XdpMode::Hardware => "hardware",
        })
    }
}
/// `ALTIFNAMSIZ` less the NUL.
const LONGEST_ALTNAME_BYTES: usize = 127;

/// A link as the kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Index in its namespace.
    pub index: u32,
    /// Primary name.
    pub name: Name,
    /// Alternative names.
    pub altnames: Vec<Name>,
    /// `ifalias`.
    pub alias: Option<Name>,
    /// Hardware type (`ARPHRD_*`): 1 Ethernet, 32 InfiniBand.
    pub hardware: u16,
    /// Present hardware address.
    pub mac: Vec<u8>,
    /// Hardware address of all others on the link.
    pub broadcast: Vec<u8>,
    /// Burnt-in hardware address, where the driver has one.
    pub permanent_mac: Vec<u8>,
    /// MTU in bytes.
    pub mtu: u32,
    /// The largest MTU the driver takes; 0 when it names none.
    pub max_mtu: u32,
    /// Length of the transmit queue in packets.
    pub tx_queue_length: u32,
    /// `IFF_*`.
    pub flags: LinkFlags,
    /// Whether it can carry traffic: `IF_OPER_UP`, or unknown for drivers that never say.
    pub carrier: bool,
    /// `macvlan`, `veth`, ...; none for hardware without a link type of its own.
    pub kind: Option<InfoKind>,
    /// What the kind says of itself.
    pub data: Option<InfoData>,
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
    /// Settings that are one number each, by the names that `ip link` has for them.
    pub numbers: BTreeMap<&'static str, u32>,
    /// RFC 2863's state (`IF_OPER_*`).
    pub oper_state: u8,
    /// Whether the link is held down, where it can be.
    pub proto_down: bool,
    /// Who holds it down: a bit for each.
    pub proto_down_reasons: u32,
    /// The interface part of its IPv6 addresses, where an administrator set one.
    pub token: Option<Ipv6Addr>,
    /// How many users want it to receive everything.
    pub promiscuity: u32,
    /// XDP programs with their IDs.
    pub xdp: Vec<(XdpMode, u32)>,
}

impl Link {
    /// Whether it is administratively up.
    pub fn is_up(&self) -> bool {
        self.flags.contains(LinkFlags::Up)
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
                LinkAttribute::Promiscuity(users) => link.promiscuity = users,
                LinkAttribute::Broadcast(address) => link.broadcast = address,
                LinkAttribute::PermAddress(mac) => link.permanent_mac = mac,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::MaxMtu(mtu) => link.max_mtu = mtu,
                LinkAttribute::TxQueueLen(length) => link.tx_queue_length = length,
                LinkAttribute::Link(index) => link.parent = Some(index),
                LinkAttribute::LinkNetNsId(id) => link.parent_netns = Some(id),
                LinkAttribute::Controller(index) => link.controller = Some(index),
                LinkAttribute::ParentDevName(name) => link.bus_device = Some(name),
                LinkAttribute::ParentDevBusName(name) => link.bus = Some(name),
                LinkAttribute::OperState(state) => {
                    link.carrier = matches!(state, State::Up | State::Unknown);
                }
                LinkAttribute::LinkInfo(list) => {
                    for info in list {
                        match info {
                            LinkInfo::Data(data) => link.data = Some(data),
                            LinkInfo::PortKind(kind) => link.port_kind = Some(kind.to_string()),
                            _ => {}
                        }
                    }
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
                _ => {}
            }),
            IFLA_OPERSTATE => self.oper_state = value.first().copied().unwrap_or(0),
            IFLA_PHYS_PORT_NAME => {
                self.port = Some(Name::of_attribute(value).to_string());
            }
            IFLA_PROTO_DOWN => self.proto_down = attribute::number(value) != Some(0),
            IFLA_PROTO_DOWN_REASON => attribute::each(value, |kind, reason| {
                if kind == IFLA_PROTO_DOWN_REASON_VALUE {
                    self.proto_down_reasons = attribute::number(reason).unwrap_or(0);
                }
            }),
            IFLA_XDP => attribute::each(value, |kind, xdp| {
                let mode = XdpMode::of_attribute(kind);
                self.xdp.extend(mode.zip(attribute::number(xdp)));
            }),
            IFLA_AF_SPEC => attribute::each(value, |kind, family| {
                if kind == AF_INET6 {
                    attribute::each(family, |kind, inet6| {
                        if kind == IFLA_INET6_TOKEN {
                            let token = <[u8; 16]>::try_from(inet6).ok();
                            let token = token.map(Ipv6Addr::from);
                            self.token = token.filter(|token| !token.is_unspecified());
                        }
                    });
                }
            }),
            kind => {
                let known = NUMBERS.iter().find(|known| known.attribute == kind);
                if let Some((known, value)) = known.zip(attribute::number(value)) {
                    self.numbers.insert(known.name, value);
                }
            }
        });
    }

    /// The names it can be found by: its primary one and its alternative ones.
    pub fn goes_by(&self, name: &[u8]) -> bool {
        self.name.as_bytes() == name || self.altnames.iter().any(|known| known.as_bytes() == name)
    }
}

/// How a link is named to the kernel.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    /// Its primary or an alternative name.
    Name(&'a [u8]),
    /// Its index.
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

/// An attribute that holds others.
fn nested(kind: u16, inner: &Raw) -> LinkAttribute {
    let inner = inner.as_bytes().to_vec();
    LinkAttribute::Other(DefaultNla::new(kind | NLA_F_NESTED, inner))
}

/// Counters are half of an answer and are not read here.
fn without_counters() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

/// Reads one link; none when there is none of that name or index.
///
/// # Errors
/// The kernel's refusal.
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
    let mut link = None;
    let asked = socket.ask(
        format_args!("read {by}"),
        RTM_GETLINK,
        0,
        &message,
        |payload| {
            link = Some(Link::parse(payload)?);
            Ok(())
        },
    );
    match asked {
        Ok(()) => Ok(link),
        Err(e) if e.is(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// All links of a namespace.
///
/// # Errors
/// The kernel's refusal.
pub fn list(socket: &mut Socket) -> Result<Vec<Link>> {
    let mut message = LinkMessage::default();
    message.attributes.push(without_counters());
    socket.dump("list netdevs", RTM_GETLINK, &message, |payload| {
        Link::parse(payload).map(Some)
    })
}

/// What a PF says of one of its VFs; empty when it has none of that number.
///
/// # Errors
/// The kernel's refusal.
pub fn vf_properties(socket: &mut Socket, pf: u32, number: u32) -> Result<Vec<VfInfo>> {
    /// `RTEXT_FILTER_VF` and `RTEXT_FILTER_SKIP_STATS`
    const FILTER: [LinkExtentMask; 2] = [LinkExtentMask::Vf, LinkExtentMask::SkipStats];
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message
        .attributes
        .push(LinkAttribute::ExtMask(FILTER.to_vec()));
    let mut properties = Vec::new();
    let what = format_args!("read VF {number} of netdev {pf}").to_string();
    socket.ask(what, RTM_GETLINK, 0, &message, |payload| {
        for attribute in LinkMessage::parse(payload)?.attributes {
            let LinkAttribute::VfInfoList(list) = attribute else {
                continue;
            };
            // Each names the VF it is of; its MAC address is always there.
            let of_vf = list.into_iter().find(|vf| {
                vf.0.iter()
                    .any(|p| matches!(p, VfInfo::Mac(mac) if mac.vf_id == number))
            });
            properties = of_vf.map(|vf| vf.0).unwrap_or_default();
        }
        Ok(())
    })?;
    Ok(properties)
}

/// Sets properties of a VF through its PF.
///
/// # Errors
/// The kernel's refusal.
pub fn set_vf(
    socket: &mut Socket,
    what: &str,
    pf: u32,
    properties: Vec<LinkAttribute>,
) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message.attributes = properties;
    socket.request(what, RTM_SETLINK, 0, &message)
}

/// What a child is, beside the link it stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Child {
    /// A MAC address of its own on an Ethernet link.
    Macvlan {
        /// bridge, private, vepa or passthru.
        mode: MacVlanMode,
        /// Packets the broadcast queue holds; none for the kernel's choice.
        broadcast_queue: Option<u32>,
    },
    /// With the parent's MAC address, distinguished by IP address.
    Ipvlan {
        /// l2, l3 or l3s.
        mode: IpVlanMode,
    },
    /// A partition of an InfiniBand port.
    Ipoib {
        /// With the membership bit.
        pkey: u16,
        /// datagram or connected.
        mode: IpoibMode,
        /// Whether user space may join multicast groups.
        user_multicast: bool,
    },
}

impl Child {
    fn kind_and_data(&self) -> (InfoKind, InfoData) {
        match *self {
            Child::Macvlan {
                mode,
                broadcast_queue,
            } => {
                let mut data = vec![InfoMacVlan::Mode(mode)];
                data.extend(broadcast_queue.map(InfoMacVlan::BcQueueLen));
                (InfoKind::MacVlan, InfoData::MacVlan(data))
            }
            Child::Ipvlan { mode } => (
                InfoKind::IpVlan,
                InfoData::IpVlan(vec![InfoIpVlan::Mode(mode)]),
            ),
            Child::Ipoib {
                pkey,
                mode,
                user_multicast,
            } => (
                InfoKind::Ipoib,
                InfoData::Ipoib(vec![
                    InfoIpoib::Pkey(pkey),
                    InfoIpoib::Mode(mode),
                    InfoIpoib::UmCast(user_multicast.into()),
                ]),
            ),
        }
    }

    fn info(&self) -> Vec<LinkInfo> {
        let (kind, data) = self.kind_and_data();
        vec![LinkInfo::Kind(kind), LinkInfo::Data(data)]
    }

    /// The kernel's name for it.
    pub fn word(&self) -> String {
        self.kind_and_data().0.to_string()
    }
}

/// A child to be made.
#[derive(Clone, Debug)]
pub struct NewChild<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it is.
    pub child: Child,
    /// Index of the link it stands on.
    pub parent: u32,
    /// The number by which the socket's namespace knows the parent's; none when they are one.
    pub parent_netns: Option<i32>,
    /// MTU in bytes; none for the parent's.
    pub mtu: Option<u32>,
    /// Hardware address; none for one of the kernel's making.
    pub mac: Option<Vec<u8>>,
    /// The namespace it is to be in, when that is not the socket's.
    pub target: Option<&'a Namespace>,
}

/// Creates a child and returns it as it is then; none when it is in another namespace, about
/// which the kernel says nothing on this socket.
///
/// Made from a socket inside the namespace it is to be in, it has its final name at once and
/// meets no netdev of the host that has that name.
///
/// # Errors
/// The kernel's refusal: EEXIST when the name is taken, EBUSY when the parent is in other use.
pub fn create(socket: &mut Socket, new: &NewChild<'_>) -> Result<Option<Link>> {
    let mut message = LinkMessage::default();
    let attributes = &mut message.attributes;
    attributes.push(named(IFLA_IFNAME, new.name.as_bytes()));
    attributes.push(LinkAttribute::Link(new.parent));
    attributes.extend(new.parent_netns.map(LinkAttribute::LinkNetNsId));
    attributes.extend(new.mtu.map(LinkAttribute::Mtu));
    attributes.extend(new.mac.clone().map(LinkAttribute::Address));
    attributes.extend(new.target.map(|netns| LinkAttribute::NetNsFd(netns.fd())));
    attributes.push(LinkAttribute::LinkInfo(new.child.info()));
    let mut link = None;
    socket.ask(
        format_args!("create {} {}", new.child.word(), new.name),
        RTM_NEWLINK,
        NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO,
        &message,
        |payload| {
            link = Some(Link::parse(payload)?);
            Ok(())
        },
    )?;
    // Kernels before 6.2 do not echo the new link.
    if link.is_none() && new.target.is_none() {
        link = get(socket, By::Name(new.name.as_bytes()))?;
    }
    Ok(link)
}

/// What is to become of a link, in one request. Everything left at its default stays.
#[derive(Clone, Debug, Default)]
pub struct Change<'a> {
    /// Another namespace. The link is down afterwards, without addresses and routes.
    pub netns: Option<&'a Namespace>,
    /// Another name.
    pub name: Option<&'a [u8]>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<&'a [u8]>,
    /// Hardware address of all others on the link.
    pub broadcast: Option<&'a [u8]>,
    /// Length of the transmit queue in packets.
    pub tx_queue_length: Option<u32>,
    /// `ifalias`; an empty one removes it.
    pub alias: Option<&'a [u8]>,
    /// The flags named in the second, set as in the first.
    pub flags: Option<(LinkFlags, LinkFlags)>,
}

impl Change<'_> {
    /// Up, and nothing else.
    pub fn up() -> Self {
        Change {
            flags: Some((LinkFlags::Up, LinkFlags::Up)),
            ..Change::default()
        }
    }

    /// Down, and nothing else.
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
/// The kernel's refusal; the link may then be changed in part.
pub fn change(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    change: &Change<'_>,
) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    if let Some((flags, mask)) = change.flags {
        message.header.flags = flags;
        message.header.change_mask = mask;
    }
    let attributes = &mut message.attributes;
    attributes.extend(change.netns.map(|netns| LinkAttribute::NetNsFd(netns.fd())));
    attributes.extend(change.name.map(|name| named(IFLA_IFNAME, name)));
    attributes.extend(change.mtu.map(LinkAttribute::Mtu));
    attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
    let broadcast = change.broadcast.map(<[u8]>::to_vec);
    attributes.extend(broadcast.map(LinkAttribute::Broadcast));
    attributes.extend(change.tx_queue_length.map(LinkAttribute::TxQueueLen));
    attributes.extend(
        change
            .alias
            .map(|alias| LinkAttribute::Other(DefaultNla::new(IFLA_IFALIAS, alias.to_vec()))),
    );
    socket.request(what, RTM_SETLINK, 0, &message)
}

fn set(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    attributes: Vec<LinkAttribute>,
) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    socket.request(what, RTM_SETLINK, 0, &message)
}

/// Sets one of [`Link::numbers`]. A name that is none of them is passed over.
///
/// # Errors
/// The kernel's refusal.
pub fn set_number(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    name: &str,
    value: u32,
) -> Result<()> {
    let Some(known) = NUMBERS.iter().find(|known| known.name == name) else {
        return Ok(());
    };
    let bytes = match known.bytes {
        1 => vec![u8::try_from(value).unwrap_or(u8::MAX)],
        _ => value.to_ne_bytes().to_vec(),
    };
    let attribute = LinkAttribute::Other(DefaultNla::new(known.attribute, bytes));
    set(socket, what, index, vec![attribute])
}

/// The names of [`Link::numbers`] in the order in which they are to be set.
pub fn number_names() -> impl Iterator<Item = &'static str> {
    NUMBERS.iter().map(|known| known.name)
}

/// Sets numbers that the kind of a link says of itself.
///
/// # Errors
/// The kernel's refusal.
pub fn set_info(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    kind: &str,
    info: &BTreeMap<u16, Vec<u8>>,
) -> Result<()> {
    let mut data = Raw::default();
    for (attribute, value) in info {
        data = data.with(*attribute, value);
    }
    let info = Raw::default()
        .with(IFLA_INFO_KIND, &Name::from(kind).to_attribute())
        .nest(IFLA_INFO_DATA, &data);
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = vec![nested(IFLA_LINKINFO, &info)];
    // Without a flag that allows creation it changes the link that is there.
    socket.request(what, RTM_NEWLINK, 0, &message)
}

/// Sets whether a link is held down, and by whom, in one request: the kernel refuses to let go of a
/// link that still has a reason (`do_set_proto_down()`).
///
/// # Errors
/// The kernel's refusal.
pub fn set_proto_down(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    down: bool,
    reasons: u32,
) -> Result<()> {
    let reason = Raw::default()
        .with(IFLA_PROTO_DOWN_REASON_MASK, &u32::MAX.to_ne_bytes())
        .with(IFLA_PROTO_DOWN_REASON_VALUE, &reasons.to_ne_bytes());
    let reason = nested(IFLA_PROTO_DOWN_REASON, &reason);
    let down = LinkAttribute::ProtoDown(down.into());
    set(socket, what, index, vec![reason, down])
}

/// Sets RFC 2863's state of a link that waits for it (`set_operstate()`).
///
/// # Errors
/// The kernel's refusal.
pub fn set_oper_state(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    state: u8,
) -> Result<()> {
    let attribute = LinkAttribute::Other(DefaultNla::new(IFLA_OPERSTATE, vec![state]));
    set(socket, what, index, vec![attribute])
}

/// Sets the interface part of IPv6 addresses; none is `::`.
///
/// # Errors
/// The kernel's refusal: EINVAL on links that take no router advertisements.
pub fn set_token(
    socket: &mut Socket,
    what: impl fmt::Display,
    index: u32,
    token: Ipv6Addr,
) -> Result<()> {
    let inet6 = Raw::default().with(IFLA_INET6_TOKEN, &token.octets());
    let attribute = nested(IFLA_AF_SPEC, &Raw::default().nest(AF_INET6, &inet6));
    set(socket, what, index, vec![attribute])
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
        .with(IFLA_XDP_FLAGS, &mode.flag().to_ne_bytes());
    let attribute = nested(IFLA_XDP, &detach);
    set(socket, what, index, vec![attribute])
}

/// Deletes a link; one that is gone is deleted.
///
/// # Errors
/// The kernel's refusal.
pub fn delete(socket: &mut Socket, link: &Link) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = link.index;
    match socket.request(
        format_args!("delete {}", link.name),
        RTM_DELLINK,
        0,
        &message,
    ) {
        Err(e) if e.is(libc::ENODEV) => Ok(()),
        done => done,
    }
}

/// Gives a link an alternative name; one that it has is given.
///
/// # Errors
/// The kernel's refusal: EEXIST when another link has it.
pub fn add_altname(socket: &mut Socket, link: &Link, name: &Name) -> Result<()> {
    if link.altnames.contains(name) {
        return Ok(());
    }
    altname(
        socket,
        RTM_NEWLINKPROP,
        NLM_F_CREATE | NLM_F_EXCL,
        link,
        name,
    )
}

/// Takes an alternative name from a link.
///
/// # Errors
/// The kernel's refusal.
pub fn remove_altname(socket: &mut Socket, link: &Link, name: &Name) -> Result<()> {
    altname(socket, RTM_DELLINKPROP, 0, link, name)
}

fn altname(socket: &mut Socket, kind: u16, flags: u16, link: &Link, name: &Name) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = link.index;
    let property = Prop::Other(DefaultNla::new(IFLA_ALT_IFNAME, name.to_attribute()));
    message
        .attributes
        .push(LinkAttribute::PropList(vec![property]));
    let verb = if kind == RTM_NEWLINKPROP {
        "give"
    } else {
        "take"
    };
    socket.request(
        format_args!("{verb} alternative name {name} of {}", link.name),
        kind,
        flags,
        &message,
    )
}

/// The number by which the socket's namespace knows another one; none when it has none.
///
/// # Errors
/// The kernel's refusal.
pub fn known_number(socket: &mut Socket, other: &Namespace) -> Result<Option<i32>> {
    ask_number(socket, &number_of(other)?, other)
}

/// The number by which the socket's namespace knows another one; made when there is none.
///
/// # Errors
/// The kernel's refusal.
pub fn namespace_number(socket: &mut Socket, other: &Namespace) -> Result<i32> {
    let message = number_of(other)?;
    if let Some(number) = ask_number(socket, &message, other)? {
        return Ok(number);
    }
    let mut assign = message.clone();
    assign.attributes.push(NsidAttribute::Id(-1));
    let what = format_args!("number namespace {}", other.path().display()).to_string();
    match socket.request(&what, RTM_NEWNSID, 0, &assign) {
        Ok(()) => {}
        // Another attachment of the pod was quicker.
        Err(e) if e.is(libc::EEXIST) => {}
        Err(e) => return Err(e),
    }
    ask_number(socket, &message, other)?.ok_or(Error::Answer {
        what,
        cause: "it has no number although it was given one".into(),
    })
}

fn number_of(other: &Namespace) -> Result<NsidMessage> {
    let mut message = NsidMessage::default();
    let fd = u32::try_from(other.fd()).map_err(|_| Error::Answer {
        what: "number a namespace".into(),
        cause: "its file is closed".into(),
    })?;
    message.attributes.push(NsidAttribute::Fd(fd));
    Ok(message)
}

fn ask_number(
    socket: &mut Socket,
    message: &NsidMessage,
    other: &Namespace,
) -> Result<Option<i32>> {
    let mut number = None;
    socket.ask(
        format_args!("ask for the number of namespace {}", other.path().display()),
        RTM_GETNSID,
        0,
        message,
        |payload| {
            number = NsidMessage::parse(payload)?
                .attributes
                .iter()
                .find_map(|a| match a {
                    NsidAttribute::Id(id) if *id >= 0 => Some(*id),
                    _ => None,
                });
            Ok(())
        },
    )?;
    Ok(number)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;

    use super::*;

    /// `IFLA_LINKINFO` as ip(8) of iproute2 6.1 sends it, by strace: kind and data.
    fn captured(kind: &str, data: &[u8]) -> Vec<u8> {
        let attribute = |number: u16, value: &[u8]| {
            let mut bytes = u16::try_from(value.len() + 4)
                .unwrap()
                .to_ne_bytes()
                .to_vec();
            bytes.extend(number.to_ne_bytes());
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        // IFLA_INFO_KIND, with the text's end, which ip leaves out and the kernel does not mind
        // (`nla_strscpy()`); IFLA_INFO_DATA.
        let kind = format!("{kind}\0");
        [attribute(1, kind.as_bytes()), attribute(2, data)].concat()
    }

    fn sent(child: &Child) -> Vec<u8> {
        let infos = child.info();
        let mut bytes = Vec::new();
        for info in &infos {
            let mut buffer = vec![0; info.buffer_len()];
            info.emit(&mut buffer);
            bytes.extend(buffer);
        }
        bytes
    }

    #[test]
    fn children_are_asked_for_as_ip_does() {
        let ipoib = |pkey, mode, user_multicast| Child::Ipoib {
            pkey,
            mode,
            user_multicast,
        };
        // type ipoib pkey 0x8001 mode datagram umcast 1
        let datagram = b"\x06\0\x01\0\x01\x80\0\0\x06\0\x02\0\0\0\0\0\x06\0\x03\0\x01\0\0\0";
        assert_eq!(
            sent(&ipoib(0x8001, IpoibMode::Datagram, true)),
            captured("ipoib", datagram)
        );
        // type ipoib pkey 0x9002 mode connected umcast 0
        let connected = b"\x06\0\x01\0\x02\x90\0\0\x06\0\x02\0\x01\0\0\0\x06\0\x03\0\0\0\0\0";
        assert_eq!(
            sent(&ipoib(0x9002, IpoibMode::Connected, false)),
            captured("ipoib", connected)
        );
        // type ipvlan mode l3s; ip sends flags of zero with it, which are the default.
        let l3s = b"\x06\0\x01\0\x02\0\0\0";
        let child = Child::Ipvlan {
            mode: IpVlanMode::L3S,
        };
        assert_eq!(sent(&child), captured("ipvlan", l3s));
    }
}
