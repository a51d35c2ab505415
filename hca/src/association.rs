//! Which netdev belongs to which RDMA port: rules over plain data.
//!
//! The RDMA side names its netdev in its GID table, or in `parent` (soft RoCE), wherever that stands
//! ([`claims`]). A port that names none has the netdev of its hardware with its link layer and
//! `dev_port` ([`serves`]). Such a name is the netdev's
//! name in its own network namespace: a NIC that was moved into a pod and is called `eth1` there
//! must not turn this namespace's `eth1` into an RDMA netdev. So a name counts only together with
//! the netdev's own address, which RoCE and iWARP build into GUIDs and GIDs.

use crate::address::{Guid, MacAddress};
use crate::gid::{Gid, GidEntry};
use crate::netdev::{Netdev, link_type};
use crate::port::LinkLayer;

/// True if a netdev of a device's own hardware is one of this port.
///
/// `single_port`: with one port the numbers say nothing; the second function of a dual-port card
/// has one port, number 1, and some drivers give its netdev `dev_port` 1.
pub(crate) fn serves(netdev: &Netdev, port: u32, link_layer: LinkLayer, single_port: bool) -> bool {
    let fits = match link_layer {
        LinkLayer::InfiniBand => netdev.is_ipoib(),
        LinkLayer::Ethernet => netdev.link_type == link_type::ETHERNET,
        LinkLayer::Unknown => true,
    };
    fits && !netdev.is_representor()
        && (single_port || netdev.dev_port.checked_add(1) == Some(port))
}

/// What a port says about a netdev that is not of its hardware.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NetdevHints<'a> {
    /// The netdev that soft RoCE names as its own.
    pub(crate) soft_parent: Option<&'a str>,
    pub(crate) node_guid: Option<Guid>,
    pub(crate) link_layer: LinkLayer,
    pub(crate) gids: &'a [GidEntry],
}

impl<'a> NetdevHints<'a> {
    /// Names of netdevs, the soft parent or those of the GID table in order of index.
    pub(crate) fn names(self) -> impl Iterator<Item = &'a str> {
        let of_gids = self
            .gids
            .iter()
            .filter(move |_| self.soft_parent.is_none())
            .filter_map(|entry| entry.netdev.as_deref());
        self.soft_parent.into_iter().chain(of_gids)
    }

    /// True if the port is Ethernet and names no netdev at all, as iWARP ports do.
    pub(crate) fn is_anonymous(self) -> bool {
        self.link_layer == LinkLayer::Ethernet && self.names().next().is_none()
    }
}

/// True if the port says that this netdev is one of its own.
pub(crate) fn claims(claim: NetdevHints<'_>, netdev: &Netdev) -> bool {
    let Some(mac) = &netdev.mac else { return false };
    let Some(identifier) = interface_identifier(mac) else {
        return false;
    };
    let named = claim.names().any(|name| name == netdev.name);
    let nameless = claim.is_anonymous() && netdev.lowers.is_empty();
    let mut gids = claim.gids.iter().map(|entry| entry.gid);
    let is_its_guid = claim.node_guid == Some(identifier);
    (named || nameless) && (is_its_guid || gids.any(|gid| stands_for(gid, mac, identifier)))
}

/// True for the link-local GID that RoCE makes of an address, and for the GID of iWARP, which is
/// the address and zeros.
fn stands_for(gid: Gid, mac: &MacAddress, identifier: Guid) -> bool {
    let (front, back) = gid.0.split_at(8);
    (gid.is_link_local() && back == identifier.0.to_be_bytes())
        || (front.starts_with(mac.bytes()) && front.ends_with(&[0, 0]) && back == [0; 8])
}

/// The EUI-64 of a 48-bit address with the local bit inverted (RFC 4291 appendix A).
fn interface_identifier(mac: &MacAddress) -> Option<Guid> {
    let &[a, b, c, d, e, f] = mac.bytes() else {
        return None;
    };
    Some(Guid(u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gid::ROCE_V2;

    fn netdev(name: &str) -> Netdev {
        Netdev {
            name: name.into(),
            ifindex: 2,
            iflink: 2,
            mac: Some("52:54:00:00:01:01".parse().unwrap()),
            permanent_mac: None,
            mtu: 1500,
            operstate: "up".into(),
            up: true,
            link_type: link_type::ETHERNET,
            kind: None,
            speed_mbps: None,
            dev_port: 0,
            phys_port_name: None,
            pci: None,
            auxiliary: None,
            driver: None,
            master: None,
            lowers: vec![],
            uppers: vec![],
        }
    }

    fn gids(entries: &[(&str, Option<&str>)]) -> Vec<GidEntry> {
        (0..)
            .zip(entries)
            .map(|(index, (gid, netdev))| GidEntry {
                index,
                gid: gid.parse().unwrap(),
                kind: Some(ROCE_V2.to_owned()),
                netdev: netdev.map(str::to_owned),
            })
            .collect()
    }

    fn claim(gids: &[GidEntry]) -> NetdevHints<'_> {
        NetdevHints {
            soft_parent: None,
            node_guid: None,
            link_layer: LinkLayer::Ethernet,
            gids,
        }
    }

    #[test]
    fn a_gid_with_name_and_address_is_a_claim() {
        let table = gids(&[("fe80::5054:00ff:fe00:0101", Some("ens192"))]);
        assert!(claims(claim(&table), &netdev("ens192")));
        assert!(
            !claims(claim(&table), &netdev("ens224")),
            "the name differs"
        );
    }

    #[test]
    fn a_netdev_with_the_name_of_a_pods_is_not_claimed() {
        let in_a_pod = gids(&[
            ("fe80::ba59:9fff:fe00:0001", Some("eth1")),
            ("::ffff:10.0.0.7", Some("eth1")),
        ]);
        assert!(!claims(claim(&in_a_pod), &netdev("eth1")));
    }

    #[test]
    fn soft_roce_is_known_by_its_guid_when_the_table_is_empty() {
        let table = gids(&[]);
        let mut claim = claim(&table);
        claim.soft_parent = Some("eth0");
        claim.node_guid = Some(Guid(0x5054_00ff_fe00_0101));
        assert!(claims(claim, &netdev("eth0")));
        claim.node_guid = Some(Guid(0x5054_00ff_fe00_0102));
        assert!(!claims(claim, &netdev("eth0")));
    }

    #[test]
    fn iwarp_names_no_netdev_and_is_known_by_its_gid() {
        // As Linux 6.1 shows siw on 52:54:00:00:01:01.
        let table = gids(&[("5254:0000:0101:0000:0000:0000:0000:0000", None)]);
        assert!(claims(claim(&table), &netdev("eth0")));
        let mut vlan = netdev("eth0.5");
        vlan.lowers = vec!["eth0".into()];
        assert!(
            !claims(claim(&table), &vlan),
            "a child shares its parent's address"
        );
        let mut other = claim(&table);
        other.link_layer = LinkLayer::Unknown;
        assert!(
            !claims(other, &netdev("eth0")),
            "no network the netdev could be on"
        );
    }

    #[test]
    fn port_and_link_layer_decide_on_shared_hardware() {
        let mut second = netdev("ens1d1");
        second.dev_port = 1;
        assert!(serves(&second, 2, LinkLayer::Ethernet, false));
        assert!(!serves(&second, 1, LinkLayer::Ethernet, false));
        assert!(
            serves(&second, 1, LinkLayer::Ethernet, true),
            "a function of its own"
        );
        assert!(!serves(&second, 2, LinkLayer::InfiniBand, false));
        second.phys_port_name = Some("pf0vf1".into());
        assert!(
            !serves(&second, 2, LinkLayer::Ethernet, false),
            "a representor"
        );
    }
}
