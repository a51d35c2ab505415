//! Answers what the kubelet asks a device plugin, for one resource, from the current snapshot.
//!
//! Allocate waits for no disk, netlink socket or other process: the kubelet calls it with no deadline
//! while it admits pods one by one. `PreStartContainer`, of which the kubelet waits 30 s for the answer,
//! reads the HCAs of the container's units, or binds slots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hca::{Host, UnitId};
use kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::promised::{self, Promise, Promises};
use crate::binding::binder::Binder;
use crate::binding::contexts;
use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};
use pools::allocate;
use pools::config::{PoolConfig, ResourceName};
use pools::deliver::device_info;
use pools::snapshot::Snapshot;

/// How long the HCAs of a container may take to be read.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// The current snapshot of a resource; `None` until the first one is ready.
pub(crate) type Feed = watch::Receiver<Option<Arc<Snapshot>>>;

/// Where a session stands, for metrics and `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct State {
    /// The kubelet has accepted the registration and nothing has spoilt it since.
    pub registered: bool,
    /// Since when the kubelet has had a stream open.
    pub streaming_since: Option<Instant>,
    /// The kubelet has been sent the list of units on a stream of this registration.
    pub listed: bool,
    /// Successful registrations since the start.
    pub registrations: u64,
    /// Failed attempts since the start.
    pub failures: u64,
    /// Why the last attempt failed; cleared by success.
    pub last_error: Option<String>,
    /// Registrations in a row after which no stream came: the kubelet cannot use what it accepted.
    pub registrations_without_stream: u32,
}

/// What the services of all resources use.
#[derive(Debug)]
pub(crate) struct Helpers {
    pub host: Host,
    /// Reads the HCAs of a container before it starts.
    pub hcas: Reader,
    /// Device information to be written.
    pub files: mpsc::Sender<device_info::Files>,
    pub binder: Arc<Binder>,
}

impl Helpers {
    pub(crate) fn new(
        readers: &Readers,
        paths: &NodePaths,
        files: mpsc::Sender<device_info::Files>,
        binder: Arc<Binder>,
    ) -> Arc<Self> {
        Arc::new(Self {
            host: paths.host.clone(),
            hcas: readers.reader("hcas", "the read of a container's HCAs", READ_TIMEOUT),
            files,
            binder,
        })
    }
}

/// One resource, whichever socket it is served on.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(super) resource: ResourceName,
    /// Whether the kubelet asks before each start of a container.
    pub(crate) asks_before_start: bool,
    /// What is sent.
    pub(super) feed: Feed,
    /// Allocations that were answered, for metrics.
    pub(crate) allocations: Arc<AllocationCounts>,
    helpers: Arc<Helpers>,
    /// What containers were allocated.
    promises: Promises,
}

/// Whether the kubelet has to ask before each start of a container: paths of device nodes that it keeps
/// may be another HCA's by then, and slots are bound to HCAs. What is in a CDI file is of now.
pub(crate) fn asks_before_start(pool: &PoolConfig) -> bool {
    !pool.has_file()
}

/// The gRPC service of a resource on one socket.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub(super) plugin: Arc<Plugin>,
    /// Streams that are open now.
    pub(super) streams: Arc<watch::Sender<usize>>,
    /// Ends the streams.
    pub(super) end: CancellationToken,
    /// Where it is said that the kubelet has the list.
    pub(super) state: watch::Sender<State>,
}

/// Allocate calls of one resource since the start.
#[derive(Debug, Default)]
pub(crate) struct AllocationCounts {
    /// Calls answered with devices.
    pub answered: std::sync::atomic::AtomicU64,
    /// Calls refused.
    pub refused: std::sync::atomic::AtomicU64,
}

impl Plugin {
    pub(crate) fn new(
        resource: ResourceName,
        asks_before_start: bool,
        feed: Feed,
        helpers: Arc<Helpers>,
    ) -> Self {
        Self {
            resource,
            asks_before_start,
            feed,
            allocations: Arc::default(),
            helpers,
            promises: Promises::default(),
        }
    }

    /// Whether a container with slots may start. What that changes is done to its end, also if the
    /// kubelet gives up.
    async fn start(&self, ids: Vec<String>) -> Result<(), Status> {
        let resource = &self.resource;
        let (binder, pool) = (self.helpers.binder.clone(), resource.to_string());
        let start = tokio::spawn(async move { binder.start(&pool, &ids).await });
        let over = |_| Status::unavailable("the device plugin is stopping");
        start.await.map_err(over)?.map_err(|failure| {
            tracing::error!(%resource, why = failure.message, "a container is not started");
            Status::failed_precondition(failure.message)
        })
    }

    fn snapshot(&self) -> Result<Arc<Snapshot>, Status> {
        self.feed.borrow().clone().ok_or_else(|| {
            Status::unavailable(
                "this resource has no HCA yet, its driver may still be loading; try again",
            )
        })
    }

    fn answer(&self, request: AllocateRequest) -> Result<AllocateResponse, Status> {
        let snapshot = self.snapshot()?;
        let containers = request.container_requests.iter();
        let container_responses: Vec<_> = containers
            .map(|container| allocate::allocate(&snapshot, &container.devices_ids))
            .collect::<Result<_, String>>()
            .map_err(|error| {
                tracing::warn!(resource = %self.resource, error, "allocation refused");
                Status::failed_precondition(error)
            })?;
        let containers = request.container_requests.into_iter();
        for (container, response) in containers.zip(&container_responses) {
            let ids = container.devices_ids;
            let files = device_info::files(&snapshot, &ids);
            // Written some time soon; nothing waits for it here.
            if !files.is_empty() && self.helpers.files.try_send(files).is_err() {
                tracing::warn!("device information is not written: too much is waiting already");
            }
            let promise = Promise::of(&snapshot, &ids, response);
            self.promises.note(ids, promise);
        }
        self.helpers.binder.pods.allocated.notify_one();
        Ok(AllocateResponse {
            container_responses,
        })
    }

    /// Why a container must not start: a node that it was promised is another HCA's by now.
    ///
    /// # Errors
    /// Why that is not known.
    async fn difference(&self, ids: &[String]) -> Result<Option<String>, String> {
        let (promises, are_certain) = match self.promises.of(ids) {
            Some(promises) => (promises, true),
            None => {
                let snapshot = self.feed.borrow().clone();
                let named = promised::named_hcas(ids, snapshot.as_deref());
                let (resource, units) = (self.resource.to_string(), ids.to_vec());
                let checkpoint = &self.helpers.binder.pods.checkpoint;
                let nodes = checkpoint.allocated_nodes(resource, units).await?;
                let are_certain = named.is_some();
                let of_pool = || snapshot.as_deref().map(promised::hcas_of_pool);
                let hcas = named.or_else(of_pool).unwrap_or_default();
                let promises = nodes.into_iter().map(|nodes| Promise {
                    hcas: hcas.clone(),
                    nodes,
                });
                (promises.collect(), are_certain)
            }
        };
        let host = self.helpers.host.clone();
        let read = self.helpers.hcas.run(move || {
            let differences = promises.iter().map(|one| promised::difference(&host, one));
            differences.collect::<Result<Vec<_>, _>>()
        });
        let differences = read.await.map_err(|late| late.to_string())?;
        let differences = differences.map_err(|error| error.to_string())?;
        let Some(difference) = differences.into_iter().flatten().next() else {
            return Ok(None);
        };
        let why = format!(
            "{} of {} was allocated as {difference}",
            promised::names(ids),
            self.resource
        );
        match are_certain {
            true => Ok(Some(why)),
            false => Err(format!("{why}, if the pool had the same HCAs then")),
        }
    }

    /// The process of a pod that ended, which still uses an HCA of these units: a list of the kubelet frees
    /// a unit while a process of its pod hangs. None where that is not known.
    async fn user_of_another_pod(&self, ids: &[String]) -> Option<String> {
        let snapshot = self.feed.borrow().clone()?;
        if snapshot.pool().sharing.is_shared() {
            return None;
        }
        let hcas = promised::named_hcas(ids, Some(&snapshot))?.into_iter();
        let devices =
            hcas.flat_map(|(hca, names)| names.into_iter().map(move |name| (name, hca.clone())));
        let helpers = &self.helpers;
        let (host, devices) = (helpers.host.clone(), devices.collect());
        let used = helpers.hcas.run(move || contexts::read(&host, &devices));
        let used = used.await.ok()?.filter(|used| !used.is_empty())?;
        let checkpoint = helpers.binder.pods.checkpoint.read(None).await.ok()??;
        let own = checkpoint.owners.uid(self.resource.as_str(), ids)?;
        let mut others = used.into_iter().filter(|one| one.pod != own);
        let other = others.find(|one| helpers.binder.holders.has(one))?;
        Some(format!(
            "{} of {} cannot be used: {other}",
            other.hca, self.resource
        ))
    }
}

impl Service {
    /// What the kubelet should know before it uses this resource.
    fn options(&self) -> DevicePluginOptions {
        DevicePluginOptions {
            pre_start_required: self.plugin.asks_before_start,
            get_preferred_allocation_available: true,
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.options()))
    }

    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (lists, stream) = mpsc::channel(1);
        let service = self.clone();
        service.streams.send_modify(|open| *open += 1);
        tokio::spawn(async move {
            let streams = service.streams.clone();
            service.send_lists(lists).await;
            streams.send_modify(|open| *open = open.saturating_sub(1));
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let snapshot = self.plugin.snapshot()?;
        let containers = request.get_ref().container_requests.iter();
        let container_responses = containers
            .map(|container| ContainerPreferredAllocationResponse {
                device_i_ds: pools::prefer::prefer(
                    &snapshot,
                    &container.available_device_i_ds,
                    &container.must_include_device_i_ds,
                    usize::try_from(container.allocation_size).unwrap_or_default(),
                ),
            })
            .collect();
        Ok(Response::new(PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let answer = self.plugin.answer(request.into_inner());
        let count = match answer {
            Ok(_) => &self.plugin.allocations.answered,
            Err(_) => &self.plugin.allocations.refused,
        };
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        answer.map(Response::new)
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let (plugin, ids) = (&self.plugin, request.into_inner().devices_ids);
        let resource = &plugin.resource;
        // Units of a time before the pool had slots name HCAs.
        let is_slot = |id: &String| matches!(id.parse(), Ok(UnitId::Slot { .. }));
        let snapshot = plugin.feed.borrow().clone();
        let is_late = snapshot.is_none_or(|snapshot| snapshot.late().is_some());
        if is_late && ids.iter().any(is_slot) {
            plugin.start(ids).await?;
            return Ok(Response::new(PreStartContainerResponse {}));
        }
        if let Some(why) = plugin.user_of_another_pod(&ids).await {
            tracing::error!(%resource, why, "a container is not started");
            return Err(Status::failed_precondition(why));
        }
        match plugin.difference(&ids).await {
            Ok(None) => {}
            Ok(Some(difference)) => {
                let why = format!(
                    "{difference}: a reboot, a driver that was loaded again or a move to a pod's namespace \
                     numbers device nodes anew, and what was allocated cannot be changed any more; \
                     delete the pod, and set delivery: cdi for this pool"
                );
                tracing::error!(%resource, why, "a container is not started");
                return Err(Status::failed_precondition(why));
            }
            Err(why) => tracing::warn!(
                %resource, units = promised::names(&ids), why,
                "a container starts though it is not known whether its device nodes are still those of \
                 its HCAs; if they are not, delete its pod"
            ),
        }
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

impl Service {
    /// Sends the current list, then each one that differs from the one sent last, until `end` or the
    /// kubelet's. Lists that come faster than it reads are skipped, never queued.
    async fn send_lists(self, lists: mpsc::Sender<Result<ListAndWatchResponse, Status>>) {
        let mut feed = self.plugin.feed.clone();
        let mut sent: Option<Arc<Snapshot>> = None;
        loop {
            let next = feed.borrow_and_update().clone();
            let is_sent =
                |next: &Arc<Snapshot>| sent.as_ref().is_some_and(|sent| sent.lists_the_same(next));
            if let Some(next) = next.filter(|next| !is_sent(next)) {
                if lists.send(Ok(next.listing())).await.is_err() {
                    return;
                }
                sent = Some(next);
                self.state.send_if_modified(|state| {
                    let news = !state.listed;
                    state.listed = true;
                    news
                });
            }
            tokio::select! {
                () = self.end.cancelled() => return,
                () = lists.closed() => return,
                changed = feed.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }
}
