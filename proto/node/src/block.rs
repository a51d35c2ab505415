//! The question for a block of addresses: what `rdma-ipam` asks the broker on its node.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

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
