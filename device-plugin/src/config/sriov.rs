//! Reader of the SR-IOV network device plugin's file (`resourceList`).
//!
//! Of that plugin's devices this one serves those with RDMA: `netDevice` and `auxNetDevice` whose
//! selectors say `isRdma`. Anything else is refused by name; it can stay with that plugin, which
//! runs beside this one. As there, HCAs go to the first selector and the first resource of the file
//! that chooses them; a physical function with virtual ones and a netdev with the default route are
//! left out.
//!
//! Departures, each on purpose: a resource whose selectors cannot be read is an error where that
//! plugin drops it; a pool is served while it is still empty; device names may also be matched on
//! functions that are in another network namespace.

use std::collections::BTreeMap;

use super::gojson::{self, Value};
use super::model::{
    Config, DEFAULT_RESCAN, Damping, Delivery, Format, NodeRule, Policy, PoolConfig,
    PortHealth, Sharing, Spare,
};
use super::pattern::Pattern;
use super::range::RangeSet;
use super::resource::ResourceName;
use super::selector::{FunctionKind, Owner, OwnerRule, Selector};
use super::{Findings, Problems};

/// Prefix of a resource that names none.
pub const DEFAULT_PREFIX: &str = "intel.com";

const TOP_KEYS: [&str; 1] = ["resourceList"];
const POOL_KEYS: [&str; 6] = [
    "resourceName",
    "resourcePrefix",
    "deviceType",
    "excludeTopology",
    "selectors",
    "additionalInfo",
];
const SELECTOR_KEYS: [&str; 14] = [
    "vendors",
    "devices",
    "drivers",
    "pciAddresses",
    "acpiIndexes",
    "pfNames",
    "rootDevices",
    "linkTypes",
    "pKeys",
    "isRdma",
    "needVhostNet",
    "auxTypes",
    "ddpProfiles",
    "vdpaType",
];
/// Nodes of `needVhostNet`.
const VHOST_NODES: [&str; 2] = ["/dev/vhost-net", "/dev/net/tun"];

/// Reads a parsed document; `prefix` is for resources that name none.
pub fn read(document: &Value, prefix: &str) -> Result<Config, Problems> {
    let mut findings = Findings::default();
    let mut list: &[Value] = &[];
    for (key, value) in document.fields("").map_err(Problems::one)? {
        match gojson::resolve(&TOP_KEYS, key) {
            Some(_) => list = findings.keep(value.elements(key)).unwrap_or_default(),
            None => findings.warn(gojson::unknown_key("", key, &TOP_KEYS)),
        }
    }
    if list.is_empty() && findings.problems.is_empty() {
        findings.problem("resourceList is empty; it needs at least one resource");
    }
    let pools = list
        .iter()
        .enumerate()
        .filter_map(|(i, value)| {
            read_pool(value, &format!("resourceList[{i}]"), prefix, &mut findings)
        })
        .collect();
    let rescan = Some(DEFAULT_RESCAN);
    findings.conclude(Config {
        format: Format::Sriov,
        rescan,
        damping: Damping::default(),
        pools,
        warnings: Vec::new(),
    })
}

/// Kinds of devices of that plugin that are served here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeviceType {
    Net,
    AuxNet,
}

#[derive(Default)]
struct Entry<'v> {
    name: String,
    prefix: String,
    device_type: String,
    exclude_topology: bool,
    selectors: Option<&'v Value>,
    additional_info: BTreeMap<String, BTreeMap<String, String>>,
}

fn read_pool(
    value: &Value,
    path: &str,
    prefix: &str,
    findings: &mut Findings,
) -> Option<PoolConfig> {
    let before = findings.problems.len();
    let entry = read_entry(value, path, findings)?;
    let resource = resource_name(&entry, path, prefix, findings);
    let device_type = device_type(&entry.device_type, path, findings)?;
    let criteria = read_selectors(entry.selectors, path, findings)?;
    let alternatives: Vec<Selector> = criteria
        .iter()
        .enumerate()
        .map(|(i, one)| {
            let at = if criteria.len() == 1 {
                format!("{path}.selectors")
            } else {
                format!("{path}.selectors[{i}]")
            };
            one.check(device_type, &at, findings);
            one.selector(device_type, &at, findings)
        })
        .collect();
    if findings.problems.len() > before {
        return None;
    }
    let vhost = criteria.iter().any(|one| one.need_vhost_net);
    Some(PoolConfig {
        resource: resource?,
        sharing: Sharing::Exclusive {
            policy: Policy::default(),
        },
        selectors: alternatives,
        nodes: NodeRule::everything(),
        exclude_topology: entry.exclude_topology,
        delivery: Delivery::default(),
        spare: Spare::WHAT_IS_IN_USE,
        port_health: PortHealth::Ignored,
        link_up: false,
        extra_nodes: VHOST_NODES
            .iter()
            .filter(|_| vhost)
            .map(ToString::to_string)
            .collect(),
        additional_info: entry.additional_info,
    })
}

fn read_entry<'v>(value: &'v Value, path: &str, findings: &mut Findings) -> Option<Entry<'v>> {
    let mut entry = Entry::default();
    for (key, value) in findings.keep(value.fields(path))? {
        let at = format!("{path}.{key}");
        let field = gojson::resolve(&POOL_KEYS, key);
        if *value == Value::Null && field.is_some() {
            continue;
        }
        match field {
            Some("resourceName") => entry.name = findings.keep(value.string(&at))?,
            Some("resourcePrefix") => entry.prefix = findings.keep(value.string(&at))?,
            Some("deviceType") => entry.device_type = findings.keep(value.string(&at))?,
            Some("excludeTopology") => {
                entry.exclude_topology = findings.keep(value.boolean(&at))?;
            }
            Some("selectors") => entry.selectors = Some(value),
            Some("additionalInfo") => {
                entry
                    .additional_info
                    .extend(additional_info(value, &at, findings)?);
            }
            _ => findings.warn(gojson::unknown_key(path, key, &POOL_KEYS)),
        }
    }
    Some(entry)
}

fn additional_info(
    value: &Value,
    path: &str,
    findings: &mut Findings,
) -> Option<BTreeMap<String, BTreeMap<String, String>>> {
    let mut devices = BTreeMap::new();
    for (device, facts) in findings.keep(value.fields(path))? {
        let at = format!("{path}.{device}");
        let mut told = BTreeMap::new();
        for (key, text) in findings.keep(facts.fields(&at))? {
            told.insert(
                key.clone(),
                findings.keep(text.string(&format!("{at}.{key}")))?,
            );
        }
        devices.insert(device.clone(), told);
    }
    Some(devices)
}

fn resource_name(
    entry: &Entry<'_>,
    path: &str,
    default_prefix: &str,
    findings: &mut Findings,
) -> Option<ResourceName> {
    if entry.name.is_empty() {
        findings.problem(format!("{path}: resourceName is missing"));
        return None;
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if let Some(bad) = entry.name.chars().find(|c| !legal(*c)) {
        findings.problem(format!(
            "{path}: resourceName {:?} has the character {bad:?}; letters, digits, \"_\" and \"-\" \
             are allowed",
            entry.name
        ));
        return None;
    }
    let prefix = if entry.prefix.is_empty() {
        default_prefix
    } else {
        &entry.prefix
    };
    let parsed = ResourceName::parse(&format!("{prefix}/{}", entry.name));
    findings.keep(parsed.map_err(|error| format!("{path}: {error}")))
}

fn device_type(word: &str, path: &str, findings: &mut Findings) -> Option<DeviceType> {
    match word {
        "" | "netDevice" => Some(DeviceType::Net),
        "auxNetDevice" => Some(DeviceType::AuxNet),
        "accelerator" => {
            findings.problem(format!(
                "{path}: deviceType accelerator is not served here; keep this resource with the \
                 SR-IOV network device plugin"
            ));
            None
        }
        other => {
            findings.problem(format!(
                "{path}: deviceType {other:?} is unknown; netDevice and auxNetDevice are served"
            ));
            None
        }
    }
}

/// The fields of one selectors object.
#[derive(Default)]
struct Criteria {
    vendors: Vec<String>,
    devices: Vec<String>,
    drivers: Vec<String>,
    pci_addresses: Vec<String>,
    acpi_indexes: Vec<String>,
    pf_names: Vec<String>,
    root_devices: Vec<String>,
    link_types: Vec<String>,
    pkeys: Vec<String>,
    aux_types: Vec<String>,
    ddp_profiles: Vec<String>,
    vdpa_type: String,
    is_rdma: bool,
    need_vhost_net: bool,
}

/// One object, or a list of alternatives.
fn read_selectors(
    value: Option<&Value>,
    path: &str,
    findings: &mut Findings,
) -> Option<Vec<Criteria>> {
    let path = format!("{path}.selectors");
    let Some(value) = value else {
        findings.problem(format!(
            "{path} is missing; give an object, or a list of alternatives"
        ));
        return None;
    };
    let Value::Array(list) = value else {
        return Some(vec![read_criteria(value, &path, findings)?]);
    };
    if list.is_empty() {
        findings.problem(format!("{path} is an empty list"));
        return None;
    }
    let read = |(i, value)| read_criteria(value, &format!("{path}[{i}]"), findings);
    list.iter().enumerate().map(read).collect()
}

fn read_criteria(value: &Value, path: &str, findings: &mut Findings) -> Option<Criteria> {
    let mut read = Criteria::default();
    for (key, value) in findings.keep(value.fields(path))? {
        let at = format!("{path}.{key}");
        let field = gojson::resolve(&SELECTOR_KEYS, key);
        let list = match field {
            Some("vendors") => &mut read.vendors,
            Some("devices") => &mut read.devices,
            Some("drivers") => &mut read.drivers,
            Some("pciAddresses") => &mut read.pci_addresses,
            Some("acpiIndexes") => &mut read.acpi_indexes,
            Some("pfNames") => &mut read.pf_names,
            Some("rootDevices") => &mut read.root_devices,
            Some("linkTypes") => &mut read.link_types,
            Some("pKeys") => &mut read.pkeys,
            Some("auxTypes") => &mut read.aux_types,
            Some("ddpProfiles") => &mut read.ddp_profiles,
            Some("isRdma" | "needVhostNet" | "vdpaType") if *value == Value::Null => continue,
            Some("isRdma") => {
                read.is_rdma = findings.keep(value.boolean(&at))?;
                continue;
            }
            Some("needVhostNet") => {
                read.need_vhost_net = findings.keep(value.boolean(&at))?;
                continue;
            }
            Some("vdpaType") => {
                read.vdpa_type = findings.keep(value.string(&at))?;
                continue;
            }
            _ => {
                findings.warn(gojson::unknown_key(path, key, &SELECTOR_KEYS));
                continue;
            }
        };
        *list = findings.keep(value.strings(&at))?;
    }
    Some(read)
}

impl Criteria {
    /// Refuses what is not served here.
    fn check(&self, device_type: DeviceType, path: &str, findings: &mut Findings) {
        if !self.vdpa_type.is_empty() {
            findings.problem(format!(
                "{path}: vdpaType {:?} is not served here, and vDPA devices have no RDMA; keep this \
                 resource with the SR-IOV network device plugin",
                self.vdpa_type
            ));
        } else if !self.is_rdma {
            findings.problem(format!(
                "{path}: isRdma is not true; this plugin serves RDMA devices, keep this resource \
                 with the SR-IOV network device plugin"
            ));
        }
        if !self.ddp_profiles.is_empty() {
            findings.problem(format!(
                "{path}: ddpProfiles are not read here; select by pciAddresses or pfNames"
            ));
        }
        match device_type {
            DeviceType::Net if !self.aux_types.is_empty() => {
                findings.warn(format!("{path}: auxTypes means nothing for a netDevice"));
            }
            DeviceType::AuxNet if self.aux_types.is_empty() => findings.problem(format!(
                "{path}: auxTypes is missing; an auxNetDevice needs auxTypes: [\"sf\"]"
            )),
            DeviceType::AuxNet => {
                for word in self.aux_types.iter().filter(|word| *word != "sf") {
                    findings.problem(format!("{path}: auxTypes {word:?} is unknown; sf is known"));
                }
                let unused = [
                    ("pciAddresses", &self.pci_addresses),
                    ("acpiIndexes", &self.acpi_indexes),
                    ("pKeys", &self.pkeys),
                ];
                for (key, _) in unused.iter().filter(|(_, list)| !list.is_empty()) {
                    findings.warn(format!("{path}: {key} means nothing for an auxNetDevice"));
                }
            }
            DeviceType::Net => {}
        }
        if self.link_types.len() > 1 {
            findings.warn(format!(
                "{path}: linkTypes mixes HCAs of different networks in one pool"
            ));
        }
    }

    fn selector(&self, device_type: DeviceType, path: &str, findings: &mut Findings) -> Selector {
        let exact = |words: &[String]| words.iter().cloned().map(Pattern::Exact).collect();
        // What that plugin does not look at for auxiliary devices is not looked at here.
        let of_net = |words: &[String]| match device_type {
            DeviceType::Net => exact(words),
            DeviceType::AuxNet => Vec::new(),
        };
        Selector {
            vendors: exact(&self.vendors),
            device_ids: exact(&self.devices),
            drivers: exact(&self.drivers),
            pci_addresses: of_net(&self.pci_addresses),
            acpi_indexes: of_net(&self.acpi_indexes),
            pf_names: owners(&self.pf_names, path, findings),
            root_devices: owners(&self.root_devices, path, findings),
            owners: OwnerRule::First,
            link_types: exact(&self.link_types),
            pkeys: match device_type {
                DeviceType::Net => pkeys(&self.pkeys, path, findings),
                DeviceType::AuxNet => Vec::new(),
            },
            functions: match device_type {
                DeviceType::Net => vec![FunctionKind::Pf, FunctionKind::Vf],
                DeviceType::AuxNet => vec![FunctionKind::Sf],
            },
            ..Selector::default()
        }
    }
}

/// `ens1f0`, `ens1f0#0-3,7`. A part that is no range ends the list with a warning, as there.
fn owners(words: &[String], path: &str, findings: &mut Findings) -> Vec<Owner> {
    let mut read = |word: &String| {
        let (name, indexes) = match word.split_once('#') {
            None => (word.as_str(), None),
            Some((name, parts)) => {
                let mut set = RangeSet::default();
                for part in parts.split(',') {
                    match RangeSet::parse(part) {
                        Ok(range) => set.extend(range),
                        Err(error) => {
                            findings.warn(format!(
                                "{path}: {word:?}: {error}; this and what follows matches nothing"
                            ));
                            break;
                        }
                    }
                }
                (name, Some(set))
            }
        };
        Owner {
            pf: Pattern::Folded(name.into()),
            indexes,
        }
    };
    words.iter().map(&mut read).collect()
}

fn pkeys(words: &[String], path: &str, findings: &mut Findings) -> Vec<u16> {
    let mut read = |word: &String| {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let key = u16::from_str_radix(digits, 16).map(|key| key & 0x7fff);
        key.map_err(|_| {
            findings.problem(format!("{path}: partition key {word:?} is not hexadecimal"))
        })
        .ok()
    };
    words.iter().filter_map(&mut read).collect()
}

#[cfg(test)]
mod tests;
