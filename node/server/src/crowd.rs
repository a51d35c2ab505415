//! Connections of a listener: a bounded number at a time, each for one question. When all are in use,
//! the one that has waited longest for its question is closed, so that clients which hang keep none
//! from an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::net::Listener;

/// The most connections at a time. More wait in the listener's backlog.
pub(crate) const MAX_CONNECTIONS: usize = 32;
/// How long a connection may take to ask while all are in use.
const CROWDED_TIMEOUT: Duration = Duration::from_millis(200);
/// How long to wait after a failed accept, which is out of file descriptors.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Whether a connection's question is there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked(Arc<AtomicBool>);

impl Asked {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Crowd {
    tasks: JoinSet<()>,
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    since: Instant,
    asked: Asked,
    task: AbortHandle,
}

impl Crowd {
    /// Serves until it is dropped. Connections that are open then stay open. `converse` is for each of
    /// them.
    pub(crate) async fn serve<L: Listener, F: Future<Output = ()> + Send + 'static>(
        &mut self,
        listener: &mut L,
        mut converse: impl FnMut(L::Io, Asked) -> F,
    ) {
        loop {
            self.open.retain(|one| !one.task.is_finished());
            let room = self.open.len() < MAX_CONNECTIONS;
            let idle = self.idle().and_then(|idle| self.open.get(idle));
            let due = idle
                .filter(|_| !room)
                .map(|one| one.since + CROWDED_TIMEOUT);
            tokio::select! {
                accepted = listener.accept(), if room => match accepted {
                    Ok((stream, _)) => {
                        let asked = Asked::default();
                        let task = self.tasks.spawn(converse(stream, asked.clone()));
                        self.open.push(Open { since: Instant::now(), asked, task });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        // The descriptor of one that hangs may serve another.
                        self.close_idle();
                        sleep(ACCEPT_RETRY_INTERVAL).await;
                    }
                },
                Some(_) = self.tasks.join_next() => {}
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.close_idle(),
            }
        }
    }

    /// Waits for the answers to questions that have been asked.
    pub(crate) async fn drain(mut self) {
        let silent = self.open.iter().filter(|one| one.is_silent());
        silent.for_each(|one| one.task.abort());
        while self.tasks.join_next().await.is_some() {}
    }

    /// The connection that has waited longest for its question: the others were opened after it.
    fn idle(&self) -> Option<usize> {
        self.open.iter().position(Open::is_silent)
    }

    fn close_idle(&mut self) {
        if let Some(idle) = self.idle() {
            self.open.remove(idle).task.abort();
        }
    }
}

impl Open {
    fn is_silent(&self) -> bool {
        !self.asked.0.load(Ordering::Relaxed) && !self.task.is_finished()
    }
}
