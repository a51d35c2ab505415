//! What an interface is given in its pod: sysctls, addresses, routes, rules, neighbours. Pure.

use std::net::{IpAddr, Ipv4Addr};

use attachment::netdev::{replay, snapshot::Snapshot};
use cni_wire::{Cidr, CniResult, Version};
use netlink::route;
use netlink_packet_core::DecodeError;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    neighbour::NeighbourMessage,
    route::{
        RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
    },
    rule::RuleMessage,
};

use crate::config::{Attach, Config};

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
pub struct InterfaceConfig {
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
    /// What is announced to neighbours.
    pub announced: Vec<IpAddr>,
    /// Gateways of the addresses.
    pub gateways: Vec<IpAddr>,
    /// Families of which the pod has a default route already.
    pub defaults_of_the_pod: Vec<AddressFamily>,
}

impl InterfaceConfig {
    /// From the addresses and routes of an IPAM.
    pub fn of_result(attach: Attach, config: &Config, result: &CniResult) -> InterfaceConfig {
        let mut routes = routes(result);
        routes.sort_by_key(replay::has_gateway);
        let announced: Vec<IpAddr> = result.ips.iter().map(|ip| ip.address.addr).collect();
        InterfaceConfig {
            settings: settings(attach, config, announced.iter().any(IpAddr::is_ipv6)),
            addresses: result
                .ips
                .iter()
                .map(|ip| address_message(ip.address, config.dad))
                .collect(),
            routes,
            announced,
            gateways: result.ips.iter().filter_map(|ip| ip.gateway).collect(),
            ..InterfaceConfig::default()
        }
    }

    /// From what a moved netdev had on the host.
    ///
    /// `ifname` is its name in the pod.
    ///
    /// # Errors
    /// The snapshot cannot be read, which the program that took it did not write.
    pub fn of_host(
        config: &Config,
        taken: &Snapshot,
        ifname: &str,
    ) -> Result<InterfaceConfig, DecodeError> {
        let index = taken.identity.index;
        let given = taken.given_to_pod()?;
        let mut addresses = given.addresses;
        // Those the interface makes for itself again.
        addresses
            .retain(|a| !(a.header.family == AddressFamily::Inet6 && replay::is_link_local(a)));
        let mut routes = given.routes;
        routes.retain(|r| !replay::leaves_elsewhere(r, index) && !replay::is_by_number_alone(r));
        let announced: Vec<IpAddr> = addresses.iter().filter_map(own_address).collect();
        Ok(InterfaceConfig {
            settings: settings(Attach::Move, config, announced.iter().any(IpAddr::is_ipv6)),
            addresses: addresses
                .iter()
                .map(|a| replay::address_elsewhere(a, 0))
                .collect(),
            routes: routes.iter().map(|r| replay::route(r, index, 0)).collect(),
            rules: given
                .rules
                .iter()
                .map(|r| replay::rule(r, &taken.name.to_string(), ifname))
                .collect(),
            neighbours: given
                .neighbours
                .iter()
                .map(|n| replay::neighbour(n, 0))
                .collect(),
            announced,
            ..InterfaceConfig::default()
        })
    }

    /// The families of its addresses.
    pub fn families(&self) -> Vec<AddressFamily> {
        let mut families: Vec<AddressFamily> =
            self.addresses.iter().map(|a| a.header.family).collect();
        families.dedup();
        families
    }

    /// Whether a default route of a family is meant for the main table.
    pub fn has_default(&self, family: AddressFamily) -> bool {
        self.routes
            .iter()
            .any(|r| r.header.address_family == family && is_way_out(r))
    }

    /// Says in a result where its default routes went: into a rail's table. Versions that cannot
    /// say it do not name them.
    pub fn report_defaults(&self, result: &mut CniResult, version: Version) {
        for family in &self.defaults_of_the_pod {
            let of_family = |r: &&RouteMessage| r.header.address_family == *family;
            let in_main = self.routes.iter().filter(of_family).any(is_way_out);
            let moved = self
                .routes
                .iter()
                .filter(of_family)
                .find(|r| replay::is_default(r));
            let Some(table) = moved.filter(|_| !in_main).map(route::table_of) else {
                continue;
            };
            let v4 = *family == AddressFamily::Inet;
            let is_meant = |r: &cni_wire::Route| {
                r.dst.is_default_route() && r.dst.addr.is_ipv4() == v4 && r.table.is_none()
            };
            if version >= Version::V1_0_0 {
                for route in result.routes.iter_mut().filter(|r| is_meant(r)) {
                    route.table = Some(table);
                }
            } else {
                result.routes.retain(|r| !is_meant(r));
            }
        }
    }

    /// Leaves out default routes of the main table of these families.
    pub fn without_defaults(&mut self, families: &[AddressFamily]) {
        self.routes
            .retain(|r| !(is_way_out(r) && families.contains(&r.header.address_family)));
    }
}

fn is_way_out(route: &RouteMessage) -> bool {
    replay::is_default(route) && route::table_of(route) == replay::MAIN
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
/// routes that were not planned. Duplicate address detection is off unless asked: the IPAM has seen
/// to it, and waiting for it costs more than all the rest. A child without IPv6 addresses gets
/// no link-local one: each takes two entries of the RoCE port's GID table, which is what limits
/// the number of pods on a port.
fn settings(attach: Attach, config: &Config, v6: bool) -> Vec<Setting> {
    let set = |group, key, value| Setting { group, key, value };
    let mut settings = vec![set("ipv4/conf", "arp_notify", "1")];
    if config.rails.keep_arp() {
        // Otherwise each of a pod's interfaces answers for all of its addresses.
        settings.push(set("ipv4/conf", "arp_ignore", "1"));
        settings.push(set("ipv4/conf", "arp_announce", "2"));
    }
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
    use crate::config::ChildKind;
    use attachment::netdev::display;

    fn config() -> Config {
        Config::default()
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
        InterfaceConfig::of_result(Attach::Child(ChildKind::Macvlan), &config(), result).routes
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
        let texts: Vec<String> = list.iter().map(display::route).collect();
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
            display::route(&list[0]),
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
            let interface_config = InterfaceConfig::of_result(
                Attach::Child(ChildKind::Macvlan),
                &config,
                &result(&[("fd00::5/64", None)], vec![]),
            );
            let dad_off = interface_config
                .settings
                .iter()
                .any(|s| s.key == "accept_dad" && s.value == "0");
            let nodad = interface_config.addresses[0]
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
            let interface_config =
                InterfaceConfig::of_result(attach, &config, &result(ips, vec![]));
            interface_config
                .settings
                .iter()
                .any(|s| s.key == "addr_gen_mode" && s.value == "1")
        };
        let (v4, v6) = (&[("10.0.0.5/24", None)], &[("fd00::5/64", None)]);
        assert!(suppressed(Attach::Child(ChildKind::Macvlan), None, v4));
        assert!(!suppressed(Attach::Child(ChildKind::Macvlan), None, v6));
        assert!(!suppressed(
            Attach::Child(ChildKind::Macvlan),
            Some(true),
            v4
        ));
        assert!(suppressed(
            Attach::Child(ChildKind::Macvlan),
            Some(false),
            v6
        ));
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
