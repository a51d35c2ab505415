//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
//! Parses and calls.

use std::{env, io, path::PathBuf, process::ExitCode};

use rdma_netdev::{command, node::Places};

fn main() -> ExitCode {
    cni_wire::serve::answer_panics();
    let status = cni_wire::serve::serve(
        concat!("CNI plugin rdma-netdev ", env!("CARGO_PKG_VERSION")),
        |name| env::var_os(name),
        io::stdin().lock(),
        &mut io::stdout().lock(),
        &mut io::stderr().lock(),
        |request| command::run(&places(), request),
    );
    ExitCode::from(status)
}

/// The runtime's environment is the administrator's; nothing of a configuration gets here.
fn places() -> Places {
    let path =
        |name, default: &str| env::var_os(name).map_or_else(|| default.into(), PathBuf::from);
    Places {
        root: path("RDMA_NETDEV_HOST_ROOT", "/"),
        policy: path("RDMA_NETDEV_POLICY", ipam::policy::DEFAULT_PATH),
        node: env::var("RDMA_NODE_NAME").ok(),
    }
}
