//! RDMA devices of a namespace: listing, moving, renaming. Each request is one exchange over RDMA
//! netlink with the codec of `hca`, which itself changes nothing.

use std::io;

pub use hca::nldev::codec::{Device, Node};
use hca::nldev::{self, Nldev, codec::Request};

use super::{Error, Namespace, Result, socket::observed};

/// A socket of the namespace; none when no RDMA stack is loaded.
///
/// # Errors
/// The namespace cannot be entered, or the process has no descriptors left.
pub fn socket(of: &Namespace, own: &Namespace) -> Result<Option<Nldev>> {
    // Entering takes a right that a read of this thread's own namespace does not need.
    let opened = match of.id() == own.id() {
        true => Nldev::open(),
        false => of.enter(own, Nldev::open)?,
    };
    match opened {
        Ok(socket) => Ok(Some(socket)),
        Err(nldev::Error::NotLoaded) => Ok(None),
        Err(e) => Err(refused(e)),
    }
}

/// The devices of the socket's namespace; of all of them in shared mode.
///
/// # Errors
/// The kernel's refusal.
pub fn list(socket: &mut Nldev) -> Result<Vec<Device>> {
    observed(
        &"list RDMA devices",
        |devices: &Vec<Device>| Some(devices.len()),
        || socket.devices().map_err(refused),
    )
}

/// The verbs node a device has now; none without the module `ib_uverbs`.
///
/// # Errors
/// The kernel's refusal.
pub fn verbs_node(socket: &mut Nldev, device: &Device) -> Result<Option<Node>> {
    match socket.char_device(device) {
        Ok(node) => Ok(Some(node)),
        // No client of that name, or one that has no node for this device (`ib_get_client_nl_info`,
        // drivers/infiniband/core/device.c).
        Err(nldev::Error::Refused { errno, .. })
            if [libc::ENOENT, libc::EOPNOTSUPP, libc::ENODEV].contains(&errno) =>
        {
            Ok(None)
        }
        Err(e) => Err(refused(e)),
    }
}

/// Moves a device of the socket's namespace into another. Call from within that namespace: the
/// kernel reads the caller's, not the socket's (`ib_device_set_netns_put()`).
///
/// # Errors
/// The kernel's refusal: EOPNOTSUPP when the driver cannot be moved, or in shared mode.
pub fn give(socket: &mut Nldev, device: &Device, to: &Namespace) -> Result<()> {
    let attempt = format!(
        "move RDMA device {} into {}",
        device.name,
        to.path().display()
    );
    let request = Request::set_netns(device.index, to.file());
    let exchange = || socket.exchange(&attempt, &request).map_err(refused);
    observed(&attempt, |_| None, exchange).map(|_| ())
}

/// Renames a device of the socket's namespace.
///
/// # Errors
/// The kernel's refusal.
pub fn rename(socket: &mut Nldev, device: &Device, name: &str) -> Result<()> {
    let attempt = format!("rename RDMA device {} to {name}", device.name);
    let request = Request::set_name(device.index, name);
    let exchange = || socket.exchange(&attempt, &request).map_err(refused);
    observed(&attempt, |_| None, exchange).map(|_| ())
}

fn refused(error: nldev::Error) -> Error {
    match error {
        nldev::Error::Refused {
            attempt,
            errno,
            message,
        } => Error::Refused {
            what: attempt,
            cause: io::Error::from_raw_os_error(errno),
            message,
        },
        nldev::Error::Io { attempt, source } => Error::call(attempt, source),
        other => Error::Answer {
            what: "ask for RDMA devices".to_owned(),
            cause: other.to_string(),
        },
    }
}
