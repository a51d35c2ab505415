//! What an attachment will do, decided before anything is changed. Pure: nothing here asks the
//! kernel, a file or a clock.
//!
//! A [`Plan`] can be printed: the log shows it at level `debug`.

mod check;

use std::{fmt, path::PathBuf};

pub use check::{carries_ipv6, check, has_partition};

use attachment::{
    journal::{RdmaDevice, record},
    netdev::{display, snapshot::Snapshot},
};
use hca::MacAddress;
use netlink::link::{Child, Link};
use netlink_packet_route::link::{InfoData, InfoIpoib, IpoibMode, MacVlanMode};

use crate::{
    config::{ChildKind, Config},
    error::Error,
    interface_config::InterfaceConfig,
    resolve::{HostLink, Parent, Resolved},
};

/// Everything that an ADD changes outside the journal and the lease store.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The interface's name in the pod.
    pub ifname: String,
    /// Path of the pod's network namespace.
    pub netns: PathBuf,
    /// RDMA devices that move into the pod, before the interface does.
    pub rdma: Vec<RdmaDevice>,
    /// What becomes the interface.
    pub interface: Source,
    /// What the interface is given; none while its IPAM wants to see it first.
    pub interface_config: Option<InterfaceConfig>,
}

/// What becomes the pod's interface.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a call has one, and never a list of them"
)]
pub enum Source {
    /// A netdev of the host.
    Netdev {
        /// The netdev.
        nic: Link,
        /// Its state on the host.
        snapshot: Box<Snapshot>,
        /// MTU in bytes; none leaves it.
        mtu: Option<u32>,
        /// Hardware address; none leaves it.
        mac: Option<MacAddress>,
    },
    /// A new child.
    Child {
        /// What it is.
        child: Child,
        /// The link it stands on.
        parent: Parent,
        /// MTU in bytes; none for the parent's.
        mtu: Option<u32>,
        /// Hardware address; none for kinds that have their parent's.
        mac: Option<MacAddress>,
        /// Index; none for kinds that are known again by what the kernel gives them.
        index: Option<u32>,
    },
}

impl Source {
    /// The netdev that moves, or the link below the child.
    pub fn link(&self) -> &Link {
        match self {
            Source::Netdev { nic, .. } => nic,
            Source::Child { parent, .. } => parent.link(),
        }
    }

    /// The state of a netdev that moves.
    pub fn snapshot(&self) -> Option<&Snapshot> {
        match self {
            Source::Netdev { snapshot, .. } => Some(snapshot),
            Source::Child { .. } => None,
        }
    }

    /// A child for the journal.
    pub fn recorded_child(&self) -> Option<record::Child> {
        match self {
            Source::Netdev { .. } => None,
            Source::Child {
                child,
                parent,
                mac,
                index,
                ..
            } => Some(record::Child {
                kind: child.word(),
                master: parent.link().name.to_string(),
                index: parent.link().index,
                in_pod: parent.of_host().is_none(),
                pod_index: *index,
                strayed: false,
                warning: None,
                mac: mac.as_ref().map(ToString::to_string),
            }),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in &self.rdma {
            write!(f, "move RDMA device {} into the pod; ", device.name)?;
        }
        match &self.interface {
            Source::Netdev { nic, .. } => write!(f, "move {}", nic.name)?,
            Source::Child { child, parent, .. } => {
                let place = match parent {
                    Parent::OfHost(_) => "of the host",
                    Parent::OfPod(_) => "of the pod",
                };
                let name = &parent.link().name;
                write!(f, "make a {} on {name} {place}", child.word())?;
            }
        }
        write!(f, " as {} in {}", self.ifname, self.netns.display())?;
        let (Source::Netdev { mtu, mac, .. } | Source::Child { mtu, mac, .. }) = &self.interface;
        if let Some(mtu) = mtu {
            write!(f, "; MTU {mtu}")?;
        }
        if let Some(mac) = mac {
            write!(f, "; MAC {mac}")?;
        }
        let Some(interface_config) = &self.interface_config else {
            return f.write_str("; addresses once the interface is up");
        };
        for setting in &interface_config.settings {
            let (group, key, value) = (setting.group, setting.key, setting.value);
            write!(f, "; {group}/{key}={value}")?;
        }
        for address in &interface_config.addresses {
            write!(f, "; address {}", display::address(address))?;
        }
        for neighbour in &interface_config.neighbours {
            write!(f, "; neighbour {}", display::neighbour(neighbour))?;
        }
        for route in &interface_config.routes {
            write!(f, "; route {}", display::route(route))?;
        }
        for rule in &interface_config.rules {
            write!(f, "; rule {}", display::rule(rule))?;
        }
        Ok(())
    }
}

/// The netdev that moves.
pub fn netdev(config: &Config, nic: &HostLink, snapshot: Snapshot) -> Source {
    Source::Netdev {
        nic: nic.link.clone(),
        snapshot: Box::new(snapshot),
        mtu: config.mtu,
        mac: config.mac.clone(),
    }
}

/// The partition key of an IPoIB child; none for every other attachment.
pub fn partition(resolved: &Resolved, config: &Config) -> Option<u16> {
    match resolved {
        Resolved::Child {
            kind: ChildKind::Ipoib,
            parent,
        } => Some(config.pkey.unwrap_or(ipoib_of(parent.link()).0)),
        _ => None,
    }
}

/// The child to be made. `random` are a MAC address for kinds that have one of their own and an index,
/// so that the journal knows them before the kernel does.
///
/// # Errors
/// Code 7 naming the mode.
pub fn child(
    config: &Config,
    kind: ChildKind,
    parent: &Parent,
    random: (MacAddress, u32),
) -> Result<Source, Error> {
    let (random, index) = random;
    let mut own_mac = None;
    let child = match kind {
        ChildKind::Macvlan => {
            let mode = config.macvlan_mode()?;
            own_mac = (mode != MacVlanMode::Passthrough).then_some(random);
            Child::Macvlan {
                mode,
                broadcast_queue: config.broadcast_queue,
            }
        }
        ChildKind::Ipvlan => Child::Ipvlan {
            mode: config.ipvlan_mode()?,
        },
        ChildKind::Ipoib => {
            let (pkey, mode) = ipoib_of(parent.link());
            Child::Ipoib {
                // The kernel wants the membership bit set and works it out from the port's table.
                pkey: config.pkey.unwrap_or(pkey) | 0x8000,
                mode: config.ipoib_mode()?.unwrap_or(mode),
                user_multicast: config.user_multicast.unwrap_or(true),
            }
        }
    };
    Ok(Source::Child {
        mac: config.mac.clone().or(own_mac),
        index: (kind != ChildKind::Ipoib).then_some(index),
        child,
        parent: parent.clone(),
        mtu: config.mtu,
    })
}

/// Partition key and mode of an IPoIB link.
fn ipoib_of(link: &Link) -> (u16, IpoibMode) {
    let (mut pkey, mut mode) = (0xffff, IpoibMode::Datagram);
    if let Some(InfoData::Ipoib(infos)) = &link.data {
        for info in infos {
            match info {
                InfoIpoib::Pkey(own) => pkey = *own,
                InfoIpoib::Mode(own) => mode = *own,
                _ => {}
            }
        }
    }
    (pkey, mode)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn an_ipoib_child_has_its_parents_partition_and_mode() {
        let mut below = link(32);
        below.data = Some(InfoData::Ipoib(vec![
            InfoIpoib::Pkey(0x8002),
            InfoIpoib::Mode(IpoibMode::Connected),
        ]));
        let parent = Parent::OfHost(HostLink {
            link: below,
            ..HostLink::default()
        });
        let random: MacAddress = "02:00:00:00:00:01".parse().unwrap();
        let made = |config: &Config| {
            let source =
                child(config, ChildKind::Ipoib, &parent, (random.clone(), 70_000)).unwrap();
            match source {
                Source::Child {
                    child: Child::Ipoib { pkey, mode, .. },
                    mac: None,
                    ..
                } => (pkey, mode),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(made(&config()), (0x8002, IpoibMode::Connected));
        // Without the bit of a full member, as people write it.
        let own = Config {
            pkey: Some(0x0001),
            mode: Some("datagram".into()),
            ..config()
        };
        assert_eq!(made(&own), (0x8001, IpoibMode::Datagram));
    }

    #[test]
    fn the_journal_is_given_what_is_made_or_moved() {
        let parent = Parent::OfHost(HostLink {
            link: link(1),
            ..HostLink::default()
        });
        let mac: MacAddress = "02:00:00:00:00:01".parse().unwrap();
        let made = child(
            &config(),
            ChildKind::Macvlan,
            &parent,
            (mac.clone(), 70_000),
        )
        .unwrap();
        assert_eq!(made.link().name, *"eth1");
        assert!(made.snapshot().is_none());
        let recorded = made.recorded_child().unwrap();
        assert_eq!((&*recorded.kind, &*recorded.master), ("macvlan", "eth1"));
        assert_eq!(recorded.mac, Some(mac.to_string()));
        assert_eq!(recorded.pod_index, Some(70_000));
        let nic = HostLink {
            link: link(1),
            ..HostLink::default()
        };
        let snapshot = Snapshot {
            name: "eth1".into(),
            ..Snapshot::default()
        };
        let moved = netdev(&config(), &nic, snapshot);
        assert_eq!(moved.link().name, *"eth1");
        assert_eq!(moved.snapshot().unwrap().name, *"eth1");
        assert!(moved.recorded_child().is_none());
    }

    #[test]
    fn a_plan_says_what_will_be_changed() {
        let parent = Parent::OfHost(HostLink {
            link: link(1),
            ..HostLink::default()
        });
        let mac: MacAddress = "02:00:00:00:00:01".parse().unwrap();
        let interface = child(&config(), ChildKind::Macvlan, &parent, (mac, 70_000)).unwrap();
        let plan = Plan {
            ifname: "net1".into(),
            netns: "/run/netns/a".into(),
            rdma: Vec::new(),
            interface,
            interface_config: None,
        };
        assert_eq!(
            plan.to_string(),
            "make a macvlan on eth1 of the host as net1 in /run/netns/a; MAC 02:00:00:00:00:01; \
             addresses once the interface is up"
        );
    }
}
