//! The state directories that attachments of this node were journalled in, the last good one last:
//! `state-dirs.json` beside the policy, whatever that says. So DEL finds a record after the policy was
//! spoilt, removed or changed.

use std::io;
use std::path::{Path, PathBuf};

use crate::{file, policy::Policy, trust};

const MAX_BYTES: u64 = 64 << 10;

/// The file, beside a policy.
#[must_use]
pub fn file_of(policy: &Path) -> PathBuf {
    policy.with_file_name("state-dirs.json")
}

/// What is remembered beside a policy.
///
/// # Errors
/// The file is there and cannot be read, or is not trusted.
pub fn read(policy: &Path) -> Result<Vec<PathBuf>, trust::Error> {
    let path = file_of(policy);
    let Some(text) = trust::read(&path, MAX_BYTES)? else {
        return Ok(Vec::new());
    };
    trust::check_directory(trust::parent(&path))?;
    serde_json::from_slice(&text).map_err(|error| trust::Error::Io {
        attempt: "read",
        path,
        source: io::Error::from(error),
    })
}

/// Where a record may be beside `current`: what is remembered, and the built-in one, which needs no file.
pub fn earlier(policy: &Path, current: &Path) -> Result<Vec<PathBuf>, trust::Error> {
    let mut known = read(policy)?;
    let built_in = Policy::default().state_dir;
    if !known.contains(&built_in) {
        known.push(built_in);
    }
    known.retain(|directory| directory != current);
    Ok(known)
}

/// The state directories of a node, `current` first.
///
/// # Errors
/// As [`read`].
pub fn all(policy: &Path, current: &Path) -> Result<Vec<PathBuf>, trust::Error> {
    let mut all = earlier(policy, current)?;
    all.insert(0, current.to_owned());
    Ok(all)
}

/// Remembers the state directory of a policy in which an attachment is to be journalled. The built-in
/// one needs no file.
///
/// # Errors
/// As [`read`], or the file cannot be written.
pub fn remember(policy: &Path, state_dir: &Path) -> Result<(), trust::Error> {
    let mut known = read(policy)?;
    let built_in = || known.is_empty() && state_dir == Policy::default().state_dir;
    if known.last().is_some_and(|last| last == state_dir) || built_in() {
        return Ok(());
    }
    known.retain(|directory| directory != state_dir);
    known.push(state_dir.to_owned());
    let path = file_of(policy);
    serde_json::to_vec(&known)
        .map_err(io::Error::from)
        .and_then(|text| file::replace(&path, text))
        .map_err(|source| trust::Error::Io {
            attempt: "write",
            path,
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_good_directory_is_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy.json");
        remember(&policy, &Policy::default().state_dir).unwrap();
        assert!(!file_of(&policy).exists(), "the built-in one needs no file");
        for state in ["/a", "/b", "/a", "/a"] {
            remember(&policy, Path::new(state)).unwrap();
        }
        assert_eq!(read(&policy).unwrap(), ["/b", "/a"].map(PathBuf::from));
        let built_in = Policy::default().state_dir;
        remember(&policy, &built_in).unwrap();
        assert_eq!(read(&policy).unwrap().last(), Some(&built_in));
    }

    #[test]
    fn records_in_the_built_in_directory_are_found_after_another_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy.json");
        let (built_in, other) = (Policy::default().state_dir, Path::new("/srv/state"));
        let expected = [built_in.clone()];
        // Before the first ADD in the other one, and after it.
        assert_eq!(earlier(&policy, other).unwrap(), expected);
        remember(&policy, other).unwrap();
        assert_eq!(earlier(&policy, other).unwrap(), expected);
        assert_eq!(earlier(&policy, &built_in).unwrap(), [other]);
    }

    #[test]
    fn a_policy_that_says_nothing_leaves_the_last_good_directory() {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy.json");
        remember(&policy, Path::new("/srv/state")).unwrap();
        let state_dir = || Policy::load_for_release(&policy).0.state_dir;
        assert_eq!(state_dir(), Path::new("/srv/state"), "missing");
        for text in ["garbage", r#"{"stateDir": 7}"#, r#"{"typo": 1}"#, "{"] {
            std::fs::write(&policy, text).unwrap();
            assert_eq!(state_dir(), Path::new("/srv/state"), "{text}");
            assert!(Policy::load_for_release(&policy).1.is_some(), "{text}");
        }
        std::fs::write(&policy, r#"{"stateDir": "/other"}"#).unwrap();
        assert_eq!(state_dir(), Path::new("/other"), "in order");
        std::fs::write(file_of(&policy), "garbage").unwrap();
        assert!(read(&policy).is_err());
    }
}
