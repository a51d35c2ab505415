//! Looking for what should not be in a store, and putting it right.
//!
//! Every repair is a step that could be taken at any time anyway; none makes an
//! address free whose holder is not known to be gone, but for a seat that is no
//! record at all: that is put aside, into `lost`, when repair is asked for.

use super::dir::{Dir, Meta};
use super::name::{self, Seat};
use super::owner::{Content, Owned};
use super::release::now;
use super::scan::{Entry, Finding};
use super::shard::Standing;
use super::{Store, StoreError, probe};
use crate::lease::Lease;
use std::collections::BTreeMap;

/// Whatever is younger may be on its way: in milliseconds.
const SETTLED: u64 = 60_000;
/// What lies in a store.
const ROOMS: [&str; 8] = [
    "FORMAT", "leases", "owners", "pods", "hints", "pools", "slices", "lost",
];

/// What fsck found and did.
#[derive(Debug, Default)]
pub struct Checkup {
    /// Leases that are in order.
    pub sound: usize,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// How many of those were put right.
    pub repaired: usize,
}

impl Store {
    /// Goes through the whole store.
    ///
    /// # Errors
    /// When a directory cannot be read, or a repair failed.
    pub fn fsck(&self, repair: bool) -> Result<Checkup, StoreError> {
        let mut checkup = Checkup::default();
        self.check_root(&mut checkup, repair)?;
        self.check_seats(&mut checkup, repair)?;
        for node in self.nodes()? {
            self.check_records(&node, &mut checkup, repair)?;
        }
        self.check_pods(&mut checkup, repair)?;
        Ok(checkup)
    }

    fn check_root(&self, checkup: &mut Checkup, repair: bool) -> Result<(), StoreError> {
        for name in self.root.names()? {
            let path = self.root.path().join(&name);
            let leftover = name.starts_with(probe::PREFIX) || name.starts_with(".FORMAT.");
            if leftover && self.settled(self.root.meta(&name)?) {
                checkup.note(
                    path,
                    "left behind by a probe or a first use that was killed",
                );
                if repair {
                    if let Ok(Some(dir)) = self.root.open(&name) {
                        for file in dir.names()? {
                            dir.unlink(&file)?;
                        }
                        self.root.remove_dir(&name)?;
                    } else {
                        self.root.unlink(&name)?;
                    }
                    checkup.repaired += 1;
                }
            } else if !leftover && !ROOMS.contains(&name.as_str()) && !by_the_file_system(&name) {
                checkup.note(path, "nothing of this store");
            }
        }
        Ok(())
    }

    fn check_seats(&self, checkup: &mut Checkup, repair: bool) -> Result<(), StoreError> {
        let mut held: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
        let strange = self.seats(true, |entry| {
            if entry.freed.is_none() {
                let key = format!(
                    "{:?} {} {:?}",
                    entry.network_name, entry.address, entry.seat.class
                );
                held.entry(key).or_default().push(entry);
            }
            Ok(())
        })?;
        for finding in strange {
            // A shard's place that something else has can be put aside as well.
            checkup.findings.push(finding);
        }
        for entries in held.into_values() {
            for entry in &entries {
                self.check_seat(entry, checkup, repair)?;
            }
        }
        Ok(())
    }

    fn check_seat(
        &self,
        entry: &Entry,
        checkup: &mut Checkup,
        repair: bool,
    ) -> Result<(), StoreError> {
        let lease = match &entry.record {
            Ok(lease) => lease,
            Err(why) => {
                checkup.note(
                    entry.path.clone(),
                    &format!("holds {}: {why}", entry.address),
                );
                if repair && entry.meta.is_none() && entry.dir.meta(&entry.seat.name())?.is_some() {
                    self.put_aside(&entry.dir, &entry.seat.name())?;
                    checkup.repaired += 1;
                }
                return Ok(());
            }
        };
        let names = entry.dir.names()?;
        let standing = Standing::of(&entry.seat, names.iter().map(String::as_str));
        if standing == Standing::Contested {
            if self.settled(entry.meta) {
                // One of them was killed before it withdrew. Which, its names do
                // not tell; its owner's DEL or ADD takes it away.
                checkup.note(
                    entry.path.clone(),
                    &format!(
                        "one of several claims of {}: {}",
                        entry.address, lease.holder
                    ),
                );
            }
            return Ok(());
        }
        if !self.has_owner(entry)? && self.settled(entry.meta) {
            checkup.note(
                entry.path.clone(),
                &format!("no record of its owner, {}", lease.holder),
            );
            if repair {
                self.give_owner(entry, lease)?;
                checkup.repaired += 1;
            }
            return Ok(());
        }
        checkup.sound += 1;
        Ok(())
    }

    /// Whether the owner's records lead to a seat.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn has_owner(&self, entry: &Entry) -> Result<bool, StoreError> {
        let (Ok(lease), Some(meta)) = (&entry.record, &entry.meta) else {
            return Ok(false);
        };
        let holder = &lease.holder;
        let records = self.owned_at(
            name::node(&holder.node),
            &holder.container,
            &holder.interface,
        )?;
        Ok(records.iter().any(|owned| owned.is_file(meta)))
    }

    /// Frees a seat by itself; its owner's record, if any, stays.
    ///
    /// # Errors
    /// When a call failed.
    pub fn release_entry(&self, entry: &Entry) -> Result<(), StoreError> {
        let Some(meta) = &entry.meta else {
            return Ok(());
        };
        if let Ok(lease) = &entry.record {
            self.release_seat(lease, meta)?;
            return Ok(());
        }
        let name = entry.seat.name();
        if entry
            .dir
            .meta(&name)?
            .is_some_and(|there| there.same_file(meta))
        {
            entry.dir.rename(
                &name,
                &Seat {
                    freed: Some(now()),
                    ..entry.seat
                }
                .name(),
            )?;
        }
        Ok(())
    }

    /// Frees a seat and, where it can go without a gap, its owner's record.
    ///
    /// # Errors
    /// When a call failed.
    pub fn release_whole(&self, entry: &Entry) -> Result<(), StoreError> {
        self.release_entry(entry)?;
        let (Ok(lease), Some(meta)) = (&entry.record, &entry.meta) else {
            return Ok(());
        };
        self.drop_record(lease, meta)
    }

    fn give_owner(&self, entry: &Entry, lease: &Lease) -> Result<(), StoreError> {
        let holder = &lease.holder;
        let node = name::node(&holder.node);
        let count = self
            .owned_at(node, &holder.container, &holder.interface)?
            .len();
        let (bucket, record) = name::owner(&holder.container, &holder.interface, count);
        let dir = self.make_below(&["owners", node, &bucket])?;
        entry.dir.link(&entry.seat.name(), &dir, &record)?;
        Ok(())
    }

    fn check_records(
        &self,
        node: &str,
        checkup: &mut Checkup,
        repair: bool,
    ) -> Result<(), StoreError> {
        let mut owners: BTreeMap<String, Vec<Owned>> = BTreeMap::new();
        let strange = self.records_of(node, |owned| {
            let owner = owned
                .name
                .rsplit_once(':')
                .map_or("", |(owner, _)| owner)
                .to_owned();
            owners.entry(owner).or_default().push(owned);
            Ok(())
        })?;
        checkup.findings.extend(strange);
        for records in owners.into_values() {
            // Last first, as they were given: from the top.
            let mut top = true;
            for owned in &records {
                let fault = match &owned.content {
                    Content::Foreign(what) => Some(format!("it is {what}")),
                    Content::Broken(why, meta) if meta.names < 2 && self.settled(Some(*meta)) => {
                        Some(format!("an ADD that was killed: {why}"))
                    }
                    Content::Broken(..) => None,
                    Content::Lease(lease, meta) if self.settled(Some(*meta)) => (!self
                        .holds(lease, meta)?)
                    .then(|| format!("holds nothing of {}", lease.address)),
                    Content::Lease(..) => None,
                };
                let Some(fault) = fault else {
                    top = false;
                    continue;
                };
                checkup.note(owned.path(), &fault);
                if !repair {
                    continue;
                }
                match &owned.content {
                    Content::Foreign(_) => self.put_aside(&owned.dir, &owned.name)?,
                    // In the middle it has to stay, or the numbering would have a gap.
                    _ if !top => continue,
                    _ => drop(self.release_owned(owned)?),
                }
                checkup.repaired += 1;
            }
        }
        Ok(())
    }

    fn check_pods(&self, checkup: &mut Checkup, repair: bool) -> Result<(), StoreError> {
        let Some(pods) = self.open_below(&["pods"])? else {
            return Ok(());
        };
        for bucket in pods.names()? {
            let Ok(Some(dir)) = pods.open(&bucket) else {
                checkup.note(
                    pods.path().join(&bucket),
                    "not a directory of the store's owner",
                );
                continue;
            };
            for entry in dir.names()? {
                let stale = match super::owner::read(&dir, &entry)? {
                    None => false,
                    Some(Content::Lease(lease, meta)) => {
                        self.settled(Some(meta)) && !self.holds(&lease, &meta)?
                    }
                    Some(_) => true,
                };
                if stale {
                    checkup.note(dir.path().join(&entry), "a pod's hint that leads nowhere");
                    if repair {
                        dir.unlink(&entry)?;
                        checkup.repaired += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves something that is no record out of the way, without looking into it.
    fn put_aside(&self, dir: &Dir, name: &str) -> Result<(), StoreError> {
        let lost = self.make_below(&["lost"])?;
        dir.move_to(
            name,
            &lost,
            &format!("{}.{}", name.replace(['/', ':'], "_"), now()),
        )?;
        Ok(())
    }

    fn settled(&self, meta: Option<Meta>) -> bool {
        let Some(modified) = meta.and_then(|meta| u64::try_from(meta.modified).ok()) else {
            return true;
        };
        now().saturating_sub(modified.saturating_mul(1000)) > SETTLED
    }
}

impl Entry {
    /// When the record was written, in Unix seconds.
    #[must_use]
    pub fn modified(&self) -> Option<i64> {
        self.meta.map(|meta| meta.modified)
    }
}

impl Checkup {
    fn note(&mut self, path: std::path::PathBuf, what: &str) {
        self.findings.push(Finding {
            path,
            what: what.to_owned(),
        });
    }
}

fn by_the_file_system(name: &str) -> bool {
    name == "lost+found" || name == ".snapshot" || name.starts_with(".nfs")
}
