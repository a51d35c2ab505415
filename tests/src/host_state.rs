//! A namespace's whole network state as lines that can be compared: what a case reads before and
//! after, so that nothing changes unnoticed.
//!
//! Links are compared attribute by attribute as the kernel sends them, with bytes that are no
//! UTF-8 written as `\xNN`. What changes by itself is left out: counters, indexes (a link that
//! was away may come back with another one), remaining lifetimes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::SockProtocol;

use crate::cni_host::differences;
use crate::netns::{Netns, run};
use crate::raw_netlink::{Netlink, attributes, four, hex};
use crate::scene::bounded;

/// What is compared, by name.
pub type State = BTreeMap<String, String>;

/// How long the kernel may take to settle carriers and link-local addresses.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

/// So many differences are enough for a message.
const SHOWN: usize = 12;

const RTM_GETLINK: u16 = 18;
const RTM_GETRULE: u16 = 34;
const RTM_GETQDISC: u16 = 38;
/// `struct fib_rule_hdr` with family `AF_INET6`.
const RULES_OF_IPV6: [u8; 12] = [10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const IFF_UP: u32 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFLA_BROADCAST: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_QDISC: u16 = 6;
const IFLA_STATS: u16 = 7;
const IFLA_MASTER: u16 = 10;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_STATS64: u16 = 23;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_CARRIER: u16 = 33;
const IFLA_CARRIER_CHANGES: u16 = 35;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_CARRIER_UP_COUNT: u16 = 47;
const IFLA_CARRIER_DOWN_COUNT: u16 = 48;
const IFLA_INFO_KIND: u16 = 1;
const IF_OPER_DOWN: u8 = 2;
const IF_OPER_LOWERLAYERDOWN: u8 = 3;
const IF_OPER_UP: u8 = 6;
/// `VF`, without statistics.
const EXT_MASK: u32 = 1 | 8;

/// Names of attributes for messages; others are shown by number.
const ATTRIBUTES: &[(u16, &str)] = &[
    (IFLA_ADDRESS, "address"),
    (IFLA_BROADCAST, "broadcast"),
    (4, "mtu"),
    (IFLA_QDISC, "qdisc"),
    (13, "txqueuelen"),
    (IFLA_OPERSTATE, "operstate"),
    (17, "linkmode"),
    (IFLA_LINKINFO, "linkinfo"),
    (IFLA_IFALIAS, "alias"),
    (27, "group"),
    (30, "promiscuity"),
    (31, "tx queues"),
    (32, "rx queues"),
    (IFLA_CARRIER, "carrier"),
    (39, "protodown"),
    (40, "gso_max_segs"),
    (41, "gso_max_size"),
    (43, "xdp"),
    (54, "permanent address"),
    (58, "gro_max_size"),
    (61, "allmulti"),
    (63, "gso_ipv4_max_size"),
    (64, "gro_ipv4_max_size"),
];

/// What `ip` is to show, one object a line; rules of IPv6 are read without it, which shows one
/// family at a time.
const SHOWN_BY_IP: &str = "\
    addr show\n\
    maddr show\n\
    route show table all\n\
    rule show\n\
    nexthop show\n\
    neigh show nud permanent\n\
    neigh show proxy\n\
    token list\n";

/// The state of a namespace: links, addresses, routes of all tables, rules, nexthop objects,
/// permanent and proxy neighbours, multicast memberships, queueing disciplines, filters and
/// sysctls. Read once the kernel has settled carriers and addresses, or has not in
/// [`SETTLE_TIMEOUT`].
///
/// # Errors
/// `ip` or the kernel failed.
pub fn state(netns: &Netns) -> Result<State> {
    let started = Instant::now();
    loop {
        let read = read(netns)?;
        if read.settled || started.elapsed() > SETTLE_TIMEOUT {
            return Ok(read.state);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Read {
    state: State,
    /// Nothing of it is about to change by itself.
    settled: bool,
}

fn read(netns: &Netns) -> Result<Read> {
    let (mut state, links, text) = netns.enter(|| {
        // First: routes and addresses follow the links, which may settle between two readings.
        let (mut state, links) = links()?;
        let mut ip = Command::new("ip");
        let answer = bounded(ip.args(["-o", "-batch", "-"]), SHOWN_BY_IP.as_bytes())?;
        ensure!(answer.status.success(), "ip: {}", answer.stderr);
        for rule in Netlink::open(SockProtocol::NetlinkRoute)?.dump(RTM_GETRULE, &RULES_OF_IPV6)? {
            state.insert(format!("rule of IPv6 {}", hex(&rule)), String::new());
        }
        if has_chosen_qdiscs()? {
            for line in run(Command::new("tc").args(["qdisc", "show"]))?.lines() {
                if let Some(line) = stable("qdisc", line) {
                    state.insert(format!("qdisc {line}"), String::new());
                }
            }
        }
        for directory in ["ipv4/conf", "ipv4/neigh", "ipv6/conf", "ipv6/neigh"] {
            sysctls(&Path::new("/proc/sys/net").join(directory), &mut state);
        }
        Ok((state, links, answer.stdout))
    })?;
    for line in text.lines() {
        let list = kind_of_line(line);
        if let Some(line) = stable(list, line) {
            let times = state.entry(format!("{list} {line}")).or_default();
            times.push('*');
        }
    }
    order_of_addresses(&text, &mut state);
    for link in with_filters(&state, &links.names) {
        for parent in ["root", "ingress", "egress"] {
            let shown = run(Command::new("tc").args([
                "-netns",
                netns.name(),
                "filter",
                "show",
                "dev",
                &link,
                parent,
            ]));
            for line in shown.unwrap_or_default().lines() {
                let line = without_values_of(&["id"], line);
                state.insert(format!("filter {link} {parent} {line}"), String::new());
            }
        }
    }
    let detecting = |line: &str| line.contains(" tentative") && !line.contains(" dadfailed");
    let settled = links.settled && !text.lines().any(detecting);
    Ok(Read { state, settled })
}

/// Fails with the differences if a namespace is not as before once the kernel has settled.
///
/// # Errors
/// It is not, or cannot be read.
pub fn unchanged(before: &State, mut now: impl FnMut() -> Result<State>, when: &str) -> Result<()> {
    let started = Instant::now();
    loop {
        let lines = differences(before, &now()?);
        if lines.is_empty() {
            return Ok(());
        }
        if started.elapsed() > SETTLE_TIMEOUT {
            let more = lines.len().saturating_sub(SHOWN);
            let shown: Vec<String> = lines.into_iter().take(SHOWN).collect();
            bail!(
                "{when}, it is not as before:\n  {}\n  and {more} more",
                shown.join("\n  ")
            );
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Bytes for people: printable ASCII as it is, everything else as `\xNN`.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b' '..=b'~' => text.push(char::from(*byte)),
            other => text += &format!("\\x{other:02x}"),
        }
    }
    text
}

/// The settings below a directory, where they can be read.
fn sysctls(directory: &Path, state: &mut State) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sysctls(&path, state);
        } else if let Ok(value) = fs::read(&path) {
            let name = printable(path.as_os_str().as_encoded_bytes());
            state.insert(format!("sysctl {name}"), printable(value.trim_ascii()));
        }
    }
}

struct Links {
    names: Vec<Vec<u8>>,
    settled: bool,
}

/// The attributes of every link, and the links' names.
fn links() -> Result<(State, Links)> {
    let netlink = Netlink::open(SockProtocol::NetlinkRoute)?;
    let mut request = vec![0; 16];
    request.extend(crate::raw_netlink::attribute(
        IFLA_EXT_MASK,
        &EXT_MASK.to_ne_bytes(),
    )?);
    let messages = netlink.dump(RTM_GETLINK, &request)?;
    let mut by_index = BTreeMap::new();
    for message in &messages {
        by_index.insert(four(message, 4)?, name_of(message)?);
    }
    let mut state = State::new();
    let mut settled = true;
    for message in &messages {
        describe(message, &by_index, &mut state)?;
        settled &= has_settled(message)?;
    }
    let names = by_index.into_values().collect();
    Ok((state, Links { names, settled }))
}

/// Whether the operational state says what the carrier does: the kernel lets it follow from its work
/// queue, up to a second later (`net/core/link_watch.c`).
fn has_settled(message: &[u8]) -> Result<bool> {
    let flags = u32::from_ne_bytes(four(message, 8)?);
    let all = attributes(message.get(16..).unwrap_or_default())?;
    let byte = |wanted| {
        let found = all.iter().find(|(kind, _)| *kind == wanted);
        found.and_then(|(_, value)| value.first().copied())
    };
    Ok(match (byte(IFLA_CARRIER), byte(IFLA_OPERSTATE)) {
        (Some(0), Some(state)) => state != IF_OPER_UP,
        (Some(_), Some(state)) if flags & IFF_UP != 0 => {
            state != IF_OPER_DOWN && state != IF_OPER_LOWERLAYERDOWN
        }
        _ => true,
    })
}

fn name_of(message: &[u8]) -> Result<Vec<u8>> {
    let all = attributes(message.get(16..).unwrap_or_default())?;
    let (_, name) = all
        .into_iter()
        .find(|(kind, _)| *kind == IFLA_IFNAME)
        .context("a link without a name")?;
    Ok(name.strip_suffix(&[0]).unwrap_or(name).to_vec())
}

fn describe(
    message: &[u8],
    by_index: &BTreeMap<[u8; 4], Vec<u8>>,
    state: &mut State,
) -> Result<()> {
    let name = printable(&name_of(message)?);
    let mut set = |key: &str, value: String| state.insert(format!("link {name} {key}"), value);
    let flags = u32::from_ne_bytes(four(message, 8)?);
    set("flags", format!("{flags:#x}"));
    let all = attributes(message.get(16..).unwrap_or_default())?;
    let elsewhere = all.iter().any(|(kind, _)| *kind == IFLA_LINK_NETNSID);
    let other = |value: &[u8]| -> String {
        let index = four(value, 0).unwrap_or_default();
        match by_index.get(&index) {
            Some(name) if !elsewhere => printable(name),
            _ => format!("index {}", u32::from_ne_bytes(index)),
        }
    };
    for (kind, value) in all {
        match kind {
            IFLA_IFNAME
            | IFLA_STATS
            | IFLA_STATS64
            | IFLA_AF_SPEC
            | IFLA_CARRIER_CHANGES
            | IFLA_CARRIER_UP_COUNT
            | IFLA_CARRIER_DOWN_COUNT => {}
            // What a link that is down sends with is chosen when it is set up.
            IFLA_QDISC if flags & IFF_UP == 0 => {}
            IFLA_LINK => drop(set("link", other(value))),
            IFLA_MASTER => drop(set("master", other(value))),
            IFLA_IFALIAS | IFLA_QDISC => drop(set(attribute_name(kind).as_str(), printable(value))),
            IFLA_LINKINFO => {
                let info = attributes(value)?;
                let kind_of = |value: &[u8]| value.starts_with(b"bridge");
                // A bridge's data has timers in it.
                let bridge = info.iter().any(|(k, v)| *k == IFLA_INFO_KIND && kind_of(v));
                let text = if bridge {
                    "bridge".to_owned()
                } else {
                    hex(value)
                };
                set("linkinfo", text);
            }
            IFLA_PROP_LIST => {
                let mut altnames: Vec<String> = attributes(value)?
                    .into_iter()
                    .filter(|(kind, _)| *kind == IFLA_ALT_IFNAME)
                    .map(|(_, name)| printable(name.strip_suffix(&[0]).unwrap_or(name)))
                    .collect();
                altnames.sort();
                set("altnames", altnames.join(" "));
            }
            _ => drop(set(attribute_name(kind).as_str(), hex(value))),
        }
    }
    Ok(())
}

fn attribute_name(kind: u16) -> String {
    match ATTRIBUTES.iter().find(|(number, _)| *number == kind) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("attribute {kind}"),
    }
}

/// What a line of `ip` is about: lists do not follow each other with headings.
fn kind_of_line(line: &str) -> &'static str {
    let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let second = rest.trim_start();
    if first == "token" {
        "token"
    } else if first == "id" {
        "nexthop"
    } else if second.starts_with("from ") || second.starts_with("not from ") {
        "rule"
    } else if first.ends_with(':') {
        let third = second.split_whitespace().nth(1);
        let address =
            third.is_some_and(|word| word == "inet" || word == "inet6") && second.contains("scope");
        if address || second.contains("<") {
            "address"
        } else {
            "multicast"
        }
    } else if line.trim_end().ends_with(" proxy") {
        "proxy"
    } else if line.contains(" PERMANENT") {
        "neighbour"
    } else {
        "route"
    }
}

/// A line without what changes by itself; nothing if all of it does.
fn stable(list: &str, line: &str) -> Option<String> {
    let mut line = line.trim().to_owned();
    match list {
        // Only what an administrator added; the rest follows from the addresses.
        "multicast" => {
            line = line
                .split_once(char::is_whitespace)
                .filter(|_| line.contains("static"))?
                .1
                .to_owned();
        }
        "address" => {
            line = line.split_once(": ")?.1.to_owned();
            line = without_values_of(&["proto"], &line);
            for flag in ["tentative", "nodad", "optimistic"] {
                line = line.replace(&format!(" {flag}"), "");
            }
        }
        // The one that the kernel chose is compared with the link.
        "qdisc" if line.split_whitespace().nth(2) == Some("0:") => return None,
        "qdisc" => line = without_values_of(&["refcnt"], &line),
        _ => {}
    }
    let words: Vec<String> = line
        .split_whitespace()
        .map(
            |word| match word.strip_suffix("sec").map(str::parse::<u64>) {
                Some(Ok(_)) => "limited".to_owned(),
                _ => word.to_owned(),
            },
        )
        .collect();
    Some(words.join(" ")).filter(|line| !line.is_empty())
}

/// A line without these words and the words behind them.
fn without_values_of(words: &[&str], line: &str) -> String {
    let mut kept = Vec::new();
    let mut all = line.split_whitespace();
    while let Some(word) = all.next() {
        if words.contains(&word) {
            all.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// Which address is a link's first decides with which one the host speaks.
fn order_of_addresses(text: &str, state: &mut State) {
    for line in text.lines().filter(|line| kind_of_line(line) == "address") {
        let mut words = line.split_whitespace();
        if let (Some(_), Some(link), Some("inet"), Some(address)) =
            (words.next(), words.next(), words.next(), words.next())
        {
            let order = state
                .entry(format!("order of addresses {link}"))
                .or_default();
            *order += &format!("{address} ");
        }
    }
}

/// Whether any link has a queueing discipline that the kernel did not choose itself.
fn has_chosen_qdiscs() -> Result<bool> {
    let netlink = Netlink::open(SockProtocol::NetlinkRoute)?;
    for message in netlink.dump(RTM_GETQDISC, &[0; 20])? {
        // `struct tcmsg`: family and padding, interface, handle.
        if four(&message, 8)? != [0; 4] {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Links with a queueing discipline that may have filters.
fn with_filters(state: &State, links: &[Vec<u8>]) -> Vec<String> {
    let mut found: Vec<String> = state
        .keys()
        .filter(|key| key.starts_with("qdisc "))
        .filter_map(|key| key.split_once(" dev ")?.1.split(' ').next())
        .filter(|name| links.iter().any(|link| link == name.as_bytes()))
        .map(str::to_owned)
        .collect();
    found.sort();
    found.dedup();
    found
}
