//! Cluster-wide IP address management for RDMA pods: ranges, leases, a shared
//! store; library and the CNI IPAM plugin `rdma-ipam`.
//!
//! - [`policy`]: what root lets network configurations do on this node

#![forbid(unsafe_code)]

mod keys;
pub mod policy;
