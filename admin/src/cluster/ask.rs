//! The daemon's pods, and what each answers.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use cni_wire::text::printable;
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use super::Flags;
use crate::kubectl::{NODES, last_line};

/// The daemon's container, in manifests and chart.
pub(crate) const CONTAINER: &str = "rdma-device-plugin";

/// One line for each node: its name and the status of its condition Ready.
const READY: &str = "--output=jsonpath={range .items[*]}{.metadata.name} \
    {.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}{end}";

/// What a node answered.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NodeAnswer {
    /// The node.
    pub node: String,
    /// The daemon's pod there.
    pub pod: String,
    /// What the command printed there, or why it did not run.
    pub output: Result<Printed, String>,
}

/// What a command printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Printed {
    /// On standard output.
    pub text: String,
    /// The last line on standard error.
    pub complaint: String,
    /// Whether it said that all is good.
    pub is_good: bool,
}

impl NodeAnswer {
    /// The document that the command printed.
    pub(super) fn json(&self) -> Option<Value> {
        serde_json::from_str(&self.output.as_ref().ok()?.text).ok()
    }

    /// As one part of the document of all nodes.
    pub(super) fn document(&self) -> Value {
        json!({
            "node": self.node,
            "pod": self.pod,
            "error": self.output.as_ref().err(),
            "document": self.json(),
        })
    }

    /// The text, nothing of which steers a terminal; with the complaint of a command that failed.
    pub(super) fn printed(&self) -> String {
        let Ok(printed) = &self.output else {
            return String::new();
        };
        let lines = printed.text.lines().map(printable);
        let complaint = (!printed.is_good).then(|| printable(&printed.complaint));
        lines.chain(complaint).map(|line| line + "\n").collect()
    }

    /// The node reports a problem.
    pub(super) fn is_wrong(&self) -> bool {
        self.output.as_ref().is_ok_and(|printed| !printed.is_good)
    }
}

/// A pod of the daemon's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    pub name: String,
    pub node: String,
    /// Why it cannot be asked.
    pub obstacle: Option<String>,
}

/// Asks all nodes, in the order of their names.
pub(super) async fn ask(flags: &Flags, argv: &[String]) -> anyhow::Result<Vec<NodeAnswer>> {
    let listed = list(flags).await.context("list the daemon's pods")?;
    let asked = stream::iter(listed).map(|pod| async {
        let output = match pod.obstacle {
            Some(obstacle) => Err(obstacle),
            None => printed(flags, &pod.name, argv).await,
        };
        let mut answer = NodeAnswer {
            node: pod.node,
            pod: pod.name,
            output,
        };
        // An answer that is not a whole document is none.
        let is_document = argv.iter().any(|word| word == "--json");
        if is_document && answer.output.is_ok() && answer.json().is_none() {
            answer.output = Err("its answer is not a JSON document: it was cut off".to_owned());
        }
        answer
    });
    let asked = asked.buffer_unordered(usize::from(flags.parallel));
    let mut answers: Vec<NodeAnswer> = asked.collect().await;
    answers.sort_by(|a, b| (&a.node, &a.pod).cmp(&(&b.node, &b.pod)));
    Ok(answers)
}

/// The daemon's pods, of the nodes that were chosen.
pub(crate) async fn list(flags: &Flags) -> anyhow::Result<Vec<Pod>> {
    let selector = format!("--selector={}", flags.selector);
    let get = ["get", "pods", "--output=json", &selector];
    let listed = flags.kubectl.run(&get, b"", flags.timeout());
    let (output, silent) = tokio::join!(listed, silent_nodes(flags));
    let output = output?;
    if !output.status.success() {
        bail!("{}", last_line(&output));
    }
    let list: Value =
        serde_json::from_slice(&output.stdout).context("read what kubectl printed")?;
    chosen(flags, &list, &silent)
}

/// Nodes whose kubelets do not report, so an exec there would wait. None where the nodes may not be read.
pub(super) async fn silent_nodes(flags: &Flags) -> BTreeSet<String> {
    let get = ["get", NODES, READY];
    let output = flags.kubectl.run(&get, b"", flags.timeout()).await;
    let output = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    silent(&output.unwrap_or_default())
}

/// Of lines of [`READY`]. The kubelet of a node whose condition is False answers.
fn silent(lines: &str) -> BTreeSet<String> {
    let of_node = |line: &str| Some(line.strip_suffix(" Unknown")?.to_owned());
    lines.lines().filter_map(of_node).collect()
}

/// Of a list of pods those that are asked; of `silent` nodes only those that the flags name.
pub(super) fn chosen(
    flags: &Flags,
    list: &Value,
    silent: &BTreeSet<String>,
) -> anyhow::Result<Vec<Pod>> {
    let mut pods = pods(list);
    if pods.is_empty() {
        bail!(
            "no pod with {}: is the daemon installed there? Another namespace is named by \
             --namespace, other labels by --selector",
            flags.selector
        );
    }
    for node in &flags.nodes {
        if !pods.iter().any(|pod| pod.node == *node) {
            bail!("no daemon runs on a node {node}");
        }
    }
    let is_named = |pod: &Pod| flags.nodes.contains(&pod.node);
    pods.retain(|pod| flags.nodes.is_empty() || is_named(pod));
    let is_silent = |pod: &&mut Pod| silent.contains(&pod.node) && !is_named(pod);
    for pod in pods.iter_mut().filter(is_silent) {
        let why =
            "the node is NotReady: its kubelet does not report. To ask it, name it by --nodes";
        (pod.obstacle).get_or_insert_with(|| why.to_owned());
    }
    Ok(pods)
}

/// What a command in the pod printed. One that found something wrong ends with 1 and prints its
/// results; one that did not run prints nothing.
async fn printed(flags: &Flags, pod: &str, argv: &[String]) -> Result<Printed, String> {
    let mut arguments = vec!["exec", pod, "--container", CONTAINER, "--"];
    arguments.extend(argv.iter().map(String::as_str));
    let output = flags.kubectl.run(&arguments, b"", flags.timeout()).await;
    let output = output.map_err(|error| format!("{error:#}"))?;
    let (is_good, complaint) = (output.status.success(), last_line(&output));
    if !is_good && output.stdout.is_empty() {
        return Err(complaint);
    }
    Ok(Printed {
        text: String::from_utf8_lossy(&output.stdout).into_owned(),
        complaint,
        is_good,
    })
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    #[test]
    fn only_a_silent_kubelet_is_not_asked_unless_named() {
        let pod = |node: &str| {
            json!({"metadata": {"name": node}, "spec": {"nodeName": node},
                "status": {"phase": "Running"}})
        };
        let list = json!({"items": [pod("n1"), pod("n2"), pod("n3")]});
        let silent = silent("n1 True\nn2 False\nn3 Unknown\n");
        let asked = |line: &[&str]| {
            let line = [&["kubectl-rdma"], line].concat();
            let flags = Line::parse_from(line).flags;
            let pods = chosen(&flags, &list, &silent).unwrap().into_iter();
            let asked = pods.filter(|pod| pod.obstacle.is_none());
            asked.map(|pod| pod.node).collect::<Vec<_>>()
        };
        assert_eq!(asked(&[]), ["n1", "n2"]);
        assert_eq!(asked(&["--nodes", "n3"]), ["n3"]);
    }

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
