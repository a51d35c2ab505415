//! Which HCAs belong to a pool. A selector is data: for each of its keys the values that are asked for.
//! An HCA has words for each key, and each type of value has one way to match a word ([`Matcher`]).
//!
//! Inside one list any entry will do; all lists that are present have to agree. Keys about a port
//! (`ports`, `linkSpeed`, `pKeys`, and `linkTypes` of an HCA without netdev) have to hold for one and
//! the same port. A key about what the host cannot see just now, because a pod has it, is neither a
//! match nor a mismatch.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use hca::{FunctionKind, Guid, Hca, PciFunction, Port};
use node::pattern::Pattern;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor, value};

use super::range::RangeSet;

/// A conjunction of keys; one without values imposes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selector {
    /// By position in [`KEYS`].
    keys: BTreeMap<usize, Vec<Matcher>>,
    /// None of these may match.
    not: Vec<Selector>,
}

/// A value of a selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matcher {
    /// As it is written, for people.
    text: String,
    asked: Asked,
}

/// What a value asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// A name, or a pattern of names.
    Pattern(Pattern),
    /// Numbers; rates of ports in Mb/s.
    Range(RangeSet),
    /// The name or address of a PF; and the numbers of VFs or SFs, `None` for all and the PF itself.
    Owner(Pattern, Option<RangeSet>),
}

/// Whether a selector chooses an HCA. The worst of all keys decides, and the best of alternatives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Match {
    /// A key that is visible fails.
    No,
    /// It asks for what is not visible now, so it might.
    Hidden,
    /// All keys hold.
    Yes,
}

/// One key of a selector.
struct Key {
    name: &'static str,
    about: About,
    /// Reads a value of our own format.
    read: fn(&str) -> Result<Asked, String>,
}

/// What a selector consists of.
enum Term<'s> {
    Key(&'static Key, &'s [Matcher]),
    Not(&'s Selector),
}

/// What a key asks about, which decides whether all of it is visible.
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
    fn is_visible(self, hca: &Hca) -> bool {
        match self {
            About::Place => true,
            About::Devices => hca.is_read(),
            About::Netdevs => hca.shows_netdevs(),
            About::Owner => hca.function().kind != FunctionKind::Pf || hca.shows_netdevs(),
            About::Links => hca.is_read() || !hca.netdevs.is_empty(),
        }
    }
}

const fn key(name: &'static str, about: About, read: fn(&str) -> Result<Asked, String>) -> Key {
    Key { name, about, read }
}

/// Every key but `not`, in the order in which they are printed.
const KEYS: &[Key] = &[
    key("rdmaDevices", About::Place, pattern),
    key("ifNames", About::Netdevs, pattern),
    key("pciAddresses", About::Place, pattern),
    key("vendors", About::Place, pci_id),
    key("deviceIDs", About::Place, pci_id),
    key("drivers", About::Devices, pattern),
    key("acpiIndexes", About::Place, pattern),
    key("guids", About::Devices, guid),
    key("firmware", About::Devices, pattern),
    key("boardIDs", About::Devices, pattern),
    key("functions", About::Place, function),
    key("pfNames", About::Owner, owner),
    key("rootDevices", About::Place, owner),
    key("numaNodes", About::Place, range),
    key("linkTypes", About::Links, link_type),
    key("ports", About::Devices, range),
    key("linkSpeed", About::Devices, speed),
    key("pKeys", About::Devices, partition_key),
];

/// Keys that hold for one and the same port.
const PORT_KEYS: [&str; 3] = ["ports", "linkSpeed", "pKeys"];

/// What a port has for one of [`PORT_KEYS`].
fn of_port(key: &str, port: &Port) -> Option<Vec<String>> {
    Some(match key {
        "ports" => vec![port.number.to_string()],
        "linkSpeed" => port.rate.iter().map(|rate| speed_word(rate.mbps)).collect(),
        "pKeys" => port.pkeys.iter().map(|pkey| pkey_word(pkey.key)).collect(),
        _ => return None,
    })
}

/// What an HCA has for a key.
fn of_hca(key: &str, hca: &Hca) -> Vec<String> {
    let devices = || hca.rdma_devices.iter();
    let ports = || hca.ports().map(|(_, port)| port);
    let pci = |word: fn(&PciFunction) -> String| hca.pci.iter().map(word).collect();
    let owned = |names: &mut dyn Iterator<Item = &str>| names.map(str::to_owned).collect();
    let bonds = hca.bond_names.iter().map(String::as_str);
    match key {
        "rdmaDevices" => owned(&mut hca.rdma_names().into_iter()),
        "ifNames" => owned(&mut hca.netdev_names().chain(bonds)),
        "pciAddresses" => pci(|pci| pci.address.to_string()),
        "vendors" => pci(|pci| format!("{:04x}", pci.vendor)),
        "deviceIDs" => pci(|pci| format!("{:04x}", pci.device)),
        "drivers" => hca.drivers(),
        // A function without an index has the empty word.
        "acpiIndexes" => {
            let index = hca.pci.as_ref().and_then(|pci| pci.acpi_index);
            vec![index.map_or_else(String::new, |index| index.to_string())]
        }
        "guids" => {
            let guids = devices().filter_map(|one| one.node_guid);
            let guids = guids.chain(ports().filter_map(Port::guid));
            guids.map(|Guid(guid)| format!("{guid:016x}")).collect()
        }
        "firmware" => devices().filter_map(|one| one.firmware.clone()).collect(),
        "boardIDs" => devices().filter_map(|one| one.board_id.clone()).collect(),
        "functions" => vec![hca.function().kind.word().to_owned()],
        "pfNames" => {
            let is_pf = hca.function().kind == FunctionKind::Pf;
            let names = hca.pf_netdevs.iter().map(String::as_str);
            numbered(hca, names.chain(bonds.filter(|_| is_pf)))
        }
        "rootDevices" => {
            let address = hca.pf().map(|pf| pf.to_string());
            numbered(hca, address.as_deref().into_iter())
        }
        "numaNodes" => hca.numa_node().iter().map(u32::to_string).collect(),
        // Netdevs decide where there are any.
        "linkTypes" if hca.netdevs.is_empty() => {
            owned(&mut ports().map(|port| port.link_layer.word()))
        }
        "linkTypes" => owned(&mut hca.netdevs.iter().map(|one| one.link_layer().word())),
        _ => ports()
            .filter_map(|port| of_port(key, port))
            .flatten()
            .collect(),
    }
}

/// Names of all keys.
static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let names = KEYS.iter().map(|key| key.name);
    names.chain(["not"]).collect()
});

impl Selector {
    /// A selector of these keys; one without values is left out.
    pub fn of(keys: impl IntoIterator<Item = (&'static str, Vec<Matcher>)>) -> Self {
        let position = |name| KEYS.iter().position(|key| key.name == name);
        let keys = keys.into_iter();
        let keys = keys.filter(|(_, values)| !values.is_empty());
        Self {
            keys: keys
                .filter_map(|(name, values)| Some((position(name)?, values)))
                .collect(),
            not: Vec::new(),
        }
    }

    /// The same without a key.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.keys
            .retain(|at, _| KEYS.get(*at).is_some_and(|key| key.name != name));
        self
    }

    /// Whether no key is set, so that everything would match.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.not.is_empty()
    }

    /// The keys that are set, in the order of [`KEYS`].
    fn wanted(&self) -> impl Iterator<Item = (&'static Key, &[Matcher])> {
        self.keys
            .iter()
            .filter_map(|(at, values)| Some((KEYS.get(*at)?, values.as_slice())))
    }

    /// Whether the HCA satisfies every key.
    pub fn matches(&self, hca: &Hca) -> Match {
        let terms = self.terms(hca);
        terms.map(|(holds, _)| holds).min().unwrap_or(Match::Yes)
    }

    /// Why the HCA is not chosen, if so: the first key that it fails, else the first that asks for what
    /// is not visible.
    pub fn why_not(&self, hca: &Hca) -> Option<String> {
        let failing = self.terms(hca).filter(|(holds, _)| *holds != Match::Yes);
        let (holds, term) = failing.min_by_key(|(holds, _)| *holds)?;
        let (key, wanted, found) = match term {
            Term::Key(key, wanted) => (key.name, alternatives(wanted), of_hca(key.name, hca)),
            Term::Not(not) if holds == Match::No => {
                return Some(format!("excluded by \"not\": {not}"));
            }
            Term::Not(not) => ("not", not.to_string(), Vec::new()),
        };
        let found = match (holds, found.concat().is_empty()) {
            (Match::Hidden, _) => {
                "not visible now: it is in another network namespace, or does not answer".to_owned()
            }
            (_, true) => "found none".to_owned(),
            (_, false) => format!("found {}", found.join(", ")),
        };
        Some(format!("{key}: wanted {wanted}, {found}"))
    }

    fn terms<'s>(&'s self, hca: &'s Hca) -> impl Iterator<Item = (Match, Term<'s>)> {
        let mut ports: Vec<&Port> = hca.ports().map(|(_, port)| port).collect();
        // Where there is no netdev, the link type is that of the port.
        let mut types = self.wanted().filter(|(key, _)| key.name == "linkTypes");
        if let (Some((_, types)), true) = (types.next(), hca.netdevs.is_empty()) {
            ports.retain(|port| any_matches(types, &[port.link_layer.word().to_owned()]));
        }
        let keys = self.wanted().map(move |(key, wanted)| {
            ports.retain(|port| {
                of_port(key.name, port).is_none_or(|words| any_matches(wanted, &words))
            });
            let holds = match PORT_KEYS.contains(&key.name) {
                true => !ports.is_empty(),
                false => any_matches(wanted, &of_hca(key.name, hca)),
            };
            let holds = match holds {
                true => Match::Yes,
                false if key.about.is_visible(hca) => Match::No,
                false => Match::Hidden,
            };
            (holds, Term::Key(key, wanted))
        });
        let excluded = self.not.iter().map(|not| {
            let holds = match not.matches(hca) {
                Match::Yes => Match::No,
                Match::Hidden => Match::Hidden,
                Match::No => Match::Yes,
            };
            (holds, Term::Not(not))
        });
        keys.chain(excluded)
    }
}

fn any_matches(wanted: &[Matcher], words: &[String]) -> bool {
    let mut pairs = words
        .iter()
        .flat_map(|word| wanted.iter().map(move |one| (one, word)));
    pairs.any(|(one, word)| one.matches(word))
}

impl Matcher {
    pub fn new(text: impl Into<String>, asked: Asked) -> Self {
        let text = text.into();
        Self { text, asked }
    }

    /// A word that is meant as it stands.
    pub fn exact(word: impl Into<String>) -> Self {
        let text = word.into();
        Self::new(text.clone(), exact(text))
    }

    fn matches(&self, word: &str) -> bool {
        match &self.asked {
            // A pattern that matches everything does not match what is not there.
            Asked::Pattern(pattern) => {
                pattern.matches(word) && (!word.is_empty() || matches!(pattern, Pattern::Exact(_)))
            }
            Asked::Range(range) => {
                let number = word.parse().ok().or_else(|| parse_rate(word));
                number.is_some_and(|number| range.contains(number))
            }
            Asked::Owner(pf, indexes) => {
                let (name, index) = match word.split_once('#') {
                    Some((name, index)) => (name, index.parse().ok()),
                    None => (word, None),
                };
                pf.matches(name)
                    && indexes
                        .as_ref()
                        .is_none_or(|indexes| index.is_some_and(|index| indexes.contains(index)))
            }
        }
    }
}

impl fmt::Display for Selector {
    /// Prints the keys that are set, as `vendors: 15b3; ifNames: ens1f0 or ens1f1`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.wanted();
        let keys = keys.map(|(key, wanted)| format!("{}: {}", key.name, alternatives(wanted)));
        let not: Vec<String> = self.not.iter().map(|not| format!("({not})")).collect();
        let not = (!not.is_empty()).then(|| format!("not: {}", not.join(" or ")));
        let text: Vec<String> = keys.chain(not).collect();
        formatter.write_str(&text.join("; "))
    }
}

/// `a or b`.
fn alternatives(wanted: &[Matcher]) -> String {
    let words: Vec<&str> = wanted.iter().map(|one| one.text.as_str()).collect();
    words.join(" or ")
}

/// Names of a PF with the number of the VF or SF.
fn numbered<'n>(hca: &Hca, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let index = hca.function().index;
    let number = index.map(|index| format!("#{index}")).unwrap_or_default();
    names.map(|name| format!("{name}{number}")).collect()
}

/// A partition key without the membership bit.
pub(super) fn pkey_word(key: u16) -> String {
    format!("{:#06x}", key & 0x7fff)
}

fn speed_word(mbps: u32) -> String {
    match mbps % 1000 {
        0 => format!("{}G", mbps / 1000),
        _ => format!("{mbps}M"),
    }
}

fn pattern(word: &str) -> Result<Asked, String> {
    Pattern::parse(word).map(Asked::Pattern)
}

fn exact(word: impl Into<String>) -> Asked {
    Asked::Pattern(Pattern::Exact(word.into()))
}

fn one_of(word: &str, words: &[&str]) -> Result<Asked, String> {
    match words.contains(&word) {
        true => Ok(exact(word)),
        false => Err(format!(
            "{word:?} is unknown; known are {}",
            words.join(", ")
        )),
    }
}

fn function(word: &str) -> Result<Asked, String> {
    one_of(word, &FunctionKind::ALL.map(FunctionKind::word))
}

fn link_type(word: &str) -> Result<Asked, String> {
    one_of(word, &["ether", "infiniband"])
}

/// A PCI ID: four hex digits, with or without `0x`, in either case.
fn pci_id(word: &str) -> Result<Asked, String> {
    let lower = word.to_ascii_lowercase();
    let digits = lower.strip_prefix("0x").unwrap_or(&lower);
    match digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        true => Ok(exact(digits)),
        false => Err(format!("{word:?} is not four hex digits, as 15b3")),
    }
}

/// A GUID: sixteen hex digits, with or without colons and `0x`, or a pattern of them.
fn guid(word: &str) -> Result<Asked, String> {
    let plain = word.to_ascii_lowercase().replace(':', "");
    let digits = plain.strip_prefix("0x").unwrap_or(&plain);
    let pattern = Pattern::parse(digits)?;
    let is_guid = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    match is_guid || matches!(pattern, Pattern::Glob(_)) {
        true => Ok(Asked::Pattern(pattern)),
        false => Err(format!("GUID {word:?} is not sixteen hex digits")),
    }
}

fn partition_key(word: &str) -> Result<Asked, String> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    let key = u16::from_str_radix(digits, 16).ok();
    let key = key.filter(|key| key & 0x7fff != 0);
    key.map(|key| exact(pkey_word(key)))
        .ok_or_else(|| format!("partition key {word:?} is not hexadecimal between 0x1 and 0xffff"))
}

/// `ens1f0`, `ens1f0#0-3,7`.
fn owner(word: &str) -> Result<Asked, String> {
    let (name, indexes) = match word.split_once('#') {
        None => (word, None),
        Some((name, range)) => (name, Some(RangeSet::parse(range)?)),
    };
    Ok(Asked::Owner(Pattern::parse(name)?, indexes))
}

fn range(word: &str) -> Result<Asked, String> {
    RangeSet::parse(word).map(Asked::Range)
}

fn speed(word: &str) -> Result<Asked, String> {
    speed_range(word)
        .map(Asked::Range)
        .ok_or_else(|| format!("link speed {word:?}: write 100G, 100G-400G, >=200G or <=40G"))
}

/// Reads `100G`, `100G-400G`, `>=200G`, `<=40G`; `M`, `G` and `T` are bits per second.
fn speed_range(text: &str) -> Option<RangeSet> {
    let text = text.trim();
    if let Some(least) = text.strip_prefix(">=") {
        return Some(RangeSet::from_to(parse_rate(least)?, u32::MAX));
    }
    if let Some(most) = text.strip_prefix("<=") {
        return Some(RangeSet::from_to(0, parse_rate(most)?));
    }
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let (low, high) = (parse_rate(low)?, parse_rate(high)?);
    (low <= high).then(|| RangeSet::from_to(low, high))
}

/// In Mb/s.
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

impl<'de> Deserialize<'de> for Selector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Selector;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a selector")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Selector, A::Error> {
        let mut selector = Selector::default();
        while let Some(at) = map.next_key_seed(KeyName)? {
            let Some(key) = KEYS.get(at) else {
                selector.not = map.next_value_seed(OneOrMany)?;
                continue;
            };
            let values = map.next_value_seed(Values(key.read))?;
            if !values.is_empty() && selector.keys.insert(at, values).is_some() {
                return Err(A::Error::duplicate_field(key.name));
            }
        }
        Ok(selector)
    }
}

/// The position of a key's name in [`NAMES`].
struct KeyName;

impl<'de> DeserializeSeed<'de> for KeyName {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        let name = String::deserialize(deserializer)?;
        let at = NAMES.iter().position(|known| *known == name);
        at.ok_or_else(|| D::Error::unknown_field(&name, &NAMES))
    }
}

/// The values of a key.
struct Values(fn(&str) -> Result<Asked, String>);

impl<'de> DeserializeSeed<'de> for Values {
    type Value = Vec<Matcher>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        let words = Vec::<String>::deserialize(deserializer)?;
        let read = words.into_iter();
        let read = read.map(|word| self.0(&word).map(|asked| Matcher::new(word, asked)));
        read.collect::<Result<_, _>>().map_err(D::Error::custom)
    }
}

/// One selector, or a list of alternatives.
struct OneOrMany;

impl<'de> DeserializeSeed<'de> for OneOrMany {
    type Value = Vec<Selector>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        // A scalar would be a type error anyway; asking for "any" keeps its message ours.
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for OneOrMany {
    type Value = Vec<Selector>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a selector or a list of selectors")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<Selector>, A::Error> {
        Ok(vec![Reader.visit_map(map)?])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<Selector>, A::Error> {
        Vec::deserialize(value::SeqAccessDeserializer::new(seq))
    }
}

/// The selectors of a pool.
pub(super) fn select<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Selector>, D::Error> {
    let selectors = OneOrMany.deserialize(deserializer)?;
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

#[cfg(test)]
mod tests;
