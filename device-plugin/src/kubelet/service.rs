//! Answers what the kubelet asks a device plugin, for one resource, from the current snapshot.
//!
//! Allocate waits for no disk, netlink socket or other process: the kubelet calls it with no deadline
//! while it admits pods one by one. `PreStartContainer`, of which the kubelet waits 30 s for the answer,
//! waits for a scan of the host and reads the kubelet's checkpoint, or binds slots.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use hca::UnitId;
use kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};
use node_wire::Failure;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{Request, Response, Status};

use super::checkpoint;
use crate::allocate;
use crate::config::{NodeClass, ResourceName};
use crate::deliver::device_info;
use crate::snapshot::{Snapshot, Unit};
use crate::words::word;

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

/// What sessions ask of the daemon, in whose hands the host is.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    scans: mpsc::Sender<Waiting>,
    files: mpsc::Sender<device_info::Files>,
    allocated: Arc<Notify>,
    starts: mpsc::Sender<Start>,
}

/// A container with slots that is about to start.
#[derive(Debug)]
pub(crate) struct Start {
    /// The resource.
    pub resource: ResourceName,
    /// The slots.
    pub ids: Vec<String>,
    /// Gets leave to start, or why not.
    pub answer: oneshot::Sender<Result<(), Failure>>,
}

/// Who waits for a scan: gets its end, or why it does not end.
pub(crate) type Waiting = oneshot::Sender<Result<(), String>>;

/// Where requests arrive.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Reads the host that somebody waits for.
    pub scans: mpsc::Receiver<Waiting>,
    /// Device information to be written.
    pub files: mpsc::Receiver<device_info::Files>,
    /// Notified when an Allocate was answered with devices.
    pub allocated: Arc<Notify>,
    /// Containers with slots that are about to start.
    pub starts: mpsc::Receiver<Start>,
}

impl Requests {
    /// A way to ask, and where it is heard.
    pub(crate) fn new() -> (Self, Asked) {
        let (scans, scans_asked) = mpsc::channel(16);
        let (files, files_asked) = mpsc::channel(256);
        let (starts, starts_asked) = mpsc::channel(16);
        let allocated = Arc::new(Notify::new());
        (
            Self {
                scans,
                files,
                allocated: allocated.clone(),
                starts,
            },
            Asked {
                scans: scans_asked,
                files: files_asked,
                allocated,
                starts: starts_asked,
            },
        )
    }

    /// Asks whether a container with slots may start.
    async fn start(&self, resource: &ResourceName, ids: Vec<String>) -> Result<(), Status> {
        let over = || Status::unavailable("the device plugin is stopping");
        let (answer, answered) = oneshot::channel();
        let start = Start {
            resource: resource.clone(),
            ids,
            answer,
        };
        self.starts.send(start).await.map_err(|_| over())?;
        answered.await.map_err(|_| over())?.map_err(|failure| {
            tracing::error!(%resource, why = failure.message, "a container is not started");
            Status::failed_precondition(failure.message)
        })
    }

    /// Asks for a scan and waits until what containers get is true again. An HCA that was moved to
    /// a pod's namespace since it was allocated may have another device number by now.
    pub(crate) async fn scan(&self) -> Result<(), Status> {
        let over = || Status::unavailable("the device plugin is stopping");
        let (done, answer) = oneshot::channel();
        self.scans.send(done).await.map_err(|_| over())?;
        answer
            .await
            .map_err(|_| over())?
            .map_err(Status::unavailable)
    }

    /// Has files written some time soon; never waits.
    fn write(&self, files: device_info::Files) {
        if !files.is_empty() && self.files.try_send(files).is_err() {
            tracing::warn!("device information is not written: too much is waiting already");
        }
    }
}

/// One resource's gRPC service.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    /// Whether its units are whole HCAs, which may be moved to a pod's namespace.
    pub(super) exclusive: bool,
    /// What is sent.
    pub(super) feed: Feed,
    /// Streams that are open now.
    pub(super) streams: Arc<watch::Sender<usize>>,
    /// Ends the streams of this incarnation.
    pub(super) end: CancellationToken,
    /// Allocations that were answered, for metrics.
    pub(super) allocations: Arc<AllocationCounts>,
    /// What is asked of the daemon.
    pub(super) requests: Requests,
    /// What units were allocated with.
    pub(super) allocated_nodes: Arc<AllocatedNodes>,
    /// The kubelet's device-plugins directory.
    pub(super) directory: PathBuf,
    /// Where it is said that the kubelet has the list.
    pub(super) state: watch::Sender<State>,
}

/// Nodes that units were allocated with, so far as this process knows.
#[derive(Debug, Default)]
pub(super) struct AllocatedNodes(Mutex<HashMap<String, Vec<String>>>);

impl AllocatedNodes {
    fn note(&self, snapshot: &Snapshot, ids: &[String]) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for id in ids {
            if let Some(Unit::Member(member)) = snapshot.unit(id) {
                let nodes = member.nodes.iter().map(|node| node.path.clone());
                known.insert(id.clone(), nodes.collect());
            }
        }
    }

    /// The nodes that these units were allocated with, if that is known of all of them.
    fn of(&self, ids: &[String]) -> Option<BTreeSet<String>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: Option<Vec<&Vec<String>>> = ids.iter().map(|id| known.get(id)).collect();
        Some(all?.into_iter().flatten().cloned().collect())
    }
}

/// Why a container must not start: a node that it was promised is another HCA's by now.
fn swapped(snapshot: &Snapshot, ids: &[String], allocated: &BTreeSet<String>) -> Option<String> {
    let (mut members, mut reason) = (Vec::new(), String::new());
    for id in ids {
        let member = match snapshot.unit(id) {
            Some(Unit::Member(member)) => Some(member),
            Some(Unit::Pool | Unit::Slot(_)) => return None,
            // A unit of a time when the pool had others. Where its HCA is gone, its node may be another's.
            None => {
                let unit = id.parse::<UnitId>().ok();
                let hca = unit.as_ref().and_then(UnitId::hca);
                let mut all = snapshot.members().iter();
                all.find(|member| Some(&member.hca.id) == hca)
            }
        };
        if let Some(member) = member {
            members.push(member);
            if let Some(why) = member.health.worst() {
                reason = format!(" ({why})");
            }
        }
    }
    let list = |paths: &BTreeSet<String>| match paths.is_empty() {
        true => "no node".to_owned(),
        false => paths.iter().cloned().collect::<Vec<_>>().join(","),
    };
    let mut of_one_hca = NodeClass::ALL.into_iter();
    of_one_hca.find_map(|class| {
        let prefix = format!("/dev/infiniband/{}", word(&class));
        let then = allocated.iter().filter(|path| path.starts_with(&prefix));
        let then: BTreeSet<String> = then.cloned().collect();
        let paths = members.iter().flat_map(|member| member.paths(class));
        let now: BTreeSet<String> = paths.collect();
        let same = match class {
            NodeClass::Uverbs => then == now,
            // They are not seen in a pod's namespace, and may have come since.
            _ => now.is_empty() || then.is_subset(&now),
        };
        // By CDI alone, the nodes are those of the specification, which is always of now.
        (!then.is_empty() && !same).then_some((then, now))
    })
    .map(|(then, now)| {
        format!(
            "unit {} of {} was allocated as {} and is {} now{reason}: a reboot or a move to a pod's namespace \
             numbers device nodes anew, and what was allocated cannot be changed any more; delete the \
             pod, and set delivery: cdi for this pool",
            ids.join(","),
            snapshot.resource(),
            list(&then),
            list(&now)
        )
    })
}

/// Allocate calls of one resource since the start.
#[derive(Debug, Default)]
pub(crate) struct AllocationCounts {
    /// Calls answered with devices.
    pub answered: std::sync::atomic::AtomicU64,
    /// Calls refused.
    pub refused: std::sync::atomic::AtomicU64,
}

impl Service {
    fn snapshot(&self) -> Result<Arc<Snapshot>, Status> {
        self.feed.borrow().clone().ok_or_else(|| {
            Status::unavailable(
                "this resource has no HCA yet, its driver may still be loading; try again",
            )
        })
    }

    /// What the kubelet should know before it uses this resource.
    fn options(&self) -> DevicePluginOptions {
        DevicePluginOptions {
            pre_start_required: self.exclusive,
            get_preferred_allocation_available: true,
        }
    }

    fn answer(&self, request: &AllocateRequest) -> Result<AllocateResponse, Status> {
        let snapshot = self.snapshot()?;
        let containers = request.container_requests.iter();
        let container_responses = containers
            .map(|container| allocate::allocate(&snapshot, &container.devices_ids))
            .collect::<Result<_, _>>()
            .inspect_err(|refused: &Status| {
                let error = refused.message();
                tracing::warn!(resource = %snapshot.resource(), error, "allocation refused");
            })?;
        for container in &request.container_requests {
            self.allocated_nodes.note(&snapshot, &container.devices_ids);
            self.requests
                .write(device_info::files(&snapshot, &container.devices_ids));
        }
        self.requests.allocated.notify_one();
        Ok(AllocateResponse {
            container_responses,
        })
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

    type ListAndWatchStream = Listing;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Listing>, Status> {
        Ok(Response::new(Listing::new(self)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let snapshot = self.snapshot()?;
        let containers = request.get_ref().container_requests.iter();
        let container_responses = containers
            .map(|container| ContainerPreferredAllocationResponse {
                device_i_ds: crate::prefer::prefer(
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
        let answer = self.answer(request.get_ref());
        let count = match answer {
            Ok(_) => &self.allocations.answered,
            Err(_) => &self.allocations.refused,
        };
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        answer.map(Response::new)
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        // Why there is no list yet, if it is because scans fail.
        if self.feed.borrow().is_none() {
            self.requests.scan().await?;
        }
        let snapshot = self.snapshot()?;
        let ids = request.into_inner().devices_ids;
        // Units of a time before the pool had slots name HCAs.
        let is_slot = |id: &String| matches!(id.parse(), Ok(UnitId::Slot { .. }));
        if snapshot.late().is_some() && ids.iter().any(is_slot) {
            self.requests.start(snapshot.resource(), ids).await?;
            return Ok(Response::new(PreStartContainerResponse {}));
        }
        self.requests.scan().await?;
        let snapshot = self.snapshot()?;
        let (directory, resource) = (self.directory.clone(), snapshot.resource().to_string());
        let asked = ids.clone();
        let kept = tokio::task::spawn_blocking(move || {
            let asked: BTreeSet<&String> = asked.iter().collect();
            checkpoint::allocated_nodes(&directory, &resource, |ids| *ids == asked)
        });
        let kept = kept.await.unwrap_or_else(|error| Err(error.to_string()));
        // Not written yet, or not to be read: what this process allocated is known at least.
        let allocated = match (kept, self.allocated_nodes.of(&ids)) {
            (Ok(allocated), _) if !allocated.is_empty() => allocated,
            (_, Some(remembered)) => vec![remembered],
            (Ok(none), None) => none,
            (Err(error), None) => {
                let why = format!(
                    "cannot read which device nodes the container of {} was allocated: {error}; its \
                     nodes could be another pod's by now. Delete the pod if it does not start",
                    ids.join(", ")
                );
                tracing::error!(resource = %snapshot.resource(), why, "a container is not started");
                return Err(Status::unavailable(why));
            }
        };
        let mut allocated = allocated.iter();
        if let Some(why) = allocated.find_map(|paths| swapped(&snapshot, &ids, paths)) {
            tracing::error!(why, "a container is not started");
            return Err(Status::failed_precondition(why));
        }
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// A ListAndWatch stream: the current state first, then every state that differs from the one
/// sent last. States that come faster than the kubelet reads are skipped, never queued.
#[derive(Debug)]
pub(crate) struct Listing {
    snapshots: WatchStream<Option<Arc<Snapshot>>>,
    sent: Option<Arc<Snapshot>>,
    end: Pin<Box<WaitForCancellationFutureOwned>>,
    streams: Arc<watch::Sender<usize>>,
    state: watch::Sender<State>,
}

impl Listing {
    fn new(service: &Service) -> Self {
        service.streams.send_modify(|open| *open += 1);
        Self {
            snapshots: WatchStream::new(service.feed.clone()),
            sent: None,
            end: Box::pin(service.end.clone().cancelled_owned()),
            streams: service.streams.clone(),
            state: service.state.clone(),
        }
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        self.streams
            .send_modify(|open| *open = open.saturating_sub(1));
    }
}

impl Stream for Listing {
    type Item = Result<ListAndWatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.end.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        loop {
            let Some(next) = std::task::ready!(Pin::new(&mut self.snapshots).poll_next(context))
            else {
                return Poll::Ready(None);
            };
            let Some(next) = next else { continue };
            if self
                .sent
                .as_ref()
                .is_some_and(|sent| sent.lists_the_same(&next))
            {
                continue;
            }
            let response = next.listing();
            self.sent = Some(next);
            self.state.send_if_modified(|state| {
                let news = !state.listed;
                state.listed = true;
                news
            });
            return Poll::Ready(Some(Ok(response)));
        }
    }
}
