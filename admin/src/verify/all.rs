//! `kubectl rdma verify --all`: every node and rail of a cluster.
//!
//! Reads nodes and networks, plans a pod for each node and rounds of pairs ([`plan`]), makes the pods
//! ([`pods`]), tests each round's pairs at once by the steps of `ladder`, and judges ([`matrix`]). The
//! pods are deleted however it ends; then what was measured is printed ([`text`], [`page`]).

mod matrix;
mod page;
mod plan;
mod pods;
mod text;

use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::{StreamExt as _, stream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::Verify;
use super::ladder::{self, Measurement};
use super::place::Place;
use crate::cluster::{Flags as ClusterFlags, ask};
use crate::global::Global;
use crate::output::{Ended, Outcome, block_on, complain, style};
use crate::verdict::{self, Finding, Verdict};
use pods::Pods;

/// How long one tool may take.
const TOOL_TIMEOUT_SECONDS: u64 = 300;

/// Flags of the cluster's test.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Flags {
    /// Test every node and rail of the cluster (kubectl rdma): makes a pod on each node, tests pairs,
    /// deletes the pods. The pods ask for all units of a network that moves NICs or has devices: all,
    /// else for one. With --gpu also for a GPU where the node has one
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
    /// With --all: image of the pods, with a shell and the tools (manifests/examples/perftest)
    #[arg(
        long,
        value_name = "IMAGE",
        requires = "all",
        default_value = "localhost/rdma-tools:1"
    )]
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
    nodes: Vec<TestedNode>,
    tests: Vec<Test>,
}

#[derive(Debug)]
struct TestedNode {
    name: String,
    kubelet: String,
    pod: Option<String>,
    gpu: bool,
    /// Why it was not tested, or does not answer.
    fault: Option<Finding>,
}

/// A test between two nodes.
#[derive(Debug)]
struct Test {
    round: usize,
    /// Where the server and the client ran.
    nodes: [usize; 2],
    checks: Vec<verdict::Outcome>,
    measurements: Vec<Measurement>,
    /// As in [`ladder::Climbed`].
    pairs: Vec<(String, [String; 2])>,
    left: [Vec<String>; 2],
}

impl Results {
    fn name(&self, node: usize) -> &str {
        self.nodes.get(node).map_or("-", |node| &node.name)
    }

    fn tests_of(&self, node: usize) -> Vec<usize> {
        let tests = self.tests.iter().enumerate();
        let mine = tests.filter(|(_, test)| test.nodes.contains(&node));
        mine.map(|(number, _)| number).collect()
    }

    /// Whether a rail of it was tested.
    fn is_tested(&self, node: usize) -> bool {
        let mut tests = self.tests.iter();
        tests.any(|test| test.nodes.contains(&node) && !test.pairs.is_empty())
    }

    /// Says of each node that was not tested why.
    fn end(&mut self, early: Option<anyhow::Error>) {
        self.ended = early.map(|error| format!("{error:#}"));
        self.tests.sort_by_key(|test| (test.round, test.nodes));
        let why = match self.ended {
            Some(_) => "it ended before this node was tested",
            None => "no other node answered",
        };
        for at in 0..self.nodes.len() {
            let is_tested = self.is_tested(at);
            let node = self.nodes.get_mut(at).filter(|node| node.fault.is_none());
            if let Some(node) = node.filter(|_| !is_tested) {
                node.fault = Some(Finding::unknown(why));
            }
        }
    }

    fn versions(&self) -> Vec<String> {
        let kubelets: BTreeSet<&str> = self
            .nodes
            .iter()
            .map(|node| node.kubelet.as_str())
            .collect();
        let own = format!("rdmactl {}", env!("CARGO_PKG_VERSION"));
        let kubelets = kubelets
            .into_iter()
            .map(|version| format!("kubelet {version}"));
        std::iter::once(own).chain(kubelets).collect()
    }
}

/// Tests the cluster and prints what was found.
pub(super) fn run(verify: &Verify, cluster: &ClusterFlags, global: &Global) -> Ended {
    let progress = Progress::new();
    let mut results = Results::default();
    let stopped = block_on(test(verify, cluster, &progress, &mut results))?;
    progress.clear();
    match stopped {
        Err(error) if results.tests.is_empty() => return Err(error),
        stopped => results.end(stopped.err()),
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
    let faults = matrix.cells.iter().filter(|cell| cell.verdict >= least);
    let faults: Vec<String> = faults
        .map(|cell| format!("{} {}", cell.node, cell.rail))
        .collect();
    ensure!(
        faults.is_empty(),
        "not as it should be: {}",
        faults.join(", ")
    );
    let untested = results
        .nodes
        .iter()
        .filter(|node| node.fault.is_some())
        .count();
    ensure!(untested == 0, "{untested} nodes were not tested");
    Ok(Outcome::Good)
}

/// Everything up to the deletion of the pods; an error where it ended early.
async fn test(
    verify: &Verify,
    cluster: &ClusterFlags,
    progress: &Progress,
    results: &mut Results,
) -> anyhow::Result<()> {
    let mut signals = Signals::new().context("watch signals")?;
    let now = jiff::Timestamp::now();
    let started = Instant::now();
    results.started = now.strftime("%Y-%m-%d %H:%M UTC").to_string();
    let run = format!("{:x}", now.as_millisecond());
    let pods = Pods {
        kubectl: cluster.kubectl.in_namespace(&verify.all.pod_namespace),
        run: &run,
    };
    let mut made = false;
    let stopped = tokio::select! {
        biased;
        name = signals.next() => Err(anyhow::anyhow!("stopped by {name}")),
        () = sleep(Duration::from_secs(verify.timeout)) => {
            Err(anyhow::anyhow!("--timeout {} is over", verify.timeout))
        }
        done = work(verify, cluster, &pods, progress, results, &mut made) => done,
    };
    results.seconds = started.elapsed().as_secs();
    if made {
        progress.show("deleting the pods");
        let deleted = tokio::select! {
            biased;
            name = signals.next() => Err(anyhow::anyhow!("stopped by {name}")),
            deleted = pods.delete() => deleted,
        };
        if let Err(error) = deleted {
            progress.clear();
            let command = pods.delete_command();
            complain(&format!(
                "the pods are not deleted: {error:#}; do it with: {command}"
            ));
        }
    }
    stopped
}

async fn work(
    verify: &Verify,
    cluster: &ClusterFlags,
    pods: &Pods<'_>,
    progress: &Progress,
    results: &mut Results,
    made: &mut bool,
) -> anyhow::Result<()> {
    progress.show("reading nodes and networks");
    results.context = pods::context(&cluster.kubectl).await;
    let networks = networks(verify, pods).await?;
    results.networks = networks
        .iter()
        .map(|network| network.name.clone())
        .collect();
    let daemons = ask::list(cluster).await.context("list the daemon's pods")?;
    let daemons: BTreeSet<String> = daemons.into_iter().map(|pod| pod.node).collect();
    let nodes = pods::list(&cluster.kubectl, &["nodes"]).await?;
    let nodes = nodes.iter().map(plan::Node::of);
    let mut nodes: Vec<plan::Node> = nodes.filter(|node| daemons.contains(&node.name)).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let leftovers = pods.leftovers().await?;
    if !leftovers.is_empty() {
        progress.clear();
        complain(&format!(
            "pods of another run are there and may hold NICs; if that run is over: kubectl -n {} delete \
             pods {}",
            pods.kubectl.namespace,
            leftovers.join(" ")
        ));
    }
    let template = plan::PodTemplate {
        run: pods.run,
        image: &verify.all.image,
        deadline_seconds: verify.timeout + 300,
        gpu: verify.gpu.is_some(),
    };
    let mut objects = Vec::new();
    for (number, node) in nodes.into_iter().enumerate() {
        let planned = template.pod(number, &node, &networks);
        let (pod, gpu, fault) = match planned {
            Ok(pod) => {
                objects.push(pod.object);
                (Some(pod.name), pod.gpu, None)
            }
            Err(why) => (None, false, Some(Finding::unknown(why))),
        };
        let (name, kubelet) = (node.name, node.kubelet);
        results.nodes.push(TestedNode {
            name,
            kubelet,
            pod,
            gpu,
            fault,
        });
    }
    if objects.len() < 2 {
        let why = results
            .nodes
            .iter()
            .filter_map(|node| Some(format!("{}: {}", node.name, node.fault.as_ref()?.why)));
        let why: Vec<String> = why.collect();
        bail!(
            "a test needs two nodes that can have a pod: {}",
            why.join("; ")
        );
    }
    progress.show(&format!("creating {} pods", objects.len()));
    *made = true;
    pods.create(objects).await?;
    let names: Vec<&str> = results
        .nodes
        .iter()
        .filter_map(|node| node.pod.as_deref())
        .collect();
    let limit = Duration::from_secs(verify.timeout / 2);
    let obstacles = pods
        .wait(&names, limit, &|text| progress.show(text))
        .await?;
    for node in &mut results.nodes {
        let obstacle = node.pod.as_ref().and_then(|pod| obstacles.get(pod));
        if let Some(why) = obstacle {
            let remedy = format!(
                "kubectl rdma pods --nodes {} shows who has its NICs",
                node.name
            );
            let finding = Finding {
                remedy: Some(remedy),
                ..Finding::unknown(why)
            };
            node.fault = Some(finding);
        }
    }
    rounds(verify, cluster, progress, results).await;
    Ok(())
}

async fn networks(verify: &Verify, pods: &Pods<'_>) -> anyhow::Result<Vec<plan::Network>> {
    const DEFINITIONS: &str = "network-attachment-definitions.k8s.cni.cncf.io";
    let namespace = &verify.all.pod_namespace;
    let asked = verify
        .all
        .network
        .iter()
        .map(|name| plan::full_name(name, namespace));
    let asked: Vec<String> = asked.collect();
    let namespaces = asked
        .iter()
        .filter_map(|name| Some(name.split_once('/')?.0));
    let mut namespaces: BTreeSet<&str> = namespaces.collect();
    if namespaces.is_empty() {
        namespaces.insert(namespace);
    }
    let mut found = Vec::new();
    for namespace in namespaces {
        let definitions = pods::list(&pods.kubectl.in_namespace(namespace), &[DEFINITIONS]).await?;
        found.extend(definitions.iter().filter_map(plan::Network::of));
    }
    plan::choose(found, &asked)
}

/// Tests the pairs of each round; a node that does not answer is left out of the next. A last round is
/// for nodes whose partners did not answer.
async fn rounds(
    verify: &Verify,
    cluster: &ClusterFlags,
    progress: &Progress,
    results: &mut Results,
) {
    let able = results.nodes.iter().enumerate();
    let able = able.filter(|(_, node)| node.fault.is_none());
    let able: Vec<usize> = able.map(|(at, _)| at).collect();
    let schedule = plan::schedule(able.len());
    let (mut met, mut out) = (BTreeSet::new(), BTreeSet::new());
    results.planned = schedule.len();
    for round in 1..=schedule.len() + 1 {
        let pairs = match schedule.get(round - 1) {
            Some(pairs) => plan::without(pairs, &out, able.len(), &met),
            None => {
                let is_lonely = |at: &usize| !results.is_tested(*at);
                let lonely = able.iter().enumerate().filter(|(_, at)| is_lonely(at));
                let lonely: BTreeSet<usize> = lonely.map(|(member, _)| member).collect();
                plan::second_chance(&lonely, &out, able.len())
            }
        };
        if pairs.is_empty() {
            continue;
        }
        met.extend(pairs.iter().copied());
        results.rounds = round;
        let (of, total) = (schedule.len().max(round), pairs.len());
        let ends = pairs.into_iter().filter_map(|(server, client)| {
            let nodes = [*able.get(server)?, *able.get(client)?];
            let [one, other] = nodes.map(|at| results.nodes.get(at));
            let (one, other) = (one?, other?);
            let places = [one.place(verify)?, other.place(verify)?];
            Some(([server, client], nodes, places, one.gpu && other.gpu))
        });
        let ends: Vec<_> = ends.collect();
        let tests = stream::iter(ends).map(|(members, nodes, places, gpu)| async move {
            let climbed = climb(verify, cluster, &places, gpu).await;
            (members, nodes, climbed)
        });
        let mut tests = tests.buffer_unordered(usize::from(cluster.parallel));
        for done in 0.. {
            progress.show(&format!(
                "round {round} of {of}: {done} of {total} tests are done"
            ));
            let Some((members, nodes, climbed)) = tests.next().await else {
                break;
            };
            let ends = climbed.outcomes.first();
            let ends = ends.map_or(&[][..], |ends| &ends.findings);
            for ((member, at), finding) in members.into_iter().zip(nodes).zip(ends) {
                if finding.verdict == Verdict::Fail
                    && let Some(node) = results.nodes.get_mut(at)
                {
                    out.insert(member);
                    node.fault = Some(finding.clone());
                }
            }
            results.tests.push(Test {
                round,
                nodes,
                checks: climbed.outcomes,
                measurements: climbed.measurements,
                pairs: climbed.pairs,
                left: climbed.left,
            });
        }
    }
}

async fn climb(
    verify: &Verify,
    cluster: &ClusterFlags,
    [server, client]: &[Place; 2],
    gpu: bool,
) -> ladder::Climbed {
    let flags = Verify {
        timeout: TOOL_TIMEOUT_SECONDS.min(verify.timeout),
        gpu: verify.gpu.filter(|_| gpu),
        ..verify.clone()
    };
    ladder::climb(&flags, &cluster.kubectl.words(), [server, client], &|_| ()).await
}

impl TestedNode {
    fn place(&self, verify: &Verify) -> Option<Place> {
        Some(Place::Pod {
            namespace: Some(verify.all.pod_namespace.clone()),
            pod: self.pod.clone()?,
            container: Some(plan::CONTAINER.to_owned()),
        })
    }
}

/// What is done now, as one line of a terminal; nothing where nobody waits.
struct Progress {
    is_watched: bool,
}

impl Progress {
    fn new() -> Self {
        let is_watched = std::io::stderr().is_terminal();
        Self { is_watched }
    }

    fn show(&self, text: &str) {
        if self.is_watched {
            // ECMA-48 8.3.41: erase to the end of the line.
            let _ = write!(std::io::stderr().lock(), "\r\u{1b}[K{text}");
        }
    }

    fn clear(&self) {
        self.show("");
    }
}

/// What asks the program to end.
struct Signals([(Signal, &'static str); 3]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self([
            (signal(SignalKind::interrupt())?, "SIGINT"),
            (signal(SignalKind::terminate())?, "SIGTERM"),
            (signal(SignalKind::hangup())?, "SIGHUP"),
        ]))
    }

    async fn next(&mut self) -> &'static str {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.0.recv() => interrupt.1,
            _ = terminate.0.recv() => terminate.1,
            _ = hangup.0.recv() => hangup.1,
        }
    }
}
