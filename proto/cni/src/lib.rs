//! What a container runtime and a CNI plugin say to each other, in every version of the
//! specification.
//!
//! Reading order:
//! - [`version`]: the versions of the specification and which of them exist;
//! - [`error`]: the error object and its codes;
//! - [`env`]: the command, the container and the interface, from the environment;
//! - [`json`]: JSON into types, as Go reads it or strictly; [`spelling`]: the word that was meant;
//! - [`section`]: one JSON object of a configuration, read as Go reads it;
//! - [`config`]: the network configuration on stdin, and with it the whole [`Request`];
//! - [`result`]: what ADD answers, in every version, and what `prevResult` says;
//! - [`delegate`]: running another plugin, an IPAM above all, by the specification's rules;
//! - [`words!`]: an enum each of whose variants is one word in a configuration;
//! - [`text`]: text of others, fit for a message or a line of a log;
//! - [`serve`]: from the process' environment and stdin to one document on stdout.
//!
//! The crate knows no path and no socket: files are touched by [`delegate`] alone, where
//! the runtime's `CNI_PATH` says.
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
pub use result::{Cidr, CniResult, Dns, Interface, IpConfig, Route};
pub use section::Section;
pub use version::Version;
