//! The binary's CNI face and its tool, driven from outside.
#![allow(
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "every line here is a test, which clippy cannot see in modules of their own"
)]

#[path = "cni/admin.rs"]
mod admin;
#[path = "cni/formats.rs"]
mod formats;
#[path = "cni/fsck.rs"]
mod fsck;
#[path = "cni/hostile.rs"]
mod hostile;
#[path = "cni/model.rs"]
mod model;
#[path = "cni/shards.rs"]
mod shards;
#[path = "cni/support.rs"]
mod support;
#[path = "cni/tool.rs"]
mod tool;
#[path = "cni/vectors.rs"]
mod vectors;
#[path = "cni/verbs.rs"]
mod verbs;
