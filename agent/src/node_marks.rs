//! What is put on the Node itself for schedulers and remediation: condition `RdmaReady`, and a taint while an
//! HCA is missing. Both change only when what they say has lasted for a while: a port that flaps changes
//! neither. [`node_labels`] are beside them.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Taint};
use node_wire::rdma_node::NodeState;
use serde_json::{Value, json};

use crate::node_labels::{self, Labels};

pub const CONDITION: &str = "RdmaReady";
pub const TAINT: &str = "rdma-netdev.io/missing";

/// Which of them are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    pub condition: bool,
    pub taint: bool,
    pub labels: bool,
}

/// Something that is shown, and whether it is otherwise by now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Damped {
    /// None until something is shown.
    pub shown: Option<bool>,
    otherwise_since: Option<Instant>,
}

impl Damped {
    #[must_use]
    pub fn new(shown: Option<bool>) -> Self {
        Self {
            shown,
            otherwise_since: None,
        }
    }

    /// What must be shown, and when that can change by itself. The first sight counts as it is.
    pub fn see(&mut self, is: bool, hold: Duration, now: Instant) -> (bool, Option<Instant>) {
        let shown = self.shown.unwrap_or(is);
        if shown == is {
            self.otherwise_since = None;
            return (is, None);
        }
        let due = *self.otherwise_since.get_or_insert(now) + hold;
        match now >= due {
            true => (is, None),
            false => (shown, Some(due)),
        }
    }
}

/// A Node's condition, taint and labels as they are.
#[must_use]
pub fn read(node: &Node) -> (Damped, Damped, Labels) {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|one| one.type_ == CONDITION);
    let is_tainted = taints(node).iter().any(|taint| taint.key == TAINT);
    let labels = node.metadata.labels.iter().flatten();
    (
        Damped::new(condition.map(|one| one.status == "True")),
        Damped::new(Some(is_tainted)),
        node_labels::own(labels.map(|(name, value)| (&**name, &**value))),
    )
}

fn taints(node: &Node) -> Vec<Taint> {
    let spec = node.spec.as_ref();
    spec.and_then(|spec| spec.taints.clone())
        .unwrap_or_default()
}

/// The strategic merge patch of a Node's status.
#[must_use]
pub fn condition(is_ready: bool, state: &NodeState, now: Timestamp) -> Value {
    let (status, reason, message) = match is_ready {
        true => ("True", "NoProblem", "RdmaNode shows no problem"),
        false => ("False", "Problem", state.summary.problem.as_str()),
    };
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"status": {"conditions": [{
        "type": CONDITION, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": now, "lastHeartbeatTime": now,
    }]}})
}

/// The merge patch that sets or removes the taint of a Node as it was read.
#[must_use]
pub fn taint(is_set: bool, node: &Node) -> Value {
    let mut taints = taints(node);
    taints.retain(|taint| taint.key != TAINT);
    if is_set {
        taints.push(Taint {
            key: TAINT.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
    }
    let version = &node.metadata.resource_version;
    json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}})
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_secs(30);

    #[test]
    fn what_flaps_is_not_shown() {
        let (mut damped, start) = (Damped::new(Some(true)), Instant::now());
        let mut at = |second: u64, is| damped.see(is, HOLD, start + Duration::from_secs(second));
        for second in (0..600).step_by(20) {
            assert!(at(second, false).0 && at(second + 10, true).0);
        }
        let due = Some(start + Duration::from_secs(630));
        assert_eq!(at(600, false), (true, due));
        assert_eq!(at(629, false), (true, due));
        assert_eq!(at(630, false), (false, None));
    }

    #[test]
    fn the_first_sight_is_shown_at_once() {
        assert_eq!(
            Damped::default().see(false, HOLD, Instant::now()),
            (false, None)
        );
    }

    #[test]
    fn a_taint_is_added_beside_others_and_removed_from_them() {
        let other = json!({"key": "other", "effect": "NoExecute"});
        let node = json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": [other]}});
        let node: Node = serde_json::from_value(node).unwrap();
        assert_eq!(read(&node).1.shown, Some(false));
        let patch = taint(true, &node);
        let own = json!({"key": TAINT, "effect": "NoSchedule"});
        assert_eq!(
            patch,
            json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": [other, own]}})
        );
        let node: Node = serde_json::from_value(patch).unwrap();
        assert_eq!(read(&node).1.shown, Some(true));
        assert_eq!(
            taint(false, &node).pointer("/spec/taints"),
            Some(&json!([other]))
        );
    }
}
