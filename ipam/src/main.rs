//! `rdma-ipam`: called by a runtime (`CNI_COMMAND` is set) it is a CNI IPAM
//! plugin, called by a person an administrator's tool.

use ipam::plugin::Plugin;
use ipam::policy::DEFAULT_PATH;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const ABOUT: &str = concat!("CNI IPAM plugin rdma-ipam ", env!("CARGO_PKG_VERSION"));

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
            let node = std::env::var("RDMA_NODE_NAME").ok();
            let policy = policy.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
            Plugin::load(policy, Path::new("/"), node.as_deref()).serve(request)
        },
    ))
}
