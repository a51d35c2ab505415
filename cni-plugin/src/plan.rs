//! What is to be done in the pod, decided before anything is changed. Pure: plain data in,
//! kernel messages out; nothing here asks the kernel, a file or a clock.

use std::net::{IpAddr, Ipv4Addr};

use cni_wire::{Cidr, CniResult, Code, Error};
use netlink_packet_core::DecodeError;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::IpoibMode,
    neighbour::NeighbourMessage,
    route::{
        RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
    },
    rule::RuleMessage,
};

use crate::{
    config::{Attach, Config},
    kernel::link::{Child, Link},
    netdev::{replay, snapshot::Snapshot},
};

/// The kind of attachment a configuration comes to.
///
/// Without `attach`, a device ID of an exclusive pool and a netdev named for moving mean
/// `move`; a shared device ID and a master mean a child of the kind that the link can have.
pub fn kind(config: &Config) -> Kind {
    let exclusive = config
        .allocation
        .as_ref()
        .is_some_and(|allocation| matches!(allocation.unit, hca::UnitId::Exclusive(_)));
    match config.attach {
        Some(attach) => Kind::Known(attach),
        None if config.master.is_some() => Kind::Child,
        None if config.device.is_some() || exclusive => Kind::Known(Attach::Move),
        None => Kind::Child,
    }
}

/// What [`kind`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This one.
    Known(Attach),
    /// macvlan on Ethernet, ipoib on InfiniBand.
    Child,
}

impl Kind {
    /// With the link at hand.
    pub fn on(self, link: &Link) -> Attach {
        match self {
            Kind::Known(attach) => attach,
            Kind::Child if link.is_infiniband() => Attach::Ipoib,
            Kind::Child => Attach::Macvlan,
        }
    }
}

/// Refuses what the kernel would refuse in worse words, or take and do something else.
///
/// # Errors
/// Code 7 or 2 naming the key and what to do instead.
pub fn check(
    attach: Attach,
    config: &Config,
    link: &Link,
    ipam: Option<&str>,
) -> Result<(), Error> {
    let name = &link.name;
    let invalid =
        |msg: String, remedy: &str| Err(Error::new(Code::InvalidConfig, msg).with_details(remedy));
    if let Some(mtu) = config.mtu {
        let most = if attach == Attach::Move {
            link.max_mtu
        } else {
            link.mtu
        };
        if most != 0 && mtu > most {
            return invalid(
                format!("mtu: {mtu} is more than the {most} of {name}"),
                "lower it, or raise the MTU of the netdev on the host",
            );
        }
    }
    match attach {
        Attach::Move => {}
        Attach::Macvlan | Attach::Ipvlan if link.hardware != 1 && !link.is_infiniband() => {
            return invalid(
                format!(
                    "{name} is no Ethernet link and cannot carry a {}",
                    attach.as_str()
                ),
                "name an Ethernet netdev as master",
            );
        }
        Attach::Macvlan if link.is_infiniband() => {
            return invalid(
                format!("{name} is IP over InfiniBand, which has no MAC addresses for a macvlan"),
                "set attach to ipoib for a child with a partition key of its own, or to ipvlan",
            );
        }
        Attach::Ipoib if !link.is_infiniband() => {
            return invalid(
                format!("{name} is no IP over InfiniBand link"),
                "set attach to macvlan for an Ethernet netdev",
            );
        }
        Attach::Macvlan | Attach::Ipvlan | Attach::Ipoib => {}
    }
    if attach == Attach::Macvlan {
        let passthru = config.mode.as_deref() == Some("passthru");
        config.macvlan_mode()?;
        if passthru && config.mac.is_some() {
            return invalid(
                "mac: a macvlan in mode passthru has its master's address".into(),
                "leave mac out, or use mode bridge",
            );
        }
    } else if config.broadcast_queue.is_some() {
        return invalid("bcqueuelen belongs to macvlan".into(), "leave it out");
    }
    if matches!(attach, Attach::Ipvlan | Attach::Ipoib) {
        if config.mac.is_some() {
            return invalid(
                format!("mac: an {} has its master's address", attach.as_str()),
                "leave mac out, or use attach macvlan",
            );
        }
        if ipam == Some("dhcp") {
            return invalid(
                format!(
                    "ipam.type dhcp cannot tell the {} children of {name} apart",
                    attach.as_str()
                ),
                "they share one hardware address; use another IPAM",
            );
        }
    }
    if attach == Attach::Move && config.mac.is_some() && link.hardware != 1 {
        return invalid(format!("mac: {name} is no Ethernet link"), "leave mac out");
    }
    if attach == Attach::Ipvlan {
        config.ipvlan_mode()?;
    }
    if attach == Attach::Ipoib {
        config.ipoib_mode()?;
    } else if config.pkey.is_some() {
        return invalid(
            "pkey belongs to ipoib".into(),
            "leave it out, or set attach to ipoib",
        );
    }
    Ok(())
}

/// The child to be made; none for a move.
///
/// `parent_pkey` and `parent_mode` are those of an IPoIB parent.
///
/// # Errors
/// Code 7 naming the mode.
pub fn child(
    attach: Attach,
    config: &Config,
    parent_pkey: u16,
    parent_mode: IpoibMode,
) -> Result<Option<Child>, Error> {
    Ok(match attach {
        Attach::Move => None,
        Attach::Macvlan => Some(Child::Macvlan {
            mode: config.macvlan_mode()?,
            broadcast_queue: config.broadcast_queue,
        }),
        Attach::Ipvlan => Some(Child::Ipvlan {
            mode: config.ipvlan_mode()?,
        }),
        Attach::Ipoib => Some(Child::Ipoib {
            // The kernel wants the membership bit set and works it out from the port's table.
            pkey: config.pkey.unwrap_or(parent_pkey) | 0x8000,
            mode: config.ipoib_mode()?.unwrap_or(parent_mode),
            user_multicast: config.user_multicast,
        }),
    })
}

/// A per-interface sysctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// `ipv4/conf` or `ipv6/conf`.
    pub group: &'static str,
    /// The key.
    pub key: &'static str,
    /// The value.
    pub value: &'static str,
}

/// What the interface is given once it is in the pod. Index 0 stands for its index.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Sysctls, written before the interface comes up.
    pub settings: Vec<Setting>,
    /// Addresses.
    pub addresses: Vec<AddressMessage>,
    /// Routes, those that others need first.
    pub routes: Vec<RouteMessage>,
    /// Rules.
    pub rules: Vec<RuleMessage>,
    /// Permanent neighbours.
    pub neighbours: Vec<NeighbourMessage>,
    /// What neighbours are told.
    pub announced: Vec<IpAddr>,
}

impl Layout {
    /// From the addresses and routes of an IPAM.
    pub fn of_result(attach: Attach, config: &Config, result: &CniResult) -> Layout {
        let mut routes = routes(result);
        routes.sort_by_key(replay::has_gateway);
        let announced: Vec<IpAddr> = result.ips.iter().map(|ip| ip.address.addr).collect();
        Layout {
            settings: settings(attach, config, announced.iter().any(IpAddr::is_ipv6)),
            addresses: result
                .ips
                .iter()
                .map(|ip| address_message(ip.address, config.dad))
                .collect(),
            routes,
            announced,
            ..Layout::default()
        }
    }

    /// From what a moved netdev had on the host.
    ///
    /// `ifname` is its name in the pod. Default routes of the main table stay behind where
    /// `has_default` says that the pod has one of that family: the pod's way out is its first
    /// interface's affair.
    ///
    /// # Errors
    /// The snapshot cannot be read, which the program that took it did not write.
    pub fn of_host(
        config: &Config,
        taken: &Snapshot,
        ifname: &str,
        has_default: impl Fn(AddressFamily) -> bool,
    ) -> Result<Layout, DecodeError> {
        let index = taken.identity.index;
        let mut addresses = taken.parsed_addresses()?;
        // Those the interface makes for itself again.
        addresses
            .retain(|a| !(a.header.family == AddressFamily::Inet6 && replay::is_link_local(a)));
        let mut routes = taken.parsed_routes()?;
        routes.retain(|r| {
            let stays = replay::is_default(r)
                && replay::route_table(r) == replay::MAIN
                && has_default(r.header.address_family);
            !stays && !replay::leaves_elsewhere(r, index)
        });
        let announced: Vec<IpAddr> = addresses.iter().filter_map(own_address).collect();
        Ok(Layout {
            settings: settings(Attach::Move, config, announced.iter().any(IpAddr::is_ipv6)),
            addresses: addresses
                .iter()
                .map(|a| replay::address_elsewhere(a, 0))
                .collect(),
            routes: routes.iter().map(|r| replay::route(r, index, 0)).collect(),
            rules: taken
                .parsed_rules()?
                .iter()
                .map(|r| replay::rule(r, &taken.name, ifname))
                .collect(),
            neighbours: taken
                .parsed_neighbours()?
                .iter()
                .map(|n| replay::neighbour(n, 0))
                .collect(),
            announced,
        })
    }
}

/// An address as the interface's own, not its peer's.
pub fn own_address(message: &AddressMessage) -> Option<IpAddr> {
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    local.or_else(|| {
        message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })
}

/// The sysctls of an interface with or without IPv6 addresses.
///
/// Router advertisements are not followed unless asked: a rail would get addresses and default
/// routes nobody planned. Duplicate address detection is off unless asked: the IPAM has seen
/// to it, and waiting for it costs more than all the rest. A child without IPv6 addresses gets
/// no link-local one: each takes two entries of the RoCE port's GID table, which is what limits
/// the number of pods on a port.
fn settings(attach: Attach, config: &Config, v6: bool) -> Vec<Setting> {
    let set = |group, key, value| Setting { group, key, value };
    let mut settings = vec![set("ipv4/conf", "arp_notify", "1")];
    let link_local = config.link_local.unwrap_or(v6 || attach == Attach::Move);
    if v6 || link_local {
        settings.push(set("ipv6/conf", "disable_ipv6", "0"));
        settings.push(set("ipv6/conf", "ndisc_notify", "1"));
        settings.push(set("ipv6/conf", "keep_addr_on_down", "1"));
        if !config.dad {
            settings.push(set("ipv6/conf", "accept_dad", "0"));
        }
    }
    if !link_local {
        // IN6_ADDR_GEN_MODE_NONE
        settings.push(set("ipv6/conf", "addr_gen_mode", "1"));
    }
    settings.push(set(
        "ipv6/conf",
        "accept_ra",
        if config.accept_ra { "1" } else { "0" },
    ));
    settings
}

fn address_message(address: Cidr, dad: bool) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.prefix_len = address.prefix;
    match address.addr {
        IpAddr::V4(addr) => {
            message.header.family = AddressFamily::Inet;
            message
                .attributes
                .push(AddressAttribute::Local(address.addr));
            message
                .attributes
                .push(AddressAttribute::Address(address.addr));
            message
                .attributes
                .extend(broadcast(addr, address.prefix).map(AddressAttribute::Broadcast));
        }
        IpAddr::V6(_) => {
            message.header.family = AddressFamily::Inet6;
            message
                .attributes
                .push(AddressAttribute::Address(address.addr));
            if !dad {
                message
                    .attributes
                    .push(AddressAttribute::Flags(AddressFlags::Nodad));
            }
        }
    }
    message
}

/// RFC 3021: a /31 has none, and neither has a single address.
fn broadcast(addr: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    (prefix < 31).then(|| {
        let host = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
        Ipv4Addr::from_bits(addr.to_bits() | host)
    })
}

/// The routes of a result, one message each in their order.
pub fn routes(result: &CniResult) -> Vec<RouteMessage> {
    result
        .routes
        .iter()
        .map(|route| route_message(route, result))
        .collect()
}

/// A route as the result says it; without a next hop, through the gateway of the family's
/// first address that has one.
fn route_message(route: &cni_wire::Route, result: &CniResult) -> RouteMessage {
    /// `RT_SCOPE_LINK`
    const LINK: u8 = 253;
    let v4 = route.dst.addr.is_ipv4();
    let of_family = || {
        result
            .ips
            .iter()
            .filter(|ip| ip.address.addr.is_ipv4() == v4)
    };
    let gateway = match route.gw {
        Some(gateway) => Some(gateway),
        None if route.scope.is_some_and(|scope| scope >= LINK) => None,
        None => of_family().find_map(|ip| ip.gateway),
    };
    let mut message = RouteMessage::default();
    message.header.address_family = if v4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    message.header.destination_prefix_length = route.dst.prefix;
    message.header.protocol = RouteProtocol::Static;
    message.header.kind = RouteType::Unicast;
    message.header.scope = match (route.scope, gateway) {
        (Some(scope), _) => scope.into(),
        (None, None) if v4 => RouteScope::Link,
        (None, _) => RouteScope::Universe,
    };
    let table = route.table.unwrap_or(replay::MAIN);
    message.header.table = u8::try_from(table).unwrap_or(0);
    let attributes = &mut message.attributes;
    if route.dst.prefix > 0 {
        attributes.push(RouteAttribute::Destination(route.dst.network().addr.into()));
    }
    attributes.push(RouteAttribute::Oif(0));
    attributes.push(RouteAttribute::Table(table));
    attributes.extend(route.priority.map(RouteAttribute::Priority));
    let metrics: Vec<RouteMetric> = [
        route.mtu.map(RouteMetric::Mtu),
        route.advmss.map(RouteMetric::Advmss),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !metrics.is_empty() {
        attributes.push(RouteAttribute::Metrics(metrics));
    }
    if let Some(gateway) = gateway {
        attributes.push(RouteAttribute::Gateway(gateway.into()));
        // A pod with a single address (/32) still reaches its gateway over this link.
        let reached = of_family().any(|ip| ip.address.contains(gateway))
            || matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
        if !reached {
            message.header.flags |= RouteFlags::Onlink;
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use cni_wire::{IpConfig, Route};

    use super::*;
    use crate::netdev::words;

    fn config() -> Config {
        Config {
            attach: None,
            device: None,
            master: None,
            allocation: None,
            port: None,
            mode: None,
            mtu: None,
            mac: None,
            broadcast_queue: None,
            link_in_container: false,
            pkey: None,
            user_multicast: true,
            link_local: None,
            accept_ra: false,
            dad: false,
        }
    }

    fn link(hardware: u16) -> Link {
        Link {
            name: "eth1".into(),
            hardware,
            mtu: 1500,
            max_mtu: 9000,
            ..Link::default()
        }
    }

    fn unit(text: &str) -> Option<crate::config::Allocation> {
        Some(crate::config::Allocation {
            unit: text.parse().unwrap(),
            text: text.into(),
        })
    }

    #[test]
    fn the_allocation_decides_what_is_made_unless_the_configuration_says() {
        let exclusive = Config {
            allocation: unit("0000:3b:00.0"),
            ..config()
        };
        let shared = Config {
            allocation: unit("0000:3b:00.0_3e71787e_17"),
            ..config()
        };
        let master = Config {
            master: Some("eth1".into()),
            ..exclusive.clone()
        };
        let said = Config {
            attach: Some(Attach::Ipvlan),
            ..exclusive.clone()
        };
        let device = Config {
            device: Some(crate::config::Target::Name("e".into())),
            ..config()
        };
        assert_eq!(kind(&exclusive), Kind::Known(Attach::Move));
        assert_eq!(kind(&device), Kind::Known(Attach::Move));
        assert_eq!(kind(&shared), Kind::Child);
        assert_eq!(kind(&master), Kind::Child);
        assert_eq!(kind(&said), Kind::Known(Attach::Ipvlan));
        assert_eq!(Kind::Child.on(&link(1)), Attach::Macvlan);
        assert_eq!(Kind::Child.on(&link(32)), Attach::Ipoib);
    }

    #[test]
    fn impossible_attachments_are_refused_with_what_to_do_instead() {
        let mac: hca::MacAddress = "02:00:00:00:00:01".parse().unwrap();
        let mtu = |mtu| Config {
            mtu: Some(mtu),
            ..config()
        };
        let with_mac = Config {
            mac: Some(mac),
            ..config()
        };
        let passthru = Config {
            mode: Some("passthru".into()),
            ..with_mac.clone()
        };
        let pkey = Config {
            pkey: Some(0x8001),
            ..config()
        };
        let queue = Config {
            broadcast_queue: Some(9),
            ..config()
        };
        for (attach, config, link, ipam, word) in [
            (Attach::Macvlan, config(), link(32), None, "InfiniBand"),
            (Attach::Ipoib, config(), link(1), None, "InfiniBand"),
            (Attach::Macvlan, config(), link(772), None, "no Ethernet"),
            (Attach::Ipvlan, config(), link(1), Some("dhcp"), "dhcp"),
            (Attach::Ipoib, config(), link(32), Some("dhcp"), "dhcp"),
            (Attach::Ipvlan, with_mac.clone(), link(1), None, "mac"),
            (Attach::Move, with_mac, link(32), None, "mac"),
            (Attach::Macvlan, passthru, link(1), None, "passthru"),
            (Attach::Macvlan, mtu(1501), link(1), None, "mtu"),
            (Attach::Move, mtu(9001), link(1), None, "mtu"),
            (Attach::Macvlan, pkey, link(1), None, "pkey"),
            (Attach::Ipvlan, queue, link(1), None, "bcqueuelen"),
        ] {
            let error = check(attach, &config, &link, ipam).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(
                error.msg.contains(word) && !error.details.is_empty(),
                "{word}: {error}"
            );
        }
        check(Attach::Macvlan, &mtu(1500), &link(1), Some("dhcp")).unwrap();
        check(Attach::Move, &mtu(9000), &link(1), None).unwrap();
    }

    fn result(ips: &[(&str, Option<&str>)], routes: Vec<Route>) -> CniResult {
        CniResult {
            ips: ips
                .iter()
                .map(|(address, gateway)| IpConfig {
                    address: address.parse().unwrap(),
                    gateway: gateway.map(|gw| gw.parse().unwrap()),
                    interface: None,
                })
                .collect(),
            routes,
            ..CniResult::default()
        }
    }

    fn laid_out(result: &CniResult) -> Vec<RouteMessage> {
        Layout::of_result(Attach::Macvlan, &config(), result).routes
    }

    #[test]
    fn a_route_without_next_hop_takes_the_gateway_of_its_family() {
        let dst = |dst: &str| Route::via(dst.parse().unwrap(), None);
        let list = laid_out(&result(
            &[("10.0.0.5/24", Some("10.0.0.1")), ("fd00::5/64", None)],
            vec![
                dst("10.0.0.0/8"),
                dst("fd01::/64"),
                Route {
                    scope: Some(253),
                    ..dst("10.9.0.0/16")
                },
            ],
        ));
        let texts: Vec<String> = list.iter().map(words::route).collect();
        assert_eq!(
            texts,
            ["fd01::/64", "10.9.0.0/16", "10.0.0.0/8 via 10.0.0.1"]
        );
        assert_eq!(list[1].header.scope, RouteScope::Link);
    }

    #[test]
    fn all_fields_of_a_route_are_honoured() {
        let route = Route {
            mtu: Some(4200),
            advmss: Some(4000),
            priority: Some(50),
            table: Some(1000),
            ..Route::via(
                "0.0.0.0/0".parse().unwrap(),
                Some("10.0.0.1".parse().unwrap()),
            )
        };
        let list = laid_out(&result(&[("10.0.0.5/24", None)], vec![route]));
        assert_eq!(
            words::route(&list[0]),
            "default via 10.0.0.1 metric 50 table 1000"
        );
        let metrics = vec![RouteMetric::Mtu(4200), RouteMetric::Advmss(4000)];
        assert!(
            list[0]
                .attributes
                .contains(&RouteAttribute::Metrics(metrics))
        );
        assert!(list[0].header.flags.is_empty());
    }

    #[test]
    fn a_gateway_outside_the_subnet_is_on_the_link() {
        let via = |gw: &str| Route::via("10.0.0.0/8".parse().unwrap(), Some(gw.parse().unwrap()));
        let list = laid_out(&result(&[("10.1.0.5/32", None)], vec![via("10.1.0.1")]));
        assert_eq!(list[0].header.flags, RouteFlags::Onlink);
        let v6 = Route::via("::/0".parse().unwrap(), Some("fe80::1".parse().unwrap()));
        let list = laid_out(&result(&[("fd00::5/128", None)], vec![v6]));
        assert!(list[0].header.flags.is_empty());
    }

    #[test]
    fn addresses_need_no_detection_unless_asked() {
        let flags = |dad: bool| {
            let config = Config { dad, ..config() };
            let layout = Layout::of_result(
                Attach::Macvlan,
                &config,
                &result(&[("fd00::5/64", None)], vec![]),
            );
            let dad_off = layout
                .settings
                .iter()
                .any(|s| s.key == "accept_dad" && s.value == "0");
            let nodad = layout.addresses[0]
                .attributes
                .contains(&AddressAttribute::Flags(AddressFlags::Nodad));
            (dad_off, nodad)
        };
        assert_eq!(flags(false), (true, true));
        assert_eq!(flags(true), (false, false));
    }

    #[test]
    fn link_local_addresses_are_made_only_where_they_serve() {
        let suppressed = |attach, link_local, ips: &[(&str, Option<&str>)]| {
            let config = Config {
                link_local,
                ..config()
            };
            let layout = Layout::of_result(attach, &config, &result(ips, vec![]));
            layout
                .settings
                .iter()
                .any(|s| s.key == "addr_gen_mode" && s.value == "1")
        };
        let (v4, v6) = (&[("10.0.0.5/24", None)], &[("fd00::5/64", None)]);
        assert!(suppressed(Attach::Macvlan, None, v4));
        assert!(!suppressed(Attach::Macvlan, None, v6));
        assert!(!suppressed(Attach::Macvlan, Some(true), v4));
        assert!(suppressed(Attach::Macvlan, Some(false), v6));
        assert!(!suppressed(Attach::Move, None, v4));
    }

    #[test]
    fn broadcast_addresses_follow_the_prefix() {
        let of = |text: &str, prefix| broadcast(text.parse().unwrap(), prefix);
        assert_eq!(of("10.1.2.3", 16), Some(Ipv4Addr::new(10, 1, 255, 255)));
        assert_eq!(of("10.1.2.3", 0), Some(Ipv4Addr::BROADCAST));
        assert_eq!(of("10.1.2.3", 31), None);
        assert_eq!(of("10.1.2.3", 32), None);
    }
}
