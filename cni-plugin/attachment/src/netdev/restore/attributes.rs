//! The netdev's own state: names, MAC address, settings, programs.

use std::collections::BTreeMap;

use netlink::{
    Name, Socket, bpf,
    link::{self, By, Change, Link},
};
use netlink_packet_route::link::LinkFlags;

use super::{
    HostContext, Returned,
    transfer::{ATTEMPTS, TEMPORARY, temporary_name},
};
use crate::netdev::snapshot::{
    KEPT_FLAGS, PROTO_DOWN, PROTO_DOWN_REASONS, Snapshot, mode, of_hexadecimal, settings,
};

/// `IF_OPER_TESTING`, `IF_OPER_DORMANT`, `IF_OPER_UP` (`include/uapi/linux/if.h`)
pub(super) const OPER_TESTING: u8 = 4;

pub(super) const OPER_DORMANT: u8 = 5;

pub(super) const OPER_UP: u8 = 6;

/// Restores the address of a virtual link while it is in the pod, so that it can be identified on
/// the host should this process end before the rest is restored.
pub(super) fn restore_mac(
    socket: &mut Socket,
    taken: &Snapshot,
    link: &Link,
    report: &mut Returned,
) {
    if taken.identity.is_virtual() {
        set_mac(socket, taken, link, report);
    }
}

/// Gives a netdev the address that it had. Of one of IPoIB that is the GUID (its last 8 bytes): the
/// rest is the kernel's.
pub(super) fn set_mac(socket: &mut Socket, taken: &Snapshot, link: &Link, report: &mut Returned) {
    let Ok(known) = taken.identity.mac.parse::<hca::MacAddress>() else {
        return;
    };
    let mac = match (link.mac.get(..12), known.bytes().get(12..20)) {
        (Some(of_kernel), Some(guid)) => hca::MacAddress::new([of_kernel, guid].concat()),
        _ => known,
    };
    if mac.bytes() == link.mac || mac.bytes().len() != link.mac.len() {
        return;
    }
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

/// Gives a netdev its name; where another netdev has that, one that says nothing. A name that the pod
/// chose does not stay: a network may mean another netdev by it, which is away.
pub(super) fn rename(
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
pub(super) fn set_name(
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
pub(super) fn remove_programs(
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
pub(super) fn restore_settings(
    host_context: &mut HostContext<'_>,
    taken: &Snapshot,
    link: &Link,
    report: &mut Returned,
) {
    let mut attempt = |done: netlink::Result<()>| {
        report.warnings.extend(done.err().map(|e| e.to_string()));
    };
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
    // The modes of IPoIB have MTUs of their own.
    let anew = match info.is_empty() {
        true => None,
        false => link::get(host_context.socket, By::Index(link.index)).unwrap_or_default(),
    };
    let link = anew.as_ref().unwrap_or(link);
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
pub(super) fn leave_dormant(
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

/// One request each, so that a driver that refuses one of them still takes the others.
pub(super) fn attributes<'a>(taken: &'a Snapshot, link: &Link) -> Vec<Change<'a>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn link() -> Link {
        Link {
            mtu: 1500,
            tx_queue_length: 1000,
            alias: Some("rail-zero".into()),
            flags: LinkFlags::Up | LinkFlags::Running | LinkFlags::Multicast | LinkFlags::Promisc,
            ..Link::default()
        }
    }

    fn taken() -> Snapshot {
        Snapshot {
            mtu: 1500,
            tx_queue_length: 1000,
            alias: Some("rail-zero".into()),
            flags: (LinkFlags::Multicast | LinkFlags::Promisc).bits(),
            ..Snapshot::default()
        }
    }

    /// MTU, queue length, alias and flags of each request.
    type Requests = Vec<(Option<u32>, Option<u32>, Option<String>, Option<LinkFlags>)>;

    fn requests(taken: &Snapshot) -> Requests {
        let changes = attributes(taken, &link());
        let text = |alias: &[u8]| String::from_utf8_lossy(alias).into_owned();
        changes
            .iter()
            .map(|change| {
                let alias = change.alias.map(text);
                let flags = change.flags.map(|(flags, of)| {
                    assert_eq!(
                        of, KEPT_FLAGS,
                        "whether it is up is another request's affair"
                    );
                    flags
                });
                (change.mtu, change.tx_queue_length, alias, flags)
            })
            .collect()
    }

    #[test]
    fn nothing_is_asked_for_that_is_as_it_was() {
        assert_eq!(requests(&taken()), []);
    }

    #[test]
    fn each_attribute_that_differs_is_a_request_of_its_own() {
        let before = Snapshot {
            mtu: 9000,
            tx_queue_length: 5,
            alias: None,
            flags: LinkFlags::Multicast.bits(),
            ..taken()
        };
        assert_eq!(
            requests(&before),
            [
                (Some(9000), None, None, None),
                (None, Some(5), None, None),
                // An empty one removes it.
                (None, None, Some(String::new()), None),
                (None, None, None, Some(LinkFlags::Multicast)),
            ]
        );
        let alias = Snapshot {
            alias: Some("rail-one".into()),
            ..taken()
        };
        let expected = (None, None, Some("rail-one".to_owned()), None);
        assert_eq!(requests(&alias), [expected]);
    }
}
