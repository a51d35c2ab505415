//! What the messages of the tools mean, and what to do about them.

/// A message and its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cause {
    /// What the tool prints, without what varies.
    pub message: &'static str,
    /// What it means.
    pub why: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

/// Of perftest, rping and the shells they run in. More specific ones first: a tool prints several
/// when it fails.
const CAUSES: &[Cause] = &[
    Cause {
        message: "Couldn't allocate MR",
        why: "memory could not be registered: the memlock limit is too low, or, with GPU memory, \
              neither nvidia_peermem nor dma-buf is usable",
        remedy: "give the container the capability IPC_LOCK or raise the runtime's LimitMEMLOCK \
                 (preflight R01, R02); for GPU memory see preflight D01",
    },
    Cause {
        message: "Unable to find GID",
        why: "the port's table has no such GID in this network namespace",
        remedy: "show the table with \"rdmactl discover --gids\"; the interface needs its \
                 address before the device is opened",
    },
    Cause {
        message: "Failed to modify QP",
        why: "the queue pair found no way to the other end: a wrong GID, or an address without a \
              neighbour or route",
        remedy: "use a RoCE v2 GID of the interface's own address at both ends, and check \
                 \"ip neigh\" and \"ip route get\" in the container",
    },
    Cause {
        message: "Completion with error",
        why: "packets are sent, but not acknowledged (status 12), or the other end refused the \
              memory (status 10)",
        remedy: "status 12: search for a filter on UDP port 4791, a wrong rail, flow control (PFC) \
                 that drops, on InfiniBand for two limited members of a partition (preflight L13); \
                 status 10: the two ends were started with different sizes",
    },
    Cause {
        message: "Permission denied",
        why: "the device's node may not be opened, or the shell to the other pod was refused",
        remedy: "the container must ask for the resource; the node policy and its security \
                 context must let it open /dev/infiniband",
    },
    Cause {
        message: "Couldn't get device attributes",
        why: "the image's verbs library cannot query the device: it is of another driver release than \
              the kernel's driver, such as an OFED library on the kernel's own driver",
        remedy: "use an image with rdma-core, or with the OFED release of the node's driver",
    },
    Cause {
        message: "Unable to create QP",
        why: "the device refused a queue pair: the memlock limit is too low, the device has no free queue \
              pair, or it has no reliable connections, as EFA",
        remedy: "give the container the capability IPC_LOCK or raise the runtime's LimitMEMLOCK \
                 (preflight R01, R02); compare \"rdma resource\" on the node with max_qp of \
                 \"ibv_devinfo -v\"",
    },
    Cause {
        message: "does not support the kernel ABI of",
        why: "the image's verbs library skips a device, because its provider is of another driver release \
              than the kernel's driver",
        remedy: "use an image whose verbs provider (the package ibverbs-providers or the vendor's) is of the \
                 release of the node's driver",
    },
    Cause {
        message: "Failed to get IB devices list",
        why: "the container has no RDMA device",
        remedy: "ask for the resource in resources.limits",
    },
    Cause {
        message: "not found",
        why: "the tool, or the device it was given, is not in the container",
        remedy: "use an image with perftest, rdma-core and iputils",
    },
    Cause {
        message: "Unable to open",
        why: "the device could not be opened",
        remedy: "the container must ask for this device's resource in resources.limits",
    },
    Cause {
        message: "RDMA_CM_EVENT_ADDR_ERROR",
        why: "the connection manager found no RDMA device for the address",
        remedy: "the address must be on an interface of an RDMA device of this network namespace; \
                 in exclusive mode the device must have moved with it",
    },
    Cause {
        message: "RDMA_CM_EVENT_UNREACHABLE",
        why: "the other end does not answer the connection manager",
        remedy: "search for a filter on UDP port 4791 (RoCE v2), and check that both ends are on one rail",
    },
    Cause {
        message: "Couldn't connect to",
        why: "the other end's TCP port could not be reached over this network",
        remedy: "search for a network policy or filter between the two addresses",
    },
];

/// What perftest says of its socket whenever there is none, in the words it has for a device.
const OF_ITS_SOCKET: &str = "Unable to open file descriptor for socket connection";

/// The first known meaning of what a tool printed.
pub(super) fn of(text: &str) -> Option<&'static Cause> {
    let text = text.replace(OF_ITS_SOCKET, "");
    CAUSES.iter().find(|cause| text.contains(cause.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_message_wins() {
        let text = "Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n";
        assert!(of(text).unwrap().remedy.contains("4791"));
        let both = "Couldn't allocate MR\n Couldn't create IB resources\n";
        assert!(of(both).unwrap().why.contains("memlock"));
        let client = "Couldn't connect to 10.0.0.1:18515\nUnable to open file descriptor for \
                      socket connection\n Unable to init the socket connection\n";
        assert!(of(client).unwrap().why.contains("TCP port"));
        let server = format!("{client}\nIB device mlx5_9 not found\n Unable to find the device\n");
        assert!(of(&server).unwrap().why.contains("the device it was given"));
        assert_eq!(of("all is well"), None);
    }

    #[test]
    fn a_library_of_another_release_is_not_a_missing_device() {
        let query = "Couldn't get device attributes\nUnable to create QP.\nFailed to create QP.\n \
                     Couldn't create IB resources\n";
        assert!(of(query).unwrap().why.contains("another driver release"));
        let queue_pair =
            "Unable to create QP.\nFailed to create QP.\n Couldn't create IB resources\n";
        assert!(of(queue_pair).unwrap().remedy.contains("IPC_LOCK"));
        let skipped = "libibverbs: Warning: Driver bnxt_re does not support the kernel ABI of 6 (supports 1 \
                       to 1) for device /sys/class/infiniband/bnxt_re0\n";
        for further in [
            "IB device bnxt_re0 not found\n",
            "Failed to get IB devices list\n",
        ] {
            let text = format!("{skipped}{further}");
            assert!(of(&text).unwrap().why.contains("skips a device"), "{text}");
        }
        // It may be about another device than the one that was tested.
        let text = format!("{skipped}Couldn't allocate MR\n");
        assert!(of(&text).unwrap().why.contains("memlock"));
    }
}
