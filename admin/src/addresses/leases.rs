//! Who holds which address.

use std::net::IpAddr;

use clap::Args;
use ipam::lease::Lease;
use ipam::leases::{LeaseError, Leases, Listed};
use ipnetwork::IpNetwork;
use node::table::{age, cell};

use super::{complain_of, names_pod};
use crate::output::{self, Exit, complain, optional};

/// Which leases.
#[derive(Debug, Default, Args)]
pub(super) struct Filter {
    /// Only leases of this pool
    #[arg(long, value_name = "RANGE")]
    pool: Option<IpNetwork>,
    /// Only leases of this network name; "" for none
    #[arg(long, value_name = "NAME")]
    network_name: Option<String>,
    /// Only leases of this pod, as NAME or NAMESPACE/NAME
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Only leases of this address
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Only leases of this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
}

impl Filter {
    pub(super) fn is_set(&self) -> bool {
        self.pool.is_some()
            || self.network_name.is_some()
            || self.pod.is_some()
            || self.address.is_some()
            || self.node.is_some()
    }

    /// Nothing that fits a filter is worth an exit status.
    pub(super) fn outcome(&self, is_empty: bool) -> Exit {
        if is_empty && self.is_set() {
            complain("no such lease");
            return Exit::Found;
        }
        Exit::Good
    }

    pub(super) fn leases(&self, leases: &Leases, store: &str) -> Result<Vec<Lease>, LeaseError> {
        let Listed {
            leases: mut listed,
            findings,
        } = leases.list()?;
        for finding in findings {
            complain_of(&finding.path, &finding.what);
        }
        listed.retain(|lease| lease.store == store);
        if let Some(pool) = self.pool
            && !listed.iter().any(|lease| lease.range == pool)
            && !leases.pools()?.iter().any(|known| known.range == pool)
        {
            complain(&format!(
                "no pool {pool} is in use here; rdmactl addresses lists them"
            ));
        }
        listed.retain(|lease| self.means(lease));
        listed.sort_by(|a, b| (&a.network_name, a.address).cmp(&(&b.network_name, b.address)));
        Ok(listed)
    }

    fn means(&self, lease: &Lease) -> bool {
        let network_name = lease.network_name.as_deref().unwrap_or_default();
        self.pool.is_none_or(|pool| pool == lease.range)
            && (self.network_name.as_deref()).is_none_or(|name| name == network_name)
            && self.address.is_none_or(|address| address == lease.address)
            && (self.node.as_ref()).is_none_or(|node| *node == lease.holder.node)
            && (self.pod.as_ref()).is_none_or(|name| names_pod(lease, name))
    }
}

pub(super) fn table(leases: &[Lease]) -> String {
    let header = "ADDRESS  NETWORK NAME  POD  INTERFACE  NODE  NETWORK  CONTAINER  AGE";
    output::table(header, leases.iter().map(row))
}

fn row(lease: &Lease) -> Vec<String> {
    let holder = &lease.holder;
    vec![
        format!("{}/{}", lease.address, lease.prefix),
        optional(lease.network_name.as_deref()),
        optional(holder.pod.as_ref()),
        cell(&holder.interface),
        cell(&holder.node),
        cell(&holder.network),
        cell(holder.container.get(..12).unwrap_or(&holder.container)),
        age(jiff::Timestamp::now().as_second() - lease.created.as_second()),
    ]
}
