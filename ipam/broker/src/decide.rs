//! What to claim, take over, give back and ask back, decided on plain data.
//!
//! - [`choice`]: which block to try next;
//! - [`pool`]: which address of a pool of whereabouts to try, and how the pool is changed;
//! - [`standing`]: whose a block is, and whether it may change hands;
//! - [`supply`]: when a node needs another block, and when it can do without one.

pub mod choice;
pub mod pool;
pub mod standing;
pub mod supply;
