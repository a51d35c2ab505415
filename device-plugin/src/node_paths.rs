//! Where the things of this node are: one value for all tasks of the daemon.

use std::path::PathBuf;

use attachment::node::Places;
use hca::Host;
use node::policy::Policy;

/// Where things are.
#[derive(Debug, Clone)]
pub(crate) struct NodePaths {
    /// Root directory, policy and name of the node.
    pub node: Places,
    /// Roots of the host's kernel file systems.
    pub host: Host,
    /// The directory of the node's sockets, which has the bindings of slots and the counts of CNI
    /// calls, and ends with the boot.
    pub run_dir: PathBuf,
    /// The host's cgroups, or the part of them that has the pods.
    pub cgroup_dir: PathBuf,
    /// Where CDI files go.
    pub cdi_dir: PathBuf,
    /// Where device information goes.
    pub device_info_dir: PathBuf,
    /// The kubelet's device-plugins directory, which has its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// The kubelet's root directory.
    pub kubelet_root_dir: PathBuf,
}

impl NodePaths {
    /// The node's policy, as far as it can be read.
    pub(crate) fn policy(&self) -> Policy {
        hca::host::show(&self.node.policy);
        Policy::load_for_release(&self.node.policy).0
    }

    /// The state directory that the policy names.
    pub(crate) fn state_dir(&self) -> PathBuf {
        let state_dir = self.policy().state_dir;
        hca::host::show(&state_dir);
        state_dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl NodePaths {
        /// Of a node whose every directory is this one.
        pub(crate) fn all_in(directory: &std::path::Path) -> Self {
            let directory = || directory.to_owned();
            Self {
                node: Places {
                    root: "/".into(),
                    policy: directory().join("policy.json"),
                    node: Some("n1".into()),
                },
                host: Host::at("/"),
                run_dir: directory(),
                cgroup_dir: directory(),
                cdi_dir: directory(),
                device_info_dir: directory(),
                device_plugin_dir: directory(),
                kubelet_root_dir: directory(),
            }
        }
    }
}
