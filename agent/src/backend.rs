//! Where the documents of a store are: files of a directory, or objects of the Kubernetes API.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ipam::directory::NotOurs;
use ipam::space::AddressSpace;
use ipam::subnet::Document;
use ipnetwork::IpNetwork;

use crate::api::{self, Api, ApiError};
use crate::directory::{Directory, DirectoryError};

/// A document as it was read, and its version; 0 before there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    pub document: Document,
    pub version: u64,
    /// Those of its object in the API.
    pub labels: BTreeMap<String, String>,
}

impl Read {
    /// Of a document that there is not.
    #[must_use]
    pub fn none(space: &AddressSpace, subnet: IpNetwork) -> Self {
        let network_name = space.network_name.as_deref().unwrap_or_default();
        Self {
            document: Document::empty(&space.store, network_name, subnet),
            version: 0,
            labels: BTreeMap::new(),
        }
    }
}

/// What became of a compare-and-swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Swap {
    /// The document has this version now.
    Won(u64),
    /// Another writer changed the document. It may have gone on from this change.
    Lost,
    /// The store does not let this node make this change, and says why.
    Denied(String),
}

/// How often documents are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Those with parts of this node.
    pub look: Duration,
    /// Those in which other nodes ask: perhaps a pod ended meanwhile.
    pub asked: Duration,
    /// Those without a free piece, in which other nodes soon will ask.
    pub full: Duration,
    /// Whether somebody tells of changes, so that what was read last is good enough until then.
    pub is_told: bool,
    /// Those in which this node asks.
    pub poll: Duration,
    /// How many documents are read for a claim, before it is asked which have no room.
    pub reads: usize,
}

/// Nobody tells of a change in a directory.
const OF_DIRECTORY: Pace = Pace {
    look: Duration::from_secs(8),
    asked: Duration::from_millis(500),
    full: Duration::from_secs(2),
    is_told: false,
    poll: Duration::from_millis(250),
    reads: usize::MAX,
};
/// The API tells of them; this is for what the watch missed.
const OF_API: Pace = Pace {
    look: Duration::from_mins(10),
    asked: Duration::from_millis(500),
    full: Duration::from_secs(2),
    is_told: true,
    poll: Duration::from_secs(10),
    reads: 8,
};

/// Why a store did not do something.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    NotOurs(#[from] NotOurs),
}

/// Documents with compare-and-swap. A call may take as long as the store hangs.
#[derive(Debug, Clone)]
pub enum Backend {
    Directory(Directory),
    Api(Api),
}

impl Backend {
    /// What hangs, for messages, and why that may be.
    #[must_use]
    pub fn name(&self) -> (String, &'static str) {
        match self {
            Self::Directory(directory) => (
                directory.path().display().to_string(),
                "its file server hangs",
            ),
            Self::Api(_) => ("the Kubernetes API".to_owned(), "it hangs"),
        }
    }

    #[must_use]
    pub fn pace(&self) -> Pace {
        match self {
            Self::Directory(_) => OF_DIRECTORY,
            Self::Api(_) => OF_API,
        }
    }

    /// Reads a document, never from a cache.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, space: &AddressSpace, subnet: IpNetwork) -> Result<Read, BackendError> {
        match self {
            Self::Directory(directory) => {
                ipam::directory::check(directory.path())?;
                Ok(directory.read(space, subnet)?)
            }
            Self::Api(api) => Ok(api.read(space, subnet)?),
        }
    }

    /// Replaces a document that was read.
    ///
    /// # Errors
    /// It is not known whether it was replaced.
    pub fn swap(
        &self,
        space: &AddressSpace,
        read: &Read,
        next: &Document,
    ) -> Result<Swap, BackendError> {
        match self {
            Self::Directory(directory) => Ok(directory.swap(space, read.version, next)?),
            Self::Api(api) => Ok(api.swap(space, read, next)?),
        }
    }

    /// A document that this node has just written.
    #[must_use]
    pub fn written(&self, space: &AddressSpace, read: &Read, next: Document, version: u64) -> Read {
        let labels = match self {
            Self::Directory(_) => BTreeMap::new(),
            Self::Api(_) => api::labels(space, &read.document, &next),
        };
        Read {
            document: next,
            version,
            labels,
        }
    }

    /// The subnets in which a node may have parts, as they are now.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn subnets(
        &self,
        space: &AddressSpace,
        node: &str,
    ) -> Result<Vec<IpNetwork>, BackendError> {
        match self {
            Self::Directory(directory) => {
                ipam::directory::check(directory.path())?;
                Ok(directory.subnets(space)?)
            }
            Self::Api(api) => Ok(api.subnets(space, node)?),
        }
    }

    /// Subnets in which no address is free; those that are not named may be full, too.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn full(&self, space: &AddressSpace) -> Result<BTreeSet<IpNetwork>, BackendError> {
        match self {
            Self::Directory(_) => Ok(BTreeSet::new()),
            Self::Api(api) => Ok(api.full(space)?),
        }
    }

    /// How many nodes share the store, where that is known.
    #[must_use]
    pub fn nodes(&self) -> Option<u64> {
        match self {
            Self::Directory(_) => None,
            Self::Api(api) => api.nodes(),
        }
    }

    /// Why a node will not come back by itself, where that is known.
    ///
    /// # Errors
    /// It cannot be asked.
    pub fn gone(&self, node: &str) -> Result<Option<String>, BackendError> {
        match self {
            Self::Directory(_) => Ok(None),
            Self::Api(api) => Ok(api.gone(node)?),
        }
    }

    /// Which time it is that the store is as a whole older than what was seen of it, for a quarter of an hour.
    #[must_use]
    pub fn restored(&self) -> Option<u64> {
        match self {
            Self::Directory(_) => None,
            Self::Api(api) => api.restored(),
        }
    }
}
