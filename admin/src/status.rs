//! `rdmactl status`: is RDMA on this node healthy?

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use cni_wire::text::printable;
use hca::wait;
use ipam::plugin::Plugin;
use ipam::pool_usage::Usage;
use ipam::store::Pool;
use node::table::cell;
use node_wire::status::{DaemonStatus, HcaStatus, PoolStatus};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::addresses::pools;
use crate::global::Global;
use crate::node_state::{Sources, Units};
use crate::output::{Ended, Exit, complain, optional, table};

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
pub(crate) struct StatusDocument {
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
        let document = StatusDocument {
            units: state.units(),
            daemon: state.daemon.ok(),
            addresses,
            notes,
        };
        global.say(json!(document), || text(&document));
        faults.iter().for_each(|fault| complain(fault));
        Ok(Exit::good_if(faults.is_empty()))
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
        let node_name = global.node_name();
        let plugin = Plugin::new(policy.clone(), &global.host_root, node_name.as_deref());
        let store = name.clone();
        let read = wait("it", STORE_TIMEOUT, move || ranges(&plugin, store));
        match read.map_err(anyhow::Error::from).flatten() {
            Ok(ranges) => all.extend(ranges),
            Err(error) => notes.push(format!("addresses of store {name:?}: {error}")),
        }
    }
    all
}

fn ranges(plugin: &Plugin, store: String) -> anyhow::Result<Vec<RangeUse>> {
    let Some(opened) = plugin.open_existing(&store)? else {
        return Ok(Vec::new());
    };
    let pools = pools::read(&opened, plugin.policy().ipam.cooldown)?;
    let number = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
    let of_pool = |(pool, count): (Pool, Usage)| RangeUse {
        store: store.clone(),
        range: pool.range.to_string(),
        network_name: pool.network_name.clone(),
        used: number(count.used),
        cooling_down: number(count.cooling_down),
        free: rounded(count.free(&pool)),
    };
    Ok(pools.into_iter().map(of_pool).collect())
}

/// The number, or beyond a million million the next power of two.
pub(crate) fn rounded(count: u128) -> String {
    match count < 1_000_000_000_000 {
        true => count.to_string(),
        false => format!("2^{}", 128 - (count - 1).leading_zeros()),
    }
}

/// The document for a person.
fn text(document: &StatusDocument) -> String {
    let mut blocks = Vec::new();
    if let Some(daemon) = &document.daemon {
        blocks.push(format!(
            "version {}, up {} s, configuration {} (generation {}), netns mode {}\n",
            cell(&daemon.program_version),
            daemon.uptime_seconds,
            daemon.configuration.file.display(),
            daemon.configuration.generation,
            optional(daemon.netns_mode.as_deref()),
        ));
    }
    if !document.units.is_empty() {
        let rows = document.units.iter().map(units_row);
        blocks.push(table(UNITS_HEADER, rows));
    }
    let hcas = document.daemon.as_ref().map(hcas).unwrap_or_default();
    if !hcas.is_empty() {
        let header = "HCA  DEVICE  NETDEV  NUMA  RESOURCES  HEALTH";
        blocks.push(table(header, hcas));
    }
    if !document.addresses.is_empty() {
        let header = "RANGE  STORE  NETWORK NAME  USED  COOLING DOWN  FREE";
        let rows = document.addresses.iter().map(range_row);
        blocks.push(table(header, rows));
    }
    let notes = document.notes.iter();
    blocks.push(notes.map(|note| format!("{}\n", printable(note))).collect());
    blocks.retain(|block| !block.is_empty());
    blocks.join("\n")
}

/// Columns of [`units_row`].
pub(crate) const UNITS_HEADER: &str = "RESOURCE  HEALTHY  UNHEALTHY  HELD  KUBELET";

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
    let hcas = daemon.pools.iter().flat_map(|pool| &pool.hcas);
    let mut seen = BTreeSet::new();
    let row = |hca: &HcaStatus| {
        let of_pool = |pool: &PoolStatus| pool.hcas.iter().find(|one| one.id == hca.id).cloned();
        let offered = daemon.pools.iter().filter(|pool| of_pool(pool).is_some());
        let resources: Vec<&str> = offered.map(|pool| pool.resource.as_str()).collect();
        let mut entries = daemon.pools.iter().filter_map(of_pool);
        let unhealthy = entries.find(|entry| !entry.healthy);
        let reasons = unhealthy.map(|entry| entry.reasons.join("; "));
        vec![
            cell(&hca.id),
            cell(&hca.rdma_devices.join(" ")),
            cell(&hca.netdevs.join(" ")),
            optional(hca.numa_node),
            cell(&resources.join(" ")),
            cell(reasons.as_deref().unwrap_or("healthy")),
        ]
    };
    hcas.filter(|hca| seen.insert(&hca.id)).map(row).collect()
}

fn range_row(range: &RangeUse) -> Vec<String> {
    vec![
        cell(&range.range),
        cell(&range.store),
        optional(range.network_name.as_deref()),
        range.used.to_string(),
        range.cooling_down.to_string(),
        cell(&range.free),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hca(id: &str, reason: Option<&str>) -> HcaStatus {
        HcaStatus {
            id: id.into(),
            rdma_devices: vec!["mlx5_0".into()],
            healthy: reason.is_none(),
            reasons: reason.map(str::to_owned).into_iter().collect(),
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
        let document = StatusDocument {
            daemon: None,
            units: Vec::new(),
            addresses: Vec::new(),
            notes: vec!["\u{1b}[2J".into()],
        };
        assert!(!text(&document).contains('\u{1b}'));
    }
}
