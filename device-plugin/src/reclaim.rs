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
    let failed = || note(&published, |all| all.failures += 1);
    // The attachments that were seen dead in the round before.
    let mut sightings = BTreeSet::new();
    let mut pause = Duration::ZERO;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = interval.unwrap_or(READ_INTERVAL);
        let (task, before) = (paths.clone(), sightings.clone());
        let read = journal.run(move || Round::read(&task, interval, &before));
        let read = tokio::select! {
            () = stop.cancelled() => return,
            read = read => read,
        };
        let round = match read {
            Ok(Ok(round)) => round,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot read the journal of attachments");
                failed();
                continue;
            }
            Err(_late) => {
                failed();
                continue;
            }
        };
        sightings = round.sightings;
        note(&published, |all| {
            if let Some(reason) = round.idle.as_ref().filter(|_| all.idle != round.idle) {
                tracing::warn!(reason, "nothing is cleaned up behind pods");
            }
            (all.idle, all.children) = (round.idle.clone(), round.children);
        });
        if round.idle.is_some() {
            continue;
        }
        for reader in [&attachments, &leases] {
            if reader.late().is_some() {
                failed();
            }
        }
        let (task, to) = (paths.clone(), published.clone());
        attachments.start(move || undo_all(&task, round.dead, &to));
        let (task, to) = (paths.clone(), published.clone());
        leases.start(move || free_over(&task, &to));
    }
}

/// Changes what is published.
fn note(published: &watch::Sender<Counts>, change: impl FnOnce(&mut Counts)) {
    published.send_if_modified(|all| {
        let before = all.clone();
        change(all);
        *all != before
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

/// An attachment that is over, by its record, and why.
type Dead = (Key, Record, &'static str);

/// What a round finds, and what is to be done.
struct Round {
    /// Why nothing is cleaned up, if so.
    idle: Option<String>,
    /// As [`Counts::children`].
    children: BTreeMap<HcaId, String>,
    /// The attachments that are over.
    sightings: BTreeSet<String>,
    /// Those of them that were so in the round before.
    dead: Vec<Dead>,
}

impl Round {
    /// `before` are the attachments that were seen dead in the round before.
    fn read(
        paths: &NodePaths,
        interval: Option<Duration>,
        before: &BTreeSet<String>,
    ) -> Result<Self, attachment::Error> {
        let idle = idle(paths, interval);
        let (policy, fault) = Policy::load_for_release(&paths.node.policy);
        if let Some(fault) = fault.filter(|_| idle.is_none()) {
            tracing::warn!("{}", fault.with_remedy());
        }
        let (records, unreadable) = Journal::at(&policy.state_dir).records()?;
        for (_, error) in unreadable {
            tracing::debug!(%error, "cannot read an attachment's record");
        }
        let boot = boot_id(&paths.host.proc);
        let here = records.iter().map(|(_, record)| record);
        let here = here.filter(|record| !is_other_boot(&record.boot, &boot));
        let children = here.flat_map(children).collect();
        let over = records.into_iter().filter_map(|(key, record)| {
            let why = over(&record, &paths.host.proc, &boot, now())?;
            Some((key, record, why))
        });
        let mut dead: Vec<Dead> = over.filter(|_| idle.is_none()).collect();
        let sightings = dead.iter().map(|(key, ..)| key.as_str().to_owned());
        let sightings = sightings.collect();
        dead.retain(|(key, ..)| before.contains(key.as_str()));
        Ok(Self {
            idle,
            children,
            sightings,
            dead,
        })
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
fn undo_all(paths: &NodePaths, dead: Vec<Dead>, published: &watch::Sender<Counts>) {
    if dead.is_empty() {
        return;
    }
    let failed = || note(published, |all| all.failures += 1);
    let mut node = match Node::open_for_release(&paths.node, "daemon".into()) {
        Ok(node) => node,
        Err(error) => {
            tracing::warn!(error = error.to_string(), "cannot clean up behind pods");
            return failed();
        }
    };
    for (key, record, why) in dead {
        let (owner, network) = (record.owner(), &record.network);
        match attachment::reclaim::undo(&mut node, &key, &record, RETURN_TIMEOUT) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(owner, network, why, "attachment undone");
                note(published, |all| all.attachments += 1);
            }
            Err(error) => {
                let error = error.to_string();
                tracing::warn!(owner, network, why, error, "cannot undo an attachment");
                failed();
            }
        }
    }
}

/// Frees leases that are over and that no attachment names.
fn free_over(paths: &NodePaths, published: &watch::Sender<Counts>) {
    let node = &paths.node;
    let plugin = Plugin::load(&node.policy, &node.root, node.node.as_deref());
    match free_leases(&plugin, &paths.host.proc) {
        Ok(report) => {
            for (lease, why) in &report.freed {
                tracing::info!(
                    address = %lease.address, holder = %lease.holder, store = lease.store,
                    why = why.as_str(), "lease freed"
                );
            }
            for failure in &report.failed {
                tracing::warn!(failure, "lease not freed");
            }
            let freed = u64::try_from(report.freed.len()).unwrap_or_default();
            note(published, |all| all.leases += freed);
        }
        Err(error) => {
            tracing::warn!(%error, "leases are not cleaned up");
            note(published, |all| all.failures += 1);
        }
    }
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
