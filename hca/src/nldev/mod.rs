//! RDMA netlink (`NETLINK_RDMA`, client `NLDEV`): what sysfs does not tell.

use serde::{Deserialize, Serialize};

use crate::host::{self, Host, Result};

/// How the RDMA subsystem treats network namespaces (`rdma system`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NetnsMode {
    /// Every namespace sees every RDMA device; character devices are what separates them.
    Shared,
    /// A device is in one namespace and must be moved there.
    Exclusive,
}

/// Reads the mode; `None` if the RDMA stack is not loaded.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn netns_mode(host: &Host) -> Result<Option<NetnsMode>> {
    let parameters = host.sys.join("module").join("ib_core").join("parameters");
    Ok(
        match host::attribute(&parameters, "netns_mode")?.as_deref() {
            Some("Y" | "1") => Some(NetnsMode::Shared),
            Some("N" | "0") => Some(NetnsMode::Exclusive),
            _ => None,
        },
    )
}
