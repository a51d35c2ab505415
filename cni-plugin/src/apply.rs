//! Making what a plan says: every change that an ADD makes outside the journal and the lease store.
//! What fails here is undone from the journal's record, not step by step.

use std::time::{Duration, Instant};

use attachment::{
    child,
    netdev::{
        identity::{Identity, LinkScope},
        restore,
    },
    node::HostNetns,
};
use cni_wire::Code;
use hca::MacAddress;
use netlink::{
    Namespace, Socket,
    link::{self, By, Change, Child, Link, NewChild},
};

use crate::{error::Error, plan::Plan, resolve::Resolved};

/// Makes the interface of a plan; it is in the pod, down and without addresses. None where the plan
/// has none.
///
/// # Errors
/// The kernel's refusal, with what can be done about it.
pub fn make(
    host: &mut HostNetns,
    pod: &Namespace,
    inside: &mut Socket,
    plan: &Plan,
) -> Result<Option<Link>, Error> {
    let (name, mtu) = (plan.ifname.as_str(), plan.config.mtu);
    let made = match (&plan.resolved, &plan.snapshot, &plan.child) {
        (Resolved::Move(nic), Some(snapshot), _) => {
            let nic = &nic.link;
            // The driver makes IPoIB netdevs anew when their RDMA device has moved.
            if nic.is_infiniband() && !plan.rdma.is_empty() {
                return take_anew(host, pod, inside, plan, &snapshot.identity).map(Some);
            }
            let moved = move_in(host, pod, inside, nic, name)?;
            // A VF may have it by its PF.
            let mac = plan.mac.as_ref().map(MacAddress::bytes);
            let mac = mac.filter(|mac| moved.mac != *mac);
            if mtu.is_some() || mac.is_some() {
                let change = Change {
                    mtu,
                    mac,
                    ..Change::default()
                };
                let what = format_args!("set MTU and MAC of {name}");
                link::change(inside, what, moved.index, &change)?;
            }
            moved
        }
        (Resolved::Child { parent, .. }, _, Some(child)) => {
            let new = NewChild {
                name,
                index: plan.index,
                child: child.clone(),
                parent: parent.link.index,
                parent_netns: None,
                mtu,
                mac: plan.mac.as_ref().map(|mac| mac.bytes().to_vec()),
            };
            let made = make_child(host, pod, inside, &new, &parent.link)?;
            // The driver of IPoIB gives a new child an MTU by its mode, whatever was asked for.
            if mtu.is_some_and(|mtu| mtu != made.mtu) {
                set_mtu(inside, &made, name, mtu)?;
            }
            made
        }
        _ => return Ok(None),
    };
    Ok(Some(made))
}

fn set_mtu(inside: &mut Socket, link: &Link, name: &str, mtu: Option<u32>) -> Result<(), Error> {
    let change = Change {
        mtu,
        ..Change::default()
    };
    let what = format_args!("set MTU of {name}");
    Ok(link::change(inside, what, link.index, &change)?)
}

fn make_child(
    host: &mut HostNetns,
    pod: &Namespace,
    inside: &mut Socket,
    new: &NewChild<'_>,
    parent: &Link,
) -> Result<Link, Error> {
    let refused = |e: netlink::Error| explain(&e, new, parent);
    let temporary = child::temporary_name(pod.id().inode, new.name);
    // The kernel makes IPoIB children beside their parent only.
    if let Child::Ipoib { .. } = new.child {
        let unnamed = NewChild {
            name: &temporary,
            ..new.clone()
        };
        let made = link::create(&mut host.socket, &unnamed).map_err(refused)?;
        let made = made.ok_or_else(|| vanished(new.name))?;
        return move_child(host, pod, inside, &made, new.name);
    }
    // From inside the pod: the final name at once, whatever the host calls its own.
    let mut new = NewChild {
        parent_netns: Some(link::namespace_number(inside, &host.namespace)?),
        ..new.clone()
    };
    let name = new.name;
    let made = match link::create(inside, &new) {
        // Kernels before 6.15 make a link in its parent's namespace and move it from there
        // (`rtnl_newlink()`), so a name of the host's stands in the way even of a link asked for
        // from inside the pod. Made under an unused name, it is named where it belongs.
        Err(e) if e.is(libc::EEXIST) => {
            new.name = &temporary;
            let made = link::create(inside, &new).map_err(refused)?;
            let made = made.ok_or_else(|| vanished(name))?;
            let what = format!("name {temporary} {name}");
            link::change(inside, what, made.index, &Change::name(name.as_bytes()))?;
            return named(inside, name);
        }
        made => made,
    };
    made.map_err(refused)?.ok_or_else(|| vanished(name))
}

/// A child that was made beside its parent under an unused name.
fn move_child(
    host: &mut HostNetns,
    pod: &Namespace,
    inside: &mut Socket,
    made: &Link,
    name: &str,
) -> Result<Link, Error> {
    let change = Change {
        netns: Some(pod),
        ..Change::name(name.as_bytes())
    };
    let what = format!("move {} into {} as {name}", made.name, pod.path().display());
    if let Err(e) = link::change(&mut host.socket, what, made.index, &change) {
        let first = Error::from(e);
        return Err(match link::delete(&mut host.socket, made) {
            Ok(()) => first,
            Err(e) => first.with_details(e.to_string()),
        });
    }
    named(inside, name)
}

fn named(inside: &mut Socket, name: &str) -> Result<Link, Error> {
    link::get(inside, By::Name(name.as_bytes()))?.ok_or_else(|| vanished(name))
}

fn vanished(name: &str) -> Error {
    Error::new(Code::Kernel, format!("{name} went away while it was made"))
}

/// What the person on call can do about a refusal of the kernel.
fn explain(error: &netlink::Error, new: &NewChild<'_>, on: &Link) -> Error {
    let explained = Error::new(Code::Kernel, format!("{error} (on {})", on.name));
    match error.errno() {
        Some(libc::EBUSY) => explained.with_details(format!(
            "{} is in other use: macvlan and ipvlan children exclude each other, passthru excludes \
             all others, and a port of a bridge or bond carries none",
            on.name
        )),
        Some(libc::ENODEV) => Error::new(Code::TryAgain, format!("{} went away: {error}", on.name))
            .with_details("another pod was quicker to take it, or it was removed; try again"),
        Some(libc::EOPNOTSUPP) => explained.with_details(format!(
            "this kernel has no {} links, or its module is not loaded",
            new.child.word()
        )),
        _ => explained,
    }
}

/// One request: the host sees a netdev go, and no name in between that a daemon could react to. The
/// move takes it down, so that also kernels before 6.2 rename it (`do_setlink()`).
fn move_in(
    host: &mut HostNetns,
    pod: &Namespace,
    inside: &mut Socket,
    nic: &Link,
    name: &str,
) -> Result<Link, Error> {
    // An alternative name that the pod knows stands in the way of the whole netdev.
    for altname in &nic.altnames {
        if *altname == *name || link::get(inside, By::Name(altname.as_bytes()))?.is_some() {
            link::remove_altname(&mut host.socket, nic, altname)?;
        }
    }
    let change = Change {
        netns: Some(pod),
        ..Change::name(name.as_bytes())
    };
    let what = format!("move {} into {} as {name}", nic.name, pod.path().display());
    link::change(&mut host.socket, what, nic.index, &change)?;
    named(inside, name)
}

/// A netdev of IP over InfiniBand ends when its RDMA device leaves a namespace, and is made anew
/// by the driver when it has arrived; in which of the two, kernels differ. It is waited for in
/// both and gets its name in the pod.
///
/// # Errors
/// Code 11 when it does not come; the kernel's refusal.
fn take_anew(
    host: &mut HostNetns,
    pod: &Namespace,
    inside: &mut Socket,
    plan: &Plan,
    identity: &Identity,
) -> Result<Link, Error> {
    let (name, mtu) = (plan.ifname.as_str(), plan.config.mtu);
    let started = Instant::now();
    loop {
        let place = LinkScope::Pod { host: None };
        if let Ok(Some(link)) = identity.find(&link::list(inside)?, place) {
            let change = Change {
                mtu,
                ..Change::name(name.as_bytes())
            };
            let what = format!("set {} down", link.name);
            link::change(inside, what, link.index, &Change::down())?;
            let what = format!("name {} {name}", link.name);
            link::change(inside, what, link.index, &change)?;
            return named(inside, name);
        }
        if let Ok(Some(link)) = identity.find(&link::list(&mut host.socket)?, LinkScope::Host) {
            let moved = move_in(host, pod, inside, link, name)?;
            if mtu.is_some() {
                set_mtu(inside, &moved, name, mtu)?;
            }
            return Ok(moved);
        }
        if started.elapsed() > restore::RETURN_TIMEOUT {
            return Err(Error::new(
                Code::TryAgain,
                format!(
                    "{} was not made anew after its RDMA device had moved",
                    plan.snapshot
                        .as_ref()
                        .map_or(String::new(), |taken| taken.name.to_string())
                ),
            )
            .with_details("is the module ib_ipoib loaded?"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
