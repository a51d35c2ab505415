//! The state of this node, from four sources: the daemon, the kubelet, the CNI plugin's journal, the
//! lease stores. A source that is missing is reported, and the others are shown.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use attachment::listing::{Attachment, Presence};
use attachment::node_files::{self, Files};
use clap::Args;
use hca::UnitId;
use ipam::lease::Lease;
use jiff::Timestamp;
use kubelet_api::client::{Devices, Held};
use node_wire::rdma_node::{self, Inputs, ResourceState};
use node_wire::status::{DaemonStatus, ForgetQuestion, PoolStatus, StatusQuestion};
use pools::config::flags::KubeletRoot;

use crate::global::{Global, NODE, within_limit};

/// How long the daemon may take.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(3);

/// Whom to ask on this node.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = NODE)]
pub(crate) struct Sources {
    /// The daemon's socket
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_NODE_SOCKET",
        default_value = "/run/rdma-netdev/node.sock"
    )]
    node_socket: PathBuf,
    #[command(flatten)]
    kubelet: KubeletRoot,
}

impl Sources {
    /// The daemon's state.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn daemon(&self) -> Result<DaemonStatus, node_wire::ClientError> {
        node_wire::ask(&self.node_socket, &StatusQuestion {}, DAEMON_TIMEOUT)
    }

    /// Has the daemon forget an HCA that is missing.
    ///
    /// # Errors
    /// It does not answer, or no such HCA is missing.
    pub(crate) fn forget(&self, hca: &str) -> Result<(), node_wire::ClientError> {
        let question = ForgetQuestion {
            hca: hca.to_owned(),
        };
        node_wire::ask(&self.node_socket, &question, DAEMON_TIMEOUT).map(drop)
    }

    /// Which containers have which devices, by the kubelet.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn kubelet(&self) -> Result<Devices, kubelet_api::client::Error> {
        kubelet_api::client::ask(&self.kubelet.kubelet_root_dir)
    }

    /// Asks all.
    pub(crate) fn read(&self, global: &Global) -> Answers {
        let places = global.places();
        let files = within_limit("the read of the journal and the leases", move || {
            node_files::read(&places)
        });
        let (files, late) = match files {
            Ok(files) => (files, Vec::new()),
            Err(error) => {
                let hangs = error.to_string();
                let files = Files {
                    attachments: Err(hangs.clone()),
                    leases: Err(hangs.clone()),
                    notes: Vec::new(),
                };
                (files, vec![hangs])
            }
        };
        let daemon = self.daemon().map_err(|error| error.to_string());
        let kubelet = self.kubelet().map_err(|error| error.to_string());
        Answers {
            late,
            ..Answers::new(daemon, kubelet, files)
        }
    }
}

/// What each source said.
#[derive(Debug)]
pub(crate) struct Answers {
    /// The daemon's own state.
    pub daemon: Result<DaemonStatus, String>,
    /// The kubelet's.
    pub kubelet: Result<Devices, String>,
    /// The journal's.
    pub attachments: Result<Vec<Attachment>, String>,
    /// The stores', of this node.
    pub leases: Result<Vec<Lease>, String>,
    notes: Vec<String>,
    /// Reads that hang.
    late: Vec<String>,
}

impl Answers {
    /// What the sources say.
    pub(crate) fn new(
        daemon: Result<DaemonStatus, String>,
        kubelet: Result<Devices, String>,
        files: Files,
    ) -> Self {
        Self {
            daemon,
            kubelet,
            attachments: files.attachments,
            leases: files.leases,
            notes: files.notes,
            late: Vec::new(),
        }
    }

    /// Pods with a GPU for which a nearer HCA exists, each with a sentence, by what the daemon bound.
    pub(crate) fn misaligned(&self) -> BTreeMap<String, String> {
        let bindings = self.daemon.iter().flat_map(|daemon| &daemon.bindings);
        let misaligned = bindings
            .filter(|one| one.ended.is_none())
            .filter_map(|one| {
                let gpu = one.gpus.iter().find(|gpu| !gpu.aligned)?;
                let pod = format!("{}/{}", one.pod.namespace, one.pod.name);
                let (hca, gpu, class) = (&one.hca, &gpu.gpu, &gpu.class);
                let sentence = format!(
                    "pod {pod}: GPU {gpu} is served by {hca} at {class}, and a nearer HCA exists"
                );
                Some((pod, sentence))
            });
        misaligned.collect()
    }

    /// Why what is shown may be old or is not whole.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = self.late.clone();
        if self.daemon.is_err() && self.kubelet.is_err() {
            let why =
                "neither the daemon nor the kubelet answers: showing the journal and leases only";
            faults.push(why.to_owned());
        }
        faults
    }

    /// The state as the API shows it, with the kubelet's list of who holds what, which is newer. The
    /// kubelet alone knows units alone.
    pub(crate) fn shown(&self) -> rdma_node::NodeState {
        let mut state = match &self.daemon {
            Ok(daemon) => rdma_node::NodeState::of(Inputs {
                daemon,
                boot: "",
                addresses: Vec::new(),
                before: None,
                now: Timestamp::now(),
            }),
            Err(_) => rdma_node::NodeState::default(),
        };
        // Since when, only who watches can say.
        state.hcas.iter_mut().for_each(|hca| hca.since = None);
        match (&self.daemon, &self.kubelet) {
            (Ok(_), Ok(devices)) => {
                for resource in &mut state.resources {
                    let held = devices.held.iter();
                    let held = held.filter(|one| one.resource == resource.name);
                    resource.allocated_units = held.map(|one| one.ids.len() as u64).sum();
                }
            }
            (Err(_), Ok(devices)) => state.resources = units_by_kubelet(devices),
            (_, Err(_)) => {}
        }
        state.summarized()
    }

    /// Which container holds which units. The daemon asks the kubelet now and then only, so the
    /// kubelet's own list is the newer one.
    pub(crate) fn held(&self) -> Vec<Held> {
        match (&self.kubelet, &self.daemon) {
            (Ok(devices), daemon) => {
                let pools = daemon.as_ref().ok().map(|daemon| daemon.pools.as_slice());
                let held = devices.held.iter();
                held.filter_map(|held| ours(held, pools)).collect()
            }
            (Err(_), Ok(daemon)) => daemon.pools.iter().flat_map(held_by_daemon).collect(),
            (Err(_), Err(_)) => Vec::new(),
        }
    }

    /// Addresses with prefix lengths that are leased for an interface of an attachment.
    pub(crate) fn addresses(&self, attachment: &Attachment) -> Vec<String> {
        let whose = (
            &attachment.network,
            &attachment.container,
            &attachment.ifname,
        );
        let is_own = |one: &&Lease| {
            let holder = &one.holder;
            let numbers = attachment.lease_numbers.as_ref();
            (&holder.network, &holder.container, &holder.interface) == whose
                && numbers.is_none_or(|numbers| numbers.contains(&one.part))
        };
        let own = self.leases.iter().flatten().filter(is_own);
        own.map(|lease| format!("{}/{}", lease.address, lease.prefix))
            .collect()
    }

    /// The HCAs of an attachment: as the journal has them, else those of its netdev.
    pub(crate) fn hcas(&self, attachment: &Attachment) -> BTreeSet<String> {
        let Some(netdev) = (attachment.netdev.as_ref()).filter(|_| attachment.hcas.is_empty())
        else {
            return attachment.hcas.clone();
        };
        let pools = self.daemon.iter().flat_map(|daemon| &daemon.pools);
        let hcas = pools.flat_map(|pool| &pool.hcas);
        let has_it = hcas.filter(|hca| hca.netdevs.contains(netdev));
        has_it.map(|hca| hca.id.clone()).collect()
    }

    /// What is missing of who has what, and pods that are misaligned.
    pub(crate) fn gaps(&self) -> Vec<String> {
        let stale = match self.daemon {
            Ok(_) => "; who holds what is what it last reported to the daemon",
            Err(_) => "",
        };
        let missing = |what: &str, error: Option<&String>| error.map(|e| format!("{what}: {e}"));
        let kubelet = missing("the kubelet", self.kubelet.as_ref().err());
        let missing = [
            missing("the daemon", self.daemon.as_ref().err()),
            kubelet.map(|text| text + stale),
            missing("the journal", self.attachments.as_ref().err()),
            missing("the leases", self.leases.as_ref().err()),
        ];
        let attachments = self.attachments.iter().flatten();
        let warnings = attachments.clone().filter_map(|one| {
            let (pod, why) = (owner(one), one.warning.as_ref()?);
            Some(format!("{pod} when it was attached: {why}"))
        });
        let gone = attachments
            .clone()
            .filter(|one| one.presence == Some(Presence::Gone))
            .map(|one| {
                let (pod, interface) = (owner(one), &one.interface);
                format!(
                    "{pod}: {interface} is gone from the pod. Delete the pod; its controller makes a \
                     new one"
                )
            });
        let mut unread: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for one in attachments {
            if let Some(Presence::Unknown(why)) = &one.presence {
                let name = format!("{} ({})", owner(one), one.interface);
                unread.entry(why).or_default().push(name);
            }
        }
        let unread = unread.into_iter().map(|(why, which)| {
            let which = which.join(", ");
            format!("whether these are still in their pods is unknown, because {why}: {which}")
        });
        (missing.into_iter().flatten())
            .chain(warnings)
            .chain(gone)
            .chain(unread)
            .chain(self.notes.iter().cloned())
            .chain(self.misaligned().into_values())
            .collect()
    }

    /// The same, with what the daemon knows of itself.
    pub(crate) fn notes(&self) -> Vec<String> {
        let daemon = self.daemon.iter();
        let daemon = daemon.flat_map(|daemon| daemon.unready.iter().chain(&daemon.notes));
        self.gaps().into_iter().chain(daemon.cloned()).collect()
    }
}

/// Whose attachment it is, for people.
fn owner(attachment: &Attachment) -> &str {
    attachment.pod.as_deref().unwrap_or(&attachment.container)
}

fn held_by_daemon(pool: &PoolStatus) -> Vec<Held> {
    let held = pool.held.iter().flatten();
    held.map(|one| Held {
        namespace: one.namespace.clone(),
        pod: one.pod.clone(),
        container: one.container.clone(),
        resource: pool.resource.clone(),
        ids: one.units.clone(),
    })
    .collect()
}

/// Our units among a container's devices: the form of their names distinguishes them from other
/// plugins'. A bare PCI address may be another plugin's, such as a GPU's: it is ours if the resource is one of
/// the daemon's pools.
fn ours(held: &Held, pools: Option<&[PoolStatus]>) -> Option<Held> {
    let is_pool = pools.is_none_or(|pools| pools.iter().any(|one| one.resource == held.resource));
    let mut held = held.clone();
    held.ids.retain(|id| match id.parse() {
        Ok(UnitId::Exclusive(_)) => is_pool,
        unit => unit.is_ok(),
    });
    (!held.ids.is_empty()).then_some(held)
}

fn is_ours(id: &str) -> bool {
    id.parse::<UnitId>().is_ok()
}

fn units_by_kubelet(devices: &Devices) -> Vec<ResourceState> {
    let mut counts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let count = |ids: &[String]| ids.iter().filter(|id| is_ours(id)).count() as u64;
    for (resource, ids) in &devices.allocatable {
        counts.entry(resource).or_default().0 += count(ids);
    }
    for held in &devices.held {
        counts.entry(&held.resource).or_default().1 += count(&held.ids);
    }
    counts.retain(|_, counts| *counts != (0, 0));
    let units = |(resource, (units, allocated_units)): (&str, (u64, u64))| ResourceState {
        name: resource.to_owned(),
        registered: true,
        units,
        healthy_units: units,
        allocated_units,
        ..ResourceState::default()
    };
    counts.into_iter().map(units).collect()
}

#[cfg(test)]
mod tests {
    use node_wire::status::{BindingStatus, HeldUnits, ServedGpu, UnitCounts};

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

    fn unanswered() -> Answers {
        let files = Files {
            attachments: Err("no permission".into()),
            leases: Err("stale handle".into()),
            notes: Vec::new(),
        };
        let kubelet = Err("no socket".into());
        Answers::new(Err("connection refused".into()), kubelet, files)
    }

    #[test]
    fn a_gpu_with_a_pci_address_for_a_name_is_no_hca() {
        let pool = PoolStatus {
            resource: "rdma/a".into(),
            ..PoolStatus::default()
        };
        let daemon = DaemonStatus {
            pools: vec![pool],
            ..DaemonStatus::default()
        };
        let held = vec![
            held("rdma/a", &["0000:3b:00.0"]),
            held("amd.com/gpu", &["0000:8f:00.0"]),
            // Of a pool that is not configured any more.
            held("rdma/b", &["pool_3e71787e_0"]),
        ];
        let answers = Answers {
            daemon: Ok(daemon),
            kubelet: Ok(Devices {
                held,
                allocatable: Vec::new(),
            }),
            ..unanswered()
        };
        let found: Vec<String> = answers.held().into_iter().map(|one| one.resource).collect();
        assert_eq!(found, ["rdma/a", "rdma/b"]);
    }

    #[test]
    fn without_a_daemon_the_kubelet_reports_our_units() {
        let status = Answers {
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
        let shown = status.shown().resources;
        assert_eq!(shown.len(), 1, "{shown:?}");
        assert_eq!(shown[0].name, "rdma/a");
        assert_eq!((shown[0].healthy_units, shown[0].allocated_units), (2, 1));
        assert_eq!(status.held(), [held("rdma/a", &["pool_3e71787e_0"])]);
        assert!(status.faults().is_empty());
        assert!(status.notes()[0].starts_with("the daemon: connection refused"));
    }

    #[test]
    fn without_a_kubelet_the_daemon_reports_who_holds_what() {
        let held = HeldUnits {
            units: vec!["0000:3b:00.0".into()],
            namespace: "n".into(),
            pod: "q".into(),
            container: "d".into(),
            ..HeldUnits::default()
        };
        let daemon = DaemonStatus {
            pools: vec![PoolStatus {
                resource: "rdma/a".into(),
                held: Some(vec![held]),
                last_error: Some("no such file".into()),
                ..PoolStatus::default()
            }],
            unready: vec!["rdma/a is not registered".into()],
            ..DaemonStatus::default()
        };
        let status = Answers {
            daemon: Ok(daemon),
            ..unanswered()
        };
        assert_eq!(
            status.shown().problems,
            ["rdma/a: not registered with the kubelet: no such file"]
        );
        assert_eq!(status.held()[0].pod, "q");
        assert!(
            status
                .notes()
                .contains(&"rdma/a is not registered".to_owned())
        );
    }

    #[test]
    fn what_the_kubelet_reports_as_held_outweighs_the_daemons_older_report() {
        let status = Answers {
            daemon: Ok(DaemonStatus {
                pools: vec![PoolStatus {
                    resource: "rdma/a".into(),
                    units: UnitCounts {
                        healthy: 2,
                        unhealthy: 0,
                    },
                    held: Some(Vec::new()),
                    registered: true,
                    streaming: true,
                    ..PoolStatus::default()
                }],
                ..DaemonStatus::default()
            }),
            kubelet: Ok(Devices {
                held: vec![held("rdma/a", &["pool_3e71787e_0"]), held("rdma/b", &["x"])],
                allocatable: Vec::new(),
            }),
            ..unanswered()
        };
        let [resource] = status.shown().resources.try_into().unwrap();
        assert_eq!((resource.healthy_units, resource.allocated_units), (2, 1));
    }

    #[test]
    fn a_pod_whose_gpu_has_a_nearer_hca_is_noted() {
        let far = ServedGpu {
            gpu: "0000:8f:00.0".into(),
            class: "SYS".into(),
            peer_to_peer: false,
            aligned: false,
        };
        let bound = |name: &str, ended: Option<&str>| BindingStatus {
            resource: "rdma/a".into(),
            unit: "slot_3e71787e_0".into(),
            hca: "0000:ce:00.0".into(),
            pod: node_wire::Pod {
                namespace: "ml".into(),
                name: name.into(),
                uid: None,
            },
            container: "c".into(),
            stage: "attached".into(),
            rail: 7,
            gpus: vec![far.clone()],
            ended: ended.map(str::to_owned),
        };
        let status = Answers {
            daemon: Ok(DaemonStatus {
                bindings: vec![bound("p", None), bound("q", Some("its pod ended"))],
                ..DaemonStatus::default()
            }),
            ..unanswered()
        };
        let note =
            "pod ml/p: GPU 0000:8f:00.0 is served by 0000:ce:00.0 at SYS, and a nearer HCA exists";
        let notes = status.notes();
        assert!(notes.iter().any(|line| line == note), "{notes:?}");
        assert!(!notes.iter().any(|line| line.contains("ml/q")), "{notes:?}");
    }

    #[test]
    fn no_answer_of_any_source_is_reported_as_such() {
        let status = unanswered();
        assert!(status.faults()[0].starts_with("neither the daemon nor the kubelet"));
        assert_eq!(status.notes().len(), 4);
    }
}
