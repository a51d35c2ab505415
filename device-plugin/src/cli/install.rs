//! `rdma-device-plugin install`: what the init container does, one line for each file.

use std::io::Write;
use std::path::PathBuf;

use node::cni_program;

use crate::install;
use anyhow::Context;

/// Installs the CNI programs, and the node's policy where one is given.
#[derive(Debug, clap::Args)]
pub(super) struct Install {
    /// Directory that holds rdma-netdev and rdma-ipam [default: that of this program]
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// The node's CNI directory, as this container sees it
    #[arg(long, value_name = "DIR", default_value = "/host/opt/cni/bin")]
    to: PathBuf,
    /// Also install rdmactl, beside the CNI programs
    #[arg(long)]
    with_rdmactl: bool,
    /// Node policy to install; without it the node's own stays as it is
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The node's policy file, as this container sees it
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/host/etc/rdma-netdev/policy.json"
    )]
    policy_to: PathBuf,
    /// The node's name in the cluster, written into the policy unless that names one
    #[arg(long, value_name = "NAME", env = "RDMA_NODE_NAME")]
    node: Option<String>,
}

impl Install {
    /// Installs everything that was asked for, and says on `out` what changed.
    ///
    /// # Errors
    /// The first file that could not be installed, and why; those before it are in place, and
    /// running it again does the rest.
    pub(super) fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        // The policy first: a program must not run a moment without the rules meant for it.
        if let Some(policy) = &self.policy {
            let node = self.node.as_deref().filter(|name| !name.is_empty());
            let outcome = install::policy(policy, &self.policy_to, node)?;
            writeln!(out, "{}: {outcome}", self.policy_to.display())?;
        }
        let from = match &self.from {
            Some(from) => from.clone(),
            None => std::env::current_exe()
                .context("find this program's own directory; name it with --from")?
                .parent()
                .map(PathBuf::from)
                .unwrap_or_default(),
        };
        let rdmactl = self.with_rdmactl.then_some("rdmactl");
        for name in cni_program::NAMES.into_iter().chain(rdmactl) {
            let outcome = install::program(&from.join(name), &self.to)?;
            writeln!(out, "{}: {outcome}", self.to.join(name).display())?;
        }
        Ok(())
    }
}
