//! The question for a block of addresses: what `rdma-ipam` asks the broker on its node.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// `perNode` of a range: the block of a node is a network of its own, and the only one that the node
/// has of the range.
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

/// An ADD finds no address in the blocks that its node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BlockNeed {
    /// Name of the store in the node's policy.
    pub store: String,
    /// `network_name`, if the network has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// The range's network, as `10.0.0.0/24`.
    pub range: String,
    /// First and last address of each part of the range that may be given, ascending.
    pub spans: Vec<(IpAddr, IpAddr)>,
    /// How the network wants the range to be divided, if not into blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_node: Option<PerNode>,
    /// The one address that is wanted, if it is a certain one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Whether that address is wanted by itself, not with a block around it: it is of a network
    /// that the policy does not let be cut into blocks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub single: bool,
    /// How many addresses are wanted.
    pub count: u32,
}

/// The node has these blocks now; they may have been there already.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BlocksGranted {
    /// As `10.0.0.16/28`.
    pub blocks: Vec<String>,
}
