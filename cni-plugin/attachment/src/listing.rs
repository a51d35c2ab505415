//! What this node's pods have of it, for people: by the journal, and by the kernel whether it is so.

use std::collections::BTreeSet;
use std::path::Path;

use netlink::{
    Namespace,
    link::{self, Link},
};
use node::identity::is_other_boot;

use crate::{
    addresses,
    detach::living,
    error::Error,
    journal::{Key, Record},
    netdev::identity::LinkScope,
    node::Node,
    part::Part,
    reclaim::{Netns, in_host_namespace, netns},
};

/// Whether an interface is in its pod, by the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    Present,
    Gone,
    /// Not known; the reason.
    Unknown(String),
}

/// One interface of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// `namespace/name`, where the runtime said it.
    pub pod: Option<String>,
    /// Name of the interface in the pod.
    pub interface: String,
    pub network: String,
    /// `CNI_CONTAINERID`, which its leases have too.
    pub container: String,
    /// `CNI_IFNAME`, which its leases have: another name than `interface` with `devices: all`.
    pub ifname: String,
    /// Which of the attachment's leases are this interface's, by their numbers; `None` for all.
    pub lease_numbers: Option<BTreeSet<usize>>,
    /// `move`, `macvlan`, …
    pub kind: Option<String>,
    /// The host's netdev: the moved one, or the child's master.
    pub netdev: Option<String>,
    /// The HCAs of a moved netdev, as units name them, and those that its slots are bound to.
    pub hcas: BTreeSet<String>,
    pub netns: String,
    /// `alive`, `gone` or `unknown`.
    pub netns_state: &'static str,
    /// `None` where the pod should not have it: its namespace is gone, the netdev has returned, or the
    /// interface is another plugin's.
    pub presence: Option<Presence>,
    /// Unix seconds of the ADD.
    pub created: u64,
    /// Why the interface may have no carrier, where the ADD knew that.
    pub warning: Option<String>,
}

impl Attachment {
    /// What a record says, compared with the kernel, one entry for each interface, and why it is not
    /// known which of them has which address. Reads the links of the pod.
    #[must_use]
    pub fn all_of(record: &Record, node: &mut Node) -> (Vec<Self>, Option<cni_wire::Error>) {
        let (netns_state, unknown) = fate(record, &node.roots.proc, &node.boot);
        let links = match netns_state {
            "gone" => None,
            _ => Some(links(node, record).map_err(|why| unknown.map_or(why, str::to_owned))),
        };
        let (positions, unknown) = match addresses::positions(node, record) {
            Ok(positions) => (positions, None),
            Err(error) => (Some(Vec::new()), Some(error)),
        };
        let of = |(interface, part): (usize, &Part)| Self {
            pod: record.pod.clone(),
            interface: part.name().to_owned(),
            network: record.network.clone(),
            container: record.container_id.clone(),
            ifname: record.ifname.clone(),
            lease_numbers: positions.as_ref().map(|positions| {
                let own = positions.iter().enumerate();
                let own = own.filter(|(_, position)| **position == interface);
                own.map(|(number, _)| number).collect()
            }),
            kind: Some(part.attach().to_owned()),
            netdev: part.netdev(),
            hcas: part.hcas().map(str::to_owned).collect(),
            netns: record.netns.path.clone(),
            netns_state,
            presence: links.as_ref().and_then(|links| presence(part, links)),
            created: record.created,
            warning: part.child().and_then(|child| child.warning.clone()),
        };
        let all = record.parts.iter().enumerate();
        (all.map(of).collect(), unknown)
    }
}

/// What became of the attachment's namespace; where that is not known, why.
fn fate(record: &Record, proc: &Path, boot: &str) -> (&'static str, Option<&'static str>) {
    if is_other_boot(&record.boot, boot) {
        return ("gone", None);
    }
    match netns(&record.netns, proc) {
        Netns::Present => ("alive", None),
        Netns::Gone => ("gone", None),
        Netns::Unknown(why) => ("unknown", Some(why)),
    }
}

/// The links of a pod as the host's socket reports them, with whose they are.
type PodLinks = (Vec<Link>, LinkScope);

fn links(node: &mut Node, record: &Record) -> Result<PodLinks, String> {
    in_host_namespace(&node.roots)?;
    let pod = living(record).map_err(|error| error.to_string())?;
    let gone = || format!("{} is not the pod's network namespace", record.netns.path);
    read_links(node, &pod.ok_or_else(gone)?).map_err(|error| error.to_string())
}

fn read_links(node: &mut Node, pod: &Namespace) -> netlink::Result<PodLinks> {
    let (socket, host) = (&mut node.netns.socket, &node.netns.namespace);
    let number = link::namespace_number(socket, pod)?;
    let links = link::list_in(socket, number)?;
    // After the answer the host's namespace has a number, if a link of the pod is on one of the host.
    Ok((links, LinkScope::of(socket, pod, host)?))
}

/// Whether a part's interface is among the links of its pod. Pure.
fn presence(part: &Part, links: &Result<PodLinks, String>) -> Option<Presence> {
    if part.moved().is_some_and(|moved| moved.returned.is_some()) {
        return None;
    }
    let (links, scope) = match links {
        Ok((links, scope)) => (links, *scope),
        Err(_) if part.interface().is_none() => return None,
        Err(why) => return Some(Presence::Unknown(why.clone())),
    };
    let found = match part {
        Part::Move(moved) => {
            let found = moved.host.identity.find(links, scope);
            found.map(|link| link.is_some())
        }
        Part::Child(child) => Ok(links.iter().any(|link| child.is(link, scope))),
        Part::RdmaOnly(_) => return None,
    };
    Some(match found {
        Ok(true) => Presence::Present,
        Ok(false) => Presence::Gone,
        Err(several) => Presence::Unknown(several.to_string()),
    })
}

/// Records, and what is to be said of those that cannot be used.
pub type Records = (Vec<(Key, Record)>, Vec<String>);

/// All attachments of a node whose record can be read, oldest first, and what is to be said of the
/// others.
pub fn records(node: &Node) -> Result<Records, Error> {
    let (mut records, unreadable) = node.journal.records()?;
    records.sort_by(|(_, a), (_, b)| (a.created, &a.network).cmp(&(b.created, &b.network)));
    let unreadable = unreadable.iter().map(|(_, error)| error.to_string());
    Ok((records, unreadable.collect()))
}
