//! Why the journal cannot be used.

use std::{io, path::PathBuf, time::Duration};

use node::trust;

use super::record::VERSION;

/// A failed use of the journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused, or a file or directory is not trusted.
    #[error(transparent)]
    File(#[from] trust::Error),
    /// A newer version of this program wrote it.
    #[error("{} has version {version} of the journal, this program knows {VERSION}", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It does not say what a record says.
    #[error("{} is damaged: {cause}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// It is empty or cut off: it is of an earlier boot.
    #[error("{} is not complete: the machine stopped while it was written", path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
    },
    /// The record would be larger than this program reads.
    #[error("{} would have {bytes} bytes, and a record has at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes that it would have.
        bytes: usize,
        /// Bytes that it may have.
        limit: u64,
    },
    /// The attachment has a record already.
    #[error("{owner} is attached to network {network} already")]
    Exists {
        /// Whose attachment it is, as text.
        owner: String,
        /// The network.
        network: String,
    },
    /// Another call holds a lock for longer than this one waits.
    #[error(
        "another call holds the lock of {name} for more than {} s (fuser -v {} lists the calls)",
        waited.as_secs(),
        path.display()
    )]
    Locked {
        /// The netdev, or the container and its interface, that is locked.
        name: String,
        /// The file of all locks.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
}

impl Error {
    /// The file system refused `attempt` on `path`.
    pub(super) fn file(attempt: &'static str, path: impl Into<PathBuf>, cause: io::Error) -> Self {
        Error::File(trust::Error::Io {
            attempt,
            path: path.into(),
            source: cause,
        })
    }

    /// Whether the file system takes no writes.
    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, Error::File(e) if e.kind() == Some(io::ErrorKind::ReadOnlyFilesystem))
    }

    /// What the person on call does about it; none where the message says it all.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Error::File(trust::Error::Io { source, .. }) => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some(
                    "no attachment can be recorded: make room, and free inodes, on the file system \
                     of stateDir of the node's policy",
                ),
                io::ErrorKind::ReadOnlyFilesystem => Some(
                    "no attachment can be recorded: mount the file system of stateDir of the \
                     node's policy writable",
                ),
                _ => None,
            },
            Error::Incomplete { .. } => None,
            Error::File(_) => Some(
                "let root own stateDir of the node's policy, every directory above it and each \
                 file in it, mode 0755 or stricter; find out what put another file there, and \
                 remove it",
            ),
            Error::Newer { .. } => {
                Some("upgrade rdma-netdev on this node again; it was newer before")
            }
            Error::Damaged { .. } => {
                Some("nothing can be restored from it; check the netdev, then remove the file")
            }
            Error::TooLarge { .. } => {
                Some("make the network configuration and CNI_ARGS smaller; both are kept in it")
            }
            Error::Exists { .. } => Some("the runtime must DEL it first"),
            Error::Locked { .. } => Some(
                "an ADD or DEL of the same container and interface, or of the same netdev, is running, \
                 or an IPAM program that it ran; try again",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_or_read_only_disk_is_said_with_what_to_do() {
        for (number, word) in [
            (libc::ENOSPC, "make room"),
            (libc::EDQUOT, "make room"),
            (libc::EROFS, "writable"),
        ] {
            let cause = io::Error::from_raw_os_error(number);
            let remedy = Error::file("write", "/x", cause).remedy().unwrap();
            assert!(remedy.contains(word) && remedy.contains("stateDir"));
        }
        let other = io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(Error::file("write", "/x", other).remedy(), None);
    }
}
