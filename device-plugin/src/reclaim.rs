//! Reclaims attachments and leases of dead pods, in place of the CNI calls that never came: Multus
//! sends secondary networks neither GC nor STATUS, and a node that crashed sends no DEL.
//!
//! An attachment is undone on evidence, never for lack of it: its boot is over, or its network
//! namespace is gone, seen in two rounds, of an attachment that is not young. An attachment whose
//! state is unknown is kept. Undoing is the same as for DEL, so that a NIC gets back its name,
//! addresses and routes, and its leases are released; then IPAM's own rules decide on leases that
//! no attachment names. Killed anywhere, the next round goes on from the journal.
//!
//! Undoing an attachment may run an IPAM program that hangs. So attachments and leases have a
//! [`Reader`] each: neither keeps the other waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use attachment::{
    journal::{Journal, Key, Record},
    node::{Node, now},
    part::{Defect, Part},
    reclaim::{in_host_namespace, over},
};
use hca::HcaId;
use ipam::{plugin::Plugin, reclaim::Report};
use node::identity::{boot_id, is_other_boot};
use node::policy::Policy;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// Time between two reads of the journal where nothing is reclaimed.
const READ_INTERVAL: Duration = Duration::from_secs(30);
/// How long the return of a netdev from a dying namespace may take.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one part of a round may take before it is called late.
const PART_TIMEOUT: Duration = Duration::from_secs(30);

/// What was cleaned up since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Attachments undone.
    pub attachments: u64,
    /// Attachments that could not be undone, and parts of a round that failed or are late; each
    /// round counts.
    pub failures: u64,
    /// Leases freed that no attachment named.
    pub leases: u64,
    /// Why nothing is cleaned up, if so.
    pub idle: Option<String>,
    /// HCAs whose netdev returned from a pod that left a child on it, and what is to be said of it.
    pub children: BTreeMap<HcaId, String>,
}

/// Cleans up every `interval` until `stop`; evidence has to last from one round to the next. Without
/// an interval nothing is cleaned up.
pub(crate) async fn keep_reclaiming(
    paths: Arc<NodePaths>,
    interval: Option<Duration>,
    readers: Readers,
    published: watch::Sender<Counts>,
    stop: CancellationToken,
) {
    let published = Arc::new(published);
    let journal: Reader = readers.reader("journal", "the search for dead pods", PART_TIMEOUT);
    let [attachments, leases] = ["attachments", "leases"]
        .map(|of| readers.reader("reclaim", format!("the clean-up of {of}"), PART_TIMEOUT));
    let failure = Counts {
        failures: 1,
        ..Counts::default()
    };
    // The attachments that were seen dead in the round before.
    let mut sightings = BTreeSet::new();
    loop {
        let (task, before) = (paths.clone(), sightings.clone());
        let read = journal.run(move || Round::read(&task, interval, &before));
        let read = tokio::select! {
            () = stop.cancelled() => return,
            read = read => read,
        };
        match read {
            Ok(round) => {
                sightings = round.sightings;
                note(&published, &round.counts);
                published.send_if_modified(|all| {
                    let is_idle = all.idle != round.idle_reason;
                    if let Some(reason) = round.idle_reason.as_ref().filter(|_| is_idle) {
                        tracing::warn!(reason, "nothing is cleaned up behind pods");
                    }
                    all.idle.clone_from(&round.idle_reason);
                    let mut is_new = false;
                    if let Some(children) = round.children {
                        is_new = all.children != children;
                        all.children = children;
                    }
                    is_idle || is_new
                });
                if round.idle_reason.is_none() {
                    for reader in [&attachments, &leases] {
                        if reader.late().is_some() {
                            note(&published, &failure);
                        }
                    }
                    let (task, to) = (paths.clone(), published.clone());
                    attachments.start(move || note(&to, &undo_all(&task, round.dead)));
                    let (task, to) = (paths.clone(), published.clone());
                    leases.start(move || note(&to, &free_over(&task)));
                }
            }
            Err(_) => note(&published, &failure),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval.unwrap_or(READ_INTERVAL)) => {}
        }
    }
}

/// Adds what was cleaned up.
fn note(published: &watch::Sender<Counts>, more: &Counts) {
    published.send_if_modified(|all| {
        all.attachments += more.attachments;
        all.failures += more.failures;
        all.leases += more.leases;
        *more != Counts::default()
    });
}

/// The HCAs of which pods have a netdev, by the journal. A record that cannot be read is passed over.
///
/// # Errors
/// The journal cannot be listed.
pub(crate) fn taken(paths: &NodePaths) -> Result<BTreeSet<HcaId>, attachment::Error> {
    let (records, unreadable) = Journal::at(&paths.state_dir()).records()?;
    if let Some((_, error)) = unreadable.into_iter().next() {
        return Err(error);
    }
    let parts = records.iter().flat_map(|(_, record)| &record.parts);
    let moved = parts.filter_map(Part::moved);
    Ok(moved
        .filter_map(|moved| moved.host.identity.bus_device.as_deref()?.parse().ok())
        .collect())
}

/// What a round finds, and what is to be done.
#[derive(Default)]
struct Round {
    /// Why nothing is cleaned up, if so.
    idle_reason: Option<String>,
    /// As [`Counts::children`]; none where the journal cannot be read.
    children: Option<BTreeMap<HcaId, String>>,
    sightings: BTreeSet<String>,
    counts: Counts,
    /// The attachments that are to be undone.
    dead: Vec<Dead>,
}

impl Round {
    /// `before` are the attachments that were seen dead in the round before.
    fn read(paths: &NodePaths, interval: Option<Duration>, before: &BTreeSet<String>) -> Self {
        let mut round = Self {
            idle_reason: idle(paths, interval),
            ..Self::default()
        };
        let (policy, fault) = Policy::load_for_release(&paths.node.policy);
        if let Some(fault) = fault.filter(|_| round.idle_reason.is_none()) {
            tracing::warn!("{}", fault.with_remedy());
        }
        round.find_dead(paths, &policy, before);
        round
    }
}

/// Why nothing is cleaned up, if so.
fn idle(paths: &NodePaths, interval: Option<Duration>) -> Option<String> {
    if interval.is_none() {
        return Some("turned off by --reclaim-interval 0".to_owned());
    }
    let reason = in_host_namespace(&paths.host).err()?;
    Some(format!("{reason}; set hostNetwork: true"))
}

/// An attachment that is over, by its record, and why.
type Dead = (Key, Record, &'static str);

impl Round {
    /// The children that pods left, and the attachments that are over and were so in the round before.
    fn find_dead(&mut self, paths: &NodePaths, policy: &Policy, before: &BTreeSet<String>) {
        let (records, unreadable) = match Journal::at(&policy.state_dir).records() {
            Ok(records) => records,
            Err(error) => {
                self.counts.failures += 1;
                return tracing::warn!(%error, "cannot read the journal of attachments");
            }
        };
        for (_, error) in unreadable {
            tracing::debug!(%error, "cannot read an attachment's record");
        }
        let proc = &paths.host.proc;
        let boot = boot_id(proc);
        let here = records.iter().map(|(_, record)| record);
        let here = here.filter(|record| !is_other_boot(&record.boot, &boot));
        self.children = Some(here.flat_map(children).collect());
        if self.idle_reason.is_some() {
            return;
        }
        for (key, record) in records {
            let Some(why) = over(&record, proc, &boot, now()) else {
                continue;
            };
            self.sightings.insert(key.as_str().to_owned());
            if before.contains(key.as_str()) {
                self.dead.push((key, record, why));
            }
        }
    }
}

/// The HCAs whose netdev returned from an attachment with a child on it.
fn children(record: &Record) -> impl Iterator<Item = (HcaId, String)> {
    let moved = record.parts.iter().filter_map(Part::moved);
    let left = moved.filter(|moved| moved.returned == Some(Defect::Child));
    left.flat_map(move |moved| {
        let hcas = moved.hcas.iter().filter_map(|hca| hca.parse().ok());
        hcas.map(move |hca| (hca, moved.left_child(record)))
    })
}

/// Undoes attachments.
fn undo_all(paths: &NodePaths, dead: Vec<Dead>) -> Counts {
    let mut counts = Counts::default();
    if dead.is_empty() {
        return counts;
    }
    let mut node = match Node::open_for_release(&paths.node, "daemon".into()) {
        Ok(node) => node,
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(error = error.to_string(), "cannot clean up behind pods");
            return counts;
        }
    };
    for (key, record, why) in dead {
        undo(&mut node, &key, &record, why, &mut counts);
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
            tracing::warn!(
                owner,
                network = record.network,
                why,
                error = error.to_string(),
                "cannot undo an attachment"
            );
        }
    }
}

/// Frees leases that are over and that no attachment names.
fn free_over(paths: &NodePaths) -> Counts {
    let mut counts = Counts::default();
    let plugin = Plugin::load(
        &paths.node.policy,
        &paths.node.root,
        paths.node.node.as_deref(),
    );
    match free_leases(&plugin, &paths.host.proc) {
        Ok(report) => {
            counts.leases += u64::try_from(report.freed.len()).unwrap_or_default();
            for (lease, why) in &report.freed {
                tracing::info!(
                    address = %lease.address, holder = %lease.holder, store = lease.store,
                    why = why.as_str(), "lease freed"
                );
            }
            for failure in &report.failed {
                tracing::warn!(failure, "lease not freed");
            }
        }
        Err(error) => {
            counts.failures += 1;
            tracing::warn!(%error, "leases are not cleaned up");
        }
    }
    counts
}

/// Frees what is over of the node's leases: [`ipam::reclaim::run`]. `proc` is the host's.
///
/// # Errors
/// They cannot be gone through.
pub(crate) fn free_leases(plugin: &Plugin, proc: &Path) -> anyhow::Result<Report> {
    let Some(leases) = plugin.leases_if_any()? else {
        return Ok(Report::default());
    };
    let options = ipam::reclaim::Options {
        netns_root: Path::new("/"),
        proc,
        state_dir: &plugin.policy().state_dir,
        cooldown: plugin.policy().ipam.cooldown,
        dry_run: false,
    };
    Ok(ipam::reclaim::run(&leases, &options)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_a_pod_left_is_known_by_the_hcas_of_its_netdev() {
        let part = |name: &str, hca: &str, returned: &str| {
            serde_json::json!({"move": {
                "interface": {"name": "net1"}, "hcas": [hca], "returned": returned,
                "host": {"identity": {"index": 5}, "name": name, "takenAt": 1,
                    "state": {"mtu": 1500, "txQueueLength": 1000, "flags": 1, "families": [],
                        "config": {}}},
            }})
        };
        let record: Record = serde_json::from_value(serde_json::json!({
            "version": 1, "network": "rail0", "containerId": "c1", "ifname": "net1",
            "pod": "ml/a", "created": 1, "boot": "b",
            "netns": {"path": "/run/netns/a", "device": 4, "inode": 5},
            "parts": [part("ens1", "0000:3b:00.0", "child"), part("ens2", "0000:86:00.0", "name")],
        }))
        .unwrap();
        let left: Vec<_> = children(&record).collect();
        let [(hca, why)] = left.as_slice() else {
            panic!("{left:?}")
        };
        assert_eq!(*hca, "0000:3b:00.0".parse().unwrap());
        assert!(why.contains("ens1") && why.contains("pod ml/a"), "{why}");
    }
}
