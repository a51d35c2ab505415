//! `rdmactl status`: is RDMA on this node in order?

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use cni_wire::text::printable;
use ipam::plugin::Plugin;
use ipam::pool_usage::usage;
use node::table::{cell, table};
use node_wire::status::DaemonStatus;
use rdma_device_plugin::reader::wait;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::global::Global;
use crate::node_state::{Sources, Units};
use crate::output::{Ended, Outcome, say, say_json};

/// How long a store may take.
const STORE_TIMEOUT: Duration = Duration::from_secs(4);

/// Shows resources, HCAs with the reason where one is unhealthy, addresses left, and what is wrong.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 the daemon or the kubelet answered, 1 neither did or a read hangs, \
    2 wrong usage."
)]
pub(crate) struct Status {
    #[command(flatten)]
    sources: Sources,
}

/// What is printed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Document {
    /// The daemon's state; `None` if it did not answer.
    pub daemon: Option<DaemonStatus>,
    /// Units of each resource.
    pub units: Vec<Units>,
    /// Address ranges of the node's stores.
    pub addresses: Vec<RangeUse>,
    /// What is missing and what is worth knowing.
    pub notes: Vec<String>,
}

/// How full a range is. Counts beyond 64 bits are texts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RangeUse {
    /// The store, by its name in the policy.
    pub store: String,
    /// The range.
    pub range: String,
    /// Its `network_name`.
    pub network_name: Option<String>,
    /// Leased addresses.
    pub used: u64,
    /// Addresses that cool down.
    pub cooling_down: u64,
    /// Addresses that an ADD may get.
    pub free: String,
}

impl Status {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let state = self.sources.read(global);
        let mut notes = state.notes();
        // A store that cannot be read is noted already.
        let addresses = match state.leases.is_ok() {
            true => addresses(global, &mut notes),
            false => Vec::new(),
        };
        let faults = state.faults();
        let document = Document {
            units: state.units(),
            daemon: state.daemon.ok(),
            addresses,
            notes,
        };
        match global.json {
            true => say_json(json!(document)),
            false => say(&text(&document)),
        }
        match faults.is_empty() {
            true => Ok(Outcome::Good),
            false => bail!("{}", faults.join("\n")),
        }
    }
}

/// How full the ranges of this node's stores are. What cannot be read is noted.
fn addresses(global: &Global, notes: &mut Vec<String>) -> Vec<RangeUse> {
    // A wrong policy is noted already.
    let Ok(policy) = global.policy() else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for name in policy.stores.keys() {
        let (plugin, store) = (
            Plugin::new(
                policy.clone(),
                &global.host_root,
                global.node_name().as_deref(),
            ),
            name.clone(),
        );
        let read = move || -> Result<Vec<RangeUse>, String> {
            let opened = plugin
                .open_existing(&store)
                .map_err(|error| error.to_string())?;
            let Some(opened) = opened else {
                return Ok(Vec::new());
            };
            let pools = opened.pools().map_err(|error| error.to_string())?;
            let counts = usage(&opened, &pools, plugin.policy().ipam.cooldown);
            let counts = counts.map_err(|error| error.to_string())?;
            let of_pool = pools.iter().zip(counts).map(|(pool, count)| RangeUse {
                store: store.clone(),
                range: pool.range.to_string(),
                network_name: pool.network_name.clone(),
                used: u64::try_from(count.used).unwrap_or(u64::MAX),
                cooling_down: u64::try_from(count.cooling_down).unwrap_or(u64::MAX),
                free: rounded(count.free(pool)),
            });
            Ok(of_pool.collect())
        };
        match wait("it", STORE_TIMEOUT, read) {
            Ok(Ok(ranges)) => all.extend(ranges),
            Ok(Err(error)) => notes.push(format!("addresses of store {name:?}: {error}")),
            Err(late) => notes.push(format!("addresses of store {name:?}: {late}")),
        }
    }
    all
}

/// The number, or beyond a million million the next power of two.
pub(crate) fn rounded(count: u128) -> String {
    match count < 1_000_000_000_000 {
        true => count.to_string(),
        false => format!("2^{}", 128 - (count - 1).leading_zeros()),
    }
}

/// The document for a person.
fn text(document: &Document) -> String {
    let mut blocks = Vec::new();
    if let Some(daemon) = &document.daemon {
        blocks.push(format!(
            "version {}, up {} s, configuration {} (generation {}), netns mode {}\n",
            cell(&daemon.program_version),
            daemon.uptime_seconds,
            daemon.configuration.file.display(),
            daemon.configuration.generation,
            cell(daemon.netns_mode.as_deref().unwrap_or_default()),
        ));
    }
    if !document.units.is_empty() {
        let rows: Vec<_> = document.units.iter().map(units_row).collect();
        blocks.push(table(&UNITS_HEADER, &rows));
    }
    let hcas = document.daemon.as_ref().map(hcas).unwrap_or_default();
    if !hcas.is_empty() {
        let header = ["HCA", "DEVICE", "NETDEV", "NUMA", "RESOURCES", "HEALTH"];
        blocks.push(table(&header, &hcas));
    }
    if !document.addresses.is_empty() {
        let header = [
            "RANGE",
            "STORE",
            "NETWORK NAME",
            "USED",
            "COOLING DOWN",
            "FREE",
        ];
        let rows: Vec<_> = document.addresses.iter().map(range_row).collect();
        blocks.push(table(&header, &rows));
    }
    let notes = document.notes.iter();
    blocks.push(notes.map(|note| format!("{}\n", printable(note))).collect());
    blocks.retain(|block| !block.is_empty());
    blocks.join("\n")
}

/// Columns of [`units_row`].
pub(crate) const UNITS_HEADER: [&str; 5] = ["RESOURCE", "HEALTHY", "UNHEALTHY", "HELD", "KUBELET"];

/// One resource.
pub(crate) fn units_row(units: &Units) -> Vec<String> {
    let count = |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |n| n.to_string());
    vec![
        cell(&units.resource),
        count(units.healthy),
        count(units.unhealthy),
        count(units.held),
        cell(&units.kubelet),
    ]
}

/// One row for each HCA, with all resources that offer it; its health in one of them where they differ.
fn hcas(daemon: &DaemonStatus) -> Vec<Vec<String>> {
    let mut ids: Vec<&str> = Vec::new();
    for hca in daemon.pools.iter().flat_map(|pool| &pool.hcas) {
        if !ids.contains(&hca.id.as_str()) {
            ids.push(&hca.id);
        }
    }
    let row = |id: &str| {
        let offered = daemon.pools.iter().filter_map(|pool| {
            let hca = pool.hcas.iter().find(|hca| hca.id == id)?;
            Some((pool.resource.as_str(), hca))
        });
        let offered: Vec<_> = offered.collect();
        let (_, hca) = offered.first()?;
        let resources: Vec<&str> = offered.iter().map(|(resource, _)| *resource).collect();
        let unhealthy = offered.iter().find(|(_, hca)| !hca.healthy);
        let health = match unhealthy {
            None => "healthy",
            Some((_, hca)) => hca.reason.as_deref().unwrap_or("unhealthy"),
        };
        Some(vec![
            cell(id),
            cell(&hca.rdma_devices.join(" ")),
            cell(&hca.netdevs.join(" ")),
            hca.numa_node
                .map_or_else(|| "-".to_owned(), |n| n.to_string()),
            cell(&resources.join(" ")),
            cell(health),
        ])
    };
    ids.into_iter().filter_map(row).collect()
}

fn range_row(range: &RangeUse) -> Vec<String> {
    vec![
        cell(&range.range),
        cell(&range.store),
        cell(range.network_name.as_deref().unwrap_or_default()),
        range.used.to_string(),
        range.cooling_down.to_string(),
        cell(&range.free),
    ]
}

#[cfg(test)]
mod tests {
    use node_wire::status::{HcaStatus, PoolStatus};

    use super::*;

    fn hca(id: &str, reason: Option<&str>) -> HcaStatus {
        HcaStatus {
            id: id.into(),
            rdma_devices: vec!["mlx5_0".into()],
            healthy: reason.is_none(),
            reason: reason.map(str::to_owned),
            ..HcaStatus::default()
        }
    }

    #[test]
    fn an_hca_of_two_resources_is_one_row_with_its_fault() {
        let pool = |resource: &str, hcas| PoolStatus {
            resource: resource.into(),
            hcas,
            ..PoolStatus::default()
        };
        let daemon = DaemonStatus {
            pools: vec![
                pool("rdma/a", vec![hca("0000:3b:00.0", None)]),
                pool("rdma/b", vec![hca("0000:3b:00.0", Some("port 1 is down"))]),
            ],
            ..DaemonStatus::default()
        };
        let rows = hcas(&daemon);
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(rows[0][4..], ["rdma/a rdma/b", "port 1 is down"]);
    }

    #[test]
    fn what_a_node_answers_steers_no_terminal() {
        let document = Document {
            daemon: None,
            units: Vec::new(),
            addresses: Vec::new(),
            notes: vec!["\u{1b}[2J".into()],
        };
        assert!(!text(&document).contains('\u{1b}'));
    }
}
