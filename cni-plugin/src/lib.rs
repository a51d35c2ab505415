//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
//!
//! In the order a request takes:
//! - [`command`]: the commands of the specification, each from request to answer;
//! - [`config`]: what the configuration says;
//! - `bind`: which HCA a slot becomes, by the daemon;
//! - `recover`: returning the NIC of a dead pod that the request means;
//! - [`resolve`]: which links and RDMA devices the request comes to;
//! - [`authorize`]: whether policy and kubelet allow that, with [`allocation`], what the kubelet
//!   reports;
//! - `parts`: the interfaces of an attachment that has all NICs of its pod;
//! - [`plan`], [`interface_config`], `rails`: what is to be done, as plain data;
//! - [`apply`]: making the interface;
//! - `rdma`: RDMA devices that move with it;
//! - `report`, `gids`, `device_info`: what programs and Multus read;
//! - `error`: what a call fails with, and its code;
//! - [`validate`]: networks, before a pod asks for them; for `rdmactl`.
//!
//! The node, the journal, IPAM and undoing are those of [`attachment`]; what reaches the kernel is
//! [`netlink`].

pub mod allocation;
pub mod apply;
pub mod authorize;
mod bind;
pub mod command;
pub mod config;
mod device_info;
mod error;
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
