//! Questions to `rdma-agent`: an ADD whose node's parts have no room, and an administrator's word about
//! parts. A question that cannot be served is answered with a failure: `exhausted` and
//! `heldByAnotherNode` (asking again does not help), `mismatch` (the network or the policy is wrong),
//! `tryAgain` (somebody was asked for room, or the store does not answer).

use std::fmt;
use std::net::IpAddr;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};

use crate::document::name;

/// Most ranges of one question.
const MAX_NEEDS: usize = 256;

/// This node's parts have no address left of some ranges. Afterwards the ADD reads the node's file
/// `owned` again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RoomQuestion {
    /// How long the asker waits for the answer. A claim goes on behind it.
    pub within_ms: u32,
    /// At least one.
    #[serde(deserialize_with = "needs")]
    pub needs: Vec<RoomNeed>,
}

/// What is missing of one range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RoomNeed {
    /// Name of the store in the node's policy.
    #[serde(deserialize_with = "name")]
    pub store: String,
    /// `network_name`, if the network has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// The range's network, as `10.0.0.0/24`.
    pub range: String,
    /// First and last address of each run of usable addresses, ascending: without `exclude`, gateways,
    /// next hops and the host's own addresses.
    pub spans: Vec<(IpAddr, IpAddr)>,
    /// Which of them.
    pub room: Room,
}

/// Which room is needed of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Room {
    /// So many more addresses, whichever.
    Addresses(u32),
    /// This one.
    Exact(IpAddr),
    /// The node's own network of the range (`perNode`).
    Network(PerNode),
}

/// `perNode` of a range: a node has one network of the range to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "expected an object with prefix and gateway"
)]
pub struct PerNode {
    /// Prefix length of a node's network.
    pub prefix: u8,
    /// An address of each network that no pod gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Gateway>,
}

/// Which address of a node's network is the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(
    rename_all = "lowercase",
    expecting = "gateway is not first, last or a number"
)]
pub enum Gateway {
    /// The first address that a host can have.
    First,
    /// The last one.
    Last,
    /// Counted from the address of the network, which is 0.
    #[serde(untagged)]
    Number(u32),
}

impl fmt::Display for PerNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

fn needs<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RoomNeed>, D::Error> {
    let needs = Vec::<RoomNeed>::deserialize(from)?;
    match needs.len() {
        1..=MAX_NEEDS => Ok(needs),
        count => Err(D::Error::custom(format!(
            "{count} needs, expected 1 to {MAX_NEEDS}"
        ))),
    }
}

/// The node has room now, or had it already: look at `owned`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomMade {}

/// An administrator's word about the parts of a space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PartsQuestion {
    /// Name of the store in the node's policy.
    #[serde(deserialize_with = "name")]
    pub store: String,
    /// `network_name`, if the space has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// What to do.
    pub change: PartsChange,
}

/// What an administrator wants of parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PartsChange {
    /// Give this node's parts without leases back, before the node leaves the cluster.
    GiveBack,
    /// Release all parts of a node that will not come back.
    ReleaseNode(#[serde(deserialize_with = "name")] String),
    /// Release one part, as `10.0.0.16/28`, whoever has it.
    ReleasePart(#[serde(deserialize_with = "name")] String),
    /// Make this part a node's network.
    Assign {
        /// As `10.0.0.16/28`.
        #[serde(deserialize_with = "name")]
        part: String,
        /// Name of the node.
        #[serde(deserialize_with = "name")]
        node: String,
    },
    /// Reserve what is free of a range, as `10.0.0.0/20`, until `Unhold`.
    Hold(#[serde(deserialize_with = "name")] String),
    /// Free what `Hold` reserved of a range.
    Unhold(#[serde(deserialize_with = "name")] String),
    /// Make the reserved parts of a range equal to another program's leases.
    Import {
        /// As `10.0.0.0/20`.
        #[serde(deserialize_with = "name")]
        range: String,
        /// Which leases.
        leases: OldLeases,
    },
}

/// Leases of a program that served a range before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OldLeases {
    /// Those of whereabouts' objects.
    Whereabouts {
        /// Namespace of the objects.
        #[serde(deserialize_with = "name")]
        namespace: String,
    },
    /// All that host-local has on this node for one of its networks.
    HostLocal {
        /// Name of host-local's network.
        #[serde(deserialize_with = "name")]
        network: String,
        /// Each address, and the ID of the container that has it.
        leases: Vec<(IpAddr, String)>,
    },
}

/// What became of the parts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartsChanged {
    /// Parts that were given back, released or assigned, as `10.0.0.16/28`.
    pub changed: Vec<String>,
    /// Parts, or addresses of an import, that stay as they are, each with the reason. Not all if there
    /// are many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<(String, String)>,
    /// After `Hold`, `Unhold` and `Import`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Reserved>,
}

/// How many addresses of a range are reserved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// Newly: held, or another program's leases.
    pub added: u64,
    /// No longer.
    pub removed: u64,
    /// Of another program's leases: how many are reserved now, and how many cannot be.
    pub left: u64,
}
