//! Character devices of a response.

use std::collections::BTreeSet;

use kubelet_api::deviceplugin::DeviceSpec;
use serde_json::{Value, json};

use crate::config::PoolConfig;
use crate::snapshot::Member;

/// Open for reading and writing; no container makes further nodes of the device (`m`).
const PERMISSIONS: &str = "rw";

/// Paths of all nodes of these HCAs, each once: `rdma_cm` belongs to all of them.
fn paths<'m>(pool: &'m PoolConfig, members: &[&'m Member]) -> Vec<&'m str> {
    let mut seen = BTreeSet::new();
    let of_members = members
        .iter()
        .flat_map(|member| &member.nodes)
        .map(|node| node.path.as_str());
    of_members
        .chain(pool.extra_nodes.iter().map(String::as_str))
        .filter(|path| seen.insert(*path))
        .collect()
}

/// The same as CDI has them.
pub fn cdi_nodes(pool: &PoolConfig, members: &[&Member]) -> Vec<Value> {
    let node = |path: &str| json!({"path": path, "type": "c", "permissions": PERMISSIONS});
    paths(pool, members).into_iter().map(node).collect()
}

/// The same as device specifications; a container sees a node where the host has it.
pub fn specs(pool: &PoolConfig, members: &[&Member]) -> Vec<DeviceSpec> {
    let spec = |path: &str| DeviceSpec {
        container_path: path.into(),
        host_path: path.into(),
        permissions: PERMISSIONS.into(),
    };
    paths(pool, members).into_iter().map(spec).collect()
}
