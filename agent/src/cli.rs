//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use kube::config::{KubeConfigOptions, Kubeconfig};
use node::identity::NodeIdentity;
use node::policy::Policy;
use node_server::flags::{Log, NodePolicy, address};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::agent::{self, Settings};
use crate::decide::ThisNode;
use crate::node_marks::Wanted;
use crate::space::Context;

/// Claims addresses for this node where its CNI programs have none left, and gives them back. Shows the
/// node's state in the Kubernetes API.
///
/// Runs until a signal ends it. Administrators use rdmactl addresses.
#[derive(Debug, Parser)]
#[command(name = "rdma-agent", version)]
#[command(after_help = "Exit status: 0 ended by a signal, 1 failed, 2 wrong usage.")]
struct Cli {
    #[command(flatten)]
    node: NodePolicy,
    /// Directory below which the host's proc, etc and run are found
    #[arg(long, value_name = "DIR", env = "RDMA_HOST_ROOT", default_value = "/")]
    host_root: PathBuf,
    /// Kubeconfig, in tests [default: the pod's service account]
    #[arg(long, value_name = "FILE", hide = true)]
    kubeconfig: Option<PathBuf>,
    /// How long a part of a node that is gone is marked before it is taken; shorter in tests
    #[arg(long, value_name = "SECONDS", default_value_t = 300, hide = true)]
    grace: u64,
    /// Socket on which ADDs ask for room
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_AGENT_SOCKET",
        default_value = "/run/rdma-netdev/agent.sock"
    )]
    socket: PathBuf,
    /// Write the state of the NICs to the Kubernetes API, as the object of this node
    #[arg(long, env = "RDMA_AGENT_RDMA_NODE")]
    rdma_node: bool,
    /// With --rdma-node: set condition `RdmaReady` of the Node
    #[arg(long, requires = "rdma_node", env = "RDMA_AGENT_NODE_CONDITION")]
    node_condition: bool,
    /// With --rdma-node: taint the Node while an HCA is missing
    #[arg(long, requires = "rdma_node", env = "RDMA_AGENT_TAINT_MISSING")]
    taint_missing: bool,
    /// With --rdma-node: set the Node's labels rdma-netdev.io/nics, rate and so on
    #[arg(long, requires = "rdma_node", env = "RDMA_AGENT_NODE_LABELS")]
    node_labels: bool,
    /// With --rdma-node: where node-feature-discovery takes the same labels from, if it is there
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_AGENT_FEATURES_DIR",
        default_value = node::features::DIRECTORY
    )]
    features_dir: PathBuf,
    /// Socket of the daemon, which knows the state
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_NODE_SOCKET",
        default_value = "/run/rdma-netdev/node.sock"
    )]
    node_socket: PathBuf,
    /// Addresses that serve /metrics, /healthz and /readyz, as 127.0.0.1:9836 [default: none]
    #[arg(
        long,
        value_name = "ADDRESS:PORT,…",
        env = "RDMA_AGENT_METRICS_ADDR",
        value_delimiter = ',',
        value_parser = address
    )]
    metrics_addr: Vec<SocketAddr>,
    #[command(flatten)]
    log: Log,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write manual pages and completions to a directory
    #[command(hide = true)]
    Pages {
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    let ended = match &cli.command {
        Some(Command::Pages { directory }) => {
            let pages = node_server::pages::write(Cli::command(), directory);
            pages.with_context(|| format!("write pages to {}", directory.display()))
        }
        None => serve(cli),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The client of the API.
async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<kube::Client> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("read {}", path.display()))?;
            let options = KubeConfigOptions::default();
            kube::Config::from_custom_kubeconfig(file, &options)
                .await
                .with_context(|| format!("use {}", path.display()))?
        }
        None => kube::Config::incluster().context(
            "no Kubernetes API, for stores of the policy or --rdma-node; run this program in a pod that has a \
             service account's token",
        )?,
    };
    let mut config = config;
    // Who asks decides whether and when it asks again.
    config.default_retry = false;
    kube::Client::try_from(config).context("use the credentials of the Kubernetes API")
}

fn serve(cli: Cli) -> anyhow::Result<()> {
    let policy = Policy::load(&cli.node.policy);
    let policy = policy.map_err(|error| anyhow::anyhow!(error.with_remedy()))?;
    let name = policy.node_name(cli.node.name().as_deref());
    let node = NodeIdentity::read(&cli.host_root, &name)?;
    // The edges have one thread; each space has its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let served = runtime.block_on(async {
        let stop = CancellationToken::new();
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            let (mut signal, stop) = (signal(kind)?, stop.clone());
            tokio::spawn(async move {
                signal.recv().await;
                stop.cancel();
            });
        }
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            node = node.name,
            "the agent of this node starts"
        );
        let client = match policy.uses_kubernetes() || cli.rdma_node {
            true => Some(client(cli.kubeconfig.as_deref()).await?),
            false => None,
        };
        let settings = Settings {
            client,
            context: Context {
                node: ThisNode {
                    name: node.name,
                    boot: node.boot,
                },
                root: cli.host_root,
                state_dir: policy.state_dir.clone(),
                cooldown: policy.ipam.cooldown,
                grace: Duration::from_secs(cli.grace),
            },
            policy,
            socket: cli.socket,
            node_socket: cli.rdma_node.then_some(cli.node_socket),
            marks: Wanted {
                condition: cli.node_condition,
                taint: cli.taint_missing,
                labels: cli.node_labels,
            },
            features_dir: cli.features_dir,
            listen: cli.metrics_addr,
        };
        agent::run(settings, stop).await
    });
    // The threads of spaces use it until the process ends; one that hangs in a store is not waited for.
    std::mem::forget(runtime);
    served
}
