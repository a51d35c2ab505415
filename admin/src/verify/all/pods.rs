//! What is asked of the cluster, and the pods of the run: made together, awaited, deleted.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use cni_wire::text::printable;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::plan::{NAME, RUN};
use super::rounds::show;
use crate::documents::name_of;
use crate::global::Kubectl;
use crate::kubectl::{CALL_TIMEOUT, last_line};

/// Between two looks at the pods.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long pods may take to run: an image is pulled, interfaces are made.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// How long their deletion may take, which is not part of the run.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// The pods of one run.
#[derive(Debug)]
pub(super) struct Pods {
    /// With the pods' namespace.
    pub kubectl: Kubectl,
    /// Name of the run.
    pub run: String,
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
    let printed = printed(kubectl, &arguments, b"").await?;
    let mut list: Value = serde_json::from_slice(&printed)
        .with_context(|| format!("read what kubectl printed of {what:?}"))?;
    let items = list.get_mut("items").and_then(Value::as_array_mut);
    Ok(items.map(std::mem::take).unwrap_or_default())
}

/// The name of the context that kubectl uses.
pub(super) async fn context(kubectl: &Kubectl) -> String {
    if let Some(name) = kubectl.context() {
        return printable(name);
    }
    let name = printed(kubectl, &["config", "current-context"], b"").await;
    let name = name.unwrap_or_else(|_| b"-".to_vec());
    printable(String::from_utf8_lossy(&name).trim())
}

async fn printed(kubectl: &Kubectl, arguments: &[&str], input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let output = kubectl.run(arguments, input, CALL_TIMEOUT).await?;
    let what: Vec<&str> = arguments.iter().take(2).copied().collect();
    ensure!(
        output.status.success(),
        "kubectl {}: {}",
        what.join(" "),
        last_line(&output)
    );
    Ok(output.stdout)
}

impl Pods {
    fn selector(&self) -> String {
        format!("--selector={RUN}={}", self.run)
    }

    /// Pods of other runs.
    pub(super) async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let selector = format!("--selector=app.kubernetes.io/name={NAME}");
        let pods = list(&self.kubectl, &["pods", &selector]).await?;
        Ok(pods.iter().map(|pod| printable(name_of(pod))).collect())
    }

    pub(super) async fn create(&self, pods: Vec<Value>) -> anyhow::Result<()> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string();
        let created = printed(&self.kubectl, &["create", "--filename=-"], list.as_bytes()).await;
        created.map(|_| ()).context("create the pods")
    }

    /// Waits until each pod is ready or stuck, at most `limit`; why each of the others is not.
    pub(super) async fn wait(
        &self,
        names: &[&str],
        limit: Duration,
    ) -> anyhow::Result<BTreeMap<String, String>> {
        let started = Instant::now();
        let selector = self.selector();
        loop {
            let pods = list(&self.kubectl, &["pods", &selector]).await?;
            let states = names.iter().map(|&name| {
                let pod = pods.iter().find(|pod| name_of(pod) == name);
                let gone = || State::Stuck("its pod was deleted".to_owned());
                (name.to_owned(), pod.map_or_else(gone, state))
            });
            let states: Vec<(String, State)> = states.collect();
            let coming = |(_, state): &&(String, State)| matches!(state, State::Coming(_));
            let coming = states.iter().filter(coming).count();
            if coming > 0 && started.elapsed() < READY_TIMEOUT.min(limit) {
                show(&format!("waiting for {coming} of {} pods", names.len()));
                sleep(POLL_INTERVAL).await;
                continue;
            }
            let events = if coming > 0 {
                self.warnings().await
            } else {
                BTreeMap::new()
            };
            let why = |(name, state): (String, State)| match state {
                State::Ready => None,
                State::Stuck(why) => Some((name, why)),
                State::Coming(why) => {
                    let event = events.get(&name).map(|event| format!(": {event}"));
                    Some((
                        name,
                        format!("its pod is {why}{}", event.unwrap_or_default()),
                    ))
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
        let warning =
            |event: &Value| (word(event, "/involvedObject/name"), word(event, "/message"));
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
        let deleted = printed(&self.kubectl, &arguments, b"");
        tokio::time::timeout(DELETE_TIMEOUT, deleted).await??;
        Ok(())
    }

    /// The same, for a person.
    pub(super) fn delete_command(&self) -> String {
        let namespace = &self.kubectl.namespace;
        format!("kubectl -n {namespace} delete pods -l {RUN}={}", self.run)
    }
}

/// Text of the API's in a message.
fn word(object: &Value, pointer: &str) -> String {
    let text = object.pointer(pointer).and_then(Value::as_str);
    printable(text.unwrap_or_default())
}

fn state(pod: &Value) -> State {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let condition = |kind: &str| {
        let mut conditions = conditions.into_iter().flatten();
        conditions.find(|condition| condition["type"] == kind)
    };
    if condition("Ready").is_some_and(|ready| ready["status"] == "True") {
        return State::Ready;
    }
    if let Some(scheduled) = condition("PodScheduled")
        && scheduled["reason"] == "Unschedulable"
    {
        return State::Stuck(format!(
            "no room for its pod: {}",
            word(scheduled, "/message")
        ));
    }
    let (phase, reason) = (word(pod, "/status/phase"), word(pod, "/status/reason"));
    if matches!(phase.as_str(), "Failed" | "Succeeded") {
        let message = word(pod, "/status/message");
        return State::Stuck(format!("its pod ended: {phase} {reason} {message}"));
    }
    match word(pod, "/status/containerStatuses/0/state/waiting/reason").as_str() {
        "" => State::Coming(phase),
        reason if reason.contains("Image") => State::Stuck(format!(
            "its pod cannot start: {reason}; --image names another image"
        )),
        // Also CreateContainerConfigError, which a busy daemon causes: the kubelet tries again.
        reason => State::Coming(reason.to_owned()),
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
            (
                waiting("CreateContainerConfigError"),
                Some("CreateContainerConfigError"),
            ),
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
