//! Which RDMA devices an attachment takes along, where the RDMA subsystem has namespaces of its own
//! (exclusive mode). [`attachment::rdma`] moves and returns them.

use std::collections::BTreeSet;

use attachment::{
    journal::RdmaDevice,
    node::Node,
    rdma::{DeviceNodes, keeps_its_number, parents},
};
use cni_wire::Code;
use hca::{Guid, Host, NetnsMode, PortId, chardev::verbs, lookup};
use netlink::{link::Link, rdma};

use crate::{config::Attach, error::Error};

cni_wire::words! {
    /// `rdma`: what the pod must have.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum RdmaRequirement {
        /// What the mode of the RDMA subsystem calls for.
        #[default]
        Auto = "auto",
        /// RDMA devices of the pod's own: exclusive mode.
        Required = "required",
        /// A netdev alone.
        Off = "off",
    }
}

/// Whether RDMA devices move into the pod.
///
/// `mode` is the RDMA subsystem's, none without one; `has_rdma` says whether the netdev
/// `name` has any. Pure.
///
/// # Errors
/// Code 50: the mode does not allow the request; code 7: the netdev does not have an RDMA device.
pub(crate) fn moves(
    requirement: RdmaRequirement,
    attach: Attach,
    mode: Option<NetnsMode>,
    has_rdma: bool,
    name: &str,
) -> Result<bool, Error> {
    match requirement {
        RdmaRequirement::Off => return Ok(false),
        RdmaRequirement::Required if !has_rdma => {
            return Err(Error::advise(
                Code::InvalidConfig,
                format_args!("rdma: required, but {name} has no RDMA device"),
                "name a netdev of an RDMA device, or leave rdma out",
            ));
        }
        RdmaRequirement::Required => isolation(mode)?,
        RdmaRequirement::Auto => {}
    }
    if mode != Some(NetnsMode::Exclusive) || !has_rdma {
        return Ok(false);
    }
    match attach {
        Attach::Move | Attach::RdmaOnly => Ok(true),
        Attach::Child(_) => Err(Error::advise(
            Code::Unavailable,
            format_args!(
                "a child of {name} is refused: the node's RDMA subsystem is in exclusive mode, in \
                 which its RDMA device would stay behind in the host's network namespace"
            ),
            "set attach to move; or set the subsystem to shared, where the device files of the \
             allocation are all that a pod needs: rdma system set netns shared, and for the next \
             boot netns_mode=1 for ib_core in /etc/modprobe.d; or set rdma to off for a netdev \
             without RDMA",
        )),
    }
}

/// Refuses a node on which a pod cannot have RDMA devices of its own.
pub(crate) fn isolation(mode: Option<NetnsMode>) -> Result<(), Error> {
    let (found, remedy) = match mode {
        Some(NetnsMode::Exclusive) => return Ok(()),
        Some(NetnsMode::Shared) => (
            "the node's RDMA subsystem is in shared mode",
            "set it to exclusive while the node has no other network namespace: rdma system set \
             netns exclusive, and for the next boot netns_mode=0 for ib_core in /etc/modprobe.d; or \
             set rdma to auto",
        ),
        None => (
            "the node has no RDMA subsystem loaded",
            "load it with the driver of the HCA (modprobe ib_core netns_mode=0; mlx5_ib for a \
             ConnectX), or set rdma to auto",
        ),
    };
    let msg = format!("RDMA devices of the pod's own are required, but {found}");
    Err(Error::advise(Code::Unavailable, msg, remedy))
}

/// The RDMA devices that go with a netdev: those of its ports, and all others of its function.
///
/// # Errors
/// Code 7: one also serves another netdev, which would lose it; code 5: sysfs cannot be read.
pub(crate) fn of_netdev(
    host: &Host,
    link: &Link,
    ports: &[PortId],
) -> Result<BTreeSet<String>, Error> {
    let mut names: BTreeSet<String> = ports.iter().map(|port| port.device.clone()).collect();
    let device = link.bus_device.as_deref();
    if let Some(hca) = device.and_then(|device| device.parse().ok()) {
        match lookup::on_hca(host, &hca) {
            Ok(occupants) => names.extend(occupants.rdma_devices),
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(names)
}

/// RDMA devices that are to move.
#[derive(Clone, Debug, Default)]
pub struct MovableRdma {
    /// With the verbs node that containers were promised.
    devices: Vec<(RdmaDevice, Option<String>)>,
    /// A device, and another netdev that it serves.
    serves_another: Option<(String, String)>,
    /// The verbs nodes of the host.
    nodes: Vec<String>,
}

impl MovableRdma {
    /// # Errors
    /// Code 7: one serves another netdev, which would lose it; code 11: one would not keep its
    /// character device.
    pub(crate) fn decide(&self) -> Result<Vec<RdmaDevice>, Error> {
        if let Some((device, other)) = &self.serves_another {
            return Err(Error::advise(
                Code::InvalidConfig,
                format_args!("RDMA device {device} also serves {other}, which would lose it"),
                "a device of several ports can be in one network namespace only; set the RDMA \
                 subsystem to shared, or rdma to off for a netdev without RDMA",
            ));
        }
        let devices = self.devices.iter();
        devices
            .map(|(device, node)| {
                if let Some(node) = node {
                    keeps_its_number(&device.name, node, &self.nodes)?;
                }
                Ok(device.clone())
            })
            .collect()
    }
}

/// Reads the devices of these names. They move with `netdev`, and get `guid`.
///
/// # Errors
/// Code 11: one is not in the host's namespace.
pub(crate) fn read(
    node: &Node,
    names: &BTreeSet<String>,
    netdev: Option<&Link>,
    promised: DeviceNodes,
    guid: Option<Guid>,
) -> Result<MovableRdma, Error> {
    let Some(mut socket) = rdma::socket(&node.netns.namespace, &node.netns.namespace)? else {
        return Err(Error::new(Code::Unavailable, "no RDMA stack is loaded"));
    };
    let there = rdma::list(&mut socket)?;
    let nodes = verbs(&node.roots)?;
    let parents = parents(&node.roots)?;
    let mut movable = MovableRdma::default();
    for name in names {
        let device = there.iter().find(|device| device.name == *name);
        let device = device.ok_or_else(|| {
            let msg = format!("RDMA device {name} is not in the host's network namespace");
            let remedy = "a pod has it, or it is returning from one";
            Error::advise(Code::TryAgain, msg, remedy)
        })?;
        if let Some(link) = netdev {
            let read = hca::rdma::read(&node.roots, name)?;
            let other = read.netdevs().find(|netdev| link.name != **netdev);
            let other = other.map(|netdev| (name.clone(), netdev.to_owned()));
            movable.serves_another = movable.serves_another.or(other);
        }
        let verbs = nodes.iter().find(|(owner, _)| owner == name);
        let verbs = verbs.filter(|_| promised == DeviceNodes::Promised);
        let guids = device.node_guid.into_iter().chain(guid);
        let known = RdmaDevice {
            name: device.name.clone(),
            index: device.index,
            node_guids: guids.map(|guid| guid.to_string()).collect(),
            parent: parents.get(name).cloned(),
        };
        movable
            .devices
            .push((known, verbs.map(|(_, node)| node.name.clone())));
    }
    movable.nodes = nodes.into_iter().map(|(_, node)| node.name).collect();
    Ok(movable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ChildKind;

    const SHARED: Option<NetnsMode> = Some(NetnsMode::Shared);
    const EXCLUSIVE: Option<NetnsMode> = Some(NetnsMode::Exclusive);

    const MACVLAN: Attach = Attach::Child(ChildKind::Macvlan);
    const AUTO: RdmaRequirement = RdmaRequirement::Auto;
    const REQUIRED: RdmaRequirement = RdmaRequirement::Required;
    const OFF: RdmaRequirement = RdmaRequirement::Off;

    #[test]
    fn the_mode_decides_unless_the_network_does() {
        for (requirement, attach, mode, has, expected) in [
            (AUTO, Attach::Move, SHARED, true, false),
            (AUTO, Attach::Move, None, false, false),
            (AUTO, Attach::Move, EXCLUSIVE, true, true),
            (AUTO, Attach::RdmaOnly, EXCLUSIVE, true, true),
            (AUTO, Attach::Move, EXCLUSIVE, false, false),
            (REQUIRED, Attach::Move, EXCLUSIVE, true, true),
            (AUTO, MACVLAN, SHARED, true, false),
            (OFF, MACVLAN, EXCLUSIVE, true, false),
            (OFF, Attach::Move, EXCLUSIVE, true, false),
        ] {
            assert_eq!(
                moves(requirement, attach, mode, has, "eth1").unwrap(),
                expected,
                "{requirement:?} {attach:?}"
            );
        }
    }

    #[test]
    fn a_device_that_cannot_follow_is_refused_with_the_reason() {
        let (unavailable, invalid) = (Code::Unavailable, Code::InvalidConfig);
        for (requirement, attach, mode, has, code, word) in [
            (
                REQUIRED,
                Attach::Move,
                SHARED,
                true,
                unavailable,
                "shared mode",
            ),
            (
                REQUIRED,
                Attach::Move,
                None,
                true,
                unavailable,
                "no RDMA subsystem",
            ),
            (REQUIRED, Attach::Move, EXCLUSIVE, false, invalid, "eth1"),
            (
                AUTO,
                MACVLAN,
                EXCLUSIVE,
                true,
                unavailable,
                "exclusive mode",
            ),
        ] {
            let error = moves(requirement, attach, mode, has, "eth1").unwrap_err();
            assert_eq!(error.code, code);
            assert!(
                error.msg.contains(word) && !error.details.is_empty(),
                "{error}"
            );
        }
    }
}
