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

use attachment::journal::Lock;
use hca::HcaId;
use node_wire::Pod;
use pools::binding::record::{Binding, Bindings, Ended, RefusedBinding, Since, VERSION};
use tokio::sync::watch;

/// The directory below that of the node's sockets.
pub(crate) const DIRECTORY: &str = "bindings";
/// How long a question waits for another daemon to end.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a refused binding is remembered. The runtime tries again within minutes.
const REFUSED_INTERVAL: Duration = Duration::from_mins(10);
/// More pods are not remembered.
const MAX_REFUSED: usize = 64;
/// A binding has some hundred bytes, and some more for each GPU.
const MAX_BYTES: u64 = 1 << 20;

/// All bindings of a node, whose sockets are in this directory.
///
/// # Errors
/// The directory of bindings is there and cannot be listed.
pub(crate) fn read(run_dir: &Path) -> io::Result<Bindings> {
    let mut bindings = Bindings::default();
    let entries = match fs::read_dir(run_dir.join(DIRECTORY)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(bindings),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        // Half-written files begin with a dot, which no HCA does.
        let name = entry.file_name();
        let Some(hca) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        match read_one(&entry.path(), &hca) {
            Ok(Some(binding)) => drop(bindings.all.insert(hca, binding)),
            // Removed between the two reads.
            Ok(None) => {}
            Err(why) => drop(bindings.unreadable.insert(hca, why)),
        }
    }
    Ok(bindings)
}

fn read_one(path: &Path, hca: &HcaId) -> Result<Option<Binding>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("binding {}: {error}", path.display());
    let text = node::trust::read(path, MAX_BYTES).map_err(|error| failed(&error))?;
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

/// The bindings of this daemon.
#[derive(Debug)]
pub(crate) struct Store {
    run_dir: PathBuf,
    all: watch::Sender<Option<Arc<Bindings>>>,
    /// Held while bindings change; what it holds keeps other daemons from them.
    writer: Mutex<Option<Lock>>,
}

impl Store {
    /// Nothing is known before [`Store::load`].
    pub(crate) fn at(run_dir: &Path) -> Self {
        Self {
            run_dir: run_dir.to_owned(),
            all: watch::Sender::new(None),
            writer: Mutex::new(None),
        }
    }

    /// The bindings as they are, and whenever they change; none until they were read.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<Bindings>>> {
        self.all.subscribe()
    }

    fn directory(&self) -> PathBuf {
        self.run_dir.join(DIRECTORY)
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
        // A node without bindings has no file of ours.
        if self.directory().exists() {
            self.lock(&mut writer)?;
        }
        self.read()
    }

    fn lock(&self, writer: &mut Option<Lock>) -> Result<(), String> {
        if writer.is_none() {
            let path = self.directory().with_extension("lock");
            let lock = Lock::exclusive(&path, DIRECTORY, LOCK_TIMEOUT);
            *writer = Some(lock.map_err(|error| {
                format!(
                    "another daemon of this node has the bindings: {}",
                    error.msg
                )
            })?);
        }
        Ok(())
    }

    fn read(&self) -> Result<Arc<Bindings>, String> {
        let read = read(&self.run_dir);
        let mut read =
            read.map_err(|error| format!("list {}: {error}", self.directory().display()))?;
        let known = self.all.borrow().clone().unwrap_or_default();
        read.in_use.clone_from(&known.in_use);
        read.ended.clone_from(&known.ended);
        read.refused.clone_from(&known.refused);
        read.free_aligned.clone_from(&known.free_aligned);
        for (hca, one) in &mut read.all {
            let now = Since(Some(Instant::now()));
            one.since = known.all.get(hca).map_or(now, |known| known.since);
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

    /// Binds an HCA, or replaces its binding. `before` is the one that was read: a transaction that hung at
    /// an HCA goes on when others have changed it.
    ///
    /// # Errors
    /// It is another one by now; what the kernel said.
    pub(crate) fn put(&self, binding: &Binding, before: Option<&Binding>) -> Result<(), String> {
        let mut writer = self.writer();
        let made = node::file::make_directories(&self.directory());
        made.map_err(|error| format!("bind {}: {error}", binding.hca))?;
        if writer.is_none() {
            self.lock(&mut writer)?;
            if !self.read()?.is_empty() {
                return Err("another daemon has bound HCAs in this moment; try again".to_owned());
            }
        }
        let known = self.all.borrow().clone().unwrap_or_default();
        if known.all.get(&binding.hca) != before {
            let hca = &binding.hca;
            return Err(format!(
                "bind {hca}: its binding changed in this moment; try again"
            ));
        }
        if before == Some(binding) {
            return Ok(());
        }
        let path = self.directory().join(binding.hca.to_string());
        // Strings, numbers and lists: this does not fail.
        let text = serde_json::to_string(binding).unwrap_or_default();
        let written = node::file::replace_in_boot(&path, text);
        written.map_err(|error| format!("bind {}: {error}", binding.hca))?;
        self.change(|all| {
            all.ended.remove(&binding.hca);
            all.all.insert(binding.hca.clone(), binding.clone());
        });
        Ok(())
    }

    /// Frees an HCA. One that is free is freed.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn remove(&self, hca: &HcaId) -> Result<(), String> {
        let _writer = self.writer();
        match fs::remove_file(self.directory().join(hca.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("free {hca}: {error}"));
            }
            _ => {}
        }
        self.change(|all| drop(all.all.remove(hca)));
        Ok(())
    }

    /// Takes note of what became of a pod's binding: why it was refused, if it was.
    pub(crate) fn note_refused(&self, pod: Pod, refused: Option<String>) {
        let _writer = self.writer();
        self.change(|all| {
            let name = format!("{}/{}", pod.namespace, pod.name);
            all.refused.remove(&name);
            if let Some(message) = refused.filter(|_| all.refused.len() < MAX_REFUSED) {
                let now = Since(Some(Instant::now()));
                let refused = RefusedBinding { pod, message };
                all.refused.insert(name, (refused, now));
            }
        });
    }

    /// Takes note of bindings whose pods have ended, and of HCAs that processes of ended pods use.
    pub(crate) fn note(
        &self,
        ended: BTreeMap<HcaId, Ended>,
        in_use: Option<BTreeMap<HcaId, String>>,
        free_aligned: BTreeMap<String, usize>,
    ) {
        let _writer = self.writer();
        self.change(|all| {
            let is_recent = |at: Instant| at.elapsed() < REFUSED_INTERVAL;
            all.refused.retain(|_, (_, at)| at.0.is_some_and(is_recent));
            all.ended = ended;
            all.ended.retain(|hca, _| all.all.contains_key(hca));
            all.free_aligned = free_aligned;
            all.in_use = in_use.unwrap_or(std::mem::take(&mut all.in_use));
        });
    }
}

#[cfg(test)]
mod tests {
    use pools::binding::record::Stage;

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
        let read = || super::read(dir.path()).unwrap();
        let known = store.subscribe();
        assert!(known.borrow().is_none());
        assert_eq!(*store.load().unwrap(), Bindings::default());
        let first = binding("0000:3b:00.0", "slot_3e71787e_0");
        let attached = Binding {
            stage: Stage::Attached,
            ..first.clone()
        };
        let mut before = None;
        for one in [&first, &attached] {
            store.put(one, before.replace(one)).unwrap();
            assert_eq!(read().all.values().collect::<Vec<_>>(), [one]);
            assert_eq!(known.borrow().as_deref(), Some(&read()));
        }
        // Decided by what is not so any more.
        for stale in [None, Some(&first)] {
            assert!(store.put(&first, stale).unwrap_err().contains("try again"));
            assert_eq!(read().all.values().collect::<Vec<_>>(), [&attached]);
        }
        for _ in 0..2 {
            store.remove(&first.hca).unwrap();
            assert!(store.put(&attached, Some(&attached)).is_err());
            assert_eq!(read(), Bindings::default());
            assert_eq!(*store.load().unwrap(), read());
        }
    }

    #[test]
    fn what_rounds_note_does_not_look_like_another_daemons_binding() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::at(dir.path());
        store.load().unwrap();
        let one = binding("0000:3b:00.0", "x");
        let in_use = BTreeMap::from([("0000:3b:00.1".parse().unwrap(), "process 7".into())]);
        let free = BTreeMap::from([("rdma/nic".to_owned(), 2)]);
        store.note(BTreeMap::new(), Some(in_use), free);
        store.put(&one, None).unwrap();
        assert_eq!(store.load().unwrap().all.len(), 1);
    }

    #[test]
    fn one_daemon_at_a_time_has_the_bindings() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (Store::at(dir.path()), Store::at(dir.path()));
        first.load().unwrap();
        first.put(&binding("0000:3b:00.0", "x"), None).unwrap();
        let refused = second.load().unwrap_err();
        assert!(
            refused.contains("another daemon") && refused.contains("bindings.lock"),
            "{refused}"
        );
        drop(first);
        assert_eq!(second.load().unwrap().all.len(), 1);
        // It had read before another one bound.
        let (early, late) = (Store::at(dir.path()), second);
        assert!(early.load().is_err());
        drop(late);
        early.load().unwrap();
    }

    #[test]
    fn an_unreadable_binding_still_binds_its_hca() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::at(dir.path());
        let hca: HcaId = "0000:3b:00.0".parse().unwrap();
        store.put(&binding("0000:3b:00.0", "x"), None).unwrap();
        let directory = dir.path().join("bindings");
        let read = || super::read(dir.path()).unwrap();
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
}
