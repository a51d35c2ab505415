//! Why a store cannot serve, and what to do about it.

use super::DirError;
use super::granted::Need;
use crate::grants::GrantsError;
use nix::errno::Errno;
use node::identity::IdentityError;
use node::policy::Policy;
use std::net::IpAddr;
use std::path::PathBuf;

/// Why a store cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The policy has no such store.
    #[error("the node's policy has no store {name:?}; it has {known}")]
    Unknown { name: String, known: String },
    /// The directory is not a store, or one of another version.
    #[error("{}: {why}", path.display())]
    Format {
        /// The directory or its FORMAT.
        path: PathBuf,
        why: String,
    },
    /// The store's FORMAT cannot be read, or is none.
    #[error("{}: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    /// Another store than this node knew lies in the directory.
    #[error("{}: this node knew store {expected} here, now there is {found}", directory.display())]
    Identity {
        directory: PathBuf,
        /// Identity and file system as remembered.
        expected: String,
        /// Identity and file system as met.
        found: String,
    },
    /// A store that the policy calls shared is on a file system of this machine.
    #[error(
        "{}: the policy says that the store is shared, but {found} is a file system of this machine alone: the share is not mounted",
        directory.display()
    )]
    NotShared {
        directory: PathBuf,
        /// The kind of file system.
        found: String,
    },
    /// This node used a store, but what it noted of it cannot be read.
    #[error("{}: this node's note of which store it uses cannot be read: {why}", path.display())]
    Forgotten {
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What this node must remember of a store could not be kept.
    #[error("note in {} which store this node uses: {source}", path.display())]
    Remember {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Others than the owner of the directory may write to it.
    #[error("store {}: it is writable for group or others", path.display())]
    Writable { path: PathBuf },
    /// The directory must not be used as it is.
    #[error("store {}: {why}", path.display())]
    Unfit {
        path: PathBuf,
        /// Which promise it does not keep.
        why: String,
    },
    /// This machine cannot say who it is.
    #[error(transparent)]
    Node(#[from] IdentityError),
    /// A requested address is held by somebody else.
    #[error("address {address} is held by {holder}")]
    Held { address: IpAddr, holder: String },
    /// A record would be larger than what is read.
    #[error(
        "the record of the lease would have {bytes} bytes, {most} at most are read: a name, path or device of the attachment is too long"
    )]
    Oversize {
        bytes: usize,
        /// The largest that is read.
        most: u64,
    },
    /// Files made in the store do not belong to the directory's owner.
    #[error(
        "{}: files that this node makes belong to user {by}, the directory to {owner}: the file server squashes this node's root",
        directory.display()
    )]
    Squashed {
        directory: PathBuf,
        owner: u32,
        by: u32,
    },
    /// No address of the range is free.
    #[error("range {range} is exhausted: {why}")]
    Exhausted {
        range: String,
        /// How it came to that.
        why: String,
    },
    /// Which blocks this node has cannot be read.
    #[error(transparent)]
    Grants(#[from] GrantsError),
    /// This node's blocks have no address to give.
    #[error("{0}")]
    NeedsBlock(Box<Need>),
    /// A DEL or another ADD of the same attachment overtook this ADD.
    #[error("another call for {container} {interface} overtook this one")]
    Overtaken {
        container: String,
        interface: String,
    },
    /// A record of the owner is not one of ours.
    #[error("{}: it cannot be used as a record: {what}", path.display())]
    Foreign { path: PathBuf, what: String },
}

impl StoreError {
    /// The policy has no store of this name.
    #[must_use]
    pub fn unknown(policy: &Policy, name: &str) -> Self {
        Self::Unknown {
            name: name.to_owned(),
            known: cni_wire::text::list(policy.stores.keys()),
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Dir(error) => remedy_of(error),
            Self::Unknown { .. } => {
                "name one of them in ipam.store, or add it to the policy's stores"
            }
            Self::Format { .. } => "give the store a directory of its own, or update this program",
            Self::Damaged { .. } => {
                "put the file back from a copy; the store's id is in stores/NAME below the policy's stateDir"
            }
            Self::Identity { .. } => {
                "mount the share; if the store was replaced on purpose, run rdmactl addresses fsck --adopt"
            }
            Self::NotShared { .. } => "mount the share on this node",
            Self::Forgotten { .. } => {
                "make sure that the share is mounted, then run rdmactl addresses fsck --adopt"
            }
            Self::Remember { .. } => "make the policy's stateDir writable for root on this node",
            Self::Writable { .. } => "let its owner alone write to it: chmod go-w",
            Self::Unfit { .. } => "use a directory on ext4, xfs, NFSv3, NFSv4 or CephFS",
            Self::Node(_) => "set node in the policy; mount /proc",
            Self::Held { .. } => "ask for another address, or for none",
            Self::Oversize { .. } => "shorten the network's name",
            Self::Squashed { .. } => "export the directory with no_root_squash to this node",
            Self::Exhausted { .. } => {
                "see rdmactl addresses and rdmactl reclaim; enlarge the range"
            }
            Self::Grants(_) => {
                "remove the file and restart the pod rdma-device-plugin of this node: its broker writes it again"
            }
            Self::NeedsBlock(_) => {
                "see rdmactl addresses, and the log of the container rdma-ipam-broker on this node"
            }
            Self::Overtaken { .. } => "the runtime's next ADD starts afresh",
            Self::Foreign { .. } => "run rdmactl addresses fsck",
        }
    }
}

fn remedy_of(error: &DirError) -> &'static str {
    match error.source {
        Errno::ENOSPC | Errno::EDQUOT => "make room in the store's file system",
        Errno::EROFS | Errno::EACCES | Errno::EPERM => {
            "make the store writable for root on this node"
        }
        Errno::ENOENT => {
            "mount the share; if there is none, make the directory, or correct the policy's stores"
        }
        Errno::ESTALE | Errno::ETIMEDOUT => {
            "see whether the file server is there; the runtime tries again"
        }
        _ => "see the kernel's log for the file system",
    }
}
