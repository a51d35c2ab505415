//! `rdmactl addresses import`: take over the leases of host-local.

use super::Scope;
use super::host_local::{self, Planned};
use crate::output::{Ended, Outcome, complain, say, say_json};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ipam::lease::Holder;
use ipam::plugin::Plugin;
use ipam::range::{Range, Spec};
use ipam::store::{CoolDown, Store, Want};
use ipnetwork::IpNetwork;
use node::policy::{Profile, StoreKind};
use node::table::table;
use serde_json::json;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct Import {
    #[command(subcommand)]
    from: From,
}

#[derive(Debug, Subcommand)]
enum From {
    /// A directory of host-local, as in /var/lib/cni/networks/NETWORK: leases of this node
    HostLocal {
        directory: PathBuf,
        /// The range the addresses belong to; may be repeated
        #[arg(long, required = true)]
        range: Vec<IpNetwork>,
        /// The CNI network's name; the directory's name unless given
        #[arg(long)]
        network: Option<String>,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, Args)]
struct How {
    /// Lease them; without this only the plan is shown
    #[arg(long, short)]
    yes: bool,
}

impl Import {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let plugin = scope.plugin()?;
        let store = plugin.policy().stores.get(scope.store);
        if let Some(StoreKind::Kubernetes { .. }) = store.map(|store| &store.kind) {
            bail!(
                "store {:?} is of type kubernetes: it has the leases of this node alone, in blocks that \
                 the cluster gave it; list the other plugin's addresses in the network's exclude \
                 until they have ended, or import them into a store of type file",
                scope.store
            );
        }
        let From::HostLocal {
            directory,
            range,
            network,
            how,
        } = &self.from;
        let (planned, empty) = host_local::read(directory, range)?;
        for name in empty {
            complain(&format!(
                "{}: the file is empty; not imported",
                directory.join(name).display()
            ));
        }
        let name = directory
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let network = network
            .clone()
            .or(name)
            .context("name the network with --network")?;
        let node = plugin.identity()?;
        let holder = move |planned: &Planned| Holder {
            network: network.clone(),
            pod: None,
            container: planned.container.clone(),
            interface: planned.interface.clone(),
            node: node.name.clone(),
            machine: node.machine.clone(),
            boot: node.boot.clone(),
            netns: None,
            netns_inode: None,
            device: None,
        };
        apply(scope, &plugin, &planned, &holder, how)
    }
}

/// Shows the plan; with `--yes` leases all of it or, if one fails, none.
fn apply(
    scope: &Scope<'_>,
    plugin: &Plugin,
    planned: &[Planned],
    holder: &impl Fn(&Planned) -> Holder,
    how: &How,
) -> Result<Outcome> {
    let ranges = planned
        .iter()
        .map(range_of)
        .collect::<Result<Vec<Range>>>()?;
    for planned in planned {
        let of = holder(planned);
        if cni_wire::ContainerId::parse(&of.container).is_err() {
            bail!(
                "{}: container ID {:?} is none",
                planned.address,
                of.container
            );
        }
    }
    let mut done = Vec::new();
    if how.yes {
        let store = &plugin.open(scope.store)?;
        for (planned, range) in planned.iter().zip(&ranges) {
            match lease(store, planned, range, &holder(planned)) {
                Ok(true) => done.push(planned),
                // Imported by an earlier run.
                Ok(false) => {}
                Err(error) => {
                    let back = give_back(store, &done, holder);
                    return Err(error.context(format!("import {}; {back}", planned.address)));
                }
            }
        }
    }
    if scope.global.json {
        say_json(json!({"dryRun": !how.yes, "leases": planned, "imported": done.len()}));
        return Ok(Outcome::Good);
    }
    let rows: Vec<Vec<String>> = planned
        .iter()
        .map(|planned| row(planned, &holder(planned)))
        .collect();
    say(&table(&["ADDRESS", "RANGE", "HOLDER"], &rows));
    match how.yes {
        true => say(&format!(
            "{} imported, {} were there\n",
            done.len(),
            planned.len() - done.len()
        )),
        false => say(&format!(
            "{} to import; nothing was written, say --yes\n",
            planned.len()
        )),
    }
    Ok(Outcome::Good)
}

fn range_of(planned: &Planned) -> Result<Range> {
    let text = planned.range.to_string();
    let range = Range::new(
        &Spec {
            range: &text,
            ..Spec::default()
        },
        Profile::Strict,
    )?;
    if !range.may_be_requested(planned.address) {
        bail!("{} is the first or last address of {text}", planned.address);
    }
    Ok(range)
}

/// Whether it was leased now; false when the same holder has it already.
fn lease(store: &Store, planned: &Planned, range: &Range, holder: &Holder) -> Result<bool> {
    // What a record names may have been released by hand since, or lost to another.
    let held = store.held_by(holder)?;
    if held.iter().any(|lease| lease.address == planned.address) {
        return Ok(false);
    }
    let index = store.owned_by(holder)?.len();
    let want = Want {
        range,
        network_name: None,
        overlapping: true,
        holder,
    };
    store.allocate_this(&want, index, planned.address)?;
    Ok(true)
}

fn give_back(store: &Store, done: &[&Planned], holder: &impl Fn(&Planned) -> Holder) -> String {
    let mut left = 0;
    for planned in done.iter().rev() {
        let last = store.owned_by(&holder(planned)).ok();
        let last = last.and_then(|mut all| all.pop());
        match last.map(|last| store.release(&last, CoolDown::NeverAnswered)) {
            Some(Ok(_)) => {}
            _ => left += 1,
        }
    }
    match left {
        0 => "nothing was imported".to_owned(),
        n => format!("{n} leases could not be given back, see rdmactl addresses"),
    }
}

fn row(planned: &Planned, holder: &Holder) -> Vec<String> {
    vec![
        planned.address.to_string(),
        planned.range.to_string(),
        node::table::cell(&holder.to_string()),
    ]
}
