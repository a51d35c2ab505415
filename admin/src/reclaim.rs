//! `rdmactl reclaim`: undoes orphaned attachments and frees leases that are over, as the daemon does
//! every half minute.

use std::{thread, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use attachment::{
    journal::Record,
    listing,
    netdev::restore,
    node::{Node, now},
    part::Part,
    reclaim::{in_host_namespace, over, undo},
};
use clap::Args;
use ipam::lease::Lease;
use ipam::reclaim::{self, Options, Report};
use node::table::cell;
use serde_json::{Value, json};

use crate::addresses::complain_of;
use crate::global::Global;
use crate::output::{Ended, Exit, complain, optional, table};

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

/// An attachment that is over, and what became of undoing it.
struct Undone {
    record: Record,
    why: &'static str,
    error: Option<String>,
}

/// What became of the attachments.
struct Attachments {
    undone: Vec<Undone>,
    /// How many there were.
    all: usize,
}

/// What became of the leases.
#[derive(Default)]
struct Leases {
    freed: Vec<(Lease, &'static str)>,
    waiting: Vec<(Lease, &'static str)>,
    kept: Vec<(Lease, &'static str)>,
    failed: Vec<String>,
}

impl Reclaim {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let mut node = global.node()?;
        in_host_namespace(&node.roots).map_err(|why| anyhow!("{why}; run this on the host"))?;
        let attachments = self.undo_attachments(&mut node)?;
        let leases = match self.free_leases(&node) {
            Ok(report) => Leases::of(report),
            Err(error) => Leases {
                failed: vec![format!("{error:#}")],
                ..Leases::default()
            },
        };
        let document = json!({
            "dryRun": self.dry_run,
            "undone": attachments.documents(),
            "freed": documents(&leases.freed),
            "waiting": documents(&leases.waiting),
            "kept": documents(&leases.kept),
            "failed": leases.failed,
        });
        global.say(document, || {
            attachments.text(self.dry_run) + &leases.text(self.dry_run)
        });
        let of_attachments = attachments
            .undone
            .iter()
            .filter_map(|one| one.error.as_ref());
        match of_attachments.chain(&leases.failed).next() {
            Some(first) => bail!("not everything could be reclaimed: {first}"),
            None => Ok(Exit::Good),
        }
    }

    fn undo_attachments(&self, node: &mut Node) -> anyhow::Result<Attachments> {
        let (mut records, complaints) = listing::records(node).context("read the journal")?;
        for complaint in complaints {
            complain(&complaint);
        }
        let all = records.len();
        records.retain(|(_, record)| over(record, &node.roots.proc, &node.boot, now()).is_some());
        if !records.is_empty() {
            thread::sleep(CONFIRM_INTERVAL);
        }
        let mut undone = Vec::new();
        for (key, record) in records {
            let Some(why) = over(&record, &node.roots.proc, &node.boot, now()) else {
                continue;
            };
            let error = match self.dry_run {
                true => None,
                false => match undo(node, &key, &record, restore::RETURN_TIMEOUT) {
                    Ok(true) => None,
                    // Undone or replaced meanwhile, by a call of the runtime.
                    Ok(false) => continue,
                    Err(error) => Some(error.to_string()),
                },
            };
            undone.push(Undone { record, why, error });
        }
        Ok(Attachments { undone, all })
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

impl Attachments {
    fn parts(&self) -> impl Iterator<Item = (&Undone, &Part)> {
        let undone = self.undone.iter();
        undone.flat_map(|one| one.record.parts.iter().map(move |part| (one, part)))
    }

    fn text(&self, dry_run: bool) -> String {
        let done = if dry_run { "would be undone" } else { "undone" };
        let row = |(one, part): (&Undone, &Part)| {
            let state = if one.error.is_some() { "failed" } else { done };
            vec![
                optional(one.record.pod.as_deref()),
                cell(part.name()),
                cell(&one.record.network),
                cell(part.attach()),
                cell(&part.netdev().unwrap_or_default()),
                state.to_owned(),
                one.why.to_owned(),
            ]
        };
        let header = "POD  INTERFACE  NETWORK  KIND  NETDEV  STATE  BECAUSE";
        let mut text = String::new();
        if !self.undone.is_empty() {
            text += &table(header, self.parts().map(row));
        }
        let failed = self.undone.iter().filter(|one| one.error.is_some()).count();
        let kept = self.all.saturating_sub(self.undone.len());
        let undone = self.undone.len() - failed;
        text + &format!("attachments: {undone} {done}, {failed} failed, {kept} kept\n")
    }

    fn documents(&self) -> Vec<Value> {
        let of = |(one, part): (&Undone, &Part)| {
            json!({
                "pod": one.record.pod,
                "interface": part.name(),
                "network": one.record.network,
                "container": one.record.container_id,
                "kind": part.attach(),
                "netdev": part.netdev().unwrap_or_default(),
                "because": one.why,
                "error": one.error,
            })
        };
        self.parts().map(of).collect()
    }
}

impl Leases {
    fn of(report: Report) -> Self {
        let over = |(lease, why): (Lease, reclaim::Over)| (lease, why.as_str());
        Self {
            freed: report.freed.into_iter().map(over).collect(),
            waiting: report.waiting.into_iter().map(over).collect(),
            kept: report.kept,
            failed: report.failed,
        }
    }

    fn text(&self, dry_run: bool) -> String {
        let done = if dry_run { "would be freed" } else { "freed" };
        let states = [
            (&self.freed, done),
            (&self.waiting, "seen; freed by a later run"),
        ];
        let rows = states.into_iter().flat_map(|(leases, state)| {
            leases.iter().map(move |(lease, why)| {
                vec![
                    lease.address.to_string(),
                    state.to_owned(),
                    (*why).to_owned(),
                    cell(&lease.holder.to_string()),
                ]
            })
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let mut text = String::new();
        if !rows.is_empty() {
            text += &table("ADDRESS  STATE  BECAUSE  HOLDER", rows);
        }
        let (freed, waiting) = (self.freed.len(), self.waiting.len());
        let (failed, kept) = (self.failed.len(), self.kept.len());
        text + &format!(
            "leases: {freed} {done}, {waiting} pending a second check, {failed} failed, {kept} kept\n"
        )
    }
}

fn documents(leases: &[(Lease, &'static str)]) -> Vec<Value> {
    let of = |(lease, why): &(Lease, &'static str)| json!({"store": lease.store, "lease": lease, "because": why});
    leases.iter().map(of).collect()
}
