//! Questions about single addresses: what `rdma-ipam` asks the broker of a store whose leases are
//! objects of the cluster, not files of the node.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One question about addresses of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AddressQuestion {
    /// Name of the store in the node's policy.
    pub store: String,
    /// `name` of the network configuration.
    pub network: String,
    /// What is to be done.
    pub action: AddressAction,
}

/// What is to be done with addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum AddressAction {
    /// ADD: an attachment gets one address of each range, or none of any. Answered in the order of
    /// the ranges; the same again for the same attachment.
    Take(Taking),
    /// DEL: what an attachment has is freed. Answered with what was freed.
    Free(Holding),
    /// CHECK: what an attachment has.
    Find(Holding),
    /// GC: what this node took for the network and what is not in the list is freed. Answered with
    /// what was freed.
    KeepOnly(Vec<AttachmentId>),
    /// STATUS: the cluster answers.
    Probe,
}

/// Container and interface of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AttachmentId {
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// `CNI_IFNAME`.
    pub interface: String,
}

impl fmt::Display for AttachmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of container {}", self.interface, self.container)
    }
}

/// Addresses that an attachment is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Taking {
    /// Whose.
    pub attachment: AttachmentId,
    /// Namespace and name of its pod, as `ml/train-0`.
    pub pod: String,
    /// `network_name`, if the network has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// One address of each.
    pub ranges: Vec<RangeWanted>,
}

/// One address of a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RangeWanted {
    /// The range's network, as `10.0.0.0/24`.
    pub range: String,
    /// First and last address of each part of the range that may be given, ascending.
    pub spans: Vec<(IpAddr, IpAddr)>,
    /// The one address that is wanted, if it is a certain one. It may be outside of the spans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
}

/// Addresses that an attachment has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Holding {
    /// Whose.
    pub attachment: AttachmentId,
    /// `network_name`, if the network has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// The networks of the ranges that it may have addresses of; none if they are not known, so
    /// that all have to be searched.
    pub ranges: Vec<String>,
}

/// Addresses of an attachment, or that were freed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Addresses {
    /// In the order of the ranges that were asked for.
    pub addresses: Vec<IpAddr>,
}
