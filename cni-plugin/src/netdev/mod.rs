//! A netdev of the host that is given to a pod: everything the kernel forgets when a netdev
//! changes namespaces, and how it comes back.
//!
//! - [`words`]: addresses, routes and rules as a person writes them;
//! - [`replay`]: a kernel message taken down, made fit to be sent again;
//! - [`snapshot`]: the state of a netdev, as the journal keeps it;
//! - [`vf`]: what a PF holds of a VF;
//! - [`restore`]: bringing a netdev home and giving it that state again.

pub mod replay;
pub mod restore;
pub mod snapshot;
pub mod vf;
pub mod words;
