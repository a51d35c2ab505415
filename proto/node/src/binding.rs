//! Late binding: which HCA a slot becomes, and what a container gets for it.
//!
//! The CNI plugin asks in this order: [`BindQuestion`] before it takes anything from the host,
//! [`CommitQuestion`] after the devices are where they belong, [`UnbindQuestion`] after they are back.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::document::{Pod, name, units};

/// How long the asker of a [`BindQuestion`] waits: the daemon asks the kubelet and the GPUs' drivers.
pub const BIND_TIMEOUT: Duration = Duration::from_secs(5);

/// Bind all slots of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BindQuestion {
    /// The pod.
    pub pod: Pod,
    /// `CNI_CONTAINERID`: the pod's sandbox. A new sandbox of the pod is bound anew.
    #[serde(deserialize_with = "name")]
    pub sandbox: String,
    /// The slot that the runtime passed for this attachment.
    #[serde(deserialize_with = "name")]
    pub unit: String,
}

/// Write what containers get for slots that are bound to this sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CommitQuestion {
    /// The pod.
    pub pod: Pod,
    /// The sandbox.
    #[serde(deserialize_with = "name")]
    pub sandbox: String,
    /// The slots whose devices are in place.
    #[serde(deserialize_with = "units")]
    pub units: Vec<String>,
    /// By slot, the index of the RoCE v2 GID of its interface's first address, as far as it is known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gid_indexes: BTreeMap<String, u32>,
}

/// The sandbox does not have these slots any more. What was attached stays bound until its pod is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UnbindQuestion {
    /// The sandbox.
    #[serde(deserialize_with = "name")]
    pub sandbox: String,
    /// The slots; if there are none, all of the sandbox. Those that containers started with without an
    /// attachment stay.
    #[serde(
        default,
        deserialize_with = "units",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub units: Vec<String>,
}

/// The answer to [`BindQuestion`]: every slot of the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bound {
    /// The slots, by rail of their HCAs.
    pub slots: Vec<BoundSlot>,
    /// What the administrator should know about the choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A slot and the HCA that it became.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundSlot {
    /// The slot.
    pub unit: String,
    /// The resource that it is of.
    pub resource: String,
    /// The container that asked for it.
    pub container: String,
    /// The HCA, in the form in which unit IDs name them.
    pub hca: String,
    /// The rail of the HCA.
    pub rail: u32,
    /// Name of the file in the CDI directory that is written at [`CommitQuestion`].
    pub cdi_file: String,
}

/// The answer to [`CommitQuestion`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Committed {
    /// Names of the files that are in the CDI directory now.
    pub cdi_files: Vec<String>,
}

/// The answer to [`UnbindQuestion`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unbound {
    /// HCAs that are free again.
    pub hcas: Vec<String>,
}
