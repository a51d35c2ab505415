//! Documents as objects of the Kubernetes API: `AddressSubnet`, cluster-scoped.
//!
//! A document's version is its `resourceVersion`, a number of the whole store (etcd's revision). A change
//! is a merge patch that names it, so it is made to what was read or not at all, and keys that a newer
//! program knows stay.
//!
//! Labels say without the document what it is about: the space, whether no address is free, and for each
//! node with a part `own`, or `asked` where something of the document waits for that node. So an agent
//! watches the latter only: a document of 250 owners has 50 KB, and its other changes are not its business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipam::space::{AddressSpace, hash};
use ipam::subnet::{ADDRESSES, Document, Part, piece, subnet_of};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::Client;
use kube::core::params::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchParams,
};
use kube::core::request::{Error as RequestError, Request};
use kube::core::{PartialObjectMeta, Status, WatchEvent};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use crate::backend::{Read, Swap};

/// The path of all documents.
const PATH: &str = "/apis/rdma-netdev.io/v1alpha1/addresssubnets";
const API_VERSION: &str = "rdma-netdev.io/v1alpha1";
const KIND: &str = "AddressSubnet";
/// As long as a document has parts, it is not deleted.
const FINALIZER: &str = "rdma-netdev.io/parts";
/// Label: the hash of the space. Annotation: its store, with `+` and `network_name` if it has one.
const SPACE: &str = "rdma-netdev.io/space";
/// Label: no address is free.
const FULL: &str = "rdma-netdev.io/full";
/// A request that takes longer failed.
const LIMIT: Duration = Duration::from_secs(10);
/// How long the server keeps a watch open, in seconds.
const WATCH_SECONDS: u32 = 290;
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

/// A document that something is to be done about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    pub space: AddressSpace,
    pub subnet: IpNetwork,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Object {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: Document,
    #[serde(default)]
    status: Summary,
}

/// For people: columns of a table cannot count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Summary {
    parts: usize,
    nodes: usize,
    free: usize,
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
        let wrong = |why: String| ApiError::Wrong {
            what: what.to_owned(),
            why,
        };
        let request = request.map_err(|error| wrong(error.to_string()))?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let answer = tokio::time::timeout(LIMIT, self.client.request(request)).await;
        let failed = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => failure(what, &error),
            Err(_) => ApiError::NoAnswer {
                what: what.to_owned(),
                why: format!("not within {} s", LIMIT.as_secs()),
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
                let object = Object {
                    api_version: API_VERSION.to_owned(),
                    kind: KIND.to_owned(),
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        labels: Some(labels),
                        annotations: Some(BTreeMap::from([(SPACE.to_owned(), space.file_name())])),
                        finalizers: Some(vec![FINALIZER.to_owned()]),
                        ..ObjectMeta::default()
                    },
                    spec: next.clone(),
                    status: Summary::of(next),
                };
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
        let selector = format!("{SPACE}={},{}", hash_of(space), label_of(node));
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
        let selector = format!("{SPACE}={},{FULL}=true", hash_of(space));
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

    /// The documents of a store in which this node has parts, as some server remembers them.
    ///
    /// # Errors
    /// The API does not answer.
    pub fn documents(&self, store: &str) -> Result<Vec<News>, ApiError> {
        let parameters = ListParams::default()
            .labels(&label_of(&self.node))
            .match_any();
        let list = self.list(&format!("list the {KIND}s of this node"), &parameters)?;
        let found = list.items().iter().filter_map(news);
        Ok(found.filter(|one| one.space.store == store).collect())
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
        let list: List = self.request(&format!("list {KIND}s"), request).await?;
        self.saw(
            before,
            version_of(list.metadata.resource_version.as_deref()),
        );
        Ok(())
    }

    /// Tells of each document in which something waits for this node, first of all that there are, until
    /// the server ends the watch.
    ///
    /// # Errors
    /// The API does not answer, or ended the watch with an error.
    pub async fn watch(&self, mut tell: impl FnMut(News)) -> Result<(), ApiError> {
        use futures_util::TryStreamExt as _;

        let what = format!("watch the {KIND}s that wait for this node");
        let selector = format!("{}=asked", label_of(&self.node));
        let parameters = ListParams::default().labels(&selector).match_any();
        let request = Request::new(PATH).list_metadata(&parameters);
        let list: List = self.request(&what, request).await?;
        list.items().iter().filter_map(news).for_each(&mut tell);
        let version = list.metadata.resource_version.unwrap_or_default();
        let parameters = WatchParams::default()
            .labels(&selector)
            .timeout(WATCH_SECONDS);
        let request = Request::new(PATH).watch_metadata(&parameters, &version);
        let request = request.map_err(|error| ApiError::Wrong {
            what: what.clone(),
            why: error.to_string(),
        })?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let failed = |error: kube::Error| failure(&what, &error);
        let events = self.client.request_events::<PartialObjectMeta>(request);
        let events = tokio::time::timeout(LIMIT, events).await;
        let events = events.map_err(|_| ApiError::NoAnswer {
            what: what.clone(),
            why: format!("not within {} s", LIMIT.as_secs()),
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

impl Summary {
    fn of(document: &Document) -> Self {
        let sizes = document.parts.keys().map(|part| piece::size(*part));
        let nodes = document.parts.values().map(|part| part.node.as_str());
        let nodes: BTreeSet<&str> = nodes.filter(|node| !node.is_empty()).collect();
        Self {
            parts: document.parts.len(),
            nodes: nodes.len(),
            free: ADDRESSES.saturating_sub(sizes.sum()),
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

fn version_of(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn hash_of(space: &AddressSpace) -> String {
    format!("{:016x}", hash(&space.file_name()))
}

/// The label of a node in documents of which it has parts.
fn label_of(node: &str) -> String {
    format!("n.rdma-netdev.io/{:016x}", hash(node))
}

/// The name of a document: a DNS subdomain (RFC 1123).
fn name(space: &AddressSpace, subnet: IpNetwork) -> String {
    let first = match subnet {
        IpNetwork::V4(subnet) => subnet.network().to_string(),
        IpNetwork::V6(subnet) => {
            let groups = subnet.network().segments();
            groups.map(|group| format!("{group:x}")).join("-")
        }
    };
    format!("{first}-{}", hash_of(space))
}

/// Which document an object is, by its metadata.
fn news(object: &PartialObjectMeta) -> Option<News> {
    let metadata = &object.metadata;
    let space = metadata.annotations.as_ref()?.get(SPACE)?;
    let space = AddressSpace::of_file_name(space)?;
    let (first, _) = metadata.name.as_ref()?.rsplit_once('-')?;
    let subnet = match first.contains('.') {
        true => subnet_of(first.parse().ok()?),
        false => subnet_of(first.replace('-', ":").parse().ok()?),
    };
    (metadata.name.as_deref() == Some(&name(&space, subnet))).then_some(News { space, subnet })
}

fn parse(object: Object, space: &AddressSpace, subnet: IpNetwork) -> Result<Read, String> {
    let (mut document, metadata) = (object.spec, object.metadata);
    let network = space.network_name.as_deref().unwrap_or_default();
    if (
        document.subnet,
        document.store.as_str(),
        document.network_name.as_str(),
    ) != (subnet, space.store.as_str(), network)
    {
        return Err(format!(
            "it is the document of {}, store {:?}, network_name {:?}: its name is another's",
            document.subnet, document.store, document.network_name
        ));
    }
    document.store.clone_from(&space.store);
    let version = version_of(metadata.resource_version.as_deref());
    if version == 0 {
        return Err("its resourceVersion is not a number".to_owned());
    }
    Ok(Read {
        document,
        version,
        labels: metadata.labels.unwrap_or_default(),
    })
}

/// What labels say of a document, that was another one before.
pub(crate) fn labels(
    space: &AddressSpace,
    before: &Document,
    next: &Document,
) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([(SPACE.to_owned(), hash_of(space))]);
    if Summary::of(next).free == 0 {
        labels.insert(FULL.to_owned(), "true".to_owned());
    }
    let asked: BTreeSet<&str> = before
        .parts
        .values()
        .flat_map(|part| &part.wanted)
        .map(|want| want.id.as_str())
        .collect();
    for part in next.parts.values().filter(|part| !part.node.is_empty()) {
        let is_handed = part.id.as_deref().is_some_and(|id| asked.contains(id));
        // An assigned part is not taken up yet.
        let waits =
            !part.wanted.is_empty() || part.over.is_some() || part.id.is_none() || is_handed;
        let label = labels
            .entry(label_of(&part.node))
            .or_insert_with(|| "own".to_owned());
        if waits {
            "asked".clone_into(label);
        }
    }
    labels
}

/// The merge patch (RFC 7386) that makes one document of another.
fn patch(
    version: u64,
    before: &Document,
    next: &Document,
    has: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> Value {
    let changed = next
        .parts
        .iter()
        .filter(|(piece, part)| before.parts.get(piece) != Some(part))
        .map(|(piece, part)| (piece.to_string(), whole(part)));
    let removed = before
        .parts
        .keys()
        .filter(|piece| !next.parts.contains_key(piece))
        .map(|piece| (piece.to_string(), Value::Null));
    let parts: serde_json::Map<String, Value> = changed.chain(removed).collect();
    let is_ours = |label: &&String| {
        *label == SPACE || *label == FULL || label.starts_with("n.rdma-netdev.io/")
    };
    let set = labels
        .iter()
        .filter(|(label, value)| has.get(*label) != Some(value))
        .map(|(label, value)| (label.clone(), json!(value)));
    let unset = has
        .keys()
        .filter(is_ours)
        .filter(|label| !labels.contains_key(*label))
        .map(|label| (label.clone(), Value::Null));
    let labels: serde_json::Map<String, Value> = set.chain(unset).collect();
    let finalizers = match next.parts.is_empty() {
        true => Value::Null,
        false => json!([FINALIZER]),
    };
    json!({
        "metadata": {
            "resourceVersion": version.to_string(),
            "labels": labels,
            "finalizers": finalizers,
            // Who wrote which key is not followed: with 250 owners it is more than the document, and the
            // server computes it at each change (Kubernetes, "Server-Side Apply", clearing managedFields).
            "managedFields": [{}],
        },
        "spec": {"parts": parts},
        "status": Summary::of(next),
    })
}

/// A part, in which a key that it does not have takes the place of one that it had.
fn whole(part: &Part) -> Value {
    let mut value = json!(part);
    if let Some(keys) = value.as_object_mut() {
        for key in ["node", "id", "wanted", "over", "network", "reserved"] {
            keys.entry(key).or_insert(Value::Null);
        }
        if let Some(Value::Object(network)) = keys.get_mut("network") {
            network.entry("gateway").or_insert(Value::Null);
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::subnet::{Over, OwnNetwork, Want};

    fn space() -> AddressSpace {
        AddressSpace::new("default", Some("blue"))
    }

    fn document(parts: &[(&str, Part)]) -> Document {
        let mut document = Document::empty("default", "blue", "10.56.3.0/24".parse().unwrap());
        for (piece, part) in parts {
            document.parts.insert(piece.parse().unwrap(), part.clone());
        }
        document
    }

    fn part(node: &str, id: &str) -> Part {
        Part {
            node: node.into(),
            id: Some(id.into()),
            ..Part::default()
        }
    }

    fn want(node: &str, id: &str) -> Want {
        Want {
            node: node.into(),
            id: id.into(),
            size: 1,
            among: ([10, 56, 3, 1].into(), [10, 56, 3, 9].into()),
        }
    }

    #[test]
    fn a_name_says_which_document_it_is() {
        for (subnet, first) in [
            ("10.56.3.0/24", "10.56.3.0"),
            ("fd00::300/120", "fd00-0-0-0-0-0-0-300"),
            ("::/120", "0-0-0-0-0-0-0-0"),
        ] {
            let subnet: IpNetwork = subnet.parse().unwrap();
            let name = name(&space(), subnet);
            assert_eq!(name, format!("{first}-{}", hash_of(&space())));
            let mut object = PartialObjectMeta {
                types: None,
                metadata: ObjectMeta {
                    name: Some(name),
                    annotations: Some(BTreeMap::from([(SPACE.to_owned(), "default+blue".into())])),
                    ..ObjectMeta::default()
                },
                _phantom: std::marker::PhantomData,
            };
            let space = space();
            assert_eq!(news(&object), Some(News { space, subnet }));
            // One that was copied under another name.
            object.metadata.annotations =
                Some(BTreeMap::from([(SPACE.to_owned(), "default".into())]));
            assert_eq!(news(&object), None);
        }
    }

    #[test]
    fn labels_say_for_whom_something_waits() {
        let before = document(&[(
            "10.56.3.0/28",
            Part {
                wanted: vec![want("c", "c-1"), want("d", "d-1")],
                ..part("a", "a-1")
            },
        )]);
        let over = Some(Over {
            since: "now".into(),
            why: "gone".into(),
        });
        let next = document(&[
            ("10.56.3.0/29", part("a", "a-1")),
            ("10.56.3.8/32", part("c", "c-1")),
            ("10.56.3.64/28", part("b", "b-1")),
            (
                "10.56.3.128/28",
                Part {
                    over,
                    ..part("e", "e-1")
                },
            ),
            (
                "10.56.3.192/28",
                Part {
                    node: "f".into(),
                    network: Some(OwnNetwork::default()),
                    ..Part::default()
                },
            ),
        ]);
        let labels = labels(&space(), &before, &next);
        let of = |node| labels.get(&label_of(node)).map(String::as_str);
        // c was handed a piece, e's part is marked, f's is not taken up yet.
        let found = ["a", "b", "c", "d", "e", "f"].map(of);
        let own = Some("own");
        let asked = Some("asked");
        assert_eq!(found, [own, own, asked, None, asked, asked]);
        assert_eq!(labels[SPACE], hash_of(&space()));
        assert_eq!(labels.get(FULL), None);
        let full = document(&[("10.56.3.0/24", part("a", "a-1"))]);
        let labels = super::labels(&space(), &next, &full);
        assert_eq!(labels[FULL], "true");
    }

    /// RFC 7386.
    fn merge(target: &mut Value, patch: &Value) {
        let Value::Object(changes) = patch else {
            *target = patch.clone();
            return;
        };
        if !target.is_object() {
            *target = json!({});
        }
        let keys = target.as_object_mut().unwrap();
        for (key, change) in changes {
            match change {
                Value::Null => drop(keys.remove(key)),
                change => merge(keys.entry(key).or_insert(Value::Null), change),
            }
        }
    }

    #[test]
    fn a_patch_makes_one_document_of_another() {
        let network = |gateway: Option<std::net::IpAddr>| Part {
            network: Some(OwnNetwork { gateway }),
            ..part("n", "n-1")
        };
        let documents = [
            document(&[]),
            document(&[("10.56.3.0/28", part("a", "a-1"))]),
            document(&[(
                "10.56.3.0/28",
                Part {
                    wanted: vec![want("c", "c-1")],
                    over: Some(Over {
                        since: "now".into(),
                        why: "gone".into(),
                    }),
                    ..part("a", "a-1")
                },
            )]),
            document(&[
                ("10.56.3.0/29", part("b", "b-2")),
                ("10.56.3.8/29", network(Some([10, 56, 3, 9].into()))),
            ]),
            document(&[(
                "10.56.3.8/29",
                Part {
                    reserved: Some("whereabouts: ml/worker-0".into()),
                    ..Part::default()
                },
            )]),
            document(&[("10.56.3.8/29", network(None))]),
        ];
        for before in &documents {
            for next in &documents {
                let has = labels(&space(), &document(&[]), before);
                let labels = labels(&space(), before, next);
                let mut foreign = has.clone();
                foreign.insert("team".into(), "ml".into());
                let mut object = json!({
                    "metadata": {"labels": foreign},
                    "spec": before,
                    "status": Summary::of(before),
                });
                let patch = patch(7, before, next, &foreign, &labels);
                assert_eq!(patch["metadata"]["resourceVersion"], "7");
                merge(&mut object, &patch);
                assert_eq!(Document::deserialize(&object["spec"]).unwrap(), *next);
                let mut expected = labels;
                expected.insert("team".into(), "ml".into());
                assert_eq!(object["metadata"]["labels"], json!(expected));
                assert_eq!(object["status"], json!(Summary::of(next)));
                let is_held = object["metadata"].get("finalizers").is_some();
                assert_eq!(is_held, !next.parts.is_empty());
            }
        }
    }

    #[test]
    fn a_document_under_the_name_of_another_is_refused() {
        let object = |store: &str, version: &str| Object {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            metadata: ObjectMeta {
                resource_version: Some(version.into()),
                ..ObjectMeta::default()
            },
            spec: Document::empty(store, "blue", "10.56.3.0/24".parse().unwrap()),
            status: Summary::default(),
        };
        let subnet = "10.56.3.0/24".parse().unwrap();
        let read = parse(object("default", "12"), &space(), subnet).unwrap();
        assert_eq!(read.version, 12);
        for (object, why) in [
            (object("other", "12"), "store \"other\""),
            (object("default", "x"), "resourceVersion"),
        ] {
            let error = parse(object, &space(), subnet).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
