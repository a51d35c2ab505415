//! The broker of a node: claims blocks of addresses in the Kubernetes API, and grants them to the
//! node's CNI programs.

#![forbid(unsafe_code)]

pub mod api;
pub mod decide;
pub mod metrics;
pub mod space;
