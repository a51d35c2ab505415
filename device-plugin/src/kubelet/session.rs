//! Keeps one resource registered with the kubelet.
//!
//! It serves first, because the kubelet dials back while it answers Register. It registers again when:
//!
//! - `kubelet.sock` is another file;
//! - our socket file is gone, or another file (a new one is made and served);
//! - no ListAndWatch stream comes, or the last one ends;
//! - a socket of another process for this resource goes away. In a rolling update the old daemon's
//!   stream ends after the new one registered, and the kubelet then marks the resource unhealthy.
//!
//! It waits for an absent kubelet with back-off and jitter, or until its socket appears. A killed
//! process leaves a socket file without a server; the next one removes it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::unit::PoolTag;
use kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use kubelet_api::deviceplugin::registration_client::RegistrationClient;
use kubelet_api::deviceplugin::{KUBELET_SOCKET, RegisterRequest, VERSION};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};

use super::directory::{Contents, SocketId};
use super::service::{AllocationCounts, Feed, Requests, Service, State};
use crate::config::ResourceName;

/// What the names of all our sockets begin with.
pub(crate) const SOCKET_PREFIX: &str = "rdma-";

/// Waits of a session. They are fields so that tests need not sit through them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Longest Register call; the kubelet dials back for up to 10 s inside it.
    pub register: Duration,
    /// First wait after a failed attempt; doubles up to `back_off_max`.
    pub back_off: Duration,
    /// Longest wait between attempts.
    pub back_off_max: Duration,
    /// How long the kubelet may take to open its stream after Register.
    pub stream: Duration,
    /// How long to wait, once the last stream ended, for what a restarting kubelet does next.
    pub settle: Duration,
    /// Least time between two registrations that nothing but a lost stream asks for.
    pub spacing: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            register: Duration::from_secs(15),
            back_off: Duration::from_millis(100),
            back_off_max: Duration::from_secs(10),
            stream: Duration::from_secs(10),
            settle: Duration::from_millis(300),
            spacing: Duration::from_secs(1),
        }
    }
}

/// What it means when the kubelet opens no stream. Kubelets before 1.26 send the socket's path as
/// the authority of their requests, which HTTP/2 does not allow (RFC 9113 8.3.1) and h2 refuses
/// before any code of ours is called; kubernetes/kubernetes#112597 ended that.
pub(crate) const NO_STREAM: &str = "the kubelet took the registration, but asks for no units: kubelets \
    before 1.26 cannot, update the node; a newer one says why in its own log";

/// What a session is about; all of it lives as long as the resource is configured.
#[derive(Debug)]
pub(crate) struct Session {
    /// The resource.
    pub resource: ResourceName,
    /// The kubelet's device-plugins directory.
    pub directory: PathBuf,
    /// File name of our socket in it.
    pub socket: SocketName,
    /// What is in that directory.
    pub contents: watch::Receiver<Contents>,
    /// What is sent to the kubelet.
    pub feed: Feed,
    /// Where the session reports how it is doing.
    pub state: watch::Sender<State>,
    /// Counters of Allocate.
    pub allocations: Arc<AllocationCounts>,
    /// Whether units are whole HCAs.
    pub exclusive: bool,
    /// What is asked of the daemon.
    pub requests: Requests,
    /// Waits.
    pub timing: Timing,
    /// Ends the session.
    pub stop: CancellationToken,
}

/// File name of a socket: the same for a resource in every process up to a part that is the
/// process's own, so that a starting process never takes the socket of one that still serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SocketName {
    shared: String,
    name: String,
}

impl SocketName {
    /// The name for a resource in the process known by `nonce`.
    ///
    /// Unix socket paths end at 107 bytes and resource names may have 317, so a hash stands for it.
    pub(crate) fn new(resource: &ResourceName, nonce: &str) -> Self {
        let shared = format!("{SOCKET_PREFIX}{}-", PoolTag::of(resource.as_str()));
        let name = format!("{shared}{nonce}.sock");
        Self { shared, name }
    }

    /// The name as a file name.
    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    /// Sockets of other processes for the same resource.
    fn siblings(&self, contents: &Contents) -> BTreeSet<String> {
        contents
            .ours
            .iter()
            .filter(|name| name.starts_with(&self.shared) && **name != self.name)
            .cloned()
            .collect()
    }
}

/// Why a registered session has to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Asked to stop.
    Stop,
    /// The server ended or its socket file is gone.
    SocketGone,
    /// `kubelet.sock` was replaced.
    KubeletRestarted,
    /// No stream came since the registration.
    NoStream,
    /// The last stream ended.
    StreamEnded,
    /// Another process's socket for this resource went away.
    SiblingGone,
}

/// A served socket.
struct Served {
    path: PathBuf,
    id: SocketId,
    end: CancellationToken,
    /// Cancelled and replaced to end the streams while the server stays.
    streams: Arc<watch::Sender<usize>>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Session {
    /// Serves and registers until stopped, then removes the socket.
    pub(crate) async fn run(mut self) {
        let mut back_off = BackOff::new(self.timing);
        loop {
            let mut served = match self.serve() {
                Ok(served) => served,
                Err(error) => {
                    self.failed(format!("serve {}: {error}", self.socket.as_str()));
                    if self.pause(back_off.next()).await == Trouble::Stop {
                        return;
                    }
                    continue;
                }
            };
            let served_at = tokio::time::Instant::now();
            let stop = self.keep_registered(&mut served, &mut back_off).await == Trouble::Stop;
            shut_down(&served);
            // A tenth: a kubelet that restarts deletes our socket, and is waiting.
            let rest = (self.timing.spacing / 10).saturating_sub(served_at.elapsed());
            if stop || (!rest.is_zero() && self.pause(rest).await == Trouble::Stop) {
                return;
            }
        }
    }

    /// Binds our socket and starts serving it.
    fn serve(&self) -> std::io::Result<Served> {
        let path = self.directory.join(self.socket.as_str());
        self.sweep();
        let listener = UnixListener::bind(&path)?;
        let id = SocketId::of(&path).ok_or(std::io::ErrorKind::NotFound)?;
        let end = CancellationToken::new();
        let streams = Arc::new(watch::Sender::new(0));
        let service = Service {
            exclusive: self.exclusive,
            feed: self.feed.clone(),
            streams: streams.clone(),
            end: end.clone(),
            allocations: self.allocations.clone(),
            requests: self.requests.clone(),
            allocated_nodes: Arc::default(),
            directory: self.directory.clone(),
            state: self.state.clone(),
        };
        let server = Server::builder()
            .add_service(DevicePluginServer::new(service))
            .serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                end.clone().cancelled_owned(),
            );
        Ok(Served {
            path,
            id,
            end,
            streams,
            task: tokio::spawn(server),
        })
    }

    /// Removes what earlier processes left of this resource: sockets without a server.
    fn sweep(&self) {
        let entries = std::fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten();
        for entry in entries {
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|name| {
                name.starts_with(&self.socket.shared) && name.ends_with(".sock")
            });
            if !ours || SocketId::of(&entry.path()).is_none() {
                continue;
            }
            let own = name.to_str() == Some(self.socket.as_str());
            let dead = || {
                std::os::unix::net::UnixStream::connect(entry.path())
                    .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
            };
            if own || dead() {
                tracing::debug!(socket = %entry.path().display(), "removing a socket without a server");
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Registers, and again whenever the registration is lost, until the socket is or `stop`.
    async fn keep_registered(&mut self, served: &mut Served, back_off: &mut BackOff) -> Trouble {
        // The socket of the kubelet that the last failures are about.
        let mut failed_on = None;
        loop {
            let siblings = self.siblings();
            // Not from the last read of the directory, which may be older than the socket that is
            // about to be called: news of it would pass for a restart, and cost a second
            // registration.
            let kubelet = self.kubelet();
            // What happened before this point wakes no task any more, so it is checked.
            if SocketId::of(&served.path) != Some(served.id) {
                return Trouble::SocketGone;
            }
            if kubelet != failed_on {
                // Another kubelet, which has refused nothing yet.
                back_off.reset();
            }
            let registered = tokio::time::Instant::now();
            match self.register(served, kubelet).await {
                Ok(()) => {
                    back_off.reset();
                    failed_on = None;
                }
                Err(Attempt::Interrupted(trouble)) => match trouble {
                    Trouble::Stop | Trouble::SocketGone => return trouble,
                    _ => continue,
                },
                Err(Attempt::Failed(error)) => {
                    failed_on = kubelet;
                    self.failed(error);
                    match self.wait_to_retry(served, back_off.next()).await {
                        Some(trouble) => return trouble,
                        None => continue,
                    }
                }
            }
            let trouble = self.watch_over(served, kubelet, &siblings).await;
            self.state.send_modify(|state| {
                state.registered = false;
                state.streaming_since = None;
                state.listed = false;
            });
            match trouble {
                Trouble::Stop => return trouble,
                Trouble::SocketGone | Trouble::SiblingGone => {
                    tracing::info!(resource = %self.resource, reason = ?trouble, "serving anew");
                    return trouble;
                }
                Trouble::KubeletRestarted => {
                    tracing::info!(resource = %self.resource, reason = ?trouble, "registering again");
                }
                Trouble::StreamEnded => {
                    tracing::info!(resource = %self.resource, reason = ?trouble, "registering again");
                    // A kubelet that ends each stream at once is not asked in a storm; one that
                    // restarts is answered at once, because its new socket cuts this short.
                    let rest = self.timing.spacing.saturating_sub(registered.elapsed());
                    if let Some(trouble) = self.wait_to_retry(served, rest).await {
                        return trouble;
                    }
                }
                Trouble::NoStream => self.note_no_stream(),
            }
        }
    }

    /// Sockets of other processes for this resource.
    ///
    /// What `sweep` removed may still be in the last read of the directory; its going away would
    /// pass for the end of a process that the kubelet knew, and cost a second registration.
    fn siblings(&mut self) -> BTreeSet<String> {
        let mut siblings = self.socket.siblings(&self.contents.borrow_and_update());
        siblings.retain(|name| SocketId::of(&self.directory.join(name)).is_some());
        siblings
    }

    /// The kubelet's socket as it is now.
    fn kubelet(&self) -> Option<SocketId> {
        SocketId::of(&self.directory.join(KUBELET_SOCKET))
    }

    /// One Register call, given up when the directory shows that it cannot succeed any more.
    async fn register(
        &mut self,
        served: &Served,
        kubelet: Option<SocketId>,
    ) -> Result<(), Attempt> {
        let socket = self.directory.join(KUBELET_SOCKET);
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: self.socket.as_str().into(),
            resource_name: self.resource.as_str().into(),
            // Kubelets ask for the options when they dial back, and ignore these.
            options: None,
        };
        let call = tokio::time::timeout(self.timing.register, call_register(&socket, request));
        tokio::pin!(call);
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return Err(Attempt::Interrupted(Trouble::Stop)),
                changed = self.contents.changed() => {
                    if changed.is_err() || self.stop.is_cancelled() {
                        return Err(Attempt::Interrupted(Trouble::Stop));
                    }
                    if SocketId::of(&served.path) != Some(served.id) {
                        return Err(Attempt::Interrupted(Trouble::SocketGone));
                    }
                    if self.kubelet() != kubelet {
                        return Err(Attempt::Interrupted(Trouble::KubeletRestarted));
                    }
                }
                answer = &mut call => {
                    let refused = match answer {
                        Ok(Ok(())) => {
                            tracing::info!(resource = %self.resource, "registered with the kubelet");
                            self.state.send_modify(|state| {
                                state.registered = true;
                                state.registrations += 1;
                                state.last_error = None;
                            });
                            return Ok(());
                        }
                        Ok(Err(error)) => error,
                        Err(_) => format!("no answer within {:?}", self.timing.register),
                    };
                    return Err(Attempt::Failed(format!(
                        "register {} on {}: {refused}", self.resource, socket.display()
                    )));
                }
            }
        }
    }

    /// Waits before the next attempt; what happens in the directory cuts it short.
    async fn wait_to_retry(&mut self, served: &Served, wait: Duration) -> Option<Trouble> {
        let sleep = tokio::time::sleep(wait);
        tokio::pin!(sleep);
        let kubelet = self.contents.borrow().kubelet;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return Some(Trouble::Stop),
                () = &mut sleep => return None,
                changed = self.contents.changed() => {
                    if changed.is_err() {
                        return Some(Trouble::Stop);
                    }
                    if SocketId::of(&served.path) != Some(served.id) {
                        return Some(Trouble::SocketGone);
                    }
                    let now = self.contents.borrow().kubelet;
                    if now.is_some() && now != kubelet {
                        return None;
                    }
                }
            }
        }
    }

    /// Watches a registered session until something is wrong with it.
    async fn watch_over(
        &mut self,
        served: &mut Served,
        kubelet: Option<SocketId>,
        siblings: &BTreeSet<String>,
    ) -> Trouble {
        let mut streams = served.streams.subscribe();
        // Those from before the registration, and those that came during it.
        let mut siblings = siblings.clone();
        siblings.extend(self.siblings());
        let mut without = Trouble::NoStream;
        // The deadline for a stream to come, while there is none.
        let mut deadline = Some(tokio::time::Instant::now() + self.timing.stream);
        loop {
            let open = *streams.borrow_and_update();
            if open > 0 {
                deadline = None;
                without = Trouble::StreamEnded;
                self.state.send_if_modified(|state| {
                    let news = state.streaming_since.is_none();
                    state.registrations_without_stream = 0;
                    state.streaming_since.get_or_insert_with(Instant::now);
                    news
                });
            } else if deadline.is_none() {
                deadline = Some(tokio::time::Instant::now() + self.timing.settle);
                self.state.send_modify(|state| {
                    state.streaming_since = None;
                    state.listed = false;
                });
            }
            let waiting = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => return Trouble::Stop,
                () = waiting => return without,
                _ = streams.changed() => {}
                _ = &mut served.task => return Trouble::SocketGone,
                changed = self.contents.changed() => {
                    if changed.is_err() {
                        return Trouble::Stop;
                    }
                    if SocketId::of(&served.path) != Some(served.id) {
                        return Trouble::SocketGone;
                    }
                    let present = self.kubelet();
                    if present.is_some() && present != kubelet {
                        return Trouble::KubeletRestarted;
                    }
                    let now = self.socket.siblings(&self.contents.borrow_and_update());
                    if siblings.iter().any(|name| !now.contains(name)) {
                        return Trouble::SiblingGone;
                    }
                    siblings = now;
                }
            }
        }
    }

    async fn pause(&self, wait: Duration) -> Trouble {
        tokio::select! {
            () = self.stop.cancelled() => Trouble::Stop,
            () = tokio::time::sleep(wait) => Trouble::SocketGone,
        }
    }

    /// The kubelet took the registration and then asked for nothing.
    fn note_no_stream(&self) {
        self.state
            .send_modify(|state| state.registrations_without_stream += 1);
        if self.state.borrow().registrations_without_stream == 1 {
            tracing::warn!(resource = %self.resource, "{NO_STREAM}; registering again");
        } else {
            tracing::debug!(resource = %self.resource, "{NO_STREAM}; registering again");
        }
    }

    fn failed(&self, error: String) {
        // The first failure is news, its repetitions are not.
        let news = self.state.borrow().last_error.as_ref() != Some(&error);
        if news {
            tracing::warn!(resource = %self.resource, %error, "not registered; will try again");
        } else {
            tracing::debug!(resource = %self.resource, %error, "not registered; will try again");
        }
        self.state.send_modify(|state| {
            state.failures += 1;
            state.last_error = Some(error);
        });
    }
}

/// Ends the streams, and removes the socket file if it is still ours. Nothing waits for open calls:
/// units are unhealthy from now on, and a process that ends is to be followed soon.
fn shut_down(served: &Served) {
    served.end.cancel();
    if SocketId::of(&served.path) == Some(served.id)
        && let Err(error) = std::fs::remove_file(&served.path)
    {
        tracing::warn!(socket = %served.path.display(), %error, "cannot remove our socket");
    }
}

/// Why one registration attempt ended without success.
enum Attempt {
    Failed(String),
    Interrupted(Trouble),
}

async fn call_register(socket: &Path, request: RegisterRequest) -> Result<(), String> {
    // tonic's own connector for unix sockets; the authority it sends is "localhost".
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .map_err(|error| error.to_string())?;
    let channel = endpoint
        .connect()
        .await
        .map_err(|error| kubelet_api::root_cause(&error))?;
    let answer = RegistrationClient::new(channel).register(request).await;
    answer
        .map(drop)
        .map_err(|status| format!("{:?}: {}", status.code(), status.message()))
}

/// Doubling waits with jitter, so that the sessions of a node do not knock in step.
#[derive(Debug)]
struct BackOff {
    timing: Timing,
    next: Duration,
}

impl BackOff {
    fn new(timing: Timing) -> Self {
        Self {
            timing,
            next: timing.back_off,
        }
    }

    /// The next wait: between half and all of the present step.
    fn next(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.timing.back_off_max);
        let random = node::random::random64() % 512;
        let share = u32::try_from(random).unwrap_or_default();
        step / 2 + step / 1024 * share
    }

    fn reset(&mut self) {
        self.next = self.timing.back_off;
    }
}

#[cfg(test)]
mod tests;
