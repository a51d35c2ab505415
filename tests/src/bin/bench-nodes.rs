//! What the `RdmaNode`s of a large cluster cost, while ports flap.
//!
//! API server and etcd are real (`e2e::api_server`), and so is each node's agent, in this process. The daemon
//! that it asks is simulated: a socket that answers with the state of eight HCAs, as soon as it is another one.
//! All requests pass a proxy that counts them.

#![expect(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "the table is what this program is for"
)]

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use e2e::cluster;
use e2e::proxy::{Kind, Proxy, client};
use e2e::random::Random;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use node::policy::{Policy, StoreKind, StorePolicy};
use node_server::socket::connections::{Answers, Connections};
use node_server::socket::{Socket, State};
use node_wire::status::{HcaStatus, HostHca, HostPort, PoolStatus, UnitCounts};
use node_wire::{Answer, DaemonStatus, Failure, FailureKind, Question, StatusChange};
use rdma_agent::agent::{Settings, run};
use rdma_agent::decide::ThisNode;
use rdma_agent::space::Context;
use tempfile::TempDir;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

const HCAS: usize = 8;
const RESOURCE: &str = "rdma/nic";
/// A port that flaps changes after one to so many seconds.
const FLAP_SECONDS: usize = 10;
/// How long all agents may take to write their node's first state.
const START_LIMIT: Duration = Duration::from_mins(5);

/// Simulates many nodes' agents and daemons on one API server
#[derive(Debug, Parser)]
struct Arguments {
    #[arg(long, default_value_t = 1000)]
    nodes: usize,
    /// Ports that flap, each of another node
    #[arg(long, default_value_t = 80)]
    flapping: usize,
    /// How long
    #[arg(long, default_value_t = 10)]
    minutes: u64,
}

/// A daemon, as its agent sees it.
struct Daemon(watch::Sender<StatusChange>);

impl Answers for Daemon {
    async fn answer(&self, question: Question) -> Result<Answer, Failure> {
        let Question::Change(question) = question else {
            return Err(Failure::new(FailureKind::Mismatch, "asks something else"));
        };
        let mut state = self.0.subscribe();
        let limit = Duration::from_millis(question.within_ms.into());
        let another = state.wait_for(|change| Some(change.state) != question.seen);
        let _ = timeout(limit, another).await;
        let change = self.0.borrow().clone();
        Ok(Answer::Change(Box::new(change)))
    }
}

/// The state of a node, with its first port up or down. Its HCA is unhealthy while the port flaps.
fn state(node: usize, is_up: bool, is_flapping: bool) -> DaemonStatus {
    let hca = |number: usize| {
        let is_well = number > 0 || !is_flapping;
        let id = format!("0000:{number:02x}:00.0");
        let hardware = HostHca {
            id: id.clone(),
            function: "pf".into(),
            device: Some("15b3:1021".into()),
            rdma_devices: vec![format!("mlx5_{number}")],
            board: Some("MT_0000000838".into()),
            firmware: Some("28.43.2026".into()),
            rail: u32::try_from(number).ok(),
            ports: vec![HostPort {
                name: format!("mlx5_{number}:1"),
                netdev: Some(format!("ens{number}np0")),
                link_layer: "ether".into(),
                state: if number > 0 || is_up {
                    "ACTIVE"
                } else {
                    "DOWN"
                }
                .into(),
                rate_mbps: Some(400_000),
                mtu: Some(9000),
                guid: Some(format!("0c42:a103:{node:04x}:{number:04x}")),
            }],
            ..HostHca::default()
        };
        let reason = "port mlx5_0:1 is DOWN".to_owned();
        let of_pool = HcaStatus {
            id,
            healthy: is_well,
            reason: (!is_well).then(|| "port_down".to_owned()),
            reasons: (!is_well).then_some(reason).into_iter().collect(),
            ..HcaStatus::default()
        };
        (hardware, of_pool)
    };
    let (hardware, of_pool) = (0..HCAS).map(hca).unzip();
    let unhealthy = u64::from(is_flapping);
    DaemonStatus {
        program_version: "0.1.0".into(),
        ready: true,
        flap_hold_ms: 30_000,
        pools: vec![PoolStatus {
            resource: RESOURCE.into(),
            mode: Some("exclusive".into()),
            present: HCAS,
            expected: HCAS,
            units: UnitCounts {
                healthy: HCAS as u64 - unhealthy,
                unhealthy,
            },
            hcas: of_pool,
            registered: true,
            listed: true,
            ..PoolStatus::default()
        }],
        hcas: hardware,
        ..DaemonStatus::default()
    }
}

async fn settings(place: &Path, name: &str, kubeconfig: &Path) -> Result<Settings> {
    let root = place.join(name);
    std::fs::create_dir_all(root.join("run/rdma-netdev"))?;
    let mut policy = Policy {
        node: Some(name.to_owned()),
        state_dir: root.join("state"),
        ..Policy::default()
    };
    let store = StorePolicy::of(StoreKind::Kubernetes);
    policy.stores.insert("default".into(), store);
    Ok(Settings {
        context: Context {
            node: ThisNode {
                name: name.to_owned(),
                boot: node::identity::boot_id(Path::new("/proc")),
            },
            state_dir: policy.state_dir.clone(),
            cooldown: Duration::ZERO,
            grace: Duration::from_mins(5),
            root: root.clone(),
        },
        policy,
        client: Some(client(kubeconfig).await?),
        node_socket: Some(root.join("node.sock")),
        marks: Default::default(),
        features_dir: Default::default(),
        socket: root.join("agent.sock"),
        listen: Vec::new(),
    })
}

/// Processor time of this process so far.
fn processor_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let spent = usage.user_time() + usage.system_time();
    Ok(Duration::from_micros(u64::try_from(
        spent.num_microseconds(),
    )?))
}

/// What this process has in memory, in MiB (`VmRSS` of `proc_pid_status(5)`).
fn resident() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let size = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(size.context("no VmRSS")?.parse::<f64>()? / 1024.0)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    ensure!(
        arguments.flapping <= arguments.nodes,
        "more ports that flap than nodes"
    );
    let place = TempDir::new()?;
    let server = cluster::api_server()?;
    let agents = server.kubeconfig_of("agent", &["crowd"])?;
    let proxy = Proxy::start(&agents, 1)?;
    let kubeconfig = proxy.kubeconfig(place.path().join("kubeconfig"))?;
    let name = |number: usize| format!("node-{number}");
    for number in 0..arguments.nodes {
        server.add_node(&name(number))?;
    }
    let stop = CancellationToken::new();
    let runtime = Builder::new_current_thread()
        // An agent waits for its daemon on one.
        .max_blocking_threads(4 * arguments.nodes)
        .thread_stack_size(256 << 10)
        .enable_all()
        .build()?;
    let (handle, until) = (runtime.handle().clone(), stop.clone());
    let driver = thread::spawn(move || {
        runtime.block_on(until.cancelled());
        runtime.shutdown_timeout(Duration::from_secs(5));
    });
    let begun = Instant::now();
    let daemons = (0..arguments.nodes).map(|number| {
        let status = state(number, true, false);
        let daemon = Daemon(watch::Sender::new(StatusChange { state: 1, status }));
        let states = daemon.0.clone();
        let settings = handle.block_on(settings(place.path(), &name(number), &kubeconfig))?;
        let socket = Socket {
            path: settings.node_socket.clone().context("a socket")?,
            flag: "--node-socket",
            nonce: name(number),
            state: watch::Sender::new(State::default()),
            connections: Connections::new(daemon),
        };
        let until = stop.clone();
        handle.spawn(async move { socket.serve(&until).await });
        handle.spawn(run(settings, stop.clone()));
        Ok(states)
    });
    let daemons = daemons.collect::<Result<Vec<_>>>()?;
    let mut written = 0;
    while written < arguments.nodes as u64 {
        ensure!(
            begun.elapsed() < START_LIMIT,
            "only {written} nodes are shown"
        );
        thread::sleep(Duration::from_millis(200));
        let counts = proxy.take_counts();
        written += counts.get(&Kind::Write).map_or(0, |count| count.accepted);
    }
    println!(
        "| RdmaNodes of {} nodes that start at one moment, all written after | {:.1?} |",
        arguments.nodes,
        begun.elapsed()
    );
    thread::sleep(Duration::from_secs(10));
    drop(proxy.take_counts());

    let before = processor_time()?;
    let begun = Instant::now();
    let length = Duration::from_secs(60 * arguments.minutes);
    let mut random = Random(1);
    let mut due: Vec<(Instant, bool)> = vec![(begun, true); arguments.flapping];
    let mut changes = 0_u64;
    while begun.elapsed() < length {
        for (number, (at, is_up)) in due.iter_mut().enumerate() {
            if *at > Instant::now() {
                continue;
            }
            *is_up = !*is_up;
            *at += Duration::from_millis(1000 + random.below(1000 * (FLAP_SECONDS - 1)) as u64);
            let status = state(number, *is_up, true);
            let daemon = daemons.get(number).context("a daemon")?;
            daemon.send_modify(|change| {
                change.state += 1;
                change.status = status;
            });
            changes += 1;
        }
        thread::sleep(Duration::from_millis(50));
    }
    let spent = processor_time()?.saturating_sub(before);
    let counts = proxy.take_counts();
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "| {} ports of {} flap for {} minutes: changes | {changes} |",
        arguments.flapping,
        HCAS * arguments.nodes,
        arguments.minutes
    );
    for (what, kind) in [
        ("writes of RdmaNodes", Kind::Write),
        ("events", Kind::Event),
        ("reads of RdmaNodes", Kind::Read),
        ("reads of Nodes", Kind::Nodes),
        ("lists of subnets", Kind::List),
        ("watches of subnets", Kind::Watch),
    ] {
        let count = counts.get(&kind).copied().unwrap_or_default();
        println!(
            "| {what}: in all, in a second, KiB sent and received in a second | {}, {:.2}, {:.1}, {:.1} |",
            count.requests,
            count.requests as f64 / seconds,
            count.sent as f64 / 1024.0 / seconds,
            count.bytes as f64 / 1024.0 / seconds
        );
    }
    println!(
        "| processor time of an agent, with its part of proxy and simulated daemons | {:.2} ms in a second |",
        1e3 * spent.as_secs_f64() / seconds / arguments.nodes as f64
    );
    println!("| resident, all in one process | {:.0} MiB |", resident()?);
    stop.cancel();
    let _ = driver.join();
    Ok(())
}
