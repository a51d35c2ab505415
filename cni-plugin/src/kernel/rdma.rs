//! RDMA devices of a namespace: listing, moving, renaming. Each request is one exchange over RDMA
//! netlink with the codec of `hca`, which itself changes nothing.

use cni_wire::{Code, Error};
pub use hca::nldev::codec::{Device, Node};
use hca::nldev::{self, Nldev, codec::Request};

use super::Namespace;

/// A socket of the namespace; none when no RDMA stack is loaded.
///
/// # Errors
/// Code 100: the namespace cannot be entered, or the process has no descriptors left.
pub fn socket(of: &Namespace, home: &Namespace) -> Result<Option<Nldev>, Error> {
    // Entering takes a right that looking at home does not need.
    let opened = match of.id() == home.id() {
        true => Nldev::open(),
        false => of.enter(home, Nldev::open)?,
    };
    match opened {
        Ok(socket) => Ok(Some(socket)),
        Err(nldev::Error::NotLoaded) => Ok(None),
        Err(e) => Err(refused(&e)),
    }
}

/// The devices of the socket's namespace; of all of them in shared mode.
///
/// # Errors
/// The kernel's refusal.
pub fn list(socket: &mut Nldev) -> Result<Vec<Device>, Error> {
    socket.devices().map_err(|e| refused(&e))
}

/// The verbs node a device has now; none without the module `ib_uverbs`.
///
/// # Errors
/// The kernel's refusal.
pub fn verbs_node(socket: &mut Nldev, device: &Device) -> Result<Option<Node>, Error> {
    match socket.char_device(device) {
        Ok(node) => Ok(Some(node)),
        // No client of that name, or one that has no node for this device (`ib_get_client_nl_info`,
        // drivers/infiniband/core/device.c).
        Err(nldev::Error::Refused { errno, .. })
            if [libc::ENOENT, libc::EOPNOTSUPP, libc::ENODEV].contains(&errno) =>
        {
            Ok(None)
        }
        Err(e) => Err(refused(&e)),
    }
}

/// Moves a device of the socket's namespace into another. Call from within that namespace: the
/// kernel looks at the caller's, not the socket's (`ib_device_set_netns_put()`).
///
/// # Errors
/// The kernel's refusal, with what to do where that is known.
pub fn give(socket: &mut Nldev, device: &Device, to: &Namespace) -> Result<(), Error> {
    let attempt = format!(
        "move RDMA device {} into {}",
        device.name,
        to.path().display()
    );
    let request = Request::set_netns(device.index, to.file());
    match socket.exchange(&attempt, &request) {
        Ok(_) => Ok(()),
        Err(e @ nldev::Error::Refused { errno, .. }) if errno == libc::EOPNOTSUPP => {
            Err(refused(&e).with_details(
                "its driver cannot be moved between namespaces, or the RDMA subsystem is not in \
                 exclusive mode any more (rdma system show)",
            ))
        }
        Err(e) => Err(refused(&e)),
    }
}

/// Renames a device of the socket's namespace.
///
/// # Errors
/// The kernel's refusal.
pub fn rename(socket: &mut Nldev, device: &Device, name: &str) -> Result<(), Error> {
    let attempt = format!("rename RDMA device {} to {name}", device.name);
    let renamed = socket.exchange(&attempt, &Request::set_name(device.index, name));
    renamed.map(|_| ()).map_err(|e| refused(&e))
}

fn refused(error: &nldev::Error) -> Error {
    Error::new(Code::Kernel, error.to_string())
}
