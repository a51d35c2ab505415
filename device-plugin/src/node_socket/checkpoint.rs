//! Which pod holds a device, from the kubelet's device manager checkpoint.
//!
//! PodResources names pods without their UIDs; the checkpoint has them. Its format is internal to
//! the kubelet (`pkg/kubelet/cm/devicemanager/checkpoint`), so what cannot be read is an answer
//! like any other, and never an error of the daemon. The checksum is that of Go's printed form of
//! the data and is not verified: the kubelet replaces the file by rename, so it is always whole.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

/// The file's name in the kubelet's device-plugins directory.
pub const FILE: &str = "kubelet_internal_checkpoint";
/// The longest file that is read. Entries hold what plugins answered, some kilobytes each.
const MAX_BYTES: u64 = 64 << 20;

/// UIDs of pods by resource and device ID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint(HashMap<String, HashMap<String, BTreeSet<String>>>);

/// What the checkpoint says of a device and a pod's UID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The device is that pod's.
    This,
    /// The device is another pod's.
    Another,
    /// The device is not in the checkpoint.
    Unknown,
}

impl Checkpoint {
    /// Whose device it is.
    #[must_use]
    pub fn owner(&self, uid: &str, resource: &str, device: &str) -> Owner {
        match self.0.get(resource).and_then(|ids| ids.get(device)) {
            Some(uids) if uids.contains(uid) => Owner::This,
            Some(_) => Owner::Another,
            None => Owner::Unknown,
        }
    }

    /// Reads the text of a checkpoint.
    ///
    /// # Errors
    /// It is not of the form that kubelets since 1.20 write.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let stored: Stored = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        let mut owners = Self::default();
        for entry in stored.data.pod_device_entries.unwrap_or_default() {
            let ids = owners.0.entry(entry.resource_name).or_default();
            for id in entry.device_ids.into_values().flatten().flatten() {
                ids.entry(id).or_default().insert(entry.pod_uid.clone());
            }
        }
        Ok(owners)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Stored {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Go writes an empty list as null.
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    resource_name: String,
    /// By NUMA node, -1 for none.
    #[serde(rename = "DeviceIDs")]
    device_ids: HashMap<String, Option<Vec<String>>>,
}

/// A checkpoint that was read, and from which file. The kubelet writes a new file each time.
#[derive(Debug, Clone)]
pub struct Known {
    file: (u64, u64, i64, i64, u64),
    /// What was in it.
    pub checkpoint: Arc<Checkpoint>,
}

/// Reads the checkpoint, unless it is the file that is known.
///
/// # Errors
/// It cannot be read or understood; the text has the path.
pub fn read(path: &Path, known: Option<Known>) -> Result<Known, String> {
    let failed = |why: String| format!("{}: {why}", path.display());
    let open = || -> std::io::Result<_> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        Ok((file, meta))
    };
    let (file, meta) = open().map_err(|error| failed(error.to_string()))?;
    let id = (
        meta.dev(),
        meta.ino(),
        meta.mtime(),
        meta.mtime_nsec(),
        meta.len(),
    );
    if let Some(known) = known.filter(|known| known.file == id) {
        return Ok(known);
    }
    if meta.len() > MAX_BYTES {
        return Err(failed(format!(
            "{} bytes, more than {MAX_BYTES}",
            meta.len()
        )));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES)
        .read_to_end(&mut text)
        .map_err(|error| failed(error.to_string()))?;
    let checkpoint = Checkpoint::parse(&text).map_err(failed)?;
    Ok(Known {
        file: id,
        checkpoint: Arc::new(checkpoint),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(uid: &str, resource: &str, ids: &serde_json::Value) -> serde_json::Value {
        json!({"PodUID": uid, "ContainerName": "main", "ResourceName": resource,
               "DeviceIDs": ids, "AllocResp": "CgA="})
    }

    fn parse(entries: &serde_json::Value) -> Result<Checkpoint, String> {
        let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}},
                          "Checksum": 1});
        Checkpoint::parse(text.to_string().as_bytes())
    }

    #[test]
    fn devices_belong_to_the_uid_of_their_entry() {
        let checkpoint = parse(&json!([
            entry(
                "u1",
                "rdma/a",
                &json!({"-1": ["x"], "0": ["y", "z"], "1": null})
            ),
            entry("u2", "rdma/b", &json!({"0": ["x"]})),
        ]))
        .unwrap();
        assert_eq!(checkpoint.owner("u1", "rdma/a", "x"), Owner::This);
        assert_eq!(checkpoint.owner("u1", "rdma/a", "z"), Owner::This);
        assert_eq!(checkpoint.owner("u1", "rdma/b", "x"), Owner::Another);
        assert_eq!(checkpoint.owner("u2", "rdma/a", "y"), Owner::Another);
        assert_eq!(checkpoint.owner("u1", "rdma/a", "w"), Owner::Unknown);
        assert_eq!(checkpoint.owner("u1", "rdma/c", "x"), Owner::Unknown);
    }

    #[test]
    fn empty_checkpoint_is_no_error_and_another_format_is() {
        assert_eq!(parse(&json!(null)), Ok(Checkpoint::default()));
        assert_eq!(parse(&json!([])), Ok(Checkpoint::default()));
        // Kubelets before 1.20 listed the IDs without NUMA nodes.
        assert!(parse(&json!([entry("u", "r", &json!(["x"]))])).is_err());
        assert!(Checkpoint::parse(b"{\"Data\": {\"PodDev").is_err());
        assert!(Checkpoint::parse(b"{}").is_err());
    }

    #[test]
    fn file_is_read_again_only_when_it_was_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let missing = read(&path, None).unwrap_err();
        assert!(missing.contains(FILE), "{missing}");
        let text = |uid: &str| {
            let entries = json!([entry(uid, "rdma/a", &json!({"0": ["x"]}))]);
            json!({"Data": {"PodDeviceEntries": entries}, "Checksum": 0}).to_string()
        };
        let replace = |uid: &str| {
            let fresh = directory.path().join("fresh");
            std::fs::write(&fresh, text(uid)).unwrap();
            std::fs::rename(&fresh, &path).unwrap();
        };
        replace("u1");
        let first = read(&path, None).unwrap();
        let again = read(&path, Some(first.clone())).unwrap();
        assert!(Arc::ptr_eq(&first.checkpoint, &again.checkpoint));
        replace("u2");
        let second = read(&path, Some(again)).unwrap();
        assert_eq!(second.checkpoint.owner("u2", "rdma/a", "x"), Owner::This);
    }
}
