//! `rdmactl addresses release`: free leases by hand.

use super::{Scope, names_pod};
use crate::output::{Ended, Exit, complain, confirmed, optional, say, table};
use anyhow::{Result, bail};
use clap::Args;
use ipam::lease::Lease;
use ipam::store::{Entry, Store};
use ipnetwork::IpNetwork;
use node::table::cell;
use serde_json::json;
use std::net::IpAddr;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The lease of this address
    address: Option<IpAddr>,
    /// All leases of a node (with --pool and --network-name those alone): the node must be gone
    #[arg(long)]
    node: Option<String>,
    /// All leases of a pod: namespace/name, or a name
    #[arg(long)]
    pod: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Release {
    #[command(flatten)]
    which: Which,
    /// With --node and this node's own name: only leases of machines that were this node
    /// before, or of its earlier boots; the node may be alive
    #[arg(long, requires = "node", conflicts_with_all = ["address", "pod"])]
    previous: bool,
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

impl Release {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let (_, store) = scope.open_used()?;
        let Some(store) = store else {
            return Ok(Exit::Found);
        };
        if self.previous && self.which.node.as_ref() != Some(&store.node().name) {
            bail!(
                "--previous distinguishes this node's leases from those before: run it on the node, which is {}",
                store.node().name
            );
        }
        let boot = store.node().boot.clone();
        let mut chosen = self.choose(&store)?;
        chosen.retain(|entry| {
            let of_this_boot = |lease: &Lease| lease.holder.boot == boot;
            !self.previous || !entry.record.as_ref().is_ok_and(of_this_boot)
        });
        self.refuse_this_boot(&store, &chosen)?;
        if chosen.is_empty() {
            complain("no such lease");
            return Ok(Exit::Found);
        }
        if !scope.global.json {
            say(&text(&chosen));
        }
        if !confirmed(self.yes, &question(chosen.len()))? {
            return Ok(Exit::Found);
        }
        let mut freed = Vec::new();
        let mut failed = Vec::new();
        for entry in &chosen {
            match store.release_entry(entry) {
                Ok(()) => freed.push(entry.address),
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

    /// Refuses to free what pods of this node use: by its own name, the node is not gone.
    /// Leases of its earlier boots may be freed.
    fn refuse_this_boot(&self, store: &Store, chosen: &[Entry]) -> Result<()> {
        let own = (self.which.node.as_deref())
            .is_some_and(|node| store.node_names().any(|name| name == node));
        let of_this_boot = |entry: &&Entry| {
            let lease = entry.record.as_ref();
            lease.is_ok_and(|lease| lease.holder.boot == store.node().boot)
        };
        let mut live = chosen.iter().filter(of_this_boot);
        let (true, Some(first)) = (own, live.next()) else {
            return Ok(());
        };
        bail!(
            "{} is this node, and it holds {} leases of this boot, such as {}; --previous frees \
             those of earlier boots alone, rdmactl reclaim those whose pods are gone",
            store.node().name,
            1 + live.count(),
            first.address
        );
    }

    /// The leases that are meant. Of one address there is one lease in each network
    /// name (and of ranges that do not overlap others, one in each): which, is asked.
    fn choose(&self, store: &Store) -> Result<Vec<Entry>> {
        let mut chosen = Vec::new();
        if let Some(address) = self.which.address {
            chosen = store.entries_at(address)?;
            chosen.retain(|entry| entry.freed.is_none() && self.in_scope(entry));
            if chosen.len() > 1 {
                let candidates: Vec<String> = chosen.iter().map(candidate).collect();
                bail!(
                    "{address} is leased {} times; say which by --network-name (\"\" for none) or --pool: {}",
                    chosen.len(),
                    candidates.join("; ")
                );
            }
            return Ok(chosen);
        }
        store.entries(true, |entry| {
            if entry.freed.is_none() && self.in_scope(&entry) && self.means(&entry) {
                chosen.push(entry);
            }
            Ok(())
        })?;
        Ok(chosen)
    }

    fn in_scope(&self, entry: &Entry) -> bool {
        let network_name = entry.network_name.as_deref().unwrap_or_default();
        (self.network_name.as_deref()).is_none_or(|name| name == network_name)
            && self
                .pool
                .is_none_or(|pool| entry.record.as_ref().is_ok_and(|lease| lease.range == pool))
    }

    fn means(&self, entry: &Entry) -> bool {
        let Ok(lease) = &entry.record else {
            return false;
        };
        if let Some(node) = &self.which.node {
            return lease.holder.node == *node;
        }
        (self.which.pod.as_ref()).is_some_and(|name| names_pod(lease, name))
    }
}

/// Prints what would be freed.
fn text(chosen: &[Entry]) -> String {
    table(
        "ADDRESS  NETWORK NAME  RANGE  HOLDER",
        chosen.iter().map(row),
    )
}

fn question(leases: usize) -> String {
    let what = match leases {
        1 => "free this lease".to_owned(),
        n => format!("free these {n} leases"),
    };
    format!("{what}? A pod that still uses one of the addresses will share it with the next.")
}

fn row(entry: &Entry) -> Vec<String> {
    let holder = match &entry.record {
        Ok(lease) => lease.holder.to_string(),
        Err(why) => format!("unknown: {why}"),
    };
    let range = entry.record.as_ref().map(|lease| lease.range.to_string());
    vec![
        entry.address.to_string(),
        optional(entry.network_name.as_deref()),
        range.unwrap_or_default(),
        cell(&holder),
    ]
}

fn candidate(entry: &Entry) -> String {
    let network_name = match &entry.network_name {
        Some(name) => format!("network name {name:?}"),
        None => "no network name".to_owned(),
    };
    match &entry.record {
        Ok(lease) => format!("{network_name}, range {}, {}", lease.range, lease.holder),
        Err(why) => format!("{network_name}, {why}"),
    }
}
