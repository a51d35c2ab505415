//! Network namespaces of this node, where the kernel has no list of them.

use std::{collections::BTreeSet, fs, iter, path::Path};

use netlink::Namespace;

use crate::node::Node;

/// Where runtimes keep network namespaces, beside the directory of the pod's own.
const NETNS_DIRECTORY: &str = "/run/netns";

/// The namespaces that lie where the pod's does or in `/run/netns`, then those of processes, each
/// once, without the host's. One that cannot be opened is passed over: it may be gone by now.
pub fn all<'a>(node: &'a Node, pod: &'a Namespace) -> impl Iterator<Item = Namespace> + use<'a> {
    let host = node.netns.namespace.id();
    let mut seen = BTreeSet::from([(host.device, host.inode)]);
    let beside = pod
        .path()
        .parent()
        .filter(|directory| !directory.starts_with("/proc"));
    let directories = beside.into_iter().chain([Path::new(NETNS_DIRECTORY)]);
    let named = directories
        .flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten())
        .filter_map(|entry| Namespace::open(&entry.path()).ok().flatten());
    // Read only when it is come to: nodes have thousands of processes.
    let of_processes = iter::once(()).flat_map(|()| Namespace::of_processes(&node.roots.proc));
    named.chain(of_processes).filter(move |namespace| {
        let id = namespace.id();
        seen.insert((id.device, id.inode))
    })
}
