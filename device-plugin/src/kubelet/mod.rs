//! The kubelet's side of the daemon: one session for each resource.
//!
//! In reading order: [`directory`] watches the kubelet's device-plugins directory, [`service`]
//! answers the kubelet's calls, [`session`] keeps one resource registered, [`allocated`] is who
//! holds which units, [`checkpoint`] what the kubelet hands out again.

pub mod allocated;
pub mod checkpoint;
pub mod directory;
pub mod service;
pub mod session;

/// tonic's errors say "transport error"; what happened is at the end of the chain.
pub(crate) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
