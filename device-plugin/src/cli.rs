//! The sub-commands, as a person or an init container starts them.

pub mod install;
