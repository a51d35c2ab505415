//! Which pod holds which units, from the kubelet's PodResources service.
//!
//! Asked for now and then, never while the kubelet waits for us. Not knowing is not the same as
//! nobody holding anything: until the service has answered once there is no [`Holdings`] at all.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::ResourceName;
use crate::podresources::{self, Held};

/// How often it is asked; it allows a hundred questions a second.
const INTERVAL: Duration = Duration::from_secs(15);
/// Longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// After this long what is known has been asked for since.
pub const UP_TO_DATE: Duration = Duration::from_secs(20);

/// Units that pods hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings(BTreeMap<String, BTreeMap<String, Holder>>);

/// The pod that holds a unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub pod: String,
    /// Container.
    pub container: String,
}

impl Holdings {
    /// Units of a resource, with their holders.
    pub fn of(&self, resource: &ResourceName) -> impl Iterator<Item = (&str, &Holder)> {
        let units = self.0.get(resource.as_str()).into_iter().flatten();
        units.map(|(unit, holder)| (unit.as_str(), holder))
    }

    /// The same without the holders.
    pub fn units(&self, resource: &ResourceName) -> BTreeSet<String> {
        self.of(resource).map(|(unit, _)| unit.to_owned()).collect()
    }

    /// Resources of which something is held.
    pub fn resources(&self) -> impl Iterator<Item = ResourceName> {
        self.0
            .keys()
            .filter_map(|name| ResourceName::parse(name).ok())
    }

    fn new(all: Vec<Held>) -> Self {
        let mut held: BTreeMap<String, BTreeMap<String, Holder>> = BTreeMap::new();
        for one in all {
            let holder = Holder {
                namespace: one.namespace,
                pod: one.pod,
                container: one.container,
            };
            let units = held.entry(one.resource).or_default();
            units.extend(one.ids.into_iter().map(|id| (id, holder.clone())));
        }
        Self(held)
    }
}

/// Asks every now and then until `stop`.
pub async fn keep_asking(
    socket: PathBuf,
    holdings: watch::Sender<Option<Arc<Holdings>>>,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        match tokio::time::timeout(DEADLINE, podresources::held(&socket)).await {
            Ok(Ok(held)) => {
                let held = Holdings::new(held);
                failing = false;
                holdings.send_if_modified(|known| {
                    let news = known.as_deref() != Some(&held);
                    if news {
                        *known = Some(Arc::new(held));
                    }
                    news
                });
            }
            failed if !failing => {
                let error = match failed {
                    Ok(Err(error)) => error,
                    _ => format!("no answer within {DEADLINE:?}"),
                };
                tracing::info!(
                    socket = %socket.display(), error,
                    "which pods hold what is not known; mount the kubelet's pod-resources directory \
                     and name its parent with --kubelet-root-dir"
                );
                failing = true;
            }
            _ => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_found_with_their_holders() {
        let held = |resource: &str, ids: &[&str]| Held {
            namespace: "ml".into(),
            pod: "train-0".into(),
            container: "worker".into(),
            resource: resource.into(),
            ids: ids.iter().map(ToString::to_string).collect(),
        };
        let holdings = Holdings::new(vec![
            held("rdma/a", &["0000:3b:00.2", "0000:3b:00.3"]),
            held("nvidia.com/gpu", &["GPU-1"]),
            held("rdma/a", &["0000:3b:00.4"]),
        ]);
        let resource = ResourceName::parse("rdma/a").unwrap();
        let units: Vec<&str> = holdings.of(&resource).map(|(unit, _)| unit).collect();
        assert_eq!(units, ["0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"]);
        assert_eq!(holdings.of(&resource).next().unwrap().1.pod, "train-0");
        assert_eq!(holdings.resources().count(), 2);
        assert!(
            holdings
                .units(&ResourceName::parse("rdma/b").unwrap())
                .is_empty()
        );
    }
}
