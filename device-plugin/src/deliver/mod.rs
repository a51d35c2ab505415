//! How a container gets what was allocated to it.

pub mod env;
pub mod nodes;

use kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::config::ResourceName;
use crate::snapshot::Member;

/// The response for a container that gets these HCAs of a resource.
pub fn response(resource: &ResourceName, members: &[&Member]) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: env::variables(resource, members),
        devices: nodes::specs(members),
        ..ContainerAllocateResponse::default()
    }
}
