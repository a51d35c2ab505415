//! What identifies a netdev, whatever it is named and wherever it is.
//!
//! Hardware is identified by its device on the bus and, where that has several netdevs, by the
//! burnt-in address. A virtual link has no such thing: it is identified by its kind, by what the
//! kind says of itself and cannot change (VLAN ID and protocol, VNI, pkey), and by the link below
//! or the peer, which only the host can give. Where these do not make it the only one possible, the
//! index says which one it is: the pod's, recorded after the move, or the host's together with name
//! or address. A match is certain or it is none.

use hca::{Host, MacAddress};
use netlink::{
    Name,
    link::{Link, PAIRED_KINDS},
};
use serde::{Deserialize, Serialize};

use super::vf;

/// What identifies a netdev, whatever it is named and wherever it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Identity {
    /// Its device on its bus: a PCI address, an auxiliary or virtio device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_device: Option<String>,
    /// Burnt-in hardware address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permanent_mac: Option<String>,
    /// The driver's name of the port; distinguishes netdevs of one function that have no burnt-in
    /// address (representors).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// Hardware address when the snapshot was taken.
    pub mac: String,
    /// Kind of link, for those that are not hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What the kind cannot change; none in records of versions that did not keep it, and for
    /// links without a kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed: Option<Fixed>,
    /// Index in the host's namespace; it keeps it in another where it is free.
    pub index: u32,
}

/// What a link with a kind cannot change while it exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fixed {
    /// What the kind says of itself, as `vlan id 100 protocol 8100`.
    pub detail: String,
    /// Index of the link below, or of the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u32>,
    /// Whether that, or the socket of a tunnel, is in a namespace other than the host's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub elsewhere: bool,
}

/// The namespace in which links are compared with an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// The host's.
    Host {
        /// The netdev's name there.
        name: Option<&'a Name>,
    },
    /// A pod's.
    Pod {
        /// The netdev's index there, where it was recorded.
        index: Option<u32>,
        /// The address that the pod's interface was to be given, where it is not the netdev's.
        mac: Option<&'a str>,
        /// The number by which the pod's namespace knows the host's, if it has one.
        host: Option<i32>,
    },
}

/// Several links could be the netdev that is searched for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} could each be it", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "))]
pub struct Ambiguous(pub Vec<Name>);

impl Identity {
    /// Of a link of the host as it is now.
    pub fn of(link: &Link) -> Self {
        Identity {
            bus_device: link.bus_device.clone(),
            permanent_mac: (!link.permanent_mac.is_empty()).then(|| mac_text(&link.permanent_mac)),
            port: link.port.clone(),
            mac: mac_text(&link.mac),
            kind: link.kind.as_ref().map(ToString::to_string),
            fixed: link.kind.is_some().then(|| Fixed {
                detail: detail(link),
                parent: link.parent,
                elsewhere: link.parent_netns.is_some(),
            }),
            index: link.index,
        }
    }

    /// Of a link of the host. A VF with one netdev is identified by its PCI address alone: drivers
    /// of VFs take whatever address the VF has at a reset for the burnt-in one (`igbvf_reset`,
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

    /// Whether it is a link without hardware of its own. Its netdev ends with its namespace, and
    /// a pod can make others like it.
    pub fn is_virtual(&self) -> bool {
        self.bus_device.is_none() && self.kind.is_some()
    }

    /// Whether only its index in the pod distinguishes it from others there.
    pub(super) fn needs_index(&self) -> bool {
        self.bus_device.is_none() && (self.kind.is_some() || self.permanent_mac.is_none())
    }

    /// A file name that stands for this netdev and no other.
    pub fn key(&self) -> String {
        let key = match (&self.bus_device, &self.permanent_mac, &self.fixed) {
            (Some(bus), mac, fixed) => {
                let mut key = bus.clone();
                if let Some(mac) = mac {
                    key = format!("{key}-{}", port_part(mac));
                }
                // A partition of an InfiniBand port has the port's device and address.
                if let Some(Fixed {
                    detail,
                    parent: Some(parent),
                    ..
                }) = fixed
                {
                    key = format!("{key}-{detail}-on-{parent}");
                }
                // A representor has its function's device and no burnt-in address.
                match (&self.port, mac) {
                    (Some(port), None) => format!("{key}-{port}"),
                    _ => key,
                }
            }
            (None, _, Some(fixed)) => {
                let parent = fixed.parent.unwrap_or(0);
                let kind = self.kind.as_deref().unwrap_or("netdev");
                let (index, mac, detail) = (self.index, &self.mac, &fixed.detail);
                format!("{kind}-{index}-on-{parent}-{mac}-{detail}")
            }
            (None, mac, None) => {
                let mac = mac.as_ref().unwrap_or(&self.mac);
                let kind = self.kind.as_deref().unwrap_or("netdev");
                format!("{kind}-{}", port_part(mac))
            }
        };
        key.trim_end_matches('-').replace(['/', ':', ' '], "-")
    }

    /// The link of a namespace that is this netdev; none when none is for certain.
    ///
    /// # Errors
    /// Several could be it.
    pub fn find<'a>(
        &self,
        links: &'a [Link],
        place: Place<'_>,
    ) -> Result<Option<&'a Link>, Ambiguous> {
        let mut found: Vec<&Link> = links
            .iter()
            .filter(|link| self.may_be(link, place))
            .collect();
        // Of netdevs of one function the port's name decides, where it does.
        if found.len() > 1 && self.port.is_some() {
            let of_port = |link: &&Link| link.port == self.port;
            if found.iter().any(of_port) {
                found.retain(of_port);
            }
        }
        match found.as_slice() {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            several => Err(Ambiguous(
                several.iter().map(|link| link.name.clone()).collect(),
            )),
        }
    }

    fn may_be(&self, link: &Link, place: Place<'_>) -> bool {
        let seen = Identity::of(link);
        if self.kind != seen.kind || self.bus_device != seen.bus_device {
            return false;
        }
        if self.bus_device.is_some() {
            let permanent = |identity: &Identity| {
                let mac = identity.permanent_mac.as_ref();
                mac.map(|mac| port_part(mac).to_owned())
            };
            let (known, now) = (permanent(self), permanent(&seen));
            let same_port = known.is_none() || now.is_none() || known == now;
            return same_port && self.same_fixed(&seen, link, place);
        }
        if self.kind.is_none() {
            // Hardware whose device the kernel does not report (before 5.14) nor, before 5.6,
            // the burnt-in address. A pod makes no links without a kind.
            return self.permanent_mac == seen.permanent_mac
                && (self.permanent_mac.is_some() || self.is_at(link, &seen, place));
        }
        if !self.same_fixed(&seen, link, place) || !self.comes_from_the_host(link, place) {
            return false;
        }
        self.is_only_of_its_parent() || self.is_at(link, &seen, place)
    }

    /// Whether index, address and name make a link the one, where nothing else does.
    fn is_at(&self, link: &Link, seen: &Identity, place: Place<'_>) -> bool {
        let same_mac = self.mac == seen.mac;
        match place {
            Place::Pod {
                index: Some(index), ..
            } => link.index == index,
            Place::Pod { mac, .. } => same_mac || mac == Some(seen.mac.as_str()),
            Place::Host { name } => {
                let same_name = name.is_some_and(|name| *name == link.name);
                let same_index = self.index == seen.index;
                same_index && (same_mac || same_name) || same_mac && same_name
            }
        }
    }

    /// What neither the pod nor the kernel changes is as it was.
    fn same_fixed(&self, seen: &Identity, link: &Link, place: Place<'_>) -> bool {
        let (Some(known), Some(now)) = (&self.fixed, &seen.fixed) else {
            // A record of a version that did not keep it.
            return true;
        };
        // A tunnel without a link below names itself once it is in another namespace than its
        // socket (`nla_put_iflink()`, net/core/rtnetlink.c).
        let names_itself = known.parent.is_none() && now.parent == Some(link.index);
        known.detail == now.detail
            && (known.parent == now.parent || names_itself)
            && match place {
                Place::Host { .. } => known.elsewhere == now.elsewhere,
                Place::Pod { .. } => true,
            }
    }

    /// A link of a pod whose parent, or whose socket, is in the host's namespace was not made by the
    /// pod: it would need a right over the host's namespace (`rtnl_link_get_net_capable()`).
    fn comes_from_the_host(&self, link: &Link, place: Place<'_>) -> bool {
        match (place, &self.fixed) {
            (Place::Pod { host, .. }, Some(fixed))
                if !fixed.elsewhere
                    && (fixed.parent.is_some() || fixed.detail.starts_with("vni")) =>
            {
                link.parent_netns.is_some() && link.parent_netns == host
            }
            _ => true,
        }
    }

    /// Index on the host of a peer that lives exactly as long as the link itself.
    pub(super) fn peer(&self) -> Option<u32> {
        let fixed = self.fixed.as_ref().filter(|fixed| !fixed.elsewhere)?;
        let paired = |kind: &str| PAIRED_KINDS.contains(&kind);
        fixed
            .parent
            .filter(|_| self.kind.as_deref().is_some_and(paired))
    }

    /// Whether the kernel allows one link alone that says the same of itself on the same parent of
    /// the host: one VLAN of an ID, one peer, one partition.
    fn is_only_of_its_parent(&self) -> bool {
        let fixed = self.fixed.as_ref();
        fixed.is_some_and(|fixed| fixed.parent.is_some() && !fixed.elsewhere)
            && matches!(
                self.kind.as_deref(),
                Some("vlan" | "veth" | "ipoib" | "netkit")
            )
    }
}

/// What a kind says of itself that it cannot change: the kernel refuses, or ignores, another value
/// (`vlan_changelink()`, `vxlan_changelink()`, `ipoib_changelink()`).
fn detail(link: &Link) -> String {
    let number = |attribute: u16| match link.info.get(&attribute).map(Vec::as_slice) {
        Some([byte]) => Some(u64::from(*byte)),
        Some([a, b]) => Some(u64::from(u16::from_ne_bytes([*a, *b]))),
        Some([a, b, c, d]) => Some(u64::from(u32::from_ne_bytes([*a, *b, *c, *d]))),
        _ => None,
    };
    let kind = link
        .kind
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default();
    match kind.as_str() {
        // IFLA_VLAN_ID, IFLA_VLAN_PROTOCOL (big endian)
        "vlan" => format!(
            "vlan {} protocol {:04x}",
            number(1).unwrap_or(0),
            number(5)
                .and_then(|p| u16::try_from(p).ok())
                .map_or(0, u16::from_be)
        ),
        // IFLA_VXLAN_ID, IFLA_GENEVE_ID
        "vxlan" | "geneve" => format!("vni {}", number(1).unwrap_or(0)),
        // IFLA_IPOIB_PKEY
        "ipoib" => format!("pkey {:04x}", number(1).unwrap_or(0)),
        // IFLA_VRF_TABLE
        "vrf" => format!("table {}", number(1).unwrap_or(0)),
        _ => String::new(),
    }
}

/// Of an IPoIB address only the port's GUID stays the same: the queue pair before it changes.
pub(super) fn port_part(mac: &str) -> &str {
    if mac.len() == 59 {
        mac.get(36..).unwrap_or(mac)
    } else {
        mac
    }
}

pub(super) fn mac_text(bytes: &[u8]) -> String {
    MacAddress::new(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    const ON_HOST: Place<'_> = Place::Host { name: None };

    fn pod(index: Option<u32>) -> Place<'static> {
        Place::Pod {
            index,
            mac: None,
            host: Some(0),
        }
    }

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

    /// A link of this kind on parent 3 of the host, as the host sees it.
    fn child(kind: InfoKind, name: &str, index: u32, mac: u8) -> Link {
        Link {
            kind: Some(kind),
            bus_device: None,
            permanent_mac: vec![],
            parent: Some(3),
            ..nic(name, index, mac)
        }
    }

    fn vlan(name: &str, index: u32, id: u16) -> Link {
        Link {
            info: [
                (1, id.to_ne_bytes().to_vec()),
                (5, 0x8100u16.to_be_bytes().to_vec()),
            ]
            .into(),
            ..child(InfoKind::Vlan, name, index, 1)
        }
    }

    /// The same link as a pod sees it that knows the host's namespace as 0.
    fn in_pod(link: Link) -> Link {
        Link {
            parent_netns: Some(0),
            ..link
        }
    }

    fn name_of(found: Result<Option<&Link>, Ambiguous>) -> Option<String> {
        found.unwrap().map(|link| link.name.to_string())
    }

    #[test]
    fn a_nic_is_found_whatever_the_pod_did_to_it() {
        let taken = Identity::of(&nic("eth1", 5, 1));
        assert!(!taken.is_virtual());
        let mut changed = nic("weird", 9, 1);
        changed.mac = vec![2, 9, 9, 9, 9, 9];
        let links = [nic("eth2", 5, 2), changed, Link::default()];
        for place in [ON_HOST, pod(None)] {
            assert_eq!(name_of(taken.find(&links, place)).as_deref(), Some("weird"));
            assert_eq!(
                taken.find(&links[..1], place),
                Ok(None),
                "the function's other port"
            );
        }
    }

    #[test]
    fn a_vf_is_found_though_its_driver_calls_another_address_burnt_in() {
        let dir = tempfile::tempdir().unwrap();
        let tree = hca_trees::Tree::new(dir.path());
        tree.pci(&hca_trees::PciSpec {
            total_vfs: 4,
            ..hca_trees::PciSpec::MLX5
        });
        let address = "0000:3b:00.2";
        tree.vf(
            hca_trees::PciSpec::MLX5.address,
            0,
            &hca_trees::PciSpec {
                address,
                ..hca_trees::PciSpec::MLX5
            },
        );
        let vf = |mac: u8| Link {
            bus_device: Some(address.into()),
            permanent_mac: vec![2, 0, 0, 0, 0, mac],
            ..nic("eth1", 5, mac)
        };
        let taken = Identity::on(&tree.host(), &vf(1));
        let links = [nic("eth2", 6, 1), vf(7)];
        let found = taken.find(&links, ON_HOST).unwrap().unwrap();
        assert_eq!(found.bus_device, vf(7).bus_device);
        assert_eq!(taken.key(), Identity::on(&tree.host(), &vf(7)).key());
        assert_eq!(
            Identity::of(&vf(1)).find(&links, ON_HOST),
            Ok(None),
            "a PF's does not change"
        );
    }

    #[test]
    fn netdevs_of_one_function_without_burnt_in_address_are_identified_by_port() {
        let port = |name: &str| Link {
            permanent_mac: vec![],
            port: Some(name.into()),
            ..nic(name, 5, 1)
        };
        let links = [port("pf0vf0"), port("pf0vf1")];
        let taken = Identity::of(&links[1]);
        assert_eq!(
            name_of(taken.find(&links, ON_HOST)).as_deref(),
            Some("pf0vf1")
        );
        assert_ne!(taken.key(), Identity::of(&links[0]).key());
        let unnamed = Link {
            port: None,
            ..port("x")
        };
        let same = [
            unnamed.clone(),
            Link {
                name: "y".into(),
                ..unnamed.clone()
            },
        ];
        let error = Identity::of(&unnamed).find(&same, ON_HOST).unwrap_err();
        assert_eq!(error.to_string(), "x and y could each be it");
    }

    #[test]
    fn vlans_of_one_nic_are_identified_by_vlan_id() {
        let (a, b) = (vlan("nic0.100", 7, 100), vlan("nic0.200", 8, 200));
        let taken = Identity::of(&a);
        assert!(taken.is_virtual());
        assert_ne!(taken.key(), Identity::of(&b).key());
        let key = "vlan-7-on-3-02-00-00-00-00-01-vlan-100-protocol-8100";
        assert_eq!(taken.key(), key);
        // The pod gave a the other's index and name; both have the NIC's address.
        let links = [in_pod(vlan("nic0.100", 7, 200)), in_pod(vlan("x", 8, 100))];
        for index in [None, Some(7)] {
            assert_eq!(
                name_of(taken.find(&links, pod(index))).as_deref(),
                Some("x")
            );
        }
        assert_eq!(taken.find(std::slice::from_ref(&b), ON_HOST), Ok(None));
    }

    #[test]
    fn a_link_whose_parent_is_the_pods_is_not_taken() {
        let taken = Identity::of(&vlan("nic0.100", 7, 100));
        // The same numbers, on a link of the pod's own, or of a namespace that the pod made.
        for parent_netns in [None, Some(1)] {
            let decoy = Link {
                parent_netns,
                ..vlan("nic0.100", 7, 100)
            };
            assert_eq!(
                taken.find(&[decoy], pod(Some(7))),
                Ok(None),
                "{parent_netns:?}"
            );
        }
    }

    #[test]
    fn vxlans_are_identified_by_vni_and_the_hosts_socket() {
        let vxlan = |index, vni: u32| Link {
            parent: None,
            info: [(1, vni.to_ne_bytes().to_vec())].into(),
            ..child(InfoKind::Vxlan, "v", index, 1)
        };
        let taken = Identity::of(&vxlan(5, 100));
        // As the kernel reports one whose socket is in another namespace.
        let moved = |index, vni| Link {
            parent: Some(index),
            ..in_pod(vxlan(index, vni))
        };
        assert!(
            taken
                .find(&[moved(5, 100)], pod(Some(5)))
                .unwrap()
                .is_some()
        );
        assert_eq!(taken.find(&[moved(5, 200)], pod(Some(5))), Ok(None));
        assert_eq!(
            taken.find(&[vxlan(5, 100)], pod(Some(5))),
            Ok(None),
            "of the pod's own"
        );
        assert!(taken.find(&[vxlan(5, 100)], ON_HOST).unwrap().is_some());
    }

    #[test]
    fn veths_of_one_address_are_identified_by_their_peer() {
        let veth = |name: &str, index, peer| Link {
            parent: Some(peer),
            ..child(InfoKind::Veth, name, index, 1)
        };
        let taken = Identity::of(&veth("a", 5, 4));
        let links = [in_pod(veth("b", 5, 6)), in_pod(veth("c", 9, 4))];
        assert_eq!(
            name_of(taken.find(&links, pod(Some(9)))).as_deref(),
            Some("c")
        );
        assert_eq!(taken.peer(), Some(4));
    }

    #[test]
    fn macvlans_are_identified_by_the_index_in_the_pod_and_no_less() {
        let macvlan = |name: &str, index, mac| child(InfoKind::MacVlan, name, index, mac);
        let taken = Identity::of(&macvlan("m", 5, 1));
        // The pod gave its own the address of the host's, and that another.
        let links = [
            in_pod(macvlan("decoy", 12, 1)),
            in_pod(macvlan("it", 9, 77)),
        ];
        assert_eq!(
            name_of(taken.find(&links, pod(Some(9)))).as_deref(),
            Some("it")
        );
        // Without an index in the record two of one address are none for certain.
        let twins = [in_pod(macvlan("a", 8, 1)), in_pod(macvlan("b", 9, 1))];
        assert!(taken.find(&twins, pod(None)).is_err());
        assert_eq!(
            name_of(taken.find(&twins[..1], pod(None))).as_deref(),
            Some("a")
        );
        // On the host an index may be another's by now, and so may an address.
        let name = Name::from("m");
        let host = Place::Host { name: Some(&name) };
        assert_eq!(taken.find(&[macvlan("x", 5, 9)], host), Ok(None));
        assert_eq!(taken.find(&[macvlan("x", 6, 1)], host), Ok(None));
        for link in [macvlan("m", 5, 9), macvlan("x", 5, 1), macvlan("m", 6, 1)] {
            assert!(taken.find(&[link], host).unwrap().is_some());
        }
    }

    #[test]
    fn ipoib_is_identified_by_port_guid_and_partitions_by_pkey() {
        let ib = |queue: u8, pkey: u16, parent| Link {
            permanent_mac: vec![
                queue, 0, 1, 0x4b, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8,
            ],
            kind: Some(InfoKind::Ipoib),
            info: [(1, pkey.to_ne_bytes().to_vec())].into(),
            parent,
            ..nic("ib0", 5, 1)
        };
        let taken = Identity::of(&ib(0, 0xffff, None));
        assert!(!taken.is_virtual());
        let links = [ib(3, 0x8001, Some(5)), ib(9, 0xffff, None)];
        assert_eq!(taken.find(&links, ON_HOST), Ok(links.get(1)));
        assert_eq!(taken.key(), Identity::of(&ib(9, 0xffff, None)).key());
        assert_ne!(taken.key(), Identity::of(&links[0]).key());
        assert!(!taken.key().contains([':', '/', ' ']));
    }

    #[test]
    fn old_kernels_identify_hardware_by_index_in_the_pod() {
        let old = |name: &str, index, mac| Link {
            bus_device: None,
            permanent_mac: vec![],
            ..nic(name, index, mac)
        };
        let taken = Identity::of(&old("eth1", 5, 1));
        assert!(!taken.is_virtual() && taken.needs_index());
        let links = [old("x", 5, 9), old("y", 6, 1)];
        assert_eq!(
            name_of(taken.find(&links, pod(Some(5)))).as_deref(),
            Some("x")
        );
        assert!(!Identity::of(&nic("eth1", 5, 1)).needs_index());
    }

    #[test]
    fn records_of_earlier_versions_are_read_and_go_by_kind_and_address() {
        let text = r#"{"mac": "02:00:00:00:00:01", "kind": "veth", "index": 5}"#;
        let old: Identity = serde_json::from_str(text).unwrap();
        assert_eq!(
            old.key(),
            "veth-02-00-00-00-00-01",
            "as its claim was called"
        );
        let veth = |name: &str, mac| child(InfoKind::Veth, name, 5, mac);
        let links = [in_pod(veth("a", 1)), in_pod(veth("b", 2))];
        assert_eq!(name_of(old.find(&links, pod(None))).as_deref(), Some("a"));
        let text = r#"{"busDevice": "0000:3b:00.0", "permanentMac": "02:00:00:00:00:01",
                       "mac": "02:00:00:00:00:01", "index": 5}"#;
        let old: Identity = serde_json::from_str(text).unwrap();
        assert_eq!(old.key(), Identity::of(&nic("eth1", 5, 1)).key());
    }
}
