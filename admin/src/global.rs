//! Flags that every command has.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use attachment::node::{Node, Places};
use clap::{Args, ValueEnum};
use node::policy::Policy;
use pools::host_snapshot::HostSnapshot;
use pools::host_snapshot::SCAN;
use serde_json::Value;

use crate::output::{complain, say, say_json};

/// Heading of the flags that are of one node, which `kubectl rdma` does not offer.
pub(crate) const NODE: &str = "Node";
/// Heading of the flags that say which cluster is asked.
pub(crate) const CLUSTER: &str = "Cluster";
const OUTPUT: &str = "Output";

/// Where the node is, and how results are printed.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Directory below which the host's sys, dev, proc and etc are found
    #[arg(
        long,
        global = true,
        help_heading = NODE,
        value_name = "DIR",
        env = "RDMA_HOST_ROOT",
        default_value = "/"
    )]
    pub(crate) host_root: PathBuf,
    /// The node's policy
    #[arg(
        long,
        global = true,
        help_heading = NODE,
        value_name = "FILE",
        env = "RDMA_NETDEV_POLICY",
        default_value = node::policy::DEFAULT_PATH
    )]
    pub(crate) policy: PathBuf,
    /// The node's name in the cluster, unless the policy has one
    #[arg(long, global = true, help_heading = NODE, value_name = "NAME", env = "RDMA_NODE_NAME")]
    node_name: Option<String>,
    /// Print one JSON document
    #[arg(long, global = true, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// Print more columns
    #[arg(long, short, global = true, help_heading = OUTPUT, value_name = "FORMAT")]
    output: Option<Width>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Width {
    Wide,
}

/// How long a command waits for what it reads.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

impl Global {
    /// The name that was given.
    pub(crate) fn node_name(&self) -> Option<String> {
        self.node_name.clone().filter(|name| !name.is_empty())
    }

    /// Whether all columns are shown.
    pub(crate) fn is_wide(&self) -> bool {
        self.output == Some(Width::Wide)
    }

    /// Prints the result of a command.
    pub(crate) fn say(&self, document: Value, text: impl FnOnce() -> String) {
        match self.json {
            true => say_json(document),
            false => say(&text()),
        }
    }

    /// The policy's path, where one was named.
    pub(crate) fn named_policy(&self) -> Option<PathBuf> {
        let usual = Path::new(node::policy::DEFAULT_PATH);
        (self.policy != usual).then(|| self.policy.clone())
    }

    /// The host's kernel file systems.
    pub(crate) fn host(&self) -> hca::Host {
        hca::Host::at(&self.host_root)
    }

    /// Scans the host. `node_addresses` are those that the cluster knows the node by.
    ///
    /// # Errors
    /// It cannot be scanned, or the scan hangs.
    pub(crate) fn scan(&self, node_addresses: &[IpAddr]) -> anyhow::Result<HostSnapshot> {
        let (host, addresses) = (self.host(), node_addresses.to_vec());
        let scan = move || HostSnapshot::scan(&host, &addresses, &[], hca::topology::gpu::read);
        within_limit(SCAN, scan)?.context("scan this host")
    }

    /// Where the node's files are.
    pub(crate) fn places(&self) -> Places {
        Places {
            root: self.host_root.clone(),
            policy: self.policy.clone(),
            node: self.node_name(),
        }
    }

    /// The policy. One that was named must be there.
    ///
    /// # Errors
    /// It is wrong, or cannot be read.
    pub(crate) fn policy(&self) -> anyhow::Result<Policy> {
        Policy::check_named(&self.policy)?;
        Policy::load(&self.policy).map_err(|error| anyhow!(error.with_remedy()))
    }

    /// The journal and what belongs to it, also where the policy is wrong.
    ///
    /// # Errors
    /// The state of the node cannot be read.
    pub(crate) fn node(&self) -> anyhow::Result<Node> {
        Policy::check_named(&self.policy)?;
        let node = Node::open_for_release(&self.places(), "administrator".into())
            .context("read the state of this node")?;
        if let Some(fault) = &node.policy.fault {
            complain(&fault.with_remedy());
        }
        Ok(node)
    }
}

/// How a cluster is reached.
#[derive(Debug, Clone, Args)]
pub(crate) struct Kubectl {
    /// Context of the kubeconfig
    #[arg(long, global = true, help_heading = CLUSTER, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Kubeconfig
    #[arg(long, global = true, help_heading = CLUSTER, value_name = "FILE")]
    kubeconfig: Option<String>,
    /// Namespace of the daemon [default: kube-system]; for verify and pods, of the pods
    #[arg(long, short, global = true, help_heading = CLUSTER, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// The kubectl program
    #[arg(
        long,
        global = true,
        help_heading = CLUSTER,
        hide_short_help = true,
        value_name = "PROGRAM",
        default_value = "kubectl"
    )]
    pub(crate) kubectl: String,
}

impl Kubectl {
    /// The flags that say which cluster is meant.
    fn cluster(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        for (flag, value) in [
            ("--context", &self.context),
            ("--kubeconfig", &self.kubeconfig),
        ] {
            arguments.extend(value.iter().map(|value| format!("{flag}={value}")));
        }
        arguments
    }

    /// The namespace of the daemon.
    pub(crate) fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or("kube-system")
    }

    /// Its flags, for each call.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = self.cluster();
        arguments.push(format!("--namespace={}", self.namespace()));
        arguments
    }

    /// The same for objects of another namespace.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Self {
        let namespace = namespace.to_owned();
        Self {
            namespace: Some(namespace),
            ..self.clone()
        }
    }

    /// The program and the flags of the cluster, for a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        [vec![self.kubectl.clone()], self.cluster()].concat()
    }
}

/// What a command reads; an error that names the path where it hangs.
///
/// # Errors
/// It takes longer than ten seconds.
pub(crate) fn within_limit<T: Send + 'static>(
    what: &str,
    read: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    Ok(hca::wait(what, READ_TIMEOUT, read)?)
}
