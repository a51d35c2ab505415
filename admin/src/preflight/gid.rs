//! GID tables of RoCE ports (G): without the right entry an address has no path.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use hca::GidType;
use hca::gid::{GidEntry, GidTable};

use super::check::Check;
use super::context::Context;
use crate::verdict::{Finding, NO_NIC};

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// RoCE ports.
    pub ports: Vec<PortFacts>,
    /// The container's checks are made.
    pub in_pod: bool,
}

/// A RoCE port.
#[derive(Debug, Clone)]
pub(super) struct PortFacts {
    /// `mlx5_0/1`.
    pub id: String,
    /// It is active: an idle port has no GIDs.
    pub active: bool,
    /// Its GID table.
    pub gids: GidTable,
    /// Addresses of its netdev and of children of it, with their netdev.
    pub addresses: Vec<(String, IpAddr)>,
    /// Units that pools make of it, each a child with addresses of its own; 0 if none is shared.
    pub children: u32,
}

/// How long the kernel may take to fill the table after a netdev came up.
const FILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The checks.
pub(super) const CHECKS: &[Check<Facts>] = &[
    Check {
        id: "G01",
        title: "every address has its RoCE v2 GID",
        judge: g01_entries,
    },
    Check {
        id: "G02",
        title: "GIDs belong to the netdev of their address",
        judge: g02_netdev,
    },
    Check {
        id: "G03",
        title: "the GID index is the same on all ports",
        judge: g03_index,
    },
    Check {
        id: "G06",
        title: "the GID table has room for all units",
        judge: g06_room,
    },
];

/// Reads the host. In a container it waits a little for the kernel to fill the tables.
#[must_use]
pub(super) fn read(context: &Context) -> Facts {
    let mut facts = read_once(context, &context.snapshot.inventory);
    let deadline = Instant::now() + FILL_TIMEOUT;
    while facts.in_pod && facts.ports.iter().any(|port| !port.lacking().is_empty()) {
        if Instant::now() >= deadline {
            break;
        }
        thread::sleep(Duration::from_millis(100));
        match hca::inventory(&context.host) {
            Ok(inventory) => facts = read_once(context, &inventory),
            Err(_) => break,
        }
    }
    facts
}

fn read_once(context: &Context, inventory: &hca::Inventory) -> Facts {
    let network = context.network();
    let ports = inventory.rdma_devices.iter();
    let ports = ports.filter(|device| context.offered(&device.name));
    let ports = ports.flat_map(|device| {
        let network = &network;
        let roce = device
            .ports
            .iter()
            // iWARP runs over Ethernet as well, but has no GIDs to speak of.
            .filter(|port| device.is_roce(port));
        roce.map(move |port| {
            let netdevs = port
                .gids
                .entries
                .iter()
                .filter_map(|entry| entry.netdev.clone());
            let mut netdevs: Vec<String> = port.netdev.iter().cloned().chain(netdevs).collect();
            netdevs.sort();
            netdevs.dedup();
            PortFacts {
                id: format!("{}/{}", device.name, port.number),
                active: port.is_active(),
                gids: port.gids.clone(),
                addresses: netdevs
                    .iter()
                    .flat_map(|name| network.of(name).map(|a| (name.clone(), a.ip)))
                    .collect(),
                children: context
                    .pools_of(&device.name)
                    .iter()
                    .filter(|pool| pool.shared)
                    .map(|pool| pool.units)
                    .sum(),
            }
        })
    });
    Facts {
        ports: ports.collect(),
        in_pod: context.in_pod(),
    }
}

impl PortFacts {
    fn of(&self, ip: IpAddr) -> Option<&GidEntry> {
        self.v2().find(|entry| entry.gid.ip() == ip)
    }

    fn v2(&self) -> impl Iterator<Item = &GidEntry> {
        self.gids
            .entries
            .iter()
            .filter(|entry| entry.kind == Some(GidType::RoceV2))
    }

    /// Addresses without a GID.
    fn lacking(&self) -> Vec<IpAddr> {
        let addresses = self.addresses.iter().map(|(_, ip)| *ip);
        addresses.filter(|ip| self.of(*ip).is_none()).collect()
    }
}

fn each(facts: &Facts, judge: impl Fn(&PortFacts) -> Option<Finding>) -> Vec<Finding> {
    if facts.ports.is_empty() {
        return vec![Finding::not_applicable(NO_NIC)];
    }
    if !facts.ports.iter().any(|port| port.active) {
        return vec![Finding::not_applicable("no RoCE port is active")];
    }
    let active = facts.ports.iter().filter(|port| port.active);
    active
        .filter_map(|port| Some(judge(port)?.on(&port.id)))
        .collect()
}

fn list(port: &PortFacts) -> String {
    let entries: Vec<String> = port
        .v2()
        .map(|entry| format!("{} {}", entry.index, entry.gid.ip()))
        .collect();
    if entries.is_empty() {
        "none".to_owned()
    } else {
        entries.join(", ")
    }
}

fn g01_entries(facts: &Facts) -> Vec<Finding> {
    each(facts, |port| {
        let lacking: Vec<String> = port.lacking().iter().map(ToString::to_string).collect();
        let finding = if port.v2().next().is_none() {
            Finding::fail(
                "no RoCE v2 GID at all: no connection can be made",
                "bring the netdev up with an address; cma_roce_mode or the driver may hold it to RoCE v1",
            )
        } else if lacking.is_empty() {
            Finding::pass("all addresses have one")
        } else {
            Finding::fail(
                format!("{} has none: connections from it fail", lacking.join(", ")),
                "the table may be full (G06); set the address again, or reload the driver",
            )
        };
        Some(finding.read("RoCE v2 GIDs", list(port)))
    })
}

fn g02_netdev(facts: &Facts) -> Vec<Finding> {
    each(facts, |port| {
        let wrong: Vec<String> = port
            .addresses
            .iter()
            .filter_map(|(netdev, ip)| {
                let of = port.of(*ip)?.netdev.as_ref()?;
                (of != netdev).then(|| format!("{ip} is on {netdev}, its GID on {of}"))
            })
            .collect();
        if port.addresses.is_empty() {
            return Some(Finding::not_applicable("its netdev has no address"));
        }
        Some(if wrong.is_empty() {
            Finding::pass("they do")
        } else {
            Finding::warn(
                format!("{}: traffic goes out with another source", wrong.join("; ")),
                "give each address to one netdev only",
            )
        })
    })
}

fn g03_index(facts: &Facts) -> Vec<Finding> {
    let first_ipv4 = |port: &PortFacts| {
        let mut addresses = port.addresses.iter().filter(|(_, ip)| ip.is_ipv4());
        addresses
            .find_map(|(_, ip)| port.of(*ip))
            .map(|entry| entry.index)
    };
    let indices: Vec<(&str, u32)> = facts
        .ports
        .iter()
        .filter(|port| port.active)
        .filter_map(|port| Some((port.id.as_str(), first_ipv4(port)?)))
        .collect();
    let Some((_, first)) = indices.first() else {
        let why = if facts.ports.is_empty() {
            NO_NIC
        } else {
            "no port has an IPv4 GID"
        };
        return vec![Finding::not_applicable(why)];
    };
    let list: Vec<String> = indices
        .iter()
        .map(|(id, index)| format!("{id} {index}"))
        .collect();
    let finding = if indices.iter().all(|(_, index)| index == first) {
        Finding::pass(format!("{first} everywhere here; other nodes may differ"))
    } else {
        Finding::warn(
            "it differs: one NCCL_IB_GID_INDEX or perftest -x for all is wrong for some",
            "leave NCCL_IB_GID_INDEX unset (NCCL 2.21 and later find it), or use rdma_cm (-R)",
        )
    };
    vec![finding.read("index of the IPv4 RoCE v2 GID", list.join(", "))]
}

fn g06_room(facts: &Facts) -> Vec<Finding> {
    each(facts, |port| {
        let Some(room) = port.gids.pods() else {
            return Some(Finding::unknown("the table's size cannot be read"));
        };
        let wanted = port.children;
        let finding = if wanted > room {
            Finding::warn(
                format!(
                    "{wanted} units, each with an address of its own, are more than fit: about {room}"
                ),
                "offer fewer units (rdmaHcaMax, slots), unless most pods have no netdev of their own",
            )
        } else {
            Finding::pass(format!("about {room} child netdevs fit"))
        };
        Some(finding.read("GID slots", port.gids.slots))
    })
}

#[cfg(test)]
mod tests;
