//! The name of a port: RDMA device and number.

use std::fmt;

use serde::Serialize;

/// A port of a named RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PortId {
    /// Name of the RDMA device, such as `mlx5_0`.
    pub device: String,
    /// Port number, from 1.
    pub port: u32,
}

impl fmt::Display for PortId {
    /// `mlx5_0/1`, as the `rdma` tool writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.device, self.port)
    }
}
