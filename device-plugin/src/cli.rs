//! The sub-commands, as a DaemonSet or an init container starts them.

mod flags;
mod install;
mod uninstall;

use std::ffi::OsString;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pools::config::flags::{Defaults, KubeletRoot, NodeAddresses, config_file};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};

use crate::node_paths::NodePaths;
use crate::run;
use attachment::node::Places;
use node_server::flags::{Log, NodePolicy, address};
use node_server::http::Details;

/// Advertises RDMA HCAs to the kubelet and hands containers their character devices.
#[derive(Debug, Parser)]
#[command(
    name = "rdma-device-plugin",
    version,
    args_conflicts_with_subcommands = true
)]
#[command(
    after_help = "The default command is run; its flags: run --help. A long flag may have a \
    single dash, as in the replaced plugins.\n\
    Administrators use rdmactl.\n\
    Exit status: 0 done, 1 failed, 2 wrong usage."
)]
struct Cli {
    #[command(flatten)]
    run: Run,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the kubelet until a signal
    Run(Box<Run>),
    /// Put the CNI programs and the node's policy in their places
    Install(install::Install),
    /// Remove this project's files from the node
    Uninstall(uninstall::Uninstall),
    /// Write manual pages and completions to a directory
    #[command(hide = true)]
    Pages { directory: PathBuf },
}

#[derive(Debug, Args)]
struct Run {
    /// Configuration file [default: the first that exists of the three plugins' usual places]
    #[arg(long, value_name = "FILE", env = "RDMA_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    /// Where the kubelet expects device plugins, also with another --root-dir
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_DEVICE_PLUGIN_DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    device_plugin_dir: PathBuf,
    #[command(flatten)]
    kubelet: KubeletRoot,
    /// Directory below which the host's sys, dev and proc are found
    #[arg(long, value_name = "DIR", env = "RDMA_HOST_ROOT", default_value = "/")]
    host_root: PathBuf,
    /// The host's cgroups, which show whether a pod's processes have ended; with another --cgroup-root
    /// of the kubelet that directory [default: sys/fs/cgroup below --host-root]
    #[arg(long, value_name = "DIR", env = "RDMA_CGROUP_DIR")]
    cgroup_dir: Option<PathBuf>,
    #[command(flatten)]
    addresses: NodeAddresses,
    #[command(flatten)]
    defaults: Defaults,
    /// Where CDI specifications are written, for pools that deliver by them
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_CDI_DIR",
        default_value = "/var/run/cdi"
    )]
    cdi_dir: PathBuf,
    /// Where information on allocated devices is written for Multus
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_DEVICE_INFO_DIR",
        default_value = "/var/run/k8s.cni.cncf.io/devinfo/dp"
    )]
    device_info_dir: PathBuf,
    /// Socket for questions of the CNI plugin, in a directory of its own that only root can write to
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_NODE_SOCKET",
        default_value = NODE_SOCKET
    )]
    node_socket: PathBuf,
    /// Directory for the last good configuration, for a start while the file is wrong [default: none]
    #[arg(long, value_name = "DIR", env = "RDMA_STATE_DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    node: NodePolicy,
    /// Addresses that serve /metrics, /healthz, /readyz and /status, as 127.0.0.1:9834 [default: none]
    #[arg(
        long,
        value_name = "ADDRESS:PORT,…",
        env = "RDMA_METRICS_ADDR",
        value_delimiter = ',',
        value_parser = address
    )]
    metrics_addr: Vec<SocketAddr>,
    /// Answer /status, and which pods hold units, to every client of these addresses; without it
    /// only to clients on the loopback address
    #[arg(long, env = "RDMA_OPEN_STATUS")]
    open_status: bool,
    /// Seconds between two rounds that reclaim what ended pods left; 0: never
    #[arg(
        long,
        value_name = "SECONDS",
        env = "RDMA_RECLAIM_INTERVAL",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(..=86_400)
    )]
    reclaim_interval: u64,
    #[command(flatten)]
    log: Log,
}

/// Where `rdma-netdev` asks.
const NODE_SOCKET: &str = "/run/rdma-netdev/node.sock";

/// The command line.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
        // Those of "run", which its own help shows: without this nobody finds the commands.
        .mut_args(|flag| flag.hide(true))
        .override_usage(
            "rdma-device-plugin [FLAGS OF RUN]\n       rdma-device-plugin COMMAND [FLAGS]",
        )
}

fn parse(arguments: Vec<OsString>) -> Result<Cli, clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    <Cli as clap::FromArgMatches>::from_arg_matches(&matches)
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let mut out = std::io::stdout().lock();
    let cli = match parse(flags::with_double_dashes(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(2)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    let done = match cli.command {
        None => serve(cli.run),
        Some(Command::Run(run)) => serve(*run),
        Some(Command::Install(install)) => install.run(&mut out),
        Some(Command::Uninstall(uninstall)) => uninstall.run(&mut out),
        Some(Command::Pages { directory }) => node_server::pages::write(command(), &directory)
            .with_context(|| format!("write pages to {}", directory.display())),
    };
    match done.and_then(|()| Ok(out.flush()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "rdma-device-plugin: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: Run) -> anyhow::Result<()> {
    args.log.start();
    let host = hca::Host::at(&args.host_root);
    let paths = NodePaths {
        cgroup_dir: args
            .cgroup_dir
            .unwrap_or_else(|| host.sys.join("fs/cgroup")),
        host,
        node: Places {
            root: args.host_root,
            node: args.node.name(),
            policy: args.node.policy,
        },
        run_dir: node::trust::parent(&args.node_socket).to_owned(),
        cdi_dir: args.cdi_dir,
        device_info_dir: args.device_info_dir,
        device_plugin_dir: args.device_plugin_dir,
        kubelet_root_dir: args.kubelet.kubelet_root_dir,
    };
    run::run(run::Settings {
        config_file: config_file(args.config_file)?,
        defaults: args.defaults,
        paths: Arc::new(paths),
        node_socket: args.node_socket,
        state_dir: args.state_dir,
        metrics_addrs: args.metrics_addr,
        details: if args.open_status {
            Details::EveryClient
        } else {
            Details::Loopback
        },
        node_addresses: args.addresses.node_addresses,
        reclaim_interval: (args.reclaim_interval > 0)
            .then(|| Duration::from_secs(args.reclaim_interval)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_help_fits_a_screen() {
        let help = command().render_help().to_string();
        assert!(help.lines().count() <= 40, "{help}");
    }
}
