//! The socket's directory and file.
//!
//! A new socket is bound beside its place and renamed over it, so during a rollout there is no
//! moment without a socket, and the newest server has the place. A server removes only the file
//! that it made itself, known by its inode.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use node::trust;

const DIRECTORY_MODE: u32 = 0o700;
const SOCKET_MODE: u32 = 0o600;

/// A socket file, distinguished from its successor of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketId {
    device: u64,
    inode: u64,
    /// A file system may give the successor the same inode number; its creation time differs, and
    /// nothing writes to a socket file after that.
    modified: (i64, i64),
}

impl SocketId {
    /// The socket at `path`, or `None` if there is none.
    pub fn of(path: &Path) -> Option<Self> {
        let meta = fs::symlink_metadata(path).ok()?;
        meta.file_type().is_socket().then(|| Self {
            device: meta.dev(),
            inode: meta.ino(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        })
    }
}

/// Where a socket is made.
#[derive(Debug)]
pub struct SocketPath {
    pub path: PathBuf,
    /// The flag that names another path, for messages.
    pub flag: &'static str,
}

/// A socket that listens at its place.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    id: SocketId,
}

/// What is at the socket's place now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Present {
    Own,
    /// Another socket: of a newer daemon, or left by one that died.
    Another,
    Nothing,
}

impl SocketPath {
    /// Makes the directory if it is missing, and a socket in place of whatever is there. `nonce`
    /// distinguishes this process from another one that does the same.
    ///
    /// # Errors
    /// What failed, and what to do about it. Existing files are unchanged then.
    pub fn bind(&self, nonce: &str) -> Result<(UnixListener, Bound), String> {
        let (Some(_), Some(name)) = (self.path.parent(), self.path.file_name()) else {
            let path = self.path.display();
            return Err(format!("{path}: not the path of a file; see {}", self.flag));
        };
        let directory = trust::parent(&self.path);
        self.prepare(directory)?;
        let prefix = format!(".{}.", name.to_string_lossy());
        remove_leftovers(directory, &prefix);
        let fresh = directory.join(format!("{prefix}{nonce}"));
        let bound = self.bind_fresh(&fresh);
        if bound.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        bound
    }

    fn failed(&self, attempt: &str, path: &Path) -> impl FnOnce(io::Error) -> String {
        move |error| {
            format!(
                "{attempt} {}: {error}; mount the node's directory of this path into the program's \
                 container, or name another socket with {}",
                path.display(),
                self.flag
            )
        }
    }

    fn bind_fresh(&self, fresh: &Path) -> Result<(UnixListener, Bound), String> {
        let listener = UnixListener::bind(fresh).map_err(self.failed("bind", fresh))?;
        fs::set_permissions(fresh, Permissions::from_mode(SOCKET_MODE))
            .map_err(self.failed("chmod", fresh))?;
        let id = SocketId::of(fresh)
            .ok_or_else(|| self.failed("bind", fresh)(ErrorKind::NotFound.into()))?;
        let path = &self.path;
        fs::rename(fresh, path).map_err(self.failed("rename the new socket to", path))?;
        let bound = Bound {
            path: path.clone(),
            id,
        };
        Ok((listener, bound))
    }

    /// Makes the directory, or checks the one that is there.
    fn prepare(&self, directory: &Path) -> Result<(), String> {
        match DirBuilder::new().mode(DIRECTORY_MODE).create(directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(self.failed("create the directory", directory)(error));
            }
            _ => {}
        }
        trust::check_one(directory).map_err(|error| {
            format!(
                "the directory {} is not used for the node's socket: {error}; it must be a directory \
                 of root's that no other user can write to: remove it, or name another socket with {}",
                directory.display(),
                self.flag
            )
        })?;
        let meta = fs::symlink_metadata(directory)
            .map_err(self.failed("read owner and mode of", directory))?;
        // The kubelet makes the directory of a hostPath volume with mode 0755. A directory that
        // holds other things as well is not ours to close.
        if meta.mode() & 0o077 != 0 && holds_only_sockets(directory) {
            fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))
                .map_err(self.failed("chmod", directory))?;
        }
        Ok(())
    }
}

fn holds_only_sockets(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| {
        entries.all(|entry| {
            entry.is_ok_and(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        })
    })
}

/// Removes what daemons left that died between bind and rename. A daemon that is at this very
/// point fails to rename and tries again.
fn remove_leftovers(directory: &Path, prefix: &str) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix);
        if ours && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Bound {
    /// What is at the socket's place now.
    #[must_use]
    pub fn present(&self) -> Present {
        match SocketId::of(&self.path) {
            Some(id) if id == self.id => Present::Own,
            Some(_) => Present::Another,
            None => Present::Nothing,
        }
    }

    /// Removes the socket if it is still this one. Between the check and the removal another
    /// daemon can take the place; it notices that its socket is gone and makes it again.
    pub fn remove(self) {
        if self.present() == Present::Own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};
    use std::os::unix::net::UnixStream;

    use tempfile::TempDir;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn place() -> (TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("rdma-netdev/node.sock");
        (root, path)
    }

    fn bind(path: &Path, nonce: &str) -> Result<(UnixListener, Bound), String> {
        let path = path.to_owned();
        let flag = "--node-socket";
        SocketPath { path, flag }.bind(nonce)
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn directory_and_socket_are_the_owners_alone() {
        let (_root, path) = place();
        let (_listener, bound) = bind(&path, "a").unwrap();
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        assert_eq!(mode(&path), 0o600);
        assert_eq!(names(path.parent().unwrap()), ["node.sock"]);
        assert_eq!(bound.present(), Present::Own);
        bound.remove();
        assert!(!path.exists());
    }

    #[test]
    fn the_kubelets_directory_is_closed_and_a_shared_one_stays_open() {
        let (_root, path) = place();
        let directory = path.parent().unwrap();
        fs::create_dir(directory).unwrap();
        fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
        let _bound = bind(&path, "a").unwrap();
        assert_eq!(mode(directory), 0o700);
        fs::write(directory.join("other"), "").unwrap();
        fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
        let _bound = bind(&path, "b").unwrap();
        assert_eq!(mode(directory), 0o755, "it is not the daemon's own");
    }

    #[test]
    fn directory_of_others_is_refused_by_what_is_wrong_with_it() {
        let (root, path) = place();
        let refused = |why: &str| {
            let error = bind(&path, "a").unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        let directory = path.parent().unwrap();
        symlink(root.path(), directory).unwrap();
        refused("it is a link");
        fs::remove_file(directory).unwrap();
        fs::write(directory, "").unwrap();
        refused("it is not a directory");
        fs::remove_file(directory).unwrap();
        fs::create_dir(directory).unwrap();
        for mode in [0o1777, 0o770] {
            fs::set_permissions(directory, Permissions::from_mode(mode)).unwrap();
            refused("it is writable for group or others");
        }
        fs::set_permissions(directory, Permissions::from_mode(0o700)).unwrap();
        if nix::unistd::geteuid().is_root() {
            chown(directory, Some(65534), None).unwrap();
            refused("it does not belong to root");
        }
        assert_eq!(names(directory), Vec::<String>::new());
    }

    #[test]
    fn missing_parent_is_reported_with_what_to_do() {
        let text = bind(Path::new("/nonexistent/rdma-netdev/node.sock"), "a").unwrap_err();
        assert!(
            text.contains("/nonexistent/rdma-netdev") && text.contains("--node-socket"),
            "{text}"
        );
        let text = bind(Path::new("/"), "a").unwrap_err();
        assert!(text.contains("not the path of a file"), "{text}");
    }

    #[test]
    fn whatever_is_at_the_place_is_replaced_without_a_gap() {
        let (_root, path) = place();
        let (first_listener, first) = bind(&path, "a").unwrap();
        drop(first_listener);
        // A stale socket, a leftover of a daemon that died in between, a plain file.
        let leftover = path.with_file_name(".node.sock.dead");
        drop(UnixListener::bind(&leftover).unwrap());
        let (second_listener, second) = bind(&path, "b").unwrap();
        assert!(UnixStream::connect(&path).is_ok() && !leftover.exists());
        assert_eq!(first.present(), Present::Another);
        first.remove();
        assert_eq!(
            second.present(),
            Present::Own,
            "a predecessor's end removes nothing"
        );
        drop(second_listener);
        fs::remove_file(&path).unwrap();
        assert_eq!(second.present(), Present::Nothing);
        fs::write(&path, "").unwrap();
        assert_eq!(second.present(), Present::Nothing);
        let _third = bind(&path, "c").unwrap();
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn failed_rename_leaves_nothing_behind() {
        let (_root, path) = place();
        fs::create_dir_all(path.join("in-the-way")).unwrap();
        let error = bind(&path, "a").unwrap_err();
        assert!(error.contains("rename the new socket"), "{error}");
        assert_eq!(names(path.parent().unwrap()), ["node.sock"]);
    }
}
