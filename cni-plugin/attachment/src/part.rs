//! One interface of an attachment: what is decided, what the journal keeps, and what apply, undo
//! and check work on. Each kind is a file with these three beside each other.
//!
//! A part is complete before anything of the host changes, and is written once.

mod child;
mod moved;
mod rdma_only;
mod vf;

use std::fmt;

use hca::MacAddress;
use netlink::{
    Socket,
    link::{self, Change, Link},
};
use serde::{Deserialize, Serialize};

pub use child::{Child, ChildLink, IpoibMode, IpvlanMode, MacvlanMode, Parent, child_on};
pub use moved::{Defect, Move};
pub use rdma_only::RdmaOnly;
pub use vf::{holder, is_held};

use crate::{
    interface::InterfaceConfig,
    journal::{RdmaDevice, Slot},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// The netdev of the host itself becomes the pod's.
    Move(Box<Move>),
    /// A link on a netdev of the host.
    Child(Box<Child>),
    /// RDMA devices alone, for an interface that another plugin made.
    RdmaOnly(RdmaOnly),
}

/// What an interface is in its pod, whether it is moved there or made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Interface {
    pub name: String,
    /// The rail of its NIC, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<u32>,
    /// In bytes; none leaves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// None leaves it, or is the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Sysctls, addresses, routes and rules.
    #[serde(default)]
    pub config: InterfaceConfig,
}

impl Interface {
    /// Gives its link this MTU and its MAC address, where it has others.
    fn set(&self, inside: &mut Socket, link: &Link, mtu: Option<u32>) -> netlink::Result<()> {
        let mac = self.mac.as_ref().map(MacAddress::bytes);
        let change = Change {
            mtu: mtu.filter(|mtu| *mtu != link.mtu),
            mac: mac.filter(|mac| link.mac != *mac),
            ..Change::default()
        };
        if change.mtu.is_none() && change.mac.is_none() {
            return Ok(());
        }
        let what = format_args!("set MTU and MAC of {}", self.name);
        link::change(inside, what, link.index, &change)
    }
}

impl Part {
    /// `attach` of the network.
    pub fn attach(&self) -> &'static str {
        match self {
            Part::Move(_) => "move",
            Part::Child(child) => child.link.kind(),
            Part::RdmaOnly(_) => "rdma-only",
        }
    }

    /// The name of the interface in the pod.
    pub fn name(&self) -> &str {
        match self {
            Part::RdmaOnly(only) => &only.interface,
            Part::Move(_) | Part::Child(_) => self.interface().map_or("", |one| &one.name),
        }
    }

    /// The interface that this plugin moved or made.
    pub fn interface(&self) -> Option<&Interface> {
        match self {
            Part::Move(moved) => Some(&moved.interface),
            Part::Child(child) => Some(&child.interface),
            Part::RdmaOnly(_) => None,
        }
    }

    pub fn interface_mut(&mut self) -> Option<&mut Interface> {
        match self {
            Part::Move(moved) => Some(&mut moved.interface),
            Part::Child(child) => Some(&mut child.interface),
            Part::RdmaOnly(_) => None,
        }
    }

    pub fn rail(&self) -> Option<u32> {
        self.interface()?.rail
    }

    /// The netdev that moves.
    pub fn moved(&self) -> Option<&Move> {
        match self {
            Part::Move(moved) => Some(moved),
            Part::Child(_) | Part::RdmaOnly(_) => None,
        }
    }

    pub fn child(&self) -> Option<&Child> {
        match self {
            Part::Child(child) => Some(child),
            Part::Move(_) | Part::RdmaOnly(_) => None,
        }
    }

    /// The RDMA devices that move with the interface, or alone.
    pub fn rdma(&self) -> &[RdmaDevice] {
        match self {
            Part::Move(moved) => &moved.rdma,
            Part::RdmaOnly(only) => &only.rdma,
            Part::Child(_) => &[],
        }
    }

    /// The slots that the runtime passed for it, each bound to an HCA by the daemon.
    pub fn slots(&self) -> &[Slot] {
        match self {
            Part::Move(moved) => &moved.slots,
            Part::Child(child) => &child.slots,
            Part::RdmaOnly(only) => &only.slots,
        }
    }

    /// The HCAs that no other pod has meanwhile, as units name them.
    pub fn hcas(&self) -> impl Iterator<Item = &str> {
        let moved = self.moved().into_iter().flat_map(|moved| &moved.hcas);
        let bound = self.slots().iter().map(|slot| slot.hca.as_str());
        bound.chain(moved.map(String::as_str))
    }

    /// The netdev of the host that moves or that the child is on.
    pub fn netdev(&self) -> Option<String> {
        match self {
            Part::Move(moved) => Some(moved.host.name.to_string()),
            Part::Child(child) => Some(child.parent.name.clone()),
            Part::RdmaOnly(_) => None,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in self.rdma() {
            write!(f, "move RDMA device {} into the pod; ", device.name)?;
        }
        match self {
            Part::Move(moved) => moved.fmt(f)?,
            Part::Child(child) => child.fmt(f)?,
            Part::RdmaOnly(_) => return f.write_str("no interface"),
        }
        let Some(interface) = self.interface() else {
            return Ok(());
        };
        write!(f, " as {}", interface.name)?;
        if let Some(mtu) = interface.mtu {
            write!(f, "; MTU {mtu}")?;
        }
        if let Some(mac) = &interface.mac {
            write!(f, "; MAC {mac}")?;
        }
        interface.config.fmt(f)
    }
}

#[cfg(test)]
mod tests;
