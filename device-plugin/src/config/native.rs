//! Reader of our own format: versioned, strict, YAML or JSON (every JSON document is YAML).
//!
//! ```yaml
//! version: 1
//! rescanInterval: 60s
//! pools:
//!   - resource: rdma/rail0
//!     mode: exclusive
//!     select: { rdmaDevices: [mlx5_0] }
//!   - resource: rdma/nic
//!     mode: exclusive
//!     binding: late
//!     select: { pfNames: [ens3f0, ens4f0] }
//!   - resource: rdma/shared
//!     mode: shared
//!     slots: 16
//!     policy: spread
//!     nodes: { optional: [umad] }
//!     select:
//!       - { vendors: [15b3], functions: [vf], not: { rdmaDevices: ["mlx5_bond_*"] } }
//!       - { pfNames: ["ens2f0#0-3"] }
//! ```
//!
//! Everything a person may have meant otherwise is an error with its line: unknown and repeated
//! keys, words outside a list of choices, keys that do not belong to the mode.
//!
//! - `form`: keys and words as they are written, with their places; `select`: those of selectors
//! - `message`: what is wrong with the form

mod form;
mod message;
mod select;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use hca::PciAddress;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_saphyr::Spanned;

use node::duration;

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Damping, Delivery, Exclusion, Format, Gate, Late, MAX_TIME,
    MAX_UNITS, MIN_RESCAN_INTERVAL, NodeClass, NodeRule, Policy, PoolConfig, PortHealth, Sharing,
    TopologyConfig, Variables,
};
use super::resource::ResourceName;
use super::selector::Selector;
use super::{Findings, Problems};
use form::{
    BindingWord, DeliveryWord, ExcludeWord, GateWord, Health, Mode, NodeWord, Nodes, PolicyWord,
    Pool, Topology, read_file,
};
use message::{at, from_text};

/// The version this program reads.
const VERSION: u32 = 1;

#[derive(Deserialize)]
struct Versioned {
    version: Option<Spanned<u32>>,
    pools: Option<Spanned<IgnoredAny>>,
}

/// Reads the text of a file.
pub(crate) fn read(text: &str) -> Result<Config, Problems> {
    let versioned: Versioned = from_text(text)?;
    match versioned.version {
        None => {
            return Err(Problems::one(
                "version is missing; this format begins with version: 1",
            ));
        }
        Some(version) if version.value != VERSION => {
            return Err(Problems::one(format!(
                "{}version is {}; this program reads version {VERSION}",
                at(version.referenced),
                version.value
            )));
        }
        Some(_) => {}
    }
    let mut findings = Findings::default();
    let file = read_file(text, &mut findings).unwrap_or_default();
    let rescan = match &file.rescan_interval {
        None => Some(DEFAULT_RESCAN_INTERVAL),
        Some(text) => match duration::parse(&text.value) {
            Some(Duration::ZERO) => {
                findings.warn("rescanInterval is 0: periodic rescans are off");
                None
            }
            Some(interval) if (MIN_RESCAN_INTERVAL..=MAX_TIME).contains(&interval) => {
                Some(interval)
            }
            Some(_) => {
                findings.problem(format!(
                    "{}rescanInterval {:?}: give a time between 1s and 24h, or 0 for never",
                    at(text.referenced),
                    text.value
                ));
                None
            }
            None => {
                findings.problem(format!(
                    "{}rescanInterval {:?}: write a number and ms, s, m or h, as 60s; 0 is off",
                    at(text.referenced),
                    text.value
                ));
                None
            }
        },
    };
    if file.pools.is_empty() && findings.problems.is_empty() {
        let place = versioned.pools.map(|pools| at(pools.referenced));
        findings.problem(format!("{}pools is empty", place.unwrap_or_default()));
    }
    let damping = file.health.damping(&mut findings);
    let topology = file.topology.read(&mut findings);
    let pools = file
        .pools
        .iter()
        .filter_map(|pool| read_pool(pool, &mut findings))
        .collect();
    findings.conclude(Config {
        format: Format::Native,
        rescan,
        damping,
        pools,
        topology,
        warnings: Vec::new(),
        refused: Vec::new(),
    })
}

fn read_pool(pool: &Pool, findings: &mut Findings) -> Option<PoolConfig> {
    let place = at(pool.resource.referenced);
    let problems_before = findings.problems.len();
    let parsed = ResourceName::parse(&pool.resource.value);
    let resource = findings.keep(parsed.map_err(|error| format!("{place}{error}")));
    let sharing = sharing(pool, findings);
    let nodes = pool.nodes.as_ref().map_or_else(NodeRule::verbs, |nodes| {
        if nodes.value.required.as_ref().is_some_and(Vec::is_empty)
            && nodes.value.optional.is_empty()
        {
            findings.problem(format!(
                "{}nodes names no class, so containers would get nothing",
                at(nodes.referenced)
            ));
        }
        nodes.value.rule()
    });
    if pool.select.value.0.is_empty() {
        findings.problem(format!("{}select is empty", at(pool.select.referenced)));
    }
    let selectors: Vec<Selector> = pool
        .select
        .value
        .0
        .iter()
        .map(|criteria| criteria.selector(findings))
        .collect();
    if findings.problems.len() == problems_before && selectors.iter().any(Selector::is_empty) {
        findings.problem(format!(
            "{}a selector without criteria; to take every HCA write rdmaDevices: [\"*\"]",
            at(pool.select.referenced)
        ));
    }
    Some(PoolConfig {
        resource: resource?,
        sharing: sharing?,
        selectors,
        nodes,
        exclude_topology: pool.exclude_topology,
        delivery: match pool.delivery.as_ref().map(|word| word.value) {
            Some(DeliveryWord::Cdi) => Delivery::Cdi,
            None if is_late(pool) => Delivery::Cdi,
            Some(DeliveryWord::DeviceSpecs) | None => Delivery::DeviceSpecs,
        },
        exclude: match (&pool.exclude, pool.mode) {
            (Some(words), _) => Exclusion {
                uplinks: words.contains(&ExcludeWord::Uplinks),
                pfs_with_vfs: words.contains(&ExcludeWord::PfsWithVfs),
            },
            (None, Mode::Shared) => Exclusion::NONE,
            (None, Mode::Exclusive) => Exclusion::IN_USE,
        },
        port_health: match pool.mode {
            Mode::Shared => PortHealth::Active,
            Mode::Exclusive => PortHealth::ActiveUnlessSetDown,
        },
        wait_for: pool
            .wait_for
            .iter()
            .filter_map(|gate| {
                findings.keep(
                    gate.value
                        .gate()
                        .map_err(|error| format!("{}waitFor: {error}", at(gate.referenced))),
                )
            })
            .collect(),
        optional: pool.optional,
        link_up: pool.link_up,
        extra_nodes: Vec::new(),
        additional_info: BTreeMap::new(),
        variables: Variables::Shell,
    })
}

impl Health {
    fn damping(&self, findings: &mut Findings) -> Damping {
        let usual = Damping::default();
        let mut time = |given: &Option<Spanned<String>>, usual: Duration| {
            let Some(text) = given else { return usual };
            let (place, given) = (at(text.referenced), &text.value);
            match duration::parse(given) {
                Some(time) if time <= MAX_TIME => return time,
                Some(_) => findings.problem(format!("{place}time {given:?}: give at most 24h")),
                None => findings.problem(format!(
                    "{place}time {given:?}: write a number and ms, s, m or h, as 500ms"
                )),
            }
            usual
        };
        let damping = Damping {
            down_delay: time(&self.down_delay, usual.down_delay),
            up_delay: time(&self.up_delay, usual.up_delay),
            flaps: self.flaps.as_ref().map_or(usual.flaps, |flaps| flaps.value),
            flap_window: time(&self.flap_window, usual.flap_window),
            flap_hold: time(&self.flap_hold, usual.flap_hold),
        };
        if let Some(flaps) = self.flaps.as_ref().filter(|flaps| flaps.value < 2) {
            findings.problem(format!(
                "{}flaps is {}; one loss is no flapping, give 2 or more",
                at(flaps.referenced),
                flaps.value
            ));
        }
        damping
    }
}

impl Topology {
    fn read(&self, findings: &mut Findings) -> TopologyConfig {
        let mut topology = TopologyConfig::default();
        if let Some(text) = &self.nccl_topology {
            let path = PathBuf::from(&text.value);
            if !path.is_absolute() {
                findings.problem(format!(
                    "{}ncclTopology {:?} is no absolute path",
                    at(text.referenced),
                    text.value
                ));
            }
            topology.nccl_topology = Some(path);
        }
        for text in &self.rails {
            let number = text.value.split_once('=').and_then(|(nic, rail)| {
                Some((nic.parse::<PciAddress>().ok()?, rail.parse::<u32>().ok()?))
            });
            match number {
                Some((nic, rail)) => drop(topology.rails.insert(nic, rail)),
                None => findings.problem(format!(
                    "{}rails {:?}: write a physical function and a number, as 0000:3b:00.0=0",
                    at(text.referenced),
                    text.value
                )),
            }
        }
        for text in &self.gpu_resources {
            let parsed = ResourceName::parse(&text.value);
            let named = parsed.map_err(|error| format!("{}{error}", at(text.referenced)));
            topology.gpu_resources.extend(findings.keep(named));
        }
        topology
    }
}

impl GateWord {
    fn gate(&self) -> Result<Gate, String> {
        match self {
            GateWord::File(path) => Gate::file(path),
            GateWord::Module(name) => Gate::module(name),
        }
    }
}

impl Nodes {
    fn rule(&self) -> NodeRule {
        let classes = |words: &[NodeWord]| words.iter().map(|word| word.class()).collect();
        NodeRule {
            required: self
                .required
                .as_deref()
                .map_or(NodeRule::verbs().required, classes),
            optional: classes(&self.optional),
        }
    }
}

impl NodeWord {
    fn class(self) -> NodeClass {
        match self {
            NodeWord::Uverbs => NodeClass::Uverbs,
            NodeWord::RdmaCm => NodeClass::RdmaCm,
            NodeWord::Umad => NodeClass::Umad,
            NodeWord::Issm => NodeClass::Issm,
            NodeWord::Ucm => NodeClass::Ucm,
        }
    }
}

fn is_late(pool: &Pool) -> bool {
    let binding = pool.binding.as_ref().map(|word| word.value);
    binding == Some(BindingWord::Late)
}

/// The sharing of a pool with late binding.
fn late(pool: &Pool, findings: &mut Findings) -> Option<Sharing> {
    let before = findings.problems.len();
    if let (Mode::Shared, Some(word)) = (pool.mode, &pool.binding) {
        findings.problem(format!(
            "{}binding late belongs to mode exclusive; a share of an HCA is known from the start",
            at(word.referenced)
        ));
    }
    if let Some(slots) = &pool.slots {
        findings.problem(format!(
            "{}slots does not belong to binding late; there is one unit for each HCA",
            at(slots.referenced)
        ));
    }
    if let Some(policy) = &pool.policy {
        findings.problem(format!(
            "{}policy does not belong to binding late; HCAs are chosen by the pod's GPUs",
            at(policy.referenced)
        ));
    }
    if let Some(word) = pool.delivery.as_ref()
        && word.value == DeliveryWord::DeviceSpecs
    {
        findings.problem(format!(
            "{}delivery deviceSpecs cannot serve binding late: the kubelet keeps paths of device \
             nodes that are not known yet; leave delivery out, or write cdi",
            at(word.referenced)
        ));
    }
    let flag = |key: &Option<Spanned<bool>>| key.as_ref().map(|flag| flag.value);
    let usual = Late::default();
    (findings.problems.len() == before).then(|| {
        Sharing::Late(Late {
            strict: flag(&pool.strict).unwrap_or(usual.strict),
            bind_at_start: flag(&pool.bind_at_start).unwrap_or(usual.bind_at_start),
            environment: flag(&pool.environment).unwrap_or(usual.environment),
        })
    })
}

fn sharing(pool: &Pool, findings: &mut Findings) -> Option<Sharing> {
    if is_late(pool) {
        return late(pool, findings);
    }
    let of_late = [
        ("strict", &pool.strict),
        ("bindAtStart", &pool.bind_at_start),
        ("environment", &pool.environment),
    ];
    for (key, flag) in of_late {
        if let Some(flag) = flag {
            findings.problem(format!(
                "{}{key} belongs to binding late, which this pool does not have",
                at(flag.referenced)
            ));
            return None;
        }
    }
    let policy = pool.policy.as_ref().map(|word| word.value);
    let place = pool
        .policy
        .as_ref()
        .map(|word| at(word.referenced))
        .unwrap_or_default();
    if let Some(slots) = &pool.slots {
        let place = at(slots.referenced);
        if pool.mode == Mode::Exclusive {
            findings.problem(format!(
                "{place}slots belongs to mode shared; an exclusive HCA is one unit"
            ));
            return None;
        }
        if !(1..=MAX_UNITS).contains(&slots.value) {
            findings.problem(format!(
                "{place}slots is {}; give a number between 1 and {MAX_UNITS}",
                slots.value
            ));
            return None;
        }
    }
    let slots = pool.slots.as_ref().map(|slots| slots.value);
    let known = match policy {
        None | Some(PolicyWord::Spread) => Policy::Spread,
        Some(PolicyWord::Pack) => Policy::Pack,
        Some(PolicyWord::Numa) => Policy::Numa,
        Some(PolicyWord::SameHca) => Policy::SameHca,
        Some(PolicyWord::AllHcas) if pool.mode == Mode::Shared => {
            return Some(Sharing::Pooled { units: slots });
        }
        Some(PolicyWord::AllHcas) => {
            findings.problem(format!("{place}policy all-hcas belongs to mode shared"));
            return None;
        }
    };
    match (pool.mode, known) {
        (Mode::Exclusive, Policy::SameHca) => {
            findings.problem(format!(
                "{place}policy same-hca needs several units on one HCA, so mode shared"
            ));
            None
        }
        (Mode::Exclusive, policy) => Some(Sharing::Exclusive { policy }),
        (Mode::Shared, policy) => Some(Sharing::Slots {
            per_hca: slots,
            policy,
        }),
    }
}

#[cfg(test)]
mod tests;
