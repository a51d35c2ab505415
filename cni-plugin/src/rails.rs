//! Source routing for rails: what leaves with an interface's address leaves through it.
//!
//! A pod with several NICs, often in one subnet, has one main table: replies and RDMA connections
//! of the second NIC would leave through the first, and every NIC would answer ARP for every
//! address. So a rail has a table of its own with its connected networks, its routes and its
//! gateway, which rules choose by source address (and by interface, for sockets bound to it). The
//! main table keeps the connected route and the others with their source, because libraries such
//! as UCX read it and know no rules. Default routes do not get into the main table of a pod
//! that has one: the pod's way out and its DNS stay where they are. Pure.

use std::{collections::BTreeSet, hash::Hasher, net::IpAddr};

use attachment::netdev::replay;
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

use crate::interface_config::{InterfaceConfig, LINK_SCOPE, Setting, cidr, route_message};

/// Before the main table (32766), behind what people number by hand.
const PRIORITY: u32 = 1000;
/// Tables chosen here are 2^24 and more; people and other plugins number theirs by hand, from 1
/// or from 100.
const FIRST_TABLE: u32 = 1 << 24;
const TABLES: u32 = 1 << 24;

/// `sourceRouting`: what is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rails {
    /// On, off, or by what the pod has.
    pub wanted: Option<bool>,
    /// The table; none for one chosen by the interface's name.
    pub table: Option<u32>,
    /// Priority of the rules; none for 1000.
    pub priority: Option<u32>,
}

impl Rails {
    /// Reads `sourceRouting`: true, false, or an object with `enabled`, `table`, `priority`.
    ///
    /// # Errors
    /// Code 7 naming key and value.
    pub fn read(root: &Section<'_>) -> Result<Rails, Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Keys {
            enabled: Option<bool>,
            table: Option<u32>,
            priority: Option<u32>,
        }
        const KEY: &str = "sourceRouting";
        let keys = match root.value(KEY) {
            None => return Ok(Rails::default()),
            Some(Value::Bool(enabled)) => Keys {
                enabled: Some(*enabled),
                ..Keys::default()
            },
            Some(_) => root
                .section(KEY)
                .map_err(|e| e.with_details("expected true, false, or an object"))?
                .read()?,
        };
        if keys.table.is_some_and(is_of_the_kernel) {
            let why = "table: 0 and 253 to 255 are the kernel's own tables";
            return Err(root
                .wrong(KEY, why)
                .with_details("leave it out for one that is not in use"));
        }
        if keys
            .priority
            .is_some_and(|priority| !(1..=32765).contains(&priority))
        {
            return Err(root.wrong(KEY, "priority is not between 1 and 32765"));
        }
        Ok(Rails {
            wanted: Some(keys.enabled.unwrap_or(true)),
            table: keys.table,
            priority: keys.priority,
        })
    }

    /// Whether ARP is to keep the interface's addresses to the interface.
    pub fn keep_arp(&self) -> bool {
        self.wanted != Some(false)
    }

    /// The families of addresses that are routed by source.
    ///
    /// Unless it is said, those of which the pod has another RDMA interface (`others`), and those
    /// of which network and pod both have a default route (`defaults`: the pod's); not those that
    /// bring rules of their own.
    pub fn families(
        &self,
        interface_config: &InterfaceConfig,
        others: &[AddressFamily],
        defaults: &[AddressFamily],
    ) -> Vec<AddressFamily> {
        let mut families: Vec<AddressFamily> = Vec::new();
        for address in &interface_config.addresses {
            let family = address.header.family;
            let has_rules = interface_config
                .rules
                .iter()
                .any(|rule| rule.header.family == family);
            let due = match self.wanted {
                Some(wanted) => wanted,
                None if has_rules => false,
                None => {
                    others.contains(&family)
                        || (defaults.contains(&family) && interface_config.has_default(family))
                }
            };
            if due && !families.contains(&family) {
                families.push(family);
            }
        }
        families
    }

    /// The table of an interface: the one that is asked for, else one that follows from its name,
    /// which is unique in the pod, and that is not in `used`. Of several interfaces each has the
    /// table that is asked for and the number of its `rail` more.
    ///
    /// # Errors
    /// Code 7: the table that is asked for is in use.
    pub fn table(
        &self,
        ifname: &str,
        rail: Option<u32>,
        used: &BTreeSet<u32>,
    ) -> Result<u32, Error> {
        if let Some(table) = self.table {
            let table = table.saturating_add(rail.unwrap_or(0));
            if is_of_the_kernel(table) {
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!(
                        "sourceRouting.table: {table}, for rail {}, is the kernel's own",
                        rail.unwrap_or(0)
                    ),
                )
                .with_details(
                    "choose a number from which on as many are free as there are rails",
                ));
            }
            if used.contains(&table) {
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!("sourceRouting.table: {table} is in use in the pod already"),
                )
                .with_details("leave it out for one that is not in use"));
            }
            return Ok(table);
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

    /// Makes a rail of the interface, for these families.
    pub fn apply(
        &self,
        interface_config: &mut InterfaceConfig,
        families: &[AddressFamily],
        ifname: &str,
        table: u32,
    ) {
        let priority = self.priority.unwrap_or(PRIORITY);
        for family in families.iter().copied() {
            if family == AddressFamily::Inet {
                // The kernel takes the larger of this and `all` (ip-sysctl.rst): 2, loose, holds
                // whatever the pod's `all` is, 0 does not.
                interface_config.settings.push(Setting {
                    group: "ipv4/conf",
                    key: "rp_filter",
                    value: "2",
                });
            }
            let addresses: Vec<AddressMessage> = interface_config
                .addresses
                .iter()
                .filter(|a| a.header.family == family)
                .cloned()
                .collect();
            let gateway = interface_config
                .gateways
                .iter()
                .copied()
                .find(|gateway| family_of(*gateway) == family);
            let mut own: Vec<RouteMessage> = addresses
                .iter()
                .filter_map(|address| connected(address, table))
                .collect();
            let in_main: Vec<RouteMessage> = interface_config
                .routes
                .iter()
                .filter(|r| r.header.address_family == family && route::table_of(r) == route::MAIN)
                .cloned()
                .collect();
            let mut led_out = false;
            for route in &in_main {
                led_out |= replay::is_default(route);
                own.push(in_table(route, table));
            }
            if let Some(gateway) = gateway.filter(|_| !led_out) {
                own.extend(default_via(gateway, &addresses, table));
            }
            own.sort_by_key(replay::has_gateway);
            if interface_config.defaults_of_the_pod.contains(&family) {
                interface_config.without_defaults(&[family]);
            }
            for route in &mut interface_config.routes {
                if route.header.address_family == family && route::table_of(route) == route::MAIN {
                    hint_source(route, &addresses);
                }
            }
            for mut route in own {
                hint_source(&mut route, &addresses);
                if !interface_config.routes.contains(&route) {
                    interface_config.routes.push(route);
                }
            }
            for address in &addresses {
                interface_config.rules.extend(
                    address::own(address)
                        .map(|from| rule(family, Some(from), None, table, priority)),
                );
            }
            interface_config
                .rules
                .push(rule(family, None, Some(ifname), table, priority));
        }
    }
}

/// 253 to 255 are default, main and local; 0 is not a table.
fn is_of_the_kernel(table: u32) -> bool {
    matches!(table, 0 | 253..=255)
}

fn family_of(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

/// The network of an address as the kernel makes its route, in another table; none for a single
/// address.
fn connected(address: &AddressMessage, table: u32) -> Option<RouteMessage> {
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

/// The first address that can be one, unless the route says another. Not IPv6: there the kernel
/// refuses an address that is still tentative, and finds the interface's own by itself.
fn hint_source(route: &mut RouteMessage, addresses: &[AddressMessage]) {
    let said = route
        .attributes
        .iter()
        .any(|a| matches!(a, RouteAttribute::PrefSource(_)));
    let Some(IpAddr::V4(source)) = addresses.first().and_then(address::own).filter(|_| !said)
    else {
        return;
    };
    route
        .attributes
        .push(RouteAttribute::PrefSource(RouteAddress::Inet(source)));
}

fn rule(
    family: AddressFamily,
    from: Option<IpAddr>,
    oif: Option<&str>,
    table: u32,
    priority: u32,
) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = RuleAction::ToTable;
    rule.header.table = u8::try_from(table).unwrap_or(0);
    if let Some(from) = from {
        rule.header.src_len = if from.is_ipv4() { 32 } else { 128 };
        rule.attributes.push(RuleAttribute::Source(from));
    }
    rule.attributes
        .extend(oif.map(|name| RuleAttribute::Oifname(name.to_owned())));
    rule.attributes.push(RuleAttribute::Table(table));
    rule.attributes.push(RuleAttribute::Priority(priority));
    rule
}

#[cfg(test)]
mod tests {
    use cni_wire::{CniResult, IpConfig};
    use netlink_packet_route::route::RouteFlags;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Attach, ChildKind, Config};
    use attachment::netdev::display;

    const V4: AddressFamily = AddressFamily::Inet;
    const V6: AddressFamily = AddressFamily::Inet6;

    fn interface_config(
        ips: &[(&str, Option<&str>)],
        routes: &[(&str, Option<&str>)],
    ) -> InterfaceConfig {
        let result = CniResult {
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
        InterfaceConfig::of_result(
            Attach::Child(ChildKind::Macvlan),
            &Config::default(),
            &result,
        )
        .unwrap()
    }

    fn read(value: Value) -> Result<Rails, Error> {
        let object = json!({ "sourceRouting": value }).to_string();
        Rails::read(&Section::root(&cni_wire::json::parse(object).unwrap()))
    }

    fn said(interface_config: &InterfaceConfig) -> (Vec<String>, Vec<String>) {
        (
            interface_config.routes.iter().map(display::route).collect(),
            interface_config.rules.iter().map(display::rule).collect(),
        )
    }

    #[test]
    fn it_is_asked_for_in_three_ways() {
        assert_eq!(read(Value::Null).unwrap(), Rails::default());
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
    fn a_pods_second_interface_of_a_family_is_a_rail() {
        let both = interface_config(&[("10.0.0.5/24", None), ("fd00::5/64", None)], &[]);
        let by = |wanted, others: &[AddressFamily]| {
            let rails = Rails {
                wanted,
                ..Rails::default()
            };
            rails.families(&both, others, &[V4, V6])
        };
        assert!(by(None, &[]).is_empty());
        assert_eq!(by(None, &[V6]), [V6]);
        assert_eq!(by(Some(true), &[]), [V4, V6]);
        assert!(by(Some(false), &[V4, V6]).is_empty());
    }

    #[test]
    fn a_network_with_a_way_out_does_not_take_the_pods() {
        let out = interface_config(&[("10.0.0.5/24", Some("10.0.0.1"))], &[("0.0.0.0/0", None)]);
        let auto = Rails::default();
        assert_eq!(auto.families(&out, &[], &[V4]), [V4]);
        assert!(auto.families(&out, &[], &[]).is_empty(), "the pod has none");
    }

    #[test]
    fn a_rail_has_its_networks_routes_and_gateway_in_its_table() {
        let mut rail = interface_config(
            &[("10.0.0.5/24", Some("10.0.0.1"))],
            &[("0.0.0.0/0", None), ("10.0.0.0/8", None)],
        );
        rail.defaults_of_the_pod = vec![V4];
        Rails::default().apply(&mut rail, &[V4], "net2", 4242);
        let (routes, rules) = said(&rail);
        assert_eq!(
            routes,
            [
                "10.0.0.0/8 via 10.0.0.1 src 10.0.0.5",
                "10.0.0.0/24 src 10.0.0.5 table 4242",
                "default via 10.0.0.1 src 10.0.0.5 table 4242",
                "10.0.0.0/8 via 10.0.0.1 src 10.0.0.5 table 4242",
            ]
        );
        assert_eq!(
            rules,
            [
                "1000: from 10.0.0.5/32 lookup 4242",
                "1000: oif net2 lookup 4242"
            ]
        );
        assert!(
            rail.settings
                .iter()
                .any(|s| s.key == "rp_filter" && s.value == "2")
        );
    }

    #[test]
    fn a_gateway_is_enough_and_may_lie_outside_of_a_single_address() {
        let mut rail = interface_config(
            &[
                ("10.0.0.5/32", Some("10.0.0.1")),
                ("fd00::5/64", Some("fe80::1")),
            ],
            &[],
        );
        Rails::default().apply(&mut rail, &[V4, V6], "net2", 4242);
        let (routes, rules) = said(&rail);
        assert_eq!(
            routes,
            [
                "default via 10.0.0.1 src 10.0.0.5 table 4242",
                "fd00::/64 table 4242",
                "default (IPv6) via fe80::1 table 4242",
            ]
        );
        assert_eq!(rail.routes[0].header.flags, RouteFlags::Onlink);
        assert!(rail.routes[2].header.flags.is_empty());
        assert_eq!(rules.len(), 4);
    }

    #[test]
    fn tables_follow_from_the_name_and_never_meet() {
        let rails = Rails::default();
        let mut used = BTreeSet::new();
        for name in ["net1", "net2", "net3", "rail0", "rail1", "ib0"] {
            let table = rails.table(name, None, &used).unwrap();
            assert_eq!(rails.table(name, None, &used).unwrap(), table);
            assert!(table >= FIRST_TABLE && used.insert(table), "{name}");
        }
        let first = rails.table("net1", None, &BTreeSet::new()).unwrap();
        assert_ne!(rails.table("net1", None, &used).unwrap(), first);
        let asked = Rails {
            table: Some(first),
            ..rails
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
