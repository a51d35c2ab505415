//! `rdma-ipam import`: take over the leases of another IPAM plugin.

use super::documents::documents;
use super::{Global, Outcome, complain, say, say_json};
use crate::import::{self, Planned};
use crate::lease::{Holder, Pod};
use crate::plugin::Plugin;
use crate::range::{Range, Spec};
use crate::store::{CoolDown, Store, Want};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ipnetwork::IpNetwork;
use node::policy::{Profile, StoreKind};
use node::table::{cell, table};
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
    /// A file with the objects of whereabouts, from kubectl get -o yaml or -o json
    Whereabouts {
        file: PathBuf,
        /// The CNI network's name
        #[arg(long, default_value = "whereabouts")]
        network: String,
        /// The interface, for old records that have none
        #[arg(long, default_value = "net1")]
        interface: String,
        /// A network name of the networks, where the file has no node slices; may be repeated
        #[arg(long)]
        network_name: Vec<String>,
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
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let plugin = global.plugin()?;
        let store = plugin.policy().stores.get(&global.store);
        if let Some(StoreKind::Kubernetes { .. }) = store.map(|store| &store.kind) {
            bail!(
                "store {:?} is of type kubernetes: it has the leases of this node alone, in blocks that \
                 the cluster gave it; list the other plugin's addresses in the network's exclude \
                 until they have ended, or import them into a store of type file",
                global.store
            );
        }
        match self.from {
            From::HostLocal {
                directory,
                range,
                network,
                how,
            } => {
                let (planned, empty) = import::host_local(&directory, &range)?;
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
                    .or(name)
                    .context("name the network with --network")?;
                let node = plugin.identity()?;
                let holder = move |planned: &Planned| Holder {
                    network: network.clone(),
                    node: node.name.clone(),
                    machine: node.machine.clone(),
                    boot: node.boot.clone(),
                    ..anybody(planned, "eth0")
                };
                apply(global, &plugin, &planned, &holder, &how)
            }
            From::Whereabouts {
                file,
                network,
                interface,
                network_name,
                how,
            } => {
                let text = std::fs::read_to_string(&file)
                    .with_context(|| format!("read {}", file.display()))?;
                let place = file.display().to_string();
                let plan = import::whereabouts(&documents(&place, &text)?, &network_name)
                    .with_context(|| format!("import {place}"))?;
                for remark in &plan.remarks {
                    complain(remark);
                }
                let holder = move |planned: &Planned| Holder {
                    network: network.clone(),
                    ..anybody(planned, &interface)
                };
                apply(global, &plugin, &plan.leases, &holder, &how)
            }
        }
    }
}

/// A holder whose node is not known: DEL finds it by the container all the same.
fn anybody(planned: &Planned, interface: &str) -> Holder {
    let pod = planned.pod.clone();
    Holder {
        network: String::new(),
        pod: pod.map(|(namespace, name)| Pod {
            namespace,
            name,
            uid: None,
        }),
        container: planned.container.clone(),
        interface: planned
            .interface
            .clone()
            .unwrap_or_else(|| interface.to_owned()),
        node: planned.node.clone().unwrap_or_default(),
        machine: String::new(),
        boot: String::new(),
        netns: None,
        netns_inode: None,
        device: None,
    }
}

/// Shows the plan; with `--yes` leases all of it or, if one fails, none.
fn apply(
    global: &Global,
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
        let store = &plugin.open(&global.store)?;
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
    if global.json {
        say_json(json!({"dryRun": !how.yes, "leases": planned, "imported": done.len()}));
        return Ok(Outcome::Done);
    }
    let rows: Vec<Vec<String>> = planned
        .iter()
        .map(|planned| row(planned, &holder(planned)))
        .collect();
    say(&table(
        &["ADDRESS", "RANGE", "NETWORK NAME", "HOLDER"],
        &rows,
    ));
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
    Ok(Outcome::Done)
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
    let same = |lease: &crate::lease::Lease| {
        lease.address == planned.address && lease.network_name == planned.network_name
    };
    if held.iter().any(same) {
        return Ok(false);
    }
    let index = store.owned_by(holder)?.len();
    let want = Want {
        range,
        network_name: planned.network_name.as_deref(),
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
        n => format!("{n} leases could not be given back, see rdma-ipam list"),
    }
}

fn row(planned: &Planned, holder: &Holder) -> Vec<String> {
    vec![
        planned.address.to_string(),
        planned.range.to_string(),
        cell(planned.network_name.as_deref().unwrap_or_default()),
        cell(&holder.to_string()),
    ]
}
