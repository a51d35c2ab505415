//! The leases of this node: which of its addresses which attachment has.
//!
//! ```text
//! /run/rdma-netdev/leases/<boot>/
//! lock                            one lock for all; never removed
//! records/<container>:<ifname>    what one attachment has, written aside and renamed when whole
//! <space>/<subnet>/<byte>         a further name of the record's file: the address is leased
//! <space>/<subnet>/<byte>-<ms>    freed, when the boot was so old
//! <space>/ranges                  the ranges in use: for people, and where to look first
//! new, seen                       a record that is written; what reclaim saw once
//! ```
//! They end with the boot, as the namespaces of pods do, so they are in `/run`, where no policy moves
//! them, and nothing is synced. One record has all addresses of an attachment, whatever their spaces;
//! so DEL needs no configuration to find them.
//!
//! # The rule
//! An address is leased if its name exists, by the record whose file that is. A record that lacks a name
//! was left by a killed call: an ADD of its attachment releases it whole and begins anew, a DEL releases
//! it. To release is to rename the names that are this file, then to remove the record. So a killed call
//! leaves a record that leads to each name it made.
//!
//! # What the lock costs
//! Under it a call makes some system calls for each address that it takes, and lists the directory where
//! it takes one: at most 256 addresses and their marks. Where a range has room is searched without it.
//! Nothing waits under it or is synced. Listing for people takes no lock.

mod decide;
mod dir;
mod error;
mod host;
mod list;
mod lock;
mod name;
mod ranges;
mod release;
mod take;
#[cfg(test)]
mod tests;

pub use error::{LeaseError, Need};
pub use list::{Checkup, Finding, Listed};
pub use name::{LeaseSpace, Use};
pub use ranges::{Noted, Pool};
pub use take::{AddressRequest, Order, Ownership, Refused};

use crate::lease::{self, Lease, Record};
use crate::space::AddressSpace;
use dir::{Dir, Inode};
use ipnetwork::IpNetwork;
use lock::Lock;
use name::Subnet;
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the leases of all boots are, below the root of the host's files.
pub const DIRECTORY: &str = "run/rdma-netdev/leases";
const LOCK: &str = "lock";
const RECORDS: &str = "records";
/// What a record is called until it is whole.
const ASIDE: &str = "new";

/// The leases of this node, in one boot.
#[derive(Debug)]
pub struct Leases {
    dir: Dir,
    boot: String,
}

/// Leased and freed addresses of a space, while the lock is held.
#[derive(Debug)]
pub struct Leased<'l> {
    leases: &'l Leases,
    space: &'l AddressSpace,
}

/// A record that was read.
#[derive(Debug, Clone)]
struct RecordFile {
    name: String,
    record: Record,
    inode: Inode,
}

impl Leases {
    /// Those of a boot; the directory is made where it is missing. `root` is the directory below which
    /// the host's files are.
    ///
    /// # Errors
    /// It cannot be made, or others than root can write there.
    pub fn open(root: &Path, boot: &str) -> Result<Self, LeaseError> {
        if let Some(leases) = Self::open_existing(root, boot)? {
            return Ok(leases);
        }
        let path = directory(root, boot);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.map_err(|error| LeaseError::Io {
            attempt: "make directory",
            path: path.clone(),
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
        })?;
        node::trust::check_directory(&path)?;
        let made = Self::open_existing(root, boot)?;
        made.ok_or(LeaseError::Io {
            attempt: "open",
            path,
            source: rustix::io::Errno::NOENT,
        })
    }

    /// The same; none where there is no directory, so there were no leases in this boot. Nothing is made.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open_existing(root: &Path, boot: &str) -> Result<Option<Self>, LeaseError> {
        let dir = Dir::open_path(&directory(root, boot))?;
        Ok(dir.map(|dir| Self {
            dir,
            boot: boot.to_owned(),
        }))
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        self.dir.path()
    }

    fn lock(&self) -> Result<Lock, LeaseError> {
        Lock::take(&self.dir.path().join(LOCK), lock::LIMIT)
    }

    /// Runs `act` under the lock, with what is leased of a space before its eyes. It must neither wait
    /// nor sync.
    pub(crate) fn locked<R>(
        &self,
        space: &AddressSpace,
        act: impl FnOnce(&Leased<'_>) -> R,
    ) -> Result<R, LeaseError> {
        let _lock = self.lock()?;
        Ok(act(&Leased {
            leases: self,
            space,
        }))
    }

    /// A record by its name; none where there is none.
    fn record(&self, name: &str) -> Result<Option<RecordFile>, LeaseError> {
        self.record_at(&format!("{RECORDS}/{name}"))
    }

    /// The record that a file is, by any of its names.
    fn record_at(&self, path: &str) -> Result<Option<RecordFile>, LeaseError> {
        let Some((content, inode)) = self.dir.read(path, lease::MAX_BYTES)? else {
            return Ok(None);
        };
        let record = Record::decode(&content).map_err(|error| LeaseError::NotARecord {
            path: self.dir.path().join(path),
            what: error.to_string(),
        })?;
        let holder = record.holder();
        Ok(Some(RecordFile {
            name: name::record(&holder.container, &holder.interface),
            record,
            inode,
        }))
    }

    /// Whether an address of a record is leased by it.
    fn holds(&self, file: &RecordFile, lease: &Lease) -> Result<bool, LeaseError> {
        Ok(self.dir.inode(&leased_path(lease))? == Some(file.inode))
    }

    /// What of a network is leased or was freed, in a space and in the ranges of it that are compared
    /// with no other one: ascending; what is not listed is free.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn uses(
        &self,
        space: &AddressSpace,
        network: IpNetwork,
    ) -> Result<Vec<(IpAddr, Use)>, LeaseError> {
        let mut uses: BTreeMap<IpAddr, Use> = BTreeMap::new();
        for of in self.spaces()?.into_iter().filter(|of| of.space == *space) {
            let of = of.directory();
            for subnet in self.subnets(&of, network)? {
                let names = self.dir.names(&format!("{of}/{}", subnet.name()))?;
                for (byte, one) in names.iter().flatten().filter_map(|name| name::entry(name)) {
                    let address = subnet.address(byte);
                    if network.contains(address) {
                        let known = uses.entry(address).or_insert(one);
                        *known = match (*known, one) {
                            (Use::Freed(a), Use::Freed(b)) => Use::Freed(a.max(b)),
                            _ => Use::Leased,
                        };
                    }
                }
            }
        }
        Ok(uses.into_iter().collect())
    }

    /// The spaces that have a directory.
    fn spaces(&self) -> Result<Vec<LeaseSpace>, LeaseError> {
        let names = self.dir.names(".")?.unwrap_or_default();
        let spaces = names.iter().filter_map(|name| LeaseSpace::parse(name));
        let mut spaces: Vec<LeaseSpace> = spaces.collect();
        spaces.sort();
        Ok(spaces)
    }

    /// The subnets of a space that have a directory and are in a network, or have it.
    fn subnets(&self, space: &str, network: IpNetwork) -> Result<Vec<Subnet>, LeaseError> {
        let around = Subnet::of(network.network());
        if around == Subnet::of(network.broadcast()) {
            return Ok(vec![around]);
        }
        let names = self.dir.names(space)?.unwrap_or_default();
        let subnets = names.iter().filter_map(|name| Subnet::parse(name));
        let mut subnets: Vec<Subnet> = subnets
            .filter(|subnet| network.contains(subnet.address(0)))
            .collect();
        subnets.sort();
        Ok(subnets)
    }
}

impl Leased<'_> {
    /// What of a network is leased or was freed; what is not listed is free.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn of(&self, network: IpNetwork) -> Result<Vec<(IpAddr, Use)>, LeaseError> {
        self.leases.uses(self.space, network)
    }
}

/// How old this boot is, suspension included.
#[must_use]
pub fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn directory(root: &Path, boot: &str) -> PathBuf {
    root.join(DIRECTORY).join(boot)
}

fn subnet_path(lease: &Lease) -> String {
    let space = LeaseSpace::of_lease(lease).directory();
    format!("{space}/{}", Subnet::of(lease.address).name())
}

fn leased_path(lease: &Lease) -> String {
    format!("{}/{}", subnet_path(lease), name::leased(lease.address))
}

fn freed_path(lease: &Lease, at: Duration) -> String {
    format!("{}/{}", subnet_path(lease), name::freed(lease.address, at))
}
