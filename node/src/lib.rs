//! What every program on a node shares.
//!
//! - [`policy`]: what root lets network configurations do on this node
//! - [`pattern`]: the words and globs of selectors
//! - [`identity`]: which machine this is, and which boot of it
//! - [`netns`]: whether a pod's network namespace is still there
//! - [`file`](mod@file): files that readers see whole, and that survive a loss of power
//! - [`features`]: the file from which node-feature-discovery takes labels
//! - [`cni_program`]: the programs that a container runtime executes, and their versions
//! - [`calls`]: counters of the CNI programs' calls, which the daemon reads
//! - [`log`]: the log of the CNI programs
//! - [`duration`], [`table`], [`terminal`]: values, columns and questions for people
//! - [`random`]: numbers that part writers that meet
//! - [`trust`]: which files and directories are believed

#![forbid(unsafe_code)]

pub use cni_wire::{json, spelling};

pub mod calls;
pub mod cni_program;
pub mod document;
pub mod duration;
pub mod features;
pub mod file;
pub mod identity;
pub mod log;
pub mod netns;
pub mod pattern;
pub mod policy;
pub mod random;
pub mod table;
pub mod terminal;
pub mod trust;
