//! ADD and DEL of `rdma-ipam` beside the reference host-local, as ratios of one interleaved run.
//!
//! Both are started as a network plugin starts them, on stores that hold the same number of
//! leases. Ours are all taken by ADD; host-local's are written as it writes them, because it
//! reads all its files at each ADD and would need hours for 65,000. Neither waits for the disk:
//! ours only does on a file system that machines share.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use clap::Parser;
use e2e::bin_under_test::product;
use e2e::host_root;
use e2e::measure::{Cost, Costs, Row, cost_of, row, table};
use e2e::need::REFERENCE_PLUGINS;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Our range: 1,048,574 addresses.
const RANGE: &str = "10.16.0.0/12";
/// host-local's: 65,534 addresses, as it reads the files of all that are taken.
const THEIR_RANGE: &str = "10.16.0.0/16";
const BASE: Ipv4Addr = Ipv4Addr::new(10, 16, 0, 0);
const THEIR_MOST: u32 = 65_000;
/// Leases of the store that fuller ones are compared with.
const FEW: u32 = 100;

#[derive(Debug, Parser)]
#[command(about = "ADD and DEL of rdma-ipam beside host-local, as ratios of one run")]
struct Arguments {
    /// Rounds of each contest
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Numbers of leases already there
    #[arg(long, value_delimiter = ',', default_values_t = [100, 10_000, 65_000, 1_000_000])]
    leases: Vec<u32>,
    /// Numbers of processes at a time for the rate of allocation
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    processes: Vec<u32>,
    /// Exit with a failure when a ratio is over its budget
    #[arg(long)]
    check: bool,
}

/// One plugin on its store.
struct Side {
    plugin: PathBuf,
    policy: PathBuf,
    root: PathBuf,
    network: Value,
}

impl Side {
    fn ours(directory: &Path) -> Result<Self> {
        Self::with_store(directory, "file")
    }

    /// A node that has blocks of the range, with room for [`FEW`] leases and some more.
    fn with_blocks(directory: &Path) -> Result<Self> {
        let side = Self::with_store(directory, "kubernetes")?;
        let owned = directory.join("state/owned");
        fs::create_dir_all(&owned)?;
        let boot = node::identity::boot_id(Path::new("/proc"));
        let parts: serde_json::Map<String, Value> = (0..=FEW / 16)
            .map(|number| Ipv4Addr::from(u32::from(BASE) + 16 * number))
            .map(|first| (format!("{first}/28"), json!({"id": first, "boot": boot})))
            .collect();
        let all = json!({"format": 1, "store": "default", "node": "bench", "parts": parts});
        fs::write(owned.join("default"), all.to_string())?;
        Ok(side)
    }

    fn with_store(directory: &Path, kind: &str) -> Result<Self> {
        let policy = directory.join("policy.json");
        let root = directory.join("root");
        host_root::make(&root)?;
        let settings = json!({
            "node": "bench",
            "stateDir": directory.join("state"),
            "stores": {"default": {"type": kind}},
            "ipam": {"cooldown": "0s"},
        });
        fs::write(&policy, settings.to_string())?;
        Ok(Self {
            plugin: product("rdma-ipam")?,
            policy,
            root,
            network: json!({
                "cniVersion": "1.0.0", "name": "ours", "type": "bench",
                "ipam": {"type": "rdma-ipam", "range": RANGE},
            }),
        })
    }

    /// The same store, asked for one address of each of eight ranges.
    fn with_eight(&self) -> Self {
        let ranges: Vec<Value> = (0..8)
            .map(|rail| json!({"range": format!("10.{}.0.0/16", 32 + rail)}))
            .collect();
        Self {
            plugin: self.plugin.clone(),
            policy: self.policy.clone(),
            root: self.root.clone(),
            network: json!({
                "cniVersion": "1.0.0", "name": "ours", "type": "bench",
                "ipam": {"type": "rdma-ipam", "ipRanges": ranges},
            }),
        }
    }

    fn host_local(directory: &Path) -> Self {
        Self {
            plugin: Path::new(REFERENCE_PLUGINS).join("host-local"),
            policy: directory.join("policy.json"),
            root: directory.join("root"),
            network: json!({
                "cniVersion": "1.0.0", "name": "peer", "type": "bench",
                "ipam": {
                    "type": "host-local", "dataDir": directory.join("host-local"),
                    "ranges": [[{"subnet": THEIR_RANGE}]],
                },
            }),
        }
    }

    fn call(&self, verb: &str, container: &str) -> Result<Cost> {
        let mut process = Command::new(&self.plugin);
        process
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", "/proc/self/ns/net")
            .env("CNI_IFNAME", "net1")
            .env("CNI_PATH", REFERENCE_PLUGINS)
            .env("RDMA_NETDEV_POLICY", &self.policy)
            .env("RDMA_HOST_ROOT", &self.root);
        let (cost, output) = cost_of(&mut process, self.network.to_string().as_bytes())?;
        ensure!(
            output.status.success(),
            "{} {verb} {container}: {}{}",
            self.plugin.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(cost)
    }
}

/// Takes leases until there are `target`, several at a time.
fn fill(side: &Side, from: u32, target: u32) -> Result<()> {
    let next = AtomicU32::new(from);
    at_once(4, |_| {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= target {
                return Ok(());
            }
            side.call("ADD", &format!("fill-{number}"))?;
        }
    })
}

/// Runs the same in several threads, and says what went wrong in one of them.
fn at_once(count: u32, work: impl Fn(u32) -> Result<()> + Sync) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|number| {
                let work = &work;
                scope.spawn(move || work(number))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .map_err(|_| anyhow!("a thread of the bench panicked"))?
        })
    })
}

/// Writes host-local's leases: a file for each address with container and interface, and the
/// address given out last.
fn fill_host_local(directory: &Path, from: u32, target: u32) -> Result<()> {
    let directory = directory.join("host-local/peer");
    fs::create_dir_all(&directory)?;
    // The first address of the subnet is host-local's gateway.
    let address = |number: u32| Ipv4Addr::from(u32::from(BASE) + 2 + number).to_string();
    for number in from..target {
        fs::write(
            directory.join(address(number)),
            format!("fill-{number}\r\nnet1"),
        )?;
    }
    let last = address(target.saturating_sub(1));
    fs::write(directory.join("last_reserved_ip.0"), last)?;
    Ok(())
}

/// ADD and DEL of both in turns.
fn contest(sides: [&Side; 2], rounds: usize) -> Result<[[Costs; 2]; 2]> {
    let mut costs = <[[Costs; 2]; 2]>::default();
    for round in 0..=rounds {
        for (side, costs) in sides.iter().zip(&mut costs) {
            let container = format!("round-{round}");
            for (verb, costs) in ["ADD", "DEL"].iter().zip(costs.iter_mut()) {
                let cost = side.call(verb, &container)?;
                // The first round warms what is to be warm.
                if round > 0 {
                    costs.0.push(cost);
                }
            }
        }
    }
    Ok(costs)
}

/// ADDs in a second, by so many processes at a time, each followed by its DEL.
fn rate(side: &Side, processes: u32, calls: u32) -> Result<f64> {
    let started = Instant::now();
    at_once(processes, |process| {
        for call in 0..calls / processes {
            let container = format!("rate-{process}-{call}");
            side.call("ADD", &container)?;
            side.call("DEL", &container)?;
        }
        Ok(())
    })?;
    Ok(f64::from(calls / processes * processes) / started.elapsed().as_secs_f64())
}

#[expect(
    clippy::print_stdout,
    reason = "the tables are what this program is for"
)]
fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let directory = TempDir::new()?;
    let ours = Side::ours(directory.path())?;
    let theirs = Side::host_local(directory.path());
    // Ours with few leases, to compare ours with itself.
    let few_directory = TempDir::new()?;
    let few = Side::ours(few_directory.path())?;
    fill(&few, 0, FEW)?;
    let mut rows: Vec<Row> = Vec::new();
    let [[add, del], [one_add, one_del]] = contest([&few.with_eight(), &few], arguments.rounds)?;
    for (what, eight, one) in [("ADD", add, one_add), ("DEL", del, one_del)] {
        rows.push(row(
            &format!("{what} of eight addresses in one order, beside one"),
            &eight,
            &one,
            [Some(2.5), None],
        ));
    }
    let blocks_directory = TempDir::new()?;
    let blocks = Side::with_blocks(blocks_directory.path())?;
    fill(&blocks, 0, FEW)?;
    let [[add, del], [file_add, file_del]] = contest([&blocks, &few], arguments.rounds)?;
    for (what, blocks, file) in [("ADD", add, file_add), ("DEL", del, file_del)] {
        rows.push(row(
            &format!("{what} in a node's blocks, beside a local file store"),
            &blocks,
            &file,
            [Some(1.1), None],
        ));
    }
    let mut there = 0;
    for leases in arguments.leases {
        fill(&ours, there, leases)?;
        if leases <= THEIR_MOST {
            fill_host_local(directory.path(), there, leases)?;
            let most = leases == THEIR_MOST;
            let rounds = if most { 5 } else { arguments.rounds };
            let [[add, del], [their_add, their_del]] = contest([&ours, &theirs], rounds)?;
            rows.push(row(
                &format!("ADD at {leases} leases, beside host-local"),
                &add,
                &their_add,
                [most.then_some(0.01), None],
            ));
            rows.push(row(
                &format!("DEL at {leases} leases, beside host-local"),
                &del,
                &their_del,
                [None, None],
            ));
        }
        // By ourselves: host-local's reading of so many files costs whoever comes next.
        let [[add, del], [few_add, few_del]] = contest([&ours, &few], arguments.rounds)?;
        for (what, many, few) in [("ADD", add, few_add), ("DEL", del, few_del)] {
            rows.push(row(
                &format!("{what} at {leases} leases, beside the same at {FEW}"),
                &many,
                &few,
                [Some(1.3), None],
            ));
        }
        there = leases;
    }
    println!("{}", table(&rows));

    println!("| processes | ADDs in a second | host-local | ratio |\n|---|---|---|---|");
    // Each on a store with few leases.
    let directory = TempDir::new()?;
    let ours = Side::ours(directory.path())?;
    let theirs = Side::host_local(directory.path());
    for processes in arguments.processes {
        let mut calls = 320;
        // Long enough to mean something, on a slow disk too.
        let probe = ours.call("ADD", "probe")?;
        ours.call("DEL", "probe")?;
        if probe.wall > Duration::from_millis(20) {
            calls = 64;
        }
        let (own, peer) = (
            rate(&ours, processes, calls)?,
            rate(&theirs, processes, calls)?,
        );
        println!("| {processes} | {own:.0} | {peer:.0} | {:.2} |", own / peer);
    }
    let over = rows.iter().filter(|row| !row.within()).count();
    Ok(match arguments.check && over > 0 {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}
