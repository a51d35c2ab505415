//! IP address management for RDMA pods: ranges, leases, who owns what; library and the CNI IPAM plugin
//! `rdma-ipam`.
//!
//! - [`range`]: which addresses a configured range may give
//! - [`config`]: the `ipam` object of a network configuration
//! - [`block`]: blocks of addresses, of which a node has some
//! - [`owned`]: which parts of subnets this node owns
//! - [`lease`]: what a lease records
//! - [`subnet`]: which node may lease which addresses: the documents and their changes
//! - [`leases`]: the leases of this node, under one lock
//! - [`pool_usage`]: how full ranges are
//! - [`reclaim`]: freeing the leases of pods that ended
//! - [`whereabouts`]: names of whereabouts' objects, and leases written as such
//! - [`plugin`]: the CNI verbs, for the binary and for `rdma-netdev`

#![forbid(unsafe_code)]

pub mod block;
pub mod config;
pub mod lease;
pub mod leases;
pub mod owned;
pub mod plugin;
pub mod pool_usage;
pub mod range;
pub mod reclaim;
pub mod subnet;
pub mod whereabouts;
