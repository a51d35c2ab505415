//! `rdmactl addresses reclaim`: free this node's leases that are over.

use super::{Scope, complain_of};
use crate::output::{Ended, Outcome, confirmed, say, table};
use anyhow::bail;
use clap::Args;
use ipam::lease::Lease;
use ipam::reclaim::{self, Options, Over, Report};
use serde_json::{Value, json};
use std::io::IsTerminal as _;

#[derive(Debug, Args)]
pub(super) struct Reclaim {
    /// Only print what would be released
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

impl Reclaim {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let (plugin, store) = scope.open_used()?;
        let state_dir = &plugin.policy().state_dir;
        let run = |dry_run| {
            let Some(store) = &store else {
                return Ok(Report::default());
            };
            let options = Options {
                netns_root: &scope.global.host_root,
                proc: &scope.global.host_root.join("proc"),
                state_dir,
                store: scope.store,
                cluster_node: plugin.is_cluster_node(),
                dry_run,
                now: jiff::Timestamp::now(),
            };
            reclaim::run(store, &options)
        };
        let mut dry_run = !self.yes;
        let mut report = run(dry_run)?;
        if dry_run && !self.dry_run && !scope.global.json && !report.freed.is_empty() {
            say(&text(&report, dry_run));
            if !std::io::stdin().is_terminal() {
                say("nothing was freed, give --yes\n");
                return Ok(Outcome::Good);
            }
            if !confirmed(false, "free them?")? {
                return Ok(Outcome::Found);
            }
            dry_run = false;
            report = run(dry_run)?;
        }
        let kept = report.kept.iter();
        let document = json!({
            "dryRun": dry_run,
            "freed": as_json(&report.freed),
            "waiting": as_json(&report.waiting),
            "kept": kept.map(|(lease, why)| of(lease, why)).collect::<Vec<_>>(),
            "failed": report.failed,
        });
        scope.global.say(document, || text(&report, dry_run));
        for finding in &report.findings {
            complain_of(&finding.path, &finding.what);
        }
        if let Some(first) = report.failed.first() {
            bail!("{} could not be freed: {first}", report.failed.len());
        }
        Ok(Outcome::Good)
    }
}

fn text(report: &Report, dry_run: bool) -> String {
    let done = if dry_run { "would be freed" } else { "freed" };
    let over = |state, leases: &[(Lease, Over)]| -> Vec<Vec<String>> {
        let rows = leases
            .iter()
            .map(|(lease, why)| row(lease, state, why.as_str()));
        rows.collect()
    };
    let mut rows = over(done, &report.freed);
    rows.extend(over("seen; freed by a later run", &report.waiting));
    rows.extend(
        report
            .kept
            .iter()
            .map(|(lease, why)| row(lease, "kept", why)),
    );
    let mut text = String::new();
    if !rows.is_empty() {
        text += &table("ADDRESS  STATE  BECAUSE  HOLDER", rows);
    }
    let (freed, waiting, kept) = (report.freed.len(), report.waiting.len(), report.kept.len());
    text + &format!("{freed} {done}, {waiting} pending a second check, {kept} kept\n")
}

fn row(lease: &Lease, state: &str, why: &str) -> Vec<String> {
    vec![
        lease.address.to_string(),
        state.to_owned(),
        why.to_owned(),
        lease.holder.to_string(),
    ]
}

fn of(lease: &Lease, why: &str) -> Value {
    json!({"lease": lease, "because": why})
}

fn as_json(leases: &[(Lease, Over)]) -> Vec<Value> {
    let leases = leases.iter();
    leases.map(|(lease, why)| of(lease, why.as_str())).collect()
}
