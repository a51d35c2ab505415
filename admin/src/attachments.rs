//! `rdmactl attachments`: interfaces of this node's pods, by the journal; `reclaim` undoes those whose
//! pods ended without DEL, as the daemon does every half minute.

use std::{thread, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use attachment::{
    journal::{Key, Part, Record},
    listing::{self, Attachment, interfaces, what},
    netdev::restore,
    node::{Node, now},
    reclaim::{in_host_namespace, over, undo},
};
use clap::{Args, Subcommand};
use node::table::cell;
use serde_json::{Value, json};

use crate::global::Global;
use crate::output::{Ended, Outcome, complain, optional, table};

/// Between the two readings that must both find an attachment over.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the interfaces that this node's pods have of it.
#[derive(Debug, Args)]
pub(crate) struct Attachments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Undo orphaned attachments, whose pods ended without DEL: return netdevs, release addresses
    Reclaim(Reclaim),
}

impl Attachments {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        match &self.command {
            None => list(global),
            Some(Command::Reclaim(command)) => command.run(global),
        }
    }
}

fn list(global: &Global) -> Ended {
    let node = global.node()?;
    let records = records(&node)?;
    let all =
        |(_, record): &(Key, Record)| Attachment::all_of(record, &node.roots.proc, &node.boot);
    let attachments: Vec<Attachment> = records.iter().flat_map(all).collect();
    let document = json!({"attachments": attachments});
    global.say(document, || listing::text(&attachments, now()));
    Ok(Outcome::Good)
}

/// All attachments whose record can be read, oldest first; the others are complained about.
fn records(node: &Node) -> anyhow::Result<Vec<(Key, Record)>> {
    let (records, complaints) = listing::records(node).context("read the journal")?;
    for complaint in complaints {
        complain(&complaint);
    }
    Ok(records)
}

#[derive(Debug, Args)]
struct Reclaim {
    /// Only print what would be undone
    #[arg(long)]
    dry_run: bool,
}

/// An attachment that is over, and what became of undoing it.
struct Undone {
    record: Record,
    why: &'static str,
    error: Option<String>,
}

impl Reclaim {
    fn run(&self, global: &Global) -> Ended {
        let mut node = global.node()?;
        in_host_namespace(&node.roots).map_err(|why| anyhow!("{why}; run this on the host"))?;
        let mut dead = records(&node)?;
        let all = dead.len();
        dead.retain(|(_, record)| over(record, &node.roots.proc, &node.boot, now()).is_some());
        if !dead.is_empty() {
            thread::sleep(CONFIRM_INTERVAL);
        }
        let mut undone = Vec::new();
        for (key, seen) in dead {
            let Some(why) = over(&seen, &node.roots.proc, &node.boot, now()) else {
                continue;
            };
            let error = match self.dry_run {
                true => None,
                false => match undo(&mut node, &key, &seen, restore::RETURN_TIMEOUT) {
                    Ok(true) => None,
                    // Undone or replaced meanwhile, by a call of the runtime.
                    Ok(false) => continue,
                    Err(error) => Some(error),
                },
            };
            undone.push(Undone {
                record: seen,
                why,
                error: error.map(|error| error.to_string()),
            });
        }
        global.say(self.document(&undone), || self.text(&undone, all));
        match undone.iter().find_map(|one| one.error.as_ref()) {
            Some(first) => bail!("not everything could be undone: {first}"),
            None => Ok(Outcome::Good),
        }
    }

    fn text(&self, undone: &[Undone], all: usize) -> String {
        let done = match self.dry_run {
            true => "would be undone",
            false => "undone",
        };
        let row = |(one, part): (&Undone, Part)| {
            let (kind, netdev) = what(&part);
            let state = if one.error.is_some() { "failed" } else { done };
            vec![
                optional(one.record.pod.as_deref()),
                cell(&part.ifname),
                cell(&one.record.network),
                cell(kind),
                cell(&netdev),
                state.to_owned(),
                one.why.to_owned(),
            ]
        };
        let header = "POD  INTERFACE  NETWORK  KIND  NETDEV  STATE  BECAUSE";
        let mut text = String::new();
        if !undone.is_empty() {
            text += &table(header, each_interface(undone).map(row));
        }
        let failed = undone.iter().filter(|one| one.error.is_some()).count();
        let (undone, kept) = (undone.len() - failed, all.saturating_sub(undone.len()));
        text + &format!("{undone} {done}, {failed} failed, {kept} kept\n")
    }

    fn document(&self, undone: &[Undone]) -> Value {
        let of = |(one, part): (&Undone, Part)| {
            let (kind, netdev) = what(&part);
            json!({
                "pod": one.record.pod,
                "interface": part.ifname,
                "network": one.record.network,
                "container": one.record.container_id,
                "kind": kind,
                "netdev": netdev,
                "because": one.why,
                "error": one.error,
            })
        };
        let list: Vec<Value> = each_interface(undone).map(of).collect();
        json!({"dryRun": self.dry_run, "undone": list})
    }
}

fn each_interface(undone: &[Undone]) -> impl Iterator<Item = (&Undone, Part)> {
    undone.iter().flat_map(|one| {
        let parts = interfaces(&one.record).into_iter();
        parts.map(move |part| (one, part))
    })
}
