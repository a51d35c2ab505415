//! The administrator's face: commands that need the API, which `rdma-ipam` has no client of.
//!
//! Each reads, decides by [`crate::decide`] and prints a table for people or, with `--json`, one
//! document for machines. Only `release` writes, and that is one change of one object: killed before
//! or after it, nothing is half done.

mod blocks;
mod fsck;
mod release;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;
use cni_wire::text::printable;
use node::document::versioned;
use node::policy::{DEFAULT_PATH, Policy};

use crate::cli::{Global, runtime};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Blocks of addresses in the cluster: which node has which, and how much of each is used
    Blocks(blocks::Blocks),
    /// Take a block from its node, which is gone for good: an administrator's word
    Release(release::Release),
    /// Compare the objects in the API with the cluster's nodes, with this node's grants and with its leases
    Fsck(fsck::Fsck),
}

/// How a command ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// Nothing was found, or something was that is not in order, or the answer was no.
    Found,
}

pub(crate) fn run(command: Command, global: &Global) -> ExitCode {
    let ran = runtime().and_then(|runtime| {
        runtime.block_on(async {
            match command {
                Command::Blocks(command) => command.run(global).await,
                Command::Release(command) => command.run(global).await,
                Command::Fsck(command) => command.run(global).await,
            }
        })
    });
    match ran {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Found) => ExitCode::from(3),
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

impl Global {
    /// The node's policy; without one the defaults, as on a workstation. One that was named is meant
    /// to be there.
    fn policy(&self) -> anyhow::Result<Policy> {
        if self.policy != Path::new(DEFAULT_PATH) && !self.policy.exists() {
            anyhow::bail!("the policy {} is not there", self.policy.display());
        }
        Policy::load(&self.policy).map_err(|error| anyhow::anyhow!(error.with_remedy()))
    }

    /// This node's name in the cluster, where somebody says it: a host name need not be one.
    fn node_name(&self, policy: &Policy) -> anyhow::Result<String> {
        let said = self.node.as_deref().filter(|node| !node.is_empty());
        let name =
            policy.node.as_deref().or(said).context(
                "which node this is is not known: name it with --node, or say --all-nodes",
            )?;
        Ok(name.to_owned())
    }
}

/// A reader that has seen enough (`| head`) is no error.
fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn complain(text: &str) {
    let text = printable(text);
    let _ = writeln!(std::io::stderr().lock(), "rdma-ipam-broker: {text}");
}

fn say_json(document: serde_json::Value) {
    say(&format!("{:#}\n", versioned(document)));
}
