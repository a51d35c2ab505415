//! Reader of the RDMA shared device plugin's file (`configList`).
//!
//! A file that works there works here with the same resources, the same number of units, and all
//! HCAs of a pool for each unit. Departures, each on purpose:
//! - Names are unique by prefix and name, as that plugin's documentation says, where its code
//!   compares the name alone.
//! - A name or prefix that no kubelet accepts is an error here, not a failed registration later.
//! - An absent `rdmaHcaMax` derives the number of units from the GID table, where that plugin
//!   silently offers none. An explicit 0 still means none.
//! - Scalable functions, which that plugin does not see, join a pool only when `ifNames` asks for
//!   them by name: a vendor selector of an old file must not hand them to everybody. What is on no
//!   bus (soft RoCE, soft iWARP), which it does not see either, joins only by `drivers`, as
//!   `rdma_rxe`.
//! - More units than one message to the kubelet holds are lowered to what it holds, with a warning.
//! - A resource that is wrong is refused, and the others are served, where that plugin ends.

use std::collections::BTreeMap;
use std::time::Duration;

use node::gojson::{self, Value};
use node::pattern::Pattern;

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Damping, Delivery, Exclusion, Format, MAX_POOLED_UNITS,
    MAX_TIME, NodeRule, PoolConfig, PortHealth, Sharing, Variables,
};
use super::resource::ResourceName;
use super::selector::{FunctionKind, Selector};
use super::{Findings, Problems, spelling};

const TOP_KEYS: [&str; 2] = ["periodicUpdateInterval", "configList"];
const POOL_KEYS: [&str; 5] = [
    "resourceName",
    "resourcePrefix",
    "rdmaHcaMax",
    "devices",
    "selectors",
];
const SELECTOR_KEYS: [&str; 5] = ["vendors", "deviceIDs", "drivers", "ifNames", "linkTypes"];
const DEFAULT_PREFIX: &str = "rdma";

/// Reads a parsed document.
pub(crate) fn read(document: &Value) -> Result<Config, Problems> {
    let mut findings = Findings::default();
    let mut interval = None;
    let mut list: &[Value] = &[];
    for (key, value) in document.fields("").map_err(Problems::one)? {
        match gojson::resolve(&TOP_KEYS, key) {
            Some("periodicUpdateInterval") => {
                interval = findings.keep(value.integer(key)).flatten()
            }
            Some("configList") => list = findings.keep(value.elements(key)).unwrap_or_default(),
            _ => findings.warn(gojson::unknown_key("", key, &TOP_KEYS)),
        }
    }
    let rescan = match interval {
        None => Some(DEFAULT_RESCAN_INTERVAL),
        Some(0) => {
            findings.warn("periodicUpdateInterval is 0: periodic rescans are off");
            None
        }
        Some(seconds) => match u64::try_from(seconds) {
            Ok(seconds) if seconds <= MAX_TIME.as_secs() => Some(Duration::from_secs(seconds)),
            Ok(_) => {
                findings.warn(format!(
                    "periodicUpdateInterval is {seconds}, which is more than a day; the host is \
                     scanned once a day"
                ));
                Some(MAX_TIME)
            }
            Err(_) => {
                findings.problem(format!(
                    "periodicUpdateInterval is {seconds}; give seconds, 0 to switch rescans off, or \
                     leave it out for 60"
                ));
                None
            }
        },
    };
    if list.is_empty() && findings.problems.is_empty() {
        findings.problem("configList is empty; it needs at least one resource");
    }
    let pools = list
        .iter()
        .enumerate()
        .filter_map(|(i, value)| {
            findings.resource(|findings| read_pool(value, &format!("configList[{i}]"), findings))
        })
        .collect();
    findings.conclude(Config {
        format: Format::Rsdp,
        rescan,
        damping: Damping::default(),
        topology: crate::config::TopologyConfig::default(),
        pools,
        warnings: Vec::new(),
        refused: Vec::new(),
    })
}

/// The fields of one entry as Go's decoder would leave them.
#[derive(Default)]
struct Entry {
    name: String,
    prefix: String,
    hca_max: Option<i64>,
    devices: Vec<String>,
    vendors: Vec<String>,
    device_ids: Vec<String>,
    drivers: Vec<String>,
    if_names: Vec<String>,
    link_types: Vec<String>,
    /// Keys whose value is of another type than it should be.
    unreadable: Vec<&'static str>,
}

fn read_pool(value: &Value, path: &str, findings: &mut Findings) -> Option<PoolConfig> {
    let entry = read_entry(value, path, findings)?;
    // What could not be read is not called missing as well.
    let readable = |key: &str| !entry.unreadable.contains(&key);
    let resource = readable("resourceName")
        .then(|| resource_name(&entry, path, findings))
        .flatten();
    let units = readable("rdmaHcaMax")
        .then(|| units(entry.hca_max, path, findings))
        .flatten();
    let selector = (readable("devices") && readable("selectors"))
        .then(|| selector(entry, path, findings))
        .flatten();
    Some(PoolConfig {
        resource: resource?,
        sharing: Sharing::Pooled { units: units? },
        selectors: vec![selector?],
        nodes: NodeRule::everything(),
        exclude_topology: true,
        delivery: Delivery::default(),
        exclude: Exclusion::NONE,
        port_health: PortHealth::Ignored,
        wait_for: Vec::new(),
        optional: false,
        link_up: false,
        extra_nodes: Vec::new(),
        additional_info: BTreeMap::new(),
        variables: Variables::Shell,
    })
}

fn read_entry(value: &Value, path: &str, findings: &mut Findings) -> Option<Entry> {
    let mut entry = Entry::default();
    for (key, value) in findings.keep(value.fields(path))? {
        let at = format!("{path}.{key}");
        let field = gojson::resolve(&POOL_KEYS, key);
        if *value == Value::Null && field != Some("devices") && field.is_some() {
            // Go leaves a scalar or a struct as it was; a list becomes empty.
            continue;
        }
        let read = match field {
            Some("resourceName") => findings
                .keep(value.string(&at))
                .map(|read| entry.name = read),
            Some("resourcePrefix") => findings
                .keep(value.string(&at))
                .map(|read| entry.prefix = read),
            Some("rdmaHcaMax") => findings
                .keep(value.integer(&at))
                .map(|read| entry.hca_max = read),
            Some("devices") => findings
                .keep(value.strings(&at))
                .map(|read| entry.devices = read),
            Some("selectors") => read_selectors(value, &at, &mut entry, findings),
            _ => {
                findings.warn(gojson::unknown_key(path, key, &POOL_KEYS));
                continue;
            }
        };
        if read.is_none() {
            entry.unreadable.extend(field);
        }
    }
    Some(entry)
}

/// Fills the selector fields; an object that appears twice is merged, as Go decodes it.
fn read_selectors(
    value: &Value,
    path: &str,
    entry: &mut Entry,
    findings: &mut Findings,
) -> Option<()> {
    let mut readable = Some(());
    for (key, value) in findings.keep(value.fields(path))? {
        let list = match gojson::resolve(&SELECTOR_KEYS, key) {
            Some("vendors") => &mut entry.vendors,
            Some("deviceIDs") => &mut entry.device_ids,
            Some("drivers") => &mut entry.drivers,
            Some("ifNames") => &mut entry.if_names,
            Some("linkTypes") => &mut entry.link_types,
            _ => {
                findings.warn(gojson::unknown_key(path, key, &SELECTOR_KEYS));
                continue;
            }
        };
        match findings.keep(value.strings(&format!("{path}.{key}"))) {
            Some(words) => *list = words,
            None => readable = None,
        }
    }
    readable
}

fn resource_name(entry: &Entry, path: &str, findings: &mut Findings) -> Option<ResourceName> {
    if entry.name.is_empty() {
        findings.problem(format!("{path}: resourceName is missing"));
        return None;
    }
    if let Some(bad) = entry
        .name
        .chars()
        .find(|c| !c.is_ascii_alphanumeric() && *c != '_')
    {
        findings.problem(format!(
            "{path}: resourceName {:?} has the character {bad:?}; letters, digits and \"_\" are \
             allowed",
            entry.name
        ));
        return None;
    }
    let prefix = if entry.prefix.is_empty() {
        DEFAULT_PREFIX
    } else {
        &entry.prefix
    };
    let parsed = ResourceName::parse(&format!("{prefix}/{}", entry.name));
    findings.keep(parsed.map_err(|error| format!("{path}: {error}")))
}

/// Units in all: `Some(None)` derives them.
fn units(hca_max: Option<i64>, path: &str, findings: &mut Findings) -> Option<Option<u32>> {
    let Some(number) = hca_max else {
        findings.warn(format!(
            "{path}: rdmaHcaMax is absent; the number of units is derived from the GID table"
        ));
        return Some(None);
    };
    match u32::try_from(number) {
        Ok(0) => {
            findings.warn(format!(
                "{path}: rdmaHcaMax is 0, so the resource offers no unit"
            ));
            Some(Some(0))
        }
        Ok(units) if units <= MAX_POOLED_UNITS => Some(Some(units)),
        _ if number > 0 => {
            findings.warn(format!(
                "{path}: rdmaHcaMax is {number}; the kubelet takes one message of 4 MiB, so \
                 {MAX_POOLED_UNITS} units are offered"
            ));
            Some(Some(MAX_POOLED_UNITS))
        }
        _ => {
            findings.problem(format!(
                "{path}: rdmaHcaMax is {number}; give the number of units, between 0 and \
                 {MAX_POOLED_UNITS}"
            ));
            None
        }
    }
}

fn selector(entry: Entry, path: &str, findings: &mut Findings) -> Option<Selector> {
    let lists = [
        &entry.vendors,
        &entry.device_ids,
        &entry.drivers,
        &entry.if_names,
        &entry.link_types,
    ];
    let has_selectors = lists.iter().any(|list| !list.is_empty());
    let if_names = match (entry.devices.is_empty(), has_selectors) {
        (true, false) => {
            findings.problem(format!(
                "{path}: no selector; give selectors with at least one of {}",
                SELECTOR_KEYS.join(", ")
            ));
            return None;
        }
        (false, true) => {
            findings.problem(format!(
                "{path}: both devices and selectors are given; move the names to selectors.ifNames"
            ));
            return None;
        }
        (false, false) => {
            findings.warn(format!(
                "{path}: devices is deprecated; write the names under selectors.ifNames"
            ));
            entry.devices
        }
        (true, true) => entry.if_names,
    };
    let mut functions = vec![FunctionKind::Pf, FunctionKind::Vf];
    if !if_names.is_empty() {
        functions.push(FunctionKind::Sf);
    }
    if !entry.drivers.is_empty() {
        functions.push(FunctionKind::Software);
    }
    let ids = entry.vendors.iter().chain(&entry.device_ids);
    let misspelt = ids.filter_map(|word| spelling::pci_id(word)).chain(
        entry
            .link_types
            .iter()
            .filter_map(|word| spelling::link_type(word)),
    );
    for warning in misspelt {
        findings.warn(format!("{path}: {warning}"));
    }
    let exact = |words: Vec<String>| words.into_iter().map(Pattern::Exact).collect();
    Some(Selector {
        vendors: exact(entry.vendors),
        device_ids: exact(entry.device_ids),
        drivers: exact(entry.drivers),
        if_names: exact(if_names),
        link_types: exact(entry.link_types),
        functions,
        ..Selector::default()
    })
}

#[cfg(test)]
mod tests;
