//! CNI plugin that moves an RDMA netdev into a pod or makes a child of it, and restores it.
//!
//! [`command`] has the commands of the specification; `command::add` shows the whole way of a
//! request. The node, the journal, IPAM and undoing are those of [`attachment`]; what reaches the
//! kernel is [`netlink`].

pub mod addressing;
pub mod allocation;
mod answer;
mod bind;
pub mod command;
pub mod config;
pub mod decide;
mod device_info;
pub mod facts;
mod gids;
mod orphan;
mod rdma;
mod source_routing;

use attachment::error;
