//! What the programs that serve a node's other programs share: the device plugin's daemon and the agent.
//!
//! - [`socket`]: a unix socket on which root asks one question a connection;
//! - [`http`]: probes and metrics; [`metrics`]: the text of these;
//! - [`flags`]: flags of both;
//! - [`pages`]: manual pages and completions;
//! - `crowd`: so many connections at a time;
//! - `log`: log lines on stderr.

#![forbid(unsafe_code)]

mod crowd;
pub mod flags;
pub mod http;
mod log;
pub mod metrics;
pub mod pages;
pub mod socket;
