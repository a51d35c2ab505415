//! DEL and what else frees addresses.

use super::name::{self, LeaseSpace};
use super::{ASIDE, LeaseError, Leases, RECORDS, RecordFile, freed_path, leased_path, since_boot};
use crate::lease::{Lease, Record};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

impl Leases {
    /// Frees all addresses of an attachment, which cool down for `cooldown`; none where it has none, or
    /// has those of another network.
    ///
    /// # Errors
    /// [`LeaseError`]; its record stays until all is freed.
    pub fn release(
        &self,
        container: &str,
        interface: &str,
        network: &str,
        cooldown: Duration,
    ) -> Result<Vec<Lease>, LeaseError> {
        let name = name::record(container, interface);
        self.release_if(&name, cooldown, |record| record.holder().network == network)
    }

    /// Frees all addresses of a record, if it is there and `is_meant` says so of what it is now.
    pub(crate) fn release_if(
        &self,
        name: &str,
        cooldown: Duration,
        is_meant: impl FnOnce(&Record) -> bool,
    ) -> Result<Vec<Lease>, LeaseError> {
        let _lock = self.lock()?;
        match self.record(name)? {
            Some(file) if is_meant(&file.record) => self.free(&file, cooldown),
            _ => Ok(Vec::new()),
        }
    }

    /// Frees what a record has, and removes it. Call with the lock.
    pub(super) fn free(
        &self,
        file: &RecordFile,
        cooldown: Duration,
    ) -> Result<Vec<Lease>, LeaseError> {
        let mut freed = Vec::new();
        for lease in file.record.leases() {
            if self.holds(file, lease)? {
                self.free_name(lease, cooldown)?;
                freed.push(lease.clone());
            }
        }
        self.dir.remove(&format!("{RECORDS}/{}", file.name))?;
        if cooldown.is_zero() {
            // It decides nothing.
            let _ = self.note_room(&freed);
        }
        Ok(freed)
    }

    /// An address that need not cool down has no name any more.
    fn free_name(&self, lease: &Lease, cooldown: Duration) -> Result<(), LeaseError> {
        let name = leased_path(lease);
        match cooldown.is_zero() {
            true => self.dir.remove(&name),
            false => self.dir.rename(&name, &freed_path(lease, since_boot())),
        }
    }

    /// Notes that addresses are free, so that an ADD finds them.
    fn note_room(&self, freed: &[Lease]) -> Result<(), LeaseError> {
        let mut by_space: BTreeMap<LeaseSpace, Vec<IpAddr>> = BTreeMap::new();
        for lease in freed {
            let space = LeaseSpace::of_lease(lease);
            by_space.entry(space).or_default().push(lease.address);
        }
        for (space, addresses) in by_space {
            self.note_free(&space, &addresses)?;
        }
        Ok(())
    }

    pub(super) fn note_free(
        &self,
        space: &LeaseSpace,
        addresses: &[IpAddr],
    ) -> Result<(), LeaseError> {
        let before = self.ranges(space)?;
        let mut ranges = before.clone();
        addresses.iter().for_each(|address| ranges.free(*address));
        match ranges == before {
            true => Ok(()),
            false => self.write_ranges(space, &ranges),
        }
    }

    /// Frees one address by hand, whatever file its name is; false where it is not leased. A record
    /// that holds nothing then is removed.
    ///
    /// # Errors
    /// [`LeaseError`]; what is not a record stays.
    pub fn release_address(
        &self,
        space: &LeaseSpace,
        address: IpAddr,
        cooldown: Duration,
    ) -> Result<bool, LeaseError> {
        let _lock = self.lock()?;
        let subnet = name::Subnet::of(address).name();
        let directory = format!("{}/{subnet}", space.directory());
        let path = format!("{directory}/{}", name::leased(address));
        let file = match self.record_at(&path) {
            Ok(None) => return Ok(false),
            Ok(Some(file)) => Some(file),
            Err(LeaseError::NotARecord { .. }) => None,
            Err(error) => return Err(error),
        };
        let freed = format!("{directory}/{}", name::freed(address, since_boot()));
        match cooldown.is_zero() {
            true => self.dir.remove(&path)?,
            false => self.dir.rename(&path, &freed)?,
        }
        if let Some(file) = file {
            let record = format!("{RECORDS}/{}", file.name);
            let mut leases = file.record.leases().iter();
            let holds_none = leases.try_fold(true, |none, lease| {
                Ok::<_, LeaseError>(none && !self.holds(&file, lease)?)
            })?;
            if holds_none && self.dir.inode(&record)? == Some(file.inode) {
                self.dir.remove(&record)?;
            }
        }
        Ok(true)
    }

    /// Removes marks of addresses that have cooled down, and directories that are empty then; and the
    /// directories of other boots. The lock is held for one subnet at a time.
    ///
    /// # Errors
    /// The first that could not be removed.
    pub fn tidy(&self, cooldown: Duration) -> Result<(), LeaseError> {
        for space in self.spaces()? {
            let directory = space.directory();
            let names = self.dir.names(&directory)?.unwrap_or_default();
            let mut left = Vec::new();
            for subnet in names.iter().filter_map(|name| name::Subnet::parse(name)) {
                if self.tidy_subnet(&space, subnet, cooldown)? {
                    left.push(subnet);
                }
            }
            let _lock = self.lock()?;
            let before = self.ranges(&space)?;
            let mut ranges = before.clone();
            let is_used =
                |pool: &super::ranges::Noted| left.iter().any(|subnet| pool.reaches(*subnet));
            ranges.0.retain(is_used);
            if ranges.0.is_empty() {
                // An ADD may have come since: its subnet keeps the directory.
                self.dir
                    .remove(&format!("{directory}/{}", super::ranges::FILE))?;
                self.dir.remove_if_empty(&directory)?;
            } else if ranges != before {
                self.write_ranges(&space, &ranges)?;
            }
        }
        self.remove_other_boots();
        Ok(())
    }

    /// Whether its directory is still there.
    fn tidy_subnet(
        &self,
        space: &LeaseSpace,
        subnet: name::Subnet,
        cooldown: Duration,
    ) -> Result<bool, LeaseError> {
        let _lock = self.lock()?;
        let directory = format!("{}/{}", space.directory(), subnet.name());
        let hot = super::decide::Hot {
            now: since_boot(),
            cooldown,
        };
        let names = self.dir.names(&directory)?.unwrap_or_default();
        let mut free = Vec::new();
        for name in &names {
            match name::entry(name) {
                Some((byte, name::Use::Freed(at))) if !hot.is(at) => {
                    self.dir.remove(&format!("{directory}/{name}"))?;
                    free.push(subnet.address(byte));
                }
                _ => {}
            }
        }
        if free.len() == names.len() {
            return Ok(!self.dir.remove_if_empty(&directory)?);
        }
        self.note_free(space, &free)?;
        Ok(true)
    }

    /// Their pods are gone; only a `/run` that outlives a boot has any.
    fn remove_other_boots(&self) {
        let Some(above) = self.directory().parent() else {
            return;
        };
        for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
            if entry.file_name().to_str() != Some(&self.boot) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Removes what a killed call left aside. Call with the lock.
    pub(super) fn remove_aside(&self) {
        let _ = self.dir.remove(ASIDE);
    }
}
