//! Keeps the object `RdmaNode` of this node as the daemon says: a question that the daemon answers when
//! something happened, and one write for it. Nothing here stops addresses.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::core::params::{GetParams, Patch, PatchParams, PostParams};
use kube::core::request::{Error as RequestError, Request};
use node_wire::{ChangeQuestion, ClientError, DaemonStatus, StatusChange};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::api::{Api, ApiError};
use crate::decide::ThisNode;
use crate::events::{self, Happening, Told};
use crate::node_labels::{self, Labels};
use crate::node_marks::{self, Damped, Wanted};
use node_wire::rdma_node::{Inputs, NodeState, OwnedAddresses};

const PATH: &str = "/apis/rdma-netdev.io/v1alpha1/rdmanodes";
const NODES: &str = "/api/v1/nodes";
/// How long the daemon is asked to wait for a change.
const WAIT: Duration = Duration::from_mins(1);
/// How much later its answer can be.
const MARGIN: Duration = Duration::from_secs(5);
/// A write follows another one no sooner.
const PAUSE: Duration = Duration::from_secs(5);
/// How long the daemon may be silent, as while it is replaced, before the object says so.
const SILENCE: Duration = Duration::from_secs(30);
/// How often the object and the Node are read, in case somebody changed or deleted them.
const READ_INTERVAL: Duration = Duration::from_mins(10);
/// When what failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(30);

/// How the object is doing, for pages.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// Why it is not as the daemon says.
    pub fault: Option<String>,
    pub writes: u64,
    /// Why node-feature-discovery's file is not as it must be.
    pub label_fault: Option<String>,
}

/// What the object is made from, and where it is.
#[expect(missing_debug_implementations, reason = "a function has none")]
pub struct Writer<F> {
    pub api: Api,
    pub node: ThisNode,
    /// The daemon's.
    pub socket: PathBuf,
    pub progress: Arc<Mutex<Progress>>,
    pub marks: Wanted,
    /// Of node-feature-discovery.
    pub features_dir: PathBuf,
    /// That of the policy.
    pub block: Option<String>,
    pub addresses: F,
}

/// The object as it was read or written last.
struct Known {
    /// None if there is no object.
    state: Option<NodeState>,
    read: Instant,
}

/// The object with the given status.
fn object(node: &str, uid: &str, state: &NodeState) -> Value {
    json!({
        "apiVersion": "rdma-netdev.io/v1alpha1",
        "kind": "RdmaNode",
        "metadata": {
            "name": node,
            // A deleted Node takes it with it.
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}],
        },
        "status": state.json(),
    })
}

impl<F: Fn() -> Vec<OwnedAddresses>> Writer<F> {
    /// Writes whenever there is a reason to, without end.
    pub async fn run(self) {
        let mut known: Option<Known> = None;
        let (mut seen, mut daemon, mut marks, mut due) = (None, None, None, None);
        let (mut answered, mut wait) = (Instant::now(), RETRY);
        let mut told = Told::default();
        loop {
            let silent = match self.ask(seen, due).await {
                Ok(change) => {
                    (seen, daemon, answered) =
                        (Some(change.state), Some(change.status), Instant::now());
                    None
                }
                Err(error) => {
                    // Its next answer does not wait for a change.
                    seen = None;
                    sleep(RETRY).await;
                    if answered.elapsed() < SILENCE {
                        continue;
                    }
                    Some(error.fault.to_string())
                }
            };
            if known
                .as_ref()
                .is_some_and(|known| known.read.elapsed() >= READ_INTERVAL)
            {
                (known, marks) = (None, None);
            }
            let mut settled = self
                .settle(&mut known, daemon.as_ref(), silent.as_deref())
                .await;
            if let (Ok(before), Some(daemon)) = (&settled, &daemon) {
                let next = known.as_ref().and_then(|known| known.state.as_ref());
                let changes = before.as_ref().zip(next);
                let changes = changes.map(|(before, next)| events::between(before, next, daemon));
                let all = changes.into_iter().flatten().chain(events::refused(daemon));
                self.tell(&mut told, all.collect()).await;
            }
            if let (Ok(_), Some(state), Some(daemon)) = (
                &settled,
                known.as_ref().and_then(|known| known.state.as_ref()),
                &daemon,
            ) {
                let hold = Duration::from_millis(daemon.flap_hold_ms);
                match self.mark(&mut marks, state, hold).await {
                    Ok(again) => due = again,
                    Err(error) => settled = Err(error),
                }
            }
            self.note_fault(settled.as_ref().err());
            match settled {
                Ok(before) => {
                    wait = RETRY;
                    if before.is_some() {
                        sleep(PAUSE).await;
                    }
                }
                Err(_) => {
                    (known, seen, marks) = (None, None, None);
                    // Agents that a restart of the API hit at one time do not come back at one time.
                    sleep(wait.mul_f64(0.5 + crate::agent::random())).await;
                    wait = (2 * wait).min(MAX_RETRY);
                }
            }
        }
    }

    /// Logs a fault that is a new one.
    fn note_fault(&self, error: Option<&ApiError>) {
        let fault = error.map(ToString::to_string);
        self.note(|progress| {
            if let Some(fault) = fault.as_ref().filter(|_| progress.fault != fault) {
                tracing::warn!(fault, "cannot write RdmaNode; trying again");
            }
            progress.fault = fault;
        });
    }

    /// The same of node-feature-discovery's file.
    fn note_features(&self, written: std::io::Result<()>) {
        let fault = written.err().map(|error| error.to_string());
        self.note(|progress| {
            if let Some(fault) = fault.as_ref().filter(|_| progress.label_fault != fault) {
                let directory = self.features_dir.display();
                tracing::warn!(fault, %directory, "cannot write labels for node-feature-discovery");
            }
            progress.label_fault = fault;
        });
    }

    fn note(&self, note: impl FnOnce(&mut Progress)) {
        note(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until the daemon's state is another one, something is due, or a minute is over.
    async fn ask(
        &self,
        seen: Option<u64>,
        due: Option<Instant>,
    ) -> Result<StatusChange, ClientError> {
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let within = left.map_or(WAIT, |left| left.min(WAIT));
        let question = ChangeQuestion {
            seen,
            within_ms: u32::try_from(within.as_millis()).unwrap_or(u32::MAX),
        };
        let socket = self.socket.clone();
        let asked =
            tokio::task::spawn_blocking(move || node_wire::ask(&socket, &question, WAIT + MARGIN));
        match asked.await {
            Ok(answer) => answer,
            Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
        }
    }

    /// Writes events, each once. One that is lost is lost.
    async fn tell(&self, told: &mut Told, happenings: Vec<Happening>) {
        let now = Instant::now();
        for happening in happenings {
            if !told.is_new(&happening, now) {
                continue;
            }
            let pods = happening.pods.iter().map(Some);
            for pod in std::iter::once(None).chain(pods) {
                let number = node::random::random64();
                let name = &self.node.name;
                let (path, event) = events::object(name, pod, &happening, Timestamp::now(), number);
                let body = serde_json::to_vec(&event).map_err(RequestError::SerializeBody);
                let request =
                    body.and_then(|body| Request::new(path).create(&PostParams::default(), body));
                let written = self.api.request::<Value>("write an event", request).await;
                let fault = written.err().map(|error| error.to_string());
                if let Some(fault) = fault.as_ref().filter(|_| told.fault != fault) {
                    tracing::warn!(fault, "an event is lost");
                }
                told.fault = fault;
            }
        }
    }

    /// Makes the object as it must be. Returns what it was before, if something was written.
    async fn settle(
        &self,
        known: &mut Option<Known>,
        daemon: Option<&DaemonStatus>,
        silent: Option<&str>,
    ) -> Result<Option<NodeState>, ApiError> {
        let name = &self.node.name;
        if known.is_none() {
            *known = Some(Known {
                state: self.read().await?,
                read: Instant::now(),
            });
        }
        let Some(known) = known else { return Ok(None) };
        let before = known.state.as_ref();
        let next = match daemon {
            Some(daemon) => NodeState::of(Inputs {
                daemon,
                boot: &self.node.boot,
                addresses: (self.addresses)(),
                before,
                now: Timestamp::now(),
            }),
            None => before.cloned().unwrap_or_default(),
        };
        let next = match silent {
            Some(why) => next.unanswered(why),
            None => next,
        };
        if before == Some(&next) {
            return Ok(None);
        }
        let what = format!("write RdmaNode {name}");
        let request = match before {
            Some(_) => {
                // Who wrote which key is not followed: see AddressSubnet.
                let patch = json!({"metadata": {"managedFields": [{}]}, "status": next.json()});
                let parameters = PatchParams::default();
                Request::new(PATH).patch_metadata(name, &parameters, &Patch::Merge(patch))
            }
            None => {
                let uid = self.node().await?.metadata.uid.unwrap_or_default();
                let body = serde_json::to_vec(&object(name, &uid, &next));
                let body = body.map_err(RequestError::SerializeBody);
                body.and_then(|body| Request::new(PATH).create(&PostParams::default(), body))
            }
        };
        self.api.request::<Value>(&what, request).await?;
        let before = known.state.replace(next).unwrap_or_default();
        self.note(|progress| progress.writes += 1);
        Ok(Some(before))
    }

    /// Writes condition, taint and labels of the Node, where they must change. Returns when they can change by
    /// themselves.
    async fn mark(
        &self,
        marks: &mut Option<(Damped, Damped, Labels)>,
        state: &NodeState,
        hold: Duration,
    ) -> Result<Option<Instant>, ApiError> {
        let (condition, taint, shown) = match marks {
            Some(marks) => marks,
            None if self.marks == Wanted::default() => marks.insert(Default::default()),
            None => marks.insert(node_marks::read(&self.node().await?)),
        };
        let (now, parameters) = (Instant::now(), PatchParams::default());
        let patch = async |what: &str, request| self.api.request::<Value>(what, request).await;
        let mut due = None;
        if self.marks.condition {
            let (is_ready, again) = condition.see(state.problems.is_empty(), hold, now);
            due = again;
            if condition.shown != Some(is_ready) {
                let body = node_marks::condition(is_ready, state, Timestamp::now());
                let body = Patch::Strategic(body);
                let name = &self.node.name;
                let request =
                    Request::new(NODES).patch_subresource("status", name, &parameters, &body);
                patch("write the Node's condition", request).await?;
                *condition = Damped::new(Some(is_ready));
            }
        }
        if self.marks.taint {
            let (is_missing, again) = taint.see(!state.missing.is_empty(), hold, now);
            due = due.into_iter().chain(again).min();
            if taint.shown != Some(is_missing) {
                let body = Patch::Merge(node_marks::taint(is_missing, &self.node().await?));
                let request = Request::new(NODES).patch(&self.node.name, &parameters, &body);
                patch("write the Node's taint", request).await?;
                *taint = Damped::new(Some(is_missing));
            }
        }
        let file = node_labels::read(&self.features_dir);
        let before = if file.is_empty() { &*shown } else { &file };
        let labels = node_labels::of(state, self.block.as_deref(), before);
        let Some(labels) = labels else { return Ok(due) };
        self.note_features(node_labels::write(&self.features_dir, &labels));
        if self.marks.labels && *shown != labels {
            let body = Patch::Merge(node_labels::patch(&labels));
            let request = Request::new(NODES).patch(&self.node.name, &parameters, &body);
            patch("write the Node's labels", request).await?;
            *shown = labels;
        }
        Ok(due)
    }

    /// The status of the object, if there is one. What a person wrote there is replaced.
    async fn read(&self) -> Result<Option<NodeState>, ApiError> {
        let name = &self.node.name;
        let request = Request::new(PATH).get(name, &GetParams::default());
        let what = format!("read RdmaNode {name}");
        match self.api.request::<Value>(&what, request).await {
            Ok(mut object) => {
                let status = object.get_mut("status").map(Value::take);
                let state = status.and_then(|status| serde_json::from_value(status).ok());
                Ok(Some(state.unwrap_or_default()))
            }
            Err(ApiError::Refused { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// This node's Node.
    async fn node(&self) -> Result<Node, ApiError> {
        let name = &self.node.name;
        let request = Request::new(NODES).get(name, &GetParams::default());
        self.api
            .request(&format!("read Node {name}"), request)
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_goes_with_its_node() {
        let object = object("n1", "u1", &NodeState::default());
        let owner = object.pointer("/metadata/ownerReferences/0").unwrap();
        let expected = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"});
        assert_eq!(*owner, expected);
        assert_eq!(object.get("spec"), None);
    }
}
