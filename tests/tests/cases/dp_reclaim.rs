//! The daemon's reclaim loop, and what `status` shows of attachments.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni_host::CniHost;
use e2e::daemon::{HCAS, Machine};
use e2e::harness::Case;
use e2e::netns::Netns;
use serde_json::{Value, json};

use super::dp_admin::{POOLS, document};

pub(crate) const CASES: &[Case] = &[
    case!(a_child_on_a_returned_netdev_makes_its_hca_unhealthy, Root),
    case!(
        attachments_are_shown_with_the_state_of_their_namespace,
        Root,
        Netns,
        Macvlan
    ),
    case!(
        attachments_and_leases_of_dead_pods_are_reclaimed,
        Root,
        Netns,
        Macvlan
    ),
];

/// Two pods with a macvlan and an address each, attached long ago: `dead` and `alive`.
struct Pods {
    host: CniHost,
    network: String,
    dead: Netns,
    alive: Netns,
}

impl Pods {
    fn new() -> Result<Self> {
        let host = CniHost::new()?;
        let config = host.config(&json!({
            "attach": "macvlan", "master": "nic0",
            "ipam": host.own_ipam("10.9.0.0/24", "10.9.0.10", &json!({})),
        }));
        let (dead, alive) = (host.pod()?, host.pod()?);
        let pods = Self {
            host,
            network: config.to_string(),
            dead,
            alive,
        };
        for (pod, container) in [(&pods.dead, "dead"), (&pods.alive, "alive")] {
            let arguments = format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={container}");
            let call = pods.host.call(pod, container, "net1");
            let call = call.env("CNI_ARGS", arguments);
            call.run("ADD", pods.network.as_bytes())?.success()?;
        }
        for entry in fs::read_dir(pods.host.state().join("attachments"))? {
            let path = entry?.path();
            let mut record: Value = serde_json::from_slice(&fs::read(&path)?)?;
            record["created"] = json!(1);
            fs::write(&path, record.to_string())?;
        }
        Ok(pods)
    }

    fn policy(&self) -> PathBuf {
        self.host.directory().join("policy.json")
    }

    fn leases(&self) -> Result<Vec<Value>> {
        let mut command = self.host.netns.command(product("rdmactl")?);
        command.args(["addresses", "--json", "--policy"]);
        let answer = document(&command.arg(self.policy()).output()?)?;
        Ok(answer["leases"].as_array().cloned().unwrap_or_default())
    }

    fn pods(&self, policy: &Path) -> Result<Value> {
        let mut command = self.host.netns.command(product("rdmactl")?);
        command.args([
            "pods",
            "--json",
            "--node-socket",
            "/none/node.sock",
            "--policy",
        ]);
        document(&command.arg(policy).output()?)
    }

    fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(
            self.host.directory().join("daemon.log"),
        )?)
    }

    /// A daemon that reclaims each second.
    fn daemon(&self, policy: &Path) -> Result<Killed> {
        let directory = |name: &str| self.host.directory().join(name);
        fs::write(directory("config.yaml"), POOLS)?;
        let kubelet = directory("kubelet");
        fs::create_dir(&kubelet)?;
        let mut daemon = self.host.netns.command(product("rdma-device-plugin")?);
        daemon.args(["run", "--reclaim-interval", "1"]);
        daemon.arg("--config-file").arg(directory("config.yaml"));
        daemon.arg("--policy").arg(policy);
        daemon.arg("--device-plugin-dir").arg(&kubelet);
        daemon.arg("--kubelet-root-dir").arg(&kubelet);
        daemon
            .arg("--node-socket")
            .arg(directory("rdma-netdev/node.sock"));
        let log = fs::File::create(directory("daemon.log"))?;
        Ok(Killed(daemon.stdout(Stdio::null()).stderr(log).spawn()?))
    }

    /// Waits until the attachment of the dead pod is undone; that of the living one stays.
    fn reclaimed(&self) -> Result<()> {
        let (mut attachments, mut leases, mut log) = (Vec::new(), Vec::new(), String::new());
        for _ in 0..200 {
            thread::sleep(Duration::from_millis(100));
            let pods = self.pods(&self.policy())?;
            attachments = pods["pods"].as_array().cloned().unwrap_or_default();
            leases = self.leases()?;
            // The daemon says it once it is done.
            log = self.log()?;
            if attachments.len() == 1 && leases.len() == 1 && log.contains("attachment undone") {
                break;
            }
        }
        ensure!(
            attachments.len() == 1 && attachments[0]["pod"] == "default/alive",
            "{attachments:?}; {log}"
        );
        ensure!(log.contains("attachment undone"), "{log}");
        assert_eq!(leases.len(), 1);
        assert!(
            self.alive.ip("link show net1").is_ok(),
            "a living pod lost its interface"
        );
        Ok(())
    }

    fn end(&self) -> Result<()> {
        let call = self.host.call(&self.alive, "alive", "net1");
        call.run("DEL", self.network.as_bytes())?.success()?;
        Ok(())
    }
}

fn attachments_are_shown_with_the_state_of_their_namespace() -> Result<()> {
    let pods = Pods::new()?;
    let answer = pods.pods(&pods.policy())?;
    let all = answer["pods"].as_array().context("no pods")?;
    assert_eq!(all.len(), 2, "{answer}");
    let dead = all
        .iter()
        .find(|one| one["pod"] == "default/dead")
        .context("not there")?;
    assert_eq!(dead["addresses"], json!(["10.9.0.10/24"]), "{answer}");
    assert_eq!(
        (&dead["netnsState"], &dead["netdev"]),
        (&json!("alive"), &json!("nic0"))
    );
    pods.dead.delete()?;
    let gone = pods.pods(&pods.policy())?;
    assert!(gone["pods"].to_string().contains("\"gone\""), "{gone}");
    pods.end()
}

fn attachments_and_leases_of_dead_pods_are_reclaimed() -> Result<()> {
    let pods = Pods::new()?;
    pods.dead.delete()?;
    let mut daemon = pods.daemon(&pods.policy())?;
    pods.reclaimed()?;
    daemon.end();
    pods.end()
}

/// The record is that of a DEL which found the child; reclaim removes it once the child is gone.
fn a_child_on_a_returned_netdev_makes_its_hca_unhealthy() -> Result<()> {
    const RESOURCE: &str = "rdma/nic";
    const EXCLUSIVE: &str = "version: 1\npools:\n- resource: rdma/nic\n  mode: exclusive\n  select: {linkTypes: [ether]}\n";
    let machine = Machine::new()?;
    let kubelet = machine.kubelet()?;
    let config = machine.directory().join("config");
    fs::write(&config, EXCLUSIVE)?;
    let daemon = machine.daemon_on(&config, &["--reclaim-interval", "1"].map(OsStr::new))?;
    let timeout = Duration::from_secs(40);
    kubelet.wait_allocatable(RESOURCE, 2, timeout)?;
    let record = json!({
        "version": 1, "network": "rail0", "containerId": "c1", "ifname": "net1", "pod": "ml/a",
        "created": 1, "boot": "",
        "netns": {"path": "/proc/1/ns/net", "device": 4, "inode": 5},
        "parts": [{"move": {
            "interface": {"name": "net1"}, "hcas": [HCAS[1]], "returned": "child",
            "host": {
                "identity": {"index": 5}, "name": "rdma1", "takenAt": 1,
                "state": {"mtu": 1500, "txQueueLength": 1000, "flags": 0, "families": [], "config": {}},
            },
        }}],
    });
    let directory = machine.state().join("attachments");
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(&directory)?;
    let file = directory.join("rail0@c1@net1");
    fs::write(&file, record.to_string())?;
    kubelet.wait_allocatable(RESOURCE, 1, timeout)?;
    let log = daemon.log();
    ensure!(
        log.contains("rdma1 carries a macvlan or ipvlan") && log.contains("pod ml/a"),
        "{log}"
    );
    // A journal that cannot be read says nothing of children.
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777))?;
    let unread = "cannot read the journal of attachments";
    let started = Instant::now();
    while daemon.log().matches(unread).count() < 2 {
        ensure!(started.elapsed() < timeout, "{}", daemon.log());
        thread::sleep(Duration::from_millis(100));
    }
    kubelet.wait_allocatable(RESOURCE, 1, timeout)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
    fs::remove_file(&file)?;
    kubelet.wait_allocatable(RESOURCE, 2, timeout)?;
    drop(daemon);
    Ok(())
}

/// A process that does not outlive its case.
struct Killed(std::process::Child);

impl Killed {
    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        self.end();
    }
}
