//! The leases of a machine of one case's own, and `rdma-ipam` called on it.
//!
//! A machine that was named anew has several nodes' names: each has a policy and a state directory.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bin_under_test::product;
use crate::cni::{Answer, answer};
use crate::host_root;

/// The store and what belongs to it; gone when dropped.
#[derive(Debug)]
pub struct LeaseStore {
    place: TempDir,
    plugin: PathBuf,
    rdmactl: PathBuf,
    cooldown: &'static str,
}

/// Whose call it is.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Node name.
    pub node: String,
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// Pod, `namespace/name`.
    pub pod: String,
}

impl Caller {
    /// A container of its own pod on a node.
    #[must_use]
    pub fn new(node: &str, container: &str) -> Self {
        let (node, container) = (node.to_owned(), container.to_owned());
        Self {
            node,
            pod: format!("default/{container}"),
            container,
        }
    }

    /// The same container of another pod.
    #[must_use]
    pub fn of_pod(mut self, pod: &str) -> Self {
        pod.clone_into(&mut self.pod);
        self
    }
}

impl LeaseStore {
    /// An empty one, in the system's directory for temporary files. Freed
    /// addresses rest for `cooldown`.
    ///
    /// # Errors
    /// No temporary directory, or the binary is not built.
    pub fn new(cooldown: &'static str) -> Result<Self> {
        Ok(Self {
            place: TempDir::new()?,
            plugin: product("rdma-ipam")?,
            rdmactl: product("rdmactl")?,
            cooldown,
        })
    }

    /// The directory of the leases.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        host_root::leases(&self.root())
    }

    fn root(&self) -> PathBuf {
        self.place.path().join("root")
    }

    /// Makes a node's policy.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn add_node(&self, node: &str) -> Result<()> {
        let policy = json!({
            "stateDir": self.state(node),
            "ipam": {"cooldown": self.cooldown},
        });
        fs::create_dir_all(self.place.path().join("etc"))?;
        host_root::make(&self.root())?;
        fs::write(self.policy(node), policy.to_string()).context("write the policy")
    }

    fn policy(&self, node: &str) -> PathBuf {
        self.place.path().join("etc").join(node)
    }

    /// A call to be started, below `wrapper` (a tracer with its arguments) if
    /// there is one.
    #[must_use]
    pub fn command(&self, verb: &str, caller: &Caller, wrapper: &[String]) -> Command {
        let mut command = match wrapper.split_first() {
            None => Command::new(&self.plugin),
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&self.plugin);
                command
            }
        };
        let (namespace, name) = caller.pod.split_once('/').unwrap_or(("default", "none"));
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("RDMA_NETDEV_POLICY", self.policy(&caller.node))
            .env("RDMA_NODE_NAME", &caller.node)
            .env("RDMA_HOST_ROOT", self.root())
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &caller.container)
            .env("CNI_IFNAME", "net1")
            .env("CNI_NETNS", "/run/netns/none")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}"),
            )
            .stdin(Stdio::piped());
        command
    }

    /// A call, to its end.
    ///
    /// # Errors
    /// It could not be started.
    pub fn call(&self, verb: &str, caller: &Caller, config: &Value) -> Result<Answer> {
        answer(
            &mut self.command(verb, caller, &[]),
            config.to_string().as_bytes(),
        )
    }

    /// ADD; the addresses, without prefix length.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn add(&self, caller: &Caller, config: &Value) -> Result<Vec<String>> {
        addresses(&self.call("ADD", caller, config)?)
    }

    /// DEL.
    ///
    /// # Errors
    /// The plugin refused.
    pub fn del(&self, caller: &Caller, config: &Value) -> Result<()> {
        self.call("DEL", caller, config)?.success().map(drop)
    }

    /// `rdmactl`, to be started by `wrapper`: a program with its arguments.
    #[must_use]
    pub fn rdmactl_below(&self, mut wrapper: Command, node: &str, arguments: &[&str]) -> Command {
        wrapper
            .arg(&self.rdmactl)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("RDMA_NETDEV_POLICY", self.policy(node))
            .env("RDMA_NODE_NAME", node)
            .env("RDMA_HOST_ROOT", self.root())
            .args(arguments);
        wrapper
    }

    /// The state directory of a node.
    #[must_use]
    pub fn state(&self, node: &str) -> PathBuf {
        self.place.path().join("state").join(node)
    }

    /// The document of `rdmactl addresses`.
    ///
    /// # Errors
    /// It printed none.
    pub fn admin(&self, node: &str, arguments: &[&str]) -> Result<Value> {
        let arguments = [&["addresses"], arguments].concat();
        let mut command = self.rdmactl_below(Command::new("env"), node, &arguments);
        let output = command.arg("--json").output()?;
        let document = serde_json::from_slice(&output.stdout);
        document.with_context(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("{arguments:?}: {said}")
        })
    }

    /// Addresses that are held, and by which container, sorted.
    ///
    /// # Errors
    /// `rdmactl` failed.
    pub fn held(&self, node: &str) -> Result<Vec<(String, String)>> {
        let mut held = Vec::new();
        let document = self.admin(node, &[])?;
        let leases = document.get("leases").and_then(Value::as_array);
        for lease in leases.context("a list")? {
            let text = |key: &str| {
                let value = lease.get(key).and_then(Value::as_str);
                value
                    .map(str::to_owned)
                    .with_context(|| format!("lease without {key}"))
            };
            held.push((text("address")?, text("container")?));
        }
        held.sort();
        Ok(held)
    }

    /// Files below a directory of the leases, for what is left over.
    #[must_use]
    pub fn files(&self, below: &str) -> Vec<PathBuf> {
        host_root::files(&self.directory().join(below))
    }
}

/// The addresses of an ADD's answer, without prefix length.
///
/// # Errors
/// The answer is an error, or no result.
pub fn addresses(answer: &Answer) -> Result<Vec<String>> {
    let result = answer.success()?;
    let ips = result
        .get("ips")
        .and_then(Value::as_array)
        .context("result without ips")?;
    ips.iter()
        .map(|ip| {
            let text = ip
                .get("address")
                .and_then(Value::as_str)
                .context("no address")?;
            Ok(text.split('/').next().unwrap_or(text).to_owned())
        })
        .collect()
}

/// A network with these ranges, one address each.
#[must_use]
pub fn network(ranges: &[&str]) -> Value {
    let ranges: Vec<Value> = ranges.iter().map(|range| json!({"range": range})).collect();
    json!({
        "cniVersion": "1.1.0",
        "name": "rail",
        "type": "macvlan",
        "ipam": {"type": "rdma-ipam", "ipRanges": ranges},
    })
}
