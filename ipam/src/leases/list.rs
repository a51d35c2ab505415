//! What is leased, for people; and what contradicts what. Takes no lock: a call that runs meanwhile may
//! be seen half.

use super::name::{self, LeaseSpace, Subnet, Use};
use super::{LeaseError, Leases, RECORDS, RecordFile};
use crate::lease::{Lease, Record};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

/// A file, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub path: PathBuf,
    pub what: String,
}

/// The leases of this node, ascending in each space; and the files that are not records.
#[derive(Debug, Default)]
pub struct Listed {
    pub leases: Vec<Lease>,
    pub findings: Vec<Finding>,
}

/// What a check found.
#[derive(Debug, Default)]
pub struct Checkup {
    /// Leases that are as they should be.
    pub sound: usize,
    pub findings: Vec<Finding>,
}

/// Records by their names.
type NamedRecords = Vec<(String, Record)>;

impl Leases {
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Listed, LeaseError> {
        let mut listed = Listed::default();
        for file in self.record_files(&mut listed.findings)? {
            for lease in file.record.leases() {
                if self.holds(&file, lease)? {
                    listed.leases.push(lease.clone());
                }
            }
        }
        let key = |lease: &Lease| (LeaseSpace::of_lease(lease), lease.address);
        listed.leases.sort_by_cached_key(key);
        Ok(listed)
    }

    /// The leases of one attachment.
    ///
    /// # Errors
    /// Its record is not one, or cannot be read.
    pub fn held(&self, container: &str, interface: &str) -> Result<Vec<Lease>, LeaseError> {
        let Some(file) = self.record(&name::record(container, interface))? else {
            return Ok(Vec::new());
        };
        let mut held = Vec::new();
        for lease in file.record.leases() {
            if self.holds(&file, lease)? {
                held.push(lease.clone());
            }
        }
        Ok(held)
    }

    /// Where an address is leased, and by which record, if by one: once in each space.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn leases_at(
        &self,
        address: IpAddr,
    ) -> Result<Vec<(LeaseSpace, Option<Lease>)>, LeaseError> {
        let mut found = Vec::new();
        for space in self.spaces()? {
            let subnet = Subnet::of(address).name();
            let path = format!("{}/{subnet}/{}", space.directory(), name::leased(address));
            let lease = match self.record_at(&path) {
                Ok(None) => continue,
                Ok(Some(file)) => {
                    let mut leases = file.record.leases().iter();
                    let is_it = |lease: &&Lease| {
                        lease.address == address && LeaseSpace::of_lease(lease) == space
                    };
                    leases.find(is_it).cloned()
                }
                Err(LeaseError::NotARecord { .. }) => None,
                Err(error) => return Err(error),
            };
            found.push((space, lease));
        }
        Ok(found)
    }

    /// All records that can be read, by their names; the others go into `findings`.
    fn record_files(&self, findings: &mut Vec<Finding>) -> Result<Vec<RecordFile>, LeaseError> {
        let mut files = Vec::new();
        for name in self.dir.names(RECORDS)?.unwrap_or_default() {
            match self.record(&name) {
                Ok(Some(file)) if file.name == name => files.push(file),
                Ok(Some(file)) => findings.push(Finding {
                    path: self.path_of(&format!("{RECORDS}/{name}")),
                    what: format!("it is the record of {}", file.name),
                }),
                // Released meanwhile.
                Ok(None) => {}
                Err(LeaseError::NotARecord { path, what }) => {
                    findings.push(Finding { path, what });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(files)
    }

    /// All records, by their names, also those that do not hold all that they name.
    pub(crate) fn records(&self) -> Result<(NamedRecords, Vec<Finding>), LeaseError> {
        let mut findings = Vec::new();
        let files = self.record_files(&mut findings)?.into_iter();
        let records = files.map(|file| (file.name, file.record)).collect();
        Ok((records, findings))
    }

    /// What [`Leases::note_seen`] noted.
    pub(crate) fn seen(&self) -> BTreeMap<String, u64> {
        let text = self.dir.read(SEEN, MAX_SEEN_BYTES).ok().flatten();
        let seen = text.and_then(|(text, _)| serde_json::from_slice(&text).ok());
        seen.unwrap_or_default()
    }

    /// Notes when a record was first seen to be over, in seconds since the boot.
    pub(crate) fn note_seen(&self, seen: &BTreeMap<String, u64>) -> std::io::Result<()> {
        let path = self.path_of(SEEN);
        match seen.is_empty() {
            false => node::file::replace_in_boot(&path, serde_json::to_vec(seen)?),
            true if path.exists() => std::fs::remove_file(path),
            true => Ok(()),
        }
    }

    /// Names in the spaces' directories: what is leased, and what was freed.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn entries(
        &self,
        mut each: impl FnMut(&LeaseSpace, IpAddr, Use),
    ) -> Result<Vec<Finding>, LeaseError> {
        let mut findings = Vec::new();
        let strange = |path: &str| Finding {
            path: self.path_of(path),
            what: "unexpected file".to_owned(),
        };
        for space in self.dir.names(".")?.unwrap_or_default() {
            if [super::LOCK, RECORDS, super::ASIDE, SEEN].contains(&space.as_str()) {
                continue;
            }
            let Some(of) = LeaseSpace::parse(&space) else {
                findings.push(strange(&space));
                continue;
            };
            for subnet in self.dir.names(&space)?.unwrap_or_default() {
                if subnet == super::ranges::FILE {
                    continue;
                }
                let path = format!("{space}/{subnet}");
                let Some(subnet) = Subnet::parse(&subnet) else {
                    findings.push(strange(&path));
                    continue;
                };
                for name in self.dir.names(&path)?.unwrap_or_default() {
                    match name::entry(&name) {
                        Some((byte, used)) => each(&of, subnet.address(byte), used),
                        None => findings.push(strange(&format!("{path}/{name}"))),
                    }
                }
            }
        }
        Ok(findings)
    }

    /// Compares records, names and what this node owns.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn check(&self, owns: impl Fn(&Lease) -> bool) -> Result<Checkup, LeaseError> {
        let mut checkup = Checkup::default();
        let files = self.record_files(&mut checkup.findings)?;
        let mut held: BTreeMap<(LeaseSpace, IpAddr), &Lease> = BTreeMap::new();
        for file in &files {
            for lease in file.record.leases() {
                match self.holds(file, lease)? {
                    true => drop(held.insert((LeaseSpace::of_lease(lease), lease.address), lease)),
                    false => checkup.findings.push(Finding {
                        path: self.path_of(&format!("{RECORDS}/{}", file.name)),
                        what: format!(
                            "it names {}, which it does not hold: it was released by hand, or a call was killed; DEL or reclaim frees the rest",
                            lease.address
                        ),
                    }),
                }
            }
        }
        let mut leased = Vec::new();
        let strange = self.entries(|space, address, used| {
            if used == Use::Leased {
                leased.push((space.clone(), address));
            }
        })?;
        checkup.findings.extend(strange);
        for (space, address) in leased {
            let path = format!(
                "{}/{}/{}",
                space.directory(),
                Subnet::of(address).name(),
                name::leased(address)
            );
            let what = match held.get(&(space.clone(), address)) {
                None => format!(
                    "{address} is leased by no record; to free it: rdmactl addresses release {address}"
                ),
                Some(lease) if !owns(lease) => format!(
                    "this node does not own {address}: another node may lease it to a pod, too; let pod {} end",
                    lease.holder
                ),
                Some(_) => {
                    checkup.sound += 1;
                    continue;
                }
            };
            checkup.findings.push(Finding {
                path: self.path_of(&path),
                what,
            });
        }
        Ok(checkup)
    }

    fn path_of(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }
}

/// A hundred thousand records fit.
const MAX_SEEN_BYTES: u64 = 64 << 20;
/// Where reclaim notes what it has seen.
pub(super) const SEEN: &str = "seen";
