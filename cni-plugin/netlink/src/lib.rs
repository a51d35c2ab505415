//! The kernel's side: the only place that sends netlink requests, enters namespaces and
//! writes sysctls. It knows no JSON and no CNI.
//!
//! - [`attribute`]: attributes as bytes, for messages that have no types;
//! - [`socket`]: one blocking netlink exchange, with the kernel's own text on refusal;
//! - [`netns`]: opening and entering network namespaces;
//! - [`link`], [`address`], [`route`], [`rule`], [`neighbour`], [`nexthop`], [`qdisc`]: the objects
//!   of rtnetlink;
//! - [`nftables`]: chains and flow tables on a netdev, over netfilter's netlink;
//! - [`ethtool`]: settings of drivers, over generic netlink;
//! - [`ioctl`], [`bpf`], [`multicast`]: what of a netdev has no netlink message;
//! - [`clock`]: the boot's clock;
//! - [`name`]: names and aliases of links, which are bytes;
//! - [`sysctl`]: per-interface settings below `/proc/sys/net`;
//! - [`rdma`]: RDMA devices, over RDMA netlink;
//! - [`release`]: releases of the kernel, and the oldest that serves;
//! - [`sysfs`]: sysfs as a pod sees it;
//! - [`uplink`]: which netdevs the node itself needs;
//! - [`announce`]: gratuitous ARP and unsolicited neighbour advertisements.
//!
//! A socket belongs to the namespace it was opened in, wherever the thread goes later; so the
//! host's and the pod's are opened once and used side by side.

pub mod address;
pub mod announce;
pub mod attribute;
pub mod bpf;
pub mod clock;
pub mod ethtool;
pub mod ioctl;
pub mod link;
pub mod multicast;
pub mod name;
pub mod neighbour;
pub mod netns;
pub mod nexthop;
pub mod nftables;
pub mod qdisc;
pub mod rdma;
pub mod release;
pub mod route;
pub mod rule;
pub mod socket;
pub mod sysctl;
pub mod sysfs;
pub mod uplink;

pub use name::Name;
pub use netns::Namespace;
pub use socket::{Error, Result, Socket};
