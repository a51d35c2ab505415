//! The socket on which programs of the node ask the daemon, the CNI plugin above all.
//!
//! What is asked and answered is `node-wire`'s; the socket is `node-server`'s. Here:
//! - [`pods`]: the kubelet and its checkpoint, asked no more often than needed;
//! - [`answer`]: which units a pod holds, decided on what was read.
//!
//! A socket that cannot be made does not stop the device plugin: it is tried again, and the reason
//! is at `/readyz` and in the log.

pub(crate) mod answer;
pub(crate) mod pods;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hca::HcaId;
use node_server::socket::Socket;
use node_server::socket::connections::{Answers, Connections};
pub(crate) use node_server::socket::{NodeSocket, State};
use node_wire::{
    Answer, ChangeQuestion, Failure, FailureKind, Forgotten, PodUnits, Question, StatusChange,
};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::binding::binder::Binder;
use crate::report::Report;
use pods::Pods;

/// How long the socket waits for the first scan of the host. Before that the daemon does not know
/// which HCAs the units of its pools stand for.
const FIRST_SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an asker can wait for a change.
const MAX_WAIT: Duration = Duration::from_mins(1);

/// What answers are made from.
#[derive(Debug)]
struct Units {
    /// What the kubelet says.
    pods: Arc<Pods>,
    /// What the kubelet was sent.
    reports: watch::Receiver<Arc<Report>>,
    /// What binds slots.
    binder: Arc<Binder>,
    /// HCAs that were removed for good.
    removed: mpsc::Sender<HcaId>,
    /// Nobody waits longer for a change.
    stop: CancellationToken,
}

impl Answers for Units {
    async fn answer(&self, question: Question) -> Result<Answer, Failure> {
        match question {
            Question::PodUnits(pod) => {
                let mut units = self.pods.units(&pod).await?;
                name_hcas(&mut units, &self.reports.borrow());
                Ok(Answer::PodUnits(units))
            }
            Question::Status(_) => {
                let status = self.reports.borrow().status(&self.binder.bindings());
                Ok(Answer::Status(Box::new(status)))
            }
            Question::Change(question) => {
                let change = self.change(&question).await;
                Ok(Answer::Change(Box::new(change)))
            }
            Question::Forget(question) => self.forget(&question.hca).await,
            Question::Bind(question) => self.binder.bind(question).await.map(Answer::Bound),
            Question::Commit(question) => self.binder.commit(question).await.map(Answer::Committed),
            Question::Unbind(question) => self.binder.unbind(question).await.map(Answer::Unbound),
            other => Err(other.not_mine()),
        }
    }
}

impl Units {
    /// Waits until the state is another one than the asker knows, or its time is over.
    async fn change(&self, question: &ChangeQuestion) -> StatusChange {
        let mut reports = self.reports.clone();
        let limit = Duration::from_millis(question.within_ms.into()).min(MAX_WAIT);
        let deadline = Instant::now() + limit;
        loop {
            let report = reports.borrow_and_update().clone();
            let status = report.status(&self.binder.bindings()).lasting();
            let mut hasher = DefaultHasher::new();
            serde_json::to_vec(&status)
                .unwrap_or_default()
                .hash(&mut hasher);
            let state = hasher.finish();
            let is_over = question.seen != Some(state) || Instant::now() >= deadline;
            if is_over || self.stop.is_cancelled() {
                return StatusChange { state, status };
            }
            tokio::select! {
                Ok(()) = reports.changed() => {}
                () = sleep_until(deadline) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    async fn forget(&self, hca: &str) -> Result<Answer, Failure> {
        let reports = self.reports.borrow().clone();
        let mut missing = reports.missing.iter();
        let Some(one) = missing.find(|one| one.id.to_string() == hca) else {
            let why = format!("no HCA {hca} is missing on this node; rdmactl status shows what is");
            return Err(Failure::new(FailureKind::UnknownHca, why));
        };
        // The daemon ends where nobody receives.
        let _ = self.removed.send(one.id.clone()).await;
        Ok(Answer::Forgotten(Forgotten {}))
    }
}

/// Names the HCAs that units of our own resources stand for, and those of their pools.
fn name_hcas(units: &mut PodUnits, report: &Report) {
    for allocation in &mut units.allocations {
        let mut pools = report.pools.iter();
        let pool = pools.find(|pool| pool.resource.as_str() == allocation.resource);
        let Some(snapshot) = pool.and_then(|pool| pool.snapshot.as_ref()) else {
            continue;
        };
        let mut known = HashSet::new();
        let hcas = allocation.units.iter().flat_map(|unit| snapshot.hcas(unit));
        let hcas = hcas.filter(|hca| known.insert(hca.clone()));
        allocation.hcas = Some(hcas.map(|hca| hca.to_string()).collect());
        let mut pool: Vec<&HcaId> = snapshot
            .members()
            .iter()
            .map(|member| &member.hca.id)
            .collect();
        pool.sort();
        allocation.pool = Some(pool.into_iter().map(ToString::to_string).collect());
    }
}

/// Serves until `stop`. `nonce` distinguishes this process from another one in the names of files.
pub(crate) async fn keep_serving(
    (path, nonce): (PathBuf, String),
    (pods, binder, removed): (Arc<Pods>, Arc<Binder>, mpsc::Sender<HcaId>),
    mut reports: watch::Receiver<Arc<Report>>,
    state: watch::Sender<State>,
    stop: CancellationToken,
) {
    let units = Units {
        pods,
        reports: reports.clone(),
        binder,
        removed,
        stop: stop.clone(),
    };
    let connections = Connections::new(units);
    let scanned = reports.wait_for(|report| report.scans.done);
    tokio::select! {
        () = stop.cancelled() => return,
        _ = timeout(FIRST_SCAN_TIMEOUT, scanned) => {}
    }
    let socket = Socket {
        path,
        flag: "--node-socket",
        nonce,
        state,
        connections,
    };
    socket.serve(&stop).await;
}
