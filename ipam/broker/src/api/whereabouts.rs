//! whereabouts' objects, and one operation on them each.
//!
//! Pool and reservation have the fields that whereabouts writes, and no others. What the broker has
//! to know besides, it notes in the metadata of reservations that it makes: a label by which it finds
//! those of its node, and an annotation. whereabouts reads neither.

use std::collections::BTreeMap;
use std::net::IpAddr;

use http::header::{CONTENT_TYPE, HeaderValue};
use ipam::whereabouts::{GROUP, VERSION};
use kube_core::params::{ListParams, Patch, PatchParams};
use kube_core::request::Request;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Changed, Client, Created, same};
use super::document::{Metadata, NODE_LABEL, NamedObject, label_hash};
use super::transport::{ApiError, Transport};

/// The annotation with [`Lease`].
const LEASE_ANNOTATION: &str = "rdma-netdev.io/lease";

/// The leases of a range: an `IPPool`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolObject {
    api_version: String,
    kind: String,
    /// Its name is [`ipam::whereabouts::pool_name`].
    pub metadata: Metadata,
    /// What whereabouts writes.
    pub spec: PoolSpec,
}

/// `spec` of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    /// The range's network.
    pub range: String,
    /// By the distance to the network address, in decimals.
    pub allocations: BTreeMap<String, Allocation>,
}

/// One lease of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// The container.
    pub id: String,
    /// Namespace and name of its pod.
    pub podref: String,
    /// The interface; absent where an old whereabouts wrote it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ifname: String,
}

impl PoolObject {
    /// One without leases, as whereabouts makes it.
    #[must_use]
    pub fn new(name: &str, range: &str) -> Self {
        Self {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: "IPPool".to_owned(),
            metadata: Metadata {
                name: name.to_owned(),
                ..Metadata::default()
            },
            spec: PoolSpec {
                range: range.to_owned(),
                allocations: BTreeMap::new(),
            },
        }
    }
}

/// The lease of an address among all ranges: an `OverlappingRangeIPReservation`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservationObject {
    api_version: String,
    kind: String,
    /// Its name is [`ipam::whereabouts::reservation_name`].
    pub metadata: ReservationMetadata,
    /// What whereabouts writes.
    pub spec: ReservationSpec,
}

/// What a reservation says about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationMetadata {
    /// As of any object.
    #[serde(flatten)]
    pub object: Metadata,
    /// Notes that no program selects by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// `spec` of a reservation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationSpec {
    /// Namespace and name of the pod.
    pub podref: String,
    /// The interface; absent where an old whereabouts wrote it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ifname: String,
}

/// What a broker notes of a reservation that it made: all that its `spec` does not say.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// The broker's node.
    pub node: String,
    /// The container.
    pub container: String,
    /// `name` of the network configuration.
    pub network: String,
    /// `network_name`, if the network has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// The range's network.
    pub range: String,
    /// The address.
    pub address: IpAddr,
}

impl ReservationObject {
    /// Of an address, for a pod's interface.
    #[must_use]
    pub fn new(name: &str, pod: &str, interface: &str, lease: &Lease) -> Self {
        Self {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: "OverlappingRangeIPReservation".to_owned(),
            metadata: ReservationMetadata {
                object: Metadata {
                    name: name.to_owned(),
                    labels: label(&lease.node),
                    ..Metadata::default()
                },
                annotations: annotation(lease),
            },
            spec: ReservationSpec {
                podref: pod.to_owned(),
                ifname: interface.to_owned(),
            },
        }
    }

    /// What the broker that made it noted; `None` of one that whereabouts made.
    #[must_use]
    pub fn lease(&self) -> Option<Lease> {
        let text = self.metadata.annotations.get(LEASE_ANNOTATION)?;
        serde_json::from_str(text).ok()
    }
}

fn label(node: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(NODE_LABEL.to_owned(), label_hash(node))])
}

fn annotation(lease: &Lease) -> BTreeMap<String, String> {
    let text = serde_json::to_string(lease).unwrap_or_default();
    BTreeMap::from([(LEASE_ANNOTATION.to_owned(), text)])
}

/// One operation of a JSON patch (RFC 6902).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Operation {
    /// The patch is done only if this value is there; `null` stands for none.
    Test {
        /// Where.
        path: String,
        /// Which.
        value: Value,
    },
    /// Adds a value.
    Add {
        /// Where.
        path: String,
        /// Which.
        value: Value,
    },
    /// Replaces the value that is there.
    Replace {
        /// Where.
        path: String,
        /// By which.
        value: Value,
    },
    /// Removes the value that is there.
    Remove {
        /// Where.
        path: String,
    },
}

/// The operations, in the namespace of whereabouts' objects.
#[derive(Debug, Clone)]
pub struct Objects {
    client: Client,
    namespace: String,
}

impl Objects {
    /// In a namespace.
    #[must_use]
    pub fn new(transport: Transport, namespace: &str) -> Self {
        Self {
            client: Client::new(transport, namespace),
            namespace: namespace.to_owned(),
        }
    }

    fn path(&self, plural: &str) -> Request {
        let namespace = &self.namespace;
        Request::new(format!(
            "/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}"
        ))
    }

    fn pools(&self) -> Request {
        self.path("ippools")
    }

    fn reservations(&self) -> Request {
        self.path("overlappingrangeipreservations")
    }

    /// Whether the API serves pools.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn probe(&self) -> Result<(), ApiError> {
        let request = self.pools().list_metadata(&ListParams::default().limit(1));
        let sent = self.client.send("list", "IPPools", request).await?;
        sent.document::<Value>().await.map(drop)
    }

    /// A pool, as it is now.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn pool(&self, name: &str) -> Result<Option<PoolObject>, ApiError> {
        let what = format!("IPPool {name}");
        self.client.get(&what, &self.pools(), name).await
    }

    /// Each pool.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn each_pool(&self, each: impl FnMut(PoolObject)) -> Result<(), ApiError> {
        let request = self.pools().list(&ListParams::default());
        let listed = self.client.list("the IPPools", request, each).await;
        listed.map(drop)
    }

    /// Makes a pool, if there is none.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn create_pool(&self, pool: &PoolObject) -> Result<Created<PoolObject>, ApiError> {
        let what = format!("IPPool {}", pool.metadata.name);
        self.client.create(&what, &self.pools(), pool).await
    }

    /// Changes a pool, if each test of the patch holds; [`Changed::Conflict`] where one does not.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been changed all the same ([`ApiError::is_uncertain`]).
    pub async fn patch_pool(
        &self,
        name: &str,
        operations: &[Operation],
    ) -> Result<Changed<PoolObject>, ApiError> {
        // kube's own type for this needs another library, for the type of its content alone.
        let patch = Patch::Merge(operations);
        let request = self.pools().patch(name, &PatchParams::default(), &patch);
        let request = request.map(|mut request| {
            let kind = HeaderValue::from_static("application/json-patch+json");
            request.headers_mut().insert(CONTENT_TYPE, kind);
            request
        });
        let what = format!("IPPool {name}");
        match self.client.change(&what, request).await {
            // A test that does not hold.
            Err(error) if error.refusal() == Some((422, "Invalid")) => Ok(Changed::Conflict),
            other => other,
        }
    }

    /// A reservation, as it is now.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn reservation(&self, name: &str) -> Result<Option<ReservationObject>, ApiError> {
        let what = reservation(name);
        self.client.get(&what, &self.reservations(), name).await
    }

    /// Makes a reservation, if there is none of its name.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been made all the same ([`ApiError::is_uncertain`]).
    pub async fn create_reservation(
        &self,
        object: &ReservationObject,
    ) -> Result<Created<ReservationObject>, ApiError> {
        let what = reservation(&object.metadata.object.name);
        let path = self.reservations();
        self.client.create(&what, &path, object).await
    }

    /// Notes in the reservation that was read for whom it is now.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn note_in_reservation(
        &self,
        read: &Metadata,
        lease: &Lease,
    ) -> Result<Changed<ReservationObject>, ApiError> {
        let mut metadata = same(read);
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.insert("labels".to_owned(), json!(label(&lease.node)));
            metadata.insert("annotations".to_owned(), json!(annotation(lease)));
        }
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let path = self.reservations();
        let request = path.patch(&read.name, &PatchParams::default(), &patch);
        self.client.change(&reservation(&read.name), request).await
    }

    /// Removes the reservation that was read.
    ///
    /// # Errors
    /// [`ApiError`]; it may have been removed all the same ([`ApiError::is_uncertain`]).
    pub async fn delete_reservation(&self, read: &Metadata) -> Result<Changed<()>, ApiError> {
        let path = self.reservations();
        let what = reservation(&read.name);
        self.client.delete(&what, &path, read).await
    }

    /// The name of each reservation, as of some seconds ago.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn each_reservation_name(
        &self,
        mut each: impl FnMut(String),
    ) -> Result<(), ApiError> {
        let parameters = ListParams::default().match_any();
        let request = self.reservations().list_metadata(&parameters);
        let what = "the names of OverlappingRangeIPReservations";
        let named = |item: NamedObject| each(item.metadata.name);
        self.client.list(what, request, named).await.map(drop)
    }

    /// Each reservation that a node's broker made or took over, as they are now.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn reservations_of_node(
        &self,
        node: &str,
        each: impl FnMut(ReservationObject),
    ) -> Result<(), ApiError> {
        let selector = format!("{NODE_LABEL}={}", label_hash(node));
        let parameters = ListParams::default().labels(&selector);
        let request = self.reservations().list(&parameters);
        let what = "the OverlappingRangeIPReservations of this node";
        self.client.list(what, request, each).await.map(drop)
    }
}

fn reservation(name: &str) -> String {
    format!("OverlappingRangeIPReservation {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_the_fields_that_whereabouts_writes() {
        let pool = serde_json::to_value(PoolObject::new("10.0.0.0-24", "10.0.0.0/24")).unwrap();
        assert_eq!(
            pool,
            json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": "10.0.0.0-24"},
                "spec": {"range": "10.0.0.0/24", "allocations": {}}})
        );
        let lease = Lease {
            node: "n1".into(),
            container: "c1".into(),
            network: "rail".into(),
            network_name: None,
            range: "10.0.0.0/24".into(),
            address: [10, 0, 0, 1].into(),
        };
        let object = ReservationObject::new("10.0.0.1", "ml/a", "net1", &lease);
        assert_eq!(object.lease(), Some(lease));
        let object = serde_json::to_value(object).unwrap();
        assert_eq!(object["kind"], "OverlappingRangeIPReservation");
        assert_eq!(object["spec"], json!({"podref": "ml/a", "ifname": "net1"}));
        let theirs = json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1",
            "kind": "OverlappingRangeIPReservation",
            "metadata": {"name": "10.0.0.2", "uid": "u", "resourceVersion": "7", "generation": 1},
            "spec": {"podref": "ml/b"}});
        let theirs: ReservationObject = serde_json::from_value(theirs).unwrap();
        assert_eq!((theirs.lease(), theirs.spec.ifname.as_str()), (None, ""));
        assert_eq!(theirs.metadata.object.uid, "u");
    }

    #[test]
    fn a_patch_is_written_as_the_standard_says() {
        let path = || "/spec/allocations/5".to_owned();
        let operations = [
            Operation::Test {
                path: path(),
                value: Value::Null,
            },
            Operation::Add {
                path: path(),
                value: json!({"id": "c"}),
            },
            Operation::Remove { path: path() },
        ];
        assert_eq!(
            serde_json::to_value(operations).unwrap(),
            json!([{"op": "test", "path": "/spec/allocations/5", "value": null},
                {"op": "add", "path": "/spec/allocations/5", "value": {"id": "c"}},
                {"op": "remove", "path": "/spec/allocations/5"}])
        );
    }
}
