//! The daemon's pods, and what each answers.

use std::collections::BTreeSet;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The daemon's container, in manifests and chart.
const CONTAINER: &str = "rdma-device-plugin";

/// What each node is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    /// `rdma-device-plugin status`
    Status,
    /// `rdma-device-plugin topology`
    Topology,
    /// `rdma-device-plugin discover`
    Discover,
    /// `rdma-device-plugin preflight`
    Preflight,
    /// `rdma-ipam list`
    Leases,
}

impl Question {
    fn command(self) -> [&'static str; 3] {
        match self {
            Self::Status => ["rdma-device-plugin", "status", "--json"],
            Self::Topology => ["rdma-device-plugin", "topology", "--json"],
            Self::Discover => ["rdma-device-plugin", "discover", "--json"],
            Self::Preflight => ["rdma-device-plugin", "preflight", "--json"],
            Self::Leases => ["rdma-ipam", "list", "--json"],
        }
    }
}

/// Which cluster, which of its nodes, and how.
#[derive(Debug)]
pub(super) struct Cluster {
    /// The program that stands for kubectl.
    pub kubectl: String,
    /// Its flags: context, kubeconfig, namespace.
    pub arguments: Vec<String>,
    /// Labels of the daemon's pods.
    pub selector: String,
    /// Only these nodes; all of them if empty.
    pub nodes: Vec<String>,
    /// Nodes that are asked at one time.
    pub parallel: usize,
    /// How long one may take.
    pub timeout: Duration,
}

/// What a node answered.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    /// The node.
    pub node: String,
    /// The daemon's pod there.
    pub pod: String,
    /// The command's document, or why there is none.
    pub document: Result<Value, String>,
}

impl Answer {
    /// As one part of the document of all nodes.
    pub(super) fn document(&self) -> Value {
        json!({
            "node": self.node,
            "pod": self.pod,
            "error": self.document.as_ref().err(),
            "document": self.document.as_ref().ok(),
        })
    }

    /// The node answered, and said that it is not fit.
    pub(super) fn is_wrong(&self, question: Question) -> bool {
        let fails = || {
            self.document
                .as_ref()
                .ok()?
                .pointer("/summary/fail")?
                .as_u64()
        };
        question == Question::Preflight && fails().is_some_and(|fails| fails > 0)
    }
}

/// A pod of the daemon's.
#[derive(Debug, PartialEq, Eq)]
struct Pod {
    name: String,
    node: String,
    /// Why it cannot be asked.
    obstacle: Option<String>,
}

impl Cluster {
    /// Asks all nodes, in the order of their names.
    pub(super) async fn ask(
        self,
        question: Question,
        more: &[String],
    ) -> anyhow::Result<Vec<Answer>> {
        let pods = self.pods().await?;
        let mut argv: Vec<String> = question.command().map(str::to_owned).into();
        argv.extend(more.iter().cloned());
        let (cluster, argv) = (Arc::new(self), Arc::new(argv));
        let turns = Arc::new(Semaphore::new(cluster.parallel));
        let mut tasks = JoinSet::new();
        for pod in pods {
            let (cluster, argv, turns) = (cluster.clone(), argv.clone(), turns.clone());
            tasks.spawn(async move {
                let _turn = turns.acquire_owned().await;
                let document = match &pod.obstacle {
                    Some(obstacle) => Err(obstacle.clone()),
                    None => cluster.document(&pod.name, &argv).await,
                };
                let Pod { name, node, .. } = pod;
                Answer {
                    node,
                    pod: name,
                    document,
                }
            });
        }
        let mut answers = Vec::new();
        while let Some(answer) = tasks.join_next().await {
            answers.push(answer.context("ask a node")?);
        }
        answers.sort_by(|a, b| (&a.node, &a.pod).cmp(&(&b.node, &b.pod)));
        Ok(answers)
    }

    async fn pods(&self) -> anyhow::Result<Vec<Pod>> {
        let selector = format!("--selector={}", self.selector);
        let output = self.run(&["get", "pods", "--output=json", &selector]).await;
        let output = output
            .map_err(anyhow::Error::msg)
            .context("list the daemon's pods")?;
        if !output.status.success() {
            bail!("list the daemon's pods: {}", last_line(&output));
        }
        let list: Value = serde_json::from_slice(&output.stdout)
            .context("read what kubectl get pods --output=json printed")?;
        let mut pods = pods(&list);
        if pods.is_empty() {
            bail!(
                "no pod with {}: is the daemon installed there? Another namespace is named by \
                 --namespace, other labels by --selector",
                self.selector
            );
        }
        if !self.nodes.is_empty() {
            let known: BTreeSet<String> = pods.iter().map(|pod| pod.node.clone()).collect();
            if let Some(node) = self.nodes.iter().find(|node| !known.contains(*node)) {
                bail!("no daemon runs on a node {node}");
            }
            pods.retain(|pod| self.nodes.contains(&pod.node));
        }
        Ok(pods)
    }

    /// What a command in the pod printed. One that says that something is wrong ends with 1, and
    /// prints its document all the same.
    async fn document(&self, pod: &str, argv: &[String]) -> Result<Value, String> {
        let mut arguments = vec!["exec", pod, "--container", CONTAINER, "--"];
        arguments.extend(argv.iter().map(String::as_str));
        let output = self.run(&arguments).await?;
        match serde_json::from_slice::<Value>(&output.stdout) {
            Ok(document) if document.is_object() => Ok(document),
            _ => Err(last_line(&output)),
        }
    }

    async fn run(&self, arguments: &[&str]) -> Result<Output, String> {
        let mut command = Command::new(&self.kubectl);
        command.args(&self.arguments).args(arguments);
        command.stdin(Stdio::null()).kill_on_drop(true);
        match tokio::time::timeout(self.timeout, command.output()).await {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(error)) => Err(format!("start {}: {error}", self.kubectl)),
            Err(_) => Err(format!("no answer within {} s", self.timeout.as_secs())),
        }
    }
}

fn pods(list: &Value) -> Vec<Pod> {
    let items = list["items"].as_array().into_iter().flatten();
    let pod = |item: &Value| {
        let text = |pointer: &str| item.pointer(pointer).and_then(Value::as_str);
        let phase = text("/status/phase").unwrap_or("without a phase");
        let ending = text("/metadata/deletionTimestamp").is_some();
        let obstacle = match (phase, ending) {
            ("Running", false) => None,
            ("Running", true) => Some("its pod is ending".to_owned()),
            (other, _) => Some(format!("its pod is {other}")),
        };
        Some(Pod {
            name: text("/metadata/name")?.to_owned(),
            node: text("/spec/nodeName").unwrap_or("-").to_owned(),
            obstacle,
        })
    };
    items.filter_map(pod).collect()
}

/// What a program that failed said last.
fn last_line(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].join(&b'\n');
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().map(str::trim);
    let last = lines.rfind(|line| !line.is_empty());
    last.unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_do_not_run_are_not_asked() {
        let list = json!({"items": [
            {"metadata": {"name": "a"}, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}},
            {"metadata": {"name": "b"}, "spec": {}, "status": {"phase": "Pending"}},
            {"metadata": {"name": "c", "deletionTimestamp": "2026-01-01T00:00:00Z"},
             "spec": {"nodeName": "n3"}, "status": {"phase": "Running"}},
            {"spec": {}},
        ]});
        let obstacles: Vec<(String, Option<String>)> = pods(&list)
            .into_iter()
            .map(|pod| (pod.node, pod.obstacle))
            .collect();
        assert_eq!(
            obstacles,
            [
                ("n1".to_owned(), None),
                ("-".to_owned(), Some("its pod is Pending".to_owned())),
                ("n3".to_owned(), Some("its pod is ending".to_owned())),
            ]
        );
        assert!(pods(&json!(7)).is_empty());
    }
}
