//! Cluster-wide IP address management for RDMA pods: ranges, leases, a shared store; library and the CNI IPAM plugin rdma-ipam.
