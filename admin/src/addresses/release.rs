//! `rdmactl addresses release`: free leases, or parts of subnets, by hand.

use super::{Scope, ownership};
use crate::output::{Ended, Exit, complain, confirmed, optional, say, table};
use anyhow::{Result, bail};
use clap::Args;
use ipam::lease::Lease;
use ipam::leases::{LeaseSpace, Leases};
use ipnetwork::IpNetwork;
use node::table::cell;
use node_wire::PartsChange;
use serde_json::json;
use std::net::IpAddr;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The lease of this address
    address: Option<IpAddr>,
    /// All leases of a pod: namespace/name, or a name
    #[arg(long)]
    pod: Option<String>,
    /// All parts of a node that will not come back
    #[arg(long)]
    node: Option<String>,
    /// One part of a subnet, whoever has it, as 10.56.3.16/28
    #[arg(long, value_name = "CIDR")]
    part: Option<IpNetwork>,
}

#[derive(Debug, Args)]
pub(super) struct Release {
    #[command(flatten)]
    which: Which,
    /// Only within this network name; "" for leases without one
    #[arg(long)]
    network_name: Option<String>,
    /// Only of this range, as in 10.0.0.0/24
    #[arg(long)]
    pool: Option<IpNetwork>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

/// What would be freed.
const HEADER: &str = "ADDRESS  NETWORK NAME  RANGE  HOLDER";

/// An address that is leased, and by which record, if by one.
struct Entry {
    space: LeaseSpace,
    address: IpAddr,
    lease: Option<Lease>,
}

impl Release {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let (node, part) = (&self.which.node, &self.which.part);
        let node = node.as_ref().map(|node| {
            let what = format!("all parts of node {node}");
            (PartsChange::ReleaseNode(node.clone()), what)
        });
        let part = part.map(|part| (PartsChange::ReleasePart(part.to_string()), part.to_string()));
        if let Some((change, what)) = node.or(part) {
            let network_name = self.network_name.clone();
            return ownership::release(scope, network_name, change, &what, self.yes);
        }
        let (plugin, leases) = scope.open_used()?;
        let Some(leases) = leases else {
            return Ok(Exit::Found);
        };
        let chosen = self.choose(&leases, scope.store)?;
        if chosen.is_empty() {
            complain("no such lease");
            return Ok(Exit::Found);
        }
        if !scope.global.json {
            say(&table(HEADER, chosen.iter().map(row)));
        }
        if !confirmed(self.yes, &question(chosen.len()))? {
            return Ok(Exit::Found);
        }
        let mut freed = Vec::new();
        let mut failed = Vec::new();
        let cooldown = plugin.policy().ipam.cooldown;
        for entry in &chosen {
            match leases.release_address(&entry.space, entry.address, cooldown) {
                Ok(_) => freed.push(entry.address),
                Err(error) => failed.push(error.to_string()),
            }
        }
        let document = json!({"freed": freed, "failed": failed});
        scope
            .global
            .say(document, || format!("{} freed\n", freed.len()));
        if let Some(first) = failed.first() {
            bail!("{} could not be freed: {first}", failed.len());
        }
        Ok(Exit::Good)
    }

    /// The leases that are meant. Of one address there is one lease in each network
    /// name (and of ranges that do not overlap others, one in each): which, is asked.
    fn choose(&self, leases: &Leases, store: &str) -> Result<Vec<Entry>> {
        let mut chosen: Vec<Entry> = match self.which.address {
            Some(address) => (leases.leases_at(address)?.into_iter())
                .map(|(space, lease)| Entry {
                    space,
                    address,
                    lease,
                })
                .collect(),
            None => (leases.list()?.leases.into_iter())
                .filter(|lease| self.which.pod.iter().any(|name| names_pod(lease, name)))
                .map(|lease| Entry {
                    space: LeaseSpace::of_lease(&lease),
                    address: lease.address,
                    lease: Some(lease),
                })
                .collect(),
        };
        chosen.retain(|entry| {
            let space = &entry.space.space;
            let network_name = space.network_name.as_deref().unwrap_or_default();
            let range = entry.lease.as_ref().map(|lease| lease.range);
            space.store == store
                && (self.network_name.as_deref()).is_none_or(|name| name == network_name)
                && self.pool.is_none_or(|pool| range == Some(pool))
        });
        if let (Some(address), 2..) = (self.which.address, chosen.len()) {
            let candidates: Vec<String> = chosen.iter().map(candidate).collect();
            bail!(
                "{address} is leased {} times; say which by --network-name (\"\" for none) or --pool: {}",
                chosen.len(),
                candidates.join("; ")
            );
        }
        Ok(chosen)
    }
}

/// Whether the holder is a pod of this name, with or without its namespace.
fn names_pod(lease: &Lease, name: &str) -> bool {
    let pod = lease.holder.pod.as_ref();
    pod.is_some_and(|pod| pod.name == name || pod.to_string() == name)
}

fn question(leases: usize) -> String {
    let what = match leases {
        1 => "free this lease".to_owned(),
        n => format!("free these {n} leases"),
    };
    format!("{what}? A pod that still uses one of the addresses will share it with the next.")
}

fn row(entry: &Entry) -> Vec<String> {
    let lease = entry.lease.as_ref();
    let holder = lease.map_or_else(
        || "unknown: no record has it".to_owned(),
        |lease| lease.holder.to_string(),
    );
    vec![
        entry.address.to_string(),
        optional(entry.space.space.network_name.as_deref()),
        optional(lease.map(|lease| lease.range)),
        cell(&holder),
    ]
}

fn candidate(entry: &Entry) -> String {
    let network_name = match &entry.space.space.network_name {
        Some(name) => format!("network name {name:?}"),
        None => "no network name".to_owned(),
    };
    match &entry.lease {
        Some(lease) => format!("{network_name}, range {}, {}", lease.range, lease.holder),
        None => format!("{network_name}, by no record"),
    }
}
