//! The file from which node-feature-discovery takes labels of this node (its source `local`).

/// Where its worker looks.
pub const DIRECTORY: &str = "/etc/kubernetes/node-feature-discovery/features.d";
/// Ours there.
pub const FILE: &str = "rdma-netdev";
