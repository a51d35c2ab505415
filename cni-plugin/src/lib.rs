//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
//!
//! In the order a request takes:
//! - [`command`]: the commands of the specification, each from request to answer;
//! - [`config`]: what the configuration asks;
//! - [`node`]: the node's policy, journal and namespace;
//! - [`find`]: which netdev is meant, and what is known of it;
//! - [`choose`]: which one an ADD works with, freed from owners that are no more;
//! - [`guard`]: whether the policy gives it away;
//! - [`addresses`]: IPAM, in this process or by exec;
//! - [`plan`], [`layout`], [`rails`]: what is to be done, as plain data;
//! - [`journal`]: what was begun, written before it is;
//! - [`act`]: making the interface;
//! - [`rdma`]: RDMA devices that go along;
//! - [`report`], [`gids`], [`device_info`]: what programs and Multus are told;
//! - [`netdev`]: a netdev's whole state, and giving it back;
//! - [`detach`]: undoing an attachment, however far it got;
//! - [`reclaim`]: which attachments are over though nobody said so;
//! - [`listing`]: what the node's pods have of it, for people;
//! - [`kernel`]: the only place that changes anything outside the journal;
//! - [`log`]: what the administrator should know.

pub mod act;
pub mod addresses;
pub mod choose;
pub mod command;
pub mod config;
pub mod detach;
pub mod device_info;
pub mod find;
pub mod gids;
pub mod guard;
pub mod journal;
pub mod kernel;
pub mod layout;
pub mod listing;
pub mod log;
pub mod netdev;
pub mod node;
pub mod plan;
pub mod rails;
pub mod rdma;
pub mod reclaim;
pub mod report;
