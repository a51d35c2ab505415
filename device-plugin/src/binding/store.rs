//! Bindings: which HCA each slot of a pod became. In memory, and written through to one file for each
//! HCA, named by the HCA.
//!
//! A file is whole from the moment on that it has its name: a process that is killed leaves all of it or
//! nothing. Bindings are of one boot, so they are in `/run`, which ends with it. One daemon at a time has
//! them, by a lock for as long as it lives.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::words::word;
use attachment::journal::Lock;
use hca::HcaId;
use node_wire::Pod;
use node_wire::status::BindingStatus;
pub(crate) use node_wire::status::ServedGpu;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// The directory below that of the node's sockets.
pub(crate) const DIRECTORY: &str = "bindings";
/// How long a question waits for another daemon to end.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
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
    /// The HCA.
    pub hca: HcaId,
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
    /// The pod's cgroup below that of the node, once it was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Since when this process knows it: what the kubelet said before is not about it.
    #[serde(skip)]
    pub since: Since,
}

/// A moment that makes no difference between two bindings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since(pub Instant);

impl Default for Since {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl PartialEq for Since {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Since {}

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
            hca: hca.clone(),
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
            cgroup: None,
            since: Since::default(),
        }
    }

    /// As the daemon answers it; `ended`: why the pod does not have the slot any more.
    pub(crate) fn status(&self, ended: Option<&str>) -> BindingStatus {
        BindingStatus {
            resource: self.resource.clone(),
            unit: self.unit.clone(),
            hca: self.hca.to_string(),
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
    /// HCAs that nobody has, and that a process of an ended pod still uses.
    pub in_use: BTreeMap<HcaId, String>,
    /// Why the pods of bindings do not have their slots any more, as far as that was found out.
    pub ended: BTreeMap<HcaId, &'static str>,
}

impl Bindings {
    /// Whether an HCA is bound, to whomever.
    pub(crate) fn has(&self, hca: &HcaId) -> bool {
        self.all.contains_key(hca) || self.unreadable.contains_key(hca)
    }

    /// The newest binding of a pod's slot.
    pub(crate) fn newest(&self, pod: &Pod, unit: &str) -> Option<&Binding> {
        let of_slot = self.all.values().filter(|one| one.unit == unit);
        of_slot
            .filter(|one| one.is_of(pod))
            .max_by_key(|one| one.created)
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
        if binding.version != VERSION || binding.hca != *hca {
            return Err(failed(&format_args!(
                "it is version {} of a binding of {}",
                binding.version, binding.hca
            )));
        }
        Ok(Some(binding))
    }

    fn path_of(&self, hca: &HcaId) -> PathBuf {
        self.directory.join(hca.to_string())
    }
}

/// The bindings of this daemon.
#[derive(Debug)]
pub(crate) struct Store {
    files: BindingDirectory,
    all: watch::Sender<Option<Arc<Bindings>>>,
    /// Held while bindings change; what it holds keeps other daemons from them.
    writer: Mutex<Option<Lock>>,
}

impl Store {
    /// Nothing is known before [`Store::load`].
    pub(crate) fn at(run_dir: &Path) -> Self {
        Self {
            files: BindingDirectory::at(run_dir),
            all: watch::Sender::new(None),
            writer: Mutex::new(None),
        }
    }

    /// The bindings as they are, and whenever they change; none until they were read.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<Bindings>>> {
        self.all.subscribe()
    }

    fn writer(&self) -> MutexGuard<'_, Option<Lock>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All bindings. The files are read by the first call, and while one is not readable.
    ///
    /// # Errors
    /// Another daemon has them, or the directory cannot be listed.
    pub(crate) fn load(&self) -> Result<Arc<Bindings>, String> {
        let mut writer = self.writer();
        let known = self.all.borrow().clone();
        if let Some(known) = known.filter(|known| known.unreadable.is_empty()) {
            return Ok(known);
        }
        let directory = &self.files.directory;
        if writer.is_none() {
            let path = directory.with_extension("lock");
            let lock = Lock::exclusive(&path, DIRECTORY, LOCK_TIMEOUT);
            *writer = Some(lock.map_err(|error| {
                format!(
                    "another daemon of this node has the bindings: {}",
                    error.msg
                )
            })?);
        }
        let read = self.files.read();
        let mut read = read.map_err(|error| format!("list {}: {error}", directory.display()))?;
        if let Some(known) = self.all.borrow().as_deref() {
            read.in_use.clone_from(&known.in_use);
            read.ended.clone_from(&known.ended);
            for (hca, one) in &mut read.all {
                one.since = known.all.get(hca).map_or(one.since, |known| known.since);
            }
        }
        Ok(self.publish(read))
    }

    fn publish(&self, bindings: Bindings) -> Arc<Bindings> {
        let bindings = Arc::new(bindings);
        self.all.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&bindings);
            if is_new {
                *known = Some(bindings.clone());
            }
            is_new
        });
        bindings
    }

    fn change(&self, change: impl FnOnce(&mut Bindings)) {
        let known = self.all.borrow().clone();
        let mut bindings = known.as_deref().cloned().unwrap_or_default();
        change(&mut bindings);
        self.publish(bindings);
    }

    /// Binds an HCA, or replaces what is known of its binding.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn put(&self, binding: &Binding) -> Result<(), String> {
        let _writer = self.writer();
        let path = self.files.path_of(&binding.hca);
        // Strings, numbers and lists: this does not fail.
        let text = serde_json::to_string(binding).unwrap_or_default();
        let written = node::file::make_directories(&self.files.directory)
            .and_then(|()| node::file::replace_in_boot(&path, text));
        written.map_err(|error| format!("bind {}: {error}", binding.hca))?;
        self.change(|all| drop(all.all.insert(binding.hca.clone(), binding.clone())));
        Ok(())
    }

    /// Frees an HCA. One that is free is freed.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn remove(&self, hca: &HcaId) -> Result<(), String> {
        let _writer = self.writer();
        match fs::remove_file(self.files.path_of(hca)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("free {hca}: {error}"));
            }
            _ => {}
        }
        self.change(|all| drop(all.all.remove(hca)));
        Ok(())
    }

    /// Takes note of bindings whose pods have ended, and of HCAs that processes of ended pods use.
    pub(crate) fn note(
        &self,
        ended: BTreeMap<HcaId, &'static str>,
        in_use: Option<BTreeMap<HcaId, String>>,
    ) {
        let _writer = self.writer();
        self.change(|all| {
            all.ended = ended;
            all.in_use = in_use.unwrap_or(std::mem::take(&mut all.in_use));
        });
    }
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
    fn what_is_written_reads_back_and_memory_says_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::at(dir.path());
        let read = || BindingDirectory::at(dir.path()).read().unwrap();
        let known = store.subscribe();
        assert!(known.borrow().is_none());
        assert_eq!(*store.load().unwrap(), Bindings::default());
        let first = binding("0000:3b:00.0", "slot_3e71787e_0");
        let attached = Binding {
            stage: Stage::Attached,
            ..first.clone()
        };
        for one in [&first, &attached] {
            store.put(one).unwrap();
            assert_eq!(read().all.values().collect::<Vec<_>>(), [one]);
            assert_eq!(known.borrow().as_deref(), Some(&read()));
        }
        for _ in 0..2 {
            store.remove(&first.hca).unwrap();
            assert_eq!(read(), Bindings::default());
            assert_eq!(*store.load().unwrap(), read());
        }
    }

    #[test]
    fn one_daemon_at_a_time_has_the_bindings() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::at(dir.path());
        first.load().unwrap();
        let second = Store::at(dir.path());
        let refused = second.load().unwrap_err();
        assert!(
            refused.contains("another daemon") && refused.contains("bindings.lock"),
            "{refused}"
        );
        drop(first);
        second.load().unwrap();
    }

    #[test]
    fn an_unreadable_binding_still_binds_its_hca() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::at(dir.path());
        let hca: HcaId = "0000:3b:00.0".parse().unwrap();
        store.put(&binding("0000:3b:00.0", "x")).unwrap();
        let directory = dir.path().join("bindings");
        let read = || BindingDirectory::at(dir.path()).read().unwrap();
        for text in ["", "{", "[]", "{\"version\": 2}"] {
            fs::write(directory.join("0000:3b:00.0"), text).unwrap();
            assert!(read().all.is_empty() && read().has(&hca));
        }
        // One HCA's binding under the name of another.
        let other = serde_json::to_string(&binding("0000:3b:00.1", "x")).unwrap();
        fs::write(directory.join("0000:3b:00.0"), other).unwrap();
        assert_eq!(read().unreadable.len(), 1);
        // What a killed writer left, and what is no HCA's.
        fs::write(directory.join(".0000:3b:00.1.0123456789abcdef.new"), "{").unwrap();
        fs::write(directory.join("README"), "{").unwrap();
        assert_eq!(read().unreadable.len(), 1);
        // It is free once the file is removed.
        drop(store);
        let store = Store::at(dir.path());
        assert!(store.load().unwrap().has(&hca));
        fs::remove_file(directory.join("0000:3b:00.0")).unwrap();
        assert!(!store.load().unwrap().has(&hca));
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
            all: all.map(|one| (one.hca.clone(), one)).into(),
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
