//! `rdmactl reclaim`: undoes orphaned attachments and frees leases that are over, as the daemon does
//! every half minute.

use std::{thread, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use attachment::{
    listing,
    netdev::restore,
    node::{Node, now},
    reclaim::{in_host_namespace, over, undo},
};
use clap::Args;
use ipam::lease::Lease;
use ipam::reclaim::{self, Options, Report};
use serde_json::{Value, json};

use crate::addresses::complain_of;
use crate::global::Global;
use crate::output::{Columns, Ended, Exit, columns, complain};

/// Between the two readings that must both find an attachment over.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(1);

/// Undoes orphaned attachments, whose pods ended without DEL: returns netdevs, releases addresses. Then
/// frees the other leases of ended pods, which two runs must find over.
#[derive(Debug, Args)]
pub(crate) struct Reclaim {
    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,
}

const ATTACHMENTS: Columns = &[
    ("POD", "/pod"),
    ("INTERFACE", "/interface"),
    ("NETWORK", "/network"),
    ("KIND", "/kind"),
    ("NETDEV", "/netdev"),
    ("BECAUSE", "/because"),
    ("ERROR", "/error"),
];
const LEASES: Columns = &[
    ("ADDRESS", "/lease/address"),
    ("STATE", "/state"),
    ("BECAUSE", "/because"),
    ("POD", "/lease/pod"),
    ("INTERFACE", "/lease/interface"),
    ("NODE", "/lease/node"),
];

/// What became of the attachments that are over.
#[derive(Default)]
struct Undone {
    /// Each interface, as a document.
    interfaces: Vec<Value>,
    /// Why attachments were not undone.
    failed: Vec<String>,
    undone: usize,
    kept: usize,
}

impl Reclaim {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let mut node = global.node()?;
        in_host_namespace(&node.roots).map_err(|why| anyhow!("{why}; run this on the host"))?;
        let attachments = self.undo_attachments(&mut node)?;
        let leases = self.free_leases(&node).unwrap_or_else(|error| Report {
            failed: vec![format!("{error:#}")],
            ..Report::default()
        });
        let [freed, waiting] = [&leases.freed, &leases.waiting].map(|leases| {
            let leases = leases.iter().map(|(lease, over)| (lease, over.as_str()));
            leases.map(document).collect::<Vec<Value>>()
        });
        let kept = leases.kept.iter().map(|(lease, why)| (lease, *why));
        let kept: Vec<Value> = kept.map(document).collect();
        let document = json!({
            "dryRun": self.dry_run,
            "undone": attachments.interfaces,
            "freed": freed,
            "waiting": waiting,
            "kept": kept,
            "failed": leases.failed,
        });
        global.say(document, || {
            let [undone, done] = match self.dry_run {
                true => ["would be undone", "would be freed"],
                false => ["undone", "freed"],
            };
            let mut text = String::new();
            if !attachments.interfaces.is_empty() {
                text += &columns(ATTACHMENTS, &attachments.interfaces);
            }
            text += &format!(
                "attachments: {} {undone}, {} failed, {} kept\n",
                attachments.undone,
                attachments.failed.len(),
                attachments.kept
            );
            let with_state = |leases: &[Value], state: &str| {
                let mut leases = leases.to_vec();
                leases.iter_mut().for_each(|lease| lease["state"] = state.into());
                leases
            };
            let rows = [with_state(&freed, done), with_state(&waiting, "seen; freed by a later run")];
            let rows = rows.concat();
            if !rows.is_empty() {
                text += &columns(LEASES, &rows);
            }
            let [freed, waiting, kept] = [&freed, &waiting, &kept].map(Vec::len);
            let failed = leases.failed.len();
            text + &format!(
                "leases: {freed} {done}, {waiting} pending a second check, {failed} failed, {kept} kept\n"
            )
        });
        match attachments.failed.iter().chain(&leases.failed).next() {
            Some(first) => bail!("not everything could be reclaimed: {first}"),
            None => Ok(Exit::Good),
        }
    }

    fn undo_attachments(&self, node: &mut Node) -> anyhow::Result<Undone> {
        let (mut records, complaints) = listing::records(node).context("read the journal")?;
        for complaint in complaints {
            complain(&complaint);
        }
        let all = records.len();
        records.retain(|(_, record)| over(record, &node.roots.proc, &node.boot, now()).is_some());
        if !records.is_empty() {
            thread::sleep(CONFIRM_INTERVAL);
        }
        let mut result = Undone::default();
        for (key, record) in records {
            let Some(why) = over(&record, &node.roots.proc, &node.boot, now()) else {
                continue;
            };
            let undone = match self.dry_run {
                true => Ok(true),
                false => undo(node, &key, &record, restore::RETURN_TIMEOUT),
            };
            let error = match undone {
                Ok(true) => None,
                // Undone or replaced meanwhile, by a call of the runtime.
                Ok(false) => continue,
                Err(error) => Some(error.to_string()),
            };
            let interfaces = record.parts.iter().map(|part| {
                json!({
                    "pod": record.pod,
                    "interface": part.name(),
                    "network": record.network,
                    "container": record.container_id,
                    "kind": part.attach(),
                    "netdev": part.netdev().unwrap_or_default(),
                    "because": why,
                    "error": error,
                })
            });
            result.interfaces.extend(interfaces);
            result.undone += usize::from(error.is_none());
            result.failed.extend(error);
        }
        result.kept = all.saturating_sub(result.undone + result.failed.len());
        Ok(result)
    }

    fn free_leases(&self, node: &Node) -> anyhow::Result<Report> {
        let Some(opened) = node.ipam.leases_if_any()? else {
            return Ok(Report::default());
        };
        let state_dir = &node.policy.values.state_dir;
        let options = Options {
            netns_root: &node.root,
            proc: &node.roots.proc,
            state_dir,
            cooldown: node.policy.values.ipam.cooldown,
            dry_run: self.dry_run,
        };
        let report = reclaim::run(&opened, &options)?;
        for finding in &report.findings {
            complain_of(&finding.path, &finding.what);
        }
        Ok(report)
    }
}

fn document((lease, why): (&Lease, &'static str)) -> Value {
    json!({"store": lease.store, "lease": lease, "because": why})
}
