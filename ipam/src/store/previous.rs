//! The lease of a pod's previous sandbox, found by the pod's name.

use super::allocate::Want;
use super::dir::Meta;
use super::owner::{Content, read};
use super::{Store, StoreError};
use crate::lease::Lease;
use node::netns::{self, Netns};
use std::path::Path;

/// A lease that another container of the same pod holds.
#[derive(Debug)]
pub struct PreviousLease {
    lease: Lease,
    meta: Meta,
    netns: Netns,
}

impl PreviousLease {
    /// The lease.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// What this node knows of its network namespace, which must be one of this
    /// node's to be known.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }
}

impl Store {
    /// The lease of the same range that another container of the wanting pod holds.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn previous_lease(&self, want: &Want<'_>) -> Result<Option<PreviousLease>, StoreError> {
        let Some((bucket, entry)) = want.pod_entry() else {
            return Ok(None);
        };
        let Some(pods) = self.open_below(&["pods", &bucket])? else {
            return Ok(None);
        };
        let Some(Content::Lease(lease, meta)) = read(&pods, &entry)? else {
            return Ok(None);
        };
        // The name is a hash: make sure that it is this pod's, and still holds.
        let same = lease
            .holder
            .pod
            .as_ref()
            .map(|pod| (&pod.namespace, &pod.name))
            == want
                .holder
                .pod
                .as_ref()
                .map(|pod| (&pod.namespace, &pod.name))
            && lease.holder.interface == want.holder.interface
            && lease.range == want.range.subnet()
            && lease.network_name.as_deref() == want.network_name
            && lease.overlapping == want.overlapping;
        if !same || lease.holder.container == want.holder.container || !self.holds(&lease, &meta)? {
            return Ok(None);
        }
        let netns = self.netns_of(&lease);
        Ok(Some(PreviousLease {
            lease: *lease,
            meta,
            netns,
        }))
    }

    /// Releases a previous lease and removes its owner's record.
    ///
    /// # Errors
    /// When a call failed; the lease may still be there then.
    pub fn release_previous(&self, previous: &PreviousLease) -> Result<(), StoreError> {
        self.release_lease(&previous.lease, &previous.meta)
    }

    fn netns_of(&self, lease: &Lease) -> Netns {
        let holder = &lease.holder;
        if holder.boot == self.node.boot {
            // A boot ID is unique: the namespace is of this machine.
            return match &holder.netns {
                Some(path) => {
                    let (root, proc) = (Path::new("/"), Path::new("/proc"));
                    netns::read(root, proc, path, holder.netns_inode)
                }
                None => Netns::Unknown("no namespace is recorded"),
            };
        }
        let earlier_boot = holder.node == self.node.name
            && holder.machine == self.node.machine
            && !holder.boot.is_empty()
            && !holder.machine.is_empty();
        match earlier_boot {
            true => Netns::Gone,
            false => Netns::Unknown("it is of another machine"),
        }
    }
}
