//! The addresses, routes and source routing of the pod's interfaces, and the part of the answer that
//! describes them. Pure.
//!
//! The pod's default route and its DNS stay where they are. A default route of a network goes to the
//! main table only if the pod has none, else to the table of its interface alone.

use std::{collections::BTreeSet, net::IpAddr};

use attachment::{
    interface::{InterfaceConfig, Sysctl},
    netdev::{replay, snapshot::Snapshot},
};
use cni_wire::{CniResult, Code, IpConfig, text::list};
use ipnetwork::IpNetwork;
use netlink::{address, route};
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    route::{
        RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
        RouteType, RouteVia,
    },
};

use crate::{
    config::{Attach, Config},
    decide,
    error::Error,
};

/// `RT_SCOPE_LINK`
pub(crate) const LINK_SCOPE: u8 = 253;
/// `RT_TABLE_LOCAL`, which the kernel keeps for its own addresses.
const LOCAL_TABLE: u32 = 255;
const V6: AddressFamily = AddressFamily::Inet6;

/// An interface that gets addresses.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its name in the pod.
    pub ifname: &'a str,
    pub rail: Option<u32>,
    pub config: &'a Config,
    /// Its MTU, if that is known.
    pub mtu: Option<u32>,
    /// Its addresses and routes by the IPAM or the chain.
    pub leased: Option<&'a CniResult>,
    /// The netdev that moves: without a lease it keeps what it has on the host.
    pub moved: Option<&'a Snapshot>,
}

/// What the pod's namespace has already.
#[derive(Clone, Debug, Default)]
pub struct Pod {
    /// Families with a default route in the main table.
    pub defaults: Vec<AddressFamily>,
    /// Tables that a rule looks up.
    pub tables: BTreeSet<u32>,
}

/// An interface's part of the plan and of the answer.
#[derive(Clone, Debug, Default)]
pub struct Addressing {
    pub interface: InterfaceConfig,
    /// Its addresses, each of interface 0, and the network's routes with the next hop and the table
    /// that they got.
    pub result: CniResult,
}

/// Decides for the interfaces of an attachment, in their order.
///
/// # Errors
/// Code 7: a gateway, a route, a table or an MTU that cannot be.
pub fn addressing(requests: &[Request<'_>], pod: &Pod) -> Result<Vec<Addressing>, Error> {
    let mut pod = pod.clone();
    let requests = requests.iter();
    requests
        .map(|request| request.addressing(&mut pod))
        .collect()
}

impl Request<'_> {
    /// Adds this interface to `pod`.
    fn addressing(&self, pod: &mut Pod) -> Result<Addressing, Error> {
        let (config, routing) = (self.config, &self.config.source_routing);
        let Addressing {
            mut interface,
            mut result,
        } = self.without_table()?;
        let needs_ipv6 = needs_ipv6(&interface);
        if let Some(mtu) = self.mtu {
            decide::carries_ipv6(mtu, config, needs_ipv6)?;
        }
        interface.sysctls = sysctls(config, needs_ipv6);
        let families = routing.families(&interface);
        let mut table = None;
        if !families.is_empty() {
            let own = routing.table(self.ifname, self.rail, &pod.tables)?;
            let gateways: Vec<IpAddr> = result.ips.iter().filter_map(|ip| ip.gateway).collect();
            routing.apply(&mut interface, &families, &gateways, self.ifname, own);
            pod.tables.insert(own);
            table = Some(own);
        }
        for family in route::FAMILIES {
            let is_default = |r: &RouteMessage| in_main(r, family) && replay::is_default(r);
            let table = table.filter(|_| families.contains(&family));
            if !interface.routes.iter().any(is_default) {
                continue;
            }
            if !pod.defaults.contains(&family) {
                pod.defaults.push(family);
            } else if table.is_some() || self.leased.is_none() {
                interface.routes.retain(|route| !is_default(route));
                let is_meant = |r: &&mut cni_wire::Route| {
                    r.dst.prefix() == 0
                        && r.dst.is_ipv4() == (family == AddressFamily::Inet)
                        && r.table.is_none_or(|table| table == route::MAIN)
                };
                for route in result.routes.iter_mut().filter(is_meant) {
                    route.table = table;
                }
            }
        }
        if config.accept_ra && !routing.is_off() {
            // The default route that routers advertise goes to the main table.
            match pod.defaults.contains(&V6) {
                true => (interface.sysctls).push(Sysctl::new("ipv6/conf/accept_ra_defrtr", "0")),
                false => pod.defaults.push(V6),
            }
        }
        Ok(Addressing { interface, result })
    }

    /// What was leased, else what the netdev has on the host.
    fn without_table(&self) -> Result<Addressing, Error> {
        if let (Some(moved), None) = (self.moved, self.leased) {
            let interface = moved.given_to_pod(self.ifname);
            let addresses = interface.addresses.iter().filter_map(cidr);
            let ips = addresses.map(|address| IpConfig {
                address,
                gateway: None,
                interface: Some(0),
            });
            let result = CniResult {
                ips: ips.collect(),
                ..CniResult::default()
            };
            return Ok(Addressing { interface, result });
        }
        let mut result = self.leased.cloned().unwrap_or_default();
        let ips = &result.ips;
        for route in &mut result.routes {
            route.gw = next_hop(route, ips);
        }
        check_result(&result)?;
        // An IPAM does not know our interfaces: every address is of ours.
        for ip in &mut result.ips {
            ip.interface = Some(0);
        }
        let mut routes = routes(&result);
        routes.sort_by_key(replay::has_gateway);
        let ips = result.ips.iter();
        let interface = InterfaceConfig {
            addresses: ips
                .map(|ip| address_message(ip.address, self.config.dad))
                .collect(),
            routes,
            ..InterfaceConfig::default()
        };
        Ok(Addressing { interface, result })
    }
}

/// Whether a route of this family is in the main table.
pub(crate) fn in_main(route: &RouteMessage, family: AddressFamily) -> bool {
    route.header.address_family == family && route::table_of(route) == route::MAIN
}

/// An address with its network.
pub(crate) fn cidr(message: &AddressMessage) -> Option<IpNetwork> {
    IpNetwork::new(address::own(message)?, message.header.prefix_len).ok()
}

/// Whether IPv6 is needed: for an address, a route, or a next hop.
fn needs_ipv6(interface: &InterfaceConfig) -> bool {
    let (mut addresses, mut routes) = (interface.addresses.iter(), interface.routes.iter());
    addresses.any(|a| a.header.family == V6)
        || routes.any(|r| {
            r.header.address_family == V6 || replay::gateway(r).is_some_and(|gw| gw.is_ipv6())
        })
}

/// The sysctls of an interface with or without IPv6 addresses.
///
/// Router advertisements are not followed unless the network says so: an interface would get addresses
/// and default routes that were not planned. Duplicate address detection is off by default: the IPAM
/// prevents duplicates, and waiting costs more than all the rest. A child without IPv6 addresses gets
/// no link-local one: each takes two entries of the RoCE port's GID table, which is what limits
/// the number of pods on a port.
fn sysctls(config: &Config, v6: bool) -> Vec<Sysctl> {
    let link_local = config
        .link_local
        .unwrap_or(v6 || config.attach == Attach::Move);
    let switch = |on| if on { "1" } else { "0" };
    let (source_routing, ipv6) = (!config.source_routing.is_off(), v6 || link_local);
    // Without arp_ignore and arp_announce, each of a pod's interfaces answers for all of its addresses.
    let all = [
        (true, "ipv4/conf/arp_notify", "1"),
        (source_routing, "ipv4/conf/arp_ignore", "1"),
        (source_routing, "ipv4/conf/arp_announce", "2"),
        (ipv6, "ipv6/conf/disable_ipv6", "0"),
        (ipv6, "ipv6/conf/ndisc_notify", "1"),
        (ipv6, "ipv6/conf/keep_addr_on_down", "1"),
        // Whatever the pod's default is.
        (ipv6, "ipv6/conf/accept_dad", switch(config.dad)),
        // IN6_ADDR_GEN_MODE_NONE
        (!link_local, "ipv6/conf/addr_gen_mode", "1"),
        (true, "ipv6/conf/accept_ra", switch(config.accept_ra)),
    ];
    let due = all.into_iter().filter(|(is_due, ..)| *is_due);
    due.map(|(_, key, value)| Sysctl::new(key, value)).collect()
}

fn address_message(address: IpNetwork, dad: bool) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.prefix_len = address.prefix();
    message.header.family = V6;
    message.attributes = vec![AddressAttribute::Address(address.ip())];
    let attributes = &mut message.attributes;
    match address {
        IpNetwork::V4(network) => {
            message.header.family = AddressFamily::Inet;
            attributes.push(AddressAttribute::Local(address.ip()));
            // RFC 3021: a /31 has none, and neither has a single address.
            let broadcast = (network.prefix() < 31).then(|| network.broadcast());
            attributes.extend(broadcast.map(AddressAttribute::Broadcast));
        }
        IpNetwork::V6(_) if !dad => attributes.push(AddressAttribute::Flags(AddressFlags::Nodad)),
        IpNetwork::V6(_) => {}
    }
    message
}

/// The routes of an answer, one message each in their order.
pub fn routes(result: &CniResult) -> Vec<RouteMessage> {
    let networks: Vec<IpNetwork> = result.ips.iter().map(|ip| ip.address).collect();
    let message = |route: &cni_wire::Route| route_message(route, route.gw, &networks);
    result.routes.iter().map(message).collect()
}

/// Where a route leads: to its own next hop, else to the first gateway of its family, else to a
/// gateway of another family that an address of its own family has.
fn next_hop(route: &cni_wire::Route, ips: &[IpConfig]) -> Option<IpAddr> {
    if route.gw.is_some() || route.scope.is_some_and(|scope| scope >= LINK_SCOPE) {
        return route.gw;
    }
    let v4 = route.dst.is_ipv4();
    let mut gateways = ips.iter().filter_map(|ip| ip.gateway);
    let mut of_family = ips.iter().filter(|ip| ip.address.is_ipv4() == v4);
    gateways
        .find(|gateway| gateway.is_ipv4() == v4)
        .or_else(|| of_family.find_map(|ip| ip.gateway))
}

/// Code 7 names the gateway or route that cannot be.
fn check_result(result: &CniResult) -> Result<(), Error> {
    let gateways = result.ips.iter().filter_map(|ip| {
        // One gateway stands beside addresses of both families in whereabouts' configuration.
        let gateway = ip
            .gateway
            .filter(|gw| gw.is_ipv4() == ip.address.is_ipv4())?;
        let why = unreachable(gateway, result)?;
        Some(format!(
            "gateway {gateway} of address {}: {why}",
            ip.address
        ))
    });
    let routes = result.routes.iter().filter_map(|route| {
        let why = impossible(route, result)?;
        let via = route.gw.map_or(String::new(), |gw| format!(" via {gw}"));
        Some(format!("route to {}{via}: {why}", route.dst))
    });
    match gateways.chain(routes).next() {
        Some(wrong) => Err(Error::advise(
            Code::InvalidConfig,
            wrong,
            "correct gateway or routes of the network's ipam",
        )),
        None => Ok(()),
    }
}

/// Why the kernel would refuse a route out of an interface, or take it for something else.
fn impossible(route: &cni_wire::Route, result: &CniResult) -> Option<String> {
    let scope = route.scope.unwrap_or(0);
    match route.gw {
        _ if route.table == Some(LOCAL_TABLE) => {
            Some(format!("table {LOCAL_TABLE} is the kernel's own"))
        }
        gw if scope > LINK_SCOPE || (scope == LINK_SCOPE && gw.is_some()) => Some(format!(
            "scope {scope} does not fit a route out of an interface"
        )),
        Some(IpAddr::V4(_)) if !route.dst.is_ipv4() => {
            Some("an IPv6 route cannot have an IPv4 next hop".to_owned())
        }
        Some(gw) if result.ips.iter().any(|ip| ip.address.ip() == gw) => Some(format!(
            "{gw} is the interface's own address; exclude it from the range"
        )),
        gw => unreachable(gw?, result),
    }
}

/// Why an interface with this result does not reach a gateway.
fn unreachable(gateway: IpAddr, result: &CniResult) -> Option<String> {
    let is_broadcast = matches!(gateway, IpAddr::V4(v4) if v4.is_broadcast());
    if gateway.is_unspecified() || gateway.is_multicast() || gateway.is_loopback() || is_broadcast {
        return Some(format!("{gateway} is not the address of a host"));
    }
    let networks = || result.ips.iter().map(|ip| ip.address);
    let reserved = |network: IpNetwork| match network {
        _ if network.is_ipv6() || network.prefix() >= 31 => None,
        _ if gateway == network.network() => Some(format!("the network address of {network}")),
        _ if gateway == network.broadcast() => Some(format!("the broadcast address of {network}")),
        _ => None,
    };
    let mut around = networks()
        .filter(|network| network.contains(gateway))
        .peekable();
    if around.peek().is_some() {
        // One network is enough in which it is a host.
        let all: Option<Vec<String>> = around.map(reserved).collect();
        return Some(format!("{gateway} is {}", all?.pop()?));
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
            .any(|r| r.dst.contains(gateway) && r.gw.is_none());
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
    use crate::{config::ChildKind, source_routing::SourceRouting};
    use attachment::netdev::{display, identity::Identity};
    use netlink::rule;

    const V4: AddressFamily = AddressFamily::Inet;

    fn config() -> Config {
        Config::default()
    }

    fn request<'a>(ifname: &'a str, config: &'a Config, leased: &'a CniResult) -> Request<'a> {
        Request {
            ifname,
            rail: None,
            config,
            mtu: None,
            leased: Some(leased),
            moved: None,
        }
    }

    fn off(config: Config) -> Config {
        let rails = SourceRouting {
            wanted: Some(false),
            ..SourceRouting::default()
        };
        Config {
            source_routing: rails,
            ..config
        }
    }

    fn one(config: &Config, leased: &CniResult) -> Result<Addressing, Error> {
        let all = addressing(&[request("net1", config, leased)], &Pod::default());
        all.map(|mut all| all.remove(0))
    }

    fn has(interface: &InterfaceConfig, key: &'static str, value: &'static str) -> bool {
        interface.sysctls.contains(&Sysctl::new(key, value))
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

    /// The main table's routes.
    fn laid_out(leased: &CniResult) -> Vec<RouteMessage> {
        one(&off(config()), leased).unwrap().interface.routes
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
        let error = one(&config(), result).unwrap_err();
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
                "network address of 10.0.0.5/24",
            ),
            (
                &[v4],
                via("10.9.0.0/16", "10.0.0.255"),
                "broadcast address of 10.0.0.5/24",
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
        let point_to_point = result(&[("10.0.0.0/31", Some("10.0.0.1"))], vec![]);
        one(&config(), &point_to_point).unwrap();
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
        let alone = one(&config(), &alone).unwrap();
        assert!(has(&alone.interface, "ipv6/conf/disable_ipv6", "0"));
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
        for dad in [false, true] {
            let config = Config { dad, ..config() };
            let leased = result(&[("fd00::5/64", None)], vec![]);
            let interface = one(&config, &leased).unwrap().interface;
            assert_eq!(has(&interface, "ipv6/conf/accept_dad", "0"), !dad);
            let nodad = AddressAttribute::Flags(AddressFlags::Nodad);
            let attributes = &interface.addresses[0].attributes;
            assert_eq!(attributes.contains(&nodad), !dad);
        }
    }

    #[test]
    fn link_local_addresses_are_made_only_where_they_serve() {
        let suppressed = |attach, link_local, ips: &[(&str, Option<&str>)]| {
            let config = Config {
                attach,
                link_local,
                ..config()
            };
            let given = one(&config, &result(ips, vec![])).unwrap();
            has(&given.interface, "ipv6/conf/addr_gen_mode", "1")
        };
        let (v4, v6) = (&[("10.0.0.5/24", None)], &[("fd00::5/64", None)]);
        let macvlan = Attach::Child(ChildKind::Macvlan);
        assert!(suppressed(macvlan, None, v4));
        assert!(!suppressed(macvlan, None, v6));
        assert!(!suppressed(macvlan, Some(true), v4));
        assert!(suppressed(macvlan, Some(false), v6));
        assert!(!suppressed(Attach::Move, None, v4));
    }

    #[test]
    fn broadcast_addresses_follow_the_prefix() {
        for (address, broadcast) in [
            ("10.1.2.3/16", Some([10, 1, 255, 255])),
            ("10.1.2.3/0", Some([255; 4])),
            ("10.1.2.3/31", None),
            ("10.1.2.3/32", None),
        ] {
            let message = address_message(address.parse().unwrap(), false);
            let found = message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Broadcast(broadcast) => Some(broadcast.octets()),
                _ => None,
            });
            assert_eq!(found, broadcast, "{address}");
        }
    }

    fn lines(addressing: &Addressing) -> Vec<String> {
        let routes = addressing.interface.routes.iter();
        let mut lines: Vec<String> = routes.map(display::route).collect();
        let rules = addressing.interface.rules.iter();
        lines.extend(rules.map(display::rule));
        lines
    }

    fn out() -> CniResult {
        let everywhere = Route::via("0.0.0.0/0".parse().unwrap(), None);
        result(&[("10.0.0.5/24", Some("10.0.0.1"))], vec![everywhere])
    }

    #[test]
    fn a_lone_interface_has_its_table_and_the_default_route_that_the_pod_lacks() {
        let routing = SourceRouting {
            table: Some(7),
            ..SourceRouting::default()
        };
        let config = Config {
            source_routing: routing,
            ..config()
        };
        let mut expected = vec![
            "default via 10.0.0.1 src 10.0.0.5",
            "10.0.0.0/24 src 10.0.0.5 table 7",
            "default via 10.0.0.1 src 10.0.0.5 table 7",
            "1000: from 10.0.0.5/32 lookup 7",
            "1000: oif net1 lookup 7",
        ];
        let alone = one(&config, &out()).unwrap();
        assert_eq!(lines(&alone), expected);
        let answered = &alone.result.routes[0];
        assert_eq!(answered.gw, Some("10.0.0.1".parse().unwrap()));
        assert_eq!(answered.table, None);

        // The pod's own stays.
        let pod = Pod {
            defaults: vec![V4],
            ..Pod::default()
        };
        let leased = out();
        let beside = addressing(&[request("net1", &config, &leased)], &pod).unwrap();
        expected.remove(0);
        assert_eq!(lines(&beside[0]), expected);
        assert_eq!(beside[0].result.routes[0].table, Some(7));
    }

    #[test]
    fn the_first_of_several_interfaces_has_the_pods_default_route() {
        let (config, leased) = (config(), out());
        let both = ["net1", "net2"].map(|ifname| request(ifname, &config, &leased));
        let both = addressing(&both, &Pod::default()).unwrap();
        let tables = both.iter().map(|one| one.result.routes[0].table);
        let tables: Vec<Option<u32>> = tables.collect();
        assert_eq!(tables[0], None);
        assert!(tables[1].is_some());
        let in_main = |one: &Addressing| one.interface.routes.iter().any(|r| in_main(r, V4));
        assert!(in_main(&both[0]) && !in_main(&both[1]));
        let tables = both.iter().flat_map(|one| &one.interface.rules);
        let tables: BTreeSet<u32> = tables.map(rule::table_of).collect();
        assert_eq!(tables.len(), 2);
    }

    #[test]
    fn without_source_routing_a_network_keeps_its_default_route() {
        let pod = Pod {
            defaults: vec![V4],
            ..Pod::default()
        };
        let (config, leased) = (off(config()), out());
        let all = addressing(&[request("net1", &config, &leased)], &pod).unwrap();
        assert_eq!(lines(&all[0]), ["default via 10.0.0.1"]);
        assert_eq!(all[0].result.routes[0].table, None);
        assert!(!has(&all[0].interface, "ipv4/conf/arp_ignore", "1"));
    }

    #[test]
    fn an_advertised_default_route_does_not_take_the_place_of_the_pods() {
        let left_out = |wanted, defaults: &[AddressFamily]| {
            let rails = SourceRouting {
                wanted,
                ..SourceRouting::default()
            };
            let config = Config {
                accept_ra: true,
                source_routing: rails,
                ..config()
            };
            let pod = Pod {
                defaults: defaults.to_vec(),
                ..Pod::default()
            };
            let leased = result(&[("fd00::5/64", None)], vec![]);
            let both = ["net1", "net2"].map(|ifname| request(ifname, &config, &leased));
            let both = addressing(&both, &pod).unwrap();
            let of = |at: usize| has(&both[at].interface, "ipv6/conf/accept_ra_defrtr", "0");
            [of(0), of(1)]
        };
        assert_eq!(left_out(None, &[]), [false, true]);
        assert_eq!(left_out(None, &[V6]), [true, true]);
        assert_eq!(left_out(Some(false), &[V6]), [false, false]);
    }

    #[test]
    fn a_moved_netdev_without_a_lease_keeps_its_addresses() {
        let snapshot = Snapshot {
            identity: Identity::default(),
            ..Snapshot::default()
        };
        let config = Config {
            attach: Attach::Move,
            ..config()
        };
        let leased = out();
        let request = Request {
            moved: Some(&snapshot),
            ..request("net1", &config, &leased)
        };
        let ips = |request| {
            let all = addressing(&[request], &Pod::default()).unwrap();
            all[0].result.ips.len()
        };
        assert_eq!(ips(request), 1);
        assert_eq!(
            ips(Request {
                leased: None,
                ..request
            }),
            0
        );
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_is_refused_with_ipv6_addresses() {
        let (config, leased) = (config(), result(&[("fd00::5/64", None)], vec![]));
        let with = |mtu| {
            let request = Request {
                mtu: Some(mtu),
                ..request("net1", &config, &leased)
            };
            addressing(&[request], &Pod::default())
        };
        assert_eq!(with(1279).unwrap_err().code, Code::InvalidConfig);
        with(1280).unwrap();
    }
}
