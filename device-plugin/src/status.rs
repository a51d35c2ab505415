//! The state of this node, from four sources: the daemon, the kubelet, the CNI plugin's journal, the
//! lease stores. A source that is missing is reported, and the others are shown.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use attachment::{
    listing::{self, Attachment},
    node::{Node, Places},
};
use diagnostics::topology::{Holders, Misaligned, alignment};
use hca::topology::{Machine, Wanted};
use hca::{Host, UnitId};
use ipam::{lease::Lease, plugin::Plugin};
use kubelet_api::client::{Devices, Held};
use node::policy::{Policy, PolicyError};
use serde::Serialize;
use serde_json::{Value, json};

use crate::reader::wait;

/// How long a store may take.
const STORE_TIMEOUT: Duration = Duration::from_secs(4);

/// What each of the four said.
#[derive(Debug)]
pub(crate) struct Status {
    /// The daemon's own report.
    pub daemon: Result<Value, String>,
    /// The kubelet's.
    pub kubelet: Result<Devices, String>,
    /// The journal's.
    pub attachments: Result<Vec<Attachment>, String>,
    /// The stores', of this node.
    pub leases: Result<Vec<Lease>, String>,
    /// Pods whose NICs are farther from their GPUs than they need be; empty where the kubelet
    /// does not say who has what.
    pub misaligned: Vec<Misaligned>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
}

/// Units of a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Units {
    /// The resource.
    pub resource: String,
    /// Units that can be allocated or are.
    pub healthy: Option<u64>,
    /// Units that cannot.
    pub unhealthy: Option<u64>,
    /// Units that containers hold.
    pub held: Option<u64>,
    /// What the daemon has with the kubelet.
    pub kubelet: String,
}

impl Status {
    /// Neither the daemon nor the kubelet answered: what the files say may be of any age.
    #[must_use]
    pub(crate) fn unanswered(&self) -> bool {
        self.daemon.is_err() && self.kubelet.is_err()
    }

    /// Whether a pod's NICs are farther from its GPUs than they need be.
    #[must_use]
    pub(crate) fn is_misaligned(&self, held: &Held) -> bool {
        let pod = format!("{}/{}", held.namespace, held.pod);
        self.misaligned.iter().any(|one| one.pod == pod)
    }

    /// Resources with their units, by the daemon, else by the kubelet, which names only the
    /// healthy ones.
    #[must_use]
    pub(crate) fn units(&self) -> Vec<Units> {
        match (&self.daemon, &self.kubelet) {
            (Ok(daemon), devices) => {
                let held = devices.as_ref().ok().map(|devices| devices.held.as_slice());
                pools(daemon).map(|pool| units_of(pool, held)).collect()
            }
            (Err(_), Ok(devices)) => units_by_kubelet(devices),
            (Err(_), Err(_)) => Vec::new(),
        }
    }

    /// Which container holds which units. The daemon asks the kubelet now and then only, so the
    /// kubelet's own word is the newer one.
    #[must_use]
    pub(crate) fn held(&self) -> Vec<Held> {
        match (&self.kubelet, &self.daemon) {
            (Ok(devices), _) => devices.held.iter().filter_map(ours).collect(),
            (Err(_), Ok(daemon)) => pools(daemon).flat_map(held_by_daemon).collect(),
            (Err(_), Err(_)) => Vec::new(),
        }
    }

    /// Addresses with prefix lengths that an attachment leases.
    #[must_use]
    pub(crate) fn addresses(&self, attachment: &Attachment) -> Vec<String> {
        let leases = self.leases.iter().flatten().filter(|lease| {
            lease.holder.container == attachment.container
                && lease.holder.interface == attachment.interface
        });
        leases
            .map(|lease| format!("{}/{}", lease.address, lease.prefix))
            .collect()
    }

    /// What is missing and what is worth knowing, for a person.
    #[must_use]
    pub(crate) fn notes(&self) -> Vec<String> {
        let missing = [
            self.daemon
                .as_ref()
                .err()
                .map(|e| format!("the daemon: {e}")),
            self.kubelet.as_ref().err().map(|e| match self.daemon {
                Ok(_) => {
                    format!(
                        "the kubelet: {e}; who holds what is what it last reported to the daemon"
                    )
                }
                Err(_) => format!("the kubelet: {e}"),
            }),
            self.attachments
                .as_ref()
                .err()
                .map(|e| format!("the journal: {e}")),
            self.leases
                .as_ref()
                .err()
                .map(|e| format!("the leases: {e}")),
        ];
        let attachments = self.attachments.iter().flatten().filter_map(|one| {
            let pod = one.pod.as_deref().unwrap_or(&one.container);
            Some(format!(
                "{pod} when it was attached: {}",
                one.warning.as_ref()?
            ))
        });
        let daemon = self.daemon.iter().flat_map(|daemon| {
            let lists = [daemon["unready"].as_array(), daemon["notes"].as_array()];
            let lines = lists.into_iter().flatten().flatten();
            lines.filter_map(|line| line.as_str().map(str::to_owned))
        });
        let misaligned = self.misaligned.iter().map(Misaligned::sentence);
        let notes = self.notes.iter().cloned().chain(misaligned);
        missing
            .into_iter()
            .flatten()
            .chain(daemon)
            .chain(attachments)
            .chain(notes)
            .collect()
    }

    /// Everything as one document.
    #[must_use]
    pub(crate) fn document(&self) -> Value {
        let attachments: Option<Vec<Value>> = self.attachments.as_ref().ok().map(|all| {
            let with_addresses = all.iter().map(|one| {
                let mut document = json!(one);
                if let Some(fields) = document.as_object_mut() {
                    fields.insert("addresses".into(), json!(self.addresses(one)));
                }
                document
            });
            with_addresses.collect()
        });
        json!({
            "daemon": self.daemon.as_ref().ok(),
            "units": self.units(),
            "held": self.held(),
            "attachments": attachments,
            "leases": self.leases.as_ref().ok(),
            "misaligned": self.misaligned,
            "notes": self.notes(),
        })
    }
}

fn pools(daemon: &Value) -> impl Iterator<Item = &Value> {
    daemon["pools"].as_array().into_iter().flatten()
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A pool of the daemon's, with what the kubelet says is held if it says so: that is the newer word.
fn units_of(pool: &Value, held: Option<&[Held]>) -> Units {
    let resource = word(&pool["resource"]);
    let kubelet = match (pool["registered"].as_bool(), pool["streaming"].as_bool()) {
        (Some(true), Some(true)) => "listening".to_owned(),
        (Some(true), _) => "registered".to_owned(),
        _ => format!("not registered: {}", word(&pool["lastError"])),
    };
    let held = match held {
        Some(all) => {
            let of_pool = all.iter().filter(|one| one.resource == resource);
            Some(of_pool.map(|one| one.ids.len()).sum())
        }
        None => pool["held"].as_array().map(Vec::len),
    };
    Units {
        resource,
        healthy: pool.pointer("/units/healthy").and_then(Value::as_u64),
        unhealthy: pool.pointer("/units/unhealthy").and_then(Value::as_u64),
        held: held.and_then(|held| u64::try_from(held).ok()),
        kubelet,
    }
}

fn held_by_daemon(pool: &Value) -> Vec<Held> {
    let held = pool["held"].as_array().into_iter().flatten();
    held.map(|one| Held {
        namespace: word(&one["namespace"]),
        pod: word(&one["pod"]),
        container: word(&one["container"]),
        resource: word(&pool["resource"]),
        ids: vec![word(&one["unit"])],
    })
    .collect()
}

/// Our units among a container's devices: the form of their names distinguishes them from other
/// plugins'. A bare PCI address may be another plugin's.
fn ours(held: &Held) -> Option<Held> {
    let ids: Vec<String> = held.ids.iter().filter(|id| is_ours(id)).cloned().collect();
    (!ids.is_empty()).then(|| Held {
        ids,
        ..held.clone()
    })
}

fn is_ours(id: &str) -> bool {
    id.parse::<UnitId>().is_ok()
}

fn units_by_kubelet(devices: &Devices) -> Vec<Units> {
    let mut counts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let count = |ids: &[String]| {
        let ours = ids.iter().filter(|id| is_ours(id)).count();
        u64::try_from(ours).unwrap_or(u64::MAX)
    };
    for (resource, ids) in &devices.allocatable {
        counts.entry(resource).or_default().0 += count(ids);
    }
    for held in &devices.held {
        counts.entry(&held.resource).or_default().1 += count(&held.ids);
    }
    let ours = counts.into_iter().filter(|(_, counts)| *counts != (0, 0));
    ours.map(|(resource, (healthy, held))| Units {
        resource: resource.to_owned(),
        healthy: Some(healthy),
        unhealthy: None,
        held: Some(held),
        kubelet: "-".to_owned(),
    })
    .collect()
}

/// Pods whose NICs are farther from their GPUs than they need be.
///
/// # Errors
/// The host cannot be read.
pub(crate) fn misaligned(host: &Host, devices: &Devices) -> hca::host::Result<Vec<Misaligned>> {
    let inventory = hca::inventory(host)?;
    let machine = Machine::read(host, &inventory, &Wanted::default())?;
    let held = devices.held.iter().flat_map(|held| {
        let pod = format!("{}/{}", held.namespace, held.pod);
        held.ids.iter().map(move |id| (pod.clone(), id.clone()))
    });
    Ok(alignment(&machine, &Holders::collect(held)).misaligned)
}

/// The journal and the leases of this node.
#[derive(Debug)]
pub(crate) struct Files {
    /// Attachments, or why they cannot be read.
    pub attachments: Result<Vec<Attachment>, String>,
    /// Leases of this node.
    pub leases: Result<Vec<Lease>, String>,
    /// What could not be read of either.
    pub notes: Vec<String>,
}

/// Reads the journal and the stores that the node's policy names.
#[must_use]
pub(crate) fn files(root: &Path, policy: &Path, node: Option<String>) -> Files {
    hca::host::show(policy);
    let places = Places {
        root: root.to_owned(),
        policy: PathBuf::from(policy),
        node: node.clone(),
    };
    let node_name = node;
    let node = match Node::open_for_release(&places, "status".into()) {
        Ok(node) => node,
        Err(error) => {
            let error = error.with_remedy();
            return Files {
                attachments: Err(error.clone()),
                leases: Err(error),
                notes: Vec::new(),
            };
        }
    };
    hca::host::show(&node.policy.values.state_dir);
    let mut notes: Vec<String> = node
        .policy
        .fault
        .iter()
        .map(PolicyError::with_remedy)
        .collect();
    let attachments: Result<Vec<Attachment>, String> = listing::records(&node.journal)
        .map(|(records, complaints)| {
            notes.extend(complaints);
            let records = records.iter();
            records
                .flat_map(|(_, record)| Attachment::all_of(record, &node.roots.proc, &node.boot))
                .collect()
        })
        .map_err(|error| error.to_string());
    // By the node's name, by an attachment, or by machine and boot (below): the name may not be known here.
    let name = node.policy.values.node_name(node_name.as_deref());
    let attached: Vec<String> = attachments
        .iter()
        .flatten()
        .map(|one| one.container.clone())
        .collect();
    let (mut found, mut failed) = (None, Vec::new());
    for store in node.policy.values.stores.keys() {
        let (name, attached) = (name.clone(), attached.clone());
        let own = move |lease: &Lease| {
            lease.holder.node == name || attached.contains(&lease.holder.container)
        };
        match leases_in_time(&node.policy.values, &places, store, own) {
            Ok(None) => {
                found.get_or_insert_with(Vec::new);
            }
            Ok(Some((leases, complaints))) => {
                found.get_or_insert_with(Vec::new).extend(leases);
                notes.extend(complaints);
            }
            Err(error) => failed.push(format!("leases of store {store:?}: {error}")),
        }
    }
    let leases = match found {
        Some(leases) => {
            notes.extend(failed);
            Ok(leases)
        }
        None if failed.is_empty() => Ok(Vec::new()),
        None => Err(failed.join("; ")),
    };
    Files {
        attachments,
        leases,
        notes,
    }
}

/// Leases, and what is to be said of those that cannot be read.
type Leases = (Vec<Lease>, Vec<String>);

/// The leases of one store that was used.
fn leases_in_time(
    policy: &Policy,
    places: &Places,
    store: &str,
    own: impl Fn(&Lease) -> bool + Send + 'static,
) -> Result<Option<Leases>, String> {
    let (policy, places, name) = (policy.clone(), places.clone(), store.to_owned());
    let read = move || {
        if let Some(store) = policy.stores.get(&name) {
            hca::host::show(&store.directory);
        }
        let ipam = Plugin::new(policy, &places.root, places.node.as_deref());
        leases_of(&ipam, &name, own)
    };
    wait("it", STORE_TIMEOUT, read).map_err(|late| late.to_string())?
}

fn leases_of(
    ipam: &Plugin,
    store: &str,
    own: impl Fn(&Lease) -> bool,
) -> Result<Option<Leases>, String> {
    let Some(open) = ipam
        .open_existing(store)
        .map_err(|error| error.to_string())?
    else {
        return Ok(None);
    };
    let (mut leases, mut complaints) = (Vec::new(), Vec::new());
    let findings = open.entries(true, |entry| {
        match entry.record {
            _ if entry.freed.is_some() => {}
            Ok(lease) if own(&lease) || lease.holder.is_of_this_boot(open.node()) => {
                leases.push(lease);
            }
            Ok(_) => {}
            Err(why) => complaints.push(format!("{}: {why}", entry.path.display())),
        }
        Ok(())
    });
    let findings = findings.map_err(|error| error.to_string())?;
    let findings = findings.into_iter();
    complaints.extend(findings.map(|found| format!("{}: {}", found.path.display(), found.what)));
    leases.sort_by_key(|lease| lease.address);
    Ok(Some((leases, complaints)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(resource: &str, ids: &[&str]) -> Held {
        Held {
            namespace: "default".into(),
            pod: "p".into(),
            container: "c".into(),
            resource: resource.into(),
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
        }
    }

    fn unanswered() -> Status {
        Status {
            daemon: Err("connection refused".into()),
            kubelet: Err("no socket".into()),
            attachments: Err("no permission".into()),
            leases: Err("stale handle".into()),
            misaligned: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn without_a_daemon_the_kubelet_reports_our_units() {
        let status = Status {
            kubelet: Ok(Devices {
                held: vec![
                    held("rdma/a", &["pool_3e71787e_0"]),
                    held("nvidia.com/gpu", &["GPU-7c2f"]),
                ],
                allocatable: vec![
                    (
                        "rdma/a".into(),
                        vec!["pool_3e71787e_0".into(), "pool_3e71787e_1".into()],
                    ),
                    ("nvidia.com/gpu".into(), vec!["GPU-7c2f".into()]),
                ],
            }),
            ..unanswered()
        };
        let units = status.units();
        assert_eq!(units.len(), 1, "{units:?}");
        assert_eq!(units[0].resource, "rdma/a");
        assert_eq!((units[0].healthy, units[0].held), (Some(2), Some(1)));
        assert_eq!(status.held(), [held("rdma/a", &["pool_3e71787e_0"])]);
        assert!(!status.unanswered());
        assert!(status.notes()[0].starts_with("the daemon: connection refused"));
    }

    #[test]
    fn without_a_kubelet_the_daemon_reports_who_holds_what() {
        let daemon = json!({"pools": [{
            "resource": "rdma/a", "units": {"healthy": 1, "unhealthy": 2},
            "held": [{"unit": "0000:3b:00.0", "namespace": "n", "pod": "q", "container": "d"}],
            "registered": false, "lastError": "no such file",
        }], "unready": ["rdma/a is not registered"], "notes": []});
        let status = Status {
            daemon: Ok(daemon),
            ..unanswered()
        };
        assert_eq!(status.units()[0].kubelet, "not registered: no such file");
        assert_eq!(status.held()[0].pod, "q");
        assert!(
            status
                .notes()
                .contains(&"rdma/a is not registered".to_owned())
        );
    }

    #[test]
    fn what_the_kubelet_reports_as_held_outweighs_the_daemons_older_report() {
        let status = Status {
            daemon: Ok(json!({"pools": [{
                "resource": "rdma/a", "units": {"healthy": 2, "unhealthy": 0}, "held": [],
                "registered": true, "streaming": true,
            }]})),
            kubelet: Ok(Devices {
                held: vec![held("rdma/a", &["pool_3e71787e_0"]), held("rdma/b", &["x"])],
                allocatable: Vec::new(),
            }),
            ..unanswered()
        };
        let [units] = status.units().try_into().unwrap();
        assert_eq!((units.healthy, units.held), (Some(2), Some(1)));
    }

    #[test]
    fn a_journal_or_store_that_was_never_used_holds_nothing() {
        let place = tempfile::tempdir().unwrap();
        let (state, store) = (place.path().join("state"), place.path().join("store"));
        let policy = place.path().join("policy.json");
        let values = json!({"stateDir": state,
            "stores": {"default": {"type": "file", "directory": store}}});
        std::fs::write(&policy, values.to_string()).unwrap();
        let unused = files(Path::new("/"), &policy, Some("n1".into()));
        assert!(unused.attachments.unwrap().is_empty() && unused.leases.unwrap().is_empty());
    }

    #[test]
    fn a_pod_with_a_nic_of_the_other_socket_is_marked() {
        let place = tempfile::tempdir().unwrap();
        let tree = hca::tree::Tree::new(place.path());
        hca::tree::machine::a4(&tree);
        let devices = Devices {
            held: vec![
                held("nvidia.com/gpu", &["GPU-0000-8f-00-0"]),
                held("rdma/a", &["0000:ce:00.0"]),
            ],
            allocatable: Vec::new(),
        };
        let status = Status {
            misaligned: misaligned(&tree.host(), &devices).unwrap(),
            kubelet: Ok(devices),
            ..unanswered()
        };
        assert!(status.is_misaligned(&status.held()[0]));
        let note = "pod default/p: GPU 0 is served by mlx5_7 at SYS";
        assert!(status.notes().iter().any(|line| line.starts_with(note)));
        assert_eq!(status.document()["misaligned"][0]["gpu"], 0);
    }

    #[test]
    fn no_answer_of_any_source_is_reported_as_such() {
        let status = unanswered();
        assert!(status.unanswered());
        assert_eq!(status.notes().len(), 4);
        let document = status.document();
        assert!(document["daemon"].is_null() && document["attachments"].is_null());
    }
}
