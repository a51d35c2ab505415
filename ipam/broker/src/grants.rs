//! Which blocks of addresses the cluster gave to this node: `<stateDir>/blocks/<store>/<space>`, one
//! JSON file for each space, the broker's own memory. It is written after the API has acknowledged a
//! block, is replaced as a whole, and is durable before the broker goes on. What of it ADDs lease from
//! is written beside it as what the node owns ([`ipam::owned`]).

use ipam::block::AddressSpace;
use ipam::owned::{OwnedNetwork, OwnedPart};
use ipam::range::{Range, gateway_in};
use ipnetwork::IpNetwork;
use node::trust;
use node_wire::PerNode;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::IpAddr;
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

    /// What the node owns by it.
    #[must_use]
    pub fn part(&self) -> OwnedPart {
        let network = |of: PerNode| OwnedNetwork {
            gateway: gateway_in(of, self.block),
        };
        OwnedPart {
            id: self.uid.clone(),
            boot: self.boot.clone(),
            network: self.per_node.map(network),
            except: self.except.clone(),
        }
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
        let path = directory.join(file_of(space));
        read(&path, space).map_err(|why| GrantsError { path, why })
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
        node::file::replace(&directory.join(file_of(space)), text)
    }

    /// Removes those of a space that has none. Not durably: a file that comes back says the same.
    ///
    /// # Errors
    /// What the kernel said; that there is no file is none.
    pub fn remove(directory: &Path, space: &AddressSpace) -> io::Result<()> {
        match std::fs::remove_file(directory.join(file_of(space))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether an address is in one of the blocks, and may be leased.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.blocks.iter().any(|grant| grant.has(address))
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

/// The file of a space.
fn file_of(space: &AddressSpace) -> String {
    match &space.network_name {
        Some(name) => format!("net.{name}"),
        None => "default".to_owned(),
    }
}

/// The `network_name` of a space's file.
fn network_name_of(file: &str) -> Option<Option<String>> {
    match file.strip_prefix("net.") {
        Some(name) => Some(Some(name.to_owned())),
        None => (file == "default").then_some(None),
    }
}

fn read(path: &Path, space: &AddressSpace) -> Result<Grants, String> {
    let said = |error: trust::Error| error.to_string();
    let Some(text) = trust::read(path, MAX_BYTES).map_err(said)? else {
        return Ok(Grants::none(space));
    };
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
    Ok(grants)
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
    fn what_is_no_grants_file_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let space = AddressSpace::new("default", None);
        let path = place.path().join(file_of(&space));
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
