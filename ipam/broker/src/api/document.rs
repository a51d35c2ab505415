//! The objects in the API, as far as the broker reads and writes them.
//!
//! Reading passes over the fields that a broker does not use; `managedFields` alone is longer than the
//! rest. Changes are merge patches ([`super::Client::change_block`]), so fields that a newer version
//! has stay in the object.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam::block::{AddressSpace, hash};
use ipam::range::gateway_in;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use node_wire::PerNode;
use serde::{Deserialize, Serialize};

use super::client::Object as _;

/// API group of the two kinds.
pub const GROUP: &str = "rdma-netdev.io";
pub const VERSION: &str = "v1alpha1";
/// Label: [`label_hash`] of the name of the node that has the block.
pub const NODE_LABEL: &str = "rdma-netdev.io/node-hash";
/// Label: [`label_hash`] of the name of the space's object.
pub const SPACE_LABEL: &str = "rdma-netdev.io/space-hash";
/// The taint with which an administrator says that a node is off
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/#node-kubernetes-io-out-of-service>).
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// A value for a label: names of nodes and spaces may be longer than the 63 bytes that one may have.
#[must_use]
pub fn label_hash(text: &str) -> String {
    format!("{:016x}", hash(text))
}

/// What objects say about themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Unique among the objects of a kind in a namespace.
    pub name: String,
    /// Unique among all objects that ever were.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Another one after each change.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    /// What watches and lists select by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// An object of which only the metadata was asked for.
#[derive(Debug, Clone, Deserialize)]
pub struct NamedObject {
    pub metadata: Metadata,
}

/// A range of an address space, and how it is cut into blocks ([`crate::decide::grid`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RangeObject {
    api_version: String,
    kind: String,
    pub metadata: Metadata,
    pub spec: RangeSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<RangeStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RangeSpec {
    /// Name of the store in the nodes' policies.
    pub store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    pub range: IpNetwork,
    /// Prefix length of a block.
    pub block_prefix: u8,
    /// That a node has one block, which is a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node: Option<PerNode>,
    /// Networks of it whose addresses are blocks of their own, ascending.
    #[serde(default, rename = "static")]
    pub static_networks: Vec<IpNetwork>,
    /// No other range contradicts it, so blocks of it may be claimed.
    #[serde(default)]
    pub confirmed: bool,
}

/// What brokers note of a range.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RangeStatus {
    /// When a broker last went through all of its blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swept: Option<Timestamp>,
    /// Since when it has no block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_since: Option<Timestamp>,
}

impl RangeObject {
    #[must_use]
    pub fn new(spec: RangeSpec) -> Self {
        let space = spec.space();
        let label = label_hash(&space.object_name());
        Self {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: Self::KIND.to_owned(),
            metadata: Metadata {
                name: space.block_name(spec.range),
                labels: [(SPACE_LABEL.to_owned(), label)].into(),
                ..Metadata::default()
            },
            spec,
            status: None,
        }
    }

    /// As [`BlockObject::is_well_named`].
    #[must_use]
    pub fn is_well_named(&self) -> bool {
        let range = self.spec.range;
        self.metadata.name == self.spec.space().block_name(range) && range.ip() == range.network()
    }

    /// Since when it has no block, if that is noted.
    #[must_use]
    pub fn empty_since(&self) -> Option<Timestamp> {
        self.status.as_ref()?.empty_since
    }
}

impl RangeSpec {
    /// The space that the range is of.
    #[must_use]
    pub fn space(&self) -> AddressSpace {
        AddressSpace::new(&self.store, self.network_name.as_deref())
    }
}

/// A block of addresses that a node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockObject {
    api_version: String,
    kind: String,
    pub metadata: Metadata,
    pub spec: BlockSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<BlockStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockSpec {
    /// Name of the store in the nodes' policies.
    pub store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    pub block: IpNetwork,
    /// As in its range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node: Option<PerNode>,
    /// The gateway of a node's network, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Name of the node that has it.
    pub node: String,
    /// UID of that node's object: another machine of its name has another one.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// One more each time that it changes hands.
    #[serde(default)]
    pub epoch: u64,
    /// When it came to the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// A node that asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted_by: Option<String>,
    /// Its node is gone, and the block rests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<Over>,
}

/// That a block is taken from its node, because the node is gone or an administrator says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Over {
    /// Since when the block rests.
    pub since: Timestamp,
    /// The node whose broker found it; `administrator` for `release`.
    pub by: String,
    pub why: String,
    /// An administrator said so: it holds although the node is there, and the node's broker obeys.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub administrator: bool,
}

/// How full a block is. Written now and then; nothing is decided by it but whom to ask first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockStatus {
    #[serde(default)]
    pub used: u64,
    #[serde(default)]
    pub free: u64,
}

/// A node by name and UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    pub name: String,
    pub uid: String,
}

impl BlockObject {
    /// A block that comes to a node.
    #[must_use]
    pub fn new(
        space: &AddressSpace,
        block: IpNetwork,
        node: &NodeId,
        epoch: u64,
        now: Timestamp,
    ) -> Self {
        let labels = [
            (SPACE_LABEL, &space.object_name()),
            (NODE_LABEL, &node.name),
        ];
        let labels = labels.map(|(label, text)| (label.to_owned(), label_hash(text)));
        Self {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: Self::KIND.to_owned(),
            metadata: Metadata {
                name: space.block_name(block),
                labels: labels.into(),
                ..Metadata::default()
            },
            spec: BlockSpec {
                store: space.store.clone(),
                network_name: space.network_name.clone(),
                block,
                per_node: None,
                gateway: None,
                node: node.name.clone(),
                node_uid: node.uid.clone(),
                epoch,
                since: Some(now),
                wanted_by: None,
                over: None,
            },
            status: None,
        }
    }

    /// The same, of a range that is divided so.
    #[must_use]
    pub fn divided(mut self, per_node: Option<PerNode>) -> Self {
        self.spec.per_node = per_node;
        self.spec.gateway = per_node.and_then(|per_node| gateway_in(per_node, self.spec.block));
        self
    }

    /// The space that it is in.
    #[must_use]
    pub fn space(&self) -> AddressSpace {
        AddressSpace::new(&self.spec.store, self.spec.network_name.as_deref())
    }

    /// The node that has it.
    #[must_use]
    pub fn node(&self) -> NodeId {
        NodeId {
            name: self.spec.node.clone(),
            uid: self.spec.node_uid.clone(),
        }
    }

    /// That an administrator took it from its node.
    #[must_use]
    pub fn taken(&self) -> Option<&Over> {
        self.spec.over.as_ref().filter(|over| over.administrator)
    }

    /// Whether its name is the one that its spec demands. Only then the name's uniqueness means
    /// that of the addresses.
    #[must_use]
    pub fn is_well_named(&self) -> bool {
        self.metadata.name == self.space().block_name(self.spec.block)
            && self.spec.block.ip() == self.spec.block.network()
    }
}

/// A node of the cluster.
#[derive(Debug, Clone, Deserialize)]
pub struct NodeObject {
    pub metadata: Metadata,
    /// Absent where only the metadata was asked for.
    #[serde(default)]
    pub spec: NodeSpec,
    #[serde(default)]
    pub status: NodeStatus,
}

/// The part of a node's `spec` that is used.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NodeSpec {
    #[serde(default)]
    taints: Vec<Taint>,
}

#[derive(Debug, Clone, Deserialize)]
struct Taint {
    key: String,
}

/// The part of a node's `status` that is used.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    #[serde(default)]
    conditions: Vec<Condition>,
    #[serde(default)]
    node_info: NodeInfo,
}

#[derive(Debug, Clone, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct NodeInfo {
    #[serde(default, rename = "bootID")]
    boot_id: String,
}

impl NodeObject {
    #[must_use]
    pub fn id(&self) -> NodeId {
        NodeId {
            name: self.metadata.name.clone(),
            uid: self.metadata.uid.clone(),
        }
    }

    /// The boot ID that its kubelet reported; empty before it did.
    #[must_use]
    pub fn boot(&self) -> &str {
        &self.status.node_info.boot_id
    }

    /// Whether an administrator said that it is off.
    #[must_use]
    pub fn is_out_of_service(&self) -> bool {
        self.spec
            .taints
            .iter()
            .any(|taint| taint.key == OUT_OF_SERVICE)
    }

    /// Whether its kubelet reports to the cluster.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|condition| condition.kind == "Ready" && condition.status == "True")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_have_the_form_of_the_custom_resource_definitions() {
        let now: Timestamp = "2026-11-22T21:00:00Z".parse().unwrap();
        let space = AddressSpace::new("default", Some("blue"));
        let node = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let block = BlockObject::new(&space, "10.0.0.16/28".parse().unwrap(), &node, 2, now);
        assert_eq!(
            serde_json::to_value(&block).unwrap(),
            json!({
                "apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressBlock",
                "metadata": {"name": "default.net-blue.10.0.0.16-28", "labels": {
                    NODE_LABEL: label_hash("n1"), SPACE_LABEL: label_hash("default.net-blue")}},
                "spec": {"store": "default", "networkName": "blue", "block": "10.0.0.16/28", "node": "n1",
                    "nodeUID": "u1", "epoch": 2, "since": "2026-11-22T21:00:00Z"}
            })
        );
        assert!(block.is_well_named());
        assert_eq!((block.space(), block.node()), (space.clone(), node));
        let fixed = ["10.0.0.5/32".parse().unwrap()];
        let range = RangeSpec::new(&space, "10.0.0.0/24".parse().unwrap(), 28, &fixed);
        let range = RangeObject::new(range);
        assert!(range.is_well_named());
        assert_eq!(
            serde_json::to_value(range).unwrap(),
            json!({
                "apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressRange",
                "metadata": {"name": "default.net-blue.10.0.0.0-24", "labels": {
                    SPACE_LABEL: label_hash("default.net-blue")}},
                "spec": {"store": "default", "networkName": "blue", "range": "10.0.0.0/24",
                    "blockPrefix": 28, "static": ["10.0.0.5/32"], "confirmed": false}
            })
        );
    }

    #[test]
    fn an_object_under_another_blocks_name_is_not_believed() {
        let now = Timestamp::UNIX_EPOCH;
        let space = AddressSpace::new("default", None);
        let node = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let mut block = BlockObject::new(&space, "10.0.0.16/28".parse().unwrap(), &node, 1, now);
        block.spec.block = "10.0.0.32/28".parse().unwrap();
        assert!(!block.is_well_named());
        block.spec.block = "10.0.0.17/28".parse().unwrap();
        assert!(!block.is_well_named());
    }

    #[test]
    fn fields_that_are_not_known_are_passed_over() {
        let text = json!({
            "apiVersion": "rdma-netdev.io/v1alpha1", "kind": "AddressBlock",
            "metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "x"}]},
            "spec": {"store": "default", "block": "10.0.0.16/28", "node": "n", "nodeUID": "u", "newer": 1}
        });
        let block: BlockObject = serde_json::from_value(text).unwrap();
        assert_eq!(block.metadata.resource_version, "7");
        let node: NodeObject = serde_json::from_value(json!({
            "metadata": {"name": "n", "uid": "u"},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": [
                {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}]}
        }))
        .unwrap();
        assert!(node.is_out_of_service());
        assert!(!node.is_ready());
    }

    #[test]
    fn a_node_is_ready_by_its_condition_alone() {
        for (kind, status, ready) in [
            ("Ready", "True", true),
            ("Ready", "False", false),
            ("Ready", "Unknown", false),
            ("DiskPressure", "True", false),
        ] {
            let node: NodeObject = serde_json::from_value(json!({
                "metadata": {"name": "n", "uid": "u"},
                "status": {"conditions": [{"type": kind, "status": status, "reason": "x"}],
                    "nodeInfo": {"bootID": "b"}}
            }))
            .unwrap();
            assert_eq!(node.is_ready(), ready, "{kind} {status}");
        }
    }
}
