//! What the daemon says about itself.

pub mod log;
