//! A cluster of agents on a real API server: each node has a policy with a Kubernetes store, a
//! state directory, leases of its own, and `rdma-ipam` called on them.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use node_wire::{ClientError, Room, RoomMade, RoomNeed, RoomQuestion};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::{ApiServer, Patch};
use crate::bin_under_test::product;
use crate::cni::{Answer, answer};
use crate::daemon::page;
use crate::host_root;

/// The path of all documents.
pub const SUBNETS: &str = "/apis/rdma-netdev.io/v1alpha1/addresssubnets";
/// How long an agent may take until it listens, on a machine that does much else.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const READY_INTERVAL: Duration = Duration::from_millis(50);
/// How long an ADD is made again and again.
const ADD_TIMEOUT: Duration = Duration::from_secs(120);
const ADD_INTERVAL: Duration = Duration::from_millis(300);

/// An API server that serves documents of subnets.
///
/// # Errors
/// As [`ApiServer::start`].
pub fn api_server() -> Result<ApiServer> {
    let server = ApiServer::start()?;
    serve_subnets(&server)?;
    Ok(server)
}

/// Has an API server serve them.
///
/// # Errors
/// It refuses.
pub fn serve_subnets(server: &ApiServer) -> Result<()> {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/base/rdma-netdev.yaml");
    let base = fs::read_to_string(base)?;
    let objects = base.split("\n---\n");
    for crd in objects.filter(|object| object.contains("kind: CustomResourceDefinition\n")) {
        server.apply_crd(crd)?;
    }
    Ok(())
}

/// All documents.
///
/// # Errors
/// The server does not answer.
pub fn subnets(server: &ApiServer) -> Result<Vec<Value>> {
    let list = server.client().get(SUBNETS)?.expect_success()?;
    let items = list.get("items").and_then(Value::as_array);
    Ok(items.context("items")?.clone())
}

/// All parts, with their CIDRs, sorted.
///
/// # Errors
/// As [`subnets`].
pub fn parts(server: &ApiServer) -> Result<Vec<(String, Value)>> {
    let subnets = subnets(server)?;
    let of = |subnet: &Value| {
        let parts = subnet.pointer("/spec/parts").and_then(Value::as_object);
        parts.cloned().unwrap_or_default()
    };
    let mut found: Vec<(String, Value)> = subnets.iter().flat_map(of).collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(found)
}

/// The parts that the API says a node has, sorted.
///
/// # Errors
/// As [`subnets`].
pub fn parts_of(server: &ApiServer, node: &str) -> Result<Vec<String>> {
    let is_its = |part: &Value| part.get("node").is_some_and(|of| of == node);
    let parts = parts(server)?.into_iter();
    Ok(parts
        .filter(|(_, part)| is_its(part))
        .map(|(cidr, _)| cidr)
        .collect())
}

/// The name of the document of an IPv4 subnet of store default.
#[must_use]
pub fn document_name(first: &str) -> String {
    format!("{first}-{:016x}", ipam::space::hash("default"))
}

/// Changes parts of a document behind the agents' backs.
///
/// # Errors
/// The server refuses.
pub fn write_parts(server: &ApiServer, first: &str, parts: &Value) -> Result<Value> {
    let path = format!("{SUBNETS}/{}", document_name(first));
    let patch = json!({"spec": {"parts": parts}});
    server
        .client()
        .patch(&path, Patch::Merge, &patch)?
        .expect_success()
}

/// A node with its agent.
#[derive(Debug)]
pub struct AgentNode {
    name: String,
    kubeconfig: PathBuf,
    /// The socket of the daemon whose state the agent shows.
    daemon: Option<PathBuf>,
    /// Where the agent serves its pages, once it is started.
    pages: Option<SocketAddr>,
    place: TempDir,
    agent: Option<Child>,
}

impl Drop for AgentNode {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

impl AgentNode {
    /// A node of the cluster, whose agent is not started.
    ///
    /// # Errors
    /// The Node cannot be made, or a file.
    pub fn new(server: &ApiServer, name: &str) -> Result<Self> {
        if server.node_uid(name)?.is_none() {
            server.add_node(name)?;
        }
        let node = Self {
            name: name.to_owned(),
            kubeconfig: server.kubeconfig().to_owned(),
            daemon: None,
            pages: None,
            agent: None,
            // On a disk, as a node's state is.
            place: tempfile::tempdir_in("/var/tmp")?,
        };
        host_root::make(&node.root())?;
        fs::create_dir_all(node.path("root/run/rdma-netdev"))?;
        node.write_policy()?;
        Ok(node)
    }

    fn write_policy(&self) -> Result<()> {
        let policy = json!({
            "node": self.name,
            "stateDir": self.path("state"),
            "stores": {"default": {"type": "kubernetes"}},
            "ipam": {"cooldown": "0s"},
        });
        Ok(fs::write(self.policy(), policy.to_string())?)
    }

    /// A node whose disk is a copy of another one's.
    ///
    /// # Errors
    /// As [`AgentNode::new`].
    pub fn with_disk_of(server: &ApiServer, name: &str, other: &Self) -> Result<Self> {
        let node = Self::new(server, name)?;
        fs::create_dir_all(node.path("state/owned"))?;
        for entry in fs::read_dir(other.path("state/owned"))? {
            let entry = entry?;
            fs::copy(
                entry.path(),
                node.path("state/owned").join(entry.file_name()),
            )?;
        }
        Ok(node)
    }

    /// The machine, whose agent does not run, has another name from now on.
    ///
    /// # Errors
    /// The Node cannot be made, or the policy not be written.
    pub fn rename(&mut self, server: &ApiServer, name: &str) -> Result<()> {
        server.add_node(name)?;
        name.clone_into(&mut self.name);
        self.write_policy()
    }

    /// The same, and its agent is started.
    ///
    /// # Errors
    /// As [`AgentNode::new`] and [`AgentNode::start`].
    pub fn started(server: &ApiServer, name: &str) -> Result<Self> {
        let mut node = Self::new(server, name)?;
        node.start()?;
        Ok(node)
    }

    /// The server that later starts of the agent use.
    pub fn set_kubeconfig(&mut self, path: &Path) {
        path.clone_into(&mut self.kubeconfig);
    }

    /// The socket of the daemon whose state later starts of the agent show.
    pub fn set_daemon(&mut self, socket: &Path) {
        self.daemon = Some(socket.to_owned());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The directory that stands for the root of the node.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.path("root")
    }

    /// Directory of node-feature-discovery, which is not made.
    #[must_use]
    pub fn features(&self) -> PathBuf {
        self.path("features.d")
    }

    #[must_use]
    pub fn policy(&self) -> PathBuf {
        self.path("policy.json")
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        self.path("root/run/rdma-netdev/agent.sock")
    }

    /// Starts the agent, and waits until it listens.
    ///
    /// # Errors
    /// It is not built, or it ends, or does not listen in time; the message has its log.
    pub fn start(&mut self) -> Result<()> {
        ensure!(self.agent.is_none(), "the agent runs already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))?;
        let _ = fs::remove_file(self.socket());
        // Free a moment ago.
        let pages = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        self.pages = Some(pages);
        let mut command = Command::new(product("rdma-agent")?);
        let child = command
            .env_clear()
            .arg("--policy")
            .arg(self.policy())
            .arg("--host-root")
            .arg(self.root())
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--socket")
            .arg(self.socket())
            .arg(format!("--metrics-addr={pages}"))
            .args(["--grace=1", "--log-level=debug"])
            .args(self.daemon.iter().flat_map(|_| {
                [
                    "--rdma-node",
                    "--node-condition",
                    "--taint-missing",
                    "--node-labels",
                ]
            }))
            .arg("--features-dir")
            .arg(self.features())
            .args(
                self.daemon
                    .iter()
                    .flat_map(|socket| [Path::new("--node-socket"), socket]),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.agent = Some(child);
        let started = Instant::now();
        while !self.socket().exists() {
            if let Some(status) = self
                .agent
                .as_mut()
                .map(Child::try_wait)
                .transpose()?
                .flatten()
            {
                self.agent = None;
                bail!("the agent ended with {status}: {}", self.log());
            }
            if started.elapsed() > READY_TIMEOUT {
                bail!("the agent does not listen: {}", self.log());
            }
            std::thread::sleep(READY_INTERVAL);
        }
        Ok(())
    }

    /// Ends the agent as a DaemonSet does.
    ///
    /// # Errors
    /// It does not run, or ends with a failure.
    pub fn stop(&mut self) -> Result<()> {
        let mut agent = self.agent.take().context("the agent does not run")?;
        kill(pid(&agent)?, Signal::SIGTERM)?;
        let status = agent.wait()?;
        ensure!(
            status.success(),
            "the agent ended with {status}: {}",
            self.log()
        );
        Ok(())
    }

    /// Kills the agent, if it runs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut agent) = self.agent.take() {
            kill(pid(&agent)?, Signal::SIGKILL)?;
            agent.wait()?;
        }
        Ok(())
    }

    /// The machine is off, and starts again: no agent runs yet, no pod, and `/run` is empty.
    ///
    /// # Errors
    /// A file cannot be changed.
    pub fn reboot(&mut self) -> Result<()> {
        self.kill()?;
        let proc = self.path("root/proc");
        match fs::remove_file(&proc) {
            Ok(()) => {
                fs::create_dir_all(proc.join("sys/kernel/random"))?;
                symlink("/proc/self", proc.join("self"))?;
            }
            // Not the first reboot.
            Err(_) => ensure!(proc.is_dir(), "no {}", proc.display()),
        }
        let boot = format!("{:032x}\n", u128::from(node::random::random64()));
        fs::write(proc.join("sys/kernel/random/boot_id"), boot)?;
        let run = self.path("root/run/rdma-netdev");
        fs::remove_dir_all(&run)?;
        Ok(fs::create_dir(run)?)
    }

    /// The disk is lost, as of a machine that is installed anew; of a boot before.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn reinstall(&mut self) -> Result<()> {
        self.reboot()?;
        Ok(fs::remove_dir_all(self.path("state"))?)
    }

    /// `rdmactl addresses` on this node.
    ///
    /// # Errors
    /// It is not built, or could not be started.
    pub fn addresses(&self, arguments: &[&str]) -> Result<Answer> {
        let mut command = Command::new(product("rdmactl")?);
        command
            .env_clear()
            .env("RDMA_HOST_ROOT", self.root())
            .arg("addresses")
            .args(arguments)
            .arg("--policy")
            .arg(self.policy());
        answer(&mut command, b"")
    }

    /// The agent's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// A page of the agent: its status and text.
    ///
    /// # Errors
    /// The agent was not started, or does not answer.
    pub fn page(&self, path: &str) -> Result<(u16, String)> {
        let address = self.pages.context("the agent was not started")?;
        page(address, path)
    }

    /// The sum of a metric of the agent over its labels.
    ///
    /// # Errors
    /// It has no such metric.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let (_, text) = self.page("/metrics")?;
        let starts = [
            format!("rdma_agent_{name}{{"),
            format!("rdma_agent_{name} "),
        ];
        let lines = text.lines();
        let lines = lines.filter(|line| starts.iter().any(|start| line.starts_with(start)));
        let values = lines.filter_map(|line| line.split(' ').next_back());
        let values: Vec<f64> = values.map(str::parse).collect::<Result<_, _>>()?;
        ensure!(!values.is_empty(), "no {name}: {text}");
        Ok(values.into_iter().sum())
    }

    /// Asks the agent for room, as an ADD does.
    ///
    /// # Errors
    /// Those of the client.
    pub fn ask(&self, range: &str, room: Room) -> Result<RoomMade, ClientError> {
        let limit = Duration::from_secs(5);
        let question = RoomQuestion {
            within_ms: 5000,
            needs: vec![need(range, room)],
        };
        node_wire::ask(&self.socket(), &question, limit)
    }

    /// The parts that the node's CNI programs go by, sorted.
    ///
    /// # Errors
    /// The file is not as documented.
    pub fn owned(&self) -> Result<Vec<String>> {
        let Ok(text) = fs::read(self.path("state/owned/default")) else {
            return Ok(Vec::new());
        };
        let owned: Value = serde_json::from_slice(&text)?;
        let parts = owned
            .get("parts")
            .and_then(Value::as_object)
            .context("parts")?;
        let mut parts: Vec<String> = parts.keys().cloned().collect();
        parts.sort();
        Ok(parts)
    }

    /// A call of `rdma-ipam` for the container of a pod of that name.
    ///
    /// # Errors
    /// It could not be started.
    pub fn call(&self, verb: &str, container: &str, config: &Value) -> Result<Answer> {
        self.call_with(verb, container, config, "")
    }

    /// The same with more of `CNI_ARGS`, as `IP=10.0.0.7`.
    ///
    /// # Errors
    /// It could not be started.
    pub fn call_with(
        &self,
        verb: &str,
        container: &str,
        config: &Value,
        arguments: &str,
    ) -> Result<Answer> {
        let pod = format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={container}");
        let mut command = Command::new(product("rdma-ipam")?);
        command
            .env_clear()
            .env("RDMA_NETDEV_POLICY", self.policy())
            .env("RDMA_HOST_ROOT", self.root())
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "net1")
            .env("CNI_NETNS", "/run/netns/none")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", format!("IgnoreUnknown=1;{pod};{arguments}"));
        answer(&mut command, config.to_string().as_bytes())
    }

    /// ADD from a range; the address without prefix length.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn add(&self, container: &str, range: &str) -> Result<String> {
        let answer = self.call("ADD", container, &network(range))?;
        let addresses = crate::lease_store::addresses(&answer)?;
        addresses.into_iter().next().context("an address")
    }

    /// ADD as a kubelet has it made again and again.
    ///
    /// # Errors
    /// The plugin refused for long.
    pub fn add_in_the_end(&self, container: &str, range: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            let added = self.add(container, range);
            if added.is_ok() || begun.elapsed() > ADD_TIMEOUT {
                return added.with_context(|| self.log());
            }
            std::thread::sleep(ADD_INTERVAL);
        }
    }

    /// Code and message of an ADD that is refused.
    ///
    /// # Errors
    /// It is not.
    pub fn refusal(&self, container: &str, range: &str) -> Result<(u64, String)> {
        self.call("ADD", container, &network(range))?.refusal()
    }

    /// DEL.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn del(&self, container: &str, range: &str) -> Result<()> {
        self.call("DEL", container, &network(range))?
            .success()
            .map(drop)
    }
}

/// A network configuration that leases from a range.
#[must_use]
pub fn network(range: &str) -> Value {
    network_with(&json!({"type": "rdma-ipam", "range": range}))
}

/// A network configuration with this `ipam`.
#[must_use]
pub fn network_with(ipam: &Value) -> Value {
    json!({"cniVersion": "1.1.0", "name": "rail", "type": "macvlan", "ipam": ipam})
}

fn pid(child: &Child) -> Result<Pid> {
    Ok(Pid::from_raw(child.id().try_into()?))
}

/// What is missing of an IPv4 range of /8 or longer.
#[must_use]
pub fn need(range: &str, room: Room) -> RoomNeed {
    let (network, prefix) = range.split_once('/').unwrap_or((range, "24"));
    let first = network
        .parse()
        .map_or(0, |first: std::net::Ipv4Addr| u32::from(first));
    let size = 1u32 << (32 - prefix.parse().unwrap_or(24u32).clamp(8, 31));
    let address = |offset: u32| std::net::Ipv4Addr::from(first + offset).into();
    RoomNeed {
        store: "default".to_owned(),
        network_name: None,
        range: range.to_owned(),
        spans: vec![(address(1), address(size.max(3) - 2))],
        room,
    }
}

/// Waits until something is so.
///
/// # Errors
/// It is not so in time, or cannot be found out.
pub fn eventually(
    what: &str,
    limit: Duration,
    mut check: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !check()? {
        ensure!(started.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
