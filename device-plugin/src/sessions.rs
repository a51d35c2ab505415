//! The sessions of all configured resources: started, fed, and ended with them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ResourceName};
use crate::kubelet::directory::Contents;
use crate::kubelet::service::{AllocationCounts, Requests, State};
use crate::kubelet::session::{Session, SocketName, Timing};
use crate::report::Pool;
use crate::snapshot::Snapshot;

/// What all sessions of a process have in common.
#[derive(Debug, Clone)]
pub(crate) struct Common {
    /// The kubelet's device-plugins directory.
    pub directory: PathBuf,
    /// What is in it.
    pub contents: watch::Receiver<Contents>,
    /// What distinguishes this process's sockets from those of another one.
    pub nonce: String,
    /// Waits.
    pub timing: Timing,
    /// What is asked of the daemon.
    pub requests: Requests,
}

/// Sessions by resource.
#[derive(Debug)]
pub(crate) struct Sessions {
    common: Common,
    running: BTreeMap<ResourceName, Running>,
    /// Resources of optional pools whose sessions start with their first HCA, and whether each is
    /// exclusive: the kubelet does not hear of a resource that this node does not have.
    waiting: BTreeMap<ResourceName, bool>,
    tasks: JoinSet<()>,
}

/// One session, seen from outside.
#[derive(Debug)]
struct Running {
    feed: watch::Sender<Option<Arc<Snapshot>>>,
    state: watch::Receiver<State>,
    allocations: Arc<AllocationCounts>,
    exclusive: bool,
    stop: CancellationToken,
}

impl Sessions {
    /// No session yet.
    pub(crate) fn new(common: Common) -> Self {
        Self {
            common,
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Ends the sessions of resources that are not configured any more and starts those that are
    /// new. A session goes on when only its pool changed, unless it has to report another option to
    /// the kubelet, which kubelets ask for at registration alone.
    pub(crate) fn follow(&mut self, config: &Config) {
        self.running.retain(|resource, running| {
            let pool = config.pools.iter().find(|pool| pool.resource == *resource);
            let stays = pool.is_some_and(|p| p.sharing.is_shared() != running.exclusive);
            if !stays {
                tracing::info!(%resource, configured = pool.is_some(), "ending the session");
                running.stop.cancel();
            }
            stays
        });
        self.waiting.clear();
        for pool in &config.pools {
            let exclusive = !pool.sharing.is_shared();
            if self.running.contains_key(&pool.resource) {
                continue;
            }
            if pool.optional {
                self.waiting.insert(pool.resource.clone(), exclusive);
            } else {
                self.start(&pool.resource, exclusive);
            }
        }
    }

    fn start(&mut self, resource: &ResourceName, exclusive: bool) {
        let feed = watch::Sender::new(None);
        let state = watch::Sender::new(State::default());
        let running = Running {
            state: state.subscribe(),
            allocations: Arc::default(),
            exclusive,
            stop: CancellationToken::new(),
            feed,
        };
        let session = Session {
            resource: resource.clone(),
            directory: self.common.directory.clone(),
            socket: SocketName::new(resource, &self.common.nonce),
            contents: self.common.contents.clone(),
            feed: running.feed.subscribe(),
            state,
            allocations: running.allocations.clone(),
            exclusive,
            requests: self.common.requests.clone(),
            timing: self.common.timing,
            stop: running.stop.clone(),
        };
        self.tasks.spawn(session.run());
        self.running.insert(resource.clone(), running);
    }

    /// Gives each session its snapshot.
    pub(crate) fn show(&mut self, snapshots: &[Arc<Snapshot>]) {
        for snapshot in snapshots {
            let mut members = snapshot.members().iter();
            if members.any(|member| !member.waits_for_kubelet())
                && let Some(exclusive) = self.waiting.remove(snapshot.resource())
            {
                self.start(snapshot.resource(), exclusive);
            }
            let Some(running) = self.running.get(snapshot.resource()) else {
                continue;
            };
            running.feed.send_if_modified(|shown| {
                let same = shown
                    .as_ref()
                    .is_some_and(|shown| Arc::ptr_eq(shown, snapshot));
                *shown = Some(snapshot.clone());
                !same
            });
        }
    }

    /// How the session of a resource is doing, once there is one.
    pub(crate) fn report(&self, resource: &ResourceName) -> Option<Pool> {
        let running = self.running.get(resource)?;
        Some(Pool {
            resource: resource.clone(),
            snapshot: running.feed.borrow().clone(),
            session: running.state.clone(),
            allocations: running.allocations.clone(),
        })
    }

    /// Waits for a session that ended; `None` while there is none at all.
    pub(crate) async fn ended(&mut self) -> Option<()> {
        self.tasks.join_next().await.map(drop)
    }

    /// Ends all sessions: streams end, sockets are removed.
    pub(crate) async fn end(mut self) {
        self.running
            .values()
            .for_each(|running| running.stop.cancel());
        while self.tasks.join_next().await.is_some() {}
    }
}
