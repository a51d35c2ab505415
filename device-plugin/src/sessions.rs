//! The sessions of all configured resources: started, fed, and ended with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::kubelet::directory::Directory;
use crate::kubelet::service::{Helpers, Plugin, State, asks_before_start};
use crate::kubelet::session::{Session, SocketName, Timing};
use crate::report::Pool;
use pools::config::{Config, ResourceName};
use pools::snapshot::Snapshot;

/// Sessions by resource.
#[derive(Debug)]
pub(crate) struct Sessions {
    /// The kubelet's device-plugins directory.
    directory: Directory,
    /// What distinguishes this process's sockets from those of another one.
    nonce: String,
    helpers: Arc<Helpers>,
    running: BTreeMap<ResourceName, Running>,
    /// Resources of optional pools whose sessions start with their first HCA, and whether the kubelet
    /// has to ask before each start of a container. It does not hear of a resource that this node does
    /// not have.
    waiting: BTreeMap<ResourceName, bool>,
    tasks: JoinSet<()>,
}

/// One session, seen from outside.
#[derive(Debug)]
struct Running {
    feed: watch::Sender<Option<Arc<Snapshot>>>,
    state: watch::Receiver<State>,
    plugin: Arc<Plugin>,
    stop: CancellationToken,
}

impl Sessions {
    /// No session yet.
    pub(crate) fn new(directory: Directory, nonce: String, helpers: Arc<Helpers>) -> Self {
        Self {
            directory,
            nonce,
            helpers,
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
            let stays = pool
                .is_some_and(|pool| asks_before_start(pool) == running.plugin.asks_before_start);
            if !stays {
                tracing::info!(%resource, configured = pool.is_some(), "ending the session");
                running.stop.cancel();
            }
            stays
        });
        self.waiting.clear();
        for pool in &config.pools {
            let asks = asks_before_start(pool);
            if self.running.contains_key(&pool.resource) {
                continue;
            }
            if pool.optional {
                self.waiting.insert(pool.resource.clone(), asks);
            } else {
                self.start(&pool.resource, asks);
            }
        }
    }

    fn start(&mut self, resource: &ResourceName, asks_before_start: bool) {
        let feed = watch::Sender::new(None);
        let state = watch::Sender::new(State::default());
        let stop = CancellationToken::new();
        let plugin = Arc::new(Plugin::new(
            resource.clone(),
            asks_before_start,
            feed.subscribe(),
            self.helpers.clone(),
        ));
        let session = Session {
            plugin: plugin.clone(),
            directory: self.directory.clone(),
            socket: SocketName::new(resource, &self.nonce),
            state: state.clone(),
            timing: Timing::default(),
            stop: stop.clone(),
        };
        self.tasks.spawn(session.run());
        let running = Running {
            feed,
            state: state.subscribe(),
            plugin,
            stop,
        };
        self.running.insert(resource.clone(), running);
    }

    /// Gives each session its snapshot.
    pub(crate) fn show(&mut self, snapshots: &[Arc<Snapshot>]) {
        for snapshot in snapshots {
            let mut members = snapshot.members().iter();
            if members.any(|member| !member.waits_for_kubelet())
                && let Some(asks) = self.waiting.remove(snapshot.resource())
            {
                self.start(snapshot.resource(), asks);
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
            allocations: running.plugin.allocations.clone(),
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
