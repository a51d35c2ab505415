//! The administrator's face of `rdma-ipam`.
//!
//! Each command reads through the library and prints a table for people or, with
//! `--json`, the same data for machines.

mod blocks;
pub mod documents;
mod explain;
mod export;
mod fsck;
mod import;
mod init;
mod list;
mod pools;
mod reclaim;
mod release;
mod show;

use crate::plugin::Plugin;
use crate::store::{Store, StoreError};
use anyhow::{Result, anyhow};
use clap::{Args, Parser, Subcommand};
use node::document::versioned;
use node::policy::{DEFAULT_PATH, Policy};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// IP addresses of RDMA pods: who holds which, and why.
///
/// Exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing found or, for fsck,
/// something found that was not put right.
#[derive(Debug, Parser)]
#[command(name = "rdma-ipam", version)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// The node's policy
    #[arg(long, global = true, env = "RDMA_NETDEV_POLICY", default_value = DEFAULT_PATH)]
    policy: PathBuf,
    /// The store, by its name in the policy
    #[arg(long, global = true, default_value = crate::config::DEFAULT_STORE)]
    store: String,
    /// This node's name, where the policy has none
    #[arg(long, global = true, env = "RDMA_NODE_NAME")]
    node_name: Option<String>,
    /// Prefix of /proc, /etc and the network namespaces' paths
    #[arg(long, global = true, env = "RDMA_HOST_ROOT", default_value = "/")]
    host_root: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the store's directory a store, with the id that the policy names for it
    Init(init::Init),
    /// Leases, by address
    List(list::List),
    /// Everything known about an address, a pod or a container
    Show(show::Show),
    /// Pools: size, used, cooling down, free
    Pools(pools::Pools),
    /// Blocks of addresses that the cluster gave to this node, and how much of each is used
    Blocks(blocks::Blocks),
    /// Which addresses a network configuration may give, and which is next
    Explain(explain::Explain),
    /// Free this node's leases that are over
    Reclaim(reclaim::Reclaim),
    /// Free leases by hand
    Release(release::Release),
    /// Check the store, and repair what can be
    Fsck(fsck::Fsck),
    /// Take over the leases of host-local
    Import(import::Import),
    /// Write leases into whereabouts' objects, for networks that go back to whereabouts
    Export(export::Export),
}

/// How a command ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// Nothing was found, or something was that is not in order.
    Found,
}

/// The command line, for manual pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Parses the arguments and runs the command.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let global = &cli.global;
    let ran = match cli.command {
        Command::Init(command) => command.run(global),
        Command::List(command) => command.run(global),
        Command::Show(command) => command.run(global),
        Command::Pools(command) => command.run(global),
        Command::Blocks(command) => command.run(global),
        Command::Explain(command) => command.run(global),
        Command::Reclaim(command) => command.run(global),
        Command::Release(command) => command.run(global),
        Command::Fsck(command) => command.run(global),
        Command::Import(command) => command.run(global),
        Command::Export(command) => command.run(global),
    };
    match ran {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Found) => ExitCode::from(3),
        Err(error) => {
            complain(&chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes, each once: some messages end with the text of their cause. With
/// what to do, where the store is at fault.
fn chain(error: &anyhow::Error) -> String {
    let mut text = causes(error);
    let store = error.chain().find_map(|cause| cause.downcast_ref());
    if let Some(store) = store.map(StoreError::remedy) {
        text += &format!(" ({store})");
    }
    text
}

fn causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut text, cause| {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
        text
    })
}

impl Global {
    fn plugin(&self) -> Result<Plugin> {
        Policy::check_named(&self.policy)?;
        let policy = Policy::load(&self.policy).map_err(|e| anyhow!(e.with_remedy()))?;
        // An unused store has no leases; one that is not configured is a mistake.
        if !policy.stores.contains_key(&self.store) {
            let error = StoreError::unknown(&policy, &self.store);
            return Err(anyhow!("{error}; name one of them with --store"));
        }
        Ok(Plugin::new(
            policy,
            &self.host_root,
            self.node_name.as_deref(),
        ))
    }

    /// The store, if it was ever used. One that was not has nothing in it, which is an
    /// answer like that of an empty one.
    fn open_used(&self) -> Result<(Plugin, Option<Store>)> {
        let plugin = self.plugin()?;
        let store = plugin.open_existing(&self.store)?;
        if store.is_none() {
            complain(&format!("store {:?} has never been used", self.store));
        }
        Ok((plugin, store))
    }
}

/// The one place that prints results. A reader that has seen enough (`| head`)
/// is no error.
fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn complain(text: &str) {
    let text = cni_wire::text::printable(text);
    let _ = writeln!(std::io::stderr().lock(), "rdma-ipam: {text}");
}

fn say_json(document: serde_json::Value) {
    say(&format!("{:#}\n", versioned(document)));
}

/// Asks on the terminal, unless `yes` was said.
fn confirmed(yes: bool, question: &str) -> Result<bool> {
    let question = cni_wire::text::printable(question);
    Ok(yes || node::terminal::confirm("rdma-ipam", &question)?)
}

/// A duration of an argument.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    node::duration::parse(text).ok_or_else(|| "is no duration, as in 30s, 2m or 0".to_owned())
}

/// What a path is called in output.
fn shown(path: &Path) -> String {
    cni_wire::text::printable(&path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_the_store_is_said_with_what_to_do() {
        let fault = StoreError::Squashed {
            directory: "/srv/ipam".into(),
            owner: 0,
            by: 65534,
        };
        let (text, remedy) = (fault.to_string(), fault.remedy());
        let error = anyhow::Error::from(fault).context("open the store");
        assert_eq!(chain(&error), format!("open the store: {text} ({remedy})"));
        assert_eq!(chain(&anyhow!("no such thing")), "no such thing");
    }
}
