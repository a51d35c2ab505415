//! Returning a netdev from a pod to the host and restoring its state.
//!
//! Every step asks for a state, not for a change: run again after being cut off anywhere, it
//! ends the same. The one thing that must succeed is that the netdev returns; what cannot be
//! restored after that (an address that somebody else has now, a route whose gateway is gone) is a
//! warning, never a reason to leave it behind.

use std::{
    collections::BTreeMap,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use netlink::{
    Name, Namespace, Socket, address, attribute, bpf, clock, ioctl,
    link::{self, By, Change, Link},
    neighbour,
    nexthop::{self, Nexthop},
    route, rule, sysctl,
};
use netlink_packet_core::Emitable;
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    link::{InfoKind, LinkFlags},
};

use super::{
    display,
    identity::{Ambiguous, Place},
    replay,
    snapshot::{
        KEPT_FLAGS, Message, PROTO_DOWN, PROTO_DOWN_REASONS, Snapshot, mode, of_hexadecimal,
        settings,
    },
};

/// How long a netdev may take to return from a namespace that is being torn down. The kernel
/// returns it after two grace periods, with many namespaces one after the other.
pub const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a netdev is moved again whose names were taken between reading and moving.
const ATTEMPTS: u32 = 8;

/// What the names of netdevs begin with whose own is taken. With seven digits it has 15 bytes.
const TEMPORARY: &str = "rdma-dev";

/// `IF_OPER_TESTING`, `IF_OPER_DORMANT`, `IF_OPER_UP` (`include/uapi/linux/if.h`)
const OPER_TESTING: u8 = 4;
const OPER_DORMANT: u8 = 5;
const OPER_UP: u8 = 6;

/// `IFLA_VXLAN_LINK` (`include/uapi/linux/if_link.h`)
const IFLA_VXLAN_LINK: u16 = 3;

/// Where a restoration happens.
#[derive(Debug)]
pub struct HostContext<'a> {
    /// The host's namespace, in which the thread is.
    pub namespace: &'a Namespace,
    /// A socket of it.
    pub socket: &'a mut Socket,
    /// The proc file system.
    pub proc: &'a Path,
    /// The sysfs of the host.
    pub sys: &'a Path,
}

/// How a netdev returned.
#[derive(Debug, Default)]
pub struct Returned {
    /// What could not be restored, as text.
    pub warnings: Vec<String>,
    /// What was not restored because it is over, as text.
    pub notes: Vec<String>,
    /// Another netdev has its name now; it has this one until that is repaired.
    pub goes_by: Option<Name>,
    /// The hardware itself, or the virtual link, is gone; there is nothing to restore.
    pub hardware_gone: bool,
}

/// Why a netdev did not return.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is in no namespace that can be read.
    #[error("{name} is neither on the host nor in the pod's namespace after {waited:?}")]
    Nowhere {
        /// Its name on the host.
        name: Name,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Other links cannot be distinguished from it.
    #[error("{name} is not returned: {place} {cause}")]
    Ambiguous {
        /// Its name on the host.
        name: Name,
        /// Where the links are.
        place: &'static str,
        /// Which links.
        cause: Ambiguous,
    },
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] netlink::Error),
}

/// Returns a netdev to the host, out of `pod` when it is there, and restores it.
///
/// # Errors
/// It is not found within `timeout`, several links could be it, or the kernel does not let it go.
pub fn return_netdev(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    pod: Option<&Namespace>,
    timeout: Duration,
) -> Result<Returned, Error> {
    let mut report = Returned::default();
    let started = Instant::now();
    loop {
        let mut arrived = None;
        // The pod first: on the host another link may have got the index of a virtual one.
        if let Some(pod) = pod {
            let mut inside = pod.socket(host_context.namespace)?;
            let links = link::list(&mut inside)?;
            let place = Place::Pod {
                index: taken.pod_index,
                mac: taken.pod_mac.as_deref(),
                host: link::known_number(&mut inside, host_context.namespace)?,
            };
            if let Some(link) = find(taken, &links, place, "in the pod")? {
                remove_children(&mut inside, &links, link, &mut report);
                let elsewhere = remove_children_elsewhere(host_context, &mut inside, pod, link);
                report
                    .warnings
                    .extend(elsewhere.unwrap_or_else(|e| vec![e.to_string()]));
                let name =
                    move_to_host(host_context, taken, &mut inside, link.clone(), &mut report)?;
                arrived = link::get(host_context.socket, By::Name(name.as_bytes()))?;
            }
        }
        if arrived.is_none() {
            let links = link::list(host_context.socket)?;
            let name = Some(&taken.name);
            arrived = find(taken, &links, Place::Host { name }, "on the host")?.cloned();
        }
        if let Some(link) = arrived {
            restore(host_context, taken, link, &mut report)?;
            return Ok(report);
        }
        if is_gone(host_context, taken)? {
            report.hardware_gone = true;
            return Ok(report);
        }
        if started.elapsed() >= timeout {
            return Err(Error::Nowhere {
                name: taken.name.clone(),
                waited: timeout,
            });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn find<'a>(
    taken: &Snapshot,
    links: &'a [Link],
    place: Place<'_>,
    location: &'static str,
) -> Result<Option<&'a Link>, Error> {
    let found = taken.identity.find(links, place);
    found.map_err(|cause| Error::Ambiguous {
        name: taken.name.clone(),
        place: location,
        cause,
    })
}

/// Whether the device below was unplugged, or a virtual link ended with its namespace. A link with
/// a peer lives as long as that.
fn is_gone(host_context: &mut HostContext<'_>, taken: &Snapshot) -> netlink::Result<bool> {
    if let (Some(bus), Some(device)) = (&taken.bus, &taken.identity.bus_device) {
        let devices = host_context.sys.join("bus").join(bus).join("devices");
        return Ok(devices.is_dir() && !devices.join(device).exists());
    }
    if let Some(peer) = taken.identity.peer() {
        let peer = link::get(host_context.socket, By::Index(peer))?;
        let kind = peer.and_then(|peer| peer.kind);
        return Ok(kind.map(|kind| kind.to_string()) != taken.identity.kind);
    }
    Ok(taken.identity.kind.is_some())
}

/// Deletes what the pod built upon a netdev: a change of namespaces does not take the netdev away from
/// beneath a VLAN or a macvlan, so that the pod would be on the host's wire until it ends.
fn remove_children(inside: &mut Socket, links: &[Link], below: &Link, report: &mut Returned) {
    let stands_on = |link: &&Link| {
        let kind = link.kind.as_ref().map(ToString::to_string);
        // A veth names its peer, a vxlan its link as part of what it says of itself.
        let on = match kind.as_deref() {
            None | Some("veth" | "netkit") => None,
            Some("vxlan") => link
                .info
                .get(&IFLA_VXLAN_LINK)
                .and_then(|value| attribute::number(value)),
            Some(_) => link.parent.filter(|_| link.parent_netns.is_none()),
        };
        on == Some(below.index) && link.index != below.index
    };
    for child in links.iter().filter(stands_on) {
        let deleted = link::delete(inside, child);
        report.warnings.extend(deleted.err().map(|e| e.to_string()));
    }
}

/// Deletes what the pod built upon a netdev and put into namespaces of its own, which are found by the
/// processes in them. Returns what could not be, as text.
fn remove_children_elsewhere(
    host_context: &HostContext<'_>,
    inside: &mut Socket,
    pod: &Namespace,
    below: &Link,
) -> netlink::Result<Vec<String>> {
    let mut warnings = Vec::new();
    for other in Namespace::of_processes(host_context.proc) {
        if [pod.id(), host_context.namespace.id()].contains(&other.id()) {
            continue;
        }
        // It may have ended meanwhile.
        let Ok(mut socket) = other.socket(host_context.namespace) else {
            continue;
        };
        // One that has no number for the pod's has no link that stands on one of it.
        let Ok(Some(number)) = link::known_number(&mut socket, pod) else {
            continue;
        };
        for child in link::list(&mut socket).unwrap_or_default() {
            let is_peer = matches!(child.kind, Some(InfoKind::Veth));
            if child.parent == Some(below.index) && child.parent_netns == Some(number) && !is_peer {
                let deleted = link::delete(&mut socket, &child);
                warnings.extend(deleted.err().map(|e| e.to_string()));
            }
        }
    }
    if !below.is_infiniband()
        && let Some(address) = neighbour::list_unicast(inside, below.index)?.first()
    {
        warnings.push(format!(
            "{} received for the address {} in the pod: a child of it may be in a network namespace \
             without a process, until that ends",
            below.name,
            hca::MacAddress::new(address.as_slice())
        ));
    }
    Ok(warnings)
}

fn is_taken(host_context: &mut HostContext<'_>, name: &Name) -> netlink::Result<bool> {
    Ok(link::get(host_context.socket, By::Name(name.as_bytes()))?.is_some())
}

/// Moves a netdev out of the pod. Returns the name that it has on the host. The move sets it down
/// before it is renamed (`do_setlink()`), so that kernels before 6.2 do that, too.
fn move_to_host(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    inside: &mut Socket,
    mut link: Link,
    report: &mut Returned,
) -> netlink::Result<Name> {
    restore_mac(inside, taken, &link, report);
    let mut attempt = 0;
    loop {
        for altname in &link.altnames {
            let of_host = taken.altnames.contains(altname) && *altname != taken.name;
            let clashes = of_host && is_taken(host_context, altname)?;
            if of_host && !clashes {
                continue;
            }
            let removed = link::remove_altname(inside, &link, altname);
            report.warnings.extend(removed.err().map(|e| e.to_string()));
            if clashes {
                report.warnings.push(format!(
                    "alternative name {altname} belongs to another netdev now"
                ));
            }
        }
        let name = match attempt == 0 && !is_taken(host_context, &taken.name)? {
            true => taken.name.clone(),
            false => temporary_name(host_context, &link, attempt)?,
        };
        let change = Change {
            netns: Some(host_context.namespace),
            name: Some(name.as_bytes()),
            ..Change::default()
        };
        let what = format!("move {} to the host as {name}", link.name);
        match link::change(inside, what, link.index, &change) {
            // A name was taken between reading and moving.
            Err(e) if e.is(libc::EEXIST) && attempt < ATTEMPTS => {
                attempt += 1;
                if let Some(now) = link::get(inside, By::Index(link.index))? {
                    link = now;
                }
            }
            done => return done.map(|()| name),
        }
    }
}

/// A name that no netdev of the host has, for one whose own is taken. The kernel's own choice for a
/// netdev that returns from a dead namespace is `dev<index>`.
fn temporary_name(
    host_context: &mut HostContext<'_>,
    link: &Link,
    attempt: u32,
) -> netlink::Result<Name> {
    let mut number = link.index.wrapping_add(attempt);
    loop {
        let name = Name::from(format!("{TEMPORARY}{}", number % 10_000_000).as_str());
        if !is_taken(host_context, &name)? {
            return Ok(name);
        }
        number = number.wrapping_add(1);
    }
}

/// Restores the address of a virtual link while it is in the pod, so that it can be identified on
/// the host should this process end before the rest is restored.
fn restore_mac(socket: &mut Socket, taken: &Snapshot, link: &Link, report: &mut Returned) {
    if taken.identity.is_virtual() {
        set_mac(socket, taken, link, report);
    }
}

/// Gives a netdev the address that it had. One of IPoIB is the port's own affair.
fn set_mac(socket: &mut Socket, taken: &Snapshot, link: &Link, report: &mut Returned) {
    let mac: Option<hca::MacAddress> = taken.identity.mac.parse().ok();
    let differs = |mac: &hca::MacAddress| mac.bytes().len() == 6 && mac.bytes() != link.mac;
    let Some(mac) = mac.filter(differs) else {
        return;
    };
    let what = format!("restore {mac} of {}", taken.name);
    let mut attempt = |change: &Change<'_>| {
        let done = link::change(socket, &what, link.index, change);
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
    // Most drivers take none while the link is up (`eth_prepare_mac_addr_change()`), and the kernel
    // changes the address before the flags (`do_setlink()`).
    if link.is_up() {
        attempt(&Change::down());
    }
    attempt(&Change {
        mac: Some(mac.bytes()),
        ..Change::default()
    });
}

fn restore(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    mut link: Link,
    report: &mut Returned,
) -> Result<(), Error> {
    let index = link.index;
    if link.name != taken.name {
        rename(host_context, &mut link, taken, report)?;
    }
    // Records of earlier versions do not say that the host had none.
    if taken.taken_at.is_some() {
        remove_programs(host_context, taken, &link, report);
    }
    let mut attempt = |done: netlink::Result<()>| {
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
    for altname in &link.altnames {
        if !taken.altnames.contains(altname) {
            attempt(link::remove_altname(host_context.socket, &link, altname));
        }
    }
    for altname in &taken.altnames {
        attempt(link::add_altname(host_context.socket, &link, altname));
    }
    if let Some(vf) = &taken.vf {
        // What is refused is tried again, and reported, at the end.
        let _ = vf.restore_rights(host_context.sys, host_context.socket)?;
    }
    set_mac(host_context.socket, taken, &link, report);
    restore_settings(host_context, taken, &link, report);
    if let Some(ethtool) = &taken.ethtool {
        match ethtool.restore(&link, &taken.name) {
            Ok(warnings) => report.warnings.extend(warnings),
            Err(e) => report.warnings.push(e.to_string()),
        }
    }
    let mut attempt = |done: netlink::Result<()>| {
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
    for (key, value) in &taken.sysctls {
        let Some((group, key)) = key.rsplit_once('/') else {
            continue;
        };
        if sysctl::read(host_context.proc, group, &link.name, key).as_ref() != Some(value) {
            attempt(sysctl::write(
                host_context.proc,
                group,
                &link.name,
                key,
                value,
            ));
        }
    }
    if let Some(token) = taken.token.filter(|token| link.token != Some(*token)) {
        let what = format!("restore the token {token} of {}", taken.name);
        attempt(link::set_token(host_context.socket, what, index, token));
    }
    if taken.up {
        let what = format!("set {} up", taken.name);
        attempt(link::change(
            host_context.socket,
            what,
            index,
            &Change::up(),
        ));
        attempt(leave_dormant(host_context, taken, index));
    }
    if let Some(vf) = &taken.vf {
        let warnings = vf.restore(host_context.sys, host_context.socket)?;
        report.warnings.extend(warnings);
    }
    restore_network(host_context, taken, &link, report)?;
    report.warnings.extend(verify(host_context, taken, index)?);
    Ok(())
}

/// Gives a netdev its name; where another netdev has that, one that says nothing. A name that the pod
/// chose does not stay: a network may mean another netdev by it, which is away.
fn rename(
    host_context: &mut HostContext<'_>,
    link: &mut Link,
    taken: &Snapshot,
    report: &mut Returned,
) -> netlink::Result<()> {
    let holder = link::get(host_context.socket, By::Name(taken.name.as_bytes()))?;
    if holder.is_none_or(|holder| holder.index == link.index)
        && set_name(host_context, link, taken.name.clone())?
    {
        return Ok(());
    }
    let mut attempt = 0;
    while !link.name.as_bytes().starts_with(TEMPORARY.as_bytes()) && attempt < ATTEMPTS {
        let name = temporary_name(host_context, link, attempt)?;
        set_name(host_context, link, name)?;
        attempt += 1;
    }
    report.warnings.push(format!(
        "{} is the name of another netdev now; it has the name {} until that is gone",
        taken.name, link.name
    ));
    report.goes_by = Some(link.name.clone());
    Ok(())
}

/// Renames a netdev. False when another one has the name by now.
fn set_name(
    host_context: &mut HostContext<'_>,
    link: &mut Link,
    name: Name,
) -> netlink::Result<bool> {
    // Its own alternative name may be the one it is to have.
    if link.altnames.contains(&name) {
        link::remove_altname(host_context.socket, link, &name)?;
        link.altnames.retain(|altname| *altname != name);
    }
    // Two requests: the kernel renames before it changes flags (`do_setlink()`), and before 6.2 it
    // renames no link that is up.
    if link.is_up() {
        let what = format!("set {} down", link.name);
        link::change(host_context.socket, what, link.index, &Change::down())?;
    }
    let what = format!("rename {} to {name}", link.name);
    let change = Change {
        name: Some(name.as_bytes()),
        ..Change::default()
    };
    match link::change(host_context.socket, what, link.index, &change) {
        Ok(()) => link.name = name,
        Err(e) if e.is(libc::EEXIST) => return Ok(false),
        Err(e) => return Err(e),
    }
    Ok(true)
}

/// Detaches BPF programs: a netdev with any of the host's is not moved, so they are the pod's. Before
/// the netdev is up, and before the MTU, which XDP limits.
fn remove_programs(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    link: &Link,
    report: &mut Returned,
) {
    let mut attempt = |done: netlink::Result<()>| {
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
    for (mode, id) in &link.xdp {
        let what = format!("detach XDP program {id} ({mode} mode) of {}", taken.name);
        match link::detach_xdp(host_context.socket, what, link.index, *mode) {
            Err(e) if e.is(libc::EBUSY) => attempt(bpf::detach_xdp_link(link.index, *id)),
            done => attempt(done),
        }
    }
    match bpf::tcx(link.index) {
        Ok(programs) => {
            for program in &programs {
                attempt(bpf::detach_tcx(link.index, program));
            }
        }
        Err(e) => attempt(Err(e)),
    }
}

/// One request each, so that a driver that refuses one of them still takes the others.
fn restore_settings(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    link: &Link,
    report: &mut Returned,
) {
    let mut attempt = |done: netlink::Result<()>| {
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
    let what = format!("restore {}", taken.name);
    for change in attributes(taken, link) {
        attempt(link::change(
            host_context.socket,
            &what,
            link.index,
            &change,
        ));
    }
    let broadcast = taken.broadcast.as_deref().and_then(of_hexadecimal);
    if let Some(broadcast) = broadcast.filter(|broadcast| *broadcast != link.broadcast) {
        let change = Change {
            broadcast: Some(&broadcast),
            ..Change::default()
        };
        attempt(link::change(
            host_context.socket,
            &what,
            link.index,
            &change,
        ));
    }
    let mut now = settings(link);
    for name in link::number_names() {
        let Some(value) = taken
            .settings
            .get(name)
            .filter(|value| now.get(name) != Some(*value))
        else {
            continue;
        };
        let what = format!("restore {name} {value} of {}", taken.name);
        attempt(link::set_number(
            host_context.socket,
            what,
            link.index,
            name,
            *value,
        ));
        // Some follow from others.
        if let Ok(Some(link)) = link::get(host_context.socket, By::Index(link.index)) {
            now = settings(&link);
        }
    }
    let modes = mode(link);
    let differing = taken
        .mode
        .iter()
        .filter(|(kind, value)| modes.get(*kind) != Some(*value));
    let info: BTreeMap<u16, Vec<u8>> = differing
        .filter_map(|(kind, value)| Some((*kind, of_hexadecimal(value)?)))
        .collect();
    if let Some(kind) = taken.identity.kind.as_ref().filter(|_| !info.is_empty()) {
        let what = format!("restore the mode of {}", taken.name);
        attempt(link::set_info(
            host_context.socket,
            what,
            link.index,
            kind,
            &info,
        ));
    }
    let held = |settings: &BTreeMap<String, u32>| {
        let down = settings.get(PROTO_DOWN).copied()?;
        Some((down, settings.get(PROTO_DOWN_REASONS).copied().unwrap_or(0)))
    };
    if let Some((down, reasons)) =
        held(&taken.settings).filter(|before| held(&now) != Some(*before))
    {
        let what = format!("restore protodown of {}", taken.name);
        attempt(link::set_proto_down(
            host_context.socket,
            what,
            link.index,
            down != 0,
            reasons,
        ));
    }
}

/// A link that a pod left dormant, or testing, stays so when it is set up.
fn leave_dormant(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    index: u32,
) -> netlink::Result<()> {
    let by_itself = taken.settings.get("mode") == Some(&0);
    let Some(link) = link::get(host_context.socket, By::Index(index))?.filter(|_| by_itself) else {
        return Ok(());
    };
    if [OPER_TESTING, OPER_DORMANT].contains(&link.oper_state) {
        let what = format!("end the dormant state of {}", taken.name);
        link::set_oper_state(host_context.socket, what, index, OPER_UP)?;
    }
    Ok(())
}

/// Addresses and what depends on them, in the order in which the kernel takes them.
fn restore_network(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    link: &Link,
    report: &mut Returned,
) -> netlink::Result<()> {
    let (known, index) = (taken.identity.index, link.index);
    let host_name = String::from_utf8_lossy(taken.name.as_bytes()).into_owned();
    let socket = &mut *host_context.socket;
    let passed = passed_since(taken)?;
    let over: Vec<&Message> = over(taken, passed).collect();
    for message in &over {
        report.notes.push(format!(
            "address {} of {host_name} is not restored: its lifetime is over",
            message.text
        ));
    }
    let warnings = &mut report.warnings;
    remove_mislabelled(socket, taken, index, warnings)?;
    let left = in_order(&taken.addresses);
    let left: Vec<Message> = left.filter(|m| !over.contains(m)).cloned().collect();
    replayed(
        &left,
        warnings,
        display::address,
        |m, what| match replay::aged(&replay::address(&m, index), passed) {
            Some(address) => address::replace(socket, what, &address),
            None => Ok(()),
        },
    );
    for address in &taken.multicast {
        let bytes = of_hexadecimal(address).unwrap_or_default();
        let added = ioctl::add_multicast(&link.name, &bytes);
        warnings.extend(added.err().map(|e| e.to_string()));
    }
    replayed(
        &taken.neighbours,
        warnings,
        display::neighbour,
        |m, what| neighbour::replace(socket, what, &replay::neighbour(&m, index)),
    );
    replayed(&taken.proxies, warnings, display::neighbour, |m, what| {
        neighbour::replace(socket, what, &replay::neighbour(&m, index))
    });
    replayed(&taken.nexthops, warnings, Nexthop::to_string, |m, what| {
        nexthop::replace(socket, what, &m.through(known, index))
    });
    replayed(&taken.routes, warnings, display::route, |m, what| {
        let copy = replay::route_of_host(&m, known, index);
        // A route over several netdevs lost this next hop; the whole is put in its place.
        if replay::leaves_elsewhere(&m, known) {
            return route::replace(socket, what, &copy);
        }
        match route::append(socket, what, &copy) {
            Err(e) if e.is(libc::EEXIST) => Ok(()),
            done => done,
        }
    });
    replayed(&taken.rules, warnings, display::rule, |m, what| {
        rule::add(socket, what, &replay::rule(&m, &host_name, &host_name))
    });
    Ok(())
}

/// Addresses in an order that leaves the kernel's list as it was: an IPv6 address goes before those
/// of its scope (`ipv6_link_dev_addr()`), an IPv4 one behind.
fn in_order(addresses: &[Message]) -> impl Iterator<Item = &Message> {
    let is_v6 = |message: &&Message| {
        let address = message.parse::<AddressMessage>();
        address.is_ok_and(|address| address.header.family == AddressFamily::Inet6)
    };
    let v4 = addresses.iter().filter(move |message| !is_v6(message));
    v4.chain(addresses.iter().rev().filter(is_v6))
}

/// Takes away addresses that a renaming gave another label (`inetdev_changename()`), which replacing
/// them does not change.
fn remove_mislabelled(
    socket: &mut Socket,
    taken: &Snapshot,
    index: u32,
    warnings: &mut Vec<String>,
) -> netlink::Result<()> {
    let known: Vec<AddressMessage> = taken
        .addresses
        .iter()
        .filter_map(|message| message.parse().ok())
        .collect();
    for now in address::list(socket, index)? {
        let before = known.iter().find(|before| replay::is_same(before, &now));
        if before.is_some_and(|before| replay::label(before) != replay::label(&now)) {
            let what = format!("restore the label of {}", display::address(&now));
            let deleted = address::delete(socket, &what, &now);
            warnings.extend(deleted.err().map(|e| e.to_string()));
        }
    }
    Ok(())
}

/// Seconds since a snapshot was taken. Records of earlier versions do not say.
fn passed_since(taken: &Snapshot) -> netlink::Result<u64> {
    let now = clock::since_boot()?.as_secs();
    Ok(taken.taken_at.map_or(0, |taken| now.saturating_sub(taken)))
}

/// The addresses whose lifetime has ended since.
fn over(taken: &Snapshot, passed: u64) -> impl Iterator<Item = &Message> {
    taken.addresses.iter().filter(move |message| {
        let address = message.parse::<AddressMessage>();
        address.is_ok_and(|address| replay::aged(&address, passed).is_none())
    })
}

/// One request each, so that a driver that refuses one of them still takes the others.
fn attributes<'a>(taken: &'a Snapshot, link: &Link) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    if link.mtu != taken.mtu {
        changes.push(Change {
            mtu: Some(taken.mtu),
            ..Change::default()
        });
    }
    if link.tx_queue_length != taken.tx_queue_length {
        changes.push(Change {
            tx_queue_length: Some(taken.tx_queue_length),
            ..Change::default()
        });
    }
    if link.alias != taken.alias {
        let alias = taken.alias.as_ref().map(Name::as_bytes).unwrap_or_default();
        changes.push(Change {
            alias: Some(alias),
            ..Change::default()
        });
    }
    let flags = LinkFlags::from_bits_retain(taken.flags);
    if link.flags & KEPT_FLAGS != flags {
        changes.push(Change {
            flags: Some((flags, KEPT_FLAGS)),
            ..Change::default()
        });
    }
    changes
}

/// Sends each message of the snapshot again; those the kernel refuses become warnings.
fn replayed<T>(
    messages: &[Message],
    warnings: &mut Vec<String>,
    display: impl Fn(&T) -> String,
    mut send: impl FnMut(T, &str) -> netlink::Result<()>,
) where
    T: Emitable + netlink_packet_core::Parseable<[u8]>,
{
    for message in messages {
        match message.parse::<T>() {
            Ok(parsed) => {
                let what = format!("restore {}", display(&parsed));
                if let Err(e) = send(parsed, &what) {
                    warnings.push(e.to_string());
                }
            }
            Err(e) => warnings.push(format!("restore {}: {e}", message.text)),
        }
    }
}

/// Reads the netdev again and says what is not as it was.
fn verify(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    index: u32,
) -> netlink::Result<Vec<String>> {
    let Some(link) = link::get(host_context.socket, By::Index(index))? else {
        return Ok(vec![format!(
            "{} went away while it was restored",
            taken.name
        )]);
    };
    let mut now = Snapshot::take_without_ethtool(host_context.socket, host_context.proc, &link)?;
    // Before the address is set again the name of the hardware may be another.
    now.name = taken.name.clone();
    let expired: Vec<Message> = over(taken, passed_since(taken)?).cloned().collect();
    let mut wrong: Vec<String> = differences(taken, &now, &expired);
    if taken.taken_at.is_some() {
        wrong.extend(
            link.xdp
                .iter()
                .map(|(mode, id)| format!("XDP program {id} ({mode} mode) is still attached")),
        );
        for program in bpf::tcx(index).unwrap_or_default() {
            wrong.push(format!("{program} is still attached"));
        }
    }
    Ok(wrong
        .into_iter()
        .map(|what| format!("{}: {what}", taken.name))
        .collect())
}

/// What of `before` is not so now, but for what ethtool sets and for addresses that have expired.
/// Pure.
fn differences(before: &Snapshot, now: &Snapshot, expired: &[Message]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut compare = |what: &str, now: &dyn std::fmt::Display, before: &dyn std::fmt::Display| {
        let (now, before) = (now.to_string(), before.to_string());
        if now != before {
            wrong.push(format!("{what} is {now}, was {before}"));
        }
    };
    let text = |name: &Option<Name>| name.as_ref().map_or("none".to_owned(), Name::to_string);
    compare("mtu", &now.mtu, &before.mtu);
    compare("MAC address", &now.identity.mac, &before.identity.mac);
    compare("up", &now.up, &before.up);
    compare("txqueuelen", &now.tx_queue_length, &before.tx_queue_length);
    compare("alias", &text(&now.alias), &text(&before.alias));
    let flags = |flags: u32| format!("{:?}", LinkFlags::from_bits_retain(flags));
    compare("flags", &flags(now.flags), &flags(before.flags));
    for (name, value) in &before.settings {
        if let Some(now) = now.settings.get(name) {
            compare(name, now, value);
        }
    }
    if let Some(broadcast) = &before.broadcast {
        let now = now.broadcast.as_deref().unwrap_or("none");
        compare("broadcast address", &now, broadcast);
    }
    if let Some(token) = before.token {
        let now = now
            .token
            .map_or("none".to_owned(), |token| token.to_string());
        compare("token", &now, &token);
    }
    for (key, value) in &before.sysctls {
        let now = now.sysctls.get(key).map_or("unreadable", String::as_str);
        compare(key, &now, value);
    }
    if let Some(users) = before.promiscuity
        && now.promiscuity > before.promiscuity
    {
        let now = now.promiscuity.unwrap_or(0);
        wrong.push(format!(
            "promiscuity is {now}, was {users}: something still listens to all of it"
        ));
    }
    if before.mode != now.mode {
        wrong.push("the mode of its kind is not as it was".to_owned());
    }
    for altname in before
        .altnames
        .iter()
        .filter(|name| !now.altnames.contains(name))
    {
        wrong.push(format!("alternative name {altname} did not come back"));
    }
    for altname in now
        .altnames
        .iter()
        .filter(|name| !before.altnames.contains(name))
    {
        wrong.push(format!("alternative name {altname} is not the host's"));
    }
    for address in before
        .multicast
        .iter()
        .filter(|a| !now.multicast.contains(a))
    {
        wrong.push(format!("multicast address {address} did not come back"));
    }
    for (what, now, before) in [
        ("address", &now.addresses, &before.addresses),
        ("route", &now.routes, &before.routes),
        ("rule", &now.rules, &before.rules),
        ("neighbour", &now.neighbours, &before.neighbours),
        ("proxy", &now.proxies, &before.proxies),
        ("object", &now.nexthops, &before.nexthops),
    ] {
        let missing = |message: &&Message| {
            now.iter().all(|n| n.text != message.text) && !expired.contains(message)
        };
        for missing in before.iter().filter(missing) {
            wrong.push(format!("{what} {} did not come back", missing.text));
        }
    }
    wrong
}

#[cfg(test)]
mod tests;
