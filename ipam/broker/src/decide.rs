//! What to claim, take over, give back and ask back, decided on plain data.
//!
//! - [`grid`]: how ranges are cut into blocks;
//! - [`choice`]: which block to try next;
//! - [`standing`]: whose a block is, and whether it may change hands;
//! - [`supply`]: when a node needs another block, and when it can do without one.

pub mod choice;
pub mod grid;
pub mod standing;
pub mod supply;
