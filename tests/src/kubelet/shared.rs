//! What the kubelet's services and the caller share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use kubelet_api::deviceplugin::DevicePluginOptions;
use kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::checkpoint;
use super::pod::Pod;
use super::state::{Node, State};

/// Where the kubelet keeps its things, and its grace period.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The device-plugins directory. In a real kubelet it stays where it is
    /// even if the root directory is moved.
    pub device_plugins: PathBuf,
    /// The kubelet's root directory; PodResources is served below it.
    pub root: PathBuf,
    /// A directory of Pod objects as JSON: stands for the API server.
    pub pods: PathBuf,
    /// The cgroups of the node (version 2, driver `systemd`), where it makes one for each pod.
    pub cgroups: Option<PathBuf>,
    /// How long the capacity of a lost plugin stays on the Node.
    pub grace: Duration,
    /// How long a kubelet that has just started takes for each pod that it had: it adds them one by
    /// one, and lists those that it has added. Their containers run meanwhile.
    pub adds_pods_every: Duration,
    /// What its gRPC client calls itself; that of a kubelet is `grpc-go/VERSION`.
    pub client: String,
}

impl Settings {
    /// Everything below one directory, laid out as below `/var/lib/kubelet`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            device_plugins: root.join("device-plugins"),
            root: root.to_path_buf(),
            pods: root.join("api/pods"),
            cgroups: None,
            grace: Duration::from_secs(300),
            adds_pods_every: Duration::ZERO,
            client: "grpc-go/1.58.3".to_owned(),
        }
    }
}

impl Settings {
    /// The same on a node with cgroups.
    #[must_use]
    pub fn with_cgroups(self, directory: PathBuf) -> Self {
        Self {
            cgroups: Some(directory),
            ..self
        }
    }
}

/// How a kubelet may go wrong, for tests of a plugin's retries.
#[derive(Debug, Clone, Default)]
pub struct Misbehaviour {
    /// So many of the next registrations are refused.
    pub refuse: u32,
    /// Registrations are answered only after this time.
    pub delay: Duration,
    /// Registrations are accepted, but no ListAndWatch follows.
    pub never_watch: bool,
    /// `PodResources` lists no pod, as while the API server has not answered a kubelet that just
    /// started.
    pub lists_no_pods: bool,
}

/// One call of Register, and what became of it.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The resource name in the request.
    pub resource: String,
    /// The socket's file name in the request.
    pub endpoint: String,
    /// When it came.
    pub at: Instant,
    /// The refusal, if it was refused.
    pub refused: Option<String>,
}

/// The plugin that registered last for a resource.
#[derive(Debug, Clone)]
pub(super) struct Plugin {
    /// Nothing once its connection has ended: the kubelet never redials.
    pub(super) client: Option<DevicePluginClient<Channel>>,
    /// As `GetDevicePluginOptions` said; those of the request count for nothing.
    pub(super) options: DevicePluginOptions,
}

/// Everything that changes, under one lock that is never held across a wait.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) state: State,
    pub(super) plugins: BTreeMap<String, Plugin>,
    /// Connections by resource *name*, as in the kubelet: when the older of two
    /// for one resource ends, it is the newer that is found here and closed.
    pub(super) connections: BTreeMap<String, CancellationToken>,
    pub(super) registrations: Vec<Registration>,
    pub(super) misbehaviour: Misbehaviour,
    pub(super) pods: BTreeMap<String, Pod>,
    /// Calls of PodResources List, refused ones too.
    pub(super) pod_lists: u64,
    /// Pods of the time before it started, by name, and when it has added each of them.
    pub(super) added: BTreeMap<String, Instant>,
}

impl Inner {
    /// Ends the connection that is known for the resource, whichever it is.
    pub(super) fn disconnect(&mut self, resource: &str) {
        let Some(connection) = self.connections.remove(resource) else {
            return;
        };
        connection.cancel();
        if let Some(plugin) = self.plugins.get_mut(resource) {
            plugin.client = None;
        }
        self.state.disconnected(resource, Instant::now());
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    inner: Mutex<Inner>,
    /// Admission is serial: one slow plugin holds up every pod.
    pub(super) admission: tokio::sync::Mutex<()>,
    changed: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(settings: Settings, inner: Inner) -> Self {
        Self {
            settings,
            inner: Mutex::new(inner),
            admission: tokio::sync::Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those who wait, so that they check again.
    pub(super) fn notify(&self) {
        self.changed.send_replace(());
    }

    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn node(&self) -> Node {
        self.lock().state.node(Instant::now(), self.settings.grace)
    }

    /// Writes down who holds what.
    pub(super) fn checkpoint(&self) -> Result<()> {
        let inner = self.lock();
        let directory = &self.settings.device_plugins;
        checkpoint::write(
            directory,
            &inner.state.assignments,
            inner.state.registered(),
        )
    }
}
