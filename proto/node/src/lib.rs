//! What programs of a node ask each other over unix sockets: the daemon `rdma-device-plugin` which
//! units a pod holds, the broker `rdma-ipam-broker` for blocks of addresses.
//!
//! - [`document`]: the questions and answers as JSON documents;
//! - [`binding`]: those about late binding; [`block`]: the one to the broker;
//! - [`status`]: the daemon's state;
//! - [`client`]: asking, blocking, within a time limit.
//!
//! One connection carries one question and one answer. The client connects, writes one JSON
//! document and shuts its writing side down. The server writes one JSON document and closes. The
//! end of the stream ends a document, so a document that was cut short is never a whole one. A
//! question has at most [`QUESTION_MAX_BYTES`] bytes and an answer at most [`ANSWER_MAX_BYTES`].
//!
//! ```text
//! {"version": 1, "question": {"podUnits": {"namespace": "ml", "name": "train-0", "uid": "8f…"}}}
//!
//! {"version": 1, "answer": {"uidChecked": true, "allocations": [
//!     {"container": "worker", "resource": "rdma/hca", "units": ["0000:3b:00.0"], "hcas": ["0000:3b:00.0"],
//!      "pool": ["0000:3b:00.0", "0000:5e:00.0"]},
//!     {"container": "worker", "resource": "nvidia.com/gpu", "units": ["GPU-7c2f…"]}]}}
//!
//! {"version": 1, "question": {"bind": {"pod": {"namespace": "ml", "name": "train-0"},
//!     "sandbox": "4c…", "unit": "slot_3e71787e_0"}}}
//!
//! {"version": 1, "answer": {"slots": [{"unit": "slot_3e71787e_0", "resource": "rdma/nic",
//!     "container": "worker", "hca": "0000:3b:00.0", "rail": 0, "cdiFile": "rdma-device-plugin-slot-….json"}]}}
//!
//! {"version": 1, "error": {"kind": "unknownPod", "message": "the kubelet knows no pod ml/train-0 …"}}
//!
//! {"version": 1, "question": {"block": {"store": "default", "range": "10.0.0.0/24",
//!     "spans": [["10.0.0.1", "10.0.0.254"]], "count": 1}}}
//!
//! {"version": 1, "answer": {"blocks": ["10.0.0.16/28"]}}
//! ```
//!
//! Every document carries `version`. A server refuses a question of another version, a question
//! that it does not know, and a field that it does not know, each by name: a field that was
//! ignored could be the one that narrows the question. A client ignores fields of an answer that
//! it does not know, so version 1 can gain some.
//!
//! Only root may ask. The server checks the user of its peer, and the client checks that the
//! socket, its directory and the listening process belong to root or to the client's own user.
//!
//! The crate knows no path: each program names the socket that it serves or asks.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod binding;
pub mod block;
pub mod client;
pub mod document;
pub mod status;

pub use binding::{
    BIND_TIMEOUT, BindQuestion, Bound, BoundSlot, CommitQuestion, Committed, UnbindQuestion,
    Unbound,
};
pub use block::{BlockNeed, BlocksGranted};
pub use client::{ClientError, Fault, Peer, Server, ask};
pub use document::{Allocation, Answer, Ask, Claim, Failure, FailureKind, Pod, PodUnits, Question};
pub use status::{DaemonStatus, StatusQuestion};

/// The version of the documents that this crate reads and writes.
pub const VERSION: u64 = 1;
/// The longest question, in bytes.
pub const QUESTION_MAX_BYTES: usize = 64 << 10;
/// The longest answer, in bytes.
pub const ANSWER_MAX_BYTES: usize = 1 << 20;
