//! Upper links of a netdev of the host. A netdev with upper links is not moved: the host's (a VXLAN, a
//! VLAN) would leave the node with it, and a child of another pod would receive the frames of the pod
//! that it goes to. The kernel says whether there is a child in a pod, the journal whose it is.

use std::fs;

use attachment::{node::Node, part::child_on};
use hca::{HcaId, Host, PciAddress};
use netlink::link;

use super::{HostLink, NodeNetwork};
use crate::error::Error;

/// What is on a netdev of the host, as a clause; one thing is enough.
///
/// # Errors
/// The host's links, its journal or sysfs cannot be read.
pub(super) fn of(
    node: &mut Node,
    nic: &HostLink,
    network: &mut NodeNetwork,
) -> Result<Option<String>, Error> {
    let links = match network.links.take() {
        Some(links) => links,
        None => link::list(&mut node.netns.socket)?,
    };
    let mut links = network.links.insert(links).iter();
    if let Some(link) = links.find(|link| link.stands_on(nic.link.index)) {
        let (kind, name) = (link.kind.as_ref().map(ToString::to_string), &link.name);
        let kind = kind.as_deref().unwrap_or("link");
        return Ok(Some(format!("{kind} {name} is on it (on the host)")));
    }
    for hca in &nic.hcas {
        if let HcaId::Pci(address) = hca
            && let Some(count) = virtual_functions(&node.roots, *address)
        {
            return Ok(Some(format!("it is a PF with {count} virtual functions")));
        }
    }
    let carries_child = match nic.link.is_ethernet() {
        // A kernel without macvlan does not say.
        true => link::carries_child(&mut node.netns.socket, &nic.link).ok(),
        false => None,
    };
    // The journal has records of all pods: it is read to name a child's owner, and where the kernel
    // does not know of children.
    if carries_child != Some(false)
        && let Some((kind, owner)) = child_on(node, nic.link.index)?
    {
        return Ok(Some(format!("a {kind} of {owner} is on it")));
    }
    Ok((carries_child == Some(true)).then(|| {
        let name = &nic.link.name;
        format!("{name} carries a macvlan or ipvlan in another network namespace")
    }))
}

/// `sriov_numvfs` (drivers/pci/iov.c); a function without it has none.
fn virtual_functions(roots: &Host, pci: PciAddress) -> Option<u32> {
    let file = roots
        .sys
        .join("bus/pci/devices")
        .join(pci.to_string())
        .join("sriov_numvfs");
    let count: u32 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (count > 0).then_some(count)
}
