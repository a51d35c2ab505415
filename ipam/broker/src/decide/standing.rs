//! Whose a block is, and whether it may change hands.
//!
//! A block changes hands because its node or an administrator releases it, or because its Node object is
//! gone or out of service. In the last case it rests first: remote queue pairs keep sending to an
//! address for a while. A Node object of the same name and another UID ends nothing: a machine that
//! registers anew keeps its pods. What is another machine's, that node's own broker finds out.

use std::time::Duration;

use crate::grants::Grant;
use jiff::Timestamp;

use crate::api::document::{BlockObject, NodeId, NodeObject};

/// What the cluster says of a node by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeState {
    /// There is one, with this UID.
    There {
        uid: String,
        /// It has the taint `node.kubernetes.io/out-of-service`.
        out_of_service: bool,
    },
    Gone,
    /// Another machine has its name, and nothing of this one's: that machine says so.
    Replaced,
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
            Self::Replaced => Some(format!(
                "node {} of UID {} is gone; another machine has its name",
                node.name, node.uid
            )),
            Self::There {
                out_of_service: true,
                ..
            } => Some(format!("node {} is out of service", node.name)),
            Self::There { .. } => None,
        }
    }

    /// Whether a node was registered anew since it had this UID.
    #[must_use]
    pub fn is_anew(&self, node: &NodeId) -> bool {
        matches!(self, Self::There { uid, .. } if *uid != node.uid)
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
    Take,
    /// Take back the mark: its node is there.
    Unmark,
}

/// What may be done with a block of `node`, by what the cluster says of that node now. It cools down for
/// `cooldown` after its mark, and for `rest` from now on.
#[must_use]
pub fn claim(
    block: &BlockObject,
    node: &NodeId,
    state: &NodeState,
    now: Timestamp,
    cooldown: Duration,
    rest: Duration,
) -> Claim {
    let over = block.spec.over.as_ref();
    let taken = || block.taken().map(|over| over.why.clone());
    let end = state.end_of(node).or_else(taken);
    match (end, over) {
        (None, Some(_)) if !state.is_anew(node) => Claim::Unmark,
        (None, _) => Claim::Held,
        (Some(why), None) => Claim::Mark(why),
        (Some(_), Some(over)) => {
            let after = |since: Timestamp, time| since.saturating_add(time).unwrap_or(now);
            // A mark of the future was made by a clock that is ahead: it rests from now on.
            let rested = after(over.since.min(now), cooldown).max(after(now, rest));
            match over.since <= now && rested <= now {
                true => Claim::Take,
                false => Claim::Rests(rested.max(now)),
            }
        }
    }
}

/// What the node does about an object that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
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
pub fn ownership(block: &BlockObject, me: &NodeId, grants: &[Grant]) -> Ownership {
    let node = block.node();
    if !block.is_well_named() || node.name != me.name {
        return Ownership::Not;
    }
    let granted = grants
        .iter()
        .any(|grant| grant.block == block.spec.block && grant.uid == block.metadata.uid);
    match (node.uid == me.uid, granted) {
        (true, _) | (false, true) if block.taken().is_some() => Ownership::Taken,
        (true, _) => Ownership::Grant,
        (false, true) => Ownership::Renew,
        (false, false) => Ownership::Foreign,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::document::Over;
    use ipam::block::AddressSpace;

    const COOLDOWN: Duration = Duration::from_secs(30);
    const NONE: Duration = Duration::ZERO;

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
        let judge = |over, state: &NodeState, now| {
            claim(&block(over), &node, state, at(now), COOLDOWN, NONE)
        };
        for gone in [NodeState::Gone, NodeState::Replaced, there("u2", true)] {
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
    fn a_block_of_a_node_that_was_registered_anew_is_not_taken_by_others() {
        let (node, anew) = (id("n2", "u2"), there("u9", false));
        for over in [None, Some(0)] {
            let judged = claim(&block(over), &node, &anew, at(9999), COOLDOWN, NONE);
            assert_eq!(judged, Claim::Held, "{over:?}");
        }
        // Its machine is off, whichever object says so.
        let off = there("u9", true);
        let judged = claim(&block(None), &node, &off, at(0), COOLDOWN, NONE);
        assert!(matches!(judged, Claim::Mark(_)), "{judged:?}");
    }

    #[test]
    fn a_block_rests_by_the_takers_own_clock_whatever_the_mark_says() {
        let node = id("n2", "u2");
        let judge = |cooldown, rest| {
            let rest = Duration::from_secs(rest);
            claim(
                &block(Some(0)),
                &node,
                &NodeState::Gone,
                at(9999),
                cooldown,
                rest,
            )
        };
        assert_eq!(judge(NONE, 300), Claim::Rests(at(10_299)));
        assert_eq!(judge(COOLDOWN, 1), Claim::Rests(at(10_000)));
        assert_eq!(judge(COOLDOWN, 0), Claim::Take);
    }

    #[test]
    fn an_administrators_word_takes_a_block_from_a_node_that_is_there() {
        let (node, state) = (id("n2", "u2"), there("u2", false));
        let mut block = block(Some(0));
        if let Some(over) = &mut block.spec.over {
            over.administrator = true;
        }
        let judge = |now| claim(&block, &node, &state, at(now), COOLDOWN, NONE);
        assert_eq!(judge(29), Claim::Rests(at(30)));
        assert_eq!(judge(30), Claim::Take);
        assert_eq!(ownership(&block, &node, &[]), Ownership::Taken);
        let grant = Grant {
            block: block.spec.block,
            uid: "o1".into(),
            epoch: 1,
            per_node: None,
            except: Vec::new(),
            boot: String::new(),
        };
        assert_eq!(
            ownership(&block, &id("n2", "u3"), &[grant]),
            Ownership::Taken
        );
        // As one of a node that is gone: it is removed once it has rested.
        assert_eq!(ownership(&block, &id("n2", "u3"), &[]), Ownership::Foreign);
        assert_eq!(ownership(&block, &id("n1", "u2"), &[]), Ownership::Not);
    }

    #[test]
    fn a_machine_keeps_its_blocks_under_a_new_uid_and_another_of_its_name_does_not_get_them() {
        let grant = |uid: &str| Grant {
            block: "10.0.0.16/28".parse().unwrap(),
            uid: uid.into(),
            epoch: 1,
            per_node: None,
            except: Vec::new(),
            boot: String::new(),
        };
        let object = block(None);
        assert_eq!(ownership(&object, &id("n2", "u2"), &[]), Ownership::Grant);
        assert_eq!(
            ownership(&object, &id("n2", "u3"), &[grant("o1")]),
            Ownership::Renew
        );
        assert_eq!(ownership(&object, &id("n2", "u3"), &[]), Ownership::Foreign);
        assert_eq!(
            ownership(&object, &id("n2", "u3"), &[grant("o0")]),
            Ownership::Foreign
        );
        assert_eq!(
            ownership(&object, &id("n1", "u2"), &[grant("o1")]),
            Ownership::Not
        );
        let mut renamed = object;
        renamed.metadata.name = "default.default.10.0.0.32-28".into();
        assert_eq!(ownership(&renamed, &id("n2", "u2"), &[]), Ownership::Not);
    }
}
