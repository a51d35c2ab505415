//! What the daemon says about itself.

pub mod http;
pub mod log;
pub mod metrics;
