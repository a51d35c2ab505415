//! Sixteen nodes on one store: the answers of each are recorded and judged
//! afterwards. No address has two holders at one time, none is lost, and no ADD
//! gets "exhausted" while an address is free.

use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::case;
use e2e::harness::Case;
use e2e::lease_store::{Caller, LeaseStore, addresses, network};
use serde_json::Value;

pub(crate) const CASES: &[Case] = &[
    case!(no_two_pods_share_an_address_on_a_large_range),
    case!(no_add_is_refused_by_a_small_range_that_has_room),
    case!(a_range_that_is_nearly_full_is_used_to_the_last_address),
];

const NODES: usize = 16;

/// Operations of each node; `RDMA_E2E_CROWD` asks for more or fewer.
fn rounds(default: usize) -> usize {
    std::env::var("RDMA_E2E_CROWD")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// One ADD and, where it succeeded, the DEL that ended it. Times from one clock.
#[derive(Debug, Clone)]
struct Stay {
    container: String,
    asked: Duration,
    answered: Duration,
    /// `None`: the ADD failed because the range is exhausted.
    address: Option<String>,
    leaving: Duration,
    left: Duration,
}

/// Lets every node attach and detach containers, up to `keep` at a time.
fn crowd(store: &LeaseStore, config: &Value, rounds: usize, keep: usize) -> Result<Vec<Stay>> {
    for node in 0..NODES {
        store.add_node(&format!("n{node}"))?;
    }
    let clock = Instant::now();
    let start = Barrier::new(NODES);
    let all: Mutex<Vec<Stay>> = Mutex::default();
    let failures: Mutex<Vec<String>> = Mutex::default();
    thread::scope(|scope| {
        for node in 0..NODES {
            let (start, all, failures) = (&start, &all, &failures);
            scope.spawn(move || {
                start.wait();
                match node_life(store, config, &clock, node, rounds, keep) {
                    Ok(stays) => all.lock().unwrap().extend(stays),
                    Err(error) => failures
                        .lock()
                        .unwrap()
                        .push(format!("node {node}: {error:#}")),
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(all.into_inner().unwrap())
}

fn node_life(
    store: &LeaseStore,
    config: &Value,
    clock: &Instant,
    node: usize,
    rounds: usize,
    keep: usize,
) -> Result<Vec<Stay>> {
    let mut stays: Vec<Stay> = Vec::new();
    let mut living: Vec<usize> = Vec::new();
    let caller = |container: &str| Caller::new(&format!("n{node}"), container);
    let leave = |stay: &mut Stay| -> Result<()> {
        stay.leaving = clock.elapsed();
        store.del(&caller(&stay.container), config)?;
        stay.left = clock.elapsed();
        Ok(())
    };
    for round in 0..rounds {
        let container = format!("c{node}-{round}");
        let asked = clock.elapsed();
        let answer = store.call("ADD", &caller(&container), config)?;
        let answered = clock.elapsed();
        let address = match answer.status.success() {
            true => addresses(&answer)?.pop(),
            false => match answer.refusal()? {
                (102, message) if message.contains("exhausted") => None,
                (code, message) => bail!("code {code}: {message}"),
            },
        };
        if address.is_some() {
            living.push(stays.len());
        }
        stays.push(Stay {
            container,
            asked,
            answered,
            address,
            leaving: answered,
            left: answered,
        });
        // Now the oldest goes, now the youngest.
        while living.len() > keep {
            let index = if round % 3 == 0 { living.len() - 1 } else { 0 };
            leave(
                stays
                    .get_mut(living.remove(index))
                    .context("no such stay")?,
            )?;
        }
    }
    for index in living {
        leave(stays.get_mut(index).context("no such stay")?)?;
    }
    Ok(stays)
}

/// Between its ADD's answer and its DEL's beginning an address is certainly one
/// container's: no two such times may meet.
fn no_address_is_shared(stays: &[Stay]) -> Result<usize> {
    let mut by_address: BTreeMap<&str, Vec<&Stay>> = BTreeMap::new();
    for stay in stays {
        if let Some(address) = &stay.address {
            by_address.entry(address).or_default().push(stay);
        }
    }
    for (address, stays) in &mut by_address {
        stays.sort_by_key(|stay| stay.answered);
        for pair in stays.windows(2) {
            let (first, second) = (pair[0], pair[1]);
            ensure!(
                first.leaving <= second.answered,
                "{address} was given to {} and to {} at one time",
                first.container,
                second.container
            );
        }
    }
    Ok(by_address.len())
}

/// The ADDs that failed because all `size` addresses are held: each must have been, or
/// may have been (an ADD or DEL was under way), at some time during the ADD.
fn no_add_was_refused_wrongly(stays: &[Stay], size: usize) -> Result<usize> {
    let mut sent_away = 0;
    for refused in stays.iter().filter(|stay| stay.address.is_none()) {
        sent_away += 1;
        let during = |stay: &&Stay| {
            stay.asked <= refused.answered
                && stay.left >= refused.asked
                && stay.container != refused.container
        };
        let mut possibly: Vec<&str> = stays
            .iter()
            .filter(during)
            .filter_map(|stay| stay.address.as_deref())
            .collect();
        possibly.sort_unstable();
        possibly.dedup();
        // Others that were refused as well may have had a lease entry for a moment.
        let passing = stays
            .iter()
            .filter(during)
            .filter(|stay| stay.address.is_none())
            .count();
        ensure!(
            possibly.len() + passing >= size,
            "{} was sent away while at most {} of {size} addresses were held",
            refused.container,
            possibly.len()
        );
    }
    Ok(sent_away)
}

fn nothing_is_left(store: &LeaseStore) -> Result<()> {
    let held = store.held("n0")?;
    ensure!(held.is_empty(), "left: {held:?}");
    let records = store.files("records");
    ensure!(records.is_empty(), "records left: {records:?}");
    let checkup = store.admin("n0", &["fsck"])?;
    ensure!(
        checkup["findings"] == serde_json::json!([]),
        "fsck: {checkup}"
    );
    Ok(())
}

fn no_two_pods_share_an_address_on_a_large_range() -> Result<()> {
    let store = LeaseStore::new("30s")?;
    let stays = crowd(&store, &network(&["10.0.0.0/16"]), rounds(60), 4)?;
    let distinct = no_address_is_shared(&stays)?;
    ensure!(
        stays.iter().all(|stay| stay.address.is_some()),
        "an ADD was refused on a /16"
    );
    nothing_is_left(&store)?;
    println!(
        "{} stays of {NODES} nodes on {distinct} addresses",
        stays.len()
    );
    Ok(())
}

fn no_add_is_refused_by_a_small_range_that_has_room() -> Result<()> {
    let store = LeaseStore::new("30s")?;
    let stays = crowd(&store, &network(&["10.0.0.0/28"]), rounds(60), 0)?;
    no_address_is_shared(&stays)?;
    let sent_away = no_add_was_refused_wrongly(&stays, 14)?;
    nothing_is_left(&store)?;
    println!(
        "{} stays of {NODES} nodes on 14 addresses, {sent_away} sent away rightly",
        stays.len()
    );
    Ok(())
}

fn a_range_that_is_nearly_full_is_used_to_the_last_address() -> Result<()> {
    let store = LeaseStore::new("30s")?;
    store.add_node("n0")?;
    let config = network(&["10.0.0.0/23"]);
    // 510 addresses, 99 % of them for good.
    for number in 0..505 {
        store.add(&Caller::new("n0", &format!("fill{number}")), &config)?;
    }
    let stays = crowd(&store, &config, rounds(30), 0)?;
    no_address_is_shared(&stays)?;
    let sent_away = no_add_was_refused_wrongly(&stays, 5)?;
    ensure!(
        store.held("n0")?.len() == 505,
        "a lease of the fill was lost"
    );
    println!(
        "{} stays of {NODES} nodes on the last 5 of 510 addresses, {sent_away} sent away rightly",
        stays.len()
    );
    Ok(())
}
