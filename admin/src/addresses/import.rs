//! `rdmactl addresses import`: take over the leases of host-local.

use super::Scope;
use super::host_local::{self, Planned};
use crate::output::{Ended, Outcome, complain, table};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ipam::lease::Holder;
use ipam::range::{Range, Spec};
use ipam::store::{CoolDown, Store, Want};
use ipnetwork::IpNetwork;
use node::policy::{Profile, StoreKind};
use node::table::cell;
use serde_json::json;
use std::net::IpAddr;
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
        /// Lease them; without this only the plan is shown
        #[arg(long, short)]
        yes: bool,
    },
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
            yes,
        } = &self.from;
        let (planned, empty) = host_local::read(directory, range)?;
        for name in empty {
            let file = directory.join(name);
            complain(&format!(
                "{}: the file is empty; not imported",
                file.display()
            ));
        }
        let name = directory
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let network = network.clone().or(name);
        let network = network.context("name the network with --network")?;
        let node = plugin.identity()?;
        let holder = |planned: &Planned| Holder {
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
        let mut leases = Vec::new();
        for planned in &planned {
            if cni_wire::ContainerId::parse(&planned.container).is_err() {
                let (address, container) = (planned.address, &planned.container);
                bail!("{address}: container ID {container:?} is none");
            }
            leases.push((planned.address, range_of(planned)?, holder(planned)));
        }
        let done = match yes {
            true => import(&plugin.open(scope.store)?, &leases)?,
            false => 0,
        };
        let document = json!({"dryRun": !yes, "leases": planned, "imported": done});
        scope.global.say(document, || {
            let row = |(planned, (.., holder)): (&Planned, &Lease)| {
                vec![
                    planned.address.to_string(),
                    planned.range.to_string(),
                    cell(&holder.to_string()),
                ]
            };
            let rows = planned.iter().zip(&leases).map(row);
            let all = planned.len();
            table("ADDRESS  RANGE  HOLDER", rows)
                + &match yes {
                    true => format!("{done} imported, {} were there\n", all - done),
                    false => format!("{all} to import; nothing was written, give --yes\n"),
                }
        });
        Ok(Outcome::Good)
    }
}

/// One to make.
type Lease = (IpAddr, Range, Holder);

/// All, or none of those that were not there; how many.
fn import(store: &Store, leases: &[Lease]) -> Result<usize> {
    let mut done = Vec::new();
    for one in leases {
        match lease(store, one) {
            Ok(true) => done.push(&one.2),
            // Imported by an earlier run.
            Ok(false) => {}
            Err(error) => {
                let back = give_back(store, &done);
                return Err(error.context(format!("import {}; {back}", one.0)));
            }
        }
    }
    Ok(done.len())
}

fn range_of(planned: &Planned) -> Result<Range> {
    let text = planned.range.to_string();
    let spec = Spec {
        range: &text,
        ..Spec::default()
    };
    let range = Range::new(&spec, Profile::Strict)?;
    if !range.may_be_requested(planned.address) {
        bail!("{} is the first or last address of {text}", planned.address);
    }
    Ok(range)
}

/// Whether it was leased now; false when the same holder has it already.
fn lease(store: &Store, (address, range, holder): &Lease) -> Result<bool> {
    // What a record names may have been released by hand since, or lost to another.
    let held = store.held_by(holder)?;
    if held.iter().any(|lease| lease.address == *address) {
        return Ok(false);
    }
    let index = store.owned_by(holder)?.len();
    let want = Want {
        range,
        network_name: None,
        overlapping: true,
        holder,
    };
    store.allocate_this(&want, index, *address)?;
    Ok(true)
}

fn give_back(store: &Store, done: &[&Holder]) -> String {
    let mut left = 0;
    for holder in done.iter().rev() {
        let last = store.owned_by(holder).ok().and_then(|mut all| all.pop());
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
