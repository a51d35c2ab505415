//! A netdev of the host as the journal keeps it.
//!
//! A change of namespaces keeps MTU, queue length, MAC address, alias and alternative names, all of
//! which the pod may change. It loses being up, addresses, routes, neighbours and the interface's
//! sysctls. All of it is recorded ([`super::state`]). Addresses, routes, rules and neighbours are
//! kept as the kernel's own messages
//! in hexadecimal, so that nothing is lost in translation, each beside the same as text for the
//! person who reads the journal.
//!
//! Queueing disciplines with their filters, which a change of namespaces destroys, multipath routes,
//! which it changes, and BPF programs, which would act in the pod, keep a netdev from being moved: [`super::obstacle`].

use std::path::Path;

use netlink::{Name, Socket, clock, link::Link};
use netlink_packet_route::{AddressFamily, address::AddressMessage};
use serde::{Deserialize, Serialize};

pub use super::identity::Identity;
use super::{display, replay, state::State, vf::Vf};
use crate::interface::InterfaceConfig;

/// A netdev with all its state in the host's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Snapshot {
    pub identity: Identity,
    /// The bus of its device (`pci`, `auxiliary`, `virtio`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    pub name: Name,
    pub state: State,
    /// What its PF holds of it, for a VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<Vf>,
    /// When it was taken, in seconds of the boot's clock.
    pub taken_at: u64,
    /// Its addresses with a lifetime are the node's for as long as it lives: they go into the pod
    /// without a lifetime, and return with the lifetime that they had.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub static_addresses: bool,
}

impl Snapshot {
    /// Records the state of a netdev of the namespace that the thread and the socket are in.
    pub fn take(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Self> {
        Ok(Snapshot {
            identity: Identity::of(link),
            bus: link.bus.clone(),
            name: link.name.clone(),
            taken_at: clock::since_boot()?.as_secs(),
            state: State::read(socket, proc, link)?,
            ..Snapshot::default()
        })
    }

    /// What a pod without an IPAM is given. Addresses with a lifetime stay with the host, unless
    /// they are static: what renews them, a DHCP client or the kernel, does not see the pod, and
    /// the lease may be somebody else's once it has ended. Routes and rules that are of no use
    /// without them stay as well, as do routes through nexthop objects, which a pod does not have.
    /// IPv6 link-local addresses the interface makes for itself again.
    ///
    /// `ifname` is its name in the pod.
    pub fn given_to_pod(&self, ifname: &str) -> InterfaceConfig {
        let mut given = self.state.config.clone();
        given.sysctls.clear();
        if self.static_addresses {
            given
                .addresses
                .iter_mut()
                .for_each(replay::without_lifetime);
        }
        let is_leased = |address: &mut AddressMessage| replay::lifetime(address).is_some();
        let stay: Vec<AddressMessage> = given.addresses.extract_if(.., is_leased).collect();
        given.routes.retain(|route| {
            !replay::needs_one_of(route, &stay, &given.addresses)
                && !replay::has_nexthop_object(route)
        });
        given
            .rules
            .retain(|rule| !replay::is_from_one_of(rule, &stay));
        let name = self.name.to_string();
        for rule in &mut given.rules {
            *rule = replay::rule(rule, &name, ifname);
        }
        given.addresses.retain(|address| {
            address.header.family != AddressFamily::Inet6 || !replay::is_link_local(address)
        });
        for address in &mut given.addresses {
            *address = replay::address_elsewhere(address, 0);
        }
        given
    }

    /// The addresses that have a lifetime, as text.
    pub fn leased_addresses(&self) -> Vec<String> {
        let all = self.state.config.addresses.iter();
        let leased = all.filter(|address| replay::lifetime(address).is_some());
        leased.map(display::address).collect()
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::address::AddressAttribute;

    use super::*;

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
        let mut address = AddressMessage::default();
        address.header.family = AddressFamily::Inet;
        address.attributes = vec![AddressAttribute::Local([10, 0, 0, 1].into())];
        let snapshot = Snapshot {
            name: Name::from(b"\xff"),
            state: State {
                mac: "02:00:00:00:00:01".parse().ok(),
                mtu: 9000,
                altnames: vec!["enp1s0".into()],
                ipoib_mode: [(2, vec![1, 0])].into(),
                families: ["ipv4".to_owned()].into(),
                config: InterfaceConfig {
                    addresses: vec![address],
                    ..InterfaceConfig::default()
                },
                ..State::default()
            },
            ..Snapshot::default()
        };
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        let damaged = text.replace("9000", "\"9000\"");
        assert!(serde_json::from_str::<Snapshot>(&damaged).is_err());
    }

    #[test]
    fn what_an_administrator_set_for_good_goes_along_and_a_lease_stays() {
        use netlink_packet_route::{
            address::CacheInfo,
            route::{RouteAddress, RouteAttribute, RouteMessage},
            rule::{RuleAttribute, RuleMessage},
        };
        let address = |text: &str, valid| {
            let mut message = AddressMessage::default();
            message.header.family = AddressFamily::Inet;
            message.header.prefix_len = 24;
            let mut lifetime = CacheInfo::default();
            (lifetime.ifa_preferred, lifetime.ifa_valid) = (valid, valid);
            message.attributes = vec![
                AddressAttribute::Local(text.parse().unwrap()),
                AddressAttribute::CacheInfo(lifetime),
            ];
            message
        };
        let route = |attribute| {
            let mut route = RouteMessage::default();
            route.header.address_family = AddressFamily::Inet;
            route.attributes = vec![attribute];
            route
        };
        let gateway =
            |text: &str| RouteAttribute::Gateway(RouteAddress::Inet(text.parse().unwrap()));
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet;
        rule.header.src_len = 32;
        rule.attributes = vec![RuleAttribute::Source("10.1.0.1".parse().unwrap())];
        let addresses = [address("10.0.0.1", u32::MAX), address("10.1.0.1", 600)];
        let routes = [
            route(gateway("10.0.0.254")),
            route(gateway("10.1.0.254")),
            route(gateway("10.2.0.254")),
            route(RouteAttribute::PrefSource(RouteAddress::Inet(
                [10, 1, 0, 1].into(),
            ))),
        ];
        let config = InterfaceConfig {
            addresses: addresses.to_vec(),
            routes: routes.to_vec(),
            rules: vec![rule],
            ..InterfaceConfig::default()
        };
        let snapshot = Snapshot {
            state: State {
                config,
                ..State::default()
            },
            ..Snapshot::default()
        };
        let given = snapshot.given_to_pod("net1");
        assert_eq!(
            given.addresses,
            [replay::address_elsewhere(&addresses[0], 0)]
        );
        assert_eq!(given.routes, [routes[0].clone(), routes[2].clone()]);
        assert!(given.rules.is_empty());
        assert_eq!(snapshot.leased_addresses(), ["10.1.0.1/24"]);
        // Ten minutes later it is over.
        assert!(replay::aged(&addresses[1], 599).is_some());
        assert!(replay::aged(&addresses[1], 600).is_none());
        assert_eq!(
            replay::aged(&addresses[0], 600).as_ref(),
            Some(&addresses[0])
        );
    }
}
