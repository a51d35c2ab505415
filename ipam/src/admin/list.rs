//! `rdma-ipam list`: who holds which address.

use super::{Global, Outcome, complain, say, say_json, shown};
use crate::lease::Lease;
use crate::store::Store;
use anyhow::Result;
use clap::Args;
use ipnetwork::IpNetwork;
use node::table::{age, cell, table};
use serde_json::json;

#[derive(Debug, Default, Args)]
pub(super) struct List {
    /// Only leases of this range, as in 10.0.0.0/24
    #[arg(long)]
    pool: Option<IpNetwork>,
    /// Only leases of this network name; "" for those without one
    #[arg(long)]
    network_name: Option<String>,
    /// Only leases of this pod: namespace/name, or a name
    #[arg(long)]
    pod: Option<String>,
    /// Only leases of this node
    #[arg(long)]
    node: Option<String>,
}

impl List {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let leases = match global.open_used()?.1 {
            Some(store) => self.leases(&store)?,
            None => Vec::new(),
        };
        let outcome = match leases.is_empty() && self.is_filtered() {
            true => {
                complain("no such lease");
                Outcome::Found
            }
            false => Outcome::Done,
        };
        if global.json {
            say_json(json!({"leases": leases}));
            return Ok(outcome);
        }
        let now = jiff::Timestamp::now();
        let rows: Vec<Vec<String>> = leases.iter().map(|lease| row(lease, now)).collect();
        say(&table(
            &[
                "ADDRESS",
                "NETWORK NAME",
                "POD",
                "INTERFACE",
                "NODE",
                "NETWORK",
                "CONTAINER",
                "AGE",
            ],
            &rows,
        ));
        Ok(outcome)
    }

    /// Whether certain leases were asked for: of those, none is nothing found.
    fn is_filtered(&self) -> bool {
        self.pool.is_some()
            || self.network_name.is_some()
            || self.pod.is_some()
            || self.node.is_some()
    }

    pub(super) fn leases(&self, store: &Store) -> Result<Vec<Lease>> {
        let mut leases = Vec::new();
        let findings = store.entries(true, |entry| {
            match entry.record {
                _ if entry.freed.is_some() => {}
                Ok(lease) => leases.push(lease),
                Err(why) => complain(&format!("{}: {why}; see fsck", shown(&entry.path))),
            }
            Ok(())
        })?;
        for finding in findings {
            complain(&format!(
                "{}: {}; see fsck",
                shown(&finding.path),
                finding.what
            ));
        }
        if let Some(pool) = self.pool
            && !leases.iter().any(|lease| lease.range == pool)
            && !store.pools()?.iter().any(|known| known.range == pool)
        {
            complain(&format!(
                "the store has no pool {pool}; rdma-ipam pools lists them"
            ));
        }
        leases.retain(|lease| self.means(lease));
        leases.sort_by(|a, b| (&a.network_name, a.address).cmp(&(&b.network_name, b.address)));
        Ok(leases)
    }
}

impl List {
    fn means(&self, lease: &Lease) -> bool {
        let network_name = lease.network_name.as_deref().unwrap_or_default();
        self.pool.is_none_or(|pool| pool == lease.range)
            && (self.network_name.as_deref()).is_none_or(|name| name == network_name)
            && (self.node.as_ref()).is_none_or(|node| *node == lease.holder.node)
            && (self.pod.as_ref()).is_none_or(|name| {
                let pod = lease.holder.pod.as_ref();
                pod.is_some_and(|pod| pod.name == *name || pod.to_string() == *name)
            })
    }
}

fn row(lease: &Lease, now: jiff::Timestamp) -> Vec<String> {
    let holder = &lease.holder;
    let pod = holder
        .pod
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default();
    vec![
        format!("{}/{}", lease.address, lease.prefix),
        cell(lease.network_name.as_deref().unwrap_or_default()),
        cell(&pod),
        cell(&holder.interface),
        cell(&holder.node),
        cell(&holder.network),
        cell(holder.container.get(..12).unwrap_or(&holder.container)),
        age(now.as_second() - lease.created.as_second()),
    ]
}
