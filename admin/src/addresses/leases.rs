//! Who holds which address.

use ipam::lease::Lease;
use ipam::leases::{LeaseError, Leases};
use node::table::{age, cell};

use super::complain_of;
use crate::output::{self, optional};

/// Those of a store, by address. What is not a lease is complained of.
pub(super) fn read(leases: &Leases, store: &str) -> Result<Vec<Lease>, LeaseError> {
    let mut listed = leases.list()?;
    for finding in listed.findings {
        complain_of(&finding.path, &finding.what);
    }
    listed.leases.retain(|lease| lease.store == store);
    let key = |lease: &Lease| (lease.network_name.clone(), lease.address);
    listed.leases.sort_by_cached_key(key);
    Ok(listed.leases)
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
