//! End-to-end tests: the built binaries driven from outside, and the stand-ins they need.
//!
//! In reading order:
//! - [`harness`]: cases, the needs they have of the machine, and how they are run and counted;
//! - [`need`]: what a machine can or cannot do, probed once;
//! - [`api_server`]: an API server of Kubernetes on etcd, without a cluster;
//! - [`cluster`]: brokers of several nodes on it;
//! - [`bin_under_test`]: where the binaries are;
//! - [`netns`]: throw-away network namespaces;
//! - [`cni`]: calling a CNI plugin as a runtime does;
//! - [`lease_store`]: a store of leases, and `rdma-ipam` called on it from several nodes;
//! - [`locked`]: a lock that makes a program wait;
//! - [`measure`]: what calls cost, side by side;
//! - [`random`]: choices that are the same in each run;
//! - [`trace`]: a run that dies or fails at a chosen system call;
//! - [`cni_host`]: a host with a NIC and pods for such calls, and pictures of its state;
//! - [`node_socket`]: the daemon's socket, for tests of the programs that ask it;
//! - [`host_state`]: a namespace's whole network state, to be compared before and after, by
//!   [`raw_netlink`];
//! - [`scene`]: a host, a tenant's network and a hostile pod, with [`bpf_object`] for its programs;
//! - [`whereabouts`]: objects as whereabouts writes them;
//! - [`kubelet`]: the kubelet's side of devices, as strict as a real one;
//! - [`node`]: kubelet and container runtime together, for whole pods;
//! - [`multus`]: what Multus does between runtime and CNI plugins.

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
pub mod random;
pub mod raw_netlink;
pub mod scene;
pub mod trace;
pub mod unanswered;
pub mod whereabouts;
