//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
//!
//! In the order a request takes:
//! - [`command`]: the commands of the specification, each from request to answer;
//! - [`config`]: what the configuration says;
//! - [`node`]: the node's roots, policy, journal and network namespace;
//! - [`recover`]: returning the NIC of a dead pod that the request means;
//! - [`resolve`]: which links and RDMA devices the request comes to;
//! - [`authorize`]: whether policy and kubelet allow that, with [`allocation`], the kubelet's word;
//! - [`addresses`]: IPAM, in this process or by exec;
//! - [`plan`], [`interface_config`], [`rails`]: what is to be done, as plain data;
//! - [`journal`]: what was begun, written before it is;
//! - [`apply`]: making the interface;
//! - [`rdma`]: RDMA devices that move with it;
//! - [`error`]: what a call fails with, and its code;
//! - [`report`], [`gids`], [`device_info`]: what programs and Multus are told;
//! - [`netdev`]: a netdev's whole state, and restoring it;
//! - [`detach`]: undoing an attachment, however far it got;
//! - [`reclaim`]: which attachments ended without a DEL;
//! - [`admin`]: the administrator's command line;
//! - [`listing`]: what the node's pods have of it, for people;
//! - [`log`]: what the administrator should know.

pub mod addresses;
pub mod admin;
pub mod allocation;
pub mod apply;
pub mod authorize;
pub mod command;
pub mod config;
pub mod detach;
pub mod device_info;
pub mod error;
pub mod gids;
pub mod interface_config;
pub mod journal;
pub mod listing;
pub mod log;
pub mod netdev;
pub mod node;
pub mod plan;
pub mod rails;
pub mod rdma;
pub mod reclaim;
pub mod recover;
pub mod report;
pub mod resolve;
