//! The lease of a pod's previous sandbox, found by the pod's name.

use super::allocate::Want;
use super::dir::Meta;
use super::name::LeaseName;
use super::owner::{Content, read};
use super::{Store, StoreError};
use crate::lease::{Holder, Lease};
use node::netns::{self, Netns};
use std::path::Path;

/// A lease that another container of the same pod holds.
#[derive(Debug)]
pub(super) struct PreviousLease {
    pub(super) lease: Lease,
    meta: Meta,
    /// What this node knows of its network namespace, which must be one of this node's to be known.
    pub(super) netns: Netns,
}

impl PreviousLease {
    /// Whether this is the lease.
    pub(super) fn is(&self, lease: &Lease) -> bool {
        LeaseName::of(&self.lease) == LeaseName::of(lease)
            && self.lease.network_name == lease.network_name
    }
}

impl Store {
    /// The lease of the same range that another container of the wanting pod holds; of
    /// several, the first that `wanted` lets pass.
    pub(super) fn previous_lease(
        &self,
        want: &Want<'_>,
        wanted: impl Fn(&Lease) -> bool,
    ) -> Result<Option<PreviousLease>, StoreError> {
        let Some((bucket, entry)) = want.pod_entry() else {
            return Ok(None);
        };
        let Some(pods) = self.open_below(&["pods", &bucket])? else {
            return Ok(None);
        };
        let Some(Content::Record(record, meta)) = read(&pods, &entry)? else {
            return Ok(None);
        };
        // The name is a hash: make sure that it is this pod's, and still holds.
        let names = |holder: &Holder| {
            let pod = holder.pod.clone();
            pod.map(|pod| (pod.namespace, pod.name))
        };
        let of_range = |lease: &&Lease| {
            names(&lease.holder) == names(want.holder)
                && lease.holder.interface == want.holder.interface
                && lease.holder.container != want.holder.container
                && lease.range == want.range.subnet()
                && lease.network_name.as_deref() == want.network_name
                && lease.overlapping == want.overlapping
                && wanted(lease)
        };
        for lease in record.leases().iter().filter(of_range) {
            if self.holds(lease, &meta)? {
                return Ok(Some(PreviousLease {
                    netns: self.netns_of(lease),
                    lease: lease.clone(),
                    meta,
                }));
            }
        }
        Ok(None)
    }

    /// Releases a previous lease and removes its owner's record, once that holds no other.
    ///
    /// # Errors
    /// When a call failed; the lease may still be there then.
    pub(super) fn release_previous(&self, previous: &PreviousLease) -> Result<(), StoreError> {
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
        match self.is_of_an_earlier_boot(holder) {
            true => Netns::Gone,
            false => Netns::Unknown("it is of another machine"),
        }
    }

    /// Whether an attachment was made before this machine booted.
    pub(super) fn is_of_an_earlier_boot(&self, holder: &Holder) -> bool {
        holder.node == self.node.name
            && holder.machine == self.node.machine
            && holder.boot != self.node.boot
            && !holder.boot.is_empty()
            && !holder.machine.is_empty()
    }
}
