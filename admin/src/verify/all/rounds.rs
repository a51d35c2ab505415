//! The run: reads the cluster, makes the pods, tests the pairs of each round, deletes the pods.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use futures_util::{StreamExt as _, stream};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::pods::{self, RunPods};
use super::test_plan::{self, Pair, TestedNetwork};
use super::{Results, Test, TestedNode};
use crate::cluster::{Flags, ask};
use crate::documents::name_of;
use crate::kubectl::{NETWORKS, NODES};
use crate::verdict::{Finding, Verdict};
use crate::verify::Verify;
use crate::verify::pod::PodRef;
use crate::verify::steps::{self, Tested};

/// How long one tool may take.
const TOOL_TIMEOUT_SECONDS: u64 = 300;
/// How long a pair may take, at least; else its part of the whole time.
const PAIR_TIMEOUT: Duration = Duration::from_secs(60);
/// TCP ports of a pair.
const PORTS: usize = 256;

/// Everything up to the deletion of the pods; an error where it ended early.
pub(super) async fn test(
    verify: &Verify,
    cluster: &Flags,
    results: &mut Results,
) -> anyhow::Result<()> {
    let now = jiff::Timestamp::now();
    let started = Instant::now();
    results.started = now.strftime("%Y-%m-%d %H:%M UTC").to_string();
    let mut cluster = cluster.clone();
    results.context = pods::context(&cluster.kubectl).await;
    if !results.context.is_empty() {
        // Stays the same if somebody changes the kubeconfig's current one.
        cluster.kubectl.context = Some(results.context.clone());
    }
    let run = format!("{:x}", now.as_millisecond());
    let pods = RunPods {
        kubectl: cluster.kubectl.in_namespace(&verify.all.pod_namespace),
        selector: format!("{}={run}", test_plan::RUN),
    };
    let limit = Duration::from_secs(verify.timeout);
    let ended = tokio::select! {
        biased;
        error = stopped() => Err(error),
        () = sleep(limit) => Err(anyhow!("--timeout {} is over", verify.timeout)),
        done = work(verify, &cluster, &run, &pods, results) => done,
    };
    results.seconds = started.elapsed().as_secs();
    if !results.nodes.is_empty() {
        show("deleting the pods");
        let deleted = tokio::select! {
            biased;
            error = stopped() => Err(error),
            deleted = pods.delete() => deleted,
        };
        show("");
        if let Err(error) = deleted {
            let remedy = pods.deletion(&pods.selector);
            bail!("the pods are not deleted: {error:#}; to delete them: {remedy}");
        }
    }
    show("");
    ended
}

async fn work(
    verify: &Verify,
    cluster: &Flags,
    run: &str,
    pods: &RunPods,
    results: &mut Results,
) -> anyhow::Result<()> {
    show("reading nodes and networks");
    let named = &verify.all.network;
    let mut networks = Vec::new();
    if !named.is_empty() || verify.all.resource.is_empty() {
        let definitions = cluster
            .kubectl
            .objects(&[NETWORKS, "--all-namespaces"])
            .await?;
        let found = definitions.iter().filter_map(TestedNetwork::of).collect();
        networks = test_plan::choose(found, named, &verify.all.pod_namespace)?;
    }
    let daemons = ask::list(cluster).await.context("list the daemon's pods")?;
    let (mut nodes, mut objects) = (Vec::new(), Vec::new());
    for node in cluster.kubectl.objects(&[NODES]).await? {
        let name = name_of(&node).to_owned();
        if daemons.iter().all(|pod| pod.node != name) {
            continue;
        }
        // One that is named is tested: it may be cordoned for that.
        if node.pointer("/spec/unschedulable") == Some(&json!(true))
            && !cluster.nodes.contains(&name)
        {
            results.cordoned.push(name);
            continue;
        }
        let mut planned = TestedNode {
            shortage: test_plan::shortage(verify, &node, &networks),
            ..TestedNode::default()
        };
        match test_plan::pod(verify, run, &node, objects.len(), &networks) {
            Ok(pod) => {
                planned.pod = name_of(&pod).to_owned();
                planned.has_gpu = test_plan::has_gpu(&pod);
                objects.push(pod);
            }
            Err(why) => planned.finding = Some(Finding::unknown(why).on(&name)),
        }
        nodes.push((name, planned));
    }
    if objects.len() < 2 {
        let why = |(name, node): &(String, TestedNode)| {
            Some(format!("; {name}: {}", node.finding.as_ref()?.why))
        };
        let why: String = nodes.iter().filter_map(why).collect();
        let cordoned = results.cordoned.iter();
        let cordoned: String = cordoned.map(|name| format!("; {name}: cordoned")).collect();
        bail!("a test needs two nodes that can have a pod{why}{cordoned}");
    }
    pods.wait_for_others().await?;
    show(&format!("creating {} pods", objects.len()));
    results.networks = networks.into_iter().map(|network| network.name).collect();
    results.nodes = nodes.into_iter().collect();
    let created = pods.kubectl.write("create", &objects).await;
    created.context("create the pods")?;
    let names: Vec<&str> = objects.iter().map(name_of).collect();
    let obstacles = pods.wait(&names, Duration::from_secs(verify.timeout / 2));
    let obstacles = obstacles.await?;
    for (name, node) in &mut results.nodes {
        if let Some(why) = obstacles.get(&node.pod) {
            node.finding = Some(Finding::unsure(why, super::remedy(name)).on(name));
        }
    }
    rounds(verify, cluster, results).await;
    Ok(())
}

/// Tests the pairs of each round; a node that does not answer is left out of the next.
async fn rounds(verify: &Verify, cluster: &Flags, results: &mut Results) {
    let last = test_plan::rounds(results.able().len());
    for round in 1..=last {
        let met = results.tests.iter().map(|test| test.nodes.clone());
        let pairs = test_plan::pairs(round, &results.able(), &met.collect());
        let total = pairs.len();
        if total == 0 {
            break;
        }
        results.rounds = round;
        let parallel = usize::from(cluster.parallel);
        let parts = (last + 2) * total.div_ceil(parallel);
        let limit = verify.timeout / u64::try_from(parts).unwrap_or(u64::MAX);
        let limit = PAIR_TIMEOUT.max(Duration::from_secs(limit));
        let tests = pairs.into_iter().filter_map(|nodes| {
            let [server, client] = nodes
                .each_ref()
                .map(|name| results.nodes.get(name).cloned());
            Some((nodes, [server?, client?]))
        });
        let tests: Vec<(Pair, [TestedNode; 2])> = tests.collect();
        let tests = stream::iter(tests).map(|(nodes, ends)| async move {
            let tested = test_pair(verify, cluster, &ends, round, limit).await;
            Test {
                round,
                nodes,
                tested,
            }
        });
        let mut tests = tests.buffer_unordered(parallel);
        for done in 0.. {
            show(&format!("round {round} of {last}: {done} of {total} tests"));
            let Some(test) = tests.next().await else {
                break;
            };
            // Those of the step "ends": how each of them answered.
            let ends = test
                .tested
                .outcomes
                .first()
                .map_or(&[][..], |ends| &ends.findings);
            for ((name, finding), end) in test.nodes.iter().zip(ends).zip(&test.tested.ends) {
                let Some(node) = results.nodes.get_mut(name) else {
                    continue;
                };
                match finding.verdict {
                    Verdict::Fail => node.finding = Some(finding.clone().on(name)),
                    Verdict::Pass => node.end = end.clone(),
                    _ => {}
                }
            }
            results.tests.push(test);
        }
    }
}

async fn test_pair(
    verify: &Verify,
    cluster: &Flags,
    nodes: &[TestedNode; 2],
    round: usize,
    limit: Duration,
) -> Tested {
    let [server, client] = nodes.each_ref().map(|node| PodRef {
        namespace: Some(verify.all.pod_namespace.clone()),
        name: node.pod.clone(),
        container: Some(test_plan::CONTAINER.to_owned()),
    });
    let flags = Verify {
        timeout: TOOL_TIMEOUT_SECONDS.min(verify.timeout),
        // A server of the round before may still listen.
        port: u16::try_from(PORTS * (round - 1)).map_or(verify.port, |of_rounds| {
            verify.port.saturating_add(of_rounds)
        }),
        gpu: verify.gpu.filter(|_| nodes.iter().all(|node| node.has_gpu)),
        ..verify.clone()
    };
    let kubectl = cluster.kubectl.words();
    let until = Some(std::time::Instant::now() + limit);
    steps::test_pair(&flags, &kubectl, [&server, &client], until, &|_| ()).await
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
