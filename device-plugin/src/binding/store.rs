//! Bindings on disk: one file for each HCA that a slot became, named by the HCA.
//!
//! A file is created only where there is none of its name, so no two pods are bound to one HCA,
//! whichever processes bind. It is whole from the moment on that it has its name: a process that is
//! killed leaves all of it or nothing. Bindings are of one boot, so they are in `/run`, which ends with
//! it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::words::word;
use attachment::journal::Lock;
use hca::HcaId;
use node_wire::Pod;
use node_wire::status::BindingStatus;
pub(crate) use node_wire::status::ServedGpu;
use serde::{Deserialize, Serialize};

/// The directory below that of the node's sockets.
pub(crate) const DIRECTORY: &str = "bindings";
/// How long a question waits for another daemon.
const LOCK_TIMEOUT: Duration = Duration::from_millis(1500);
/// The version of the files.
const VERSION: u32 = 1;
/// A binding has some hundred bytes, and some more for each GPU.
const MAX_BYTES: u64 = 1 << 20;

/// An HCA and the slot that it is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Binding {
    /// The version of the file.
    pub version: u32,
    /// The HCA, as unit IDs name it.
    pub hca: String,
    /// The slot.
    pub unit: String,
    /// The resource that the slot is of.
    pub resource: String,
    /// Name of the container that asked for it.
    pub container: String,
    /// The pod.
    pub pod: Pod,
    /// The sandbox that it was bound for; none where the pod has no network attachment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// How far it is.
    pub stage: Stage,
    /// Seconds since 1970 when it was bound, or later: see [`Bindings::next_created`].
    pub created: u64,
    /// The HCA's rail.
    pub rail: u32,
    /// The GPUs that it serves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ServedGpu>,
    /// The index of its interface's GID, once it is attached and as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u32>,
}

/// How far a binding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Stage {
    /// Decided.
    Bound,
    /// The CNI plugin has moved the devices, and its journal says so.
    Attached,
    /// The CNI plugin has returned the devices. The pod may still run, and have the device nodes.
    Detached,
    /// The first container of a pod without network attachment has started.
    Started,
}

impl Binding {
    /// A binding, not yet on disk.
    pub(crate) fn new(hca: &HcaId, unit: &str, pod: &Pod, sandbox: Option<&str>) -> Self {
        Self {
            version: VERSION,
            hca: hca.to_string(),
            unit: unit.to_owned(),
            resource: String::new(),
            container: String::new(),
            pod: pod.clone(),
            sandbox: sandbox.map(str::to_owned),
            stage: Stage::Bound,
            created: attachment::node::now(),
            rail: 0,
            gpus: Vec::new(),
            gid_index: None,
        }
    }

    /// As the daemon answers it; `ended`: why the pod does not have the slot any more.
    pub(crate) fn status(&self, ended: Option<&str>) -> BindingStatus {
        BindingStatus {
            resource: self.resource.clone(),
            unit: self.unit.clone(),
            hca: self.hca.clone(),
            pod: self.pod.clone(),
            container: self.container.clone(),
            stage: word(&self.stage),
            rail: self.rail,
            gpus: self.gpus.clone(),
            ended: ended.map(str::to_owned),
        }
    }

    /// Whether it is this pod's: the same UID where both are known.
    pub(crate) fn is_of(&self, pod: &Pod) -> bool {
        let same_uid = match (&self.pod.uid, &pod.uid) {
            (Some(own), Some(other)) => own == other,
            _ => true,
        };
        same_uid && self.pod.namespace == pod.namespace && self.pod.name == pod.name
    }
}

/// What is on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Bindings {
    /// Bindings by HCA.
    pub all: BTreeMap<HcaId, Binding>,
    /// HCAs whose file cannot be read, and why. They are bound to somebody.
    pub unreadable: BTreeMap<HcaId, String>,
}

impl Bindings {
    /// Whether an HCA is bound, to whomever.
    pub(crate) fn has(&self, hca: &HcaId) -> bool {
        self.all.contains_key(hca) || self.unreadable.contains_key(hca)
    }

    /// When a binding of a slot is created: `now`, but after all others of the slot, because the newest
    /// one counts and the clock may have been set back.
    pub(crate) fn next_created(&self, unit: &str, now: u64) -> u64 {
        let of_unit = self.all.values().filter(|one| one.unit == unit);
        let next = of_unit.map(|one| one.created.saturating_add(1));
        next.fold(now, u64::max)
    }
}

/// The bindings of a node.
#[derive(Debug, Clone)]
pub(crate) struct BindingDirectory {
    directory: PathBuf,
}

impl BindingDirectory {
    /// Below the directory of the node's sockets.
    pub(crate) fn at(run_dir: &Path) -> Self {
        Self {
            directory: run_dir.join(DIRECTORY),
        }
    }

    /// Keeps other daemons of this node from the bindings, as in a rolling update.
    ///
    /// # Errors
    /// Another one has them for longer than [`LOCK_TIMEOUT`].
    pub(crate) fn lock(&self) -> Result<Lock, String> {
        let path = self.directory.with_extension("lock");
        Lock::exclusive(&path, DIRECTORY, LOCK_TIMEOUT).map_err(|error| {
            format!(
                "another daemon of this node changes bindings: {}",
                error.msg
            )
        })
    }

    /// All bindings.
    ///
    /// # Errors
    /// The directory is there and cannot be listed.
    pub(crate) fn read(&self) -> io::Result<Bindings> {
        let mut bindings = Bindings::default();
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(bindings),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            // Half-written files begin with a dot, which no HCA does.
            let Some(hca) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            match self.read_one(&hca) {
                Ok(Some(binding)) => drop(bindings.all.insert(hca, binding)),
                // Removed between the two reads.
                Ok(None) => {}
                Err(why) => drop(bindings.unreadable.insert(hca, why)),
            }
        }
        Ok(bindings)
    }

    fn read_one(&self, hca: &HcaId) -> Result<Option<Binding>, String> {
        let path = self.directory.join(hca.to_string());
        let failed = |error: &dyn std::fmt::Display| format!("binding {}: {error}", path.display());
        let text = node::trust::read(&path, MAX_BYTES).map_err(|error| failed(&error))?;
        let Some(text) = text else {
            return Ok(None);
        };
        let binding: Binding = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        if binding.version != VERSION || binding.hca != hca.to_string() {
            return Err(failed(&format_args!(
                "it is version {} of a binding of {}",
                binding.version, binding.hca
            )));
        }
        Ok(Some(binding))
    }

    /// Binds an HCA that is not bound.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if it is; what the kernel said.
    pub(crate) fn create(&self, binding: &Binding) -> io::Result<()> {
        node::file::make_directories(&self.directory)?;
        node::file::create(&self.path_of(binding), text(binding))
    }

    /// Replaces what is known of a binding.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn replace(&self, binding: &Binding) -> io::Result<()> {
        node::file::replace_in_boot(&self.path_of(binding), text(binding))
    }

    /// Frees an HCA. One that is free is freed.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn remove(&self, binding: &Binding) -> io::Result<()> {
        match fs::remove_file(self.path_of(binding)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn path_of(&self, binding: &Binding) -> PathBuf {
        self.directory.join(&binding.hca)
    }
}

fn text(binding: &Binding) -> String {
    // Strings, numbers and lists: this does not fail.
    serde_json::to_string(binding).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: Option<&str>) -> Pod {
        Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: uid.map(str::to_owned),
        }
    }

    fn binding(hca: &str, unit: &str) -> Binding {
        Binding::new(&hca.parse().unwrap(), unit, &pod(Some("u1")), Some("s1"))
    }

    #[test]
    fn an_hca_is_bound_once_and_what_is_written_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = BindingDirectory::at(dir.path());
        assert_eq!(store.read().unwrap(), Bindings::default());
        let first = binding("0000:3b:00.0", "slot_3e71787e_0");
        store.create(&first).unwrap();
        let second = store.create(&binding("0000:3b:00.0", "slot_3e71787e_1"));
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let attached = Binding {
            stage: Stage::Attached,
            ..first.clone()
        };
        store.replace(&attached).unwrap();
        let read = store.read().unwrap();
        assert_eq!(read.all.values().collect::<Vec<_>>(), [&attached]);
        store.remove(&first).unwrap();
        store.remove(&first).unwrap();
        assert_eq!(store.read().unwrap(), Bindings::default());
    }

    #[test]
    fn an_unreadable_binding_still_binds_its_hca() {
        let dir = tempfile::tempdir().unwrap();
        let store = BindingDirectory::at(dir.path());
        store.create(&binding("0000:3b:00.0", "x")).unwrap();
        let directory = dir.path().join("bindings");
        for text in ["", "{", "[]", "{\"version\": 2}"] {
            fs::write(directory.join("0000:3b:00.0"), text).unwrap();
            let read = store.read().unwrap();
            assert!(read.all.is_empty() && read.has(&"0000:3b:00.0".parse().unwrap()));
        }
        // One HCA's binding under the name of another.
        let other = serde_json::to_string(&binding("0000:3b:00.1", "x")).unwrap();
        fs::write(directory.join("0000:3b:00.0"), other).unwrap();
        assert_eq!(store.read().unwrap().unreadable.len(), 1);
        // What a killed writer left, and what is no HCA's.
        fs::write(directory.join(".0000:3b:00.1.0123456789abcdef.new"), "{").unwrap();
        fs::write(directory.join("README"), "{").unwrap();
        assert_eq!(store.read().unwrap().unreadable.len(), 1);
    }

    #[test]
    fn a_binding_is_newer_than_all_others_of_its_slot() {
        let created = |hca: &str, unit: &str, created| Binding {
            created,
            ..binding(hca, unit)
        };
        let all = [
            created("0000:3b:00.0", "x", 100),
            created("0000:3b:00.1", "x", 200),
            created("0000:3b:00.2", "y", 300),
        ];
        let bindings = Bindings {
            all: all.map(|one| (one.hca.parse().unwrap(), one)).into(),
            ..Bindings::default()
        };
        for (unit, now, expected) in [
            ("x", 1000, 1000),
            // In the same second, and after the clock was set back.
            ("x", 200, 201),
            ("x", 50, 201),
            ("z", 50, 50),
        ] {
            assert_eq!(bindings.next_created(unit, now), expected, "{unit} {now}");
        }
    }

    #[test]
    fn a_pod_of_the_same_name_with_another_uid_is_another_pod() {
        let own = binding("0000:3b:00.0", "x");
        assert!(own.is_of(&pod(Some("u1"))) && own.is_of(&pod(None)));
        assert!(!own.is_of(&pod(Some("u2"))));
    }
}
