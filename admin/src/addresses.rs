//! `rdmactl addresses`: leased addresses of this node's stores, and what can be done about them.

mod blocks;
mod export;
mod fsck;
mod init;
mod leases;
pub(crate) mod pools;
mod release;

use std::path::Path;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use ipam::lease::Lease;
use ipam::plugin::Plugin;
use ipam::store::{Store, StoreError};
use serde_json::json;

use crate::global::Global;
use crate::output::{Ended, Exit, complain, filters_before_command};

/// Shows the pools of a store, this node's blocks, and who holds which address.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 good, 1 failed, nothing found, or fsck found something, 2 wrong usage."
)]
pub(crate) struct Addresses {
    /// The store, by its name in the policy
    #[arg(long, global = true, value_name = "NAME", default_value = ipam::config::DEFAULT_STORE)]
    store: String,
    #[command(flatten)]
    filter: leases::Filter,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Release leases by hand
    Release(release::Release),
    /// Check the store, and repair what can be
    Fsck(fsck::Fsck),
    /// Write leases into whereabouts' objects, for networks that go back to whereabouts
    Export(export::Export),
    /// Create the store in its directory, with the policy's id
    Init,
}

impl Addresses {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let scope = Scope {
            global,
            store: &self.store,
        };
        if self.command.is_some() && self.filter.is_set() {
            let filters = "--pool, --network-name, --pod, --address and --node";
            return Err(filters_before_command(filters));
        }
        match &self.command {
            None => self.list(&scope),
            Some(Command::Release(command)) => command.run(&scope),
            Some(Command::Fsck(command)) => command.run(&scope),
            Some(Command::Export(command)) => command.run(&scope),
            Some(Command::Init) => init::run(&scope),
        }
    }

    fn list(&self, scope: &Scope<'_>) -> Ended {
        let (plugin, store) = scope.open_used()?;
        let Some(store) = store else {
            let document = json!({
                "store": null, "pools": [], "blocks": null, "leasesOutside": [], "leases": [],
            });
            scope.global.say(document, String::new);
            return Ok(self.filter.outcome(true));
        };
        let pools = pools::read(&store, plugin.policy().ipam.cooldown)?;
        let blocks = blocks::read(&store)?;
        let leases = self.filter.leases(&store)?;
        let document = json!({
            "store": {
                "directory": store.directory(), "id": store.id(), "filesystem": store.file_system(),
            },
            "pools": pools::documents(&pools),
            "blocks": blocks.as_ref().map(|blocks| blocks.documents()),
            "leasesOutside": blocks.as_ref().map(|blocks| &blocks.outside),
            "leases": leases,
        });
        scope.global.say(document, || {
            let (id, directory) = (store.id(), store.directory().display());
            let mut tables = vec![format!(
                "store {id} in {directory} ({})\n",
                store.file_system()
            )];
            if !self.filter.is_set() {
                tables.push(pools::table(&pools));
                tables.extend(blocks.as_ref().map(blocks::Blocks::table));
            }
            tables.push(leases::table(&leases));
            tables.join("\n")
        });
        let outside = blocks.iter().flat_map(|blocks| &blocks.outside);
        outside.clone().for_each(|lease| complain(lease));
        match outside.count() {
            0 => Ok(self.filter.outcome(leases.is_empty())),
            _ => Ok(Exit::Found),
        }
    }
}

/// What a command works on.
struct Scope<'g> {
    global: &'g Global,
    store: &'g str,
}

impl Scope<'_> {
    fn plugin(&self) -> anyhow::Result<Plugin> {
        let policy = self.global.policy()?;
        // An unused store has no leases; one that is not configured is a mistake.
        if !policy.stores.contains_key(self.store) {
            let error = StoreError::unknown(&policy, self.store);
            return Err(anyhow!("{error}; name one of them with --store"));
        }
        Ok(Plugin::new(
            policy,
            &self.global.host_root,
            self.global.node_name().as_deref(),
        ))
    }

    /// The store, if it was ever used. One that was not has nothing in it, which is an answer like
    /// that of an empty one.
    fn open_used(&self) -> anyhow::Result<(Plugin, Option<Store>)> {
        let plugin = self.plugin()?;
        let store = plugin.open_existing(self.store)?;
        if store.is_none() {
            complain(&format!("store {:?} has never been used", self.store));
        }
        Ok((plugin, store))
    }
}

/// A duration of an argument.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    node::duration::parse(text).ok_or_else(|| "is not a duration such as 30s, 2m or 0".to_owned())
}

/// Whether the holder is a pod of this name, with or without its namespace.
fn names_pod(lease: &Lease, name: &str) -> bool {
    let pod = lease.holder.pod.as_ref();
    pod.is_some_and(|pod| pod.name == name || pod.to_string() == name)
}

pub(crate) fn complain_of(path: &Path, what: &str) {
    let path = shown(path);
    complain(&format!("{path}: {what}; see rdmactl addresses fsck"));
}

/// What a path is called in output.
fn shown(path: &Path) -> String {
    cni_wire::text::printable(&path.display().to_string())
}
