//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
