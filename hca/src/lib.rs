//! Which RDMA hardware a Linux host has: sysfs, character devices, ports, GIDs, PCI, RDMA netlink; looks, never changes.
