//! The lease of a pod's former sandbox, found by the pod's name.

use super::allocate::Want;
use super::dir::Meta;
use super::name;
use super::owner::{Content, read};
use super::{Store, StoreError};
use crate::lease::Lease;
use node::netns::{self, Netns};
use std::path::Path;

/// A lease that another container of the same pod holds.
#[derive(Debug)]
pub struct Former {
    lease: Lease,
    meta: Meta,
    gone: bool,
}

impl Former {
    /// The lease.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Whether its network namespace is known to be gone: by this node, of which
    /// it must be one.
    #[must_use]
    pub fn netns_is_gone(&self) -> bool {
        self.gone
    }
}

impl Store {
    /// The lease of the same range that another container of the wanting pod holds.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn former_lease(&self, want: &Want<'_>) -> Result<Option<Former>, StoreError> {
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
        let gone = self.is_gone(&lease);
        Ok(Some(Former {
            lease: *lease,
            meta,
            gone,
        }))
    }

    /// Ends a former lease: frees its address and its owner's record.
    ///
    /// # Errors
    /// When a call failed; the lease may still be there then.
    pub fn end(&self, former: &Former) -> Result<(), StoreError> {
        self.release_seat(&former.lease, &former.meta)?;
        self.drop_record(&former.lease, &former.meta)
    }

    /// Removes the record of a lease that was ended by somebody else than its owner.
    pub(super) fn drop_record(&self, lease: &Lease, meta: &Meta) -> Result<(), StoreError> {
        let holder = &lease.holder;
        let records = self.owned_at(
            name::node(&holder.node),
            &holder.container,
            &holder.interface,
        )?;
        if let Some(owned) = records.iter().find(|owned| owned.is_file(meta)) {
            self.remove_last(owned, meta)?;
        }
        Ok(())
    }

    fn is_gone(&self, lease: &Lease) -> bool {
        let holder = &lease.holder;
        if holder.node != self.node.name || holder.machine != self.node.machine {
            return false;
        }
        if holder.boot != self.node.boot {
            return !holder.boot.is_empty() && !holder.machine.is_empty();
        }
        let Some(path) = &holder.netns else {
            return false;
        };
        netns::look(Path::new("/"), Path::new("/proc"), path, holder.netns_inode) == Netns::Gone
    }
}
