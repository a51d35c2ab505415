//! The state of a node as an object `RdmaNode` shows it, decided on what the daemon says and what was shown
//! before. No counter is in it, and no time that goes on by itself: who compares two of them sees whether
//! something happened.

use jiff::Timestamp;
use node_wire::DaemonStatus;
use node_wire::status::{HcaStatus, HostHca, PoolStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The status of an `RdmaNode`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeState {
    /// Versions of the programs.
    pub daemon_version: String,
    pub agent_version: String,
    /// The kernel's boot ID.
    pub boot: String,
    /// `shared`, `exclusive`, or nothing where the kernel does not say it.
    pub netns_mode: String,
    pub summary: Summary,
    /// What a person should know, worst first.
    pub problems: Vec<String>,
    pub resources: Vec<ResourceState>,
    pub hcas: Vec<HcaState>,
    pub missing: Vec<MissingState>,
    pub addresses: Vec<OwnedAddresses>,
}

/// For the columns of a table, which cannot count: one value for each resource, with commas.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    pub resource: String,
    pub nics: String,
    pub expected: String,
    pub healthy: String,
    pub allocated: String,
    pub problem: String,
}

/// A resource. `nics`, `expected` and `healthy` count HCAs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResourceState {
    pub name: String,
    /// `shared`, `exclusive` or `late`; nothing before the daemon's first list.
    pub mode: String,
    /// Whether the kubelet has the list of units.
    pub registered: bool,
    pub nics: usize,
    pub expected: usize,
    pub healthy: usize,
    pub units: u64,
    pub healthy_units: u64,
    pub allocated_units: u64,
}

/// An HCA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HcaState {
    #[serde(flatten)]
    pub hardware: HostHca,
    /// The resource that it is of, and whether it can be allocated.
    pub resource: Option<String>,
    pub healthy: Option<bool>,
    /// Why it cannot: a word, a text, and since when it is this word.
    pub reason: Option<String>,
    pub message: Option<String>,
    pub since: Option<String>,
    /// Namespace and name of the pod that has it for itself.
    pub pod: Option<String>,
}

/// An HCA that was here and is not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingState {
    pub id: String,
    pub rdma_devices: Vec<String>,
    pub since: String,
    pub resource: Option<String>,
    pub rail: Option<u32>,
}

/// Addresses that the node owns in a space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnedAddresses {
    pub store: String,
    pub network_name: String,
    pub parts: u64,
    pub addresses: u64,
}

/// What is known at one moment.
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    pub daemon: &'a DaemonStatus,
    pub boot: &'a str,
    pub addresses: Vec<OwnedAddresses>,
    /// What was shown before.
    pub before: Option<&'a NodeState>,
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
        let problems = state.problems(daemon);
        state.summarized(problems)
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
        self.summarized(vec![format!("the daemon does not answer: {why}")])
    }

    fn summarized(self, problems: Vec<String>) -> Self {
        let each = |value: fn(&ResourceState) -> String| {
            let values: Vec<String> = self.resources.iter().map(value).collect();
            values.join(",")
        };
        let problem = match problems.as_slice() {
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
            problems,
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
        let unregistered = self.resources.iter().filter(|one| !one.registered);
        let unregistered =
            unregistered.map(|one| format!("{}: not registered with the kubelet", one.name));
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
pub(crate) fn named(id: &str, rail: Option<u32>) -> String {
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

impl ResourceState {
    fn of(pool: &PoolStatus) -> Self {
        let units = pool.held.iter().flatten();
        Self {
            name: pool.resource.clone(),
            mode: pool.mode.clone().unwrap_or_default(),
            registered: pool.registered && pool.listed,
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
        pools.sort_by_key(|(_, one)| one.reason.as_deref() == Some("excluded"));
        let (resource, status) = pools.into_iter().next().unzip();
        let message = status.as_ref().map(|one| one.reasons.join("; "));
        let mut state = Self {
            hardware: hca.clone(),
            resource,
            healthy: status.as_ref().map(|one| one.healthy),
            message: message.filter(|text| !text.is_empty()),
            reason: status.and_then(|one| one.reason),
            since: None,
            pod: holder(&hca.id, daemon),
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

impl MissingState {
    fn of(missing: &node_wire::status::MissingHca) -> Self {
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
    use node_wire::status::{HeldUnits, MissingHca, UnitCounts};

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
