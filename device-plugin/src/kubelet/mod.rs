//! The kubelet's side of the daemon: one session for each resource.
//!
//! In reading order: [`directory`] watches the kubelet's device-plugins directory, [`service`]
//! answers the kubelet's calls, [`session`] keeps one resource registered, [`promised`]
//! compares what containers were allocated with what is there, [`checkpoint`] reads what the kubelet hands
//! out again. Who holds which units is decided in [`pools::holdings`].

pub(crate) mod checkpoint;
pub(crate) mod directory;
mod promised;
pub(crate) mod service;
pub(crate) mod session;
