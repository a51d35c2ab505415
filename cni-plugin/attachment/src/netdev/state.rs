//! The state of a netdev on the host: what the journal keeps of it, and reading it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    path::Path,
};

use hca::MacAddress;
use netlink::{Name, Socket, address, link::Link, neighbour, route, rule, sysctl};
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    link::{InfoKind, LinkFlags},
};
use serde::{Deserialize, Serialize};

use super::{identity::mac_of, replay};
use crate::interface::{InterfaceConfig, Sysctl};

/// The flags that are restored, beside `up`.
pub(super) const KEPT_FLAGS: LinkFlags = LinkFlags::Allmulti
    .union(LinkFlags::Multicast)
    .union(LinkFlags::Noarp);

/// `IFLA_IPOIB_MODE`, `IFLA_IPOIB_UMCAST`
const IPOIB_MODE: RangeInclusive<u16> = 2..=3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct State {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// In bytes.
    pub mtu: u32,
    /// In packets.
    pub tx_queue_length: u32,
    /// `IFF_*`, of [`KEPT_FLAGS`] and `IFF_UP`.
    pub flags: u32,
    #[serde(default, skip_serializing_if = "Name::is_empty")]
    pub alias: Name,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub altnames: Vec<Name>,
    /// The attributes [`IPOIB_MODE`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ipoib_mode: BTreeMap<u16, Vec<u8>>,
    /// `ipv4` and `ipv6`, as far as the kernel keeps settings of the netdev.
    pub families: BTreeSet<String>,
    /// All sysctls, addresses, permanent neighbours, routes and rules but those that come by themselves.
    pub config: InterfaceConfig,
}

impl State {
    /// The state of a netdev of the namespace that the thread and the socket are in.
    pub(super) fn read(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Self> {
        Ok(State {
            mac: mac_of(&link.mac),
            mtu: link.mtu,
            tx_queue_length: link.tx_queue_length,
            flags: (link.flags & (KEPT_FLAGS | LinkFlags::Up)).bits(),
            alias: link.alias.clone().unwrap_or_default(),
            altnames: link.altnames.clone(),
            ipoib_mode: ipoib_mode(link),
            families: families(proc, &link.name),
            config: config(socket, proc, link)?,
        })
    }
}

fn ipoib_mode(link: &Link) -> BTreeMap<u16, Vec<u8>> {
    let mut mode = link.info.clone();
    let is_ipoib = link.kind == Some(InfoKind::Ipoib);
    mode.retain(|number, _| is_ipoib && IPOIB_MODE.contains(number));
    mode
}

pub(super) fn families(proc: &Path, name: &Name) -> BTreeSet<String> {
    let net = proc.join("sys/net");
    let has_settings = |family: &&str| net.join(family).join("conf").join(name).exists();
    let families = ["ipv4", "ipv6"].into_iter().filter(has_settings);
    families.map(str::to_owned).collect()
}

fn config(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<InterfaceConfig> {
    let sysctls = sysctl::read_all(proc, &link.name)?.into_iter();
    let neighbours = neighbour::list_permanent(socket, link.index)?;
    let name = String::from_utf8_lossy(link.name.as_bytes());
    let (mut routes, mut rules) = (Vec::new(), Vec::new());
    for family in route::FAMILIES {
        let mut of_family = route::list(socket, family, link.index)?;
        of_family.retain(|route| !replay::is_kernel_made(route));
        let tables: Vec<u32> = of_family.iter().map(route::table_of).collect();
        let mut concerned = rule::list(socket, family)?;
        concerned.retain(|rule| replay::rule_concerns(rule, &name, &tables));
        routes.extend(of_family);
        rules.extend(concerned);
    }
    routes.sort_by_key(replay::has_gateway);
    let sysctl = |(key, value): (String, String)| Sysctl {
        key: key.into(),
        value: value.into(),
    };
    let routes = routes.iter();
    Ok(InterfaceConfig {
        sysctls: sysctls.map(sysctl).collect(),
        addresses: addresses(socket, link.index)?,
        neighbours: neighbours
            .iter()
            .map(|one| replay::neighbour(one, 0))
            .collect(),
        routes: routes
            .map(|one| replay::route(one, link.index, 0))
            .collect(),
        rules: rules
            .iter()
            .map(|one| replay::rule(one, &name, &name))
            .collect(),
    })
}

/// In an order of writes that leaves the kernel's list as it was: an IPv6 address goes before those of
/// its scope (`ipv6_link_dev_addr()`), an IPv4 one behind.
fn addresses(socket: &mut Socket, index: u32) -> netlink::Result<Vec<AddressMessage>> {
    let mut all = address::list(socket, index)?;
    all.retain(|address| !replay::is_autoconfigured(address));
    let is_v6 = |address: &AddressMessage| address.header.family == AddressFamily::Inet6;
    let (v6, v4): (Vec<_>, Vec<_>) = all.iter().partition(|address| is_v6(address));
    let ordered = v4.into_iter().chain(v6.into_iter().rev());
    Ok(ordered.map(|address| replay::address(address, 0)).collect())
}
