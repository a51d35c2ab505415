//! Freeing the leases of pods that ended: for the runtime's GC, the daemon and the administrator.
//!
//! A lease is freed on evidence, never for lack of it: its network namespace is gone, seen twice, some
//! seconds apart, and it is not young. GC brings the runtime's list instead, and frees nothing that is
//! younger than that. Leases end with the boot by themselves.
//!
//! A lease whose attachment is in the journal is released with that: its interface may have left the
//! namespace that is gone. What was seen once is noted beside the leases; a lost note costs one more
//! reading. Killed between two leases, the next run goes on.

use crate::lease::{Holder, Lease, Record};
use crate::leases::{Finding, LeaseError, Leases, since_boot};
use node::netns::{self, Netns};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// A lease younger than this is left alone: its ADD may still be running.
pub const MIN_AGE: Duration = Duration::from_secs(60);
/// The second reading comes at least this long after the first.
pub const MIN_GAP: Duration = Duration::from_secs(5);

/// What to read, and what to do.
#[derive(Debug, Clone)]
pub struct Options<'a> {
    /// Prefix of the paths of network namespaces: `/` for who sees the host's.
    pub netns_root: &'a Path,
    pub proc: &'a Path,
    pub state_dir: &'a Path,
    /// How long freed addresses cool down.
    pub cooldown: Duration,
    /// Only say what would be freed.
    pub dry_run: bool,
}

/// Why a lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
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
    /// Leases that are not over, or not known to be; and why.
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
            Self::Netns => "its network namespace is gone",
            Self::Unlisted => "the runtime does not list it",
        }
    }
}

/// Frees the leases that are over.
///
/// # Errors
/// When the leases cannot be gone through. What could not be freed is in the report.
pub fn run(leases: &Leases, options: &Options<'_>) -> Result<Report, LeaseError> {
    let attached = attached(options.state_dir);
    let before = leases.seen();
    let mut after: BTreeMap<String, u64> = BTreeMap::new();
    let mut report = Report::default();
    let (records, findings) = leases.records()?;
    report.findings = findings;
    let now = since_boot();
    for (name, record) in records {
        let why = match judge(record.holder(), &attached, options) {
            Ok(why) => why,
            Err(why) => {
                let kept = record.leases().iter().map(|lease| (lease.clone(), why));
                report.kept.extend(kept);
                continue;
            }
        };
        // Another record of this name was taken at another time.
        let key = format!("{name}#{}", record.since_boot.as_millis());
        let first = before.get(&key).copied().unwrap_or(now.as_secs());
        after.insert(key, first);
        if !is_ripe(Duration::from_secs(first), record.since_boot, now) {
            let waiting = record.leases().iter().map(|lease| (lease.clone(), why));
            report.waiting.extend(waiting);
        } else if options.dry_run {
            let freed = record.leases().iter().map(|lease| (lease.clone(), why));
            report.freed.extend(freed);
        } else {
            report.free(leases, &name, &record, options.cooldown, why);
        }
    }
    if let Err(error) = leases.note_seen(&after) {
        report
            .failed
            .push(format!("remember what was seen: {error}"));
    }
    if !options.dry_run
        && let Err(error) = leases.tidy(options.cooldown)
    {
        report.failed.push(error.to_string());
    }
    Ok(report)
}

/// Frees the leases of one network that the runtime does not list, and that are older than its list.
///
/// # Errors
/// When the leases cannot be gone through. What could not be freed is in the report.
pub fn keep_only(
    leases: &Leases,
    network: &str,
    listed: &impl Fn(&Holder) -> bool,
    since: Duration,
    cooldown: Duration,
) -> Result<Report, LeaseError> {
    let mut report = Report::default();
    let (records, findings) = leases.records()?;
    report.findings = findings;
    for (name, record) in records {
        let holder = record.holder();
        if holder.network == network && !listed(holder) && record.since_boot < since {
            report.free(leases, &name, &record, cooldown, Over::Unlisted);
        }
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

impl Report {
    fn free(
        &mut self,
        leases: &Leases,
        name: &str,
        record: &Record,
        cooldown: Duration,
        why: Over,
    ) {
        // An ADD may have replaced it meanwhile.
        match leases.release_if(name, cooldown, |now| now == record) {
            Ok(freed) => self
                .freed
                .extend(freed.into_iter().map(|lease| (lease, why))),
            Err(error) => self.failed.push(error.to_string()),
        }
    }
}

/// Why leases are over, or why they are kept.
fn judge(
    holder: &Holder,
    attached: &BTreeSet<String>,
    options: &Options<'_>,
) -> Result<Over, &'static str> {
    let Some(path) = &holder.netns else {
        return Err("no namespace is recorded");
    };
    match netns::read(options.netns_root, options.proc, path, holder.netns_inode) {
        Netns::Present => return Err("its network namespace is there"),
        Netns::Unknown(why) => return Err(why),
        Netns::Gone => {}
    }
    match attached.contains(&format!("{}@{}", holder.container, holder.interface)) {
        true => Err("its attachment is still in the journal"),
        false => Ok(Over::Netns),
    }
}

/// Whether a lease that is over was seen so before, and is old enough.
fn is_ripe(first: Duration, taken: Duration, now: Duration) -> bool {
    now.saturating_sub(first) >= MIN_GAP && now.saturating_sub(taken) >= MIN_AGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_freed_when_it_is_old_and_was_seen_before() {
        for (first, taken, ripe) in [
            (995, 940, true),
            (996, 940, false),
            (995, 941, false),
            (1000, 0, false),
            (0, 940, true),
        ] {
            let [first, taken, now] = [first, taken, 1000].map(Duration::from_secs);
            assert_eq!(is_ripe(first, taken, now), ripe, "{first:?} {taken:?}");
        }
    }

    #[test]
    fn evidence_is_a_namespace_that_is_gone_and_no_attachment() {
        let place = tempfile::tempdir().unwrap();
        let of = |netns: Option<&str>| Holder {
            netns: netns.map(|name| place.path().join(name).display().to_string()),
            netns_inode: Some(7),
            ..crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24").holder
        };
        let state_dir = place.path().join("state");
        let judge = |holder: &Holder| {
            let options = Options {
                netns_root: Path::new("/"),
                proc: Path::new("/proc"),
                state_dir: &state_dir,
                cooldown: Duration::ZERO,
                dry_run: false,
            };
            judge(holder, &attached(&state_dir), &options)
        };
        let gone = of(Some("gone"));
        assert_eq!(judge(&gone), Ok(Over::Netns));
        assert!(judge(&of(Some("no/such/directory"))).is_err());
        assert!(judge(&of(None)).is_err());
        let name = format!("{}@{}@{}", gone.network, gone.container, gone.interface);
        let record = state_dir.join("attachments").join(name);
        std::fs::create_dir_all(record.parent().unwrap()).unwrap();
        std::fs::write(&record, "").unwrap();
        assert!(judge(&gone).is_err());
    }
}
