//! What the kubelet keeps of its allocations: its device manager's checkpoint.
//!
//! The kubelet keeps each Allocate answer in `kubelet_internal_checkpoint` in the device-plugins
//! directory and uses it for every start of the container, over restarts of the kubelet, the daemon
//! and the node (`pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go`). Two things are read here
//! that no other source has:
//! - the UID of the pod that a device was allocated to ([`Owners`]); PodResources names pods without
//!   their UIDs;
//! - the device nodes that were allocated ([`allocated_nodes`]). After a reboot the kernel may have
//!   numbered the verbs nodes in another order, so an old answer may name another HCA's node.
//!
//! The format is internal to the kubelet. So what cannot be read is an answer like any other, and
//! never an error of the daemon. The checksum is that of Go's printed form of the data and is not
//! verified: the kubelet replaces the file by rename, so it is always whole.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kubelet_api::deviceplugin::ContainerAllocateResponse;
use node::file::FileId;
use prost::Message as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Name of the file in the device-plugins directory.
pub const FILE: &str = "kubelet_internal_checkpoint";
/// The longest file that is read. Entries hold what plugins answered, some kilobytes each.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Stored<T> {
    data: T,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Go writes an empty list as null.
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Registered {
    registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    /// By NUMA node, -1 for none.
    device_ids: BTreeMap<String, Option<Vec<String>>>,
    /// The answer to Allocate for this container, in protobuf and base64.
    alloc_resp: Option<String>,
}

impl Entry {
    fn ids(&self) -> impl Iterator<Item = &String> {
        self.device_ids.values().flatten().flatten()
    }
}

/// Opens the checkpoint of a device-plugins directory.
fn open(directory: &Path) -> io::Result<(File, Metadata)> {
    node::file::open_regular(&directory.join(FILE))
}

fn read_data<T: DeserializeOwned>((file, meta): (File, Metadata)) -> io::Result<T> {
    if meta.len() > MAX_BYTES {
        let why = format!("{} bytes, more than {MAX_BYTES}", meta.len());
        return Err(io::Error::other(why));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice::<Stored<T>>(&text)?.data)
}

fn read_entries(opened: (File, Metadata)) -> io::Result<Vec<Entry>> {
    let data: Data = read_data(opened)?;
    Ok(data.pod_device_entries.unwrap_or_default())
}

/// Device IDs that plugins registered, by resource.
///
/// # Errors
/// The checkpoint cannot be read.
pub fn registered(directory: &Path) -> io::Result<BTreeMap<String, Vec<String>>> {
    let read: Registered = read_data(open(directory)?)?;
    Ok(read.registered_devices)
}

/// Why the checkpoint says nothing.
fn unreadable(directory: &Path, why: impl Display) -> String {
    let path = directory.join(FILE);
    format!(
        "the kubelet's checkpoint {} cannot be read: {why}",
        path.display()
    )
}

/// Paths of the device nodes that containers were allocated with units of a resource: one set for each
/// container whose units `are_meant`. An init container's units are also those of a container that starts
/// after it, which may have more or fewer.
///
/// # Errors
/// Why the checkpoint says nothing.
pub fn allocated_nodes(
    directory: &Path,
    resource: &str,
    are_meant: impl Fn(&BTreeSet<&String>) -> bool,
) -> Result<Vec<BTreeSet<String>>, String> {
    let read = || -> anyhow::Result<_> {
        let entries = read_entries(open(directory)?)?
            .into_iter()
            .filter(|entry| entry.resource_name == resource && are_meant(&entry.ids().collect()));
        let answers = entries.map(|entry| {
            let answer = BASE64_STANDARD.decode(entry.alloc_resp.unwrap_or_default())?;
            let answer = ContainerAllocateResponse::decode(answer.as_slice())?;
            let devices = answer.devices.into_iter();
            Ok(devices.map(|device| device.host_path).collect())
        });
        answers.collect()
    };
    read().map_err(|error| unreadable(directory, error))
}

/// Pods by resource and device ID: UIDs, with the container. Entries of ended pods remain until the
/// kubelet writes the file again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners(HashMap<String, HashMap<String, Uids>>);

/// Containers by the UIDs of their pods.
pub type Uids = BTreeMap<String, String>;

impl Owners {
    /// Reads the text of a checkpoint.
    ///
    /// # Errors
    /// Where the text is not what a kubelet writes.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        let stored: Stored<Data> = serde_json::from_slice(text)?;
        let entries = stored.data.pod_device_entries.unwrap_or_default();
        Ok(Self::of_entries(entries))
    }

    fn of_entries(entries: Vec<Entry>) -> Self {
        let mut owners = Self::default();
        for entry in entries {
            for id in entry.ids() {
                owners.add(
                    &entry.resource_name,
                    id,
                    &entry.pod_uid,
                    &entry.container_name,
                );
            }
        }
        owners
    }

    /// The pods that have a device.
    pub fn uids(&self, resource: &str, device: &str) -> Option<&Uids> {
        self.0.get(resource)?.get(device)
    }

    /// Resource, device, pods.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &Uids)> {
        self.0.iter().flat_map(|(resource, devices)| {
            devices
                .iter()
                .map(move |(device, uids)| (resource.as_str(), device.as_str(), uids))
        })
    }

    /// The UID of the only pod that has all of these devices.
    pub fn uid(&self, resource: &str, devices: &[String]) -> Option<String> {
        let mut devices = devices.iter().map(|device| self.uids(resource, device));
        let mut common: Vec<&String> = devices.next()??.keys().collect();
        for uids in devices {
            let uids = uids?;
            common.retain(|uid| uids.contains_key(*uid));
        }
        match common.as_slice() {
            [uid] => Some((*uid).clone()),
            _ => None,
        }
    }

    pub(crate) fn add(&mut self, resource: &str, device: &str, uid: &str, container: &str) {
        let devices = self.0.entry(resource.to_owned()).or_default();
        let uids = devices.entry(device.to_owned()).or_default();
        uids.entry(uid.to_owned()).or_insert(container.to_owned());
    }
}

/// What the checkpoint has, and which file it was read from. The kubelet writes a new one at each
/// allocation, after it has noted the allocation for PodResources (`pkg/kubelet/cm/devicemanager/manager.go`,
/// `allocateContainerResources`): while the file is the same, no pod was allocated anything.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub file: FileId,
    pub owners: Arc<Owners>,
}

/// Reads the checkpoint, unless its file is the one that is known. `None` where there is none: the
/// kubelet has allocated nothing yet.
///
/// # Errors
/// Why the checkpoint says nothing.
pub fn read(directory: &Path, known: Option<Checkpoint>) -> Result<Option<Checkpoint>, String> {
    let opened = match open(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| unreadable(directory, error))?,
    };
    let file = FileId::of_metadata(&opened.1);
    if let Some(known) = known.filter(|known| known.file == file) {
        return Ok(Some(known));
    }
    let entries = read_entries(opened).map_err(|error| unreadable(directory, error))?;
    let owners = Arc::new(Owners::of_entries(entries));
    Ok(Some(Checkpoint { file, owners }))
}

#[cfg(test)]
mod tests {
    use kubelet_api::deviceplugin::DeviceSpec;
    use serde_json::{Value, json};

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

    fn entry(uid: &str, resource: &str, ids: &Value, nodes: &[&str]) -> Value {
        json!({"PodUID": uid, "ContainerName": "main", "ResourceName": resource,
               "DeviceIDs": ids, "AllocResp": answer(nodes)})
    }

    /// A device-plugins directory with a checkpoint of these entries.
    fn directory(entries: &Value) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        put(directory.path(), entries);
        directory
    }

    fn put(directory: &Path, entries: &Value) {
        let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}},
                          "Checksum": 1});
        let fresh = directory.join("fresh");
        std::fs::write(&fresh, text.to_string()).unwrap();
        std::fs::rename(&fresh, directory.join(FILE)).unwrap();
    }

    fn read(entries: &Value) -> Owners {
        let directory = directory(entries);
        let known = super::read(directory.path(), None).unwrap().unwrap();
        (*known.owners).clone()
    }

    #[test]
    fn nodes_are_found_by_resource_and_unit() {
        let directory = directory(&json!([
            entry(
                "1",
                "rdma/a",
                &json!({"-1": ["0000:3b:00.2"], "1": ["0000:3b:00.3"], "2": null}),
                &["/dev/infiniband/uverbs0"]
            ),
            entry(
                "2",
                "rdma/b",
                &json!({"-1": ["0000:3b:00.2"]}),
                &["/dev/infiniband/uverbs7"]
            ),
        ]));
        let paths = |resource: &str, id: &str| -> Vec<String> {
            let has = |ids: &BTreeSet<&String>| ids.contains(&id.to_owned());
            let all = allocated_nodes(directory.path(), resource, has).unwrap();
            all.into_iter().flatten().collect()
        };
        assert_eq!(paths("rdma/a", "0000:3b:00.3"), ["/dev/infiniband/uverbs0"]);
        assert_eq!(paths("rdma/b", "0000:3b:00.2"), ["/dev/infiniband/uverbs7"]);
        assert!(paths("rdma/a", "0000:3b:00.4").is_empty());
    }

    #[test]
    fn devices_belong_to_the_uid_of_their_entry() {
        let owners = read(&json!([
            entry(
                "u1",
                "rdma/a",
                &json!({"-1": ["x"], "0": ["y", "z"], "1": null}),
                &[]
            ),
            entry("u2", "rdma/b", &json!({"-1": ["x"]}), &[]),
        ]));
        let uids = |resource, id| -> Vec<&str> {
            let uids = owners.uids(resource, id).into_iter().flatten();
            uids.map(|(uid, _)| uid.as_str()).collect()
        };
        assert_eq!(uids("rdma/a", "x"), ["u1"]);
        assert_eq!(uids("rdma/a", "z"), ["u1"]);
        assert_eq!(uids("rdma/b", "x"), ["u2"]);
        assert_eq!(uids("rdma/a", "w"), [""; 0]);
        assert_eq!(uids("rdma/c", "x"), [""; 0]);
    }

    #[test]
    fn registered_devices_are_listed_by_resource() {
        let directory = tempfile::tempdir().unwrap();
        registered(directory.path()).unwrap_err();
        let text = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":
            {"rdma/a":["0000:3b:00.0"],"nvidia.com/gpu":["GPU-1"]}},"Checksum":1}"#;
        std::fs::write(directory.path().join(FILE), text).unwrap();
        assert_eq!(
            registered(directory.path()).unwrap()["rdma/a"],
            ["0000:3b:00.0"]
        );
        std::fs::write(directory.path().join(FILE), "{").unwrap();
        registered(directory.path()).unwrap_err();
    }

    #[test]
    fn empty_checkpoint_has_no_owners() {
        assert_eq!(read(&json!(null)), Owners::default());
        assert_eq!(read(&json!([])), Owners::default());
    }

    #[test]
    fn an_unreadable_checkpoint_is_an_error_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let both = || {
            let nodes = allocated_nodes(directory.path(), "rdma/a", |_| true);
            let errors = [
                nodes.unwrap_err().to_string(),
                super::read(directory.path(), None).unwrap_err().to_string(),
            ];
            assert!(
                errors.iter().all(|error| error.contains(FILE)),
                "{errors:?}"
            );
            errors.concat()
        };
        let nodes = allocated_nodes(directory.path(), "rdma/a", |_| true);
        assert!(nodes.unwrap_err().to_string().contains("No such file"));
        assert!(super::read(directory.path(), None).unwrap().is_none());
        for (text, words) in [
            ("{\"Version\": 3}", "missing field"),
            ("{\"Data\": {\"PodDev", "EOF"),
            ("", "EOF"),
            ("\0\0\0\0\0\0\0\0", "expected value"),
            ("[]", "invalid"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(both().contains(words), "{text:?}: {}", both());
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(both().contains("directory"), "{}", both());
        std::fs::remove_dir(&path).unwrap();
        // It has no writer, and the read does not wait for one.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(both().contains("not a regular file"), "{}", both());
    }

    #[test]
    fn file_is_read_again_only_when_it_was_replaced() {
        let entries = |uid: &str| json!([entry(uid, "rdma/a", &json!({"0": ["x"]}), &[])]);
        let directory = directory(&entries("u1"));
        let read = |known| super::read(directory.path(), known).unwrap().unwrap();
        let first = read(None);
        let again = read(Some(first.clone()));
        assert!(Arc::ptr_eq(&first.owners, &again.owners));
        put(directory.path(), &entries("u2"));
        let second = read(Some(again));
        assert!(
            second
                .owners
                .uids("rdma/a", "x")
                .unwrap()
                .contains_key("u2")
        );
    }
}
