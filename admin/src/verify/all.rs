//! `kubectl rdma verify --all`: every node and rail of a cluster.
//!
//! [`test_plan`] decides on a pod for each node and on rounds of pairs, [`rounds`] makes the pods and tests
//! the pairs by [`super::steps`], [`matrix`] judges. The pods are deleted however it ends; then
//! [`text`] and [`page`] print the results.

mod matrix;
mod page;
mod pods;
mod rounds;
mod test_plan;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use super::Verify;
use super::ends::End;
use super::steps::Tested;
use crate::cluster;
use crate::global::Global;
use crate::output::{Ended, Exit, block_on};
use crate::verdict::{Finding, Verdict};
use matrix::{Cell, Matrix};

/// Flags of the cluster's test.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AllFlags {
    /// Test every node and rail of the cluster (kubectl rdma): makes a pod on each node, tests pairs,
    /// deletes the pods. Cordoned nodes are left out unless --nodes names them. A pod asks for all units of a network that moves NICs or has devices: all,
    /// else for one; with --gpu also for a GPU where the node has one
    #[arg(long, conflicts_with_all = ["server", "client", "device"])]
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

/// What was found, and about what; its document.
#[derive(Debug, Default, Serialize)]
struct Results {
    started: String,
    seconds: u64,
    context: String,
    networks: Vec<String>,
    rounds: usize,
    /// Nodes that are left out.
    cordoned: Vec<String>,
    /// Why it ended early.
    ended: Option<String>,
    nodes: BTreeMap<String, TestedNode>,
    tests: Vec<Test>,
    #[serde(flatten)]
    matrix: Matrix,
}

#[derive(Debug, Clone, Default, Serialize)]
struct TestedNode {
    /// The name of its pod; empty without.
    pod: String,
    #[serde(skip)]
    has_gpu: bool,
    /// What its pod has, once it answered.
    #[serde(skip)]
    end: End,
    /// Units that are not healthy, in words.
    shortage: Option<String>,
    /// Why it was not tested, or does not answer.
    finding: Option<Finding>,
}

/// A test between two nodes.
#[derive(Debug, Serialize)]
struct Test {
    round: usize,
    /// Where the server and the client ran.
    nodes: test_plan::Pair,
    #[serde(flatten)]
    tested: Tested,
}

impl Results {
    /// Nodes that nothing is known against.
    fn able(&self) -> Vec<&str> {
        let nodes = self.nodes.iter();
        let able = nodes.filter(|(_, node)| node.finding.is_none());
        able.map(|(name, _)| name.as_str()).collect()
    }

    /// Judges the tests, and says why of each node that has none.
    fn end(&mut self, early: Option<anyhow::Error>) {
        self.tests
            .sort_by(|a, b| (a.round, &a.nodes).cmp(&(b.round, &b.nodes)));
        self.ended = early.map(|error| format!("{error:#}"));
        let why = match self.ended {
            Some(_) => "it ended before this node was tested",
            None => "no test of it came to its end",
        };
        let tests = self
            .tests
            .iter()
            .filter(|test| !test.tested.pairs.is_empty());
        let tested: BTreeSet<&String> = tests.flat_map(|test| &test.nodes).collect();
        for (name, node) in &mut self.nodes {
            if node.finding.is_none() && !tested.contains(name) {
                node.finding = Some(Finding::unknown(why).on(name));
            }
        }
        self.matrix = matrix::judge(self);
    }
}

/// How to find out why a node's pod failed.
fn remedy(node: &str) -> String {
    format!("kubectl rdma status --nodes {node}")
}

/// Tests the cluster and prints what was found.
pub(super) fn run(verify: &Verify, cluster: &cluster::Flags, global: &Global) -> Ended {
    ensure!(
        verify.gpu.is_some() || verify.only != ["gpu"],
        "--only gpu needs --gpu, by which each pod asks for a GPU"
    );
    let mut results = Results::default();
    if let Some(file) = &verify.all.html {
        // Before the test, which takes long: can it be written?
        let is_new = !file.exists();
        let mut options = std::fs::File::options();
        let opened = options.append(true).create(true).open(file);
        opened.with_context(|| format!("write {}", file.display()))?;
        if is_new {
            std::fs::remove_file(file)?;
        }
    }
    match block_on(rounds::test(verify, cluster, &mut results))? {
        Err(error) if results.tests.is_empty() => return Err(error),
        ended => results.end(ended.err()),
    }
    global.say(serde_json::to_value(&results)?, || text::text(&results));
    if let Some(file) = &verify.all.html {
        let written = node::file::replace(file, page::page(&results));
        written.with_context(|| format!("write {}", file.display()))?;
    }
    if let Some(ended) = &results.ended {
        bail!("not complete: {ended}");
    }
    let least = if verify.strict {
        Verdict::Warn
    } else {
        Verdict::Fail
    };
    let cells = &results.matrix.cells;
    let is_untested = |cell: &Cell| cell.verdict == Verdict::Unknown && cell.gbps.is_none();
    let is_fault = |cell: &&Cell| cell.verdict >= least || is_untested(cell);
    let faults = cells.iter().filter(is_fault).count();
    let all = cells.len();
    ensure!(faults == 0, "{faults} of {all} rails did not pass");
    let is_measured = |cell: &Cell| cell.verdict != Verdict::NotApplicable;
    ensure!(
        cells.iter().any(is_measured),
        "nothing was measured: see --only, --skip and --gpu"
    );
    Ok(Exit::Good)
}
