//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character
//! devices.
//!
//! The way of the data, in reading order:
//! - [`config`]: three formats, one model;
//! - [`observe`]: one look at the host; [`network`]: its routes and uplinks; [`candidate`]: the HCAs that pools choose from;
//! - [`pool`]: which HCAs are in which pool and as how many units; [`snapshot`]: what the kubelet
//!   is told about one resource;
//! - [`health`]: damping of flapping ports;
//! - [`board`]: the pools as they are now; [`sessions`], [`kubelet`]: one session for each resource;
//! - [`prefer`], [`allocate`], [`deliver`]: which units, and what a container gets with them;
//! - [`events`], [`watch`]: when to scan again; [`scan`]: one scan at a time, which may hang; [`reclaim`]: cleaning up behind pods;
//! - [`run`]: the daemon; [`report`]: how it is doing; [`status`]: the same and what else the node knows; [`cli`]: its sub-commands; [`telemetry`]: what it says about itself;
//! - [`node_socket`]: what programs of the node ask the daemon;
//! - [`preflight`]: is a node fit; [`verify`]: does it work between two pods; [`topology`]: GPUs and NICs, shown; [`podresources`]: what the kubelet knows of devices;
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
pub mod network;
pub mod node_socket;
pub mod podresources;
pub mod pool;
pub mod pool_state;
pub mod prefer;
pub mod preflight;
pub mod reclaim;
pub mod report;
pub mod run;
pub mod scan;
pub mod sessions;
pub mod snapshot;
pub mod status;
pub mod telemetry;
pub mod topology;
pub mod verify;
pub mod watch;
