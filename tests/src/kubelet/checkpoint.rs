//! The device plugin checkpoint, `kubelet_internal_checkpoint`: which container
//! holds which devices, and what the plugin answered for them.
//!
//! The shape is the kubelet's, since others read it. The checksum is not (the
//! kubelet hashes Go's printed form of the data): it only serves to notice a
//! file that was cut short or edited. The file is replaced by rename, so a
//! kubelet killed at any point leaves the old or the new one.

use std::collections::BTreeMap;
use std::fs;
use std::hash::Hasher;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubelet_api::deviceplugin::ContainerAllocateResponse;
use prost::Message;
use serde::{Deserialize, Serialize};

use super::state::Assignment;

/// The file's name in the device-plugins directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Stored {
    data: Data,
    checksum: u64,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Vec<Entry>,
    registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<i64, Vec<String>>,
    alloc_resp: String,
}

/// What a kubelet finds when it starts.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Checkpoint {
    pub(super) assignments: Vec<Assignment>,
    pub(super) registered: BTreeMap<String, Vec<String>>,
}

/// Reads the checkpoint; a missing one is empty.
pub(super) fn read(directory: &Path) -> Result<Checkpoint> {
    let path = directory.join(FILE);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Checkpoint::default()),
        Err(error) => return Err(error).context(format!("read {}", path.display())),
    };
    let stored: Stored =
        serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
    if checksum(&stored.data)? != stored.checksum {
        bail!(
            "checkpoint {} is corrupt: its checksum does not match",
            path.display()
        );
    }
    let assignments = stored.data.pod_device_entries.into_iter().map(|entry| {
        let response = BASE64_STANDARD.decode(&entry.alloc_resp)?;
        Ok(Assignment {
            pod_uid: entry.pod_uid,
            container: entry.container_name,
            resource: entry.resource_name,
            devices: entry.device_ids,
            response: ContainerAllocateResponse::decode(response.as_slice())?,
        })
    });
    Ok(Checkpoint {
        assignments: assignments.collect::<Result<_>>()?,
        registered: stored.data.registered_devices,
    })
}

/// Replaces the checkpoint.
pub(super) fn write(
    directory: &Path,
    assignments: &[Assignment],
    registered: BTreeMap<String, Vec<String>>,
) -> Result<()> {
    let entries = assignments.iter().map(|held| Entry {
        pod_uid: held.pod_uid.clone(),
        container_name: held.container.clone(),
        resource_name: held.resource.clone(),
        device_ids: held.devices.clone(),
        alloc_resp: BASE64_STANDARD.encode(held.response.encode_to_vec()),
    });
    let data = Data {
        pod_device_entries: entries.collect(),
        registered_devices: registered,
    };
    let stored = Stored {
        checksum: checksum(&data)?,
        data,
    };
    let path = directory.join(FILE);
    let fresh = directory.join(format!(".{FILE}.new"));
    fs::write(&fresh, serde_json::to_vec(&stored)?)
        .and_then(|()| fs::rename(&fresh, &path))
        .with_context(|| format!("write {}", path.display()))
}

fn checksum(data: &Data) -> Result<u64> {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(&serde_json::to_vec(data)?);
    Ok(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment() -> Assignment {
        Assignment {
            pod_uid: "uid".to_owned(),
            container: "main".to_owned(),
            resource: "rdma/hca".to_owned(),
            devices: [(-1, vec!["a".to_owned()])].into(),
            response: ContainerAllocateResponse {
                envs: [("KEY".to_owned(), "value".to_owned())].into(),
                ..ContainerAllocateResponse::default()
            },
        }
    }

    #[test]
    fn comes_back_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(read(directory.path()).unwrap(), Checkpoint::default());
        let registered = BTreeMap::from([("rdma/hca".to_owned(), vec!["a".to_owned()])]);
        write(directory.path(), &[assignment()], registered.clone()).unwrap();
        let found = read(directory.path()).unwrap();
        assert_eq!(
            found,
            Checkpoint {
                assignments: vec![assignment()],
                registered
            }
        );
    }

    #[test]
    fn has_the_keys_that_readers_of_the_kubelets_file_need() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &[assignment()], BTreeMap::new()).unwrap();
        let text = fs::read(directory.path().join(FILE)).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let entry = &json["Data"]["PodDeviceEntries"][0];
        assert_eq!(entry["PodUID"], "uid");
        assert_eq!(entry["ContainerName"], "main");
        assert_eq!(entry["ResourceName"], "rdma/hca");
        assert_eq!(entry["DeviceIDs"]["-1"][0], "a");
        assert!(json["Data"]["RegisteredDevices"].is_object());
    }

    #[test]
    fn an_edited_file_is_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &[assignment()], BTreeMap::new()).unwrap();
        let path = directory.path().join(FILE);
        let text = fs::read_to_string(&path)
            .unwrap()
            .replace("\"main\"", "\"other\"");
        fs::write(&path, text).unwrap();
        assert!(
            read(directory.path())
                .unwrap_err()
                .to_string()
                .contains("checksum")
        );
    }
}
