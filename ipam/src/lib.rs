//! Cluster-wide IP address management for RDMA pods: ranges, leases, a shared
//! store; library and the CNI IPAM plugin `rdma-ipam`.
//!
//! - [`policy`]: what root lets network configurations do on this node
//! - [`range`]: which addresses a configured range may give
//! - [`config`]: the `ipam` object of a network configuration
//! - [`lease`]: what a lease records
//! - [`node`], [`netns`]: who this machine is, and whether a namespace is there
//! - [`store`]: the directory of leases, and why it cannot lose or double one
//! - [`reclaim`]: freeing what nobody holds any more
//! - [`import`]: reading what other IPAM plugins left
//! - [`keys`]: the known key that a mistyped one was meant to be
//! - [`log`]: the log of both CNI programs
//! - [`table`]: columns for a terminal
//! - [`plugin`]: the CNI verbs, for the binary and for `rdma-netdev`

#![forbid(unsafe_code)]

pub mod config;
pub mod import;
pub mod keys;
pub mod lease;
pub mod log;
pub mod netns;
pub mod node;
pub mod plugin;
pub mod policy;
pub mod range;
pub mod reclaim;
pub mod slice;
pub mod store;
pub mod table;
