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
    case!(an_order_of_eight_killed_anywhere_is_undone_by_del, Strace),
    case!(
        an_order_of_eight_killed_anywhere_is_taken_up_by_the_next,
        Strace
    ),
    case!(
        a_del_of_eight_killed_anywhere_is_finished_by_the_next,
        Strace
    ),
];

/// Fewer means that the enumeration is broken, not that the program is frugal.
const FEWEST_POINTS: usize = 25;

fn ranges() -> Value {
    network(&["10.0.0.0/24", "fd99::/64"])
}

/// Eight addresses: of one range several, of other shards and families one.
fn eight() -> Value {
    network(&[
        "10.0.0.0/24",
        "10.0.0.0/24",
        "10.0.1.0/24",
        "10.0.2.0/23",
        "10.0.0.0/24",
        "fd99::/64",
        "fd99::/64",
        "fd01::/64",
    ])
}

/// What is asked for.
struct Setting {
    config: Value,
    addresses: usize,
}

fn two() -> Setting {
    Setting {
        config: ranges(),
        addresses: 2,
    }
}

fn of_eight() -> Setting {
    Setting {
        config: eight(),
        addresses: 8,
    }
}

fn victim() -> Caller {
    Caller::new("n1", "victim")
}

/// A store with two holders who must not notice anything, and what they hold.
struct Bystanders {
    store: LeaseStore,
    held: Vec<(String, String)>,
    records: usize,
}

impl Setting {
    fn bystanders(&self) -> Result<Bystanders> {
        let store = LeaseStore::new("0")?;
        store.add_node("n1")?;
        for name in ["bystander", "other"] {
            store.add(&Caller::new("n1", name), &self.config)?;
        }
        let held = store.held("n1")?;
        ensure!(held.len() == 2 * self.addresses, "{held:?}");
        let records = store.files("records").len();
        ensure!(records == 2, "{records} records");
        Ok(Bystanders {
            store,
            held,
            records,
        })
    }
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

impl Bystanders {
    /// Nothing but their leases and records; and fsck finds the store in order.
    fn only(&self) -> Result<()> {
        let held = self.store.held("n1")?;
        ensure!(held == self.held, "held: {held:?}");
        let records = self.store.files("records").len();
        ensure!(records == self.records, "{records} records of owners");
        let checkup = self.store.admin("n1", &["fsck"])?;
        let sound = checkup.get("sound").and_then(Value::as_u64);
        ensure!(sound == Some(self.held.len() as u64), "fsck: {checkup}");
        let findings = checkup.get("findings").and_then(Value::as_array);
        ensure!(findings.is_some_and(Vec::is_empty), "fsck: {checkup}");
        Ok(())
    }
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
    setting: &Setting,
    prepare: impl Fn(&LeaseStore) -> Result<()>,
    next: impl Fn(&LeaseStore) -> Result<()>,
) -> Result<()> {
    let bystanders = setting.bystanders()?;
    let (store, config) = (&bystanders.store, &setting.config);
    prepare(store)?;
    let points = enumerate(store, verb, &victim(), config)?;
    store.del(&victim(), config)?;
    let mut dead = 0;
    for point in &points {
        let at = || {
            format!(
                "{verb} killed before {} number {}: {}",
                point.call, point.occurrence, point.line
            )
        };
        prepare(store).with_context(at)?;
        dead += usize::from(killed(store, verb, &victim(), config, point).with_context(at)?);
        next(store).with_context(at)?;
        bystanders.only().with_context(at)?;
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

fn add_then_del(setting: &Setting) -> Result<()> {
    everywhere(
        "ADD, then DEL",
        "ADD",
        setting,
        |_| Ok(()),
        |store| store.del(&victim(), &setting.config),
    )
}

fn add_then_add(setting: &Setting) -> Result<()> {
    everywhere(
        "ADD, then ADD",
        "ADD",
        setting,
        |_| Ok(()),
        |store| {
            let given = store.add(&victim(), &setting.config)?;
            ensure!(given.len() == setting.addresses, "{given:?}");
            ensure!(
                store.add(&victim(), &setting.config)? == given,
                "a repeated ADD answers otherwise"
            );
            let held = store.held("n1")?;
            let mine: Vec<_> = held
                .iter()
                .filter(|(_, of)| of == "victim")
                .map(|(a, _)| a)
                .collect();
            ensure!(
                mine.len() == given.len() && given.iter().all(|a| mine.contains(&a)),
                "{held:?}, answered {given:?}"
            );
            store.del(&victim(), &setting.config)
        },
    )
}

fn del_then_del(setting: &Setting) -> Result<()> {
    let prepare = |store: &LeaseStore| store.add(&victim(), &setting.config).map(drop);
    everywhere("DEL, then DEL", "DEL", setting, prepare, |store| {
        store.del(&victim(), &setting.config)
    })
}

fn an_add_killed_anywhere_is_undone_by_del() -> Result<()> {
    add_then_del(&two())
}

fn an_add_killed_anywhere_is_taken_up_by_the_next() -> Result<()> {
    add_then_add(&two())
}

fn a_del_killed_anywhere_is_finished_by_the_next() -> Result<()> {
    del_then_del(&two())
}

fn an_order_of_eight_killed_anywhere_is_undone_by_del() -> Result<()> {
    add_then_del(&of_eight())
}

fn an_order_of_eight_killed_anywhere_is_taken_up_by_the_next() -> Result<()> {
    add_then_add(&of_eight())
}

fn a_del_of_eight_killed_anywhere_is_finished_by_the_next() -> Result<()> {
    del_then_del(&of_eight())
}

fn an_add_after_a_del_killed_anywhere_starts_afresh() -> Result<()> {
    for setting in [two(), of_eight()] {
        let config = &setting.config;
        let prepare = |store: &LeaseStore| store.add(&victim(), config).map(drop);
        everywhere("DEL, then ADD", "DEL", &setting, prepare, |store| {
            ensure!(store.add(&victim(), config)?.len() == setting.addresses);
            let held = store.held("n1")?;
            let mine = held.iter().filter(|(_, of)| of == "victim").count();
            ensure!(mine == setting.addresses, "{held:?}");
            store.del(&victim(), config)
        })?;
    }
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
            given == ["10.0.0.1", "fd99::1"] || given.len() == 2,
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
