//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character
//! devices.
//!
//! The way of the data, in reading order:
//! - [`config`]: three formats, one model;
//! - `host_snapshot`: one scan of the host; `candidate`: the HCAs that pools choose from;
//! - `pool`: which HCAs are in which pool and as how many units; `snapshot`: one resource as the
//!   kubelet gets it; `health`: damping of flapping ports;
//! - `pool_state`: the pools as they are now; `sessions`, `kubelet`: one session for each
//!   resource;
//! - `prefer`, `allocate`, `deliver`: which units, and what a container gets with them;
//! - `slots`, `binding`: units that become HCAs when a pod's network is made;
//! - `events`, `watch`: when to scan again; `scan`: one scan at a time; `reader`: what may hang;
//! - `links`: netdevs that a pool sets up; `reclaim`: attachments and leases of dead pods;
//! - `run`: the daemon; `node_paths`: where the node's things are; `report`: its state, for metrics,
//!   readiness and `/status`; `telemetry`: log, metrics, HTTP;
//! - `remarks`: what the log has once for as long as it is true;
//! - `node_socket`: what programs of the node ask the daemon;
//! - [`port_counters`], [`nccl`], [`files`]: what else it reads of a node;
//! - [`cli`]: the command line; people have `rdmactl`;
//! - [`node_files`]: journal and leases, for `rdmactl` and `uninstall`;
//! - `install`: what the DaemonSet's init container does; `uninstall`: the way back.
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
pub mod files;
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
pub mod pool;
mod pool_state;
pub mod port_counters;
mod prefer;
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
// Reads the kubelet's checkpoint; for a fuzz target.
pub use kubelet::checkpoint::Owners;
