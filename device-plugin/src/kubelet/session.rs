//! Keeps one resource registered with the kubelet.
//!
//! One loop: bind a socket and serve it, because the kubelet dials back while it answers Register;
//! register; wait until
//!
//! - `kubelet.sock` is another file,
//! - our socket file is gone, or another file,
//! - the ListAndWatch stream ends, or none comes in [`Timing::stream`];
//!
//! drop the socket, and again. In a rolling update the stream of the new daemon ends when the old
//! daemon does: a kubelet knows connections by resource alone, and closes the newest one.
//!
//! It waits with back-off and jitter between attempts, or until another kubelet's socket appears. A
//! killed process leaves a socket file without a server; the next one removes it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::unit::PoolTag;
use kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use kubelet_api::deviceplugin::registration_client::RegistrationClient;
use kubelet_api::deviceplugin::{KUBELET_SOCKET, RegisterRequest, VERSION};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};

use super::directory::{Bound, Contents, Directory};
use super::service::{Plugin, Service, State};
use pools::config::ResourceName;

/// What the names of all our sockets begin with.
const SOCKET_PREFIX: &str = "rdma-";

/// Waits of a session. They are fields so that tests need not sit through them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Longest Register call; the kubelet dials back for up to 10 s inside it.
    pub register: Duration,
    /// How long the kubelet may take to open its stream after Register.
    pub stream: Duration,
    /// First wait after a failed attempt; doubles up to `back_off_max`.
    pub back_off: Duration,
    /// Longest wait between attempts. After a session that lasted longer, the first wait is the next.
    pub back_off_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            register: Duration::from_secs(15),
            stream: Duration::from_secs(10),
            back_off: Duration::from_millis(100),
            back_off_max: Duration::from_secs(10),
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
    /// What is served.
    pub plugin: Arc<Plugin>,
    /// The kubelet's device-plugins directory.
    pub directory: Directory,
    /// File name of our socket in it.
    pub socket: SocketName,
    /// Where the session reports how it is doing.
    pub state: watch::Sender<State>,
    /// Waits.
    pub timing: Timing,
    /// Ends the session.
    pub stop: CancellationToken,
}

/// File name of a socket: the same for a resource in every process up to a part that is the
/// process's own, so that a starting process never takes the socket of one that still serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SocketName {
    /// Length of the part that is the same.
    shared: usize,
    name: String,
}

impl SocketName {
    /// The name for a resource in the process known by `nonce`.
    ///
    /// Unix socket paths end at 107 bytes and resource names may have 317, so a hash stands for it.
    pub(crate) fn new(resource: &ResourceName, nonce: &str) -> Self {
        let shared = format!("{SOCKET_PREFIX}{}-", PoolTag::of(resource.as_str()));
        Self {
            shared: shared.len(),
            name: format!("{shared}{nonce}.sock"),
        }
    }

    /// The name as a file name.
    pub(crate) fn as_str(&self) -> &str {
        &self.name
    }

    /// Whether a file name is that of a socket of this program.
    pub(crate) fn is_ours(name: &str) -> bool {
        name.starts_with(SOCKET_PREFIX) && name.ends_with(".sock")
    }

    /// Whether a file name of ours is that of a socket for the same resource.
    pub(crate) fn is_same_resource(&self, name: &str) -> bool {
        self.name.get(..self.shared) == name.get(..self.shared)
    }
}

/// What a session does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Stop,
    /// Starts over at once: `kubelet.sock` was replaced.
    Again,
    /// Starts over after a pause.
    Pause,
}

/// A served socket.
struct Served {
    bound: Bound,
    streams: Arc<watch::Sender<usize>>,
    end: CancellationToken,
}

impl Session {
    /// Serves and registers until stopped, then removes the socket.
    pub(crate) async fn run(self) {
        let mut back_off = BackOff::new(self.timing);
        let mut kubelet = None;
        loop {
            let served = match self.serve().await {
                Ok(served) => served,
                Err(error) => {
                    self.failed(format!("serve {}: {error}", self.socket.as_str()));
                    if self.pause(back_off.next(), std::future::pending()).await == Next::Stop {
                        return;
                    }
                    continue;
                }
            };
            if served.bound.kubelet != kubelet {
                // Another kubelet, which has refused nothing yet.
                kubelet = served.bound.kubelet;
                back_off.reset();
            }
            let mut next = tokio::select! {
                () = self.stop.cancelled() => Next::Stop,
                next = self.changed(&served, true) => next,
                () = self.registered(&served) => Next::Pause,
            };
            self.state.send_modify(|state| {
                state.registered = false;
                state.streaming_since = None;
                state.listed = false;
            });
            served.end.cancel();
            let removed = self
                .directory
                .remove(self.socket.clone(), served.bound.id)
                .await;
            if let Err(error) = removed {
                let socket = self.socket.as_str();
                tracing::warn!(socket, %error, "cannot remove our socket");
            }
            if served.bound.at.elapsed() > self.timing.back_off_max {
                back_off.reset();
            }
            if next == Next::Pause {
                let changed = self.changed(&served, false);
                next = self.pause(back_off.next(), changed).await;
            }
            if next == Next::Stop {
                return;
            }
            tracing::debug!(resource = %self.plugin.resource, "registering again");
        }
    }

    /// Binds our socket and starts serving it.
    async fn serve(&self) -> std::io::Result<Served> {
        let (listener, bound) = self.directory.bind(self.socket.clone()).await?;
        let listener = UnixListener::from_std(listener)?;
        let end = CancellationToken::new();
        let streams = Arc::new(watch::Sender::new(0));
        let service = Service {
            plugin: self.plugin.clone(),
            streams: streams.clone(),
            end: end.clone(),
            state: self.state.clone(),
        };
        let server = Server::builder()
            .add_service(DevicePluginServer::new(service))
            .serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                end.clone().cancelled_owned(),
            );
        // Nothing waits for its end: units are unhealthy once it was asked to, and a process that
        // ends is to be followed soon.
        tokio::spawn(server);
        Ok(Served {
            bound,
            streams,
            end,
        })
    }

    /// Waits until the directory shows another kubelet, or that our socket is gone, if it should be
    /// there.
    async fn changed(&self, served: &Served, is_bound: bool) -> Next {
        let mut contents = self.directory.contents();
        let next = |seen: &Option<Contents>| {
            // What was read before does not have our socket yet.
            let seen = seen.as_ref().filter(|seen| seen.read > served.bound.at)?;
            let own = seen.ours.get(self.socket.as_str());
            if seen.kubelet.is_some() && seen.kubelet != served.bound.kubelet {
                return Some(Next::Again);
            }
            (is_bound && own != Some(&served.bound.id)).then_some(Next::Pause)
        };
        let seen = contents.wait_for(|seen| next(seen).is_some()).await;
        // The directory is watched as long as the daemon runs.
        seen.ok().and_then(|seen| next(&seen)).unwrap_or(Next::Stop)
    }

    /// Registers, and waits for the end of the stream that follows.
    async fn registered(&self, served: &Served) {
        if served.bound.kubelet.is_none() {
            return std::future::pending().await;
        }
        let (plugin, socket) = (&self.plugin, self.directory.path.join(KUBELET_SOCKET));
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: self.socket.as_str().into(),
            resource_name: plugin.resource.as_str().into(),
            // Kubelets ask for the options when they dial back, and ignore these.
            options: None,
        };
        let answer = timeout(self.timing.register, call_register(&socket, request)).await;
        let late = |_| Err(format!("no answer within {:?}", self.timing.register));
        if let Err(refused) = answer.unwrap_or_else(late) {
            let (resource, socket) = (&plugin.resource, socket.display());
            self.failed(format!("register {resource} on {socket}: {refused}"));
            return;
        }
        tracing::info!(resource = %plugin.resource, "registered with the kubelet");
        self.state.send_modify(|state| {
            state.registered = true;
            state.registrations += 1;
            state.last_error = None;
        });
        let mut streams = served.streams.subscribe();
        if timeout(self.timing.stream, streams.wait_for(|open| *open > 0))
            .await
            .is_err()
        {
            return self.note_no_stream();
        }
        self.state.send_modify(|state| {
            state.registrations_without_stream = 0;
            state.streaming_since = Some(Instant::now());
        });
        let _ = streams.wait_for(|open| *open == 0).await;
        tracing::info!(resource = %plugin.resource, "the kubelet's stream ended; registering again");
    }

    /// Waits before the next attempt, or until there is another kubelet.
    async fn pause(&self, wait: Duration, changed: impl Future<Output = Next>) -> Next {
        tokio::select! {
            () = self.stop.cancelled() => Next::Stop,
            () = sleep(wait) => Next::Pause,
            next = changed => next,
        }
    }

    /// The kubelet took the registration and then asked for nothing.
    fn note_no_stream(&self) {
        let resource = &self.plugin.resource;
        self.state
            .send_modify(|state| state.registrations_without_stream += 1);
        if self.state.borrow().registrations_without_stream == 1 {
            tracing::warn!(%resource, "{NO_STREAM}; registering again");
        } else {
            tracing::debug!(%resource, "{NO_STREAM}; registering again");
        }
    }

    fn failed(&self, error: String) {
        let resource = &self.plugin.resource;
        // The first failure is news, its repetitions are not.
        let news = self.state.borrow().last_error.as_ref() != Some(&error);
        if news {
            tracing::warn!(%resource, %error, "not registered; will try again");
        } else {
            tracing::debug!(%resource, %error, "not registered; will try again");
        }
        self.state.send_modify(|state| {
            state.failures += 1;
            state.last_error = Some(error);
        });
    }
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
