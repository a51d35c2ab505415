//! The kernel's side: the only place that sends netlink requests, enters namespaces and writes
//! sysctls. It knows no JSON and no CNI.
//!
//! A socket belongs to the namespace in which it was opened, wherever the thread goes later. So the
//! host's and the pod's are opened once and used side by side.

pub mod address;
pub mod announce;
pub mod attribute;
pub mod bpf;
pub mod clock;
#[cfg(any(test, feature = "fake"))]
#[path = "../tests/fake/mod.rs"]
pub mod fake;
pub mod link;
pub mod name;
pub mod neighbour;
pub mod netns;
pub mod nexthop;
pub mod qdisc;
pub mod rdma;
pub mod release;
pub mod route;
pub mod rule;
pub mod socket;
pub mod sysctl;
pub mod sysfs;
#[cfg(test)]
mod tests;
pub mod uplink;

pub use name::Name;
pub use netns::Namespace;
pub use socket::{Error, Result, Socket};
