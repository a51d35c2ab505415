//! Addresses, routes, rules and neighbours of the netdev.

use netlink::{Socket, address, clock, link::Link, neighbour, route, rule};
use netlink_packet_core::Emitable;
use netlink_packet_route::{AddressFamily, address::AddressMessage};

use super::{HostContext, Returned};
use crate::netdev::{
    display, replay,
    snapshot::{Message, Snapshot},
};

/// Addresses and what depends on them, in the order in which the kernel takes them.
pub(super) fn restore_network(
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
    replayed(
        &taken.neighbours,
        warnings,
        display::neighbour,
        |m, what| neighbour::replace(socket, what, &replay::neighbour(&m, index)),
    );
    replayed(&taken.proxies, warnings, display::neighbour, |m, what| {
        neighbour::replace(socket, what, &replay::neighbour(&m, index))
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
pub(super) fn in_order(addresses: &[Message]) -> impl Iterator<Item = &Message> {
    let is_v6 = |message: &&Message| {
        let address = message.parse::<AddressMessage>();
        address.is_ok_and(|address| address.header.family == AddressFamily::Inet6)
    };
    let v4 = addresses.iter().filter(move |message| !is_v6(message));
    v4.chain(addresses.iter().rev().filter(is_v6))
}

/// Takes away addresses that a renaming gave another label (`inetdev_changename()`), which replacing
/// them does not change.
pub(super) fn remove_mislabelled(
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

/// How many seconds of its addresses' lifetimes have passed since a snapshot was taken. Those of
/// static addresses begin again: the address was in use as the
/// node's, and what renews it on the host could not.
pub(super) fn passed_since(taken: &Snapshot) -> netlink::Result<u64> {
    if taken.static_addresses {
        return Ok(0);
    }
    let now = clock::since_boot()?.as_secs();
    Ok(now.saturating_sub(taken.taken_at))
}

/// The addresses whose lifetime has ended since.
pub(super) fn over(taken: &Snapshot, passed: u64) -> impl Iterator<Item = &Message> {
    taken.addresses.iter().filter(move |message| {
        let address = message.parse::<AddressMessage>();
        address.is_ok_and(|address| replay::aged(&address, passed).is_none())
    })
}

/// Sends each message of the snapshot again; those the kernel refuses become warnings.
pub(super) fn replayed<T>(
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
