//! Multicast netlink: what the kernel sends to every listener.
//!
//! Messages are only read as far as it takes to know whether they matter. A socket that was overrun
//! has lost some, which is a reason to scan like any other; rtnetlink would not say so, and has
//! neither uevents nor RDMA netlink.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use hca::KernelSocket;
use netlink_sys::protocols::{NETLINK_KOBJECT_UEVENT, NETLINK_RDMA, NETLINK_ROUTE};
use nix::errno::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Trigger, Triggers};

/// `RTMGRP_LINK` (`include/uapi/linux/rtnetlink.h`).
const LINK_GROUP: u32 = 1;
/// The kernel's own uevents; group 2 has what udev passes on.
const UEVENT_GROUP: u32 = 1;
/// Bit of `RDMA_NL_GROUP_NOTIFY`, which is group 4 (`include/uapi/rdma/rdma_netlink.h`).
const RDMA_GROUP: u32 = 1 << 3;
/// How long to wait before a source that cannot be opened is tried again: the RDMA family exists
/// only while `ib_core` is loaded.
const REOPEN_INTERVAL: Duration = Duration::from_secs(30);

/// A netlink source.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// Changes of netdevs with these interface indexes.
    Links(watch::Receiver<BTreeSet<u32>>),
    /// Devices of the RDMA, net, PCI and auxiliary subsystems.
    Devices,
    /// Notices of the RDMA subsystem.
    Rdma,
}

impl Source {
    fn open(&self) -> io::Result<AsyncFd<KernelSocket>> {
        let (protocol, groups) = match self {
            Source::Links(_) => (NETLINK_ROUTE, LINK_GROUP),
            Source::Devices => (NETLINK_KOBJECT_UEVENT, UEVENT_GROUP),
            Source::Rdma => (NETLINK_RDMA, RDMA_GROUP),
        };
        let socket = KernelSocket::open(protocol, groups)?;
        socket.set_non_blocking(true)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe, for types whose descriptor may change; a Socket \
                      keeps its own until it is dropped, and this crate has no unsafe code"
        )]
        AsyncFd::new(socket)
    }

    /// Why a message is a reason to scan, if it is.
    fn judge(&self, message: &[u8]) -> Option<Trigger> {
        match self {
            Source::Links(watched) => link_indexes(message)
                .any(|index| watched.borrow().contains(&index))
                .then_some(Trigger::Link),
            Source::Devices => uevent_matters(message).then_some(Trigger::Device),
            Source::Rdma => Some(Trigger::Rdma),
        }
    }
}

/// Listens until `stop`, and triggers a scan for what matters.
pub(crate) async fn listen(source: Source, triggers: Triggers, stop: CancellationToken) {
    let mut logged = false;
    loop {
        let failed = tokio::select! {
            () = stop.cancelled() => return,
            failed = serve(&source, &triggers) => failed,
        };
        if !logged {
            tracing::info!(?source, error = %failed, "no events of this kind; will try again");
            logged = true;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(REOPEN_INTERVAL) => {}
        }
    }
}

/// Reads messages until the socket fails.
async fn serve(source: &Source, triggers: &Triggers) -> io::Error {
    let socket = match source.open() {
        Ok(socket) => socket,
        Err(error) => return error,
    };
    let mut buffer = Vec::new();
    loop {
        let mut ready = match socket.readable().await {
            Ok(ready) => ready,
            Err(error) => return error,
        };
        match ready.try_io(|socket| socket.get_ref().receive(&mut buffer)) {
            Ok(Ok(())) => {
                if let Some(reason) = source.judge(&buffer) {
                    triggers.send(reason);
                }
            }
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                triggers.send(Trigger::Device);
            }
            Ok(Err(error)) => return error,
            Err(_would_block) => {}
        }
    }
}

/// Interface indexes of the `RTM_NEWLINK` and `RTM_DELLINK` messages of a datagram.
fn link_indexes(datagram: &[u8]) -> impl Iterator<Item = u32> {
    const RTM_NEWLINK: u16 = 16;
    const RTM_DELLINK: u16 = 17;
    let mut rest = datagram;
    std::iter::from_fn(move || {
        loop {
            // struct nlmsghdr: length, type, flags, sequence, port; then struct ifinfomsg, whose
            // index is behind family, padding and type.
            let length = usize::try_from(u32::from_ne_bytes(take(rest, 0)?)).ok()?;
            let kind = u16::from_ne_bytes(take(rest, 4)?);
            let index = take(rest, 20).map(u32::from_ne_bytes);
            rest = rest
                .get(length.max(16).next_multiple_of(4)..)
                .unwrap_or_default();
            match (kind, index) {
                (RTM_NEWLINK | RTM_DELLINK, Some(index)) => return Some(index),
                _ if rest.is_empty() => return None,
                _ => {}
            }
        }
    })
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Whether a uevent is about hardware that matters. Virtual netdevs come and go with every pod.
fn uevent_matters(message: &[u8]) -> bool {
    const SUBSYSTEMS: [&[u8]; 7] = [
        b"infiniband",
        b"infiniband_verbs",
        b"infiniband_mad",
        b"infiniband_cm",
        b"net",
        b"pci",
        b"auxiliary",
    ];
    let value = |key: &[u8]| {
        message
            .split(|byte| *byte == 0)
            .find_map(|field| field.strip_prefix(key))
    };
    let Some(subsystem) = value(b"SUBSYSTEM=") else {
        return false;
    };
    let path = value(b"DEVPATH=").unwrap_or_default();
    if subsystem == b"misc" {
        return path.ends_with(b"/rdma_cm");
    }
    SUBSYSTEMS.contains(&subsystem)
        && !(subsystem == b"net" && path.starts_with(b"/devices/virtual/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uevent(fields: &[&str]) -> Vec<u8> {
        fields
            .iter()
            .flat_map(|field| field.bytes().chain([0]))
            .collect()
    }

    fn link(kind: u16, index: u32, extra: usize) -> Vec<u8> {
        let length = u32::try_from(32 + extra).unwrap();
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend([0, 0, 1, 0]);
        message.extend(index.to_ne_bytes());
        message.resize(32 + extra, 0);
        message
    }

    #[test]
    fn uevents_of_rdma_hardware_matter_and_those_of_pods_do_not() {
        let cases = [
            ("infiniband", "/devices/virtual/infiniband/rxe0", true),
            (
                "infiniband_verbs",
                "/devices/pci0000:3a/0000:3b:00.0/infiniband_verbs/uverbs0",
                true,
            ),
            ("net", "/devices/pci0000:3a/0000:3b:00.0/net/ens1f0", true),
            ("net", "/devices/virtual/net/veth1a2b", false),
            ("pci", "/devices/pci0000:3a/0000:3b:00.2", true),
            (
                "auxiliary",
                "/devices/pci0000:3a/0000:3b:00.0/mlx5_core.sf.4",
                true,
            ),
            ("misc", "/devices/virtual/misc/rdma_cm", true),
            ("misc", "/devices/virtual/misc/fuse", false),
            ("block", "/devices/virtual/block/loop0", false),
        ];
        for (subsystem, path, matters) in cases {
            let message = uevent(&[
                &format!("add@{path}"),
                "ACTION=add",
                &format!("DEVPATH={path}"),
                &format!("SUBSYSTEM={subsystem}"),
                "SEQNUM=4711",
            ]);
            assert_eq!(uevent_matters(&message), matters, "{path}");
        }
        assert!(!uevent_matters(b""));
        assert!(!uevent_matters(b"libudev\0\xfe\xed\xca\xfe"));
    }

    #[test]
    fn link_messages_are_found_among_others() {
        let mut datagram = link(16, 7, 8);
        datagram.extend(link(20, 8, 0));
        datagram.extend(link(17, 9, 3));
        assert_eq!(link_indexes(&datagram).collect::<Vec<_>>(), [7, 9]);
        let (watched, links) = watch::channel(BTreeSet::from([9]));
        let links = Source::Links(links);
        assert_eq!(links.judge(&datagram), Some(Trigger::Link));
        watched.send_replace(BTreeSet::from([8]));
        assert_eq!(links.judge(&datagram), None);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic_or_hang(bytes in proptest::collection::vec(0u8.., 0..80)) {
            let _ = link_indexes(&bytes).count();
            let _ = uevent_matters(&bytes);
        }
    }

    #[tokio::test]
    async fn sources_that_every_kernel_has_can_be_opened() {
        let links = watch::channel(BTreeSet::new()).1;
        assert!(Source::Links(links).open().is_ok());
        assert!(Source::Devices.open().is_ok());
    }
}
