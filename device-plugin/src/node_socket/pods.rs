//! What the kubelet says of pods, asked as often as needed and no more often.
//!
//! What the kubelet said last is kept for [`VIEW_LIFETIME`], with the file that its checkpoint was
//! then. The kubelet writes another one at each allocation, so while the file is the same, a pod
//! whose units the checkpoint gives to the UID that is asked for has those and no others. It writes
//! none when a pod ends, hence the limit. Every other question is the kubelet's: of a pod that is
//! not among the known ones, or without a UID.
//!
//! One task calls the kubelet and reads its checkpoint, for questions and for the daemon's own picture
//! of who holds what. A call serves every question that arrived before it began, and none
//! that arrived later: a pod that was admitted a moment ago is in the list that its own question
//! causes. So any number of questions at once cost two calls at most. The task also calls a moment
//! after an allocation by this daemon: the pod's interfaces are asked about next, and a pod waits
//! for them. A question does not wait for that call: it makes its own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kubelet_api::client;
use node::file::FileId;
use node_wire::{Failure, FailureKind, Pod, PodUnits};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::answer::{self, View};
use crate::kubelet::allocated::{AllocatedUnits, AskedAt};
use crate::kubelet::checkpoint::{self, Kept};
use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// How long a question waits for the kubelet: less than its client waits for us, so that the client
/// learns who was late.
const KUBELET_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a call of the kubelet may take for those who asked late into the one before.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the kubelet's checkpoint may take to be read.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long after an allocation the kubelet is called: it admits the whole pod first, other plugins'
/// devices too, and a sandbox takes longer than that to make.
const ADMISSION_GRACE_PERIOD: Duration = Duration::from_millis(30);
/// How long what the kubelet said is answered from: a pod that ended meanwhile has no units any
/// more.
const VIEW_LIFETIME: Duration = Duration::from_secs(2);

/// How often who holds what is asked; it allows a hundred questions a second.
const ASK_INTERVAL: Duration = Duration::from_secs(15);
/// How long after it is wanted: the kubelet allocates a moment longer by the list before.
const ASKED_INTERVAL: Duration = Duration::from_millis(1200);
/// Longest wait for that answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// After this long what is known has been asked for since.
pub(crate) const UP_TO_DATE_INTERVAL: Duration = Duration::from_secs(20);

/// A question to the kubelet.
#[derive(Debug)]
struct Call {
    /// How long the kubelet may take.
    limit: Duration,
    reply: oneshot::Sender<Found>,
}

/// What a call found.
#[derive(Debug, Clone)]
struct Found {
    view: Result<Arc<View>, String>,
    allocated: Result<AllocatedUnits, String>,
}

/// What the kubelet said, and which file its checkpoint was before and after.
#[derive(Debug)]
struct Known {
    view: Arc<View>,
    file: FileId,
    /// When the kubelet was asked.
    asked: Instant,
}

type Shared = Arc<Mutex<Option<Known>>>;

/// Answers questions about pods.
#[derive(Debug)]
pub(crate) struct Pods {
    calls: mpsc::Sender<Call>,
    socket: PathBuf,
    checkpoint: Checkpoint,
    known: Shared,
}

/// Reads the kubelet's checkpoint.
#[derive(Debug, Clone)]
struct Checkpoint {
    reader: Arc<Reader>,
    directory: PathBuf,
}

impl Checkpoint {
    async fn file_id(&self) -> Option<FileId> {
        let directory = self.directory.clone();
        let read = self.reader.run(move || {
            hca::host::show(&directory);
            checkpoint::file_id(&directory)
        });
        read.await.ok().flatten()
    }

    async fn read(&self, known: Option<Kept>) -> Result<Option<Kept>, String> {
        let directory = self.directory.clone();
        let read = self.reader.run(move || {
            hca::host::show(&directory);
            checkpoint::read(&directory, known)
        });
        read.await.map_err(|late| late.to_string())?
    }
}

/// The task that calls the kubelet.
#[derive(Debug)]
pub(crate) struct Caller {
    calls: mpsc::Receiver<Call>,
    allocated: Arc<Notify>,
    kubelet: Kubelet,
}

#[derive(Debug)]
struct Kubelet {
    pods: client::Lister,
    checkpoint: Checkpoint,
    kept: Option<Kept>,
    known: Shared,
    node: String,
}

/// Nothing is answered before [`Caller::run`] runs. `node` is the node's name, which is in the names of
/// static pods; `allocated` is notified when this daemon has answered an Allocate.
pub(crate) fn pods(
    readers: &Readers,
    paths: &NodePaths,
    node: String,
    allocated: Arc<Notify>,
) -> (Pods, Caller) {
    let socket = client::socket(&paths.kubelet_root_dir);
    let (calls, asked) = mpsc::channel(16);
    let known = Shared::default();
    let what = "the read of the kubelet's checkpoint";
    let checkpoint = Checkpoint {
        reader: Arc::new(readers.reader("checkpoint", what, CHECKPOINT_TIMEOUT)),
        directory: paths.device_plugin_dir.clone(),
    };
    let pods = Pods {
        calls,
        socket: socket.clone(),
        checkpoint: checkpoint.clone(),
        known: known.clone(),
    };
    let caller = Caller {
        calls: asked,
        allocated,
        kubelet: Kubelet {
            pods: client::Lister::new(socket),
            checkpoint,
            kept: None,
            known,
            node,
        },
    };
    (pods, caller)
}

impl Pods {
    /// The units of a pod, HCAs not yet named.
    ///
    /// # Errors
    /// The kubelet did not answer, or its answer has no such pod.
    pub(crate) async fn units(&self, pod: &Pod) -> Result<PodUnits, Failure> {
        let what = format!("which devices pod {pod} has");
        self.ask(&what, self.find_units(pod)).await?
    }

    /// The pod that holds these units of a resource in one container.
    ///
    /// # Errors
    /// The kubelet did not answer, lists no such pod, or several.
    pub(crate) async fn holder(&self, resource: &str, ids: &[String]) -> Result<Pod, Failure> {
        let what = format!("which pod has {} of {resource}", ids.join(", "));
        let view = self.ask(&what, self.list()).await?;
        answer::holder(resource, ids, &view)
    }

    /// Waits for an answer of the kubelet, which is asked `what`.
    async fn ask<T>(
        &self,
        what: &str,
        answer: impl Future<Output = Result<T, String>>,
    ) -> Result<T, Failure> {
        let answer = tokio::time::timeout(KUBELET_TIMEOUT, answer).await;
        let answer =
            answer.unwrap_or_else(|_| Err(format!("no answer within {KUBELET_TIMEOUT:?}")));
        answer.map_err(|error| {
            let socket = self.socket.display();
            let message = format!("ask the kubelet at {socket} {what}: {error}");
            Failure::new(FailureKind::KubeletUnavailable, message)
        })
    }

    async fn find_units(&self, pod: &Pod) -> Result<Result<PodUnits, Failure>, String> {
        let view = match &pod.uid {
            Some(_) => self.unchanged().await,
            None => None,
        };
        let units = view.and_then(|view| answer::pod_units(pod, &view).ok());
        match units.filter(|units| units.uid_checked) {
            Some(units) => Ok(Ok(units)),
            None => Ok(answer::pod_units(pod, &*self.list().await?)),
        }
    }

    /// What the kubelet said a moment ago, if it has allocated nothing since.
    async fn unchanged(&self) -> Option<Arc<View>> {
        let (view, file) = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let known = known
                .as_ref()
                .filter(|known| known.asked.elapsed() < VIEW_LIFETIME)?;
            (known.view.clone(), known.file)
        };
        let now = self.checkpoint.file_id().await;
        (now == Some(file)).then_some(view)
    }

    /// Who holds what, by the kubelet and its checkpoint.
    ///
    /// # Errors
    /// What came back instead of an answer. Waits for the kubelet at most `limit`, and for the call
    /// under way.
    pub(crate) async fn allocated(&self, limit: Duration) -> Result<AllocatedUnits, String> {
        self.call(limit).await?.allocated
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    async fn list(&self) -> Result<Arc<View>, String> {
        self.call(CALL_TIMEOUT).await?.view
    }

    async fn call(&self, limit: Duration) -> Result<Found, String> {
        let stopping = || "the daemon is stopping".to_owned();
        let (reply, found) = oneshot::channel();
        let call = Call { limit, reply };
        self.calls.send(call).await.map_err(|_| stopping())?;
        found.await.map_err(|_| stopping())
    }
}

impl Caller {
    /// Calls the kubelet for each question, until all senders are gone.
    pub(crate) async fn run(self) {
        let Self {
            mut calls,
            allocated,
            mut kubelet,
        } = self;
        let mut ahead: Option<Instant> = None;
        loop {
            let call_ahead = async {
                match ahead {
                    Some(at) => {
                        tokio::time::sleep_until(at).await;
                        kubelet.call_ahead().await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                first = calls.recv() => match first {
                    Some(first) => {
                        let mut waiting = vec![first];
                        while let Ok(another) = calls.try_recv() {
                            waiting.push(another);
                        }
                        kubelet.serve(waiting).await;
                    }
                    None => return,
                },
                () = allocated.notified() => ahead = Some(Instant::now() + ADMISSION_GRACE_PERIOD),
                () = call_ahead => ahead = None,
            }
        }
    }
}

impl Kubelet {
    async fn serve(&mut self, mut waiting: Vec<Call>) {
        // Some have waited too long in the meantime.
        waiting.retain(|call| !call.reply.is_closed());
        let Some(limit) = waiting.iter().map(|call| call.limit).max() else {
            return;
        };
        let found = self.call(limit).await;
        for call in waiting {
            let _ = call.reply.send(found.clone());
        }
    }

    /// Calls unless a question did so meanwhile. A failure is for the next question to report.
    async fn call_ahead(&mut self) {
        let now = self.checkpoint.file_id().await;
        let known = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.as_ref().map(|known| known.file)
        };
        if now.is_some() && now != known {
            let _ = self.call(CALL_TIMEOUT).await;
        }
    }

    async fn call(&mut self, limit: Duration) -> Found {
        let asked = AskedAt::now();
        let before = self.checkpoint.file_id().await;
        let pods = match tokio::time::timeout(limit, self.pods.pods()).await {
            Ok(pods) => pods,
            Err(_) => Err(format!("no answer within {limit:?}")),
        };
        // After the list: what the kubelet allocated in between is in the checkpoint, and a device
        // that went over to another pod is seen as that pod's.
        let kept = self.checkpoint.read(self.kept.take()).await;
        self.kept = kept.as_ref().ok().cloned().flatten();
        let allocated = AllocatedUnits::of_call(&pods, &kept, &self.node, asked);
        let owners = kept.and_then(|kept| match kept {
            Some(kept) => Ok(kept.owners),
            None => Err(format!(
                "the kubelet's checkpoint {} does not exist",
                self.checkpoint.directory.join(checkpoint::FILE).display()
            )),
        });
        let view = pods.map(|pods| Arc::new(View { pods, owners }));
        let after = self.kept.as_ref().map(|kept| kept.file);
        let known = after.filter(|after| before == Some(*after));
        let known = known.zip(view.as_ref().ok());
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) =
            known.map(|(file, view)| Known {
                view: view.clone(),
                file,
                asked: asked.at.into(),
            });
        Found { view, allocated }
    }
}

/// Asks every now and then, and a moment after `ask` is notified, until `stop`.
pub(crate) async fn keep_asking(
    pods: Arc<Pods>,
    allocated: watch::Sender<Option<Arc<AllocatedUnits>>>,
    ask: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        match pods.allocated(ANSWER_TIMEOUT).await {
            Ok(held) => {
                failing = false;
                allocated.send_if_modified(|known| {
                    let held = held.with_names_of(known.as_deref());
                    let same = known
                        .as_ref()
                        .is_some_and(|known| known.says_the_same(&held));
                    // Stored also if nothing changed, because it is newer.
                    *known = Some(Arc::new(held));
                    !same
                });
            }
            Err(error) if !failing => {
                tracing::info!(
                    socket = %pods.socket().display(), error,
                    "cannot read pod allocations; mount the kubelet's pod-resources directory and name \
                     its parent with --kubelet-root-dir"
                );
                failing = true;
            }
            Err(_) => {}
        }
        let wait = async {
            tokio::select! {
                () = ask.notified() => tokio::time::sleep(ASKED_INTERVAL).await,
                () = tokio::time::sleep(ASK_INTERVAL) => {}
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = wait => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ResourceName;

    #[tokio::test]
    async fn the_checkpoint_answers_while_the_kubelet_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let paths = NodePaths::all_in(dir.path());
        let (pods, caller) = super::pods(&Readers::default(), &paths, "n1".into(), Arc::default());
        tokio::spawn(caller.run());
        let ask = || pods.allocated(Duration::from_secs(1));
        // Neither answers: unknown holdings are not the same as none.
        ask().await.unwrap_err();
        let text = |uid: &str| {
            format!(
                r#"{{"Data": {{"PodDeviceEntries": [{{"PodUID": "{uid}", "ContainerName": "c",
                    "ResourceName": "rdma/a", "DeviceIDs": ["x"]}}]}}, "Checksum": 1}}"#
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
