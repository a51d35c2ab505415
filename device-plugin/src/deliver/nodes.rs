//! Character devices of a response.

use std::collections::BTreeSet;

use kubelet_api::deviceplugin::DeviceSpec;

use crate::snapshot::Member;

/// Open for reading and writing; making further nodes of the device (`m`) is nobody's business.
const PERMISSIONS: &str = "rw";

/// The nodes of all HCAs, each once: `rdma_cm` belongs to all of them.
pub fn specs(members: &[&Member]) -> Vec<DeviceSpec> {
    let mut seen = BTreeSet::new();
    members
        .iter()
        .flat_map(|member| &member.nodes)
        .filter(|node| seen.insert(node.path.as_str()))
        .map(|node| DeviceSpec {
            container_path: node.path.clone(),
            host_path: node.path.clone(),
            permissions: PERMISSIONS.into(),
        })
        .collect()
}
