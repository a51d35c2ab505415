//! Flags of more than one program.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, ValueEnum};
use tracing::Level;

/// How much is logged, and in which form.
#[derive(Debug, Clone, Copy, Args)]
pub struct Log {
    /// How much to log
    #[arg(
        long,
        value_name = "LEVEL",
        env = "RDMA_LOG_LEVEL",
        default_value = "info",
        value_parser = PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"])
            .try_map(|word| word.parse::<Level>())
    )]
    log_level: Level,
    /// Log lines for people or for machines
    #[arg(
        long,
        value_name = "FORMAT",
        env = "RDMA_LOG_FORMAT",
        default_value = "text"
    )]
    log_format: Format,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl Log {
    /// Starts logging.
    pub fn start(self) {
        crate::log::start(self.log_level, matches!(self.log_format, Format::Json));
    }
}

/// Where attachments and leases of this node are found.
#[derive(Debug, Args)]
pub struct NodePolicy {
    /// The node policy
    #[arg(
        long,
        value_name = "FILE",
        env = "RDMA_NETDEV_POLICY",
        default_value = node::policy::DEFAULT_PATH
    )]
    pub policy: PathBuf,
    /// The node's name in the cluster, unless the policy has one
    #[arg(long, value_name = "NAME", env = "RDMA_NODE_NAME")]
    pub node: Option<String>,
}

impl NodePolicy {
    /// The name that was given, if it is one.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        self.node.clone().filter(|name| !name.is_empty())
    }
}

/// An address with a port, also one of IPv6 without brackets, as it comes out of a manifest's
/// `$(POD_IP):9834`.
///
/// # Errors
/// The text is neither.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let plain = || {
        let (ip, port) = text.rsplit_once(':')?;
        Some(SocketAddr::new(ip.parse().ok()?, port.parse().ok()?))
    };
    text.parse()
        .ok()
        .or_else(plain)
        .ok_or_else(|| "expected an IP address and a port, as 127.0.0.1:9834".to_owned())
}
