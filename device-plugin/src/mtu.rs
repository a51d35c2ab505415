//! The MTU that pools set on host links (`linkUp: {mtu: 4200}`).
//!
//! Before the first change of a netdev its MTU is recorded in `/run`, which ends with the boot as the
//! setting does. A pool's MTU is set once for each time a netdev appears; what somebody sets after that
//! stays. A netdev that no pool sets the MTU of any more gets back the recorded one, unless somebody has
//! set another one. Uplinks and netdevs in the CNI plugin's journal are never changed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use attachment::journal::Lock;
use hca::{HcaId, netdev::Netdev, uplink::Uplinks};
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
    /// The HCA that it is on, as the journal names it.
    id: Option<HcaId>,
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
        self.id == target.id && same.into_iter().filter(|same| *same).count() >= 2
    }
}

/// A netdev of the host, as the scan found it, and the MTU that a pool wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    netdev: String,
    ifindex: u32,
    mtu: u32,
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
pub(crate) fn targets(
    config: &Config,
    snapshots: &[Arc<Snapshot>],
    netdevs: &[Netdev],
    uplinks: &Uplinks,
) -> Vec<Target> {
    let wanting = config.pools.iter().filter_map(|pool| {
        let mut all = snapshots.iter();
        let snapshot = all.find(|snapshot| *snapshot.resource() == pool.resource);
        pool.mtu.zip(snapshot)
    });
    let wanting: Vec<(u32, &Arc<Snapshot>)> = wanting.collect();
    let target = |netdev: &Netdev| {
        let has = |snapshot: &Snapshot| {
            snapshot.members().iter().any(|member| {
                // A bond passes its MTU on to its ports.
                let bonds = &member.hca.bond_names;
                let is_port = netdev.master.as_ref().is_some_and(|by| bonds.contains(by));
                match netdev.kind.as_deref() {
                    Some("bond") => bonds.contains(&netdev.name),
                    _ => !is_port && member.hca.netdev_names().any(|name| name == netdev.name),
                }
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
            // With the MTU that a pod had it with.
            let is_former = target.mtu == record.former && target.mtu != *mtu;
            (!is_set || is_former).then_some(Step::Set(*mtu))
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
        let taken = taken(paths).map_err(|error| error.to_string())?;
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
    if !found.as_ref().is_some_and(unchanged) {
        // The event of that change triggers another scan.
        return Ok(());
    }
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
        Step::Set(mtu) => {
            let old = records.iter().find(|record| record.is_of(target)).cloned();
            let ours = old.filter(|old| old.set.contains(&target.mtu));
            let mut record = Record {
                netdev: target.netdev.clone(),
                ifindex: target.ifindex,
                id: target.id.clone(),
                former: ours.as_ref().map_or(target.mtu, |old| old.former),
                set: ours.map_or_else(Vec::new, |old| old.set),
                done: false,
            };
            record.set.retain(|set| *set != mtu);
            record.set.push(mtu);
            // Of a netdev that had this name before.
            others.retain(|other| other.netdev != record.netdev || other.id != record.id);
            others.push(record);
            *records = others;
            write(path, records)?;
            change(mtu)?;
            if let Some(record) = records.last_mut() {
                record.done = true;
            }
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
        .map_err(|error| error.wire.msg)
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

#[cfg(test)]
mod tests {
    use hca::uplink::Why;

    use super::*;
    use crate::candidate::example::named;
    use crate::config::parse;
    use crate::snapshot::Member;

    fn netdev(name: &str, ifindex: u32) -> Netdev {
        Netdev {
            name: name.into(),
            ifindex,
            mtu: 1500,
            ..Netdev::default()
        }
    }

    fn target(mtu: u32, wanted: Option<u32>) -> Target {
        Target {
            netdev: "rdma0".into(),
            ifindex: 5,
            mtu,
            id: None,
            wanted: wanted.map(|mtu| (mtu, ResourceName::parse("rdma/a").unwrap())),
            obstacle: None,
        }
    }

    fn record(set: &[u32], done: bool) -> Record {
        Record {
            netdev: "rdma0".into(),
            ifindex: 5,
            id: None,
            former: 1500,
            set: set.to_vec(),
            done,
        }
    }

    #[test]
    fn an_mtu_is_set_once_and_restored_when_no_pool_wants_it() {
        let set = |mtu| Some(Step::Set(mtu));
        for (mtu, wanted, record, expected) in [
            (1500, None, None, None),
            (1500, Some(4200), None, set(4200)),
            (4200, Some(4200), None, None),
            // A daemon was killed before or after the change.
            (1500, Some(4200), Some(record(&[4200], false)), set(4200)),
            (4200, Some(4200), Some(record(&[4200], false)), set(4200)),
            (4200, Some(4200), Some(record(&[4200], true)), None),
            // What somebody set after it stays.
            (9000, Some(4200), Some(record(&[4200], true)), None),
            // A pod took it before it was set, and gave it back as it was.
            (1500, Some(4200), Some(record(&[4200], true)), set(4200)),
            (1500, Some(1500), Some(record(&[4200, 1500], true)), None),
            // Another configuration.
            (4200, Some(9000), Some(record(&[4200], true)), set(9000)),
            (
                9000,
                Some(4200),
                Some(record(&[4200, 9000], true)),
                set(4200),
            ),
            (
                4200,
                None,
                Some(record(&[4200], true)),
                Some(Step::Restore(1500)),
            ),
            (
                4200,
                None,
                Some(record(&[4200, 9000], false)),
                Some(Step::Restore(1500)),
            ),
            (1500, None, Some(record(&[4200], false)), Some(Step::Forget)),
            (8000, None, Some(record(&[4200], true)), Some(Step::Forget)),
        ] {
            let target = target(mtu, wanted);
            let decided = decide(&target, record.as_ref());
            assert_eq!(decided, expected, "{mtu} {wanted:?} {record:?}");
        }
    }

    #[test]
    fn a_netdev_keeps_its_record_until_its_driver_is_loaded_anew() {
        let is_of = |netdev: &str, ifindex, mtu| {
            let target = Target {
                netdev: netdev.into(),
                ifindex,
                ..target(mtu, None)
            };
            record(&[4200], true).is_of(&target)
        };
        assert!(is_of("rdma0", 5, 4200) && is_of("rdma0", 5, 9000));
        assert!(is_of("ens2f0", 5, 4200), "renamed");
        assert!(is_of("rdma0", 9, 4200), "a pod had it");
        assert!(!is_of("rdma0", 9, 1500), "another netdev of that name");
        assert!(!is_of("veth1", 5, 1500));
        let other = Target {
            id: "0000:3b:00.0".parse().ok(),
            ..target(4200, None)
        };
        assert!(!record(&[4200], true).is_of(&other), "another HCA");
    }

    #[test]
    fn uplinks_and_netdevs_of_two_minds_are_left_alone() {
        let text = "version: 1\npools:\n\
            - {resource: rdma/a, mode: shared, select: {vendors: [15b3]}, linkUp: {mtu: 4200}}\n\
            - {resource: rdma/b, mode: shared, select: {vendors: [15b3]}, linkUp: {mtu: 9000}}\n\
            - {resource: rdma/c, mode: shared, select: {vendors: [15b3]}, linkUp: true}\n";
        let config = parse(text).unwrap();
        let snapshot = |pool: usize, names: &[&str], bonds: &[&str]| {
            let mut hca = named("0000:3b:00.0", &["mlx5_0"]);
            hca.netdevs = names.iter().map(|name| netdev(name, 0)).collect();
            hca.bond_names = bonds.iter().map(|name| (*name).to_owned()).collect();
            let pool = config.pools[pool].clone().into();
            Arc::new(Snapshot::new(
                pool,
                0,
                vec![Member::example(hca)],
                Arc::default(),
            ))
        };
        let snapshots = [
            snapshot(0, &["rdma0", "rdma1", "rdma2"], &["bond0", "eth9"]),
            snapshot(1, &["rdma1"], &[]),
            snapshot(2, &["rdma3"], &[]),
        ];
        let (mut port, mut bond) = (netdev("rdma2", 4), netdev("bond0", 5));
        port.master = Some("bond0".into());
        bond.kind = Some("bond".into());
        let netdevs = [
            netdev("rdma0", 2),
            netdev("rdma1", 3),
            port,
            bond,
            netdev("rdma3", 6),
            netdev("eth9", 7),
        ];
        let uplinks = Uplinks::Known([("rdma0".to_owned(), Why::DefaultRoute)].into());
        let all = targets(&config, &snapshots, &netdevs, &uplinks);
        let wanted = |target: &Target| target.wanted.as_ref().map(|(mtu, _)| *mtu);
        let all: Vec<_> = all
            .iter()
            .map(|t| (wanted(t), t.obstacle.clone()))
            .collect();
        assert!(all[0].1.as_ref().unwrap().contains("default route"));
        assert_eq!(all[1], (Some(4200), Some("rdma/b wants 9000".into())));
        let (none, bond) = ((None, None), (Some(4200), None));
        assert_eq!(all[2..], [none.clone(), bond, none.clone(), none]);
        let unknown = Uplinks::Unknown("no routes".into());
        let all = targets(&config, &snapshots, &netdevs, &unknown);
        assert!(all.iter().all(|target| target.obstacle.is_some()));
    }
}
