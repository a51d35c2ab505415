//! What the kubelet says of a pod, asked as often as needed and no more often.
//!
//! One task calls the kubelet. A call serves every question that arrived before it began, and none
//! that arrived later: a pod that was admitted a moment ago is in the list that its own question
//! causes. So any number of questions at once cost two calls at most.
//!
//! A pod's units do not change from its admission on, and its questions come after that. So an
//! answer that was checked against the pod's UID holds for [`ANSWER_LIFETIME`], for the other
//! interfaces of the same pod.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kubelet_api::client;
use node_wire::{Failure, FailureKind, Pod, PodUnits};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::answer::{self, View};
use crate::kubelet::checkpoint;

/// How long an answer that was checked against the pod's UID is given again.
const ANSWER_LIFETIME: Duration = Duration::from_secs(1);
/// How long a question waits for the kubelet: less than its client waits for us, so that the client
/// learns who was late.
const KUBELET_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a call of the kubelet may take for those who asked late into the one before.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

type Listing = Result<Arc<View>, String>;

/// Answers questions about pods.
#[derive(Debug)]
pub(crate) struct Pods {
    calls: mpsc::Sender<oneshot::Sender<Listing>>,
    socket: PathBuf,
    answers: Mutex<HashMap<Pod, (Instant, PodUnits)>>,
}

/// The task that calls the kubelet.
#[derive(Debug)]
pub(crate) struct Caller {
    calls: mpsc::Receiver<oneshot::Sender<Listing>>,
    kubelet: client::Lister,
    device_plugin_dir: PathBuf,
    known: Option<checkpoint::KnownOwners>,
}

/// For the kubelet with this PodResources socket and device-plugins directory. Nothing is answered before
/// [`Caller::run`] runs.
pub(crate) fn pods(socket: PathBuf, device_plugin_dir: PathBuf) -> (Pods, Caller) {
    let (calls, asked) = mpsc::channel(16);
    let pods = Pods {
        calls,
        socket: socket.clone(),
        answers: Mutex::default(),
    };
    let caller = Caller {
        calls: asked,
        kubelet: client::Lister::new(socket),
        device_plugin_dir,
        known: None,
    };
    (pods, caller)
}

impl Pods {
    /// The units of a pod, HCAs not yet named.
    ///
    /// # Errors
    /// The kubelet did not answer, or its answer has no such pod.
    pub(crate) async fn units(&self, pod: &Pod) -> Result<PodUnits, Failure> {
        if let Some(units) = self.recent(pod) {
            return Ok(units);
        }
        let listing = match tokio::time::timeout(KUBELET_TIMEOUT, self.list()).await {
            Ok(listing) => listing,
            Err(_) => Err(format!("no answer within {KUBELET_TIMEOUT:?}")),
        };
        let view = listing.map_err(|error| {
            Failure::new(
                FailureKind::KubeletUnavailable,
                format!(
                    "ask the kubelet at {} which devices pod {pod} has: {error}",
                    self.socket.display()
                ),
            )
        })?;
        let units = answer::pod_units(pod, &view)?;
        if units.uid_checked {
            self.remember(pod, &units);
        }
        Ok(units)
    }

    async fn list(&self) -> Listing {
        let stopping = || "the daemon is stopping".to_owned();
        let (reply, listing) = oneshot::channel();
        self.calls.send(reply).await.map_err(|_| stopping())?;
        listing.await.map_err(|_| stopping())?
    }

    fn recent(&self, pod: &Pod) -> Option<PodUnits> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, units) = answers.get(pod)?;
        (since.elapsed() < ANSWER_LIFETIME).then(|| units.clone())
    }

    fn remember(&self, pod: &Pod, units: &PodUnits) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|_, (since, _)| since.elapsed() < ANSWER_LIFETIME);
        answers.insert(pod.clone(), (Instant::now(), units.clone()));
    }
}

impl Caller {
    /// Calls the kubelet whenever somebody asks, until nobody can any more.
    pub(crate) async fn run(mut self) {
        while let Some(first) = self.calls.recv().await {
            let mut waiting = vec![first];
            while let Ok(another) = self.calls.try_recv() {
                waiting.push(another);
            }
            // Some have waited too long in the meantime.
            waiting.retain(|reply| !reply.is_closed());
            if waiting.is_empty() {
                continue;
            }
            let listing = match tokio::time::timeout(CALL_TIMEOUT, self.view()).await {
                Ok(listing) => listing.map(Arc::new),
                Err(_) => Err(format!("no answer within {CALL_TIMEOUT:?}")),
            };
            for reply in waiting {
                let _ = reply.send(listing.clone());
            }
        }
    }

    async fn view(&mut self) -> Result<View, String> {
        let pods = self.kubelet.pods().await?;
        // After the list: what the kubelet allocated in between is in the checkpoint, and a device
        // that went over to another pod is seen as that pod's.
        let (directory, known) = (self.device_plugin_dir.clone(), self.known.take());
        let read = tokio::task::spawn_blocking(move || checkpoint::owners(&directory, known)).await;
        let owners = match read {
            Ok(Ok(known)) => Ok(self.known.insert(known).owners.clone()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        Ok(View { pods, owners })
    }
}
