//! `rdma-ipam` killed before each of its system calls in turn, really killed:
//! whatever the runtime does next leaves no lease leaked and none doubled.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::cni::answer;
use e2e::harness::Case;
use e2e::lease_store::{Caller, LeaseStore, network};
use e2e::trace::{Point, kill_at, points, record};
use serde_json::Value;

pub(crate) const CASES: &[Case] = &[
    case!(an_add_killed_anywhere_is_undone_by_del, Strace),
    case!(an_add_killed_anywhere_is_taken_up_by_the_next, Strace),
    case!(
        a_first_add_killed_anywhere_leaves_a_store_that_works,
        Strace
    ),
    case!(a_del_killed_anywhere_is_finished_by_the_next, Strace),
    case!(an_add_after_a_del_killed_anywhere_starts_afresh, Strace),
    case!(a_take_over_killed_anywhere_loses_nothing, Strace),
];

/// Fewer means that the enumeration is broken, not that the program is frugal.
const FEWEST_POINTS: usize = 40;

fn ranges() -> Value {
    network(&["10.0.0.0/24", "fd00::/64"])
}

fn victim() -> Caller {
    Caller::new("n1", "victim")
}

/// A store with two holders who must not notice anything.
fn store_with_bystanders() -> Result<(LeaseStore, Vec<(String, String)>)> {
    let store = LeaseStore::new("0")?;
    store.add_node("n1")?;
    for name in ["bystander", "other"] {
        store.add(&Caller::new("n1", name), &ranges())?;
    }
    let held = store.held("n1")?;
    ensure!(held.len() == 4, "{held:?}");
    Ok((store, held))
}

/// The system calls of one call, which is made for it.
fn enumerate(
    store: &LeaseStore,
    verb: &str,
    caller: &Caller,
    config: &Value,
) -> Result<Vec<Point>> {
    let log = tempfile::NamedTempFile::new()?;
    let mut command = store.command(verb, caller, &record(log.path()));
    answer(&mut command, config.to_string().as_bytes())?.success()?;
    let points = points(log.path())?;
    ensure!(
        points.len() >= FEWEST_POINTS,
        "only {} system calls seen",
        points.len()
    );
    Ok(points)
}

/// Makes a call that dies before `point`; whether it did.
fn killed(
    store: &LeaseStore,
    verb: &str,
    caller: &Caller,
    config: &Value,
    point: &Point,
) -> Result<bool> {
    let mut command = store.command(verb, caller, &kill_at(point));
    let answer = answer(&mut command, config.to_string().as_bytes())?;
    Ok(!answer.status.success() && answer.stdout.is_empty())
}

/// Nothing but the bystanders' leases and records; and fsck finds the store in order.
fn only(store: &LeaseStore, bystanders: &[(String, String)]) -> Result<()> {
    let held = store.held("n1")?;
    ensure!(held == bystanders, "held: {held:?}");
    let records = store.files("owners").len();
    ensure!(records == bystanders.len(), "{records} records of owners");
    let checkup = store.admin("n1", &["fsck"])?;
    let sound = checkup.get("sound").and_then(Value::as_u64);
    ensure!(sound == Some(bystanders.len() as u64), "fsck: {checkup}");
    Ok(())
}

fn print(what: &str, points: &[Point], dead: usize) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for point in points {
        *counts.entry(&point.call).or_default() += 1;
    }
    println!(
        "{what}: killed before each of {} system calls, died {dead} times: {counts:?}",
        points.len()
    );
}

/// For each system call of `verb`: prepares, kills there, goes on and checks.
fn everywhere(
    what: &str,
    verb: &str,
    prepare: impl Fn(&LeaseStore) -> Result<()>,
    next: impl Fn(&LeaseStore) -> Result<()>,
) -> Result<()> {
    let (store, bystanders) = store_with_bystanders()?;
    prepare(&store)?;
    let points = enumerate(&store, verb, &victim(), &ranges())?;
    store.del(&victim(), &ranges())?;
    let mut dead = 0;
    for point in &points {
        let at = || {
            format!(
                "{verb} killed before {} number {}: {}",
                point.call, point.occurrence, point.line
            )
        };
        prepare(&store).with_context(at)?;
        dead += usize::from(killed(&store, verb, &victim(), &ranges(), point).with_context(at)?);
        next(&store).with_context(at)?;
        only(&store, &bystanders).with_context(at)?;
    }
    // The last calls may come after the answer, and a run need not take the traced one's every turn.
    ensure!(
        dead * 10 >= points.len() * 9,
        "died at {dead} of {} points only",
        points.len()
    );
    print(what, &points, dead);
    Ok(())
}

fn an_add_killed_anywhere_is_undone_by_del() -> Result<()> {
    everywhere(
        "ADD, then DEL",
        "ADD",
        |_| Ok(()),
        |store| store.del(&victim(), &ranges()),
    )
}

fn an_add_killed_anywhere_is_taken_up_by_the_next() -> Result<()> {
    everywhere(
        "ADD, then ADD",
        "ADD",
        |_| Ok(()),
        |store| {
            let given = store.add(&victim(), &ranges())?;
            ensure!(given.len() == 2, "{given:?}");
            ensure!(
                store.add(&victim(), &ranges())? == given,
                "a repeated ADD answers otherwise"
            );
            let held = store.held("n1")?;
            let mine: Vec<_> = held
                .iter()
                .filter(|(_, of)| of == "victim")
                .map(|(a, _)| a)
                .collect();
            ensure!(
                mine.len() == 2 && given.iter().all(|a| mine.contains(&a)),
                "{held:?}, answered {given:?}"
            );
            store.del(&victim(), &ranges())
        },
    )
}

fn a_del_killed_anywhere_is_finished_by_the_next() -> Result<()> {
    let prepare = |store: &LeaseStore| store.add(&victim(), &ranges()).map(drop);
    everywhere("DEL, then DEL", "DEL", prepare, |store| {
        store.del(&victim(), &ranges())
    })
}

fn an_add_after_a_del_killed_anywhere_starts_afresh() -> Result<()> {
    let prepare = |store: &LeaseStore| store.add(&victim(), &ranges()).map(drop);
    everywhere("DEL, then ADD", "DEL", prepare, |store| {
        ensure!(store.add(&victim(), &ranges())?.len() == 2);
        let held = store.held("n1")?;
        ensure!(
            held.iter().filter(|(_, of)| of == "victim").count() == 2,
            "{held:?}"
        );
        store.del(&victim(), &ranges())
    })
}

fn a_take_over_killed_anywhere_loses_nothing() -> Result<()> {
    let previous = Caller::new("n1", "previous").of_pod("default/victim");
    let prepare = |store: &LeaseStore| store.add(&previous, &ranges()).map(drop);
    let (store, bystanders) = store_with_bystanders()?;
    prepare(&store)?;
    let points = enumerate(&store, "ADD", &victim(), &ranges())?;
    store.del(&victim(), &ranges())?;
    store.del(&previous, &ranges())?;
    let mut dead = 0;
    for point in &points {
        let at = || {
            format!(
                "killed before {} number {}: {}",
                point.call, point.occurrence, point.line
            )
        };
        prepare(&store).with_context(at)?;
        dead += usize::from(killed(&store, "ADD", &victim(), &ranges(), point).with_context(at)?);
        let given = store.add(&victim(), &ranges()).with_context(at)?;
        let held = store.held("n1").with_context(at)?;
        let mine = held
            .iter()
            .filter(|(address, of)| of == "victim" && given.contains(address));
        ensure!(mine.count() == 2, "{}: {held:?}, answered {given:?}", at());
        // The late DEL of the previous sandbox frees nothing of the new one.
        store.del(&previous, &ranges()).with_context(at)?;
        ensure!(store.add(&victim(), &ranges())? == given, "{}", at());
        store.del(&victim(), &ranges()).with_context(at)?;
        only(&store, &bystanders).with_context(at)?;
    }
    print("ADD of a pod's next sandbox, then ADD", &points, dead);
    Ok(())
}

fn a_first_add_killed_anywhere_leaves_a_store_that_works() -> Result<()> {
    let new = || -> Result<LeaseStore> {
        let store = LeaseStore::new("0")?;
        store.add_node("n1")?;
        Ok(store)
    };
    let points = enumerate(&new()?, "ADD", &victim(), &ranges())?;
    let mut dead = 0;
    for point in &points {
        let at = || {
            format!(
                "killed before {} number {}: {}",
                point.call, point.occurrence, point.line
            )
        };
        let store = new()?;
        dead += usize::from(killed(&store, "ADD", &victim(), &ranges(), point).with_context(at)?);
        let given = store.add(&victim(), &ranges()).with_context(at)?;
        ensure!(
            given == ["10.0.0.1", "fd00::1"] || given.len() == 2,
            "{}: {given:?}",
            at()
        );
        let second = store
            .add(&Caller::new("n1", "second"), &ranges())
            .with_context(at)?;
        ensure!(
            second.iter().all(|address| !given.contains(address)),
            "{}: {second:?}",
            at()
        );
        store.del(&victim(), &ranges()).with_context(at)?;
        ensure!(store.held("n1")?.len() == 2, "{}", at());
    }
    print("first ADD in an empty directory, then ADD", &points, dead);
    Ok(())
}
