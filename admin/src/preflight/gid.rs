//! GID tables of RoCE ports (G): without the right entry an address has no path.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use hca::gid::{GidEntry, GidTable};
use hca::{Port, ROCE_V2, RdmaDevice};

use super::check::{Findings, checks, need};
use super::context::{Context, ELSEWHERE, port_name};
use crate::verdict::{Finding, NO_NIC, words};

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// RoCE ports.
    pub ports: Vec<PortFacts>,
    /// The container's checks are made.
    pub in_pod: bool,
    /// Addresses are not known: this process is in another network namespace.
    pub elsewhere: bool,
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
    /// Addresses of its netdev and of children of it.
    pub addresses: Vec<IpAddr>,
    /// Units that pools make of it, each a child with addresses of its own; 0 if none is shared.
    pub children: u32,
}

/// How long the kernel may take to fill the table after a netdev came up.
const FILL_TIMEOUT: Duration = Duration::from_secs(2);

checks! {
    "G01" "every address has its RoCE v2 GID" g01_entries;
    "G03" "the GID index is the same on all ports" g03_index;
    "G06" "the GID table has room for all units" g06_room;
}

/// Reads the host. In a container it waits a little for the kernel to fill the tables.
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
    let addresses = context.addresses.iter().flatten();
    let facts = |(device, port): (&RdmaDevice, &Port)| {
        let netdevs = port
            .gids
            .entries
            .iter()
            .filter_map(|entry| entry.netdev.as_deref());
        let netdevs: BTreeSet<&str> = netdevs.chain(port.netdev.as_deref()).collect();
        let pools = context.pools_of(&device.name).iter();
        PortFacts {
            id: port_name(device, port),
            active: port.is_active(),
            gids: port.gids.clone(),
            addresses: addresses
                .clone()
                .filter(|address| netdevs.contains(address.netdev.as_str()))
                .map(|address| address.ip.ip())
                .collect(),
            children: pools
                .filter(|pool| pool.shared)
                .map(|pool| pool.units)
                .sum(),
        }
    };
    // iWARP runs over Ethernet as well, but has no GIDs to speak of.
    let roce = context
        .ports(inventory)
        .filter(|(device, port)| device.is_roce(port));
    Facts {
        ports: roce.map(facts).collect(),
        in_pod: context.settings.in_pod,
        elsewhere: context.addresses.is_none(),
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
            .filter(|entry| entry.kind.as_deref() == Some(ROCE_V2))
    }

    /// Addresses without a GID.
    fn lacking(&self) -> Vec<IpAddr> {
        let addresses = self.addresses.iter().copied();
        addresses.filter(|ip| self.of(*ip).is_none()).collect()
    }
}

fn each(facts: &Facts, judge: impl Fn(&PortFacts) -> Finding) -> Findings {
    need(!facts.ports.is_empty(), NO_NIC)?;
    let active: Vec<&PortFacts> = facts.ports.iter().filter(|port| port.active).collect();
    need(!active.is_empty(), "no RoCE port is active")?;
    Ok(active
        .into_iter()
        .map(|port| judge(port).on(&port.id))
        .collect())
}

fn list(port: &PortFacts) -> String {
    let entry = |entry: &GidEntry| format!("{} {}", entry.index, entry.gid.ip());
    words(&port.v2().map(entry).collect::<Vec<_>>(), ", ")
}

fn g01_entries(facts: &Facts) -> Findings {
    each(facts, |port| {
        let lacking: Vec<String> = port.lacking().iter().map(ToString::to_string).collect();
        let finding = if port.v2().next().is_none() {
            Finding::fail(
                "no RoCE v2 GID at all: no connection can be made",
                "bring the netdev up with an address; cma_roce_mode or the driver may hold it to RoCE v1",
            )
        } else if facts.elsewhere {
            Finding::unknown(ELSEWHERE)
        } else if lacking.is_empty() {
            Finding::pass("all addresses have one")
        } else {
            Finding::fail(
                format!("{} has none: connections from it fail", lacking.join(", ")),
                "the table may be full (G06); set the address again, or reload the driver",
            )
        };
        finding.read("RoCE v2 GIDs", list(port))
    })
}

fn g03_index(facts: &Facts) -> Findings {
    let first_ipv4 = |port: &PortFacts| {
        let mut addresses = port.addresses.iter().filter(|ip| ip.is_ipv4());
        addresses.find_map(|ip| Some(port.of(*ip)?.index))
    };
    let active = facts.ports.iter().filter(|port| port.active);
    let indices = active.filter_map(|port| Some((port.id.as_str(), first_ipv4(port)?)));
    let indices: Vec<(&str, u32)> = indices.collect();
    need(!facts.ports.is_empty(), NO_NIC)?;
    if facts.elsewhere {
        return Err(Finding::unknown(ELSEWHERE));
    }
    let Some((_, first)) = indices.first() else {
        return Err(Finding::not_applicable("no port has an IPv4 GID"));
    };
    let list = indices.iter().map(|(id, index)| format!("{id} {index}"));
    let list: Vec<String> = list.collect();
    let finding = if indices.iter().all(|(_, index)| index == first) {
        Finding::pass(format!("{first} everywhere here; other nodes may differ"))
    } else {
        Finding::warn(
            "it differs: one NCCL_IB_GID_INDEX or perftest -x for all is wrong for some",
            "leave NCCL_IB_GID_INDEX unset (NCCL 2.21 and later find it), or use rdma_cm (-R)",
        )
    };
    let read = "index of the IPv4 RoCE v2 GID";
    Ok(vec![finding.read(read, list.join(", "))])
}

fn g06_room(facts: &Facts) -> Findings {
    each(facts, |port| {
        let Some(room) = port.gids.pods() else {
            return Finding::unknown("the table's size cannot be read");
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
        finding.read("GID slots", port.gids.slots)
    })
}

#[cfg(test)]
mod tests;
