//! The Kubernetes API, as far as the broker uses it.
//!
//! - [`document`]: the objects;
//! - [`endpoint`]: where the API is, and our credentials;
//! - [`transport`]: HTTP and TLS;
//! - [`items`]: lists that are longer than our memory;
//! - [`client`]: one operation each;
//! - [`watch`]: this node's own blocks, from the first list on;
//! - [`whereabouts`]: the objects of whereabouts.

pub mod client;
pub mod document;
pub mod endpoint;
pub mod items;
pub mod transport;
pub mod watch;
pub mod whereabouts;

pub use client::{Changed, Client};
pub use document::{BlockObject, NodeId, NodeObject, RangeObject};
pub use endpoint::{Endpoint, EndpointError};
pub use transport::{ApiError, Processor, Transport};
