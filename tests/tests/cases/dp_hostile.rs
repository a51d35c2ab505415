//! The daemon among odd hosts, kubelets and untrusted clients: it reports the truth and goes on.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::daemon::{Daemon, HCAS, Machine};
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Misbehaviour, Pod};
use e2e::unanswered::Unanswered;
use hca_trees::cloud;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

pub(crate) const CASES: &[Case] = &[
    case!(half_open_requests_harm_no_other_client, Root),
    case!(
        a_hundred_restarts_of_the_kubelet_beside_half_open_requests,
        Root
    ),
    case!(a_port_that_is_taken_does_not_stop_the_device_plugin, Root),
    case!(an_hca_that_hangs_is_unhealthy_and_the_others_go_on, Root),
    case!(
        many_hcas_that_hang_at_once_delay_the_others_for_a_moment,
        Root
    ),
    case!(commands_name_the_read_that_hangs_and_end, Root, Fuse),
    case!(a_waiting_container_does_not_delay_the_daemons_end, Root),
    case!(a_kubelet_directory_that_hangs_stops_no_daemon, Root, Fuse),
    case!(an_attribute_that_cannot_be_read_blinds_one_hca, Root),
    case!(ready_means_that_the_kubelet_has_the_list, Root),
    case!(a_pool_waits_for_the_marker_of_a_driver_container, Root),
    case!(
        what_the_cni_plugin_reads_is_written_again_when_it_is_lost,
        Root
    ),
    case!(functions_of_nvswitches_are_named_to_the_cni_plugin, Root),
];

pub(super) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
pub(super) const EXCLUSIVE: &str = "version: 1\nrescanInterval: 1s\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";

/// The same HCAs in a shared pool.
pub(super) fn shared() -> String {
    EXCLUSIVE
        .replace("rdma/nic", "rdma/shared")
        .replace("mode: exclusive", "mode: shared\n  shares: 1")
}

/// A daemon that serves what it says of itself.
pub(super) struct Scene {
    pub(super) machine: Machine,
    pub(super) file: PathBuf,
    pub(super) address: SocketAddr,
}

impl Scene {
    pub(super) fn new(config: &str) -> Result<Self> {
        Self::on(Machine::new()?, config)
    }

    pub(super) fn on(machine: Machine, config: &str) -> Result<Self> {
        let directory = machine.directory().join("config");
        fs::create_dir(&directory)?;
        let file = directory.join("config.yaml");
        fs::write(&file, config)?;
        // Free a moment ago; no other process here asks for one.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        Ok(Self {
            machine,
            file,
            address,
        })
    }

    pub(super) fn daemon(&self) -> Result<Daemon> {
        let directory = |name: &str| self.machine.directory().join(name);
        let address = self.address.to_string();
        let (state, information) = (directory("state"), directory("devinfo"));
        let root = self.machine.settings().root;
        let flags: [&OsStr; 8] = [
            "--metrics-addr".as_ref(),
            address.as_ref(),
            "--kubelet-root-dir".as_ref(),
            root.as_ref(),
            "--state-dir".as_ref(),
            state.as_ref(),
            "--device-info-dir".as_ref(),
            information.as_ref(),
        ];
        self.machine.daemon_on(&self.file, &flags)
    }

    pub(super) fn wait(
        &self,
        kubelet: &Kubelet,
        daemon: &Daemon,
        resource: &str,
        units: usize,
    ) -> Result<()> {
        let waited = kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT);
        waited.with_context(|| format!("the daemon said: {}", daemon.log()))
    }

    pub(super) fn get(&self, path: &str) -> Result<(u16, String)> {
        let mut stream = TcpStream::connect_timeout(&self.address, WAIT_TIMEOUT)?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
        let status = head.split(' ').nth(1).context("no status")?;
        Ok((status.parse()?, body.to_owned()))
    }

    pub(super) fn until(
        &self,
        path: &str,
        daemon: &Daemon,
        wanted: impl Fn(u16, &str) -> bool,
    ) -> Result<String> {
        let started = Instant::now();
        loop {
            let said = match self.get(path) {
                Ok((status, body)) if wanted(status, &body) => return Ok(body),
                said => said,
            };
            if started.elapsed() > WAIT_TIMEOUT {
                bail!(
                    "{path} never said so: {said:?}\nthe daemon said: {}",
                    daemon.log()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

pub(super) fn admit(
    kubelet: &Kubelet,
    name: &str,
    resource: &str,
    units: u64,
) -> Result<Vec<String>> {
    kubelet.admit(Pod::with_limits(name, &[(resource, units)])?)?;
    Ok(kubelet
        .assigned(&format!("default/{name}"))?
        .into_values()
        .flatten()
        .collect())
}

/// Anonymous resident memory in KiB; a debug build maps many pages of its file besides.
fn memory(daemon: &Daemon) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.id()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib.context("no RssAnon")?.parse()?)
}

/// Clients open a request each and never end it, more of them than the daemon has descriptors.
fn half_open_requests_harm_no_other_client() -> Result<()> {
    const CLIENTS: usize = 2000;
    let scene = Scene::new(EXCLUSIVE)?;
    let mut kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let limited = Command::new("prlimit")
        .args(["--pid", &daemon.id().to_string(), "--nofile=1024:1024"])
        .status()
        .context("run prlimit")?;
    ensure!(limited.success(), "prlimit: {limited}");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(1 << 16), hard)?;
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        // A full backlog is the kernel's to answer; what matters is who else is served.
        if let Ok(mut stream) = TcpStream::connect_timeout(&scene.address, Duration::from_secs(1)) {
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:");
            clients.push(stream);
        }
    }
    ensure!(
        clients.len() > CLIENTS / 2,
        "only {} clients came",
        clients.len()
    );
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        let settings = kubelet.settings().clone();
        kubelet.kill();
        kubelet = Kubelet::start(settings)?;
        let started = Instant::now();
        scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
        quickest = quickest.min(started.elapsed());
        // One who asks gets an answer at once, among all of them.
        let started = Instant::now();
        assert_eq!(scene.get("/healthz")?.0, 200);
        ensure!(
            started.elapsed() < Duration::from_secs(5),
            "{:?}",
            started.elapsed()
        );
    }
    ensure!(
        quickest < Duration::from_secs(1),
        "registered again only after {quickest:?}"
    );
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.id()))?.count();
    ensure!(descriptors < 100, "{descriptors} descriptors");
    let kib = memory(&daemon)?;
    ensure!(kib < 20 * 1024, "{kib} KiB");
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    Ok(())
}

/// Clients connect all the time, each with half a request.
fn a_hundred_restarts_of_the_kubelet_beside_half_open_requests() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let mut kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let over = Arc::new(AtomicBool::new(false));
    let (ended, address) = (over.clone(), scene.address);
    let hostile = std::thread::spawn(move || {
        let mut clients = VecDeque::new();
        let mut came = 0_u32;
        while !ended.load(Ordering::Relaxed) {
            if let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200))
            {
                let _ = stream.write_all(b"GET /status HTTP/1.1\r\nX:");
                clients.push_back(stream);
                came += 1;
            }
            if clients.len() > 500 {
                clients.pop_front();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        came
    });
    let mut slowest = Duration::ZERO;
    for restart in 1..=100_u64 {
        let settings = kubelet.settings().clone();
        if restart % 2 == 0 {
            kubelet.stop()
        } else {
            kubelet.kill()
        }
        std::thread::sleep(Duration::from_millis(restart * 7 % 60));
        kubelet = Kubelet::start(settings)?;
        let started = Instant::now();
        scene
            .wait(&kubelet, &daemon, "rdma/nic", 2)
            .with_context(|| format!("restart {restart}"))?;
        slowest = slowest.max(started.elapsed());
    }
    over.store(true, Ordering::Relaxed);
    let came = hostile
        .join()
        .map_err(|_| anyhow::anyhow!("the clients failed"))?;
    ensure!(came > 500, "only {came} clients came");
    ensure!(
        slowest < Duration::from_secs(10),
        "the slowest took {slowest:?}"
    );
    let kib = memory(&daemon)?;
    ensure!(kib < 20 * 1024, "{kib} KiB");
    Ok(())
}

fn a_port_that_is_taken_does_not_stop_the_device_plugin() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let taken = TcpListener::bind(scene.address)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    ensure!(daemon.log().contains("--metrics-addr"), "{}", daemon.log());
    drop(taken);
    scene.until("/healthz", &daemon, |status, _| status == 200)?;
    Ok(())
}

/// A FIFO blocks its reader as firmware that does not answer does.
fn an_hca_that_hangs_is_unhealthy_and_the_others_go_on() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let attribute = |hca: u32, name: &str| {
        let path = format!("/sys/class/infiniband/mlx5_{hca}/ports/1/{name}");
        scene.machine.tree.path(path)
    };
    let rate = attribute(1, "rate");
    let answer = fs::read(&rate)?;
    fs::remove_file(&rate)?;
    mkfifo(&rate, Mode::S_IRUSR)?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    let healthy: Vec<String> = kubelet
        .devices("rdma/nic")
        .into_iter()
        .filter_map(|(id, device)| (device.health == "Healthy").then_some(id))
        .collect();
    assert_eq!(healthy, [HCAS[0]]);
    let status: serde_json::Value = serde_json::from_str(&scene.get("/status")?.1)?;
    let reason = status["pools"][0]["hcas"][1]["reasons"].to_string();
    ensure!(reason.contains("mlx5_1/ports/1/rate"), "{reason}");
    let (ready, said) = scene.get("/readyz")?;
    ensure!(
        ready == 200 && said.contains("is late") && said.contains("mlx5_1/ports/1/rate"),
        "{ready} {said}"
    );
    let (_, metrics) = scene.get("/metrics")?;
    let late = metrics
        .lines()
        .find(|line| line.starts_with("rdma_device_plugin_scan_late_seconds"));
    ensure!(late.is_some_and(|line| !line.ends_with(" 0.0")), "{late:?}");
    // The other HCA is allocated, its container starts, and its health is that of now.
    assert_eq!(admit(&kubelet, "pod", "rdma/nic", 1)?, [HCAS[0]]);
    kubelet.run_options("default/pod", "main")?;
    fs::write(attribute(0, "state"), "1: DOWN\n")?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 0)?;
    fs::write(attribute(0, "state"), "4: ACTIVE\n")?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    let log = daemon.log();
    assert_eq!(log.matches("is late").count(), 1, "{log}");
    let scans = fs::read_dir(format!("/proc/{}/task", daemon.id()))?
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.trim() == "scan");
    ensure!(scans.count() <= 2, "more than one thread hangs");
    // It answers: another file takes the name, and the one that was opened gets its text.
    let opened = fs::OpenOptions::new().write(true).open(&rate)?;
    fs::remove_file(&rate)?;
    fs::write(&rate, answer)?;
    drop(opened);
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let started = Instant::now();
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(Duration::from_secs(5))?;
    ensure!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
    Ok(())
}

/// As virtual functions do where the firmware is one.
fn many_hcas_that_hang_at_once_delay_the_others_for_a_moment() -> Result<()> {
    let scene = Scene::on(Machine::with_hcas(10)?, EXCLUSIVE)?;
    for hca in 1..9 {
        let path = format!("/sys/class/infiniband/mlx5_{hca}/ports/1/rate");
        let rate = scene.machine.tree.path(path);
        fs::remove_file(&rate)?;
        mkfifo(&rate, Mode::S_IRUSR)?;
    }
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    scene.until("/readyz", &daemon, |_, body| {
        (1..9).all(|hca| body.contains(&format!("mlx5_{hca}/ports/1/rate has not answered")))
    })?;
    Ok(())
}

fn commands_name_the_read_that_hangs_and_end() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let _kubelet = scene.machine.kubelet()?;
    let host = scene.machine.tree.path("/");
    let state = scene
        .machine
        .tree
        .path("/sys/class/infiniband/mlx5_1/ports/1/state");
    fs::remove_file(&state)?;
    mkfifo(&state, Mode::S_IRUSR)?;
    let policy = scene.machine.policy()?;
    let root = scene.machine.settings().root;
    let run = |command: &[&str]| -> Result<String> {
        let output = Command::new("timeout")
            .arg("30")
            .arg(product("rdmactl")?)
            .args(command)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1),
            "{command:?}: {} {said}",
            output.status
        );
        Ok(said)
    };
    let (host, file) = (text(&host)?, text(&scene.file)?);
    let (policy, root) = (text(&policy)?, text(&root)?);
    let status = [
        "status",
        "--node-socket",
        "/none/node.sock",
        "--host-root",
        host,
        "--policy",
        policy,
        "--kubelet-root-dir",
        root,
    ];
    for command in [
        &["discover", "--host-root", host][..],
        &["topology", "--host-root", host, "--kubelet-root-dir", root],
        &["validate", file, "--on-host", "--host-root", host],
    ] {
        let said = run(command)?;
        ensure!(said.contains("mlx5_1/ports/1/state"), "{command:?}: {said}");
    }
    let directory = scene.machine.state();
    let _mount = Unanswered::on(&directory)?;
    // The journal is read in the network namespace of the root's own /proc.
    let said = run(&[&status[..3], &status[5..7]].concat())?;
    ensure!(said.contains(text(&directory)?), "{said}");
    Ok(())
}

fn text(path: &std::path::Path) -> Result<&str> {
    path.to_str().context("a path that is not text")
}

/// The scan has begun and is not late yet when the daemon is asked to end.
fn a_waiting_container_does_not_delay_the_daemons_end() -> Result<()> {
    let scene = Scene::new(&EXCLUSIVE.replace("rescanInterval: 1s", "rescanInterval: 0"))?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let held = admit(&kubelet, "pod", "rdma/nic", 1)?;
    // What is read of its HCA does not answer.
    let index = HCAS.iter().position(|hca| *hca == held[0]).context("HCA")?;
    let number = format!("/sys/class/infiniband_verbs/uverbs{index}/dev");
    let number = scene.machine.tree.path(number);
    fs::remove_file(&number)?;
    mkfifo(&number, Mode::S_IRUSR)?;
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| kubelet.run_options("default/pod", "main"));
        std::thread::sleep(Duration::from_millis(500));
        ensure!(
            !starting.is_finished(),
            "the container did not wait: {}",
            daemon.log()
        );
        let asked = Instant::now();
        daemon.signal(Signal::SIGTERM)?;
        ensure!(
            daemon.ended(Duration::from_secs(5))?.success(),
            "{}",
            daemon.log()
        );
        ensure!(
            asked.elapsed() < Duration::from_secs(1),
            "{:?}: {}",
            asked.elapsed(),
            daemon.log()
        );
        let refused = starting
            .join()
            .map_err(|_| anyhow::anyhow!("the kubelet failed"))?;
        refused.err().context("the container started").map(drop)
    })
}

/// As a disk of which the kubelet's directory is, or a hard NFS mount.
fn a_kubelet_directory_that_hangs_stops_no_daemon() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let mut daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let directory = kubelet.settings().device_plugins.clone();
    let _mount = Unanswered::on(&directory)?;
    // The session starts over, and the directory is read meanwhile.
    kubelet.disconnect("rdma/nic");
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(8) {
        let asked = Instant::now();
        let (status, body) = scene.get("/healthz")?;
        ensure!(status == 200, "{body}");
        let took = asked.elapsed();
        ensure!(took < Duration::from_secs(1), "{took:?}: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(200));
    }
    let log = daemon.log();
    ensure!(log.contains(&directory.display().to_string()), "{log}");
    daemon.signal(Signal::SIGTERM)?;
    daemon.ended(Duration::from_secs(6)).map(drop)
}

fn an_attribute_that_cannot_be_read_blinds_one_hca() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let tree = &scene.machine.tree;
    let state = "/sys/class/infiniband/mlx5_1/ports/1/state";
    tree.remove(state);
    fs::create_dir(tree.path(state))?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 1)?;
    let status = scene.until("/status", &daemon, |_, body| {
        body.contains("Is a directory")
    })?;
    let read: serde_json::Value = serde_json::from_str(&status)?;
    let hcas = read["pools"][0]["hcas"].as_array().context("no HCAs")?;
    assert_eq!(hcas[0]["healthy"], true);
    ensure!(
        hcas[1]["reasons"][0]
            .as_str()
            .is_some_and(|why| why.contains("mlx5_1/ports/1/state")),
        "{status}"
    );
    fs::remove_dir(tree.path(state))?;
    tree.file(state, "4: ACTIVE");
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)
}

fn ready_means_that_the_kubelet_has_the_list() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    kubelet.misbehave(Misbehaviour {
        never_watch: true,
        ..Misbehaviour::default()
    });
    let daemon = scene.daemon()?;
    kubelet.wait("a registration", WAIT_TIMEOUT, |_, calls| calls.len() == 1)?;
    scene.until("/readyz", &daemon, |status, body| {
        status == 503 && body.contains("has not opened its stream")
    })?;
    kubelet.misbehave(Misbehaviour::default());
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    scene.until("/readyz", &daemon, |status, body| {
        status == 200 && body.starts_with("ready")
    })?;
    Ok(())
}

fn what_the_cni_plugin_reads_is_written_again_when_it_is_lost() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)?;
    let file = scene.machine.state().join("exclusive-hcas");
    let written = || fs::read_to_string(&file).unwrap_or_default();
    // It is there before the kubelet hears of the units.
    let whole = written();
    ensure!(HCAS.iter().all(|hca| whole.contains(hca)), "{whole:?}");
    let kept = scene
        .machine
        .directory()
        .join("state/device-plugin-config.last-good");
    let wait = |what: &str| -> Result<()> {
        let started = Instant::now();
        while written() != whole || !kept.exists() {
            ensure!(started.elapsed() < WAIT_TIMEOUT, "{what}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    wait("written at the start")?;
    fs::remove_file(&file)?;
    fs::remove_file(&kept)?;
    wait("removed")?;
    fs::write(&file, "0000:00:00.0\n")?;
    wait("replaced")?;
    // What cannot be written is said, and written once it can be.
    fs::remove_file(&file)?;
    fs::create_dir_all(file.join("full"))?;
    scene.until("/readyz", &daemon, |status, body| {
        status == 200 && body.contains("exclusive-hcas") && body.contains("exclusive pools")
    })?;
    fs::remove_dir_all(&file)?;
    wait("mended")?;
    scene
        .until("/readyz", &daemon, |_, body| {
            !body.contains("exclusive-hcas")
        })
        .map(drop)
}

/// No pod holds them, so the CNI plugin makes no child of their netdevs for any.
fn functions_of_nvswitches_are_named_to_the_cni_plugin() -> Result<()> {
    let config = EXCLUSIVE.replace("linkTypes: [ether]", "vendors: ['15b3']");
    let scene = Scene::on(Machine::laid(cloud::hgx_b200)?, &config)?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    scene.wait(&kubelet, &daemon, "rdma/nic", 9)?;
    let written = fs::read_to_string(scene.machine.state().join("exclusive-hcas"))?;
    for bus in ["05", "06", "07", "08"] {
        ensure!(written.contains(&format!("0000:{bus}:00.0")), "{written}");
    }
    Ok(())
}

fn a_pool_waits_for_the_marker_of_a_driver_container() -> Result<()> {
    let scene = Scene::new(EXCLUSIVE)?;
    let marker = scene.machine.directory().join(".driver-ready");
    let wait = format!(
        "  waitFor: [{{file: {}}}, {{module: mlx5-ib}}]\n",
        marker.display()
    );
    fs::write(&scene.file, format!("{EXCLUSIVE}{wait}"))?;
    let kubelet = scene.machine.kubelet()?;
    let daemon = scene.daemon()?;
    let unready =
        |text: &'static str| scene.until("/readyz", &daemon, move |_, body| body.contains(text));
    kubelet.wait("the list", WAIT_TIMEOUT, |node, _| {
        node.get("rdma/nic").is_some_and(|one| one.capacity == 2)
    })?;
    unready("no healthy unit")?;
    let (_, status) = scene.get("/status")?;
    ensure!(status.contains(".driver-ready, module mlx5_ib"), "{status}");
    fs::write(&marker, "")?;
    scene.until("/status", &daemon, |_, body| {
        !body.contains(".driver-ready")
    })?;
    assert_eq!(
        kubelet
            .devices("rdma/nic")
            .values()
            .filter(|one| one.health == "Healthy")
            .count(),
        0
    );
    scene
        .machine
        .tree
        .file("/sys/module/mlx5_ib/initstate", "live");
    scene.wait(&kubelet, &daemon, "rdma/nic", 2)
}
