//! When an attachment is orphaned, that is, over without a DEL: the rule of the daemon's loop and
//! of `rdmactl reclaim`.
//!
//! Evidence is never the lack of it: the boot is over, or the network namespace is gone. An
//! attachment whose state is unknown is kept. Both callers ask twice, some time apart.

use std::{collections::BTreeSet, path::Path, time::Duration};

use hca::Host;
pub use node::netns::Netns;
use node::{identity::is_other_boot, netns};

use crate::{
    detach::detach,
    error::Error,
    journal::{self, Key, Record},
    node::Node,
};

/// An ADD or DEL of an attachment may be running; the next round finds what it leaves.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// An attachment younger than this is left alone: its ADD may still be running.
pub const MIN_AGE_SECONDS: u64 = 60;

/// Why an attachment is over, if it is.
///
/// `proc` is the host's; `boot` is the kernel's boot ID now, empty where it reports none; `now`
/// is in seconds since 1970.
pub fn over(record: &Record, proc: &Path, boot: &str, now: u64) -> Option<&'static str> {
    // The runtime's DEL is done; what is left can be tried at any time.
    if record.is_returned() && !is_other_boot(&record.boot, boot) {
        return Some("its NIC is back, and not all of it is restored");
    }
    // One from the future was written by a clock that was set back since, which says nothing of its
    // age: its ADD holds the attachment's lock for as long as it runs.
    if (0..MIN_AGE_SECONDS).contains(&now.wrapping_sub(record.created)) {
        return None;
    }
    if is_other_boot(&record.boot, boot) {
        return Some("its boot is over");
    }
    (netns(&record.netns, proc) == Netns::Gone).then_some("its network namespace is gone")
}

/// Undoes an attachment that is over. False when it is another one by now, or none: a call of the
/// runtime came first.
pub fn undo(node: &mut Node, key: &Key, seen: &Record, timeout: Duration) -> Result<bool, Error> {
    let _attachment = node.journal.lock_attachment(key, LOCK_TIMEOUT)?;
    match node.journal.read(key)? {
        Some(record) if record == *seen => detach(node, key, &record, timeout).map(|()| true),
        _ => Ok(false),
    }
}

/// What became of an attachment's namespace, seen from this process' file system.
pub fn netns(of: &journal::Netns, proc: &Path) -> Netns {
    netns::read(Path::new("/"), proc, &of.path, Some(of.inode))
}

/// Whether this process is in the network namespace of the host that `sys` shows: what is to be
/// restored is restored where this process is.
///
/// # Errors
/// It is not, or that is not known; as text.
pub fn in_host_namespace(host: &Host) -> Result<(), String> {
    let own = std::fs::read(host.proc.join("self/net/dev"))
        .map_err(|error| format!("this process' netdevs cannot be read: {error}"))?;
    let own = names_of(&own);
    let shown: BTreeSet<Vec<u8>> = std::fs::read_dir(host.sys.join("class/net"))
        .map_err(|error| format!("the host's netdevs cannot be read: {error}"))?
        .flatten()
        // Plain files, such as bonding_masters, are not netdevs.
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_encoded_bytes())
        .collect();
    // Pods' links are made and removed between the two reads; another namespace shares only "lo".
    let common = own
        .intersection(&shown)
        .filter(|name| name.as_slice() != b"lo")
        .count();
    if common == 0 || common * 2 < shown.len() {
        return Err("this process is not in the host's network namespace".into());
    }
    Ok(())
}

/// Names in the table that `/proc/net/dev` prints, which are bytes.
fn names_of(table: &[u8]) -> BTreeSet<Vec<u8>> {
    table
        .split(|byte| *byte == b'\n')
        .skip(2)
        .filter_map(|line| {
            let end = line.iter().position(|byte| *byte == b':')?;
            Some(line.get(..end)?.trim_ascii().to_vec())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(created: u64, boot: &str, path: &str) -> Record {
        serde_json::from_value(serde_json::json!({
            "version": 1, "network": "rail0", "containerId": "c1", "ifname": "net1",
            "created": created, "boot": boot,
            "netns": {"path": path, "device": 4, "inode": 4026531840u64}, "parts": [],
        }))
        .unwrap()
    }

    #[test]
    fn an_attachment_is_over_on_evidence_alone() {
        let dir = tempfile::tempdir().unwrap();
        let proc = Path::new("/proc");
        let gone = dir.path().join("gone").display().to_string();
        let file = dir.path().join("plain");
        std::fs::write(&file, "").unwrap();
        let cases = [
            (
                record(0, "this", &gone),
                Some("its network namespace is gone"),
            ),
            (record(0, "other", &gone), Some("its boot is over")),
            (
                record(0, "other", "/proc/1/ns/net"),
                Some("its boot is over"),
            ),
            // Young.
            (record(950, "this", &gone), None),
            (record(950, "other", &gone), None),
            // Written by a clock that was ahead.
            (
                record(2000, "this", &gone),
                Some("its network namespace is gone"),
            ),
            // Not known: another directory, another process, a file that is not a namespace.
            (record(0, "this", "/nonexistent/directory/netns"), None),
            (record(0, "this", "/proc/4711/ns/net"), None),
            (record(0, "this", &file.display().to_string()), None),
            (record(0, "", &file.display().to_string()), None),
        ];
        for (record, expected) in cases {
            assert_eq!(over(&record, proc, "this", 1000), expected, "{record:?}");
        }
        let record = record(0, "other", "/proc/1/ns/net");
        assert_eq!(over(&record, proc, "", 1000), None);
    }

    #[test]
    fn only_the_hosts_own_namespace_will_do() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        assert!(in_host_namespace(&host).is_err());
        let net = dir.path().join("proc/self/net");
        std::fs::create_dir_all(&net).unwrap();
        let table = |names: &[&str]| {
            let lines: String = names
                .iter()
                .map(|name| format!("{name:>6}: 0 0 0\n"))
                .collect();
            std::fs::write(
                net.join("dev"),
                format!("Inter-| Receive\n face |bytes\n{lines}"),
            )
            .unwrap();
        };
        for name in ["lo", "ens1", "ens2", "veth1"] {
            std::fs::create_dir_all(dir.path().join("sys/class/net").join(name)).unwrap();
        }
        std::fs::write(dir.path().join("sys/class/net/bonding_masters"), "").unwrap();
        table(&["lo", "ens1", "ens2"]);
        assert_eq!(in_host_namespace(&host), Ok(()));
        table(&["lo", "eth0"]);
        assert!(
            in_host_namespace(&host)
                .unwrap_err()
                .contains("not in the host's")
        );
        table(&["lo"]);
        assert!(in_host_namespace(&host).is_err());
    }
}
