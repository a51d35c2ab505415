//! The agent of a node: claims parts of subnets in documents that the nodes of a cluster share, and
//! gives them back. ADDs lease from what it writes to the file `owned`, and ask it for room only when
//! that is used up. And it shows the node's state in the Kubernetes API.
//!
//! - [`backend`]: where documents are: [`directory`], files of a shared directory; [`mod@api`], objects of the Kubernetes API;
//! - [`decide`]: what to do about a document, decided on plain data;
//! - [`reserve`]: what is reserved while a range moves from another program, decided on plain data;
//! - [`whereabouts`]: that program's leases and pods, read from the API;
//! - [`space`]: one space: its questions first, then its documents;
//! - [`node_object`]: writes the object [`RdmaNode`](node_wire::rdma_node); [`events`]: what happened between
//!   two of them; [`node_marks`] and [`node_labels`]: what the Node itself shows;
//! - [`agent`]: the program: a thread for each space, the socket, the pages;
//! - [`cli`]: the command line.
//!
//! A read of a share may hang for as long as its server is gone. So each space has a thread of its own,
//! and the answer to a question never waits for it longer than the asker does.

#![forbid(unsafe_code)]

pub mod agent;
pub mod api;
pub mod backend;
pub mod cli;
pub mod decide;
pub mod directory;
pub mod events;
pub mod goal;
pub mod node_labels;
pub mod node_marks;
pub mod node_object;
pub mod reserve;
pub mod space;
pub mod whereabouts;
