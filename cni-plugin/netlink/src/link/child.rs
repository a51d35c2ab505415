//! Creating a link on another one.

use std::hash::{BuildHasher, Hasher, RandomState};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL};
use netlink_packet_route::link::{
    InfoData, InfoIpVlan, InfoIpoib, InfoKind, InfoMacVlan, IpVlanMode, IpoibMode, LinkAttribute,
    LinkInfo, LinkMessage, MacVlanMode,
};

use super::{By, IFLA_IFNAME, Link, RTM_NEWLINK, delete, get, named};
use crate::{Result, Socket};

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
    pub name: &'a str,
    /// In the namespace of the socket.
    pub index: u32,
    pub child: Child,
    /// Index of the link it stands on.
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
pub fn create(socket: &mut Socket, new: &NewChild<'_>) -> Result<Option<Link>> {
    let mut message = LinkMessage::default();
    message.header.index = new.index;
    let attributes = &mut message.attributes;
    attributes.push(named(IFLA_IFNAME, new.name.as_bytes()));
    attributes.push(LinkAttribute::Link(new.parent));
    attributes.extend(new.parent_netns.map(LinkAttribute::LinkNetNsId));
    attributes.extend(new.mtu.map(LinkAttribute::Mtu));
    attributes.extend(new.mac.clone().map(LinkAttribute::Address));
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
    if link.is_none() {
        link = get(socket, By::Name(new.name.as_bytes()))?;
    }
    Ok(link)
}

/// Whether an Ethernet link of the socket's namespace carries a macvlan, an ipvlan or a `macsec` link, in
/// whichever namespace that is, up or down. A VLAN does not count.
///
/// Asks for a macvlan of mode passthru, which stands on a link alone: EINVAL beside another macvlan
/// (`macvlan_common_newlink()`), EBUSY where another kind has the link's handler of received frames
/// (`netdev_rx_handler_register()`). On a link without a child the kernel refuses the name, which it
/// looks at last (`register_netdevice()`). So nothing is made, and nobody is notified.
///
/// # Errors
/// The kernel's refusal: EOPNOTSUPP without macvlan.
pub fn carries_child(socket: &mut Socket, link: &Link) -> Result<bool> {
    // With that of a link the kernel would answer as for a link without a child.
    let unused = random_index();
    let child = Child::Macvlan {
        mode: MacVlanMode::Passthrough,
        broadcast_queue: None,
    };
    let mut message = LinkMessage::default();
    message.header.index = unused;
    message.attributes = vec![
        named(IFLA_IFNAME, b"lo"),
        LinkAttribute::Link(link.index),
        LinkAttribute::LinkInfo(child.info()),
    ];
    let what = format_args!("ask whether a child stands on {}", link.name);
    match socket.request(what, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &message) {
        Err(e) if e.is(libc::EEXIST) => Ok(false),
        Err(e) if e.is(libc::EINVAL) => Ok(true),
        // A port of a bridge or bond has that handler without a child.
        Err(e) if e.is(libc::EBUSY) => Ok(link.controller.is_none()),
        Err(e) => Err(e),
        // No link is called lo.
        Ok(()) => {
            let made = Link {
                index: unused,
                ..Link::default()
            };
            delete(socket, &made).map(|()| false)
        }
    }
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
