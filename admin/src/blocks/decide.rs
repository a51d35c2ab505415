//! Whether an administrator may take a block from its node.
//!
//! The word that is written is [`Over::administrator`]: the node's broker obeys it, every other one lets the block rest for the cool-down first, as one of a node that is gone.

use jiff::Timestamp;

use rdma_ipam_broker::api::document::{BlockObject, NodeObject, Over};
use rdma_ipam_broker::decide::standing::NodeState;

/// What to do about a block that an administrator wants to take from its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Release {
    /// Write this. The node's pods, if any of them runs, lose the block under their feet.
    Take {
        over: Over,
        /// What makes that dangerous; `None` where the cluster, too, says that the node is gone.
        danger: Option<Danger>,
    },
    /// An administrator took it before.
    Taken,
    /// It is nothing that can be taken, for this reason.
    Refused(String),
}

/// What is known against it that a node is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Danger {
    /// Its Node object is there, but its kubelet does not report.
    NotReady,
    /// Its kubelet reports that it is ready.
    Ready,
}

/// What may be done. `node` is the Node object of the block's node by name, as it is now.
pub(super) fn release(block: &BlockObject, node: Option<&NodeObject>, now: Timestamp) -> Release {
    let name = &block.metadata.name;
    if !block.is_well_named() {
        return Release::Refused(format!(
            "AddressBlock {name} has not the name of its block {}, so no broker believes it: kubectl delete \
             addressblock {name}",
            block.spec.block
        ));
    }
    if block.taken().is_some() {
        return Release::Taken;
    }
    let state = NodeState::of(node);
    let (why, danger) = match state.end_of(&block.node()) {
        Some(why) => (why, None),
        None => {
            let ready = node.is_some_and(NodeObject::is_ready);
            let danger = if ready {
                Danger::Ready
            } else {
                Danger::NotReady
            };
            let why = format!("an administrator took it from node {}", block.spec.node);
            (why, Some(danger))
        }
    };
    // What has rested for a while, because its node is gone, has rested.
    let rests = block.spec.over.as_ref().filter(|_| danger.is_none());
    let over = Over {
        since: rests.map_or(now, |over| over.since.min(now)),
        by: "administrator".to_owned(),
        why,
        administrator: true,
    };
    Release::Take { over, danger }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::block::AddressSpace;
    use rdma_ipam_broker::api::document::NodeId;
    use serde_json::json;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn block(over: Option<(i64, bool)>) -> BlockObject {
        let space = AddressSpace::new("default", None);
        let node = NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        };
        let mut block = BlockObject::new(&space, "10.0.0.16/28".parse().unwrap(), &node, 1, at(0));
        block.spec.over = over.map(|(since, administrator)| Over {
            since: at(since),
            by: "n2".into(),
            why: "gone".into(),
            administrator,
        });
        block
    }

    fn node(uid: &str, ready: &str, taints: &serde_json::Value) -> NodeObject {
        serde_json::from_value(json!({
            "metadata": {"name": "n1", "uid": uid},
            "spec": {"taints": taints},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    #[test]
    fn how_dangerous_it_is_to_take_a_block_is_said_by_the_nodes_object() {
        let off = json!([{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]);
        let none = json!([]);
        for (node, expected) in [
            (None, None),
            (Some(node("u2", "True", &off)), None),
            (Some(node("u1", "True", &off)), None),
            (Some(node("u1", "True", &none)), Some(Danger::Ready)),
            (Some(node("u1", "Unknown", &none)), Some(Danger::NotReady)),
            // The machine may be the same, registered anew, and its pods run.
            (Some(node("u2", "True", &none)), Some(Danger::Ready)),
            (Some(node("u2", "Unknown", &none)), Some(Danger::NotReady)),
        ] {
            match release(&block(None), node.as_ref(), at(9)) {
                Release::Take { over, danger } => {
                    assert_eq!(danger, expected);
                    assert!(over.administrator && over.since == at(9), "{over:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_block_that_rests_already_does_not_begin_anew_unless_its_node_is_there() {
        let since = |block, node: Option<&NodeObject>| match release(&block, node, at(9)) {
            Release::Take { over, .. } => over.since,
            other => panic!("{other:?}"),
        };
        assert_eq!(since(block(Some((3, false))), None), at(3));
        let there = node("u1", "True", &json!([]));
        assert_eq!(since(block(Some((3, false))), Some(&there)), at(9));
        assert_eq!(since(block(Some((99, false))), None), at(9));
        let taken = release(&block(Some((3, true))), None, at(9));
        assert_eq!(taken, Release::Taken);
    }

    #[test]
    fn an_object_of_another_name_is_refused() {
        let mut renamed = block(None);
        renamed.metadata.name = "x".into();
        match release(&renamed, None, at(0)) {
            Release::Refused(why) => assert!(why.contains("kubectl delete"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
