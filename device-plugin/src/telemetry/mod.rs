//! What the daemon says about itself.

pub(crate) mod http;
mod measured;
pub(crate) mod metrics;
