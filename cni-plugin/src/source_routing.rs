//! Source routing: what leaves with an interface's address leaves through it.
//!
//! A pod with several NICs, often in one subnet, has one main table: replies and RDMA connections
//! of the second NIC would leave through the first, and every NIC would answer ARP for every
//! address. So each interface has a table of its own with its connected networks, its routes and its
//! gateway, which rules choose by source address (and by interface, for sockets bound to it). It has
//! them from the start, so that an interface that is attached later changes none of the others. The
//! main table keeps the connected route and the others with their source, because libraries such
//! as UCX read it and know no rules. Pure.

use std::{collections::BTreeSet, hash::Hasher, net::IpAddr};

use attachment::{
    interface::{InterfaceConfig, Sysctl},
    netdev::replay,
};
use cni_wire::{Code, Error, Route, Section, json::Value};
use fnv::FnvHasher;
use ipnetwork::IpNetwork;
use netlink::{address, route};
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use serde::Deserialize;

use crate::addressing::{LINK_SCOPE, cidr, in_main, route_message};

/// Before the main table (32766), behind what people number by hand.
const PRIORITY: u32 = 1000;
/// Tables chosen here are 2^24 and more; people and other plugins number theirs by hand, from 1
/// or from 100.
const FIRST_TABLE: u32 = 1 << 24;
const TABLES: u32 = 1 << 24;

/// What the network says of source routing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SourceRouting {
    /// On, off, or on unless the netdev has rules of the host.
    #[serde(rename = "enabled")]
    pub wanted: Option<bool>,
    /// The table; none for one chosen by the interface's name.
    pub table: Option<u32>,
    /// Priority of the rules; none for 1000.
    pub priority: Option<u32>,
}

impl SourceRouting {
    /// Reads `sourceRouting`: true, false, or an object with `enabled`, `table`, `priority`.
    ///
    /// # Errors
    /// Code 7 naming key and value.
    pub fn read(value: Option<&Value>) -> Result<SourceRouting, Error> {
        const KEY: &str = "sourceRouting";
        let read = match value {
            None => return Ok(SourceRouting::default()),
            Some(Value::Bool(wanted)) => SourceRouting {
                wanted: Some(*wanted),
                ..SourceRouting::default()
            },
            Some(value) => Section::of(value, KEY.to_owned())
                .map_err(|e| e.with_details("expected true, false, or an object"))?
                .read()?,
        };
        let (why, remedy) = match (read.table, read.priority) {
            (Some(table), _) if is_of_the_kernel(table) => (
                "table: 0 and 253 to 255 are the kernel's own tables",
                "leave it out for one that is not in use",
            ),
            (_, Some(0 | 32766..)) => {
                ("priority: must be from 1 to 32765", "leave it out for 1000")
            }
            _ => {
                let wanted = read.wanted.or(Some(true));
                return Ok(SourceRouting { wanted, ..read });
            }
        };
        let msg = format!("{KEY}.{why}");
        Err(Error::advise(Code::InvalidConfig, msg, remedy))
    }

    pub fn is_off(&self) -> bool {
        self.wanted == Some(false)
    }

    /// The families of an interface's addresses that are routed by source.
    pub fn families(&self, interface: &InterfaceConfig) -> Vec<AddressFamily> {
        let rules = &interface.rules;
        let is_routed = |family: &AddressFamily| {
            let mut addresses = interface.addresses.iter();
            addresses.any(|address| address.header.family == *family)
                && (self.wanted)
                    .unwrap_or_else(|| rules.iter().all(|rule| rule.header.family != *family))
        };
        route::FAMILIES.into_iter().filter(is_routed).collect()
    }

    /// The table of an interface: the one that the network names, else one that follows from the
    /// interface's name, which is unique in the pod, and that is not in `used`. Of several interfaces
    /// each has the named table and the number of its `rail` more.
    ///
    /// # Errors
    /// Code 7: the named table is in use.
    pub fn table(
        &self,
        ifname: &str,
        rail: Option<u32>,
        used: &BTreeSet<u32>,
    ) -> Result<u32, Error> {
        if let Some(table) = self.table {
            let table = table.saturating_add(rail.unwrap_or(0));
            let wrong = |why: &str, remedy: &str| {
                let msg = format_args!("sourceRouting.table: {table} of {ifname} {why}");
                Err(Error::advise(Code::InvalidConfig, msg, remedy))
            };
            return match table {
                _ if is_of_the_kernel(table) => wrong(
                    "is the kernel's own table",
                    "choose N so that N to N+rails-1 are free",
                ),
                _ if used.contains(&table) => wrong(
                    "is in use in the pod already",
                    "leave it out for one that is not in use",
                ),
                _ => Ok(table),
            };
        }
        // The same name has the same table in every pod.
        let mut hasher = FnvHasher::default();
        hasher.write(ifname.as_bytes());
        let first = u32::try_from(hasher.finish() % u64::from(TABLES)).unwrap_or_default();
        let free = (0..TABLES)
            .map(|step| FIRST_TABLE + (first + step) % TABLES)
            .find(|table| !used.contains(table));
        free.ok_or_else(|| Error::new(Code::Internal, "the pod has no routing table left"))
    }

    /// Routes the addresses of these families by source: `table` has their networks, the routes of the
    /// main table, and a default route by the gateway.
    pub fn apply(
        &self,
        interface: &mut InterfaceConfig,
        families: &[AddressFamily],
        gateways: &[IpAddr],
        ifname: &str,
        table: u32,
    ) {
        let priority = self.priority.unwrap_or(PRIORITY);
        for family in families.iter().copied() {
            if family == AddressFamily::Inet {
                // The kernel takes the larger of this and `all` (ip-sysctl.rst): 2, loose, holds
                // whatever the pod's `all` is, 0 does not.
                let loose = Sysctl::new("ipv4/conf/rp_filter", "2");
                interface.sysctls.push(loose);
            }
            let addresses = interface.addresses.iter();
            let addresses: Vec<AddressMessage> = addresses
                .filter(|address| address.header.family == family)
                .cloned()
                .collect();
            let connected = addresses.iter();
            let connected: Vec<RouteMessage> = connected
                .filter_map(|address| connected_route(address, table))
                .collect();
            let mut own = connected.clone();
            for route in &mut interface.routes {
                if in_main(route, family) {
                    let mut copy = in_table(route, table);
                    hint_source(&mut copy, &addresses);
                    hint_source(route, &addresses);
                    own.extend((!connected.contains(&copy)).then_some(copy));
                }
            }
            let is_of = |gateway: &&IpAddr| gateway.is_ipv4() == (family == AddressFamily::Inet);
            if let Some(gateway) = gateways.iter().find(is_of)
                && !own.iter().any(replay::is_default)
            {
                own.extend(default_via(*gateway, &addresses, table));
            }
            own.sort_by_key(replay::has_gateway);
            for route in &mut own {
                hint_source(route, &addresses);
            }
            interface.routes.extend(own);
            let sources = addresses.iter().filter_map(address::own);
            let by_name = RuleAttribute::Oifname(ifname.to_owned());
            let selectors = sources.map(RuleAttribute::Source).chain([by_name]);
            let rules = selectors.map(|selector| rule(family, selector, table, priority));
            interface.rules.extend(rules);
        }
    }
}

/// 253 to 255 are default, main and local; 0 is not a table.
fn is_of_the_kernel(table: u32) -> bool {
    matches!(table, 0 | 253..=255)
}

/// The network of an address as the kernel makes its route, in another table; none for a single
/// address.
fn connected_route(address: &AddressMessage, table: u32) -> Option<RouteMessage> {
    let own = cidr(address).filter(|own| *own != own.ip().into())?;
    let route = Route {
        table: Some(table),
        scope: Some(LINK_SCOPE),
        ..Route::via(own, None)
    };
    let mut message = route_message(&route, None, &[]);
    // Of several addresses each network has its own.
    hint_source(&mut message, std::slice::from_ref(address));
    Some(message)
}

fn default_via(gateway: IpAddr, addresses: &[AddressMessage], table: u32) -> Option<RouteMessage> {
    let everywhere = IpNetwork::new(gateway, 0).ok()?;
    let route = Route {
        table: Some(table),
        ..Route::via(everywhere, None)
    };
    let networks: Vec<IpNetwork> = addresses.iter().filter_map(cidr).collect();
    Some(route_message(&route, Some(gateway), &networks))
}

fn in_table(route: &RouteMessage, table: u32) -> RouteMessage {
    let mut copy = route.clone();
    copy.header.table = u8::try_from(table).unwrap_or(0);
    copy.attributes
        .retain(|a| !matches!(a, RouteAttribute::Table(_)));
    copy.attributes.push(RouteAttribute::Table(table));
    copy
}

/// The first address that can be one, unless the route has another. Not IPv6: there the kernel
/// refuses an address that is still tentative, and finds the interface's own by itself.
fn hint_source(route: &mut RouteMessage, addresses: &[AddressMessage]) {
    let mut attributes = route.attributes.iter();
    let has_source = attributes.any(|a| matches!(a, RouteAttribute::PrefSource(_)));
    if let Some(IpAddr::V4(source)) = addresses.first().and_then(address::own)
        && !has_source
    {
        route
            .attributes
            .push(RouteAttribute::PrefSource(RouteAddress::Inet(source)));
    }
}

fn rule(family: AddressFamily, selector: RuleAttribute, table: u32, priority: u32) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = RuleAction::ToTable;
    rule.header.table = u8::try_from(table).unwrap_or(0);
    if let RuleAttribute::Source(from) = &selector {
        rule.header.src_len = if from.is_ipv4() { 32 } else { 128 };
    }
    rule.attributes = vec![
        selector,
        RuleAttribute::Table(table),
        RuleAttribute::Priority(priority),
    ];
    rule
}

#[cfg(test)]
mod tests {
    use cni_wire::{CniResult, IpConfig};
    use netlink_packet_route::route::RouteFlags;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        addressing::{Pod, Request, addressing},
        config::Config,
    };
    use attachment::netdev::display;

    const V4: AddressFamily = AddressFamily::Inet;
    const V6: AddressFamily = AddressFamily::Inet6;

    /// An interface with these addresses and routes and its gateways.
    fn interface(
        ips: &[(&str, Option<&str>)],
        routes: &[(&str, Option<&str>)],
    ) -> (InterfaceConfig, Vec<IpAddr>) {
        let gateways = ips.iter().filter_map(|(_, gateway)| *gateway);
        let leased = CniResult {
            ips: ips
                .iter()
                .map(|(address, gateway)| IpConfig {
                    address: address.parse().unwrap(),
                    gateway: gateway.map(|gateway| gateway.parse().unwrap()),
                    interface: None,
                })
                .collect(),
            routes: routes
                .iter()
                .map(|(dst, gw)| Route::via(dst.parse().unwrap(), gw.map(|gw| gw.parse().unwrap())))
                .collect(),
            ..CniResult::default()
        };
        let config = Config {
            source_routing: SourceRouting {
                wanted: Some(false),
                ..SourceRouting::default()
            },
            ..Config::default()
        };
        let request = Request {
            ifname: "net2",
            rail: None,
            config: &config,
            mtu: None,
            leased: Some(&leased),
            moved: None,
        };
        let mut all = addressing(&[request], &Pod::default()).unwrap();
        let gateways = gateways.map(|gateway| gateway.parse().unwrap()).collect();
        (all.remove(0).interface, gateways)
    }

    fn read(value: serde_json::Value) -> Result<SourceRouting, Error> {
        let value = cni_wire::json::parse(value.to_string()).unwrap();
        SourceRouting::read(Some(&value).filter(|value| **value != cni_wire::json::Value::Null))
    }

    fn said(interface: &InterfaceConfig) -> (Vec<String>, Vec<String>) {
        (
            interface.routes.iter().map(display::route).collect(),
            interface.rules.iter().map(display::rule).collect(),
        )
    }

    #[test]
    fn it_is_asked_for_in_three_ways() {
        assert_eq!(read(Value::Null).unwrap(), SourceRouting::default());
        assert_eq!(read(json!(true)).unwrap().wanted, Some(true));
        assert_eq!(read(json!(false)).unwrap().wanted, Some(false));
        let full = read(json!({"table": 7, "priority": 9})).unwrap();
        assert_eq!(
            (full.wanted, full.table, full.priority),
            (Some(true), Some(7), Some(9))
        );
        assert_eq!(read(json!({"enabled": false})).unwrap().wanted, Some(false));
        for (wrong, named) in [
            (json!("yes"), "sourceRouting"),
            (json!({"tabel": 1}), "sourceRouting.tabel"),
            (json!({"table": 254}), "sourceRouting"),
            (json!({"table": -1}), "sourceRouting"),
            (json!({"priority": 0}), "sourceRouting"),
            (json!({"priority": 40000}), "sourceRouting"),
        ] {
            let error = read(wrong).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains(named), "{error}");
        }
    }

    #[test]
    fn all_addresses_are_routed_by_source_unless_the_network_says_otherwise() {
        let (mut both, _) = interface(&[("10.0.0.5/24", None), ("fd00::5/64", None)], &[]);
        let families = |interface: &InterfaceConfig, wanted| {
            let routing = SourceRouting {
                wanted,
                ..SourceRouting::default()
            };
            routing.families(interface)
        };
        assert_eq!(families(&both, None), [V4, V6]);
        assert_eq!(families(&both, Some(true)), [V4, V6]);
        assert!(families(&both, Some(false)).is_empty());
        assert!(families(&InterfaceConfig::default(), None).is_empty());
        // Those of the host came along.
        both.rules = vec![rule(V4, RuleAttribute::Oifname("net2".into()), 7, 9)];
        assert_eq!(families(&both, None), [V6]);
        assert_eq!(families(&both, Some(true)), [V4, V6]);
    }

    #[test]
    fn a_table_has_the_interfaces_networks_routes_and_gateway() {
        let (mut net2, gateways) = interface(
            &[("10.0.0.5/24", Some("10.0.0.1"))],
            &[("10.0.0.0/24", None), ("10.0.0.0/8", None)],
        );
        SourceRouting::default().apply(&mut net2, &[V4], &gateways, "net2", 4242);
        let (routes, rules) = said(&net2);
        assert_eq!(
            routes,
            [
                "10.0.0.0/24 via 10.0.0.1 src 10.0.0.5",
                "10.0.0.0/8 via 10.0.0.1 src 10.0.0.5",
                "10.0.0.0/24 src 10.0.0.5 table 4242",
                "10.0.0.0/24 via 10.0.0.1 src 10.0.0.5 table 4242",
                "10.0.0.0/8 via 10.0.0.1 src 10.0.0.5 table 4242",
                "default via 10.0.0.1 src 10.0.0.5 table 4242",
            ]
        );
        assert_eq!(
            rules,
            [
                "1000: from 10.0.0.5/32 lookup 4242",
                "1000: oif net2 lookup 4242"
            ]
        );
        let loose = Sysctl::new("ipv4/conf/rp_filter", "2");
        assert!(net2.sysctls.contains(&loose));
    }

    #[test]
    fn a_network_that_is_a_route_too_is_in_the_table_once() {
        let (mut net2, _) = interface(&[("10.0.0.5/24", None)], &[("10.0.0.0/24", None)]);
        SourceRouting::default().apply(&mut net2, &[V4], &[], "net2", 4242);
        let (routes, _) = said(&net2);
        assert_eq!(
            routes,
            [
                "10.0.0.0/24 src 10.0.0.5",
                "10.0.0.0/24 src 10.0.0.5 table 4242"
            ]
        );
    }

    #[test]
    fn a_gateway_is_enough_and_may_lie_outside_of_a_single_address() {
        let (mut net2, gateways) = interface(
            &[
                ("10.0.0.5/32", Some("10.0.0.1")),
                ("fd00::5/64", Some("fe80::1")),
            ],
            &[],
        );
        SourceRouting::default().apply(&mut net2, &[V4, V6], &gateways, "net2", 4242);
        let (routes, rules) = said(&net2);
        assert_eq!(
            routes,
            [
                "default via 10.0.0.1 src 10.0.0.5 table 4242",
                "fd00::/64 table 4242",
                "default (IPv6) via fe80::1 table 4242",
            ]
        );
        assert_eq!(net2.routes[0].header.flags, RouteFlags::Onlink);
        assert!(net2.routes[2].header.flags.is_empty());
        assert_eq!(rules.len(), 4);
    }

    #[test]
    fn tables_follow_from_the_name_and_never_meet() {
        let routing = SourceRouting::default();
        let mut used = BTreeSet::new();
        for name in ["net1", "net2", "net3", "rdma0", "rdma1", "ib0"] {
            let table = routing.table(name, None, &used).unwrap();
            assert_eq!(routing.table(name, None, &used).unwrap(), table);
            assert!(table >= FIRST_TABLE && used.insert(table), "{name}");
        }
        let first = routing.table("net1", None, &BTreeSet::new()).unwrap();
        assert_ne!(routing.table("net1", None, &used).unwrap(), first);
        let asked = SourceRouting {
            table: Some(first),
            ..routing
        };
        assert!(
            asked
                .table("x", None, &used)
                .unwrap_err()
                .msg
                .contains("in use")
        );
    }
}
