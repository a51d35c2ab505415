//! CNI plugin that moves an RDMA netdev into a pod or makes a child of it, and restores it.
//!
//! [`command`] has the commands of the specification; `command::add` shows the whole way of a
//! request. The node, the journal, IPAM and undoing are those of [`attachment`]; what reaches the
//! kernel is [`netlink`].

pub mod allocation;
pub mod apply;
pub mod authorize;
mod bind;
pub mod command;
pub mod config;
mod device_info;
mod gids;
pub mod interface_config;
mod parts;
pub mod plan;
mod rails;
mod rdma;
mod recover;
mod report;
pub mod resolve;
pub mod validate;

use attachment::error;
