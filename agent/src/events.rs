//! Events of Kubernetes about HCAs: what happened between two states of the node, and the objects for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use node_wire::DaemonStatus;
use node_wire::Pod;
use serde_json::{Value, json};

use node_wire::rdma_node::{HcaState, NodeState, named};

/// The same of one HCA is not told again sooner.
const INTERVAL: Duration = Duration::from_mins(10);
/// More pods of one HCA are not told.
const MAX_PODS: usize = 16;
/// The API takes notes up to 1 kB.
const MAX_NOTE_BYTES: usize = 1000;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Happening {
    /// The HCA; of a refused binding, the pod.
    pub subject: String,
    /// A word for programs.
    pub reason: &'static str,
    pub is_good: bool,
    /// For people.
    pub note: String,
    /// Pods that it concerns.
    pub pods: Vec<Pod>,
}

/// What happened to HCAs between two states of a node, the second one as the daemon says it.
#[must_use]
pub fn between(before: &NodeState, next: &NodeState, daemon: &DaemonStatus) -> Vec<Happening> {
    let was = |hca: &HcaState| {
        let id = &hca.hardware.id;
        before.hcas.iter().find(|old| old.hardware.id == *id)
    };
    let is_missing = |state: &NodeState, id: &str| state.missing.iter().any(|one| one.id == id);
    let missing = next.missing.iter();
    let missing = missing.filter(|one| !is_missing(before, &one.id));
    let missing = missing.map(|one| Happening {
        subject: one.id.clone(),
        reason: "HcaMissing",
        is_good: false,
        note: format!("HCA {one}"),
        pods: holders(&one.id, daemon),
    });
    let changed = next.hcas.iter().filter_map(|hca| {
        let id = &hca.hardware.id;
        let name = format!("HCA {}", named(id, hca.hardware.rail));
        let before_reason = was(hca).and_then(|old| old.reason.as_deref());
        let (reason, is_good, note) = match (before_reason, hca.reason.as_deref()) {
            _ if is_missing(next, id) => return None,
            _ if is_missing(before, id) => ("HcaBack", true, format!("{name} is back")),
            (Some(_), None) => ("HcaHealthy", true, format!("{name} is healthy again")),
            (old, Some(new)) if old != Some(new) => {
                let why = hca.message.as_deref().unwrap_or(new);
                let reason = match new {
                    "in_use" => "HcaInUse",
                    // The pool's configuration changed.
                    "excluded" | "handover" => return None,
                    _ => "HcaUnhealthy",
                };
                (reason, false, format!("{name} is unhealthy: {why}"))
            }
            _ => return None,
        };
        Some(Happening {
            subject: id.clone(),
            reason,
            is_good,
            note,
            pods: holders(id, daemon),
        })
    });
    missing.chain(changed).collect()
}

/// Bindings that were refused a moment ago.
pub fn refused(daemon: &DaemonStatus) -> impl Iterator<Item = Happening> {
    daemon.refused.iter().map(|one| Happening {
        subject: format!("{}/{}", one.pod.namespace, one.pod.name),
        reason: "BindingRefused",
        is_good: false,
        note: format!("no HCA for pod {}: {}", one.pod, one.message),
        pods: vec![one.pod.clone()],
    })
}

/// Pods that hold an HCA.
fn holders(hca: &str, daemon: &DaemonStatus) -> Vec<Pod> {
    let held = daemon
        .pools
        .iter()
        .flat_map(|pool| pool.held.iter().flatten());
    let held = held.filter(|one| one.hcas.iter().any(|held| held == hca));
    let mut pods: Vec<Pod> = held
        .map(|one| Pod {
            namespace: one.namespace.clone(),
            name: one.pod.clone(),
            uid: one.uid.clone(),
        })
        .collect();
    pods.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    pods.dedup();
    pods.truncate(MAX_PODS);
    pods
}

/// What was told a moment ago.
#[derive(Debug, Default)]
pub struct Told {
    at: BTreeMap<(String, &'static str), Instant>,
    /// Why the last event was lost, if it was.
    pub fault: Option<String>,
}

impl Told {
    /// Whether something is to be told, which it then was.
    pub fn is_new(&mut self, happening: &Happening, now: Instant) -> bool {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < INTERVAL;
        self.at.retain(|_, at| is_recent(at));
        let key = (happening.subject.clone(), happening.reason);
        let is_new = !self.at.contains_key(&key);
        if is_new {
            self.at.insert(key, now);
        }
        is_new
    }
}

/// An event about a node, or about a pod on it, with the path of its collection.
#[must_use]
pub fn object(
    node: &str,
    pod: Option<&Pod>,
    happening: &Happening,
    now: Timestamp,
    number: u64,
) -> (String, Value) {
    // The namespace and the UID by which kubectl describe node searches.
    let (namespace, name, regarding) = match pod {
        None => (
            "default",
            node,
            json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}),
        ),
        Some(pod) => (
            pod.namespace.as_str(),
            pod.name.as_str(),
            json!({"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name,
                   "uid": pod.uid.as_deref().unwrap_or_default()}),
        ),
    };
    let note = &happening.note[..happening.note.floor_char_boundary(MAX_NOTE_BYTES)];
    let event = json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": format!("{name}.{number:016x}")},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string(),
        "type": if happening.is_good { "Normal" } else { "Warning" },
        "reason": happening.reason,
        "action": "Watch",
        "note": note,
        "regarding": regarding,
        "reportingController": "rdma-netdev.io/rdma-agent",
        "reportingInstance": &node[..node.floor_char_boundary(128)],
    });
    let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    (path, event)
}

#[cfg(test)]
mod tests {
    use node_wire::status::{HeldUnits, HostHca, PoolStatus};

    use super::*;
    use node_wire::rdma_node::MissingState;

    fn state(hcas: &[(&str, Option<&str>)], missing: &[&str]) -> NodeState {
        let hca = |(id, reason): &(&str, Option<&str>)| HcaState {
            hardware: HostHca {
                id: (*id).into(),
                ..HostHca::default()
            },
            reason: reason.map(str::to_owned),
            message: reason.map(|_| "port 1 is DOWN".to_owned()),
            ..HcaState::default()
        };
        let missing = missing.iter().map(|id| MissingState {
            id: (*id).into(),
            since: "then".into(),
            ..MissingState::default()
        });
        NodeState {
            hcas: hcas.iter().map(hca).collect(),
            missing: missing.collect(),
            ..NodeState::default()
        }
    }

    fn told(before: &NodeState, next: &NodeState) -> Vec<(&'static str, String)> {
        let all = between(before, next, &DaemonStatus::default()).into_iter();
        all.map(|one| (one.reason, one.note)).collect()
    }

    #[test]
    fn what_happens_to_an_hca_is_told_by_its_reason() {
        let good = state(&[("a", None), ("b", None)], &[]);
        let bad = state(&[("a", None), ("b", Some("port"))], &[]);
        let stuck = state(&[("a", None), ("b", Some("in_use"))], &[]);
        let gone = state(&[("a", None)], &["b"]);
        let note = |text: &str| text.to_owned();
        for (before, next, expected) in [
            (&good, &good, vec![]),
            (&bad, &bad, vec![]),
            (
                &good,
                &bad,
                vec![("HcaUnhealthy", note("HCA b is unhealthy: port 1 is DOWN"))],
            ),
            (
                &bad,
                &good,
                vec![("HcaHealthy", note("HCA b is healthy again"))],
            ),
            (
                &good,
                &stuck,
                vec![("HcaInUse", note("HCA b is unhealthy: port 1 is DOWN"))],
            ),
            (
                &good,
                &gone,
                vec![("HcaMissing", note("HCA b missing since then"))],
            ),
            (&gone, &good, vec![("HcaBack", note("HCA b is back"))]),
            // It was removed for good.
            (&gone, &state(&[("a", None)], &[]), vec![]),
            (
                &good,
                &state(&[("a", None), ("b", Some("handover"))], &[]),
                vec![],
            ),
        ] {
            assert_eq!(told(before, next), expected);
        }
    }

    #[test]
    fn the_same_is_told_once_in_ten_minutes() {
        let (mut told, now) = (Told::default(), Instant::now());
        let happening = |reason| Happening {
            subject: "a".into(),
            reason,
            is_good: false,
            note: String::new(),
            pods: Vec::new(),
        };
        assert!(told.is_new(&happening("HcaUnhealthy"), now));
        assert!(told.is_new(&happening("HcaHealthy"), now));
        assert!(!told.is_new(&happening("HcaUnhealthy"), now + INTERVAL / 2));
        assert!(told.is_new(&happening("HcaHealthy"), now + INTERVAL));
    }

    #[test]
    fn each_pod_that_holds_the_hca_is_told() {
        let held = |pod: &str, container: &str, hca: &str| HeldUnits {
            namespace: "ml".into(),
            pod: pod.into(),
            container: container.into(),
            hcas: vec![hca.into()],
            uid: Some("u".into()),
            ..HeldUnits::default()
        };
        let pool = PoolStatus {
            held: Some(vec![
                held("p", "a", "x"),
                held("q", "a", "y"),
                held("p", "b", "x"),
            ]),
            ..PoolStatus::default()
        };
        let daemon = DaemonStatus {
            pools: vec![pool],
            ..DaemonStatus::default()
        };
        let [pod] = holders("x", &daemon).try_into().unwrap();
        assert_eq!(pod.name, "p");
        let happening = Happening {
            subject: "x".into(),
            reason: "HcaUnhealthy",
            is_good: false,
            note: "é".repeat(2000),
            pods: Vec::new(),
        };
        let (path, event) = object("n1", Some(&pod), &happening, Timestamp::UNIX_EPOCH, 255);
        assert_eq!(path, "/apis/events.k8s.io/v1/namespaces/ml/events");
        let text = |key: &str| event.pointer(key).unwrap().as_str().unwrap();
        assert_eq!(text("/metadata/name"), "p.00000000000000ff");
        assert_eq!(text("/eventTime"), "1970-01-01T00:00:00.000000Z");
        assert_eq!((text("/regarding/uid"), text("/note").len()), ("u", 1000));
        let (path, event) = object("n1", None, &happening, Timestamp::UNIX_EPOCH, 1);
        let node = event.pointer("/regarding/name").unwrap();
        assert!(path.contains("/default/") && *node == "n1", "{path} {node}");
    }
}
