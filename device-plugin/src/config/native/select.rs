//! Selectors: their keys as they are written, and what is read from each.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor, value};
use serde_saphyr::Spanned;

use node::pattern::Pattern;

use super::message::at;
use crate::candidate::LinkType;
use crate::config::Findings;
use crate::config::range::RangeSet;
use crate::config::selector::{FunctionKind, Owner, OwnerRule, Selector, SpeedRange};

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(super) struct Criteria {
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
pub(super) struct OneOrMany(pub(super) Vec<Criteria>);

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

impl Criteria {
    pub(super) fn selector(&self, findings: &mut Findings) -> Selector {
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
