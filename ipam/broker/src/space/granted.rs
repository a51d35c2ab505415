//! The blocks of an address space that this node has, in memory and in the file that ADDs read.

use std::collections::BTreeSet;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use crate::grants::{Grant, Grants, GrantsError};
use ipam::block::AddressSpace;
use ipam::leases::{Leased, Leases};
use ipam::owned::{self, Owned};
use ipnetwork::IpNetwork;

#[derive(Debug)]
pub(super) struct GrantsFile {
    directory: PathBuf,
    space: AddressSpace,
    /// ID of the present boot: ADDs lease from its blocks only.
    boot: String,
    pub(super) noted: Grants,
    state_dir: PathBuf,
    /// The node's name, in what it owns.
    node: String,
    leases: Leases,
    /// Whether these are what the files have: a write that failed may have replaced one.
    is_written: bool,
}

impl Deref for GrantsFile {
    type Target = Grants;

    fn deref(&self) -> &Grants {
        &self.noted
    }
}

impl GrantsFile {
    /// # Errors
    /// It cannot be read, which must not be taken for none.
    pub(super) fn read(
        state_dir: &Path,
        space: &AddressSpace,
        boot: String,
        node: &str,
        leases: Leases,
    ) -> Result<Self, GrantsError> {
        let directory = crate::grants::directory(state_dir, &space.store);
        Ok(Self {
            noted: Grants::read(&directory, space)?,
            is_written: true,
            space: space.clone(),
            state_dir: state_dir.to_owned(),
            node: node.to_owned(),
            leases,
            boot,
            directory,
        })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn boot(&self) -> &str {
        &self.boot
    }

    /// The blocks that ADDs lease from.
    pub(super) fn usable(&self) -> impl Iterator<Item = &Grant> {
        self.blocks.iter().filter(|grant| grant.boot == self.boot)
    }

    /// Whether ADDs lease from all blocks.
    pub(super) fn are_usable(&self) -> bool {
        self.blocks.iter().all(|grant| grant.boot == self.boot)
    }

    /// Whether ADDs lease from a block.
    pub(super) fn is_usable(&self, network: IpNetwork) -> bool {
        self.usable().any(|grant| grant.block == network)
    }

    pub(super) fn has_block(&self, network: IpNetwork) -> bool {
        self.blocks.iter().any(|grant| grant.block == network)
    }

    /// Whether the file says so.
    pub(super) fn has_grant(&self, grant: &Grant) -> bool {
        self.is_written && self.blocks.contains(grant)
    }

    /// Writes that the node has these blocks: a write is durable, and takes its time.
    pub(super) fn add(&mut self, new: Vec<Grant>) -> io::Result<()> {
        let mut grants = self.noted.clone();
        let added: BTreeSet<IpNetwork> = new.iter().map(|grant| grant.block).collect();
        grants.blocks.retain(|other| !added.contains(&other.block));
        grants.blocks.extend(new);
        self.write(grants)
    }

    /// Writes that the node does not have a block, unless that is written.
    pub(super) fn revoke(&mut self, network: IpNetwork) -> io::Result<()> {
        if self.is_written && !self.has_block(network) {
            return Ok(());
        }
        let mut grants = self.noted.clone();
        grants.blocks.retain(|grant| grant.block != network);
        self.write(grants)
    }

    fn write(&mut self, grants: Grants) -> io::Result<()> {
        self.is_written = false;
        grants.write(&self.directory, &self.space)?;
        self.own(&grants)?;
        self.noted = grants;
        self.is_written = true;
        Ok(())
    }

    /// Writes what ADDs lease from, under the lock of the leases: an ADD that has leased by what was
    /// written before has ended then.
    fn own(&self, grants: &Grants) -> io::Result<()> {
        let own = |owned: &mut Owned, _: &Leased<'_>| {
            owned.node.clone_from(&self.node);
            let parts = grants.blocks.iter();
            owned.parts = parts.map(|grant| (grant.block, grant.part())).collect();
        };
        owned::change(&self.leases, &self.state_dir, &self.space, own).map_err(io::Error::other)
    }

    /// Removes the file: one without blocks says what no file says.
    pub(super) fn remove(&self) -> io::Result<()> {
        Grants::remove(&self.directory, &self.space)
    }
}
