//! End-to-end tests: the built programs driven from outside, and the stand-ins they need.
//!
//! [`harness`] has the cases and how they run; [`need`] what a machine can do. [`netns`], [`cni`] and
//! [`cni_host`] call a CNI plugin as a runtime does; [`kubelet`], [`node`] and [`multus`] run whole
//! pods; [`api_server`], [`cluster`] and [`proxy`] give agents a cluster; [`trace`] kills a program at a
//! system call.

#![forbid(unsafe_code)]

pub mod api_server;
pub mod bin_under_test;
pub mod bpf_object;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod cni;
pub mod cni_host;
pub mod daemon;
pub mod harness;
pub mod host_root;
pub mod host_state;
pub mod kubelet;
pub mod lease_store;
pub mod locked;
pub mod measure;
pub mod multus;
pub mod need;
pub mod netns;
pub mod node;
pub mod node_socket;
#[cfg(feature = "cluster")]
pub mod proxy;
pub mod random;
pub mod raw_netlink;
pub mod scene;
pub mod trace;
pub mod unanswered;
pub mod whereabouts;
