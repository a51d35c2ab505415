//! RDMA netlink (`NETLINK_RDMA`, client `NLDEV`): what sysfs does not show, and what a change of
//! namespace needs.
//!
//! Used sparingly: sysfs answers most questions without a socket. Netlink is the only source for
//! a device's index, by which a move between network namespaces names it, and for the character
//! device that a device has at this very moment ([`Nldev::char_device`]), since a move hands out
//! new minors.
//!
//! A socket belongs to the network namespace its thread was in when it was opened, and sees that
//! namespace's devices alone (in exclusive mode).

pub mod codec;
mod socket;

use serde::{Deserialize, Serialize};

use crate::host::{self, Host, Result};

pub use socket::{Error, Nldev};

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
