//! The records under an owner's name: how DEL and a repeated ADD find their
//! leases without reading any others.
//!
//! Records of one owner are numbered from 0 without gaps: they are made upwards
//! and removed from the top, so the first number that is missing is the end.

use super::Store;
use super::StoreError;
use super::dir::{Dir, DirError, Found, Meta, system};
use super::name::{self, LeaseName};
use super::shard::Standing;
use crate::lease::{self, Lease, Record};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// How often a claim that others contest is read again, and the time between: a
/// contender withdraws within one listing.
const MAX_LISTINGS: usize = 10;
const LISTING_INTERVAL: Duration = Duration::from_millis(20);
/// How many directories stay open.
const MOST_OPEN: usize = 384;

/// A record under its owner's name.
#[derive(Debug)]
pub struct Owned {
    pub(super) dir: Rc<Dir>,
    pub(super) name: String,
    pub(super) content: Content,
}

/// What a record turned out to be.
#[derive(Debug)]
pub(super) enum Content {
    /// Leases, and their file. Whether a lease entry is this file is another question.
    Record(Record, Meta),
    /// A file that cannot be decoded; the reason.
    Broken(String, Meta),
    Foreign(&'static str),
}

impl Owned {
    /// The leases that it records, where they can be read. Of several, some may have been
    /// lost to another ADD: see [`Store::leases_of`].
    #[must_use]
    pub fn leases(&self) -> &[Lease] {
        match &self.content {
            Content::Record(record, _) => record.leases(),
            Content::Broken(..) | Content::Foreign(_) => &[],
        }
    }

    pub(super) fn is_file(&self, file: &Meta) -> bool {
        match &self.content {
            Content::Record(_, meta) | Content::Broken(_, meta) => meta.same_file(file),
            Content::Foreign(_) => false,
        }
    }

    /// Whether another record is in the same directory.
    #[must_use]
    pub fn is_beside(&self, other: &Self) -> bool {
        self.dir.path() == other.dir.path()
    }

    /// Whether it is in the directory of a node's owners.
    pub(super) fn is_of_node(&self, node: &str) -> bool {
        let directory = self.dir.path().parent().and_then(Path::file_name);
        directory.is_some_and(|directory| directory == node)
    }

    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join(&self.name)
    }

    /// What is wrong with the record, where something is.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        match &self.content {
            Content::Record(..) => None,
            Content::Broken(why, _) => Some(why.clone()),
            Content::Foreign(what) => Some(format!("it is {what}")),
        }
    }
}

impl Store {
    /// The records of an attachment on this node: those of each directory by number,
    /// this node's own first.
    pub fn owned(&self, container: &str, interface: &str) -> Result<Vec<Owned>, StoreError> {
        let mut found = Vec::new();
        for directory in self.node_names() {
            found.extend(self.owned_at(directory, container, interface)?);
        }
        Ok(found)
    }

    /// The leases that an attachment holds.
    pub fn held(&self, container: &str, interface: &str) -> Result<Vec<Lease>, StoreError> {
        self.held_of(&self.owned(container, interface)?)
    }

    fn held_of(&self, records: &[Owned]) -> Result<Vec<Lease>, StoreError> {
        let mut held = Vec::new();
        for owned in records {
            if let Content::Record(record, meta) = &owned.content {
                for lease in record.leases() {
                    if self.holds(lease, meta)? {
                        held.push(lease.clone());
                    }
                }
            }
        }
        Ok(held)
    }

    /// The leases of a record, but for those of several that it does not hold.
    pub fn leases_of(&self, owned: &Owned) -> Result<Vec<Lease>, StoreError> {
        match &owned.content {
            Content::Record(record, meta) if record.leases().len() > 1 => {
                let mut leases = Vec::new();
                for lease in record.leases() {
                    if self.holds(lease, meta)? {
                        leases.push(lease.clone());
                    }
                }
                Ok(leases)
            }
            _ => Ok(owned.leases().to_vec()),
        }
    }

    /// Whether a record's lease entry is its own, for good: step 4 of ADD is made up for,
    /// in case the ADD was killed before it.
    pub(super) fn is_held(&self, lease: &Lease, meta: &Meta) -> Result<bool, StoreError> {
        let Some(shard) = self.shard_of(lease)? else {
            return Ok(false);
        };
        let lease_name = LeaseName::of(lease);
        if !is_entry_of(&shard, lease, meta)? {
            return Ok(false);
        }
        // A contender may be about to withdraw; one that stays has the address. That others had
        // it since matters no more.
        let address = lease.address.to_string();
        for _ in 0..MAX_LISTINGS {
            // Who claims it by a lower number chose by an old listing, and withdraws, or was killed.
            let listing = shard.names_that(|name| {
                name::is_lease_name_of(&address, name)
                    && LeaseName::parse(name).is_some_and(|other| {
                        other.class != lease_name.class || other.generation >= lease_name.generation
                    })
            })?;
            let standing = Standing::of(&lease_name, listing.iter().map(String::as_str));
            if standing != Standing::Contested
                && !self.taken_by_other_class(&listing, &lease_name, lease, &shard)?
            {
                return Ok(true);
            }
            system::sleep(LISTING_INTERVAL);
        }
        if is_entry_of(&shard, lease, meta)? {
            self.withdraw(&shard, lease_name)?;
        }
        Ok(false)
    }

    pub(super) fn owned_at(
        &self,
        node: &str,
        container: &str,
        interface: &str,
    ) -> Result<Vec<Owned>, StoreError> {
        let mut found = Vec::new();
        let (bucket, _) = name::owner(container, interface, 0);
        loop {
            let index = found.len();
            let (_, record) = name::owner(container, interface, index);
            let Some(dir) = self.open_below(&["owners", node, &bucket])? else {
                break;
            };
            let Some(content) = read(&dir, &record)? else {
                break;
            };
            found.push(Owned {
                dir,
                name: record,
                content,
            });
        }
        Ok(found)
    }

    /// Whether any lease entry of a record is its own.
    pub(super) fn holds_any(&self, record: &Record, meta: &Meta) -> Result<bool, StoreError> {
        for lease in record.leases() {
            if self.holds(lease, meta)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a record's lease entry is its own.
    pub(super) fn holds(&self, lease: &Lease, meta: &Meta) -> Result<bool, StoreError> {
        let Some(shard) = self.shard_of(lease)? else {
            return Ok(false);
        };
        is_entry_of(&shard, lease, meta)
    }

    /// The shard of a lease, if it is there.
    pub(super) fn shard_of(&self, lease: &Lease) -> Result<Option<Rc<Dir>>, StoreError> {
        let space = name::space(lease.network_name.as_deref());
        let number = name::shard_number(crate::range::bits(lease.address));
        let shard = name::shard(lease.address.is_ipv4(), number);
        self.open_below(&["leases", &space, &shard])
    }

    /// A directory, if all of the path is there. One that was opened stays open:
    /// directories of the store are made, never removed.
    pub(super) fn open_below(&self, path: &[&str]) -> Result<Option<Rc<Dir>>, StoreError> {
        self.walk(path, |dir, name| dir.open(name))
    }

    /// A directory, made if need be.
    pub(super) fn make_below(&self, path: &[&str]) -> Result<Rc<Dir>, StoreError> {
        let made = self.walk(path, |dir, name| {
            dir.open_or_make(name, self.durable()).map(Some)
        })?;
        // Only an empty path walks to nothing.
        made.ok_or_else(|| self.root.failed("make", "")(nix::errno::Errno::EINVAL).into())
    }

    fn keep_open(&self, path: String, dir: &Rc<Dir>) {
        let mut open = self.dirs.borrow_mut();
        // Going through a whole store must not run out of descriptors.
        if open.len() >= MOST_OPEN {
            open.clear();
        }
        open.insert(path, Rc::clone(dir));
    }

    fn walk(
        &self,
        path: &[&str],
        enter: impl Fn(&Dir, &str) -> Result<Option<Dir>, DirError>,
    ) -> Result<Option<Rc<Dir>>, StoreError> {
        let mut key = String::new();
        let mut at: Option<Rc<Dir>> = None;
        for name in path {
            key.push('/');
            key += name;
            let open = self.dirs.borrow().get(&key).cloned();
            at = match open {
                Some(dir) => Some(dir),
                None => {
                    let parent = at.as_deref().unwrap_or(&self.root);
                    let Some(dir) = enter(parent, name)? else {
                        return Ok(None);
                    };
                    let dir = Rc::new(dir);
                    self.keep_open(key.clone(), &dir);
                    Some(dir)
                }
            };
        }
        Ok(at)
    }
}

/// Whether the lease entry is the record's file. If that had not been linked to all its lease names
/// when it was read, another record may have got its inode number and the name since, and is read.
pub(super) fn is_entry_of(shard: &Dir, lease: &Lease, meta: &Meta) -> Result<bool, StoreError> {
    let lease_name = LeaseName::of(lease);
    let there = shard.meta(&lease_name.name())?;
    if !there.is_some_and(|there| there.same_file(meta)) {
        return Ok(false);
    }
    if meta.has_all_names {
        return Ok(true);
    }
    Ok(match read(shard, &lease_name.name())? {
        Some(Content::Record(record, _)) => record.leases().contains(lease),
        Some(Content::Broken(..) | Content::Foreign(_)) | None => false,
    })
}

/// A record; `None` when there is no such name.
pub(super) fn read(dir: &Dir, name: &str) -> Result<Option<Content>, StoreError> {
    Ok(match dir.read(name, lease::MAX_BYTES)? {
        None => None,
        Some(Found::Foreign(what)) => Some(Content::Foreign(what)),
        Some(Found::TooLarge(meta)) => {
            Some(Content::Broken("larger than any record".to_owned(), meta))
        }
        Some(Found::File(bytes, meta)) => Some(match Record::decode(&bytes) {
            Ok(record) => {
                let has_all_names = meta.links > record.leases().len() as u64;
                let meta = Meta {
                    has_all_names,
                    ..meta
                };
                Content::Record(record, meta)
            }
            Err(error) => Content::Broken(error.to_string(), meta),
        }),
    })
}
