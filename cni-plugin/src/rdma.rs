//! The RDMA devices of an attachment, where the RDMA subsystem has namespaces of its own
//! (exclusive mode): they go into the pod before its netdev, and [`attachment::rdma`] returns them
//! before it.
//!
//! A move takes a device's character devices away and makes new ones, with the lowest numbers
//! that are free (`ib_uverbs_add_one()`). The container was promised the old number when it was
//! allocated. So a move that would change the number is refused before anything is changed; one
//! that did nevertheless is taken back and the attachment fails. Moves are made one at a time on
//! a node, because two together could swap their numbers. For an HCA that was bound late the number
//! is read after the move, so it may change.
//!
//! After a kill anywhere: the journal names the devices before the first one moves.

use std::collections::BTreeSet;

use attachment::{
    journal::RdmaDevice,
    node::Node,
    rdma::{find, parents},
};
use cni_wire::Code;
use hca::{CharDevice, Guid, Host, NetnsMode, PortId, chardev::verbs, lookup};
use netlink::{Namespace, link::Link, rdma};

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

/// What containers know of the numbers of device nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// They were promised them when the HCA was allocated.
    Promised,
    /// They get those that the daemon reads after the move.
    ReadAfterwards,
}

/// Whether RDMA devices move into the pod.
///
/// `mode` is that of the RDMA subsystem, none without one; `has_rdma` says whether the netdev
/// `name` has any. Pure.
///
/// # Errors
/// Code 50: the mode does not allow what is asked for; code 7: the netdev has no RDMA device.
pub(crate) fn moves(
    requirement: RdmaRequirement,
    attach: Attach,
    mode: Option<NetnsMode>,
    has_rdma: bool,
    name: &str,
) -> Result<bool, Error> {
    if requirement == RdmaRequirement::Off {
        return Ok(false);
    }
    if requirement == RdmaRequirement::Required {
        isolation(mode)?;
        if !has_rdma {
            return Err(Error::new(
                Code::InvalidConfig,
                format!("rdma: required, but {name} has no RDMA device"),
            )
            .with_details("name a netdev of an RDMA device, or leave rdma out"));
        }
    }
    if mode != Some(NetnsMode::Exclusive) || !has_rdma {
        return Ok(false);
    }
    match attach {
        Attach::Move | Attach::RdmaOnly => Ok(true),
        Attach::Child(_) => Err(Error::new(
            Code::Unavailable,
            format!(
                "a child of {name} is refused: the node's RDMA subsystem is in exclusive mode, in \
                 which its RDMA device would stay behind in the host's network namespace"
            ),
        )
        .with_details(
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
    Err(Error::new(
        Code::Unavailable,
        format!("RDMA devices of the pod's own are required, but {found}"),
    )
    .with_details(remedy))
}

/// The RDMA devices that go with a netdev: those of its ports, and all others of its function.
///
/// # Errors
/// Code 7: one serves another netdev, too, which would lose it; code 5: sysfs cannot be read.
pub(crate) fn of_netdev(
    host: &Host,
    link: &Link,
    ports: &[PortId],
) -> Result<BTreeSet<String>, Error> {
    let unread = |e: hca::Error| Error::new(Code::Io, e.to_string());
    let mut names: BTreeSet<String> = ports.iter().map(|port| port.device.clone()).collect();
    let hca = link
        .bus_device
        .as_deref()
        .and_then(|device| device.parse().ok());
    if let Some(hca) = hca {
        match lookup::on_hca(host, &hca) {
            Ok(occupants) => names.extend(occupants.rdma_devices),
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(unread(e)),
        }
    }
    for name in &names {
        let device = hca::rdma::read(host, name).map_err(unread)?;
        if let Some(other) = device.netdevs().find(|netdev| link.name != **netdev) {
            return Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "RDMA device {name} of {} serves {other}, too, which would lose it",
                    link.name
                ),
            )
            .with_details(
                "a device of several ports can be in one network namespace only; set the RDMA \
                 subsystem to shared, or rdma to off for a netdev without RDMA",
            ));
        }
    }
    Ok(names)
}

/// Describes the devices of these names for the journal. `guid` is what the attachment sets.
///
/// # Errors
/// Code 11: one is not in the host's namespace, or would not keep its character device.
pub(crate) fn describe(
    node: &Node,
    names: &BTreeSet<String>,
    numbers: Numbers,
    guid: Option<Guid>,
) -> Result<Vec<RdmaDevice>, Error> {
    let Some(mut socket) = rdma::socket(&node.netns.namespace, &node.netns.namespace)? else {
        return Err(Error::new(Code::Unavailable, "no RDMA stack is loaded"));
    };
    let there = rdma::list(&mut socket)?;
    let nodes = verbs(&node.roots)?;
    let parents = parents(&node.roots)?;
    let describe = |name: &String| {
        let device = there.iter().find(|device| device.name == *name);
        let device = device.ok_or_else(|| {
            Error::new(
                Code::TryAgain,
                format!("RDMA device {name} is not in the host's network namespace"),
            )
            .with_details("a pod has it, or it is returning from one")
        })?;
        let verbs = nodes.iter().find(|(owner, _)| owner == name);
        if let (Some((_, verbs)), Numbers::Promised) = (verbs, numbers) {
            keeps_its_number(name, &verbs.name, &nodes)?;
        }
        let guids = device.node_guid.into_iter().chain(guid);
        Ok(RdmaDevice {
            name: device.name.clone(),
            index: device.index,
            node_guids: guids.map(|guid| guid.to_string()).collect(),
            parent: parents.get(name).cloned(),
        })
    };
    names.iter().map(describe).collect()
}

/// Moves devices into a pod.
///
/// # Errors
/// Code 11: one would get another character device than the container was promised; code 100:
/// the kernel's refusal. What was moved by then is named in the journal.
pub(crate) fn move_in(
    node: &Node,
    pod: &Namespace,
    devices: &[RdmaDevice],
    numbers: Numbers,
) -> Result<(), Error> {
    if devices.is_empty() {
        return Ok(());
    }
    let _lock = node.journal.lock_rdma()?;
    let (Some(mut host), Some(mut inside)) = (
        rdma::socket(&node.netns.namespace, &node.netns.namespace)?,
        rdma::socket(pod, &node.netns.namespace)?,
    ) else {
        return Err(Error::new(Code::Unavailable, "no RDMA stack is loaded"));
    };
    for known in devices {
        let there = rdma::list(&mut host)?;
        let parents = parents(&node.roots)?;
        let device = find(known, &there, &parents).ok_or_else(|| {
            Error::new(
                Code::TryAgain,
                format!("RDMA device {} left the host meanwhile", known.name),
            )
        })?;
        let before = rdma::verbs_node(&mut host, device)?;
        if let (Some(before), Numbers::Promised) = (&before, numbers) {
            // It was checked before, too; another attachment may have been quicker.
            keeps_its_number(&device.name, &before.name, &verbs(&node.roots)?)?;
        }
        rdma::give(&mut host, device, pod).map_err(Error::rdma_move)?;
        let arrived = rdma::list(&mut inside)?;
        let arrived = find(known, &arrived, &parents).ok_or_else(|| {
            Error::new(
                Code::Kernel,
                format!("RDMA device {} did not arrive in the pod", known.name),
            )
        })?;
        let after = rdma::verbs_node(&mut inside, arrived)?;
        if after != before && numbers == Numbers::Promised {
            let name = |node: &Option<rdma::Node>| {
                node.as_ref().map_or("none".to_owned(), |n| n.name.clone())
            };
            return Err(Error::new(
                Code::TryAgain,
                format!(
                    "RDMA device {} has the character device {} in the pod, but the container was \
                     promised {}",
                    known.name,
                    name(&after),
                    name(&before)
                ),
            )
            .with_details("another RDMA device left the host meanwhile; delete the pod, so that a new one is allocated"));
        }
    }
    Ok(())
}

/// Refuses a move after which a device would have another number: the lowest that is free then,
/// its own among them. `all` are the verbs nodes of the host. Pure.
fn keeps_its_number(device: &str, node: &str, all: &[(String, CharDevice)]) -> Result<(), Error> {
    let number = |name: &str| name.strip_prefix("uverbs")?.parse::<u32>().ok();
    let Some(own) = number(node) else {
        return Ok(());
    };
    let used: BTreeSet<u32> = all.iter().filter_map(|(_, n)| number(&n.name)).collect();
    match (0..own).find(|lower| !used.contains(lower)) {
        None => Ok(()),
        Some(lower) => Err(Error::new(
            Code::TryAgain,
            format!(
                "moving RDMA device {device} is refused: it has /dev/infiniband/{node}, which the \
                 container was promised, and would become uverbs{lower}, which is free"
            ),
        )
        .with_details(
            "it can be moved once the lower numbers are in use: load the driver of the device \
             that had them, or, with no pod using RDMA, reload the drivers so that numbers are \
             given anew",
        )),
    }
}

/// That a pod still has its devices.
///
/// # Errors
/// Code 104 naming the one it has not.
pub(crate) fn check(node: &Node, pod: &Namespace, devices: &[RdmaDevice]) -> Result<(), Error> {
    if devices.is_empty() {
        return Ok(());
    }
    let there = match rdma::socket(pod, &node.netns.namespace)? {
        Some(mut inside) => rdma::list(&mut inside)?,
        None => Vec::new(),
    };
    let parents = parents(&node.roots)?;
    match devices
        .iter()
        .find(|known| find(known, &there, &parents).is_none())
    {
        None => Ok(()),
        Some(lost) => Err(Error::new(
            Code::Differs,
            format!("RDMA device {} is gone from the pod", lost.name),
        )),
    }
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
                false,
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

    #[test]
    fn a_move_that_would_change_the_promised_node_is_refused() {
        let all = ["uverbs0", "uverbs1", "uverbs3"].map(|name| {
            let number = "231:192".parse().unwrap();
            let path = "/dev/null".into();
            (
                String::new(),
                CharDevice {
                    name: name.into(),
                    path,
                    number,
                },
            )
        });
        keeps_its_number("mlx5_1", "uverbs1", &all).unwrap();
        keeps_its_number("mlx5_0", "uverbs0", &all).unwrap();
        let error = keeps_its_number("mlx5_3", "uverbs3", &all).unwrap_err();
        assert_eq!(error.code, Code::TryAgain);
        assert!(
            error.msg.contains("uverbs3") && error.msg.contains("uverbs2"),
            "{error}"
        );
    }
}
