//! What pods hold stays theirs, whatever becomes of the kubelet, the pools and the node.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::daemon::HCAS;
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Misbehaviour};
use nix::sys::signal::Signal;

use super::dp_hostile::{EXCLUSIVE, Scene, WAIT_TIMEOUT, admit, shared};

pub(crate) const CASES: &[Case] = &[
    case!(
        an_hca_stays_a_pods_own_while_the_kubelet_does_not_answer,
        Root
    ),
    case!(an_exclusive_hca_stays_a_pods_own_when_pools_change, Root),
    case!(
        a_pod_gets_no_device_node_of_another_hca_after_a_reboot,
        Root
    ),
    case!(a_kubelet_that_lists_no_pods_yet_frees_nothing, Root),
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
