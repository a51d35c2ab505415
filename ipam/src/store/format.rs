//! `FORMAT`: the store's version and identity.
//!
//! Made once, by whoever uses the directory first: written under a name of its
//! own, then linked, so that of several only one wins and no reader ever gets half
//! of it. A version that is not known is refused and nothing in the store is touched.

use super::StoreError;
use super::dir::{Dir, Found};
use node::random::random64;
use serde::{Deserialize, Serialize};

const NAME: &str = "FORMAT";
const KIND: &str = "rdma-ipam store";
/// The one that is known.
const VERSION: u64 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Format {
    format: String,
    version: u64,
    /// The store's identity, made of random digits.
    pub(crate) id: String,
    created: jiff::Timestamp,
}

impl Format {
    /// Reads the file; `None` when there is none.
    pub(crate) fn read(root: &Dir) -> Result<Option<Self>, StoreError> {
        let path = || root.path().join(NAME);
        let refuse = |why: String| StoreError::Format { path: path(), why };
        let damaged = |why: String| StoreError::Damaged { path: path(), why };
        let bytes = match root.read(NAME, 4096)? {
            None => return Ok(None),
            Some(Found::File(bytes, _)) => bytes,
            Some(Found::TooLarge(_)) => return Err(damaged("it is too large".to_owned())),
            Some(Found::Foreign(what)) => return Err(damaged(format!("it is {what}"))),
        };
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let head: Head = serde_json::from_slice(&bytes)
            .map_err(|e| damaged(format!("it cannot be decoded: {e}")))?;
        if head.format != KIND {
            return Err(refuse(format!("it belongs to {:?}", head.format)));
        }
        if head.version != VERSION {
            return Err(refuse(format!(
                "the store has version {}, this program knows version {VERSION}",
                head.version
            )));
        }
        let format: Self = serde_json::from_slice(&bytes)
            .map_err(|e| damaged(format!("it cannot be decoded: {e}")))?;
        if !node::identity::is_name(&format.id) {
            return Err(damaged("its id is not a store ID".to_owned()));
        }
        Ok(Some(format))
    }

    /// Makes a directory a store, unless somebody else just did: by the identity
    /// `id`, or a new one.
    pub(crate) fn establish(root: &Dir, id: Option<&str>) -> Result<Self, StoreError> {
        let names = root.names()?;
        if let Some(foreign) = names.iter().find(|name| !may_lie_in_an_empty_store(name)) {
            // Unless somebody else was first, and uses the store already.
            return Self::read(root)?.ok_or_else(|| StoreError::Format {
                path: root.path().to_owned(),
                why: format!(
                    "it has {foreign:?} but no {NAME}: it is not a store and is not empty"
                ),
            });
        }
        let format = Self {
            format: KIND.to_owned(),
            version: VERSION,
            id: id.map_or_else(
                || format!("{:016x}{:016x}", random64(), random64()),
                str::to_owned,
            ),
            created: jiff::Timestamp::now(),
        };
        let text = serde_json::to_vec_pretty(&format).unwrap_or_default();
        let draft = format!(".{NAME}.{:016x}", random64());
        // Synced on every file system: what is linked is not written first, as what is renamed
        // is. Emptied by a loss of power, it would stop every ADD and DEL of the node.
        if root.create(&draft, &text, true)?.is_some() {
            let linked = root.link(&draft, root, NAME);
            root.unlink(&draft)?;
            linked?;
            root.sync()?;
        }
        Self::read(root)?.ok_or_else(|| StoreError::Format {
            path: root.path().join(NAME),
            why: "it vanished after it was made".to_owned(),
        })
    }
}

/// What file systems and interrupted first uses leave behind.
fn may_lie_in_an_empty_store(name: &str) -> bool {
    name == NAME
        || name == "lost+found"
        || name == ".snapshot"
        || name.starts_with(".nfs")
        || name.starts_with(".FORMAT.")
        || name.starts_with(super::probe::PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, Dir) {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_path(place.path()).unwrap();
        (place, dir)
    }

    #[test]
    fn an_unknown_version_is_refused_by_name() {
        let (place, dir) = place();
        for (text, part) in [
            (
                r#"{"format":"rdma-ipam store","version":3,"hm":[]}"#,
                "version 3, this program knows version 2",
            ),
            (r#"{"format":"other","version":2}"#, "belongs to \"other\""),
            (
                r#"{"format":"rdma-ipam store","version":2,"id":"../x","created":"2025-01-01T00:00:00Z"}"#,
                "id",
            ),
            ("", "decoded"),
            ("null", "decoded"),
        ] {
            std::fs::write(place.path().join(NAME), text).unwrap();
            let error = Format::read(&dir).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
