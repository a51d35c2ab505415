//! Which HCAs belong to a pool.
//!
//! Inside one list any entry will do; all lists that are present have to agree. Criteria about a
//! port (`ports`, `linkSpeed`, `pKeys`, and `linkTypes` of an HCA without netdev) have to hold for
//! one and the same port.

use std::fmt;

use node::pattern::Pattern;

use super::range::RangeSet;
use crate::candidate::{Candidate, Function, Port};

/// A conjunction of criteria; an empty list imposes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selector {
    /// PCI vendor, four hex digits.
    pub vendors: Vec<Pattern>,
    /// PCI device, four hex digits.
    pub device_ids: Vec<Pattern>,
    /// PCI driver.
    pub drivers: Vec<Pattern>,
    /// Netdev name on the host.
    pub if_names: Vec<Pattern>,
    /// Link encapsulation, by its word.
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
    pub owners: OwnerRule,
    /// Partition keys without the membership bit.
    pub pkeys: Vec<u16>,
    /// RDMA device name.
    pub rdma_devices: Vec<Pattern>,
    /// Node or port GUID, sixteen hex digits.
    pub guids: Vec<Pattern>,
    /// Port numbers.
    pub ports: RangeSet,
    /// NUMA nodes.
    pub numa_nodes: RangeSet,
    /// Port rates.
    pub link_speed: Vec<SpeedRange>,
    /// Firmware version.
    pub firmware: Vec<Pattern>,
    /// Board or PSID.
    pub board_ids: Vec<Pattern>,
    /// `pf`, `vf`, `sf`, `software`.
    pub functions: Vec<FunctionKind>,
    /// None of these may match.
    pub not: Vec<Selector>,
}

/// An entry of `pfNames` or `rootDevices`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// PF name or address.
    pub pf: Pattern,
    /// VF or SF numbers; `None` is all, and the PF itself.
    pub indexes: Option<RangeSet>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeedRange {
    /// Least.
    pub min_mbps: u32,
    /// Most.
    pub max_mbps: u32,
}

/// A function kind without its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Why an HCA is not selected: the first criterion that it fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Key of the criterion as written in configuration files.
    pub criterion: &'static str,
    /// What the configuration asks for.
    pub wanted: String,
    /// What the HCA has.
    pub found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            criterion,
            wanted,
            found,
        } = self;
        if *criterion == "not" {
            return write!(formatter, "excluded by \"not\": {wanted}");
        }
        write!(formatter, "{criterion}: wanted {wanted}, found {found}")
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
        let pci = candidate.pci.as_ref();
        let rdma = &candidate.rdma_devices;
        let one = |text: Option<&str>| text.map(str::to_owned).into_iter().collect::<Vec<_>>();

        words("rdmaDevices", &self.rdma_devices, || {
            rdma.iter().map(|device| device.name.clone()).collect()
        })?;
        words("ifNames", &self.if_names, || {
            candidate
                .netdevs
                .iter()
                .map(|netdev| netdev.name.clone())
                .collect()
        })?;
        words("pciAddresses", &self.pci_addresses, || {
            one(pci.map(|p| p.address.as_str()))
        })?;
        words("vendors", &self.vendors, || {
            one(pci.map(|p| p.vendor.as_str()))
        })?;
        words("deviceIDs", &self.device_ids, || {
            one(pci.map(|p| p.device.as_str()))
        })?;
        words("drivers", &self.drivers, || candidate.drivers.clone())?;
        words("acpiIndexes", &self.acpi_indexes, || {
            let index = pci.and_then(|p| p.acpi_index.as_deref());
            // The SR-IOV plugin's `[""]`: a function without an index. A pattern of ours that
            // matches everything does not match what is not there.
            let none = self.acpi_indexes.contains(&Pattern::Exact(String::new()));
            one(index.or(none.then_some("")))
        })?;
        words("guids", &self.guids, || {
            let port_guids = rdma
                .iter()
                .flat_map(|d| d.ports.iter().filter_map(|p| p.guid.clone()));
            rdma.iter()
                .map(|d| d.node_guid.clone())
                .chain(port_guids)
                .collect()
        })?;
        words("firmware", &self.firmware, || {
            rdma.iter().map(|d| d.firmware.clone()).collect()
        })?;
        words("boardIDs", &self.board_ids, || {
            rdma.iter().map(|d| d.board_id.clone()).collect()
        })?;
        self.check_function(candidate)?;
        self.check_owner(candidate)?;
        if !self.numa_nodes.is_empty()
            && !candidate
                .numa_node
                .is_some_and(|node| self.numa_nodes.contains(node))
        {
            return Err(Mismatch {
                criterion: "numaNodes",
                wanted: self.numa_nodes.to_string(),
                found: candidate
                    .numa_node
                    .map_or("none".into(), |node| node.to_string()),
            });
        }
        self.check_ports(candidate)?;
        match self.not.iter().find(|selector| selector.matches(candidate)) {
            Some(selector) => Err(Mismatch {
                criterion: "not",
                wanted: selector.to_string(),
                found: String::new(),
            }),
            None => Ok(()),
        }
    }

    fn check_function(&self, candidate: &Candidate) -> Result<(), Mismatch> {
        if self.functions.is_empty()
            || self
                .functions
                .iter()
                .any(|kind| kind.covers(candidate.function))
        {
            return Ok(());
        }
        Err(Mismatch {
            criterion: "functions",
            wanted: alternatives(self.functions.iter().map(|kind| kind.word())),
            found: candidate.function.word().into(),
        })
    }

    fn check_owner(&self, candidate: &Candidate) -> Result<(), Mismatch> {
        let netdevs = candidate
            .pf
            .iter()
            .flat_map(|pf| pf.netdevs.iter().map(String::as_str));
        owned(
            "pfNames",
            &self.pf_names,
            self.owners,
            candidate,
            &netdevs.collect::<Vec<_>>(),
        )?;
        let address = candidate
            .pf
            .iter()
            .map(|pf| pf.address.as_str())
            .collect::<Vec<_>>();
        owned(
            "rootDevices",
            &self.root_devices,
            self.owners,
            candidate,
            &address,
        )
    }

    /// Port criteria: netdevs decide the link type where there are any, one port all the rest.
    fn check_ports(&self, candidate: &Candidate) -> Result<(), Mismatch> {
        let by_netdev = !candidate.netdevs.is_empty();
        if by_netdev {
            words("linkTypes", &self.link_types, || {
                candidate
                    .netdevs
                    .iter()
                    .map(|netdev| netdev.link_type.word().into())
                    .collect()
            })?;
        }
        let mut ports: Vec<&Port> = candidate
            .rdma_devices
            .iter()
            .flat_map(|device| &device.ports)
            .collect();
        if !by_netdev && !self.link_types.is_empty() {
            let types: Vec<String> = ports
                .iter()
                .map(|port| port.link_type.word().into())
                .collect();
            ports.retain(|port| {
                self.link_types
                    .iter()
                    .any(|pattern| pattern.matches(port.link_type.word()))
            });
            if ports.is_empty() {
                return Err(mismatch(
                    "linkTypes",
                    alternatives(self.link_types.iter()),
                    &types,
                ));
            }
        }
        if !self.ports.is_empty() {
            let numbers: Vec<String> = ports.iter().map(|port| port.number.to_string()).collect();
            ports.retain(|port| self.ports.contains(port.number));
            if ports.is_empty() {
                return Err(mismatch("ports", self.ports.to_string(), &numbers));
            }
        }
        if !self.link_speed.is_empty() {
            let rates: Vec<String> = ports.iter().map(|port| rate(port.rate_mbps)).collect();
            ports.retain(|port| {
                port.rate_mbps
                    .is_some_and(|rate| self.link_speed.iter().any(|range| range.contains(rate)))
            });
            if ports.is_empty() {
                let wanted = alternatives(self.link_speed.iter());
                return Err(mismatch("linkSpeed", wanted, &rates));
            }
        }
        if !self.pkeys.is_empty() {
            let keys: Vec<String> = ports
                .iter()
                .flat_map(|p| p.pkeys.iter().map(|k| format!("{k:#06x}")))
                .collect();
            if !ports
                .iter()
                .any(|port| port.pkeys.iter().any(|key| self.pkeys.contains(key)))
            {
                let wanted = alternatives(self.pkeys.iter().map(|key| format!("{key:#06x}")));
                return Err(mismatch("pKeys", wanted, &keys));
            }
        }
        Ok(())
    }
}

impl FunctionKind {
    fn word(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(_, kind)| *kind == self)
            .map_or("", |(word, _)| word)
    }
}

/// A list of word patterns against the words that the HCA has for it.
fn words(
    criterion: &'static str,
    patterns: &[Pattern],
    found: impl FnOnce() -> Vec<String>,
) -> Result<(), Mismatch> {
    if patterns.is_empty() {
        return Ok(());
    }
    let found = found();
    if found
        .iter()
        .any(|word| patterns.iter().any(|pattern| pattern.matches(word)))
    {
        return Ok(());
    }
    Err(mismatch(criterion, alternatives(patterns.iter()), &found))
}

fn owned(
    criterion: &'static str,
    entries: &[Owner],
    rule: OwnerRule,
    candidate: &Candidate,
    names: &[&str],
) -> Result<(), Mismatch> {
    if entries.is_empty() {
        return Ok(());
    }
    let index = candidate.function.index();
    let in_range = |entry: &Owner| match &entry.indexes {
        None => true,
        Some(range) => index.is_some_and(|index| range.contains(index)),
    };
    let mut naming = entries
        .iter()
        .filter(|entry| names.iter().any(|name| entry.pf.matches(name)));
    let matched = match rule {
        OwnerRule::Any => naming.any(in_range),
        OwnerRule::First => naming.next().is_some_and(in_range),
    };
    if matched {
        return Ok(());
    }
    let number = index.map(|index| format!("#{index}")).unwrap_or_default();
    let found: Vec<String> = names.iter().map(|name| format!("{name}{number}")).collect();
    Err(mismatch(criterion, alternatives(entries.iter()), &found))
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
    }
}

fn alternatives(words: impl Iterator<Item = impl ToString>) -> String {
    words
        .map(|word| word.to_string())
        .collect::<Vec<_>>()
        .join(" or ")
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
        let join = |patterns: &[Pattern]| alternatives(patterns.iter());
        let criteria = [
            ("rdmaDevices", join(&self.rdma_devices)),
            ("ifNames", join(&self.if_names)),
            ("pciAddresses", join(&self.pci_addresses)),
            ("vendors", join(&self.vendors)),
            ("deviceIDs", join(&self.device_ids)),
            ("drivers", join(&self.drivers)),
            ("acpiIndexes", join(&self.acpi_indexes)),
            ("guids", join(&self.guids)),
            ("firmware", join(&self.firmware)),
            ("boardIDs", join(&self.board_ids)),
            (
                "functions",
                alternatives(self.functions.iter().map(|kind| kind.word())),
            ),
            ("pfNames", alternatives(self.pf_names.iter())),
            ("rootDevices", alternatives(self.root_devices.iter())),
            ("numaNodes", self.numa_nodes.to_string()),
            ("linkTypes", join(&self.link_types)),
            ("ports", self.ports.to_string()),
            ("linkSpeed", alternatives(self.link_speed.iter())),
            (
                "pKeys",
                alternatives(self.pkeys.iter().map(|key| format!("{key:#06x}"))),
            ),
            (
                "not",
                alternatives(self.not.iter().map(|not| format!("({not})"))),
            ),
        ];
        let set = criteria.iter().filter(|(_, text)| !text.is_empty());
        let text: Vec<String> = set.map(|(key, text)| format!("{key}: {text}")).collect();
        formatter.write_str(&text.join("; "))
    }
}

#[cfg(test)]
mod tests;
