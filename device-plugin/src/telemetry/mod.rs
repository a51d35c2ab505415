//! What the daemon says about itself.

pub(crate) mod http;
pub(crate) mod measured;
pub(crate) mod metrics;
