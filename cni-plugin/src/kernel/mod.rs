//! The kernel's side: the only place that sends netlink requests, enters namespaces and
//! writes sysctls. It knows no JSON and no CNI.
//!
//! - [`socket`]: one blocking netlink exchange, with the kernel's own words on refusal;
//! - [`netns`]: opening and entering network namespaces;
//! - [`link`], [`address`], [`route`], [`rule`], [`neighbour`]: the objects of rtnetlink;
//! - [`sysctl`]: per-interface settings below `/proc/sys/net`;
//! - [`announce`]: gratuitous ARP and unsolicited neighbour advertisements.
//!
//! A socket belongs to the namespace it was opened in, wherever the thread goes later; so the
//! host's and the pod's are opened once and used side by side.

pub mod address;
pub mod announce;
pub mod link;
pub mod neighbour;
pub mod netns;
pub mod route;
pub mod rule;
pub mod socket;
pub mod sysctl;

pub use netns::Namespace;
pub use socket::{Error, Result, Socket};
