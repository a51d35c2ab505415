//! Setting what a record says of a VF.
//!
//! The VF's driver reads a GUID when it starts, and makes another netdev and another RDMA device then. No
//! lock is held while they are awaited: what must not change meanwhile is compared afterwards.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use cni_wire::{Code, text::list};
use hca::{GidEntry, Guid, Host, LinkLayer, Port, chardev::verbs};
use netlink::link::{self, Change, Link};

use crate::{
    error::Error,
    netdev::{identity::LinkScope, restore::DRIVER_TIMEOUT, snapshot::Snapshot, vf::Vf},
    node::Node,
    rdma::{DeviceNodes, parents},
};

/// Another owner of a GUID on this node.
#[must_use]
pub fn is_held(guid: Guid, holder: &str) -> Error {
    let msg = format!("guid: {holder} of this node has {guid}");
    Error::new(Code::TryAgain, msg).with_details(
        "a fabric has each GUID once: choose another; if a pod that ends has it, the next ADD sets it",
    )
}

/// Sets what is decided of the VF. Returns its netdev, of which a GUID makes another one.
/// Call with the record written and the netdev's lock held.
///
/// # Errors
/// The refusal of kernel or driver. Code 11 where the VF's netdev does not come, the VF has another
/// character device than the container was promised, or another port of this host has the GUID.
pub(super) fn apply(
    node: &mut Node,
    taken: &Snapshot,
    link: Link,
    nodes: DeviceNodes,
) -> Result<Link, Error> {
    let vf = taken.vf.as_ref().filter(|vf| !vf.set.is_empty());
    let (Some(vf), Some(address)) = (vf, taken.identity.bus_device.as_deref()) else {
        return Ok(link);
    };
    if let Some(mac) = &vf.set.mac {
        // By the VF itself, before the PF sets it: after that, some drivers (igb) refuse it to the VF
        // until its driver starts again. A refusal does not matter where the VF takes the PF's address.
        let change = Change {
            mac: Some(mac.bytes()),
            ..Change::default()
        };
        let what = format_args!("set MAC of {}", link.name);
        if let Err(refused) = link::change(&mut node.netns.socket, what, link.index, &change) {
            node.log.debug(refused);
        }
    }
    let before = verbs_nodes(node, address)?;
    {
        // A driver that starts takes the lowest numbers that are free.
        let guid = vf.set.node_guid;
        let _lock = guid.map(|_| node.journal.lock_rdma()).transpose()?;
        let set = vf.apply(&node.roots, &mut node.netns.socket, address);
        set.map_err(|refused| {
            Error::from(refused).with_details(
                "the driver of the physical function decides what its VFs can have; dmesg may say more",
            )
        })?;
    }
    let started = Instant::now();
    loop {
        let links = link::list(&mut node.netns.socket)?;
        let after = verbs_nodes(node, address)?;
        let found = taken.identity.find(&links, LinkScope::Host);
        if let (Ok(Some(found)), true) = (found, after.len() == before.len()) {
            if after != before && nodes == DeviceNodes::Promised {
                let (after, before) = (list(after), list(before));
                let msg = format!(
                    "VF {address} has the character device {after} with its GUID, but the container \
                     was promised {before}"
                );
                return Err(Error::new(Code::TryAgain, msg).with_details(
                    "another RDMA device was made or moved meanwhile; delete the pod, so that a new one \
                     is allocated",
                ));
            }
            // Two attachments may have found it free.
            if let Some(guid) = vf.set.node_guid
                && let Some(holder) = holder(node, vf, address, guid)?
            {
                return Err(is_held(guid, &holder));
            }
            return Ok(found.clone());
        }
        if started.elapsed() > DRIVER_TIMEOUT {
            let msg = format!(
                "VF {address} has no netdev, or not its character devices ({}), after it was set",
                list(before)
            );
            return Err(
                Error::new(Code::TryAgain, msg).with_details("dmesg says what its driver did")
            );
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// What else than the VF at `address` has a GUID on this host, as text.
pub fn holder(
    node: &mut Node,
    vf: &Vf,
    address: &str,
    guid: Guid,
) -> Result<Option<String>, Error> {
    Ok(match device_with(&node.roots, address, guid)? {
        Some(device) => Some(device),
        None => vf.other_with(&mut node.netns.socket, guid)?,
    })
}

/// The RDMA device that the host sees with a GUID, its own or a port's, beside those at `address`.
fn device_with(host: &Host, address: &str, guid: Guid) -> Result<Option<String>, Error> {
    let parents = parents(host)?;
    for (name, _) in parents.into_iter().filter(|(_, on)| on != address) {
        let device = match hca::rdma::read(host, &name) {
            Err(e) if e.is_missing() => continue,
            device => device?,
        };
        let is_infiniband = |port: &&Port| port.link_layer == LinkLayer::InfiniBand;
        let ports = device.ports.iter().filter(is_infiniband);
        let mut gids = ports.flat_map(|port| &port.gids.entries);
        let ends_so = |entry: &GidEntry| entry.gid.0.ends_with(&guid.0.to_be_bytes());
        if device.node_guid == Some(guid) || gids.any(ends_so) {
            return Ok(Some(format!("RDMA device {name}")));
        }
    }
    Ok(None)
}

/// The verbs nodes of the RDMA devices on a PCI function.
fn verbs_nodes(node: &Node, address: &str) -> Result<BTreeSet<String>, Error> {
    let parents = parents(&node.roots)?;
    let nodes = verbs(&node.roots)?.into_iter();
    let of_function = nodes.filter(|(owner, _)| parents.get(owner).is_some_and(|on| on == address));
    Ok(of_function.map(|(_, node)| node.name).collect())
}

#[cfg(test)]
mod tests {
    use hca_trees::{On, PciSpec, PortSpec, RdmaSpec, Tree};

    use super::*;

    #[test]
    fn a_guid_of_another_device_or_port_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            node_guid: "b859:9f03:0000:0000",
            ports: &[PortSpec::INFINIBAND],
            ..RdmaSpec::default()
        });
        let host = tree.host();
        let device = hca::rdma::read(&host, "mlx5_0").unwrap();
        let node = device.node_guid.unwrap();
        let gid = device.ports[0].gids.entries[0].gid.0;
        let port = Guid(u64::from_be_bytes(gid[8..].try_into().unwrap()));
        assert_ne!(node, port);
        for guid in [node, port] {
            let found = |address| device_with(&host, address, guid).unwrap();
            assert_eq!(found("0000:3b:00.2").as_deref(), Some("RDMA device mlx5_0"));
            assert_eq!(found("0000:3b:00.0"), None, "its own");
        }
        let free = device_with(&host, "0000:3b:00.2", Guid(node.0 ^ 1 << 40)).unwrap();
        assert_eq!(free, None);
    }
}
