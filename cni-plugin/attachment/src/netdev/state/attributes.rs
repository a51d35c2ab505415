//! The table, and what its rows write.

use std::{collections::BTreeMap, io, net::Ipv6Addr};

use netlink::{
    Name, bpf, ioctl,
    link::{self, Change},
    sysctl,
};
use netlink_packet_route::link::{InfoKind, LinkFlags};

use super::{
    Attribute, Entries, Entry, Kind, Netdev, Restoration, Written,
    addresses::{self, ADDRESS, NEIGHBOUR, ROUTE, RULE},
    ethtool,
};
use crate::netdev::{
    identity::port_part,
    snapshot::{hexadecimal, of_hexadecimal},
};

pub const XDP_PROGRAM: &str = "XDP program";
pub const TCX_PROGRAM: &str = "BPF";
pub const STEERING_RULE: &str = "steering rule";
pub const ALTNAME: &str = "altname";
pub const MAC: &str = "MAC address";
/// RFC 2863's state that the link takes when it gets a carrier: 0 for up, 1 for dormant.
const LINK_MODE: &str = "mode";

/// `IF_OPER_TESTING`, `IF_OPER_DORMANT`, `IF_OPER_UP` (`include/uapi/linux/if.h`)
const OPER_TESTING: u8 = 4;
const OPER_DORMANT: u8 = 5;
const OPER_UP: u8 = 6;

/// The flags that an administrator sets; the rest are the kernel's (`__dev_change_flags()`).
const KEPT_FLAGS: LinkFlags = LinkFlags::Promisc
    .union(LinkFlags::Allmulti)
    .union(LinkFlags::Multicast)
    .union(LinkFlags::Noarp)
    .union(LinkFlags::Debug)
    .union(LinkFlags::Notrailers)
    .union(LinkFlags::Dynamic)
    .union(LinkFlags::Portsel)
    .union(LinkFlags::Automedia);

/// `IFLA_IPOIB_MODE`, `IFLA_IPOIB_UMCAST`
const IPOIB_MODE: std::ops::RangeInclusive<u16> = 2..=3;

type Read = fn(&mut Netdev<'_>) -> netlink::Result<Entries>;
type Write = fn(&mut Restoration<'_>, Entry<'_>) -> Written;

const fn row(key: &'static str, kind: Kind, read: Read, write: Write) -> Attribute {
    let same = |before: &str, now: &str| before == now;
    Attribute {
        key,
        kind,
        read,
        write,
        same,
    }
}

const fn step(write: Write) -> Attribute {
    row("", Kind::Step, |_| Ok(Entries::new()), write)
}

macro_rules! number {
    ($key:expr) => {
        row(
            $key,
            Kind::Value,
            |netdev| single(netdev.link.numbers.get($key)),
            |to, entry| {
                let (index, value) = (to.netdev.link.index, entry.parse()?);
                link::set_number(to.netdev.socket, entry.what, index, $key, value)
            },
        )
    };
}

/// The order of the writes: programs before the MTU, which XDP limits; what the PF allows before the
/// MAC address; all that a link takes only while it is down before `up`; sysctls, which an MTU too
/// small for IPv6 removes, after the MTU; addresses after `up`, and routes after the addresses and
/// neighbours that they need. The name comes before all of it: sysctls and steering rules go by name.
///
/// Each value is written by a request of its own, so that a driver that refuses one still takes the
/// others.
pub(super) static ATTRIBUTES: &[Attribute] = &[
    row(XDP_PROGRAM, Kind::Foreign, read_xdp, detach_xdp),
    row(
        TCX_PROGRAM,
        Kind::Foreign,
        |netdev| Ok(named(bpf::tcx(netdev.link.index)?)),
        detach_tcx,
    ),
    step(remove_altnames),
    row(
        ALTNAME,
        Kind::Item,
        |netdev| Ok(named(&netdev.link.altnames)),
        |to, entry| {
            let altname = Name::parse_display(entry.name).ok_or_else(|| entry.damaged())?;
            link::add_altname(to.netdev.socket, &to.netdev.link, &altname)
        },
    ),
    // What is refused is tried again, and reported, by the last step.
    step(|to, _| match &to.before.vf {
        Some(vf) => vf.restore_rights(to.sys, to.netdev.socket).map(drop),
        None => Ok(()),
    }),
    Attribute {
        same: |before, now| port_part(before) == port_part(now),
        ..row(
            MAC,
            Kind::Value,
            |netdev| single(Some(netdev.link.mac_text())),
            restore_mac,
        )
    },
    // Before the MTU: each mode has its own largest.
    row(
        "IPoIB mode",
        Kind::Value,
        read_ipoib_mode,
        restore_ipoib_mode,
    ),
    number!("mtu"),
    number!("txqueuelen"),
    row(
        "alias",
        Kind::Value,
        |netdev| single(Some(netdev.link.alias.clone().unwrap_or_default())),
        |to, entry| {
            let alias = Name::parse_display(entry.value).ok_or_else(|| entry.damaged())?;
            let alias = Some(alias.as_bytes());
            let change = Change {
                alias,
                ..Change::default()
            };
            to.change(entry.what, &change)
        },
    ),
    row(
        "flags",
        Kind::Value,
        |netdev| single(Some((netdev.link.flags & KEPT_FLAGS).bits())),
        |to, entry| {
            let flags = LinkFlags::from_bits_retain(entry.parse()?);
            to.set_flags(entry.what, flags, KEPT_FLAGS)
        },
    ),
    // Of InfiniBand the port makes it.
    row(
        "broadcast address",
        Kind::Value,
        |netdev| {
            let broadcast = hexadecimal(&netdev.link.broadcast);
            single(Some(broadcast).filter(|_| !netdev.link.is_infiniband()))
        },
        |to, entry| {
            let address = of_hexadecimal(entry.value).ok_or_else(|| entry.damaged())?;
            let change = Change {
                broadcast: Some(&address),
                ..Change::default()
            };
            to.change(entry.what, &change)
        },
    ),
    number!(LINK_MODE),
    number!("group"),
    number!("gso_max_segs"),
    // Each before those that follow from it: `netif_set_gso_max_size()` sets the limit for IPv4, too.
    number!("gso_max_size"),
    number!("gso_ipv4_max_size"),
    number!("gro_max_size"),
    number!("gro_ipv4_max_size"),
    // Users of promiscuity cannot be removed from here; each ends with what holds it.
    Attribute {
        same: |before, now| now.parse::<u32>().ok() <= before.parse().ok(),
        ..row(
            "promiscuity",
            Kind::Value,
            |netdev| single(Some(netdev.link.promiscuity)),
            |_, _| Ok(()),
        )
    },
    row(
        STEERING_RULE,
        Kind::Foreign,
        |netdev| Ok(named(ioctl::flow_rules(&netdev.link.name)?)),
        |to, entry| {
            let location = entry.name.parse().map_err(|_| entry.damaged())?;
            ioctl::delete_flow_rule(&to.netdev.link.name, location)
        },
    ),
    Attribute {
        same: |before, now| ethtool::differing(before, now).is_empty(),
        ..row(
            "ethtool",
            Kind::Driver,
            ethtool::read_groups,
            ethtool::restore_group,
        )
    },
    row(
        "feature",
        Kind::Driver,
        ethtool::read_features,
        ethtool::restore_feature,
    ),
    row(
        "sysctl",
        Kind::Value,
        |netdev| {
            let sysctls = sysctl::read_all(netdev.proc, &netdev.link.name)?;
            Ok(sysctls.into_iter().collect())
        },
        |to, entry| {
            let (group, key) = entry.name.rsplit_once('/').ok_or_else(|| entry.damaged())?;
            let name = &to.netdev.link.name;
            sysctl::write(to.netdev.proc, group, name, key, entry.value)
        },
    ),
    // The interface part of its IPv6 addresses, where an administrator set one; else `::`.
    row(
        "token",
        Kind::Value,
        |netdev| single(Some(netdev.link.token.unwrap_or(Ipv6Addr::UNSPECIFIED))),
        |to, entry| {
            let (index, token) = (to.netdev.link.index, entry.parse()?);
            link::set_token(to.netdev.socket, entry.what, index, token)
        },
    ),
    row(
        "up",
        Kind::Value,
        |netdev| single(Some(netdev.link.is_up())),
        |to, entry| {
            let up = entry.parse::<bool>()?;
            let flags = if up {
                LinkFlags::Up
            } else {
                LinkFlags::empty()
            };
            to.set_flags(entry.what, flags, LinkFlags::Up)
        },
    ),
    step(end_dormant),
    step(|to, _| {
        if let Some(vf) = &to.before.vf {
            let refused = vf.restore(to.sys, to.netdev.socket)?;
            if let Some(still) = vf.still_set(to.sys, to.netdev.socket)? {
                let refused = refused.join("; ");
                to.report.vf_kept = Some(format!("{still} was not restored: {refused}"));
            }
            to.report.warnings.extend(refused);
        }
        Ok(())
    }),
    step(addresses::remove_mislabelled),
    row(
        ADDRESS,
        Kind::Item,
        addresses::read_addresses,
        addresses::restore_address,
    ),
    row(
        NEIGHBOUR,
        Kind::Item,
        addresses::read_neighbours,
        addresses::restore_neighbour,
    ),
    // Addresses that it answers for on behalf of others.
    row(
        "proxy",
        Kind::Item,
        addresses::read_proxies,
        addresses::restore_neighbour,
    ),
    row(
        ROUTE,
        Kind::Item,
        addresses::read_routes,
        addresses::restore_route,
    ),
    row(
        RULE,
        Kind::Item,
        addresses::read_rules,
        addresses::restore_rule,
    ),
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

fn single(value: Option<impl ToString>) -> netlink::Result<Entries> {
    let entry = value.map(|value| (String::new(), value.to_string()));
    Ok(entry.into_iter().collect())
}

fn named(names: impl IntoIterator<Item = impl ToString>) -> Entries {
    let names = names.into_iter();
    names
        .map(|name| (name.to_string(), String::new()))
        .collect()
}

impl Restoration<'_> {
    fn set_flags(&mut self, what: &str, flags: LinkFlags, among: LinkFlags) -> Written {
        let change = Change {
            flags: Some((flags & among, among)),
            ..Change::default()
        };
        self.change(what, &change)
    }

    fn change(&mut self, what: &str, change: &Change<'_>) -> Written {
        link::change(self.netdev.socket, what, self.netdev.link.index, change)
    }
}

fn read_xdp(netdev: &mut Netdev<'_>) -> netlink::Result<Entries> {
    let programs = netdev.link.xdp.iter();
    Ok(named(
        programs.map(|(mode, id)| format!("{id} ({} mode)", mode.name)),
    ))
}

/// All that there are, with the first.
fn detach_xdp(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let link = &mut to.netdev.link;
    for (mode, id) in std::mem::take(&mut link.xdp) {
        match link::detach_xdp(to.netdev.socket, entry.what, link.index, mode) {
            Err(e) if e.is(libc::EBUSY) => bpf::detach_xdp_link(link.index, id)?,
            done => done?,
        }
    }
    Ok(())
}

fn detach_tcx(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let index = to.netdev.link.index;
    let mut programs = bpf::tcx(index)?.into_iter();
    let program = programs.find(|program| program.to_string() == entry.name);
    program.map_or(Ok(()), |program| bpf::detach_tcx(index, &program))
}

fn remove_altnames(to: &mut Restoration<'_>, _: Entry<'_>) -> Written {
    let link = to.netdev.link.clone();
    for name in link
        .altnames
        .iter()
        .filter(|name| !to.before.has_altname(name))
    {
        let removed = link::remove_altname(to.netdev.socket, &link, name);
        to.attempt(removed);
    }
    Ok(())
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
        to.change(entry.what, &Change::down())?;
    }
    let change = Change {
        mac: Some(&mac),
        ..Change::default()
    };
    to.change(entry.what, &change)
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
    let info = BTreeMap::from([(number, value)]);
    link::set_info(
        to.netdev.socket,
        entry.what,
        to.netdev.link.index,
        "ipoib",
        &info,
    )
}

/// A link that a pod left dormant, or testing, stays so when it is set up.
fn end_dormant(to: &mut Restoration<'_>, _: Entry<'_>) -> Written {
    if to.before.state.value("up") != Some("true") || to.before.state.value(LINK_MODE) != Some("0")
    {
        return Ok(());
    }
    to.refresh()?;
    let link = &to.netdev.link;
    if [OPER_TESTING, OPER_DORMANT].contains(&link.oper_state) {
        let what = format!("end the dormant state of {}", to.before.name);
        let ended = link::set_oper_state(to.netdev.socket, what, link.index, OPER_UP);
        to.attempt(ended);
    }
    Ok(())
}
