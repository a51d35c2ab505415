//! Where the documents of a store are.

use std::path::Path;

use ipam::block::AddressSpace;
use ipam::subnet::Document;
use ipnetwork::IpNetwork;

use crate::directory::{Directory, DirectoryError, Read, Swap};

/// Documents with compare-and-swap. A call may take as long as the store hangs.
#[derive(Debug, Clone)]
pub enum Backend {
    Directory(Directory),
}

impl Backend {
    /// What hangs, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        let Self::Directory(directory) = self;
        directory.path()
    }

    /// # Errors
    /// The store cannot be used.
    pub fn check(&self) -> Result<(), DirectoryError> {
        let Self::Directory(directory) = self;
        directory.check()
    }

    /// Reads a document, never from a cache.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, space: &AddressSpace, subnet: IpNetwork) -> Result<Read, DirectoryError> {
        let Self::Directory(directory) = self;
        directory.check()?;
        directory.read(space, subnet)
    }

    /// Replaces a document that was read with this version.
    ///
    /// # Errors
    /// It is not known whether it was replaced.
    pub fn swap(
        &self,
        space: &AddressSpace,
        version: u64,
        document: &Document,
    ) -> Result<Swap, DirectoryError> {
        let Self::Directory(directory) = self;
        directory.swap(space, version, document)
    }

    /// The subnets in which a node may have parts.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn subnets(&self, space: &AddressSpace) -> Result<Vec<IpNetwork>, DirectoryError> {
        let Self::Directory(directory) = self;
        directory.check()?;
        directory.subnets(space)
    }
}
