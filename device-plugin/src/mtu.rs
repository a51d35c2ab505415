//! The MTU that pools set on host links (`linkUp: {mtu: 4200}`).
//!
//! Before the first change of a netdev its MTU is recorded in `/run`, which ends with the boot as the
//! setting does. A pool's MTU is set once for each time a netdev appears; what somebody sets after that
//! stays. A netdev that no pool sets the MTU of any more gets back the recorded one, unless somebody has
//! set another one. Uplinks and netdevs in the CNI plugin's journal are never changed.

use std::path::Path;
use std::time::Duration;

use attachment::journal::Lock;
use hca::{HcaId, netdev::Netdev, network::Uplinks};
use netlink::{Socket, link};
use serde::{Deserialize, Serialize};

use crate::{
    config::{Config, ResourceName},
    links,
    node_paths::NodePaths,
    reclaim::taken,
    snapshot::Snapshot,
};

/// The records, in the directory of the node's sockets.
pub(crate) const FILE: &str = "mtu.json";
const MAX_BYTES: u64 = 1 << 20;
/// How long a change waits for another daemon.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// A netdev whose MTU was changed, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    netdev: String,
    ifindex: u32,
    /// The MTU to go back to.
    former: u32,
    /// All that pools have set, the last one last.
    set: Vec<u32>,
    /// Whether the last one was set.
    done: bool,
}

impl Record {
    /// A netdev can get another name or, in a pod, another index. One whose driver was loaded anew has
    /// another index and MTU.
    fn is_of(&self, target: &Target) -> bool {
        let same = [
            self.netdev == target.netdev,
            self.ifindex == target.ifindex,
            self.set.contains(&target.mtu),
        ];
        same.into_iter().filter(|same| *same).count() >= 2
    }
}

/// A netdev of the host, as the scan found it, and the MTU that a pool wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    netdev: String,
    ifindex: u32,
    mtu: u32,
    /// The HCA that it is on, as the journal names it.
    id: Option<HcaId>,
    wanted: Option<(u32, ResourceName)>,
    /// Why it must not be changed.
    obstacle: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Set(u32),
    Restore(u32),
    /// Somebody else has set the MTU.
    Forget,
}

/// All netdevs of the host with the MTUs that pools want. Pure.
pub(crate) fn targets<'a>(
    config: &Config,
    snapshots: impl Iterator<Item = &'a Snapshot> + Clone,
    netdevs: &[Netdev],
    uplinks: &Uplinks,
) -> Vec<Target> {
    let wanting: Vec<(u32, &Snapshot)> = config
        .pools
        .iter()
        .filter_map(|pool| {
            let mut snapshots = snapshots.clone();
            let snapshot = snapshots.find(|one| *one.resource() == pool.resource);
            pool.mtu.zip(snapshot)
        })
        .collect();
    let target = |netdev: &Netdev| {
        let has = |snapshot: &Snapshot| {
            snapshot.members().iter().any(|member| {
                let has = |name: &str| member.hca.netdev_names().any(|own| own == name);
                // A bond passes its MTU on to its ports.
                has(&netdev.name) && !netdev.master.as_deref().is_some_and(has)
            })
        };
        let mut wanted = wanting.iter().filter(|(_, snapshot)| has(snapshot));
        let first = wanted.next();
        let other = wanted.find(|(mtu, _)| first.is_some_and(|(first, _)| first != mtu));
        let obstacle = match uplinks {
            Uplinks::Known(all) => all.get(&netdev.name).map(ToString::to_string),
            Uplinks::Unknown(why) => Some(format!("it may be an uplink: {why}")),
        };
        let device = netdev.auxiliary.clone();
        let device = device.or_else(|| Some(netdev.pci?.to_string()));
        Target {
            netdev: netdev.name.clone(),
            ifindex: netdev.ifindex,
            mtu: netdev.mtu,
            id: device.and_then(|device| device.parse().ok()),
            wanted: first.map(|(mtu, snapshot)| (*mtu, snapshot.resource().clone())),
            obstacle: obstacle
                .or_else(|| other.map(|(mtu, by)| format!("{} wants {mtu}", by.resource()))),
        }
    };
    netdevs.iter().map(target).collect()
}

/// What is to be done with a netdev.
fn decide(target: &Target, record: Option<&Record>) -> Option<Step> {
    match (&target.wanted, record) {
        (None, None) => None,
        (None, Some(record)) if record.set.contains(&target.mtu) => {
            Some(Step::Restore(record.former))
        }
        (None, Some(_)) => Some(Step::Forget),
        (Some((mtu, _)), Some(record)) => {
            let is_set = record.done && record.set.last() == Some(mtu);
            (!is_set).then_some(Step::Set(*mtu))
        }
        (Some((mtu, _)), None) => (*mtu != target.mtu).then_some(Step::Set(*mtu)),
    }
}

/// Sets MTUs and restores them. Returns what could not be done, for a person; it is tried again at the
/// next scan.
pub(crate) fn apply(paths: &NodePaths, targets: &[Target]) -> Vec<String> {
    let path = paths.run_dir.join(FILE);
    if !path.exists() && targets.iter().all(|target| target.wanted.is_none()) {
        return Vec::new();
    }
    let changed = locked(&path).and_then(|_lock| {
        let mut records = read(&path)?;
        let steps: Vec<(&Target, Step)> = targets
            .iter()
            .filter_map(|target| {
                let record = records.iter().find(|record| record.is_of(target));
                Some((target, decide(target, record)?))
            })
            .collect();
        if steps.is_empty() {
            return Ok(Vec::new());
        }
        let taken = taken(paths);
        let mut socket = links::socket(paths)?;
        let free = |target: &Target| !target.id.as_ref().is_some_and(|id| taken.contains(id));
        let steps = steps.into_iter().filter(|(target, _)| free(target));
        let faults = steps.filter_map(|(target, step)| {
            let outcome = act(&mut socket, &path, &mut records, target, step);
            outcome.err().map(|why| match (step, &target.wanted) {
                (Step::Set(mtu), Some((_, by))) => format!(
                    "the MTU of {} cannot be set to {mtu} (linkUp of {by}): {why}",
                    target.netdev
                ),
                _ => format!(
                    "the MTU of {}, set by linkUp, cannot be restored: {why}",
                    target.netdev
                ),
            })
        });
        Ok(faults.collect())
    });
    changed.unwrap_or_else(|why| vec![format!("MTUs of linkUp cannot be set: {why}")])
}

fn act(
    socket: &mut Socket,
    path: &Path,
    records: &mut Vec<Record>,
    target: &Target,
    step: Step,
) -> Result<(), String> {
    if let (Some(why), Step::Set(_) | Step::Restore(_)) = (&target.obstacle, step) {
        return Err(why.clone());
    }
    let found = link::get(socket, link::By::Index(target.ifindex));
    let found = found.map_err(|error| error.to_string())?;
    let unchanged =
        |link: &link::Link| link.name == target.netdev.as_str() && link.mtu == target.mtu;
    let Some(link) = found.filter(unchanged) else {
        // The event of that change triggers another scan.
        return Ok(());
    };
    let mut change = |mtu| {
        let what = format_args!("set the MTU of {} to {mtu}", target.netdev);
        let change = link::Change {
            mtu: Some(mtu),
            ..link::Change::default()
        };
        link::change(socket, what, target.ifindex, &change).map_err(|error| error.to_string())
    };
    let mut others = records.clone();
    others.retain(|record| !record.is_of(target));
    match step {
        Step::Set(mtu) if link.max_mtu != 0 && mtu > link.max_mtu => {
            return Err(format!("its driver takes at most {}", link.max_mtu));
        }
        Step::Set(mtu) => {
            let old = records.iter().find(|record| record.is_of(target)).cloned();
            let ours = old.filter(|old| old.set.contains(&target.mtu));
            let mut record = Record {
                netdev: target.netdev.clone(),
                ifindex: target.ifindex,
                former: ours.as_ref().map_or(target.mtu, |old| old.former),
                set: ours.map_or_else(Vec::new, |old| old.set),
                done: false,
            };
            record.set.retain(|set| *set != mtu);
            record.set.push(mtu);
            // Of a netdev that had this name before.
            others.retain(|other| other.netdev != record.netdev);
            others.push(record);
            *records = others;
            write(path, records)?;
            change(mtu)?;
            records
                .last_mut()
                .into_iter()
                .for_each(|record| record.done = true);
            tracing::info!(
                netdev = target.netdev,
                mtu,
                former = target.mtu,
                "set the MTU, by linkUp"
            );
        }
        Step::Restore(mtu) => {
            change(mtu)?;
            *records = others;
            tracing::info!(
                netdev = target.netdev,
                mtu,
                "restored the MTU, changed by linkUp before"
            );
        }
        Step::Forget => *records = others,
    }
    write(path, records)
}

fn locked(path: &Path) -> Result<Lock, String> {
    Lock::exclusive(&path.with_extension("lock"), FILE, LOCK_TIMEOUT)
        .map_err(|error| error.to_string())
}

fn read(path: &Path) -> Result<Vec<Record>, String> {
    let text = node::trust::read(path, MAX_BYTES).map_err(|error| error.to_string())?;
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let records = serde_json::from_slice(&text);
    records.map_err(|error| format!("read {}: {error}; remove it", path.display()))
}

fn write(path: &Path, records: &[Record]) -> Result<(), String> {
    let written = match records {
        [] => std::fs::remove_file(path),
        _ => serde_json::to_vec(records)
            .map_err(Into::into)
            .and_then(|text| node::file::replace_in_boot(path, text)),
    };
    written.map_err(|error| format!("write {}: {error}", path.display()))
}
