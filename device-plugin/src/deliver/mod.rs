//! How a container gets what was allocated to it.

pub mod env;
pub mod nodes;

use kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::snapshot::{Member, Snapshot};

/// The response for a container that gets these HCAs of a resource.
pub fn response(snapshot: &Snapshot, members: &[&Member]) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: env::variables(snapshot.terms(), members),
        devices: nodes::specs(snapshot.terms(), members),
        ..ContainerAllocateResponse::default()
    }
}
