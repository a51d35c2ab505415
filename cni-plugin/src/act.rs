//! Making the interface and giving it what it is to have: every change an ADD makes outside
//! the journal. What fails here is undone from the journal's record, not step by step.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use cni_wire::{Code, Error};
use hca::MacAddress;

use crate::{
    config::Attach,
    kernel::{
        self, Namespace, Socket, address, announce,
        link::{self, By, Change, Child, Link, NewChild},
        neighbour, route, rule, sysctl,
    },
    layout::Layout,
    netdev::{replay, restore, snapshot::Identity, words},
    node::Node,
};

/// How long a moved netdev may take to have a carrier before its addresses are announced
/// without one.
const CARRIER: Duration = Duration::from_millis(100);

/// What the names of links begin with that are not named yet.
pub const TEMPORARY: &str = "rdma-tmp";

/// The interface to be made.
#[derive(Debug)]
pub struct Interface<'a> {
    /// Its name in the pod.
    pub name: &'a str,
    /// What it is made of.
    pub attach: Attach,
    /// The netdev that is moved or built upon.
    pub netdev: &'a Link,
    /// The child to be made; none for a move.
    pub child: Option<Child>,
    /// Whether the netdev is in the pod's namespace, not the host's.
    pub within: bool,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<MacAddress>,
}

/// Makes the interface; it is in the pod, down and without addresses.
///
/// # Errors
/// The kernel's refusal, with what can be done about it.
pub fn make(
    node: &mut Node,
    pod: &Namespace,
    inside: &mut Socket,
    new: &Interface<'_>,
) -> Result<Link, Error> {
    match &new.child {
        None => move_in(node, pod, inside, new),
        // The kernel makes IPoIB children beside their parent only.
        Some(child @ Child::Ipoib { .. }) if !new.within => {
            make_and_move(node, pod, inside, new, child)
        }
        Some(child) => {
            // From inside the pod: the final name at once, whatever the host calls its own.
            let parent_netns = match new.within {
                true => None,
                false => Some(link::namespace_number(inside, &node.home)?),
            };
            let child = NewChild {
                parent_netns,
                ..describe(new, child, new.name)
            };
            match link::create(inside, &child) {
                // The pod has no such name, that was looked at; the host has.
                Err(e) if e.is(libc::EEXIST) && !new.within => make_and_rename(inside, new, &child),
                made => made
                    .map_err(|e| explain(&e, new))?
                    .ok_or_else(|| vanished(new.name)),
            }
        }
    }
}

fn describe<'a>(new: &Interface<'_>, child: &Child, name: &'a str) -> NewChild<'a> {
    NewChild {
        name,
        child: child.clone(),
        parent: new.netdev.index,
        parent_netns: None,
        mtu: new.mtu,
        mac: new.mac.as_ref().map(|mac| mac.bytes().to_vec()),
        target: None,
    }
}

/// A name nobody has, for the moment between making and naming.
fn temporary() -> String {
    format!("{TEMPORARY}{}", std::process::id())
}

/// Kernels before 6.15 make a link in its parent's namespace and move it from there
/// (`rtnl_newlink()`), so a name of the host's stands in the way even of a link asked for from
/// inside the pod. Made under a name nobody has, it is named where it belongs.
fn make_and_rename(
    inside: &mut Socket,
    new: &Interface<'_>,
    child: &NewChild<'_>,
) -> Result<Link, Error> {
    let temporary = temporary();
    let child = NewChild {
        name: &temporary,
        ..child.clone()
    };
    let made = link::create(inside, &child)
        .map_err(|e| explain(&e, new))?
        .ok_or_else(|| vanished(new.name))?;
    let change = Change {
        name: Some(new.name.as_bytes()),
        ..Change::default()
    };
    let what = format!("name {temporary} {}", new.name);
    link::change(inside, what, made.index, &change)?;
    link::get(inside, By::Name(new.name.as_bytes()))?.ok_or_else(|| vanished(new.name))
}

/// Made beside its parent under a name nobody has, then moved.
fn make_and_move(
    node: &mut Node,
    pod: &Namespace,
    inside: &mut Socket,
    new: &Interface<'_>,
    child: &Child,
) -> Result<Link, Error> {
    let temporary = temporary();
    let made = link::create(&mut node.socket, &describe(new, child, &temporary))
        .map_err(|e| explain(&e, new))?
        .ok_or_else(|| vanished(new.name))?;
    let change = Change {
        netns: Some(pod),
        name: Some(new.name.as_bytes()),
        ..Change::default()
    };
    let what = format!(
        "move {temporary} into {} as {}",
        pod.path().display(),
        new.name
    );
    if let Err(e) = link::change(&mut node.socket, what, made.index, &change) {
        let first = Error::from(e);
        return Err(match link::delete(&mut node.socket, &made) {
            Ok(()) => first,
            Err(e) => first.with_details(e.to_string()),
        });
    }
    link::get(inside, By::Name(new.name.as_bytes()))?.ok_or_else(|| vanished(new.name))
}

fn vanished(name: &str) -> Error {
    Error::new(Code::Kernel, format!("{name} went away while it was made"))
}

/// What the person on call can do about a refusal of the kernel.
fn explain(error: &kernel::Error, new: &Interface<'_>) -> Error {
    let on = &new.netdev.name;
    let told = Error::new(Code::Kernel, format!("{error} (on {on})"));
    match error.errno() {
        Some(libc::EBUSY) => told.with_details(format!(
            "{on} is in other use: macvlan and ipvlan children exclude each other, passthru \
             excludes all others, and a port of a bridge or bond carries none"
        )),
        Some(libc::EOPNOTSUPP) => told.with_details(format!(
            "this kernel has no {} links, or its module is not loaded",
            new.attach.as_str()
        )),
        _ => told,
    }
}

/// One request: the host sees a netdev go, and no name in between that a daemon could react to.
fn move_in(
    node: &mut Node,
    pod: &Namespace,
    inside: &mut Socket,
    new: &Interface<'_>,
) -> Result<Link, Error> {
    let (netdev, name) = (new.netdev, new.name);
    // An alternative name that the pod knows stands in the way of the whole netdev.
    for altname in &netdev.altnames {
        if altname == name || link::get(inside, By::Name(altname.as_bytes()))?.is_some() {
            link::remove_altname(&mut node.socket, netdev, altname)?;
        }
    }
    let change = Change {
        netns: Some(pod),
        name: Some(name.as_bytes()),
        ..Change::default()
    };
    let what = format!(
        "move {} into {} as {name}",
        netdev.name,
        pod.path().display()
    );
    link::change(&mut node.socket, what, netdev.index, &change)?;
    let moved = link::get(inside, By::Name(name.as_bytes()))?.ok_or_else(|| vanished(name))?;
    if new.mtu.is_some() || new.mac.is_some() {
        let change = Change {
            mtu: new.mtu,
            mac: new.mac.as_ref().map(MacAddress::bytes),
            ..Change::default()
        };
        link::change(
            inside,
            format_args!("set MTU and MAC of {name}"),
            moved.index,
            &change,
        )?;
    }
    Ok(moved)
}

/// A netdev of IP over InfiniBand ends when its RDMA device leaves a namespace, and is made anew
/// by the driver when it has arrived; in which of the two, kernels differ. It is waited for in
/// both and gets its name in the pod.
///
/// # Errors
/// Code 11 when it does not come; the kernel's refusal.
pub fn take_anew(
    node: &mut Node,
    pod: &Namespace,
    inside: &mut Socket,
    new: &Interface<'_>,
    identity: &Identity,
) -> Result<Link, Error> {
    let started = Instant::now();
    loop {
        if let Some(link) = identity.find(&link::list(inside)?) {
            let change = Change {
                name: Some(new.name.as_bytes()),
                mtu: new.mtu,
                ..Change::down()
            };
            let what = format!("name {} {}", link.name, new.name);
            link::change(inside, what, link.index, &change)?;
            return link::get(inside, By::Name(new.name.as_bytes()))?
                .ok_or_else(|| vanished(new.name));
        }
        if let Some(link) = identity.find(&link::list(&mut node.socket)?) {
            let anew = Interface {
                netdev: link,
                child: None,
                mac: None,
                ..*new
            };
            return move_in(node, pod, inside, &anew);
        }
        if started.elapsed() > restore::ON_ITS_WAY {
            return Err(Error::new(
                Code::TryAgain,
                format!(
                    "{} was not made anew after its RDMA device had moved",
                    new.netdev.name
                ),
            )
            .with_details("is the module ib_ipoib loaded?"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Gives the interface its settings, addresses and routes, brings it up and announces it. Call
/// from within the pod's namespace. Returns the interface as it is then.
///
/// With `arp_notify` and `ndisc_notify` the kernel itself announces the addresses of a link that
/// goes up (`inetdev_event()`, `ndisc_netdev_event()`), and that reaches the wire when the link has
/// its carrier at once: children have their parent's, and so has a NIC whose port is up. Another
/// trains its link first; its addresses are announced once it has a carrier, from a packet
/// socket, whose closing waits for all processors (`packet_release()`: `synchronize_net()`, some
/// 10 ms).
///
/// # Errors
/// The kernel's refusal.
pub fn configure(
    socket: &mut Socket,
    proc: &Path,
    link: &Link,
    layout: &Layout,
    attach: Attach,
) -> kernel::Result<Link> {
    let (index, name) = (link.index, &link.name);
    for setting in &layout.settings {
        sysctl::write_if_there(proc, setting.group, name, setting.key, setting.value)?;
    }
    for message in &layout.addresses {
        let mut message = message.clone();
        message.header.index = index;
        address::add(
            socket,
            &format!("give {} to {name}", words::address(&message)),
            &message,
        )?;
    }
    link::change(socket, format_args!("set {name} up"), index, &Change::up())?;
    for message in &layout.neighbours {
        let mut message = message.clone();
        message.header.ifindex = index;
        let what = format!("give neighbour {} to {name}", words::neighbour(&message));
        neighbour::replace(socket, &what, &message)?;
    }
    for message in &layout.routes {
        let what = format!("route {} through {name}", words::route(message));
        route::append(socket, &what, &replay::route(message, 0, index))?;
    }
    for message in &layout.rules {
        rule::add(
            socket,
            &format!("add rule {}", words::rule(message)),
            message,
        )?;
    }
    let mut now = link::get(socket, By::Index(index))?;
    let trains = now.as_ref().is_some_and(|link| !link.carrier);
    if trains && attach == Attach::Move && !layout.announced.is_empty() {
        let started = Instant::now();
        while now.as_ref().is_some_and(|link| !link.carrier) && started.elapsed() < CARRIER {
            std::thread::sleep(Duration::from_millis(5));
            now = link::get(socket, By::Index(index))?;
        }
        if let Some(link) = &now {
            announce::announce(link, &layout.announced)?;
        }
    }
    Ok(now.unwrap_or_else(|| link.clone()))
}
