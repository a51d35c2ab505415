//! What the daemon says about itself.

pub(crate) mod http;
pub(crate) mod metrics;
