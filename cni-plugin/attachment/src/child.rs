//! Removing the child of an attachment, which its pod may have renamed or changed.

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
    error::Error,
    journal::{Part, Record, record::Child},
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

/// Removes the child of an attachment's part from its pod, if that is there, or from the host.
///
/// The kernel makes a child of IPoIB beside its master, so an ADD that was killed leaves it there. It
/// deletes other children with their namespace, but gives one of IPoIB to the host, down and under any
/// name (`netns_refund` of `ipoib_link_ops`), some time after the namespace is gone: `timeout` is how
/// long it may take.
pub(crate) fn remove(
    node: &mut Node,
    record: &Record,
    part: &Part,
    child: &Child,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<(), Error> {
    if let Some(pod) = pod {
        let host = &node.netns.namespace;
        let mut inside = pod.socket(host)?;
        let scope = LinkScope::of(&mut inside, pod, host)?;
        if delete(&mut inside, child, scope)? {
            return Ok(());
        }
    }
    let started = Instant::now();
    loop {
        if delete(&mut node.netns.socket, child, LinkScope::Host)? {
            return Ok(());
        }
        if pod.is_some() || child.kind != IPOIB || started.elapsed() >= timeout {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    let (kind, name, master) = (&child.kind, &part.ifname, &child.master);
    let owner = record.owner();
    if pod.is_some() {
        node.log.info(format_args!(
            "{kind} {name} on {master} is gone from {owner}; nothing to remove"
        ));
    } else if child.kind == IPOIB {
        node.log.warn(format_args!(
            "the IPoIB child of {owner} on {master} is not on the host {timeout:?} after its pod's \
             network namespace ended: its pod deleted it, or something still holds the namespace. If \
             the child appears later, delete it: ip link delete NAME (it had index {})",
            child.pod_index
        ));
    }
    Ok(())
}

/// Deletes the child in the namespace of `socket`. False where it is not there.
fn delete(socket: &mut Socket, child: &Child, scope: LinkScope) -> netlink::Result<bool> {
    match link::get(socket, By::Index(child.pod_index))? {
        Some(link) if is_it(&link, child, scope) => link::delete(socket, &link).map(|()| true),
        _ => Ok(false),
    }
}

/// Whether a link is the child: by its index, which was chosen for it and which its namespace cannot
/// change, its kind and the link below it. Pure.
pub(crate) fn is_it(link: &Link, child: &Child, scope: LinkScope) -> bool {
    let kind = link.kind.as_ref().map(ToString::to_string);
    // Where both indexes are one number and both links are in one namespace, or of IPoIB, the
    // kernel leaves it out (`nla_put_iflink()`).
    let on = link.parent.unwrap_or(link.index);
    // IPoIB does not report the namespace of the link below (`ipoib_get_link_ops()`).
    link.index == child.pod_index
        && kind.as_deref() == Some(&child.kind)
        && on == child.index
        && (scope.is_on_host(link) || child.kind == IPOIB && link.parent_netns.is_none())
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::InfoKind;

    use super::*;

    const POD: LinkScope = LinkScope::Pod { host: Some(0) };

    fn child(kind: &str, pod_index: u32) -> Child {
        Child {
            kind: kind.into(),
            master: "ens1f0".into(),
            index: 3,
            pod_index,
            warning: None,
        }
    }

    fn link(index: u32, kind: InfoKind) -> Link {
        Link {
            index,
            name: "evil".into(),
            kind: Some(kind),
            parent: Some(3),
            parent_netns: Some(0),
            ..Link::default()
        }
    }

    #[test]
    fn a_temporary_name_fits_and_is_of_one_interface() {
        let name = temporary_name(4_026_532_567, "net1");
        assert_eq!(name, "rdma-tmpb46d232");
        assert_ne!(name, temporary_name(4_026_532_568, "net1"));
        assert_ne!(name, temporary_name(4_026_532_567, "net2"));
    }

    #[test]
    fn another_index_kind_or_parent_is_not_the_child() {
        let ours = child("macvlan", 5);
        let of = |change: &dyn Fn(&mut Link)| {
            let mut one = link(5, InfoKind::MacVlan);
            change(&mut one);
            is_it(&one, &ours, POD)
        };
        assert!(of(&|_| {}), "whatever its name");
        assert!(!of(&|link| link.index = 6));
        assert!(!of(&|link| link.kind = Some(InfoKind::IpVlan)));
        assert!(!of(&|link| link.kind = None));
        assert!(!of(&|link| link.parent = Some(4)));
        assert!(!of(&|link| link.parent_netns = Some(1)));
        assert!(!of(&|link| link.parent_netns = None));
        let unnumbered = LinkScope::Pod { host: None };
        assert!(
            !is_it(&link(5, InfoKind::MacVlan), &ours, unnumbered),
            "no number, no link on one of the host"
        );
    }

    #[test]
    fn an_ipoib_child_is_known_by_the_little_that_is_reported() {
        let ours = child("ipoib", 3);
        let reported = |index| Link {
            parent_netns: None,
            parent: None,
            ..link(index, InfoKind::Ipoib)
        };
        for scope in [POD, LinkScope::Host] {
            assert!(is_it(&reported(3), &ours, scope));
            assert!(!is_it(&reported(4), &ours, scope));
        }
    }
}
