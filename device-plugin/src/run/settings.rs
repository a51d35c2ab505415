//! What the daemon is started with.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use node_server::http;

use crate::node_paths::NodePaths;
use pools::config;

/// What the daemon is started with.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Configuration file.
    pub config_file: PathBuf,
    /// What the command line says about configurations of the peers.
    pub defaults: config::Defaults,
    /// Where the things of this node are.
    pub paths: Arc<NodePaths>,
    /// The socket on which programs of the node ask.
    pub node_socket: PathBuf,
    /// Where the last good configuration is kept, if it is.
    pub state_dir: Option<PathBuf>,
    /// Where metrics and probes are served, if they are.
    pub metrics_addrs: Vec<SocketAddr>,
    /// Who gets `/status` and the names of pods.
    pub details: http::Details,
    /// Addresses that the cluster knows the node by; none if they are not configured.
    pub node_addresses: Vec<IpAddr>,
    /// Time between two rounds of cleaning up behind pods; `None`: nothing is cleaned up.
    pub reclaim_interval: Option<Duration>,
}
