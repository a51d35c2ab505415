//! What the kubelet says of pods, asked as often as needed and no more often.
//!
//! One task asks: it lists the pods and reads the checkpoint, every [`ASK_INTERVAL`] and for each
//! question that is newer than the last answer. An answer serves every question that came before it
//! was asked for, and none that came later: a pod that was admitted a moment ago is in the list that
//! its own question causes. So any number of questions at once cost two lists at most.
//!
//! An answer is used again for [`VIEW_LIFETIME`] while the checkpoint is the same file. The kubelet
//! writes another one at each allocation, so a pod whose units the checkpoint gives to the UID that is
//! asked for has those and no others. It writes none when a pod ends, hence the limit. The task also
//! asks a moment after an allocation by this daemon: the pod's interfaces are asked about next.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kubelet_api::client;
use node::file::FileId;
use node_wire::{Failure, FailureKind, Pod, PodUnits};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::answer::{self, View};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::node_paths::NodePaths;
use crate::reader::Readers;
use pools::checkpoint::Checkpoint;
use pools::holdings::Holdings;

/// How long the kubelet may take to list its pods, and a question waits for that: less than its client
/// waits for us, so that the client learns who was late.
const LIST_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long after an allocation the kubelet is asked: it admits the whole pod first, other plugins'
/// devices too, and a sandbox takes longer than that to make.
const ADMISSION_GRACE_PERIOD: Duration = Duration::from_millis(30);
/// How long an answer is used again: a pod that ended meanwhile has no units any more.
const VIEW_LIFETIME: Duration = Duration::from_secs(2);

/// How often who holds what is asked; the kubelet allows a hundred questions a second.
const ASK_INTERVAL: Duration = Duration::from_secs(15);
/// How long after it is wanted soon: the kubelet allocates a moment longer by the list before.
const ASKED_INTERVAL: Duration = Duration::from_millis(1200);

/// What came of asking once.
#[derive(Debug)]
struct Answer {
    asked: Instant,
    view: Result<Arc<View>, String>,
    /// The checkpoint, if it was the same file before and after.
    file: Option<FileId>,
    holdings: Result<Arc<Holdings>, String>,
}

type Answers = Option<Arc<Answer>>;

/// Asks the kubelet, and answers questions about pods.
#[derive(Debug)]
pub(crate) struct Pods {
    socket: PathBuf,
    pub(crate) checkpoint: CheckpointReader,
    /// The node's name, which is in the names of static pods.
    node: String,
    answers: watch::Sender<Answers>,
    holdings: watch::Sender<Option<Arc<Holdings>>>,
    /// The newest question.
    wanted: watch::Sender<Option<Instant>>,
    /// Notified, that is asked soon.
    soon: Notify,
    /// Notified when this daemon has answered an Allocate.
    pub(crate) allocated: Notify,
}

impl Pods {
    /// Nothing is answered before [`Pods::run`] runs.
    pub(crate) fn new(readers: &Readers, paths: &NodePaths, node: String) -> Self {
        Self {
            socket: client::socket(&paths.kubelet_root_dir),
            checkpoint: CheckpointReader::new(readers, &paths.device_plugin_dir),
            node,
            answers: watch::Sender::new(None),
            holdings: watch::Sender::new(None),
            wanted: watch::Sender::new(None),
            soon: Notify::new(),
            allocated: Notify::new(),
        }
    }

    /// The units of a pod, HCAs not yet named.
    ///
    /// # Errors
    /// The kubelet did not answer, or its answer has no such pod.
    pub(crate) async fn units(&self, pod: &Pod) -> Result<PodUnits, Failure> {
        let asked = Instant::now();
        if pod.uid.is_some()
            && let Some(view) = self.unchanged().await
            && let Ok(units) = answer::pod_units(pod, &view)
            && units.uid_checked
        {
            return Ok(units);
        }
        let what = format!("which devices pod {pod} has");
        let view = self.view(&what, asked).await?;
        answer::pod_units(pod, &view)
    }

    /// The pod that holds these units of a resource in one container.
    ///
    /// # Errors
    /// The kubelet did not answer, lists no such pod, or several.
    pub(crate) async fn holder(&self, resource: &str, ids: &[String]) -> Result<Pod, Failure> {
        let what = format!("which pod has {} of {resource}", ids.join(", "));
        let view = self.view(&what, Instant::now()).await?;
        answer::holder(resource, ids, &view)
    }

    /// Who holds what, asked from now on.
    ///
    /// # Errors
    /// Nothing is known, or there is no answer within the limit.
    pub(crate) async fn holdings_of_now(&self, limit: Duration) -> Result<Arc<Holdings>, String> {
        let answer = self.newer_than(Instant::now(), limit).await?;
        answer.holdings.clone()
    }

    /// Who holds what. A change is one of the pods that hold something.
    pub(crate) fn holdings(&self) -> watch::Receiver<Option<Arc<Holdings>>> {
        self.holdings.subscribe()
    }

    /// Has the kubelet asked once what it allocates now is over.
    pub(crate) fn ask_soon(&self) {
        self.soon.notify_one();
    }

    /// What the kubelet listed a moment ago, if it has allocated nothing since.
    async fn unchanged(&self) -> Option<Arc<View>> {
        let answer = self.answers.borrow().clone()?;
        let view = answer.view.as_ref().ok()?.clone();
        let file = answer
            .file
            .filter(|_| answer.asked.elapsed() < VIEW_LIFETIME)?;
        (self.checkpoint.file_id().await == Some(file)).then_some(view)
    }

    /// What the kubelet lists, asked later than `since`; it is asked `what`.
    async fn view(&self, what: &str, since: Instant) -> Result<Arc<View>, Failure> {
        let answer = self.newer_than(since, LIST_TIMEOUT).await;
        answer
            .and_then(|answer| answer.view.clone())
            .map_err(|error| {
                let socket = self.socket.display();
                let message = format!("ask the kubelet at {socket} {what}: {error}");
                Failure::new(FailureKind::KubeletUnavailable, message)
            })
    }

    async fn newer_than(&self, since: Instant, limit: Duration) -> Result<Arc<Answer>, String> {
        let mut answers = self.answers.subscribe();
        self.wanted
            .send_modify(|wanted| *wanted = (*wanted).max(Some(since)));
        let is_newer = |answer: &Answers| answer.as_ref().is_some_and(|one| one.asked >= since);
        let answer = timeout(limit, answers.wait_for(is_newer)).await;
        let answer = answer.map_err(|_| format!("no answer within {limit:?}"))?;
        let answer = answer.ok().and_then(|answer| answer.clone());
        answer.ok_or_else(|| "the daemon is stopping".to_owned())
    }

    /// Asks the kubelet until `stop`.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut kubelet = client::Lister::new(self.socket.clone());
        let mut wanted = self.wanted.subscribe();
        let mut read = None;
        let mut next = tokio::time::Instant::now();
        let mut ahead: Option<tokio::time::Instant> = None;
        let mut is_whole = true;
        loop {
            let newest = *wanted.borrow_and_update();
            let last = self.answers.borrow().as_ref().map(|answer| answer.asked);
            if newest <= last {
                let after_allocation = async {
                    match ahead {
                        Some(ahead) => sleep_until(ahead).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = sleep_until(next) => {}
                    Ok(()) = wanted.changed() => continue,
                    () = self.soon.notified() => {
                        next = next.min(tokio::time::Instant::now() + ASKED_INTERVAL);
                        continue;
                    }
                    () = self.allocated.notified() => {
                        ahead = Some(tokio::time::Instant::now() + ADMISSION_GRACE_PERIOD);
                        continue;
                    }
                    () = after_allocation => {
                        ahead = None;
                        if !self.has_allocated().await {
                            continue;
                        }
                    }
                }
            }
            // Two lists at this distance confirm each other.
            let asked = Instant::now();
            next = tokio::time::Instant::from(asked) + ASK_INTERVAL;
            let answer = tokio::select! {
                () = stop.cancelled() => return,
                answer = self.ask(asked, &mut kubelet, &mut read) => answer,
            };
            let fault = match &answer.holdings {
                Ok(holdings) => {
                    self.publish(holdings);
                    holdings.fault.as_ref()
                }
                Err(error) => Some(error),
            };
            let was_whole = std::mem::replace(&mut is_whole, fault.is_none());
            if let Some(error) = fault.filter(|_| was_whole) {
                tracing::warn!(
                    error,
                    "cannot read all pod allocations; mount the kubelet's pod-resources directory and \
                     name its parent with --kubelet-root-dir"
                );
            }
            self.answers.send_replace(Some(Arc::new(answer)));
        }
    }

    fn publish(&self, holdings: &Arc<Holdings>) {
        self.holdings.send_if_modified(|known| {
            let is_same = known
                .as_ref()
                .is_some_and(|one| one.says_the_same(holdings));
            // Stored also if nothing changed, because it is newer.
            *known = Some(holdings.clone());
            !is_same
        });
    }

    /// Whether the kubelet has allocated something since the last answer.
    async fn has_allocated(&self) -> bool {
        let known = self
            .answers
            .borrow()
            .as_ref()
            .and_then(|answer| answer.file);
        let now = self.checkpoint.file_id().await;
        now.is_some() && now != known
    }

    /// `read` is the checkpoint as it was read last.
    async fn ask(
        &self,
        asked: Instant,
        kubelet: &mut client::Lister,
        read: &mut Option<Checkpoint>,
    ) -> Answer {
        let before = self.checkpoint.file_id().await;
        let pods = match timeout(LIST_TIMEOUT, kubelet.pods()).await {
            Ok(pods) => pods,
            Err(_) => Err(format!("no answer within {LIST_TIMEOUT:?}")),
        };
        // After the list: what the kubelet allocated in between is in the checkpoint, and a device
        // that went over to another pod is seen as that pod's.
        let checkpoint = self.checkpoint.read(read.take()).await;
        *read = checkpoint.as_ref().ok().cloned().flatten();
        let known = self.holdings.borrow().clone();
        let holdings = Holdings::update(known.as_deref(), &pods, &checkpoint, &self.node, asked);
        let after = read.as_ref().map(|read| read.file);
        let owners = checkpoint.and_then(|read| match read {
            Some(read) => Ok(read.owners),
            None => Err(format!(
                "the kubelet's checkpoint {} does not exist",
                self.checkpoint.path().display()
            )),
        });
        Answer {
            asked,
            view: pods.map(|pods| Arc::new(View { pods, owners })),
            file: after.filter(|_| after == before),
            holdings: holdings.map(Arc::new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pools::checkpoint;
    use pools::config::ResourceName;

    #[tokio::test]
    async fn the_checkpoint_answers_while_the_kubelet_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let paths = NodePaths::all_in(dir.path());
        let pods = Arc::new(Pods::new(&Readers::default(), &paths, "n1".into()));
        tokio::spawn(pods.clone().run(CancellationToken::new()));
        let ask = || pods.holdings_of_now(Duration::from_secs(3));
        // Neither answers: unknown holdings are not the same as none.
        let checkpoint = dir.path().join(checkpoint::FILE);
        std::fs::create_dir(&checkpoint).unwrap();
        ask().await.unwrap_err();
        std::fs::remove_dir(&checkpoint).unwrap();
        // A kubelet that has never allocated anything has no checkpoint.
        ask().await.unwrap();
        let text = |uid: &str| {
            format!(
                r#"{{"Data": {{"PodDeviceEntries": [{{"PodUID": "{uid}", "ContainerName": "c",
                    "ResourceName": "rdma/a", "DeviceIDs": {{"-1": ["x"]}}}}]}}, "Checksum": 1}}"#
            )
        };
        let resource = ResourceName::parse("rdma/a").unwrap();
        for uid in ["u1", "u2"] {
            std::fs::write(dir.path().join(checkpoint::FILE), text(uid)).unwrap();
            let held = ask().await.unwrap();
            let (unit, holder) = held.of(&resource).next().unwrap();
            assert_eq!((unit, holder.pod.as_str()), ("x", uid));
        }
    }
}
