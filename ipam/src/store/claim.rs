//! Leasing addresses by one record: steps 2 to 5 of ADD, as the module above describes
//! them.

use super::dir::{Dir, Fd, Meta, meta_of};
use super::name::{self, Class, LeaseName};
use super::owner::{Content, read};
use super::shard::Standing;
use super::{Store, StoreError};
use crate::lease::{self, Lease, Record};
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::rc::Rc;

/// A record under its owner's name that has no lease entry yet.
#[derive(Debug)]
pub(super) struct Intent {
    dir: Rc<Dir>,
    name: String,
    /// The owner's record that its number follows.
    below: Option<String>,
    file: Fd,
    pub(super) meta: Meta,
}

/// One lease of a record, and where its entry goes.
#[derive(Debug)]
pub(super) struct PlacedLease {
    pub(super) lease: Lease,
    pub(super) shard: Rc<Dir>,
}

impl Store {
    /// Step 2: creates the record that says what is going to be taken.
    pub(super) fn intend(&self, record: &Record, index: usize) -> Result<Intent, StoreError> {
        let Some(lease) = record.leases().first() else {
            return Err(self.root.failed("record", "")(Errno::EINVAL).into());
        };
        let holder = &lease.holder;
        let (bucket, name) = name::owner(&holder.container, &holder.interface, index);
        let below = index.checked_sub(1);
        let below = below.map(|below| name::owner(&holder.container, &holder.interface, below).1);
        let dir = self.make_below(&["owners", &holder.node, &bucket])?;
        let text = record.encode();
        let (bytes, most) = (text.len(), lease::MAX_BYTES);
        if bytes as u64 > most {
            return Err(StoreError::Oversize { bytes, most });
        }
        let Some(file) = dir.create(&name, &text, self.durable())? else {
            return Err(overtaken(lease));
        };
        let (meta, foreign) = dir
            .identity(&file)
            .map_err(dir.failed("read the owner of", &name))?;
        if let Some(by) = foreign {
            dir.unlink(&name)?;
            return Err(StoreError::Squashed {
                directory: self.root.path().to_owned(),
                owner: dir.owner(),
                by,
            });
        }
        Ok(Intent {
            dir,
            name,
            below,
            file,
            meta,
        })
    }

    /// Steps 3 to 5: which lease entries are ours. An error leaves the record, which leads the
    /// owner's next DEL or ADD to whatever was done.
    pub(super) fn claim(
        &self,
        intent: &Intent,
        claims: &[PlacedLease],
    ) -> Result<Vec<bool>, StoreError> {
        let mut linked = Vec::with_capacity(claims.len());
        for claim in claims {
            match self.link_entry(intent, claim) {
                Ok(is_linked) => linked.push(is_linked),
                Err(error) => {
                    if let StoreError::Overtaken { .. } = error {
                        self.withdraw_all(claims, &linked)?;
                    }
                    return Err(error);
                }
            }
        }
        match linked.contains(&true) {
            true => self.confirm(intent, claims, linked),
            // Also a record that has nothing must be one that the next above it can follow.
            false if self.is_out_of_reach(intent)? || self.is_overtaken(intent, &[])? => {
                Err(self.overtaken(intent, claims)?)
            }
            false => Ok(linked),
        }
    }

    /// Step 3: whether the lease entry is this record.
    pub(super) fn link_entry(
        &self,
        intent: &Intent,
        claim: &PlacedLease,
    ) -> Result<bool, StoreError> {
        let name = LeaseName::of(&claim.lease).name();
        // The open file, not its name: that may be another ADD's record by now, which must not
        // get a lease entry from this call.
        let linked = match claim.shard.link_file(&intent.file, &name) {
            // Where the record is gone, a DEL was here, whatever the error: nothing else leads to
            // what was linked before. A file server may say so of one that is there.
            Err(error) => {
                let is_gone = matches!(error.source, Errno::ENOENT | Errno::ESTALE);
                return Err(match self.is_overtaken(intent, &[]) {
                    Ok(true) => overtaken(&claim.lease),
                    Err(_) if is_gone => overtaken(&claim.lease),
                    Ok(false) | Err(_) => error.into(),
                });
            }
            Ok(linked) => linked,
        };
        if linked {
            return Ok(true);
        }
        // The answer to a link that was done may have been lost on its way.
        let there = claim.shard.meta(&name)?;
        Ok(there.is_some_and(|there| there.same_file(&intent.meta)))
    }

    /// Steps 4 and 5: which of the lease entries that were linked are ours; the others are
    /// withdrawn.
    pub(super) fn confirm(
        &self,
        intent: &Intent,
        claims: &[PlacedLease],
        mut linked: Vec<bool>,
    ) -> Result<Vec<bool>, StoreError> {
        if self.is_out_of_reach(intent)? || self.is_overtaken(intent, &linked)? {
            self.withdraw_all(claims, &linked)?;
            return Err(self.overtaken(intent, claims)?);
        }
        if self.durable() {
            intent.dir.sync()?;
        }
        let mut hints = BTreeSet::new();
        for shard in shards_of(claims) {
            if self.durable() {
                shard.sync()?;
            }
            // Parallel to `claims`; those of this shard that were linked.
            let here: Vec<(usize, &Lease)> = (0..)
                .zip(claims)
                .filter(|(n, claim)| {
                    linked.get(*n) == Some(&true) && claim.shard.path() == shard.path()
                })
                .map(|(n, claim)| (n, &claim.lease))
                .collect();
            let texts: Vec<String> = here.iter().map(|(_, l)| l.address.to_string()).collect();
            let listing = shard
                .names_that(|name| texts.iter().any(|text| name::is_lease_name_of(text, name)))?;
            for (n, lease) in here {
                let lease_name = LeaseName::of(lease);
                let standing = Standing::of(&lease_name, listing.iter().map(String::as_str));
                if standing != Standing::Alone
                    || self.taken_by_other_class(&listing, &lease_name, lease, shard)?
                {
                    self.withdraw(shard, lease_name)?;
                    if let Some(linked) = linked.get_mut(n) {
                        *linked = false;
                    }
                    continue;
                }
                self.tidy(&listing, &lease_name, shard);
                hints.extend(name::pod_of(lease));
            }
        }
        for (bucket, entry) in hints {
            self.hint_pod(intent, &bucket, &entry);
        }
        Ok(linked)
    }

    /// The error of a claim that withdrew. Its record goes where nothing leads to it: left
    /// there, the owner's next record below it would lead to it.
    fn overtaken(&self, intent: &Intent, claims: &[PlacedLease]) -> Result<StoreError, StoreError> {
        if self.is_out_of_reach(intent)? {
            intent.dir.unlink_same(&intent.name, &intent.meta)?;
        }
        Ok(match claims.first() {
            Some(claim) => overtaken(&claim.lease),
            None => self.root.failed("claim", "")(Errno::EINVAL).into(),
        })
    }

    /// Whether a DEL removed the record below since this one was made: nothing leads to it.
    fn is_out_of_reach(&self, intent: &Intent) -> Result<bool, StoreError> {
        match &intent.below {
            Some(below) => Ok(intent.dir.meta(below)?.is_none()),
            None => Ok(false),
        }
    }

    /// Whether a DEL removed the record since it was made.
    fn is_overtaken(&self, intent: &Intent, linked: &[bool]) -> Result<bool, StoreError> {
        let links = meta_of(&intent.file)
            .map_err(intent.dir.failed("read", &intent.name))?
            .links;
        let own = linked.iter().filter(|linked| **linked).count();
        // The count alone is not enough: NFS gives a file that this process has open
        // another name when it is removed ("silly rename"), and counts that one.
        let named = intent.dir.meta(&intent.name)?;
        Ok(links < 1 + own as u64 || !named.is_some_and(|there| there.same_file(&intent.meta)))
    }

    fn withdraw_all(&self, claims: &[PlacedLease], linked: &[bool]) -> Result<(), StoreError> {
        for (claim, _) in claims.iter().zip(linked).filter(|(_, linked)| **linked) {
            self.withdraw(&claim.shard, LeaseName::of(&claim.lease))?;
        }
        Ok(())
    }

    /// Takes back a link that this call made. It is not compared: nobody else can have linked
    /// the name, nor may have it later, because the record goes on naming it. The record may be
    /// removed next: a loss of power must not bring the link back after that.
    pub(super) fn withdraw(&self, shard: &Dir, lease_name: LeaseName) -> Result<(), StoreError> {
        let freed = LeaseName {
            freed: Some(0),
            ..lease_name
        };
        shard.rename(&lease_name.name(), &freed.name())?;
        if self.durable() {
            shard.sync()?;
        }
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
        Ok(match read(shard, &other_class.name())? {
            None => false,
            Some(Content::Record(record, _)) => other_class
                .in_record(&record)
                .is_none_or(|other| other.range == lease.range),
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
    fn hint_pod(&self, intent: &Intent, bucket: &str, entry: &str) {
        let hinted = || -> Result<(), StoreError> {
            let pods = self.make_below(&["pods", bucket])?;
            if !intent.dir.link(&intent.name, &pods, entry)? {
                pods.unlink(entry)?;
                intent.dir.link(&intent.name, &pods, entry)?;
            }
            Ok(())
        };
        // Without it the pod's next sandbox gets another address; no harm.
        let _ = hinted();
    }
}

/// The shards of claims, each once.
fn shards_of(claims: &[PlacedLease]) -> Vec<&Dir> {
    let mut shards: Vec<&Dir> = Vec::new();
    for claim in claims {
        if !shards
            .iter()
            .any(|shard| shard.path() == claim.shard.path())
        {
            shards.push(&claim.shard);
        }
    }
    shards
}

/// The class of leases that the same range may have in another configuration.
pub(super) fn other_class(lease: &Lease) -> Class {
    Class::of(lease.range, !lease.overlapping)
}

fn overtaken(lease: &Lease) -> StoreError {
    StoreError::Overtaken {
        container: lease.holder.container.clone(),
        interface: lease.holder.interface.clone(),
    }
}
