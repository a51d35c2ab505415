//! The daemon and a kubelet: it is registered whenever there is a kubelet to
//! register with, whatever happens to either, and a container gets the devices
//! that it was allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::harness::Case;
use e2e::kubelet::{Container, Kubelet, Misbehaviour, Pod};
use kubelet_api::deviceplugin::{HEALTHY, UNHEALTHY};
use nix::sys::signal::Signal;

use e2e::daemon::{Daemon, HCAS, Machine, sockets};

pub(crate) const CASES: &[Case] = &[
    case!(a_pod_gets_all_hcas_of_an_unchanged_configuration, Root),
    case!(an_exclusive_unit_is_one_hca_and_its_nodes, Root),
    case!(units_are_offered_where_no_device_directory_is_shown, Root),
    case!(an_init_container_can_have_more_or_fewer_units, Root),
    case!(a_container_of_a_time_before_late_binding_restarts, Root),
    case!(two_units_are_two_hcas, Root),
    case!(ten_thousand_units_are_listed, Root),
    case!(twenty_thousand_shares_are_allocated_at_once, Root),
    case!(a_hundred_restarts_of_the_kubelet, Root),
    case!(a_kubelet_that_comes_late_is_waited_for, Root),
    case!(a_kubelet_that_refuses_is_asked_again, Root),
    case!(a_kubelet_that_never_watches_is_asked_again, Root),
    case!(a_slow_kubelet_is_asked_once, Root),
    case!(a_replaced_directory_is_noticed, Root),
    case!(a_dropped_stream_is_registered_anew, Root),
    case!(a_deleted_socket_is_served_anew, Root),
    case!(
        a_port_that_goes_down_makes_its_units_unhealthy_and_drops_none,
        Root
    ),
    case!(a_killed_daemon_is_followed_by_one_with_the_same_units, Root),
    case!(a_rolling_update_ends_registered, Root),
    case!(asked_to_stop_it_leaves_no_socket, Root),
    case!(a_missing_kubelet_directory_is_said, Root),
    case!(a_wrong_configuration_is_said, Root),
    case!(an_optional_pool_is_offered_from_its_first_hca_on, Root),
];

const SHARED: &str = r#"{"periodicUpdateInterval": 1, "configList": [
    {"resourceName": "hca", "rdmaHcaMax": 4, "devices": ["rdma0", "rdma1"]}]}"#;
const SHARED_RESOURCE: &str = "rdma/hca";
const EXCLUSIVE: &str =
    "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";
const EXCLUSIVE_RESOURCE: &str = "rdma/nic";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// A machine whose daemon is registered and has listed `count` units.
fn registered(config: &str, resource: &str, count: usize) -> Result<(Machine, Kubelet, Daemon)> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    let daemon = machine.daemon(config)?;
    wait(&kubelet, &daemon, resource, count)?;
    Ok((machine, kubelet, daemon))
}

fn wait(kubelet: &Kubelet, daemon: &Daemon, resource: &str, count: usize) -> Result<()> {
    let waited = kubelet.wait_allocatable(resource, count, WAIT_TIMEOUT);
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

fn admit(kubelet: &Kubelet, name: &str, resource: &str, units: u64) -> Result<Vec<String>> {
    kubelet.admit(Pod::with_limits(name, &[(resource, units)])?)?;
    let name = format!("default/{name}");
    Ok(kubelet.assigned(&name)?.into_values().flatten().collect())
}

/// Paths of the nodes that a pod's container gets.
fn nodes(kubelet: &Kubelet, name: &str) -> Result<BTreeSet<String>> {
    let options = kubelet.run_options(&format!("default/{name}"), "main")?;
    for device in &options.devices {
        assert_eq!(device.permissions, "rw");
        assert_eq!(device.host_path, device.container_path);
    }
    Ok(options
        .devices
        .into_iter()
        .map(|device| device.container_path)
        .collect())
}

fn named<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(|name| format!("/dev/infiniband/{name}")).into()
}

fn a_pod_gets_all_hcas_of_an_unchanged_configuration() -> Result<()> {
    let (_machine, kubelet, _daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    assert_eq!(admit(&kubelet, "pod", SHARED_RESOURCE, 1)?.len(), 1);
    let nodes = nodes(&kubelet, "pod")?;
    assert!(
        nodes.is_superset(&named(["rdma_cm", "uverbs0", "uverbs1"])),
        "{nodes:?}"
    );
    Ok(())
}

fn an_exclusive_unit_is_one_hca_and_its_nodes() -> Result<()> {
    let (_machine, kubelet, _daemon) = registered(EXCLUSIVE, EXCLUSIVE_RESOURCE, 2)?;
    let devices = kubelet.devices(EXCLUSIVE_RESOURCE);
    assert_eq!(
        devices.keys().collect::<Vec<_>>(),
        HCAS,
        "a unit's ID is its PCI address"
    );
    for (numa_node, device) in (0..).zip(devices.values()) {
        let topology = device.topology.as_ref().context("no topology")?;
        assert_eq!(
            topology
                .nodes
                .iter()
                .map(|node| node.id)
                .collect::<Vec<_>>(),
            [numa_node]
        );
    }
    for pod in ["one", "two"] {
        let ids = admit(&kubelet, pod, EXCLUSIVE_RESOURCE, 1)?;
        let own = if ids == HCAS[..1] {
            "uverbs0"
        } else {
            "uverbs1"
        };
        assert_eq!(
            nodes(&kubelet, pod)?,
            named(["rdma_cm", own]),
            "{pod} has {ids:?}"
        );
    }
    assert!(admit(&kubelet, "three", EXCLUSIVE_RESOURCE, 1).is_err());
    Ok(())
}

/// As in the DaemonSet's container, which has sysfs and no part of `/dev`.
fn units_are_offered_where_no_device_directory_is_shown() -> Result<()> {
    let machine = Machine::new()?;
    fs::remove_dir_all(machine.tree.path("/dev"))?;
    let kubelet = machine.kubelet()?;
    let daemon = machine.daemon(EXCLUSIVE)?;
    wait(&kubelet, &daemon, EXCLUSIVE_RESOURCE, 2)?;
    let ids = admit(&kubelet, "pod", EXCLUSIVE_RESOURCE, 2)?;
    assert_eq!(ids, HCAS);
    assert_eq!(
        nodes(&kubelet, "pod")?,
        named(["rdma_cm", "uverbs0", "uverbs1"])
    );
    Ok(())
}

/// The kubelet gives a container the units of the init containers before it.
fn an_init_container_can_have_more_or_fewer_units() -> Result<()> {
    let (_machine, kubelet, _daemon) = registered(EXCLUSIVE, EXCLUSIVE_RESOURCE, 2)?;
    for units in [[1, 2], [2, 1]] {
        let of =
            |name: &str, units| vec![Container::with_limits(name, &[(EXCLUSIVE_RESOURCE, units)])];
        let pod = Pod::of_containers("pod", of("init", units[0]), of("main", units[1]))?;
        kubelet.admit(pod)?;
        for container in ["init", "main"] {
            let started = kubelet.run_options("default/pod", container);
            started.with_context(|| format!("{container} of {units:?}"))?;
        }
        kubelet.remove("default/pod")?;
    }
    Ok(())
}

fn a_container_of_a_time_before_late_binding_restarts() -> Result<()> {
    let (machine, kubelet, daemon) = registered(EXCLUSIVE, EXCLUSIVE_RESOURCE, 2)?;
    admit(&kubelet, "pod", EXCLUSIVE_RESOURCE, 1)?;
    let before = nodes(&kubelet, "pod")?;
    drop(daemon);
    let late = EXCLUSIVE.replace("mode: exclusive", "mode: exclusive\n  binding: late");
    let daemon = machine.daemon(&late)?;
    kubelet.wait("the new daemon", WAIT_TIMEOUT, |_, all| all.len() == 2)?;
    let after = nodes(&kubelet, "pod");
    assert_eq!(after.with_context(|| daemon.log())?, before);
    Ok(())
}

/// The kubelet picks at random; the daemon's preference makes it two cards, not two slots of one.
fn two_units_are_two_hcas() -> Result<()> {
    let config = "version: 1\npools:\n- resource: rdma/hca\n  mode: shared\n  shares: 8\n  select: {linkTypes: [ether]}\n";
    let (_machine, kubelet, _daemon) = registered(config, "rdma/hca", 16)?;
    for pod in ["one", "two", "three", "four"] {
        let ids = admit(&kubelet, pod, "rdma/hca", 2)?;
        let hcas: BTreeSet<_> = ids.iter().filter_map(|id| id.split('_').next()).collect();
        assert_eq!(hcas, HCAS.into(), "{pod} has {ids:?}");
        assert_eq!(
            nodes(&kubelet, pod)?,
            named(["rdma_cm", "uverbs0", "uverbs1"])
        );
    }
    Ok(())
}

fn ten_thousand_units_are_listed() -> Result<()> {
    let config = r#"{"configList": [
        {"resourceName": "hca", "rdmaHcaMax": 10000, "devices": ["rdma0"]}]}"#;
    registered(config, SHARED_RESOURCE, 10_000).map(drop)
}

fn twenty_thousand_shares_are_allocated_at_once() -> Result<()> {
    const HCAS: u32 = 50;
    let machine = Machine::with_hcas(HCAS)?;
    let kubelet = machine.kubelet()?;
    let config = "version: 1\npools:\n- resource: rdma/hca\n  mode: shared\n  shares: 1000\n  select: {linkTypes: [ether]}\n";
    let daemon = machine.daemon(config)?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 50_000)?;
    let started = Instant::now();
    let ids = admit(&kubelet, "pod", SHARED_RESOURCE, 20_000)?;
    // The stand-in and the machine that runs this take most of it.
    let took = started.elapsed();
    ensure!(took < Duration::from_secs(5), "{took:?}");
    let mut shares: BTreeMap<&str, usize> = BTreeMap::new();
    for hca in ids.iter().filter_map(|id| id.split('_').next()) {
        *shares.entry(hca).or_default() += 1;
    }
    let even = shares.values().all(|shares| *shares == 400);
    ensure!(even && shares.len() == 50, "{shares:?}");
    Ok(())
}

/// At arbitrary moments, while pods start and end: a pod keeps what it had, and the
/// daemon is no larger at the end than after the first ten.
fn a_hundred_restarts_of_the_kubelet() -> Result<()> {
    let (_machine, mut kubelet, daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    let before = admit(&kubelet, "pod", SHARED_RESOURCE, 1)?;
    let options = kubelet.run_options("default/pod", "main")?;
    let mut after_ten = None;
    // A linear congruential generator: another pause each time, the same in every run.
    let mut random: u64 = 20_261_121;
    for restart in 1..=100_u64 {
        assert_eq!(
            kubelet.registrations().len(),
            1,
            "once is enough: {}",
            daemon.log()
        );
        let name = format!("pod-{restart}");
        admit(&kubelet, &name, SHARED_RESOURCE, 2)?;
        let settings = kubelet.settings().clone();
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_millis((random >> 33) % 60));
        // By turns asked to end and killed, at once again and after a while.
        if restart % 2 == 0 {
            kubelet.stop();
        } else {
            kubelet.kill();
        }
        std::thread::sleep(Duration::from_millis((random >> 40) % 120));
        kubelet = Kubelet::start(settings)?;
        wait(&kubelet, &daemon, SHARED_RESOURCE, 4)
            .with_context(|| format!("restart {restart}"))?;
        kubelet.remove(&format!("default/{name}"))?;
        if restart == 10 {
            after_ten = Some(size(&daemon)?);
        }
    }
    let after = kubelet
        .assigned("default/pod")?
        .into_values()
        .flatten()
        .collect::<Vec<_>>();
    assert_eq!(after, before);
    kubelet.readmit("default/pod")?;
    assert_eq!(kubelet.run_options("default/pod", "main")?, options);
    assert_eq!(
        sockets(&kubelet.settings().device_plugins)?.len(),
        1,
        "one socket, not a hundred"
    );
    let (memory, descriptors) = after_ten.context("ten restarts")?;
    let (memory_now, descriptors_now) = size(&daemon)?;
    assert!(
        descriptors_now <= descriptors + 2,
        "{descriptors} descriptors became {descriptors_now}"
    );
    assert!(
        memory_now <= memory + 2048,
        "{memory} KiB became {memory_now}"
    );
    Ok(())
}

/// Resident memory in KiB, and open descriptors.
fn size(daemon: &Daemon) -> Result<(u64, usize)> {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.id()))?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident
        .and_then(|text| text.split_whitespace().next())
        .context("VmRSS")?;
    Ok((
        resident.parse()?,
        fs::read_dir(format!("/proc/{}/fd", daemon.id()))?.count(),
    ))
}

fn a_kubelet_that_comes_late_is_waited_for() -> Result<()> {
    let machine = Machine::new()?;
    fs::create_dir_all(machine.settings().device_plugins)?;
    let daemon = machine.daemon(SHARED)?;
    std::thread::sleep(Duration::from_millis(500));
    let kubelet = machine.kubelet()?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)
}

fn a_kubelet_that_refuses_is_asked_again() -> Result<()> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    kubelet.misbehave(Misbehaviour {
        refuse: 3,
        ..Misbehaviour::default()
    });
    let daemon = machine.daemon(SHARED)?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)?;
    let refused: Vec<_> = kubelet
        .registrations()
        .into_iter()
        .map(|call| call.refused.is_some())
        .collect();
    assert_eq!(refused, [true, true, true, false]);
    Ok(())
}

fn a_kubelet_that_never_watches_is_asked_again() -> Result<()> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    kubelet.misbehave(Misbehaviour {
        never_watch: true,
        ..Misbehaviour::default()
    });
    let daemon = machine.daemon(SHARED)?;
    kubelet.wait("a registration", WAIT_TIMEOUT, |_, calls| calls.len() == 1)?;
    kubelet.misbehave(Misbehaviour::default());
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)
}

fn a_slow_kubelet_is_asked_once() -> Result<()> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    let delay = Duration::from_secs(4);
    kubelet.misbehave(Misbehaviour {
        delay,
        ..Misbehaviour::default()
    });
    let daemon = machine.daemon(SHARED)?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)?;
    assert_eq!(kubelet.registrations().len(), 1, "{}", daemon.log());
    Ok(())
}

/// Then there are no events from it any more.
fn a_replaced_directory_is_noticed() -> Result<()> {
    let (machine, kubelet, daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    kubelet.kill();
    let directory = machine.settings().device_plugins;
    fs::rename(&directory, directory.with_extension("old"))?;
    std::thread::sleep(Duration::from_millis(500));
    let kubelet = machine.kubelet()?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)
}

fn a_dropped_stream_is_registered_anew() -> Result<()> {
    let (_machine, kubelet, daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    for _ in 0..5 {
        kubelet.disconnect(SHARED_RESOURCE);
        wait(&kubelet, &daemon, SHARED_RESOURCE, 4)?;
    }
    Ok(())
}

fn a_deleted_socket_is_served_anew() -> Result<()> {
    let (_machine, kubelet, daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    let directory = &kubelet.settings().device_plugins;
    let names = sockets(directory)?;
    assert_eq!(names.len(), 1);
    fs::remove_file(directory.join(&names[0]))?;
    kubelet.wait("another registration", WAIT_TIMEOUT, |_, calls| {
        calls.len() >= 2
    })?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)?;
    admit(&kubelet, "pod", SHARED_RESOURCE, 1)?;
    assert_eq!(sockets(directory)?.len(), 1);
    Ok(())
}

/// A dropped ID is shown as healthy in a pod's status, so none is ever dropped.
fn a_port_that_goes_down_makes_its_units_unhealthy_and_drops_none() -> Result<()> {
    let config = format!("{EXCLUSIVE}rescanInterval: 1s\n");
    let (machine, kubelet, daemon) = registered(&config, EXCLUSIVE_RESOURCE, 2)?;
    machine
        .tree
        .set_port_state("mlx5_1", 1, "1: DOWN", "3: Disabled");
    wait(&kubelet, &daemon, EXCLUSIVE_RESOURCE, 1)?;
    let devices = kubelet.devices(EXCLUSIVE_RESOURCE);
    let health: Vec<_> = HCAS.iter().map(|id| devices[*id].health.as_str()).collect();
    assert_eq!(health, [HEALTHY, UNHEALTHY]);

    machine
        .tree
        .set_port_state("mlx5_1", 1, "4: ACTIVE", "5: LinkUp");
    wait(&kubelet, &daemon, EXCLUSIVE_RESOURCE, 2)
}

fn a_killed_daemon_is_followed_by_one_with_the_same_units() -> Result<()> {
    let (machine, kubelet, daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    let before: Vec<_> = kubelet.devices(SHARED_RESOURCE).into_keys().collect();
    admit(&kubelet, "pod", SHARED_RESOURCE, 1)?;
    daemon.signal(Signal::SIGKILL)?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 0)?;
    assert_eq!(kubelet.node()[SHARED_RESOURCE].capacity, 4);
    // The kernel closes a dead process' files one after another; the kubelet hears of the first.
    for socket in sockets(&kubelet.settings().device_plugins)? {
        let path = kubelet.settings().device_plugins.join(socket);
        while std::os::unix::net::UnixStream::connect(&path).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    let daemon = machine.daemon(SHARED)?;
    wait(&kubelet, &daemon, SHARED_RESOURCE, 4)?;
    let after: Vec<_> = kubelet.devices(SHARED_RESOURCE).into_keys().collect();
    assert_eq!(after, before);
    kubelet.readmit("default/pod")?;
    // Registering twice would take all units away for a moment, and fail the pods that start then.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(kubelet.registrations().len(), 2, "{}", daemon.log());
    let left = sockets(&kubelet.settings().device_plugins)?;
    assert_eq!(
        left.len(),
        1,
        "that of the pod that ended is gone: {}",
        daemon.log()
    );
    Ok(())
}

/// The new daemon starts before the old ends; the old one's end closes the
/// new one's stream, since the kubelet knows connections by resource name.
fn a_rolling_update_ends_registered() -> Result<()> {
    let (machine, kubelet, mut old) = registered(SHARED, SHARED_RESOURCE, 4)?;
    let new = machine.daemon(SHARED)?;
    kubelet.wait("the new daemon", WAIT_TIMEOUT, |_, calls| calls.len() >= 2)?;
    old.signal(Signal::SIGTERM)?;
    assert!(old.ended(WAIT_TIMEOUT)?.success(), "{}", old.log());
    std::thread::sleep(Duration::from_secs(1));
    wait(&kubelet, &new, SHARED_RESOURCE, 4)?;
    admit(&kubelet, "pod", SHARED_RESOURCE, 1)?;
    assert_eq!(sockets(&kubelet.settings().device_plugins)?.len(), 1);
    Ok(())
}

fn asked_to_stop_it_leaves_no_socket() -> Result<()> {
    let (_machine, kubelet, mut daemon) = registered(SHARED, SHARED_RESOURCE, 4)?;
    daemon.signal(Signal::SIGTERM)?;
    assert!(
        daemon.ended(Duration::from_secs(5))?.success(),
        "{}",
        daemon.log()
    );
    assert!(sockets(&kubelet.settings().device_plugins)?.is_empty());
    wait(&kubelet, &daemon, SHARED_RESOURCE, 0)
}

fn a_missing_kubelet_directory_is_said() -> Result<()> {
    let machine = Machine::new()?;
    let mut daemon = machine.daemon(SHARED)?;
    let status = daemon.ended(WAIT_TIMEOUT)?;
    let log = daemon.log();
    assert_eq!(status.code(), Some(1), "{log}");
    let directory = machine.settings().device_plugins;
    assert!(log.contains(directory.to_str().unwrap()), "{log}");
    assert!(
        log.contains("--device-plugin-dir"),
        "it says what to do: {log}"
    );
    assert!(!directory.exists(), "it is the kubelet's to make");
    Ok(())
}

fn a_wrong_configuration_is_said() -> Result<()> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    for (config, words) in [
        (r#"{"configList": []}"#, "configList"),
        (
            r#"{"configList": [{"resourceName": "h-a", "devices": ["x"]}]}"#,
            "h-a",
        ),
        (
            r#"{"configList": [{"resourceName": "a", "rdmaHcaMax": 1}]}"#,
            "selector",
        ),
        (
            r#"{"configList": [{"resourceName": "a", "rdmaHcaMax": -1, "devices": ["x"]}]}"#,
            "-1",
        ),
        (
            r#"{"configList": [{"resourceName": "a", "rdmaHcaMax": 1, "devices": ["x"]}, {}]}"#,
            "configList[1]",
        ),
        (
            "version: 1\npools:\n- resource: rdma/a\n  mode: shard\n",
            "shard",
        ),
    ] {
        let mut daemon = machine.daemon(config)?;
        assert_eq!(daemon.ended(WAIT_TIMEOUT)?.code(), Some(1), "{config}");
        assert!(daemon.log().contains(words), "{config}: {}", daemon.log());
    }
    assert!(kubelet.registrations().is_empty());
    Ok(())
}

fn an_optional_pool_is_offered_from_its_first_hca_on() -> Result<()> {
    const POOLS: &str = "version: 1\nrescanInterval: 1s\npools:\n\
        - {resource: rdma/nic, mode: exclusive, select: {rdmaDevices: [mlx5_0]}}\n\
        - {resource: rdma/vf, mode: exclusive, optional: true, select: {rdmaDevices: [mlx5_9]}}\n";
    let (machine, kubelet, daemon) = registered(POOLS, "rdma/nic", 1)?;
    let named = |resource: &str| {
        let registrations = kubelet.registrations();
        registrations.iter().any(|one| one.resource == resource)
    };
    // Some scans later.
    std::thread::sleep(Duration::from_secs(3));
    assert!(named("rdma/nic") && !named("rdma/vf"), "{}", daemon.log());
    assert!(
        !daemon.log().contains("no HCA of this host is in the pool"),
        "{}",
        daemon.log()
    );
    machine.tree.nic(
        &hca_trees::PciSpec {
            address: "0000:f1:00.0",
            ..hca_trees::PciSpec::MLX5
        },
        "mlx5_9",
        "rdma9",
        &[hca_trees::PortSpec::ROCE],
    );
    machine.make_nodes()?;
    wait(&kubelet, &daemon, "rdma/vf", 1)
}
