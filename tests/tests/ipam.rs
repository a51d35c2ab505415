//! `rdma-ipam` as a runtime calls it, and `rdmactl addresses` on its store.
#![allow(
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "every line here is a test, which clippy cannot see in modules of their own"
)]

#[path = "ipam/admin.rs"]
mod admin;
#[path = "ipam/agent.rs"]
mod agent;
#[path = "ipam/crowd.rs"]
mod crowd;
#[path = "ipam/formats.rs"]
mod formats;
#[path = "ipam/hostile.rs"]
mod hostile;
#[path = "ipam/model.rs"]
mod model;
#[path = "ipam/shards.rs"]
mod shards;
#[path = "ipam/support.rs"]
mod support;
#[path = "ipam/tool.rs"]
mod tool;
#[path = "ipam/vectors.rs"]
mod vectors;
#[path = "ipam/verbs.rs"]
mod verbs;
