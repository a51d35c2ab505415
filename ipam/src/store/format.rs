//! `FORMAT`: the store's version and identity.
//!
//! Made once, by whoever uses the directory first: written under a name of its
//! own, then linked, so that of several only one wins and no reader ever gets half
//! of it. A version that is not known is refused and nothing in the store is touched.
//!
//! The version is that of the records ([`RecordFormat`]). A new store has the latest one. A
//! store of version 1 stays one, which nodes of an older version can use, until an
//! administrator raises it: a file beside takes the place of `FORMAT` by one rename. Killed
//! before, the store has version 1, and a file that fsck removes. A node that had just opened
//! the file that was replaced may be refused once by an NFS server (ESTALE), and tries again.
//! Calls that run meanwhile need not end: those that read version 1 write records of format 1,
//! which are read in any store; to older ones a record of format 2 is one that cannot be decoded,
//! so they leave it alone.

use super::StoreError;
use super::dir::{Dir, Found};
use crate::lease::RecordFormat;
use node::random::random64;
use serde::{Deserialize, Serialize};

const NAME: &str = "FORMAT";
const KIND: &str = "rdma-ipam store";

/// What the file says.
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
        if RecordFormat::of_version(head.version).is_none() {
            return Err(refuse(format!(
                "the store has version {}, this program knows versions 1 to {}",
                head.version,
                RecordFormat::LATEST.version()
            )));
        }
        let format: Self = serde_json::from_slice(&bytes)
            .map_err(|e| damaged(format!("it cannot be decoded: {e}")))?;
        if !node::identity::is_name(&format.id) {
            return Err(damaged("its id is no identity".to_owned()));
        }
        Ok(Some(format))
    }

    /// How records are written.
    pub(crate) fn records(&self) -> RecordFormat {
        // A version that is not known was refused when it was read.
        RecordFormat::of_version(self.version).unwrap_or(RecordFormat::LATEST)
    }

    /// Makes a directory a store, unless somebody else just did: by the identity
    /// `id`, or a new one.
    pub(crate) fn establish(root: &Dir, id: Option<&str>) -> Result<Self, StoreError> {
        let names = root.names()?;
        if let Some(foreign) = names.iter().find(|name| !may_lie_in_an_empty_store(name)) {
            // Unless somebody else was first, and uses the store already.
            return Self::read(root)?.ok_or_else(|| StoreError::Format {
                path: root.path().to_owned(),
                why: format!("it has {foreign:?} but no {NAME}: it is no store and not empty"),
            });
        }
        let format = Self {
            format: KIND.to_owned(),
            version: RecordFormat::LATEST.version().into(),
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

    /// Raises a store to the latest version; whether it had another.
    pub(crate) fn raise(root: &Dir) -> Result<bool, StoreError> {
        let Some(format) = Self::read(root)? else {
            return Err(StoreError::Format {
                path: root.path().join(NAME),
                why: "it is not there".to_owned(),
            });
        };
        if format.records() == RecordFormat::LATEST {
            return Ok(false);
        }
        let raised = Self {
            version: RecordFormat::LATEST.version().into(),
            ..format
        };
        let text = serde_json::to_vec_pretty(&raised).unwrap_or_default();
        let draft = format!(".{NAME}.{:016x}", random64());
        // Synced on every file system: without it the store is lost.
        let Some(file) = root.create(&draft, &text, true)? else {
            return Err(root.failed("create", &draft)(nix::errno::Errno::EEXIST).into());
        };
        // Nor would any node believe one that is another user's.
        let by = root.foreign_owner(&file);
        if let Some(by) = by.map_err(root.failed("read the owner of", &draft))? {
            root.unlink(&draft)?;
            return Err(StoreError::Squashed {
                directory: root.path().to_owned(),
                owner: root.owner(),
                by,
            });
        }
        root.rename(&draft, NAME)?;
        root.sync()?;
        // Its name may have been gone: the answer to a rename that was done was lost, or somebody
        // removed it.
        match Self::read(root)? {
            Some(now) if now.records() == RecordFormat::LATEST => Ok(true),
            _ => Err(root.failed("rename", &draft)(nix::errno::Errno::ENOENT).into()),
        }
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
    fn the_first_user_makes_the_store_and_the_second_finds_it() {
        let (place, dir) = place();
        assert_eq!(Format::read(&dir).unwrap(), None);
        let first = Format::establish(&dir, None).unwrap();
        assert_eq!(Format::establish(&dir, None).unwrap(), first);
        assert_eq!(Format::read(&dir).unwrap(), Some(first));
        assert_eq!(
            std::fs::read_dir(place.path()).unwrap().count(),
            1,
            "no draft is left"
        );
    }

    #[test]
    fn a_directory_of_something_else_is_not_taken_over() {
        let (place, dir) = place();
        std::fs::write(place.path().join("10.0.0.5"), "container\r\neth0").unwrap();
        let error = Format::establish(&dir, None).unwrap_err().to_string();
        assert!(
            error.contains("10.0.0.5") && error.contains("no store"),
            "{error}"
        );
        assert_eq!(
            std::fs::read_dir(place.path()).unwrap().count(),
            1,
            "something was written"
        );
    }

    #[test]
    fn an_unknown_version_is_refused_by_name() {
        let (place, dir) = place();
        for (text, part) in [
            (
                r#"{"format":"rdma-ipam store","version":3,"hm":[]}"#,
                "version 3, this program knows versions 1 to 2",
            ),
            (r#"{"format":"other","version":1}"#, "belongs to \"other\""),
            (
                r#"{"format":"rdma-ipam store","version":1,"id":"../x","created":"2025-01-01T00:00:00Z"}"#,
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

    const OLD: &str =
        r#"{"format":"rdma-ipam store","version":1,"id":"a1","created":"2025-01-01T00:00:00Z"}"#;

    #[test]
    fn a_store_keeps_its_version_until_it_is_raised() {
        let (place, dir) = place();
        std::fs::write(place.path().join(NAME), OLD).unwrap();
        let old = Format::establish(&dir, None).unwrap();
        assert_eq!((old.version, old.records()), (1, RecordFormat::PerLease));
        assert!(Format::raise(&dir).unwrap());
        let raised = Format::read(&dir).unwrap().unwrap();
        assert_eq!(
            (raised.version, raised.records()),
            (2, RecordFormat::PerOrder)
        );
        assert_eq!((&raised.id, raised.created), (&old.id, old.created));
        assert!(!Format::raise(&dir).unwrap(), "again");
        assert_eq!(dir.names().unwrap(), [NAME], "a draft is left");
    }

    #[test]
    fn a_store_that_lost_its_draft_is_not_raised() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let (place, dir) = place();
        let done = AtomicBool::new(false);
        let answers: Vec<_> = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    for file in std::fs::read_dir(place.path()).unwrap().flatten() {
                        if file.file_name().to_string_lossy().starts_with(".FORMAT.") {
                            let _ = std::fs::remove_file(file.path());
                        }
                    }
                }
            });
            let raise = || {
                std::fs::write(place.path().join(NAME), OLD).unwrap();
                let raised = Format::raise(&dir).is_ok();
                (raised, Format::read(&dir).unwrap().unwrap().version == 2)
            };
            let answers = (0..20).map(|_| raise()).collect();
            done.store(true, Ordering::SeqCst);
            answers
        });
        for (raised, is_raised) in answers {
            assert_eq!(raised, is_raised);
        }
    }

    #[test]
    fn a_store_of_an_unknown_version_is_not_raised() {
        let (place, dir) = place();
        assert!(Format::raise(&dir).is_err(), "there is no store");
        let unknown = OLD.replace(":1,", ":3,");
        std::fs::write(place.path().join(NAME), &unknown).unwrap();
        assert!(Format::raise(&dir).is_err());
        let left = std::fs::read_to_string(place.path().join(NAME)).unwrap();
        assert_eq!(left, unknown);
    }
}
