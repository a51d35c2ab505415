//! `rdmactl addresses`: leased addresses of this node's stores, and what can be done about them.

mod export;
mod fsck;
mod leases;
mod ownership;
mod parts;
pub(crate) mod pools;
mod release;

use std::path::Path;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use ipam::lease::Lease;
use ipam::leases::{LeaseError, Leases};
use ipam::plugin::Plugin;
use node_wire::{PartsChange, Reserved};
use serde_json::json;

use crate::global::Global;
use crate::output::{Ended, Exit, columns, complain, page};

/// Shows the ranges that this node leases from, what it owns, and who holds which address.
#[derive(Debug, Args)]
#[command(after_help = "Exit status: 0 good, 1 failed, or fsck found something, 2 wrong usage.")]
pub(crate) struct Addresses {
    /// The store, by its name in the policy
    #[arg(long, global = true, value_name = "NAME", default_value = ipam::config::DEFAULT_STORE)]
    store: String,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Release leases, or parts that a node has, by hand
    Release(release::Release),
    /// Prepare the directory that nodes share, once for all nodes
    Init,
    /// Make a part of a range a node's own network, before the node asks for one
    Assign(ownership::Assign),
    /// Give back what this node owns and does not use, before it leaves the cluster
    GiveBack(ownership::Space),
    /// Reserve what is free of a range, before its networks come from another program
    Hold(ownership::Ranges),
    /// Reserve the addresses of a range that whereabouts or host-local leases; repeat it until none is left
    Import(ownership::Import),
    /// Free what hold reserved; imported leases stay reserved
    Unhold(ownership::Ranges),
    /// Show what contradicts what in this node's leases
    Fsck,
    /// Write leases into whereabouts' objects, for networks that go back to whereabouts
    Export(export::Export),
}

impl Addresses {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let scope = Scope {
            global,
            store: &self.store,
        };
        match &self.command {
            None => self.list(&scope),
            Some(Command::Release(command)) => command.run(&scope),
            Some(Command::Init) => ownership::init(&scope),
            Some(Command::Assign(command)) => command.run(&scope),
            Some(Command::GiveBack(space)) => ownership::give_back(&scope, space),
            Some(Command::Hold(ranges)) => {
                let text = |of: &Reserved| format!("{} addresses are held now", of.added);
                ranges.change(&scope, PartsChange::Hold, text)
            }
            Some(Command::Import(command)) => command.run(&scope),
            Some(Command::Unhold(ranges)) => {
                let text = |of: &Reserved| format!("{} addresses are free now", of.removed);
                ranges.change(&scope, PartsChange::Unhold, text)
            }
            Some(Command::Fsck) => fsck::run(&scope),
            Some(Command::Export(command)) => command.run(&scope),
        }
    }

    fn list(&self, scope: &Scope<'_>) -> Ended {
        let (plugin, leases) = scope.open_used()?;
        let Some(leases) = leases else {
            let document = json!({
                "store": self.store, "pools": [], "parts": [], "leasesOutside": [], "leases": [],
            });
            scope.global.say(document, String::new);
            return Ok(Exit::Good);
        };
        let cooldown = plugin.policy().ipam.cooldown;
        let pools = pools::read(&leases, Some(&self.store), cooldown)?;
        let parts = parts::read(&plugin, &leases, &self.store)?;
        let listed = leases::read(&leases, &self.store)?;
        let owns = plugin.owns(&listed)?;
        let outside = listed.iter().filter(|lease| !owns(lease));
        let outside: Vec<String> = outside.map(outside_text).collect();
        let document = json!({
            "store": self.store,
            "pools": pools,
            "parts": parts,
            "leasesOutside": outside,
            "leases": listed,
        });
        scope.global.say(document, || {
            let mut tables = vec![columns(pools::COLUMNS, &pools)];
            if !parts.is_empty() {
                tables.push(columns(parts::COLUMNS, &parts));
            }
            tables.push(leases::table(&listed));
            page(tables, &[])
        });
        outside.iter().for_each(|lease| complain(lease));
        Ok(Exit::good_if(outside.is_empty()))
    }
}

fn outside_text(lease: &Lease) -> String {
    format!(
        "this node does not own {}: another node may lease it to a pod, too; let the pod that has it here end",
        lease.address
    )
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
            let error = LeaseError::unknown_store(&policy, self.store);
            return Err(anyhow!("{error}; name one of them with --store"));
        }
        Ok(Plugin::new(
            policy,
            &self.global.host_root,
            self.global.node_name().as_deref(),
        ))
    }

    /// The leases of this node, if there were any in this boot. None is an answer like that of an empty
    /// directory.
    fn open_used(&self) -> anyhow::Result<(Plugin, Option<Leases>)> {
        let plugin = self.plugin()?;
        let leases = plugin.leases_if_any()?;
        if leases.is_none() {
            complain("this node has leased nothing since it was started");
        }
        Ok((plugin, leases))
    }
}

pub(crate) fn complain_of(path: &Path, what: &str) {
    let path = shown(path);
    complain(&format!("{path}: {what}; see rdmactl addresses fsck"));
}

/// What a path is called in output.
fn shown(path: &Path) -> String {
    cni_wire::text::printable(&path.display().to_string())
}
