//! Documents as objects of the Kubernetes API: `AddressSubnet`, cluster-scoped.
//!
//! A document's version is its `resourceVersion`, a number of the whole store (etcd's revision). A change
//! is a merge patch that names it, so it is made to what was read or not at all, and keys that a newer
//! program knows stay.
//!
//! What it looks like there is in [`object`]. Labels say without the document what it is about: the space,
//! whether no address is free, and for each node with a part `own`, or `asked` where something of the document
//! waits for that node. So an agent watches the latter only: a document of 250 owners has 50 KB, and its other
//! changes are not its business.

mod object;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipam::space::AddressSpace;
use ipam::subnet::Document;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::Client;
use kube::core::params::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchParams,
};
use kube::core::request::{Error as RequestError, Request};
use kube::core::{PartialObjectMeta, Status, WatchEvent};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Handle;

use crate::backend::{Read, Swap};
pub use object::News;
pub(crate) use object::labels;
use object::{KIND, Object, label_of, name, news, parse, patch, version_of};

/// The path of all documents.
const PATH: &str = "/apis/rdma-netdev.io/v1alpha1/addresssubnets";
/// A request that takes longer failed.
const LIMIT: Duration = Duration::from_secs(10);
/// What every agent asks when it starts and when its watch ends: nobody waits for it, and after the API's
/// restart all agents ask at one time. Who gives up too early makes the server do it twice.
const PATIENT_LIMIT: Duration = Duration::from_mins(1);
/// How long the server keeps a watch open, in seconds. Its bookmarks, one a minute, show that it lives.
const WATCH_SECONDS: u32 = 590;
/// How long a restored store is not claimed from.
const RESTORED_REST: Duration = Duration::from_mins(15);
/// A backup is restored with so much higher a version, so that nobody sees that it is older (etcdutl snapshot
/// restore --bump-revision). No cluster writes so much between two looks of an agent.
const BUMP: u64 = 100_000_000;
/// For so long.
const BUMP_REST: Duration = Duration::from_hours(1);
/// How long the number of Nodes is believed.
const NODES_REST: Duration = Duration::from_hours(1);
/// When they are counted again after no answer.
const NODES_RETRY: Duration = Duration::from_mins(1);
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// Why the API did not do something.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("{what}: the Kubernetes API says {code} {reason}: {message}")]
    Refused {
        what: String,
        code: u16,
        reason: String,
        message: String,
    },
    /// It may have been done all the same.
    #[error("{what}: no answer of the Kubernetes API: {why}")]
    NoAnswer { what: String, why: String },
    /// Written by hand, or by another program.
    #[error("{what}: {why}")]
    Wrong { what: String, why: String },
}

/// What is counted.
#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    failed: AtomicU64,
}

/// What is known of the store as a whole.
#[derive(Debug, Default)]
struct Known {
    /// The highest version that was seen.
    highest: u64,
    /// When it was seen in this process.
    seen: Option<Instant>,
    /// How often its truth was older than that, and since when.
    restored: Option<(u64, Instant)>,
    /// When the Nodes were counted, and how many there were, if that was answered.
    nodes: Option<(Instant, Option<u64>)>,
}

/// A store of documents, used from threads that may wait.
#[derive(Clone)]
pub struct Api {
    client: Client,
    runtime: Handle,
    node: String,
    counts: Arc<Counts>,
    known: Arc<Mutex<Known>>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize)]
struct List {
    metadata: ListMeta,
    /// The server says `null` of an empty list.
    items: Option<Vec<PartialObjectMeta>>,
}

impl List {
    fn items(&self) -> &[PartialObjectMeta] {
        self.items.as_deref().unwrap_or_default()
    }
}

#[derive(Debug, Deserialize)]
struct Written {
    metadata: ObjectMeta,
}

impl Api {
    /// `runtime` must be driven by another thread than those that call.
    #[must_use]
    pub fn new(client: Client, runtime: Handle, node: &str) -> Self {
        Self {
            client,
            runtime,
            node: node.to_owned(),
            counts: Arc::default(),
            known: Arc::default(),
        }
    }

    /// Requests so far, and those without a good answer.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (of(&self.counts.requests), of(&self.counts.failed))
    }

    fn known<T>(&self, use_it: impl FnOnce(&mut Known) -> T) -> T {
        use_it(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn send<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<T, ApiError> {
        self.runtime.block_on(self.request(what, request))
    }

    pub(crate) async fn request<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<T, ApiError> {
        self.request_within(LIMIT, what, request).await
    }

    async fn request_within<T: DeserializeOwned>(
        &self,
        limit: Duration,
        what: &str,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<T, ApiError> {
        let wrong = |why: String| ApiError::Wrong {
            what: what.to_owned(),
            why,
        };
        let request = request.map_err(|error| wrong(error.to_string()))?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let answer = tokio::time::timeout(limit, self.client.request(request)).await;
        let failed = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => failure(what, &error),
            Err(_) => ApiError::NoAnswer {
                what: what.to_owned(),
                why: format!("not within {} s", limit.as_secs()),
            },
        };
        self.counts.failed.fetch_add(1, Ordering::Relaxed);
        Err(failed)
    }

    /// Reads a document: an empty one where there is none.
    ///
    /// # Errors
    /// The API does not answer, or the object is not such a document.
    pub fn read(&self, space: &AddressSpace, subnet: IpNetwork) -> Result<Read, ApiError> {
        let name = name(space, subnet);
        let what = format!("read {KIND} {name}");
        let request = Request::new(PATH).get(&name, &GetParams::default());
        match self.send::<Object>(&what, request) {
            Ok(object) => {
                let read = parse(object, space, subnet);
                let read = read.map_err(|why| ApiError::Wrong { what, why })?;
                self.remember(read.version);
                Ok(read)
            }
            Err(ApiError::Refused { code: 404, .. }) => Ok(Read::none(space, subnet)),
            Err(error) => Err(error),
        }
    }

    /// Replaces a document that was read.
    ///
    /// # Errors
    /// It is not known whether it was replaced.
    pub fn swap(
        &self,
        space: &AddressSpace,
        read: &Read,
        next: &Document,
    ) -> Result<Swap, ApiError> {
        let name = name(space, next.subnet);
        let labels = labels(space, &read.document, next);
        let before = self.highest();
        let request = match read.version {
            0 => {
                let object = Object::new(space, next, labels);
                let body = serde_json::to_vec(&object).map_err(RequestError::SerializeBody);
                body.and_then(|body| Request::new(PATH).create(&PostParams::default(), body))
            }
            version => {
                let patch = patch(version, &read.document, next, &read.labels, &labels);
                let parameters = PatchParams::default();
                Request::new(PATH).patch_metadata(&name, &parameters, &Patch::Merge(patch))
            }
        };
        let written: Written = match self.send(&format!("change {KIND} {name}"), request) {
            Ok(written) => written,
            Err(ApiError::Refused {
                code: 404 | 409, ..
            }) => return Ok(Swap::Lost),
            Err(error) if is_denied(&error) => return Ok(Swap::Denied(error.to_string())),
            Err(error) => return Err(error),
        };
        let version = version_of(written.metadata.resource_version.as_deref());
        self.saw(before, version);
        if next.parts.is_empty() {
            self.delete(&name, &written.metadata);
        }
        Ok(Swap::Won(version))
    }

    /// A document without parts goes, if nobody has used it meanwhile; else, or if it cannot be deleted, it
    /// stays.
    fn delete(&self, name: &str, metadata: &ObjectMeta) {
        let parameters = DeleteParams::default().preconditions(Preconditions {
            uid: metadata.uid.clone(),
            resource_version: metadata.resource_version.clone(),
        });
        let request = Request::new(PATH).delete(name, &parameters);
        match self.send::<Value>(&format!("delete {KIND} {name}"), request) {
            Ok(_)
            | Err(ApiError::Refused {
                code: 404 | 409, ..
            }) => {}
            Err(error) => tracing::warn!("an empty document stays: {error}"),
        }
    }

    fn list(&self, what: &str, parameters: &ListParams) -> Result<List, ApiError> {
        self.send(what, Request::new(PATH).list_metadata(parameters))
    }

    /// The subnets of a space in which a node has parts.
    ///
    /// # Errors
    /// The API does not answer.
    pub fn subnets(&self, space: &AddressSpace, node: &str) -> Result<Vec<IpNetwork>, ApiError> {
        let selector = object::of_node(space, node);
        let what = format!("list the {KIND}s of node {node}");
        let list = self.list(&what, &ListParams::default().labels(&selector))?;
        let found = list.items().iter().filter_map(news);
        Ok(found.map(|one| one.subnet).collect())
    }

    /// The subnets of a space without a free address.
    ///
    /// # Errors
    /// The API does not answer.
    pub fn full(&self, space: &AddressSpace) -> Result<BTreeSet<IpNetwork>, ApiError> {
        let selector = object::of_full(space);
        // As some server remembers them, which costs the cluster nothing.
        let parameters = ListParams::default().labels(&selector).match_any();
        let list = self.list(&format!("list the full {KIND}s"), &parameters)?;
        Ok(list
            .items()
            .iter()
            .filter_map(news)
            .map(|one| one.subnet)
            .collect())
    }

    /// The documents in which this node has parts, as some server remembers them, and from where to watch them.
    ///
    /// # Errors
    /// The API does not answer.
    pub async fn documents(&self) -> Result<(Vec<News>, String), ApiError> {
        let parameters = ListParams::default()
            .labels(&label_of(&self.node))
            .match_any();
        let request = Request::new(PATH).list_metadata(&parameters);
        let what = format!("list the {KIND}s of this node");
        let list: List = self.request_within(PATIENT_LIMIT, &what, request).await?;
        let found = list.items().iter().filter_map(news).collect();
        Ok((found, list.metadata.resource_version.unwrap_or_default()))
    }

    /// How many Nodes the cluster has; not known where it cannot be asked.
    #[must_use]
    pub fn nodes(&self) -> Option<u64> {
        if let Some((at, count)) = self.known(|known| known.nodes) {
            let rest = count.map_or(NODES_RETRY, |_| NODES_REST);
            if at.elapsed() < rest {
                return count;
            }
        }
        let parameters = ListParams::default().limit(1);
        let request = Request::new("/api/v1/nodes").list_metadata(&parameters);
        let list: Option<List> = self.send("count the Nodes", request).ok();
        let count = list.map(|list| {
            let more = list.metadata.remaining_item_count.unwrap_or(0);
            u64::try_from(more).unwrap_or(0) + list.items().len() as u64
        });
        self.known(|known| known.nodes = Some((Instant::now(), count)));
        count
    }

    /// Why a node will not come back by itself: its Node is deleted, or marked as out of service.
    ///
    /// # Errors
    /// The API does not answer.
    pub fn gone(&self, node: &str) -> Result<Option<String>, ApiError> {
        let what = format!("read Node {node}");
        let request = Request::new("/api/v1/nodes").get(node, &GetParams::default());
        match self.send::<Node>(&what, request) {
            Ok(found) => {
                let taints = found.spec.and_then(|spec| spec.taints).unwrap_or_default();
                let is_out = taints.iter().any(|taint| taint.key == OUT_OF_SERVICE);
                Ok(is_out.then(|| format!("node {node} is out of service")))
            }
            Err(ApiError::Refused { code: 404, .. }) => Ok(Some(format!("node {node} is gone"))),
            Err(error) => Err(error),
        }
    }

    /// A version that was seen of the store.
    pub fn remember(&self, version: u64) {
        self.known(|known| known.highest = known.highest.max(version));
    }

    fn highest(&self) -> u64 {
        self.known(|known| known.highest)
    }

    /// The version of the whole store, which answers a request that was made when another one had been seen.
    fn saw(&self, before: u64, version: u64) {
        self.known(|known| {
            // The other one was found to be of a truth that is gone.
            let is_known = known.highest < before;
            let is_fresh = known.seen.is_some_and(|at| at.elapsed() < BUMP_REST);
            let is_newer = version >= before && (!is_fresh || version - before < BUMP);
            if is_newer || is_known {
                known.highest = known.highest.max(version);
                known.seen = Some(Instant::now());
                return;
            }
            tracing::error!(
                version,
                before,
                "the Kubernetes API is not what it was: restored from a backup? For 15 minutes nothing is \
                 claimed but what this node had"
            );
            known.highest = version;
            known.restored = Some((known.restored.map_or(1, |(number, _)| number + 1), Instant::now()));
        });
    }

    /// Which time it is that the store is older than what was seen of it, for a quarter of an hour.
    #[must_use]
    pub fn restored(&self) -> Option<u64> {
        self.known(|known| {
            let restored = known.restored;
            let fresh = restored.filter(|(_, since)| since.elapsed() < RESTORED_REST);
            fresh.map(|(number, _)| number)
        })
    }

    /// Sees how old the store is.
    ///
    /// # Errors
    /// The API does not answer.
    pub async fn look(&self) -> Result<(), ApiError> {
        let before = self.highest();
        // From etcd: one item and the version of all.
        let request = Request::new(PATH).list_metadata(&ListParams::default().limit(1));
        let what = format!("list {KIND}s");
        let list: List = self.request_within(PATIENT_LIMIT, &what, request).await?;
        self.saw(
            before,
            version_of(list.metadata.resource_version.as_deref()),
        );
        Ok(())
    }

    /// Tells of each document in which from now on something waits for this node, until the server ends the
    /// watch. `from` is what [`Self::documents`] gave.
    ///
    /// # Errors
    /// The API does not answer, or ended the watch with an error.
    pub async fn watch(&self, from: &str, mut tell: impl FnMut(News)) -> Result<(), ApiError> {
        use futures_util::TryStreamExt as _;

        let what = format!("watch the {KIND}s that wait for this node");
        let selector = format!("{}=asked", label_of(&self.node));
        let parameters = WatchParams::default()
            .labels(&selector)
            .timeout(WATCH_SECONDS);
        let request = Request::new(PATH).watch_metadata(&parameters, from);
        let request = request.map_err(|error| ApiError::Wrong {
            what: what.clone(),
            why: error.to_string(),
        })?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let failed = |error: kube::Error| failure(&what, &error);
        let events = self.client.request_events::<PartialObjectMeta>(request);
        let events = tokio::time::timeout(PATIENT_LIMIT, events).await;
        let events = events.map_err(|_| ApiError::NoAnswer {
            what: what.clone(),
            why: format!("not within {} s", PATIENT_LIMIT.as_secs()),
        })?;
        let mut events = std::pin::pin!(events.map_err(failed)?);
        // A connection that died without a word ends here, too.
        let limit = Duration::from_secs(u64::from(WATCH_SECONDS)) + LIMIT;
        let until = tokio::time::Instant::now() + limit;
        loop {
            let event = tokio::time::timeout_at(until, events.try_next()).await;
            match event {
                Ok(Ok(Some(event))) => match event {
                    WatchEvent::Added(object)
                    | WatchEvent::Modified(object)
                    | WatchEvent::Deleted(object) => news(&object).into_iter().for_each(&mut tell),
                    WatchEvent::Bookmark(_) => {}
                    WatchEvent::Error(status) => return Err(refused(&what, &status)),
                },
                Ok(Ok(None)) | Err(_) => return Ok(()),
                Ok(Err(error)) => return Err(failed(error)),
            }
        }
    }
}

fn failure(what: &str, error: &kube::Error) -> ApiError {
    match error {
        kube::Error::Api(status) => refused(what, status),
        error => {
            // The innermost cause is what happened.
            let mut why: &dyn std::error::Error = error;
            while let Some(source) = why.source() {
                why = source;
            }
            ApiError::NoAnswer {
                what: what.to_owned(),
                why: why.to_string(),
            }
        }
    }
}

/// A path that the server does not know is another fault than an object that is not there.
fn refused(what: &str, status: &Status) -> ApiError {
    let names = status
        .details
        .as_ref()
        .is_some_and(|details| !details.name.is_empty());
    if status.code == 404 && !names {
        return ApiError::Wrong {
            what: what.to_owned(),
            why: format!(
                "the Kubernetes API does not know this kind: install the CustomResourceDefinition of its \
                 chart ({})",
                status.message
            ),
        };
    }
    ApiError::Refused {
        what: what.to_owned(),
        code: status.code,
        reason: status.reason.clone(),
        message: status.message.clone(),
    }
}

/// Whether the cluster's policy or the definition does not allow a change: another one may be allowed. A right
/// that is missing is a fault of the whole store.
fn is_denied(error: &ApiError) -> bool {
    match error {
        ApiError::Refused { code, message, .. } => {
            *code == 422 || (*code == 403 && message.contains("ValidatingAdmissionPolicy"))
        }
        _ => false,
    }
}
