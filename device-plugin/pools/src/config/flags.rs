//! Flags that name the configuration and the node, of every command that reads them.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::{Gate, sriov};

/// What the command line says about configurations of the peers.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Defaults {
    /// Prefix of resources of a resourceList that name none
    #[arg(
        long,
        value_name = "PREFIX",
        env = "RDMA_RESOURCE_PREFIX",
        default_value = sriov::DEFAULT_PREFIX
    )]
    pub resource_prefix: String,
    /// Deliver by CDI, for configList and resourceList; version 1 sets it for each pool
    #[arg(
        long,
        env = "RDMA_USE_CDI",
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true"
    )]
    pub use_cdi: bool,
    /// Keep units Unhealthy until this file or kernel module is there (`file:/PATH`, `module:NAME`), in
    /// pools that do not set waitFor
    #[arg(
        long,
        value_name = "WHAT,…",
        env = "RDMA_WAIT_FOR",
        value_delimiter = ','
    )]
    pub wait_for: Vec<Gate>,
}

/// Addresses of the node, by which its uplinks are known.
#[derive(Debug, Clone, Args)]
pub struct NodeAddresses {
    /// The node's addresses: a netdev that has one is an uplink
    #[arg(
        long,
        value_name = "ADDRESS,…",
        env = "RDMA_NODE_ADDRESSES",
        value_delimiter = ','
    )]
    pub node_addresses: Vec<IpAddr>,
}

/// Where the kubelet keeps things.
#[derive(Debug, Clone, Args)]
pub struct KubeletRoot {
    /// The kubelet's --root-dir
    #[arg(
        long,
        value_name = "DIR",
        env = "RDMA_KUBELET_ROOT_DIR",
        default_value = "/var/lib/kubelet"
    )]
    pub kubelet_root_dir: PathBuf,
}

/// The configuration files that are tried when none is named: ours, then the peers'.
const CONFIG_FILES: [&str; 3] = [
    "/etc/rdma-netdev/pools.json",
    "/k8s-rdma-shared-dev-plugin/config.json",
    "/etc/pcidp/config.json",
];

/// The file that is named, else the first that exists of the usual ones.
pub fn config_file(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let usual = || {
        CONFIG_FILES
            .iter()
            .map(PathBuf::from)
            .find(|path| path.exists())
    };
    named.or_else(usual).ok_or_else(|| {
        anyhow::anyhow!(
            "no configuration: --config-file is not given, and none of {} exists",
            CONFIG_FILES.join(", ")
        )
    })
}
