//! Leasing one address: steps 1 to 5 of ADD, as the module above describes them.

use super::dir::{Dir, Meta, meta_of};
use super::name::{self, Class, LeaseName};
use super::shard::Standing;
use super::{Store, StoreError};
use crate::lease::{self, Lease};
use nix::errno::Errno;
use std::fs::File;
use std::rc::Rc;

/// A record under its owner's name that has no lease entry yet.
#[derive(Debug)]
pub(super) struct Intent {
    dir: Rc<Dir>,
    name: String,
    file: File,
    meta: Meta,
}

impl Store {
    /// Step 1: creates the record that says what is going to be taken.
    pub(super) fn intend(&self, lease: &Lease, index: usize) -> Result<Intent, StoreError> {
        let holder = &lease.holder;
        let (bucket, name) = name::owner(&holder.container, &holder.interface, index);
        let dir = self.make_below(&["owners", name::node(&holder.node), &bucket])?;
        let record = bounded_record(lease)?;
        let Some(file) = dir.create(&name, &record, self.durable())? else {
            return Err(overtaken(lease));
        };
        if let Some(by) = dir
            .foreign_owner(&file)
            .map_err(dir.failed("read the owner of", &name))?
        {
            dir.unlink(&name)?;
            return Err(StoreError::Squashed {
                directory: self.root.path().to_owned(),
                owner: dir.owner(),
                by,
            });
        }
        let meta = meta_of(&file).map_err(dir.failed("read", &name))?;
        Ok(Intent {
            dir,
            name,
            file,
            meta,
        })
    }

    /// The same record for another address: nothing leads to the one before.
    pub(super) fn intend_instead(&self, intent: &Intent, lease: &Lease) -> Result<(), StoreError> {
        Ok(intent.dir.refill(
            &intent.name,
            &intent.file,
            &bounded_record(lease)?,
            self.durable(),
        )?)
    }

    /// Steps 3 to 5: whether the lease entry is ours. An error leaves the record, which
    /// leads the owner's next DEL or ADD to whatever was done.
    pub(super) fn claim(
        &self,
        intent: &Intent,
        lease: &Lease,
        shard: &Dir,
    ) -> Result<bool, StoreError> {
        Ok(self.link_entry(intent, lease, shard)? && self.confirm(intent, lease, shard)?)
    }

    /// Step 3: whether the lease entry is this record.
    pub(super) fn link_entry(
        &self,
        intent: &Intent,
        lease: &Lease,
        shard: &Dir,
    ) -> Result<bool, StoreError> {
        let name = LeaseName::of(lease).name();
        let linked = match intent.dir.link(&intent.name, shard, &name) {
            // The record is gone: a DEL was here.
            Err(error) if error.source == Errno::ENOENT => return Err(overtaken(lease)),
            other => other?,
        };
        if linked {
            return Ok(true);
        }
        // The answer to a link that was done may have been lost on its way.
        let there = shard.meta(&name)?;
        Ok(there.is_some_and(|there| there.same_file(&intent.meta)))
    }

    /// Steps 4 and 5: whether a lease entry that was linked is ours; if not, it is withdrawn.
    pub(super) fn confirm(
        &self,
        intent: &Intent,
        lease: &Lease,
        shard: &Dir,
    ) -> Result<bool, StoreError> {
        let lease_name = LeaseName::of(lease);
        let entry = lease_name.name();
        let links = meta_of(&intent.file)
            .map_err(intent.dir.failed("read", &intent.name))?
            .links;
        // The count alone is not enough: NFS gives a file that this process has open
        // another name when it is removed ("silly rename"), and counts that one.
        let named = intent.dir.meta(&intent.name)?;
        if links < 2 || !named.is_some_and(|there| there.same_file(&intent.meta)) {
            self.withdraw(shard, &entry)?;
            return Err(overtaken(lease));
        }
        if self.durable() {
            intent.dir.sync()?;
            shard.sync()?;
        }
        let address = lease.address.to_string();
        let listing = shard.names_that(|name| name::is_lease_name_of(&address, name))?;
        let standing = Standing::of(&lease_name, listing.iter().map(String::as_str));
        if standing != Standing::Alone
            || self.taken_by_other_class(&listing, &lease_name, lease, shard)?
        {
            self.withdraw(shard, &entry)?;
            return Ok(false);
        }
        self.tidy(&listing, &lease_name, shard);
        self.hint_pod(intent, lease);
        Ok(true)
    }

    /// Takes back a link. The record may be refilled for another address or removed
    /// next: a loss of power must not bring the link back after that.
    fn withdraw(&self, shard: &Dir, lease_name: &str) -> Result<(), StoreError> {
        shard.unlink(lease_name)?;
        if self.durable() {
            shard.sync()?;
        }
        Ok(())
    }

    /// Removes a record that has no address.
    pub(super) fn remove_intent(&self, intent: Intent) -> Result<(), StoreError> {
        intent.dir.unlink_same(&intent.name, &intent.meta)?;
        Ok(())
    }

    /// Whether a lease of the other class at the same address is of the same range.
    pub(super) fn taken_by_other_class(
        &self,
        listing: &[String],
        lease_name: &LeaseName,
        lease: &Lease,
        shard: &Dir,
    ) -> Result<bool, StoreError> {
        let other_class = other_class(lease);
        for other in listing.iter().filter_map(|name| LeaseName::parse(name)) {
            if other.address == lease_name.address
                && other.class == other_class
                && other.freed.is_none()
                && self.other_class_conflicts(lease, other.generation, shard)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a lease of the other class counts for this lease's range. The
    /// other class of a shared lease is named after the range; the other way round its
    /// record has to be read, and one that cannot be read counts.
    pub(super) fn other_class_conflicts(
        &self,
        lease: &Lease,
        generation: u64,
        shard: &Dir,
    ) -> Result<bool, StoreError> {
        if lease.overlapping {
            return Ok(true);
        }
        let other_class = LeaseName {
            address: lease.address,
            class: other_class(lease),
            generation,
            freed: None,
        };
        Ok(match super::owner::read(shard, &other_class.name())? {
            None => false,
            Some(super::owner::Content::Lease(other, _)) => other.range == lease.range,
            Some(_) => true,
        })
    }

    /// Step 5: freed entries of lower numbers than this claim's.
    fn tidy(&self, listing: &[String], lease_name: &LeaseName, shard: &Dir) {
        for name in listing {
            if let Some(other) = LeaseName::parse(name)
                && other.address == lease_name.address
                && other.class == lease_name.class
                && other.freed.is_some()
                && other.generation < lease_name.generation
            {
                // Left behind, it is passed over until the next claim.
                let _ = shard.unlink(name);
            }
        }
    }

    /// Lets the next sandbox of the same pod find the address. A hint only.
    fn hint_pod(&self, intent: &Intent, lease: &Lease) {
        let Some((bucket, entry)) = name::pod_of(lease) else {
            return;
        };
        let hinted = || -> Result<(), StoreError> {
            let pods = self.make_below(&["pods", &bucket])?;
            if !intent.dir.link(&intent.name, &pods, &entry)? {
                pods.unlink(&entry)?;
                intent.dir.link(&intent.name, &pods, &entry)?;
            }
            Ok(())
        };
        // Without it the pod's next sandbox gets another address; no harm.
        let _ = hinted();
    }
}

/// The class of leases that the same range may have in another configuration.
pub(super) fn other_class(lease: &Lease) -> Class {
    Class::of(lease.range, !lease.overlapping)
}

/// The record, which must be one that can be read again.
fn bounded_record(lease: &Lease) -> Result<Vec<u8>, StoreError> {
    let record = lease.encode();
    if record.len() as u64 > lease::MAX_BYTES {
        return Err(StoreError::Oversize {
            bytes: record.len(),
        });
    }
    Ok(record)
}

fn overtaken(lease: &Lease) -> StoreError {
    StoreError::Overtaken {
        container: lease.holder.container.clone(),
        interface: lease.holder.interface.clone(),
    }
}
