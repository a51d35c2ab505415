//! The stand-in's own configuration, in the node's CNI directory.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

/// What Multus has in its configuration, and what stands for the API server.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Conf {
    /// The runtime's; passed on to a default network that names none.
    pub(super) cni_version: String,
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "type")]
    _type: String,
    /// File of the default network: a list of plugins or a single one.
    pub(super) cluster_network: PathBuf,
    /// Files and directories of manifests with `NetworkAttachmentDefinition`s.
    pub(super) networks: Vec<PathBuf>,
    /// Directory of Pod objects.
    #[serde(default = "default_pods")]
    pub(super) pods: PathBuf,
    /// The kubelet's `PodResources` socket.
    #[serde(default = "default_pod_resources")]
    pub(super) pod_resources: PathBuf,
    /// Directory of plugins, searched before `CNI_PATH`.
    #[serde(default)]
    pub(super) bin_dir: Option<PathBuf>,
    /// Directory of scratch files, results and network status.
    #[serde(default = "default_state_dir")]
    pub(super) state_dir: PathBuf,
    /// Directory of device-info files.
    #[serde(default = "default_device_info")]
    pub(super) device_info: PathBuf,
    /// What libcni adds; of no use here.
    #[serde(rename = "prevResult", default)]
    _prev_result: Option<Value>,
    #[serde(rename = "runtimeConfig", default)]
    _runtime_config: Option<Value>,
    #[serde(rename = "cni.dev/valid-attachments", default)]
    pub(super) valid_attachments: Option<Value>,
    #[serde(rename = "cni.dev/attachments", default)]
    _attachments: Option<Value>,
}

fn default_pods() -> PathBuf {
    PathBuf::from("/var/lib/kubelet/api/pods")
}

fn default_pod_resources() -> PathBuf {
    PathBuf::from("/var/lib/kubelet/pod-resources/kubelet.sock")
}

fn default_state_dir() -> PathBuf {
    PathBuf::from("/var/lib/cni/multus-standin")
}

fn default_device_info() -> PathBuf {
    PathBuf::from("/var/run/k8s.cni.cncf.io/devinfo")
}

impl Conf {
    pub(super) fn read(stdin: &[u8]) -> Result<Self> {
        serde_json::from_slice(stdin).context("load netconf")
    }
}
