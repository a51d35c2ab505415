//! `rdma-device-plugin uninstall`: the way back of `install`, for one node.

use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use node::policy::Policy;
use node_server::flags::NodePolicy;

use super::flags::RUN_DIR;
use crate::uninstall::{self, Places};

/// Removes what was put on this node: CNI programs, journal, policy. Refuses while a pod has an
/// interface or an address of it.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The DaemonSet runs it instead of the daemon with Helm's uninstall.enabled, or with \
    the component manifests/components/uninstall. By hand: on each node after the DaemonSet is deleted.\n\
    Exit status: 0 removed, 1 refused or failed, 2 wrong usage."
)]
pub(super) struct Uninstall {
    /// Directory below which the host's files are found
    #[arg(long, value_name = "DIR", env = "RDMA_HOST_ROOT", default_value = "/")]
    host_root: PathBuf,
    /// The node's CNI directory [default: opt/cni/bin below --host-root]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// Where CDI specifications are
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_CDI_DIR",
        default_value = "/var/run/cdi"
    )]
    cdi_dir: PathBuf,
    /// Where node-feature-discovery takes labels from
    #[arg(long, value_name = "DIR", default_value = node::features::DIRECTORY)]
    features_dir: PathBuf,
    /// Directory of the node's sockets
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    #[command(flatten)]
    node: NodePolicy,
    /// Remove it; the journal cannot be recovered
    #[arg(long, required_unless_present = "dry_run", conflicts_with = "dry_run")]
    yes: bool,
    /// Only say whether it would be refused
    #[arg(long)]
    dry_run: bool,
    /// Try again every ten seconds until nothing is in use; addresses of ended pods are released
    /// meanwhile
    #[arg(long)]
    wait: bool,
    /// Keep running when done, so that a DaemonSet of it stays ready
    #[arg(long)]
    stay: bool,
}

/// Between two tries.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

impl Uninstall {
    /// Checks, removes, and says what became of each path.
    ///
    /// # Errors
    /// It is refused, or something cannot be removed.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        Policy::check_named(&self.node.policy)?;
        let places = Places {
            node: attachment::node::Places {
                root: self.host_root.clone(),
                policy: self.node.policy.clone(),
                node: self.node.name(),
            },
            cni_bin: (self.cni_bin_dir.clone())
                .unwrap_or_else(|| self.host_root.join("opt/cni/bin")),
            run: self.run_dir.clone(),
            cdi: self.cdi_dir.clone(),
            features: self.features_dir.clone(),
        };
        let ended = match self.wait || self.stay {
            true => Some(end_signal()?),
            false => None,
        };
        let ready = || {
            uninstall::check(&places)?;
            match self.yes {
                true => uninstall::give_back(&places),
                false => Ok(()),
            }
        };
        while let Err(refusal) = ready() {
            let Some(ended) = ended.as_ref().filter(|_| self.wait) else {
                return Err(refusal);
            };
            let mut said = std::io::stderr().lock();
            let _ = writeln!(said, "waiting: {refusal}");
            // The daemon, which did this, is gone.
            for line in uninstall::free_leases(&places) {
                let _ = writeln!(said, "{line}");
            }
            if ended.recv_timeout(RETRY_INTERVAL).is_ok() {
                return Err(refusal);
            }
        }
        if !self.yes {
            return Ok(writeln!(out, "nothing on this node is in use")?);
        }
        uninstall::remove(&places, out)?;
        writeln!(out, "uninstalled from this node")?;
        out.flush().context("print")?;
        if let Some(ended) = ended.filter(|_| self.stay) {
            let _ = ended.recv();
        }
        Ok(())
    }
}

/// Receives SIGTERM or SIGINT, which do not end number 1 of a pid namespace by themselves.
fn end_signal() -> anyhow::Result<mpsc::Receiver<()>> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block().context("block signals")?;
    let (sender, ended) = mpsc::channel();
    thread::spawn(move || {
        let _ = signals.wait();
        let _ = sender.send(());
    });
    Ok(ended)
}
