//! The daemon while it runs: a configuration that changes, what it writes for others to read,
//! what it says of itself.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use e2e::kubelet::{Kubelet, Pod};
use node::calls;
use serde_json::Value;

use e2e::daemon::{Daemon, HCAS, Machine, page};

pub(crate) const CASES: &[Case] = &[
    case!(a_changed_config_map_is_in_force_at_once_unless_wrong, Root),
    case!(a_file_that_is_wrong_in_part_changes_nothing, Root),
    case!(cdi_devices_are_written_before_they_are_named, Root),
    case!(metrics_follow_units_pods_ports_and_files, Root),
    case!(
        the_dashboard_and_the_docs_have_the_metrics_that_are_served,
        Root
    ),
    case!(traffic_of_an_hca_names_the_pod_that_has_it, Root),
    case!(a_device_of_two_pools_is_reported, Root),
    case!(the_nodes_addresses_are_written_for_the_cni_plugin, Root),
];

const RESOURCE: &str = "rdma/hca";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

fn shared(slots: u32) -> String {
    format!(
        "version: 1\npools:\n- resource: {RESOURCE}\n  mode: shared\n  shares: {slots}\n  select: {{linkTypes: [ether]}}\n"
    )
}

/// A file as the kubelet mounts a ConfigMap: a link to a file in a directory behind a link, which
/// is swapped whole.
struct ConfigMap {
    directory: PathBuf,
    generation: u32,
}

impl ConfigMap {
    fn new(machine: &Machine, text: &str) -> Result<Self> {
        let directory = machine.directory().join("mounted");
        fs::create_dir(&directory)?;
        let mut map = Self {
            directory,
            generation: 0,
        };
        map.change(text)?;
        symlink("..data/config.yaml", map.file())?;
        Ok(map)
    }

    fn file(&self) -> PathBuf {
        self.directory.join("config.yaml")
    }

    fn change(&mut self, text: &str) -> Result<()> {
        self.generation += 1;
        let data = format!("..{}", self.generation);
        fs::create_dir(self.directory.join(&data))?;
        fs::write(self.directory.join(&data).join("config.yaml"), text)?;
        let new = self.directory.join("..data_tmp");
        symlink(&data, &new)?;
        Ok(fs::rename(new, self.directory.join("..data"))?)
    }
}

/// A daemon on a ConfigMap that serves what it says of itself.
struct Running {
    machine: Machine,
    kubelet: Kubelet,
    daemon: Daemon,
    map: ConfigMap,
    address: SocketAddr,
}

fn running(config: &str, resource: &str, units: usize) -> Result<Running> {
    running_on(Machine::new()?, config, resource, units)
}

fn running_on(machine: Machine, config: &str, resource: &str, units: usize) -> Result<Running> {
    let kubelet = machine.kubelet()?;
    let map = ConfigMap::new(&machine, config)?;
    // Free a moment ago; no other process here asks for one.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let (cdi, root, listen) = (
        machine.directory().join("cdi"),
        machine.settings().root,
        address.to_string(),
    );
    fs::create_dir(&cdi)?;
    let information = machine.directory().join("devinfo");
    let flags = [
        OsStr::new("--metrics-addr"),
        listen.as_ref(),
        "--cdi-dir".as_ref(),
        cdi.as_ref(),
        "--kubelet-root-dir".as_ref(),
        root.as_ref(),
        "--device-info-dir".as_ref(),
        information.as_ref(),
    ];
    let daemon = machine.daemon_on(&map.file(), &flags)?;
    let running = Running {
        machine,
        kubelet,
        daemon,
        map,
        address,
    };
    running.wait(resource, units)?;
    Ok(running)
}

impl Running {
    fn wait(&self, resource: &str, units: usize) -> Result<()> {
        let waited = self.kubelet.wait_allocatable(resource, units, WAIT_TIMEOUT);
        waited.with_context(|| format!("the daemon said: {}", self.daemon.log()))
    }

    /// Status and body of a page.
    fn get(&self, path: &str) -> Result<(u16, String)> {
        page(self.address, path)
    }

    /// Asks for a page until it says what is wanted.
    fn until(&self, path: &str, what: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let started = Instant::now();
        loop {
            let (_, body) = self.get(path)?;
            if wanted(&body) {
                return Ok(body);
            }
            if started.elapsed() > WAIT_TIMEOUT {
                bail!(
                    "{path} never said {what}: {body}\nthe daemon said: {}",
                    self.daemon.log()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn metric(&self, name: &str, value: &str) -> Result<String> {
        let line = format!("rdma_device_plugin_{name} {value}");
        self.until("/metrics", &line, |body| {
            body.lines().any(|l| l.starts_with(&line))
        })
    }

    fn admit(&self, name: &str, units: u64) -> Result<()> {
        self.kubelet
            .admit(Pod::with_limits(name, &[(RESOURCE, units)])?)?;
        Ok(())
    }
}

fn a_changed_config_map_is_in_force_at_once_unless_wrong() -> Result<()> {
    let mut running = running(&shared(2), RESOURCE, 4)?;
    let generation = |running: &Running, wanted: u64| {
        running.until("/status", "the generation", |body| {
            let status: Value = serde_json::from_str(body).unwrap_or_default();
            status["configuration"]["generation"] == wanted
        })
    };
    generation(&running, 1)?;
    running.map.change(&shared(3))?;
    running.wait(RESOURCE, 6)?;
    generation(&running, 2)?;

    // A mistake changes nothing and is reported in every place.
    running
        .map
        .change("version: 1\npools:\n- resource: rdma/hca\n  mode: shraed\n")?;
    running.metric("config_accepted", "0")?;
    let notes = running.get("/readyz")?;
    assert_eq!(notes.0, 200, "the daemon serves on: {}", notes.1);
    assert!(
        notes.1.contains("rejected") && notes.1.contains("shraed"),
        "{}",
        notes.1
    );
    running.wait(RESOURCE, 6)?;
    assert_eq!(
        running.kubelet.registrations().len(),
        1,
        "the same resource goes on"
    );

    // Another resource comes, the first goes.
    running
        .map
        .change(&shared(2).replace(RESOURCE, "rdma/other"))?;
    running.wait("rdma/other", 4)?;
    running.wait(RESOURCE, 0)?;
    running.metric("config_accepted", "1")?;
    Ok(())
}

fn specifications(directory: &Path) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains("rdma-device-plugin"))
        {
            found.push(serde_json::from_slice(&fs::read(path)?)?);
        }
    }
    Ok(found)
}

fn a_file_that_is_wrong_in_part_changes_nothing() -> Result<()> {
    let good = r#"{"periodicUpdateInterval": 1, "configList": [
        {"resourceName": "hca", "rdmaHcaMax": 4, "selectors": {"vendors": ["15b3"]}}]}"#;
    let partly = good
        .replace("}}]}", "}}, {\"resourceName\": \"other\"}]}")
        .replace("\"rdmaHcaMax\": 4", "\"rdmaHcaMax\": 6");
    let mut running = running(good, RESOURCE, 4)?;
    running.map.change(&partly)?;
    running.metric("config_accepted", "0")?;
    let (status, notes) = running.get("/readyz")?;
    assert_eq!(status, 200, "{notes}");
    assert!(
        notes.contains("config rejected") && notes.contains("configList[1]"),
        "{notes}"
    );
    running.wait(RESOURCE, 4)?;
    running.map.change(good)?;
    running.metric("config_accepted", "1").map(drop)
}

fn cdi_devices_are_written_before_they_are_named() -> Result<()> {
    let config = format!("{}  delivery: cdi\n", shared(2));
    let mut running = running(&config, RESOURCE, 4)?;
    let directory = running.machine.directory().join("cdi");
    fs::write(directory.join("vendor.json"), "theirs")?;
    running.admit("pod", 1)?;
    let options = running.kubelet.run_options("default/pod", "main")?;
    assert_eq!(options.devices, [], "one way, not both");
    let [specification] = specifications(&directory)?
        .try_into()
        .map_err(|_| anyhow::anyhow!("one file"))?;
    let [device] = options.cdi_devices.as_slice() else {
        bail!("{options:?}")
    };
    let (kind, name) = device.name.split_once('=').context("a qualified name")?;
    assert_eq!(specification["kind"], kind);
    let devices = specification["devices"].as_array().context("devices")?;
    let names: BTreeSet<_> = devices.iter().filter_map(|d| d["name"].as_str()).collect();
    assert_eq!(names, HCAS.into(), "one for each HCA");
    let own = devices
        .iter()
        .find(|d| d["name"] == name)
        .context("the one that was named")?;
    let nodes: BTreeSet<_> = own["containerEdits"]["deviceNodes"]
        .as_array()
        .context("nodes")?
        .iter()
        .filter_map(|node| node["path"].as_str())
        .collect();
    let uverbs = if name == HCAS[0] {
        "/dev/infiniband/uverbs0"
    } else {
        "/dev/infiniband/uverbs1"
    };
    assert_eq!(nodes, [uverbs, "/dev/infiniband/rdma_cm"].into());

    // A pool that is delivered otherwise has none, once the kubelet has been asked what pods still
    // hold; what others wrote stays.
    running.kubelet.remove("default/pod")?;
    running.map.change(&shared(3))?;
    running.wait(RESOURCE, 6)?;
    let started = Instant::now();
    while !specifications(&directory)?.is_empty() && started.elapsed() < 4 * WAIT_TIMEOUT {
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(specifications(&directory)?, Vec::<Value>::new());
    assert_eq!(fs::read_to_string(directory.join("vendor.json"))?, "theirs");
    Ok(())
}

/// Names of metrics in a text.
fn metrics(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for part in text.split("rdma_device_plugin_").skip(1) {
        let end = part
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(part.len());
        names.extend(part.get(..end).map(str::to_owned));
    }
    names
}

fn metrics_follow_units_pods_ports_and_files() -> Result<()> {
    let mut running = running(&shared(2), RESOURCE, 4)?;
    running.metric("build_info{version=", "").ok();
    running.metric("units{resource=\"rdma/hca\",health=\"healthy\"}", "4")?;
    running.metric("registered{resource=\"rdma/hca\"}", "1")?;
    running.metric("registrations_total{resource=\"rdma/hca\"}", "1")?;
    running.metric("excluded_hcas", "0")?;
    running.admit("pod", 3)?;
    running.metric(
        "allocations_total{resource=\"rdma/hca\",result=\"allocated\"}",
        "1",
    )?;
    running.metric(
        "allocated_units{resource=\"rdma/hca\",pod_namespace=\"default\",pod_name=\"pod\"}",
        "3",
    )?;

    // A port that goes down, and comes up again.
    let state = |text: &str| {
        let path = running
            .machine
            .tree
            .path("/sys/class/infiniband/mlx5_0/ports/1/state");
        fs::write(path, text)
    };
    state("1: DOWN\n")?;
    running
        .map
        .change(&format!("{}rescanInterval: 1s\n", shared(2)))?;
    running.metric("units{resource=\"rdma/hca\",health=\"unhealthy\"}", "2")?;
    running.metric(
        "health_transitions_total{resource=\"rdma/hca\",to=\"unhealthy\"}",
        "1",
    )?;
    let down = running.get("/metrics")?.1;
    assert!(
        down.contains("hca_unhealthy{resource=\"rdma/hca\",hca=\"0000:3b:00.0\""),
        "{down}"
    );
    state("4: ACTIVE\n")?;
    running.metric(
        "health_transitions_total{resource=\"rdma/hca\",to=\"healthy\"}",
        "1",
    )?;
    running.map.change("nonsense")?;
    running.metric("config_accepted", "0")?;
    let scans = |text: &str| -> f64 {
        let values = text
            .lines()
            .filter(|l| l.starts_with("rdma_device_plugin_scans_total"));
        values
            .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    };
    let then = scans(&down);
    running.until("/metrics", "more scans", |body| scans(body) > then)?;
    assert_eq!(running.get("/healthz")?.0, 200);
    Ok(())
}

/// What CNI programs and ports of a machine have counted, and a pool that has a lease.
fn count_something(machine: &Machine) -> Result<()> {
    let directory = machine
        .node_socket()
        .parent()
        .context("a directory")?
        .to_owned();
    fs::create_dir_all(&directory)?;
    let calls = calls::file_in(&directory, "rdma-netdev");
    let took = Duration::from_millis(20);
    calls::count(&calls, calls::Command::Add, None, took);
    calls::count(&calls, calls::Command::Add, Some(calls::Code::Policy), took);
    // Whose leases a store has is known by the node's boot.
    let boot = "/proc/sys/kernel/random/boot_id";
    machine
        .tree
        .file(boot, "6f1c1f5e-0000-4000-8000-000000000000");
    let port = "/sys/class/infiniband/mlx5_0/ports/1";
    machine.tree.file(format!("{port}/counters/link_downed"), 3);
    machine
        .tree
        .file(format!("{port}/counters/port_rcv_data"), 25);
    machine
        .tree
        .file(format!("{port}/counters/port_rcv_packets"), 7);
    machine
        .tree
        .file(format!("{port}/hw_counters/np_cnp_sent"), 3);
    let mut add = Command::new(product("rdma-ipam")?)
        .env("CNI_COMMAND", "ADD")
        .env("CNI_CONTAINERID", "c1")
        .env("CNI_IFNAME", "net1")
        .env("CNI_NETNS", "/proc/self/ns/net")
        .env("CNI_PATH", "/nonexistent")
        .env("RDMA_NETDEV_POLICY", machine.policy()?)
        .env("RDMA_HOST_ROOT", machine.tree.path("/"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    let config = r#"{"cniVersion": "1.0.0", "name": "n", "type": "x",
        "ipam": {"type": "rdma-ipam", "range": "10.44.0.0/24"}}"#;
    add.stdin
        .take()
        .context("stdin")?
        .write_all(config.as_bytes())?;
    anyhow::ensure!(add.wait()?.success(), "ADD failed");
    Ok(())
}

fn the_dashboard_and_the_docs_have_the_metrics_that_are_served() -> Result<()> {
    let machine = Machine::new()?;
    count_something(&machine)?;
    let mut running = running_on(machine, &shared(2), RESOURCE, 4)?;
    let pool = "store=\"default\",range=\"10.44.0.0/24\",network_name=\"\"";
    running.metric(&format!("ipam_pool_free_addresses{{{pool}}}"), "253.0")?;
    let add = "program=\"rdma-netdev\",command=\"ADD\"";
    running.metric(&format!("cni_call_duration_seconds_count{{{add}}}"), "2")?;
    let denied = format!("cni_failures_total{{{add},code=\"101\",reason=\"policy\"}}");
    running.metric(&denied, "1.0")?;
    let down = "port_errors_total{rdma_device=\"mlx5_0\",port=\"1\",counter=\"link_downed\"}";
    running.metric(down, "3.0")?;
    running.admit("pod", 1)?;
    running.metric(
        "allocated_units{resource=\"rdma/hca\",pod_namespace=\"default\",pod_name=\"pod\"}",
        "1",
    )?;
    let port = "/sys/class/infiniband/mlx5_0/ports/1/state";
    fs::write(running.machine.tree.path(port), "1: DOWN\n")?;
    running
        .map
        .change(&format!("{}rescanInterval: 1s\n", shared(2)))?;
    running.metric("units{resource=\"rdma/hca\",health=\"unhealthy\"}", "2")?;
    let down = running.get("/metrics")?.1;
    // Whoever draws this draws what there is.
    let served = metrics(&down);
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .with_file_name("manifests")
        .join("chart/files/dashboard.json");
    let dashboard: Value = serde_json::from_slice(&fs::read(path)?)?;
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().context("a query")?;
            asked.extend(metrics(query));
        }
    }
    // And whoever is called by an alert is called by what there is.
    let rules =
        Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("manifests/chart/files/rules.yaml");
    asked.extend(metrics(&fs::read_to_string(rules)?));
    assert!(asked.len() > 10, "{asked:?}");
    // Served once a pod was bound late (chain_shown); no pool here binds late.
    asked.remove("alignment");
    // Served while an HCA is missing.
    asked.remove("hca_missing");
    let unknown: Vec<_> = asked.difference(&served).collect();
    assert!(
        unknown.is_empty(),
        "the dashboard asks for {unknown:?}; there are {served:?}"
    );
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs/metrics.md");
    let documented = metrics(&fs::read_to_string(page)?);
    let samples: Vec<&str> = down.lines().filter(|l| !l.starts_with('#')).collect();
    let served = metrics(&samples.join("\n"));
    assert!(
        served.is_subset(&documented),
        "docs/metrics.md lacks {:?}",
        served.difference(&documented)
    );
    Ok(())
}

fn traffic_of_an_hca_names_the_pod_that_has_it() -> Result<()> {
    let machine = Machine::new()?;
    for device in ["mlx5_0", "mlx5_1"] {
        let counters = format!("/sys/class/infiniband/{device}/ports/1/counters");
        machine.tree.file(format!("{counters}/port_xmit_data"), 25);
    }
    let exclusive = shared(1).replace("mode: shared\n  shares: 1", "mode: exclusive");
    let running = running_on(machine, &exclusive, RESOURCE, 2)?;
    let lines = |body: &str, end: &str| {
        let bytes = body.lines().filter(|l| l.contains("_port_bytes_total{"));
        bytes.filter(|l| l.ends_with(end)).count()
    };
    let free = "direction=\"transmitted\"} 100.0";
    let held = "direction=\"transmitted\",pod_namespace=\"default\",pod_name=\"pod\"} 100.0";
    running.until("/metrics", "two free", |body| lines(body, free) == 2)?;
    running.admit("pod", 1)?;
    let one_of_two = |body: &str| lines(body, free) == 1 && lines(body, held) == 1;
    running.until("/metrics", "one held", one_of_two)?;
    Ok(())
}

/// Two pools that choose one HCA, of which one is exclusive: it is in the first alone,
/// and metrics and /readyz report that.
fn a_device_of_two_pools_is_reported() -> Result<()> {
    let config = format!(
        "{}- resource: rdma/nic\n  mode: exclusive\n  select: {{rdmaDevices: [mlx5_0]}}\n",
        shared(2)
    );
    let running = running(&config, RESOURCE, 4)?;
    running.metric("excluded_hcas", "1")?;
    // A pool without an HCA is registered, and is not a failure.
    let notes = running.until("/readyz", "ready", |body| !body.starts_with("not ready"))?;
    assert!(
        notes.contains("0000:3b:00.0") && notes.contains("rdma/nic"),
        "{notes}"
    );
    assert!(running.kubelet.devices("rdma/nic").is_empty());
    Ok(())
}

fn the_nodes_addresses_are_written_for_the_cni_plugin() -> Result<()> {
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    let config = machine.directory().join("config.yaml");
    fs::write(&config, shared(2))?;
    // As $(HOST_IP):9834 comes out of a manifest, on a cluster of IPv6.
    let flags = [
        "--node-addresses",
        "10.0.0.7,fd00::7",
        "--metrics-addr",
        "::1:0",
    ];
    let daemon = machine.daemon_on(&config, &flags.map(OsStr::new))?;
    kubelet
        .wait_allocatable(RESOURCE, 4, WAIT_TIMEOUT)
        .with_context(|| daemon.log())?;
    assert_eq!(
        fs::read_to_string(machine.state().join("node-addresses"))?,
        "10.0.0.7\nfd00::7\n"
    );
    Ok(())
}
