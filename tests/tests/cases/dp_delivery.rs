//! How containers get their devices: by paths of nodes, or by CDI names where a pool states it.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::case;
use e2e::daemon::{Daemon, HCAS, Machine};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod, RunOptions};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(device_nodes_are_delivered_unless_cdi_is_stated, Root),
    case!(cdi_file_of_pods_stays_true_after_a_change_to_nodes, Root),
];

const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const RESOURCE: &str = "rdma/nic";
const EXCLUSIVE: &str = "version: 1\nrescanInterval: 1s\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";

/// A daemon in a container whose CDI directory is a mount of the host's.
struct Scene {
    machine: Machine,
    cdi: TempDir,
    file: PathBuf,
    address: SocketAddr,
}

impl Scene {
    fn new(config: &str) -> Result<Self> {
        let machine = Machine::new()?;
        let file = machine.directory().join("config.yaml");
        fs::write(&file, config)?;
        let cdi = tempfile::tempdir_in("/dev/shm")?;
        // Free a moment ago; no other process here asks for one.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        Ok(Self {
            machine,
            cdi,
            file,
            address,
        })
    }

    /// containerd with this configuration.
    fn containerd(&self, config: &str) {
        let tree = &self.machine.tree;
        tree.file("/proc/4711/comm", "containerd");
        tree.file("/proc/4711/cmdline", "/usr/bin/containerd\0");
        tree.file("/etc/containerd/config.toml", config);
    }

    fn daemon(&self, kubelet: &Kubelet) -> Result<Daemon> {
        let (address, root) = (self.address.to_string(), self.machine.settings().root);
        let information = self.machine.directory().join("devinfo");
        let flags: [&OsStr; 8] = [
            "--metrics-addr".as_ref(),
            address.as_ref(),
            "--cdi-dir".as_ref(),
            self.cdi.path().as_ref(),
            "--kubelet-root-dir".as_ref(),
            root.as_ref(),
            "--device-info-dir".as_ref(),
            information.as_ref(),
        ];
        let daemon = self.machine.daemon_on(&self.file, &flags)?;
        let waited = kubelet.wait_allocatable(RESOURCE, 2, WAIT_TIMEOUT);
        waited.with_context(|| format!("the daemon said: {}", daemon.log()))?;
        Ok(daemon)
    }

    fn pool(&self) -> Result<Value> {
        let mut stream = TcpStream::connect(self.address)?;
        write!(stream, "GET /status HTTP/1.1\r\nHost: node\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no head")?;
        let status: Value = serde_json::from_str(body)?;
        Ok(status["pools"][0].clone())
    }

    /// Waits until the status says that the pool is delivered so.
    fn delivered_by(&self, delivery: &str, daemon: &Daemon) -> Result<()> {
        let started = Instant::now();
        loop {
            let pool = self.pool()?;
            if pool["delivery"] == delivery {
                return Ok(());
            }
            if started.elapsed() > WAIT_TIMEOUT {
                bail!(
                    "not by {delivery}: {pool}\nthe daemon said: {}",
                    daemon.log()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The kubelet learns at registration alone whether it has to ask before each start of a container, so
/// another delivery is registered anew. It admits no pod at that moment.
fn run(kubelet: &Kubelet, name: &str) -> Result<RunOptions> {
    let started = Instant::now();
    while let Err(error) = kubelet.admit(Pod::with_limits(name, &[(RESOURCE, 1)])?) {
        if started.elapsed() > WAIT_TIMEOUT {
            return Err(error.into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    kubelet.run_options(&format!("default/{name}"), "main")
}

/// Paths of nodes in the only CDI file.
fn cdi_file(directory: &Path) -> Result<String> {
    let mut files = fs::read_dir(directory)?;
    let file = files.next().context("no CDI file")??;
    ensure!(files.next().is_none(), "several files");
    Ok(fs::read_to_string(file.path())?)
}

fn device_nodes_are_delivered_unless_cdi_is_stated() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    scene.containerd("version = 3\n");
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon(&kubelet)?;
    scene.delivered_by("deviceSpecs", &daemon)?;
    let first = run(&kubelet, "first")?;
    assert_eq!(first.cdi_devices.len(), 0, "{first:?}");
    ensure!(!first.devices.is_empty(), "{first:?}");
    assert_eq!(fs::read_dir(scene.cdi.path())?.count(), 0);

    fs::write(&scene.file, format!("{EXCLUSIVE}  delivery: cdi\n"))?;
    scene.delivered_by("cdi", &daemon)?;
    kubelet.wait("a registration", WAIT_TIMEOUT, |_, calls| calls.len() >= 2)?;
    let second = run(&kubelet, "second")?;
    assert_eq!(
        (second.devices.len(), second.cdi_devices.len()),
        (0, 1),
        "{second:?}"
    );
    ensure!(cdi_file(scene.cdi.path())?.contains(HCAS[0]));
    assert_eq!(kubelet.run_options("default/first", "main")?, first);
    Ok(())
}

/// Names that a pod has are resolved at each start of its container, however new pods are served.
fn cdi_file_of_pods_stays_true_after_a_change_to_nodes() -> Result<()> {
    let scene = Scene::new(&format!("{EXCLUSIVE}  delivery: cdi\n"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon(&kubelet)?;
    run(&kubelet, "pod")?;
    ensure!(cdi_file(scene.cdi.path())?.contains("uverbs0"));
    fs::write(&scene.file, format!("{EXCLUSIVE}  delivery: deviceSpecs\n"))?;
    scene.delivered_by("deviceSpecs", &daemon)?;
    scene.machine.renumber("uverbs0", "uverbs9")?;
    let started = Instant::now();
    loop {
        let file = cdi_file(scene.cdi.path())?;
        if file.contains("uverbs9") && !file.contains("uverbs0") {
            return kubelet.run_options("default/pod", "main").map(drop);
        }
        ensure!(started.elapsed() < WAIT_TIMEOUT, "{file}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
