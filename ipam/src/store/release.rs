//! Freeing: DEL's steps, as the module above tells them.

use super::dir::Meta;
use super::name::{self, Seat};
use super::owner::{Content, Owned};
use super::{Store, StoreError, hint};
use crate::lease::Lease;
use crate::range::bits;

/// Whether a lease was given for another network. After a refused ADD the runtime calls DEL, which
/// must not free what the container's interface of that name has. A lease that was imported from
/// whereabouts has no boot; whereabouts' objects do not name the CNI network.
fn is_of_another_network(owned: &Owned, network: &str) -> bool {
    let holder = owned.lease().map(|lease| &lease.holder);
    holder.is_some_and(|holder| !holder.boot.is_empty() && holder.network != network)
}

impl Store {
    /// Frees every address of an attachment. What is gone already is no error.
    /// Answers what was freed, and what was found that is no record.
    ///
    /// # Errors
    /// The first thing that failed; the rest was attempted.
    pub fn give_back(
        &self,
        container: &str,
        interface: &str,
        network: &str,
    ) -> Result<(Vec<Lease>, Vec<String>), StoreError> {
        let (mut freed, mut strange, mut first_error) = (Vec::new(), Vec::new(), None);
        // From the top, so that the numbering never has gaps.
        for owned in self.owned(container, interface)?.iter().rev() {
            if is_of_another_network(owned, network) {
                continue;
            }
            match self.release_owned(owned) {
                Ok(true) => freed.extend(owned.lease().cloned()),
                Ok(false) => {
                    strange.extend(owned.fault().map(|why| format!("{}: {why}", owned.name)))
                }
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok((freed, strange)), Err)
    }

    /// Frees one record's address and removes the record. False when it held
    /// none, or is nothing to be believed.
    ///
    /// # Errors
    /// When a call failed; the record is still there then.
    pub fn release_owned(&self, owned: &Owned) -> Result<bool, StoreError> {
        match &owned.content {
            Content::Lease(lease, meta) => {
                let held = self.release_seat(lease, meta)?;
                Ok(self.remove_released(owned, lease, meta)? || held)
            }
            // Killed between create and write: no seat was ever taken by it.
            Content::Broken(_, meta) if meta.names < 2 => {
                self.remove_last(owned, meta)?;
                Ok(false)
            }
            // Emptied by a crash of the machine, it leads nowhere. Reclaim finds
            // its seat by other means.
            Content::Broken(..) | Content::Foreign(_) => Ok(false),
        }
    }

    /// Removes the record of a seat that was freed or was not there; whether an ADD that
    /// slept had linked it since, and it was freed now: that ADD read the record before
    /// it was removed, so it did not withdraw.
    pub(super) fn remove_released(
        &self,
        owned: &Owned,
        lease: &Lease,
        meta: &Meta,
    ) -> Result<bool, StoreError> {
        self.remove_last(owned, meta)?;
        match self.holds(lease, meta)? {
            true => self.release_seat(lease, meta),
            false => Ok(false),
        }
    }

    /// This machine's names in this boot.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.node.name)
            .chain(&self.previous_names)
            .map(String::as_str)
    }

    /// Removes a record, unless the owner has a higher one: that one could not be
    /// freed just now, and the numbering that leads to it must have no gap. What
    /// stays is a record without seat; the next DEL removes both.
    pub(super) fn remove_last(&self, owned: &Owned, meta: &Meta) -> Result<(), StoreError> {
        if let Some(next) = name::next_owned(&owned.name)
            && owned.dir.meta(&next)?.is_some()
        {
            return Ok(());
        }
        // Or the record of a DEL that was done might come back, and nobody calls DEL again.
        if owned.dir.unlink_same(&owned.name, meta)? && self.durable() {
            owned.dir.sync()?;
        }
        Ok(())
    }

    /// Frees the seat of a record, if it holds it, and the pod's hint. The address rests
    /// from now.
    pub(super) fn release_seat(&self, lease: &Lease, meta: &Meta) -> Result<bool, StoreError> {
        self.release_seat_at(lease, meta, now())
    }

    /// The same for an address that was never answered, so that nobody can send to it:
    /// it does not rest.
    pub(super) fn release_unanswered(&self, owned: &Owned) -> Result<(), StoreError> {
        if let Content::Lease(lease, meta) = &owned.content {
            self.release_seat_at(lease, meta, 0)?;
        }
        self.release_owned(owned)?;
        Ok(())
    }

    fn release_seat_at(&self, lease: &Lease, meta: &Meta, at: u64) -> Result<bool, StoreError> {
        let mut held = false;
        if let Some(shard) = self.shard_of(lease)? {
            let seat = Seat::of(lease);
            let name = seat.name();
            if shard
                .meta(&name)?
                .is_some_and(|there| there.same_file(meta))
            {
                let freed = Seat {
                    freed: Some(at),
                    ..seat
                };
                held = shard.rename(&name, &freed.name())?;
                // Or a loss of power might take back this, but not the next step.
                if self.durable() {
                    shard.sync()?;
                }
            }
        }
        // Even when it was not held: a DEL killed half-way may have left this out.
        self.announce(lease);
        if let Some((bucket, entry)) = name::pod_of(lease)
            && let Some(pods) = self.open_below(&["pods", &bucket])?
        {
            pods.unlink_same(&entry, meta)?;
        }
        Ok(held)
    }

    fn announce(&self, lease: &Lease) {
        let space = name::space(lease.network_name.as_deref());
        if let Ok(dir) = self.make_below(&["hints", &space]) {
            // Advice; see `hint`.
            let _ = hint::released(&dir, bits(lease.address));
        }
    }
}

/// Unix milliseconds by this machine's clock.
pub(super) fn now() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// The same, for records.
pub(super) fn timestamp() -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(jiff::Timestamp::now().as_millisecond())
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}
