//! The journal: one file for each attachment of this node, written before the host is changed,
//! removed when nothing of the attachment is left. With it DEL needs no configuration, no
//! result, no namespace and no master.
//!
//! - [`record`]: what is written, versioned; imports no netlink;
//! - [`store`]: the files, their locks, and who owns a moved netdev.
//!
//! It outlives this process, not the kernel: what it speaks of (links, namespaces, addresses of
//! netdevs) ends with the boot, so nothing is synced to disk, and a record of an earlier boot
//! says only what leases there were.

mod file;
pub mod record;
pub mod store;

use crate::error::{Error, Kind};
pub use file::{Lock, Sharing, hold_all};
pub use record::{Netns, RdmaDevice, Record, Slot};
pub use store::{Journal, Key, Records};
