//! The administrator's face of `rdma-netdev`: what this node's pods have of it, and taking it back
//! from those that are gone.

mod list;
mod reclaim;
mod validate;

pub use validate::examine;

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, anyhow};
use attachment::{
    journal::{Key, Record},
    listing,
    node::{Node, Places},
};
use clap::{Args, Parser, Subcommand};
use node::document::versioned;
use node::policy::Policy;

/// RDMA netdevs of this node's pods: which pod has which, and since when.
///
/// Exit status: 0 done, 1 failed, 2 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "rdma-netdev", version)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// The node's policy, which names the directory of the journal
    #[arg(long, global = true, env = "RDMA_NETDEV_POLICY", default_value = node::policy::DEFAULT_PATH)]
    policy: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Attachments of this node, by the journal
    List,
    /// Undo orphaned attachments, whose pods ended without DEL: return netdevs, release addresses
    Reclaim(reclaim::Reclaim),
    /// Check networks with the node's policy, before a pod asks for them
    Validate(validate::Validate),
}

/// The command line, for manual pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Parses the arguments and runs the command.
pub fn run(places: &Places) -> ExitCode {
    let cli = Cli::parse();
    let places = Places {
        policy: cli.global.policy.clone(),
        ..places.clone()
    };
    let ran = match cli.command {
        Command::List => list::run(&places, cli.global.json),
        Command::Reclaim(command) => command.run(&places, cli.global.json),
        Command::Validate(command) => command.run(&places, cli.global.json),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn open(places: &Places) -> Result<Node> {
    Policy::check_named(&places.policy)?;
    let node = Node::open_for_release(places, "administrator".into())
        .map_err(|error| anyhow!(error.with_remedy()))
        .context("read the state of this node")?;
    if let Some(fault) = &node.policy.fault {
        complain(&fault.with_remedy());
    }
    Ok(node)
}

/// All attachments whose record can be read, oldest first; the others are complained about.
fn records(node: &Node) -> Result<Vec<(Key, Record)>> {
    let (records, complaints) = listing::records(node).context("read the journal")?;
    for complaint in complaints {
        complain(&complaint);
    }
    Ok(records)
}

/// The one place that prints results. A reader that has seen enough (`| head`) is no error.
fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn say_json(document: serde_json::Value) {
    say(&format!("{:#}\n", versioned(document)));
}

fn complain(text: &str) {
    let text = cni_wire::text::printable(text);
    let _ = writeln!(std::io::stderr().lock(), "rdma-netdev: {text}");
}
