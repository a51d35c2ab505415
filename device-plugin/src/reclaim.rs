//! Reclaims attachments and leases of dead pods, in place of the CNI calls that never came: Multus
//! sends secondary networks neither GC nor STATUS, and a node that crashed sends no DEL.
//!
//! An attachment is undone on evidence, never for lack of it: its boot is over, or its network
//! namespace is gone, seen in two rounds, of an attachment that is not young. What cannot be told
//! is kept. Undoing is the CNI plugin's own, the same as for DEL, so that a NIC gets back its
//! name, addresses and routes, and its leases are released; then IPAM's own rules decide on leases
//! that no attachment names. Killed anywhere, the next round goes on from the journal.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hca::{HcaId, Host};
use node::policy::Policy;
use rdma_netdev::journal::{Key, Record, Store};
use rdma_netdev::node::{EXCLUSIVE_HCAS, NODE_ADDRESSES, Node, Places, now};
use rdma_netdev::reclaim::{in_host_namespace, over};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::candidate::LinkType;
use node::file;

/// Time between looks at the journal where nothing is cleaned up.
const LOOKING: Duration = Duration::from_secs(30);
/// How long a netdev on its way out of a dying namespace is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

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
    /// Time between rounds; evidence has to last from one to the next. `None`: nothing is
    /// cleaned up.
    pub interval: Option<Duration>,
}

/// Tells the CNI plugin which addresses the node is known by. Without them it goes by the routes,
/// so what cannot be written is a warning.
pub(crate) fn tell_node_addresses(settings: &Settings, addresses: &[IpAddr]) {
    tell(settings, NODE_ADDRESSES, addresses);
}

/// Tells the CNI plugin which HCAs are of exclusive pools: none of them carries a child of a pod that
/// does not have it. Without them it goes by what is inside pods alone.
pub(crate) fn tell_exclusive_hcas(settings: &Settings, hcas: &BTreeSet<HcaId>) {
    tell(settings, EXCLUSIVE_HCAS, hcas);
}

/// Writes a file of the state directory, one value a line.
fn tell<T: Display>(settings: &Settings, name: &str, values: impl IntoIterator<Item = T>) {
    let (policy, _) = Policy::load_for_release(&settings.policy);
    let file = policy.state_dir.join(name);
    let text: String = values.into_iter().map(|v| format!("{v}\n")).collect();
    if std::fs::read_to_string(&file).is_ok_and(|known| known == text) {
        return;
    }
    if let Err(error) = file::replace(&file, &text) {
        tracing::warn!(file = %file.display(), %error, "cannot tell the CNI plugin");
    }
}

/// What was cleaned up since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Rounds.
    pub rounds: u64,
    /// Attachments undone.
    pub attachments: u64,
    /// Attachments that could not be undone; each round counts.
    pub failures: u64,
    /// Leases freed that no attachment named.
    pub leases: u64,
    /// Why nothing is cleaned up, if so.
    pub idle: Option<String>,
}

/// A netdev that a pod has, as the journal names it.
pub(crate) type Taken = (HcaId, String, LinkType);

/// What a round found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// What was cleaned up since the start.
    pub counts: Counts,
    /// Netdevs that pods have now.
    pub taken: Arc<Vec<Taken>>,
}

/// Cleans up every now and then until `stop`.
pub(crate) async fn keep_reclaiming(
    settings: Settings,
    findings: watch::Sender<Findings>,
    stop: CancellationToken,
) {
    let mut sightings = BTreeSet::new();
    let mut counts = Counts::default();
    loop {
        let task = settings.clone();
        let round = tokio::task::spawn_blocking(move || {
            let taken = taken(&task);
            let outcome = round(&task, &mut sightings, counts);
            (sightings, outcome, taken)
        });
        let taken;
        (sightings, counts, taken) = match round.await {
            Ok(done) => done,
            // Only a panic ends up here.
            Err(error) => {
                tracing::error!(%error, "cleaning up behind pods failed");
                return stop.cancelled().await;
            }
        };
        findings.send_if_modified(|before| {
            let after = Findings {
                counts: counts.clone(),
                taken: Arc::new(taken),
            };
            let news = *before != after;
            *before = after;
            news
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(settings.interval.unwrap_or(LOOKING)) => {}
        }
    }
}

/// The netdevs that pods have, by the journal. What cannot be read is none.
pub(crate) fn taken(settings: &Settings) -> Vec<Taken> {
    let (policy, _) = node::policy::Policy::load_for_release(&settings.policy);
    let store = Store::at(&policy.state_dir);
    let (records, _) = store.records().unwrap_or_default();
    let moved = records.into_iter().filter_map(|(_, record)| record.moved);
    moved
        .filter_map(|netdev| {
            let id = netdev.identity.bus_device.as_deref()?.parse().ok()?;
            let infiniband = netdev.identity.mac.len() > "00:00:00:00:00:00".len();
            let link_type = if infiniband {
                LinkType::Infiniband
            } else {
                LinkType::Ether
            };
            Some((id, netdev.name.to_string(), link_type))
        })
        .collect()
}

/// One round; `sightings` are the attachments that were seen dead in the round before.
fn round(settings: &Settings, sightings: &mut BTreeSet<String>, before: Counts) -> Counts {
    if settings.interval.is_none() {
        return Counts {
            idle: Some("turned off by --reclaim-interval 0".to_owned()),
            ..before
        };
    }
    let mut counts = Counts {
        rounds: before.rounds + 1,
        idle: None,
        ..before.clone()
    };
    if let Err(reason) = in_host_namespace(&settings.host) {
        let reason = format!("{reason}; set hostNetwork: true");
        if before.idle.as_ref() != Some(&reason) {
            tracing::warn!(reason, "nothing is cleaned up behind pods");
        }
        return Counts {
            idle: Some(reason),
            ..before
        };
    }
    let places = Places {
        root: settings.root.clone(),
        policy: settings.policy.clone(),
        node: settings.node.clone(),
    };
    match Node::open_for_release(&places, "daemon".into()) {
        Ok(mut node) => {
            if let Some(fault) = &node.policy.fault {
                tracing::warn!("{}", fault.with_remedy());
            }
            attachments(&mut node, sightings, &mut counts);
            leases(settings, &node, &mut counts);
        }
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(%error, "cannot clean up behind pods");
        }
    }
    counts
}

/// Undoes the attachments that are over.
fn attachments(node: &mut Node, sightings: &mut BTreeSet<String>, counts: &mut Counts) {
    let (records, unreadable) = match node.journal.records() {
        Ok(records) => records,
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(%error, "cannot read the journal of attachments");
            return;
        }
    };
    for one in unreadable {
        tracing::debug!(error = %one, "cannot read an attachment's record");
    }
    let mut dead = BTreeSet::new();
    for (key, record) in records {
        let Some(why) = over(&record, &node.roots.proc, &node.boot, now()) else {
            continue;
        };
        let seen = sightings.contains(key.as_str());
        dead.insert(key.as_str().to_owned());
        if seen {
            undo(node, &key, &record, why, counts);
        }
    }
    *sightings = dead;
}

fn undo(node: &mut Node, key: &Key, record: &Record, why: &str, counts: &mut Counts) {
    let owner = record.owner();
    match rdma_netdev::reclaim::undo(node, key, record, PATIENCE) {
        Ok(false) => {}
        Ok(true) => {
            counts.attachments += 1;
            tracing::info!(owner, network = record.network, why, "attachment undone");
        }
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(owner, network = record.network, why, %error, "cannot undo an attachment");
        }
    }
}

/// Frees leases that are over and that no attachment named, in each store of the policy.
fn leases(settings: &Settings, node: &Node, counts: &mut Counts) {
    let plugin =
        ipam::plugin::Plugin::load(&settings.policy, &settings.root, settings.node.as_deref());
    for name in node.policy.values.stores.keys() {
        let store = match plugin.open_existing(name) {
            Ok(Some(store)) => store,
            Ok(None) => continue,
            Err(error) => {
                tracing::debug!(store = name, %error, "store is not cleaned up");
                continue;
            }
        };
        let options = ipam::reclaim::Options {
            netns_root: Path::new("/"),
            proc: &node.roots.proc,
            state_dir: &node.policy.values.state_dir,
            store: name,
            cluster_node: plugin.is_cluster_node(),
            dry_run: false,
            now: jiff::Timestamp::now(),
        };
        match ipam::reclaim::run(&store, &options) {
            Ok(report) => {
                counts.leases += u64::try_from(report.freed.len()).unwrap_or_default();
                for (lease, why) in &report.freed {
                    tracing::info!(
                        address = %lease.address, holder = %lease.holder, store = name,
                        why = why.as_str(), "lease freed"
                    );
                }
                for failure in &report.failed {
                    tracing::warn!(store = name, failure, "lease not freed");
                }
            }
            Err(error) => tracing::warn!(store = name, %error, "store is not cleaned up"),
        }
    }
}
