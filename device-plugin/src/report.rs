//! The daemon's state as plain data: what `/metrics`, `/readyz` and `/status` are made from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hca::{HcaId, NetnsMode};
use node_server::socket::{self, NodeSocket};
use node_wire::status::{
    ConfigurationStatus, DaemonStatus, HcaStatus, HeldUnits, HostHca, MissingHca, PoolStatus,
    SocketStatus, UnitCounts,
};
use tokio::sync::watch;

use crate::events::Trigger;
use crate::kubelet::service::{AllocationCounts, State};
use crate::kubelet::session::NO_STREAM;
use crate::last_good::REJECTED;
use crate::reader::Readers;
use crate::reclaim;
use crate::telemetry::measured::Holders;
use hca::Late;
use pools::binding::alignment;
use pools::binding::record::{Binding, Bindings};
use pools::config::{ResourceName, TopologyConfig};
use pools::history::Missing;
use pools::holdings::Holdings;
use pools::plan::Transitions;
use pools::snapshot::{Member, Snapshot, UnhealthyReason};
use pools::words::word;

/// The state of the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// When it started.
    pub started: Instant,
    /// Its configuration.
    pub config: ConfigurationStatus,
    /// How long a port that flapped must be up.
    pub flap_hold: Duration,
    /// Reads the host.
    pub scans: ScanCounts,
    /// How the RDMA subsystem treats network namespaces.
    pub netns_mode: Option<NetnsMode>,
    /// One for each resource, in the order of the configuration.
    pub pools: Vec<Pool>,
    /// HCAs that are chosen by a pool and not in it, with the reason.
    pub excluded: Vec<String>,
    /// The hardware.
    pub hcas: Arc<Vec<HostHca>>,
    /// HCAs that were here and are not.
    pub missing: Vec<Missing>,
    /// How configuration and host do not fit.
    pub remarks: Vec<String>,
    /// Health changes.
    pub transitions: Transitions,
    /// Who holds what, once known.
    pub allocated: Option<Arc<Holdings>>,
    /// What was cleaned up behind pods.
    pub reclaim: reclaim::Counts,
    /// The socket on which programs of the node ask.
    pub node_socket: NodeSocket,
    /// What may be late.
    pub readers: Readers,
    /// What the configuration says about GPUs and NICs.
    pub topology: TopologyConfig,
    /// Slots that are bound.
    pub bindings: Arc<Bindings>,
}

/// Reads the host since the start.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScanCounts {
    /// By what made the daemon scan.
    pub by_trigger: BTreeMap<Trigger, u64>,
    /// Failed ones.
    pub failures: u64,
    /// Why the last one failed; cleared by success.
    pub error: Option<String>,
    /// The one that does not come to its end.
    pub late: Option<Late>,
    /// Whether one has come to its end.
    pub done: bool,
    /// How long the last one took.
    pub last: Duration,
}

/// One resource.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    /// Its name.
    pub resource: ResourceName,
    /// What is sent to the kubelet, and nothing else; `None` until something is sent.
    pub snapshot: Option<Arc<Snapshot>>,
    /// Its session.
    pub session: watch::Receiver<State>,
    /// Its Allocate calls.
    pub allocations: Arc<AllocationCounts>,
}

impl Pool {
    /// Units that the kubelet was sent.
    pub(crate) fn units(&self) -> UnitCounts {
        let snapshot = self.snapshot.as_ref();
        snapshot
            .map(|snapshot| snapshot.count())
            .unwrap_or_default()
    }
}

fn owned<'n>(names: impl IntoIterator<Item = &'n str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

impl Report {
    /// What the kubelet was sent of each resource.
    pub(crate) fn snapshots(&self) -> Vec<Arc<Snapshot>> {
        let pools = self.pools.iter();
        pools.filter_map(|pool| pool.snapshot.clone()).collect()
    }

    /// Before anything was scanned.
    pub(crate) fn new(
        config: ConfigurationStatus,
        node_socket: NodeSocket,
        readers: Readers,
    ) -> Self {
        Self {
            started: Instant::now(),
            config,
            flap_hold: Duration::ZERO,
            scans: ScanCounts::default(),
            netns_mode: None,
            pools: Vec::new(),
            excluded: Vec::new(),
            hcas: Arc::default(),
            missing: Vec::new(),
            remarks: Vec::new(),
            transitions: Transitions::default(),
            allocated: None,
            reclaim: reclaim::Counts::default(),
            node_socket,
            readers,
            topology: TopologyConfig::default(),
            bindings: Arc::default(),
        }
    }

    /// Why the daemon is not ready; empty when it is.
    pub(crate) fn unready(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if let Some(late) = &self.scans.late {
            reasons.push(late.to_string());
        } else if let Some(error) = &self.scans.error {
            reasons.push(format!("the host cannot be scanned: {error}"));
        } else if !self.scans.done {
            reasons.push("the host has not been scanned yet".into());
        }
        for pool in &self.pools {
            let state = pool.session.borrow();
            if !state.registered {
                let error = state.last_error.as_deref().unwrap_or("not yet");
                reasons.push(format!("{} is not registered: {error}", pool.resource));
            } else if state.streaming_since.is_none() {
                reasons.push(format!(
                    "{}: the kubelet has not opened its stream",
                    pool.resource
                ));
            } else if !state.listed {
                reasons.push(format!(
                    "{}: the kubelet has not been sent the list of units",
                    pool.resource
                ));
            }
        }
        reasons
    }

    /// What is worth knowing although it does not make the daemon unready.
    pub(crate) fn notes(&self) -> Vec<String> {
        let error = self.config.error.iter();
        let rejected = error.map(|error| format!("{REJECTED}: {error}"));
        let pools = self.pools.iter().filter_map(|pool| {
            let counts = pool.snapshot.as_ref()?.count();
            (counts.healthy == 0).then(|| format!("{} has no healthy unit", pool.resource))
        });
        let without_stream = self.pools.iter().filter_map(|pool| {
            let without_stream = pool.session.borrow().registrations_without_stream > 0;
            without_stream.then(|| format!("{}: {NO_STREAM}", pool.resource))
        });
        let idle = self.reclaim.idle.iter();
        let idle = idle.map(|why| format!("nothing is cleaned up behind pods: {why}"));
        let socket = self
            .node_socket_error()
            .map(|error| format!("programs of this node cannot ask which pod holds what: {error}"));
        let unreadable = self
            .bindings
            .unreadable
            .values()
            .map(|why| format!("{why}; its HCA is given to no pod until the file is removed"));
        rejected
            .chain(unreadable)
            .chain(pools)
            .chain(without_stream)
            .chain(idle)
            .chain(socket)
            .chain(self.readers.late().iter().map(Late::to_string))
            .chain(self.excluded.clone())
            .chain(self.remarks.clone())
            .collect()
    }

    fn node_socket_error(&self) -> Option<String> {
        match &*self.node_socket.state.borrow() {
            socket::State::Failed(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// How many HCAs of a pool are here, and how many there must be: by its configuration, else as many as
    /// there were.
    pub(crate) fn hca_counts(&self, pool: &Pool) -> (usize, usize) {
        let is_its = |one: &&Missing| one.resource.as_deref() == Some(pool.resource.as_str());
        let missing = self.missing.iter().filter(is_its);
        let mut known: BTreeSet<&HcaId> = missing.map(|one| &one.id).collect();
        let members = pool.snapshot.iter().flat_map(|snapshot| snapshot.members());
        let not_here = |reason: &UnhealthyReason| {
            matches!(reason, UnhealthyReason::Gone | UnhealthyReason::Excluded)
        };
        let here = members.filter(|member| !member.health.has(not_here));
        let here: BTreeSet<&HcaId> = here.map(|member| &member.hca.id).collect();
        let configured = pool
            .snapshot
            .as_ref()
            .and_then(|snapshot| snapshot.pool().expected);
        known.extend(&here);
        let expected = configured.and_then(|count| usize::try_from(count).ok());
        (here.len(), expected.unwrap_or(known.len()))
    }

    /// HCAs of pools that give them to one pod alone, by RDMA device.
    pub(crate) fn exclusive_hcas(&self) -> BTreeMap<String, HcaId> {
        let pools = self.pools.iter().filter_map(|pool| pool.snapshot.as_ref());
        let exclusive = pools.filter(|snapshot| !snapshot.pool().sharing.is_shared());
        let members = exclusive.flat_map(|snapshot| snapshot.members());
        let devices = members.flat_map(|member| {
            let names = member.hca.rdma_names().into_iter();
            names.map(|name| (name.to_owned(), member.hca.id.clone()))
        });
        devices.collect()
    }

    /// Namespace and name of the pod that has an RDMA device for itself, by device.
    pub(crate) fn holders(&self) -> Holders {
        let pools = self.pools.iter().filter(|pool| {
            let snapshot = pool.snapshot.as_ref();
            snapshot.is_some_and(|snapshot| !snapshot.pool().sharing.is_shared())
        });
        let held = pools.flat_map(|pool| self.pool(pool).held.unwrap_or_default());
        let held: Vec<HeldUnits> = held.collect();
        let holder = |hca: &HcaId| {
            let hca = hca.to_string();
            let holder = held.iter().find(|one| one.hcas.contains(&hca))?;
            Some((holder.namespace.clone(), holder.pod.clone()))
        };
        let devices = self.exclusive_hcas().into_iter();
        let devices = devices.filter_map(|(device, hca)| Some((device, holder(&hca)?)));
        devices.collect()
    }

    /// The report as it is answered, with the bindings as they are.
    pub(crate) fn status(&self, bindings: &Bindings) -> DaemonStatus {
        let missing = |one: &Missing| MissingHca {
            id: one.id.to_string(),
            rdma_devices: one.rdma_devices.clone(),
            since: one.since,
            resource: one.resource.clone(),
            rail: one.rail,
        };
        let binding =
            |one: &Binding| one.status(bindings.ended.get(&one.hca).map(|ended| ended.why));
        DaemonStatus {
            program_version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ready: self.unready().is_empty(),
            unready: self.unready(),
            notes: self.notes(),
            configuration: self.config.clone(),
            flap_hold_ms: u64::try_from(self.flap_hold.as_millis()).unwrap_or(u64::MAX),
            netns_mode: self.netns_mode.map(|mode| mode.word().to_owned()),
            node_socket: SocketStatus {
                path: self.node_socket.path.clone(),
                state: self.node_socket.state.borrow().as_str().to_owned(),
                error: self.node_socket_error(),
            },
            pools: self.pools.iter().map(|pool| self.pool(pool)).collect(),
            hcas: self.hcas.to_vec(),
            missing: self.missing.iter().map(missing).collect(),
            bindings: bindings.all.values().map(binding).collect(),
            refused: bindings.refused.values().map(|one| one.0.clone()).collect(),
            alignment: alignment::of_pods(bindings),
        }
    }

    fn pool(&self, pool: &Pool) -> PoolStatus {
        let state = pool.session.borrow();
        let members = pool.snapshot.iter().flat_map(|snapshot| snapshot.members());
        let hca = |member: &Member| HcaStatus {
            id: member.hca.id.to_string(),
            rdma_devices: owned(member.hca.rdma_names()),
            netdevs: owned(member.hca.netdev_names()),
            numa_node: member.hca.numa_node(),
            nodes: member.nodes.iter().map(|node| node.path.clone()).collect(),
            healthy: member.health.is_healthy(),
            reasons: member
                .health
                .reasons()
                .iter()
                .map(ToString::to_string)
                .collect(),
            reason: member.health.worst().map(word),
        };
        let held = self.allocated.as_ref().map(|allocated| {
            let mut held: BTreeMap<_, Vec<String>> = BTreeMap::new();
            for (unit, holder) in allocated.of(&pool.resource) {
                let container = (&holder.namespace, &holder.pod, &holder.container);
                held.entry(container).or_default().push(unit.to_owned());
            }
            // The HCA of a pod that ended is not free before its binding is.
            let (all, resource) = (self.bindings.all.values(), pool.resource.as_str());
            let is_listed = |unit: &str| allocated.holder(resource, unit).is_some();
            for one in all.filter(|one| one.resource == resource && !is_listed(&one.unit)) {
                let container = (&one.pod.namespace, &one.pod.name, &one.container);
                held.entry(container).or_default().push(one.unit.clone());
            }
            let snapshot = pool.snapshot.as_ref();
            let hcas = |units: &[String]| -> BTreeSet<String> {
                let hcas = |unit: &String| snapshot.map(|snapshot| snapshot.hcas(unit));
                let hcas = units.iter().filter_map(hcas).flatten();
                hcas.map(|hca| hca.to_string()).collect()
            };
            let units = |((namespace, pod, container), units): (_, Vec<String>)| HeldUnits {
                uid: allocated.uid(resource, &units),
                hcas: hcas(&units).into_iter().collect(),
                units,
                namespace: String::clone(namespace),
                pod: String::clone(pod),
                container: String::clone(container),
            };
            held.into_iter().map(units).collect()
        });
        let delivery = pool.snapshot.as_ref();
        PoolStatus {
            resource: pool.resource.as_str().to_owned(),
            mode: delivery.map(|snapshot| snapshot.pool().sharing.word().to_owned()),
            present: self.hca_counts(pool).0,
            expected: self.hca_counts(pool).1,
            units: pool.units(),
            delivery: delivery.map(|snapshot| word(&snapshot.pool().delivery)),
            hcas: members.map(hca).collect(),
            free_aligned: self
                .bindings
                .free_aligned
                .get(pool.resource.as_str())
                .copied(),
            held,
            registered: state.registered,
            streaming: state.streaming_since.is_some(),
            listed: state.listed,
            registrations: state.registrations,
            last_error: state.last_error.clone(),
            allocations: node_wire::status::AllocationCounts {
                granted: pool.allocations.answered.load(Ordering::Relaxed),
                refused: pool.allocations.refused.load(Ordering::Relaxed),
            },
        }
    }
}
