//! Which link is below a link.

use super::Link;
use crate::attribute;

/// Kinds whose link below is their peer, which is beside them (`veth_get_iflink()`,
/// `netkit_get_iflink()`, `vxcan_get_iflink()`).
pub const PAIRED_KINDS: [&str; 3] = ["veth", "netkit", "vxcan"];

/// `IFLA_VXLAN_LINK` (`include/uapi/linux/if_link.h`)
const IFLA_VXLAN_LINK: u16 = 3;

impl Link {
    /// Of a VXLAN, the index of the link that it is bound to.
    pub(crate) fn bound_to(&self) -> Option<u32> {
        attribute::number(self.info.get(&IFLA_VXLAN_LINK)?)
    }

    /// Whether the link with index `below` of its own namespace is below it.
    pub fn stands_on(&self, below: u32) -> bool {
        let kind = self.kind.as_ref().map(ToString::to_string);
        let on = match kind.as_deref() {
            Some(kind) if PAIRED_KINDS.contains(&kind) => None,
            // Tunnels name as the link below themselves, if anything (`dev_get_iflink()`). What they
            // send through is part of what they say of themselves.
            Some("vxlan") => self.bound_to(),
            Some("geneve") => None,
            // One without a link below names itself.
            _ => self.parent.filter(|parent| *parent != self.index),
        };
        on == Some(below) && self.parent_netns.is_none()
    }

    /// Whether it is a partition on the IPoIB netdev `port`, in whichever namespace: IPoIB does not
    /// report that of the link below, but a child has the GID of its port in its address (RFC 4391
    /// section 9.1.1).
    pub fn is_partition_of(&self, port: &Link) -> bool {
        self.is_infiniband()
            && !self.is_hardware()
            && self.parent.unwrap_or(self.index) == port.index
            && self.mac.get(4..) == port.mac.get(4..)
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    fn link(index: u32, kind: &str, parent: Option<u32>, netns: Option<i32>) -> Link {
        Link {
            index,
            kind: Some(InfoKind::from(kind)),
            parent,
            parent_netns: netns,
            ..Link::default()
        }
    }

    #[test]
    fn a_child_stands_on_its_parent_in_the_parents_namespace_only() {
        let here = link(7, "macvlan", Some(2), None);
        assert!(here.stands_on(2));
        assert!(!here.stands_on(3));
        assert!(!link(7, "ipvlan", Some(2), Some(0)).stands_on(2));
        // Below a port of a switch is the NIC that it sends through (`dsa_user_get_iflink()`).
        let port = Link { kind: None, ..here };
        assert!(port.stands_on(2));
    }

    #[test]
    fn a_partition_is_known_by_the_gid_of_its_port() {
        let port = Link {
            hardware: 32,
            mac: (0..20).collect(),
            bus_device: Some("0000:3b:00.0".into()),
            ..link(5, "ipoib", None, None)
        };
        let mut mac = port.mac.clone();
        mac[3] = 99; // its queue pair
        let child = Link {
            mac,
            bus_device: None,
            ..port.clone()
        };
        // The kernel leaves a parent out that has the child's own index (`nla_put_iflink()`).
        assert!(child.is_partition_of(&port));
        let on = |parent| Link {
            parent,
            index: 7,
            ..child.clone()
        };
        assert!(on(Some(5)).is_partition_of(&port));
        assert!(!on(Some(6)).is_partition_of(&port));
        assert!(!port.is_partition_of(&port));
        let of_another_port = Link {
            mac: vec![0; 20],
            ..child
        };
        assert!(!of_another_port.is_partition_of(&port));
    }

    #[test]
    fn a_peer_is_no_child_wherever_it_is() {
        for kind in PAIRED_KINDS {
            assert!(!link(7, kind, Some(2), None).stands_on(2), "{kind}");
        }
    }

    #[test]
    fn a_link_without_a_link_below_stands_on_nothing() {
        assert!(!link(2, "dummy", Some(2), None).stands_on(2));
        assert!(!link(2, "dummy", None, None).stands_on(2));
    }

    #[test]
    fn a_tunnel_stands_on_the_link_that_it_sends_through() {
        let through = |netns| Link {
            info: [(IFLA_VXLAN_LINK, 2u32.to_ne_bytes().to_vec())].into(),
            ..link(9, "vxlan", None, netns)
        };
        assert!(through(None).stands_on(2));
        assert!(!through(None).stands_on(4));
        assert!(!through(Some(0)).stands_on(2));
    }
}
