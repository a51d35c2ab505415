//! `kubectl rdma`: one view of all nodes. The same binary by another name, which kubectl finds as a
//! plugin: `kubectl-rdma` in the PATH.
//!
//! It asks the daemon's pod of each node, by `kubectl exec`, for what the commands print as JSON, and
//! puts the answers together. It needs no server of its own and no rights in the cluster but those
//! of its user: to list the pods of the daemon's namespace, and `pods/exec` there.
//!
//! - [`ask`]: the pods, and their answers in parallel
//! - [`tables`]: the answers as one table

mod ask;
mod tables;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use node::document::versioned;
use serde_json::json;

use crate::cli;
use ask::{Answer, Cluster, Question};

/// The name under which kubectl finds this program.
const NAME: &str = "kubectl-rdma";

/// RDMA on all nodes: asks the daemon's pod of each.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-rdma",
    bin_name = "kubectl rdma",
    version,
    after_help = "It needs kubectl in the PATH, and the rights to list pods and to exec into them in the \
    daemon's namespace.\n\
    Exit status: 0 all nodes answered and are in order, 1 not, 2 wrong usage."
)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Flags {
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// Kubeconfig
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<String>,
    /// Namespace of the daemon
    #[arg(
        long,
        short,
        global = true,
        value_name = "NAME",
        default_value = "kube-system"
    )]
    namespace: String,
    /// Labels of the daemon's pods
    #[arg(
        long,
        short = 'l',
        global = true,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=rdma-device-plugin"
    )]
    selector: String,
    /// Only these nodes
    #[arg(long, global = true, value_name = "NAME,..", value_delimiter = ',')]
    nodes: Vec<String>,
    /// How many nodes are asked at one time
    #[arg(long, global = true, value_name = "COUNT", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    /// How long a node may take, in seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// The program that stands for kubectl
    #[arg(long, global = true, value_name = "PROGRAM", default_value = "kubectl")]
    kubectl: String,
    /// Print JSON: each node with its document
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Resources, who holds what, and health of each node
    Status(More),
    /// GPUs, NICs and how near they are, by node
    Topology(More),
    /// HCAs of each node
    Discover(More),
    /// Which checks fail on which node
    Preflight(More),
    /// Leases of all nodes
    Leases(More),
}

#[derive(Debug, Args)]
struct More {
    /// Flags for the command on the node, behind --
    #[arg(last = true, value_name = "FLAG")]
    more: Vec<String>,
}

impl Command {
    fn question(&self) -> (Question, &[String]) {
        match self {
            Self::Status(more) => (Question::Status, &more.more),
            Self::Topology(more) => (Question::Topology, &more.more),
            Self::Discover(more) => (Question::Discover, &more.more),
            Self::Preflight(more) => (Question::Preflight, &more.more),
            Self::Leases(more) => (Question::Leases, &more.more),
        }
    }
}

/// Whether the program was started by that name.
pub(crate) fn is_meant(program: Option<&OsString>) -> bool {
    let name = program
        .map(std::path::Path::new)
        .and_then(|path| path.file_name());
    name.is_some_and(|name| name == NAME)
}

/// The command line, for manual pages and completions.
pub(crate) fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Parses the command line, asks and prints.
pub(crate) fn main(arguments: impl Iterator<Item = OsString>, out: &mut impl Write) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    cli::ended("kubectl rdma", cli.run(out), out)
}

impl Cli {
    fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let (question, more) = self.command.question();
        let answers = self.ask(question, more)?;
        if self.flags.json {
            let nodes: Vec<_> = answers.iter().map(Answer::document).collect();
            writeln!(out, "{:#}", versioned(json!({"nodes": nodes})))?;
        } else {
            out.write_all(tables::text(question, &answers).as_bytes())?;
        }
        let silent = answers.iter().filter(|answer| answer.document.is_err());
        let wrong = answers.iter().filter(|answer| answer.is_wrong(question));
        match (silent.count(), wrong.count()) {
            (0, 0) => Ok(()),
            (0, wrong) => bail!("{wrong} of {} nodes are not in order", answers.len()),
            (silent, _) => bail!("{silent} of {} nodes did not answer", answers.len()),
        }
    }

    fn ask(&self, question: Question, more: &[String]) -> anyhow::Result<Vec<Answer>> {
        let flags = &self.flags;
        let mut arguments = Vec::new();
        for (flag, value) in [
            ("--context", &flags.context),
            ("--kubeconfig", &flags.kubeconfig),
        ] {
            arguments.extend(value.iter().map(|value| format!("{flag}={value}")));
        }
        arguments.push(format!("--namespace={}", flags.namespace));
        let cluster = Cluster {
            kubectl: flags.kubectl.clone(),
            arguments,
            selector: flags.selector.clone(),
            nodes: flags.nodes.clone(),
            parallel: usize::from(flags.parallel),
            timeout: Duration::from_secs(flags.timeout),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start")?;
        runtime.block_on(cluster.ask(question, more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides_which_program_it_is() {
        for (name, expected) in [
            ("/usr/local/bin/kubectl-rdma", true),
            ("kubectl-rdma", true),
            ("/usr/bin/rdma-device-plugin", false),
            ("/kubectl-rdma/rdma-device-plugin", false),
        ] {
            assert_eq!(is_meant(Some(&name.into())), expected, "{name}");
        }
        assert!(!is_meant(None));
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
        let cli = Cli::try_parse_from([
            "kubectl-rdma",
            "preflight",
            "--nodes",
            "a,b",
            "--",
            "--only",
            "L",
        ]);
        let cli = cli.unwrap();
        assert_eq!(cli.flags.nodes, ["a", "b"]);
        assert_eq!(cli.command.question().1, ["--only", "L"]);
    }
}
