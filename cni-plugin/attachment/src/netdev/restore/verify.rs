//! What is not as it was before the pod.

use netlink::{
    Name, bpf,
    link::{self, By},
};
use netlink_packet_route::link::LinkFlags;

use super::{
    HostContext,
    network::{over, passed_since},
};
use crate::netdev::{
    identity::port_part,
    snapshot::{Message, Snapshot},
};

/// Reads the netdev again and says what is not as it was.
pub(super) fn verify(
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
    wrong.extend(
        link.xdp
            .iter()
            .map(|(mode, id)| format!("XDP program {id} ({mode} mode) is still attached")),
    );
    for program in bpf::tcx(index).unwrap_or_default() {
        wrong.push(format!("{program} is still attached"));
    }
    Ok(wrong
        .into_iter()
        .map(|what| format!("{}: {what}", taken.name))
        .collect())
}

/// What of `before` is not so now, but for what ethtool sets and for addresses that have expired.
/// Pure.
pub(super) fn differences(before: &Snapshot, now: &Snapshot, expired: &[Message]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut compare = |what: &str, now: &dyn std::fmt::Display, before: &dyn std::fmt::Display| {
        let (now, before) = (now.to_string(), before.to_string());
        if now != before {
            wrong.push(format!("{what} is {now}, was {before}"));
        }
    };
    let text = |name: &Option<Name>| name.as_ref().map_or("none".to_owned(), Name::to_string);
    compare("mtu", &now.mtu, &before.mtu);
    let (mac, mac_before) = (&now.identity.mac, &before.identity.mac);
    compare("MAC address", &port_part(mac), &port_part(mac_before));
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
    if now.promiscuity > before.promiscuity {
        wrong.push(format!(
            "promiscuity is {}, was {}: something still listens to all of it",
            now.promiscuity, before.promiscuity
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
    for (what, now, before) in [
        ("address", &now.addresses, &before.addresses),
        ("route", &now.routes, &before.routes),
        ("rule", &now.rules, &before.rules),
        ("neighbour", &now.neighbours, &before.neighbours),
        ("proxy", &now.proxies, &before.proxies),
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
