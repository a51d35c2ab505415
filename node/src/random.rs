//! Numbers that part writers and callers that meet.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A number that cannot be predicted: std seeds its hash maps from the kernel.
#[must_use]
pub fn random64() -> u64 {
    RandomState::new().build_hasher().finish()
}
