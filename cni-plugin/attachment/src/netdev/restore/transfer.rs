//! Moving a netdev from the pod to the host, and deleting the links that the pod made on it.

use std::{fs, slice};

use cni_wire::Code;
use netlink::{
    Name, Namespace, Socket,
    link::{self, By, Change, Link},
};

use netlink_packet_route::link::LinkFlags;

use super::Returned;
use crate::{
    error::Error,
    netdev::{identity::LinkScope, snapshot::Snapshot},
    node::Node,
};

/// How many names are tried where others are taken between reading and renaming.
const ATTEMPTS: u32 = 8;

/// What the names of netdevs begin with on their way, and while their own is taken. With seven digits
/// it has 15 bytes.
const TEMPORARY: &str = "rdma-dev";
/// For the kernel to find a number that is free (`dev_alloc_name()`).
const ANY_TEMPORARY: &[u8] = b"rdma-dev%d";

/// Moves the netdev out of the pod, if it is there.
pub(super) fn take_out(
    node: &mut Node,
    taken: &Snapshot,
    pod: &Namespace,
    report: &mut Returned,
) -> Result<Option<Link>, Error> {
    let mut inside = pod.socket(&node.netns.namespace)?;
    let links = link::list(&mut inside)?;
    let place = LinkScope::of(&mut inside, pod, &node.netns.namespace)?;
    let Some(link) = find(taken, &links, place, "in the pod")? else {
        return Ok(None);
    };
    remove_children(&mut inside, &links, link, report);
    let name = move_to_host(node, taken, &mut inside, link.clone(), report)?;
    confirmed(node, taken, &name, pod)
}

fn find<'a>(
    taken: &Snapshot,
    links: &'a [Link],
    place: LinkScope,
    location: &'static str,
) -> Result<Option<&'a Link>, Error> {
    let found = taken.identity.find(links, place);
    found.map_err(|cause| {
        let what = format!("{} is not returned: {location} {cause}", taken.name);
        Error::new(Code::State, what).with_details(
            "delete those of them that are not it, or end the pod's namespace, then try again",
        )
    })
}

/// Of the host's links the one that is the netdev, by what the kernel says of it in the host's namespace
/// and, of hardware, by the device that sysfs has below it.
pub(crate) fn find_on_host<'a>(
    node: &Node,
    taken: &Snapshot,
    links: &'a [Link],
) -> Result<Option<&'a Link>, Error> {
    let found = find(taken, links, LinkScope::Host, "on the host")?;
    let is_of = |link: &&Link, device: &str| {
        let netdev = node.roots.sys.join("class/net").join(&link.name);
        fs::read_link(netdev.join("device")).is_ok_and(|below| below.ends_with(device))
    };
    let device = taken.identity.bus_device.as_deref();
    Ok(found.filter(|link| device.is_none_or(|device| is_of(link, device))))
}

/// The netdev that came to the host as `name`. Another link, to which the pod gave the netdev's index
/// meanwhile, goes back to the pod.
fn confirmed(
    node: &mut Node,
    taken: &Snapshot,
    name: &Name,
    pod: &Namespace,
) -> Result<Option<Link>, Error> {
    let Some(arrived) = link::get(&mut node.netns.socket, By::Name(name.as_bytes()))? else {
        return Ok(None);
    };
    if find_on_host(node, taken, slice::from_ref(&arrived))?.is_some() {
        return Ok(Some(arrived));
    }
    let change = Change {
        netns: Some(pod),
        ..Change::name(ANY_TEMPORARY)
    };
    let what = format!("move {name}, which is not {}, back to the pod", taken.name);
    link::change(&mut node.netns.socket, what, arrived.index, &change).map_err(|e| {
        Error::from(e).with_details(format!(
            "{name} is a link of the pod that is left on the host: look at it with ip -d link show \
             {name}, delete it with ip link delete {name}, then try again"
        ))
    })?;
    Ok(None)
}

/// Whether the device below was unplugged, or a virtual link ended with its namespace. A link with
/// a peer lives as long as that.
pub(super) fn is_gone(node: &mut Node, taken: &Snapshot) -> netlink::Result<bool> {
    if let (Some(bus), Some(device)) = (&taken.bus, &taken.identity.bus_device) {
        let devices = node.roots.sys.join("bus").join(bus).join("devices");
        return Ok(devices.is_dir() && !devices.join(device).exists());
    }
    if let Some(peer) = taken.identity.peer() {
        let peer = link::get(&mut node.netns.socket, By::Index(peer))?;
        let kind = peer.and_then(|peer| peer.kind);
        return Ok(kind.map(|kind| kind.to_string()) != taken.identity.kind);
    }
    Ok(taken.identity.is_virtual())
}

/// Deletes what the pod built upon a netdev: a change of namespaces does not take the netdev away from
/// beneath a VLAN or a macvlan, so that the pod would be on the host's wire until it ends.
fn remove_children(inside: &mut Socket, links: &[Link], below: &Link, report: &mut Returned) {
    // Hardware cannot be deleted.
    let stands_on = |link: &&Link| link.kind.is_some() && link.stands_on(below.index);
    for child in links.iter().filter(stands_on) {
        report.attempt(link::delete(inside, child));
    }
}

/// Moves a netdev out of the pod, with its old index where that is free. Returns the name that it has
/// on the host: none that its pod chose, which may be another netdev's, or one for which the kernel
/// keeps no IP state.
fn move_to_host(
    node: &mut Node,
    taken: &Snapshot,
    inside: &mut Socket,
    mut link: Link,
    report: &mut Returned,
) -> netlink::Result<Name> {
    let mut change = Change {
        netns: Some(&node.netns.namespace),
        new_index: Some(taken.identity.index),
        ..Change::default()
    };
    let from = link.name.clone();
    let mut attempt = 0;
    loop {
        // Those of before are restored on the host.
        for altname in std::mem::take(&mut link.altnames) {
            report.attempt(link::remove_altname(inside, &link, &altname));
        }
        let name = temporary_name(&mut node.netns.socket, &link, attempt)?;
        // A link of the pod may have the name.
        if set_name(inside, &mut link, name.clone())? {
            let what = format!("move {from} to the host as {name}");
            match link::change(inside, what, link.index, &change) {
                Err(e) if e.is(libc::EBUSY) && change.new_index.is_some() => {
                    change.new_index = None;
                }
                // A name was taken between reading and moving.
                Err(e) if e.is(libc::EEXIST) && attempt < ATTEMPTS => {
                    let now = link::get(inside, By::Index(link.index))?;
                    link = now.unwrap_or(link);
                }
                done => return done.map(|()| name),
            }
        }
        attempt += 1;
    }
}

/// A name that no netdev of the host has.
fn temporary_name(host: &mut Socket, link: &Link, attempt: u32) -> netlink::Result<Name> {
    let mut number = link.index.wrapping_add(attempt);
    loop {
        let name = Name::from(format!("{TEMPORARY}{}", number % 10_000_000).as_str());
        if link::get(host, By::Name(name.as_bytes()))?.is_none() {
            return Ok(name);
        }
        number = number.wrapping_add(1);
    }
}

/// Gives a netdev its name; where another netdev has that, one that says nothing. A name that the pod
/// chose does not stay: a network may mean another netdev by it, which is away.
pub(super) fn rename(node: &mut Node, link: &mut Link, taken: &Snapshot, report: &mut Returned) {
    let why = match set_name(&mut node.netns.socket, link, taken.name.clone()) {
        Ok(true) => return,
        Ok(false) => format!("{} is the name of another netdev now", taken.name),
        Err(e) => e.to_string(),
    };
    for attempt in 0..ATTEMPTS {
        if link.name.as_bytes().starts_with(TEMPORARY.as_bytes()) {
            break;
        }
        let name = temporary_name(&mut node.netns.socket, link, attempt);
        let named = name.and_then(|name| set_name(&mut node.netns.socket, link, name));
        report.attempt(named.map(drop));
    }
    report.warnings.push(format!(
        "{why}; {} is called {} until it can be renamed",
        taken.name, link.name
    ));
    report.is_misnamed = true;
}

/// Renames a netdev. False when another one has the name.
fn set_name(socket: &mut Socket, link: &mut Link, name: Name) -> netlink::Result<bool> {
    // Its own alternative name may be the one it is to have.
    if link.altnames.contains(&name) {
        link::remove_altname(socket, link, &name)?;
        link.altnames.retain(|altname| *altname != name);
    }
    let what = format!("rename {} to {name}", link.name);
    match link::change(socket, what, link.index, &Change::name(name.as_bytes())) {
        Ok(()) => link.name = name,
        Err(e) if e.is(libc::EEXIST) => return Ok(false),
        // Before Linux 6.2 no link that is up is renamed, and flags change last (`do_setlink()`).
        Err(e) if e.is(libc::EBUSY) && link.is_up() => {
            let what = format!("set {} down", link.name);
            link::change(socket, what, link.index, &Change::down())?;
            link.flags -= LinkFlags::Up;
            return set_name(socket, link, name);
        }
        Err(e) => return Err(e),
    }
    Ok(true)
}
