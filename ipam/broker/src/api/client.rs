//! One operation on the API each.
//!
//! Each change names the object's UID and `resourceVersion`, so it is made to what was read or not
//! at all.

use std::collections::BTreeSet;

use ipam::block::AddressSpace;
use kube_core::params::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions,
};
use kube_core::request::{Error as RequestError, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::document::{
    BlockObject, GROUP, Metadata, NODE_LABEL, NamedObject, NodeObject, RangeObject, SPACE_LABEL,
    VERSION, label_hash,
};
use super::items::{Items, ItemsError};
use super::transport::{ApiAnswer, ApiError, PIECE_TIMEOUT, Transport};

/// What became of a change or removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed<T> {
    Done(T),
    /// The object is another one, or was changed since it was read.
    Conflict,
    /// There is no such object.
    Gone,
}

/// An object of ours in the API.
pub trait Object: Serialize + DeserializeOwned {
    const KIND: &str;
    const PLURAL: &str;

    fn metadata(&self) -> &Metadata;
}

impl Object for BlockObject {
    const KIND: &str = "AddressBlock";
    const PLURAL: &str = "addressblocks";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

impl Object for RangeObject {
    const KIND: &str = "AddressRange";
    const PLURAL: &str = "addressranges";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

/// The operations, in one namespace.
#[derive(Debug, Clone)]
pub struct Client {
    transport: Transport,
    namespace: String,
}

impl Client {
    #[must_use]
    pub fn new(transport: Transport, namespace: &str) -> Self {
        Self {
            transport,
            namespace: namespace.to_owned(),
        }
    }

    /// The connection, for its counts.
    #[must_use]
    pub fn transport(&self) -> &Transport {
        &self.transport
    }

    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The objects of a kind in the namespace.
    pub(super) fn path(&self, group: &str, version: &str, plural: &str) -> Request {
        let namespace = &self.namespace;
        Request::new(format!(
            "/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        ))
    }

    fn path_of<T: Object>(&self) -> Request {
        self.path(GROUP, VERSION, T::PLURAL)
    }

    async fn send(
        &self,
        verb: &str,
        what: &str,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<ApiAnswer, ApiError> {
        let attempt = format!("{verb} {what}");
        match request {
            Ok(request) => self.transport.send(&attempt, request).await,
            Err(error) => Err(ApiError::Malformed {
                attempt,
                why: error.to_string(),
            }),
        }
    }

    async fn get<T: DeserializeOwned>(
        &self,
        kind: &str,
        path: &Request,
        name: &str,
    ) -> Result<Option<T>, ApiError> {
        let request = path.get(name, &GetParams::default());
        match self.send("read", &format!("{kind} {name}"), request).await {
            Ok(answer) => answer.document().await.map(Some),
            // Without a reason the path is unknown, not the object.
            Err(error) if error.refusal() == Some((404, "NotFound")) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes an object, and answers it as the server has it; `None` if there is another one of its name.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been made all the same ([`ApiError::is_uncertain`]).
    pub async fn create<T: Object>(&self, object: &T) -> Result<Option<T>, ApiError> {
        let body = serde_json::to_vec(object).map_err(RequestError::SerializeBody);
        let path = self.path_of::<T>();
        let request = body.and_then(|body| path.create(&PostParams::default(), body));
        let what = format!("{} {}", T::KIND, object.metadata().name);
        match self.send("create", &what, request).await {
            Ok(answer) => answer.document().await.map(Some),
            Err(error) if error.refusal() == Some((409, "AlreadyExists")) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Changes fields of `spec`, and labels, of the very object that was read.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been changed all the same ([`ApiError::is_uncertain`]).
    pub async fn change<T: Object>(
        &self,
        object: &Metadata,
        spec: Value,
    ) -> Result<Changed<T>, ApiError> {
        let patch = Patch::Merge(json!({"metadata": object, "spec": spec}));
        let path = self.path_of::<T>();
        let request = path.patch(&object.name, &PatchParams::default(), &patch);
        self.changed(object, request).await
    }

    /// The same of what brokers note in `status`; without a `resourceVersion`, of any version.
    pub async fn note<T: Object>(
        &self,
        object: &Metadata,
        status: Value,
    ) -> Result<Changed<T>, ApiError> {
        let patch = Patch::Merge(json!({"metadata": object, "status": status}));
        let (path, parameters) = (self.path_of::<T>(), PatchParams::default());
        let request = path.patch_subresource("status", &object.name, &parameters, &patch);
        self.changed(object, request).await
    }

    async fn changed<T: Object>(
        &self,
        object: &Metadata,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<Changed<T>, ApiError> {
        let what = format!("{} {}", T::KIND, object.name);
        match self.send("change", &what, request).await {
            Ok(answer) => answer.document().await.map(Changed::Done),
            Err(error) => unchanged(error),
        }
    }

    /// Removes the object that was read.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been removed all the same ([`ApiError::is_uncertain`]).
    pub async fn delete<T: Object>(&self, object: &Metadata) -> Result<Changed<()>, ApiError> {
        let parameters = DeleteParams::default().preconditions(Preconditions {
            uid: Some(object.uid.clone()),
            resource_version: Some(object.resource_version.clone()),
        });
        let request = self.path_of::<T>().delete(&object.name, &parameters);
        let what = format!("{} {}", T::KIND, object.name);
        match self.send("delete", &what, request).await {
            Ok(_) => Ok(Changed::Done(())),
            Err(error) => unchanged(error),
        }
    }

    /// Each range of the namespace, of one moment that is not before the call.
    pub async fn ranges(&self, each: impl FnMut(RangeObject)) -> Result<(), ApiError> {
        let path = self.path_of::<RangeObject>();
        let request = path.list(&ListParams::default());
        self.list("the AddressRanges", request, each)
            .await
            .map(drop)
    }

    /// The object of a block.
    pub async fn block(&self, name: &str) -> Result<Option<BlockObject>, ApiError> {
        let path = self.path_of::<BlockObject>();
        self.get(BlockObject::KIND, &path, name).await
    }

    /// The names of all blocks of a space.
    pub async fn block_names(&self, space: &AddressSpace) -> Result<BTreeSet<String>, ApiError> {
        let parameters = of_space(space).match_any();
        let request = self.path_of::<BlockObject>().list_metadata(&parameters);
        let mut names = BTreeSet::new();
        self.list(
            "the names of AddressBlocks",
            request,
            |item: NamedObject| {
                names.insert(item.metadata.name);
            },
        )
        .await?;
        Ok(names)
    }

    /// Each block of a space.
    pub async fn blocks_of_space(
        &self,
        space: &AddressSpace,
        each: impl FnMut(BlockObject),
    ) -> Result<(), ApiError> {
        let request = self
            .path_of::<BlockObject>()
            .list(&of_space(space).match_any());
        self.list("the AddressBlocks of a space", request, each)
            .await
            .map(drop)
    }

    /// Each block of a node, as they are now, and the list's `resourceVersion`.
    pub async fn blocks_of_node(
        &self,
        node: &str,
        each: impl FnMut(BlockObject),
    ) -> Result<String, ApiError> {
        let selector = of_node(node);
        let request = self
            .path_of::<BlockObject>()
            .list(&ListParams::default().labels(&selector));
        self.list("the AddressBlocks of this node", request, each)
            .await
    }

    /// Begins to watch the blocks of a node behind a `resourceVersion`.
    pub(super) async fn watch_blocks_of_node(
        &self,
        node: &str,
        version: &str,
        seconds: u32,
    ) -> Result<ApiAnswer, ApiError> {
        let parameters = kube_core::params::WatchParams {
            label_selector: Some(of_node(node)),
            field_selector: None,
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: false,
        };
        let request = self.path_of::<BlockObject>().watch(&parameters, version);
        self.send("watch", "the AddressBlocks of this node", request)
            .await
    }

    /// A node of the cluster, as it is now.
    pub async fn node(&self, name: &str) -> Result<Option<NodeObject>, ApiError> {
        let path = Request::new("/api/v1/nodes");
        self.get("Node", &path, name).await
    }

    /// Each node of the cluster, with its taints.
    pub async fn nodes(&self, each: impl FnMut(NodeObject)) -> Result<(), ApiError> {
        let path = Request::new("/api/v1/nodes");
        let request = path.list(&ListParams::default().match_any());
        self.list("the Nodes", request, each).await.map(drop)
    }

    /// Name and UID of each node of the cluster.
    pub async fn node_names(&self, each: impl FnMut(NodeObject)) -> Result<(), ApiError> {
        let path = Request::new("/api/v1/nodes");
        let request = path.list_metadata(&ListParams::default().match_any());
        self.list("the names of Nodes", request, each)
            .await
            .map(drop)
    }

    /// Reads a list item by item; answers its `resourceVersion`.
    pub(super) async fn list<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Result<http::Request<Vec<u8>>, RequestError>,
        mut each: impl FnMut(T),
    ) -> Result<String, ApiError> {
        let mut answer = self.send("list", what, request).await?;
        let mut items = Items::default();
        while let Some(piece) = answer.piece(PIECE_TIMEOUT).await? {
            let fed = items.feed(&piece, |item| {
                match serde_json::from_slice(item) {
                    Ok(item) => each(item),
                    // Written by hand, or by a newer version: the others are no worse for it.
                    Err(error) => tracing::warn!(
                        list = what, object = name_of(item), %error,
                        "an object cannot be read and is passed over; correct or remove it"
                    ),
                }
                Ok::<_, ItemsError>(())
            });
            fed.map_err(|error| answer.malformed(error))?;
        }
        let metadata = items.end().map_err(|error| answer.malformed(error))?;
        let version = metadata.get("resourceVersion").and_then(Value::as_str);
        Ok(version.unwrap_or_default().to_owned())
    }
}

/// The name of an object of which nothing else may be readable.
fn name_of(object: &[u8]) -> String {
    serde_json::from_slice::<NamedObject>(object).map_or_else(
        |_| "without a name".to_owned(),
        |object| object.metadata.name,
    )
}

fn unchanged<T>(error: ApiError) -> Result<Changed<T>, ApiError> {
    match error.refusal() {
        Some((409, _)) => Ok(Changed::Conflict),
        Some((404, "NotFound")) => Ok(Changed::Gone),
        _ => Err(error),
    }
}

fn of_space(space: &AddressSpace) -> ListParams {
    let hash = label_hash(&space.object_name());
    ListParams::default().labels(&format!("{SPACE_LABEL}={hash}"))
}

fn of_node(node: &str) -> String {
    format!("{NODE_LABEL}={}", label_hash(node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_from_the_servers_memory_says_so() {
        let parameters = of_space(&AddressSpace::new("default", None)).match_any();
        let request = Request::new("/apis/x").list_metadata(&parameters).unwrap();
        assert!(request.uri().query().unwrap().contains("resourceVersion=0"));
        let accept = request.headers().get(http::header::ACCEPT).unwrap();
        assert!(
            accept
                .to_str()
                .unwrap()
                .contains("as=PartialObjectMetadataList")
        );
    }
}
