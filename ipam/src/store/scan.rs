//! Going through a whole store: for listings, reclaim and fsck; never for ADD or DEL.

use super::dir::{Dir, Meta};
use super::name::{self, Class, LeaseName};
use super::owner::{Content, Owned, read};
use super::{Store, StoreError};
use crate::lease::Lease;
use ipnetwork::IpNetwork;
use std::net::IpAddr;
use std::path::PathBuf;
use std::rc::Rc;

/// An address that was ever leased, by its name in the store.
#[derive(Debug)]
pub struct Entry {
    pub network_name: Option<String>,
    pub address: IpAddr,
    /// How many times it was leased.
    pub generation: u64,
    /// Unix milliseconds when it was freed; `None` while it is held.
    pub freed: Option<u64>,
    pub path: PathBuf,
    /// The record (of the last holder, when freed), or what is wrong with it.
    pub record: Result<Lease, String>,
    pub(super) dir: Rc<Dir>,
    pub(super) lease_name: LeaseName,
    pub(super) meta: Option<Meta>,
    /// Whether it is the first lease of its record.
    pub(super) leads: bool,
}

impl Entry {
    /// Whether it may be a lease of a range, by its name alone: of the same addresses
    /// there may be other ranges, unless leases of the range are unique in it alone.
    #[must_use]
    pub fn may_be_of(&self, range: IpNetwork, overlapping: bool) -> bool {
        self.lease_name.class == Class::of(range, overlapping) && range.contains(self.address)
    }

    /// The range that its record names, if it can be read.
    #[must_use]
    pub fn range(&self) -> Option<IpNetwork> {
        let read = record(&self.dir, &self.lease_name.name(), &self.lease_name).ok()?;
        read.lease.ok().map(|lease| lease.range)
    }
}

/// Something in the store that should not be there or cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub path: PathBuf,
    pub what: String,
    /// Whether it could not be read, so that what it holds is not known.
    pub unread: bool,
}

impl Finding {
    /// Something that should not be there.
    pub(super) fn strange(path: PathBuf, what: impl Into<String>) -> Self {
        let what = what.into();
        let unread = false;
        Self { path, what, unread }
    }

    fn unread(path: PathBuf, error: &impl ToString) -> Self {
        let (what, unread) = (error.to_string(), true);
        Self { path, what, unread }
    }
}

/// The names of one shard.
pub(super) struct ShardListing {
    pub(super) network_name: Option<String>,
    pub(super) dir: Rc<Dir>,
    /// Those that are of an address of the shard, sorted.
    pub(super) entries: Vec<(String, LeaseName)>,
}

impl ShardListing {
    pub(super) fn entry(
        &self,
        name: &str,
        lease_name: LeaseName,
        records: bool,
    ) -> Result<Entry, StoreError> {
        let read = match records {
            true => record(&self.dir, name, &lease_name)?,
            false => Read::failed(String::new(), None),
        };
        Ok(Entry {
            network_name: self.network_name.clone(),
            address: lease_name.address,
            generation: lease_name.generation,
            freed: lease_name.freed,
            path: self.dir.path().join(name),
            record: read.lease,
            dir: Rc::clone(&self.dir),
            lease_name,
            meta: read.meta,
            leads: read.leads,
        })
    }
}

impl Store {
    /// Calls `each` with every name of an address, freed ones too, in no order;
    /// with `records` their files are read too. Answers what is none.
    ///
    /// # Errors
    /// When a directory of the store cannot be read.
    pub fn entries(
        &self,
        records: bool,
        mut each: impl FnMut(Entry) -> Result<(), StoreError>,
    ) -> Result<Vec<Finding>, StoreError> {
        self.shards(|shard| {
            for (name, lease_name) in &shard.entries {
                each(shard.entry(name, *lease_name, records)?)?;
            }
            Ok(())
        })
    }

    /// The names of one address in all spaces, read by their place.
    ///
    /// # Errors
    /// When a directory of the store cannot be read.
    pub fn entries_at(&self, address: IpAddr) -> Result<Vec<Entry>, StoreError> {
        let mut entries = Vec::new();
        let Some(leases) = self.open_below(&["leases"])? else {
            return Ok(entries);
        };
        let v4 = address.is_ipv4();
        let number = name::shard_number(crate::range::bits(address));
        for space in sorted(leases.names()?) {
            let Some(network_name) = name::network_name(&space) else {
                continue;
            };
            let mut findings = Vec::new();
            let Some(shards) = enter(&leases, &space, &mut findings)? else {
                continue;
            };
            let Some(dir) = enter(&shards, &name::shard(v4, number), &mut findings)? else {
                continue;
            };
            let text = address.to_string();
            let names = sorted(dir.names_that(|name| name::is_lease_name_of(&text, name))?);
            let of_address = names
                .into_iter()
                .filter_map(|name| Some((LeaseName::parse(&name)?, name)))
                .map(|(lease_name, name)| (name, lease_name))
                .collect();
            let listing = ShardListing {
                network_name,
                dir: Rc::new(dir),
                entries: of_address,
            };
            for (name, lease_name) in &listing.entries {
                entries.push(listing.entry(name, *lease_name, true)?);
            }
        }
        Ok(entries)
    }

    /// Calls `each` with the names of one shard after the other.
    pub(super) fn shards(
        &self,
        mut each: impl FnMut(ShardListing) -> Result<(), StoreError>,
    ) -> Result<Vec<Finding>, StoreError> {
        let mut findings = Vec::new();
        let Some(leases) = self.open_below(&["leases"])? else {
            return Ok(findings);
        };
        for space in sorted(leases.names()?) {
            let Some(network_name) = name::network_name(&space) else {
                let what = "not a network name of the store";
                findings.push(Finding::strange(leases.path().join(&space), what));
                continue;
            };
            let Some((shards, names)) = listed(&leases, &space, &mut findings) else {
                continue;
            };
            for shard in sorted(names) {
                let Some((v4, number)) = name::parse_shard(&shard) else {
                    let what = "not a shard";
                    findings.push(Finding::strange(shards.path().join(&shard), what));
                    continue;
                };
                let Some((dir, names)) = listed(&shards, &shard, &mut findings) else {
                    continue;
                };
                let mut entries = Vec::new();
                for name in sorted(names) {
                    match LeaseName::parse(&name)
                        .filter(|lease_name| belongs(lease_name, v4, number))
                    {
                        Some(lease_name) => entries.push((name, lease_name)),
                        None => {
                            let what = "not an address of this shard";
                            findings.push(Finding::strange(dir.path().join(&name), what));
                        }
                    }
                }
                each(ShardListing {
                    network_name: network_name.clone(),
                    dir: Rc::new(dir),
                    entries,
                })?;
            }
        }
        Ok(findings)
    }

    /// Calls `each` with every record under the owners of one node, last first
    /// for each owner.
    ///
    /// # Errors
    /// When a directory of the store cannot be read, or from `each`.
    pub fn records_of(
        &self,
        node: &str,
        each: impl FnMut(Owned) -> Result<(), StoreError>,
    ) -> Result<Vec<Finding>, StoreError> {
        self.records_in(node, |_| true, each)
    }

    /// Calls `each` with the names of each bucket of owners of one node. What cannot be
    /// read is passed over.
    pub(super) fn buckets_of(
        &self,
        node: &str,
        mut each: impl FnMut(&str, Vec<String>),
    ) -> Result<(), StoreError> {
        let mut findings = Vec::new();
        let Some(owners) = self.open_below(&["owners"])? else {
            return Ok(());
        };
        let Some(buckets) = enter(&owners, node, &mut findings)? else {
            return Ok(());
        };
        for bucket in buckets.names()? {
            if let Some((_, names)) = listed(&buckets, &bucket, &mut findings) {
                each(&bucket, names);
            }
        }
        Ok(())
    }

    /// [`Self::records_of`] of the buckets that are wanted.
    pub(super) fn records_in(
        &self,
        node: &str,
        wanted: impl Fn(&str) -> bool,
        mut each: impl FnMut(Owned) -> Result<(), StoreError>,
    ) -> Result<Vec<Finding>, StoreError> {
        let mut findings = Vec::new();
        let Some(owners) = self.open_below(&["owners"])? else {
            return Ok(findings);
        };
        let Some(buckets) = enter(&owners, node, &mut findings)? else {
            return Ok(findings);
        };
        for bucket in sorted(buckets.names()?) {
            if !wanted(&bucket) {
                continue;
            }
            let Some((dir, mut names)) = listed(&buckets, &bucket, &mut findings) else {
                continue;
            };
            let dir = Rc::new(dir);
            names.sort_by_key(|name| std::cmp::Reverse(index(name)));
            for name in names {
                if index(&name).is_none() {
                    let what = "not an owner's record";
                    findings.push(Finding::strange(dir.path().join(&name), what));
                    continue;
                };
                let content = match read(&dir, &name) {
                    Ok(Some(content)) => content,
                    Ok(None) => continue,
                    // One that cannot be read must not stop the rest.
                    Err(error) => {
                        findings.push(Finding::unread(dir.path().join(&name), &error));
                        continue;
                    }
                };
                each(Owned {
                    dir: Rc::clone(&dir),
                    name,
                    content,
                })?;
            }
        }
        Ok(findings)
    }

    /// The nodes that have records.
    pub fn nodes(&self) -> Result<Vec<String>, StoreError> {
        let Some(owners) = self.open_below(&["owners"])? else {
            return Ok(Vec::new());
        };
        Ok(sorted(owners.names()?))
    }
}

fn index(name: &str) -> Option<usize> {
    let mut parts = name.split(':');
    let (_, _, index) = (parts.next()?, parts.next()?, parts.next()?);
    parts.next().is_none().then(|| index.parse().ok())?
}

fn belongs(lease_name: &LeaseName, v4: bool, number: u128) -> bool {
    let bits = crate::range::bits(lease_name.address);
    lease_name.address.is_ipv4() == v4 && name::shard_number(bits) == number
}

/// What the file of a lease entry says of it.
struct Read {
    lease: Result<Lease, String>,
    meta: Option<Meta>,
    leads: bool,
}

impl Read {
    fn failed(why: String, meta: Option<Meta>) -> Self {
        Self {
            lease: Err(why),
            meta,
            leads: false,
        }
    }
}

fn record(dir: &Dir, name: &str, lease_name: &LeaseName) -> Result<Read, StoreError> {
    let content = match read(dir, name) {
        Ok(content) => content,
        Err(error) => return Ok(Read::failed(error.to_string(), None)),
    };
    Ok(match content {
        None => Read::failed("it vanished".to_owned(), None),
        Some(Content::Foreign(what)) => Read::failed(format!("it is {what}"), None),
        Some(Content::Broken(why, meta)) => Read::failed(why, Some(meta)),
        Some(Content::Record(record, meta)) => match lease_name.in_record(&record) {
            Some(lease) => Read {
                lease: Ok(lease.clone()),
                meta: Some(meta),
                leads: record.leases().first() == Some(lease),
            },
            None => Read::failed("its record is of another address".to_owned(), Some(meta)),
        },
    })
}

/// A directory, or a finding when something else has its name.
fn enter(dir: &Dir, name: &str, findings: &mut Vec<Finding>) -> Result<Option<Dir>, StoreError> {
    use nix::errno::Errno;
    match dir.open(name) {
        Ok(found) => Ok(found),
        Err(error) if matches!(error.source, Errno::ELOOP | Errno::ENOTDIR | Errno::EPERM) => {
            let what = "not a directory of the store's owner";
            findings.push(Finding::strange(dir.path().join(name), what));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// The same with its names, or a finding when it cannot be read: that must not stop the
/// rest.
fn listed(dir: &Dir, name: &str, findings: &mut Vec<Finding>) -> Option<(Dir, Vec<String>)> {
    let entered = enter(dir, name, findings);
    let listed = entered.and_then(|dir| match dir {
        Some(dir) => Ok(Some((dir.names()?, dir))),
        None => Ok(None),
    });
    match listed {
        Ok(listed) => listed.map(|(names, dir)| (dir, names)),
        Err(error) => {
            findings.push(Finding::unread(dir.path().join(name), &error));
            None
        }
    }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort_unstable();
    names
}
