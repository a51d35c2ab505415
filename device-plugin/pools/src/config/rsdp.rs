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

use std::time::Duration;

use hca::FunctionKind;
use node::json::{self, Value};
use serde::Deserialize;

use super::model::{
    Config, DEFAULT_RESCAN_INTERVAL, Format, MAX_POOLED_UNITS, PoolConfig, Sharing,
};
use super::problems::Problems;
use super::selector::{Matcher, Selector};
use super::value::MAX_TIME;

const DEFAULT_PREFIX: &str = "rdma";

/// Reads a parsed document.
pub fn read(document: &Value) -> Result<Config, Problems> {
    let mut findings = Problems::default();
    let decoded = json::decode(document, "", &mut findings.warnings);
    let file: File = decoded.map_err(Problems::one)?;
    let rescan = match file.periodic_update_interval {
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
    let pools = findings.pools("configList", &file.config_list, read_pool);
    findings.conclude(Format::Rsdp, rescan, pools)
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct File {
    periodic_update_interval: Option<i64>,
    config_list: Vec<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Entry {
    resource_name: String,
    resource_prefix: String,
    rdma_hca_max: Option<i64>,
    devices: Vec<String>,
    selectors: Selectors,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Selectors {
    vendors: Vec<String>,
    #[serde(rename = "deviceIDs")]
    device_ids: Vec<String>,
    drivers: Vec<String>,
    if_names: Vec<String>,
    link_types: Vec<String>,
}

fn read_pool(value: &Value, path: &str, findings: &mut Problems) -> Option<PoolConfig> {
    let entry: Entry = findings.decode(value, path)?;
    let prefix = (entry.resource_prefix.as_str(), DEFAULT_PREFIX);
    let resource = findings.resource(path, prefix, &entry.resource_name, "_");
    let units = units(entry.rdma_hca_max, path, findings);
    let selector = selector(entry.devices, entry.selectors, path, findings);
    let sharing = Sharing::Pooled { units: units? };
    Some(PoolConfig {
        exclude_topology: true,
        ..PoolConfig::new(resource?, sharing, vec![selector?])
    })
}

/// Units in all: `Some(None)` derives them.
fn units(hca_max: Option<i64>, path: &str, findings: &mut Problems) -> Option<Option<u32>> {
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

fn selector(
    devices: Vec<String>,
    entry: Selectors,
    path: &str,
    findings: &mut Problems,
) -> Option<Selector> {
    let lists = [
        &entry.vendors,
        &entry.device_ids,
        &entry.drivers,
        &entry.if_names,
        &entry.link_types,
    ];
    let has_selectors = lists.iter().any(|list| !list.is_empty());
    let if_names = match (devices.is_empty(), has_selectors) {
        (true, false) => {
            findings.problem(format!(
                "{path}: no selector; give selectors with at least one of vendors, deviceIDs, drivers, \
                 ifNames, linkTypes"
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
            devices
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
    let exact = |words: Vec<String>| words.into_iter().map(Matcher::exact).collect();
    Some(Selector::of([
        ("vendors", exact(entry.vendors)),
        ("deviceIDs", exact(entry.device_ids)),
        ("drivers", exact(entry.drivers)),
        ("ifNames", exact(if_names)),
        ("linkTypes", exact(entry.link_types)),
        (
            "functions",
            functions
                .into_iter()
                .map(|kind| Matcher::exact(kind.word()))
                .collect(),
        ),
    ]))
}

#[cfg(test)]
mod tests;
