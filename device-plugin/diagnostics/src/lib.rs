//! What `rdma-device-plugin preflight`, `verify` and `topology` find out.
//!
//! - [`preflight`]: can RDMA work on this node, or in this container?
//! - [`verify`]: does RDMA work between two pods or nodes, and as fast as it should?
//! - [`topology`]: how far are GPUs and NICs from each other, and which pod has them?
//! - [`container_runtime`]: does the node's container runtime read CDI files?
//! - [`port_counters`]: counters of ports
//! - [`report`]: findings, as text and as JSON
//! - `files`: kernel files whose absence is an answer
//!
//! Nothing here knows the daemon. What a command takes from the daemon, such as the pools of its
//! configuration, the command line passes in as plain data.

#![forbid(unsafe_code)]

pub mod container_runtime;
mod files;
pub mod port_counters;
pub mod preflight;
pub mod report;
pub mod topology;
mod verdict;
pub mod verify;

pub use verdict::{Finding, Outcome, Verdict};
