//! Whose a block is, and whether it may change hands.
//!
//! A block changes hands by its node's own word, by an administrator's, or because the Node *of that
//! UID* is gone or out of service. In the last case it rests first: remote queue pairs keep sending to
//! an address for a while.

use std::time::Duration;

use ipam::grants::Grant;
use jiff::Timestamp;

use crate::api::document::{BlockObject, NodeId, NodeObject};

/// What the cluster says of a node by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeState {
    /// There is one, with this UID.
    There {
        /// `metadata.uid`.
        uid: String,
        /// It has the taint `node.kubernetes.io/out-of-service`.
        out_of_service: bool,
    },
    /// There is none.
    Gone,
}

impl NodeState {
    /// By the Node object of a name, if there is one.
    #[must_use]
    pub fn of(node: Option<&NodeObject>) -> Self {
        match node {
            None => Self::Gone,
            Some(node) => Self::There {
                uid: node.metadata.uid.clone(),
                out_of_service: node.is_out_of_service(),
            },
        }
    }

    /// Why a block of `node` is nobody's any longer, if it is.
    #[must_use]
    pub fn end_of(&self, node: &NodeId) -> Option<String> {
        match self {
            Self::Gone => Some(format!("node {} is gone", node.name)),
            Self::There { uid, .. } if *uid != node.uid => Some(format!(
                "node {} of UID {} is gone; another one has its name",
                node.name, node.uid
            )),
            Self::There {
                out_of_service: true,
                ..
            } => Some(format!("node {} is out of service", node.name)),
            Self::There { .. } => None,
        }
    }
}

/// What this node may do with a block of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// Nothing but ask for it.
    Held,
    /// Mark that it is over, for this reason.
    Mark(String),
    /// Wait: it rests until then.
    Rests(Timestamp),
    /// Take it.
    Take,
    /// Take back the mark: its node is there.
    Unmark,
}

/// What may be done with a block of `node`, by what the cluster says of that node now.
#[must_use]
pub fn claim(
    block: &BlockObject,
    node: &NodeId,
    state: &NodeState,
    now: Timestamp,
    cooldown: Duration,
) -> Claim {
    let over = block.spec.over.as_ref();
    let taken = over.filter(|over| over.administrator);
    let end = state
        .end_of(node)
        .or_else(|| taken.map(|over| over.why.clone()));
    match (end, over) {
        (None, None) => Claim::Held,
        (None, Some(_)) => Claim::Unmark,
        (Some(why), None) => Claim::Mark(why),
        (Some(_), Some(over)) => {
            // A mark of the future was made by a clock that is ahead: it rests from now on.
            let rested = over.since.min(now).saturating_add(cooldown).unwrap_or(now);
            match over.since <= now && rested <= now {
                true => Claim::Take,
                false => Claim::Rests(rested.max(now)),
            }
        }
    }
}

/// What the node does about an object that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// It is granted, or will be.
    Grant,
    /// It is of this machine under its previous UID: the object gets the new one.
    Renew,
    /// It is of another machine that had the name: as one of a node that is gone.
    Foreign,
    /// An administrator took it from this node.
    Taken,
    /// It is no block of this node.
    Not,
}

/// What to do about an object that was selected by the node's label. `grants` are those on disk: a
/// machine that has the grant is the one that the block was given to.
#[must_use]
pub fn own(block: &BlockObject, me: &NodeId, grants: &[Grant]) -> Own {
    match block.node() {
        Some(node) if block.is_well_named() && node.name == me.name => {
            let granted = grants
                .iter()
                .any(|grant| grant.block == block.spec.block && grant.uid == block.metadata.uid);
            let taken = block.spec.over.as_ref();
            let taken = taken.is_some_and(|over| over.administrator);
            match (node.uid == me.uid, granted) {
                (true, _) | (false, true) if taken => Own::Taken,
                (true, _) => Own::Grant,
                (false, true) => Own::Renew,
                (false, false) => Own::Foreign,
            }
        }
        _ => Own::Not,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::document::Over;
    use ipam::block::AddressSpace;

    const COOLDOWN: Duration = Duration::from_secs(30);

    fn id(name: &str, uid: &str) -> NodeId {
        NodeId {
            name: name.into(),
            uid: uid.into(),
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn block(over: Option<i64>) -> BlockObject {
        let space = AddressSpace::new("default", None);
        let network = "10.0.0.16/28".parse().unwrap();
        let mut block = BlockObject::new(&space, network, &id("n2", "u2"), 1, at(0));
        block.metadata.uid = "o1".into();
        block.spec.over = over.map(|since| Over {
            since: at(since),
            by: "n3".into(),
            why: "gone".into(),
            administrator: false,
        });
        block
    }

    fn there(uid: &str, out_of_service: bool) -> NodeState {
        NodeState::There {
            uid: uid.into(),
            out_of_service,
        }
    }

    #[test]
    fn a_block_is_taken_after_its_node_was_gone_for_the_cool_down_and_not_before() {
        let node = id("n2", "u2");
        let judge =
            |over, state: &NodeState, now| claim(&block(over), &node, state, at(now), COOLDOWN);
        for gone in [NodeState::Gone, there("u9", false), there("u2", true)] {
            assert!(matches!(judge(None, &gone, 0), Claim::Mark(_)));
            assert_eq!(judge(Some(0), &gone, 29), Claim::Rests(at(30)));
            assert_eq!(judge(Some(0), &gone, 30), Claim::Take);
            // By a clock that is an hour ahead.
            assert_eq!(judge(Some(3600), &gone, 0), Claim::Rests(at(30)));
            assert_eq!(judge(Some(3600), &gone, 3700), Claim::Take);
        }
        assert_eq!(judge(None, &there("u2", false), 0), Claim::Held);
        assert_eq!(judge(Some(0), &there("u2", false), 99), Claim::Unmark);
    }

    #[test]
    fn an_administrators_word_takes_a_block_from_a_node_that_is_there() {
        let (node, state) = (id("n2", "u2"), there("u2", false));
        let mut block = block(Some(0));
        if let Some(over) = &mut block.spec.over {
            over.administrator = true;
        }
        let judge = |now| claim(&block, &node, &state, at(now), COOLDOWN);
        assert_eq!(judge(29), Claim::Rests(at(30)));
        assert_eq!(judge(30), Claim::Take);
        assert_eq!(own(&block, &node, &[]), Own::Taken);
        let grant = Grant {
            block: block.spec.block,
            uid: "o1".into(),
            epoch: 1,
            except: Vec::new(),
        };
        assert_eq!(own(&block, &id("n2", "u3"), &[grant]), Own::Taken);
        // As one of a node that is gone: it is removed once it has rested.
        assert_eq!(own(&block, &id("n2", "u3"), &[]), Own::Foreign);
        assert_eq!(own(&block, &id("n1", "u2"), &[]), Own::Not);
    }

    #[test]
    fn a_machine_keeps_its_blocks_under_a_new_uid_and_another_of_its_name_does_not_get_them() {
        let grant = |uid: &str| Grant {
            block: "10.0.0.16/28".parse().unwrap(),
            uid: uid.into(),
            epoch: 1,
            except: Vec::new(),
        };
        let object = block(None);
        assert_eq!(own(&object, &id("n2", "u2"), &[]), Own::Grant);
        assert_eq!(own(&object, &id("n2", "u3"), &[grant("o1")]), Own::Renew);
        assert_eq!(own(&object, &id("n2", "u3"), &[]), Own::Foreign);
        assert_eq!(own(&object, &id("n2", "u3"), &[grant("o0")]), Own::Foreign);
        assert_eq!(own(&object, &id("n1", "u2"), &[grant("o1")]), Own::Not);
        let mut renamed = object;
        renamed.metadata.name = "default.default.10.0.0.32-28".into();
        assert_eq!(own(&renamed, &id("n2", "u2"), &[]), Own::Not);
    }
}
