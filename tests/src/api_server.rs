//! A real API server of Kubernetes on a real etcd, without a cluster.
//!
//! `tests/api-server/build` makes both programs; its `server/main.go` says what is served: custom
//! resources and core/v1 Nodes, by Kubernetes' own packages. Every server has a loopback address
//! of its own, so that it keeps its ports when it is restarted.
//!
//! - [`ApiServer`]: start, kill and restart either program; certificates; etcd's compaction;
//! - [`Client`]: requests, by `curl`: no TLS library is among the dependencies;
//! - [`ApiServer::add_node`] and its like: what happens to the Nodes of a cluster.
#![expect(
    clippy::indexing_slicing,
    reason = "a JSON value answers null for a key that it does not have"
)]

mod certificates;
mod client;
mod node;
mod process;

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use certificates::{Authority, Identity};
pub use client::{Client, Patch, Response};
use process::Process;

/// How long either program may take until it answers, on a machine that does much else.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// How often it is asked.
const READY_INTERVAL: Duration = Duration::from_millis(50);
/// Ports on the server's own address.
const API_PORT: u16 = 6443;
const ETCD_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;

/// The two programs, running; dropping it kills them and removes their data.
#[derive(Debug)]
pub struct ApiServer {
    programs: PathBuf,
    address: Ipv4Addr,
    authority: Authority,
    admin: Client,
    kubeconfig: PathBuf,
    etcd: Option<Process>,
    server: Option<Process>,
    /// Last, so that it is removed after those who write to it have ended.
    directory: TempDir,
}

/// The directory of `api-server` and `etcd`, made from the sources as they are now.
///
/// # Errors
/// They were not built, or not from these sources; the message says how to build them.
pub fn programs() -> Result<PathBuf> {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("api-server/build");
    let output = Command::new(&build)
        .arg("--find")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", build.display()))?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

impl ApiServer {
    /// Starts both as in a cluster, and waits until they are ready.
    ///
    /// # Errors
    /// They are not built, `openssl` or `curl` is missing, or one of them ended or is not ready
    /// in time; the message has the end of its log.
    pub fn start() -> Result<Self> {
        let programs = programs()?;
        let directory = tempfile::Builder::new().prefix("api-server-").tempdir()?;
        let address = free_address()?;
        let authority = Authority::create(directory.path())?;
        authority.issue(&Identity::Server(address))?;
        let admin = Identity::User {
            name: "admin",
            groups: &["system:masters"],
        };
        let admin = authority.issue(&admin)?;
        let url = format!("https://{address}:{API_PORT}");
        let mut started = Self {
            admin: Client::new(&url, &authority.certificate(), Some(&admin)),
            kubeconfig: admin.with_extension("kubeconfig"),
            programs,
            address,
            authority,
            etcd: None,
            server: None,
            directory,
        };
        started.write_kubeconfig(&started.kubeconfig, &admin)?;
        started.start_etcd()?;
        started.start_api_server()?;
        Ok(started)
    }

    /// A kubeconfig file with a client certificate of the group `system:masters`.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A kubeconfig file with a client certificate of this user. Whoever is not in `system:masters` or
    /// `crowd` gets 403 for every object: RBAC is not served.
    ///
    /// # Errors
    /// The certificate or the file cannot be made.
    pub fn kubeconfig_of(&self, name: &str, groups: &[&str]) -> Result<PathBuf> {
        let stem = self.authority.issue(&Identity::User { name, groups })?;
        let path = stem.with_extension("kubeconfig");
        self.write_kubeconfig(&path, &stem)?;
        Ok(path)
    }

    /// A client that may do everything.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.admin
    }

    /// Applies a `CustomResourceDefinition`, YAML or JSON, as `kubectl apply --server-side` does,
    /// and waits until each version in it is served.
    ///
    /// # Errors
    /// It cannot be read, the server refuses it, or it is not served in time.
    pub fn apply_crd(&self, text: &str) -> Result<()> {
        let crd: Value = serde_saphyr::from_str(text).context("read the CRD")?;
        ensure!(
            crd["kind"] == "CustomResourceDefinition",
            "not a CustomResourceDefinition: {}",
            crd["kind"]
        );
        let word = |pointer: &str| {
            crd.pointer(pointer)
                .and_then(Value::as_str)
                .with_context(|| format!("the CRD has no {pointer}"))
        };
        let name = word("/metadata/name")?;
        let path = format!(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}?fieldManager=e2e&force=true"
        );
        self.admin
            .patch(&path, Patch::Apply, &crd)?
            .expect_success()
            .with_context(|| format!("apply CRD {name}"))?;
        let (group, plural) = (word("/spec/group")?, word("/spec/names/plural")?);
        let versions = crd["spec"]["versions"].as_array().context("versions")?;
        for version in versions.iter().filter(|version| version["served"] == true) {
            let version = version["name"].as_str().context("a version's name")?;
            let path = format!("/apis/{group}/{version}/{plural}?limit=1");
            wait_for(&format!("CRD {name} is served in {version}"), || {
                Ok(self.admin.get(&path)?.status == 200)
            })?;
        }
        Ok(())
    }

    /// Starts etcd on the data it had.
    ///
    /// # Errors
    /// It runs already, or it is not ready in time.
    pub fn start_etcd(&mut self) -> Result<()> {
        ensure!(self.etcd.is_none(), "etcd runs already");
        let (client, peer) = (
            self.etcd_url(),
            format!("http://{}:{ETCD_PEER_PORT}", self.address),
        );
        let mut command = Command::new(self.programs.join("etcd"));
        command
            .arg("--name=e2e")
            .arg(format!("--data-dir={}", self.path("etcd").display()))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster=e2e={peer}"))
            // A killed process loses nothing that it wrote; power is not lost here.
            .arg("--unsafe-no-fsync")
            .arg("--log-level=warn");
        let etcd = self
            .etcd
            .insert(Process::spawn(command, self.directory.path(), "etcd")?);
        let plain = Client::new(&client, Path::new(""), None);
        etcd.wait_until_ready(|| Ok(plain.get("/health")?.status == 200))
    }

    /// Starts the API server on the same address.
    ///
    /// # Errors
    /// It runs already, or it is not ready in time, as it is when etcd is down.
    pub fn start_api_server(&mut self) -> Result<()> {
        ensure!(self.server.is_none(), "the API server runs already");
        let certificate = self.authority.server_certificate();
        let mut command = Command::new(self.programs.join("api-server"));
        command
            .arg(format!("--etcd-servers={}", self.etcd_url()))
            .arg("--etcd-prefix=/registry")
            // By the test, when it says so.
            .arg("--etcd-compaction-interval=0")
            .arg(format!("--bind-address={}", self.address))
            .arg(format!("--secure-port={API_PORT}"))
            .arg(format!(
                "--tls-cert-file={}",
                certificate.with_extension("crt").display()
            ))
            .arg(format!(
                "--tls-private-key-file={}",
                certificate.with_extension("key").display()
            ))
            .arg(format!(
                "--client-ca-file={}",
                self.authority.certificate().display()
            ));
        let directory = self.directory.path();
        let server = self
            .server
            .insert(Process::spawn(command, directory, "api-server")?);
        server.wait_until_ready(|| Ok(self.admin.get("/readyz")?.status == 200))
    }

    /// Ends the API server as on SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_api_server(&mut self) -> Result<()> {
        taken(&mut self.server, "the API server")?.kill()
    }

    /// Ends etcd as on SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_etcd(&mut self) -> Result<()> {
        taken(&mut self.etcd, "etcd")?.kill()
    }

    /// Takes a backup of etcd, as by its snapshots; both programs are down meanwhile.
    ///
    /// # Errors
    /// One of them does not run or does not start again.
    pub fn back_up(&mut self) -> Result<()> {
        self.exchange("etcd", "backup")
    }

    /// Has etcd be as in the backup.
    ///
    /// # Errors
    /// As [`ApiServer::back_up`].
    pub fn restore(&mut self) -> Result<()> {
        self.exchange("backup", "etcd")
    }

    fn exchange(&mut self, from: &str, to: &str) -> Result<()> {
        self.kill_api_server()?;
        self.kill_etcd()?;
        let copied = Command::new("sh")
            .args(["-c", "rm -rf \"$2\" && cp -a \"$1\" \"$2\"", "sh"])
            .arg(self.path(from))
            .arg(self.path(to))
            .status()?;
        ensure!(copied.success(), "copy {from} to {to}: {copied}");
        self.start_etcd()?;
        self.start_api_server()
    }

    /// Nobody can be given what happened before, but by the API server's memory.
    fn compact(&self) -> Result<()> {
        let etcd = Client::new(&self.etcd_url(), Path::new(""), None);
        let any = json!({"key": STANDARD.encode("/"), "count_only": true});
        let range = etcd.post("/v3/kv/range", &any)?.expect_success()?;
        let revision = range["header"]["revision"]
            .as_str()
            .context("etcd names no revision")?;
        etcd.post(
            "/v3/kv/compaction",
            &json!({"revision": revision, "physical": true}),
        )?
        .expect_success()
        .context("compact etcd")?;
        Ok(())
    }

    /// Compacts etcd and restarts the API server, which then remembers nothing either: a watch
    /// from any version before this gets 410, as it does in a cluster after some minutes.
    ///
    /// # Errors
    /// One of them does not answer or does not start.
    pub fn forget_history(&mut self) -> Result<()> {
        self.compact()?;
        self.kill_api_server()?;
        self.start_api_server()
    }

    fn etcd_url(&self) -> String {
        format!("http://{}:{ETCD_PORT}", self.address)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write_kubeconfig(&self, path: &Path, stem: &Path) -> Result<()> {
        let inline =
            |path: &Path| -> Result<String> {
                Ok(STANDARD
                    .encode(fs::read(path).with_context(|| format!("read {}", path.display()))?))
            };
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "e2e",
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
            "clusters": [{"name": "e2e", "cluster": {
                "server": self.admin.url(),
                "certificate-authority-data": inline(&self.authority.certificate())?,
            }}],
            "users": [{"name": "e2e", "user": {
                "client-certificate-data": inline(&stem.with_extension("crt"))?,
                "client-key-data": inline(&stem.with_extension("key"))?,
            }}],
        });
        fs::write(path, config.to_string()).with_context(|| format!("write {}", path.display()))
    }
}

fn taken(process: &mut Option<Process>, name: &str) -> Result<Process> {
    process
        .take()
        .with_context(|| format!("{name} does not run"))
}

/// An address of the loopback network on which all three ports are free. Nobody is given a port
/// of it at random while a program that listens there is restarted, as happens on 127.0.0.1.
fn free_address() -> Result<Ipv4Addr> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(8);
    for _ in 0..64 {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let [_, second, third, fourth] = number.to_be_bytes();
        let address = Ipv4Addr::new(127, second | 0x40, third, fourth);
        let free = [API_PORT, ETCD_PORT, ETCD_PEER_PORT]
            .iter()
            .all(|&port| TcpListener::bind((address, port)).is_ok());
        if free {
            return Ok(address);
        }
    }
    bail!("no free address on the loopback network for an API server");
}

/// Waits until this is so; an error counts as not yet.
fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + READY_TIMEOUT;
    loop {
        let last = match is_so() {
            Ok(true) => return Ok(()),
            Ok(false) => String::new(),
            Err(error) => format!(": {error:#}"),
        };
        if Instant::now() >= end {
            bail!("not within {READY_TIMEOUT:?}: {what}{last}");
        }
        std::thread::sleep(READY_INTERVAL);
    }
}
