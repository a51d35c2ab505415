//! The state of a node as an object `RdmaNode` shows it, decided on what the daemon says and what was shown
//! before. No counter is in it, and no time that goes on by itself: who compares two of them sees whether
//! something happened.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::DaemonStatus;
use crate::status::{HcaStatus, HostHca, MissingHca, NearGpu, PoolStatus, ServedGpu};

/// The status of an `RdmaNode`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeState {
    /// Version of the daemon.
    pub daemon_version: String,
    /// Version of the agent that wrote it.
    pub agent_version: String,
    /// The kernel's boot ID.
    pub boot: String,
    /// `shared`, `exclusive`, or nothing where the kernel does not say it.
    pub netns_mode: String,
    /// The columns of a table.
    pub summary: Summary,
    /// What a person should know, worst first.
    pub problems: Vec<String>,
    /// In the order of the configuration.
    pub resources: Vec<ResourceState>,
    /// All but virtual and scalable functions that no resource has.
    pub hcas: Vec<HcaState>,
    /// Those that were here and are not.
    pub missing: Vec<MissingState>,
    /// What the node owns in spaces.
    pub addresses: Vec<OwnedAddresses>,
}

/// For the columns of a table, which cannot count: one value for each resource, with commas.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Names of the resources.
    pub resource: String,
    /// HCAs that are here.
    pub nics: String,
    /// HCAs that must be here.
    pub expected: String,
    /// HCAs that can be allocated or are.
    pub healthy: String,
    /// Units that containers hold.
    pub allocated: String,
    /// The worst problem, and how many more there are.
    pub problem: String,
}

/// A resource. `nics`, `expected` and `healthy` count HCAs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResourceState {
    /// Such as `rdma/nic`.
    pub name: String,
    /// `shared`, `exclusive` or `late`; nothing before the daemon's first list.
    pub mode: String,
    /// Whether the kubelet has the list of units.
    pub registered: bool,
    /// Those that are here.
    pub nics: usize,
    /// Those that must be here.
    pub expected: usize,
    /// Those that can be allocated or are.
    pub healthy: usize,
    /// Units, by the list that the kubelet has.
    pub units: u64,
    /// Units that can be allocated or are.
    pub healthy_units: u64,
    /// Units that containers hold.
    pub allocated_units: u64,
}

/// An HCA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HcaState {
    /// What it is.
    #[serde(flatten)]
    pub hardware: HostHca,
    /// The resource that it is of; several with commas.
    pub resource: Option<String>,
    /// Whether it can be allocated, or is.
    pub healthy: Option<bool>,
    /// The word for why it cannot.
    pub reason: Option<String>,
    /// The same as a text.
    pub message: Option<String>,
    /// Since when it is this word, in RFC 3339.
    pub since: Option<String>,
    /// Namespace and name of the pod that has it for itself.
    pub pod: Option<String>,
    /// The pod's GPUs that it was bound to serve.
    pub serves: Vec<NearGpu>,
}

/// An HCA that was here and is not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MissingState {
    /// As unit IDs name it.
    pub id: String,
    /// Its RDMA devices when it was here.
    pub rdma_devices: Vec<String>,
    /// In RFC 3339.
    pub since: String,
    /// The resource that it was of.
    pub resource: Option<String>,
    /// Its rail when it was here.
    pub rail: Option<u32>,
}

/// Addresses that the node owns in a space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnedAddresses {
    /// The store, by its name in the policy.
    pub store: String,
    /// The space's `network_name`; empty for the store's main one.
    pub network_name: String,
    /// Parts of subnets.
    pub parts: u64,
    /// Addresses in them.
    pub addresses: u64,
}

/// What is known at one moment.
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    /// What the daemon says.
    pub daemon: &'a DaemonStatus,
    /// The kernel's boot ID.
    pub boot: &'a str,
    /// What the node owns.
    pub addresses: Vec<OwnedAddresses>,
    /// What was shown before.
    pub before: Option<&'a NodeState>,
    /// The node's time.
    pub now: Timestamp,
}

impl NodeState {
    /// The state of the node.
    #[must_use]
    pub fn of(inputs: Inputs<'_>) -> Self {
        let daemon = inputs.daemon;
        let before = inputs.before.map_or(&[][..], |before| &before.hcas);
        let hcas = daemon.hcas.iter();
        let state = Self {
            daemon_version: daemon.program_version.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: inputs.boot.to_owned(),
            netns_mode: daemon.netns_mode.clone().unwrap_or_default(),
            resources: daemon.pools.iter().map(ResourceState::of).collect(),
            hcas: hcas
                .map(|hca| HcaState::of(hca, daemon, before, inputs.now))
                .collect(),
            missing: daemon.missing.iter().map(MissingState::of).collect(),
            addresses: inputs.addresses,
            ..Self::default()
        };
        Self {
            problems: state.problems(daemon),
            ..state
        }
        .summarized()
    }

    /// Its JSON, without keys that have no value: the API takes `null` for a wrong one.
    #[must_use]
    pub fn json(&self) -> Value {
        let mut value = json!(self);
        prune(&mut value);
        value
    }

    /// The same while the daemon does not answer, as far as it was known.
    #[must_use]
    pub fn unanswered(self, why: &str) -> Self {
        let problems = vec![format!("the daemon does not answer: {why}")];
        Self { problems, ..self }.summarized()
    }

    /// With the columns of a table that fit the rest.
    #[must_use]
    pub fn summarized(self) -> Self {
        let each = |value: fn(&ResourceState) -> String| {
            let values: Vec<String> = self.resources.iter().map(value).collect();
            values.join(",")
        };
        let problem = match self.problems.as_slice() {
            [] => String::new(),
            [only] => only.clone(),
            [first, others @ ..] => format!("{first} (and {} more)", others.len()),
        };
        Self {
            summary: Summary {
                resource: each(|one| one.name.clone()),
                nics: each(|one| one.nics.to_string()),
                expected: each(|one| one.expected.to_string()),
                healthy: each(|one| one.healthy.to_string()),
                allocated: each(|one| one.allocated_units.to_string()),
                problem,
            },
            ..self
        }
    }

    fn problems(&self, daemon: &DaemonStatus) -> Vec<String> {
        let missing = self.missing.iter().map(ToString::to_string);
        let is_missing = |id: &str| self.missing.iter().any(|one| one.id == id);
        let unhealthy = self.hcas.iter().filter_map(|hca| {
            let (id, why) = (&hca.hardware.id, hca.message.as_ref()?);
            (!is_missing(id)).then(|| format!("{}: {why}", named(id, hca.hardware.rail)))
        });
        let too_few = self.resources.iter().filter_map(|resource| {
            let ResourceState {
                name,
                nics,
                expected,
                ..
            } = resource;
            let of_it = |one: &&MissingState| one.resource.as_ref() == Some(name);
            let known = nics + self.missing.iter().filter(of_it).count();
            (known < *expected).then(|| format!("{name}: {nics} of {expected} HCAs"))
        });
        let unregistered = daemon.pools.iter().filter(|pool| !is_registered(pool));
        let unregistered = unregistered.map(|pool| {
            let why = pool.last_error.iter().map(|why| format!(": {why}"));
            let why: String = why.collect();
            format!("{}: not registered with the kubelet{why}", pool.resource)
        });
        let rejected = daemon.configuration.error.iter();
        missing
            .chain(unhealthy)
            .chain(too_few)
            .chain(unregistered)
            .chain(rejected.map(|why| format!("the configuration is rejected: {why}")))
            .collect()
    }
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(keys) => {
            keys.retain(|_, value| !value.is_null());
            keys.values_mut().for_each(prune);
        }
        Value::Array(values) => values.iter_mut().for_each(prune),
        _ => {}
    }
}

/// An HCA, for people.
#[must_use]
pub fn named(id: &str, rail: Option<u32>) -> String {
    rail.map_or_else(|| id.to_owned(), |rail| format!("{id} (rail {rail})"))
}

impl std::fmt::Display for MissingState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} missing since {}",
            named(&self.id, self.rail),
            self.since
        )
    }
}

fn is_registered(pool: &PoolStatus) -> bool {
    pool.registered && pool.listed
}

impl ResourceState {
    fn of(pool: &PoolStatus) -> Self {
        let units = pool.held.iter().flatten();
        Self {
            name: pool.resource.clone(),
            mode: pool.mode.clone().unwrap_or_default(),
            registered: is_registered(pool),
            nics: pool.present,
            expected: pool.expected,
            healthy: pool.hcas.iter().filter(|hca| hca.healthy).count(),
            units: pool.units.healthy + pool.units.unhealthy,
            healthy_units: pool.units.healthy,
            allocated_units: units.map(|held| held.units.len() as u64).sum(),
        }
    }
}

impl HcaState {
    fn of(hca: &HostHca, daemon: &DaemonStatus, before: &[Self], now: Timestamp) -> Self {
        let in_pool = |pool: &PoolStatus| -> Option<(String, HcaStatus)> {
            let hca = pool.hcas.iter().find(|one| one.id == hca.id)?;
            Some((pool.resource.clone(), hca.clone()))
        };
        // Another pool can have it until its pods end.
        let mut pools: Vec<_> = daemon.pools.iter().filter_map(in_pool).collect();
        let is_excluded = |one: &HcaStatus| one.reason.as_deref() == Some("excluded");
        if pools.iter().any(|(_, one)| !is_excluded(one)) {
            pools.retain(|(_, one)| !is_excluded(one));
        }
        let names: Vec<String> = pools.iter().map(|(name, _)| name.clone()).collect();
        let resource = (!names.is_empty()).then(|| names.join(","));
        pools.sort_by_key(|(_, one)| one.healthy);
        let status = pools.into_iter().next().map(|(_, status)| status);
        let message = status.as_ref().map(|one| one.reasons.join("; "));
        let mut state = Self {
            hardware: hca.clone(),
            resource,
            healthy: status.as_ref().map(|one| one.healthy),
            message: message.filter(|text| !text.is_empty()),
            reason: status.and_then(|one| one.reason),
            since: None,
            pod: holder(&hca.id, daemon),
            serves: serves(&hca.id, daemon),
        };
        let same = before.iter().find(|old| {
            old.hardware.id == hca.id
                && (&old.reason, &old.resource) == (&state.reason, &state.resource)
        });
        state.since = state.reason.is_some().then(|| {
            let since = same.and_then(|old| old.since.clone());
            since.unwrap_or_else(|| at(now.as_second()))
        });
        state
    }
}

/// The pod that has an HCA for itself.
fn holder(hca: &str, daemon: &DaemonStatus) -> Option<String> {
    let pools = daemon.pools.iter();
    let exclusive = pools.filter(|pool| pool.mode.as_deref() != Some("shared"));
    let mut held = exclusive.flat_map(|pool| pool.held.iter().flatten());
    let held = held.find(|one| one.hcas.iter().any(|held| held == hca))?;
    Some(format!("{}/{}", held.namespace, held.pod))
}

/// The GPUs that an HCA was bound to serve, while its pod lives.
fn serves(hca: &str, daemon: &DaemonStatus) -> Vec<NearGpu> {
    let mut bindings = daemon.bindings.iter();
    let bound = bindings.find(|one| one.hca == hca && one.ended.is_none());
    let gpus = bound.into_iter().flat_map(|one| &one.gpus);
    let near = |gpu: &ServedGpu| NearGpu {
        gpu: gpu.gpu.clone(),
        class: gpu.class.clone(),
    };
    gpus.map(near).collect()
}

impl MissingState {
    fn of(missing: &MissingHca) -> Self {
        Self {
            id: missing.id.clone(),
            rdma_devices: missing.rdma_devices.clone(),
            since: at(i64::try_from(missing.since).unwrap_or_default()),
            resource: missing.resource.clone(),
            rail: missing.rail,
        }
    }
}

/// A time of Unix seconds, as the API writes times.
fn at(seconds: i64) -> String {
    Timestamp::from_second(seconds)
        .unwrap_or_default()
        .to_string()
}

#[cfg(test)]
mod tests {
    use crate::status::{HeldUnits, UnitCounts};

    use super::*;

    fn hca(id: &str, reason: Option<&str>) -> (HostHca, HcaStatus) {
        let hardware = HostHca {
            id: id.into(),
            rail: Some(3),
            ..HostHca::default()
        };
        let status = HcaStatus {
            id: id.into(),
            healthy: reason.is_none(),
            reasons: reason
                .iter()
                .map(|_| "mlx5_0 port 1 is DOWN".to_owned())
                .collect(),
            reason: reason.map(str::to_owned),
            ..HcaStatus::default()
        };
        (hardware, status)
    }

    fn daemon(hcas: Vec<(HostHca, HcaStatus)>) -> DaemonStatus {
        let (hcas, of_pool): (Vec<_>, Vec<_>) = hcas.into_iter().unzip();
        let pool = PoolStatus {
            resource: "rdma/nic".into(),
            mode: Some("exclusive".into()),
            present: of_pool.len(),
            expected: of_pool.len(),
            units: UnitCounts {
                healthy: 1,
                unhealthy: 0,
            },
            hcas: of_pool,
            registered: true,
            listed: true,
            ..PoolStatus::default()
        };
        DaemonStatus {
            program_version: "1".into(),
            pools: vec![pool],
            hcas,
            ..DaemonStatus::default()
        }
    }

    fn state_at(daemon: &DaemonStatus, before: Option<&NodeState>, now: i64) -> NodeState {
        NodeState::of(Inputs {
            daemon,
            boot: "b1",
            addresses: Vec::new(),
            before,
            now: Timestamp::from_second(now).unwrap(),
        })
    }

    #[test]
    fn an_unhealthy_hca_is_a_problem_since_its_first_moment() {
        let good = daemon(vec![hca("a", None), hca("b", None)]);
        let first = state_at(&good, None, 0);
        assert_eq!(first.problems, Vec::<String>::new());
        assert_eq!((&*first.summary.nics, &*first.summary.healthy), ("2", "2"));
        let bad = daemon(vec![hca("a", None), hca("b", Some("port"))]);
        let second = state_at(&bad, Some(&first), 60);
        assert_eq!(second.problems, ["b (rail 3): mlx5_0 port 1 is DOWN"]);
        assert_eq!(
            second.hcas[1].since.as_deref(),
            Some("1970-01-01T00:01:00Z")
        );
        // Nothing happened since.
        assert_eq!(state_at(&bad, Some(&second), 120), second);
        let other = daemon(vec![hca("a", None), hca("b", Some("flapping"))]);
        let third = state_at(&other, Some(&second), 180);
        assert_eq!(third.hcas[1].since.as_deref(), Some("1970-01-01T00:03:00Z"));
        assert_eq!(state_at(&good, Some(&third), 240), first);
    }

    #[test]
    fn a_missing_hca_comes_first_and_counts_as_expected() {
        let mut daemon = daemon(vec![hca("a", Some("port"))]);
        daemon.missing.push(MissingHca {
            id: "b".into(),
            since: 3600,
            resource: Some("rdma/nic".into()),
            rail: Some(1),
            ..MissingHca::default()
        });
        daemon.pools[0].expected = 2;
        let state = state_at(&daemon, None, 7200);
        let problem = "b (rail 1) missing since 1970-01-01T01:00:00Z (and 1 more)";
        assert_eq!(state.summary.problem, problem);
        let counts = (&*state.summary.nics, &*state.summary.expected);
        assert_eq!(counts, ("1", "2"));
        // One that was never here, by the configuration.
        daemon.pools[0].expected = 3;
        let problems = state_at(&daemon, None, 7200).problems;
        assert!(
            problems.contains(&"rdma/nic: 1 of 3 HCAs".to_owned()),
            "{problems:?}"
        );
    }

    #[test]
    fn a_pod_that_has_an_hca_for_itself_is_named() {
        let mut daemon = daemon(vec![hca("a", None), hca("b", None)]);
        daemon.pools[0].held = Some(vec![HeldUnits {
            units: vec!["slot_0".into()],
            hcas: vec!["a".into()],
            namespace: "ml".into(),
            pod: "p".into(),
            ..HeldUnits::default()
        }]);
        let state = state_at(&daemon, None, 0);
        let pods: Vec<_> = state.hcas.iter().map(|one| one.pod.as_deref()).collect();
        assert_eq!(pods, [Some("ml/p"), None]);
        assert_eq!(state.summary.allocated, "1");
        daemon.pools[0].mode = Some("shared".into());
        assert_eq!(state_at(&daemon, None, 0).hcas[0].pod, None);
    }

    #[test]
    fn what_counts_or_goes_on_by_itself_is_not_a_change() {
        let quiet = daemon(vec![hca("a", None)]);
        let mut busy = quiet.clone();
        busy.uptime_seconds = 77;
        busy.notes.push("the scan is late for 7 s".into());
        busy.pools[0].registrations = 9;
        busy.pools[0].allocations.granted = 9;
        assert_eq!(busy.clone().lasting(), quiet.clone().lasting());
        assert_eq!(state_at(&busy, None, 0), state_at(&quiet, None, 0));
    }

    #[test]
    fn a_daemon_that_is_silent_leaves_what_was_known() {
        let known = state_at(&daemon(vec![hca("a", None)]), None, 0);
        let silent = known.clone().unanswered("connection refused");
        assert_eq!(silent.hcas, known.hcas);
        let problem = "the daemon does not answer: connection refused";
        assert_eq!(silent.summary.problem, problem);
    }

    #[test]
    fn a_state_is_what_its_json_says() {
        let state = state_at(&daemon(vec![hca("a", Some("port"))]), None, 0);
        let json = state.json();
        assert!(!json.to_string().contains("null"), "{json}");
        assert_eq!(serde_json::from_value::<NodeState>(json).unwrap(), state);
    }
}
