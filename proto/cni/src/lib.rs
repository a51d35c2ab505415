//! What a container runtime and a CNI plugin say to each other, in every version of the
//! specification.
//!
//! [`serve`] goes from the process' environment and stdin to one document on stdout; [`Request`] is
//! all of a call, and [`result`] what ADD answers. [`json`] reads JSON into types, as Go reads it or
//! strictly. The crate knows no path and no socket: files are touched by [`delegate`] alone, where the
//! runtime's `CNI_PATH` says.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[macro_use]
mod words;

pub mod config;
pub mod delegate;
pub mod env;
pub mod error;
pub mod json;
pub mod result;
pub mod section;
pub mod serve;
pub mod spelling;
pub mod text;
pub mod version;

pub use config::{NetworkConfig, Request};
pub use env::{Args, AttachmentId, Command, ContainerId, Environment, IfName, KNOWN_ARGS};
pub use error::{Code, Error};
pub use result::{CniResult, Dns, Interface, IpConfig, Route, cidr};
pub use section::Section;
pub use version::Version;
