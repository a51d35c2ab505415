//! This host as the daemon sees it: its HCAs, also those that pods have, and what a configuration makes
//! of them.

use std::net::IpAddr;
use std::path::Path;

use hca::Hca;
use hca::inventory::Unusable;
use pools::config::Config;
use pools::history;
use pools::host_snapshot::HostSnapshot;
use pools::pool::{self, Pools};

use crate::global::Global;

/// A host that was scanned.
#[derive(Debug)]
pub(crate) struct OnHost {
    pub scanned: HostSnapshot,
    pub hcas: Vec<Hca>,
    /// RDMA devices that are of no HCA.
    pub unusable: Vec<Unusable>,
}

impl OnHost {
    /// Scans this host. `node_addresses` are those that the cluster knows the node by.
    ///
    /// # Errors
    /// It cannot be scanned, or the scan hangs.
    pub(crate) fn scan(
        global: &Global,
        node_addresses: &[IpAddr],
        policy: &Path,
    ) -> anyhow::Result<Self> {
        let scanned = global.scan(node_addresses)?;
        let (hcas, unusable) = history::list(&scanned, policy, &global.host());
        Ok(Self {
            scanned,
            hcas,
            unusable,
        })
    }

    /// The pools of a configuration here.
    pub(crate) fn pools(&self, config: &Config) -> Pools {
        pool::assemble(config, &self.hcas, &self.scanned, &[])
    }
}
