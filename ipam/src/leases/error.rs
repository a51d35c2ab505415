//! Why addresses cannot be leased or freed, and what to do about it.

use crate::owned::OwnedError;
use crate::range::Range;
use ipnetwork::IpNetwork;
use node::identity::IdentityError;
use node::policy::Policy;
use rustix::io::Errno;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

/// Why a call on the node's leases failed.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// What was tried, on which file, and what the kernel said.
    #[error("{attempt} {}: {source}", path.display())]
    Io {
        attempt: &'static str,
        path: PathBuf,
        #[source]
        source: Errno,
    },
    /// A directory that others than root can write to.
    #[error(transparent)]
    Untrusted(#[from] node::trust::Error),
    /// Another call has the lock.
    #[error("{}: held for more than {seconds} s by {holder}", path.display())]
    Locked {
        path: PathBuf,
        seconds: u64,
        /// Its process, as it wrote it.
        holder: String,
    },
    /// The policy has no such store.
    #[error("the node's policy has no store {name:?}; it has {known}")]
    UnknownStore { name: String, known: String },
    /// This machine cannot say who it is.
    #[error(transparent)]
    Node(#[from] IdentityError),
    /// A requested address is leased to somebody else.
    #[error("address {address} is held by {holder}")]
    Held { address: IpAddr, holder: String },
    /// A requested address is one of the node's own.
    #[error("address {address} is an address of this node")]
    OfThisNode { address: IpAddr },
    /// A requested address is in no network of the node's own.
    #[error("address {address} is not in {network}, and a node has one network of range {range}")]
    OtherNetwork {
        address: IpAddr,
        network: IpNetwork,
        range: IpNetwork,
    },
    /// A record would be larger than what is read.
    #[error(
        "the record of the lease would have {bytes} bytes, {most} at most are read: a name, path or device of the attachment is too long"
    )]
    Oversize { bytes: usize, most: u64 },
    /// No address of the range is free.
    #[error("range {range} is exhausted: {why}")]
    Exhausted { range: String, why: String },
    /// Which parts of subnets this node owns cannot be read.
    #[error(transparent)]
    Owned(#[from] OwnedError),
    /// What this node owns has no address to lease.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NeedsRoom(Vec<Need>),
    /// A file in the place of a record is not one.
    #[error("{}: it cannot be used as a record: {what}", path.display())]
    NotARecord { path: PathBuf, what: String },
    /// Others took what was free as fast as it was found.
    #[error("range {range}: other calls took each address that was found free")]
    Overtaken { range: String },
}

/// Addresses of a range that this node does not own and an order needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// The addresses that may be leased, whoever owns them.
    pub range: Range,
    /// The one address that is needed, where it is a certain one.
    pub address: Option<IpAddr>,
    /// How many addresses are needed.
    pub count: u32,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.range.subnet();
        match self.address {
            Some(address) => write!(f, "{range}: this node does not own {address}"),
            None => write!(f, "{range}: this node's addresses are used up"),
        }
    }
}

impl LeaseError {
    /// The policy has no store of this name.
    #[must_use]
    pub fn unknown_store(policy: &Policy, name: &str) -> Self {
        Self::UnknownStore {
            name: name.to_owned(),
            known: cni_wire::text::list(policy.stores.keys()),
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Io { source, .. } => match *source {
                Errno::NOSPC | Errno::DQUOT => "make room in /run",
                Errno::ROFS | Errno::ACCESS | Errno::PERM => "make /run writable for root",
                _ => "see the kernel's log for the file system of /run",
            },
            Self::Untrusted(_) => "let root own /run/rdma-netdev, and nobody else write to it",
            Self::Locked { .. } => "see what that process waits for; the runtime tries again",
            Self::UnknownStore { .. } => {
                "name one of them in ipam.store, or add it to the policy's stores"
            }
            Self::Node(_) => "set node in the policy; mount /proc",
            Self::Held { .. } | Self::OfThisNode { .. } | Self::OtherNetwork { .. } => {
                "ask for another address, or for none"
            }
            Self::Oversize { .. } => "shorten the network's name",
            Self::Exhausted { .. } => {
                "see rdmactl addresses and rdmactl reclaim; enlarge the range"
            }
            Self::Owned(_) => {
                "remove the file and restart the pod rdma-device-plugin of this node: it is written again"
            }
            Self::NeedsRoom(_) => "see rdmactl addresses",
            Self::NotARecord { .. } => "run rdmactl addresses fsck",
            Self::Overtaken { .. } => "the runtime tries again",
        }
    }
}
