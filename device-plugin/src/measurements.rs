//! What takes time to read, and is served as metrics: counters of ports and of CNI calls, how full
//! address pools are, and how pods are placed.
//!
//! Each is read on a thread of its own, which a firmware, a share or a kubelet that does not answer
//! may keep for ever: no other one waits for it, nor does the daemon. It is started again when it
//! has ended. Its age is a metric, so that an old value is not taken for a new one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use diagnostics::port_counters::{self, PortCounter};
use diagnostics::topology::{Alignment, Holders, alignment};
use hca::Host;
use hca::topology::{Machine, Wanted};
use ipam::plugin::Plugin;
use ipam::pool_usage::usage;
use node::calls::{self, Calls};
use node::policy::{Policy, StoreKind};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Time between two readings of what is on this node.
const INTERVAL: Duration = Duration::from_secs(30);
/// The same for a store that many nodes share: reading it lists all leases.
const SHARED_STORE_INTERVAL: Duration = Duration::from_secs(900);
/// The programs that count their calls.
const PROGRAMS: [&str; 2] = ["rdma-netdev", "rdma-ipam"];

/// Where things are.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Roots of the host's kernel file systems.
    pub host: Host,
    /// The directory that they are below.
    pub root: PathBuf,
    /// The node's policy.
    pub policy: PathBuf,
    /// The node's name, if it was given.
    pub node: Option<String>,
    /// The kubelet's root directory.
    pub kubelet_root: PathBuf,
    /// The directory of the CNI programs' counters.
    pub calls: Option<PathBuf>,
}

/// What was read last.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measurements {
    /// Counters of ports.
    pub ports: Measured<Vec<PortCounter>>,
    /// Calls of the CNI programs, by program.
    pub calls: Measured<Vec<(&'static str, Calls)>>,
    /// Pools of stores that only this node uses.
    pub own_pools: Measured<Vec<PoolFill>>,
    /// Pools of stores that nodes share.
    pub shared_pools: Measured<Vec<PoolFill>>,
    /// How pods are placed; `None` while the kubelet does not say what they hold.
    pub alignment: Measured<Option<Alignment>>,
}

/// A reading and its time.
#[derive(Debug, Clone)]
pub(crate) struct Measured<T> {
    /// When it was read; `None`: not yet.
    pub at: Option<Instant>,
    /// What was read.
    pub value: T,
}

impl<T: Default> Default for Measured<T> {
    fn default() -> Self {
        Self {
            at: None,
            value: T::default(),
        }
    }
}

impl<T> Measured<T> {
    fn now(value: T) -> Self {
        Self {
            at: Some(Instant::now()),
            value,
        }
    }
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
    /// Those that are leased.
    pub used: f64,
    /// Those that are neither leased nor cooling down.
    pub free: f64,
}

/// Starts the readers, until `stop`.
pub(crate) fn start(
    settings: Settings,
    services: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> watch::Receiver<Measurements> {
    let sender = Arc::new(watch::Sender::new(Measurements::default()));
    let receiver = sender.subscribe();
    let settings = Arc::new(settings);
    services.spawn(keep(
        INTERVAL,
        with(&settings, |settings| ports(&settings.host)),
        publish(&sender, |all, value| all.ports = value),
        stop.clone(),
    ));
    services.spawn(keep(
        INTERVAL,
        with(&settings, |settings| calls_of(settings.calls.as_deref())),
        publish(&sender, |all, value| all.calls = value),
        stop.clone(),
    ));
    services.spawn(keep(
        INTERVAL,
        with(&settings, |settings| pools(settings, Sharing::OneNode)),
        publish(&sender, |all, value| all.own_pools = value),
        stop.clone(),
    ));
    services.spawn(keep(
        SHARED_STORE_INTERVAL,
        with(&settings, |settings| pools(settings, Sharing::Nodes)),
        publish(&sender, |all, value| all.shared_pools = value),
        stop.clone(),
    ));
    services.spawn(keep(
        INTERVAL,
        with(&settings, placement),
        publish(&sender, |all, value| all.alignment = value),
        stop.clone(),
    ));
    receiver
}

fn with<T>(
    settings: &Arc<Settings>,
    read: impl Fn(&Settings) -> T + Send + Sync + 'static,
) -> Arc<dyn Fn() -> T + Send + Sync> {
    let settings = settings.clone();
    Arc::new(move || read(&settings))
}

fn publish<T, F: Fn(&mut Measurements, Measured<T>)>(
    sender: &Arc<watch::Sender<Measurements>>,
    put: F,
) -> impl Fn(T) + use<T, F> {
    let sender = sender.clone();
    move |value| sender.send_modify(|all| put(all, Measured::now(value)))
}

/// Reads, publishes, waits; a reading that does not end is waited for, and nothing else.
async fn keep<T: Send + 'static>(
    interval: Duration,
    read: Arc<dyn Fn() -> T + Send + Sync>,
    publish: impl Fn(T),
    stop: CancellationToken,
) {
    loop {
        let (sender, receiver) = oneshot::channel();
        let read = read.clone();
        let thread = std::thread::Builder::new().name("measure".into());
        // The receiver is gone when the daemon ends.
        if let Err(error) = thread.spawn(move || drop(sender.send(read()))) {
            tracing::warn!(%error, "no thread to read metrics on");
        }
        tokio::select! {
            () = stop.cancelled() => return,
            // Without a value it panicked, or had no thread.
            value = receiver => if let Ok(value) = value { publish(value) },
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

fn ports(host: &Host) -> Vec<PortCounter> {
    let inventory = hca::inventory(host);
    let read = inventory.map(|inventory| port_counters::read(host, &inventory));
    read.unwrap_or_else(|error| {
        tracing::debug!(%error, "counters of ports are not read");
        Vec::new()
    })
}

fn calls_of(directory: Option<&Path>) -> Vec<(&'static str, Calls)> {
    let Some(directory) = directory else {
        return Vec::new();
    };
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    OneNode,
    Nodes,
}

/// The pools of file stores. Of blocks from the cluster the broker says how full they are.
fn pools(settings: &Settings, sharing: Sharing) -> Vec<PoolFill> {
    let (policy, _) = Policy::load_for_release(&settings.policy);
    let of_kind = policy.stores.iter();
    let of_kind = of_kind.filter(|(_, store)| matches!(store.kind, StoreKind::File { .. }));
    let names: Vec<String> = of_kind.map(|(name, _)| name.clone()).collect();
    let plugin = Plugin::new(policy.clone(), &settings.root, settings.node.as_deref());
    let mut fills = Vec::new();
    for name in names {
        match fill(&plugin, &name, sharing) {
            Ok(found) => fills.extend(found),
            Err(error) => {
                tracing::debug!(store = name, error, "how full pools are is not known");
            }
        }
    }
    fills
}

/// None of a store of the other kind, by the file system that its directory is on: a share is one
/// whether or not the policy says so.
fn fill(plugin: &Plugin, name: &str, sharing: Sharing) -> Result<Vec<PoolFill>, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let Some(store) = plugin.open_existing(name).map_err(|e| text(&e))? else {
        return Ok(Vec::new());
    };
    if store.is_shared() != (sharing == Sharing::Nodes) {
        return Ok(Vec::new());
    }
    let pools = store.pools().map_err(|e| text(&e))?;
    let used = usage(&store, &pools, plugin.policy().ipam.cooldown).map_err(|e| text(&e))?;
    let fills = pools.iter().zip(used).map(|(pool, usage)| PoolFill {
        store: name.to_owned(),
        range: pool.range.to_string(),
        network_name: pool.network_name.clone().unwrap_or_default(),
        size: rounded(pool.size()),
        used: rounded(usage.taken),
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

/// How pods with GPUs and NICs are placed. GPUs are read only where a pod holds one of our units.
fn placement(settings: &Settings) -> Option<Alignment> {
    let devices = kubelet_api::client::ask(&settings.kubelet_root).ok()?;
    let held: Vec<(String, String)> = devices
        .held
        .iter()
        .flat_map(|held| {
            let pod = format!("{}/{}", held.namespace, held.pod);
            held.ids.iter().map(move |id| (pod.clone(), id.clone()))
        })
        .collect();
    let is_ours = |(_, id): &(String, String)| id.parse::<hca::UnitId>().is_ok();
    if !held.iter().any(is_ours) {
        return Some(Alignment::default());
    }
    let inventory = hca::inventory(&settings.host).ok()?;
    let machine = Machine::read(&settings.host, &inventory, &Wanted::default()).ok()?;
    Some(alignment(&machine, &Holders::collect(held)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use serde_json::json;

    const SOON: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn a_reading_that_hangs_keeps_nothing_else_waiting() {
        let stop = CancellationToken::new();
        let sender = Arc::new(watch::Sender::new(Measurements::default()));
        let mut receiver = sender.subscribe();
        let mut services = JoinSet::new();
        let hung: Arc<dyn Fn() -> Vec<PoolFill> + Send + Sync> = Arc::new(|| {
            loop {
                std::thread::park();
            }
        });
        let put = publish(&sender, |all: &mut Measurements, value| {
            all.shared_pools = value
        });
        services.spawn(keep(SOON, hung, put, stop.clone()));
        let rounds = Arc::new(AtomicU32::new(0));
        let counted = rounds.clone();
        let reads: Arc<dyn Fn() -> Vec<PortCounter> + Send + Sync> = Arc::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Vec::new()
        });
        let put = publish(&sender, |all: &mut Measurements, value| all.ports = value);
        services.spawn(keep(SOON, reads, put, stop.clone()));
        while rounds.load(Ordering::SeqCst) < 3 {
            receiver.changed().await.unwrap();
        }
        assert!(receiver.borrow().ports.at.is_some());
        assert!(receiver.borrow().shared_pools.at.is_none());
        stop.cancel();
        while services.join_next().await.is_some() {}
    }

    #[test]
    fn pools_of_a_local_store_are_counted_and_those_of_a_shared_one_are_not() {
        let place = tempfile::tempdir().unwrap();
        let policy = place.path().join("policy.json");
        let store = |name: &str| json!({"type": "file", "directory": place.path().join(name)});
        let mut nfs = store("nfs");
        nfs["shared"] = json!(true);
        let values = json!({"stateDir": place.path().join("state"), "stores": {
            "default": store("default"), "nfs": nfs}});
        std::fs::write(&policy, values.to_string()).unwrap();
        let settings = Settings {
            host: Host::at("/"),
            root: "/".into(),
            policy,
            node: Some("n1".into()),
            kubelet_root: place.path().to_owned(),
            calls: None,
        };
        assert_eq!(pools(&settings, Sharing::OneNode), [], "never used");
        assert_eq!(placement(&settings), None, "no kubelet");
        assert!(calls_of(Some(place.path())).is_empty());
    }
}
