//! The blocks that one call of a Kubernetes store goes by.
//!
//! Each address space's file is read once, before anything is chosen, and looked at once more
//! after everything is linked (see [`crate::grants`] for why that is enough).

use super::take::{Part, Space};
use super::{Store, StoreError};
use crate::block::AddressSpace;
use crate::grants::{Grants, Reading};
use crate::lease::Lease;
use crate::range::Range;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::rc::Rc;

/// Of a store whose blocks the cluster gives: where they are noted.
#[derive(Debug, Clone)]
pub(super) struct BlockFiles {
    /// Name of the store in the policy.
    pub(super) store: String,
    /// The directory with one file for each address space.
    pub(super) directory: PathBuf,
}

impl BlockFiles {
    fn space(&self, space: &Space) -> AddressSpace {
        AddressSpace::new(&self.store, space.network_name.as_deref())
    }
}

/// What this node's blocks do not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Whom the addresses are unique among.
    pub space: AddressSpace,
    /// The range, as the network has it.
    pub range: Range,
    /// The one address that is wanted, if it is a certain one.
    pub address: Option<IpAddr>,
    /// How many addresses are wanted.
    pub count: u32,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.range.subnet();
        match self.address {
            Some(address) => write!(f, "{address} is in none of this node's blocks of {range}"),
            None => write!(f, "no address is free in this node's blocks of {range}"),
        }
    }
}

/// The blocks of this node, as one call found them; of any other store than a Kubernetes store,
/// every address is as good as another.
pub(super) struct Granted<'s> {
    files: Option<&'s BlockFiles>,
    read: RefCell<BTreeMap<Option<String>, Rc<Reading>>>,
}

impl<'s> Granted<'s> {
    pub(super) fn new(store: &'s Store) -> Self {
        Self {
            files: store.blocks.as_ref(),
            read: RefCell::default(),
        }
    }

    fn of(&self, space: &Space) -> Result<Option<Rc<Reading>>, StoreError> {
        let Some(files) = self.files else {
            return Ok(None);
        };
        if let Some(read) = self.read.borrow().get(&space.network_name) {
            return Ok(Some(read.clone()));
        }
        let reading = Rc::new(Reading::new(&files.directory, &files.space(space))?);
        let name = space.network_name.clone();
        self.read.borrow_mut().insert(name, reading.clone());
        Ok(Some(reading))
    }

    /// A range, of which only the blocks' addresses are given.
    pub(super) fn cut(&self, space: &Space, range: Range) -> Result<Range, StoreError> {
        Ok(match self.of(space)? {
            Some(reading) => range.within(&reading.grants.networks()),
            None => range,
        })
    }

    /// Whether this node may lease an address.
    pub(super) fn has(&self, space: &Space, address: IpAddr) -> Result<bool, StoreError> {
        Ok(self
            .of(space)?
            .is_none_or(|reading| reading.grants.has(address)))
    }

    /// The error of a part for which no address was found.
    pub(super) fn explain(
        &self,
        error: StoreError,
        part: &Part,
        address: Option<IpAddr>,
        count: usize,
    ) -> StoreError {
        match (error, self.files) {
            (StoreError::Exhausted { .. }, Some(files)) => StoreError::NeedsBlock(Box::new(Need {
                space: files.space(&part.space),
                range: part.range.clone(),
                address,
                count: u32::try_from(count).unwrap_or(u32::MAX),
            })),
            (error, _) => error,
        }
    }

    /// That a part wants an address which is in none of the blocks.
    pub(super) fn needs(&self, part: &Part, address: IpAddr) -> StoreError {
        let exhausted = StoreError::Exhausted {
            range: part.range.subnet().to_string(),
            why: String::new(),
        };
        self.explain(exhausted, part, Some(address), 1)
    }

    /// The last look: of the leases that the call is about to answer, the first whose block this
    /// node does not have any longer.
    pub(super) fn lost<'l>(
        &self,
        parts: &[Part],
        leases: impl Iterator<Item = (usize, &'l Lease)>,
    ) -> Result<Option<(usize, StoreError)>, StoreError> {
        let Some(files) = self.files else {
            return Ok(None);
        };
        let mut now: BTreeMap<Option<String>, Grants> = BTreeMap::new();
        for (name, reading) in self.read.borrow().iter() {
            let grants = match reading.is_current() {
                true => reading.grants.clone(),
                false => {
                    let space = AddressSpace::new(&files.store, name.as_deref());
                    Grants::read(&files.directory, &space)?
                }
            };
            now.insert(name.clone(), grants);
        }
        for (number, lease) in leases {
            let Some(part) = parts.get(number) else {
                continue;
            };
            let grants = now.get(&part.space.network_name);
            if !grants.is_some_and(|grants| grants.has(lease.address)) {
                return Ok(Some((number, self.needs(part, lease.address))));
            }
        }
        Ok(None)
    }
}
