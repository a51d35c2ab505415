//! whereabouts' objects, as far as the broker reads them.

use std::collections::BTreeMap;

use ipam::whereabouts::{GROUP, VERSION};
use kube_core::params::ListParams;
use kube_core::request::Request;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::client::Client;
use super::document::{Metadata, NamedObject};
use super::transport::{ApiError, Transport};

/// The leases of a range: an `IPPool`.
#[derive(Debug, Deserialize)]
pub struct PoolObject {
    /// Its name is [`ipam::whereabouts::pool_name`], with a node's name before the range where
    /// whereabouts cuts it into slices of nodes.
    pub metadata: Metadata,
    pub spec: PoolSpec,
}

#[derive(Debug, Deserialize)]
pub struct PoolSpec {
    pub range: String,
    /// By the distance to the network address, in decimals.
    pub allocations: BTreeMap<String, IgnoredAny>,
}

/// The objects of a namespace.
#[derive(Debug, Clone)]
pub struct WhereaboutsObjects(Client);

impl WhereaboutsObjects {
    #[must_use]
    pub fn new(transport: Transport, namespace: &str) -> Self {
        Self(Client::new(transport, namespace))
    }

    fn path(&self, plural: &str) -> Request {
        self.0.path(GROUP, VERSION, plural)
    }

    pub async fn each_pool(&self, each: impl FnMut(PoolObject)) -> Result<(), ApiError> {
        let request = self.path("ippools").list(&ListParams::default());
        let listed = self.0.list("the IPPools", request, each).await;
        listed.map(drop)
    }

    /// The name of each reservation, as of some seconds ago.
    pub async fn each_reservation_name(
        &self,
        mut each: impl FnMut(String),
    ) -> Result<(), ApiError> {
        let path = self.path("overlappingrangeipreservations");
        let request = path.list_metadata(&ListParams::default().match_any());
        let what = "the names of OverlappingRangeIPReservations";
        let named = |item: NamedObject| each(item.metadata.name);
        self.0.list(what, request, named).await.map(drop)
    }

    /// Whether the cluster has a node of this name.
    pub async fn is_node(&self, name: &str) -> Result<bool, ApiError> {
        self.0.node(name).await.map(|node| node.is_some())
    }
}
