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

use super::range::RangeSet;
use super::value::{
    DriverName, GuidPattern, HexId, PartitionKey, link_types, list, numbers, one_or_many, ranges,
};
use crate::candidate::{Candidate, Function, link_type};

/// A conjunction of criteria; an empty list imposes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Selector {
    /// PCI vendor, four hex digits.
    #[serde(deserialize_with = "list::<_, HexId, _>")]
    pub vendors: Vec<Pattern>,
    /// PCI device, four hex digits.
    #[serde(rename = "deviceIDs", deserialize_with = "list::<_, HexId, _>")]
    pub device_ids: Vec<Pattern>,
    /// PCI driver.
    #[serde(deserialize_with = "list::<_, DriverName, _>")]
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
    #[serde(rename = "pKeys", deserialize_with = "list::<_, PartitionKey, _>")]
    pub pkeys: Vec<u16>,
    /// RDMA device name.
    pub rdma_devices: Vec<Pattern>,
    /// Node or port GUID, sixteen hex digits.
    #[serde(deserialize_with = "list::<_, GuidPattern, _>")]
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
            pf: Pattern::parse(name).map_err(|error| error.to_string())?,
            indexes: indexes.transpose().map_err(|error| error.to_string())?,
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

/// A function kind without its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FunctionKind {
    /// Physical function.
    Pf,
    /// Virtual function.
    Vf,
    /// Scalable function.
    Sf,
    /// Soft RoCE or soft iWARP on a netdev without a bus.
    Software,
}

impl FunctionKind {
    /// All of them, in the order that messages list them.
    pub const ALL: [(&'static str, FunctionKind); 4] = [
        ("pf", FunctionKind::Pf),
        ("vf", FunctionKind::Vf),
        ("sf", FunctionKind::Sf),
        ("software", FunctionKind::Software),
    ];

    fn covers(self, function: Function) -> bool {
        matches!(
            (self, function),
            (FunctionKind::Pf, Function::Physical)
                | (FunctionKind::Vf, Function::Virtual(_))
                | (FunctionKind::Sf, Function::Scalable(_))
                | (FunctionKind::Software, Function::Software)
        )
    }
}

/// Why an HCA is not selected: the first criterion that it fails, else the first that asks for what
/// is not visible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Key of the criterion as written in configuration files.
    pub criterion: &'static str,
    /// What the configuration asks for.
    pub wanted: String,
    /// What the HCA has.
    pub found: String,
    /// Whether this is not visible now, so it might match.
    pub hidden: bool,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            criterion,
            wanted,
            found,
            hidden,
        } = self;
        match (*criterion, *hidden) {
            ("not", false) => return write!(formatter, "excluded by \"not\": {wanted}"),
            (_, false) => {}
            (_, true) => {
                return write!(
                    formatter,
                    "{criterion}: wanted {wanted}, not visible now: it is in another network \
                     namespace, or does not answer"
                );
            }
        }
        write!(formatter, "{criterion}: wanted {wanted}, found {found}")
    }
}

/// One key of a selector: what it asks for, what an HCA has, and how the two are matched.
struct Criterion {
    key: &'static str,
    about: About,
    test: Test,
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
            About::Owner => hca.function() != Function::Physical || hca.shows_netdevs(),
            About::Links => hca.is_read() || !hca.netdevs.is_empty(),
        }
    }
}

enum Test {
    /// One of the HCA's values matches one of the patterns.
    Words {
        patterns: fn(&Selector) -> &[Pattern],
        values: fn(&Candidate) -> Vec<String>,
    },
    /// The HCA as a whole decides.
    Hca {
        /// `None` if the selector does not ask for this.
        wanted: fn(&Selector) -> Option<String>,
        holds: fn(&Selector, &Candidate) -> bool,
        values: fn(&Candidate) -> Vec<String>,
    },
    /// All criteria of this kind hold for one and the same port.
    Port {
        /// `None` if the selector does not ask for this.
        wanted: fn(&Selector) -> Option<String>,
        holds: fn(&Selector, &Port) -> bool,
        values: fn(&Port) -> Vec<String>,
    },
}

/// Every key but `not`, in the order in which they are checked and printed.
const CRITERIA: &[Criterion] = &[
    Criterion {
        key: "rdmaDevices",
        about: About::Place,
        test: Test::Words {
            patterns: |selector| &selector.rdma_devices,
            values: |hca| of_devices(hca, |device| Some(device.name.clone())),
        },
    },
    Criterion {
        key: "ifNames",
        about: About::Netdevs,
        test: Test::Words {
            patterns: |selector| &selector.if_names,
            values: |hca| {
                let bonds = hca.bond_names.iter().map(String::as_str);
                hca.netdev_names().chain(bonds).map(str::to_owned).collect()
            },
        },
    },
    Criterion {
        key: "pciAddresses",
        about: About::Place,
        test: Test::Words {
            patterns: |selector| &selector.pci_addresses,
            values: |hca| of_pci(hca, |pci| pci.address.to_string()),
        },
    },
    Criterion {
        key: "vendors",
        about: About::Place,
        test: Test::Words {
            patterns: |selector| &selector.vendors,
            values: |hca| of_pci(hca, |pci| format!("{:04x}", pci.vendor)),
        },
    },
    Criterion {
        key: "deviceIDs",
        about: About::Place,
        test: Test::Words {
            patterns: |selector| &selector.device_ids,
            values: |hca| of_pci(hca, |pci| format!("{:04x}", pci.device)),
        },
    },
    Criterion {
        key: "drivers",
        about: About::Devices,
        test: Test::Words {
            patterns: |selector| &selector.drivers,
            values: Candidate::drivers,
        },
    },
    Criterion {
        key: "acpiIndexes",
        about: About::Place,
        test: Test::Hca {
            wanted: |selector| alternatives(selector.acpi_indexes.iter()),
            holds: |selector, hca| match acpi_index(hca) {
                Some(index) => any_matches(&selector.acpi_indexes, &index),
                // The SR-IOV plugin's `[""]`: a function without an index. A pattern of ours that
                // matches everything does not match what is not there.
                None => selector
                    .acpi_indexes
                    .contains(&Pattern::Exact(String::new())),
            },
            values: |hca| acpi_index(hca).into_iter().collect(),
        },
    },
    Criterion {
        key: "guids",
        about: About::Devices,
        test: Test::Words {
            patterns: |selector| &selector.guids,
            values: |hca| {
                let nodes = hca
                    .rdma_devices
                    .iter()
                    .filter_map(|device| device.node_guid);
                let ports = hca.ports().filter_map(Port::guid);
                let digits = |Guid(guid): Guid| format!("{guid:016x}");
                nodes.chain(ports).map(digits).collect()
            },
        },
    },
    Criterion {
        key: "firmware",
        about: About::Devices,
        test: Test::Words {
            patterns: |selector| &selector.firmware,
            values: |hca| of_devices(hca, |device| device.firmware.clone()),
        },
    },
    Criterion {
        key: "boardIDs",
        about: About::Devices,
        test: Test::Words {
            patterns: |selector| &selector.board_ids,
            values: |hca| of_devices(hca, |device| device.board_id.clone()),
        },
    },
    Criterion {
        key: "functions",
        about: About::Place,
        test: Test::Hca {
            wanted: |selector| alternatives(selector.functions.iter().map(|kind| kind.word())),
            holds: |selector, hca| selector.functions.iter().any(|k| k.covers(hca.function())),
            values: |hca| vec![hca.function().word().to_owned()],
        },
    },
    Criterion {
        key: "pfNames",
        about: About::Owner,
        test: Test::Hca {
            wanted: |selector| alternatives(selector.pf_names.iter()),
            holds: |selector, hca| owned(&selector.pf_names, selector.owners, hca, &pf_names(hca)),
            values: |hca| numbered(hca, &pf_names(hca)),
        },
    },
    Criterion {
        key: "rootDevices",
        about: About::Place,
        test: Test::Hca {
            wanted: |selector| alternatives(selector.root_devices.iter()),
            holds: |selector, hca| {
                owned(
                    &selector.root_devices,
                    selector.owners,
                    hca,
                    &pf_address(hca),
                )
            },
            values: |hca| numbered(hca, &pf_address(hca)),
        },
    },
    Criterion {
        key: "numaNodes",
        about: About::Place,
        test: Test::Hca {
            wanted: |selector| range(&selector.numa_nodes),
            holds: |selector, hca| {
                hca.numa_node()
                    .is_some_and(|n| selector.numa_nodes.contains(n))
            },
            values: |hca| hca.numa_node().iter().map(ToString::to_string).collect(),
        },
    },
    Criterion {
        key: "linkTypes",
        about: About::Links,
        test: Test::Words {
            patterns: |selector| &selector.link_types,
            // Netdevs decide where there are any.
            values: |hca| {
                let mut layers: Vec<_> = hca.netdevs.iter().map(Netdev::link_layer).collect();
                if layers.is_empty() {
                    layers.extend(hca.ports().map(|port| port.link_layer));
                }
                let words = layers.into_iter().map(|layer| link_type(layer).to_owned());
                words.collect()
            },
        },
    },
    Criterion {
        key: "ports",
        about: About::Devices,
        test: Test::Port {
            wanted: |selector| range(&selector.ports),
            holds: |selector, port| selector.ports.contains(port.number),
            values: |port| vec![port.number.to_string()],
        },
    },
    Criterion {
        key: "linkSpeed",
        about: About::Devices,
        test: Test::Port {
            wanted: |selector| alternatives(selector.link_speed.iter()),
            holds: |selector, port| {
                rate_mbps(port)
                    .is_some_and(|rate| selector.link_speed.iter().any(|r| r.contains(rate)))
            },
            values: |port| vec![rate(rate_mbps(port))],
        },
    },
    Criterion {
        key: "pKeys",
        about: About::Devices,
        test: Test::Port {
            wanted: |selector| alternatives(pkeys(selector.pkeys.iter().copied())),
            holds: |selector, port| partitions(port).any(|key| selector.pkeys.contains(&key)),
            values: |port| pkeys(partitions(port)).collect(),
        },
    },
];

impl Test {
    /// What the selector asks for, if it does. A list of one empty word does.
    fn wanted(&self, selector: &Selector) -> Option<String> {
        match self {
            Self::Words { patterns, .. } => alternatives(patterns(selector).iter()),
            Self::Hca { wanted, .. } | Self::Port { wanted, .. } => wanted(selector),
        }
    }

    /// Whether an HCA has it, and else what it has. `ports` are those that hold so far.
    fn check(
        &self,
        selector: &Selector,
        hca: &Candidate,
        ports: &mut Vec<&Port>,
    ) -> Result<(), Vec<String>> {
        let (holds, values) = match self {
            Self::Words { patterns, values } => {
                let values = values(hca);
                let patterns = patterns(selector);
                (values.iter().any(|v| any_matches(patterns, v)), values)
            }
            Self::Hca { holds, values, .. } => (holds(selector, hca), values(hca)),
            Self::Port { holds, values, .. } => {
                let values = ports.iter().flat_map(|port| values(port)).collect();
                ports.retain(|port| holds(selector, port));
                (!ports.is_empty(), values)
            }
        };
        if holds { Ok(()) } else { Err(values) }
    }
}

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
    pub fn matches(&self, candidate: &Candidate) -> bool {
        self.check(candidate).is_ok()
    }

    /// Says which criterion an HCA fails first.
    pub fn check(&self, candidate: &Candidate) -> Result<(), Mismatch> {
        let mut ports = self.ports_of_link_type(candidate);
        let mut hidden = None;
        for Criterion { key, about, test } in CRITERIA {
            let Some(wanted) = test.wanted(self) else {
                continue;
            };
            if let Err(found) = test.check(self, candidate, &mut ports) {
                let mismatch = mismatch(key, wanted, &found);
                if about.is_visible(candidate) {
                    return Err(mismatch);
                }
                hidden.get_or_insert(mismatch);
            }
        }
        for selector in &self.not {
            let excluded = || mismatch("not", selector.to_string(), &[]);
            match selector.check(candidate) {
                Ok(()) => return Err(excluded()),
                Err(unsure) if unsure.hidden => drop(hidden.get_or_insert_with(excluded)),
                Err(_) => {}
            }
        }
        match hidden {
            Some(mismatch) => Err(Mismatch {
                hidden: true,
                ..mismatch
            }),
            None => Ok(()),
        }
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

fn any_matches(patterns: &[Pattern], word: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(word))
}

fn of_devices(hca: &Candidate, value: fn(&RdmaDevice) -> Option<String>) -> Vec<String> {
    hca.rdma_devices.iter().filter_map(value).collect()
}

fn of_pci(hca: &Candidate, value: fn(&PciFunction) -> String) -> Vec<String> {
    hca.pci.iter().map(value).collect()
}

fn rate_mbps(port: &Port) -> Option<u32> {
    Some(port.rate.as_ref()?.mbps)
}

/// Partition keys without the membership bit.
fn partitions(port: &Port) -> impl Iterator<Item = u16> {
    port.pkeys.iter().map(|(_, key)| key & 0x7fff)
}

fn acpi_index(hca: &Candidate) -> Option<String> {
    Some(hca.pci.as_ref()?.acpi_index?.to_string())
}

fn pf_names(hca: &Candidate) -> Vec<String> {
    let bonded = hca.function() == Function::Physical;
    let bond_names = hca.bond_names.iter().filter(|_| bonded);
    hca.pf_netdevs.iter().chain(bond_names).cloned().collect()
}

fn pf_address(hca: &Candidate) -> Vec<String> {
    hca.pf().iter().map(ToString::to_string).collect()
}

/// Names of a PF with the number of the VF or SF.
fn numbered(hca: &Candidate, names: &[String]) -> Vec<String> {
    let index = hca.function().index();
    let number = index.map(|index| format!("#{index}")).unwrap_or_default();
    names.iter().map(|name| format!("{name}{number}")).collect()
}

fn pkeys(keys: impl Iterator<Item = u16>) -> impl Iterator<Item = String> {
    keys.map(|key| format!("{key:#06x}"))
}

impl FunctionKind {
    fn word(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(_, kind)| *kind == self)
            .map_or("", |(word, _)| word)
    }
}

/// Whether an entry names the PF (by one of `names`) and the number of this VF or SF.
fn owned(entries: &[Owner], rule: OwnerRule, hca: &Candidate, names: &[String]) -> bool {
    let index = hca.function().index();
    let in_range = |entry: &Owner| match &entry.indexes {
        None => true,
        Some(range) => index.is_some_and(|index| range.contains(index)),
    };
    let mut naming = entries
        .iter()
        .filter(|entry| names.iter().any(|name| entry.pf.matches(name)));
    match rule {
        OwnerRule::Any => naming.any(in_range),
        OwnerRule::First => naming.next().is_some_and(in_range),
    }
}

fn mismatch(criterion: &'static str, wanted: String, found: &[String]) -> Mismatch {
    let found = if found.is_empty() {
        "none".into()
    } else {
        found.join(", ")
    };
    Mismatch {
        criterion,
        wanted,
        found,
        hidden: false,
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

fn rate(mbps: Option<u32>) -> String {
    match mbps {
        None => "unknown".into(),
        Some(mbps) if mbps % 1000 == 0 => format!("{}G", mbps / 1000),
        Some(mbps) => format!("{mbps}M"),
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

    fn contains(self, mbps: u32) -> bool {
        (self.min_mbps..=self.max_mbps).contains(&mbps)
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

impl fmt::Display for SpeedRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (rate(Some(self.min_mbps)), rate(Some(self.max_mbps)));
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
        let criteria = CRITERIA.iter().map(|c| (c.key, c.test.wanted(self)));
        let criteria = criteria.chain([("not", not)]);
        let text: Vec<String> = criteria
            .filter_map(|(key, wanted)| Some(format!("{key}: {}", wanted?)))
            .collect();
        formatter.write_str(&text.join("; "))
    }
}

#[cfg(test)]
mod tests;
