//! What a node knows of the blocks of an address space that are its own, or were, or may be.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use crate::grants::Grant;
use ipnetwork::IpNetwork;
use tokio::time::Instant;

use crate::api::document::{BlockObject, Metadata};
use crate::leases::BlockUse;

#[derive(Debug, Default)]
pub(super) struct NodeBlocks {
    pub own: BTreeMap<IpNetwork, Own>,
    /// Blocks of another machine that had this node's name.
    pub foreign: BTreeMap<IpNetwork, BlockObject>,
    pub removed: VecDeque<Removed>,
    /// Objects of this node's name that came before it was known which node this is, or whether it has
    /// leases in them.
    pub unread: Vec<BlockObject>,
    /// Blocks that this node lost while it had leases in them, with the number of those.
    pub lost: BTreeMap<IpNetwork, usize>,
}

impl NodeBlocks {
    pub(super) fn is_empty(&self) -> bool {
        let Self {
            own,
            foreign,
            removed,
            unread,
            lost,
        } = self;
        own.is_empty()
            && foreign.is_empty()
            && removed.is_empty()
            && unread.is_empty()
            && lost.is_empty()
    }

    /// Whether it was removed since.
    pub(super) fn is_late_news(&self, object: &Metadata) -> bool {
        self.removed.iter().any(|one| one.is_of(object))
    }
}

/// What is not known of a block, because a request had no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// Whether it is this node's. Its object has to be read.
    Whose,
    /// Whether it was removed. It is no longer granted, and the removal is asked for until there is an
    /// answer: the first request may still be on its way, so a block that is there may go.
    Removed,
}

/// An object that this node removed, or that another node has: what came before is late news.
#[derive(Debug)]
pub(super) struct Removed {
    pub at: Instant,
    pub uid: String,
    /// Up to which `resourceVersion`; `None` of an object that is no more.
    pub until: Option<String>,
}

impl Removed {
    pub(super) fn is_of(&self, object: &Metadata) -> bool {
        self.uid == object.uid
            && self
                .until
                .as_ref()
                .is_none_or(|until| !is_newer(&object.resource_version, until))
    }
}

/// A block of this node.
#[derive(Debug)]
pub(super) struct Own {
    pub object: BlockObject,
    pub doubt: Option<Doubt>,
    pub granted: Instant,
    pub usage: Option<BlockUse>,
    pub empty_since: Option<Instant>,
    pub noted: Option<(u64, Instant)>,
}

impl Own {
    pub(super) fn new(object: BlockObject) -> Self {
        let noted = object.status.map(|status| (status.used, Instant::now()));
        Self {
            object,
            doubt: None,
            granted: Instant::now(),
            usage: None,
            empty_since: None,
            noted,
        }
    }

    /// One of which a request had no answer.
    pub(super) fn in_doubt(object: BlockObject) -> Self {
        Self {
            doubt: Some(Doubt::Whose),
            ..Self::new(object)
        }
    }

    pub(super) fn grant(&self, except: Vec<IpAddr>, boot: &str) -> Grant {
        Grant {
            block: self.object.spec.block,
            uid: self.object.metadata.uid.clone(),
            epoch: self.object.spec.epoch,
            per_node: self.object.spec.per_node,
            except,
            boot: boot.to_owned(),
        }
    }
}

/// Whether one `resourceVersion` is not older than another. They are numbers that ascend; where one is
/// not, the later message is the newer one.
pub(super) fn is_newer(one: &str, other: &str) -> bool {
    match (one.parse::<u64>(), other.parse::<u64>()) {
        (Ok(one), Ok(other)) => one >= other,
        _ => true,
    }
}
