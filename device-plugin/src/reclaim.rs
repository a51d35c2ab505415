//! Cleaning up behind pods that are gone, in place of the CNI calls that never came.
//!
//! Multus sends secondary networks neither GC nor STATUS, and a node that reboots sends no DEL.

/// What was cleaned up since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds.
    pub rounds: u64,
    /// Attachments undone.
    pub attachments: u64,
    /// Attachments that could not be undone.
    pub failures: u64,
}
