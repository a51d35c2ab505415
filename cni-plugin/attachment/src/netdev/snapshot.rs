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

use netlink_packet_core::{DecodeError, Emitable, Parseable};
use netlink_packet_route::{
    AddressFamily, address::AddressMessage, neighbour::NeighbourMessage, route::RouteMessage,
    rule::RuleMessage,
};
use serde::{Deserialize, Serialize};

pub use super::identity::Identity;
use super::{
    display, replay,
    state::{self, State},
    vf::Vf,
};
use crate::interface::InterfaceConfig;
use netlink::{Name, Socket, clock, link::Link};

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

pub(super) fn of_hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

/// A kernel message and what it says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub text: String,
    /// The message's bytes in hexadecimal.
    pub message: String,
}

impl Message {
    pub(crate) fn of(body: &impl Emitable, text: String) -> Self {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        Message {
            text,
            message: hexadecimal(&bytes),
        }
    }

    pub fn rule(rule: &RuleMessage) -> Self {
        Message::of(rule, display::rule(rule))
    }

    /// The message again.
    ///
    /// # Errors
    /// It is not what this program wrote.
    pub fn parse<T: Parseable<[u8]>>(&self) -> Result<T, DecodeError> {
        parse_hex(&self.message)
    }
}

pub(super) fn parse_hex<T: Parseable<[u8]>>(message: &str) -> Result<T, DecodeError> {
    let bytes = of_hexadecimal(message);
    let bytes = bytes.ok_or_else(|| DecodeError::from("message is not hexadecimal"))?;
    T::parse(&bytes)
}

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

    pub fn has_altname(&self, name: &Name) -> bool {
        let text = name.to_string();
        let mut altnames = self.state.entries(state::ALTNAME).iter();
        altnames.any(|(altname, _)| *altname == text)
    }

    /// The MAC address that it had on the host.
    pub fn mac(&self) -> &str {
        let mac = self.state.entries(state::MAC).first();
        mac.map_or("", |(_, mac)| mac)
    }

    fn parsed<T: Parseable<[u8]>>(&self, key: &str) -> Result<Vec<T>, DecodeError> {
        let entries = self.state.entries(key).iter();
        entries.map(|(_, message)| parse_hex(message)).collect()
    }

    /// What a pod without an IPAM is given. Addresses with a lifetime stay with the host, unless
    /// they are static: what renews them, a DHCP client or the kernel, does not see the pod, and
    /// the lease may be somebody else's once it has ended. Routes and rules that are of no use
    /// without them stay as well, as do routes through nexthop objects, which a pod does not have.
    /// IPv6 link-local addresses the interface makes for itself again.
    ///
    /// `ifname` is its name in the pod.
    ///
    /// # Errors
    /// The snapshot cannot be read, which the program that took it did not write.
    pub fn given_to_pod(&self, ifname: &str) -> Result<InterfaceConfig, DecodeError> {
        let mut all: Vec<AddressMessage> = self.parsed(state::ADDRESS)?;
        if self.static_addresses {
            all.iter_mut().for_each(replay::without_lifetime);
        }
        let (addresses, stay): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|address| replay::lifetime(address).is_none());
        let mut routes: Vec<RouteMessage> = self.parsed(state::ROUTE)?;
        routes.retain(|route| {
            !replay::needs_one_of(route, &stay, &addresses) && !replay::has_nexthop_object(route)
        });
        let mut rules: Vec<RuleMessage> = self.parsed(state::RULE)?;
        rules.retain(|rule| !replay::is_from_one_of(rule, &stay));
        let is_made_again = |address: &&AddressMessage| {
            address.header.family == AddressFamily::Inet6 && replay::is_link_local(address)
        };
        let addresses = addresses.iter().filter(|address| !is_made_again(address));
        let (index, name) = (self.identity.index, self.name.to_string());
        let routes = routes.iter().map(|route| replay::route(route, index, 0));
        let rules = rules.iter().map(|rule| replay::rule(rule, &name, ifname));
        let neighbours: Vec<NeighbourMessage> = self.parsed(state::NEIGHBOUR)?;
        Ok(InterfaceConfig {
            addresses: addresses.map(|a| replay::address_elsewhere(a, 0)).collect(),
            routes: routes.collect(),
            rules: rules.collect(),
            neighbours: neighbours.iter().map(|n| replay::neighbour(n, 0)).collect(),
            ..InterfaceConfig::default()
        })
    }

    /// The addresses that have a lifetime, as text.
    pub fn leased_addresses(&self) -> Vec<&str> {
        let is_leased = |(_, message): &&(String, String)| {
            let address = parse_hex::<AddressMessage>(message);
            address.is_ok_and(|address| replay::lifetime(&address).is_some())
        };
        let addresses = self.state.entries(state::ADDRESS).iter();
        let leased = addresses.filter(is_leased);
        leased.map(|(text, _)| text.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(message: Message) -> (String, String) {
        (message.text, message.message)
    }

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
        let mut route = RouteMessage::default();
        route.header.table = 254;
        route.attributes = vec![netlink_packet_route::route::RouteAttribute::Oif(5)];
        let mut state = State::default();
        let written = Message::of(&route, display::route(&route));
        state.set(state::ROUTE, vec![entry(written)]);
        let snapshot = Snapshot {
            identity: Identity {
                index: 5,
                ..Identity::default()
            },
            name: "eth1".into(),
            state,
            ..Snapshot::default()
        };
        let text = serde_json::to_string(&snapshot).unwrap();
        let read: Snapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(read, snapshot);
        let given = read.given_to_pod("net1").unwrap();
        assert_eq!(given.routes, [replay::route(&route, 5, 0)]);
        let damaged = Message {
            text: String::new(),
            message: "zz".into(),
        };
        assert!(damaged.parse::<RouteMessage>().is_err());
    }

    #[test]
    fn what_an_administrator_set_for_good_goes_along_and_a_lease_stays() {
        use netlink_packet_route::{
            AddressFamily,
            address::{AddressAttribute, CacheInfo},
            route::{RouteAddress, RouteAttribute},
            rule::RuleAttribute,
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
        let mut state = State::default();
        let of_addresses = addresses
            .iter()
            .map(|a| Message::of(a, display::address(a)));
        state.set(state::ADDRESS, of_addresses.map(entry).collect());
        let of_routes = routes.iter().map(|r| Message::of(r, display::route(r)));
        state.set(state::ROUTE, of_routes.map(entry).collect());
        state.set(state::RULE, vec![entry(Message::rule(&rule))]);
        let snapshot = Snapshot {
            state,
            ..Snapshot::default()
        };
        let given = snapshot.given_to_pod("net1").unwrap();
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
