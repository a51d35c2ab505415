//! What an attachment will do, decided before anything is changed. Pure: nothing here asks the
//! kernel, a file or a clock.
//!
//! A [`Plan`] can be printed: the log shows it at level `debug`.

mod check;

use std::fmt;

pub use check::{carries_ipv6, check, has_partition};

use attachment::{
    journal::{Part, RdmaDevice, record},
    netdev::snapshot::{Message, Snapshot},
};
use cni_wire::IfName;
use hca::MacAddress;
use netlink::link::{self, Child, Link};
use netlink_packet_route::link::{InfoKind, IpoibMode, MacVlanMode};

use crate::{
    config::{ChildKind, Config},
    error::Error,
    interface_config::InterfaceConfig,
    resolve::Resolved,
};

/// Everything that an ADD changes for one NIC outside the journal and the lease store, and why.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The interface's name in the pod.
    pub ifname: IfName,
    /// The rail, with `devices: all` or where the network asks for one.
    pub rail: Option<u32>,
    /// The configuration; of several NICs each has its own allocation.
    pub config: Config,
    /// What the interface is made of.
    pub resolved: Resolved,
    /// RDMA devices that move into the pod, before the interface does.
    pub rdma: Vec<RdmaDevice>,
    /// The state of a netdev that moves.
    pub snapshot: Option<Snapshot>,
    /// What is made on a link, for an interface that is a child.
    pub child: Option<Child>,
    /// The index of the child in the pod.
    pub index: u32,
    /// The hardware address; none leaves it, or is the parent's.
    pub mac: Option<MacAddress>,
    /// What the interface is given; none while its IPAM wants to see it first.
    pub given: Option<InterfaceConfig>,
}

impl Plan {
    /// `random` makes a MAC address for kinds that have one of their own, so that the journal knows it
    /// before the kernel does.
    ///
    /// # Errors
    /// Code 7 naming the mode; that of `random`.
    pub fn of(
        config: Config,
        resolved: Resolved,
        ifname: IfName,
        random: impl FnOnce() -> Result<MacAddress, Error>,
    ) -> Result<Plan, Error> {
        let child = match &resolved {
            Resolved::Child { kind, parent } => Some(child(&config, *kind, &parent.link)?),
            Resolved::Move(_) | Resolved::RdmaOnly(_) => None,
        };
        let mac = match (&config.mac, &child) {
            (None, Some(Child::Macvlan { mode, .. })) if *mode != MacVlanMode::Passthrough => {
                Some(random()?)
            }
            (mac, _) => mac.clone(),
        };
        Ok(Plan {
            ifname,
            rail: None,
            config,
            resolved,
            rdma: Vec::new(),
            snapshot: None,
            child,
            index: link::random_index(),
            mac,
            given: None,
        })
    }

    pub fn part(&self) -> Part {
        let on = self.child.as_ref().zip(self.resolved.host_link());
        let child = on.map(|(child, parent)| record::Child {
            kind: child.word(),
            master: parent.link.name.to_string(),
            index: parent.link.index,
            pod_index: self.index,
            warning: None,
        });
        let hcas = match &self.resolved {
            Resolved::Move(host) => host.hcas.iter().map(ToString::to_string).collect(),
            Resolved::Child { .. } | Resolved::RdmaOnly(_) => Vec::new(),
        };
        let slot = self
            .config
            .allocation
            .as_ref()
            .and_then(|one| one.slot.clone());
        Part {
            ifname: self.ifname.to_string(),
            rail: self.rail,
            moved: self.snapshot.clone(),
            hcas,
            slots: slot.into_iter().collect(),
            returned: false,
            carries_child: false,
            child,
            rdma: self.rdma.clone(),
            rules: self.rules(),
        }
    }

    /// The rules that the pod gets, for the journal.
    pub fn rules(&self) -> Vec<Message> {
        let rules = self.given.iter().flat_map(|given| &given.rules);
        rules.map(Message::rule).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in &self.rdma {
            write!(f, "move RDMA device {} into the pod; ", device.name)?;
        }
        match &self.resolved {
            Resolved::Move(nic) => write!(f, "move {}", nic.link.name)?,
            Resolved::Child { kind, parent } => {
                write!(f, "make a {} on {}", kind.as_str(), parent.link.name)?;
            }
            Resolved::RdmaOnly(_) => return f.write_str("no interface"),
        }
        write!(f, " as {}", self.ifname)?;
        if let Some(mtu) = self.config.mtu {
            write!(f, "; MTU {mtu}")?;
        }
        if let Some(mac) = &self.mac {
            write!(f, "; MAC {mac}")?;
        }
        let vf = self.snapshot.as_ref().and_then(|taken| taken.vf.as_ref());
        if let Some(vf) = vf.filter(|vf| !vf.set.is_empty()) {
            write!(f, "; VF {}", vf.set)?;
        }
        match &self.given {
            Some(given) => given.fmt(f),
            None => f.write_str("; addresses once the interface is up"),
        }
    }
}

/// The partition key of an IPoIB child; none for every other attachment.
pub fn partition(resolved: &Resolved, config: &Config) -> Option<u16> {
    match resolved {
        Resolved::Child {
            kind: ChildKind::Ipoib,
            parent,
        } => Some(config.pkey.unwrap_or(ipoib_of(&parent.link).0)),
        _ => None,
    }
}

/// The child to be made.
fn child(config: &Config, kind: ChildKind, parent: &Link) -> Result<Child, Error> {
    Ok(match kind {
        ChildKind::Macvlan => Child::Macvlan {
            mode: config.macvlan_mode()?,
            broadcast_queue: config.broadcast_queue,
        },
        ChildKind::Ipvlan => Child::Ipvlan {
            mode: config.ipvlan_mode()?,
        },
        ChildKind::Ipoib => {
            let (pkey, mode) = ipoib_of(parent);
            Child::Ipoib {
                // The kernel wants the membership bit set and works it out from the port's table.
                pkey: config.pkey.unwrap_or(pkey) | 0x8000,
                mode: config.ipoib_mode()?.unwrap_or(mode),
                user_multicast: config.user_multicast.unwrap_or(true),
            }
        }
    })
}

/// Partition key and mode of an IPoIB link (`IFLA_IPOIB_PKEY`, `IFLA_IPOIB_MODE`).
fn ipoib_of(link: &Link) -> (u16, IpoibMode) {
    let number = |attribute: u16| {
        let value = link.info.get(&attribute);
        let value = value.filter(|_| link.kind == Some(InfoKind::Ipoib))?;
        value.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
    };
    let mode = number(2).map_or(IpoibMode::Datagram, IpoibMode::from);
    (number(1).unwrap_or(0xffff), mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::HostLink;

    fn config() -> Config {
        Config::default()
    }

    fn link(hardware: u16) -> Link {
        Link {
            name: "eth1".into(),
            hardware,
            mtu: 1500,
            max_mtu: 9000,
            ..Link::default()
        }
    }

    fn on(link: Link) -> HostLink {
        HostLink {
            link,
            ..HostLink::default()
        }
    }

    fn planned(config: Config, resolved: Resolved) -> Plan {
        let ifname = IfName::parse("net1").unwrap();
        let random = || Ok("02:00:00:00:00:01".parse().unwrap());
        Plan::of(config, resolved, ifname, random).unwrap()
    }

    fn child_on(kind: ChildKind, host: HostLink) -> Resolved {
        Resolved::Child { kind, parent: host }
    }

    #[test]
    fn an_ipoib_child_has_its_parents_partition_and_mode() {
        let numbers = [(1, 0x8002_u16), (2, 1)];
        let below = Link {
            kind: Some(InfoKind::Ipoib),
            info: numbers
                .map(|(kind, value)| (kind, value.to_ne_bytes().to_vec()))
                .into(),
            ..link(32)
        };
        let made = |config: Config| {
            let resolved = child_on(ChildKind::Ipoib, on(below.clone()));
            let plan = planned(config, resolved);
            assert_eq!(plan.mac, None);
            match plan.child {
                Some(Child::Ipoib { pkey, mode, .. }) => (pkey, mode),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(made(config()), (0x8002, IpoibMode::Connected));
        // Without the bit of a full member, as people write it.
        let own = Config {
            pkey: Some(0x0001),
            mode: Some("datagram".into()),
            ..config()
        };
        assert_eq!(made(own), (0x8001, IpoibMode::Datagram));
    }

    #[test]
    fn the_journal_is_given_what_is_made_or_moved() {
        let made = planned(config(), child_on(ChildKind::Macvlan, on(link(1)))).part();
        assert_eq!(made.moved, None);
        let recorded = made.child.unwrap();
        assert_eq!((&*recorded.kind, &*recorded.master), ("macvlan", "eth1"));
        assert!(recorded.pod_index >= 1 << 20);
        let snapshot = Snapshot {
            name: "eth1".into(),
            ..Snapshot::default()
        };
        let moved = Plan {
            snapshot: Some(snapshot),
            ..planned(config(), Resolved::Move(on(link(1))))
        };
        assert_eq!(moved.part().moved.unwrap().name, *"eth1");
        assert_eq!(moved.part().child, None);
    }

    #[test]
    fn a_plan_says_what_will_be_changed() {
        let plan = planned(config(), child_on(ChildKind::Macvlan, on(link(1))));
        assert_eq!(
            plan.to_string(),
            "make a macvlan on eth1 as net1; MAC 02:00:00:00:00:01; addresses once the interface is up"
        );
    }
}
