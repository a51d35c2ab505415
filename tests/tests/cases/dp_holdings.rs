//! What pods hold stays theirs, whatever becomes of the kubelet, the pools and the node.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::daemon::HCAS;
use e2e::harness::Case;
use e2e::kubelet::{CHECKPOINT_FILE, Kubelet, Misbehaviour, Settings};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use super::dp_admin::document;
use super::dp_hostile::{EXCLUSIVE, Scene, WAIT_TIMEOUT, admit, shared};

pub(crate) const CASES: &[Case] = &[
    case!(
        an_hca_stays_a_pods_own_while_the_kubelet_does_not_answer,
        Root
    ),
    case!(an_exclusive_hca_stays_a_pods_own_when_pools_change, Root),
    case!(
        hcas_of_a_whole_pool_become_nobodys_own_while_it_is_held,
        Root
    ),
    case!(an_hca_is_offered_again_though_no_poll_saw_its_pod, Root),
    case!(
        a_pod_gets_no_device_node_of_another_hca_after_a_reboot,
        Root
    ),
    case!(
        a_pod_gets_no_management_node_of_another_hca_after_a_reboot,
        Root
    ),
    case!(a_shared_container_gets_no_device_node_of_another_hca, Root),
    case!(
        a_container_starts_with_a_warning_while_its_nodes_are_not_known,
        Root
    ),
    case!(
        a_daemon_knows_what_it_allocated_after_a_restart_of_the_kubelet,
        Root
    ),
    case!(a_container_with_cdi_starts_while_the_daemon_is_away, Root),
    case!(
        a_container_waits_for_the_kubelets_back_off_in_a_rollout,
        Root
    ),
    case!(
        pods_that_a_kubelet_adds_one_by_one_keep_what_they_hold,
        Root
    ),
    case!(nothing_is_offered_before_it_is_known_who_holds_it, Root),
    case!(a_kubelet_that_lists_no_pods_yet_frees_nothing, Root),
    case!(
        a_held_hca_stays_in_its_pool_over_a_restart_of_the_daemon,
        Root
    ),
    case!(a_pf_in_a_pod_stays_healthy_by_its_pf_name, Root),
    case!(an_hca_that_returns_is_healthy_while_its_link_comes_up, Root),
    case!(a_held_hca_that_nobody_knows_is_not_taken_in_by_not, Root),
    case!(
        a_container_gets_its_nodes_after_its_pool_dropped_the_hca,
        Root
    ),
    case!(a_container_starts_after_a_failed_scan, Root),
    case!(an_hca_that_was_here_is_missing_until_it_is_forgotten, Root),
    case!(a_delay_ends_though_the_host_cannot_be_scanned, Root),
    case!(a_scan_that_failed_is_tried_again_by_itself, Root),
    case!(
        an_untrusted_file_of_known_hcas_changes_nothing_for_pods,
        Root
    ),
];

/// The pod was admitted after the kubelet was asked last, and the kubelet does not answer when the
/// pools change.
fn an_hca_stays_a_pods_own_while_the_kubelet_does_not_answer() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    let socket = kubelet.settings().root.join("pod-resources/kubelet.sock");
    fs::rename(&socket, socket.with_extension("away"))?;
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    let offered: Vec<String> = kubelet.devices("rdma/other").into_keys().collect();
    ensure!(
        !offered.contains(&held[0]),
        "{offered:?}, and {held:?} is held"
    );
    // So does a daemon that starts meanwhile.
    drop(daemon);
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    kubelet.remove("default/pod")?;
    fs::rename(socket.with_extension("away"), &socket)?;
    let waited = kubelet.wait_allocatable("rdma/other", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

fn an_exclusive_hca_stays_a_pods_own_when_pools_change() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    let free = HCAS
        .into_iter()
        .find(|hca| *hca != held[0])
        .context("both are held")?;
    fs::write(&scene.file, shared())?;
    scene.wait(&kubelet, &daemon, "rdma/shared", 1)?;
    let offered: Vec<String> = kubelet.devices("rdma/shared").into_keys().collect();
    ensure!(
        offered.iter().all(|id| id.starts_with(free)),
        "{offered:?}, and {held:?} is held"
    );
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    scene.until("/readyz", &daemon, |_, body| {
        body.contains("until pod default/pod ends")
    })?;
    // The daemon starts anew, and knows it at once.
    drop(daemon);
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    assert_eq!(
        kubelet
            .devices("rdma/other")
            .into_keys()
            .collect::<Vec<_>>(),
        [free]
    );
    kubelet.remove("default/pod")?;
    let waited = kubelet.wait_allocatable("rdma/other", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

/// A unit of such a pool names no HCA.
fn hcas_of_a_whole_pool_become_nobodys_own_while_it_is_held() -> Result<()> {
    let all = "version: 1\npools:\n- resource: rdma/all\n  mode: shared\n  policy: all-hcas\n  \
               shares: 4\n  select: {linkTypes: [ether]}\n";
    let scene = Scene::new(all)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/all", 4)?;
    admit(&kubelet, "pod", "rdma/all", 1)?;
    fs::write(&scene.file, EXCLUSIVE)?;
    for _ in 0..2 {
        scene.until("/readyz", &daemon, |_, body| {
            body.contains("until pod default/pod ends")
        })?;
        let offered = kubelet.devices("rdma/nic");
        ensure!(offered.is_empty(), "{offered:?}");
        drop(daemon);
        daemon = scene.daemon()?;
    }
    kubelet.remove("default/pod")?;
    let waited = kubelet.wait_allocatable("rdma/nic", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

/// Between two polls of the kubelet: the poll's answers are the same before and after.
fn an_hca_is_offered_again_though_no_poll_saw_its_pod() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 1)?;
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    kubelet.remove("default/pod")?;
    let waited = kubelet.wait_allocatable("rdma/other", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

/// The kubelet uses its old answer for the pod, and the kernel has numbered the nodes anew.
fn a_pod_gets_no_device_node_of_another_hca_after_a_reboot() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 2)?;
    kubelet.run_options("default/pod", "main")?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    let settings = kubelet.settings().clone();
    kubelet.stop();
    let kubelet = Kubelet::start(settings.clone())?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    // The same numbers: the container starts.
    kubelet.run_options("default/pod", "main")?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    scene.machine.renumber("uverbs0", "uverbs9")?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let refused = kubelet
        .run_options("default/pod", "main")
        .err()
        .context("it started")?;
    let said = format!("{refused:#}");
    ensure!(
        said.contains("uverbs9") && said.contains("delivery: cdi"),
        "{said}"
    );
    Ok(())
}

/// Verbs nodes and management nodes are numbered apart.
fn a_pod_gets_no_management_node_of_another_hca_after_a_reboot() -> Result<()> {
    let umad = "mode: exclusive\n  nodes: {optional: [umad]}";
    let scene = Scene::new(&EXCLUSIVE.replace("mode: exclusive", umad))?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    assert_eq!(admit(&kubelet, "pod", "rdma/nic", 1)?, [HCAS[0]]);
    kubelet.run_options("default/pod", "main")?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    kubelet.run_options("default/pod", "main")?;
    // The other HCA has its number now.
    scene.machine.renumber("umad0", "umad9")?;
    scene.machine.renumber("umad2", "umad0")?;
    scene.until("/status", &daemon, |_, body| body.contains("umad9"))?;
    let started = kubelet.run_options("default/pod", "main");
    let said = format!("{:#}", started.err().context("it started")?);
    ensure!(
        said.contains("umad0 and is /dev/infiniband/umad9") && said.contains("delivery: cdi"),
        "{said}"
    );
    Ok(())
}

/// The driver was loaded again: the pool's HCAs have other numbers, and another pod has the old one.
fn a_shared_container_gets_no_device_node_of_another_hca() -> Result<()> {
    for shares in ["shares: 4", "policy: all-hcas\n  shares: 4"] {
        let pool = "mode: shared\n  select: {rdmaDevices: [mlx5_0]}"
            .replace("shared", &format!("shared\n  {shares}"));
        let select = "mode: exclusive\n  select: {linkTypes: [ether]}";
        let scene = Scene::new(&EXCLUSIVE.replace(select, &pool))?;
        let kubelet = scene.machine.kubelet()?;
        let daemon = scene.daemon()?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 4)?;
        admit(&kubelet, "pod", "rdma/nic", 1)?;
        kubelet.run_options("default/pod", "main")?;
        scene.machine.renumber("uverbs0", "uverbs9")?;
        scene.machine.renumber("uverbs1", "uverbs0")?;
        let refused = kubelet.run_options("default/pod", "main").err();
        let said = format!(
            "{:#}",
            refused.with_context(|| format!("{shares}: it started"))?
        );
        ensure!(
            said.contains("uverbs0 and is /dev/infiniband/uverbs9")
                && said.contains("delivery: cdi"),
            "{said}"
        );
        scene.machine.renumber("uverbs0", "uverbs1")?;
        scene.machine.renumber("uverbs9", "uverbs0")?;
        kubelet.run_options("default/pod", "main")?;
    }
    Ok(())
}

/// Has the kubelet neither read nor write its checkpoint.
fn spoil_checkpoint(kubelet: &Kubelet) -> Result<std::path::PathBuf> {
    let checkpoint = kubelet.settings().device_plugins.join(CHECKPOINT_FILE);
    let whole = checkpoint.with_extension("whole");
    fs::rename(&checkpoint, &whole)?;
    fs::create_dir(&checkpoint)?;
    Ok(whole)
}

fn mend_checkpoint(whole: &std::path::Path) -> Result<()> {
    let checkpoint = whole.with_extension("");
    fs::remove_dir(&checkpoint)?;
    Ok(fs::rename(whole, checkpoint)?)
}

/// The daemon that allocated them is gone, and the kubelet's checkpoint cannot be read.
fn a_container_starts_with_a_warning_while_its_nodes_are_not_known() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 1)?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    const WARNING: &str = "not known whether its device nodes are still those of its HCAs";
    kubelet.run_options("default/pod", "main")?;
    ensure!(!daemon.log().contains(WARNING), "{}", daemon.log());
    let whole = spoil_checkpoint(&kubelet)?;
    kubelet.run_options("default/pod", "main")?;
    ensure!(daemon.log().contains(WARNING), "{}", daemon.log());
    // What is proved refuses it.
    mend_checkpoint(&whole)?;
    scene.machine.renumber("uverbs0", "uverbs9")?;
    scene.machine.renumber("uverbs1", "uverbs8")?;
    let started = kubelet.run_options("default/pod", "main");
    started.err().context("it started").map(drop)
}

/// The kubelet deletes the daemon's socket when it starts.
fn a_daemon_knows_what_it_allocated_after_a_restart_of_the_kubelet() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 2)?;
    let kubelet = kubelet.restart()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    spoil_checkpoint(&kubelet)?;
    kubelet.run_options("default/pod", "main")?;
    scene.machine.renumber("uverbs0", "uverbs9")?;
    let started = kubelet.run_options("default/pod", "main");
    started.err().context("it started").map(drop)
}

/// What is in a CDI file is of now: nobody is asked.
fn a_container_with_cdi_starts_while_the_daemon_is_away() -> Result<()> {
    let scene =
        Scene::new(&EXCLUSIVE.replace("mode: exclusive", "mode: exclusive\n  delivery: cdi"))?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 1)?;
    let before = kubelet.run_options("default/pod", "main")?;
    ensure!(!before.cdi_devices.is_empty(), "{before:?}");
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    ensure!(
        kubelet.run_options("default/pod", "main")? == before,
        "another answer"
    );
    Ok(())
}

#[expect(clippy::print_stderr, reason = "how long it takes is what is asked")]
fn a_container_waits_for_the_kubelets_back_off_in_a_rollout() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 1)?;
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(WAIT_TIMEOUT)?;
    std::thread::scope(|scope| {
        let container = scope.spawn(|| kubelet.restart_container("default/pod", "main"));
        std::thread::sleep(Duration::from_millis(200));
        let ended = Instant::now();
        let daemon = scene.daemon()?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
        let away = ended.elapsed();
        let restarted = container
            .join()
            .map_err(|_| anyhow::anyhow!("the kubelet failed"))?;
        let (_, took) = restarted?;
        eprintln!("the daemon was away for {away:?}, the container for {took:?}");
        ensure!((10..13).contains(&took.as_secs()), "{took:?}");
        Ok(())
    })
}

/// What pods hold stays theirs, and what Multus reads of it stays, until two lists lack them.
fn pods_that_a_kubelet_adds_one_by_one_keep_what_they_hold() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    let name = format!("rdma-nic-{}-device.json", held[0]);
    let information = scene.machine.directory().join("devinfo").join(name);
    let started = Instant::now();
    while !information.exists() {
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    // As of a pod that has been there for a while.
    let old = std::time::SystemTime::now() - Duration::from_secs(100);
    fs::File::options()
        .write(true)
        .open(&information)?
        .set_modified(old)?;
    let settings = Settings {
        adds_pods_every: Duration::from_secs(8),
        ..kubelet.settings().clone()
    };
    kubelet.kill();
    let kubelet = Kubelet::start(settings)?;
    let restarted = Instant::now();
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    fs::write(&scene.file, shared())?;
    while restarted.elapsed() < Duration::from_secs(10) {
        let offered = healthy_ids(&kubelet, "rdma/shared");
        ensure!(
            !offered.iter().any(|id| id.starts_with(&held[0])),
            "{offered:?}, and {held:?} is held: {}",
            daemon.log()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    ensure!(healthy(&kubelet, "rdma/shared") == 1, "{}", daemon.log());
    ensure!(information.exists(), "{}", daemon.log());
    kubelet.remove("default/pod")?;
    let waited = kubelet.wait_allocatable("rdma/shared", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

/// The daemon starts with another configuration while neither the kubelet nor its checkpoint answers.
fn nothing_is_offered_before_it_is_known_who_holds_it() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    drop(daemon);
    let socket = kubelet.settings().root.join("pod-resources/kubelet.sock");
    fs::rename(&socket, socket.with_extension("away"))?;
    let whole = spoil_checkpoint(&kubelet)?;
    fs::write(&scene.file, EXCLUSIVE.replace("rdma/nic", "rdma/other"))?;
    let daemon = scene.daemon()?;
    let listed = |kubelet: &Kubelet| kubelet.devices("rdma/other").len() == 2;
    let started = Instant::now();
    while !listed(&kubelet) || started.elapsed() < Duration::from_secs(3) {
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", daemon.log());
        ensure!(healthy(&kubelet, "rdma/other") == 0, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    mend_checkpoint(&whole)?;
    scene.wait(&kubelet, &daemon, "rdma/other", 1)?;
    ensure!(
        !healthy_ids(&kubelet, "rdma/other").contains(&held[0]),
        "{}",
        daemon.log()
    );
    Ok(())
}

/// A kubelet that just started has not heard from the API server.
fn a_kubelet_that_lists_no_pods_yet_frees_nothing() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    kubelet.misbehave(Misbehaviour {
        lists_no_pods: true,
        ..Misbehaviour::default()
    });
    fs::write(&scene.file, shared())?;
    scene.wait(&kubelet, &daemon, "rdma/shared", 1)?;
    let offered: Vec<String> = kubelet.devices("rdma/shared").into_keys().collect();
    ensure!(
        !offered.iter().any(|id| id.starts_with(&held[0])),
        "{offered:?}, and {held:?} is held"
    );
    // A daemon that starts now knows it, too.
    drop(daemon);
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/shared", 1)?;
    kubelet.misbehave(Misbehaviour::default());
    kubelet.remove("default/pod")?;
    let waited = kubelet.wait_allocatable("rdma/shared", 2, Duration::from_secs(40));
    waited.with_context(|| format!("the daemon said: {}", daemon.log()))
}

/// Moves an HCA out of sight, as into a pod's namespace in exclusive mode.
fn take(scene: &Scene, hca: &str) -> Result<()> {
    let index = HCAS.iter().position(|known| *known == hca);
    let index = index.context("no HCA of this machine")?;
    let mode = "/sys/module/ib_core/parameters/netns_mode";
    scene.machine.tree.file(mode, "N");
    scene.machine.tree.hide_rdma(&format!("mlx5_{index}"));
    scene.machine.tree.hide_netdev(&format!("rdma{index}"));
    Ok(())
}

/// Waits for three more scans.
fn scan_again(scene: &Scene) -> Result<()> {
    let scans = || -> Result<f64> {
        let started = Instant::now();
        let text = loop {
            match scene.get("/metrics") {
                Ok((_, text)) => break text,
                Err(error) => ensure!(started.elapsed() < WAIT_TIMEOUT, "{error:#}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let lines = text.lines();
        let lines = lines.filter(|line| line.starts_with("rdma_device_plugin_scans_total{"));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(values.sum())
    };
    let (before, started) = (scans()?, Instant::now());
    while scans()? < before + 3.0 {
        ensure!(started.elapsed() < WAIT_TIMEOUT, "no scan");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn healthy(kubelet: &Kubelet, resource: &str) -> usize {
    healthy_ids(kubelet, resource).len()
}

fn healthy_ids(kubelet: &Kubelet, resource: &str) -> Vec<String> {
    let devices = kubelet.devices(resource).into_iter();
    let healthy = devices.filter(|(_, one)| one.health == "Healthy");
    healthy.map(|(id, _)| id).collect()
}

/// A configuration of one exclusive pool.
fn selecting(selector: &str) -> String {
    EXCLUSIVE.replace("{linkTypes: [ether]}", &format!("{{{selector}}}"))
}

/// Selectors that need what the host cannot see while a pod has the HCA.
const HIDDEN: [&str; 3] = [
    "linkSpeed: [100G], firmware: [\"28.*\"], guids: [\"*\"]",
    "ifNames: [\"rdma*\"], pfNames: [rdma0, rdma1]",
    "not: {linkSpeed: [\"<=40G\"]}",
];

fn a_held_hca_stays_in_its_pool_over_a_restart_of_the_daemon() -> Result<()> {
    for selector in HIDDEN {
        let scene = Scene::new(&selecting(selector))?;
        let kubelet = scene.machine.kubelet()?;
        let daemon = scene.daemon()?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
        let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
        kubelet.run_options("default/pod", "main")?;
        take(&scene, &held[0])?;
        drop(daemon);
        let daemon = scene.daemon()?;
        let waited = scene.wait(&kubelet, &daemon, "rdma/nic", 2);
        waited.with_context(|| selector.to_owned())?;
        // So does a command that reads the host.
        let mut validate = Command::new(product("rdmactl")?);
        validate.args(["validate", "--on-host", "--json", "--host-root"]);
        validate.arg(scene.machine.tree.path("/"));
        validate.arg("--policy").arg(scene.machine.policy()?);
        let validated = document(&validate.arg(&scene.file).output()?)?;
        let on_host = &validated["files"][0]["pools"][0]["onHost"];
        let on_host = on_host.as_array().map_or(0, Vec::len);
        ensure!(on_host == 2, "{selector}: {validated}");
        // Its container crashed, and starts again with what it was allocated.
        kubelet.run_options("default/pod", "main")?;
        admit(&kubelet, "second", "rdma/nic", 1)?;
    }
    Ok(())
}

/// In shared mode the RDMA device stays in sight, and its netdev does not.
fn a_pf_in_a_pod_stays_healthy_by_its_pf_name() -> Result<()> {
    let scene = Scene::new(&selecting("pfNames: [rdma0, rdma1]"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 2)?;
    for netdev in ["rdma0", "rdma1"] {
        scene.machine.tree.hide_netdev(netdev);
    }
    scan_again(&scene)?;
    ensure!(healthy(&kubelet, "rdma/nic") == 2, "{}", daemon.log());
    kubelet.run_options("default/pod", "main")?;
    Ok(())
}

/// A pod that asks for all HCAs while the kubelet has heard of fewer fails for good.
fn an_hca_that_returns_is_healthy_while_its_link_comes_up() -> Result<()> {
    for (mode, moved) in [
        ("N", &["infiniband/mlx5_1", "net/rdma1"][..]),
        ("Y", &["net/rdma1"]),
    ] {
        let scene = Scene::new(EXCLUSIVE)?;
        let tree = &scene.machine.tree;
        tree.file("/sys/module/ib_core/parameters/netns_mode", mode);
        let kubelet = scene.machine.kubelet()?;
        let daemon = scene.daemon()?;
        scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
        admit(&kubelet, "first", "rdma/nic", 2)?;
        let mut away = Vec::new();
        for device in moved {
            away.extend(carry_off(&scene, device)?);
        }
        scan_again(&scene)?;
        kubelet.remove("default/first")?;
        // The kernel sets it down on its way.
        let port = tree.path("/sys/class/infiniband/mlx5_1/ports/1/state");
        let of_device = |(_, stash): &&(PathBuf, PathBuf)| stash.join("ports").exists();
        let port = match away.iter().find(of_device) {
            Some((_, stash)) => stash.join("ports/1/state"),
            None => port,
        };
        fs::write(port, "1: DOWN\n")?;
        for (place, stash) in &away {
            fs::rename(stash, place)?;
        }
        scan_again(&scene)?;
        let second = admit(&kubelet, "second", "rdma/nic", 2);
        second.with_context(|| format!("{mode}: {}", daemon.log()))?;
        tree.set_port_state("mlx5_1", 1, "4: ACTIVE", "5: LinkUp");
        scan_again(&scene)?;
        tree.set_port_state("mlx5_1", 1, "1: DOWN", "3: Disabled");
        scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
        let (_, metrics) = scene.get("/metrics")?;
        let transitions = metrics
            .lines()
            .filter(|line| line.contains("transitions_total{"));
        let transitions: Vec<&str> = transitions.collect();
        let only_the_loss =
            transitions.len() == 1 && transitions[0].ends_with("\"unhealthy\"} 1.0");
        ensure!(only_the_loss, "{mode}: {transitions:?}");
    }
    Ok(())
}

/// Takes a device of a class out of the tree. Returns what has gone from where, and is where now.
fn carry_off(scene: &Scene, device: &str) -> Result<[(PathBuf, PathBuf); 2]> {
    let class = scene.machine.tree.path(format!("/sys/class/{device}"));
    let stash = scene.machine.directory().join(device.replace('/', "-"));
    let gone = [
        (fs::canonicalize(&class)?, stash.with_extension("device")),
        (class, stash),
    ];
    for (place, stash) in gone.iter().rev() {
        fs::rename(place, stash)?;
    }
    Ok(gone)
}

/// The first daemon of this boot starts when the HCA is in a pod that has it by another plugin.
fn a_held_hca_that_nobody_knows_is_not_taken_in_by_not() -> Result<()> {
    let scene = Scene::new(&selecting("not: {linkSpeed: [100G]}"))?;
    take(&scene, HCAS[0])?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scan_again(&scene)?;
    let status: Value = serde_json::from_str(&scene.get("/status")?.1)?;
    ensure!(!status["pools"].to_string().contains(HCAS[0]), "{status}");
    fs::write(&scene.file, selecting("linkSpeed: [100G]"))?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    let offered: Vec<String> = kubelet.devices("rdma/nic").into_keys().collect();
    assert_eq!(offered, [HCAS[1]]);
    Ok(())
}

fn a_container_gets_its_nodes_after_its_pool_dropped_the_hca() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    kubelet.run_options("default/pod", "main")?;
    let without = format!(
        "linkTypes: [ether], not: {{pciAddresses: [\"{}\"]}}",
        held[0]
    );
    fs::write(&scene.file, selecting(&without))?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    kubelet.run_options("default/pod", "main")?;
    // So it does with a daemon that never offered the HCA.
    drop(daemon);
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    kubelet.run_options("default/pod", "main")?;
    // No other pod does.
    let devices = kubelet.devices("rdma/nic");
    assert_eq!(devices[&held[0]].health, "Unhealthy");
    Ok(())
}

/// What is read before a start are the HCAs of the container alone.
fn a_container_starts_after_a_failed_scan() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    admit(&kubelet, "pod", "rdma/nic", 2)?;
    // Reading a directory fails, as the kernel does without memory or file descriptors.
    let mode = scene
        .machine
        .tree
        .path("/sys/module/ib_core/parameters/netns_mode");
    fs::remove_file(&mode)?;
    fs::create_dir(&mode)?;
    kubelet.run_options("default/pod", "main")?;
    // So it does with a daemon that has never read the host.
    drop(daemon);
    let daemon = scene.daemon()?;
    let registered = |_: &_, calls: &[_]| calls.len() == 2;
    kubelet.wait("a registration", WAIT_TIMEOUT, registered)?;
    let started = kubelet.run_options("default/pod", "main");
    started.with_context(|| daemon.log())?;
    // What was known before does not count.
    scene.machine.renumber("uverbs0", "uverbs9")?;
    let started = kubelet.run_options("default/pod", "main");
    let said = format!("{:#}", started.err().context("it started")?);
    ensure!(said.contains("uverbs9"), "{said}");
    Ok(())
}

/// After a reboot the bus does not see one of two.
fn an_hca_that_was_here_is_missing_until_it_is_forgotten() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    scene.until("/metrics", &daemon, |_, body| {
        !body.contains("hca_missing{")
    })?;
    drop(daemon);
    let tree = &scene.machine.tree;
    let function = format!("/sys/bus/pci/devices/{}", HCAS[1]);
    fs::remove_dir_all(fs::canonicalize(tree.path(&function))?)?;
    for link in [
        function.as_str(),
        "/sys/class/infiniband/mlx5_1",
        "/sys/class/infiniband_verbs/uverbs1",
        "/sys/class/net/rdma1",
    ] {
        tree.remove(link);
    }
    let daemon = scene.daemon()?;
    let metric = format!(
        "hca_missing{{hca=\"{}\",rdma_device=\"mlx5_1\"}} 1",
        HCAS[1]
    );
    scene.until("/metrics", &daemon, |_, body| body.contains(&metric))?;
    let tool = |arguments: &[&str]| {
        let mut command = Command::new(product("rdmactl")?);
        command.args(arguments).arg("--node-socket");
        command.arg(scene.machine.node_socket());
        Ok::<_, anyhow::Error>(command.output()?)
    };
    let status = tool(&["status"])?;
    let said = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        said.contains("(mlx5_1) was here and is missing since"),
        "{said}"
    );
    // One that is here cannot be forgotten.
    let refused = tool(&["forget", HCAS[0]])?;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && why.contains("is missing on this node"),
        "{why}"
    );
    let done = tool(&["forget", HCAS[1]])?;
    ensure!(done.status.success(), "{done:?}");
    scene.until("/metrics", &daemon, |_, body| {
        !body.contains("hca_missing{")
    })?;
    // Nor does the next daemon miss it, once that is on disk.
    let file = scene.machine.state().join("known-hcas");
    let start = Instant::now();
    while fs::read_to_string(&file)?.contains("mlx5_1") {
        ensure!(start.elapsed() < WAIT_TIMEOUT, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(daemon);
    let daemon = scene.daemon()?;
    scene.until("/metrics", &daemon, |_, body| {
        body.contains("units{") && !body.contains("hca_missing{")
    })?;
    Ok(())
}

/// What is known is decided anew when its time has come, whatever a scan would say.
fn a_delay_ends_though_the_host_cannot_be_scanned() -> Result<()> {
    let scene = Scene::new(&format!("{EXCLUSIVE}health: {{upDelay: 3s}}\n"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    let tree = &scene.machine.tree;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    tree.set_port_state("mlx5_1", 1, "1: DOWN", "3: Disabled");
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    tree.set_port_state("mlx5_1", 1, "4: ACTIVE", "5: LinkUp");
    scene.until("/status", &daemon, |_, body| body.contains("active again"))?;
    let mode = tree.path("/sys/module/ib_core/parameters/netns_mode");
    fs::remove_file(&mode)?;
    fs::create_dir(&mode)?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    ensure!(
        daemon.log().contains("cannot scan the host"),
        "{}",
        daemon.log()
    );
    Ok(())
}

/// The only event is over by then.
fn a_scan_that_failed_is_tried_again_by_itself() -> Result<()> {
    let scene = Scene::new(&EXCLUSIVE.replace("rescanInterval: 1s", "rescanInterval: 0s"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    let tree = &scene.machine.tree;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    tree.set_port_state("mlx5_1", 1, "1: DOWN", "3: Disabled");
    let mode = tree.path("/sys/module/ib_core/parameters/netns_mode");
    fs::remove_file(&mode)?;
    fs::create_dir(&mode)?;
    daemon.signal(Signal::SIGHUP)?;
    scene.until("/readyz", &daemon, |_, body| {
        body.contains("cannot be scanned")
    })?;
    fs::remove_dir(&mode)?;
    fs::write(&mode, "Y\n")?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)
}

fn an_untrusted_file_of_known_hcas_changes_nothing_for_pods() -> Result<()> {
    let scene = Scene::new(&selecting("linkSpeed: [100G]"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    take(&scene, &held[0])?;
    drop(daemon);
    let file = scene.machine.state().join("known-hcas");
    let text = fs::read_to_string(&file)?;
    // What a process that writes there could make of the machine.
    let forged = text.replace("100000", "1").replace("mlx5_", "mlx4_");
    let elsewhere = scene.machine.directory().join("forged");
    fs::write(&elsewhere, &forged)?;
    let lay: [&dyn Fn() -> Result<()>; 5] = [
        &|| Ok(symlink(&elsewhere, &file)?),
        &|| Ok(mkfifo(&file, Mode::S_IRUSR | Mode::S_IWUSR)?),
        &|| {
            fs::write(&file, &forged)?;
            Ok(fs::set_permissions(&file, Permissions::from_mode(0o666))?)
        },
        &|| {
            fs::write(&file, &forged)?;
            Ok(chown(&file, Some(65534), None)?)
        },
        &|| Ok(fs::create_dir(&file)?),
    ];
    for (index, lay) in lay.iter().enumerate() {
        if file.is_dir() {
            fs::remove_dir(&file)?;
        } else {
            fs::remove_file(&file)?;
        }
        lay()?;
        let daemon = scene.daemon()?;
        let waited = scene.wait(&kubelet, &daemon, "rdma/nic", 2);
        waited.with_context(|| format!("file {index}"))?;
        let started = Instant::now();
        while !daemon.log().contains("known-hcas") {
            ensure!(
                started.elapsed() < WAIT_TIMEOUT,
                "{index}: {}",
                daemon.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        kubelet.run_options("default/pod", "main")?;
        if index < 4 {
            // The daemon's own file is in its place again.
            let own =
                || fs::symlink_metadata(&file).is_ok_and(|meta| meta.is_file() && meta.uid() == 0);
            let started = Instant::now();
            while !own() || !fs::read_to_string(&file)?.contains(HCAS[1]) {
                ensure!(
                    started.elapsed() < WAIT_TIMEOUT,
                    "{index}: {}",
                    daemon.log()
                );
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    ensure!(fs::read_to_string(&elsewhere)? == forged);
    Ok(())
}
