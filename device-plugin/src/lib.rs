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

mod binding;
pub mod cli;
mod events;
mod files;
mod install;
mod kubelet;
mod last_good;
mod links;
mod measurements;
mod node_paths;
mod node_socket;
mod port_counters;
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
