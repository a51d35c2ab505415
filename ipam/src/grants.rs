//! Which blocks of addresses the cluster gave to this node: `<stateDir>/blocks/<store>/<space>`, one
//! JSON file for each space. The broker writes it after the API has acknowledged a block. It is
//! replaced as a whole, and durable before the broker goes on.
//!
//! The file outlives a reboot, and another node may have taken a block while the machine was off. So
//! each block has the boot in which the API acknowledged it last, and an ADD leases from those of
//! the present boot only.
//!
//! # Why giving a block back and an ADD in it cannot cross
//! The broker takes the block out of the file, then looks for leases in it; if it finds one, it puts
//! the block back. An ADD makes its lease entry, then looks whether the file still has the block; if
//! not, it withdraws. One of the two looks last. If it is the ADD, the block was out by then, and it
//! withdraws. If it is the broker, the lease was there by then, and the block stays. Both may give
//! way. No lock is needed, and either may die anywhere: a lease without the second look keeps the
//! block until its owner's DEL.

use crate::block::AddressSpace;
use crate::range::Range;
use crate::store::network_name_of;
#[cfg(test)]
use crate::store::simulated;
use ipnetwork::IpNetwork;
use nix::fcntl::OFlag;
use node::trust;
use node_wire::PerNode;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file is no longer than this, in bytes: more than [`MAX_BLOCKS`] of the longest, with all of 64
/// addresses excepted.
const MAX_BYTES: u64 = 1 << 24;
/// The most blocks that a node may have in one address space.
pub const MAX_BLOCKS: usize = 4096;
const VERSION: u64 = 1;

/// One block that this node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub block: IpNetwork,
    pub uid: String,
    /// How often it changed hands, with this time.
    pub epoch: u64,
    /// That it is a network of the node's own, and which address is its gateway.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "perNode")]
    pub per_node: Option<PerNode>,
    /// Addresses of it that are not given, because they are leased in a store that the networks used
    /// before. Ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<IpAddr>,
    /// ID of the boot in which the API acknowledged it last.
    pub boot: String,
}

impl Grant {
    /// How many addresses pods can have of it.
    #[must_use]
    pub fn size(&self) -> u64 {
        let range = Range::whole(self.block).divided(self.per_node);
        let size = range.map_or(0, |range| range.size_within(self.block));
        u64::try_from(size).unwrap_or(u64::MAX)
    }

    /// Whether the node may lease an address by it.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.block.contains(address) && self.except.binary_search(&address).is_err()
    }
}

/// The blocks of one address space that this node has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grants {
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network_name: Option<String>,
    /// The blocks, in no order.
    pub blocks: Vec<Grant>,
}

/// Why the node's blocks are not known.
#[derive(Debug, thiserror::Error)]
#[error("read which blocks of addresses this node has: {}: {why}", path.display())]
pub struct GrantsError {
    pub path: PathBuf,
    pub why: String,
}

/// Where the files of a store's address spaces are.
#[must_use]
pub fn directory(state_dir: &Path, store: &str) -> PathBuf {
    state_dir.join("blocks").join(store)
}

/// Those of all address spaces of a store, for which there is a file.
///
/// # Errors
/// [`GrantsError`]: a file is not one of ours.
pub fn read_all(directory: &Path, store: &str) -> Result<Vec<(AddressSpace, Grants)>, GrantsError> {
    let failed = |error: io::Error| GrantsError {
        path: directory.to_owned(),
        why: error.to_string(),
    };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let file = entry.map_err(failed)?.file_name();
        // What a killed writer left begins with a dot.
        if let Some(network_name) = file.to_str().and_then(network_name_of) {
            let space = AddressSpace::new(store, network_name.as_deref());
            let grants = Grants::read(directory, &space)?;
            all.push((space, grants));
        }
    }
    Ok(all)
}

impl Grants {
    #[must_use]
    pub fn none(space: &AddressSpace) -> Self {
        Self {
            version: VERSION,
            network_name: space.network_name.clone(),
            blocks: Vec::new(),
        }
    }

    /// Reads those of a space; a file that is not there has none.
    ///
    /// # Errors
    /// [`GrantsError`]: the file is not one of ours.
    pub fn read(directory: &Path, space: &AddressSpace) -> Result<Self, GrantsError> {
        Ok(Reading::new(directory, space)?.grants)
    }

    /// Replaces those of a space, durably.
    ///
    /// # Errors
    /// What the kernel said, or it would be too long to be read again. Either the file is as it was, or
    /// it was replaced, and not durably ([`node::file::replace`]).
    pub fn write(&self, directory: &Path, space: &AddressSpace) -> io::Result<()> {
        node::file::make_directories(directory)?;
        let text = serde_json::to_vec(self)?;
        if text.len() as u64 > MAX_BYTES {
            let why = format!("it would be longer than {MAX_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
        node::file::replace(&directory.join(space.directory_name()), text)
    }

    /// Removes those of a space that has none. Not durably: a file that comes back says the same.
    ///
    /// # Errors
    /// What the kernel said; that there is no file is none.
    pub fn remove(directory: &Path, space: &AddressSpace) -> io::Result<()> {
        match std::fs::remove_file(directory.join(space.directory_name())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The blocks that an ADD in a boot can lease from.
    #[must_use]
    pub fn of_boot(mut self, boot: &str) -> Self {
        self.blocks.retain(|grant| grant.boot == boot);
        self
    }

    /// The blocks that are of a range's division.
    fn of(&self, range: &Range) -> impl Iterator<Item = &Grant> {
        let divided = range.per_node();
        let grants = self.blocks.iter();
        grants.filter(move |grant| grant.per_node == divided)
    }

    /// Whether the node may lease an address of a range. It never leases the gateway of its network.
    #[must_use]
    pub fn may_lease(&self, range: &Range, address: IpAddr) -> bool {
        range.gateway_of(address) != Some(address) && self.of(range).any(|grant| grant.has(address))
    }

    /// A range, of which only the blocks' addresses are given.
    #[must_use]
    pub fn cut(&self, range: &Range) -> Range {
        let blocks: Vec<IpNetwork> = self.of(range).map(|grant| grant.block).collect();
        range.within(&blocks)
    }

    /// Whether an address is in one of the blocks, and may be leased.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.blocks.iter().any(|grant| grant.has(address))
    }

    /// The addresses of the blocks that are not given.
    #[must_use]
    pub fn exceptions(&self) -> Vec<IpNetwork> {
        let except = self.blocks.iter().flat_map(|grant| &grant.except);
        except.copied().map(IpNetwork::from).collect()
    }

    #[must_use]
    pub fn networks(&self) -> Vec<IpNetwork> {
        self.blocks.iter().map(|grant| grant.block).collect()
    }

    #[must_use]
    pub fn network_name(&self) -> Option<&str> {
        self.network_name.as_deref()
    }
}

/// What a file said, and whether it says so still.
#[derive(Debug)]
pub(crate) struct Reading {
    path: PathBuf,
    /// Held open: another file cannot have its inode meanwhile.
    file: Option<File>,
    pub(crate) grants: Grants,
    /// Which file it was, if it was simulated.
    #[cfg(test)]
    simulated: Option<u32>,
}

impl Reading {
    pub(crate) fn new(directory: &Path, space: &AddressSpace) -> Result<Self, GrantsError> {
        let path = directory.join(space.directory_name());
        #[cfg(test)]
        if let Some((file, text)) = simulated::grants() {
            return Ok(Self {
                path,
                file: None,
                grants: serde_json::from_slice(&text).unwrap(),
                simulated: Some(file),
            });
        }
        match read(&path, space) {
            Ok((file, grants)) => Ok(Self {
                path,
                file,
                grants,
                #[cfg(test)]
                simulated: None,
            }),
            Err(why) => Err(GrantsError { path, why }),
        }
    }

    /// Whether the file is the one that was read. The broker replaces it, and never writes into it.
    pub(crate) fn is_current(&self) -> bool {
        #[cfg(test)]
        if self.simulated.is_some() {
            return self.simulated == simulated::grants().map(|(file, _)| file);
        }
        let there = std::fs::symlink_metadata(&self.path);
        match (&self.file, there) {
            (None, Err(error)) => error.kind() == io::ErrorKind::NotFound,
            (Some(file), Ok(there)) => file
                .metadata()
                .is_ok_and(|read| (read.dev(), read.ino()) == (there.dev(), there.ino())),
            _ => false,
        }
    }
}

fn read(path: &Path, space: &AddressSpace) -> Result<(Option<File>, Grants), String> {
    let said = |error: trust::Error| error.to_string();
    let Some(mut file) = trust::open(path, OFlag::O_RDONLY).map_err(said)? else {
        return Ok((None, Grants::none(space)));
    };
    let text = trust::content(path, &mut file, MAX_BYTES).map_err(said)?;
    let grants: Grants = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if grants.version != VERSION {
        return Err(format!(
            "it has version {}, this program knows version {VERSION}: install all programs of one release",
            grants.version
        ));
    }
    if grants.network_name != space.network_name {
        return Err("it is of another network_name".to_owned());
    }
    Ok((Some(file), grants))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(space: &AddressSpace, blocks: &[&str]) -> Grants {
        let mut grants = Grants::none(space);
        for block in blocks {
            grants.blocks.push(Grant {
                block: block.parse().unwrap(),
                uid: "8f".into(),
                epoch: 1,
                per_node: None,
                except: Vec::new(),
                boot: "b1".into(),
            });
        }
        grants
    }

    #[test]
    fn what_is_written_is_read() {
        let place = tempfile::tempdir().unwrap();
        let directory = directory(place.path(), "default");
        for name in [None, Some("blue")] {
            let space = AddressSpace::new("default", name);
            assert_eq!(Grants::read(&directory, &space).unwrap().blocks, []);
            let grants = granted(&space, &["10.0.0.16/28", "fd00::40/122"]);
            grants.write(&directory, &space).unwrap();
            let read = Grants::read(&directory, &space).unwrap();
            assert_eq!(read, grants);
            assert_eq!(read.network_name(), name);
            assert!(read.has("10.0.0.31".parse().unwrap()));
            assert!(!read.has("10.0.0.32".parse().unwrap()));
            assert!(read.has("fd00::7f".parse().unwrap()));
        }
    }

    #[test]
    fn an_add_leases_from_blocks_of_its_own_boot() {
        let space = AddressSpace::new("default", None);
        let grants = granted(&space, &["10.0.0.16/28"]);
        assert_eq!(grants.clone().of_boot("b1"), grants);
        assert_eq!(grants.of_boot("b2").blocks, []);
    }

    #[test]
    fn the_gateway_of_a_nodes_network_is_not_leased() {
        let per_node = PerNode {
            prefix: 29,
            gateway: Some(node_wire::Gateway::First),
        };
        let mut grants = granted(&AddressSpace::new("default", None), &["10.0.0.8/29"]);
        grants.blocks[0].per_node = Some(per_node);
        let range = Range::whole("10.0.0.0/24".parse().unwrap());
        let range = range.divided(Some(per_node)).unwrap();
        assert!(!grants.may_lease(&range, "10.0.0.9".parse().unwrap()));
        assert!(grants.may_lease(&range, "10.0.0.10".parse().unwrap()));
    }

    #[test]
    fn as_many_blocks_as_a_node_may_have_are_read_back() {
        let place = tempfile::tempdir().unwrap();
        let name = "n".repeat(200);
        let space = AddressSpace::new("default", Some(&name));
        let mut grants = Grants::none(&space);
        let longest = Grant {
            block: "fd00:1111:2222:3333:4444:5555:6666:7777/128"
                .parse()
                .unwrap(),
            uid: "u".repeat(64),
            epoch: u64::MAX,
            per_node: None,
            except: Vec::new(),
            boot: "b".repeat(36),
        };
        grants.blocks = vec![longest; MAX_BLOCKS];
        grants.write(place.path(), &space).unwrap();
        assert_eq!(Grants::read(place.path(), &space).unwrap(), grants);
    }

    #[test]
    fn what_would_be_too_long_to_be_read_is_not_written() {
        let place = tempfile::tempdir().unwrap();
        let space = AddressSpace::new("default", None);
        let mut grants = granted(&space, &["fd00::/112"]);
        grants.write(place.path(), &space).unwrap();
        let before = grants.clone();
        let first: u128 = 0xfd00_1111_2222_3333_4444_5555_6666_0000;
        let all = (0..1 << 16).map(|at| std::net::Ipv6Addr::from(first + at).into());
        grants.blocks[0].except = all.collect();
        grants.blocks = vec![grants.blocks[0].clone(); 8];
        let error = grants.write(place.path(), &space).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(Grants::read(place.path(), &space).unwrap(), before);
    }

    #[test]
    fn a_replaced_file_is_seen() {
        let place = tempfile::tempdir().unwrap();
        let space = AddressSpace::new("default", None);
        let none = Reading::new(place.path(), &space).unwrap();
        assert!(none.is_current());
        let grants = granted(&space, &["10.0.0.16/28"]);
        grants.write(place.path(), &space).unwrap();
        assert!(!none.is_current());
        let one = Reading::new(place.path(), &space).unwrap();
        assert!(one.is_current());
        // The same text in a new file: whoever wrote it may have looked at the leases between.
        for _ in 0..3 {
            grants.write(place.path(), &space).unwrap();
            assert!(!one.is_current());
        }
        std::fs::remove_file(&one.path).unwrap();
        assert!(!one.is_current());
    }

    #[test]
    fn what_is_no_grants_file_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let space = AddressSpace::new("default", None);
        let path = place.path().join(space.directory_name());
        for (text, says) in [
            ("", "EOF"),
            (r#"{"version": 2, "blocks": []}"#, "version 2"),
            (
                r#"{"version": 1, "networkName": "blue", "blocks": []}"#,
                "network_name",
            ),
            (
                r#"{"version": 1, "blocks": [{"block": "10.0.0.0/28", "uid": "", "epoch": 1}]}"#,
                "boot",
            ),
            (
                r#"{"version": 1, "blocks": [{"block": "10.0.0/28", "uid": "", "epoch": 1, "boot": "b"}]}"#,
                "invalid",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Grants::read(place.path(), &space).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        let error = Grants::read(place.path(), &space).unwrap_err().to_string();
        assert!(error.contains("is a link"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let fifo = nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR);
        fifo.unwrap();
        assert!(Grants::read(place.path(), &space).is_err());
    }
}
