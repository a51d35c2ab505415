//! Reader of our own format: versioned, strict, YAML or JSON (every JSON document is YAML).
//!
//! ```yaml
//! version: 1
//! rescanInterval: 60s
//! pools:
//!   - resource: rdma/rail0
//!     mode: exclusive
//!     select: { rdmaDevices: [mlx5_0] }
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

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor, value,
};
use serde_saphyr::{Location, Spanned};

use node::duration;
use node::pattern::Pattern;
use node::spelling::nearest;

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Damping, Delivery, Exclusion, Format, Gate, MAX_TIME,
    MAX_UNITS, MIN_RESCAN_INTERVAL, NodeClass, NodeRule, Policy, PoolConfig, PortHealth, Sharing,
    Variables,
};

use super::range::RangeSet;
use super::resource::ResourceName;
use super::selector::{FunctionKind, Owner, OwnerRule, Selector, SpeedRange};
use super::{Findings, Problems};
use crate::candidate::LinkType;

/// The version this program reads.
const VERSION: u32 = 1;

/// Most pools whose form is wrong that are reported at once; each costs another reading of the
/// text.
const MAX_MALFORMED_POOLS: usize = 20;

#[derive(Deserialize)]
struct Versioned {
    version: Option<Spanned<u32>>,
    pools: Option<Spanned<IgnoredAny>>,
}

/// A file, without the pools that are passed over.
#[derive(Default)]
struct File {
    rescan_interval: Option<Spanned<String>>,
    health: Health,
    pools: Vec<Pool>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum FileKey {
    Version,
    RescanInterval,
    Health,
    Pools,
}

/// Reads a file but for some of its pools, and says which pool it is at. The library stops at the
/// first key or word that it does not know, so a pool that has one is passed over in another reading,
/// which finds what is wrong with the next.
#[derive(Clone, Copy)]
struct FileBut<'s> {
    malformed: &'s BTreeSet<usize>,
    at: &'s Cell<Option<usize>>,
}

impl<'de> DeserializeSeed<'de> for FileBut<'_> {
    type Value = File;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<File, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FileBut<'_> {
    type Value = File;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a configuration")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<File, A::Error> {
        let mut file = File::default();
        let mut pools = None;
        while let Some(key) = map.next_key()? {
            match key {
                FileKey::Version => drop(map.next_value::<IgnoredAny>()?),
                FileKey::RescanInterval => file.rescan_interval = map.next_value()?,
                FileKey::Health => file.health = map.next_value()?,
                FileKey::Pools => pools = Some(map.next_value_seed(PoolsBut(self))?),
            }
        }
        file.pools = pools.ok_or_else(|| A::Error::missing_field("pools"))?;
        Ok(file)
    }
}

struct PoolsBut<'s>(FileBut<'s>);

impl<'de> DeserializeSeed<'de> for PoolsBut<'_> {
    type Value = Vec<Pool>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Pool>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for PoolsBut<'_> {
    type Value = Vec<Pool>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of pools")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Pool>, A::Error> {
        let Self(FileBut { malformed, at }) = self;
        let mut pools = Vec::new();
        for index in 0.. {
            at.set(Some(index));
            let more = if malformed.contains(&index) {
                seq.next_element::<IgnoredAny>()?.is_some()
            } else {
                let pool = seq.next_element()?;
                let more = pool.is_some();
                pools.extend(pool);
                more
            };
            if !more {
                break;
            }
        }
        at.set(None);
        Ok(pools)
    }
}

/// The file without malformed pools, each of which is a problem; `None` if it cannot be read even
/// so.
fn read_file(text: &str, findings: &mut Findings) -> Option<File> {
    let (mut malformed, at) = (BTreeSet::new(), Cell::new(None));
    loop {
        let read = serde_saphyr::with_deserializer_from_str(text, |deserializer| {
            let (malformed, at) = (&malformed, &at);
            FileBut { malformed, at }.deserialize(deserializer)
        });
        match read {
            Ok(file) => return Some(file),
            Err(error) => findings.problem(message(error)),
        }
        let pool = at.take()?;
        if !malformed.insert(pool) || malformed.len() == MAX_MALFORMED_POOLS {
            return None;
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Health {
    down_delay: Option<Spanned<String>>,
    up_delay: Option<Spanned<String>>,
    flaps: Option<Spanned<u32>>,
    flap_window: Option<Spanned<String>>,
    flap_hold: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Pool {
    resource: Spanned<String>,
    mode: Mode,
    slots: Option<Spanned<u32>>,
    policy: Option<Spanned<PolicyWord>>,
    nodes: Option<Spanned<Nodes>>,
    #[serde(default)]
    exclude_topology: bool,
    delivery: Option<DeliveryWord>,
    exclude: Option<Vec<ExcludeWord>>,
    #[serde(default)]
    wait_for: Vec<Spanned<GateWord>>,
    #[serde(default)]
    link_up: bool,
    select: Spanned<OneOrMany>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Shared,
    Exclusive,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
enum ExcludeWord {
    Uplinks,
    PfsWithVfs,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum GateWord {
    File(String),
    Module(String),
}

impl GateWord {
    fn gate(&self) -> Result<Gate, String> {
        match self {
            GateWord::File(path) => Gate::file(path),
            GateWord::Module(name) => Gate::module(name),
        }
    }
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
enum DeliveryWord {
    DeviceSpecs,
    Cdi,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum PolicyWord {
    AllHcas,
    Spread,
    Pack,
    Numa,
    SameHca,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Nodes {
    required: Option<Vec<NodeWord>>,
    optional: Vec<NodeWord>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum NodeWord {
    Uverbs,
    RdmaCm,
    Umad,
    Issm,
    Ucm,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Criteria {
    vendors: Vec<Spanned<String>>,
    #[serde(rename = "deviceIDs")]
    device_ids: Vec<Spanned<String>>,
    drivers: Vec<Spanned<String>>,
    if_names: Vec<Spanned<String>>,
    link_types: Vec<LinkWord>,
    pci_addresses: Vec<Spanned<String>>,
    acpi_indexes: Vec<Spanned<String>>,
    pf_names: Vec<Spanned<String>>,
    root_devices: Vec<Spanned<String>>,
    p_keys: Vec<Spanned<String>>,
    rdma_devices: Vec<Spanned<String>>,
    guids: Vec<Spanned<String>>,
    ports: Vec<u32>,
    numa_nodes: Vec<Spanned<String>>,
    link_speed: Vec<Spanned<String>>,
    firmware: Vec<Spanned<String>>,
    #[serde(rename = "boardIDs")]
    board_ids: Vec<Spanned<String>>,
    functions: Vec<FunctionWord>,
    not: Option<OneOrMany>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum LinkWord {
    Ether,
    Infiniband,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum FunctionWord {
    Pf,
    Vf,
    Sf,
    Software,
}

/// One selector, or a list of alternatives.
#[derive(Default)]
struct OneOrMany(Vec<Criteria>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = OneOrMany;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a selector or a list of selectors")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OneOrMany, A::Error> {
                let one = Criteria::deserialize(value::MapAccessDeserializer::new(map))?;
                Ok(OneOrMany(vec![one]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<OneOrMany, A::Error> {
                Vec::deserialize(value::SeqAccessDeserializer::new(seq)).map(OneOrMany)
            }
        }
        // A scalar would be a type error anyway; asking for "any" keeps its message ours.
        deserializer.deserialize_any(Either)
    }
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
        warnings: Vec::new(),
        refused: Vec::new(),
    })
}

fn from_text<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Problems> {
    serde_saphyr::from_str(text).map_err(|error| Problems::one(message(error)))
}

/// The present name of a key or a value that an earlier version knew.
fn renamed(old: &str) -> Option<&'static str> {
    match old {
        "spare" => Some("exclude"),
        "legacy" => Some("all-hcas"),
        _ => None,
    }
}

/// What the library says, with the place first as in all our messages.
fn message(error: serde_saphyr::Error) -> String {
    let location = error.location();
    let message = match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField {
            field, expected, ..
        } => {
            let near = nearest(field, expected);
            let hint = match (renamed(field), near) {
                (Some(now), _) => format!("its name is {now:?} now"),
                (None, Some(near)) => format!("did you mean {near:?}?"),
                (None, None) => format!("known keys: {}", expected.join(", ")),
            };
            format!("unknown key {field:?}; {hint}")
        }
        other => {
            let text = other.to_string();
            let text = text.split(" at line ").next().unwrap_or(&text);
            let old = text
                .strip_prefix("unknown variant `")
                .and_then(|rest| rest.split('`').next());
            match old.and_then(renamed) {
                Some(now) => format!("{text}; its name is {now:?} now"),
                None => text.to_owned(),
            }
        }
    };
    format!("{}{message}", location.map_or_else(String::new, at))
}

fn at(location: Location) -> String {
    format!("line {}, column {}: ", location.line(), location.column())
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
        delivery: match (pool.delivery, pool.mode) {
            (Some(DeliveryWord::DeviceSpecs), _) | (None, Mode::Shared) => {
                Some(Delivery::DeviceSpecs)
            }
            (Some(DeliveryWord::Cdi), _) => Some(Delivery::Cdi),
            (None, Mode::Exclusive) => None,
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

fn sharing(pool: &Pool, findings: &mut Findings) -> Option<Sharing> {
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

impl Criteria {
    fn selector(&self, findings: &mut Findings) -> Selector {
        let numa = self
            .numa_nodes
            .iter()
            .filter_map(|text| findings.keep(located(text, RangeSet::parse(&text.value))));
        let mut numa_nodes = RangeSet::default();
        numa.for_each(|range| numa_nodes.extend(range));
        Selector {
            vendors: hex_ids(&self.vendors, "vendor", findings),
            device_ids: hex_ids(&self.device_ids, "device ID", findings),
            drivers: patterns(&self.drivers, findings),
            if_names: patterns(&self.if_names, findings),
            link_types: self.link_types.iter().map(|word| word.pattern()).collect(),
            pci_addresses: patterns(&self.pci_addresses, findings),
            acpi_indexes: patterns(&self.acpi_indexes, findings),
            pf_names: owners(&self.pf_names, findings),
            root_devices: owners(&self.root_devices, findings),
            owners: OwnerRule::Any,
            pkeys: pkeys(&self.p_keys, findings),
            rdma_devices: patterns(&self.rdma_devices, findings),
            guids: guids(&self.guids, findings),
            ports: RangeSet::of(self.ports.iter().copied()),
            numa_nodes,
            link_speed: speeds(&self.link_speed, findings),
            firmware: patterns(&self.firmware, findings),
            board_ids: patterns(&self.board_ids, findings),
            functions: self.functions.iter().map(|word| word.kind()).collect(),
            not: self
                .not
                .iter()
                .flat_map(|not| &not.0)
                .map(|c| c.selector(findings))
                .collect(),
        }
    }
}

impl LinkWord {
    fn pattern(self) -> Pattern {
        let link_type = match self {
            LinkWord::Ether => LinkType::Ether,
            LinkWord::Infiniband => LinkType::Infiniband,
        };
        Pattern::Exact(link_type.word().into())
    }
}

impl FunctionWord {
    fn kind(self) -> FunctionKind {
        match self {
            FunctionWord::Pf => FunctionKind::Pf,
            FunctionWord::Vf => FunctionKind::Vf,
            FunctionWord::Sf => FunctionKind::Sf,
            FunctionWord::Software => FunctionKind::Software,
        }
    }
}

fn located<T, E: fmt::Display>(text: &Spanned<String>, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| format!("{}{error}", at(text.referenced)))
}

fn patterns(words: &[Spanned<String>], findings: &mut Findings) -> Vec<Pattern> {
    let parse = |word: &Spanned<String>| located(word, Pattern::parse(&word.value));
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

/// PCI IDs: four hex digits, with or without `0x`, in either case.
fn hex_ids(words: &[Spanned<String>], what: &str, findings: &mut Findings) -> Vec<Pattern> {
    let parse = |word: &Spanned<String>| {
        let lower = word.value.to_ascii_lowercase();
        let digits = lower.strip_prefix("0x").unwrap_or(&lower);
        if digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Ok(Pattern::Exact(digits.into()));
        }
        let message = format!("{what} {:?} is not four hex digits, as 15b3", word.value);
        located(word, Err(message))
    };
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

fn guids(words: &[Spanned<String>], findings: &mut Findings) -> Vec<Pattern> {
    let parse = |word: &Spanned<String>| {
        let plain: String = word
            .value
            .to_ascii_lowercase()
            .chars()
            .filter(|c| *c != ':')
            .collect();
        let digits = plain.strip_prefix("0x").unwrap_or(&plain);
        let pattern = Pattern::parse(digits).map_err(|error| error.to_string());
        let shaped = match &pattern {
            Ok(Pattern::Exact(digits)) => {
                digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit())
            }
            _ => true,
        };
        let message = format!("GUID {:?} is not sixteen hex digits", word.value);
        located(word, if shaped { pattern } else { Err(message) })
    };
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

/// `ens1f0`, `ens1f0#0-3,7`.
fn owners(words: &[Spanned<String>], findings: &mut Findings) -> Vec<Owner> {
    let parse = |word: &Spanned<String>| {
        let (name, indexes) = match word.value.split_once('#') {
            None => (word.value.as_str(), None),
            Some((name, range)) => (name, Some(located(word, RangeSet::parse(range))?)),
        };
        Ok::<_, String>(Owner {
            pf: located(word, Pattern::parse(name))?,
            indexes,
        })
    };
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

fn pkeys(words: &[Spanned<String>], findings: &mut Findings) -> Vec<u16> {
    let parse = |word: &Spanned<String>| {
        let digits = word.value.strip_prefix("0x").unwrap_or(&word.value);
        let key = u16::from_str_radix(digits, 16).ok().map(|key| key & 0x7fff);
        let key = key.filter(|key| *key != 0).ok_or_else(|| {
            format!(
                "partition key {:?} is not hexadecimal between 0x1 and 0xffff",
                word.value
            )
        });
        located(word, key)
    };
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

fn speeds(words: &[Spanned<String>], findings: &mut Findings) -> Vec<SpeedRange> {
    let parse = |word: &Spanned<String>| {
        let range = SpeedRange::parse(&word.value).ok_or_else(|| {
            format!(
                "link speed {:?}: write 100G, 100G-400G, >=200G or <=40G",
                word.value
            )
        });
        located(word, range)
    };
    words
        .iter()
        .filter_map(|word| findings.keep(parse(word)))
        .collect()
}

#[cfg(test)]
mod tests;
