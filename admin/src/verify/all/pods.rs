//! What is asked of the cluster, and the pods of the run: made together, awaited, deleted.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use cni_wire::text::printable;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use super::rounds::show;
use super::test_plan::RUN;
use crate::documents::{name_of, text_at};
use crate::global::Kubectl;

/// Between two looks at the pods.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long pods may take to run: an image is pulled, interfaces are made.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// How long their deletion may take, which is not part of the run.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);

/// The pods of one run.
#[derive(Debug)]
pub(super) struct RunPods {
    /// With the pods' namespace.
    pub kubectl: Kubectl,
    /// The label of the run.
    pub selector: String,
}

/// The name of the context that kubectl uses.
pub(super) async fn context(kubectl: &Kubectl) -> String {
    let view = [
        "config",
        "view",
        "--minify",
        "--output=jsonpath={.current-context}",
    ];
    let name = kubectl.printed(&view, b"").await.unwrap_or_default();
    printable(&String::from_utf8_lossy(&name))
}

impl RunPods {
    /// Waits until the pods of earlier runs have left their NICs.
    ///
    /// # Errors
    /// Another run is under way, or did not delete its pods.
    pub(super) async fn wait_for_others(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        let selector = format!("--selector={RUN}");
        loop {
            let mut others = self.kubectl.objects(&["pods", &selector]).await?;
            let ended = ["Failed", "Succeeded"];
            others.retain(|pod| !ended.contains(&text_at(pod, "/status/phase")));
            let is_leaving = |pod: &&Value| pod.pointer("/metadata/deletionTimestamp").is_some();
            if let Some(pod) = others.iter().find(|pod| !is_leaving(pod)) {
                bail!(
                    "another run has pods, such as {}; if none is under way: {}",
                    word(pod, "/metadata/name"),
                    self.deletion(RUN)
                );
            }
            // Those of a node that does not answer stay.
            if others.is_empty() || started.elapsed() > DELETE_TIMEOUT {
                return Ok(());
            }
            show("waiting for the pods of an earlier run");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// The command that deletes pods.
    pub(super) fn deletion(&self, selector: &str) -> String {
        let (words, namespace) = (self.kubectl.words().join(" "), self.kubectl.namespace());
        format!("{words} -n {namespace} delete pods -l {selector}")
    }

    /// Waits until each pod is ready or cannot be, at most `limit`; why each of the others is not.
    pub(super) async fn wait(
        &self,
        names: &[&str],
        limit: Duration,
    ) -> anyhow::Result<BTreeMap<String, String>> {
        let started = Instant::now();
        let selector = format!("--selector={}", self.selector);
        loop {
            let is_late = started.elapsed() >= READY_TIMEOUT.min(limit);
            let pods = match self.kubectl.objects(&["pods", &selector]).await {
                Err(_) if !is_late => {
                    sleep(POLL_INTERVAL).await;
                    continue;
                }
                pods => pods?,
            };
            let obstacles = names.iter().filter_map(|&name| {
                let pod = pods.iter().find(|pod| name_of(pod) == name);
                let deleted = || Some((false, "its pod was deleted".to_owned()));
                Some((name.to_owned(), pod.map_or_else(deleted, obstacle)?))
            });
            let mut obstacles: BTreeMap<String, (bool, String)> = obstacles.collect();
            let coming = obstacles
                .values()
                .filter(|(is_coming, _)| *is_coming)
                .count();
            if coming > 0 && !is_late {
                show(&format!("waiting for {coming} of {} pods", names.len()));
                sleep(POLL_INTERVAL).await;
                continue;
            }
            if coming > 0 {
                // Such as why its interfaces could not be made.
                let warnings = "--field-selector=type=Warning,involvedObject.kind=Pod";
                let events = self.kubectl.objects(&["events", warnings]).await;
                for event in events.unwrap_or_default() {
                    let name = text_at(&event, "/involvedObject/name");
                    if let Some((true, why)) = obstacles.get_mut(name) {
                        *why = format!("its pod is not ready: {}", word(&event, "/message"));
                    }
                }
            }
            let why = |(name, (_, why))| (name, why);
            return Ok(obstacles.into_iter().map(why).collect());
        }
    }

    /// Deletes them, without waiting for their end.
    pub(super) async fn delete(&self) -> anyhow::Result<()> {
        let selector = format!("--selector={}", self.selector);
        let arguments = [
            "delete",
            "pods",
            &selector,
            "--wait=false",
            "--ignore-not-found",
        ];
        timeout(DELETE_TIMEOUT, self.kubectl.printed(&arguments, b"")).await??;
        Ok(())
    }
}

/// Text of the API's in a message.
fn word(object: &Value, pointer: &str) -> String {
    printable(text_at(object, pointer))
}

/// Why a pod is not ready, and whether it may become so.
fn obstacle(pod: &Value) -> Option<(bool, String)> {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let condition = |kind: &str, key: &str, value: &str| {
        let mut conditions = conditions.into_iter().flatten();
        conditions.find(|one| one["type"] == kind && one[key] == value)
    };
    if condition("Ready", "status", "True").is_some() {
        return None;
    }
    if let Some(scheduled) = condition("PodScheduled", "reason", "Unschedulable") {
        let why = word(scheduled, "/message");
        return Some((false, format!("its pod cannot be scheduled: {why}")));
    }
    let status = ["/status/phase", "/status/reason", "/status/message"];
    let [phase, reason, message] = status.map(|pointer| word(pod, pointer));
    if phase == "Failed" || phase == "Succeeded" {
        return Some((false, format!("its pod ended: {phase} {reason} {message}")));
    }
    let waiting = word(pod, "/status/containerStatuses/0/state/waiting/reason");
    // Not CreateContainerConfigError, which a busy daemon can cause: the kubelet tries again.
    if waiting.contains("Image") {
        let why = format!("its pod cannot start: {waiting}; --image names another image");
        return Some((false, why));
    }
    let state = if waiting.is_empty() { phase } else { waiting };
    Some((true, format!("its pod is {state}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
                Some("its pod cannot be scheduled: 1 Insufficient rdma/nic.\\u{1b}[2J"),
            ),
            (
                json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"}),
                Some("its pod ended: Failed UnexpectedAdmissionError "),
            ),
            (
                waiting("ImagePullBackOff"),
                Some("its pod cannot start: ImagePullBackOff; --image names another image"),
            ),
            (
                waiting("ContainerCreating"),
                Some("its pod is ContainerCreating"),
            ),
            (json!({"phase": "Pending"}), Some("its pod is Pending")),
        ] {
            let found = obstacle(&json!({"status": status})).map(|(_, why)| why);
            assert_eq!(found.as_deref(), expected);
        }
    }
}
