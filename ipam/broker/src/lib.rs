//! The broker of a node: claims blocks of addresses in the Kubernetes API, and grants them to the
//! node's CNI programs.
//!
//! - [`api`]: the Kubernetes API;
//! - [`decide`]: what to claim, take over and give back, decided on plain data;
//! - [`space`]: one address space: its grants, its questions, its care;
//! - `sweep`: blocks of nodes that are gone, and ranges without blocks;
//! - [`broker`]: the program, from the lock to the last answer;
//! - [`metrics`], [`cli`]: its faces.
//!
//! One thread does it all. The tasks of a broker share plain cells, so none of them is ever held
//! across a wait.

#![forbid(unsafe_code)]

pub mod api;
pub mod broker;
pub mod cli;
pub mod decide;
pub mod grants;
mod leases;
pub mod metrics;
pub mod space;
mod sweep;
