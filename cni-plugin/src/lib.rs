//! CNI plugin that moves an RDMA netdev into a pod or makes a child of it, and restores it.
//!
//! [`command`] has the commands of the specification; `command::add` shows the whole way of a
//! request. The node, the journal, IPAM and undoing are those of [`attachment`]; what reaches the
//! kernel is [`netlink`].

pub mod addressing;
pub mod allocation;
pub mod apply;
pub mod authorize;
mod bind;
pub mod command;
pub mod config;
mod device_info;
mod gids;
mod parts;
pub mod plan;
mod rdma;
mod recover;
mod report;
pub mod resolve;
mod source_routing;
pub mod validate;

use attachment::error;
