//! A crowd of nodes on one API server: each has its broker and its local store, pods come and go on
//! all of them at once, and every answer is compared with who has the address already.
//!
//! API server and etcd are real (`e2e::api_server`). Brokers and the store's calls run in this
//! process, because five hundred nodes would be a thousand processes; between them is what is
//! between the programs, the question for a block. In the middle the API server is killed and
//! started again, then etcd, and its history is compacted.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the table, and what is wrong in it, is what this program is for"
)]

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use e2e::api_server::ApiServer;
use e2e::cluster;
use ipam::block::AddressSpace;
use ipam::lease::Holder;
use ipam::leases::{AddressRequest, LeaseError, Leases, Need, Order, Ownership, Refused};
use ipam::owned::Owned;
use ipam::range::{Range, Spec};
use node::policy::{BlockLength, Policy, Profile, StoreBounds, StoreKind, StorePolicy};
use node::trust;
use node_wire::{BlockNeed, FailureKind};
use rdma_ipam_broker::api::{Client, Endpoint, Transport};
use rdma_ipam_broker::broker::{Asker, Questions, Settings, questions, run};
use rdma_ipam_broker::space::Timing;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

/// Writes to the API for each ADD, at most.
const MAX_WRITES: f64 = 0.1;
/// ADDs in a second in the whole cluster, at least, once its nodes have their first blocks.
const MIN_RATE: f64 = 5_000.0;
/// How long an ADD is tried, as the runtime tries again, while the API is away.
const ADD_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Parser)]
#[command(
    about = "Many nodes' blocks of addresses on one API server: uniqueness, rate, API requests"
)]
struct Arguments {
    /// Nodes
    #[arg(long, default_value_t = 500)]
    nodes: usize,
    /// ADDs of all nodes together
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(2..))]
    adds: u64,
    /// Pods that a node has when it is full
    #[arg(long, default_value_t = 40)]
    pods: usize,
    /// Threads in which ADDs and DELs are called
    #[arg(long, default_value_t = 8)]
    callers: usize,
    /// The range that all nodes share
    #[arg(long, default_value = "10.64.0.0/15")]
    range: String,
    /// Leave API server and etcd alone
    #[arg(long)]
    no_faults: bool,
    /// Exit with a failure when a figure is out of its budget
    #[arg(long)]
    check: bool,
}

/// A node of the crowd.
struct Node {
    name: String,
    policy: Policy,
    asker: Asker,
}

impl Node {
    fn leases(&self) -> Result<Leases, LeaseError> {
        let root = trust::parent(&self.policy.state_dir);
        Leases::open(root, &node::identity::boot_id(Path::new("/proc")))
    }
}

fn policy(place: &Path, name: &str) -> Result<Policy> {
    let place = place.join(name);
    std::fs::create_dir_all(&place)?;
    std::os::unix::fs::symlink("/proc", place.join("proc"))?;
    let store = StorePolicy {
        kind: StoreKind::Kubernetes {
            blocks: BlockLength::default(),
            static_networks: Vec::new(),
            after: None,
        },
        bounds: StoreBounds::default(),
    };
    let mut policy = Policy {
        node: Some(name.to_owned()),
        state_dir: place.join("state"),
        ..Policy::default()
    };
    policy.ipam.cooldown = Duration::ZERO;
    policy.stores.insert("default".into(), store);
    Ok(policy)
}

/// Who has which address, by the answers; the judge of the run.
#[derive(Default)]
struct Holders {
    by_address: Mutex<HashMap<IpAddr, String>>,
    doubles: AtomicU64,
}

impl Holders {
    fn answered(&self, address: IpAddr, holder: String) {
        let mut all = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = all.insert(address, holder.clone()) {
            self.doubles.fetch_add(1, Ordering::Relaxed);
            eprintln!("{address} was given to {holder}, and {other} has it");
        }
    }

    /// Before the DEL: from then on another may have it.
    fn ends(&self, address: IpAddr) {
        let mut all = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.remove(&address);
    }
}

struct Crowd {
    range: Range,
    holders: Holders,
    adds: AtomicU64,
    /// When half of all ADDs are made: by then every node has its blocks.
    half: u64,
    half_at: OnceLock<Instant>,
    left: AtomicU64,
    questions: AtomicU64,
    retries: AtomicU64,
}

impl Crowd {
    fn order(&self, node: &Node, container: &str) -> Order {
        Order {
            holder: Holder {
                network: "crowd".into(),
                pod: None,
                container: container.to_owned(),
                interface: "net1".into(),
                node: node.name.clone(),
                netns: None,
                netns_inode: None,
                device: None,
            },
            profile: Profile::Strict,
            space: AddressSpace::new("default", None),
            overlapping: true,
            requests: vec![AddressRequest {
                range: self.range.clone(),
                same_host_number_as: None,
                requested: None,
            }],
            cooldown: Duration::ZERO,
        }
    }

    /// An ADD, with what the runtime does when it is to try again.
    fn add(&self, node: &Node, container: &str, runtime: &Runtime) -> Result<IpAddr> {
        let until = Instant::now() + ADD_TIMEOUT;
        loop {
            let order = self.order(node, container);
            let parts = Ownership::Parts {
                state_dir: &node.policy.state_dir,
                last_resort: true,
            };
            match node.leases()?.take(&order, &parts) {
                Ok(leases) => {
                    let lease = leases.first().context("an ADD without a lease")?;
                    return Ok(lease.address);
                }
                Err(Refused {
                    error: LeaseError::NeedsRoom(needs),
                    ..
                }) => {
                    for need in &needs {
                        self.ask(node, need, until, runtime)?;
                    }
                }
                Err(refused) => bail!("{} {container}: {}", node.name, refused.error),
            }
        }
    }

    fn ask(&self, node: &Node, need: &Need, until: Instant, runtime: &Runtime) -> Result<()> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let spans = need.range.spans().iter();
        let need = BlockNeed {
            store: "default".into(),
            network_name: None,
            range: need.range.subnet().to_string(),
            spans: spans
                .map(|span| span.addresses(need.range.subnet().is_ipv4()))
                .collect(),
            per_node: need.range.per_node(),
            address: need.address,
            single: false,
            count: need.count,
        };
        match runtime.block_on(node.asker.ask(need)) {
            Ok(_) => Ok(()),
            // As `rdma-ipam` tells the runtime: what these three say does not change by waiting.
            Err(failure)
                if !matches!(
                    failure.kind,
                    FailureKind::Exhausted | FailureKind::HeldByAnotherNode | FailureKind::Mismatch
                ) =>
            {
                ensure!(Instant::now() < until, "{}: {failure}", node.name);
                self.retries.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(100));
                Ok(())
            }
            Err(failure) => Err(anyhow!("{}: {failure}", node.name)),
        }
    }

    /// Pods come and go on some nodes until all ADDs are made; returns what they have then.
    fn call(&self, nodes: &[Node], pods: usize, seed: u64) -> Result<Vec<(usize, String, IpAddr)>> {
        let runtime = Builder::new_current_thread().build()?;
        let mut random = seed;
        let mut next = move |most: usize| {
            // Xorshift: which pod comes next need not be a secret.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % most.max(1) as u64).unwrap_or(0)
        };
        let mut live: Vec<Vec<(String, IpAddr)>> = nodes.iter().map(|_| Vec::new()).collect();
        loop {
            let number = next(nodes.len());
            let (Some(node), Some(on_node)) = (nodes.get(number), live.get_mut(number)) else {
                continue;
            };
            // Fuller nodes lose pods, emptier ones get some.
            if next(2 * pods) < on_node.len() {
                let (container, address) = on_node.swap_remove(next(on_node.len()));
                self.holders.ends(address);
                let leases = node.leases()?;
                let freed = leases.release(&container, "net1", "crowd", Duration::ZERO)?;
                ensure!(freed.len() == 1, "{container}: {freed:?}");
                continue;
            }
            let taken = self
                .left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(1)
                });
            let Ok(left) = taken else { break };
            let container = format!("{}-{left}", node.name);
            let address = self.add(node, &container, &runtime)?;
            self.holders.answered(address, container.clone());
            if self.adds.fetch_add(1, Ordering::Relaxed) + 1 == self.half {
                self.half_at.get_or_init(Instant::now);
            }
            on_node.push((container, address));
        }
        let all = live.into_iter().enumerate().flat_map(|(number, pods)| {
            pods.into_iter()
                .map(move |(container, address)| (number, container, address))
        });
        Ok(all.collect())
    }
}

/// Kills either program once, and forgets etcd's history, when a part of the ADDs is made.
fn trouble(server: &mut ApiServer, crowd: &Crowd, adds: u64, over: &AtomicBool) -> Result<()> {
    let reached = |part: u64| loop {
        if crowd.adds.load(Ordering::Relaxed) >= adds * part / 10 || over.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    };
    reached(3);
    server.kill_api_server()?;
    thread::sleep(Duration::from_secs(3));
    server.start_api_server()?;
    reached(5);
    server.kill_etcd()?;
    thread::sleep(Duration::from_secs(1));
    server.start_etcd()?;
    reached(7);
    server.forget_history()?;
    Ok(())
}

/// A broker to be.
struct Seat {
    name: String,
    policy: Policy,
    questions: (Asker, Questions),
}

/// Serves the brokers of all nodes in one thread; answers how many requests they made that change
/// something, and how many that do not.
fn serve(seats: Vec<Seat>, kubeconfig: &Path, stop: &CancellationToken) -> Result<(u64, u64)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    let (mut brokers, mut clients) = (Vec::new(), Vec::new());
    for seat in seats {
        let transport = Transport::new(Endpoint::of_kubeconfig(kubeconfig)?)?;
        let client = Client::new(transport, "default");
        clients.push(client.clone());
        let settings = Settings {
            root: trust::parent(&seat.policy.state_dir).to_owned(),
            policy: seat.policy,
            node: seat.name,
            client,
            socket: None,
            listen: Vec::new(),
            timing: Timing::default(),
        };
        brokers.push(local.spawn_local(run(settings, seat.questions, stop.clone())));
    }
    runtime.block_on(local.run_until(async {
        for broker in brokers {
            broker.await??;
        }
        anyhow::Ok(())
    }))?;
    let mut counts = (0, 0);
    for client in clients {
        for ((method, _), count) in client.transport().requests() {
            match method.as_str() {
                "GET" => counts.1 += count,
                _ => counts.0 += count,
            }
        }
    }
    Ok(counts)
}

fn resident_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.context("/proc/self/status has no VmRSS")
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let place = TempDir::new()?;
    let mut server = cluster::api_server()?;
    let (mut nodes, mut seats) = (Vec::new(), Vec::new());
    for number in 0..arguments.nodes {
        let name = format!("node-{number}");
        server.add_node(&name)?;
        let (asker, asked) = questions();
        let policy = policy(place.path(), &name)?;
        seats.push(Seat {
            name: name.clone(),
            policy: policy.clone(),
            questions: (asker.clone(), asked),
        });
        nodes.push(Node {
            name,
            policy,
            asker,
        });
    }
    let spec = Spec {
        range: &arguments.range,
        ..Spec::default()
    };
    let crowd = Crowd {
        range: Range::new(&spec, Profile::Strict)?,
        holders: Holders::default(),
        adds: AtomicU64::new(0),
        half: arguments.adds / 2,
        half_at: OnceLock::new(),
        left: AtomicU64::new(arguments.adds),
        questions: AtomicU64::new(0),
        retries: AtomicU64::new(0),
    };
    let stop = CancellationToken::new();
    let over = AtomicBool::new(false);
    let started = Instant::now();
    let share = arguments.nodes.div_ceil(arguments.callers.max(1)).max(1);
    let kubeconfig = server.kubeconfig().to_owned();
    let (live, ended, (writes, reads)) = thread::scope(|scope| -> Result<_> {
        let serving = scope.spawn(|| serve(seats, &kubeconfig, &stop));
        let (crowd, over) = (&crowd, &over);
        let adds = arguments.adds;
        let server = &mut server;
        let faults =
            (!arguments.no_faults).then(|| scope.spawn(move || trouble(server, crowd, adds, over)));
        let callers: Vec<_> = nodes
            .chunks(share)
            .enumerate()
            .map(|(number, nodes)| {
                scope.spawn(move || {
                    crowd.call(
                        nodes,
                        arguments.pods,
                        88_172_645_463_325_252 + number as u64,
                    )
                })
            })
            .collect();
        let ends: Vec<_> = callers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        let ended = Instant::now();
        over.store(true, Ordering::Relaxed);
        let faults = faults.map(thread::ScopedJoinHandle::join);
        stop.cancel();
        let served = serving.join();
        let panicked = || anyhow!("a thread of the crowd panicked");
        faults.transpose().map_err(|_| panicked())?.transpose()?;
        let requests = served.map_err(|_| panicked())??;
        let mut live = Vec::new();
        for (number, end) in ends.into_iter().enumerate() {
            let held = end.map_err(|_| panicked())??;
            live.extend(
                held.into_iter()
                    .map(|(node, container, address)| (number * share + node, container, address)),
            );
        }
        Ok((live, ended, requests))
    })?;

    let mut lost = 0;
    let mut held = 0_u64;
    let boot = node::identity::boot_id(Path::new("/proc"));
    for (number, node) in nodes.iter().enumerate() {
        let leases = node.leases()?;
        let space = AddressSpace::new("default", None);
        let owned = Owned::read(&node.policy.state_dir, &space)?;
        for lease in leases.list()?.leases {
            held += 1;
            lost += usize::from(!owned.covers(lease.address, &node.name, &boot));
        }
        for (_, container, address) in live.iter().filter(|(node, ..)| *node == number) {
            let leases = leases.held(container, "net1")?;
            if leases.iter().all(|lease| lease.address != *address) {
                lost += 1;
                eprintln!("{container} lost {address}");
            }
        }
    }
    let adds = crowd.adds.load(Ordering::Relaxed);
    let doubles = crowd.holders.doubles.load(Ordering::Relaxed);
    let half_at = crowd.half_at.get();
    let half_at = *half_at.context("not half of the ADDs were made")?;
    #[expect(
        clippy::cast_precision_loss,
        reason = "counts that are shown as ratios"
    )]
    let (rate, rate_from_half, writes_per_add) = (
        adds as f64 / (ended - started).as_secs_f64(),
        (adds - crowd.half) as f64 / (ended - half_at).as_secs_f64(),
        writes as f64 / adds as f64,
    );
    println!("| what | measured | budget |\n|---|---|---|");
    println!("| nodes, ADDs | {}, {adds} | |", arguments.nodes);
    println!("| addresses given twice | {doubles} | 0 |");
    println!("| leases lost, or outside of their node's blocks | {lost} | 0 |");
    println!(
        "| leases in the stores, by the answers | {held}, {} | equal |",
        live.len()
    );
    println!("| API writes for each ADD | {writes_per_add:.4} | {MAX_WRITES} |");
    println!(
        "| API reads for each ADD | {:.4} | |",
        reads as f64 / adds as f64
    );
    println!("| ADDs in a second, with their DELs, from nodes without a block | {rate:.0} | |");
    println!("| the same, the second half | {rate_from_half:.0} | {MIN_RATE} |");
    println!(
        "| ADDs that asked the broker | {} | |",
        crowd.questions.load(Ordering::Relaxed)
    );
    println!(
        "| answers \"try again\" | {} | |",
        crowd.retries.load(Ordering::Relaxed)
    );
    println!(
        "| resident memory, all brokers and callers | {} MiB | |",
        resident_kib()? / 1024
    );
    let sound = doubles == 0 && lost == 0 && held == live.len() as u64;
    ensure!(sound, "addresses are not unique, or leases are lost");
    let within = writes_per_add <= MAX_WRITES
        && (arguments
            .no_faults
            .then_some(rate_from_half)
            .is_none_or(|rate| rate >= MIN_RATE));
    Ok(match arguments.check && !within {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}
