//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character
//! devices.
//!
//! The way of the data: [`config`] has the pools; `host_snapshot` is one scan of the host; `pool`
//! selects HCAs and makes units of them; `snapshot` is one resource as the kubelet gets it, and
//! `kubelet` serves it. `allocate` and `deliver` say what a container gets; `binding` turns slots into
//! HCAs when a pod's network is made. `run` is the daemon that does this again at each event.
//!
//! Public is what `rdmactl` reads a node with, and two readers for the fuzz targets.

#![forbid(unsafe_code)]

mod allocate;
mod binding;
pub mod candidate;
pub mod cli;
pub mod config;
mod deliver;
mod device_nodes;
mod events;
mod health;
pub mod host_snapshot;
mod install;
mod kubelet;
mod links;
mod measurements;
pub mod nccl;
pub mod node_files;
mod node_paths;
mod node_socket;
mod plan;
pub mod pool;
mod port_counters;
mod prefer;
pub mod rails;
pub mod reader;
mod reclaim;
mod remarks;
mod report;
mod run;
pub mod scan;
mod sessions;
mod slots;
pub mod snapshot;
mod state_files;
mod telemetry;
mod uninstall;
mod watch;
pub mod words;

pub use binding::gpus::Gpus;
// Readers of the kubelet's checkpoint; the first for a fuzz target.
pub use kubelet::checkpoint::{Owners, registered};
