//! Freeing the leases of pods that ended: for the runtime's GC, the daemon and the administrator.
//!
//! A lease is freed on evidence of this node, never for lack of it: it is from an earlier boot of this
//! machine, or its network namespace is gone, seen twice, some seconds apart, on a lease that is not
//! young. A machine without a lasting machine ID goes by the node's name in the cluster, for leases
//! from well before this boot. GC brings the runtime's list instead and needs no second reading.
//!
//! Leases of other nodes are theirs, until an administrator releases them. A lease whose attachment is
//! in the journal is released with that: its interface may have left the namespace that is gone.
//!
//! What was seen once is in `<stateDir>/reclaim/<store>`; a lost or broken file costs one more reading.
//! Killed between two leases, the next run goes on.

use crate::lease::{Holder, Lease};
use crate::store::{CoolDown, Entry, Finding, Owned, Store, StoreError};
use jiff::Timestamp;
use node::identity::NodeIdentity;
use node::netns::{self, Netns};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A lease younger than this is left alone: its ADD may still be running.
pub const MIN_AGE: Duration = Duration::from_secs(60);
/// The directory below the policy's `stateDir` where it is noted what was seen once.
pub const DIRECTORY: &str = "reclaim";
/// The second reading comes at least this long after the first.
pub const MIN_GAP: Duration = Duration::from_secs(5);

/// What to read, and what to do.
#[derive(Debug, Clone)]
pub struct Options<'a> {
    /// Prefix of the paths of network namespaces: `/` for who sees the host's.
    pub netns_root: &'a Path,
    pub proc: &'a Path,
    pub state_dir: &'a Path,
    /// The store's name in the policy.
    pub store: &'a str,
    /// Whether the cluster gave this node its name, so that no other machine has it.
    pub cluster_node: bool,
    /// Only say what would be freed.
    pub dry_run: bool,
    pub now: Timestamp,
}

/// Why a lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// It is of an earlier boot of this machine.
    Boot,
    /// It is of a previous machine that was this node, or of this one by another
    /// machine ID, and older than this boot.
    PreviousMachine,
    /// Its network namespace is gone.
    Netns,
    /// The runtime does not list it.
    Unlisted,
}

/// What one run did and found.
#[derive(Debug, Default)]
pub struct Report {
    /// Freed, or to be freed when it was a dry run.
    pub freed: Vec<(Lease, Over)>,
    /// Over by the evidence, but seen for the first time or still young.
    pub waiting: Vec<(Lease, Over)>,
    /// Leases of this node that are not over, or not known to be; and why.
    pub kept: Vec<(Lease, &'static str)>,
    /// What could not be freed.
    pub failed: Vec<String>,
    /// What is not a record; see fsck.
    pub findings: Vec<Finding>,
}

impl Over {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Boot => "its boot is over",
            Self::PreviousMachine => "it is of the machine that was this node before",
            Self::Netns => "its network namespace is gone",
            Self::Unlisted => "the runtime does not list it",
        }
    }
}

/// What is remembered from one run to the next.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Sightings {
    boot: String,
    /// Whether lease entries without owner were searched for in this boot.
    #[serde(default)]
    swept: bool,
    /// Unix seconds at which a record was first seen to be over.
    #[serde(default)]
    seen: BTreeMap<String, i64>,
}

/// Frees this node's leases that are over.
///
/// # Errors
/// When the store cannot be gone through. What could not be freed is in the report.
pub fn run(store: &Store, options: &Options<'_>) -> Result<Report, StoreError> {
    let path = sightings_path(options);
    let before = Sightings::read(&path, &store.node().boot);
    let mut run = Run {
        store,
        options,
        attached: attached(options.state_dir),
        before,
        after: Sightings::default(),
        report: Report::default(),
    };
    run.after.boot.clone_from(&store.node().boot);
    let mut findings = Vec::new();
    for name in store.node_names() {
        findings.extend(store.records_of(name, |owned| {
            run.record(&owned);
            Ok(())
        })?);
    }
    let mut swept_whole = true;
    if !run.before.swept && !store.is_shared() {
        let waiting = run.report.waiting.len();
        let of_sweep = store.entries(true, |entry| {
            run.entry(&entry);
            Ok(())
        })?;
        swept_whole =
            waiting == run.report.waiting.len() && !of_sweep.iter().any(|finding| finding.unread);
        findings.extend(of_sweep);
    }
    // Killed or failed in between, or while an entry waits, the sweep is made once more.
    run.after.swept =
        run.before.swept || (run.report.failed.is_empty() && swept_whole && !options.dry_run);
    if let Err(error) = run.after.write(&path) {
        run.report.failed.push(format!(
            "remember what was seen in {}: {error}",
            path.display()
        ));
    }
    run.report.findings.extend(findings);
    Ok(run.report)
}

/// Frees this machine's leases of one network that the runtime does not list.
///
/// # Errors
/// When the store cannot be gone through. What could not be freed is in the report.
pub fn keep_only(
    store: &Store,
    network: &str,
    listed: &impl Fn(&Holder) -> bool,
) -> Result<Report, StoreError> {
    let mut report = Report::default();
    for name in store.node_names() {
        let findings = store.records_of(name, |owned| {
            // All leases of a record are of one holder.
            let first = owned.leases().first();
            if let Some(lease) = first.filter(|lease| lease.holder.network == network) {
                if !is_of_this_machine(&lease.holder, store.node()) {
                    report.keep(store, &owned, ANOTHER_MACHINE);
                } else if listed(&lease.holder) {
                    report.keep(store, &owned, "the runtime lists it");
                } else {
                    report.free(store, &owned, Over::Unlisted);
                }
            }
            Ok(())
        })?;
        report.findings.extend(findings);
    }
    Ok(report)
}

/// Container and interface of each attachment in the journal of `rdma-netdev`, by the names of the
/// records: `NETWORK@CONTAINER@INTERFACE`.
fn attached(state_dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(state_dir.join("attachments"));
    let names = entries.into_iter().flatten().flatten();
    names
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some(name.split_once('@')?.1.to_owned())
        })
        .collect()
}

/// Whether an attachment is provably of this machine. Its node's name proves
/// nothing: two hosts may have been `localhost` before each got its own name.
fn is_of_this_machine(holder: &Holder, node: &NodeIdentity) -> bool {
    let same_machine = !node.machine.is_empty() && holder.machine == node.machine;
    (!holder.boot.is_empty() && holder.boot == node.boot) || same_machine
}

impl Report {
    fn free(&mut self, store: &Store, owned: &Owned, why: Over) {
        let leases = leases_of(store, owned);
        match store.release(owned, CoolDown::FromNow) {
            Ok(_) => self.freed.extend(leases.map(|lease| (lease, why))),
            Err(error) => self.failed.push(error.to_string()),
        }
    }

    fn keep(&mut self, store: &Store, owned: &Owned, why: &'static str) {
        self.kept
            .extend(leases_of(store, owned).map(|lease| (lease, why)));
    }
}

/// The leases of a record for the report: those that it holds, where that can be read.
fn leases_of(store: &Store, owned: &Owned) -> impl Iterator<Item = Lease> + use<> {
    let leases = store.leases_of(owned);
    leases
        .unwrap_or_else(|_| owned.leases().to_vec())
        .into_iter()
}

struct Run<'a> {
    store: &'a Store,
    options: &'a Options<'a>,
    /// Container and interface of each attachment in the journal.
    attached: BTreeSet<String>,
    before: Sightings,
    after: Sightings,
    report: Report,
}

impl Run<'_> {
    fn record(&mut self, owned: &Owned) {
        // All leases of a record are of one holder and of one time.
        let Some(lease) = owned.leases().first() else {
            return;
        };
        let why = match self.judge(lease) {
            Ok(why) => why,
            Err(why) => return self.report.keep(self.store, owned, why),
        };
        let ripe = self.ripe(lease, &owned.path());
        match (ripe, self.options.dry_run) {
            (true, false) => self.report.free(self.store, owned, why),
            (true, true) => {
                let leases = leases_of(self.store, owned);
                self.report.freed.extend(leases.map(|lease| (lease, why)));
            }
            (false, _) => {
                let leases = leases_of(self.store, owned);
                self.report.waiting.extend(leases.map(|lease| (lease, why)));
            }
        }
    }

    /// A lease entry to which no owner's record leads: after a crash of the machine the
    /// record may be empty or missing on a file system of its own.
    fn entry(&mut self, entry: &Entry) {
        if entry.freed.is_some() || self.store.has_owner(entry).unwrap_or(true) {
            return;
        }
        let lease = match &entry.record {
            Ok(lease) => match self.judge(lease) {
                Ok(why) if self.ripe(lease, &entry.path) => Some((lease.clone(), why)),
                Ok(why) => return self.report.waiting.push((lease.clone(), why)),
                Err(_) => return,
            },
            // Whose it was is lost, but not that it was before this boot.
            Err(_) => match (entry.modified(), self.store.node().booted()) {
                (Some(modified), Some(booted)) if modified < booted => None,
                _ => return,
            },
        };
        if !self.options.dry_run
            && let Err(error) = self.store.release_entry(entry)
        {
            return self.report.failed.push(error.to_string());
        }
        match lease {
            Some(lease) => self.report.freed.push(lease),
            None => {
                let done = match self.options.dry_run {
                    true => "reclaim --yes frees it",
                    false => "it is freed",
                };
                self.report.findings.push(Finding {
                    path: entry.path.clone(),
                    what: format!(
                        "the record of {} cannot be read, and is of an earlier boot; {done}",
                        entry.address
                    ),
                    unread: false,
                });
            }
        }
    }

    /// Why a lease is over, or why it is kept.
    fn judge(&self, lease: &Lease) -> Result<Over, &'static str> {
        let netns = |holder: &Holder| match &holder.netns {
            Some(path) => netns::read(
                self.options.netns_root,
                self.options.proc,
                path,
                holder.netns_inode,
            ),
            None => Netns::Unknown("no namespace is recorded"),
        };
        let node = self.store.node();
        // Unless the cluster gave the name, another machine may have it, too.
        let booted = node.booted().filter(|_| self.options.cluster_node);
        let why = over(lease, node, booted, netns)?;
        let Holder {
            container,
            interface,
            ..
        } = &lease.holder;
        match why == Over::Netns && self.attached.contains(&format!("{container}@{interface}")) {
            true => Err("its attachment is still in the journal"),
            false => Ok(why),
        }
    }

    /// Whether a lease that is over was seen so before and is old enough.
    fn ripe(&mut self, lease: &Lease, path: &Path) -> bool {
        let key = format!("{}#{}", path.display(), lease.created);
        let now = self.options.now.as_second();
        let first = self.before.seen.get(&key).copied().unwrap_or(now);
        let (first, ripe) = ripe(first, lease.created.as_second(), now);
        self.after.seen.insert(key, first);
        ripe
    }
}

/// When a lease was first seen to be over, and whether that and its age are long
/// enough ago; all in Unix seconds. A clock that was wrong has stamped what it
/// stamped in the future: that says nothing, and counts from now.
fn ripe(first: i64, created: i64, now: i64) -> (i64, bool) {
    let gap = i64::try_from(MIN_GAP.as_secs()).unwrap_or(i64::MAX);
    let age = i64::try_from(MIN_AGE.as_secs()).unwrap_or(i64::MAX);
    let first = first.min(now);
    let seen_for = now - first;
    let old = match created <= now {
        true => now - created >= age,
        false => seen_for >= age,
    };
    (first, seen_for >= gap && old)
}

const ANOTHER_MACHINE: &str = "it is of another machine, or not known to be of this one";

/// How much older than this boot, in seconds, a lease of a previous machine must be:
/// its clock may have been another.
const PREVIOUS_MACHINE_MARGIN_SECONDS: i64 = 300;

/// Why a lease is over, by what this node can know, or why it is kept. Pure but for
/// `netns`. `booted` is when this boot began, in Unix seconds, where the cluster
/// gave the node its name.
fn over(
    lease: &Lease,
    node: &NodeIdentity,
    booted: Option<i64>,
    netns: impl FnOnce(&Holder) -> Netns,
) -> Result<Over, &'static str> {
    let holder = &lease.holder;
    if holder.boot == node.boot {
        // A boot ID is unique: the lease was made here, whatever name was used.
        return match netns(holder) {
            Netns::Gone => Ok(Over::Netns),
            Netns::Present => Err("its network namespace is there"),
            Netns::Unknown(why) => Err(why),
        };
    }
    if holder.node != node.name || holder.boot.is_empty() {
        return Err(ANOTHER_MACHINE);
    }
    if !node.machine.is_empty() && holder.machine == node.machine {
        return Ok(Over::Boot);
    }
    let created = lease.created.as_second();
    match booted {
        Some(booted) if created.saturating_add(PREVIOUS_MACHINE_MARGIN_SECONDS) < booted => {
            Ok(Over::PreviousMachine)
        }
        _ => Err(ANOTHER_MACHINE),
    }
}

/// A hundred thousand leases fit.
const MAX_SIGHTINGS_BYTES: u64 = 64 << 20;

fn sightings_path(options: &Options<'_>) -> PathBuf {
    options.state_dir.join(DIRECTORY).join(options.store)
}

impl Sightings {
    fn read(path: &Path, boot: &str) -> Self {
        let text = node::trust::read(path, MAX_SIGHTINGS_BYTES).ok().flatten();
        let read: Option<Self> = text.and_then(|text| serde_json::from_slice(&text).ok());
        read.filter(|sightings| sightings.boot == boot)
            .unwrap_or_default()
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        node::file::replace(path, serde_json::to_vec_pretty(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeIdentity {
        let root = tempfile::tempdir().unwrap();
        let random = root.path().join("proc/sys/kernel/random");
        std::fs::create_dir_all(&random).unwrap();
        std::fs::write(random.join("boot_id"), "now").unwrap();
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/machine-id"), "m1").unwrap();
        NodeIdentity::read(root.path(), "n1").unwrap()
    }

    fn holder(node: &str, machine: &str, boot: &str) -> Holder {
        let lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
        Holder {
            node: node.into(),
            machine: machine.into(),
            boot: boot.into(),
            ..lease.holder
        }
    }

    fn lease(holder: Holder, created: i64) -> Lease {
        Lease {
            holder,
            created: Timestamp::from_second(created).unwrap(),
            ..crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24")
        }
    }

    #[test]
    fn only_evidence_of_this_machine_ends_a_lease() {
        let unknown = Netns::Unknown("");
        for (of, netns, verdict) in [
            (holder("n1", "m1", "now"), Netns::Gone, Some(Over::Netns)),
            (holder("n1", "m1", "now"), Netns::Present, None),
            (holder("n1", "m1", "now"), unknown.clone(), None),
            (
                holder("old-name", "m1", "now"),
                Netns::Gone,
                Some(Over::Netns),
            ),
            (
                holder("n1", "m1", "before"),
                Netns::Present,
                Some(Over::Boot),
            ),
            (holder("n1", "m2", "before"), Netns::Gone, None),
            (holder("n2", "m2", "before"), Netns::Gone, None),
            (holder("n1", "", "before"), Netns::Gone, None),
            (holder("n1", "m1", ""), Netns::Gone, None),
            (holder("", "", ""), Netns::Gone, None),
        ] {
            let of = lease(of, 0);
            assert_eq!(
                over(&of, &node(), None, |_| netns.clone()).ok(),
                verdict,
                "{of:?} {netns:?}"
            );
        }
    }

    #[test]
    fn a_reinstalled_node_ends_what_it_held_before_this_boot() {
        let before = Some(Over::PreviousMachine);
        for (of, created, booted, verdict) in [
            (holder("n1", "m2", "before"), 699, Some(1000), before),
            (holder("n1", "m2", "before"), 700, Some(1000), None),
            (holder("n1", "m2", "before"), 5000, Some(1000), None),
            (holder("n1", "", "before"), 699, Some(1000), before),
            (holder("n1", "m2", "before"), 699, None, None),
            (holder("n2", "m2", "before"), 699, Some(1000), None),
            (holder("n1", "m2", ""), 699, Some(1000), None),
            (holder("n1", "m2", "now"), 699, Some(1000), None),
        ] {
            let of = lease(of, created);
            let netns = |_: &Holder| Netns::Present;
            assert_eq!(over(&of, &node(), booted, netns).ok(), verdict, "{of:?}");
        }
    }

    #[test]
    fn garbage_collection_is_for_leases_of_this_machine_alone() {
        for (of, ours) in [
            (holder("n1", "m1", "now"), true),
            (holder("n1", "m1", "before"), true),
            (holder("old-name", "m1", "now"), true),
            (holder("n1", "m2", "now"), true),
            (holder("n1", "m2", "before"), false),
            (holder("n1", "", "before"), false),
            (holder("n1", "", ""), false),
        ] {
            assert_eq!(is_of_this_machine(&of, &node()), ours, "{of:?}");
        }
        let mut nameless = node();
        nameless.machine.clear();
        assert!(!is_of_this_machine(&holder("n1", "", "before"), &nameless));
    }

    #[test]
    fn a_lease_is_freed_when_it_is_old_and_was_seen_before() {
        for (first, created, freed) in [
            (995, 940, true),
            (996, 940, false),
            (995, 941, false),
            (1000, 0, false),
            // Stamped by a clock that was ahead: seen for as long as it must be old.
            (940, 5000, true),
            (941, 5000, false),
            (995, 5000, false),
            (0, 1000, false),
            (0, 940, true),
        ] {
            assert_eq!(
                ripe(first, created, 1000),
                (first, freed),
                "{first} {created}"
            );
        }
        assert_eq!(ripe(9000, 0, 1000), (1000, false), "the clock was set back");
    }

    /// A store with one lease entry whose record a crash emptied, long before this boot, and
    /// to which no owner's record leads.
    struct Crashed {
        place: tempfile::TempDir,
        entry: PathBuf,
    }

    impl Crashed {
        fn new() -> Self {
            let place = tempfile::tempdir().unwrap();
            let shard = place.path().join("store/leases/default/10.0.0.0-24");
            std::fs::create_dir(place.path().join("store")).unwrap();
            let crashed = Self {
                entry: shard.join("10.0.0.5@1"),
                place,
            };
            crashed.store();
            std::fs::create_dir_all(&shard).unwrap();
            let file = std::fs::File::create(&crashed.entry).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
            crashed
        }

        fn store(&self) -> Store {
            use node::policy::{Policy, StorePolicy};
            let mut policy = Policy {
                state_dir: self.place.path().join("state"),
                ..Policy::default()
            };
            let store = StorePolicy::file(self.place.path().join("store"));
            policy.stores.insert("default".into(), store);
            let node = NodeIdentity::read(Path::new("/"), "n1").unwrap();
            Store::open(&policy, "default", node, Path::new("/")).unwrap()
        }

        fn run(&self, store: &Store, dry_run: bool) -> Report {
            let options = Options {
                netns_root: Path::new("/"),
                proc: Path::new("/proc"),
                state_dir: &self.place.path().join("state"),
                store: "default",
                cluster_node: false,
                dry_run,
                now: Timestamp::now(),
            };
            run(store, &options).unwrap()
        }

        fn swept(&self, store: &Store) -> bool {
            let path = self.place.path().join("state/reclaim/default");
            Sightings::read(&path, &store.node().boot).swept
        }
    }

    #[test]
    fn a_lease_whose_attachment_is_in_the_journal_is_kept() {
        let crashed = Crashed::new();
        let store = crashed.store();
        let state_dir = crashed.place.path().join("state");
        let mut of = holder("n1", &store.node().machine, &store.node().boot);
        of.netns = Some(crashed.place.path().join("gone").display().to_string());
        let name = format!("{}@{}@{}", of.network, of.container, of.interface);
        let lease = lease(of, 0);
        let judge = || {
            let options = Options {
                netns_root: Path::new("/"),
                proc: Path::new("/proc"),
                state_dir: &state_dir,
                store: "default",
                cluster_node: false,
                dry_run: false,
                now: Timestamp::now(),
            };
            let run = Run {
                store: &store,
                options: &options,
                attached: attached(&state_dir),
                before: Sightings::default(),
                after: Sightings::default(),
                report: Report::default(),
            };
            run.judge(&lease).ok()
        };
        assert_eq!(judge(), Some(Over::Netns));
        let record = state_dir.join("attachments").join(&name);
        std::fs::create_dir_all(record.parent().unwrap()).unwrap();
        std::fs::write(&record, "").unwrap();
        assert_eq!(judge(), None);
    }

    #[test]
    fn leases_without_owner_are_searched_for_once_in_a_boot() {
        let crashed = Crashed::new();
        let store = crashed.store();
        let shown = crashed.run(&store, true).findings;
        assert!(crashed.entry.exists(), "a dry run freed something");
        assert!(
            shown[0].what.contains("reclaim --yes frees it"),
            "{shown:?}"
        );
        assert!(!crashed.swept(&store), "a dry run counted");
        crashed.run(&store, false);
        assert!(!crashed.entry.exists());
        assert!(crashed.swept(&store));
        // It is not made again, nor forgotten by a dry run.
        let file = std::fs::File::create(&crashed.entry).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        for dry_run in [true, false, true] {
            crashed.run(&store, dry_run);
            assert!(crashed.entry.exists() && crashed.swept(&store), "{dry_run}");
        }
        // In another boot it is.
        std::fs::remove_file(crashed.place.path().join("state/reclaim/default")).unwrap();
        crashed.run(&store, false);
        assert!(!crashed.entry.exists());
    }

    #[test]
    fn a_lease_without_owner_ends_by_evidence_seen_twice() {
        let crashed = Crashed::new();
        let store = crashed.store();
        let mut of = holder("n1", &store.node().machine, &store.node().boot);
        of.netns = Some(crashed.place.path().join("gone").display().to_string());
        let record = crate::lease::Record::of(vec![lease(of, 0)]).unwrap();
        std::fs::write(&crashed.entry, record.encode()).unwrap();
        let first = crashed.run(&store, false);
        assert_eq!(first.waiting.len(), 1, "{first:?}");
        assert!(crashed.entry.exists() && !crashed.swept(&store));
        let path = crashed.place.path().join("state/reclaim/default");
        let mut seen = Sightings::read(&path, &store.node().boot);
        seen.seen.values_mut().for_each(|at| *at -= 60);
        seen.write(&path).unwrap();
        let second = crashed.run(&store, false);
        assert_eq!(second.freed.len(), 1, "{second:?}");
        assert!(!crashed.entry.exists() && crashed.swept(&store));
    }

    #[test]
    fn an_emptied_record_of_this_boot_may_be_a_call_that_runs() {
        let crashed = Crashed::new();
        let store = crashed.store();
        std::fs::File::create(&crashed.entry).unwrap();
        let file = std::fs::File::open(&crashed.entry).unwrap();
        file.set_modified(std::time::SystemTime::now()).unwrap();
        crashed.run(&store, false);
        assert!(crashed.entry.exists());
    }

    /// Files have whole seconds here: in the second in which the machine began, a call may have
    /// run already.
    #[test]
    fn an_emptied_record_of_the_boots_first_second_is_kept() {
        let crashed = Crashed::new();
        let store = crashed.store();
        let booted = u64::try_from(store.node().booted().unwrap()).unwrap();
        for (age, kept) in [(0, true), (1, false)] {
            let modified = std::time::UNIX_EPOCH + Duration::from_secs(booted - age);
            let file = std::fs::File::create(&crashed.entry).unwrap();
            file.set_modified(modified).unwrap();
            // In another boot, or the search is not made again.
            let _ = std::fs::remove_file(crashed.place.path().join("state/reclaim/default"));
            crashed.run(&store, false);
            assert_eq!(crashed.entry.exists(), kept, "{age} s before the boot");
        }
    }

    /// There every record is on the server before it counts, and leases without owner may
    /// be another node's.
    #[test]
    fn leases_without_owner_are_not_searched_for_on_a_shared_file_system() {
        let crashed = Crashed::new();
        let store = crashed.store().into_shared();
        crashed.run(&store, false);
        assert!(crashed.entry.exists());
    }

    #[test]
    fn sightings_are_of_one_boot() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("reclaim/default");
        let seen = BTreeMap::from([("a".to_owned(), 7)]);
        let sightings = Sightings {
            boot: "b1".into(),
            swept: true,
            seen,
        };
        sightings.write(&path).unwrap();
        assert_eq!(Sightings::read(&path, "b1"), sightings);
        assert_eq!(Sightings::read(&path, "b2"), Sightings::default());
        std::fs::write(&path, "{").unwrap();
        assert_eq!(Sightings::read(&path, "b1"), Sightings::default());
    }
}
