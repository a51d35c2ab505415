//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character
//! devices.
//!
//! The way of the data, in reading order:
//! - [`config`]: three formats, one model;
//! - [`host_snapshot`]: one scan of the host; [`candidate`]: the HCAs that pools choose from;
//! - [`pool`]: which HCAs are in which pool and as how many units; [`snapshot`]: one resource as the
//!   kubelet gets it; [`health`]: damping of flapping ports;
//! - [`pool_state`]: the pools as they are now; [`sessions`], [`kubelet`]: one session for each
//!   resource;
//! - [`prefer`], [`allocate`], [`deliver`]: which units, and what a container gets with them;
//! - [`events`], [`watch`]: when to scan again; [`scan`]: one scan at a time, which may hang;
//! - [`links`]: the resource that a netdev's alias names; [`reclaim`]: attachments and leases of dead
//!   pods;
//! - [`run`]: the daemon; [`report`]: its state, for metrics and readiness; [`status`]: the node's
//!   state, for `status`; [`telemetry`]: log, metrics, HTTP;
//! - [`node_socket`]: what programs of the node ask the daemon;
//! - [`cli`]: the sub-commands; those that look for faults are in the package `diagnostics`;
//! - [`install`]: what the DaemonSet's init container does.

#![forbid(unsafe_code)]

pub mod allocate;
pub mod candidate;
pub mod cli;
pub mod config;
pub mod deliver;
pub mod events;
pub mod health;
pub mod host_snapshot;
pub mod install;
pub mod kubelet;
pub mod links;
pub mod node_socket;
pub mod pool;
pub mod pool_state;
pub mod prefer;
pub mod reclaim;
pub mod report;
pub mod run;
pub mod scan;
pub mod sessions;
pub mod snapshot;
pub mod status;
pub mod telemetry;
pub mod watch;
