//! Bringing a netdev home from a pod and giving it its state again.
//!
//! Every step asks for a state, not for a change: run again after being cut off anywhere, it
//! ends the same. The one thing that must succeed is that the netdev comes home; what cannot be
//! given back to it after that (an address that somebody else has now, a route whose gateway is
//! gone) is a warning, never a reason to strand it.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use netlink_packet_core::Emitable;
use netlink_packet_route::link::LinkFlags;

use super::{
    replay,
    snapshot::{KEPT_FLAGS, Message, Snapshot},
    words,
};
use crate::kernel::{
    self, Name, Namespace, Socket, address,
    link::{self, By, Change, Link},
    neighbour, route, rule, sysctl,
};

/// How long a netdev may be on its way out of a namespace that is being torn down. The kernel
/// does that after two grace periods, with many namespaces one after the other.
pub const ON_ITS_WAY: Duration = Duration::from_secs(5);

/// Where a restoration happens.
#[derive(Debug)]
pub struct Ground<'a> {
    /// The host's namespace, in which the thread is.
    pub home: &'a Namespace,
    /// A socket of it.
    pub socket: &'a mut Socket,
    /// The proc file system.
    pub proc: &'a Path,
    /// The sysfs of the host.
    pub sys: &'a Path,
}

/// How a netdev came home.
#[derive(Debug, Default)]
pub struct Homecoming {
    /// What could not be given back to it, in words.
    pub warnings: Vec<String>,
    /// Somebody else has its name now; it goes by this one until that is repaired.
    pub goes_by: Option<Name>,
    /// The hardware itself is gone from the host; there is nothing to restore.
    pub hardware_gone: bool,
}

/// Why a netdev did not come home.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is in no namespace that can be looked into.
    #[error("{name} is neither on the host nor in the pod's namespace after {waited:?}")]
    Nowhere {
        /// Its name on the host.
        name: Name,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
}

/// Brings a netdev home, out of `pod` when it is there, and restores it.
///
/// # Errors
/// It is nowhere to be found within `patience`, or the kernel does not let it go.
pub fn bring_home(
    ground: &mut Ground<'_>,
    taken: &Snapshot,
    pod: Option<&Namespace>,
    patience: Duration,
) -> Result<Homecoming, Error> {
    let mut report = Homecoming::default();
    let started = Instant::now();
    loop {
        if let Some(link) = taken.identity.find(&link::list(ground.socket)?) {
            let link = link.clone();
            restore(ground, taken, link, &mut report)?;
            return Ok(report);
        }
        if let Some(pod) = pod {
            let mut inside = pod.socket(ground.home)?;
            if let Some(link) = taken.identity.find(&link::list(&mut inside)?) {
                move_home(ground, taken, &mut inside, link, &mut report)?;
                continue;
            }
        }
        if hardware_is_gone(ground.sys, taken) {
            report.hardware_gone = true;
            return Ok(report);
        }
        if started.elapsed() >= patience {
            return Err(Error::Nowhere {
                name: taken.name.clone(),
                waited: patience,
            });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the device below was unplugged, or a virtual link deleted with its namespace.
fn hardware_is_gone(sys: &Path, taken: &Snapshot) -> bool {
    match (&taken.bus, &taken.identity.bus_device) {
        (Some(bus), Some(device)) => {
            let devices = sys.join("bus").join(bus).join("devices");
            devices.is_dir() && !devices.join(device).exists()
        }
        // Links with a kind of their own die with their namespace.
        _ => taken.identity.kind.is_some(),
    }
}

/// Names of the host's netdevs that stand in a netdev's way, other than its own.
fn in_the_way(ground: &mut Ground<'_>, names: &[&Name]) -> kernel::Result<Vec<Name>> {
    let mut taken = Vec::new();
    for name in names {
        if link::get(ground.socket, By::Name(name.as_bytes()))?.is_some() {
            taken.push((*name).clone());
        }
    }
    Ok(taken)
}

fn move_home(
    ground: &mut Ground<'_>,
    taken: &Snapshot,
    inside: &mut Socket,
    link: &Link,
    report: &mut Homecoming,
) -> kernel::Result<()> {
    let mut names: Vec<&Name> = vec![&taken.name];
    names.extend(&link.altnames);
    let clashes = in_the_way(ground, &names)?;
    for altname in link.altnames.iter().filter(|name| clashes.contains(name)) {
        link::remove_altname(inside, link, altname)?;
    }
    let name = if clashes.contains(&taken.name) {
        stand_in(link)
    } else {
        taken.name.clone()
    };
    let change = Change {
        netns: Some(ground.home),
        name: Some(name.as_bytes()),
        // On kernels before 6.2 a link that is up cannot be renamed.
        flags: Some((LinkFlags::empty(), LinkFlags::Up)),
        ..Change::default()
    };
    let what = format!("move {} home as {name}", link.name);
    match link::change(inside, &what, link.index, &change) {
        // The name was taken between the look and the move.
        Err(e) if e.is(libc::EEXIST) && name == taken.name => {
            let name = stand_in(link);
            let change = Change {
                name: Some(name.as_bytes()),
                ..change
            };
            link::change(inside, what, link.index, &change)?;
        }
        done => done?,
    }
    report.warnings.extend(
        clashes
            .iter()
            .filter(|name| **name != taken.name)
            .map(|name| format!("alternative name {name} belongs to another netdev now")),
    );
    Ok(())
}

/// A name that nobody else has: the kernel's own choice for a netdev that comes back from a
/// dead namespace is `dev<index>`.
fn stand_in(link: &Link) -> Name {
    Name::from(format!("rdma-dev{}", link.index % 1_000_000).as_str())
}

fn restore(
    ground: &mut Ground<'_>,
    taken: &Snapshot,
    link: Link,
    report: &mut Homecoming,
) -> Result<(), Error> {
    let index = link.index;
    let mut name = link.name.clone();
    if name != taken.name {
        if link::get(ground.socket, By::Name(taken.name.as_bytes()))?
            .is_some_and(|l| l.index != index)
        {
            report.warnings.push(format!(
                "{} is the name of another netdev now; it goes by {name} until that is gone",
                taken.name
            ));
            report.goes_by = Some(name.clone());
        } else {
            rename(ground, &link, &taken.name, report)?;
            name = taken.name.clone();
        }
    }
    let mut attempt = |done: kernel::Result<()>| match done {
        Ok(()) => {}
        Err(e) => report.warnings.push(e.to_string()),
    };
    for altname in &link.altnames {
        if !taken.altnames.contains(altname) {
            attempt(link::remove_altname(ground.socket, &link, altname));
        }
    }
    for altname in &taken.altnames {
        attempt(link::add_altname(ground.socket, &link, altname));
    }
    if let Some(vf) = &taken.vf {
        // What is refused is tried again, and told, at the end.
        let _ = vf.restore_rights(ground.sys, ground.socket)?;
    }
    let mac: Option<hca::MacAddress> = taken.identity.mac.parse().ok();
    // An IPoIB address is the port's own affair.
    if let Some(mac) = mac.filter(|mac| mac.bytes().len() == 6 && mac.bytes() != link.mac) {
        let change = Change {
            mac: Some(mac.bytes()),
            ..Change::down()
        };
        attempt(link::change(
            ground.socket,
            format_args!("restore {mac} of {}", taken.name),
            index,
            &change,
        ));
    }
    for change in attributes(taken, &link) {
        attempt(link::change(
            ground.socket,
            format_args!("restore {}", taken.name),
            index,
            &change,
        ));
    }
    for (key, value) in &taken.sysctls {
        let Some((group, key)) = key.rsplit_once('/') else {
            continue;
        };
        if sysctl::read(ground.proc, group, &name, key).is_some_and(|now| now != *value) {
            attempt(sysctl::write(ground.proc, group, &name, key, value));
        }
    }
    if taken.up {
        let what = format!("set {} up", taken.name);
        attempt(link::change(ground.socket, what, index, &Change::up()));
    }
    if let Some(vf) = &taken.vf {
        let warnings = vf.restore(ground.sys, ground.socket)?;
        report.warnings.extend(warnings);
    }
    let known = taken.identity.index;
    let home = taken.name.to_string();
    replayed(&taken.addresses, report, words::address, |m, what| {
        address::replace(ground.socket, what, &replay::address(&m, index))
    });
    replayed(&taken.neighbours, report, words::neighbour, |m, what| {
        neighbour::replace(ground.socket, what, &replay::neighbour(&m, index))
    });
    replayed(&taken.routes, report, words::route, |m, what| {
        let copy = replay::route(&m, known, index);
        // A route over several netdevs lost this next hop; the whole is put in its place.
        if replay::leaves_elsewhere(&m, known) {
            return route::replace(ground.socket, what, &copy);
        }
        match route::append(ground.socket, what, &copy) {
            Err(e) if e.is(libc::EEXIST) => Ok(()),
            done => done,
        }
    });
    replayed(&taken.rules, report, words::rule, |m, what| {
        rule::add(ground.socket, what, &replay::rule(&m, &home, &home))
    });
    report.warnings.extend(verify(ground, taken, index)?);
    Ok(())
}

fn rename(
    ground: &mut Ground<'_>,
    link: &Link,
    name: &Name,
    report: &mut Homecoming,
) -> kernel::Result<()> {
    // Its own alternative name may be the one it is to have.
    if link.altnames.contains(name) {
        link::remove_altname(ground.socket, link, name)?;
    }
    let what = format!("rename {} to {name}", link.name);
    let change = Change {
        name: Some(name.as_bytes()),
        flags: Some((LinkFlags::empty(), LinkFlags::Up)),
        ..Change::default()
    };
    match link::change(ground.socket, what, link.index, &change) {
        Err(e) if e.is(libc::EEXIST) => {
            report.warnings.push(e.to_string());
            report.goes_by = Some(link.name.clone());
            Ok(())
        }
        done => done,
    }
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
    report: &mut Homecoming,
    words: impl Fn(&T) -> String,
    mut send: impl FnMut(T, &str) -> kernel::Result<()>,
) where
    T: Emitable + netlink_packet_core::Parseable<[u8]>,
{
    for message in messages {
        match message.parse::<T>() {
            Ok(parsed) => {
                let what = format!("restore {}", words(&parsed));
                if let Err(e) = send(parsed, &what) {
                    report.warnings.push(e.to_string());
                }
            }
            Err(e) => report
                .warnings
                .push(format!("restore {}: {e}", message.text)),
        }
    }
}

/// Looks at the netdev again and says what is not as it was.
fn verify(ground: &mut Ground<'_>, taken: &Snapshot, index: u32) -> kernel::Result<Vec<String>> {
    let Some(link) = link::get(ground.socket, By::Index(index))? else {
        return Ok(vec![format!(
            "{} went away while it was restored",
            taken.name
        )]);
    };
    let now = Snapshot::take(ground.socket, ground.proc, &link)?;
    let mut wrong = Vec::new();
    let mut compare = |what: &str, now: &dyn std::fmt::Display, before: &dyn std::fmt::Display| {
        if now.to_string() != before.to_string() {
            wrong.push(format!("{}: {what} is {now}, was {before}", taken.name));
        }
    };
    compare("mtu", &now.mtu, &taken.mtu);
    compare("MAC address", &now.identity.mac, &taken.identity.mac);
    compare("up", &now.up, &taken.up);
    for (what, now, before) in [
        ("address", &now.addresses, &taken.addresses),
        ("route", &now.routes, &taken.routes),
        ("rule", &now.rules, &taken.rules),
        ("neighbour", &now.neighbours, &taken.neighbours),
    ] {
        for missing in before
            .iter()
            .filter(|m| now.iter().all(|n| n.text != m.text))
        {
            wrong.push(format!(
                "{}: {what} {} did not come back",
                taken.name, missing.text
            ));
        }
    }
    Ok(wrong)
}
