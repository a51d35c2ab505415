//! Which unit of which resource is what, decided from plain data: no runtime, no socket, no clock.
//!
//! The way of the data: [`config`] has the pools; [`host_snapshot`] is one scan of the host; [`pool`]
//! selects HCAs and makes units of them; [`plan`](mod@plan) adds who holds what ([`holdings`]), what is
//! bound ([`binding`]) and what was known before ([`history`], [`health`], [`slots`]); [`snapshot`] is one
//! resource as the kubelet gets it, and [`prefer`] chooses among its units.
//! `hardware` is what the status shows of HCAs.

#![forbid(unsafe_code)]

pub mod allocate;
pub mod binding;
pub mod checkpoint;
pub mod config;
pub mod deliver;
pub mod device_nodes;
#[cfg(any(test, feature = "example"))]
#[path = "tests/example.rs"]
pub mod example;
pub mod gpus;
mod hardware;
pub mod health;
pub mod history;
pub mod holdings;
pub mod host_snapshot;
pub mod nccl;
pub mod plan;
pub mod pool;
pub mod prefer;
pub mod rails;
pub mod slots;
pub mod snapshot;
pub mod words;
