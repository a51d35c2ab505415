//! Which HCAs belong to a pool. Each key of a selector is a line of `CRITERIA`.
//!
//! Inside one list any entry will do; all lists that are present have to agree. Criteria about a
//! port (`ports`, `linkSpeed`, `pKeys`, and `linkTypes` of an HCA without netdev) have to hold for
//! one and the same port. A criterion about what the host cannot see just now, because a pod has it,
//! is neither a match nor a mismatch.

use std::fmt;

use hca::{Guid, Netdev, PciFunction, Port, RdmaDevice};
use node::pattern::Pattern;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor, value};

use super::range::RangeSet;
use super::value::{guids, link_types, numbers, partition_keys, pci_ids, ranges};
use crate::candidate::{Candidate, FunctionKind, link_type};
use crate::words::word;

/// A conjunction of criteria; an empty list imposes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Selector {
    /// PCI vendor, four hex digits.
    #[serde(deserialize_with = "pci_ids")]
    pub vendors: Vec<Pattern>,
    /// PCI device, four hex digits.
    #[serde(rename = "deviceIDs", deserialize_with = "pci_ids")]
    pub device_ids: Vec<Pattern>,
    /// PCI driver.
    pub drivers: Vec<Pattern>,
    /// Netdev name on the host.
    pub if_names: Vec<Pattern>,
    /// Link encapsulation, by its name.
    #[serde(deserialize_with = "link_types")]
    pub link_types: Vec<Pattern>,
    /// PCI address of the function.
    pub pci_addresses: Vec<Pattern>,
    /// `acpi_index` of the function.
    pub acpi_indexes: Vec<Pattern>,
    /// Name of the owning PF's netdev, with VF or SF numbers.
    pub pf_names: Vec<Owner>,
    /// PCI address of the owning PF, with VF or SF numbers.
    pub root_devices: Vec<Owner>,
    /// How several entries for one PF in `pf_names` or `root_devices` combine.
    #[serde(skip)]
    pub owners: OwnerRule,
    /// Partition keys without the membership bit.
    #[serde(rename = "pKeys", deserialize_with = "partition_keys")]
    pub pkeys: Vec<u16>,
    /// RDMA device name.
    pub rdma_devices: Vec<Pattern>,
    /// Node or port GUID, sixteen hex digits.
    #[serde(deserialize_with = "guids")]
    pub guids: Vec<Pattern>,
    /// Port numbers.
    #[serde(deserialize_with = "numbers")]
    pub ports: RangeSet,
    /// NUMA nodes.
    #[serde(deserialize_with = "ranges")]
    pub numa_nodes: RangeSet,
    /// Port rates.
    pub link_speed: Vec<SpeedRange>,
    /// Firmware version.
    pub firmware: Vec<Pattern>,
    /// Board or PSID.
    #[serde(rename = "boardIDs")]
    pub board_ids: Vec<Pattern>,
    /// `pf`, `vf`, `sf`, `software`.
    pub functions: Vec<FunctionKind>,
    /// None of these may match.
    #[serde(deserialize_with = "one_or_many")]
    pub not: Vec<Selector>,
}

/// An entry of `pfNames` or `rootDevices`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Owner {
    /// PF name or address.
    pub pf: Pattern,
    /// VF or SF numbers; `None` is all, and the PF itself.
    pub indexes: Option<RangeSet>,
}

impl TryFrom<String> for Owner {
    type Error = String;

    /// `ens1f0`, `ens1f0#0-3,7`.
    fn try_from(text: String) -> Result<Self, String> {
        let (name, indexes) = match text.split_once('#') {
            None => (text.as_str(), None),
            Some((name, range)) => (name, Some(RangeSet::parse(range))),
        };
        Ok(Owner {
            pf: Pattern::parse(name)?,
            indexes: indexes.transpose()?,
        })
    }
}

/// How several entries that name the same PF combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OwnerRule {
    /// Any entry will do.
    #[default]
    Any,
    /// Only the first entry that names the PF counts (the SR-IOV plugin's rule).
    First,
}

/// A closed range of port rates in Mb/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct SpeedRange {
    /// Least.
    pub min_mbps: u32,
    /// Most.
    pub max_mbps: u32,
}

/// Whether a selector chooses an HCA. The worst of all criteria decides, and the best of alternatives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Match {
    /// A criterion that is visible fails.
    No,
    /// It asks for what is not visible now, so it might.
    Hidden,
    /// All criteria hold.
    Yes,
}

/// One key of a selector, and how an HCA is matched.
struct Criterion {
    key: &'static str,
    about: About,
    /// What the selector asks for, for a person; `None` if it does not ask for this.
    wanted: fn(&Selector) -> Option<String>,
    /// What the HCA has.
    found: fn(&Candidate) -> Vec<String>,
    test: Test,
}

enum Test {
    /// A word of what was found matches one of these patterns.
    Words(fn(&Selector) -> &[Pattern]),
    Hca(fn(&Selector, &Candidate) -> bool),
    /// All criteria of this kind hold for one and the same port.
    Port(fn(&Selector, &Port) -> bool),
}

/// What a selector consists of.
enum Term<'s> {
    Key(&'static Criterion),
    Not(&'s Selector),
}

/// What a criterion asks about, which decides whether all of it is visible.
#[derive(Clone, Copy)]
enum About {
    /// Where the HCA is: always visible.
    Place,
    /// Its RDMA devices.
    Devices,
    /// Its netdevs.
    Netdevs,
    /// The netdevs of its PF.
    Owner,
    /// Its netdevs, else its ports.
    Links,
}

impl About {
    fn is_visible(self, hca: &Candidate) -> bool {
        match self {
            About::Place => true,
            About::Devices => hca.is_read(),
            About::Netdevs => hca.shows_netdevs(),
            About::Owner => hca.function().kind != FunctionKind::Pf || hca.shows_netdevs(),
            About::Links => hca.is_read() || !hca.netdevs.is_empty(),
        }
    }
}

macro_rules! criterion {
    ($key:literal, $about:ident, $found:expr, $field:ident) => {
        criterion!(
            $key,
            $about,
            $found,
            |selector| alternatives(selector.$field.iter()),
            Words(|selector| &selector.$field)
        )
    };
    ($key:literal, $about:ident, $found:expr, $wanted:expr, $kind:ident($test:expr)) => {
        Criterion {
            key: $key,
            about: About::$about,
            wanted: $wanted,
            found: $found,
            test: Test::$kind($test),
        }
    };
}

/// Every key but `not`, in the order in which they are printed.
const CRITERIA: &[Criterion] = &[
    criterion!(
        "rdmaDevices",
        Place,
        |hca| of_devices(hca, |one| Some(one.name.clone())),
        rdma_devices
    ),
    criterion!(
        "ifNames",
        Netdevs,
        |hca| {
            let bonds = hca.bond_names.iter().map(String::as_str);
            hca.netdev_names().chain(bonds).map(str::to_owned).collect()
        },
        if_names
    ),
    criterion!(
        "pciAddresses",
        Place,
        |hca| of_pci(hca, |pci| Some(pci.address.to_string())),
        pci_addresses
    ),
    criterion!(
        "vendors",
        Place,
        |hca| of_pci(hca, |pci| Some(format!("{:04x}", pci.vendor))),
        vendors
    ),
    criterion!(
        "deviceIDs",
        Place,
        |hca| of_pci(hca, |pci| Some(format!("{:04x}", pci.device))),
        device_ids
    ),
    criterion!("drivers", Devices, Candidate::drivers, drivers),
    criterion!(
        "acpiIndexes",
        Place,
        acpi_index,
        |selector| alternatives(selector.acpi_indexes.iter()),
        Hca(|selector, hca| match acpi_index(hca).first() {
            Some(index) => any_matches(&selector.acpi_indexes, index),
            // The SR-IOV plugin's `[""]`: a function without an index. A pattern of ours that
            // matches everything does not match what is not there.
            None => selector
                .acpi_indexes
                .contains(&Pattern::Exact(String::new())),
        })
    ),
    criterion!(
        "guids",
        Devices,
        |hca| {
            let nodes = hca.rdma_devices.iter().filter_map(|one| one.node_guid);
            let ports = hca.ports().filter_map(Port::guid);
            let digits = |Guid(guid): Guid| format!("{guid:016x}");
            nodes.chain(ports).map(digits).collect()
        },
        guids
    ),
    criterion!(
        "firmware",
        Devices,
        |hca| of_devices(hca, |one| one.firmware.clone()),
        firmware
    ),
    criterion!(
        "boardIDs",
        Devices,
        |hca| of_devices(hca, |one| one.board_id.clone()),
        board_ids
    ),
    criterion!(
        "functions",
        Place,
        |hca| vec![word(&hca.function().kind)],
        |selector| alternatives(selector.functions.iter().map(word)),
        Hca(|selector, hca| selector.functions.contains(&hca.function().kind))
    ),
    criterion!(
        "pfNames",
        Owner,
        |hca| numbered(hca, pf_names(hca)),
        |selector| alternatives(selector.pf_names.iter()),
        Hca(|selector, hca| owned(&selector.pf_names, selector.owners, hca, &pf_names(hca)))
    ),
    criterion!(
        "rootDevices",
        Place,
        |hca| numbered(hca, pf_address(hca)),
        |selector| alternatives(selector.root_devices.iter()),
        Hca(|selector, hca| owned(
            &selector.root_devices,
            selector.owners,
            hca,
            &pf_address(hca)
        ))
    ),
    criterion!(
        "numaNodes",
        Place,
        |hca| hca.numa_node().iter().map(ToString::to_string).collect(),
        |selector| range(&selector.numa_nodes),
        Hca(|selector, hca| hca
            .numa_node()
            .is_some_and(|n| selector.numa_nodes.contains(n)))
    ),
    criterion!(
        "linkTypes",
        Links,
        |hca| {
            // Netdevs decide where there are any.
            let mut layers: Vec<_> = hca.netdevs.iter().map(Netdev::link_layer).collect();
            if layers.is_empty() {
                layers.extend(hca.ports().map(|port| port.link_layer));
            }
            let words = layers.into_iter().map(|layer| link_type(layer).to_owned());
            words.collect()
        },
        link_types
    ),
    criterion!(
        "ports",
        Devices,
        |hca| hca.ports().map(|port| port.number.to_string()).collect(),
        |selector| range(&selector.ports),
        Port(|selector, port| selector.ports.contains(port.number))
    ),
    criterion!(
        "linkSpeed",
        Devices,
        |hca| hca.ports().filter_map(rate_mbps).map(rate).collect(),
        |selector| alternatives(selector.link_speed.iter()),
        Port(|selector, port| {
            let mut ranges = selector.link_speed.iter();
            rate_mbps(port).is_some_and(|rate| ranges.any(|range| range.contains(rate)))
        })
    ),
    criterion!(
        "pKeys",
        Devices,
        |hca| hca.ports().flat_map(partitions).map(pkey).collect(),
        |selector| alternatives(selector.pkeys.iter().copied().map(pkey)),
        Port(|selector, port| partitions(port).any(|key| selector.pkeys.contains(&key)))
    ),
];

impl Selector {
    /// Whether no criterion is set, so that everything would match.
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                owners: self.owners,
                ..Self::default()
            }
    }

    /// Whether the HCA satisfies every criterion.
    pub fn matches(&self, candidate: &Candidate) -> Match {
        let terms = self.terms(candidate);
        terms.map(|(holds, _)| holds).min().unwrap_or(Match::Yes)
    }

    /// Why the HCA is not chosen, if so: the first criterion that it fails, else the first that asks
    /// for what is not visible.
    pub fn why_not(&self, candidate: &Candidate) -> Option<String> {
        let failing = self
            .terms(candidate)
            .filter(|(holds, _)| *holds != Match::Yes);
        let (holds, term) = failing.min_by_key(|(holds, _)| *holds)?;
        let (key, wanted, found) = match term {
            Term::Key(one) => (
                one.key,
                (one.wanted)(self).unwrap_or_default(),
                (one.found)(candidate),
            ),
            Term::Not(not) if holds == Match::No => {
                return Some(format!("excluded by \"not\": {not}"));
            }
            Term::Not(not) => ("not", not.to_string(), Vec::new()),
        };
        let found = match (holds, found.is_empty()) {
            (Match::Hidden, _) => {
                "not visible now: it is in another network namespace, or does not answer".to_owned()
            }
            (_, true) => "found none".to_owned(),
            (_, false) => format!("found {}", found.join(", ")),
        };
        Some(format!("{key}: wanted {wanted}, {found}"))
    }

    fn terms<'s>(&'s self, candidate: &'s Candidate) -> impl Iterator<Item = (Match, Term<'s>)> {
        let mut ports = self.ports_of_link_type(candidate);
        let asked = CRITERIA.iter().filter(|one| (one.wanted)(self).is_some());
        let criteria = asked.map(move |criterion| {
            let holds = match criterion.test {
                Test::Words(patterns) => {
                    let mut words = (criterion.found)(candidate).into_iter();
                    words.any(|word| any_matches(patterns(self), &word))
                }
                Test::Hca(holds) => holds(self, candidate),
                Test::Port(holds) => {
                    ports.retain(|port| holds(self, port));
                    !ports.is_empty()
                }
            };
            let holds = match holds {
                true => Match::Yes,
                false if criterion.about.is_visible(candidate) => Match::No,
                false => Match::Hidden,
            };
            (holds, Term::Key(criterion))
        });
        let excluded = self.not.iter().map(|not| {
            let holds = match not.matches(candidate) {
                Match::Yes => Match::No,
                Match::Hidden => Match::Hidden,
                Match::No => Match::Yes,
            };
            (holds, Term::Not(not))
        });
        criteria.chain(excluded)
    }

    /// The ports that port criteria may hold for. Where there is no netdev, the link type is a
    /// criterion of the port as well.
    fn ports_of_link_type<'c>(&self, candidate: &'c Candidate) -> Vec<&'c Port> {
        let any = self.link_types.is_empty() || !candidate.netdevs.is_empty();
        let has_type = |port: &&Port| any_matches(&self.link_types, link_type(port.link_layer));
        let ports = candidate.ports();
        ports.filter(|port| any || has_type(port)).collect()
    }
}

/// One selector, or a list of alternatives.
fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Selector>, D::Error> {
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = Vec<Selector>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a selector or a list of selectors")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<Selector>, A::Error> {
            let one = Selector::deserialize(value::MapAccessDeserializer::new(map))?;
            Ok(vec![one])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<Selector>, A::Error> {
            Vec::deserialize(value::SeqAccessDeserializer::new(seq))
        }
    }
    // A scalar would be a type error anyway; asking for "any" keeps its message ours.
    deserializer.deserialize_any(Either)
}

/// The same where it selects the HCAs of a pool.
pub(super) fn select<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Selector>, D::Error> {
    let selectors = one_or_many(deserializer)?;
    if selectors.is_empty() {
        return Err(D::Error::custom("select is empty"));
    }
    match selectors.iter().any(Selector::is_empty) {
        true => Err(D::Error::custom(
            "a selector without criteria; to take every HCA write rdmaDevices: [\"*\"]",
        )),
        false => Ok(selectors),
    }
}

fn any_matches(patterns: &[Pattern], word: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(word))
}

fn of_devices(hca: &Candidate, value: fn(&RdmaDevice) -> Option<String>) -> Vec<String> {
    hca.rdma_devices.iter().filter_map(value).collect()
}

fn of_pci(hca: &Candidate, value: fn(&PciFunction) -> Option<String>) -> Vec<String> {
    hca.pci.iter().filter_map(value).collect()
}

fn acpi_index(hca: &Candidate) -> Vec<String> {
    of_pci(hca, |pci| Some(pci.acpi_index?.to_string()))
}

fn pf_address(hca: &Candidate) -> Vec<String> {
    of_pci(hca, |pci| Some(pci.physical().to_string()))
}

fn pf_names(hca: &Candidate) -> Vec<String> {
    let bonded = hca.function().kind == FunctionKind::Pf;
    let bond_names = hca.bond_names.iter().filter(|_| bonded);
    hca.pf_netdevs.iter().chain(bond_names).cloned().collect()
}

/// Names of a PF with the number of the VF or SF.
fn numbered(hca: &Candidate, names: Vec<String>) -> Vec<String> {
    let index = hca.function().index;
    let number = index.map(|index| format!("#{index}")).unwrap_or_default();
    names.iter().map(|name| format!("{name}{number}")).collect()
}

fn rate_mbps(port: &Port) -> Option<u32> {
    Some(port.rate.as_ref()?.mbps)
}

/// Partition keys without the membership bit.
fn partitions(port: &Port) -> impl Iterator<Item = u16> {
    port.pkeys.iter().map(|pkey| pkey.key & 0x7fff)
}

fn pkey(key: u16) -> String {
    format!("{key:#06x}")
}

/// Whether an entry names the PF (by one of `names`) and the number of this VF or SF.
fn owned(entries: &[Owner], rule: OwnerRule, hca: &Candidate, names: &[String]) -> bool {
    let index = hca.function().index;
    let in_range = |entry: &Owner| match &entry.indexes {
        None => true,
        Some(range) => index.is_some_and(|index| range.contains(index)),
    };
    let is_named = |entry: &&Owner| names.iter().any(|name| entry.pf.matches(name));
    let mut naming = entries.iter().filter(is_named);
    match rule {
        OwnerRule::Any => naming.any(in_range),
        OwnerRule::First => naming.next().is_some_and(in_range),
    }
}

/// `a or b`; `None` for no word at all.
fn alternatives(words: impl Iterator<Item = impl ToString>) -> Option<String> {
    let words: Vec<String> = words.map(|word| word.to_string()).collect();
    (!words.is_empty()).then(|| words.join(" or "))
}

fn range(numbers: &RangeSet) -> Option<String> {
    (!numbers.is_empty()).then(|| numbers.to_string())
}

fn rate(mbps: u32) -> String {
    match mbps % 1000 {
        0 => format!("{}G", mbps / 1000),
        _ => format!("{mbps}M"),
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.indexes {
            None => write!(formatter, "{}", self.pf),
            Some(range) => write!(formatter, "{}#{range}", self.pf),
        }
    }
}

impl TryFrom<String> for SpeedRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
            .ok_or_else(|| format!("link speed {text:?}: write 100G, 100G-400G, >=200G or <=40G"))
    }
}

impl SpeedRange {
    /// Reads `100G`, `100G-400G`, `>=200G`, `<=40G`; `M`, `G` and `T` are bits per second.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if let Some(least) = text.strip_prefix(">=") {
            return Some(Self {
                min_mbps: parse_rate(least)?,
                max_mbps: u32::MAX,
            });
        }
        if let Some(most) = text.strip_prefix("<=") {
            return Some(Self {
                min_mbps: 0,
                max_mbps: parse_rate(most)?,
            });
        }
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (min_mbps, max_mbps) = (parse_rate(low)?, parse_rate(high)?);
        (min_mbps <= max_mbps).then_some(Self { min_mbps, max_mbps })
    }
}

fn parse_rate(text: &str) -> Option<u32> {
    let text = text
        .trim()
        .trim_end_matches("b/s")
        .trim_end_matches("bit/s")
        .trim_end();
    let (digits, factor) = match text.as_bytes().last()? {
        b'M' => (text.strip_suffix('M')?, 1),
        b'G' => (text.strip_suffix('G')?, 1_000),
        b'T' => (text.strip_suffix('T')?, 1_000_000),
        _ => return None,
    };
    digits.trim_end().parse::<u32>().ok()?.checked_mul(factor)
}

impl SpeedRange {
    fn contains(self, mbps: u32) -> bool {
        (self.min_mbps..=self.max_mbps).contains(&mbps)
    }
}

impl fmt::Display for SpeedRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (rate(self.min_mbps), rate(self.max_mbps));
        match (self.min_mbps, self.max_mbps) {
            (least, most) if least == most => write!(formatter, "{low}"),
            (_, u32::MAX) => write!(formatter, ">={low}"),
            (0, _) => write!(formatter, "<={high}"),
            _ => write!(formatter, "{low}-{high}"),
        }
    }
}

impl fmt::Display for Selector {
    /// Prints the criteria that are set, as `vendors: 15b3; ifNames: ens1f0 or ens1f1`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not = alternatives(self.not.iter().map(|not| format!("({not})")));
        let criteria = CRITERIA.iter().map(|c| (c.key, (c.wanted)(self)));
        let criteria = criteria.chain([("not", not)]);
        let text: Vec<String> = criteria
            .filter_map(|(key, wanted)| Some(format!("{key}: {}", wanted?)))
            .collect();
        formatter.write_str(&text.join("; "))
    }
}

#[cfg(test)]
mod tests;
