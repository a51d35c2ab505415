//! The state of a netdev, as the journal keeps it.
//!
//! A change of namespaces keeps MTU, queue length, MAC address, alias and alternative names
//! (the pod may change them); it loses being up, addresses, routes, neighbours, and the
//! interface's sysctls. All of it is taken down. Addresses, routes, rules and neighbours are
//! kept as the kernel's own messages in hexadecimal, so that nothing is lost in translation,
//! each beside the same in words for the person who reads the journal.
//!
//! Not kept, because a change of namespaces does not touch it or because it belongs to others:
//! queueing disciplines (the kernel resets them), XDP programs, ethtool settings, the switch's
//! side of things.

use std::{collections::BTreeMap, path::Path};

use hca::{Host, MacAddress};
use netlink_packet_core::{DecodeError, Emitable, Parseable};
use netlink_packet_route::{
    address::AddressMessage, link::LinkFlags, neighbour::NeighbourMessage, route::RouteMessage,
    rule::RuleMessage,
};
use serde::{Deserialize, Serialize};

use super::{
    replay,
    vf::{self, Vf},
    words,
};
use crate::kernel::{self, Name, Socket, address, link::Link, neighbour, route, rule, sysctl};

/// What tells a netdev from others, whatever it is named and wherever it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Identity {
    /// Its device on its bus: a PCI address, an auxiliary or virtio device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_device: Option<String>,
    /// Burnt-in hardware address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permanent_mac: Option<String>,
    /// Hardware address when it was taken.
    pub mac: String,
    /// Kind of link, for those that are not hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Index in the host's namespace; it keeps it in another where it is free.
    pub index: u32,
}

impl Identity {
    /// Of a link as it is now.
    pub fn of(link: &Link) -> Self {
        Identity {
            bus_device: link.bus_device.clone(),
            permanent_mac: (!link.permanent_mac.is_empty()).then(|| mac_text(&link.permanent_mac)),
            mac: mac_text(&link.mac),
            kind: link.kind.as_ref().map(ToString::to_string),
            index: link.index,
        }
    }

    /// Of a link of the host. A VF with one netdev is told by its PCI address alone: drivers of
    /// VFs take whatever address the VF has at a reset for the burnt-in one (`igbvf_reset`,
    /// `ixgbevf_reset`), so that it is another once a pod has set its own.
    pub fn on(host: &Host, link: &Link) -> Self {
        let mut identity = Identity::of(link);
        if identity
            .bus_device
            .as_ref()
            .is_some_and(|device| vf::is_single_port_vf(host, device))
        {
            identity.permanent_mac = None;
        }
        identity
    }

    /// A file name that stands for this netdev and no other.
    pub fn key(&self) -> String {
        let words = match (&self.bus_device, &self.permanent_mac) {
            (Some(bus), Some(mac)) => format!("{bus}-{}", port_part(mac)),
            (Some(bus), None) => bus.clone(),
            (None, mac) => {
                let mac = mac.as_ref().unwrap_or(&self.mac);
                let kind = self.kind.as_deref().unwrap_or("netdev");
                format!("{kind}-{}", port_part(mac))
            }
        };
        words.replace(['/', ':'], "-")
    }

    /// How surely a link is this netdev; none when it is not.
    fn likeness(&self, link: &Link) -> Option<u32> {
        let seen = Identity::of(link);
        if self.kind != seen.kind || differ(&self.bus_device, &seen.bus_device) {
            return None;
        }
        let permanent = |identity: &Identity| {
            identity
                .permanent_mac
                .as_ref()
                .map(|mac| port_part(mac).to_owned())
        };
        if differ(&permanent(self), &permanent(&seen)) {
            return None;
        }
        let same_mac = u32::from(self.mac == seen.mac) * 2;
        let same_index = u32::from(self.index == seen.index);
        let both = |known: bool, seen: bool| u32::from(known && seen);
        let hardware = both(self.bus_device.is_some(), seen.bus_device.is_some()) * 8
            + both(self.permanent_mac.is_some(), seen.permanent_mac.is_some()) * 4;
        // Something must speak for it: the hardware, or for a virtual link MAC or index.
        let score = hardware + same_mac + same_index;
        (score > 0).then_some(score)
    }

    /// The link of a namespace that is this netdev.
    pub fn find<'a>(&self, links: &'a [Link]) -> Option<&'a Link> {
        links
            .iter()
            .filter_map(|link| Some((self.likeness(link)?, link)))
            .max_by_key(|(likeness, _)| *likeness)
            .map(|(_, link)| link)
    }
}

fn differ<T: PartialEq>(known: &Option<T>, seen: &Option<T>) -> bool {
    matches!((known, seen), (Some(known), Some(seen)) if known != seen)
}

/// Of an IPoIB address only the port's GUID stays the same: the queue pair before it changes.
fn port_part(mac: &str) -> &str {
    if mac.len() == 59 {
        mac.get(36..).unwrap_or(mac)
    } else {
        mac
    }
}

fn mac_text(bytes: &[u8]) -> String {
    MacAddress::new(bytes).to_string()
}

/// A kernel message and what it says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// In words.
    pub text: String,
    /// The message's bytes in hexadecimal.
    pub message: String,
}

impl Message {
    pub(super) fn of(body: &impl Emitable, text: String) -> Self {
        use std::fmt::Write;
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        let mut message = String::with_capacity(bytes.len() * 2);
        for byte in bytes {
            // Writing to a String does not fail.
            let _ = write!(message, "{byte:02x}");
        }
        Message { text, message }
    }

    /// Of a rule.
    pub fn rule(rule: &RuleMessage) -> Self {
        Message::of(rule, words::rule(rule))
    }

    /// The message again.
    ///
    /// # Errors
    /// It is not what this program wrote.
    pub fn parse<T: Parseable<[u8]>>(&self) -> Result<T, DecodeError> {
        let bytes: Option<Vec<u8>> = self
            .message
            .as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect();
        let bytes = bytes.ok_or_else(|| DecodeError::from("message is not hexadecimal"))?;
        T::parse(&bytes)
    }
}

/// The flags that an administrator sets; the rest are the kernel's.
pub const KEPT_FLAGS: LinkFlags = LinkFlags::Promisc
    .union(LinkFlags::Allmulti)
    .union(LinkFlags::Multicast)
    .union(LinkFlags::Noarp)
    .union(LinkFlags::Debug);

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
}

impl Snapshot {
    /// Takes down the state of a netdev in the namespace the thread and the socket are in.
    ///
    /// # Errors
    /// The kernel's refusal, or settings that cannot be listed.
    pub fn take(socket: &mut Socket, proc: &Path, link: &Link) -> kernel::Result<Self> {
        let addresses = address::list(socket, link.index)?;
        let mut routes = Vec::new();
        let mut rules = Vec::new();
        for family in route::FAMILIES {
            let mut of_family = route::list(socket, family, link.index)?;
            of_family.retain(|route| !replay::is_kernel_made(route));
            let tables: Vec<u32> = of_family.iter().map(route::table_of).collect();
            rules.extend(
                rule::list(socket, family)?
                    .into_iter()
                    .filter(|rule| replay::rule_concerns(rule, &link.name.to_string(), &tables)),
            );
            routes.extend(of_family);
        }
        routes.sort_by_key(replay::has_gateway);
        let neighbours = neighbour::list_permanent(socket, link.index)?;
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
                .map(|address| Message::of(address, words::address(address)))
                .collect(),
            routes: routes
                .iter()
                .map(|r| Message::of(r, words::route(r)))
                .collect(),
            rules: rules
                .iter()
                .map(|r| Message::of(r, words::rule(r)))
                .collect(),
            neighbours: neighbours
                .iter()
                .map(|n| Message::of(n, words::neighbour(n)))
                .collect(),
            vf: None,
            sysctls: sysctl::read_all(proc, &link.name)?,
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

    /// The permanent neighbours as messages.
    ///
    /// # Errors
    /// The journal is damaged.
    pub fn parsed_neighbours(&self) -> Result<Vec<NeighbourMessage>, DecodeError> {
        self.neighbours.iter().map(Message::parse).collect()
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    fn nic(name: &str, index: u32, mac: u8) -> Link {
        Link {
            index,
            name: name.into(),
            mac: vec![2, 0, 0, 0, 0, mac],
            permanent_mac: vec![2, 0, 0, 0, 0, mac],
            bus_device: Some("0000:3b:00.0".into()),
            ..Link::default()
        }
    }

    #[test]
    fn a_nic_is_found_whatever_the_pod_did_to_it() {
        let taken = Identity::of(&nic("eth1", 5, 1));
        let mut changed = nic("weird", 9, 1);
        changed.mac = vec![2, 9, 9, 9, 9, 9];
        let links = [nic("eth2", 5, 2), changed, Link::default()];
        assert_eq!(taken.find(&links).unwrap().name, "weird");
        assert_eq!(
            taken.find(&links[..1]),
            None,
            "the other port of the same function"
        );
    }

    #[test]
    fn a_vf_is_found_though_its_driver_calls_another_address_burnt_in() {
        let dir = tempfile::tempdir().unwrap();
        let tree = hca::tree::Tree::new(dir.path());
        tree.pci(&hca::tree::PciSpec {
            total_vfs: 4,
            ..hca::tree::PciSpec::MLX5
        });
        let address = "0000:3b:00.2";
        tree.vf(
            hca::tree::PciSpec::MLX5.address,
            0,
            &hca::tree::PciSpec {
                address,
                ..hca::tree::PciSpec::MLX5
            },
        );
        let vf = |mac: u8| Link {
            bus_device: Some(address.into()),
            permanent_mac: vec![2, 0, 0, 0, 0, mac],
            ..nic("eth1", 5, mac)
        };
        let taken = Identity::on(&tree.host(), &vf(1));
        let links = [nic("eth2", 6, 1), vf(7)];
        assert_eq!(taken.find(&links).unwrap().bus_device, vf(7).bus_device);
        assert_eq!(taken.key(), Identity::on(&tree.host(), &vf(7)).key());
        assert_eq!(
            Identity::of(&vf(1)).find(&links),
            None,
            "a PF's does not change"
        );
    }

    #[test]
    fn a_virtual_link_is_found_by_mac_or_index_within_its_kind() {
        let veth = |index, mac| Link {
            kind: Some(InfoKind::Veth),
            bus_device: None,
            permanent_mac: vec![],
            ..nic("v", index, mac)
        };
        let taken = Identity::of(&veth(5, 1));
        assert_eq!(taken.find(&[veth(7, 2), veth(8, 1)]).unwrap().index, 8);
        assert_eq!(taken.find(&[veth(5, 3)]).unwrap().index, 5);
        assert_eq!(taken.find(&[veth(6, 3)]), None);
        let other = Link {
            kind: Some(InfoKind::MacVlan),
            ..veth(5, 1)
        };
        assert_eq!(taken.find(&[other]), None);
    }

    #[test]
    fn ipoib_is_known_by_its_ports_guid() {
        let ib = |queue: u8| Link {
            permanent_mac: vec![
                queue, 0, 1, 0x4b, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8,
            ],
            ..nic("ib0", 5, 1)
        };
        let taken = Identity::of(&ib(0));
        assert!(taken.find(&[ib(9)]).is_some());
        assert_eq!(taken.key(), Identity::of(&ib(9)).key());
        assert!(!taken.key().contains([':', '/']));
    }

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
        let mut route = RouteMessage::default();
        route.header.table = 254;
        route.attributes = vec![netlink_packet_route::route::RouteAttribute::Oif(5)];
        let snapshot = Snapshot {
            identity: Identity::of(&nic("eth1", 5, 1)),
            name: "eth1".into(),
            mtu: 9000,
            routes: vec![Message::of(&route, words::route(&route))],
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
}
