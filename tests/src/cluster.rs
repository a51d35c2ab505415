//! A cluster of brokers on a real API server: each node has a policy with a Kubernetes store, a
//! state directory, leases of its own, and `rdma-ipam` called on them.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use node_wire::{BlockNeed, ClientError};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::ApiServer;
use crate::bin_under_test::product;
use crate::cni::{Answer, answer};
use crate::host_root;

/// The namespace of the blocks.
pub const NAMESPACE: &str = "rdma-test";
/// How long a broker may take until it listens, on a machine that does much else.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
const READY_INTERVAL: Duration = Duration::from_millis(50);
/// As an ADD's, and some more for a machine that does much else.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// An API server that serves blocks.
///
/// # Errors
/// As [`ApiServer::start`].
pub fn api_server() -> Result<ApiServer> {
    let server = ApiServer::start()?;
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/base/rdma-netdev.yaml");
    let base = fs::read_to_string(base)?;
    let objects = base.split("\n---\n");
    for crd in objects.filter(|object| object.contains("kind: CustomResourceDefinition\n")) {
        server.apply_crd(crd)?;
    }
    Ok(server)
}

/// All `AddressBlock`s.
///
/// # Errors
/// The server does not answer.
pub fn blocks(server: &ApiServer) -> Result<Vec<Value>> {
    let path = format!("/apis/rdma-netdev.io/v1alpha1/namespaces/{NAMESPACE}/addressblocks");
    let list = server.client().get(&path)?.expect_success()?;
    let items = list.get("items").and_then(Value::as_array);
    Ok(items.context("items")?.clone())
}

/// The blocks that the API says a node has, sorted.
///
/// # Errors
/// As [`blocks`].
pub fn blocks_of(server: &ApiServer, node: &str) -> Result<Vec<String>> {
    let mut found: Vec<String> = blocks(server)?
        .iter()
        .filter(|block| block.pointer("/spec/node").is_some_and(|of| of == node))
        .filter_map(|block| Some(block.pointer("/spec/block")?.as_str()?.to_owned()))
        .collect();
    found.sort();
    Ok(found)
}

/// A node with its broker.
#[derive(Debug)]
pub struct BrokerNode {
    name: String,
    kubeconfig: PathBuf,
    /// Where the broker serves its metrics, once it is started.
    metrics: Option<SocketAddr>,
    place: TempDir,
    broker: Option<Child>,
}

impl Drop for BrokerNode {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

impl BrokerNode {
    /// A node of the cluster, whose broker is not started. `store` has further keys of its store.
    ///
    /// # Errors
    /// The Node cannot be made, or a file.
    pub fn new(server: &ApiServer, name: &str, store: &Value) -> Result<Self> {
        let place = TempDir::new()?;
        let store = cluster_store(store);
        if server.node_uid(name)?.is_none() {
            server.add_node(name)?;
        }
        let node = Self {
            name: name.to_owned(),
            kubeconfig: server.kubeconfig().to_owned(),
            metrics: None,
            broker: None,
            place,
        };
        fs::DirBuilder::new().mode(0o700).create(node.path("run"))?;
        host_root::make(&node.path("root"))?;
        std::os::unix::fs::symlink(node.path("run"), node.path("root/run/rdma-netdev"))?;
        node.write_policy(&store)?;
        Ok(node)
    }

    /// Gives the node's store other keys, for its next calls and its broker's next start.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_store(&self, store: &Value) -> Result<()> {
        self.write_policy(&cluster_store(store))
    }

    fn write_policy(&self, store: &Value) -> Result<()> {
        let policy = json!({
            "node": self.name,
            "stateDir": self.path("state"),
            "stores": {"default": store},
            "ipam": {"cooldown": "1s"},
        });
        fs::write(self.path("policy.json"), policy.to_string())?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Where its broker listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path("run/ipam.sock")
    }

    /// Starts the broker, and waits until it listens.
    ///
    /// # Errors
    /// It is not built, or it ends, or does not listen in time; the message has its log.
    pub fn start(&mut self) -> Result<()> {
        let kubeconfig = self.kubeconfig.clone();
        self.start_as(&kubeconfig)
    }

    /// The same with another kubeconfig.
    ///
    /// # Errors
    /// As [`BrokerNode::start`].
    pub fn start_as(&mut self, kubeconfig: &Path) -> Result<()> {
        ensure!(self.broker.is_none(), "the broker runs already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))?;
        let _ = fs::remove_file(self.socket());
        // Free a moment ago.
        let metrics = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        self.metrics = Some(metrics);
        let mut command = Command::new(product("rdma-ipam-broker")?);
        command.env_clear();
        let child = command
            .env("RDMA_HOST_ROOT", self.path("root"))
            .arg("--policy")
            .arg(self.path("policy.json"))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--namespace")
            .arg(NAMESPACE)
            .arg("--socket")
            .arg(self.socket())
            .arg(format!("--metrics-addr={metrics}"))
            .args(["--rest=1", "--settle=5"])
            .arg("--log-level=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let child = self.broker.insert(child);
        let started = Instant::now();
        while !self.place.path().join("run/ipam.sock").exists() {
            if let Some(status) = child.try_wait()? {
                let log = fs::read_to_string(self.place.path().join("log"))?;
                bail!("the broker ended with {status}: {log}");
            }
            if started.elapsed() > READY_TIMEOUT {
                bail!("the broker does not listen: {}", self.log());
            }
            std::thread::sleep(READY_INTERVAL);
        }
        Ok(())
    }

    /// Ends the broker as a DaemonSet does.
    ///
    /// # Errors
    /// It does not run, or ends with a failure.
    pub fn stop(&mut self) -> Result<()> {
        let mut broker = self.broker.take().context("the broker does not run")?;
        kill(pid(&broker)?, Signal::SIGTERM)?;
        let status = broker.wait()?;
        ensure!(
            status.success(),
            "the broker ended with {status}: {}",
            self.log()
        );
        Ok(())
    }

    /// Kills the broker, if it runs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut broker) = self.broker.take() {
            kill(pid(&broker)?, Signal::SIGKILL)?;
            broker.wait()?;
        }
        Ok(())
    }

    /// `rdmactl addresses` on this node.
    ///
    /// # Errors
    /// It is not built, or could not be started.
    pub fn addresses(&self, arguments: &[&str]) -> Result<Answer> {
        let mut command = Command::new(product("rdmactl")?);
        command
            .env_clear()
            .env("RDMA_HOST_ROOT", self.path("root"))
            .arg("addresses")
            .args(arguments)
            .arg("--policy")
            .arg(self.path("policy.json"));
        answer(&mut command, b"")
    }

    /// `rdmactl blocks` on this node.
    ///
    /// # Errors
    /// It is not built, or could not be started.
    pub fn tool(&self, arguments: &[&str]) -> Result<Answer> {
        self.tool_with(&self.kubeconfig, arguments)
    }

    /// The same with another kubeconfig.
    ///
    /// # Errors
    /// As [`BrokerNode::tool`].
    pub fn tool_with(&self, kubeconfig: &Path, arguments: &[&str]) -> Result<Answer> {
        let mut command = Command::new(product("rdmactl")?);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .args(["blocks", "--namespace", NAMESPACE, "--kubectl"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("api-server/kubectl"))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(arguments)
            .arg("--policy")
            .arg(self.path("policy.json"));
        answer(&mut command, b"")
    }

    /// The broker's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// The sum of a metric of the broker over its address spaces; None before it serves one.
    ///
    /// # Errors
    /// The broker was not started, or its answer is not as documented.
    pub fn metric(&self, name: &str) -> Result<Option<f64>> {
        let address = self.metrics.context("the broker was not started")?;
        let Ok(mut stream) = TcpStream::connect(address) else {
            return Ok(None);
        };
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let start = format!("rdma_ipam_broker_{name}{{");
        let lines = answer.lines().filter(|line| line.starts_with(&start));
        let values = lines.filter_map(|line| line.split(' ').next_back());
        let values: Vec<f64> = values.map(str::parse).collect::<Result<_, _>>()?;
        Ok((!values.is_empty()).then(|| values.into_iter().sum()))
    }

    /// Asks the broker for so many addresses of a range, as an ADD does.
    ///
    /// # Errors
    /// Those of the client.
    pub fn ask(&self, range: &str, count: u32) -> Result<Vec<String>, ClientError> {
        self.ask_for(&need(range, count))
    }

    /// Asks the broker.
    ///
    /// # Errors
    /// Those of the client.
    pub fn ask_for(&self, need: &BlockNeed) -> Result<Vec<String>, ClientError> {
        node_wire::ask(&self.socket(), need, ASK_TIMEOUT).map(|granted| granted.blocks)
    }

    /// The blocks that the node's CNI programs go by, sorted.
    ///
    /// # Errors
    /// The file is not as documented.
    pub fn granted(&self) -> Result<Vec<String>> {
        let path = self.path("state/blocks/default/default");
        let Ok(text) = fs::read(&path) else {
            return Ok(Vec::new());
        };
        let grants: Value = serde_json::from_slice(&text)?;
        let blocks = grants.get("blocks").and_then(Value::as_array);
        let blocks = blocks.context("blocks")?;
        let mut blocks: Vec<String> = blocks
            .iter()
            .filter_map(|grant| Some(grant.get("block")?.as_str()?.to_owned()))
            .collect();
        blocks.sort();
        Ok(blocks)
    }

    /// A call of `rdma-ipam` that asks this node's broker: in a mount namespace where its socket is
    /// at the usual place.
    ///
    /// # Errors
    /// It could not be started.
    pub fn call(&self, verb: &str, container: &str, range: &str) -> Result<Answer> {
        let ipam = json!({"type": "rdma-ipam", "range": range});
        self.call_as(verb, container, container, &network(&ipam))
    }

    /// The same for a container of this pod, with any configuration.
    ///
    /// # Errors
    /// It could not be started.
    pub fn call_as(
        &self,
        verb: &str,
        container: &str,
        pod: &str,
        config: &Value,
    ) -> Result<Answer> {
        let script = "mount -t tmpfs none /run && mkdir -m 700 /run/rdma-netdev && \
                      mount --bind \"$1\" /run/rdma-netdev && \
                      exec \"$2\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(self.path("run"))
            .arg(product("rdma-ipam")?)
            .env("RDMA_NETDEV_POLICY", self.path("policy.json"))
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "net1")
            .env("CNI_NETNS", "/run/netns/none")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}"),
            );
        answer(&mut command, config.to_string().as_bytes())
    }

    /// ADD; the address without prefix length.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn add(&self, container: &str, range: &str) -> Result<String> {
        let addresses = crate::lease_store::addresses(&self.call("ADD", container, range)?)?;
        addresses.into_iter().next().context("an address")
    }

    /// DEL.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn del(&self, container: &str, range: &str) -> Result<()> {
        self.call("DEL", container, range)?.success().map(drop)
    }
}

/// A store of the cluster, with further keys.
fn cluster_store(keys: &Value) -> Value {
    let mut store = json!({"type": "kubernetes"});
    if let (Some(store), Some(keys)) = (store.as_object_mut(), keys.as_object()) {
        store.extend(keys.clone());
    }
    store
}

/// A network configuration with this `ipam`.
#[must_use]
pub fn network(ipam: &Value) -> Value {
    json!({"cniVersion": "1.1.0", "name": "rail", "type": "macvlan", "ipam": ipam})
}

fn pid(child: &Child) -> Result<Pid> {
    Ok(Pid::from_raw(child.id().try_into()?))
}

/// The question for so many addresses of an IPv4 range of /24 or longer.
#[must_use]
pub fn need(range: &str, count: u32) -> BlockNeed {
    let (network, prefix) = range.split_once('/').unwrap_or((range, "24"));
    let first = network
        .parse()
        .map_or(0, |first: std::net::Ipv4Addr| u32::from(first));
    let size = 1u32 << (32 - prefix.parse().unwrap_or(24u32).clamp(1, 31));
    let address = |offset: u32| std::net::Ipv4Addr::from(first + offset).into();
    BlockNeed {
        store: "default".to_owned(),
        network_name: None,
        range: range.to_owned(),
        spans: vec![(address(1), address(size - 2))],
        per_node: None,
        address: None,
        single: false,
        count,
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
