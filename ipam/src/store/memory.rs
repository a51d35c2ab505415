//! What this node remembers of a store, on its own disk: `<stateDir>/stores/<name>`.
//!
//! A share that is not mounted appears as an empty directory; a store made in it
//! would give addresses that others hold. So the identity met first is kept, and
//! another one, or none, is refused until a person says so. The probe of the
//! mount is remembered too, for the time of one boot, and the names this machine
//! went by during the boot: a DEL must find what an ADD made under a host name
//! that was changed since.
//!
//! Written whole under another name, synced and renamed. A file that cannot be
//! read is no licence to make a store: a person says so, by `fsck --adopt`. Where
//! it cannot be written, a shared store is not used.

use super::StoreError;
use super::dir::Dir;
use node::identity::NodeIdentity;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) id: String,
    pub(crate) directory: PathBuf,
    /// What kind of file system it was on.
    pub(crate) filesystem: String,
    /// The boot in which the mount was probed.
    #[serde(default)]
    pub(crate) boot: String,
    /// The names of this machine in that boot.
    #[serde(default)]
    pub(crate) nodes: Vec<String>,
    /// The store that this name of the policy stood for before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) previous: Option<Known>,
}

/// A store that was used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    pub(crate) id: String,
    pub(crate) directory: PathBuf,
}

/// A file has some names of stores and of this machine.
const MAX_BYTES: u64 = 1 << 20;

/// The file for a store of the policy.
pub(crate) fn path(state_dir: &Path, store: &str) -> PathBuf {
    state_dir.join("stores").join(store)
}

impl Memory {
    /// What is remembered; `None` when nothing is.
    ///
    /// # Errors
    /// Why the file cannot be read. It is written whole and synced, so one that is
    /// empty or torn was spoilt by something else, and says nothing about the store.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, String> {
        let text = node::trust::read(path, MAX_BYTES).map_err(|error| error.to_string())?;
        let memory = text.map(|text| serde_json::from_slice(&text)).transpose();
        memory.map_err(|error| error.to_string())
    }

    /// Whether this boot of this machine has probed the store under this name.
    pub(crate) fn knows(&self, node: &NodeIdentity) -> bool {
        self.boot == node.boot && self.nodes.contains(&node.name)
    }

    /// Notes the store, this boot and this name.
    pub(crate) fn note(
        &mut self,
        directory: &Path,
        id: &str,
        filesystem: &str,
        node: &NodeIdentity,
    ) {
        if !self.id.is_empty() && (self.id != id || self.directory != directory) {
            self.previous = Some(Known {
                id: std::mem::take(&mut self.id),
                directory: std::mem::take(&mut self.directory),
            });
        }
        id.clone_into(&mut self.id);
        directory.clone_into(&mut self.directory);
        filesystem.clone_into(&mut self.filesystem);
        if self.boot != node.boot {
            self.boot.clone_from(&node.boot);
            self.nodes.clear();
        }
        if !self.nodes.contains(&node.name) {
            self.nodes.push(node.name.clone());
        }
    }

    /// Keeps it for the next call.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        if let Some(parent) = path.parent() {
            node::file::make_directories(parent)?;
        }
        node::file::replace(path, serde_json::to_vec_pretty(self)?)
    }
}

/// Refuses another store than the one expected, if one is.
pub(crate) fn check(
    dir: &Dir,
    expected: Option<&str>,
    found: &str,
    filesystem: &str,
) -> Result<(), StoreError> {
    match expected {
        Some(expected) if expected != found => Err(StoreError::Identity {
            directory: dir.path().to_owned(),
            expected: expected.to_owned(),
            found: format!("{found} on {filesystem}"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        Memory {
            id: "a1".into(),
            directory: "/mnt/leases".into(),
            filesystem: "nfs4".into(),
            ..Memory::default()
        }
    }

    #[test]
    fn another_store_in_the_same_place_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_path(place.path()).unwrap();
        assert!(check(&dir, Some("a1"), "a1", "nfs4").is_ok());
        assert!(check(&dir, None, "b2", "nfs4").is_ok());
        let error = check(&dir, Some("a1"), "b2", "ext4")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a1") && error.contains("b2 on ext4"),
            "{error}"
        );
    }

    #[test]
    fn it_reads_back_and_garbage_is_not_nothing() {
        let place = tempfile::tempdir().unwrap();
        let path = path(place.path(), "default");
        assert_eq!(Memory::read(&path), Ok(None));
        memory().write(&path).unwrap();
        assert_eq!(Memory::read(&path), Ok(Some(memory())));
        for spoilt in ["", "{", "[]"] {
            std::fs::write(&path, spoilt).unwrap();
            assert!(Memory::read(&path).is_err(), "{spoilt:?}");
        }
    }
}
