//! Reader of the SR-IOV network device plugin's file (`resourceList`).
//!
//! Of that plugin's devices this one serves those with RDMA: `netDevice` and `auxNetDevice` whose
//! selectors say `isRdma`. Any other resource is left to that plugin, with a warning; a file that has
//! no resource with RDMA is refused. As there, HCAs go to the first selector and the first resource of the file
//! that chooses them; a physical function with virtual ones and a netdev with the default route are
//! left out.
//!
//! Departures, each on purpose: a file with one wrong resource is refused; a pool is served while it is still empty; device names may also be matched on
//! functions that are in another network namespace.

use std::collections::{BTreeMap, BTreeSet};

use hca::FunctionKind;
use node::json::{self, Value};
use node::pattern::Pattern;
use serde::Deserialize;

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Exclude, Format, Policy, PoolConfig, Sharing, TUN, VHOST_NET,
    Variables,
};
use super::problems::Problems;
use super::range::RangeSet;
use super::selector::{Asked, Matcher, Selector, pkey_word};

/// Prefix of a resource that names none.
pub const DEFAULT_PREFIX: &str = "intel.com";

/// Nodes of `needVhostNet`.
const VHOST_NODES: [&str; 2] = [VHOST_NET, TUN];

/// Reads a parsed document; `prefix` is for resources that name none.
pub fn read(document: &Value, prefix: &str) -> Result<Config, Problems> {
    let mut findings = Problems::default();
    let decoded = json::decode(document, "", &mut findings.warnings);
    let file: File = decoded.map_err(Problems::one)?;
    let read = |value: &Value, path: &str, findings: &mut Problems| {
        read_pool(value, path, prefix, findings)
    };
    let pools = findings.pools("resourceList", &file.resource_list, read);
    if pools.is_empty() && findings.problems.is_empty() {
        findings.problem(
            "no resource of this file has RDMA, so all of it is left to the SR-IOV network device \
             plugin; resources with \"isRdma\": true are served here",
        );
    }
    let rescan = Some(DEFAULT_RESCAN_INTERVAL);
    findings.conclude(Format::Sriov, rescan, pools)
}

/// Kinds of devices of that plugin that are served here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeviceType {
    Net,
    AuxNet,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct File {
    resource_list: Vec<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Entry {
    resource_name: String,
    resource_prefix: String,
    device_type: String,
    exclude_topology: bool,
    selectors: Option<Value>,
    additional_info: BTreeMap<String, BTreeMap<String, String>>,
}

fn read_pool(
    value: &Value,
    path: &str,
    prefix: &str,
    findings: &mut Problems,
) -> Option<PoolConfig> {
    let entry: Entry = findings.decode(value, path)?;
    let leave = |why: &str| {
        format!(
            "{path}: resource {:?} is left to the SR-IOV network device plugin: {why}",
            entry.resource_name
        )
    };
    if entry.device_type == "accelerator" {
        findings.warn(leave("accelerators have no RDMA"));
        return None;
    }
    let criteria = read_selectors(entry.selectors.as_ref(), path, findings);
    let of_rdma = |all: &Vec<Criteria>| all.iter().any(|one| one.is_rdma);
    if criteria.as_ref().is_some_and(|all| !of_rdma(all)) {
        findings.warn(leave("isRdma is not true"));
        return None;
    }
    let prefix = (entry.resource_prefix.as_str(), prefix);
    let resource = findings.resource(path, prefix, &entry.resource_name, "_-");
    let device_type = device_type(&entry.device_type, path, findings);
    let (device_type, criteria) = (device_type?, criteria?);
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
    let vhost = criteria.iter().any(|one| one.need_vhost_net);
    let sharing = Sharing::Exclusive {
        policy: Policy::default(),
    };
    Some(PoolConfig {
        exclude_topology: entry.exclude_topology,
        exclude: Exclude::IN_USE.to_vec(),
        extra_nodes: VHOST_NODES
            .iter()
            .filter(|_| vhost)
            .map(ToString::to_string)
            .collect(),
        additional_info: entry.additional_info,
        variables: Variables::Sriov,
        ..PoolConfig::new(resource?, sharing, alternatives)
    })
}

fn device_type(word: &str, path: &str, findings: &mut Problems) -> Option<DeviceType> {
    match word {
        "" | "netDevice" => Some(DeviceType::Net),
        "auxNetDevice" => Some(DeviceType::AuxNet),
        other => {
            findings.problem(format!(
                "{path}: deviceType {other:?} is unknown; netDevice and auxNetDevice are served"
            ));
            None
        }
    }
}

/// One selectors object.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Criteria {
    vendors: Vec<String>,
    devices: Vec<String>,
    drivers: Vec<String>,
    pci_addresses: Vec<String>,
    acpi_indexes: Vec<String>,
    pf_names: Vec<String>,
    root_devices: Vec<String>,
    link_types: Vec<String>,
    p_keys: Vec<String>,
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
    findings: &mut Problems,
) -> Option<Vec<Criteria>> {
    let path = format!("{path}.selectors");
    let Some(value) = value else {
        findings.problem(format!(
            "{path} is missing; give an object, or a list of alternatives"
        ));
        return None;
    };
    let Value::Array(list) = value else {
        return Some(vec![findings.decode(value, &path)?]);
    };
    if list.is_empty() {
        findings.problem(format!("{path} is an empty list"));
        return None;
    }
    let read = |(i, value)| findings.decode(value, &format!("{path}[{i}]"));
    list.iter().enumerate().map(read).collect()
}

impl Criteria {
    /// Refuses what is not served here.
    fn check(&self, device_type: DeviceType, path: &str, findings: &mut Problems) {
        if !self.vdpa_type.is_empty() {
            findings.problem(format!(
                "{path}: vdpaType {:?} is not served here, and vDPA devices have no RDMA; keep them \
                 in a resource of their own with the SR-IOV network device plugin",
                self.vdpa_type
            ));
        } else if !self.is_rdma {
            findings.problem(format!(
                "{path}: isRdma is not true, and other alternatives of this resource have it; this \
                 plugin serves RDMA devices, so give the others a resource of their own"
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
                    ("pKeys", &self.p_keys),
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

    fn selector(&self, device_type: DeviceType, path: &str, findings: &mut Problems) -> Selector {
        let exact = |words: &[String]| words.iter().map(Matcher::exact).collect();
        // What that plugin ignores for auxiliary devices is ignored here.
        let of_net = |words: Vec<Matcher>| match device_type {
            DeviceType::Net => words,
            DeviceType::AuxNet => Vec::new(),
        };
        let functions: &[FunctionKind] = match device_type {
            DeviceType::Net => &[FunctionKind::Pf, FunctionKind::Vf],
            DeviceType::AuxNet => &[FunctionKind::Sf],
        };
        let functions = functions.iter().map(|kind| Matcher::exact(kind.word()));
        Selector::of([
            ("vendors", exact(&self.vendors)),
            ("deviceIDs", exact(&self.devices)),
            ("drivers", exact(&self.drivers)),
            ("pciAddresses", of_net(exact(&self.pci_addresses))),
            ("acpiIndexes", of_net(exact(&self.acpi_indexes))),
            ("pfNames", owners(&self.pf_names, path, findings)),
            ("rootDevices", owners(&self.root_devices, path, findings)),
            ("linkTypes", exact(&self.link_types)),
            (
                "pKeys",
                of_net(pkeys(&self.p_keys, device_type, path, findings)),
            ),
            ("functions", functions.collect()),
        ])
    }
}

/// `ens1f0`, `ens1f0#0-3,7`. Of several entries that name one PF only the first counts there.
fn owners(words: &[String], path: &str, findings: &mut Problems) -> Vec<Matcher> {
    let mut named = BTreeSet::new();
    let mut owners = Vec::new();
    for word in words {
        let (name, indexes) = match word.split_once('#') {
            None => (word.as_str(), None),
            Some((name, parts)) => (name, Some(indexes(word, parts, path, findings))),
        };
        if named.insert(name.to_ascii_lowercase()) {
            let numbers = indexes.as_ref().map(|set| format!("#{set}"));
            let text = format!("{name}{}", numbers.unwrap_or_default());
            let asked = Asked::Owner(Pattern::Folded(name.into()), indexes);
            owners.push(Matcher::new(text, asked));
        }
    }
    owners
}

/// The function numbers behind `#`, as that plugin reads them: a part that is not a number ends the
/// list, a space makes a part no number, a range that runs backwards is empty, and a second `#`
/// spoils the whole entry. It says none of this; here each is warned of.
fn indexes(word: &str, parts: &str, path: &str, findings: &mut Problems) -> RangeSet {
    let mut set = RangeSet::default();
    if parts.contains('#') {
        findings.warn(format!(
            "{path}: {word:?} has a second \"#\" and matches nothing"
        ));
        return set;
    }
    // Functions are numbered far below 2^32, so a number that does not fit matches none of them.
    let number = |text: &str| -> Option<u32> {
        let number: i64 = text.parse().ok()?;
        Some(u32::try_from(number).unwrap_or(u32::MAX))
    };
    for part in parts.split(',') {
        let range = match part.split('-').collect::<Vec<_>>().as_slice() {
            [one] => number(one).map(|one| (one, one)),
            [low, high] => number(low).zip(number(high)),
            _ => None,
        };
        match range {
            Some((low, high)) if low <= high => set.extend(RangeSet::from_to(low, high)),
            Some(_) => findings.warn(format!(
                "{path}: {word:?}: range {part:?} runs backwards and matches nothing"
            )),
            None => {
                findings.warn(format!(
                    "{path}: {word:?}: {part:?} is neither a number nor a range; it and what follows \
                     matches nothing"
                ));
                break;
            }
        }
    }
    set
}

/// Partition keys without the membership bit. That plugin compares text, so a word that is no key
/// matches nothing; a list of such words still has to match nothing, and not everything.
fn pkeys(
    words: &[String],
    device_type: DeviceType,
    path: &str,
    findings: &mut Problems,
) -> Vec<Matcher> {
    let mut read = |word: &String| {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let key = u16::from_str_radix(digits, 16);
        if key.is_err() && device_type == DeviceType::Net {
            findings.warn(format!(
                "{path}: partition key {word:?} is not hexadecimal between 0x0001 and 0xffff and \
                 matches nothing"
            ));
        }
        Matcher::exact(pkey_word(key.unwrap_or(INVALID_PKEY)))
    };
    words.iter().map(&mut read).collect()
}

/// The invalid partition key, which is in no port's table (`InfiniBand` specification 10.9.1.1).
const INVALID_PKEY: u16 = 0;

#[cfg(test)]
mod tests;
