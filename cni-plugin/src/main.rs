//! CNI plugin that moves an RDMA netdev into a pod or wraps it, and puts it back unharmed.
//! Called by a runtime (`CNI_COMMAND` is set) it is a CNI plugin; called by a person it says what it
//! is. Parses and calls.

use std::{env, io, path::PathBuf, process::ExitCode};

use attachment::node::Places;
use rdma_netdev::command;

#[global_allocator]
static MEMORY: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

const ABOUT: &str = concat!(
    "CNI plugin rdma-netdev ",
    env!("CARGO_PKG_VERSION"),
    " is called by a container runtime. People ask rdmactl."
);

fn main() -> ExitCode {
    cni_wire::serve::answer_panics();
    let status = cni_wire::serve::serve(
        ABOUT,
        |name| env::var_os(name),
        io::stdin().lock(),
        &mut io::stdout().lock(),
        &mut io::stderr().lock(),
        |request| Ok(command::run(&places(), request)?),
    );
    ExitCode::from(status)
}

/// The runtime's environment is the administrator's; nothing of a configuration gets here.
fn places() -> Places {
    let path =
        |name, default: &str| env::var_os(name).map_or_else(|| default.into(), PathBuf::from);
    Places {
        root: path("RDMA_HOST_ROOT", "/"),
        policy: path("RDMA_NETDEV_POLICY", node::policy::DEFAULT_PATH),
        node: env::var("RDMA_NODE_NAME").ok(),
    }
}
