//! Upper links of a netdev of the host. A netdev with upper links is not moved: the host's (a VXLAN, a
//! VLAN) would leave the node with it, and a child of another pod would receive the frames of the pod
//! that it goes to. The kernel says whether there is a child in a pod, the journal whose it is.

use std::{fs, path::Path};

use attachment::{detach::living, journal::record::Child, node::Node};
use cni_wire::Code;
use hca::{HcaId, Host, PciAddress};
use netlink::link::{self, Link};
use netlink_packet_route::link::InfoKind;

use super::{HostLink, NodeNetwork, Resolved};
use crate::{config::ChildKind, error::Error};

/// Something that stands on a netdev.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dependent {
    /// A clause of a message.
    pub what: String,
    /// How a user can move the netdev all the same, or another.
    pub remedy: &'static str,
}

impl Dependent {
    fn of(what: String) -> Self {
        let remedy = "the pod would receive the frames of what stands on it; remove that first, or move \
                      another netdev";
        Dependent { what, remedy }
    }
}

/// What stands on a netdev of the host; one thing is enough.
///
/// # Errors
/// The host's links, its journal or sysfs cannot be read.
pub(super) fn of(
    node: &mut Node,
    nic: &HostLink,
    network: &mut NodeNetwork,
) -> Result<Option<Dependent>, Error> {
    let links = match network.links.take() {
        Some(links) => links,
        None => link::list(&mut node.netns.socket)?,
    };
    let mut links = network.links.insert(links).iter();
    if let Some(link) = links.find(|link| link.stands_on(nic.link.index)) {
        let kind = link.kind.as_ref().map(ToString::to_string);
        let kind = kind.as_deref().unwrap_or("link");
        let what = format!("{kind} {} stands on it (on the host)", link.name);
        return Ok(Some(Dependent::of(what)));
    }
    for hca in &nic.hcas {
        if let HcaId::Pci(address) = hca
            && let Some(count) = virtual_functions(&node.roots, *address)
        {
            let what = format!("it is a PF with {count} virtual functions");
            return Ok(Some(Dependent::of(what)));
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
        && let Some((kind, owner)) = attachment_on(node, nic.link.index)?
    {
        let what = format!("a {kind} of {owner} stands on it");
        return Ok(Some(Dependent::of(what)));
    }
    Ok((carries_child == Some(true)).then(|| {
        let name = &nic.link.name;
        Dependent::of(format!(
            "{name} carries a macvlan or ipvlan in another network namespace"
        ))
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

/// A child that this plugin made on the netdev, in a namespace that is still there: its kind and its
/// owner, as messages name them.
fn attachment_on(node: &Node, index: u32) -> Result<Option<(String, String)>, Error> {
    for (_, record) in node.records()? {
        let on_it = |child: &&Child| child.index == index;
        let mut children = record.parts.iter().filter_map(|part| part.child.as_ref());
        let Some(child) = children.find(on_it) else {
            continue;
        };
        if node.is_of_this_boot(&record.boot) && living(&record)?.is_some() {
            return Ok(Some((child.kind.clone(), record.owner())));
        }
    }
    Ok(None)
}

/// Names the children that keep the kernel from making one of another kind. Both kinds want the
/// only handler of received frames that a netdev has (`netdev_rx_handler_register()`). Whose
/// they are stands in the journal, all of which is read for that: only after a refusal.
pub fn explain(node: &mut Node, resolved: &Resolved, refused: Error) -> Error {
    let Resolved::Child {
        kind: attach @ (ChildKind::Macvlan | ChildKind::Ipvlan),
        parent: host,
    } = resolved
    else {
        return refused;
    };
    let (attach, netdev) = (attach.as_str(), &host.link.name);
    match rivals(node, &host.link) {
        Ok(Some((kind, whose))) if kind != attach => Error::new(
            Code::InvalidConfig,
            format!(
                "attach {attach} on {netdev} is refused: it carries {kind} children ({whose}), \
                 and a netdev carries children of one of these kinds"
            ),
        )
        .with_details(format!("set attach to {kind}, or name another netdev"))
        .with_details(refused.to_string()),
        _ => refused,
    }
}

/// The kind of children, `macvlan` or `ipvlan`, that a netdev of the host carries, and whose one of
/// them is. Children in pods are known from the journal, those on the host from sysfs.
fn rivals(node: &mut Node, link: &Link) -> Result<Option<(String, String)>, Error> {
    for name in uppers(&node.roots.sys, link) {
        let upper = link::get(&mut node.netns.socket, link::By::Name(name.as_bytes()))?;
        let kind = upper.and_then(|upper| upper.kind);
        if let Some(kind @ (InfoKind::MacVlan | InfoKind::IpVlan)) = kind {
            return Ok(Some((kind.to_string(), format!("{name} of the host"))));
        }
    }
    attachment_on(node, link.index)
}

/// Netdevs of the host's namespace that stand on one of it (`upper_*` in sysfs).
fn uppers(sys: &Path, link: &Link) -> Vec<String> {
    let entries = fs::read_dir(sys.join("class/net").join(&link.name));
    let names = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("upper_").map(str::to_owned)
    });
    names.collect()
}
