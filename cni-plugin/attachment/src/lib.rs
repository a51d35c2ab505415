//! A pod's attachment to a network, from the moment it is written down to the moment that nothing of
//! it is left. The CNI plugin makes attachments; it and the daemon undo them.
//!
//! - [`node`]: the node's roots, policy, journal and network namespace;
//! - [`journal`]: what was begun, written before it is;
//! - [`interface`]: how an interface is set up in the pod;
//! - [`netdev`]: a netdev's whole state, and restoring it;
//! - [`rdma`]: RDMA devices that went with it, and returning them;
//! - [`cdi_file`]: CDI files of its slots, where HCAs were bound late;
//! - [`addresses`]: IPAM, in this process or by exec;
//! - [`part`]: one interface of an attachment: what is decided, recorded, applied and undone;
//! - [`interface`]: its sysctls, addresses, routes and rules;
//! - [`attach`]: making what a record says;
//! - [`detach`]: undoing an attachment, however far it got;
//! - [`reclaim`]: which attachments ended without a DEL;
//! - [`listing`]: what the node's pods have of it, for people;
//! - [`node_files`]: journal and leases of a node, for people;
//! - [`log`]: what the administrator should know;
//! - [`error`]: why any of this failed, as it is reported to the runtime.

pub mod addresses;
pub mod attach;
pub mod cdi_file;
pub mod detach;
pub mod error;
pub mod interface;
pub mod journal;
pub mod listing;
pub mod log;
pub mod netdev;
pub mod node;
pub mod node_files;
pub mod part;
pub mod rdma;
pub mod reclaim;

pub use error::Error;
