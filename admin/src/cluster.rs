//! `kubectl rdma`: the same commands for all nodes. The same program by another name, which kubectl
//! finds as a plugin: `kubectl-rdma` in the PATH.
//!
//! What nodes are and how they are, it reads from the API: `RdmaNode`s and pods. For the rest it starts
//! `rdmactl COMMAND --json` in the daemon's pod of each node, by `kubectl exec`, and puts the documents
//! together as one table; a command that has none is shown node by node, as it prints. It needs no server
//! of its own and no rights in the cluster but those of its user. With the right to list nodes, it does not
//! wait for one whose kubelet does not report.
//!
//! - [`nodes`], [`pods`]: what the API knows
//! - [`ask`]: the daemon's pods, and their answers in parallel
//! - [`tables`]: the answers as one table
//! - [`report`]: what a report has of the cluster and its nodes

pub(crate) mod ask;
mod nodes;
mod pods;
mod report;
mod tables;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser};
use serde_json::json;

use crate::global::{CLUSTER, Global, Kubectl, NODE};
use crate::output::{Ended, Exit, block_on, ended, say, say_json, wrong_usage};
use crate::{Command, output::complain};
use tables::NodeTable;

/// The name under which kubectl finds this program.
const NAME: &str = "kubectl-rdma";

/// RDMA on all nodes.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-rdma",
    bin_name = "kubectl rdma",
    version,
    max_term_width = 100,
    after_help = "It needs kubectl in the PATH. status, discover and topology need the rights of ClusterRole \
    rdma-viewer, pods also that to list pods. The other commands ask the daemon's pods by exec in its namespace; \
    with the right to list nodes, they do not wait for one whose kubelet does not report.\n\
    Exit status: 0 all nodes answered and none reports a problem, 1 not, 2 wrong usage."
)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Which cluster and nodes, and how they are asked.
#[derive(Debug, Clone, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(crate) kubectl: Kubectl,
    /// Labels of the daemon's pods
    #[arg(
        long,
        short = 'l',
        global = true,
        help_heading = CLUSTER,
        hide_short_help = true,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=rdma-netdev"
    )]
    pub(crate) selector: String,
    /// Only these nodes
    #[arg(long, global = true, help_heading = CLUSTER, value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) nodes: Vec<String>,
    /// How many nodes are asked at one time
    #[arg(long, global = true, help_heading = CLUSTER, hide_short_help = true, value_name = "COUNT",
        default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) parallel: u16,
    /// How long a node may take, in seconds
    #[arg(long, global = true, help_heading = CLUSTER, hide_short_help = true, value_name = "SECONDS",
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
}

impl Flags {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
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
    without_node_flags(Cli::command())
}

fn is_of_node(arg: &Arg) -> bool {
    arg.get_help_heading() == Some(NODE)
}

fn without_node_flags(command: clap::Command) -> clap::Command {
    let hidden = |arg: Arg| match is_of_node(&arg) {
        true => arg.hide(true),
        false => arg,
    };
    command.mut_args(hidden).mut_subcommands(without_node_flags)
}

/// A flag of the command line that is of a node.
fn node_flag(command: &clap::Command, given: &ArgMatches) -> Option<String> {
    let mut flags = command.get_arguments().filter(|arg| is_of_node(arg));
    let flag = flags.find(|arg| !forwarded(arg, given).is_empty());
    let flag = flag.and_then(|arg| Some(format!("--{}", arg.get_long()?)));
    flag.or_else(|| {
        let (name, given) = given.subcommand()?;
        node_flag(command.find_subcommand(name)?, given)
    })
}

/// Parses the command line, asks and prints.
pub(crate) fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut command = command();
    // Of global flags, a sub-command's matches have them only once it is built.
    command.build();
    let matches = command.clone().get_matches_from(arguments);
    ended(
        Cli::from_arg_matches(&matches)
            .map_or_else(|error| Err(error.into()), |cli| cli.run(&command, &matches)),
    )
}

impl Cli {
    fn run(&self, command: &clap::Command, matches: &ArgMatches) -> Ended {
        if let Some(flag) = node_flag(command, matches) {
            let why = format!("{flag} is for one node: run rdmactl there");
            return Err(wrong_usage(&why));
        }
        match &self.command {
            // Of the cluster or of a file, not of a node.
            Command::Verify(verify) => return verify.run_in_cluster(&self.flags, &self.global),
            Command::Validate(_) | Command::Completion(_) | Command::Pages(_) => {
                return self.command.run(&self.global);
            }
            Command::Report(command) => {
                let mut collection = command.open()?;
                block_on(report::collect(&self.flags, &mut collection))??;
                return collection.finish(&self.global);
            }
            Command::Status(_) | Command::Discover(_) | Command::Topology(_) => {
                let command = matches.subcommand_name().unwrap_or_default();
                let views = nodes::views(command, self.global.is_wide());
                return block_on(nodes::print(&views, &self.flags, &self.global))?;
            }
            Command::Pods(_) => return block_on(pods::print(&self.flags, &self.global))?,
            Command::Plan(plan) => {
                let argv = ["rdmactl", "discover", "--json"].map(str::to_owned);
                let answers = block_on(ask::ask(&self.flags, &argv))??;
                let answers: Vec<_> = answers.iter().map(ask::NodeAnswer::document).collect();
                return plan.run(&answers, &self.global, &self.flags);
            }
            _ => {}
        }
        let Some((name, sub)) = matches.subcommand() else {
            bail!("no command");
        };
        // Flags of this program alone, and how results are printed.
        let of_flags = Flags::augment_args(clap::Command::new(""));
        let of_flags = of_flags.get_arguments().map(|arg| arg.get_id().as_str());
        let common: BTreeSet<&str> = of_flags.chain(["json", "output"]).collect();
        let mut argv = vec!["rdmactl".to_owned(), name.to_owned()];
        let mut nested = false;
        let (mut command, mut sub) = (command.find_subcommand(name), Some(sub));
        while let (Some(of), Some(given)) = (command, sub) {
            for arg in of.get_arguments() {
                if !common.contains(arg.get_id().as_str()) {
                    argv.extend(forwarded(arg, given));
                }
            }
            let next = given.subcommand();
            nested |= next.is_some();
            argv.extend(next.map(|(name, _)| name.to_owned()));
            command = next.and_then(|(name, _)| of.find_subcommand(name));
            sub = next.map(|(_, given)| given);
        }
        let view = NodeTable::of(name).filter(|_| !nested);
        if self.global.json || view.is_some() {
            argv.push("--json".to_owned());
        }
        if self.global.is_wide() {
            argv.push("--output=wide".to_owned());
        }
        let mut answers = block_on(ask::ask(&self.flags, &argv))??;
        if let Some(view) = view.filter(|_| !self.global.json) {
            view.check(&mut answers);
        }
        self.print(view, &answers)
    }

    fn print(&self, view: Option<NodeTable>, answers: &[ask::NodeAnswer]) -> Ended {
        if self.global.json {
            let nodes: Vec<_> = answers.iter().map(ask::NodeAnswer::document).collect();
            say_json(json!({"nodes": nodes}));
        } else if let Some(view) = view {
            say(&view.text(answers));
        } else {
            for answer in answers {
                say(&format!("NODE {}\n{}\n", answer.node, answer.printed()));
            }
        }
        for answer in answers {
            if let Err(error) = &answer.output {
                let (node, pod) = (&answer.node, &answer.pod);
                complain(&format!("{node}: no answer of {pod}: {error}"));
            }
        }
        let count = |of: fn(&ask::NodeAnswer) -> bool| answers.iter().filter(|a| of(a)).count();
        let silent = count(|answer| answer.output.is_err());
        let wrong = count(ask::NodeAnswer::is_wrong);
        match (silent, wrong) {
            (0, 0) => Ok(Exit::Good),
            (0, wrong) => bail!("{wrong} of {} nodes report a problem", answers.len()),
            (silent, _) => bail!("{silent} of {} nodes did not answer", answers.len()),
        }
    }
}

/// A flag or argument as it was given, for the command on the node.
fn forwarded(arg: &clap::Arg, given: &ArgMatches) -> Vec<String> {
    let id = arg.get_id().as_str();
    let is_known = given.try_contains_id(id).is_ok();
    if !is_known || given.value_source(id) != Some(ValueSource::CommandLine) {
        return Vec::new();
    }
    let takes_value = arg.get_num_args().is_none_or(|count| count.takes_values());
    let values = given.get_raw(id).into_iter().flatten();
    let values = values.map(|value| value.to_string_lossy().into_owned());
    match arg.get_long() {
        Some(long) if takes_value => values.map(|value| format!("--{long}={value}")).collect(),
        Some(long) => vec![format!("--{long}")],
        None => values.collect(),
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
            ("/usr/bin/rdmactl", false),
            ("/kubectl-rdma/rdmactl", false),
        ] {
            assert_eq!(is_meant(Some(&name.into())), expected, "{name}");
        }
        assert!(!is_meant(None));
    }

    /// The texts of `--help` of each command.
    fn helps(command: &mut clap::Command, all: &mut Vec<String>) {
        all.push(command.render_long_help().to_string());
        for sub in command.get_subcommands_mut() {
            helps(sub, all);
        }
    }

    #[test]
    fn a_cluster_is_not_asked_with_flags_of_a_node() {
        let mut all = Vec::new();
        let mut command = command();
        command.build();
        helps(&mut command, &mut all);
        assert!(all.len() > 20, "{}", all.len());
        for help in all {
            assert!(!help.contains("\nNode:"), "{help}");
        }
        for (line, expected) in [
            ("--policy=/x status", Some("--policy")),
            ("status --kubelet-root-dir /x", Some("--kubelet-root-dir")),
            ("addresses fsck --host-root /x", Some("--host-root")),
            ("preflight --pod", Some("--pod")),
            ("validate --on-host x", Some("--on-host")),
            ("validate --resource-prefix x x", None),
            ("status -o wide", None),
        ] {
            let words = std::iter::once("kubectl-rdma").chain(line.split(' '));
            let matches = command.clone().try_get_matches_from(words).unwrap();
            let flag = node_flag(&command, &matches);
            assert_eq!(flag.as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn flags_of_a_command_reach_the_node() {
        command().debug_assert();
        let mut command = command();
        command.build();
        let matches = command
            .clone()
            .try_get_matches_from([
                "kubectl-rdma",
                "preflight",
                "--nodes",
                "a,b",
                "--only",
                "L,M01",
                "--strict",
            ])
            .unwrap();
        let (name, given) = matches.subcommand().unwrap();
        let of = command.find_subcommand(name).unwrap();
        let forwarded: Vec<String> = ["only", "strict", "skip"]
            .iter()
            .flat_map(|id| {
                let arg = of.get_arguments().find(|arg| arg.get_id() == *id).unwrap();
                forwarded(arg, given)
            })
            .collect();
        assert_eq!(forwarded, ["--only=L", "--only=M01", "--strict"]);
        let cli = Cli::from_arg_matches(&matches).unwrap();
        assert_eq!(cli.flags.nodes, ["a", "b"]);
    }
}
