//! The tables, and what their rows write.

use std::io;

use netlink::{
    Name,
    link::{self, Change},
    sysctl,
};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags};

use super::{
    Attribute, Entries, Entry, Netdev, Restoration, Written,
    addresses::{self, ADDRESS, NEIGHBOUR, ROUTE, RULE},
};
use crate::netdev::snapshot::{hexadecimal, of_hexadecimal};

pub const ALTNAME: &str = "altname";
pub const MAC: &str = "MAC address";

/// The flags that are restored, beside `up`.
const KEPT_FLAGS: LinkFlags = LinkFlags::Allmulti
    .union(LinkFlags::Multicast)
    .union(LinkFlags::Noarp);

/// `IFLA_IPOIB_MODE`, `IFLA_IPOIB_UMCAST`
pub(crate) const IPOIB_MODE: std::ops::RangeInclusive<u16> = 2..=3;

/// What has one value, or one by name; one that differs is written. All that a link takes only while
/// it is down before `up`; sysctls, which an MTU too small for IPv6 removes, after the MTU. The name
/// comes before all of it: sysctls go by name.
///
/// Each value is written by a request of its own, so that a driver that refuses one still takes the
/// others.
pub(super) static VALUES: &[Attribute] = &[
    Attribute {
        key: MAC,
        read: |netdev| single(netdev.link.mac_text()),
        write: restore_mac,
    },
    // Before the MTU: each mode has its own largest.
    Attribute {
        key: "IPoIB mode",
        read: read_ipoib_mode,
        write: restore_ipoib_mode,
    },
    // Before the MTU, which it changes.
    Attribute {
        key: "IP",
        read: read_families,
        write: restore_families,
    },
    Attribute {
        key: "mtu",
        read: |netdev| single(netdev.link.mtu),
        write: |to, entry| to.set(entry, LinkAttribute::Mtu(entry.parse()?)),
    },
    Attribute {
        key: "txqueuelen",
        read: |netdev| single(netdev.link.tx_queue_length),
        write: |to, entry| to.set(entry, LinkAttribute::TxQueueLen(entry.parse()?)),
    },
    Attribute {
        key: "alias",
        read: |netdev| single(netdev.link.alias.clone().unwrap_or_default()),
        write: |to, entry| {
            let alias = Name::parse_display(entry.value).ok_or_else(|| entry.damaged())?;
            let alias = Some(alias.as_bytes());
            let change = Change {
                alias,
                ..Change::default()
            };
            to.change(entry, &change)
        },
    },
    Attribute {
        key: "flags",
        read: |netdev| single((netdev.link.flags & KEPT_FLAGS).bits()),
        write: |to, entry| {
            let flags = LinkFlags::from_bits_retain(entry.parse()?);
            to.set_flags(entry, flags, KEPT_FLAGS)
        },
    },
    Attribute {
        key: "sysctl",
        read: |netdev| {
            let sysctls = sysctl::read_all(netdev.proc, &netdev.link.name)?;
            Ok(sysctls.into_iter().collect())
        },
        write: |to, entry| {
            let (group, key) = entry.name.rsplit_once('/').ok_or_else(|| entry.damaged())?;
            let name = &to.netdev.link.name;
            sysctl::write(to.netdev.proc, group, name, key, entry.value)
        },
    },
    Attribute {
        key: "up",
        read: |netdev| single(netdev.link.is_up()),
        write: |to, entry| {
            let flags = match entry.parse()? {
                true => LinkFlags::Up,
                false => LinkFlags::empty(),
            };
            to.set_flags(entry, flags, LinkFlags::Up)
        },
    },
];

/// Lists. Routes come after the addresses and neighbours that they need.
pub(super) static ITEMS: &[Attribute] = &[
    Attribute {
        key: ALTNAME,
        read: |netdev| {
            let altnames = netdev.link.altnames.iter();
            Ok(altnames
                .map(|name| (name.to_string(), String::new()))
                .collect())
        },
        write: |to, entry| {
            let altname = Name::parse_display(entry.name).ok_or_else(|| entry.damaged())?;
            link::add_altname(to.netdev.socket, &to.netdev.link, &altname)
        },
    },
    Attribute {
        key: ADDRESS,
        read: addresses::read_addresses,
        write: addresses::restore_address,
    },
    Attribute {
        key: NEIGHBOUR,
        read: addresses::read_neighbours,
        write: addresses::restore_neighbour,
    },
    Attribute {
        key: ROUTE,
        read: addresses::read_routes,
        write: addresses::restore_route,
    },
    Attribute {
        key: RULE,
        read: addresses::read_rules,
        write: addresses::restore_rule,
    },
];

impl Entry<'_> {
    pub(super) fn damaged(self) -> netlink::Error {
        let damaged = io::Error::new(io::ErrorKind::InvalidData, "the record is damaged");
        netlink::Error::call(self.what, damaged)
    }

    fn parse<T: std::str::FromStr>(self) -> netlink::Result<T> {
        self.value.parse().map_err(|_| self.damaged())
    }
}

fn single(value: impl ToString) -> netlink::Result<Entries> {
    Ok(vec![(String::new(), value.to_string())])
}

impl Restoration<'_> {
    fn set_flags(&mut self, entry: Entry<'_>, flags: LinkFlags, among: LinkFlags) -> Written {
        let change = Change {
            flags: Some((flags & among, among)),
            ..Change::default()
        };
        self.change(entry, &change)
    }

    fn change(&mut self, entry: Entry<'_>, change: &Change<'_>) -> Written {
        link::change(
            self.netdev.socket,
            entry.what,
            self.netdev.link.index,
            change,
        )
    }

    fn set(&mut self, entry: Entry<'_>, attribute: LinkAttribute) -> Written {
        let index = self.netdev.link.index;
        link::set(self.netdev.socket, entry.what, index, vec![attribute])
    }
}

/// Of IPoIB the address ends with the port's GUID (its last 8 bytes): the rest is the kernel's.
fn restore_mac(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let known: hca::MacAddress = entry.parse()?;
    let link = &to.netdev.link;
    let mac = match (link.mac.get(..12), known.bytes().get(12..20)) {
        (Some(of_kernel), Some(guid)) => [of_kernel, guid].concat(),
        _ => known.bytes().to_vec(),
    };
    if mac.len() != link.mac.len() {
        return Ok(());
    }
    // Most drivers take none while the link is up (`eth_prepare_mac_addr_change()`), and the kernel
    // changes the address before the flags (`do_setlink()`).
    if link.is_up() {
        to.change(entry, &Change::down())?;
        to.netdev.link.flags -= LinkFlags::Up;
    }
    to.set(entry, LinkAttribute::Address(mac))
}

/// The families of which the kernel keeps state for it.
fn read_families(netdev: &mut Netdev<'_>) -> netlink::Result<Entries> {
    let (net, name) = (netdev.proc.join("sys/net"), &netdev.link.name);
    let has_state = |family: &&str| net.join(family).join("conf").join(name).exists();
    let families: Vec<&str> = ["ipv4", "ipv6"].into_iter().filter(has_state).collect();
    single(families.join(" "))
}

/// A netdev that came to its namespace under the name `all` or `default` has neither
/// (`sysctl_dev_name_is_allowed()`), so that it takes no address. The kernel makes both anew when the
/// MTU changes (`inetdev_event()`, `addrconf_notify()`).
fn restore_families(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    // The least MTU with IPv4, which most drivers have for their least.
    const LEAST: u32 = 68;
    let other = match to.netdev.link.mtu {
        mtu if mtu > LEAST => mtu - 1,
        mtu => mtu + 1,
    };
    to.set(entry, LinkAttribute::Mtu(other))
}

fn read_ipoib_mode(netdev: &mut Netdev<'_>) -> netlink::Result<Entries> {
    let link = &netdev.link;
    let is_ipoib = link.kind == Some(InfoKind::Ipoib);
    let mode = link.info.iter();
    let mode = mode.filter(|(number, _)| is_ipoib && IPOIB_MODE.contains(number));
    Ok(mode
        .map(|(number, value)| (number.to_string(), hexadecimal(value)))
        .collect())
}

fn restore_ipoib_mode(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let value = of_hexadecimal(entry.value).ok_or_else(|| entry.damaged())?;
    let number = entry.name.parse().map_err(|_| entry.damaged())?;
    let (socket, index) = (&mut *to.netdev.socket, to.netdev.link.index);
    link::set_info(socket, entry.what, index, "ipoib", (number, &value))
}
