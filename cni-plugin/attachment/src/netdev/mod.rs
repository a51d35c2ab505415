//! A netdev of the host that is given to a pod: everything the kernel forgets when a netdev
//! changes namespaces, everything the pod may change, and how the netdev returns.
//!
//! - [`identity`]: what identifies a netdev;
//! - [`snapshot`]: a netdev as the journal keeps it;
//! - [`state`]: its attributes, addresses and routes;
//! - [`obstacle`]: what of the host's would be lost, so that a netdev is not moved;
//! - [`restore`]: returning a netdev to the host and restoring its state;
//! - [`vf`]: what a PF holds of a VF;
//! - [`replay`]: a kernel message of the snapshot, made fit to be sent again;
//! - [`display`]: addresses, routes and rules as text.

pub mod display;
pub mod identity;
pub mod obstacle;
pub mod replay;
pub mod restore;
pub mod snapshot;
pub mod state;
pub mod vf;
