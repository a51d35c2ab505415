//! What an interface is given in its pod: sysctls, addresses, routes, rules, neighbours. Pure.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use attachment::netdev::{display, replay, snapshot::Snapshot};
use cni_wire::{CniResult, Code, IpConfig, Version, text::list};
use ipnetwork::IpNetwork;
use netlink::{address, route};
use netlink_packet_core::DecodeError;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    neighbour::NeighbourMessage,
    route::{
        RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
        RouteType, RouteVia,
    },
    rule::RuleMessage,
};

use crate::{
    config::{Attach, Config},
    error::Error,
};

/// `RT_SCOPE_LINK`
pub(crate) const LINK_SCOPE: u8 = 253;
/// `RT_TABLE_LOCAL`, which the kernel keeps for its own addresses.
const LOCAL_TABLE: u32 = 255;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// `ipv4/conf` or `ipv6/conf`.
    pub group: &'static str,
    pub key: &'static str,
    pub value: &'static str,
}

/// What the interface is given once it is in the pod. Index 0 stands for its index.
#[derive(Clone, Debug, Default)]
pub struct InterfaceConfig {
    /// Sysctls, written before the interface comes up.
    pub settings: Vec<Setting>,
    pub addresses: Vec<AddressMessage>,
    /// Routes, those that others need first.
    pub routes: Vec<RouteMessage>,
    pub rules: Vec<RuleMessage>,
    pub neighbours: Vec<NeighbourMessage>,
    /// What is announced to neighbours.
    pub announced: Vec<IpAddr>,
    pub gateways: Vec<IpAddr>,
    /// Families of which the pod has a default route already.
    pub defaults_of_the_pod: Vec<AddressFamily>,
}

impl InterfaceConfig {
    /// From the addresses and routes of an IPAM.
    pub fn of_result(
        attach: Attach,
        config: &Config,
        result: &CniResult,
    ) -> Result<InterfaceConfig, Error> {
        check_result(result)?;
        let mut routes = routes(result);
        routes.sort_by_key(replay::has_gateway);
        let ips = result.ips.iter();
        let addresses: Vec<_> = ips
            .map(|ip| address_message(ip.address, config.dad))
            .collect();
        Ok(InterfaceConfig {
            settings: settings(attach, config, needs_ipv6(&addresses, &routes)),
            addresses,
            routes,
            announced: result.ips.iter().map(|ip| ip.address.ip()).collect(),
            gateways: result.ips.iter().filter_map(|ip| ip.gateway).collect(),
            ..InterfaceConfig::default()
        })
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
        let routes = given.routes;
        let announced: Vec<IpAddr> = addresses.iter().filter_map(address::own).collect();
        Ok(InterfaceConfig {
            settings: settings(Attach::Move, config, needs_ipv6(&addresses, &routes)),
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

    /// Whether it cannot do without IPv6.
    pub fn needs_ipv6(&self) -> bool {
        needs_ipv6(&self.addresses, &self.routes)
    }

    /// Its addresses, for a result.
    pub fn ips(&self) -> Vec<IpConfig> {
        let ip = |address| IpConfig {
            address,
            gateway: None,
            interface: None,
        };
        self.addresses.iter().filter_map(cidr).map(ip).collect()
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
                r.dst.prefix() == 0 && r.dst.is_ipv4() == v4 && r.table.is_none()
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

    /// Leaves out the default route that router advertisements would put into the main table.
    pub fn without_advertised_default(&mut self) {
        self.settings.push(Setting {
            group: "ipv6/conf",
            key: "accept_ra_defrtr",
            value: "0",
        });
    }

    /// Leaves out default routes of the main table of these families.
    pub fn without_defaults(&mut self, families: &[AddressFamily]) {
        self.routes
            .retain(|r| !(is_way_out(r) && families.contains(&r.header.address_family)));
    }
}

impl fmt::Display for InterfaceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            let (group, key, value) = (setting.group, setting.key, setting.value);
            write!(f, "; {group}/{key}={value}")?;
        }
        for address in &self.addresses {
            write!(f, "; address {}", display::address(address))?;
        }
        for neighbour in &self.neighbours {
            write!(f, "; neighbour {}", display::neighbour(neighbour))?;
        }
        for route in &self.routes {
            write!(f, "; route {}", display::route(route))?;
        }
        for rule in &self.rules {
            write!(f, "; rule {}", display::rule(rule))?;
        }
        Ok(())
    }
}

/// An address with its network.
pub(crate) fn cidr(message: &AddressMessage) -> Option<IpNetwork> {
    IpNetwork::new(address::own(message)?, message.header.prefix_len).ok()
}

fn is_way_out(route: &RouteMessage) -> bool {
    replay::is_default(route) && route::table_of(route) == route::MAIN
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
    if config.source_routing.keep_arp() {
        // Otherwise each of a pod's interfaces answers for all of its addresses.
        settings.push(set("ipv4/conf", "arp_ignore", "1"));
        settings.push(set("ipv4/conf", "arp_announce", "2"));
    }
    let link_local = config.link_local.unwrap_or(v6 || attach == Attach::Move);
    if v6 || link_local {
        settings.push(set("ipv6/conf", "disable_ipv6", "0"));
        settings.push(set("ipv6/conf", "ndisc_notify", "1"));
        settings.push(set("ipv6/conf", "keep_addr_on_down", "1"));
        // Whatever the pod's default is.
        let dad = if config.dad { "1" } else { "0" };
        settings.push(set("ipv6/conf", "accept_dad", dad));
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

fn address_message(address: IpNetwork, dad: bool) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.prefix_len = address.prefix();
    let attributes = &mut message.attributes;
    match address.ip() {
        IpAddr::V4(addr) => {
            message.header.family = AddressFamily::Inet;
            attributes.push(AddressAttribute::Local(address.ip()));
            attributes.push(AddressAttribute::Address(address.ip()));
            let broadcast = broadcast(addr, address.prefix());
            attributes.extend(broadcast.map(AddressAttribute::Broadcast));
        }
        IpAddr::V6(_) => {
            message.header.family = AddressFamily::Inet6;
            attributes.push(AddressAttribute::Address(address.ip()));
            let flags = (!dad).then_some(AddressFlags::Nodad);
            attributes.extend(flags.map(AddressAttribute::Flags));
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
    let networks: Vec<IpNetwork> = result.ips.iter().map(|ip| ip.address).collect();
    let message = |route| route_message(route, next_hop(route, result), &networks);
    result.routes.iter().map(message).collect()
}

/// Whether IPv6 is needed: for an address, a route, or a next hop.
fn needs_ipv6(addresses: &[AddressMessage], routes: &[RouteMessage]) -> bool {
    let v6 = AddressFamily::Inet6;
    addresses.iter().any(|a| a.header.family == v6)
        || routes.iter().any(|r| {
            r.header.address_family == v6 || replay::gateway(r).is_some_and(|gw| gw.is_ipv6())
        })
}

/// Where a route leads: to its own next hop, else to the first gateway of its family, else to a
/// gateway of another family that an address of its own family has.
pub fn next_hop(route: &cni_wire::Route, result: &CniResult) -> Option<IpAddr> {
    let v4 = route.dst.is_ipv4();
    let gateways = || {
        let ips = result.ips.iter();
        ips.filter_map(|ip| Some((ip.address.is_ipv4(), ip.gateway?)))
    };
    match route.gw {
        None if route.scope.is_some_and(|scope| scope >= LINK_SCOPE) => None,
        None => gateways()
            .find(|(_, gateway)| gateway.is_ipv4() == v4)
            .or_else(|| gateways().find(|(of_v4, _)| *of_v4 == v4))
            .map(|(_, gateway)| gateway),
        gateway => gateway,
    }
}

/// Refuses next hops that no host can be, or that are out of reach, and routes that the kernel would refuse,
/// or take for something else.
///
/// # Errors
/// Code 7 naming the gateway or route.
pub fn check_result(result: &CniResult) -> Result<(), Error> {
    let wrong = |what: String, why: String| {
        Err(Error::new(Code::InvalidConfig, format!("{what}: {why}"))
            .with_details("correct gateway or routes of the network's ipam"))
    };
    for ip in &result.ips {
        // One gateway stands beside addresses of both families in whereabouts' configuration.
        let gateway = ip.gateway.filter(|gw| gw.is_ipv4() == ip.address.is_ipv4());
        if let Some((gateway, why)) = gateway.and_then(|gw| Some((gw, unreachable(gw, result)?))) {
            return wrong(format!("gateway {gateway} of address {}", ip.address), why);
        }
    }
    for route in &result.routes {
        let next_hop = next_hop(route, result);
        let what = match next_hop {
            Some(next_hop) => format!("route to {} via {next_hop}", route.dst),
            None => format!("route to {}", route.dst),
        };
        if route.table == Some(LOCAL_TABLE) {
            return wrong(what, format!("table {LOCAL_TABLE} is the kernel's own"));
        }
        if let Some(scope) = route.scope
            && (scope > LINK_SCOPE || scope == LINK_SCOPE && next_hop.is_some())
        {
            return wrong(
                what,
                format!("scope {scope} does not fit a route out of an interface"),
            );
        }
        if let Some(next_hop) = next_hop {
            if next_hop.is_ipv4() && !route.dst.is_ipv4() {
                return wrong(
                    what,
                    "an IPv6 route cannot have an IPv4 next hop".to_owned(),
                );
            }
            if result.ips.iter().any(|ip| ip.address.ip() == next_hop) {
                let why = "is the interface's own address; exclude it from the range";
                return wrong(what, format!("{next_hop} {why}"));
            }
            if let Some(why) = unreachable(next_hop, result) {
                return wrong(what, why);
            }
        }
    }
    Ok(())
}

/// Why an address is not the one of a host in a network.
fn reserved(address: IpAddr, network: IpNetwork) -> Option<String> {
    if address.is_ipv6() || network.prefix() >= 31 {
        return None;
    }
    let which = match address {
        _ if address == network.network() => "network",
        _ if address == network.broadcast() => "broadcast",
        _ => return None,
    };
    let (first, prefix) = (network.network(), network.prefix());
    Some(format!(
        "{address} is the {which} address of {first}/{prefix}"
    ))
}

/// Why a next hop is none for an interface with this result.
fn unreachable(gateway: IpAddr, result: &CniResult) -> Option<String> {
    let is_broadcast = matches!(gateway, IpAddr::V4(v4) if v4.is_broadcast());
    if gateway.is_unspecified() || gateway.is_multicast() || gateway.is_loopback() || is_broadcast {
        return Some(format!("{gateway} is not the address of a host"));
    }
    let networks = || result.ips.iter().map(|ip| ip.address);
    let mut around = networks()
        .filter(|network| network.contains(gateway))
        .peekable();
    if around.peek().is_some() {
        let all: Option<Vec<String>> = around.map(|network| reserved(gateway, network)).collect();
        return all?.pop();
    }
    // A pod with a single address (/32) still reaches its gateway over this link.
    let is_single = |network: IpNetwork| {
        network == network.ip().into() && network.is_ipv4() == gateway.is_ipv4()
    };
    let is_reached = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local())
        || networks().any(is_single)
        || result
            .routes
            .iter()
            .any(|r| r.dst.contains(gateway) && next_hop(r, result).is_none());
    (!is_reached).then(|| {
        format!(
            "{gateway} is outside of the interface's subnets ({})",
            list(networks())
        )
    })
}

/// A route through an interface that is in these networks.
pub(crate) fn route_message(
    route: &cni_wire::Route,
    gateway: Option<IpAddr>,
    networks: &[IpNetwork],
) -> RouteMessage {
    let v4 = route.dst.is_ipv4();
    let mut message = RouteMessage::default();
    message.header.address_family = if v4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    message.header.destination_prefix_length = route.dst.prefix();
    message.header.protocol = RouteProtocol::Static;
    message.header.kind = RouteType::Unicast;
    message.header.scope = match (route.scope, gateway) {
        (Some(scope), _) => scope.into(),
        (None, None) if v4 => RouteScope::Link,
        (None, _) => RouteScope::Universe,
    };
    let table = route.table.unwrap_or(route::MAIN);
    message.header.table = u8::try_from(table).unwrap_or(0);
    let attributes = &mut message.attributes;
    if route.dst.prefix() > 0 {
        attributes.push(RouteAttribute::Destination(route.dst.network().into()));
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
        attributes.push(match gateway {
            IpAddr::V6(gateway) if v4 => RouteAttribute::Via(RouteVia::Inet6(gateway)),
            gateway => RouteAttribute::Gateway(gateway.into()),
        });
        let is_near = networks.iter().any(|network| network.contains(gateway))
            || matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
        if !is_near {
            message.header.flags |= RouteFlags::Onlink;
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use cni_wire::Route;

    use super::*;
    use crate::config::ChildKind;

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
        InterfaceConfig::of_result(Attach::Child(ChildKind::Macvlan), &config(), result)
            .unwrap()
            .routes
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

    fn refusal(result: &CniResult) -> String {
        let error = check_result(result).unwrap_err();
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(!error.details.is_empty(), "{error}");
        error.msg.clone()
    }

    #[test]
    fn next_hops_that_the_interface_cannot_reach_are_refused() {
        let via = |dst: &str, gw: &str| Route::via(dst.parse().unwrap(), Some(gw.parse().unwrap()));
        let (v4, v6) = (("10.0.0.5/24", None), ("fd00::5/64", None));
        for (ips, route, why) in [
            (
                &[v4][..],
                via("10.9.0.0/16", "10.1.0.1"),
                "outside of the interface's subnets (10.0.0.5/24)",
            ),
            (
                &[v4],
                via("10.9.0.0/16", "10.0.0.0"),
                "network address of 10.0.0.0/24",
            ),
            (
                &[v4],
                via("10.9.0.0/16", "10.0.0.255"),
                "broadcast address of 10.0.0.0/24",
            ),
            (&[v4], via("10.9.0.0/16", "10.0.0.5"), "own address"),
            (
                &[v4],
                via("10.9.0.0/16", "224.0.0.1"),
                "not the address of a host",
            ),
            (&[v4], via("10.9.0.0/16", "fd00::1"), "outside"),
            (
                &[v4, v6],
                via("fd01::/64", "10.0.0.1"),
                "IPv6 route cannot have an IPv4 next hop",
            ),
            (&[v6], via("fd01::/64", "fd02::1"), "outside"),
        ] {
            let msg = refusal(&result(ips, vec![route]));
            assert!(msg.contains(why), "{why}: {msg}");
        }
        for gateway in ["10.1.0.1", "10.0.0.255", "10.0.0.0"] {
            refusal(&result(&[("10.0.0.5/24", Some(gateway))], vec![]));
        }
        check_result(&result(&[("10.0.0.0/31", Some("10.0.0.1"))], vec![])).unwrap();
    }

    #[test]
    fn tables_and_scopes_of_the_kernel_are_refused() {
        let dst: IpNetwork = "10.9.0.0/16".parse().unwrap();
        for route in [
            Route {
                table: Some(255),
                ..Route::via(dst, None)
            },
            Route {
                scope: Some(254),
                ..Route::via(dst, None)
            },
            Route {
                scope: Some(253),
                ..Route::via(dst, Some("10.0.0.1".parse().unwrap()))
            },
        ] {
            refusal(&result(&[("10.0.0.5/24", None)], vec![route]));
        }
    }

    #[test]
    fn an_ipv4_route_has_its_ipv6_next_hop() {
        let ips = [("10.0.0.5/24", Some("fe80::1")), ("fd00::5/64", None)];
        let list = laid_out(&result(
            &ips,
            vec![Route::via("10.9.0.0/16".parse().unwrap(), None)],
        ));
        assert_eq!(display::route(&list[0]), "10.9.0.0/16 via fe80::1");
        assert!(matches!(
            list[0].attributes.last(),
            Some(RouteAttribute::Via(_))
        ));
        let alone = result(
            &ips[..1],
            vec![Route::via("10.9.0.0/16".parse().unwrap(), None)],
        );
        let given =
            InterfaceConfig::of_result(Attach::Child(ChildKind::Macvlan), &config(), &alone);
        let enabled = |s: &Setting| s.key == "disable_ipv6" && s.value == "0";
        assert!(given.unwrap().settings.iter().any(enabled));
    }

    #[test]
    fn a_gateway_is_reached_by_a_route_of_the_link() {
        let link = Route {
            scope: Some(253),
            ..Route::via("10.1.0.1/32".parse().unwrap(), None)
        };
        let out = Route::via(
            "0.0.0.0/0".parse().unwrap(),
            Some("10.1.0.1".parse().unwrap()),
        );
        let list = laid_out(&result(&[("10.0.0.5/24", None)], vec![out, link]));
        assert_eq!(display::route(&list[1]), "default via 10.1.0.1");
    }

    #[test]
    fn addresses_need_no_detection_unless_asked() {
        let flags = |dad: bool| {
            let config = Config { dad, ..config() };
            let interface_config = InterfaceConfig::of_result(
                Attach::Child(ChildKind::Macvlan),
                &config,
                &result(&[("fd00::5/64", None)], vec![]),
            )
            .unwrap();
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
                InterfaceConfig::of_result(attach, &config, &result(ips, vec![])).unwrap();
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
