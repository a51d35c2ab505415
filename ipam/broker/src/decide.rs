//! What to claim, take over, give back and ask back, decided on plain data.
//!
//! - [`agreement`]: what of the objects, nodes and grants does not agree;
//! - [`choice`]: which block to try next;
//! - [`release`]: whether an administrator may take a block from its node;
//! - [`split`]: when a split cell can be a block again;
//! - [`standing`]: whose a block is, and whether it may change hands;
//! - [`supply`]: when a node needs another block, and when it can do without one.

pub mod agreement;
pub mod choice;
pub mod release;
pub mod split;
pub mod standing;
pub mod supply;
