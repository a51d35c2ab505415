//! `rdma-ipam reclaim`: free this node's leases that are over.

use super::{Global, Outcome, complain, say, say_json, shown};
use crate::lease::Lease;
use crate::reclaim::{self, Options, Over, Report};
use anyhow::{Result, bail};
use clap::Args;
use node::table::table;
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct Reclaim {
    /// Only say what would be freed
    #[arg(long)]
    dry_run: bool,
}

impl Reclaim {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (plugin, store) = global.open()?;
        let options = Options {
            netns_root: &global.host_root,
            proc: &global.host_root.join("proc"),
            state_dir: &plugin.policy().state_dir,
            store: &global.store,
            dry_run: self.dry_run,
            now: jiff::Timestamp::now(),
        };
        let report = reclaim::run(&store, &options)?;
        if global.json {
            say_json(&json!({
                "dryRun": self.dry_run,
                "freed": as_json(&report.freed),
                "waiting": as_json(&report.waiting),
                "kept": report.kept,
                "failed": report.failed,
            }))?;
        } else {
            self.print(&report);
        }
        for finding in &report.findings {
            complain(&format!(
                "{}: {}; see fsck",
                shown(&finding.path),
                finding.what
            ));
        }
        if let Some(first) = report.failed.first() {
            bail!("{} could not be freed: {first}", report.failed.len());
        }
        Ok(Outcome::Done)
    }

    fn print(&self, report: &Report) {
        let done = if self.dry_run {
            "would be freed"
        } else {
            "freed"
        };
        let mut rows = Vec::new();
        for (leases, state) in [
            (&report.freed, done),
            (&report.waiting, "seen; freed by a later run"),
        ] {
            for (lease, why) in leases {
                let holder = lease.holder.to_string();
                rows.push(vec![
                    lease.address.to_string(),
                    state.to_owned(),
                    why.as_str().to_owned(),
                    holder,
                ]);
            }
        }
        if !rows.is_empty() {
            say(&table(&["ADDRESS", "STATE", "BECAUSE", "HOLDER"], &rows));
        }
        say(&format!(
            "{} {done}, {} to be looked at once more, {} kept\n",
            report.freed.len(),
            report.waiting.len(),
            report.kept
        ));
    }
}

fn as_json(leases: &[(Lease, Over)]) -> Vec<serde_json::Value> {
    leases
        .iter()
        .map(|(lease, why)| json!({"lease": lease, "because": why.as_str()}))
        .collect()
}
