//! What the daemon costs and how soon it answers, against its budgets: on hosts made of files,
//! with the kubelet's stand-in; links that go are real netdevs'. Nothing else does the same, so there is no peer beside it.
//!
//! Each row is the median of several daemons, but for memory, which is the largest.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use e2e::bin_under_test::product;
use e2e::daemon::{Daemon, Machine, make_nodes, sockets};
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::scene::{Scene, index_of};
use hca::KernelSocket;
use hca_trees::{Tree, machine};
use kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use kubelet_api::deviceplugin::{ContainerPreferredAllocationRequest, PreferredAllocationRequest};
use nix::sys::signal::Signal;

#[derive(Debug, Parser)]
#[command(about = "Start, memory, list and Allocate of rdma-device-plugin, against budgets")]
struct Arguments {
    /// Daemons for each row
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Exit with a failure when something is over its budget
    #[arg(long)]
    check: bool,
}

const RESOURCE: &str = "rdma/hca";
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Pods admitted one after the other for the latency of Allocate.
const PODS: usize = 64;

/// From a pod's admission to the first CNI call at least: the kubelet makes the pod's directories and
/// cgroups and the runtime a namespace.
const SANDBOX: Duration = Duration::from_millis(100);

/// Restarts of the kubelet.
const RESTARTS: usize = 10;

/// Daemons that follow each other, as in a rollout.
const REPLACEMENTS: usize = 5;

/// Ports that lose their link, one after the other.
const PORTS: usize = 8;

/// What one daemon did.
#[derive(Debug, Default)]
struct Seen {
    registered: Vec<Duration>,
    resident_kib: Vec<u64>,
    bytes: Vec<usize>,
    allocate: Vec<Duration>,
    again: Vec<Duration>,
    /// From SIGTERM to the end of the process.
    ended: Vec<Duration>,
    /// From the end of a process to all units allocatable by the next one.
    replaced: Vec<Duration>,
    /// What the CNI plugin waits for: which units a pod holds, asked as long after its admission as
    /// a sandbox takes at least.
    proof: Vec<Duration>,
    /// The same, asked at once, so that the kubelet must be asked first.
    proof_at_once: Vec<Duration>,
    processor: Vec<Duration>,
}

fn config(slots: u32) -> String {
    format!(
        "version: 1\npools:\n- resource: {RESOURCE}\n  mode: shared\n  shares: {slots}\n  select: {{linkTypes: [ether]}}\n"
    )
}

fn resident(daemon: &Daemon) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|text| text.split_whitespace().next());
    Ok(number.context("VmRSS")?.parse()?)
}

/// Processor time of a daemon so far, user and system.
fn processor(daemon: &Daemon) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", daemon.id()))?;
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .context("stat")?
        .split_whitespace()
        .collect();
    let ticks =
        |index: usize| -> Result<u64> { Ok(fields.get(index).context("stat is short")?.parse()?) };
    // utime and stime, fields 14 and 15 of proc(5), in hundredths of a second.
    Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
}

/// Bytes of one message with all units, as the kubelet gets it.
fn message(kubelet: &Kubelet) -> usize {
    let devices = kubelet.devices(RESOURCE).into_values().collect();
    prost::Message::encoded_len(&kubelet_api::deviceplugin::ListAndWatchResponse { devices })
}

fn one(seen: &mut Seen, hcas: u32, slots: u32) -> Result<()> {
    let machine = Machine::with_hcas(hcas)?;
    let kubelet = machine.kubelet()?;
    let started = Instant::now();
    // In a directory of its own, as a ConfigMap is: whatever happens beside it is an event, and
    // those of the configuration's directory are gathered for a while.
    let directory = machine.directory().join("config");
    fs::create_dir(&directory)?;
    let file = directory.join("config.yaml");
    fs::write(&file, config(slots))?;
    let root = machine.settings().root;
    let start = || machine.daemon_on(&file, &["--kubelet-root-dir".as_ref(), root.as_os_str()]);
    let mut daemon = start()?;
    let units = usize::try_from(hcas * slots)?;
    kubelet
        .wait_allocatable(RESOURCE, units, WAIT_TIMEOUT)
        .with_context(|| daemon.log())?;
    seen.registered.push(started.elapsed());
    seen.bytes.push(message(&kubelet));
    for number in 0..PODS {
        let pod = Pod::with_limits(&format!("pod-{number}"), &[(RESOURCE, 1)])?;
        let named = node_wire::Pod {
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            uid: Some(pod.metadata.uid.clone()),
        };
        let asked = Instant::now();
        kubelet.admit(pod)?;
        seen.allocate.push(asked.elapsed());
        let at_once = number % 2 == 0;
        if !at_once {
            std::thread::sleep(SANDBOX);
        }
        let asked = Instant::now();
        let held = node_wire::ask(&machine.node_socket(), &named, WAIT_TIMEOUT)?;
        let proof = match at_once {
            true => &mut seen.proof_at_once,
            false => &mut seen.proof,
        };
        proof.push(asked.elapsed());
        ensure!(held.allocations.len() == 1, "{held:?}");
    }
    // From the moment the kubelet serves again; what it was doing before is its own affair.
    let mut kubelet = kubelet;
    for _ in 0..RESTARTS {
        let settings = kubelet.settings().clone();
        kubelet.kill();
        kubelet = Kubelet::start(settings)?;
        let started = Instant::now();
        kubelet.wait_allocatable(RESOURCE, units, WAIT_TIMEOUT)?;
        seen.again.push(started.elapsed());
    }
    for _ in 0..REPLACEMENTS {
        let asked = Instant::now();
        daemon.signal(Signal::SIGTERM)?;
        ensure!(daemon.ended(WAIT_TIMEOUT)?.success(), "{}", daemon.log());
        seen.ended.push(asked.elapsed());
        kubelet.wait_allocatable(RESOURCE, 0, WAIT_TIMEOUT)?;
        let ended = Instant::now();
        daemon = start()?;
        kubelet.wait_allocatable(RESOURCE, units, WAIT_TIMEOUT)?;
        seen.replaced.push(ended.elapsed());
    }
    // Idle: what the start and the pods asked for has been given back, and the timer went.
    let before = processor(&daemon)?;
    std::thread::sleep(Duration::from_secs(10));
    seen.processor
        .push(processor(&daemon)?.saturating_sub(before));
    seen.resident_kib.push(resident(&daemon)?);
    Ok(())
}

fn median<T: Copy + Ord>(list: &mut [T]) -> Option<T> {
    list.sort_unstable();
    list.get(list.len() / 2).copied()
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn print(line: &str) {
    println!("{line}");
}

fn row(what: &str, value: f64, unit: &str, budget: Option<f64>) -> bool {
    let within = budget.is_none_or(|budget| value <= budget);
    let budget = budget.map_or(String::new(), |budget| format!("≤ {budget} {unit}"));
    print(&format!("| {what} | {value:.1} {unit} | {budget} |"));
    within
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    print("| what | value | budget |");
    print("|---|---|---|");
    let mut within = true;
    let mut preferred = Vec::new();
    for _ in 0..arguments.rounds {
        preferred.push(advice()?);
    }
    within &= row(
        "GetPreferredAllocation, 20,000 of 50 HCAs × 1000 shares",
        median(&mut preferred).unwrap_or_default().as_secs_f64() * 1000.0,
        "ms",
        Some(50.0),
    );
    let mut told = Vec::new();
    for _ in 0..arguments.rounds {
        told.extend(links_go()?);
    }
    let told_row = |what: &str, time: Option<Duration>, budget| {
        let what =
            format!("8 HCAs × 1000 units: a port's link event to the kubelet's list, {what}");
        let time = time.unwrap_or_default().as_secs_f64() * 1000.0;
        row(&what, time, "ms", budget)
    };
    within &= told_row("median", median(&mut told), Some(100.0));
    within &= told_row("the slowest", told.iter().max().copied(), None);
    for (hcas, slots, start, memory, proof) in [
        (8, 1000, Some(300.0), Some(10.0), Some(1.0)),
        (100, 100, None, None, None),
        (0, 1, None, None, None),
    ] {
        let mut seen = Seen::default();
        for _ in 0..arguments.rounds {
            if hcas > 0 {
                one(&mut seen, hcas, slots)?;
            } else {
                idle(&mut seen)?;
            }
        }
        let name = format!("{hcas} HCAs × {slots} units");
        let ms = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64() * 1000.0;
        if hcas > 0 {
            let (mut registered, mut allocate) = (seen.registered, seen.allocate);
            within &= row(
                &format!("{name}: start to all units registered"),
                ms(median(&mut registered)),
                "ms",
                start,
            );
            let kib = f64::from(u32::try_from(median(&mut seen.bytes).unwrap_or(0))?) / 1024.0;
            within &= row(&format!("{name}: the message"), kib, "KiB", Some(4096.0));
            within &= row(
                &format!("{name}: a pod admitted, Preferred and Allocate"),
                ms(median(&mut allocate)),
                "ms",
                None,
            );
            for (times, which, proof) in [
                (&mut seen.proof, "asked by its sandbox", proof),
                (&mut seen.proof_at_once, "asked at once", None),
            ] {
                within &= row(
                    &format!("{name}: the units of a pod, {which}"),
                    ms(median(times)),
                    "ms",
                    proof,
                );
            }
            let slowest = seen.again.iter().max().copied();
            within &= row(
                &format!("{name}: kubelet restarted to all units registered, the slowest"),
                ms(slowest),
                "ms",
                Some(1000.0),
            );
            for (times, what, budget) in [
                (&mut seen.ended, "SIGTERM to the end of the process", None),
                (
                    &mut seen.replaced,
                    "end of the old process to all units registered by the new one",
                    start,
                ),
            ] {
                let time = ms(median(times));
                within &= row(&format!("{name}: {what}"), time, "ms", budget);
            }
            within &= row(
                &format!("{name}: processor time of 10 s"),
                ms(median(&mut seen.processor)),
                "ms",
                None,
            );
        }
        let largest = seen.resident_kib.iter().copied().max().unwrap_or(0);
        let mib = f64::from(u32::try_from(largest)?) / 1024.0;
        within &= row(&format!("{name}: resident"), mib, "MiB", memory);
    }
    Ok(match arguments.check && !within {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// How long the daemon takes to say which 20,000 of 50,000 shares a pod should have.
fn advice() -> Result<Duration> {
    let machine = Machine::with_hcas(50)?;
    let kubelet = machine.kubelet()?;
    let _daemon = machine.daemon(&config(1000))?;
    kubelet.wait_allocatable(RESOURCE, 50_000, WAIT_TIMEOUT)?;
    let directory = machine.settings().device_plugins;
    let socket = sockets(&directory)?.pop().context("no socket")?;
    let socket = format!("unix://{}", directory.join(socket).display());
    let question = ContainerPreferredAllocationRequest {
        available_device_i_ds: kubelet.devices(RESOURCE).into_keys().collect(),
        must_include_device_i_ds: Vec::new(),
        allocation_size: 20_000,
    };
    let question = PreferredAllocationRequest {
        container_requests: vec![question],
    };
    kubelet.runtime().block_on(async {
        let mut plugin = DevicePluginClient::connect(socket).await?;
        let asked = Instant::now();
        let answer = plugin
            .get_preferred_allocation(question)
            .await?
            .into_inner();
        let took = asked.elapsed();
        let mut chosen = answer.container_responses.into_iter();
        let chosen = chosen.next().context("no answer")?.device_i_ds;
        ensure!(chosen.len() == 20_000, "{} units", chosen.len());
        Ok(took)
    })
}

/// Each port of a machine with eight loses its link once: how long after the kernel's event the kubelet
/// has the list without the port's units. The netdevs are real; sysfs is of files, and says that the port
/// is down before its netdev does, as a driver has it.
fn links_go() -> Result<Vec<Duration>> {
    let names: Vec<String> = (0..PORTS).map(|nic| format!("gpu{nic}rdma0")).collect();
    let netdevs: Vec<&str> = names.iter().map(String::as_str).collect();
    let lay = |tree: &Tree| {
        tree.rdma_core(true);
        machine::a4(tree);
    };
    let scene = Scene::laid(lay, &netdevs)?;
    let (tree, netns) = (scene.tree()?, &scene.host.netns);
    make_nodes(tree)?;
    let mut indexes = Vec::new();
    for name in &names {
        let index = index_of(netns, name)?;
        for file in ["ifindex", "iflink"] {
            tree.file(format!("/sys/class/net/{name}/{file}"), index);
        }
        indexes.push(u32::try_from(index)?);
    }
    let directory = scene.host.directory();
    let file = directory.join("pools/config");
    fs::create_dir(directory.join("pools"))?;
    fs::DirBuilder::new()
        .mode(0o700)
        .create(scene.host.state())?;
    // What is not an event is not seen.
    fs::write(&file, format!("rescanInterval: 0\n{}", config(1000)))?;
    let settings = Settings::below(&directory.join("kubelet"));
    let kubelet = Kubelet::start(settings.clone())?;
    let mut command = netns.command(product("rdma-device-plugin")?);
    for (flag, path) in [
        ("--config-file", &file),
        ("--host-root", &scene.host_root()),
        ("--device-plugin-dir", &settings.device_plugins),
        ("--kubelet-root-dir", &settings.root),
        ("--node-socket", &directory.join("node.sock")),
        ("--policy", &scene.policy_file()),
    ] {
        command.arg(flag).arg(path);
    }
    let daemon = Daemon::start(command, directory)?;
    let listed = |units: usize| {
        let waited = kubelet.wait_allocatable(RESOURCE, units, WAIT_TIMEOUT);
        waited.with_context(|| daemon.log())
    };
    let all = PORTS * 1000;
    let mut took = Vec::new();
    for (nic, (netdev, index)) in names.iter().zip(indexes).enumerate() {
        listed(all)?;
        // The daemon listens by now, and is not at work.
        std::thread::sleep(Duration::from_secs(1));
        let events = netns.enter(|| Ok(KernelSocket::open(ROUTE, LINK_GROUP)?))?;
        let device = format!("mlx5_{nic}");
        let event = std::thread::scope(|scope| {
            let event = scope.spawn(|| link_event(&events, index));
            tree.set_port_state(&device, 1, "1: DOWN", "3: Disabled");
            netns.ip(&format!("link set p-{netdev} down"))?;
            event.join().ok().context("panicked")?
        })?;
        listed(all - 1000)?;
        took.push(event.elapsed());
        tree.set_port_state(&device, 1, "4: ACTIVE", "5: LinkUp");
        netns.ip(&format!("link set p-{netdev} up"))?;
    }
    Ok(took)
}

/// `NETLINK_ROUTE` and `RTMGRP_LINK` (`include/uapi/linux/{netlink,rtnetlink}.h`).
const ROUTE: isize = 0;
const LINK_GROUP: u32 = 1;

/// When the kernel's next message about a link came.
fn link_event(events: &KernelSocket, index: u32) -> Result<Instant> {
    let mut message = Vec::new();
    loop {
        events.receive(&mut message)?;
        // struct ifinfomsg is behind struct nlmsghdr; its index is behind family, padding and type.
        if message.get(20..24) == Some(&index.to_ne_bytes()) {
            return Ok(Instant::now());
        }
    }
}

/// A node without RDMA hardware.
fn idle(seen: &mut Seen) -> Result<()> {
    let machine = Machine::with_hcas(0)?;
    let kubelet = machine.kubelet()?;
    let daemon = machine.daemon(&config(1))?;
    kubelet.wait("a registration", WAIT_TIMEOUT, |_, calls| !calls.is_empty())?;
    std::thread::sleep(Duration::from_secs(2));
    seen.resident_kib.push(resident(&daemon)?);
    anyhow::ensure!(
        Path::new("/proc").join(daemon.id().to_string()).exists(),
        "it ended"
    );
    Ok(())
}
