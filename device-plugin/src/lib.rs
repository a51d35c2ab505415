//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character devices.

#![forbid(unsafe_code)]

pub mod cli;
pub mod install;
