//! Which pod holds which units, from the kubelet's PodResources service.
//!
//! Asked for now and then, never while the kubelet waits for us. Not knowing is not the same as
//! no pod with units: until the service has answered once there is no [`AllocatedUnits`] at all.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hca::{HcaId, UnitId};
use kubelet_api::client::{self, Held};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::checkpoint;
use crate::config::ResourceName;

/// How often it is asked; it allows a hundred questions a second.
const ASK_INTERVAL: Duration = Duration::from_secs(15);
/// Longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// After this long what is known has been asked for since.
pub(crate) const UP_TO_DATE_INTERVAL: Duration = Duration::from_secs(20);

/// Units that pods hold.
#[derive(Debug, Clone)]
pub(crate) struct AllocatedUnits {
    units: BTreeMap<String, BTreeMap<String, Holder>>,
    /// When the kubelet was asked.
    asked: SystemTime,
}

/// Who holds an HCA, by the name of a unit: how it is held, and of which resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HcaAllocation {
    /// The resource, of whichever device plugin.
    pub resource: String,
    /// Whether the pod has the HCA for itself.
    pub exclusive: bool,
    /// The pod.
    pub holder: Holder,
}

/// The pod that holds a unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub pod: String,
    /// Container.
    pub container: String,
}

impl fmt::Display for Holder {
    /// A pod of the kubelet's checkpoint has a UID for its name, and no namespace.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "the pod with UID {}", self.pod),
            namespace => write!(f, "pod {namespace}/{}", self.pod),
        }
    }
}

impl AllocatedUnits {
    /// Units of a resource, with their holders.
    pub(crate) fn of(&self, resource: &ResourceName) -> impl Iterator<Item = (&str, &Holder)> {
        let units = self.units.get(resource.as_str()).into_iter().flatten();
        units.map(|(unit, holder)| (unit.as_str(), holder))
    }

    /// The same without the holders.
    pub(crate) fn units(&self, resource: &ResourceName) -> BTreeSet<String> {
        self.of(resource).map(|(unit, _)| unit.to_owned()).collect()
    }

    /// Resources of which something is held.
    pub(crate) fn resources(&self) -> impl Iterator<Item = ResourceName> {
        self.units
            .keys()
            .filter_map(|name| ResourceName::parse(name).ok())
    }

    /// When the kubelet was asked: what it allocated later is not in here.
    pub(crate) fn asked(&self) -> SystemTime {
        self.asked
    }

    /// Whether both say the same.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        self.units == other.units
    }

    /// HCAs that units in pods' hands name, whichever resource and device plugin they are of: the
    /// SR-IOV device plugin's units are PCI addresses, too. Units of a whole pool name none.
    pub(crate) fn hcas(&self) -> BTreeMap<HcaId, Vec<HcaAllocation>> {
        let mut hcas: BTreeMap<HcaId, Vec<HcaAllocation>> = BTreeMap::new();
        for (resource, units) in &self.units {
            for (unit, holder) in units {
                let (hca, exclusive) = match unit.parse() {
                    Ok(UnitId::Exclusive(hca)) => (hca, true),
                    Ok(UnitId::Shared { hca, .. }) => (hca, false),
                    Ok(UnitId::Pool { .. }) | Err(_) => continue,
                };
                hcas.entry(hca).or_default().push(HcaAllocation {
                    resource: resource.clone(),
                    exclusive,
                    holder: holder.clone(),
                });
            }
        }
        hcas
    }

    pub(crate) fn new(all: Vec<Held>, asked: SystemTime) -> Self {
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
        Self { units: held, asked }
    }
}

/// Asks once.
///
/// # Errors
/// What came back instead of an answer, or that none came in this time.
pub(crate) async fn ask(socket: &Path, timeout: Duration) -> Result<AllocatedUnits, String> {
    let asked = SystemTime::now();
    match tokio::time::timeout(timeout, client::held(socket)).await {
        Ok(held) => held.map(|held| AllocatedUnits::new(held, asked)),
        Err(_) => Err(format!("no answer within {timeout:?}")),
    }
}

/// Asks once, and where no answer comes takes what the kubelet's checkpoint has: it is as new as the
/// kubelet's own word, but names pods by UID alone.
///
/// # Errors
/// Neither says anything: what came back instead of an answer.
pub(crate) async fn ask_or_read(
    socket: &Path,
    timeout: Duration,
    device_plugin_dir: &Path,
) -> Result<AllocatedUnits, String> {
    let error = match ask(socket, timeout).await {
        Ok(allocated) => return Ok(allocated),
        Err(error) => error,
    };
    let (asked, directory) = (SystemTime::now(), device_plugin_dir.to_owned());
    let read = tokio::task::spawn_blocking(move || checkpoint::allocated(&directory)).await;
    match read {
        Ok(Ok(held)) => Ok(AllocatedUnits::new(held, asked)),
        Ok(Err(_)) | Err(_) => Err(error),
    }
}

/// Asks every now and then until `stop`.
pub(crate) async fn keep_asking(
    socket: PathBuf,
    allocated: watch::Sender<Option<Arc<AllocatedUnits>>>,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        match ask(&socket, ANSWER_TIMEOUT).await {
            Ok(held) => {
                failing = false;
                allocated.send_if_modified(|known| {
                    let same = known
                        .as_ref()
                        .is_some_and(|known| known.says_the_same(&held));
                    // Also when it is no news: it is the newer word.
                    *known = Some(Arc::new(held));
                    !same
                });
            }
            Err(error) if !failing => {
                tracing::info!(
                    socket = %socket.display(), error,
                    "which pods hold what is not known; mount the kubelet's pod-resources directory \
                     and name its parent with --kubelet-root-dir"
                );
                failing = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(ASK_INTERVAL) => {}
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
        let allocated = AllocatedUnits::new(
            vec![
                held("rdma/a", &["0000:3b:00.2", "0000:3b:00.3"]),
                held("nvidia.com/gpu", &["GPU-1"]),
                held("rdma/a", &["0000:3b:00.4"]),
                held("rdma/s", &["0000:86:00.0_3e71787e_17", "pool_3e71787e_17"]),
            ],
            SystemTime::now(),
        );
        let resource = ResourceName::parse("rdma/a").unwrap();
        let units: Vec<&str> = allocated.of(&resource).map(|(unit, _)| unit).collect();
        assert_eq!(units, ["0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4"]);
        assert_eq!(allocated.of(&resource).next().unwrap().1.pod, "train-0");
        assert_eq!(allocated.resources().count(), 3);
        let hcas = allocated.hcas();
        let exclusive: Vec<bool> = hcas.values().map(|all| all[0].exclusive).collect();
        assert_eq!(exclusive, [true, true, true, false]);
        assert!(
            allocated
                .units(&ResourceName::parse("rdma/b").unwrap())
                .is_empty()
        );
    }
}
