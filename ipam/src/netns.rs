//! Whether a network namespace that a lease names is still there.
//!
//! Only looks, and says "unknown" wherever it cannot be sure: a directory that
//! is not mounted into a container looks like namespaces that are gone.

use crate::store::probe::magic;
use nix::errno::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `NSFS_MAGIC` of include/uapi/linux/magic.h.
const NSFS: u32 = 0x6e73_6673;

/// What became of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Netns {
    /// It is there.
    Present,
    /// Its path is gone, or leads to another namespace.
    Gone,
    /// It cannot be told; the reason.
    Unknown(&'static str),
}

/// Looks at the path that the runtime gave, below `root`, and compares with the
/// inode number that ADD saw.
#[must_use]
pub fn look(root: &Path, path: &str, inode: Option<u64>) -> Netns {
    let Some(relative) = path.strip_prefix('/') else {
        return Netns::Unknown("a relative path");
    };
    if relative.starts_with("proc/") {
        return Netns::Unknown("a process' namespace, seen from another process");
    }
    if relative.split('/').any(|part| part == "..") {
        return Netns::Unknown("a path with ..");
    }
    let at = root.join(relative);
    match std::fs::metadata(&at) {
        Ok(meta) => match inode {
            Some(inode) if inode == meta.ino() => Netns::Present,
            // Seen without its mount it is a plain file, whose number says nothing.
            Some(_) if is_namespace(&at) => Netns::Gone,
            Some(_) => Netns::Unknown("a file that is no namespace"),
            None => Netns::Present,
        },
        Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => {
            match at.parent().map(std::fs::read_dir) {
                Some(Ok(_)) => Netns::Gone,
                _ => Netns::Unknown("its directory is not there to be looked into"),
            }
        }
        Err(_) => Netns::Unknown("it cannot be looked at"),
    }
}

fn is_namespace(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|fs| magic(&fs) == NSFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_counts_only_where_presence_would_show() {
        let root = tempfile::tempdir().unwrap();
        let look = |path, inode| look(root.path(), path, inode);
        assert!(
            matches!(look("/run/netns/a", Some(1)), Netns::Unknown(_)),
            "no directory"
        );
        std::fs::create_dir_all(root.path().join("run/netns")).unwrap();
        assert_eq!(look("/run/netns/a", Some(1)), Netns::Gone);
        std::fs::write(root.path().join("run/netns/a"), "").unwrap();
        assert!(
            matches!(look("/run/netns/a", Some(1)), Netns::Unknown(_)),
            "not mounted here"
        );
        let inode = std::fs::metadata(root.path().join("run/netns/a"))
            .unwrap()
            .ino();
        assert_eq!(look("/run/netns/a", Some(inode)), Netns::Present);
        assert_eq!(look("/run/netns/a", None), Netns::Present);
        for path in ["/proc/7/ns/net", "run/netns/a", "/run/../run/netns/b", ""] {
            assert!(matches!(look(path, Some(1)), Netns::Unknown(_)), "{path}");
        }
    }

    #[test]
    fn another_namespace_at_the_path_is_another() {
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/proc/self/ns/net", root.path().join("ns")).unwrap();
        assert_eq!(look(root.path(), "/ns", Some(own)), Netns::Present);
        assert_eq!(look(root.path(), "/ns", Some(own + 1)), Netns::Gone);
    }
}
