//! What was last known of HCAs; HCAs for tests.

pub mod memory;

#[cfg(test)]
pub mod example;
