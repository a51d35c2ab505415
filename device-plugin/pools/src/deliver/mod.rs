//! How a container gets what was allocated to it.
//!
//! [`nodes`]: paths in the response; [`cdi`]: names that the container runtime resolves; [`env`]:
//! what is said about the HCAs; [`device_info`]: the same for Multus.

pub mod cdi;
pub mod device_info;
pub mod env;
pub mod nodes;
pub mod slot;

use kubelet_api::deviceplugin::ContainerAllocateResponse;

use crate::config::Delivery;
use crate::snapshot::{Member, Snapshot};

/// The response for a container that gets these HCAs of a resource.
pub fn response(snapshot: &Snapshot, members: &[&Member]) -> ContainerAllocateResponse {
    let pool = snapshot.pool();
    let mut response = ContainerAllocateResponse {
        envs: env::variables(pool, members),
        ..ContainerAllocateResponse::default()
    };
    response.envs.extend(env::of_libraries(pool, members, None));
    match pool.delivery {
        Delivery::DeviceSpecs => response.devices = nodes::specs(pool, members),
        Delivery::Cdi => response.cdi_devices = cdi::names(&pool.resource, members),
    }
    response
}
