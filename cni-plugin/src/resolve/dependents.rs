//! What stands on a netdev of the host: a netdev that others stand on is not moved.
//!
//! A child of another pod would receive the frames of the pod that the netdev went to, and links of
//! the host (a VXLAN, a VLAN) would leave the node with it. Children in pods' namespaces are no
//! business of the host's netlink, so they are known from the journal where this plugin made them,
//! and otherwise by reading the namespaces that lie where the runtime keeps the pod's own, and those
//! of processes.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use attachment::{detach::living, journal::record::Child, namespaces, node::Node};
use hca::{HcaId, Host, PciAddress};
use netlink::{
    Namespace,
    link::{self, Link},
};
use netlink_packet_route::link::InfoKind;

use super::HostLink;
use crate::error::Error;

/// Something that stands on a netdev.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dependent {
    /// A link of the host, or of a namespace that is named by its path.
    Link {
        /// `macvlan`, `vxlan`, ...
        kind: String,
        /// Its name.
        name: String,
        /// The path of its namespace; none for the host's.
        netns: Option<PathBuf>,
    },
    /// A child that this plugin made.
    Attachment {
        /// The kernel's name of the child's kind, as `macvlan`.
        kind: String,
        /// Whose it is, as messages name it.
        owner: String,
    },
    /// Perhaps a link in a network namespace that cannot be read.
    Unreadable {
        /// The path of the namespace.
        netns: PathBuf,
        /// Why it cannot be read.
        cause: String,
    },
    /// The virtual functions of a physical one.
    VirtualFunctions {
        /// How many there are.
        count: u32,
    },
}

impl fmt::Display for Dependent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dependent::Link { kind, name, netns } => {
                write!(f, "{kind} {name} stands on it")?;
                match netns {
                    Some(netns) => write!(f, " (in network namespace {})", netns.display()),
                    None => f.write_str(" (on the host)"),
                }
            }
            Dependent::Attachment { kind, owner } => {
                write!(f, "a {kind} of {owner} stands on it")
            }
            Dependent::Unreadable { netns, cause } => write!(
                f,
                "something may stand on it: the links in network namespace {} cannot be read ({cause})",
                netns.display()
            ),
            Dependent::VirtualFunctions { count } => {
                write!(f, "it is a PF with {count} virtual functions")
            }
        }
    }
}

impl Dependent {
    /// How a user can move the netdev all the same, or another.
    pub fn remedy(&self) -> &'static str {
        match self {
            Dependent::Unreadable { .. } => {
                "try again; if the namespace stays so, end the pod or process that it belongs to, or \
                 move another netdev"
            }
            _ => {
                "the pod would receive the frames of what stands on it; remove that first, or move \
                 another netdev"
            }
        }
    }
}

/// What stands on a netdev of the host. The first of each sort is enough.
///
/// # Errors
/// The host's links, its journal or sysfs cannot be read.
pub(super) fn of(
    node: &mut Node,
    nic: &HostLink,
    pod: &Namespace,
) -> Result<Vec<Dependent>, Error> {
    let mut dependents = Vec::new();
    let links = link::list(&mut node.netns.socket)?;
    dependents.extend(
        links
            .iter()
            .find(|link| link.stands_on(nic.link.index, None))
            .map(|link| described(link, None)),
    );
    for hca in &nic.hcas {
        if let HcaId::Pci(address) = hca {
            dependents.extend(virtual_functions(&node.roots, *address));
        }
    }
    dependents.extend(attachment_on(node, nic.link.index)?);
    if dependents.is_empty() {
        dependents.extend(in_other_namespaces(node, &nic.link, pod));
    }
    Ok(dependents)
}

fn described(link: &Link, netns: Option<&Path>) -> Dependent {
    let kind = link.kind.as_ref().map(ToString::to_string);
    Dependent::Link {
        kind: kind.unwrap_or_else(|| "link".to_owned()),
        name: link.name.to_string(),
        netns: netns.map(Path::to_owned),
    }
}

/// `sriov_numvfs` (drivers/pci/iov.c); a function without it has none.
fn virtual_functions(roots: &Host, pci: PciAddress) -> Option<Dependent> {
    let file = roots
        .sys
        .join("bus/pci/devices")
        .join(pci.to_string())
        .join("sriov_numvfs");
    let count: u32 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (count > 0).then_some(Dependent::VirtualFunctions { count })
}

/// A child that this plugin made on the netdev, in a namespace that is still there.
fn attachment_on(node: &Node, index: u32) -> Result<Option<Dependent>, Error> {
    for (_, record) in node.records()? {
        let on_it = |child: &&Child| !child.in_pod && child.index == index;
        let mut children = record.parts.iter().filter_map(|part| part.child.as_ref());
        let Some(child) = children.find(on_it) else {
            continue;
        };
        if node.is_of_this_boot(&record.boot) && living(&record)?.is_some() {
            return Ok(Some(Dependent::Attachment {
                kind: child.kind.clone(),
                owner: record.owner(),
            }));
        }
    }
    Ok(None)
}

/// A link on the netdev in another namespace of the node.
fn in_other_namespaces(node: &Node, below: &Link, pod: &Namespace) -> Option<Dependent> {
    namespaces::all(node, pod).find_map(|other| match link_in(node, &other, below) {
        Ok(link) => Some(described(&link?, Some(other.path()))),
        Err(cause) => Some(Dependent::Unreadable {
            netns: other.path().to_owned(),
            cause: cause.to_string(),
        }),
    })
}

fn link_in(node: &Node, other: &Namespace, below: &Link) -> netlink::Result<Option<Link>> {
    let mut socket = other.socket(&node.netns.namespace)?;
    // A namespace that has no number for the host's has no link that stands on one of it, but for
    // IPoIB.
    let number = link::known_number(&mut socket, &node.netns.namespace)?;
    if number.is_none() && !below.is_infiniband() {
        return Ok(None);
    }
    let mut links = link::list(&mut socket)?.into_iter();
    Ok(links.find(|link| {
        let stands_there = number.is_some() && link.stands_on(below.index, number);
        stands_there || link.is_partition_of(below)
    }))
}

/// The kind of children, `macvlan` or `ipvlan`, that a netdev of the host carries, and whose one of
/// them is; none where it has none that is known.
///
/// Children in pods are known from the journal, those on the host from sysfs.
///
/// # Errors
/// The journal cannot be listed, the kernel does not answer.
pub fn rivals(node: &mut Node, link: &Link) -> Result<Option<(String, String)>, Error> {
    for name in uppers(&node.roots.sys, link) {
        let upper = link::get(&mut node.netns.socket, link::By::Name(name.as_bytes()))?;
        let kind = upper.and_then(|upper| upper.kind);
        if let Some(kind @ (InfoKind::MacVlan | InfoKind::IpVlan)) = kind {
            return Ok(Some((kind.to_string(), format!("{name} of the host"))));
        }
    }
    Ok(match attachment_on(node, link.index)? {
        Some(Dependent::Attachment { kind, owner }) => Some((kind, owner)),
        _ => None,
    })
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
