//! The run: reads the cluster, makes the pods, tests the pairs of each round, deletes the pods.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use futures_util::{StreamExt as _, stream};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::plan::{self, Network, PodTemplate};
use super::pods::{self, Pods};
use super::{Node, Results, Test};
use crate::cluster::{Flags, ask};
use crate::output::complain;
use crate::verdict::{Finding, Verdict};
use crate::verify::Verify;
use crate::verify::ladder::{self, Climbed};
use crate::verify::place::Place;

/// How long one tool may take.
const TOOL_TIMEOUT_SECONDS: u64 = 300;
const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// Everything up to the deletion of the pods; an error where it ended early.
pub(super) async fn test(
    verify: &Verify,
    cluster: &Flags,
    results: &mut Results,
) -> anyhow::Result<()> {
    let now = jiff::Timestamp::now();
    let started = Instant::now();
    results.started = now.strftime("%Y-%m-%d %H:%M UTC").to_string();
    let pods = Pods {
        kubectl: cluster.kubectl.in_namespace(&verify.all.pod_namespace),
        run: format!("{:x}", now.as_millisecond()),
    };
    let limit = Duration::from_secs(verify.timeout);
    let ended = tokio::select! {
        biased;
        error = stopped() => Err(error),
        () = sleep(limit) => Err(anyhow!("--timeout {} is over", verify.timeout)),
        done = work(verify, cluster, &pods, results) => done,
    };
    results.seconds = started.elapsed().as_secs();
    if !results.nodes.is_empty() {
        show("deleting the pods");
        let deleted = tokio::select! {
            biased;
            error = stopped() => Err(error),
            deleted = pods.delete() => deleted,
        };
        if let Err(error) = deleted {
            let command = pods.delete_command();
            show("");
            complain(&format!(
                "the pods are not deleted: {error:#}; to delete them: {command}"
            ));
        }
    }
    show("");
    ended
}

async fn work(
    verify: &Verify,
    cluster: &Flags,
    pods: &Pods,
    results: &mut Results,
) -> anyhow::Result<()> {
    show("reading nodes and networks");
    results.context = pods::context(&cluster.kubectl).await;
    let (named, namespace) = (&verify.all.network, &verify.all.pod_namespace);
    let mut networks = Vec::new();
    if !named.is_empty() || verify.all.resource.is_empty() {
        let definitions = pods::list(&cluster.kubectl, &[NETWORKS, "--all-namespaces"]).await?;
        let found = definitions.iter().filter_map(Network::of).collect();
        networks = plan::choose(found, named, namespace)?;
    }
    let daemons = ask::list(cluster).await.context("list the daemon's pods")?;
    let nodes = pods::list(&cluster.kubectl, &["nodes"]).await?;
    let nodes = nodes.iter().map(plan::Node::of);
    let has_daemon = |node: &plan::Node| daemons.iter().any(|pod| pod.node == node.name);
    let mut nodes: Vec<plan::Node> = nodes.filter(has_daemon).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let leftovers = pods.leftovers().await?;
    if !leftovers.is_empty() {
        show("");
        complain(&format!(
            "pods of another run may hold NICs; if that run is over: kubectl -n {} delete pods {}",
            pods.kubectl.namespace,
            leftovers.join(" ")
        ));
    }
    let template = PodTemplate {
        run: &pods.run,
        image: &verify.all.image,
        deadline_seconds: verify.timeout + 300,
        gpu: verify.gpu.is_some(),
        resources: &verify.all.resource,
    };
    let planned = nodes.into_iter().enumerate().map(|(number, node)| {
        let pod = template.pod(number, &node, &networks);
        let fault = pod.as_ref().err().map(Finding::unknown);
        let (name, kubelet) = (node.name, node.kubelet);
        Node {
            name,
            kubelet,
            pod: pod.ok(),
            fault,
        }
    });
    let planned: Vec<Node> = planned.collect();
    let objects = planned.iter().filter_map(|node| node.pod.as_ref());
    let objects: Vec<Value> = objects.map(|pod| pod.object.clone()).collect();
    if objects.len() < 2 {
        let why = |node: &Node| Some(format!("; {}: {}", node.name, node.fault.as_ref()?.why));
        let why: String = planned.iter().filter_map(why).collect();
        bail!("a test needs two nodes that can have a pod{why}");
    }
    show(&format!("creating {} pods", objects.len()));
    results.networks = networks.into_iter().map(|network| network.name).collect();
    results.nodes = planned;
    pods.create(objects).await?;
    let made = results.nodes.iter().filter_map(|node| node.pod.as_ref());
    let names: Vec<&str> = made.map(|pod| pod.name.as_str()).collect();
    let limit = Duration::from_secs(verify.timeout / 2);
    let obstacles = pods.wait(&names, limit).await?;
    for node in &mut results.nodes {
        let obstacle = node.pod.as_ref().and_then(|pod| obstacles.get(&pod.name));
        if let Some(why) = obstacle {
            let remedy = format!("kubectl rdma status --nodes {}", node.name);
            let mut finding = Finding::unknown(why);
            finding.remedy = Some(remedy);
            node.fault = Some(finding);
        }
    }
    rounds(verify, cluster, results).await;
    Ok(())
}

/// Tests the pairs of each round; a node that does not answer is left out of the next. The last round is
/// for nodes that none has answered.
async fn rounds(verify: &Verify, cluster: &Flags, results: &mut Results) {
    let mut rounds = plan::schedule(&results.able().into_iter().collect::<Vec<_>>());
    results.planned = rounds.len();
    rounds.push(Vec::new());
    for (number, planned) in rounds.iter().enumerate() {
        if planned.is_empty() && results.untested().is_empty() {
            break;
        }
        let met = results.tests.iter().map(|test| test.nodes).collect();
        let pairs = plan::without_silent(planned, &results.able(), &met);
        let (round, total) = (number + 1, pairs.len());
        let ends = pairs.into_iter().filter_map(|nodes| {
            let [server, client] = nodes.map(|at| results.nodes.get(at)?.pod.clone());
            Some((nodes, [server?, client?]))
        });
        let ends: Vec<([usize; 2], [plan::Pod; 2])> = ends.collect();
        let tests = stream::iter(ends).map(|(nodes, pods)| async move {
            let climbed = climb(verify, cluster, &pods).await;
            Test {
                round,
                nodes,
                climbed,
            }
        });
        let mut tests = tests.buffer_unordered(usize::from(cluster.parallel));
        results.rounds = round;
        for done in 0.. {
            show(&format!(
                "round {round} of {}: {done} of {total} tests",
                results.planned.max(round)
            ));
            let Some(test) = tests.next().await else {
                break;
            };
            // Those of the step "ends": how each of them answered.
            let ends = test.climbed.outcomes.first();
            let ends = ends.map_or(&[][..], |ends| &ends.findings);
            for (at, finding) in test.nodes.into_iter().zip(ends) {
                if let Some(node) = results.nodes.get_mut(at)
                    && finding.verdict == Verdict::Fail
                {
                    node.fault = Some(finding.clone());
                }
            }
            results.tests.push(test);
        }
    }
}

async fn climb(verify: &Verify, cluster: &Flags, pods: &[plan::Pod; 2]) -> Climbed {
    let [server, client] = pods.each_ref().map(|pod| Place::Pod {
        namespace: Some(verify.all.pod_namespace.clone()),
        pod: pod.name.clone(),
        container: Some(plan::CONTAINER.to_owned()),
    });
    let flags = Verify {
        timeout: TOOL_TIMEOUT_SECONDS.min(verify.timeout),
        gpu: verify.gpu.filter(|_| pods.iter().all(|pod| pod.gpu)),
        ..verify.clone()
    };
    let kubectl = cluster.kubectl.words();
    ladder::climb(&flags, &kubectl, [&server, &client], &|_| ()).await
}

/// Returns when a signal asks the program to end.
async fn stopped() -> anyhow::Error {
    let of = |kind: SignalKind| async move {
        match signal(kind) {
            Ok(mut signal) => signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = of(SignalKind::interrupt()) => anyhow!("stopped by SIGINT"),
        _ = of(SignalKind::terminate()) => anyhow!("stopped by SIGTERM"),
        _ = of(SignalKind::hangup()) => anyhow!("stopped by SIGHUP"),
    }
}

/// What is done now, in the terminal's last line; nothing where nobody waits.
pub(super) fn show(text: &str) {
    if std::io::stderr().is_terminal() {
        // ECMA-48 8.3.41: erase to the end of the line.
        let _ = write!(std::io::stderr().lock(), "\r\u{1b}[K{text}");
    }
}
