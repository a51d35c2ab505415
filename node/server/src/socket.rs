//! A unix socket on which programs of the node ask one question a connection.
//!
//! What is asked and answered is `node-wire`'s. Here, in reading order:
//! - [`place`]: the directory and the socket file;
//! - [`connections`]: who may ask, and how long it may take.
//!
//! A socket that cannot be made does not stop its program: it is tried again, and the reason is in
//! [`State`] and in the log.

pub mod connections;
pub mod place;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;

use connections::{Answers, Connections};
pub use place::SocketId;
use place::{Bound, Present, SocketPath};

/// How often the socket's file is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait before a socket that cannot be made is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// How long another server may take to accept a connection before it counts as alive but busy.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// How the socket is doing, for the report.
#[derive(Debug, Clone)]
pub struct NodeSocket {
    pub path: PathBuf,
    /// Whether it listens, or why not.
    pub state: watch::Receiver<State>,
}

impl NodeSocket {
    /// Of a socket at `path` that has not been made yet, and where its state is set.
    #[must_use]
    pub fn new(path: PathBuf) -> (Self, watch::Sender<State>) {
        let state = watch::Sender::new(State::default());
        let socket = Self {
            path,
            state: state.subscribe(),
        };
        (socket, state)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Starting,
    /// It listens at its place.
    Listening,
    /// Another daemon has the place, as in a rollout.
    Displaced,
    /// It cannot be made, for this reason.
    Failed(String),
}

impl State {
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Listening => "listening",
            Self::Displaced => "displaced",
            Self::Failed(_) => "failed",
        }
    }
}

#[derive(Debug)]
pub struct Socket<A> {
    pub path: PathBuf,
    /// The flag that names another path, for messages.
    pub flag: &'static str,
    /// Distinguishes this process from another one in the names of files.
    pub nonce: String,
    /// Where its state is set.
    pub state: watch::Sender<State>,
    /// Who may ask, and who answers.
    pub connections: Connections<A>,
}

impl<A: Answers> Socket<A> {
    /// Makes the socket and serves it, again and again, until `stop`; then answers what was asked
    /// before.
    pub async fn serve(mut self, stop: &CancellationToken) {
        self.run(stop).await;
        self.connections.drain().await;
    }

    async fn run(&mut self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            match self.bind().await {
                Ok((mut listener, bound)) => {
                    self.set(State::Listening);
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = self.connections.serve(&mut listener) => {}
                        () = lost(&bound, &self.path, &self.state) => {}
                    }
                    bound.remove();
                }
                Err(error) => {
                    self.set(State::Failed(error));
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = tokio::time::sleep(RETRY_INTERVAL) => {}
                    }
                }
            }
        }
    }

    async fn bind(&self) -> Result<(UnixListener, Bound), String> {
        let place = SocketPath {
            path: self.path.clone(),
            flag: self.flag,
        };
        let nonce = self.nonce.clone();
        let (listener, bound) = tokio::task::spawn_blocking(move || place.bind(&nonce))
            .await
            .map_err(|error| error.to_string())??;
        listener
            .set_nonblocking(true)
            .and_then(|()| UnixListener::from_std(listener))
            .map(|listener| (listener, bound))
            .map_err(|error| format!("serve {}: {error}", self.path.display()))
    }

    fn set(&self, new: State) {
        let path = self.path.display();
        self.state.send_if_modified(|state| {
            if *state == new {
                return false;
            }
            match &new {
                State::Failed(error) => tracing::error!(
                    error,
                    "programs of this node cannot ask; trying again every {} s",
                    RETRY_INTERVAL.as_secs()
                ),
                _ => tracing::info!(socket = %path, "serving the node's socket"),
            }
            *state = new;
            true
        });
    }
}

/// Returns when the socket's place is empty, or has a socket without a listener. A place that
/// a newer daemon has is that daemon's.
async fn lost(bound: &Bound, path: &Path, state: &watch::Sender<State>) {
    let mut checks = tokio::time::interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        checks.tick().await;
        let now = match bound.present() {
            Present::Own => State::Listening,
            Present::Another if is_alive(path).await => State::Displaced,
            Present::Another => {
                tracing::warn!(socket = %path.display(), "the server that had the node's socket is gone");
                return;
            }
            Present::Nothing => {
                tracing::warn!(socket = %path.display(), "the node's socket was removed");
                return;
            }
        };
        state.send_if_modified(|state| {
            if *state == now {
                return false;
            }
            tracing::info!(socket = %path.display(), state = ?now, "the node's socket");
            *state = now;
            true
        });
    }
}

/// Whether some process listens. A full backlog is that of a process.
async fn is_alive(path: &Path) -> bool {
    match timeout(PROBE_TIMEOUT, UnixStream::connect(path)).await {
        Ok(Err(error)) => error.kind() == std::io::ErrorKind::WouldBlock,
        Ok(Ok(_)) | Err(_) => true,
    }
}
