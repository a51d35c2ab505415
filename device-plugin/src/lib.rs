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
//! - `run`: the daemon; `report`: its state, for metrics and readiness; `status`: the node's
//!   state, for `status`; `telemetry`: log, metrics, HTTP;
//! - `node_socket`: what programs of the node ask the daemon;
//! - [`cli`]: the sub-commands; those that search for faults are in the package `diagnostics`;
//! - `kubectl`: one view of all nodes, as a plugin of kubectl;
//! - `install`: what the DaemonSet's init container does; `uninstall`: the way back.
//!
//! Only `cli`, for the manual pages, and two readers, for the fuzz targets, are public.

#![forbid(unsafe_code)]

mod allocate;
mod binding;
mod candidate;
pub mod cli;
pub mod config;
mod deliver;
mod device_nodes;
mod events;
mod health;
mod host_snapshot;
mod install;
mod kubectl;
mod kubelet;
mod links;
mod measurements;
mod node_socket;
mod pool;
mod pool_state;
mod prefer;
mod reader;
mod reclaim;
mod report;
mod run;
mod scan;
mod sessions;
mod slots;
mod snapshot;
mod state_files;
mod status;
mod telemetry;
mod uninstall;
mod watch;

// Reads the kubelet's checkpoint; for a fuzz target.
pub use kubelet::checkpoint::Owners;
