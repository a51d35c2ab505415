//! What makes the daemon decide anew, most of it after a scan of the host.
//!
//! Nothing is concluded from an event itself: every event of the host triggers the same scan. Sources:
//! link changes ([`netlink`]: route), devices that come and go ([`netlink`]: uevents), the RDMA
//! subsystem's own notices (Linux 6.12 and later), device nodes (inotify), and a timer behind all
//! of them, because each can be missing: a container without the host's network namespace hears no
//! link changes, old kernels have no RDMA notices.

pub(crate) mod netlink;

use serde::Serialize;
use tokio::sync::mpsc;

/// What made the daemon decide anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Trigger {
    /// The start.
    Start,
    /// The rescan interval.
    Timer,
    /// A change of a netdev that an RDMA device stands on.
    Link,
    /// A device that came, went or got a driver.
    Device,
    /// A notice of the RDMA subsystem.
    Rdma,
    /// Something in `/dev/infiniband`.
    Node,
    /// A new configuration.
    Configuration,
    /// A container that is about to start.
    Container,
    /// SIGHUP.
    Signal,
    /// Not the host: who holds what, a binding, a file, or a port that was up or down for long enough.
    World,
}

/// Where sources put their reasons.
#[derive(Debug, Clone)]
pub(crate) struct Triggers(mpsc::Sender<Trigger>);

impl Triggers {
    /// The sender and the receiver.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Trigger>) {
        let (sender, receiver) = mpsc::channel(64);
        (Self(sender), receiver)
    }

    /// Asks for a decision; never waits.
    pub(crate) fn send(&self, reason: Trigger) {
        // A full channel: a decision is due anyway.
        let _ = self.0.try_send(reason);
    }
}
