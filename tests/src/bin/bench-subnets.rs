//! A crowd of nodes on one API server: each has its agent, its disk and its leases, and every answer is
//! compared with who has the address already.
//!
//! API server and etcd are real (`e2e::api_server`). The agents and the store's calls run in this
//! process, because five hundred nodes would be a thousand processes; between them is what is between
//! the programs, the question on a socket.
//!
//! - rate: pods come and go on all nodes at once, while the API server is killed, then etcd, and its
//!   history is compacted;
//! - shared: a pod on each of 250 nodes, all at once, in one /24; then 1,000 ADDs for which the range has
//!   no address. All requests pass a proxy that counts them;
//! - start: what 5,000 agents ask of the API when they start at one moment, each with a part of a full
//!   subnet. Their requests only: so many programs do not fit on one machine.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::cast_precision_loss,
    reason = "the table, and what is wrong in it, is what this program is for"
)]

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::{Parser, ValueEnum};
use e2e::api_server::ApiServer;
use e2e::cluster;
use e2e::proxy::{Count, Kind, Proxy, client};
use e2e::random::Random;
use ipam::lease::Holder;
use ipam::leases::{AddressRequest, LeaseError, Leases, Need, Order, Ownership, Refused};
use ipam::owned::Owned;
use ipam::range::{Range, Spec};
use ipam::space::{AddressSpace, single};
use ipam::subnet::{self, Part, subnet_of};
use node::policy::{Policy, Profile, StoreKind, StorePolicy};
use node_wire::{FailureKind, Room, RoomNeed, RoomQuestion};
use rdma_agent::agent::{Settings, run};
use rdma_agent::api::{Api, ApiError, News};
use rdma_agent::backend::{Read, Swap};
use rdma_agent::decide::ThisNode;
use rdma_agent::space::Context;
use tempfile::TempDir;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// ADDs in a second in the whole cluster, at least, once its nodes have parts.
const MIN_RATE: f64 = 5_000.0;
/// How long the nodes of a shared /24 may wait for their addresses.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Accepted writes of each of them, at most.
const MAX_WRITES: f64 = 6.0;
/// Lists of each of them in a second, at most, while the range is exhausted.
const MAX_LISTS: f64 = 1.0;
/// Nodes that have a part of one subnet, where agents start.
const OWNERS: usize = 250;
/// How long an ADD is tried, as the runtime tries again, while the API is away or much asked.
const ADD_TIMEOUT: Duration = Duration::from_mins(5);
/// How long an ADD's question waits for its answer.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scene {
    Rate,
    Shared,
    Start,
}

#[derive(Debug, Parser)]
#[command(about = "Many nodes' parts of subnets on one API server: uniqueness, rate, API requests")]
struct Arguments {
    /// Only this one
    #[arg(long)]
    only: Option<Scene>,
    /// Nodes of the first scene
    #[arg(long, default_value_t = 500)]
    nodes: usize,
    /// ADDs of all of them together
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(2..))]
    adds: u64,
    /// Pods that a node has when it is full
    #[arg(long, default_value_t = 40)]
    pods: usize,
    /// Threads in which ADDs and DELs are called
    #[arg(long, default_value_t = 8)]
    callers: usize,
    /// Nodes that share a /24
    #[arg(long, default_value_t = 250)]
    shared: usize,
    /// ADDs on the range when it is exhausted
    #[arg(long, default_value_t = 1000)]
    exhausted: usize,
    /// Agents that start at one moment
    #[arg(long, default_value_t = 5000)]
    starting: usize,
    /// Leave API server and etcd alone
    #[arg(long)]
    no_faults: bool,
    /// Exit with a failure when a figure is out of its budget
    #[arg(long)]
    check: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn boot() -> String {
    node::identity::boot_id(Path::new("/proc"))
}

/// A node of the crowd.
struct Node {
    name: String,
    root: PathBuf,
    policy: Policy,
}

impl Node {
    fn new(place: &Path, name: String) -> Result<Self> {
        let root = place.join(&name);
        std::fs::create_dir_all(root.join("run/rdma-netdev"))?;
        let mut policy = Policy {
            node: Some(name.clone()),
            state_dir: root.join("state"),
            ..Policy::default()
        };
        policy.ipam.cooldown = Duration::ZERO;
        let store = StorePolicy::of(StoreKind::Kubernetes);
        policy.stores.insert("default".into(), store);
        Ok(Self { name, root, policy })
    }

    fn leases(&self) -> Result<Leases, LeaseError> {
        Leases::open(&self.root, &boot())
    }

    fn socket(&self) -> PathBuf {
        self.root.join("run/agent.sock")
    }

    fn settings(&self, client: kube::Client) -> Settings {
        let node = ThisNode {
            name: self.name.clone(),
            boot: boot(),
        };
        Settings {
            context: Context {
                node,
                root: self.root.clone(),
                state_dir: self.policy.state_dir.clone(),
                cooldown: Duration::ZERO,
                grace: Duration::from_mins(5),
            },
            policy: self.policy.clone(),
            client: Some(client),
            node_socket: None,
            marks: Default::default(),
            features_dir: Default::default(),
            socket: self.socket(),
            listen: Vec::new(),
        }
    }
}

/// The agents of all nodes, on one thread beside those of their spaces.
struct Agents {
    stop: CancellationToken,
    thread: JoinHandle<Result<()>>,
}

impl Agents {
    fn start(nodes: &[Node], kubeconfig: &Path) -> Result<Self> {
        let stop = CancellationToken::new();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let clients = nodes.iter().map(|_| runtime.block_on(client(kubeconfig)));
        let clients = clients.collect::<Result<Vec<_>>>()?;
        let settings = nodes.iter().zip(clients);
        let settings: Vec<Settings> = settings
            .map(|(node, client)| node.settings(client))
            .collect();
        let until = stop.clone();
        let thread = thread::spawn(move || {
            let ended = runtime.block_on(async {
                let mut agents = tokio::task::JoinSet::new();
                for settings in settings {
                    agents.spawn(run(settings, until.clone()));
                }
                while let Some(ended) = agents.join_next().await {
                    ended??;
                }
                anyhow::Ok(())
            });
            // Threads of spaces may wait in it still.
            std::mem::forget(runtime);
            ended
        });
        let begun = Instant::now();
        for node in nodes {
            while !node.socket().exists() {
                ensure!(
                    begun.elapsed() < ADD_TIMEOUT,
                    "{} does not listen",
                    node.name
                );
                thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(Self { stop, thread })
    }

    fn end(self) -> Result<()> {
        self.stop.cancel();
        let ended = self.thread.join();
        ended.map_err(|_| anyhow!("the agents' thread panicked"))?
    }
}

/// Who has which address, by the answers; the judge of the run.
#[derive(Default)]
struct Holders {
    by_address: Mutex<HashMap<IpAddr, String>>,
    doubles: AtomicU64,
}

impl Holders {
    fn answered(&self, address: IpAddr, holder: String) {
        if let Some(other) = lock(&self.by_address).insert(address, holder.clone()) {
            self.doubles.fetch_add(1, Ordering::Relaxed);
            eprintln!("{address} was leased to {holder}, and {other} has it");
        }
    }

    /// Before the DEL: from then on another may have it.
    fn ends(&self, address: IpAddr) {
        lock(&self.by_address).remove(&address);
    }
}

/// What an ADD got.
enum Added {
    Address(IpAddr),
    Exhausted,
}

struct Crowd {
    range: Range,
    holders: Holders,
    adds: AtomicU64,
    /// When half of all ADDs are made: by then every node has parts.
    half: u64,
    half_at: OnceLock<Instant>,
    left: AtomicU64,
    questions: AtomicU64,
    retries: AtomicU64,
}

impl Crowd {
    fn new(range: &str, adds: u64) -> Result<Self> {
        let spec = Spec {
            range,
            ..Spec::default()
        };
        Ok(Self {
            range: Range::new(&spec, Profile::Strict)?,
            holders: Holders::default(),
            adds: AtomicU64::new(0),
            half: adds / 2,
            half_at: OnceLock::new(),
            left: AtomicU64::new(adds),
            questions: AtomicU64::new(0),
            retries: AtomicU64::new(0),
        })
    }

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
    fn add(&self, node: &Node, container: &str) -> Result<Added> {
        let until = Instant::now() + ADD_TIMEOUT;
        let leases = node.leases()?;
        loop {
            let order = self.order(node, container);
            let parts = Ownership::Parts {
                state_dir: &node.policy.state_dir,
                last_resort: true,
            };
            let needs = match leases.take(&order, &parts) {
                Ok(leased) => {
                    let lease = leased.first().context("an ADD without a lease")?;
                    return Ok(Added::Address(lease.address));
                }
                Err(Refused {
                    error: LeaseError::NeedsRoom(needs),
                    ..
                }) => needs,
                Err(refused) => bail!("{} {container}: {}", node.name, refused.error),
            };
            self.questions.fetch_add(1, Ordering::Relaxed);
            let failure = match ask(node, &needs) {
                Ok(()) => continue,
                Err(failure) => failure,
            };
            // As `rdma-ipam` tells the runtime: what these say does not change by waiting.
            match failure.failure().map(|failure| failure.kind) {
                Some(FailureKind::Exhausted) => return Ok(Added::Exhausted),
                Some(FailureKind::HeldByAnotherNode | FailureKind::Mismatch) => {
                    bail!("{}: {failure}", node.name)
                }
                _ => {}
            }
            ensure!(Instant::now() < until, "{}: {failure}", node.name);
            self.retries.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Pods come and go on some nodes until all ADDs are made; returns what they have then.
    fn call(&self, nodes: &[Node], pods: usize, seed: u64) -> Result<Vec<Pod>> {
        let mut random = Random(seed);
        let mut live: Vec<Vec<(String, IpAddr)>> = nodes.iter().map(|_| Vec::new()).collect();
        loop {
            let number = random.below(nodes.len());
            let (Some(node), Some(on_node)) = (nodes.get(number), live.get_mut(number)) else {
                continue;
            };
            // Fuller nodes lose pods, emptier ones get some.
            if random.below(2 * pods) < on_node.len() {
                let (container, address) = on_node.swap_remove(random.below(on_node.len()));
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
            let Added::Address(address) = self.add(node, &container)? else {
                bail!("{}: exhausted", node.name);
            };
            self.holders.answered(address, container.clone());
            if self.adds.fetch_add(1, Ordering::Relaxed) + 1 == self.half {
                self.half_at.get_or_init(Instant::now);
            }
            on_node.push((container, address));
        }
        let of_node = |(node, pods): (&Node, Vec<(String, IpAddr)>)| {
            let pods = pods.into_iter();
            let name = node.name.clone();
            pods.map(move |(container, address)| Pod {
                node: name.clone(),
                container,
                address,
            })
        };
        Ok(nodes.iter().zip(live).flat_map(of_node).collect())
    }

    /// How many leases there are, and how many of them and of the pods are wrong.
    fn judge(&self, nodes: &[Node], pods: &[Pod]) -> Result<(u64, u64)> {
        let (mut held, mut wrong) = (0, 0);
        let (boot, space) = (boot(), AddressSpace::new("default", None));
        let mut by_node: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
        for pod in pods {
            by_node.entry(&pod.node).or_default().push(pod);
        }
        for node in nodes {
            let leases = node.leases()?;
            let owned = Owned::read(&node.policy.state_dir, &space)?;
            for lease in leases.list()?.leases {
                held += 1;
                wrong += u64::from(!owned.covers(lease.address, &node.name, &boot));
            }
            for pod in by_node.get(&*node.name).into_iter().flatten() {
                let leases = leases.held(&pod.container, "net1")?;
                if leases.iter().all(|lease| lease.address != pod.address) {
                    wrong += 1;
                    eprintln!("{} lost {}", pod.container, pod.address);
                }
            }
        }
        Ok((held, wrong))
    }
}

struct Pod {
    node: String,
    container: String,
    address: IpAddr,
}

fn ask(node: &Node, needs: &[Need]) -> Result<(), node_wire::ClientError> {
    let need = |need: &Need| {
        let v4 = need.range.subnet().is_ipv4();
        let spans = need.range.spans().iter();
        RoomNeed {
            store: "default".into(),
            network_name: None,
            range: need.range.subnet().to_string(),
            spans: spans.map(|span| span.addresses(v4)).collect(),
            room: Room::Addresses(need.count),
        }
    };
    let question = RoomQuestion {
        within_ms: u32::try_from(QUESTION_TIMEOUT.as_millis()).unwrap_or(u32::MAX),
        needs: needs.iter().map(need).collect(),
    };
    node_wire::ask(&node.socket(), &question, QUESTION_TIMEOUT).map(drop)
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
    server.forget_history()
}

fn nodes_of(server: &ApiServer, place: &Path, count: usize) -> Result<Vec<Node>> {
    let node = |number| {
        let name = format!("node-{number}");
        if server.node_uid(&name)?.is_none() {
            server.add_node(&name)?;
        }
        Node::new(place, name)
    };
    (0..count).map(node).collect()
}

fn joined<T>(threads: Vec<ScopedJoinHandle<'_, Result<T>>>) -> Result<Vec<T>> {
    let ends = threads.into_iter().map(ScopedJoinHandle::join);
    ends.map(|end| end.map_err(|_| anyhow!("a thread panicked"))?)
        .collect()
}

fn resident_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.context("/proc/self/status has no VmRSS")
}

/// Whether all figures are within their budgets.
fn rate(arguments: &Arguments) -> Result<bool> {
    let place = TempDir::new()?;
    let mut server = cluster::api_server()?;
    let nodes = nodes_of(&server, place.path(), arguments.nodes)?;
    let crowd = Crowd::new("10.64.0.0/15", arguments.adds)?;
    let agents = Agents::start(&nodes, server.kubeconfig())?;
    let over = AtomicBool::new(false);
    let started = Instant::now();
    let share = arguments.nodes.div_ceil(arguments.callers.max(1)).max(1);
    let (pods, ended) = thread::scope(|scope| -> Result<_> {
        let (crowd, over, server) = (&crowd, &over, &mut server);
        let faults = (!arguments.no_faults)
            .then(|| scope.spawn(move || trouble(server, crowd, arguments.adds, over)));
        let callers = nodes.chunks(share).zip(1..);
        let callers = callers
            .map(|(nodes, seed)| scope.spawn(move || crowd.call(nodes, arguments.pods, seed)));
        let called = joined(callers.collect());
        let ended = Instant::now();
        over.store(true, Ordering::Relaxed);
        joined(faults.into_iter().collect())?;
        Ok((called?.into_iter().flatten().collect::<Vec<Pod>>(), ended))
    })?;
    let memory = resident_kib()? / 1024;
    agents.end()?;
    let (held, wrong) = crowd.judge(&nodes, &pods)?;
    let adds = crowd.adds.load(Ordering::Relaxed);
    let doubles = crowd.holders.doubles.load(Ordering::Relaxed);
    let half_at = *crowd
        .half_at
        .get()
        .context("not half of the ADDs were made")?;
    let whole_rate = adds as f64 / (ended - started).as_secs_f64();
    let rate = (adds - crowd.half) as f64 / (ended - half_at).as_secs_f64();
    println!("| pods come and go | measured | budget |\n|---|---|---|");
    println!("| nodes, ADDs | {}, {adds} | |", arguments.nodes);
    println!("| addresses leased twice | {doubles} | 0 |");
    println!("| leases lost, or outside of their node's parts | {wrong} | 0 |");
    println!(
        "| leases on disk, by the answers | {held}, {} | equal |",
        pods.len()
    );
    println!(
        "| ADDs in a second, with their DELs, from nodes without a part | {whole_rate:.0} | |"
    );
    println!("| the same, the second half | {rate:.0} | {MIN_RATE} |");
    println!(
        "| ADDs that asked the agent | {} | |",
        crowd.questions.load(Ordering::Relaxed)
    );
    println!(
        "| answers \"try again\" | {} | |",
        crowd.retries.load(Ordering::Relaxed)
    );
    println!("| resident memory, all agents and callers | {memory} MiB | |");
    ensure!(
        doubles == 0 && wrong == 0 && held == pods.len() as u64,
        "addresses are not unique, or leases are lost"
    );
    Ok(rate >= MIN_RATE)
}

/// Whether all figures are within their budgets.
fn shared(arguments: &Arguments) -> Result<bool> {
    let place = TempDir::new()?;
    let server = cluster::api_server()?;
    let proxy = Proxy::start(server.kubeconfig(), 1)?;
    let nodes = nodes_of(&server, place.path(), arguments.shared)?;
    let crowd = Crowd::new("10.64.0.0/24", 2)?;
    let agents = Agents::start(&nodes, &proxy.kubeconfig(place.path().join("kubeconfig"))?)?;
    // Lists and watches of the start are no ADD's.
    thread::sleep(Duration::from_secs(2));
    drop(proxy.take_counts());
    let started = Instant::now();
    let pods = thread::scope(|scope| {
        let crowd = &crowd;
        let pod = |node| {
            scope.spawn(move || -> Result<(Pod, Duration)> {
                let node: &Node = node;
                let container = format!("{}-first", node.name);
                loop {
                    if let Added::Address(address) = crowd.add(node, &container)? {
                        crowd.holders.answered(address, container.clone());
                        let node = node.name.clone();
                        let pod = Pod {
                            node,
                            container,
                            address,
                        };
                        return Ok((pod, started.elapsed()));
                    }
                    ensure!(started.elapsed() < ADD_TIMEOUT, "{}: exhausted", node.name);
                    thread::sleep(Duration::from_secs(1));
                }
            })
        };
        joined(nodes.iter().map(pod).collect())
    })?;
    let mut waits: Vec<Duration> = pods.iter().map(|(_, after)| *after).collect();
    waits.sort_unstable();
    let last = waits.last().copied().unwrap_or_default();
    let half = waits.get(waits.len() / 2).copied().unwrap_or_default();
    let counts = proxy.take_counts();
    let of = |kind| counts.get(&kind).copied().unwrap_or_default();
    let each = |number: u64| number as f64 / arguments.shared as f64;
    let kib = |count: Count| each(count.bytes) / 1024.0;
    let writes = each(of(Kind::Write).accepted);
    println!("\n| a pod on each node, one /24 | measured | budget |\n|---|---|---|");
    println!("| nodes | {} | |", arguments.shared);
    println!(
        "| half of them, all of them have an address after | {half:.1?}, {last:.1?} | {MAX_WAIT:?} |"
    );
    println!("| accepted writes for each node | {writes:.2} | {MAX_WRITES} |");
    println!(
        "| conflicts for each node | {:.2} | |",
        each(of(Kind::Write).conflicts)
    );
    println!(
        "| reads, lists for each node | {:.2}, {:.2} | |",
        each(of(Kind::Read).requests),
        each(of(Kind::List).requests)
    );
    println!(
        "| KiB watched, read, written for each node | {:.1}, {:.1}, {:.1} | 1024 together |",
        kib(of(Kind::Watch)),
        kib(of(Kind::Read)) + kib(of(Kind::List)) + kib(of(Kind::Nodes)),
        kib(of(Kind::Write))
    );
    let bytes: u64 = counts.values().map(|count| count.bytes).sum();

    // The rest of the range goes, and then there is none.
    let begun = Instant::now();
    let callers = 50.min(arguments.exhausted.max(1));
    let left = AtomicU64::new(arguments.exhausted as u64);
    let refused = AtomicU64::new(0);
    let served: Vec<Vec<Pod>> = thread::scope(|scope| {
        let call = |seed| {
            let (crowd, left, refused, nodes) = (&crowd, &left, &refused, &nodes);
            scope.spawn(move || -> Result<Vec<Pod>> {
                let (mut random, mut pods) = (Random(seed), Vec::new());
                while let Ok(number) =
                    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                        left.checked_sub(1)
                    })
                {
                    let node = random.one(nodes);
                    let container = format!("{}-{number}", node.name);
                    let order = crowd.order(node, &container);
                    let parts = Ownership::Parts {
                        state_dir: &node.policy.state_dir,
                        last_resort: true,
                    };
                    // One question: the runtime asks again later.
                    for is_asked in [false, true] {
                        match node.leases()?.take(&order, &parts) {
                            Ok(leased) => {
                                let address = leased.first().context("a lease")?.address;
                                crowd.holders.answered(address, container.clone());
                                let node = node.name.clone();
                                pods.push(Pod {
                                    node,
                                    container,
                                    address,
                                });
                                break;
                            }
                            Err(Refused {
                                error: LeaseError::NeedsRoom(needs),
                                ..
                            }) => {
                                if is_asked || ask(node, &needs).is_err() {
                                    refused.fetch_add(1, Ordering::Relaxed);
                                    break;
                                }
                            }
                            Err(other) => bail!("{}: {}", node.name, other.error),
                        }
                    }
                }
                Ok(pods)
            })
        };
        joined((0..callers as u64).map(call).collect())
    })?;
    let took = begun.elapsed();
    let counts = proxy.take_counts();
    let of = |kind| counts.get(&kind).copied().unwrap_or_default();
    let lists = each(of(Kind::List).requests) / took.as_secs_f64().max(1.0);
    println!("\n| ADDs on a range without addresses | measured | budget |\n|---|---|---|");
    println!(
        "| ADDs, refused, time | {}, {}, {took:.1?} | |",
        arguments.exhausted,
        refused.load(Ordering::Relaxed)
    );
    println!("| lists of each node in a second | {lists:.3} | {MAX_LISTS} |");
    println!(
        "| reads, accepted writes, conflicts for each ADD | {:.2}, {:.2}, {:.2} | |",
        of(Kind::Read).requests as f64 / arguments.exhausted as f64,
        of(Kind::Write).accepted as f64 / arguments.exhausted as f64,
        of(Kind::Write).conflicts as f64 / arguments.exhausted as f64
    );
    agents.end()?;
    let mut all: Vec<Pod> = pods.into_iter().map(|(pod, _)| pod).collect();
    all.extend(served.into_iter().flatten());
    let (held, wrong) = crowd.judge(&nodes, &all)?;
    let doubles = crowd.holders.doubles.load(Ordering::Relaxed);
    println!("| addresses leased twice, leases lost or outside | {doubles}, {wrong} | 0, 0 |");
    ensure!(
        doubles == 0 && wrong == 0 && held == all.len() as u64,
        "addresses are not unique, or leases are lost: {held} leases, {} pods",
        all.len()
    );
    Ok(last <= MAX_WAIT
        && writes <= MAX_WRITES
        && lists <= MAX_LISTS
        && each(bytes) <= 1024.0 * 1024.0)
}

/// Full subnets, so that each node has a part of one.
fn fill(api: &Api, space: &AddressSpace, nodes: usize) -> Result<()> {
    for (number, first) in (0..nodes).step_by(OWNERS).enumerate() {
        let network = Ipv4Addr::from(0x0a40_0000 + u32::try_from(number)? * 256);
        let none = Read::none(space, subnet_of(network.into()));
        let mut document = none.document.clone();
        let owners = (first..nodes.min(first + OWNERS)).zip(u32::from(network)..);
        document.parts = owners
            .map(|(node, address)| {
                let by = subnet::Holder {
                    node: format!("node-{node}"),
                    id: format!("{node:08x}-00000001"),
                };
                (single(IpAddr::V4(address.into())), Part::of(&by))
            })
            .collect();
        // As nodes do: one makes the document, and others change it.
        let mut first = none.document.clone();
        first.parts = document.parts.clone().into_iter().take(1).collect();
        ensure!(matches!(api.swap(space, &none, &first)?, Swap::Won(_)));
        let made = api.read(space, document.subnet)?;
        ensure!(matches!(api.swap(space, &made, &document)?, Swap::Won(_)));
    }
    Ok(())
}

/// What an agent asks until it has read its parts, each of it tried again as the agent does; where to watch from.
fn start_agent(
    api: &Api,
    runtime: &Handle,
    name: &str,
    (failed, over): (&AtomicU64, &CancellationToken),
) -> String {
    let mut random = Random(ipam::space::hash(name));
    let mut pause = |wait: &mut usize, error: &ApiError| {
        if failed.fetch_add(1, Ordering::Relaxed) == 0 {
            eprintln!("{name}: {error}");
        }
        let pause = *wait / 2 + random.below(*wait);
        thread::sleep(Duration::from_millis(pause as u64));
        *wait = (2 * *wait).min(30_000);
        !over.is_cancelled()
    };
    let begin = || {
        let found = runtime.block_on(api.documents())?;
        runtime.block_on(api.look())?;
        Ok(found)
    };
    let mut wait = 1000;
    let (documents, from) = loop {
        match begin() {
            Ok(found) => break found,
            Err(error) if pause(&mut wait, &error) => {}
            Err(_) => return String::new(),
        }
    };
    assert!(!documents.is_empty(), "{name} has no document");
    let mut wait = 1000;
    for News { space, subnet } in documents {
        let read = loop {
            match api.read(&space, subnet) {
                Ok(read) => break read,
                Err(error) if pause(&mut wait, &error) => {}
                Err(_) => return String::new(),
            }
        };
        assert!(read.document.parts.values().any(|part| part.node == name));
    }
    from
}

fn start(arguments: &Arguments) -> Result<()> {
    let place = TempDir::new()?;
    let server = cluster::api_server()?;
    // As agents are: the server answers so many of them at a time, and sends the others away for a second.
    let agents = server.kubeconfig_of("agent", &["crowd"])?;
    let proxy = Proxy::start(&agents, 1)?;
    let end = CancellationToken::new();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (handle, until) = (runtime.handle().clone(), end.clone());
    let driver = thread::spawn(move || runtime.block_on(until.cancelled()));
    let config = proxy.kubeconfig(place.path().join("kubeconfig"))?;
    let client = handle.block_on(client(&config))?;
    let api = |name: &str| Api::new(client.clone(), handle.clone(), name);
    let space = AddressSpace::new("default", None);
    fill(&api("node-0"), &space, arguments.starting)?;
    drop(proxy.take_counts());
    let (failed, hears, over) = (
        AtomicU64::new(0),
        AtomicU64::new(0),
        CancellationToken::new(),
    );
    let started = Instant::now();
    let each = |number: u64| number as f64 / arguments.starting as f64;
    let done = thread::scope(|scope| -> Result<()> {
        let (runtime, failed, hears, over) = (&handle, &failed, &hears, &over);
        for number in 0..arguments.starting {
            let name = format!("node-{number}");
            let api = api(&name);
            thread::Builder::new()
                .stack_size(512 << 10)
                .spawn_scoped(scope, move || {
                    let from = start_agent(&api, runtime, &name, (failed, over));
                    hears.fetch_add(1, Ordering::Relaxed);
                    let watch = async { drop(api.watch(&from, |_| ()).await) };
                    runtime.block_on(async {
                        tokio::select! { () = watch => {} () = over.cancelled() => {} }
                    });
                })?;
        }
        while hears.load(Ordering::Relaxed) < arguments.starting as u64
            && started.elapsed() < ADD_TIMEOUT
        {
            thread::sleep(Duration::from_millis(100));
        }
        let took = started.elapsed();
        // The last ones' watches.
        thread::sleep(Duration::from_secs(5));
        let counts = proxy.take_counts();
        thread::sleep(Duration::from_secs(30));
        let idle: u64 = proxy
            .take_counts()
            .values()
            .map(|count| count.requests)
            .sum();
        over.cancel();
        println!("\n| agents that start at one moment | measured |\n|---|---|");
        println!(
            "| agents, all have read their parts after | {}, {took:.1?} |",
            arguments.starting
        );
        println!(
            "| attempts without an answer | {} |",
            failed.load(Ordering::Relaxed)
        );
        let of = |kind| counts.get(&kind).copied().unwrap_or_default();
        for (what, kind) in [
            ("reads", Kind::Read),
            ("lists", Kind::List),
            ("watches", Kind::Watch),
        ] {
            let count = of(kind);
            println!(
                "| {what} of each, KiB | {:.2}, {:.1} |",
                each(count.requests),
                each(count.bytes) / 1024.0
            );
        }
        println!("| requests of all in the 30 s after it | {idle} |");
        ensure!(
            hears.load(Ordering::Relaxed) == arguments.starting as u64,
            "not all agents started"
        );
        Ok(())
    });
    end.cancel();
    let _ = driver.join();
    done
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut within = true;
    let is_wanted = |scene| arguments.only.is_none_or(|only| only == scene);
    if is_wanted(Scene::Rate) {
        within &= rate(&arguments)?;
    }
    if is_wanted(Scene::Shared) {
        within &= shared(&arguments)?;
    }
    if is_wanted(Scene::Start) {
        start(&arguments)?;
    }
    Ok(match arguments.check && !within {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}
