//! A slot becomes a NIC in the pod and is one on the host again: the CNI plugin with the real daemon
//! and a kubelet.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::cases;
use e2e::cni::Call;
use e2e::daemon::{Daemon, make_nodes};
use e2e::host_state::unchanged;
use e2e::kubelet::{Kubelet, Pod, Settings};
use e2e::scene::{DENIED, INVALID_NETWORK, PCI, Scene, TRY_AGAIN, answer_of};
use nix::sys::signal::Signal;
use serde_json::json;

cases! {
    a_slot_becomes_a_nic_and_returns => there_and_back();
    del_needs_no_daemon => del_without_daemon();
    without_the_daemon_nothing_is_attached => no_daemon();
    a_slot_that_is_not_the_pods_is_denied => foreign_slot();
    a_link_beside_a_slot_is_refused => link_beside();
    without_a_cdi_file_nothing_stays_attached => no_cdi();
    a_child_stands_on_the_nic_that_the_slot_became: Macvlan => child();
    check_misses_the_cdi_file => check();
    the_container_is_told_the_gid_index_of_its_nic => gid_index();
}

pub(crate) const NIC: &str = "rdma/nic";
const LATE: &str = "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  binding: late\n  \
                    environment: true\n  select: {rdmaDevices: [mlx5_0]}\n";
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Node {
    pub(crate) scene: Scene,
    pub(crate) kubelet: Kubelet,
    pub(crate) daemon: Daemon,
}

impl Node {
    pub(crate) fn new() -> Result<Self> {
        let scene = Scene::with_hardware()?;
        scene.hide_processes()?;
        let tree = scene.tree()?;
        tree.rdma_core(true);
        make_nodes(tree)?;
        let cdi = scene.host.directory().join("cdi");
        scene.policy(&json!({"unallocated": null}), &json!({"cdiDir": cdi}))?;
        fs::create_dir_all(scene.host_root().join("run"))?;
        DirBuilder::new().mode(0o700).create(scene.host.state())?;
        let kubelet = Kubelet::start(settings(&scene))?;
        let daemon = start(&scene)?;
        let node = Self {
            scene,
            kubelet,
            daemon,
        };
        node.ready()?;
        Ok(node)
    }

    pub(crate) fn ready(&self) -> Result<()> {
        let listed = self.kubelet.wait_allocatable(NIC, 1, WAIT_TIMEOUT);
        listed.with_context(|| self.daemon.log())?;
        let started = Instant::now();
        while UnixStream::connect(socket(&self.scene)).is_err() {
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", self.daemon.log());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Admits a pod with one slot, and gives the slot with the call for its network.
    pub(crate) fn admit(&self, name: &str) -> Result<(String, Call)> {
        let pod = Pod::with_limits(name, &[(NIC, 1)])?;
        let uid = pod.metadata.uid.clone();
        self.kubelet.admit(pod)?;
        let assigned = self.kubelet.assigned(&format!("default/{name}"))?;
        let slot = assigned.into_values().flatten().next().context("a slot")?;
        Ok((slot, self.call(name, &uid)))
    }

    pub(crate) fn call(&self, name: &str, uid: &str) -> Call {
        let mut call = self.scene.call();
        call.args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name};K8S_POD_UID={uid}"
        );
        call
    }

    pub(crate) fn cdi(&self) -> PathBuf {
        self.scene.host.directory().join("cdi")
    }

    /// How many CDI files a runtime reads.
    pub(crate) fn cdi_files(&self) -> usize {
        names(&self.cdi()).map_or(0, |names| names.len())
    }

    /// HCAs that are bound, by the files, but those that only wait for the end of their pod.
    pub(crate) fn bound(&self) -> Result<Vec<String>> {
        let bindings = socket(&self.scene).with_file_name("bindings");
        let mut bound = match bindings.exists() {
            true => names(&bindings)?,
            false => Vec::new(),
        };
        bound.retain(|hca| {
            let text = fs::read_to_string(bindings.join(hca));
            text.is_ok_and(|text| !text.contains(r#""stage":"detached""#))
        });
        Ok(bound)
    }

    pub(crate) fn kill_daemon(&mut self) -> Result<()> {
        if self.daemon.ended(Duration::from_millis(1)).is_err() {
            self.daemon.signal(Signal::SIGKILL)?;
            self.daemon.ended(WAIT_TIMEOUT)?;
        }
        Ok(())
    }
}

/// Names in a directory but those that begin with a dot: a writer that is killed leaves such a file,
/// which nobody reads and a later start of the daemon removes.
fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.retain(|name| !name.starts_with('.'));
    Ok(names)
}

fn settings(scene: &Scene) -> Settings {
    Settings::below(&scene.host.directory().join("kubelet"))
        .with_cgroups(scene.host_root().join("sys/fs/cgroup"))
}

fn socket(scene: &Scene) -> PathBuf {
    scene.host_root().join("run/rdma-netdev/node.sock")
}

pub(crate) fn start(scene: &Scene) -> Result<Daemon> {
    let config = scene.host.directory().join("config");
    fs::write(&config, LATE)?;
    let settings = settings(scene);
    let mut command = Command::new(product("rdma-device-plugin")?);
    command
        .arg("--config-file")
        .arg(config)
        .arg("--host-root")
        .arg(scene.host_root())
        .arg("--device-plugin-dir")
        .arg(settings.device_plugins)
        .arg("--kubelet-root-dir")
        .arg(settings.root)
        .arg("--node-socket")
        .arg(socket(scene))
        .arg("--policy")
        .arg(scene.policy_file())
        .arg("--cdi-dir")
        .arg(scene.host.directory().join("cdi"));
    Daemon::start(command, scene.host.directory())
}

fn there_and_back() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    ensure!(slot.starts_with("slot_"), "{slot}");
    // Without its network the container does not start.
    assert!(node.kubelet.run_options("default/a", "main").is_err());
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    let before = node.scene.host_state()?;
    let added = answer_of(&call, "ADD", &network)?.success();
    added.with_context(|| node.daemon.log())?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![PCI.to_owned()], 1));
    let options = node.kubelet.run_options("default/a", "main")?;
    assert_eq!(
        options.cdi_devices[0].name,
        format!("rdma-device-plugin/slot={slot}")
    );
    node.scene.in_pod(&["link set net1 mtu 400"])?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || node.scene.host_state(), "after DEL")?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![], 0));
    // The next sandbox of the pod, and after it the next pod.
    let mut again = call.clone();
    again.container_id = "c2".into();
    answer_of(&again, "ADD", &network)?.success()?;
    answer_of(&again, "DEL", &network)?.success()?;
    unchanged(&before, || node.scene.host_state(), "after another DEL")?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![], 0));
    Ok(())
}

fn del_without_daemon() -> Result<()> {
    let mut node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    let before = node.scene.host_state()?;
    answer_of(&call, "ADD", &network)?.success()?;
    node.kill_daemon()?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || node.scene.host_state(), "after DEL")?;
    assert_eq!(node.cdi_files(), 0);
    assert_eq!(node.bound()?, [PCI], "the daemon was not there to free it");
    // The next pod gets the NIC: the journal shows that it was returned.
    node.daemon = start(&node.scene)?;
    node.kubelet.remove("default/a")?;
    node.ready()?;
    let (slot, call) = node.admit("b")?;
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    answer_of(&call, "ADD", &network)?
        .success()
        .with_context(|| node.daemon.log())?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || node.scene.host_state(), "after the second pod")
}

fn no_daemon() -> Result<()> {
    let mut node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    node.kill_daemon()?;
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    node.scene
        .refuses_call(&call, &network, &[TRY_AGAIN], &["node.sock", &slot])
}

fn foreign_slot() -> Result<()> {
    let node = Node::new()?;
    let (slot, _) = node.admit("a")?;
    let other = Pod::with_limits("b", &[])?;
    let uid = other.metadata.uid.clone();
    node.kubelet.admit(other)?;
    for unit in [slot.as_str(), "slot_00000000_0"] {
        let network = node
            .scene
            .network(&json!({"attach": "move", "deviceID": unit}));
        let call = node.call("b", &uid);
        node.scene
            .refuses_call(&call, &network, &[DENIED], &[unit, "default/b"])?;
    }
    assert_eq!(node.bound()?.len(), 0);
    Ok(())
}

fn link_beside() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    for keys in [
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "move", "device": "nic0"}),
    ] {
        let mut network = node.scene.network(&keys);
        network["deviceID"] = json!(slot);
        node.scene
            .refuses_call(&call, &network, &[INVALID_NETWORK], &["beside the slot"])?;
    }
    assert_eq!(node.bound()?.len(), 0);
    Ok(())
}

fn no_cdi() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    let victim = node.scene.host.directory().join("victim");
    fs::create_dir(&victim)?;
    if node.cdi().exists() {
        fs::remove_dir_all(node.cdi())?;
    }
    symlink(&victim, node.cdi())?;
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    node.scene
        .refuses_call(&call, &network, &[TRY_AGAIN], &["it is a link"])?;
    assert_eq!(fs::read_dir(&victim)?.count(), 0);
    assert!(node.kubelet.run_options("default/a", "main").is_err());
    fs::remove_file(node.cdi())?;
    // As a runtime does: the daemon sees at its next scan that the link is gone.
    let started = Instant::now();
    while let Err(refused) = answer_of(&call, "ADD", &network)?.success() {
        let log = || format!("{refused:#}\n{}", node.daemon.log());
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{}", log());
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(node.cdi_files(), 1);
    answer_of(&call, "DEL", &network)?.success()?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![], 0));
    Ok(())
}

fn child() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    let network = node
        .scene
        .network(&json!({"attach": "macvlan", "deviceID": slot}));
    let before = node.scene.host_state()?;
    answer_of(&call, "ADD", &network)?
        .success()
        .with_context(|| node.daemon.log())?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![PCI.to_owned()], 1));
    node.kubelet.run_options("default/a", "main")?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || node.scene.host_state(), "after DEL")?;
    assert_eq!((node.bound()?, node.cdi_files()), (vec![], 0));
    Ok(())
}

fn check() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    let mut network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    let added = answer_of(&call, "ADD", &network)?.success()?;
    network["prevResult"] = added;
    answer_of(&call, "CHECK", &network)?.success()?;
    for entry in fs::read_dir(node.cdi())? {
        fs::remove_file(entry?.path())?;
    }
    let refused = answer_of(&call, "CHECK", &network)?;
    let (code, text) = refused.refusal()?;
    ensure!(code == 104 && text.contains(&slot), "{code} {text}");
    answer_of(&call, "DEL", &network)?.success()?;
    Ok(())
}

/// What containers get for their slots.
fn cdi_text(node: &Node) -> Result<String> {
    let files = names(&node.cdi())?.into_iter();
    let read = files.map(|name| Ok(fs::read_to_string(node.cdi().join(name))?));
    read.collect()
}

fn gid_index() -> Result<()> {
    let node = Node::new()?;
    let (slot, call) = node.admit("a")?;
    let network = node
        .scene
        .network(&json!({"attach": "move", "deviceID": slot}));
    answer_of(&call, "ADD", &network)?.success()?;
    let text = cdi_text(&node)?;
    ensure!(
        text.contains("NCCL_IB_HCA") && !text.contains("GID"),
        "{text}"
    );
    answer_of(&call, "DEL", &network)?.success()?;
    let tree = node.scene.tree()?;
    let port = "/sys/class/infiniband/mlx5_0/ports/1";
    let gid = "0000:0000:0000:0000:0000:ffff:0a09:0001";
    tree.file(format!("{port}/gids/5"), gid);
    tree.file(format!("{port}/gid_attrs/types/5"), "RoCE v2");
    tree.file(format!("{port}/gid_attrs/ndevs/5"), "net1");
    answer_of(&call, "ADD", &network)?.success()?;
    let text = cdi_text(&node)?;
    ensure!(text.contains("\"NCCL_IB_GID_INDEX=5\""), "{text}");
    // A start of the container writes the file again.
    for name in names(&node.cdi())? {
        fs::write(node.cdi().join(name), "{}")?;
    }
    node.kubelet.run_options("default/a", "main")?;
    assert_eq!(cdi_text(&node)?, text);
    answer_of(&call, "DEL", &network)?.success().map(drop)
}
