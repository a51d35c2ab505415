//! What takes time to read, and is served as metrics: counters of ports and of CNI calls, and how
//! full address pools are.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::port_counters::{self, PortCounter};
use hca::Host;
use ipam::plugin::Plugin;
use ipam::pool_usage::usage;
use node::calls::{self, Calls};
use node::policy::StoreKind;
use tokio_util::sync::CancellationToken;

use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// Time between two readings of what is on this node.
const INTERVAL: Duration = Duration::from_secs(30);
/// How long a reading may take before it is called late.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The programs that count their calls.
const PROGRAMS: [&str; 2] = ["rdma-netdev", "rdma-ipam"];

/// Reads what is served.
#[derive(Debug)]
pub(crate) struct Measurements {
    ports: Reader<Vec<PortCounter>>,
    calls: Reader<Vec<(&'static str, Calls)>>,
    pools: Reader<Vec<PoolFill>>,
}

/// What was read last; nothing before the first time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    /// Counters of ports.
    pub ports: Vec<PortCounter>,
    /// Calls of the CNI programs, by program.
    pub calls: Vec<(&'static str, Calls)>,
    /// Pools of addresses.
    pub pools: Vec<PoolFill>,
}

/// How full a pool of addresses is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PoolFill {
    /// The store's name in the policy.
    pub store: String,
    /// The range.
    pub range: String,
    /// `network_name`; empty for none.
    pub network_name: String,
    /// Addresses that the pool may give.
    pub size: f64,
    /// Those that are neither leased nor cooling down.
    pub free: f64,
}

impl Measurements {
    pub(crate) fn new(readers: &Readers) -> Self {
        let reader = |what| format!("the measurement of {what}");
        Self {
            ports: readers.reader("ports", reader("port counters"), READ_TIMEOUT),
            calls: readers.reader("calls", reader("CNI calls"), READ_TIMEOUT),
            pools: readers.reader("pools", reader("address pools"), READ_TIMEOUT),
        }
    }

    /// What was read last.
    pub(crate) fn read(&self) -> Measured {
        Measured {
            ports: last(&self.ports),
            calls: last(&self.calls),
            pools: last(&self.pools),
        }
    }

    /// Reads every now and then until `stop`. What has not ended is not started again.
    pub(crate) async fn keep_reading(
        self: Arc<Self>,
        paths: Arc<NodePaths>,
        stop: CancellationToken,
    ) {
        let mut ticks = tokio::time::interval(INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let [all, own, calls] = [(); 3].map(|()| paths.clone());
            self.ports.start(move || ports(&all.host));
            self.calls.start(move || calls_of(&calls.run_dir));
            self.pools.start(move || pools(&own));
        }
    }
}

fn last<T: Clone + Send + 'static>(reader: &Reader<Vec<T>>) -> Vec<T> {
    reader.last().map(|last| last.value).unwrap_or_default()
}

fn ports(host: &Host) -> Vec<PortCounter> {
    let inventory = hca::inventory(host);
    let read = inventory.map(|inventory| port_counters::read(host, &inventory));
    read.unwrap_or_else(|error| {
        tracing::debug!(%error, "counters of ports are not read");
        Vec::new()
    })
}

fn calls_of(directory: &Path) -> Vec<(&'static str, Calls)> {
    let read = PROGRAMS.into_iter().filter_map(|program| {
        let file = calls::file_in(directory, program);
        match Calls::read(&file) {
            Ok(calls) => Some((program, calls?)),
            Err(error) => {
                tracing::debug!(file = %file.display(), %error, "calls are not read");
                None
            }
        }
    });
    read.collect()
}

/// The ranges in use. Of blocks from the cluster the broker says how full they are.
fn pools(paths: &NodePaths) -> Vec<PoolFill> {
    let policy = paths.policy();
    let plugin = Plugin::new(policy, &paths.node.root, paths.node.node.as_deref());
    fills(&plugin).unwrap_or_else(|error| {
        tracing::debug!(%error, "how full pools are is not known");
        Vec::new()
    })
}

fn fills(plugin: &Plugin) -> anyhow::Result<Vec<PoolFill>> {
    let Some(leases) = plugin.leases_if_any()? else {
        return Ok(Vec::new());
    };
    let policy = plugin.policy();
    let mut pools = leases.pools()?;
    pools.retain(|pool| {
        let store = policy.stores.get(&pool.space.space.store);
        store.is_some_and(|store| store.kind == StoreKind::Node)
    });
    let used = usage(&leases, &pools, policy.ipam.cooldown)?;
    let fills = pools.iter().zip(used).map(|(pool, usage)| PoolFill {
        store: pool.space.space.store.clone(),
        range: pool.range.to_string(),
        network_name: pool.space.space.network_name.clone().unwrap_or_default(),
        size: rounded(pool.size()),
        free: rounded(usage.free(pool)),
    });
    Ok(fills.collect())
}

/// Exact up to 2^53; a larger pool of IPv6 is never nearly full.
#[expect(
    clippy::cast_precision_loss,
    reason = "a metric is a floating-point number"
)]
fn rounded(count: u128) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_that_leased_nothing_has_no_pools() {
        let place = tempfile::tempdir().unwrap();
        let policy = place.path().join("policy.json");
        let values = json!({"stateDir": place.path().join("state")});
        std::fs::write(&policy, values.to_string()).unwrap();
        let mut paths = NodePaths::all_in(place.path());
        paths.node.root = place.path().to_owned();
        assert_eq!(pools(&paths), []);
        assert!(calls_of(place.path()).is_empty());
    }
}
