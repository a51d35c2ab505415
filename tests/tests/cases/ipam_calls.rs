//! How many system calls `rdma-ipam` makes on a store with many leases.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::cni::answer;
use e2e::harness::Case;
use e2e::lease_store::{Caller, LeaseStore, network};
use e2e::trace::{points, record};
use serde_json::Value;

pub(crate) const CASES: &[Case] = &[
    case!(
        an_exhausted_range_of_65534_addresses_is_known_within_2000_system_calls,
        Strace
    ),
    case!(releasing_an_address_reads_its_place_alone, Strace),
    case!(the_system_calls_of_fsck_grow_with_the_leases_alone, Strace),
];

/// System calls of fsck for each lease, with its share of the directories that are listed.
const FSCK_CALLS: usize = 20;

const RANGE: &str = "10.7.0.0/16";

/// A store in which somebody holds every address of [`RANGE`] since long ago.
fn full() -> Result<LeaseStore> {
    let store = LeaseStore::new("30s")?;
    store.add_node("n1")?;
    store.add(&Caller::new("n1", "first"), &config())?;
    let shards = store.directory().join("default+");
    for third in 0..=255 {
        let shard = shards.join(format!("10.7.{third}"));
        fs::create_dir_all(&shard)?;
        for fourth in 0..=255 {
            let address = shard.join(fourth.to_string());
            // The link count of a file is limited; what it says does not matter here.
            if !matches!((third, fourth), (0, 0..=1) | (255, 255)) {
                File::create(address)?;
            }
        }
    }
    Ok(store)
}

fn config() -> Value {
    network(&[RANGE])
}

fn calls(log: &Path) -> Result<usize> {
    Ok(points(log)?.len())
}

fn an_exhausted_range_of_65534_addresses_is_known_within_2000_system_calls() -> Result<()> {
    let store = full()?;
    // The first one finds out, the second believes what the first one has noted.
    for (verb, attempt) in [("ADD", 1), ("ADD", 2), ("STATUS", 1)] {
        let log = tempfile::NamedTempFile::new()?;
        let mut command = store.command(verb, &Caller::new("n1", "late"), &record(log.path()));
        let answer = answer(&mut command, config().to_string().as_bytes())?;
        let text = format!("{answer:?}");
        ensure!(
            text.contains("all 65534 addresses between"),
            "{verb}: {text}"
        );
        let count = calls(log.path())?;
        println!("{verb} {attempt} on an exhausted {RANGE}: {count} system calls");
        ensure!(count < 2000, "{verb} {attempt}: {count} system calls");
    }
    Ok(())
}

fn releasing_an_address_reads_its_place_alone() -> Result<()> {
    let store = full()?;
    let log = tempfile::NamedTempFile::new()?;
    let mut wrapper = record(log.path()).into_iter();
    let mut command = Command::new(wrapper.next().context("no tracer")?);
    command.args(wrapper);
    let arguments = ["addresses", "release", "10.7.0.1", "--yes"];
    let output = store.rdmactl_below(command, "n1", &arguments).output()?;
    ensure!(output.status.success(), "{output:?}");
    let count = calls(log.path())?;
    println!("{arguments:?} with 65,534 leases: {count} system calls");
    ensure!(count < 300, "{arguments:?}: {count} system calls");
    Ok(())
}

fn the_system_calls_of_fsck_grow_with_the_leases_alone() -> Result<()> {
    let store = LeaseStore::new("30s")?;
    store.add_node("n1")?;
    let fsck = || -> Result<(usize, usize)> {
        let log = tempfile::NamedTempFile::new()?;
        let mut wrapper = record(log.path()).into_iter();
        let mut command = Command::new(wrapper.next().context("no tracer")?);
        command.args(wrapper);
        let output = store
            .rdmactl_below(command, "n1", &["addresses", "fsck"])
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        let text = fs::read_to_string(log.path())?;
        let descriptors = text
            .lines()
            .filter(|line| line.contains(" open"))
            .filter_map(|line| line.rsplit_once(" = ")?.1.parse::<usize>().ok());
        Ok((calls(log.path())?, descriptors.max().unwrap_or(0)))
    };
    let mut seen = Vec::new();
    for count in [40, 400] {
        for n in store.held("n1")?.len()..count {
            store.add(&Caller::new("n1", &format!("pod-{n}")), &config())?;
        }
        let (calls, descriptors) = fsck()?;
        println!("fsck of {count} leases: {calls} system calls, descriptors up to {descriptors}");
        seen.push((count, calls));
        ensure!(descriptors < 600, "{descriptors} descriptors");
    }
    let [(few, of_few), (many, of_many)] = seen[..] else {
        unreachable!()
    };
    ensure!(of_many - of_few < FSCK_CALLS * (many - few), "{seen:?}");
    Ok(())
}
