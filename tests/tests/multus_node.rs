//! A node whose pods get their networks by way of the stand-ins for kubelet
//! and Multus; a namespace is its host.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use e2e::bin_under_test::standin;
use e2e::cni::Call;
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::need::REFERENCE_PLUGINS;
use e2e::netns::Netns;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plugin::{Plugin, Script};

pub(crate) struct MultusNode {
    pub(crate) host: Netns,
    pub(crate) kubelet: Kubelet,
    /// Keeps the units listed.
    _plugin: Plugin,
    root: TempDir,
}

impl MultusNode {
    /// A node that offers these units of a resource, and whose default network is `default`.
    /// Plugins are searched for in its `bin`, then among the reference plugins;
    /// definitions of networks in its `networks`.
    pub(crate) fn new(resource: &str, units: &[&str], default: &Value) -> Result<Self> {
        let root = tempfile::tempdir()?;
        let kubelet = Kubelet::start(Settings::below(&root.path().join("kubelet")))?;
        let plugins = &kubelet.settings().device_plugins;
        let plugin = Plugin::serve(plugins, "plugin.sock", Script::default())?;
        plugin.list_healthy(units);
        plugin.register(resource)?;
        kubelet.wait_allocatable(resource, units.len(), Duration::from_secs(10))?;
        for directory in ["bin", "networks"] {
            fs::create_dir(root.path().join(directory))?;
        }
        fs::write(root.path().join("default.conflist"), default.to_string())?;
        Ok(Self {
            host: Netns::new("host")?,
            kubelet,
            _plugin: plugin,
            root,
        })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// The runtime's call for a pod's sandbox.
    pub(crate) fn multus(&self, pod: &Pod, netns: &Path) -> Result<Call> {
        let (uid, name) = (&pod.metadata.uid, &pod.metadata.name);
        let sandbox = format!("sandbox-{name}");
        let mut call = Call::new(&standin("multus-standin")?, &sandbox, netns, "eth0");
        call.path =
            std::env::join_paths([self.path("bin").as_path(), Path::new(REFERENCE_PLUGINS)])?;
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={name};\
             K8S_POD_INFRA_CONTAINER_ID={sandbox};K8S_POD_UID={uid}",
            pod.metadata.namespace
        );
        Ok(call.on_host(&self.host))
    }

    /// The configuration in the node's CNI directory.
    pub(crate) fn multus_conf(&self) -> Vec<u8> {
        let conf = json!({
            "cniVersion": "1.0.0",
            "name": "node",
            "type": "multus-standin",
            "clusterNetwork": self.path("default.conflist"),
            "networks": [self.path("networks")],
            "pods": self.kubelet.settings().pods,
            "podResources": self.kubelet.pod_resources_socket(),
            "stateDir": self.path("state"),
            "deviceInfo": self.path("devinfo"),
        });
        conf.to_string().into_bytes()
    }
}
