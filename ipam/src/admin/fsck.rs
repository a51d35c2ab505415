//! `rdma-ipam fsck`: what should not be in the store.

use super::{Global, Outcome, say, say_json, shown};
use crate::store::Store;
use anyhow::Result;
use clap::Args;
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct Fsck {
    /// Put right what can be, and put aside what is no record
    #[arg(long)]
    repair: bool,
    /// First forget which store this node knew: another one was put in its place on purpose
    #[arg(long)]
    adopt: bool,
}

impl Fsck {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let plugin = global.plugin()?;
        if self.adopt {
            Store::forget(plugin.policy(), &global.store)?;
        }
        let (_, store) = global.open()?;
        store.probe()?;
        let checkup = store.fsck(self.repair)?;
        let left = checkup.findings.len().saturating_sub(checkup.repaired);
        if global.json {
            let findings: Vec<_> = checkup
                .findings
                .iter()
                .map(|finding| json!({"file": finding.path, "what": finding.what}))
                .collect();
            say_json(&json!({
                "sound": checkup.sound, "findings": findings, "repaired": checkup.repaired,
            }))?;
        } else {
            for finding in &checkup.findings {
                say(&format!(
                    "{}: {}\n",
                    shown(&finding.path),
                    finding.what.escape_debug()
                ));
            }
            say(&format!(
                "{} leases in order, {} findings, {} put right\n",
                checkup.sound,
                checkup.findings.len(),
                checkup.repaired
            ));
        }
        Ok(if left == 0 {
            Outcome::Done
        } else {
            Outcome::Found
        })
    }
}
