//! `rdma-netdev list`: who has what.

use anyhow::Result;
use ipam::table::{age, cell, table};
use rdma_netdev::{
    journal::Record,
    node::{Places, now},
    reclaim::{Netns, netns},
};
use serde_json::{Value, json};

use super::{open, records, say, say_json};

pub(super) fn run(places: &Places, as_json: bool) -> Result<()> {
    let node = open(places)?;
    let records = records(&node)?;
    let records = records.iter().map(|(_, record)| record);
    if as_json {
        say_json(&records.map(|record| document(record, &node.boot)).collect());
    } else {
        let now = now();
        let rows: Vec<_> = records.map(|record| row(record, &node.boot, now)).collect();
        let header = [
            "POD",
            "INTERFACE",
            "NETWORK",
            "KIND",
            "NETDEV",
            "NETNS",
            "CONTAINER",
            "AGE",
        ];
        say(&table(&header, &rows));
    }
    Ok(())
}

/// What became of the attachment's namespace, in a word.
fn fate(record: &Record, boot: &str) -> &'static str {
    if !boot.is_empty() && record.boot != boot {
        return "gone";
    }
    match netns(&record.netns) {
        Netns::Present => "alive",
        Netns::Gone => "gone",
        Netns::Unknown(_) => "unknown",
    }
}

/// The kind of attachment and the netdev of the host that it is about.
pub(super) fn what(record: &Record) -> (&str, &str) {
    match (&record.moved, &record.child) {
        (Some(netdev), _) => ("move", &netdev.name),
        (None, Some(child)) => (&child.kind, &child.master),
        (None, None) if !record.rdma.is_empty() => ("rdma-only", ""),
        // Begun and not made, or already undone but for its addresses.
        (None, None) => ("", ""),
    }
}

fn row(record: &Record, boot: &str, now: u64) -> Vec<String> {
    let (kind, netdev) = what(record);
    let seconds = now.saturating_sub(record.created);
    let container = &record.container_id;
    vec![
        cell(record.pod.as_deref().unwrap_or_default()),
        cell(&record.ifname),
        cell(&record.network),
        cell(kind),
        cell(netdev),
        fate(record, boot).to_owned(),
        cell(container.get(..12).unwrap_or(container)),
        age(i64::try_from(seconds).unwrap_or(i64::MAX)),
    ]
}

fn document(record: &Record, boot: &str) -> Value {
    let (kind, netdev) = what(record);
    json!({
        "pod": record.pod,
        "interface": record.ifname,
        "network": record.network,
        "container": record.container_id,
        "kind": Some(kind).filter(|kind| !kind.is_empty()),
        "netdev": Some(netdev).filter(|netdev| !netdev.is_empty()),
        "pciAddress": record.moved.as_ref().and_then(|moved| moved.identity.bus_device.as_deref()),
        "rdmaDevices": record.rdma.iter().map(|device| &device.name).collect::<Vec<_>>(),
        "netns": record.netns.path,
        "netnsState": fate(record, boot),
        "created": record.created,
    })
}
