//! `rdmactl addresses fsck`: what should not be in the store, and its repair.

use super::{Scope, shown};
use crate::output::{Ended, Outcome, say, say_json};
use clap::Args;
use cni_wire::text::printable;
use ipam::store::{Checkup, Store};
use serde_json::json;
use std::time::Duration;

#[derive(Debug, Args)]
pub(super) struct Fsck {
    /// Repair what can be, and put aside what is no record
    #[arg(long)]
    repair: bool,
    /// First forget which store this node knew: another one was put in its place on purpose
    #[arg(long)]
    adopt: bool,
    /// Leave alone what changed less than this ago: it may be a call that still runs
    #[arg(long, value_name = "DURATION", value_parser = super::duration, default_value = "60s")]
    min_age: Duration,
}

impl Fsck {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let plugin = scope.plugin()?;
        if self.adopt {
            Store::forget(plugin.policy(), scope.store)?;
        }
        let checkup = match scope.open_used()?.1 {
            Some(store) => {
                store.probe()?;
                store.fsck(self.repair, self.min_age)?
            }
            None => Checkup::default(),
        };
        let repaired = checkup.repaired();
        let left = checkup.findings.len().saturating_sub(repaired);
        if scope.global.json {
            let findings: Vec<_> = checkup
                .findings
                .iter()
                .map(|problem| {
                    json!({
                        "file": problem.finding.path,
                        "what": problem.finding.what,
                        "repaired": problem.repaired,
                    })
                })
                .collect();
            say_json(json!({
                "sound": checkup.sound, "findings": findings, "repaired": repaired,
            }));
        } else {
            for problem in &checkup.findings {
                say(&format!(
                    "{}: {}{}\n",
                    shown(&problem.finding.path),
                    printable(&problem.finding.what),
                    if problem.repaired { " (repaired)" } else { "" }
                ));
            }
            say(&format!(
                "{} leases in order, {} findings, {repaired} repaired\n",
                checkup.sound,
                checkup.findings.len(),
            ));
        }
        Ok(if left == 0 {
            Outcome::Good
        } else {
            Outcome::Found
        })
    }
}
