//! What the kubelet hands out again without asking: its checkpoint.
//!
//! The kubelet keeps each Allocate answer in `kubelet_internal_checkpoint` in the device-plugins
//! directory and uses it for every start of the container, over restarts of the kubelet, the daemon
//! and the node (`pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go`). After a reboot the kernel
//! may have numbered the verbs nodes in another order, so an old answer may name another HCA's node.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kubelet_api::deviceplugin::ContainerAllocateResponse;
use prost::Message as _;
use serde::Deserialize;

/// Name of the file in the device-plugins directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// Why the checkpoint says nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error("read the kubelet's checkpoint {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// It is written otherwise than any kubelet wrote it so far.
    #[error("read the kubelet's checkpoint {path}: {reason}")]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Stored {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: DeviceIds,
    alloc_resp: Option<String>,
}

/// By NUMA node since Kubernetes 1.20, a list before.
#[derive(Deserialize)]
#[serde(untagged)]
enum DeviceIds {
    ByNode(BTreeMap<String, Vec<String>>),
    List(Vec<String>),
}

impl DeviceIds {
    fn contains(&self, id: &str) -> bool {
        match self {
            Self::ByNode(nodes) => nodes.values().flatten().any(|known| known == id),
            Self::List(list) => list.iter().any(|known| known == id),
        }
    }
}

/// Paths of the device nodes that containers get with these units: one set for each container that
/// holds one of them.
///
/// # Errors
/// [`Error`]: the checkpoint says nothing.
pub fn granted(
    directory: &Path,
    resource: &str,
    ids: &[String],
) -> Result<Vec<BTreeSet<String>>, Error> {
    let path = directory.join(FILE);
    let text = std::fs::read(&path).map_err(|source| Error::Read {
        path: path.clone(),
        source,
    })?;
    let form = |reason: String| Error::Form {
        path: path.clone(),
        reason,
    };
    let stored: Stored = serde_json::from_slice(&text).map_err(|error| form(error.to_string()))?;
    let entries = stored.data.pod_device_entries.unwrap_or_default();
    let ours = entries.into_iter().filter(|entry| {
        entry.resource_name == resource && ids.iter().any(|id| entry.device_ids.contains(id))
    });
    ours.map(|entry| {
        let answer = BASE64_STANDARD
            .decode(entry.alloc_resp.unwrap_or_default())
            .map_err(|error| form(error.to_string()))?;
        let answer = ContainerAllocateResponse::decode(answer.as_slice())
            .map_err(|error| form(error.to_string()))?;
        Ok(answer
            .devices
            .into_iter()
            .map(|device| device.host_path)
            .collect())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use kubelet_api::deviceplugin::DeviceSpec;

    use super::*;

    fn answer(paths: &[&str]) -> String {
        let devices = paths.iter().map(|path| DeviceSpec {
            container_path: (*path).into(),
            host_path: (*path).into(),
            permissions: "rw".into(),
        });
        let answer = ContainerAllocateResponse {
            devices: devices.collect(),
            ..Default::default()
        };
        BASE64_STANDARD.encode(answer.encode_to_vec())
    }

    #[test]
    fn answers_are_found_by_resource_and_unit_in_both_forms() {
        let dir = tempfile::tempdir().unwrap();
        let text = serde_json::json!({"Data": {"PodDeviceEntries": [
            {"PodUID": "1", "ContainerName": "a", "ResourceName": "rdma/a",
             "DeviceIDs": {"-1": ["0000:3b:00.2"], "1": ["0000:3b:00.3"]},
             "AllocResp": answer(&["/dev/infiniband/uverbs0"])},
            {"PodUID": "2", "ContainerName": "a", "ResourceName": "rdma/b",
             "DeviceIDs": ["0000:3b:00.2"], "AllocResp": answer(&["/dev/infiniband/uverbs7"])},
        ], "RegisteredDevices": {}}, "Checksum": 1});
        std::fs::write(dir.path().join(FILE), text.to_string()).unwrap();
        let paths = |resource: &str, id: &str| -> Vec<String> {
            let all = granted(dir.path(), resource, &[id.to_owned()]).unwrap();
            all.into_iter().flatten().collect()
        };
        assert_eq!(paths("rdma/a", "0000:3b:00.3"), ["/dev/infiniband/uverbs0"]);
        assert_eq!(paths("rdma/b", "0000:3b:00.2"), ["/dev/infiniband/uverbs7"]);
        assert!(paths("rdma/a", "0000:3b:00.4").is_empty());
    }

    #[test]
    fn a_checkpoint_of_another_form_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let ask = || {
            granted(dir.path(), "rdma/a", &["x".into()])
                .unwrap_err()
                .to_string()
        };
        assert!(ask().contains(FILE), "{}", ask());
        std::fs::write(dir.path().join(FILE), "{\"Version\": 3}").unwrap();
        assert!(ask().contains("missing field"), "{}", ask());
    }
}
