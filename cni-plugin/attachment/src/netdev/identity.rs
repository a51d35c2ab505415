//! What identifies a netdev, whatever it is named and wherever it is.
//!
//! Hardware is identified by its device on the bus and, where that has several netdevs, by the
//! burnt-in address or the port's name. A link without hardware is identified by what the kernel
//! vouches for from the host's side: its kind, the link below it or its peer, which is on the host,
//! and of a VLAN the number, of which the kernel allows one on a link. Any other link without hardware
//! is not moved ([`is_certain`]).

use hca::{Host, MacAddress};
use netlink::{
    Name, Namespace, Socket,
    link::{self, Link, PAIRED_KINDS},
};
use serde::{Deserialize, Serialize};

use super::vf;
use crate::interface::messages::hexadecimal;

const VLAN: &str = "vlan";
/// `IFLA_VLAN_ID`, `IFLA_IPOIB_PKEY`
const NUMBER: u16 = 1;
/// `IFLA_VLAN_PROTOCOL`
const PROTOCOL: u16 = 5;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Identity {
    /// Its device on its bus: a PCI address, an auxiliary or virtio device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permanent_mac: Option<MacAddress>,
    /// The driver's name of the port; distinguishes netdevs of one function that have no burnt-in
    /// address (representors).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Index of the link below, or of the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u32>,
    /// Of a VLAN its ID and protocol, of an IPoIB netdev the partition key, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<String>,
    /// Index in the host's namespace when it was taken. Says nothing elsewhere or later.
    pub index: u32,
}

/// The namespace of links that are compared with what is known of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkScope {
    Host,
    Pod {
        /// The number by which it knows the host's, if it has one.
        host: Option<i32>,
    },
}

impl LinkScope {
    /// That of links of the namespace `here` which were read by `socket`.
    pub(crate) fn of(
        socket: &mut Socket,
        here: &Namespace,
        host: &Namespace,
    ) -> netlink::Result<Self> {
        Ok(match here.id() == host.id() {
            true => LinkScope::Host,
            false => LinkScope::Pod {
                host: link::known_number(socket, host)?,
            },
        })
    }

    /// Whether what is below a link of this namespace, or its peer, is on the host.
    pub(crate) fn is_on_host(self, link: &Link) -> bool {
        match self {
            LinkScope::Host => link.parent_netns.is_none(),
            LinkScope::Pod { host } => link.parent_netns.is_some() && link.parent_netns == host,
        }
    }
}

/// Several links could be the netdev that is searched for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} could each be it", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "))]
pub struct Ambiguous(pub Vec<Name>);

/// Whether a link of the host can be told from every other one, wherever it is. The link below a
/// link, or its peer, must be on the host itself: a pod cannot make a link there
/// (`rtnl_link_get_net_capable()`).
pub fn is_certain(link: &Link) -> bool {
    let kind = link.kind.as_ref().map(ToString::to_string);
    let is_single = |kind: &str| kind == VLAN || PAIRED_KINDS.contains(&kind);
    link.bus_device.is_some()
        || kind.as_deref().is_some_and(is_single)
            && link.parent.is_some()
            && link.parent_netns.is_none()
}

impl Identity {
    /// Of a link of the host as it is now.
    pub fn of(link: &Link) -> Self {
        let kind = link.kind.as_ref().map(ToString::to_string);
        let attributes: &[u16] = match kind.as_deref() {
            Some(VLAN) => &[NUMBER, PROTOCOL],
            Some("ipoib") => &[NUMBER],
            _ => &[],
        };
        let number = attributes.iter().filter_map(|number| link.info.get(number));
        let number: String = number.map(|value| hexadecimal(value)).collect();
        Identity {
            bus_device: link.bus_device.clone(),
            permanent_mac: mac_of(&link.permanent_mac),
            port: link.port.clone(),
            kind,
            parent: link.parent.filter(|_| link.kind.is_some()),
            number: (!number.is_empty()).then_some(number),
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
        self.bus_device.is_none()
    }

    /// A file name that stands for this netdev and no other.
    pub fn key(&self) -> String {
        let on = |parent| {
            let number = self.number.as_deref().unwrap_or_default();
            format!("-on-{parent}-{number}")
        };
        // A partition of an InfiniBand port has the port's device and address.
        let on = self.parent.map(on).unwrap_or_default();
        let key = match (&self.bus_device, &self.permanent_mac, &self.port) {
            (Some(bus), Some(mac), _) => {
                let guid = mac.port_guid().map(|guid| guid.to_string());
                format!("{bus}-{}{on}", guid.unwrap_or_else(|| mac.to_string()))
            }
            // A representor has its function's device and no burnt-in address.
            (Some(bus), None, Some(port)) => format!("{bus}{on}-{port}"),
            (Some(bus), None, None) => format!("{bus}{on}"),
            (None, ..) => {
                let kind = self.kind.as_deref().unwrap_or("netdev");
                format!("{kind}-{}{on}", self.index)
            }
        };
        key.trim_end_matches('-').replace(['/', ':', ' '], "-")
    }

    /// The link of a namespace that is this netdev; none when none is for certain.
    pub fn find<'a>(
        &self,
        links: &'a [Link],
        place: LinkScope,
    ) -> Result<Option<&'a Link>, Ambiguous> {
        let mut found: Vec<&Link> = links.iter().filter(|link| self.is(link, place)).collect();
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

    fn is(&self, link: &Link, place: LinkScope) -> bool {
        let now = Identity::of(link);
        if self.kind != now.kind
            || self.bus_device != now.bus_device
            || self.parent != now.parent
            || self.number != now.number
        {
            return false;
        }
        if self.is_virtual() {
            return place.is_on_host(link);
        }
        match (&self.permanent_mac, &now.permanent_mac) {
            (Some(known), Some(now)) => is_same_mac(known, now),
            _ => true,
        }
    }

    /// Index on the host of a peer that lives exactly as long as the link itself.
    pub(super) fn peer(&self) -> Option<u32> {
        let is_paired = |kind: &str| PAIRED_KINDS.contains(&kind);
        let kind = self.kind.as_deref();
        self.parent.filter(|_| kind.is_some_and(is_paired))
    }
}

/// A hardware address; none of a link that has none.
pub(super) fn mac_of(bytes: &[u8]) -> Option<MacAddress> {
    (!bytes.is_empty()).then(|| MacAddress::new(bytes))
}

/// Whether two addresses are one: of an IPoIB address only the port's GUID stays the same, the queue pair
/// before it changes.
pub(super) fn is_same_mac(one: &MacAddress, other: &MacAddress) -> bool {
    one == other || one.port_guid().is_some() && one.port_guid() == other.port_guid()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    const POD: LinkScope = LinkScope::Pod { host: Some(0) };

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
        for place in [LinkScope::Host, POD] {
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
        let found = taken.find(&links, LinkScope::Host).unwrap().unwrap();
        assert_eq!(found.bus_device, vf(7).bus_device);
        assert_eq!(taken.key(), Identity::on(&tree.host(), &vf(7)).key());
        assert_eq!(
            Identity::of(&vf(1)).find(&links, LinkScope::Host),
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
            name_of(taken.find(&links, LinkScope::Host)).as_deref(),
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
        let error = Identity::of(&unnamed)
            .find(&same, LinkScope::Host)
            .unwrap_err();
        assert_eq!(error.to_string(), "x and y could each be it");
    }

    #[test]
    fn vlans_of_one_nic_are_identified_by_vlan_id() {
        let (a, b) = (vlan("nic0.100", 7, 100), vlan("nic0.200", 8, 200));
        let taken = Identity::of(&a);
        assert!(taken.is_virtual());
        assert_ne!(taken.key(), Identity::of(&b).key());
        // The pod gave a the other's index and name; both have the NIC's address.
        let links = [in_pod(vlan("nic0.100", 7, 200)), in_pod(vlan("x", 8, 100))];
        assert_eq!(name_of(taken.find(&links, POD)).as_deref(), Some("x"));
        assert_eq!(
            taken.find(std::slice::from_ref(&b), LinkScope::Host),
            Ok(None)
        );
        let mut of_provider = in_pod(vlan("nic0.100", 7, 100));
        let protocol = 0x88a8u16.to_be_bytes().to_vec();
        of_provider.info.insert(PROTOCOL, protocol);
        assert_eq!(taken.find(&[of_provider], POD), Ok(None));
    }

    #[test]
    fn veths_of_one_address_are_identified_by_their_peer() {
        let veth = |name: &str, index, peer| Link {
            parent: Some(peer),
            ..child(InfoKind::Veth, name, index, 1)
        };
        let taken = Identity::of(&veth("a", 5, 4));
        let links = [in_pod(veth("b", 5, 6)), in_pod(veth("c", 9, 4))];
        assert_eq!(name_of(taken.find(&links, POD)).as_deref(), Some("c"));
        assert_eq!(taken.peer(), Some(4));
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
            assert_eq!(taken.find(&[decoy], POD), Ok(None), "{parent_netns:?}");
        }
        let decoy = in_pod(vlan("nic0.100", 7, 100));
        let nameless = LinkScope::Pod { host: None };
        assert_eq!(taken.find(&[decoy], nameless), Ok(None));
    }

    #[test]
    fn only_links_that_the_kernel_vouches_for_are_certain() {
        let of_kind = |kind| child(kind, "x", 7, 1);
        for kind in [
            InfoKind::Vlan,
            InfoKind::Veth,
            InfoKind::Other("netkit".into()),
        ] {
            assert!(is_certain(&of_kind(kind.clone())), "{kind:?}");
            let bare = Link {
                parent: None,
                ..of_kind(kind.clone())
            };
            assert!(!is_certain(&bare), "{kind:?} on nothing");
            assert!(
                !is_certain(&in_pod(of_kind(kind.clone()))),
                "{kind:?} on another namespace's"
            );
        }
        // The kernel allows several on one link, or none below.
        for kind in [
            InfoKind::MacVlan,
            InfoKind::IpVlan,
            InfoKind::Vxlan,
            InfoKind::Dummy,
        ] {
            assert!(!is_certain(&of_kind(kind.clone())), "{kind:?}");
        }
        assert!(is_certain(&nic("eth1", 5, 1)));
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
        assert_eq!(taken.find(&links, LinkScope::Host), Ok(links.get(1)));
        assert_eq!(taken.key(), Identity::of(&ib(9, 0xffff, None)).key());
        assert_ne!(taken.key(), Identity::of(&links[0]).key());
        assert!(!taken.key().contains([':', '/', ' ']));
    }
}
