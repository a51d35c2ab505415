//! Which RDMA hardware a Linux host has: sysfs, character devices, ports, GIDs, PCI; reads, never
//! changes.
//!
//! - [`host`]: the roots everything is read from
//! - [`mod@inventory`]: all of it, one value
//! - [`lookup`]: one object and its neighbours, fast
//! - [`rdma`], [`port`], [`gid`], [`chardev`]: RDMA devices outward from `/sys/class/infiniband`
//! - [`netdev`], [`pci`], [`address`]: what they stand on
//! - [`topology`]: GPUs and NICs, distances, and the choice of NICs for GPUs
//! - [`uplink`]: which netdevs the node itself needs
//! - [`mod@unit`]: the names of what a node offers, shared by both plugins
//! - [`KernelSocket`]: the netlink socket of all programs

#![forbid(unsafe_code)]

pub mod address;
mod association;
pub mod chardev;
pub mod gid;
pub mod host;
pub mod inventory;
mod json;
mod kernel_socket;
mod late;
pub mod lookup;
pub mod netdev;
mod netns_mode;
mod parent;
pub mod pci;
pub mod port;
mod port_id;
pub mod rdma;
mod reserved;
mod sub_device;
pub mod topology;
pub mod unit;
pub mod uplink;

pub use address::{Guid, MacAddress, ParseError};
pub use chardev::{CharDevice, DeviceNumber};
pub use gid::{Gid, GidEntry, ROCE_V2};
pub use host::{Error, Host, Progress, Result};
pub use inventory::{Function, FunctionKind, Hca, Inventory, inventory};
pub use kernel_socket::KernelSocket;
pub use late::{Late, wait};
pub use netdev::Netdev;
pub use netns_mode::{NetnsMode, netns_mode};
pub use pci::{PciAddress, PciFunction};
pub use port::{LinkLayer, Port, PortState};
pub use port_id::PortId;
pub use rdma::{RdmaDevice, Reserved};
pub use unit::{HcaId, UnitId};
