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
    /// A port has been up or down for long enough.
    Damping,
    /// A new configuration.
    Configuration,
    /// A container that is about to start.
    Container,
    /// SIGHUP.
    Signal,
    /// Another pod holds units than before.
    Pods,
    /// Units were allocated.
    Allocated,
    /// Containers of a pool get what its CDI file says again, or not any more.
    Files,
    /// A slot was bound or unbound.
    Binding,
    /// Somebody said that an HCA was removed for good.
    Forget,
    /// A pod left a child on the netdev of an HCA, or it is gone.
    Child,
}

impl Trigger {
    /// Whether the host may be another one than at the last scan.
    pub(crate) fn is_of_host(self) -> bool {
        !matches!(
            self,
            Self::Damping
                | Self::Pods
                | Self::Allocated
                | Self::Files
                | Self::Binding
                | Self::Forget
                | Self::Child
        )
    }
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
