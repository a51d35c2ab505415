//! Device plugin that advertises RDMA HCAs to the kubelet and hands containers their character devices.
