//! `rdma-ipam` on a file system that fails it at each system call in turn: full,
//! over quota, broken, or gone stale. An ADD succeeds and holds, or fails and
//! holds nothing; a DEL that says done has freed.

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::cni::answer;
use e2e::harness::Case;
use e2e::lease_store::{Caller, LeaseStore, addresses, network};
use e2e::trace::{Point, fail_at, points, record};
use serde_json::Value;

pub(crate) const CASES: &[Case] = &[
    case!(an_add_that_is_failed_anywhere_leaves_nothing, Strace),
    case!(a_del_that_says_done_has_freed, Strace),
];

/// Errors of a file system, and the calls that may see each.
const FAULTS: [(&str, &[&str]); 4] = [
    (
        "ENOSPC",
        &[
            "openat",
            "open",
            "write",
            "pwrite64",
            "linkat",
            "renameat",
            "renameat2",
            "mkdirat",
            "fsync",
        ],
    ),
    (
        "EDQUOT",
        &[
            "openat", "open", "write", "pwrite64", "linkat", "mkdirat", "fsync",
        ],
    ),
    (
        "EIO",
        &[
            "openat",
            "open",
            "read",
            "pread64",
            "write",
            "pwrite64",
            "linkat",
            "renameat",
            "renameat2",
            "unlinkat",
            "mkdirat",
            "getdents64",
            "fstat",
            "newfstatat",
            "statx",
            "fsync",
            "ftruncate",
            "fstatfs",
            "statfs",
        ],
    ),
    (
        "ESTALE",
        &[
            "openat",
            "open",
            "read",
            "pread64",
            "write",
            "pwrite64",
            "linkat",
            "renameat",
            "renameat2",
            "unlinkat",
            "mkdirat",
            "getdents64",
            "fstat",
            "newfstatat",
            "statx",
            "fsync",
            "ftruncate",
            "fstatfs",
            "statfs",
        ],
    ),
];

fn ranges() -> Value {
    network(&["10.0.0.0/24", "fd99::/64"])
}

fn victim() -> Caller {
    Caller::new("n1", "victim")
}

fn store() -> Result<LeaseStore> {
    let store = LeaseStore::new("0")?;
    store.add_node("n1")?;
    store.add(&Caller::new("n1", "bystander"), &ranges())?;
    Ok(store)
}

fn enumerate(store: &LeaseStore, verb: &str) -> Result<Vec<Point>> {
    let log = tempfile::NamedTempFile::new()?;
    let mut command = store.command(verb, &victim(), &record(log.path()));
    answer(&mut command, ranges().to_string().as_bytes())?.success()?;
    let points = points(log.path())?;
    // Before the node's boot ID comes the C library's start, and the policy: a
    // DEL that cannot read it goes by the defaults, and leaves the rest to reclaim.
    // An answer that cannot be written is the runtime's to notice, which makes a DEL.
    let begin = points
        .iter()
        .position(|point| point.line.contains("boot_id"));
    let begin = begin.context("the boot ID was not read")?;
    let points = points.into_iter().skip(begin);
    Ok(points
        .filter(|point| !point.line.starts_with("write(1, "))
        .collect())
}

fn of(store: &LeaseStore, container: &str) -> Result<Vec<String>> {
    let held = store.held("n1")?;
    Ok(held
        .into_iter()
        .filter(|(_, of)| of == container)
        .map(|(address, _)| address)
        .collect())
}

fn an_add_that_is_failed_anywhere_leaves_nothing() -> Result<()> {
    let store = store()?;
    let records = store.files("records").len();
    let points = enumerate(&store, "ADD")?;
    store.del(&victim(), &ranges())?;
    let (mut refused, mut coped) = (0, 0);
    for (error, calls) in FAULTS {
        for point in points
            .iter()
            .filter(|point| calls.contains(&point.call.as_str()))
        {
            let at = || {
                format!(
                    "{error} from {} number {}: {}",
                    point.call, point.occurrence, point.line
                )
            };
            let mut command = store.command("ADD", &victim(), &fail_at(point, error));
            let answer = answer(&mut command, ranges().to_string().as_bytes())?;
            let held = of(&store, "victim").with_context(at)?;
            if answer.status.success() {
                coped += 1;
                let given = addresses(&answer).with_context(at)?;
                ensure!(
                    given.len() == 2 && given == held,
                    "{}: answered {given:?}, holds {held:?}",
                    at()
                );
            } else {
                refused += 1;
                let (code, message) = answer.refusal().with_context(at)?;
                let known = [5, 7, 11, 101, 105].contains(&code);
                ensure!(
                    known && !message.is_empty(),
                    "{}: code {code}, {message}",
                    at()
                );
                ensure!(
                    held.is_empty(),
                    "{}: refused ({message}), but holds {held:?}",
                    at()
                );
            }
            del_frees(&store, records).with_context(at)?;
        }
    }
    ensure!(refused > 20, "only {refused} faults were noticed");
    println!("ADD: {refused} faults refused, {coped} coped with");
    Ok(())
}

/// DEL releases what the victim has, and nothing else.
fn del_frees(store: &LeaseStore, records: usize) -> Result<()> {
    store.del(&victim(), &ranges())?;
    ensure!(of(store, "victim")?.is_empty(), "DEL left something");
    ensure!(
        of(store, "bystander")?.len() == 2,
        "a bystander lost his lease"
    );
    let owners = store.files("records");
    ensure!(owners.len() == records, "{owners:?}");
    Ok(())
}

fn a_del_that_says_done_has_freed() -> Result<()> {
    let store = store()?;
    let records = store.files("records").len();
    store.add(&victim(), &ranges())?;
    let points = enumerate(&store, "DEL")?;
    let (mut refused, mut coped) = (0, 0);
    for (error, calls) in FAULTS {
        for point in points
            .iter()
            .filter(|point| calls.contains(&point.call.as_str()))
        {
            let at = || {
                format!(
                    "{error} from {} number {}: {}",
                    point.call, point.occurrence, point.line
                )
            };
            store.add(&victim(), &ranges()).with_context(at)?;
            let mut command = store.command("DEL", &victim(), &fail_at(point, error));
            let answer = answer(&mut command, ranges().to_string().as_bytes())?;
            if answer.status.success() {
                coped += 1;
                let held = of(&store, "victim").with_context(at)?;
                ensure!(held.is_empty(), "{}: said done, but holds {held:?}", at());
            } else {
                refused += 1;
                answer.refusal().with_context(at)?;
            }
            del_frees(&store, records).with_context(at)?;
        }
    }
    ensure!(refused > 5, "only {refused} faults were noticed");
    println!("DEL: {refused} faults refused, {coped} coped with");
    Ok(())
}
