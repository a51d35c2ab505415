//! GID tables of RoCE ports (G): without the right entry an address has no path.

use std::collections::BTreeSet;
use std::net::IpAddr;

use hca::{GidEntry, ROCE_V2};

use super::context::Context;
use super::engine::{Check, Judged, Object, check, some};
use super::link::{PortFacts, roce};
use crate::verdict::Verdict::{Fail, Warn};
use crate::verdict::{Finding, words};

pub(super) fn checks() -> Vec<Check> {
    vec![
        check("G01", "port", Fail, "every address has its RoCE v2 GID")
            .reads("gids and gid_attrs of the port, addresses of its netdev")
            .remedy("the table may be full (G06); set the address again, or reload the driver")
            .each(active_roce, g01_entries),
        check("G06", "port", Warn, "the GID table has room for all units")
            .reads("gids of the port, the configuration")
            .remedy(
                "offer fewer units (rdmaHcaMax, slots), unless most pods have no netdev of their \
                 own",
            )
            .each(active_roce, g06_room),
    ]
}

/// An idle port has no GIDs.
fn active_roce(context: &Context) -> Result<Vec<&PortFacts>, Finding> {
    let ports = roce(context)?.into_iter();
    some(
        ports.filter(|port| port.port.is_active()),
        "no RoCE port is active",
    )
}

fn v2(entries: &[GidEntry]) -> impl Iterator<Item = &GidEntry> {
    let is_v2 = |entry: &&GidEntry| entry.kind.as_deref() == Some(ROCE_V2);
    entries.iter().filter(is_v2)
}

/// Addresses of a port's netdev and of its children that have no GID.
fn lacking(port: &PortFacts, entries: &[GidEntry], addresses: &[(String, IpAddr)]) -> Vec<IpAddr> {
    let netdevs = entries.iter().filter_map(|entry| entry.netdev.as_deref());
    let netdevs: BTreeSet<&str> = netdevs.chain(port.port.netdev.as_deref()).collect();
    let of_port = addresses
        .iter()
        .filter(|(netdev, _)| netdevs.contains(netdev.as_str()));
    let ips = of_port.map(|(_, ip)| *ip);
    ips.filter(|ip| !v2(entries).any(|entry| entry.gid.ip() == *ip))
        .collect()
}

fn g01_entries(context: &Context, check: &Check, port: &PortFacts) -> Judged {
    let entries = &port.port.gids.entries;
    let shown = v2(entries).map(|entry| format!("{} {}", entry.index, entry.gid.ip()));
    let shown = words(&shown.collect::<Vec<_>>(), ", ");
    if v2(entries).next().is_none() {
        return Ok(Finding::fail(
            "no RoCE v2 GID: no connection can be made",
            port.fill(
                "give {netdev} an address and set it up; cma_roce_mode or the driver may hold it to \
                 RoCE v1",
            ),
        ));
    }
    let addresses = context.addresses.as_ref().map_err(Clone::clone)?;
    let lacking = lacking(port, entries, addresses);
    let lacking: Vec<String> = lacking.iter().map(ToString::to_string).collect();
    let finding = match lacking.is_empty() {
        true => Finding::pass("all addresses have one"),
        false => {
            let why = format!("{} has none: connections from it fail", lacking.join(", "));
            check.fault(port, &why)
        }
    };
    Ok(finding.read("RoCE v2 GIDs", shown))
}

fn g06_room(_: &Context, check: &Check, port: &PortFacts) -> Judged {
    let Some(room) = port.port.gids.pods() else {
        return Err(Finding::unknown(
            "the driver does not report the GID table's size",
        ));
    };
    let shared = port.pools.iter().filter(|pool| pool.shared);
    let wanted: u32 = shared.map(|pool| pool.units).sum();
    let finding = match wanted > room {
        true => {
            let why = format!("{wanted} units with an address each, and room for about {room}");
            check.fault(port, &why)
        }
        false => Finding::pass(format!("room for about {room} child netdevs")),
    };
    Ok(finding.read("GID entries", port.port.gids.size))
}
