//! What should not be in a store, and putting it right.
//!
//! Every repair is a step that could be taken at any time anyway; none makes an
//! address free whose holder is not known to be gone, but for something in an
//! address' place that is not a record at all: that is put aside, into `lost`, when
//! repair is asked for. What changed a moment ago may be a call that still runs, and is
//! left alone. The moment is the file server's: its files' times are compared with
//! that of a new file, never with this machine's clock.
//!
//! One shard is in memory at a time. A record that a lease led to is not read again: the
//! leases of each bucket of owners are counted, and a bucket that has as many names is in
//! order.

use super::dir::{Dir, Found, Meta, meta_of, system};
use super::name;
use super::owner::{Content, Owned};
use super::release::now;
use super::scan::{Entry, Finding, ShardListing};
use super::shard::Standing;
use super::{Store, StoreError, probe};
use crate::lease::{self, Lease, Record};
use cni_wire::text::list;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Whatever changed later than this may be a call that still runs.
pub const MIN_AGE: Duration = Duration::from_secs(60);
/// What lies in a store.
const ROOMS: [&str; 7] = [
    "FORMAT", "leases", "owners", "pods", "hints", "pools", "lost",
];

/// What fsck found and did.
#[derive(Debug, Default)]
pub struct Checkup {
    /// Leases that are in order.
    pub sound: usize,
    pub findings: Vec<Problem>,
}

/// Something that is wrong, and whether it was put right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub finding: Finding,
    /// Whether it was put right just now.
    pub repaired: bool,
}

impl Checkup {
    /// How many findings were put right.
    #[must_use]
    pub fn repaired(&self) -> usize {
        self.findings.iter().filter(|found| found.repaired).count()
    }
}

struct Fsck<'a> {
    store: &'a Store,
    repair: bool,
    /// Unix seconds before which something must have changed last: the file server's.
    settled_before: i64,
    /// Names in buckets of owners that no lease led to, less leases whose bucket was not
    /// read yet; several buckets share a place.
    unaccounted: Vec<i64>,
    checkup: Checkup,
}

/// Places for counts of buckets.
const PLACES: usize = 1 << 16;

fn place(node: &str, bucket: &str) -> usize {
    let hash = name::hash64(&format!("{node}/{bucket}"));
    usize::try_from(hash).unwrap_or(0) % PLACES
}

impl Store {
    /// Reads the whole store. What changed less than `min_age` ago is left alone.
    ///
    /// # Errors
    /// When a directory cannot be read, or a repair failed.
    pub fn fsck(&self, repair: bool, min_age: Duration) -> Result<Checkup, StoreError> {
        let min_age = i64::try_from(min_age.as_secs()).unwrap_or(i64::MAX);
        let mut fsck = Fsck {
            store: self,
            repair,
            settled_before: server_time(&self.root)?.saturating_sub(min_age),
            unaccounted: vec![0; PLACES],
            checkup: Checkup::default(),
        };
        fsck.root()?;
        fsck.addresses()?;
        let nodes = self.nodes()?;
        for node in &nodes {
            self.buckets_of(node, |bucket, names| {
                fsck.account(node, bucket, names.len())
            })?;
        }
        for node in &nodes {
            fsck.records(node)?;
        }
        fsck.pods()?;
        for lease in self.outside_blocks()? {
            fsck.checkup.findings.push(Problem {
                finding: lease.finding(),
                repaired: false,
            });
        }
        Ok(fsck.checkup)
    }

    /// Whether the owner's records lead to a lease entry.
    pub fn has_owner(&self, entry: &Entry) -> Result<bool, StoreError> {
        let (Ok(lease), Some(meta)) = (&entry.record, &entry.meta) else {
            return Ok(false);
        };
        let holder = &lease.holder;
        let (bucket, _) = name::owner(&holder.container, &holder.interface, 0);
        let path = ["owners", &holder.node, &bucket];
        let Some(dir) = self.open_below(&path)? else {
            return Ok(false);
        };
        for index in 0.. {
            let (_, record) = name::owner(&holder.container, &holder.interface, index);
            match dir.meta(&record)? {
                None => break,
                Some(there) if there.same_file(meta) => return Ok(true),
                Some(_) => {}
            }
        }
        Ok(false)
    }

    fn give_owner(&self, entry: &Entry, lease: &Lease) -> Result<(), StoreError> {
        let holder = &lease.holder;
        let node = &holder.node;
        let count = self
            .owned_at(node, &holder.container, &holder.interface)?
            .len();
        let (bucket, record) = name::owner(&holder.container, &holder.interface, count);
        let dir = self.make_below(&["owners", node, &bucket])?;
        entry.dir.link(&entry.lease_name.name(), &dir, &record)?;
        Ok(())
    }

    /// Moves something that is not a record out of the way, unread.
    fn put_aside(&self, dir: &Dir, name: &str) -> Result<(), StoreError> {
        let lost = self.make_below(&["lost"])?;
        dir.move_to(
            name,
            &lost,
            &format!("{}.{}", name.replace(['/', ':'], "_"), now()),
        )?;
        Ok(())
    }
}

/// The time by the clock that stamps the store's files, in Unix seconds.
///
/// # Errors
/// When no file can be made in the store.
pub(super) fn server_time(root: &Dir) -> Result<i64, StoreError> {
    let name = format!("{}{:016x}", probe::PREFIX, system::random64());
    let Some(file) = root.create(&name, b"", false)? else {
        return Err(root.failed("create", &name)(nix::errno::Errno::EEXIST).into());
    };
    let meta = meta_of(&file).map_err(root.failed("read the time of", &name));
    root.unlink(&name)?;
    Ok(meta?.changed)
}

impl Fsck<'_> {
    fn root(&mut self) -> Result<(), StoreError> {
        let root = &self.store.root;
        for name in root.names()? {
            let path = root.path().join(&name);
            let leftover = name.starts_with(probe::PREFIX) || name.starts_with(".FORMAT.");
            if leftover && self.settled(root.meta(&name)?) {
                if self.repair {
                    probe::remove(root, &name)?;
                }
                let what = "left behind by a probe or a first use that was killed";
                self.note(path, what, self.repair);
            } else if !leftover && !ROOMS.contains(&name.as_str()) && !by_the_file_system(&name) {
                self.note(path, "unexpected file", false);
            }
        }
        Ok(())
    }

    fn addresses(&mut self) -> Result<(), StoreError> {
        let strange = self.store.shards(|shard| self.shard(&shard))?;
        for finding in strange {
            self.checkup.findings.push(Problem {
                finding,
                repaired: false,
            });
        }
        Ok(())
    }

    fn shard(&mut self, shard: &ShardListing) -> Result<(), StoreError> {
        let mut by_address: HashMap<IpAddr, Vec<&str>> = HashMap::new();
        for (name, lease_name) in &shard.entries {
            by_address.entry(lease_name.address).or_default().push(name);
        }
        for (name, lease_name) in &shard.entries {
            if lease_name.freed.is_none() {
                let names = by_address
                    .get(&lease_name.address)
                    .map_or(&[][..], Vec::as_slice);
                self.address(&shard.entry(name, *lease_name, true)?, names)?;
            }
        }
        Ok(())
    }

    fn address(&mut self, entry: &Entry, names: &[&str]) -> Result<(), StoreError> {
        let lease = match &entry.record {
            Ok(lease) => lease,
            Err(why) => {
                let mut what = format!("holds {}: {why}", entry.address);
                let name = entry.lease_name.name();
                let mut repaired = false;
                if entry.meta.is_none() && entry.dir.meta(&name)?.is_some() {
                    match self.is_of_a_squashed_node(&entry.dir, &name)? {
                        true => what += SQUASHED,
                        false if self.repair => {
                            self.store.put_aside(&entry.dir, &name)?;
                            repaired = true;
                        }
                        false => {}
                    }
                } else if entry.meta.is_some() {
                    // A crash may have emptied it under a pod that lives: who knows, must say so.
                    let name = match &entry.network_name {
                        Some(name) => format!(" --network-name {name}"),
                        None => String::new(),
                    };
                    what += &format!(
                        "; if no pod has the address: rdmactl addresses release {}{name}",
                        entry.address
                    );
                }
                self.note(entry.path.clone(), &what, repaired);
                return Ok(());
            }
        };
        let standing = Standing::of(&entry.lease_name, names.iter().copied());
        if standing == Standing::Contested {
            if self.settled(entry.meta) {
                // One of them was killed before it withdrew. The names do not say
                // which; its owner's DEL or ADD removes it.
                let what = format!(
                    "one of several claims of {}: {}",
                    entry.address, lease.holder
                );
                self.note(entry.path.clone(), &what, false);
            }
            return Ok(());
        }
        let owned = self.store.has_owner(entry)?;
        if owned {
            let holder = &lease.holder;
            let (bucket, _) = name::owner(&holder.container, &holder.interface, 0);
            // Of several leases the first stands for the record. If that one was lost, the
            // bucket is read.
            if entry.leads
                && let Some(count) = self.unaccounted.get_mut(place(&holder.node, &bucket))
            {
                *count -= 1;
            }
        } else if self.settled(entry.meta) {
            if self.repair {
                self.store.give_owner(entry, lease)?;
            }
            let what = format!("no record of its owner, {}", lease.holder);
            self.note(entry.path.clone(), &what, self.repair);
            return Ok(());
        }
        self.checkup.sound += 1;
        Ok(())
    }

    /// Whether a file of another user may be a lease: of a node whose root the file
    /// server takes for that user. One that has just changed may become one.
    fn is_of_a_squashed_node(&self, dir: &Dir, name: &str) -> Result<bool, StoreError> {
        Ok(match dir.read_of_anybody(name, lease::MAX_BYTES)? {
            Some(Found::File(bytes, meta)) => {
                meta.links > 1 || Record::decode(&bytes).is_ok() || !self.settled(Some(meta))
            }
            // No node writes so much, but none of ours made it.
            Some(Found::TooLarge(meta)) => meta.links > 1,
            Some(Found::Foreign(_)) | None => false,
        })
    }

    fn account(&mut self, node: &str, bucket: &str, names: usize) {
        if let Some(count) = self.unaccounted.get_mut(place(node, bucket)) {
            *count = count.saturating_add(i64::try_from(names).unwrap_or(i64::MAX));
        }
    }

    fn records(&mut self, node: &str) -> Result<(), StoreError> {
        let mut owners: BTreeMap<String, Vec<Owned>> = BTreeMap::new();
        let mut bucket: Option<PathBuf> = None;
        let store = self.store;
        // One bucket is in memory at a time.
        let unaccounted = std::mem::take(&mut self.unaccounted);
        let wanted = |bucket: &str| unaccounted.get(place(node, bucket)) != Some(&0);
        let strange = store.records_in(node, wanted, |owned| {
            if bucket.as_deref() != Some(owned.dir.path()) {
                bucket = Some(owned.dir.path().to_owned());
                self.owners(std::mem::take(&mut owners))?;
            }
            let owner = owned
                .name
                .rsplit_once(':')
                .map_or("", |(owner, _)| owner)
                .to_owned();
            owners.entry(owner).or_default().push(owned);
            Ok(())
        })?;
        self.unaccounted = unaccounted;
        self.owners(owners)?;
        for finding in strange {
            self.checkup.findings.push(Problem {
                finding,
                repaired: false,
            });
        }
        Ok(())
    }

    fn owners(&mut self, owners: BTreeMap<String, Vec<Owned>>) -> Result<(), StoreError> {
        for records in owners.into_values() {
            // Last first, as they were given: from the top.
            let mut top = true;
            for owned in &records {
                let Some(fault) = self.fault_of(owned)? else {
                    top = false;
                    continue;
                };
                // In the middle it has to stay, or the numbering would have a gap. One that can
                // be read has lost its addresses to others, and goes with the one above.
                if !top && matches!(owned.content, Content::Record(..)) {
                    continue;
                }
                let repaired = self.repair && self.remove_record(owned, top)?;
                self.note(owned.path(), &fault, repaired);
            }
        }
        Ok(())
    }

    fn fault_of(&self, owned: &Owned) -> Result<Option<String>, StoreError> {
        Ok(match &owned.content {
            Content::Foreign(what) => {
                let squashed = match self.is_of_a_squashed_node(&owned.dir, &owned.name)? {
                    true => SQUASHED,
                    false => "",
                };
                Some(format!("it is {what}{squashed}"))
            }
            Content::Broken(why, meta) if meta.links < 2 && self.settled(Some(*meta)) => {
                Some(format!("an ADD that was killed: {why}"))
            }
            Content::Record(record, meta) if self.settled(Some(*meta)) => {
                let addresses = list(record.leases().iter().map(|lease| lease.address));
                (!self.store.holds_any(record, meta)?)
                    .then(|| format!("holds nothing of {addresses}"))
            }
            Content::Broken(..) | Content::Record(..) => None,
        })
    }

    /// Removes a record that holds nothing. It never frees an address: one that was
    /// linked since keeps its record.
    fn remove_record(&self, owned: &Owned, top: bool) -> Result<bool, StoreError> {
        let meta = match &owned.content {
            Content::Foreign(_) => {
                if self.is_of_a_squashed_node(&owned.dir, &owned.name)? {
                    return Ok(false);
                }
                self.store.put_aside(&owned.dir, &owned.name)?;
                return Ok(true);
            }
            Content::Record(_, meta) | Content::Broken(_, meta) => meta,
        };
        // As it is now, not as it was read: a link changes the file's times.
        let now = owned.dir.meta(&owned.name)?;
        let unchanged = now.is_some_and(|now| now.same_file(meta) && now.changed == meta.changed);
        if !top || !unchanged {
            return Ok(false);
        }
        match &owned.content {
            Content::Record(record, meta) => self.store.remove_unless_held(owned, record, meta),
            _ => self.store.remove_record(owned, meta).map(|()| true),
        }
    }

    fn pods(&mut self) -> Result<(), StoreError> {
        let Some(pods) = self.store.open_below(&["pods"])? else {
            return Ok(());
        };
        for bucket in pods.names()? {
            let Ok(Some(dir)) = pods.open(&bucket) else {
                let path = pods.path().join(&bucket);
                self.note(path, "not a directory of the store's owner", false);
                continue;
            };
            for entry in dir.names()? {
                // Its other names are those of a lease and of its record. A record of several
                // leases has more names, and has to be read.
                let names = dir.meta(&entry)?.map_or(0, |meta| meta.links);
                if names == 3 {
                    continue;
                }
                let stale = match super::owner::read(&dir, &entry)? {
                    None => false,
                    Some(Content::Record(record, meta)) => {
                        self.settled(Some(meta)) && !self.leads(&bucket, &entry, &record, &meta)?
                    }
                    Some(_) => true,
                };
                if stale {
                    if self.repair {
                        dir.unlink(&entry)?;
                    }
                    let what = "a pod's hint that leads nowhere";
                    self.note(dir.path().join(&entry), what, self.repair);
                }
            }
        }
        Ok(())
    }

    /// Whether a pod's hint leads to a lease that is held.
    fn leads(
        &self,
        bucket: &str,
        entry: &str,
        record: &Record,
        meta: &Meta,
    ) -> Result<bool, StoreError> {
        for lease in record.leases() {
            let of_hint = name::pod_of(lease).is_some_and(|(b, e)| b == bucket && e == entry);
            if of_hint && self.store.holds(lease, meta)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn settled(&self, meta: Option<Meta>) -> bool {
        meta.is_none_or(|meta| meta.changed <= self.settled_before)
    }

    fn note(&mut self, path: PathBuf, what: &str, repaired: bool) {
        self.checkup.findings.push(Problem {
            finding: Finding::strange(path, what),
            repaired,
        });
    }
}

/// What to do about a lease that belongs to another user than the store.
const SQUASHED: &str = "; it may be a lease of a node whose root the file server squashes: \
    export with no_root_squash, or give all files to the store's owner";

impl Entry {
    /// When the record was written, in Unix seconds.
    #[must_use]
    pub fn modified(&self) -> Option<i64> {
        self.meta.map(|meta| meta.modified)
    }
}

fn by_the_file_system(name: &str) -> bool {
    name == "lost+found" || name == ".snapshot" || name.starts_with(".nfs")
}
