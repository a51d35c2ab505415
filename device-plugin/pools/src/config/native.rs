//! Reader of our own format, version 1: strict, YAML or JSON (every JSON document is YAML).
//! `docs/pools.md` and `docs/reference.md` describe it.
//!
//! Anything ambiguous is an error that names the line: unknown and repeated keys, unknown words, keys
//! that do not belong to the mode.

use std::ops::RangeInclusive;
use std::time::Duration;

use node::duration;
use node::policy::DEFAULT_PATH;
use node::spelling::nearest;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny};
use serde_saphyr::{Location, Spanned};

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Damping, Delivery, Exclude, Format, Gate, Late, MAX_UNITS,
    NodeRule, Policy, PoolConfig, PortHealth, Sharing, TopologyConfig,
};
use super::problems::Problems;
use super::resource::ResourceName;
use super::selector::{self, Selector};
use super::value::MAX_TIME;

/// The version this program reads.
const VERSION: u32 = 1;

#[derive(Deserialize)]
struct Versioned {
    version: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct File {
    #[serde(rename = "version")]
    _version: IgnoredAny,
    #[serde(default = "usual_interval", deserialize_with = "rescan")]
    rescan_interval: Option<Duration>,
    #[serde(default)]
    health: Damping,
    #[serde(default)]
    topology: TopologyConfig,
    pools: Spanned<Vec<Pool>>,
}

fn usual_interval() -> Option<Duration> {
    Some(DEFAULT_RESCAN_INTERVAL)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Pool {
    resource: Spanned<ResourceName>,
    mode: Mode,
    #[serde(default)]
    binding: Binding,
    strict: Option<bool>,
    bind_at_start: Option<bool>,
    #[serde(default)]
    environment: bool,
    nccl_topology: Option<bool>,
    #[serde(default, deserialize_with = "shares")]
    shares: Option<u32>,
    policy: Option<Placement>,
    #[serde(default)]
    nodes: NodeRule,
    #[serde(default)]
    exclude_topology: bool,
    delivery: Option<Delivery>,
    exclude: Option<Vec<Exclude>>,
    #[serde(default)]
    wait_for: Vec<Gate>,
    #[serde(default)]
    optional: bool,
    #[serde(default, deserialize_with = "expected")]
    expected: Option<u32>,
    #[serde(default)]
    link_up: LinkUp,
    #[serde(deserialize_with = "selector::select")]
    select: Vec<Selector>,
}

/// No host has more HCAs, virtual functions included.
const MAX_EXPECTED: u32 = 10_000;
/// What the kernel takes for Ethernet; a driver may take less.
const MTU_RANGE: RangeInclusive<u32> = 68..=65535;

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "linkUp: write true, false or {mtu: NUMBER}"
)]
enum LinkUp {
    Plain(bool),
    With { mtu: u32 },
}

impl Default for LinkUp {
    fn default() -> Self {
        Self::Plain(false)
    }
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Shared,
    Exclusive,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "lowercase")]
enum Binding {
    #[default]
    Early,
    Late,
}

/// The words of `policy`: a [`Policy`], or that each unit stands for all HCAs.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Placement {
    AllHcas,
    Spread,
    Pack,
    Numa,
    SameHca,
}

/// Reads the text of a file.
pub fn read(text: &str) -> Result<Config, Problems> {
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
    let file: File = from_text(text)?;
    let mut findings = Problems::default();
    if file.rescan_interval.is_none() {
        findings.warn("rescanInterval is 0: periodic rescans are off");
    }
    if file.pools.value.is_empty() {
        findings.problem(format!("{}pools is empty", at(file.pools.referenced)));
    }
    let pools = file.pools.value.into_iter();
    let pools = pools.map(|pool| pool.read(&file.topology, &mut findings));
    let pools = pools.collect();
    let config = findings.conclude(Format::Native, file.rescan_interval, pools)?;
    Ok(Config {
        damping: file.health,
        topology: file.topology,
        ..config
    })
}

impl Pool {
    fn read(self, topology: &TopologyConfig, findings: &mut Problems) -> PoolConfig {
        let mtu = match self.link_up {
            LinkUp::With { mtu } => Some(mtu),
            LinkUp::Plain(_) => None,
        };
        let place = at(self.resource.referenced);
        let name = &self.resource.value;
        let wrong = self.wrong(topology, mtu);
        let wrong = wrong.iter().filter(|(is_wrong, _)| *is_wrong);
        let problems = wrong.map(|(_, why)| format!("{place}{name}: {why}"));
        findings.problems.extend(problems);
        let sharing = self.sharing();
        PoolConfig {
            nodes: self.nodes,
            exclude_topology: self.exclude_topology,
            delivery: self.delivery.unwrap_or(match self.binding {
                Binding::Late => Delivery::Cdi,
                Binding::Early => Delivery::DeviceSpecs,
            }),
            exclude: self.exclude.unwrap_or(match self.mode {
                Mode::Shared => Vec::new(),
                Mode::Exclusive => Exclude::IN_USE.to_vec(),
            }),
            port_health: match self.mode {
                Mode::Shared => PortHealth::Active,
                Mode::Exclusive => PortHealth::ActiveUnlessSetDown,
            },
            wait_for: self.wait_for,
            optional: self.optional,
            expected: self.expected,
            link_up: self.link_up != LinkUp::Plain(false),
            environment: self.environment,
            mtu,
            ..PoolConfig::new(self.resource.value, sharing, self.select)
        }
    }

    /// What does not go together, and why.
    fn wrong(&self, topology: &TopologyConfig, mtu: Option<u32>) -> [(bool, &'static str); 14] {
        let is_late = self.binding == Binding::Late;
        let is_shared = self.mode == Mode::Shared;
        let is_whole = !is_late && !is_shared;
        [
            (
                self.nodes.required.is_empty() && self.nodes.optional.is_empty(),
                "nodes names no class, so containers would get nothing",
            ),
            (
                is_late && is_shared,
                "binding late requires mode exclusive; a share of an HCA is known from the start",
            ),
            (
                is_late && self.shares.is_some(),
                "shares cannot be set with binding late; there is one unit for each HCA",
            ),
            (
                is_late && self.policy.is_some(),
                "policy cannot be set with binding late; HCAs are chosen by the pod's GPUs",
            ),
            (
                is_late && self.delivery == Some(Delivery::DeviceSpecs),
                "delivery deviceSpecs cannot be used with binding late: the kubelet keeps paths of \
                 device nodes that are not known yet; leave delivery out, or write cdi",
            ),
            (
                !is_late && self.strict.is_some(),
                "strict requires binding: late",
            ),
            (
                !is_late && self.bind_at_start.is_some(),
                "bindAtStart requires binding: late",
            ),
            (
                !is_late && self.nccl_topology.is_some(),
                "ncclTopology requires binding: late",
            ),
            (
                is_whole && self.shares.is_some(),
                "shares requires mode shared; an exclusive HCA is one unit",
            ),
            (
                is_whole && self.policy == Some(Placement::AllHcas),
                "policy all-hcas requires mode shared",
            ),
            (
                is_whole && self.policy == Some(Placement::SameHca),
                "policy same-hca needs several units on one HCA, so mode shared",
            ),
            (
                self.nccl_topology == Some(true) && topology.nccl_topology.is_none(),
                "ncclTopology requires topology.ncclTopology, the file that is mounted; where the \
                 host shows its PCI tree, NCCL reads it itself",
            ),
            (
                self.environment && is_shared,
                "environment requires mode: exclusive",
            ),
            (
                mtu.is_some_and(|mtu| !MTU_RANGE.contains(&mtu)),
                "linkUp: give an mtu between 68 and 65535",
            ),
        ]
    }

    fn sharing(&self) -> Sharing {
        if self.binding == Binding::Late {
            let usual = Late::default();
            return Sharing::Late(Late {
                strict: self.strict.unwrap_or(usual.strict),
                bind_at_start: self.bind_at_start.unwrap_or(usual.bind_at_start),
                nccl_topology: self.nccl_topology.unwrap_or(usual.nccl_topology),
            });
        }
        let policy = match self.policy.unwrap_or(Placement::Spread) {
            Placement::AllHcas => return Sharing::Pooled { units: self.shares },
            Placement::Spread => Policy::Spread,
            Placement::Pack => Policy::Pack,
            Placement::Numa => Policy::Numa,
            Placement::SameHca => Policy::SameHca,
        };
        match self.mode {
            Mode::Exclusive => Sharing::Exclusive { policy },
            Mode::Shared => Sharing::Shares {
                per_hca: self.shares,
                policy,
            },
        }
    }
}

/// Shortest interval of rescans: a scan reads a thousand files, and events cause scans besides.
const MIN_RESCAN_INTERVAL: Duration = Duration::from_secs(1);

/// `rescanInterval`; 0 switches rescans off.
fn rescan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match duration::parse(&text) {
        Some(Duration::ZERO) => Ok(None),
        Some(interval) if (MIN_RESCAN_INTERVAL..=MAX_TIME).contains(&interval) => {
            Ok(Some(interval))
        }
        Some(_) => Err(D::Error::custom(format!(
            "rescanInterval {text:?}: give a time between 1s and 24h, or 0 for never"
        ))),
        None => Err(D::Error::custom(format!(
            "rescanInterval {text:?}: write a number and ms, s, m or h, as 60s; 0 is off"
        ))),
    }
}

fn shares<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    number("shares", MAX_UNITS, deserializer).map(Some)
}

fn expected<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    number("expected", MAX_EXPECTED, deserializer).map(Some)
}

fn number<'de, D: Deserializer<'de>>(key: &str, most: u32, value: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(value)?;
    let valid = u32::try_from(number).ok();
    let valid = valid.filter(|number| (1..=most).contains(number));
    valid.ok_or_else(|| {
        D::Error::custom(format!(
            "{key} is {number}; give a number between 1 and {most}"
        ))
    })
}

fn from_text<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Problems> {
    serde_saphyr::from_str(text).map_err(|error| Problems::one(message(error)))
}

/// What the library says, with the place first as in all our messages.
fn message(error: serde_saphyr::Error) -> String {
    let location = error.location();
    let message = match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField { field, .. } if field == "rails" => {
            format!("unknown key \"rails\"; write `rails` in {DEFAULT_PATH}")
        }
        serde_saphyr::Error::SerdeUnknownField {
            field, expected, ..
        } => match nearest(field, expected) {
            Some(near) => format!("unknown key {field:?}; did you mean {near:?}?"),
            None => format!("unknown key {field:?}; known keys: {}", expected.join(", ")),
        },
        other => {
            let text = other.to_string();
            text.split(" at line ").next().unwrap_or(&text).to_owned()
        }
    };
    format!("{}{message}", location.map_or_else(String::new, at))
}

fn at(location: Location) -> String {
    format!("line {}, column {}: ", location.line(), location.column())
}

#[cfg(test)]
mod tests;
