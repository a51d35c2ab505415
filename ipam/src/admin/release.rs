//! `rdma-ipam release`: free leases by hand.

use super::{Global, Outcome, complain, confirmed, say, say_json};
use crate::store::Entry;
use anyhow::{Result, bail};
use clap::Args;
use node::table::{cell, table};
use serde_json::json;
use std::net::IpAddr;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The lease of this address
    address: Option<IpAddr>,
    /// All leases of a node, and its slices: the node must be gone
    #[arg(long)]
    node: Option<String>,
    /// All leases of a pod, namespace/name
    #[arg(long)]
    pod: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct Release {
    #[command(flatten)]
    which: Which,
    /// Only within this network name
    #[arg(long)]
    network_name: Option<String>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

impl Release {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (_, store) = global.open()?;
        let mut chosen: Vec<Entry> = Vec::new();
        store.seats(true, |entry| {
            if entry.freed.is_none() && self.means(&entry) {
                chosen.push(entry);
            }
            Ok(())
        })?;
        if chosen.is_empty() && self.which.node.is_none() {
            complain("no such lease");
            return Ok(Outcome::Found);
        }
        let rows: Vec<Vec<String>> = chosen.iter().map(row).collect();
        if !global.json {
            say(&table(&["ADDRESS", "HOLDER"], &rows));
        }
        let question = format!(
            "free {}? A pod that still uses one of them will share it with the next.",
            match rows.len() {
                1 => "this lease".to_owned(),
                n => format!("these {n} leases"),
            }
        );
        if !confirmed(self.yes, &question)? {
            return Ok(Outcome::Found);
        }
        let mut freed = Vec::new();
        let mut failed = Vec::new();
        for entry in &chosen {
            match store.release_whole(entry) {
                Ok(()) => freed.push(entry.address),
                Err(error) => failed.push(error.to_string()),
            }
        }
        let slices = match &self.which.node {
            Some(node) => store.release_slices(node)?,
            None => Vec::new(),
        };
        if global.json {
            say_json(&json!({"freed": freed, "slices": slices, "failed": failed}))?;
        } else {
            say(&format!("{} freed\n", freed.len()));
            for slice in &slices {
                say(&format!("slice of {slice} freed\n"));
            }
        }
        if let Some(first) = failed.first() {
            bail!("{} could not be freed: {first}", failed.len());
        }
        Ok(Outcome::Done)
    }

    fn means(&self, entry: &Entry) -> bool {
        if self.network_name.is_some() && self.network_name != entry.network_name {
            return false;
        }
        if let Some(address) = self.which.address {
            return entry.address == address;
        }
        let Ok(lease) = &entry.record else {
            return false;
        };
        if let Some(node) = &self.which.node {
            return lease.holder.node == *node;
        }
        lease.holder.pod.as_ref().map(ToString::to_string) == self.which.pod
    }
}

fn row(entry: &Entry) -> Vec<String> {
    let holder = match &entry.record {
        Ok(lease) => lease.holder.to_string(),
        Err(why) => format!("unknown: {why}"),
    };
    vec![entry.address.to_string(), cell(&holder)]
}
