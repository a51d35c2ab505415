//! `rdmactl addresses fsck`: what should not be in the store, and its repair.

use super::{Scope, shown};
use crate::output::{Ended, Exit};
use clap::Args;
use cni_wire::text::printable;
use ipam::store::{Checkup, Problem, Store};
use serde_json::json;
use std::time::Duration;

#[derive(Debug, Args)]
pub(super) struct Fsck {
    /// Repair, and move aside files that are not records
    #[arg(long)]
    repair: bool,
    /// Accept a store that replaced the one that this node knew
    #[arg(long)]
    adopt: bool,
    /// Skip files that changed later than this ago: a call may still run
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
        let finding = |one: &Problem| json!({"file": one.finding.path, "what": one.finding.what, "repaired": one.repaired});
        let findings: Vec<_> = checkup.findings.iter().map(finding).collect();
        let document = json!({
            "sound": checkup.sound, "findings": findings, "repaired": repaired,
        });
        scope.global.say(document, || {
            let mut text = String::new();
            for Problem { finding, repaired } in &checkup.findings {
                let (path, what) = (shown(&finding.path), printable(&finding.what));
                let repaired = if *repaired { " (repaired)" } else { "" };
                text += &format!("{path}: {what}{repaired}\n");
            }
            let (sound, found) = (checkup.sound, checkup.findings.len());
            text + &format!("{sound} sound leases, {found} findings, {repaired} repaired\n")
        });
        Ok(Exit::good_if(repaired == checkup.findings.len()))
    }
}
