//! How the RDMA subsystem treats network namespaces.

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

impl NetnsMode {
    /// As `rdma system` writes it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Exclusive => "exclusive",
        }
    }
}

/// Reads the mode; `None` if the RDMA stack is not loaded.
///
/// The module parameter is the very variable that `rdma system set netns` changes
/// (`ib_devices_shared_netns`, `drivers/infiniband/core/device.c`), so no socket is needed.
/// Kernels without it (before 5.2) share devices among all namespaces.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn netns_mode(host: &Host) -> Result<Option<NetnsMode>> {
    let parameters = host.sys.join("module").join("ib_core").join("parameters");
    match host::attribute(&parameters, "netns_mode")?.as_deref() {
        Some("Y" | "1") => Ok(Some(NetnsMode::Shared)),
        Some(_) => Ok(Some(NetnsMode::Exclusive)),
        None if host::exists(&host.class("infiniband"))? => Ok(Some(NetnsMode::Shared)),
        None => Ok(None),
    }
}
