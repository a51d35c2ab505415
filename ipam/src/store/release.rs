//! Releasing: DEL's steps, as the module above describes them. An address is released
//! (`release_address`), a record is removed (`remove_record`), or both (`release`,
//! `release_entry`).

use super::dir::{Dir, Meta, meta_of, system};
use super::name::{self, LeaseName};
use super::owner::{Content, Owned, is_entry_of, read};
use super::scan::Entry;
use super::{Store, StoreError, hint};
use crate::lease::{Lease, Record};
use crate::range::bits;
use nix::errno::Errno;
use std::rc::Rc;

/// Whether a record was made for another network. After a refused ADD the runtime calls DEL, which
/// must not free what the container's interface of that name has.
fn is_of_another_network(owned: &Owned, network: &str) -> bool {
    let holder = owned.leases().first().map(|lease| &lease.holder);
    holder.is_some_and(|holder| holder.network != network)
}

/// Whether a released address cools down before it is leased again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoolDown {
    FromNow,
    /// No ADD answered with it, so that no peer can send to it.
    NeverAnswered,
}

impl Store {
    /// Releases every address of an attachment. What is gone already is not an error.
    /// Answers what was freed, and what was found that is not a record.
    ///
    /// # Errors
    /// The first thing that failed; the rest was attempted.
    pub fn give_back(
        &self,
        container: &str,
        interface: &str,
        network: &str,
    ) -> Result<(Vec<Lease>, Vec<String>), StoreError> {
        self.give_back_listed(&self.owned(container, interface)?, network)
    }

    /// The same of records that were listed just now.
    pub(super) fn give_back_listed(
        &self,
        listed: &[Owned],
        network: &str,
    ) -> Result<(Vec<Lease>, Vec<String>), StoreError> {
        let (mut freed, mut strange, mut first_error) = (Vec::new(), Vec::new(), None);
        // From the top, so that the numbering never has gaps.
        for owned in listed.iter().rev() {
            if is_of_another_network(owned, network) {
                continue;
            }
            match self.release(owned, CoolDown::FromNow) {
                Ok(leases) if leases.is_empty() => {
                    strange.extend(owned.fault().map(|why| format!("{}: {why}", owned.name)))
                }
                Ok(leases) => freed.extend(leases),
                Err(error) => first_error = first_error.or(Some(error)),
            }
            match self.release_above(owned, listed, network) {
                Ok(leases) => freed.extend(leases),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok((freed, strange)), Err)
    }

    /// Releases what an ADD that still runs has taken since the records were listed: a further
    /// record, which keeps the one below it from being removed.
    fn release_above(
        &self,
        owned: &Owned,
        listed: &[Owned],
        network: &str,
    ) -> Result<Vec<Lease>, StoreError> {
        let Some(next) = name::next_owned(&owned.name) else {
            return Ok(Vec::new());
        };
        let known = |other: &Owned| other.is_beside(owned) && other.name == next;
        let there = owned.dir.meta(&owned.name)?;
        if listed.iter().any(known) || !there.is_some_and(|there| owned.is_file(&there)) {
            return Ok(Vec::new());
        }
        let mut freed = Vec::new();
        if let Some(content) = read(&owned.dir, &next)? {
            let next = Owned {
                dir: Rc::clone(&owned.dir),
                name: next,
                content,
            };
            if is_of_another_network(&next, network) {
                return Ok(freed);
            }
            freed.extend(self.release(&next, CoolDown::FromNow)?);
            freed.extend(self.release_above(&next, listed, network)?);
        }
        freed.extend(self.release(owned, CoolDown::FromNow)?);
        Ok(freed)
    }

    /// Releases the addresses of one record and removes the record. Answers the leases that
    /// were freed: none when it had none, or is nothing to be believed.
    ///
    /// # Errors
    /// The first call that failed; the record is still there then. The other addresses were
    /// attempted.
    pub fn release(&self, owned: &Owned, cool_down: CoolDown) -> Result<Vec<Lease>, StoreError> {
        match &owned.content {
            Content::Record(record, meta) => {
                let (mut freed, mut first_error) = (Vec::new(), None);
                for lease in record.leases() {
                    match self.release_address(lease, meta, cool_down) {
                        Ok(true) => freed.push(lease.clone()),
                        Ok(false) => {}
                        Err(error) => first_error = first_error.or(Some(error)),
                    }
                }
                if let Some(error) = first_error {
                    return Err(error);
                }
                freed.extend(self.remove_released(owned, record, meta)?);
                Ok(freed)
            }
            // Killed between create and write: no address was ever taken by it. Or about to be
            // written: what it says then is read once more, after it was removed.
            Content::Broken(_, meta) if meta.links < 2 => {
                match self.remove_and_read(owned, meta)? {
                    Some(record) => self.remove_released(owned, &record, meta),
                    None => Ok(Vec::new()),
                }
            }
            // Emptied by a crash of the machine, it leads nowhere. Reclaim finds
            // its address by other means.
            Content::Broken(..) | Content::Foreign(_) => Ok(Vec::new()),
        }
    }

    /// Removes the record of addresses that were released or were not taken. Answers what an
    /// ADD that slept had linked since, and was released now: that ADD read the record before
    /// it was removed, so it did not withdraw.
    pub(super) fn remove_released(
        &self,
        owned: &Owned,
        record: &Record,
        meta: &Meta,
    ) -> Result<Vec<Lease>, StoreError> {
        self.remove_record(owned, meta)?;
        // Its inode number may be another record's now.
        let meta = &meta.in_doubt();
        let mut freed = Vec::new();
        for lease in record.leases() {
            if self.holds(lease, meta)? && self.release_address(lease, meta, CoolDown::FromNow)? {
                freed.push(lease.clone());
            }
        }
        // The same of the record that such an ADD made for what it had lost: it read this one
        // before it was removed. Unless there is another in this one's place already.
        if let Some(next) = name::next_owned(&owned.name)
            && owned.dir.meta(&next)?.is_some()
            && owned.dir.meta(&owned.name)?.is_none()
            && let Some(content) = read(&owned.dir, &next)?
        {
            let next = Owned {
                dir: Rc::clone(&owned.dir),
                name: next,
                content,
            };
            freed.extend(self.release(&next, CoolDown::FromNow)?);
            // And of those that it made above that one, which keep it from being removed.
            let network = record.leases().first().map(|lease| &*lease.holder.network);
            freed.extend(self.release_above(&next, &[], network.unwrap_or_default())?);
        }
        Ok(freed)
    }

    /// Removes a record that an ADD may have written since it was read. Answers what it says
    /// after that, where it can be read.
    fn remove_and_read(&self, owned: &Owned, meta: &Meta) -> Result<Option<Record>, StoreError> {
        let file = owned.dir.keep_open(&owned.name)?;
        let file = file.filter(|file| meta_of(file).is_ok_and(|there| there.same_file(meta)));
        self.remove_record(owned, meta)?;
        let Some(file) = file else {
            return Ok(None);
        };
        let content = owned.dir.content_of(&owned.name, &file)?;
        Ok(Record::decode(&content).ok())
    }

    /// Releases an address found by its name in a shard and, where it can go without a gap,
    /// its owner's record.
    pub fn release_entry(&self, entry: &Entry) -> Result<(), StoreError> {
        let Some(meta) = &entry.meta else {
            return Ok(());
        };
        match &entry.record {
            Ok(lease) => self.release_lease(lease, meta),
            Err(_) => {
                let name = entry.lease_name.name();
                let there = entry.dir.meta(&name)?;
                if there.is_some_and(|there| there.same_file(meta)) {
                    self.rename_released(&entry.dir, entry.lease_name, CoolDown::FromNow)?;
                }
                Ok(())
            }
        }
    }

    /// Releases the address of a lease that somebody else than its owner ends, and removes
    /// the owner's record, unless that holds others.
    pub(super) fn release_lease(&self, lease: &Lease, meta: &Meta) -> Result<(), StoreError> {
        self.release_address(lease, meta, CoolDown::FromNow)?;
        let holder = &lease.holder;
        let node = &holder.node;
        let records = self.owned_at(node, &holder.container, &holder.interface)?;
        match records.iter().find(|owned| owned.is_file(meta)) {
            Some(owned) => match &owned.content {
                Content::Record(record, meta) => {
                    self.remove_unless_held(owned, record, meta).map(drop)
                }
                Content::Broken(..) | Content::Foreign(_) => self.remove_record(owned, meta),
            },
            None => Ok(()),
        }
    }

    /// Removes a record that somebody else than its owner found without an address, unless it
    /// has one: one that was linked since keeps its record. Whether it was removed.
    pub(super) fn remove_unless_held(
        &self,
        owned: &Owned,
        record: &Record,
        meta: &Meta,
    ) -> Result<bool, StoreError> {
        if self.holds_any(record, meta)? {
            return Ok(false);
        }
        self.remove_record(owned, meta)?;
        // An ADD made a further record meanwhile, which nothing leads to now.
        if let Some(next) = name::next_owned(&owned.name)
            && owned.dir.meta(&next)?.is_some()
            && owned.dir.meta(&owned.name)?.is_none()
            && link_if_there(&owned.dir, &next, owned)?
        {
            owned.dir.unlink(&next)?;
            return Ok(true);
        }
        let meta = &meta.in_doubt();
        for lease in record.leases() {
            if self.holds(lease, meta)?
                && let Some(shard) = self.shard_of(lease)?
                && link_if_there(&shard, &LeaseName::of(lease).name(), owned)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// This machine's names in this boot.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.node.name)
            .chain(&self.previous_names)
            .map(String::as_str)
    }

    /// Removes a record, unless the owner has a higher one: that one could not be
    /// released just now, and the numbering that leads to it must have no gap. What
    /// stays is a record without address; the next DEL removes both.
    pub(super) fn remove_record(&self, owned: &Owned, meta: &Meta) -> Result<(), StoreError> {
        if let Some(next) = name::next_owned(&owned.name)
            && owned.dir.meta(&next)?.is_some()
        {
            return Ok(());
        }
        // Or the record of a DEL that was done might come back, and no runtime calls DEL again.
        if owned.dir.unlink_same(&owned.name, meta)? && self.durable() {
            owned.dir.sync()?;
        }
        Ok(())
    }

    /// Releases the address of a record, if it has it, and the pod's hint.
    pub(super) fn release_address(
        &self,
        lease: &Lease,
        meta: &Meta,
        cool_down: CoolDown,
    ) -> Result<bool, StoreError> {
        let had = match self.shard_of(lease)? {
            Some(shard) if is_entry_of(&shard, lease, meta)? => {
                self.rename_released(&shard, LeaseName::of(lease), cool_down)?
            }
            Some(_) | None => false,
        };
        // Even when it had none: a DEL killed half-way may have left this out.
        self.announce(lease);
        if let Some((bucket, entry)) = name::pod_of(lease)
            && let Some(pods) = self.open_below(&["pods", &bucket])?
        {
            pods.unlink_same(&entry, meta)?;
        }
        Ok(had)
    }

    /// Gives a leased address the name of a released one. Nobody but its holder can have the name.
    pub(super) fn rename_released(
        &self,
        shard: &Dir,
        leased: LeaseName,
        cool_down: CoolDown,
    ) -> Result<bool, StoreError> {
        let freed = match cool_down {
            CoolDown::FromNow => now(),
            CoolDown::NeverAnswered => 0,
        };
        let released = LeaseName {
            freed: Some(freed),
            ..leased
        };
        let renamed = shard.rename(&leased.name(), &released.name())?;
        // Or a loss of power might take back this, but not the next step.
        if self.durable() {
            shard.sync()?;
        }
        Ok(renamed)
    }

    fn announce(&self, lease: &Lease) {
        let space = name::space(lease.network_name.as_deref());
        if let Ok(dir) = self.make_below(&["hints", &space]) {
            // Advice; see `hint`.
            let _ = hint::released(&dir, bits(lease.address));
        }
    }
}

/// Gives a file the name of a record that was removed. False when it was released meanwhile, or the
/// name is taken.
fn link_if_there(dir: &Dir, name: &str, record: &Owned) -> Result<bool, StoreError> {
    match dir.link(name, &record.dir, &record.name) {
        Err(error) if error.source == Errno::ENOENT => Ok(false),
        linked => Ok(linked?),
    }
}

/// Unix milliseconds by this machine's clock.
pub(super) fn now() -> u64 {
    u64::try_from(system::Timestamp::now().as_millisecond()).unwrap_or(0)
}

pub(super) fn timestamp() -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(system::Timestamp::now().as_millisecond())
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}
