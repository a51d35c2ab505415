//! What programs of a node ask each other over unix sockets: the daemon `rdma-device-plugin` which
//! units a pod holds, `rdma-agent` for room in subnets. [`document`] shows the JSON.
//!
//! A connection carries one question and one answer. The client writes a JSON document and shuts its
//! writing side; the server writes one and closes. The end of the stream ends a document, so a cut one
//! is never whole. Limits are [`QUESTION_MAX_BYTES`] and [`ANSWER_MAX_BYTES`].
//!
//! A server refuses an unknown version, question or field by name: an ignored field could be the one
//! that narrows the question. A client ignores unknown fields, so version 1 can gain some.
//!
//! [`rdma_node`] is what the API shows of the daemon's answer.
//!
//! Only root may ask. The server checks its peer's user; the client checks that the socket, its
//! directory and the listening process belong to root or to its own user. The crate knows no path.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod agent;
pub mod binding;
pub mod client;
pub mod document;
pub mod rdma_node;
pub mod status;

pub use agent::{
    Gateway, OldLeases, PartsChange, PartsChanged, PartsQuestion, PerNode, Reserved, Room,
    RoomMade, RoomNeed, RoomQuestion,
};
pub use binding::{
    BIND_TIMEOUT, BindQuestion, Bound, BoundSlot, CommitQuestion, Committed, UnbindQuestion,
    Unbound,
};
pub use client::{ClientError, Fault, Peer, Server, ask};
pub use document::{
    Allocation, Answer, Ask, ClaimedDevice, Failure, FailureKind, Pod, PodUnits, Question,
};
pub use status::{
    ChangeQuestion, DaemonStatus, ForgetQuestion, Forgotten, StatusChange, StatusQuestion,
};

/// The version of the documents that this crate reads and writes.
pub const VERSION: u64 = 1;
/// The longest question, in bytes.
pub const QUESTION_MAX_BYTES: usize = 64 << 10;
/// The longest answer, in bytes.
pub const ANSWER_MAX_BYTES: usize = 1 << 20;
