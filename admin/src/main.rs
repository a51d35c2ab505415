//! `rdmactl`: everything that a person asks about RDMA, on this node or, as `kubectl rdma`, on all
//! nodes of a cluster.
//!
//! A command reads, then prints a table for people or, with `--json`, one document for programs. What
//! the daemon knows comes from its socket as a typed document, the rest from files and the kernel.

#![forbid(unsafe_code)]

mod addresses;
mod cluster;
mod discover;
mod documents;
mod explain;
mod findings;
mod forget;
mod global;
mod kubectl;
mod node_guid;
mod node_state;
mod on_host;
mod output;
mod pages;
mod pcie_link;
mod plan;
mod pods;
mod preflight;
mod reclaim;
mod report;
mod state_rows;
mod status;
mod topology;
mod validate;
mod verdict;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use global::Global;
use output::{Ended, ended};

/// RDMA on this node: hardware, pods, addresses, and what is wrong.
#[derive(Debug, Parser)]
#[command(name = "rdmactl", version, max_term_width = 100)]
#[command(
    after_help = "As kubectl rdma COMMAND it is about all nodes of the cluster.\n\
    Exit status: 0 good, 1 failed or something was found, 2 wrong usage."
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Health of this node: resources, HCAs, reasons, addresses left
    Status(status::Status),
    /// Which pod has which HCAs, GPUs, interfaces and addresses
    Pods(pods::Pods),
    /// RDMA devices of this node, and the resources that offer them
    Discover(discover::Discover),
    /// GPUs and NICs, and how far they are from each other
    Topology(topology::Topology),
    /// Why a device is or is not in each pool
    Explain(explain::Explain),
    /// An HCA that is missing was removed for good: it is not missed any more
    Forget(forget::Forget),
    /// What this node or container lacks for RDMA
    Preflight(Box<preflight::Preflight>),
    /// Whether RDMA works between two pods or all nodes, and how fast
    Verify(Box<verify::Verify>),
    /// Write one archive of what support needs
    Report(report::Report),
    /// Write pools, policy and networks for what the nodes have
    Plan(Box<plan::Plan>),
    /// Check pools, policies and networks before they are applied
    Validate(validate::Validate),
    /// Leased addresses of this node's stores
    Addresses(addresses::Addresses),
    /// Undo what pods left that ended without DEL: attachments and leases
    Reclaim(reclaim::Reclaim),
    /// Print the completion for a shell
    Completion(pages::Completion),
    /// Write manual pages and completions of the programs to a directory
    #[command(hide = true)]
    Pages(pages::Pages),
}

impl Command {
    fn run(&self, global: &Global) -> Ended {
        match self {
            Self::Status(command) => command.run(global),
            Self::Pods(command) => command.run(global),
            Self::Discover(command) => command.run(global),
            Self::Topology(command) => command.run(global),
            Self::Explain(command) => command.run(global),
            Self::Forget(command) => command.run(global),
            Self::Preflight(command) => command.run(global),
            Self::Verify(command) => command.run(global),
            Self::Report(command) => command.run(global),
            Self::Plan(_) => Err(output::wrong_usage(
                "plan asks the nodes of a cluster: run \"kubectl rdma plan\" where kubectl works",
            )),
            Self::Validate(command) => command.run(global),
            Self::Addresses(command) => command.run(global),
            Self::Reclaim(command) => command.run(global),
            Self::Completion(command) => command.run(),
            Self::Pages(command) => command.run(),
        }
    }
}

fn main() -> ExitCode {
    if cluster::is_meant(std::env::args_os().next().as_ref()) {
        return cluster::main(std::env::args_os());
    }
    let cli = Cli::parse();
    ended(cli.command.run(&cli.global))
}
