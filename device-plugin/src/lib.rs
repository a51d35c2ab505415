//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character
//! devices.
//!
//! The crate [`pools`] decides: configuration, units, health, who has what, and what a
//! container gets. Here is what reads and acts: `kubelet` serves each resource, `binding` turns slots into
//! HCAs when a pod's network is made, `files` keeps what other programs read, `reclaim` cleans up behind
//! pods. `run` is the loop that decides again at each event.

#![forbid(unsafe_code)]

mod binding;
pub mod cli;
mod events;
mod files;
mod install;
mod kubelet;
mod last_good;
mod links;
mod node_paths;
mod node_socket;
mod reader;
mod reclaim;
mod remarks;
mod report;
mod run;
mod scan;
mod sessions;
mod telemetry;
mod uninstall;
mod watch;
