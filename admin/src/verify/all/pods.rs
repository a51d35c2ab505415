//! What is asked of the cluster, and the pods of the run: made together, awaited, deleted.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use cni_wire::text::printable;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::plan::{NAME, RUN};
use crate::documents::name_of;
use crate::global::Kubectl;
use crate::kubectl::{CALL_TIMEOUT, last_line};

/// Between two looks at the pods.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long pods may take to run: an image is pulled, interfaces are made.
const READY_TIMEOUT: Duration = Duration::from_secs(300);

/// The pods of one run.
#[derive(Debug)]
pub(super) struct Pods<'a> {
    /// With the pods' namespace.
    pub kubectl: Kubectl,
    /// Name of the run.
    pub run: &'a str,
}

/// How a pod stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Ready,
    /// It may become ready; what it waits for.
    Coming(String),
    /// It does not become ready by waiting.
    Stuck(String),
}

/// Objects of a kind.
pub(super) async fn list(kubectl: &Kubectl, what: &[&str]) -> anyhow::Result<Vec<Value>> {
    let arguments = [&["get"], what, &["--output=json"]].concat();
    let output = kubectl.run(&arguments, b"", CALL_TIMEOUT).await?;
    let what = what.first().copied().unwrap_or_default();
    ensure!(
        output.status.success(),
        "kubectl get {what}: {}",
        last_line(&output)
    );
    let mut list: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read what kubectl printed of {what}"))?;
    let items = list.get_mut("items").and_then(Value::as_array_mut);
    Ok(items.map(std::mem::take).unwrap_or_default())
}

/// The name of the context that kubectl uses.
pub(super) async fn context(kubectl: &Kubectl) -> String {
    if let Some(name) = kubectl.context() {
        return printable(name);
    }
    let output = kubectl
        .run(&["config", "current-context"], b"", CALL_TIMEOUT)
        .await;
    let output = output.ok().filter(|output| output.status.success());
    output.map_or_else(|| "-".to_owned(), |output| last_line(&output))
}

impl Pods<'_> {
    fn selector(&self) -> String {
        format!("--selector={RUN}={}", self.run)
    }

    /// Pods of other runs, which may hold NICs.
    pub(super) async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let selector = format!("--selector=app.kubernetes.io/name={NAME}");
        let pods = list(&self.kubectl, &["pods", &selector]).await?;
        Ok(pods.iter().map(|pod| printable(name_of(pod))).collect())
    }

    pub(super) async fn create(&self, pods: Vec<Value>) -> anyhow::Result<()> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string();
        let arguments = ["create", "--filename=-"];
        let output = self
            .kubectl
            .run(&arguments, list.as_bytes(), CALL_TIMEOUT)
            .await?;
        ensure!(
            output.status.success(),
            "cannot create the pods in namespace {}: {}",
            self.kubectl.namespace,
            last_line(&output)
        );
        Ok(())
    }

    /// Waits until each pod is ready or stuck, at most `limit`; why each of the others is not.
    pub(super) async fn wait(
        &self,
        names: &[&str],
        limit: Duration,
        progress: &dyn Fn(&str),
    ) -> anyhow::Result<BTreeMap<String, String>> {
        let started = Instant::now();
        let selector = self.selector();
        loop {
            let pods = list(&self.kubectl, &["pods", &selector]).await?;
            let states: BTreeMap<&str, State> =
                pods.iter().map(|pod| (name_of(pod), state(pod))).collect();
            let gone = || State::Stuck("its pod was deleted".to_owned());
            let states = names.iter().map(|&name| {
                (
                    name.to_owned(),
                    states.get(name).cloned().unwrap_or_else(gone),
                )
            });
            let states: Vec<(String, State)> = states.collect();
            let coming = |(_, state): &&(String, State)| matches!(state, State::Coming(_));
            let waiting = states.iter().filter(coming).count();
            let is_late = started.elapsed() >= READY_TIMEOUT.min(limit);
            if waiting > 0 && !is_late {
                progress(&format!(
                    "{} of {} pods are ready",
                    names.len() - waiting,
                    names.len()
                ));
                sleep(POLL_INTERVAL).await;
                continue;
            }
            let events = if waiting > 0 {
                self.warnings().await
            } else {
                BTreeMap::new()
            };
            let why = |(name, state): (String, State)| match state {
                State::Ready => None,
                State::Stuck(why) => Some((name, why)),
                State::Coming(why) => {
                    let event = events.get(&name).cloned().unwrap_or_default();
                    let why = format!("its pod is not ready: {why} {event}");
                    Some((name, why.trim_end().to_owned()))
                }
            };
            return Ok(states.into_iter().filter_map(why).collect());
        }
    }

    /// The last warning about each pod, such as why its interfaces could not be made.
    async fn warnings(&self) -> BTreeMap<String, String> {
        let fields = "--field-selector=type=Warning,involvedObject.kind=Pod";
        let events = list(&self.kubectl, &["events", fields])
            .await
            .unwrap_or_default();
        let text = |event: &Value, pointer: &str| {
            let text = event.pointer(pointer).and_then(Value::as_str);
            printable(text.unwrap_or_default())
        };
        let warning =
            |event: &Value| (text(event, "/involvedObject/name"), text(event, "/message"));
        events.iter().map(warning).collect()
    }

    /// Deletes them, without waiting for their end.
    pub(super) async fn delete(&self) -> anyhow::Result<()> {
        let selector = self.selector();
        let arguments = [
            "delete",
            "pods",
            &selector,
            "--wait=false",
            "--ignore-not-found",
        ];
        let output = self
            .kubectl
            .run(&arguments, b"", Duration::from_secs(60))
            .await?;
        ensure!(output.status.success(), "{}", last_line(&output));
        Ok(())
    }

    /// The same, for a person.
    pub(super) fn delete_command(&self) -> String {
        let namespace = &self.kubectl.namespace;
        format!("kubectl -n {namespace} delete pods -l {RUN}={}", self.run)
    }
}

fn state(pod: &Value) -> State {
    let text = |pointer: &str| {
        pod.pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let condition = |kind: &str| {
        let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
        let mut conditions = conditions.into_iter().flatten();
        conditions.find(|condition| condition["type"] == kind)
    };
    let word = |value: &Value| printable(value.as_str().unwrap_or_default());
    if !text("/metadata/deletionTimestamp").is_empty() {
        return State::Stuck("its pod was deleted".to_owned());
    }
    if condition("Ready").is_some_and(|ready| ready["status"] == "True") {
        return State::Ready;
    }
    if let Some(scheduled) = condition("PodScheduled")
        && scheduled["reason"] == "Unschedulable"
    {
        return State::Stuck(format!(
            "no room for its pod: {}",
            word(&scheduled["message"])
        ));
    }
    let phase = text("/status/phase");
    if matches!(phase, "Failed" | "Succeeded") {
        let (reason, message) = (text("/status/reason"), text("/status/message"));
        return State::Stuck(printable(&format!(
            "its pod ended: {phase} {reason} {message}"
        )));
    }
    let waiting = pod.pointer("/status/containerStatuses/0/state/waiting");
    let reason = waiting.map_or(String::new(), |waiting| word(&waiting["reason"]));
    match reason.as_str() {
        "ImagePullBackOff"
        | "ErrImageNeverPull"
        | "InvalidImageName"
        | "CreateContainerConfigError" => State::Stuck(format!(
            "its pod cannot start: {reason}; --image names another image"
        )),
        "" => State::Coming(printable(phase)),
        _ => State::Coming(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_cannot_start_says_why() {
        let waiting = |reason: &str| json!({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason}}}]});
        let condition = |kind: &str, status: &str| {
            json!({"type": kind, "status": status,
            "reason": if status == "False" { "Unschedulable" } else { "" },
            "message": "1 Insufficient rdma/nic.\u{1b}[2J"})
        };
        for (status, expected) in [
            (json!({"conditions": [condition("Ready", "True")]}), None),
            (
                json!({"conditions": [condition("PodScheduled", "False")]}),
                Some("no room for its pod: 1 Insufficient rdma/nic.\\u{1b}[2J"),
            ),
            (
                json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"}),
                Some("its pod ended: Failed UnexpectedAdmissionError "),
            ),
            (
                waiting("ImagePullBackOff"),
                Some("its pod cannot start: ImagePullBackOff; --image names another image"),
            ),
            (waiting("ContainerCreating"), Some("ContainerCreating")),
            (json!({"phase": "Pending"}), Some("Pending")),
        ] {
            let found = match state(&json!({"status": status})) {
                State::Ready => None,
                State::Stuck(why) | State::Coming(why) => Some(why),
            };
            assert_eq!(found.as_deref(), expected);
        }
    }
}
