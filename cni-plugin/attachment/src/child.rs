//! Removing the child of an attachment, which its pod may have renamed, changed or moved.

use std::{
    hash::Hasher,
    thread,
    time::{Duration, Instant},
};

use fnv::FnvHasher;
use netlink::{
    Namespace, Socket,
    link::{self, By, Link},
};

use crate::{
    detach::living,
    error::{Error, Kind},
    journal::{Part, Record, record::Child},
    namespaces::{self, Search},
    netdev::identity::LinkScope,
    node::Node,
};

/// [`Child::kind`] of a partition of an InfiniBand port.
pub const IPOIB: &str = "ipoib";

/// The name of a child of this pod until it gets its own, where it cannot be made with that: 15 bytes.
pub fn temporary_name(netns_inode: u64, ifname: &str) -> String {
    let mut hasher = FnvHasher::default();
    hasher.write(&netns_inode.to_le_bytes());
    hasher.write(ifname.as_bytes());
    format!("rdma-tmp{:07x}", hasher.finish() & 0xfff_ffff)
}

/// Removes the child of a killed ADD that was made beside its master on the host and not moved to its pod.
pub(crate) fn remove_unmoved(node: &mut Node, record: &Record, part: &Part) -> Result<(), Error> {
    let unfinished = |child: &&Child| child.pod_index.is_none();
    let Some(child) = part.child.as_ref().filter(unfinished) else {
        return Ok(());
    };
    let name = temporary_name(record.netns.inode, &part.ifname);
    let socket = &mut node.netns.socket;
    match link::get(socket, By::Name(name.as_bytes()))? {
        Some(link) if is_like(&link, child, LinkScope::Host) => Ok(link::delete(socket, &link)?),
        _ => Ok(()),
    }
}

/// Removes the child of an attachment's part: from its pod, or from the namespace that it was moved
/// to from there. Where it is not known again, all links like it go that are of no other attachment:
/// a pod makes such links by its own child alone.
///
/// `inside` is a socket of `pod`.
///
/// # Errors
/// The kernel's refusal; [`Kind::ChildNowhere`] where it may be in a namespace that is not found.
pub(crate) fn remove(
    node: &Node,
    record: &Record,
    part: &Part,
    child: &Child,
    pod: &Namespace,
    inside: &mut Socket,
) -> Result<(), Error> {
    let links = link::list(inside)?;
    let (host, proc) = (&node.netns.namespace, &node.roots.proc);
    let scope = LinkScope::of(inside, pod, host)?;
    let temporary = temporary_name(record.netns.inode, &part.ifname);
    if let Some(link) = find(&links, child, scope, [&part.ifname, &temporary]) {
        return Ok(link::delete(inside, link)?);
    }
    // Cut off before it was made.
    if child.pod_index.is_none() {
        return Ok(());
    }
    let others = others(node, record, part)?;
    delete_alike(inside, &links, child, scope, &others)?;
    let found = namespaces::search_reached(host, proc, pod, inside, |other, socket| {
        let scope = LinkScope::of(socket, other, host)?;
        let links = link::list(socket)?;
        match by_identity(&links, child, scope) {
            Some(link) => link::delete(socket, link).map(|()| true),
            None => delete_alike(socket, &links, child, scope, &others).map(|()| false),
        }
    })?;
    match found {
        Search::Found => Ok(()),
        Search::Nowhere => {
            node.log.info(format_args!(
                "the pod deleted {} {} on {} of {}",
                child.kind,
                part.ifname,
                child.master,
                record.owner()
            ));
            Ok(())
        }
        Search::Unknown => Err(nowhere(record, part, child)),
    }
}

/// That a child may be in a namespace that is not found.
pub(crate) fn nowhere(record: &Record, part: &Part, child: &Child) -> Error {
    let (kind, name, master) = (&child.kind, &part.ifname, &child.master);
    let what = format!(
        "{kind} {name} on {master} of {} is not in its pod, which moved links to a network namespace \
         without a thread",
        record.owner()
    );
    Error::of(Kind::ChildNowhere(name.clone()), what).with_details(REMEDY)
}

/// For an attachment of which something is not found.
pub(crate) const REMEDY: &str = "end what holds the network namespaces that the pod made, and the daemon undoes the attachment; if \
     the interface is known to be gone, remove the record of the attachment from stateDir/attachments \
     and release its addresses with rdma-ipam release";

/// The interfaces of other attachments of the same pod, and other ones of this attachment: the index
/// in the pod and the MAC address of each.
fn others(node: &Node, record: &Record, part: &Part) -> Result<Vec<Interface>, Error> {
    let records = node.records()?;
    let parts = records
        .iter()
        .filter(|(_, other)| other.netns == record.netns)
        .flat_map(|(_, other)| other.parts.iter().map(move |part| (other, part)));
    let is_another = |(other, one): &(&Record, &Part)| {
        other.network != record.network || other.ifname != record.ifname || *one != part
    };
    Ok(parts
        .filter(is_another)
        .map(|(_, part)| interface(part))
        .collect())
}

/// Index in its pod and MAC address, where they are known.
type Interface = (Option<u32>, Option<String>);

fn interface(part: &Part) -> Interface {
    match (&part.child, &part.moved) {
        (Some(child), _) => (child.pod_index, child.mac.clone()),
        (None, Some(moved)) => (None, Some(moved.mac().to_owned())),
        (None, None) => (None, None),
    }
}

/// Whether a link is one of these interfaces. Pure.
fn is_one_of(interfaces: &[Interface], link: &Link) -> bool {
    let mac = link.mac_text();
    let is_it =
        |(index, known): &Interface| *index == Some(link.index) || known.as_ref() == Some(&mac);
    interfaces.iter().any(is_it)
}

/// Deletes the links like a child that are none of `others`.
fn delete_alike(
    socket: &mut Socket,
    links: &[Link],
    child: &Child,
    scope: LinkScope,
    others: &[Interface],
) -> netlink::Result<()> {
    for link in links.iter().filter(|link| is_like(link, child, scope)) {
        if !is_one_of(others, link) {
            link::delete(socket, link)?;
        }
    }
    Ok(())
}

/// Removes the child of a pod whose namespace is gone from the namespace of a thread that it was moved
/// to. It is known by the MAC address it was given: its index is in each namespace another link's. Another
/// pod's interface can have the same one by now.
pub(crate) fn remove_moved(node: &Node, child: &Child) -> Result<(), Error> {
    if child.kind == IPOIB || child.pod_index.is_none() || child.mac.is_none() {
        return Ok(());
    }
    let by_mac = Child {
        pod_index: None,
        ..child.clone()
    };
    let host = &node.netns.namespace;
    let (records, _) = node.journal.records()?;
    namespaces::search_outside(host, &node.roots.proc, None, |other| {
        let id = other.id();
        let mut of_pod = Vec::new();
        for (_, record) in &records {
            // The number of a namespace that ended can be another one's.
            if (record.netns.device, record.netns.inode) == (id.device, id.inode)
                && living(record)?.is_some()
            {
                of_pod.extend(record.parts.iter().map(interface));
            }
        }
        let mut socket = other.socket(host)?;
        let scope = LinkScope::of(&mut socket, other, host)?;
        if scope == (LinkScope::Pod { host: None }) {
            return Ok(false);
        }
        let mut links = link::list(&mut socket)?;
        links.retain(|link| !is_one_of(&of_pod, link));
        match by_identity(&links, &by_mac, scope) {
            Some(link) => Ok(link::delete(&mut socket, link).map(|()| true)?),
            None => Ok::<_, Error>(false),
        }
    })?;
    Ok(())
}

/// Removes the child of a pod whose namespace is gone. The kernel deletes children with their
/// namespace, but gives one of IPoIB to the host, down and under any name (`netns_refund` of
/// `ipoib_link_ops`), some time after the namespace is gone: `timeout` is how long it may take. True
/// when it was there.
pub(crate) fn remove_returned(
    node: &mut Node,
    record: &Record,
    child: &Child,
    timeout: Duration,
) -> Result<bool, Error> {
    if child.kind != IPOIB || child.pod_index.is_none() {
        return Ok(false);
    }
    let started = Instant::now();
    loop {
        let links = link::list(&mut node.netns.socket)?;
        if let Some(link) = find_returned(&links, child) {
            link::delete(&mut node.netns.socket, link)?;
            return Ok(true);
        }
        if started.elapsed() >= timeout {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    node.log.warn(format_args!(
        "the IPoIB child of {} on {} is not on the host {timeout:?} after its pod's network namespace \
         ended: its pod deleted it, or something still holds the namespace. If the child appears \
         later, delete it: ip link delete NAME (it had index {})",
        record.owner(),
        child.master,
        child.pod_index.unwrap_or_default()
    ));
    Ok(false)
}

/// The child among the links of the host, by its index and by the queue pair that its address begins
/// with: an administrator's child of the same port and partition has others. Pure.
fn find_returned<'a>(links: &'a [Link], child: &Child) -> Option<&'a Link> {
    let queue_pair = |mac: &str| mac.get(..11).map(str::to_owned);
    links.iter().find(|link| {
        let mac = link.mac_text();
        is_like(link, child, LinkScope::Host)
            && child.pod_index == Some(link.index)
            && (child.mac.as_deref()).is_none_or(|known| queue_pair(known) == queue_pair(&mac))
    })
}

/// The child among the links of its pod; `names` are its own and its temporary one. Pure.
fn find<'a>(
    links: &'a [Link],
    child: &Child,
    scope: LinkScope,
    [name, temporary]: [&str; 2],
) -> Option<&'a Link> {
    let found = by_identity(links, child, scope);
    if found.is_some() || child.pod_index.is_some() {
        return found;
    }
    // Killed before the index was written: by name, and where it was not named yet by the name that it
    // has until then. One with a MAC address of its own is known by that.
    let mut candidates = links.iter().filter(|link| is_like(link, child, scope));
    let named = candidates.clone().find(|link| link.name == *name);
    named.or_else(|| candidates.find(|l| child.mac.is_none() && l.name == *temporary))
}

/// By the index that it had in its pod, which a change of namespaces keeps where it is free, else by
/// the MAC address that it was given, which no two children of a link have. Pure.
fn by_identity<'a>(links: &'a [Link], child: &Child, scope: LinkScope) -> Option<&'a Link> {
    let mut candidates = links.iter().filter(|link| is_like(link, child, scope));
    let by_index = candidates
        .clone()
        .find(|link| child.pod_index == Some(link.index));
    by_index.or_else(|| {
        candidates.find(|link| {
            let mac = link.mac_text();
            child.mac.as_ref() == Some(&mac)
        })
    })
}

/// Whether a link is of the child's kind and stands on the child's master. Pure.
fn is_like(link: &Link, child: &Child, scope: LinkScope) -> bool {
    let kind = link.kind.as_ref().map(ToString::to_string);
    // Where both indexes are one number and both links are in one namespace, or of IPoIB, the
    // kernel leaves it out (`nla_put_iflink()`).
    let on = link.parent.unwrap_or(link.index);
    // IPoIB does not report the namespace of the link below (`ipoib_get_link_ops()`).
    kind.as_deref() == Some(&child.kind)
        && on == child.index
        && (scope.is_on_host(link) || child.kind == IPOIB && link.parent_netns.is_none())
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    const POD: LinkScope = LinkScope::Pod { host: Some(0) };
    const NAMES: [&str; 2] = ["net1", "rdma-tmp77"];

    fn child(pod_index: Option<u32>, mac: Option<&str>) -> Child {
        Child {
            kind: "macvlan".into(),
            master: "ens1f0".into(),
            index: 3,
            pod_index,
            strayed: false,
            warning: None,
            mac: mac.map(str::to_owned),
        }
    }

    fn link(index: u32, name: &str, mac: u8) -> Link {
        Link {
            index,
            name: name.into(),
            mac: vec![2, 0, 0, 0, 0, mac],
            kind: Some(InfoKind::MacVlan),
            parent: Some(3),
            parent_netns: Some(0),
            ..Link::default()
        }
    }

    fn found(links: &[Link], child: &Child) -> Option<u32> {
        find(links, child, POD, NAMES).map(|link| link.index)
    }

    #[test]
    fn the_index_counts_before_mac_and_name() {
        let links = [link(5, "net1", 1), link(6, "evil", 9)];
        let ours = child(Some(6), Some("02:00:00:00:00:01"));
        assert_eq!(found(&links, &ours), Some(6));
        // It was away and came back, and its index was taken.
        let ours = child(Some(7), Some("02:00:00:00:00:09"));
        assert_eq!(found(&links, &ours), Some(6));
        let gone = child(Some(7), Some("02:00:00:00:00:08"));
        assert_eq!(found(&links, &gone), None, "a name proves nothing");
    }

    #[test]
    fn without_an_index_a_child_is_found_by_mac_or_name() {
        let links = [link(5, "net1", 1), link(6, "evil", 9)];
        assert_eq!(
            found(&links, &child(None, Some("02:00:00:00:00:09"))),
            Some(6)
        );
        assert_eq!(found(&links, &child(None, None)), Some(5));
        let unnamed = [link(8, "rdma-tmp77", 1)];
        assert_eq!(found(&unnamed, &child(None, None)), Some(8));
        assert_eq!(
            found(&unnamed, &child(None, Some("02:00:00:00:00:09"))),
            None
        );
    }

    #[test]
    fn a_temporary_name_fits_and_is_of_one_interface() {
        let name = temporary_name(4_026_532_567, "net1");
        assert_eq!(name, "rdma-tmpb46d232");
        assert_ne!(name, temporary_name(4_026_532_568, "net1"));
        assert_ne!(name, temporary_name(4_026_532_567, "net2"));
    }

    #[test]
    fn another_kind_or_another_parent_is_not_the_child() {
        let ours = child(Some(5), None);
        let of = |change: &dyn Fn(&mut Link)| {
            let mut one = link(5, "net1", 1);
            change(&mut one);
            found(&[one], &ours)
        };
        assert_eq!(of(&|_| {}), Some(5));
        assert_eq!(of(&|link| link.kind = Some(InfoKind::IpVlan)), None);
        assert_eq!(of(&|link| link.kind = None), None);
        assert_eq!(of(&|link| link.parent = Some(4)), None);
        assert_eq!(of(&|link| link.parent_netns = Some(1)), None);
        assert_eq!(of(&|link| link.parent_netns = None), None);
        let unnumbered = find(
            &[link(5, "net1", 1)],
            &ours,
            LinkScope::Pod { host: None },
            NAMES,
        )
        .is_some();
        assert!(!unnumbered, "no number, no link on one of the host");
    }

    #[test]
    fn an_ipoib_child_is_found_by_the_little_that_is_reported() {
        let ours = Child {
            kind: "ipoib".into(),
            ..child(Some(3), None)
        };
        let mut one = link(3, "net1", 1);
        one.kind = Some(InfoKind::Ipoib);
        one.parent_netns = None;
        one.parent = None;
        assert_eq!(found(&[one.clone()], &ours), Some(3));
        one.index = 4;
        assert_eq!(found(&[one], &ours), None);
    }

    #[test]
    fn a_returned_ipoib_child_is_not_taken_for_another_one() {
        let address = |queue_pair: u8, guid: u8| {
            let mut mac = [0; 20];
            (mac[3], mac[19]) = (queue_pair, guid);
            mac.to_vec()
        };
        let returned = Link {
            kind: Some(InfoKind::Ipoib),
            mac: address(0x13, 1),
            parent_netns: None,
            ..link(7, "dev7", 0)
        };
        let ours = Child {
            kind: IPOIB.into(),
            ..child(
                Some(7),
                Some(&hca::MacAddress::new(address(0x13, 2)).to_string()),
            )
        };
        // The GUID of a virtual function can be changed while a pod has the child.
        assert_eq!(
            find_returned(std::slice::from_ref(&returned), &ours),
            Some(&returned),
            "whatever its name"
        );
        let other_index = Link {
            index: 8,
            ..returned.clone()
        };
        let other_queue_pair = Link {
            mac: address(0x14, 1),
            ..returned.clone()
        };
        let other_parent = Link {
            parent: Some(4),
            ..returned.clone()
        };
        let a_vlan = Link {
            kind: Some(InfoKind::Vlan),
            ..returned
        };
        let others = [other_index, other_queue_pair, other_parent, a_vlan];
        assert_eq!(find_returned(&others, &ours), None);
    }
}
