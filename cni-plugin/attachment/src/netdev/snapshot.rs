//! The state of a netdev, as the journal keeps it.
//!
//! A change of namespaces keeps MTU, queue length, MAC address, alias, alternative names, link
//! settings, ethtool settings and BPF programs, all of which the pod may change. It loses being up,
//! addresses, routes, neighbours and the interface's sysctls. All of it is recorded. Addresses, routes, rules and neighbours are kept as the kernel's
//! own messages in hexadecimal, so that nothing is lost in translation, each beside the same as
//! text for the person who reads the journal.
//!
//! What a change of namespaces destroys and this program does not restore (queueing disciplines
//! with their filters, nexthop objects, static multicast addresses) and what would act in the pod (BPF programs of the host) keeps a netdev from
//! being moved: [`super::obstacle`].

use std::{collections::BTreeMap, net::Ipv6Addr, path::Path};

use netlink_packet_core::{DecodeError, Emitable, Parseable};
use netlink_packet_route::{
    address::AddressMessage, link::LinkFlags, neighbour::NeighbourMessage, route::RouteMessage,
    rule::RuleMessage,
};
use serde::{Deserialize, Serialize};

pub use super::identity::Identity;
use super::{display, replay, tuning::Tuning, vf::Vf};
use netlink::{Name, Socket, address, clock, link::Link, neighbour, route, rule, sysctl};

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
    /// As text.
    pub text: String,
    /// The message's bytes in hexadecimal.
    pub message: String,
}

impl Message {
    pub(super) fn of(body: &impl Emitable, text: String) -> Self {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        Message {
            text,
            message: hexadecimal(&bytes),
        }
    }

    /// Of a rule.
    pub fn rule(rule: &RuleMessage) -> Self {
        Message::of(rule, display::rule(rule))
    }

    /// The message again.
    ///
    /// # Errors
    /// It is not what this program wrote.
    pub fn parse<T: Parseable<[u8]>>(&self) -> Result<T, DecodeError> {
        let bytes = of_hexadecimal(&self.message);
        let bytes = bytes.ok_or_else(|| DecodeError::from("message is not hexadecimal"))?;
        T::parse(&bytes)
    }
}

/// The flags that an administrator sets; the rest are the kernel's (`__dev_change_flags()`).
pub const KEPT_FLAGS: LinkFlags = LinkFlags::Promisc
    .union(LinkFlags::Allmulti)
    .union(LinkFlags::Multicast)
    .union(LinkFlags::Noarp)
    .union(LinkFlags::Debug)
    .union(LinkFlags::Notrailers)
    .union(LinkFlags::Dynamic)
    .union(LinkFlags::Portsel)
    .union(LinkFlags::Automedia);

/// A netdev with all its state in the host's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Snapshot {
    /// How it is found again.
    pub identity: Identity,
    /// The bus of its device (`pci`, `auxiliary`, `virtio`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<String>,
    /// Name.
    pub name: Name,
    /// Alternative names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub altnames: Vec<Name>,
    /// `ifalias`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<Name>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Length of the transmit queue in packets.
    pub tx_queue_length: u32,
    /// Whether it was up.
    pub up: bool,
    /// `IFF_*` of [`KEPT_FLAGS`].
    pub flags: u32,
    /// Addresses, but for autoconfigured ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Message>,
    /// Routes in every table, but for those the kernel makes; those without a gateway first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Message>,
    /// Rules about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Message>,
    /// Permanent neighbours.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<Message>,
    /// What its PF holds of it, for a VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<Vf>,
    /// Per-interface sysctls, `group/key` and value.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    /// When it was taken, in seconds of the boot's clock.
    pub taken_at: u64,
    /// Its addresses with a lifetime are the node's for as long as it lives: they go into the pod
    /// without a lifetime, and return with the lifetime that they had.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub static_addresses: bool,
    /// Its index in the pod; none while it was not moved, and for hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_index: Option<u32>,
    /// Hardware address of all others on the link, in hexadecimal; none for InfiniBand, where it is
    /// the port's own affair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast: Option<String>,
    /// The hardware address that the pod's interface is given, where it is not the netdev's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_mac: Option<String>,
    /// Settings of the link that are one number each, by the names that `ip link` has for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, u32>,
    /// How many users wanted it to receive everything.
    pub promiscuity: u32,
    /// What its kind says of itself and can change, attribute by attribute in hexadecimal: mode and
    /// flags of a macvlan, macvtap, ipvlan or IPoIB netdev.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub mode: BTreeMap<u16, String>,
    /// The interface part of its IPv6 addresses, where an administrator set one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<Ipv6Addr>,
    /// Addresses it answers for on behalf of others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub proxies: Vec<Message>,
    /// What ethtool sets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ethtool: Option<Tuning>,
}

/// What a pod without an IPAM is given of a netdev's state.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Addresses without an end.
    pub addresses: Vec<AddressMessage>,
    /// Routes that these serve.
    pub routes: Vec<RouteMessage>,
    /// Rules.
    pub rules: Vec<RuleMessage>,
    /// Permanent neighbours.
    pub neighbours: Vec<NeighbourMessage>,
}

impl Snapshot {
    /// Records the state of a netdev in the namespace the thread and the socket are in.
    ///
    /// # Errors
    /// The kernel's refusal, or settings that cannot be listed.
    pub fn take(socket: &mut Socket, proc: &Path, link: &Link) -> netlink::Result<Self> {
        Ok(Snapshot {
            ethtool: Tuning::take(link)?,
            ..Snapshot::take_without_ethtool(socket, proc, link)?
        })
    }

    pub(super) fn take_without_ethtool(
        socket: &mut Socket,
        proc: &Path,
        link: &Link,
    ) -> netlink::Result<Self> {
        let taken_at = clock::since_boot()?;
        let addresses = address::list(socket, link.index)?;
        let name = String::from_utf8_lossy(link.name.as_bytes());
        let mut routes = Vec::new();
        let mut rules = Vec::new();
        for family in route::FAMILIES {
            let mut of_family = route::list(socket, family, link.index)?;
            of_family.retain(|route| !replay::is_kernel_made(route));
            let tables: Vec<u32> = of_family.iter().map(route::table_of).collect();
            rules.extend(
                rule::list(socket, family)?
                    .into_iter()
                    .filter(|rule| replay::rule_concerns(rule, &name, &tables)),
            );
            routes.extend(of_family);
        }
        routes.sort_by_key(replay::has_gateway);
        let neighbours = neighbour::list_permanent(socket, link.index)?;
        let proxies = neighbour::list_proxies(socket, link.index)?;
        Ok(Snapshot {
            identity: Identity::of(link),
            bus: link.bus.clone(),
            name: link.name.clone(),
            altnames: link.altnames.clone(),
            alias: link.alias.clone(),
            mtu: link.mtu,
            tx_queue_length: link.tx_queue_length,
            up: link.is_up(),
            flags: (link.flags & KEPT_FLAGS).bits(),
            addresses: addresses
                .iter()
                .filter(|address| !replay::is_autoconfigured(address))
                .map(|address| Message::of(address, display::address(address)))
                .collect(),
            routes: routes
                .iter()
                .map(|r| Message::of(r, display::route(r)))
                .collect(),
            rules: rules
                .iter()
                .map(|r| Message::of(r, display::rule(r)))
                .collect(),
            neighbours: neighbours
                .iter()
                .map(|n| Message::of(n, display::neighbour(n)))
                .collect(),
            vf: None,
            sysctls: sysctl::read_all(proc, &link.name)?,
            taken_at: taken_at.as_secs(),
            static_addresses: false,
            pod_index: None,
            broadcast: (!link.is_infiniband()).then(|| hexadecimal(&link.broadcast)),
            pod_mac: None,
            settings: settings(link),
            promiscuity: link.promiscuity,
            mode: mode(link),
            token: link.token,
            proxies: proxies
                .iter()
                .map(|n| Message::of(n, display::neighbour(n)))
                .collect(),
            ethtool: None,
        })
    }

    /// Notes the netdev's index in the pod, which distinguishes a link without a bus device from
    /// those that the pod makes. To be written to the journal after the move and before the pod
    /// runs. False when there is nothing to note.
    pub fn moved_as(&mut self, in_pod: &Link) -> bool {
        let noted = self.identity.needs_index();
        if noted {
            self.pod_index = Some(in_pod.index);
        }
        noted
    }

    /// What a pod without an IPAM is given. Addresses with a lifetime stay with the host, unless
    /// they are static: what renews them, a DHCP client or the kernel, does not see the pod, and
    /// the lease may be somebody else's once it has ended. Routes and rules that are of no use
    /// without them stay as well.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn given_to_pod(&self) -> Result<Given, DecodeError> {
        let mut all = self.parsed_addresses()?;
        if self.static_addresses {
            all.iter_mut().for_each(replay::without_lifetime);
        }
        let (addresses, stay): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|address| replay::lifetime(address).is_none());
        let mut routes = self.parsed_routes()?;
        routes.retain(|route| !replay::needs_one_of(route, &stay, &addresses));
        let mut rules = self.parsed_rules()?;
        rules.retain(|rule| !replay::is_from_one_of(rule, &stay));
        Ok(Given {
            addresses,
            routes,
            rules,
            neighbours: self.parsed_neighbours()?,
        })
    }

    /// The addresses as messages.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn parsed_addresses(&self) -> Result<Vec<AddressMessage>, DecodeError> {
        self.addresses.iter().map(Message::parse).collect()
    }

    /// The routes as messages.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn parsed_routes(&self) -> Result<Vec<RouteMessage>, DecodeError> {
        self.routes.iter().map(Message::parse).collect()
    }

    /// The rules as messages.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn parsed_rules(&self) -> Result<Vec<RuleMessage>, DecodeError> {
        self.rules.iter().map(Message::parse).collect()
    }

    /// The addresses that have a lifetime, as text.
    pub fn leased_addresses(&self) -> Vec<&str> {
        let leased = |message: &&Message| {
            let address = message.parse::<AddressMessage>();
            address.is_ok_and(|address| replay::lifetime(&address).is_some())
        };
        let leased = self.addresses.iter().filter(leased);
        leased.map(|message| message.text.as_str()).collect()
    }

    /// The permanent neighbours as messages.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn parsed_neighbours(&self) -> Result<Vec<NeighbourMessage>, DecodeError> {
        self.neighbours.iter().map(Message::parse).collect()
    }
}

/// [`Link::numbers`], and whether the link is held down.
pub(super) fn settings(link: &Link) -> BTreeMap<String, u32> {
    let numbers = link.numbers.iter();
    let mut settings: BTreeMap<_, _> = numbers
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    settings.insert(PROTO_DOWN.to_owned(), link.proto_down.into());
    settings.insert(PROTO_DOWN_REASONS.to_owned(), link.proto_down_reasons);
    settings
}

/// Mode and flags of a kind that has them (`IFLA_MACVLAN_MODE`, `IFLA_IPVLAN_MODE`, `…_FLAGS`;
/// `IFLA_IPOIB_MODE`, `IFLA_IPOIB_UMCAST`).
pub(super) fn mode(link: &Link) -> BTreeMap<u16, String> {
    let kind = link.kind.as_ref().map(ToString::to_string);
    let of_kind = match kind.as_deref() {
        Some("macvlan" | "macvtap" | "ipvlan" | "ipvtap") => 1..=2,
        Some("ipoib") => 2..=3,
        _ => return BTreeMap::new(),
    };
    let of_kind = link
        .info
        .iter()
        .filter(|(attribute, _)| of_kind.contains(*attribute));
    of_kind
        .map(|(attribute, value)| (*attribute, hexadecimal(value)))
        .collect()
}

/// Among [`Snapshot::settings`], 1 for a link that is held down.
pub(super) const PROTO_DOWN: &str = "protodown";
/// Among [`Snapshot::settings`], a bit for each reason.
pub(super) const PROTO_DOWN_REASONS: &str = "protodown_reason";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
        let mut route = RouteMessage::default();
        route.header.table = 254;
        route.attributes = vec![netlink_packet_route::route::RouteAttribute::Oif(5)];
        let snapshot = Snapshot {
            identity: Identity {
                index: 5,
                ..Identity::default()
            },
            name: "eth1".into(),
            mtu: 9000,
            routes: vec![Message::of(&route, display::route(&route))],
            ..Snapshot::default()
        };
        let text = serde_json::to_string(&snapshot).unwrap();
        let read: Snapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(read, snapshot);
        assert_eq!(read.parsed_routes().unwrap(), [route]);
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
        let snapshot = Snapshot {
            addresses: addresses
                .iter()
                .map(|a| Message::of(a, display::address(a)))
                .collect(),
            routes: routes
                .iter()
                .map(|r| Message::of(r, display::route(r)))
                .collect(),
            rules: vec![Message::rule(&rule)],
            ..Snapshot::default()
        };
        let given = snapshot.given_to_pod().unwrap();
        assert_eq!(given.addresses, addresses[..1]);
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
