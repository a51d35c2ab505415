//! IP address management for RDMA pods: ranges, leases, who owns what; library and the CNI IPAM plugin
//! `rdma-ipam`.
//!
//! - [`range`]: which addresses a configured range may give
//! - [`config`]: the `ipam` object of a network configuration

//! - [`mod@directory`]: whether a directory is one in which nodes share documents
//! - [`owned`]: which parts of subnets this node owns
//! - [`lease`]: what a lease records
//! - [`subnet`]: which node may lease which addresses: the documents and their changes
//! - [`leases`]: the leases of this node, under one lock
//! - [`pool_usage`]: how full ranges are
//! - [`space`]: spaces of addresses, and networks as they lie in each other
//! - [`reclaim`]: freeing the leases of pods that ended
//! - [`whereabouts`]: names of whereabouts' objects, and leases written as such
//! - [`plugin`]: the CNI verbs, for the binary and for `rdma-netdev`

#![forbid(unsafe_code)]

pub mod config;
pub mod directory;
pub mod lease;
pub mod leases;
pub mod owned;
pub mod plugin;
pub mod pool_usage;
pub mod range;
pub mod reclaim;
pub mod space;
pub mod subnet;
pub mod whereabouts;
