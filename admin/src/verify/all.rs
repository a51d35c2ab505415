//! `kubectl rdma verify --all`: every node and rail of a cluster.
//!
//! [`plan`] decides on a pod for each node and on rounds of pairs, [`rounds`] makes the pods and tests
//! the pairs by the steps of `ladder`, [`matrix`] judges. The pods are deleted however it ends; then
//! what was measured is printed ([`text`], [`page`]).

mod matrix;
mod page;
mod plan;
mod pods;
mod rounds;
mod text;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};

use super::Verify;
use super::ladder::Climbed;
use crate::cluster;
use crate::global::Global;
use crate::output::{Ended, Outcome, block_on, style};
use crate::verdict::{Finding, Verdict};

/// Flags of the cluster's test.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Flags {
    /// Test every node and rail of the cluster (kubectl rdma): makes a pod on each node, tests pairs,
    /// deletes the pods. A pod asks for all units of a network that moves NICs or has devices: all,
    /// else for one; with --gpu also for a GPU where the node has one
    #[arg(long, conflicts_with_all = ["server", "client", "read", "device", "nics"])]
    pub(super) all: bool,
    /// With --all: networks of each pod [default: those of kubectl rdma plan, or the only one]
    #[arg(
        long,
        value_name = "[NAMESPACE/]NAME,..",
        value_delimiter = ',',
        requires = "all"
    )]
    network: Vec<String>,
    /// With --all: resources of HCAs without netdevs, which need no network; without --network, these alone
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "all")]
    resource: Vec<String>,
    /// With --all: image of the pods, with a shell and the tools (manifests/examples/perftest)
    #[arg(long, requires = "all", default_value = "localhost/rdma-tools:1")]
    image: String,
    /// With --all: namespace of the pods
    #[arg(long, value_name = "NAME", requires = "all", default_value = "default")]
    pod_namespace: String,
    /// With --all: also write the result as one HTML page
    #[arg(long, value_name = "FILE", requires = "all")]
    html: Option<PathBuf>,
}

/// What was found, and about what.
#[derive(Debug, Default)]
struct Results {
    started: String,
    seconds: u64,
    context: String,
    networks: Vec<String>,
    planned: usize,
    rounds: usize,
    /// Why it ended early.
    ended: Option<String>,
    nodes: Vec<Node>,
    tests: Vec<Test>,
}

#[derive(Debug)]
struct Node {
    name: String,
    kubelet: String,
    pod: Option<plan::Pod>,
    /// Why it was not tested, or does not answer.
    fault: Option<Finding>,
}

/// A test between two nodes.
#[derive(Debug)]
struct Test {
    round: usize,
    /// Where the server and the client ran.
    nodes: [usize; 2],
    climbed: Climbed,
}

impl Results {
    fn name(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("-", |node| &node.name)
    }

    fn tests_of(&self, node: usize) -> impl Iterator<Item = (usize, &Test)> {
        let tests = self.tests.iter().enumerate();
        tests.filter(move |(_, test)| test.nodes.contains(&node))
    }

    /// Nodes that have no fault yet.
    fn able(&self) -> BTreeSet<usize> {
        let nodes = self.nodes.iter().enumerate();
        let able = nodes.filter(|(_, node)| node.fault.is_none());
        able.map(|(at, _)| at).collect()
    }

    /// Nodes that have no fault, and of which no rail was tested.
    fn untested(&self) -> BTreeSet<usize> {
        let is_tested = |at: &usize| {
            self.tests_of(*at)
                .any(|(_, test)| !test.climbed.pairs.is_empty())
        };
        self.able()
            .into_iter()
            .filter(|at| !is_tested(at))
            .collect()
    }

    /// Says why of each node that was not tested.
    fn end(&mut self, early: Option<anyhow::Error>) {
        self.tests.sort_by_key(|test| (test.round, test.nodes));
        self.ended = early.map(|error| format!("{error:#}"));
        let why = match self.ended {
            Some(_) => "it ended before this node was tested",
            None => "no other node answered",
        };
        for at in self.untested() {
            if let Some(node) = self.nodes.get_mut(at) {
                node.fault = Some(Finding::unknown(why));
            }
        }
    }
}

/// Tests the cluster and prints what was found.
pub(super) fn run(verify: &Verify, cluster: &cluster::Flags, global: &Global) -> Ended {
    let mut results = Results::default();
    match block_on(rounds::test(verify, cluster, &mut results))? {
        Err(error) if results.tests.is_empty() => return Err(error),
        ended => results.end(ended.err()),
    }
    let matrix = matrix::judge(&results);
    let document = text::document(&results, &matrix);
    global.say(document, || text::text(&results, &matrix, style()));
    if let Some(file) = &verify.all.html {
        let page = page::page(&results, &matrix);
        node::file::replace(file, page).with_context(|| format!("write {}", file.display()))?;
    }
    if let Some(ended) = &results.ended {
        bail!("not complete: {ended}");
    }
    let least = if verify.strict {
        Verdict::Warn
    } else {
        Verdict::Fail
    };
    let faults = matrix
        .cells
        .iter()
        .filter(|cell| cell.verdict >= least)
        .count();
    ensure!(
        faults == 0,
        "{faults} of {} rails are not as they should be",
        matrix.cells.len()
    );
    let untested = results.nodes.len() - results.able().len();
    ensure!(
        untested == 0,
        "{untested} of {} nodes were not tested",
        results.nodes.len()
    );
    Ok(Outcome::Good)
}
