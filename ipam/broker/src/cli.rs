//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use node::policy::Policy;
use node_server::flags::{Log, NodePolicy, address};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::api::endpoint::SERVICE_ACCOUNT_DIR;
use crate::api::{Client, Endpoint, Processor, Transport};
use crate::broker::{self, Settings};
use crate::space::Timing;

/// Claims blocks of addresses for this node in the Kubernetes API, for its CNI programs.
///
/// Runs until a signal ends it. Administrators use kubectl and rdmactl blocks release.
#[derive(Debug, Parser)]
#[command(name = "rdma-ipam-broker", version)]
#[command(after_help = "Exit status: 0 ended by a signal, 1 failed, 2 wrong usage.")]
struct Cli {
    #[command(flatten)]
    node: NodePolicy,
    /// Directory below which the host's proc and etc are found
    #[arg(long, value_name = "DIR", env = "RDMA_HOST_ROOT", default_value = "/")]
    host_root: PathBuf,
    /// Namespace of the objects [default: that of the service account]
    #[arg(long, value_name = "NAME", env = "RDMA_IPAM_NAMESPACE")]
    namespace: Option<String>,
    /// Kubeconfig in JSON with a client certificate, in tests [default: the pod's service account]
    #[arg(long, value_name = "FILE", hide = true)]
    kubeconfig: Option<PathBuf>,
    /// Socket on which ADDs ask for a block
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_IPAM_SOCKET",
        default_value = "/run/rdma-netdev/ipam.sock"
    )]
    socket: PathBuf,
    /// Addresses that serve /metrics, /healthz and /readyz, as 127.0.0.1:9835 [default: none]
    #[arg(
        long,
        value_name = "ADDRESS:PORT,…",
        env = "RDMA_IPAM_METRICS_ADDR",
        value_delimiter = ',',
        value_parser = address
    )]
    metrics_addr: Vec<SocketAddr>,
    /// How long a block of a node that is gone rests by this broker's own clock; shorter in tests
    #[arg(long, value_name = "SECONDS", default_value_t = 300, hide = true)]
    rest: u64,
    /// How long a range waits for ADDs of whereabouts to end; shorter in tests
    #[arg(long, value_name = "SECONDS", default_value_t = 150, hide = true)]
    settle: u64,
    #[command(flatten)]
    log: Log,
}

/// The command line, for manual pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    match serve(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

impl Cli {
    /// The API, with its credentials. Within a runtime.
    fn client(&self) -> anyhow::Result<Client> {
        Processor::check()?;
        let endpoint = match &self.kubeconfig {
            Some(path) => Endpoint::of_kubeconfig(path)?,
            None => Endpoint::in_cluster(
                |name| std::env::var(name).ok(),
                Path::new(SERVICE_ACCOUNT_DIR),
            )?,
        };
        let transport =
            Transport::new(endpoint).context("use the credentials of the Kubernetes API")?;
        let namespace = self.namespace.as_deref().or(transport.namespace());
        let namespace = namespace
            .context("in which namespace the blocks are is not known; name it with --namespace")?
            .to_owned();
        Ok(Client::new(transport, &namespace))
    }
}

fn serve(cli: Cli) -> anyhow::Result<()> {
    let policy = Policy::load(&cli.node.policy)?;
    // One thread does it all.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let client = cli.client()?;
        let stop = CancellationToken::new();
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            let (mut signal, stop) = (signal(kind)?, stop.clone());
            tokio::spawn(async move {
                signal.recv().await;
                stop.cancel();
            });
        }
        let settings = Settings {
            node: policy.node_name(cli.node.name().as_deref()),
            policy,
            root: cli.host_root,
            client,
            socket: Some(cli.socket),
            listen: cli.metrics_addr,
            timing: Timing {
                rest: Duration::from_secs(cli.rest),
                settle: Duration::from_secs(cli.settle),
                ..Timing::default()
            },
        };
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            node = settings.node,
            namespace = settings.client.namespace(),
            "the broker of this node's blocks of addresses starts"
        );
        broker::run(settings, broker::questions(), stop).await
    })
}
