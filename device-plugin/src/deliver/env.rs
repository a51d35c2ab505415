//! Environment of a response: which HCAs the container got.
//!
//! Names are made of the whole resource name, because the kubelet keeps only the first of two
//! values for one name, and a container may hold several resources.

use std::collections::HashMap;

use crate::config::ResourceName;
use crate::snapshot::Member;

/// Variables for a container.
///
/// `RDMA_DEVICES_<RESOURCE>` lists RDMA devices as applications name them (`mlx5_0,mlx5_1`).
/// `PCIDEVICE_<RESOURCE>` lists HCA identities, as the SR-IOV plugin does.
pub fn variables(resource: &ResourceName, members: &[&Member]) -> HashMap<String, String> {
    let suffix = suffix(resource);
    let devices: Vec<&str> = members
        .iter()
        .flat_map(|m| m.rdma_devices.iter().map(String::as_str))
        .collect();
    let identities: Vec<String> = members.iter().map(|member| member.id.to_string()).collect();
    HashMap::from([
        (format!("RDMA_DEVICES_{suffix}"), devices.join(",")),
        (format!("PCIDEVICE_{suffix}"), identities.join(",")),
    ])
}

/// The resource name as part of a variable's name that every shell can use.
pub fn suffix(resource: &ResourceName) -> String {
    let legal = |c: char| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_uppercase()
        } else {
            '_'
        }
    };
    resource.as_str().chars().map(legal).collect()
}
