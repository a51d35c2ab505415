//! Reclaims attachments and leases of dead pods, in place of the CNI calls that never came: Multus
//! sends secondary networks neither GC nor STATUS, and a node that crashed sends no DEL.
//!
//! An attachment is undone on evidence, never for lack of it: its boot is over, or its network
//! namespace is gone, seen in two rounds, of an attachment that is not young. An attachment whose
//! state is unknown is kept. Undoing is the same as for DEL, so that a NIC gets back its name,
//! addresses and routes, and its leases are released; then IPAM's own rules decide on leases that
//! no attachment names. Killed anywhere, the next round goes on from the journal.
//!
//! The leases of a store may be on a share whose server does not answer. So what needs a store is
//! done on a thread of the store's own ([`apart`]): one that hangs keeps neither the other stores
//! nor attachments without leases waiting.

mod apart;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use apart::{Apart, Ended, Part};
use attachment::{
    journal::{Key, Record, Store},
    node::{Node, Places, now},
    reclaim::{in_host_namespace, over},
};
use hca::{HcaId, Host};
use ipam::{plugin::Plugin, reclaim::Report, store::StoreError};
use node::identity::boot_id;
use node::policy::Policy;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Time between two reads of the journal where nothing is reclaimed.
const READ_INTERVAL: Duration = Duration::from_secs(30);
/// How long the return of a netdev from a dying namespace may take.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a round waits for its parts. What they do later is counted by a later round.
const ROUND_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one part of a round may take before it is called late.
const PART_TIMEOUT: Duration = Duration::from_secs(30);

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

/// What was cleaned up since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Rounds.
    pub rounds: u64,
    /// Attachments undone.
    pub attachments: u64,
    /// Attachments that could not be undone, and parts of a round that failed or are late; each
    /// round counts.
    pub failures: u64,
    /// Leases freed that no attachment named.
    pub leases: u64,
    /// Why nothing is cleaned up, if so.
    pub idle: Option<String>,
}

/// What lasts from one round to the next.
#[derive(Default)]
struct Memory {
    /// The attachments that were seen dead in the round before.
    sightings: BTreeSet<String>,
    /// What rounds started and did not see the end of.
    apart: Apart<Counts>,
}

/// Cleans up every now and then until `stop`.
pub(crate) async fn keep_reclaiming(
    settings: Settings,
    published: watch::Sender<Counts>,
    stop: CancellationToken,
) {
    let mut memory = Memory::default();
    let mut counts = Counts::default();
    loop {
        let task = settings.clone();
        let round = tokio::task::spawn_blocking(move || {
            let outcome = round(&task, &mut memory, counts);
            (memory, outcome)
        });
        (memory, counts) = match round.await {
            Ok(done) => done,
            // Only a panic ends up here.
            Err(error) => {
                tracing::error!(%error, "cleaning up behind pods failed");
                return stop.cancelled().await;
            }
        };
        published.send_if_modified(|before| {
            let news = *before != counts;
            before.clone_from(&counts);
            news
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(settings.interval.unwrap_or(READ_INTERVAL)) => {}
        }
    }
}

/// The HCAs of which pods have a netdev, by the journal. What cannot be read is none.
pub(crate) fn taken(settings: &Settings) -> BTreeSet<HcaId> {
    let (policy, _) = Policy::load_for_release(&settings.policy);
    let store = Store::at(&policy.state_dir);
    let (records, _) = store.records().unwrap_or_default();
    let parts = records.into_iter().flat_map(|(_, record)| record.parts);
    let moved = parts.filter_map(|part| part.moved);
    moved
        .filter_map(|netdev| netdev.identity.bus_device.as_deref()?.parse().ok())
        .collect()
}

/// One round.
fn round(settings: &Settings, memory: &mut Memory, before: Counts) -> Counts {
    if settings.interval.is_none() {
        return Counts {
            idle: Some("turned off by --reclaim-interval 0".to_owned()),
            ..before
        };
    }
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
    let mut counts = Counts {
        rounds: before.rounds + 1,
        idle: None,
        ..before
    };
    let (policy, fault) = Policy::load_for_release(&settings.policy);
    if let Some(fault) = fault {
        tracing::warn!("{}", fault.with_remedy());
    }
    let mut work = dead(settings, &policy, &mut memory.sightings, &mut counts);
    for store in policy.stores.keys() {
        work.entry(Part::Store(store.clone())).or_default();
    }
    let ended = memory
        .apart
        .run(work, ROUND_TIMEOUT, PART_TIMEOUT, |part, dead| {
            let settings = settings.clone();
            move || clean_up(&settings, &part, dead)
        });
    for (part, ended) in ended {
        match ended {
            Ended::Done(done) => {
                counts.attachments += done.attachments;
                counts.failures += done.failures;
                counts.leases += done.leases;
            }
            Ended::Late { news, elapsed } => {
                counts.failures += 1;
                let seconds = elapsed.as_secs();
                if news {
                    tracing::error!(
                        seconds,
                        "the clean-up of {part} is late: its file system does not answer; the rest goes on"
                    );
                }
            }
            Ended::Failed(error) => {
                counts.failures += 1;
                tracing::error!(error, "the clean-up of {part} failed");
            }
        }
    }
    counts
}

/// An attachment that is over, by its record, and why.
type Dead = (Key, Record, &'static str);

/// The attachments that are over and were so in the round before, by the store of their leases.
fn dead(
    settings: &Settings,
    policy: &Policy,
    sightings: &mut BTreeSet<String>,
    counts: &mut Counts,
) -> BTreeMap<Part, Vec<Dead>> {
    let mut dead: BTreeMap<Part, Vec<Dead>> = BTreeMap::new();
    let (records, unreadable) = match Store::at(&policy.state_dir).records() {
        Ok(records) => records,
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(%error, "cannot read the journal of attachments");
            return dead;
        }
    };
    for one in unreadable {
        tracing::debug!(error = %one, "cannot read an attachment's record");
    }
    let proc = &settings.host.proc;
    let boot = boot_id(proc);
    let mut seen = BTreeSet::new();
    for (key, record) in records {
        let Some(why) = over(&record, proc, &boot, now()) else {
            continue;
        };
        seen.insert(key.as_str().to_owned());
        if sightings.contains(key.as_str()) {
            let part = part_of(&record);
            dead.entry(part).or_default().push((key, record, why));
        }
    }
    *sightings = seen;
    dead
}

/// What an attachment's release needs.
fn part_of(record: &Record) -> Part {
    let config = record.ipam.as_ref().map(|ipam| ipam.config.as_bytes());
    config
        .and_then(ipam::config::store_of)
        .map_or(Part::NoStore, Part::Store)
}

/// One part of a round: undoes its attachments, then frees leases that are over and that no
/// attachment named.
fn clean_up(settings: &Settings, part: &Part, dead: Vec<Dead>) -> Counts {
    let mut counts = Counts::default();
    let places = Places {
        root: settings.root.clone(),
        policy: settings.policy.clone(),
        node: settings.node.clone(),
    };
    let mut node = match Node::open_for_release(&places, "daemon".into()) {
        Ok(node) => node,
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(error = error.with_remedy(), "cannot clean up behind pods");
            return counts;
        }
    };
    for (key, record, why) in dead {
        undo(&mut node, &key, &record, why, &mut counts);
    }
    if let Part::Store(store) = part {
        leases(settings, &node, store, &mut counts);
    }
    counts
}

fn undo(node: &mut Node, key: &Key, record: &Record, why: &str, counts: &mut Counts) {
    let owner = record.owner();
    match attachment::reclaim::undo(node, key, record, RETURN_TIMEOUT) {
        Ok(false) => {}
        Ok(true) => {
            counts.attachments += 1;
            tracing::info!(owner, network = record.network, why, "attachment undone");
        }
        Err(error) => {
            counts.failures += 1;
            let error = error.with_remedy();
            tracing::warn!(
                owner,
                network = record.network,
                why,
                error,
                "cannot undo an attachment"
            );
        }
    }
}

/// Frees leases of a store that are over and that no attachment named.
fn leases(settings: &Settings, node: &Node, name: &str, counts: &mut Counts) {
    let plugin = Plugin::load(&settings.policy, &settings.root, settings.node.as_deref());
    let store = match plugin.open_existing(name) {
        Ok(Some(store)) => store,
        Ok(None) => return,
        Err(error) => {
            tracing::debug!(store = name, %error, "store is not cleaned up");
            return;
        }
    };
    match free_leases(&plugin, &store, name, &node.roots.proc) {
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

/// Frees what is over of the node's leases in the store of that name: [`ipam::reclaim::run`].
/// `proc` is the host's.
///
/// # Errors
/// The store cannot be gone through.
pub(crate) fn free_leases(
    plugin: &Plugin,
    store: &ipam::store::Store,
    name: &str,
    proc: &Path,
) -> Result<Report, StoreError> {
    let options = ipam::reclaim::Options {
        netns_root: Path::new("/"),
        proc,
        state_dir: &plugin.policy().state_dir,
        store: name,
        cluster_node: plugin.is_cluster_node(),
        dry_run: false,
        now: jiff::Timestamp::now(),
    };
    ipam::reclaim::run(store, &options)
}
