//! Of the nodes that use a shared file store: which are gone from the cluster, and for how long.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ipam::store::AnnouncedNode;
use jiff::Timestamp;
use tokio::time::Instant;

use super::standing::NodeState;
use crate::api::document::{NodeId, NodeObject};

/// Nodes are asked for once in so long a time for each node that uses a store: together the brokers
/// of a cluster list its nodes once a minute.
const PER_NODE: Duration = Duration::from_secs(60);
const SHORTEST: Duration = Duration::from_secs(600);
const LONGEST: Duration = Duration::from_secs(6 * 3600);
/// A node is gone for at least so long, whatever the cool-down.
const LEAST_GONE: Duration = Duration::from_secs(5);

/// Why a node that announced itself has no leases any longer, by the Node object of its name now.
///
/// An object of another UID ends nothing: a machine that registers anew may run the same pods, and
/// what another machine of this name finds of the previous one is freed there.
#[must_use]
pub fn end(node: &AnnouncedNode, object: Option<&NodeObject>) -> Option<String> {
    let id = NodeId {
        name: node.name.clone(),
        uid: node.uid.clone(),
    };
    let is_another = object.is_some_and(|object| object.metadata.uid != node.uid);
    match is_another {
        true => None,
        false => NodeState::of(object).end_of(&id),
    }
}

/// Whether a list of the cluster's nodes may be believed where it lacks one.
///
/// # Errors
/// Why not.
pub fn check(nodes: &BTreeMap<String, NodeObject>, me: &NodeId) -> Result<(), String> {
    match nodes.get(&me.name) {
        _ if nodes.is_empty() => Err("the cluster's list of nodes is empty".to_owned()),
        Some(own) if own.metadata.uid == me.uid => Ok(()),
        _ => Err(format!(
            "the cluster's list of nodes lacks this one, {} of UID {}",
            me.name, me.uid
        )),
    }
}

/// How long until nodes are asked for again, of so many that use the stores.
#[must_use]
pub fn interval(nodes: usize) -> Duration {
    let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
    PER_NODE.saturating_mul(nodes).clamp(SHORTEST, LONGEST)
}

/// A node by the store in which it announced itself.
pub type Key = (String, AnnouncedNode);

/// Those of `users` that this broker has seen as Node objects of its own cluster, now or `before`. Nodes
/// of another cluster may use the same store, and this one does not have them either.
#[must_use]
pub fn seen(
    before: &BTreeSet<Key>,
    users: &BTreeSet<Key>,
    nodes: &BTreeMap<String, NodeObject>,
) -> BTreeSet<Key> {
    let is_there = |node: &AnnouncedNode| {
        let object = nodes.get(&node.name);
        object.is_some_and(|object| object.metadata.uid == node.uid)
    };
    let all = users.iter();
    all.filter(|key| before.contains(key) || is_there(&key.1))
        .cloned()
        .collect()
}

/// When a node was first found to be gone, by both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Since {
    /// By the one that nobody sets.
    pub instant: Instant,
    /// By the one that leases are stamped by.
    pub time: Timestamp,
}

/// The nodes that are gone, as far as this broker has seen, and since when.
#[derive(Debug, Default)]
pub struct Departures(BTreeMap<Key, Since>);

impl Departures {
    /// Takes note of all that are gone now. One that was back meanwhile begins anew.
    pub fn note(&mut self, gone: &BTreeSet<Key>, now: Since) {
        self.0.retain(|key, _| gone.contains(key));
        for key in gone {
            self.0.entry(key.clone()).or_insert(now);
        }
    }

    /// Nothing is known any longer: who was gone may have been back.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Those that have been gone for the cool-down.
    #[must_use]
    pub fn ripe(&self, now: Instant, cooldown: Duration) -> Vec<(Key, Since)> {
        let all = self.0.iter();
        all.filter(|(_, since)| since.instant + least(cooldown) <= now)
            .map(|(key, since)| (key.clone(), *since))
            .collect()
    }

    /// When the next one will have been.
    #[must_use]
    pub fn next(&self, now: Instant, cooldown: Duration) -> Option<Instant> {
        let all = self.0.values().map(|since| since.instant + least(cooldown));
        all.filter(|ripe| *ripe > now).min()
    }
}

fn least(cooldown: Duration) -> Duration {
    cooldown.max(LEAST_GONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const COOLDOWN: Duration = Duration::from_secs(30);

    fn announced(name: &str) -> AnnouncedNode {
        AnnouncedNode {
            name: name.into(),
            uid: format!("u-{name}"),
            machine: format!("m-{name}"),
        }
    }

    fn object(name: &str, uid: &str, taint: &str) -> NodeObject {
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": uid},
            "spec": {"taints": [{"key": taint, "effect": "NoExecute"}]},
        }))
        .unwrap()
    }

    fn key(name: &str) -> Key {
        ("default".into(), announced(name))
    }

    #[test]
    fn only_a_missing_node_and_one_that_is_out_of_service_are_gone() {
        let node = announced("n2");
        let off = "node.kubernetes.io/out-of-service";
        for (object, gone) in [
            (None, true),
            (Some(object("n2", "u-n2", off)), true),
            (
                Some(object("n2", "u-n2", "node.kubernetes.io/unreachable")),
                false,
            ),
            (Some(object("n2", "u-n9", "x")), false),
            (Some(object("n2", "u-n9", off)), false),
        ] {
            assert_eq!(end(&node, object.as_ref()).is_some(), gone, "{object:?}");
        }
    }

    #[test]
    fn a_list_without_this_node_says_nothing_of_others() {
        let me = NodeId {
            name: "n1".into(),
            uid: "u-n1".into(),
        };
        let nodes = |all: &[(&str, &str)]| -> BTreeMap<String, NodeObject> {
            let all = all.iter();
            all.map(|(name, uid)| ((*name).to_owned(), object(name, uid, "x")))
                .collect()
        };
        assert!(check(&nodes(&[]), &me).unwrap_err().contains("empty"));
        for wrong in [&[("n2", "u-n2")][..], &[("n1", "u-other"), ("n2", "u-n2")]] {
            assert!(check(&nodes(wrong), &me).unwrap_err().contains("lacks"));
        }
        assert_eq!(check(&nodes(&[("n1", "u-n1")]), &me), Ok(()));
    }

    #[test]
    fn a_node_that_was_never_in_this_cluster_is_not_gone_from_it() {
        let users: BTreeSet<Key> = [key("n2"), key("n3"), key("n4")].into();
        let nodes: BTreeMap<String, NodeObject> = [
            ("n2".to_owned(), object("n2", "u-n2", "x")),
            // Of this name, but not the one that uses the store.
            ("n3".to_owned(), object("n3", "u-other", "x")),
        ]
        .into();
        let first = seen(&BTreeSet::new(), &users, &nodes);
        assert_eq!(first, [key("n2")].into());
        let then = seen(&first, &users, &BTreeMap::new());
        assert_eq!(then, [key("n2")].into(), "it was seen before");
        assert_eq!(seen(&first, &[key("n3")].into(), &nodes), BTreeSet::new());
    }

    #[test]
    fn a_node_that_was_back_begins_anew() {
        let start = Instant::now();
        let at = |seconds: u64| Since {
            instant: start + Duration::from_secs(seconds),
            time: Timestamp::from_second(1000 + i64::try_from(seconds).unwrap()).unwrap(),
        };
        let (one, both) = ([key("n2")].into(), [key("n2"), key("n3")].into());
        let mut departures = Departures::default();
        departures.note(&both, at(0));
        assert_eq!(departures.next(start, COOLDOWN), Some(at(30).instant));
        departures.note(&one, at(10));
        departures.note(&both, at(20));
        let ripe = departures.ripe(at(30).instant, COOLDOWN);
        assert_eq!(ripe, [(key("n2"), at(0))]);
        assert_eq!(
            departures.next(at(30).instant, COOLDOWN),
            Some(at(50).instant)
        );
        assert_eq!(departures.ripe(at(29).instant, COOLDOWN), []);
        assert_eq!(departures.ripe(at(24).instant, Duration::ZERO).len(), 1);
        departures.clear();
        assert_eq!(departures.ripe(at(999).instant, COOLDOWN), []);
    }

    #[test]
    fn the_brokers_of_a_cluster_together_list_nodes_at_most_once_a_minute() {
        assert_eq!(interval(2), SHORTEST);
        assert_eq!(interval(200), Duration::from_secs(200 * 60));
        assert_eq!(interval(100_000), LONGEST);
    }
}
