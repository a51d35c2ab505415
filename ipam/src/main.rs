//! `rdma-ipam`: called by a runtime (`CNI_COMMAND` is set) it is a CNI IPAM plugin; called by a
//! person it says what it is.

use ipam::plugin::Plugin;
use node::{calls, policy::DEFAULT_PATH};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[global_allocator]
static MEMORY: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

const ABOUT: &str = concat!(
    "CNI IPAM plugin rdma-ipam ",
    env!("CARGO_PKG_VERSION"),
    " is called by a CNI plugin. People ask rdmactl addresses."
);

fn main() -> ExitCode {
    cni_wire::serve::answer_panics();
    ExitCode::from(cni_wire::serve::serve(
        ABOUT,
        |name| std::env::var_os(name),
        std::io::stdin().lock(),
        &mut std::io::stdout().lock(),
        &mut std::io::stderr().lock(),
        |request| {
            let policy = std::env::var_os("RDMA_NETDEV_POLICY").map(PathBuf::from);
            let policy = policy.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
            let node = std::env::var("RDMA_NODE_NAME").ok();
            let root = std::env::var_os("RDMA_HOST_ROOT").map(PathBuf::from);
            let root = root.as_deref().unwrap_or(Path::new("/"));
            let started = Instant::now();
            let answer = Plugin::load(policy, root, node.as_deref()).serve(request);
            let code = answer.as_ref().err().map(|error| error.code);
            let file = calls::file_of(root, "rdma-ipam");
            calls::count(&file, request.command(), code, started.elapsed());
            answer
        },
    ))
}
