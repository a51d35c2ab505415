//! Which parts of subnets this node owns: `<stateDir>/owned/<space>`, one JSON file for each space.
//!
//! An ADD leases from parts of this file alone, and from those only that were confirmed in this boot:
//! the file outlives a reboot, and another node may have taken a part while the machine was off.
//!
//! It is read and changed under the lock of the node's leases ([`crate::leases`]), so whoever takes a
//! part out of it sees every lease in that part, and no ADD leases from it afterwards. A change is
//! synced after the lock is let go. A file that cannot be synced is removed: no file, no parts.

use crate::leases::{LeaseError, Leased, Leases};
use crate::range::{Range, gateway_in};
use crate::space::AddressSpace;
use ipnetwork::IpNetwork;
use node::trust;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// The directory below the policy's `stateDir`.
pub const DIRECTORY: &str = "owned";
/// A file is no longer than this, in bytes: 4,096 parts fit.
const MAX_BYTES: u64 = 1 << 24;
const FORMAT: u64 = 1;

/// What this node owns of a space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owned {
    format: u64,
    store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network_name: Option<String>,
    /// The node's name. Under another one it owns nothing.
    pub node: String,
    /// With what the IDs of this disk's claims begin.
    #[serde(default)]
    pub claimant: String,
    /// The highest version seen of each document that matters, by its subnet.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<IpNetwork, u64>,
    pub parts: BTreeMap<IpNetwork, OwnedPart>,
}

/// A part of a subnet that this node owns.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnedPart {
    /// What the node chose when it claimed the part.
    pub id: String,
    /// The boot in which it was confirmed last.
    pub boot: String,
    /// That it is a network of the node's own (`perNode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<OwnedNetwork>,
}

/// A network of the node's own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedNetwork {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// Why it is not known, or cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum OwnedError {
    #[error("read what this node owns: {}: {why}", path.display())]
    Read { path: PathBuf, why: String },
    /// Nothing of what the change says may be relied on.
    #[error("write what this node owns: {}: {source}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Leases(#[from] Box<LeaseError>),
}

impl From<LeaseError> for OwnedError {
    fn from(error: LeaseError) -> Self {
        Self::Leases(Box::new(error))
    }
}

/// The spaces of which there is a file.
///
/// # Errors
/// [`OwnedError::Read`]: the directory, or one of the files.
pub fn spaces(state_dir: &Path) -> Result<Vec<AddressSpace>, OwnedError> {
    let directory = state_dir.join(DIRECTORY);
    let failed = |error: io::Error| OwnedError::Read {
        path: directory.clone(),
        why: error.to_string(),
    };
    let entries = match std::fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut spaces = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        // What a killed writer left begins with a dot.
        if let Some(space) = name.to_str().and_then(AddressSpace::of_file_name) {
            spaces.push(space);
        }
    }
    spaces.sort();
    Ok(spaces)
}

/// Changes what this node owns of a space, under the lock of its leases: `change` sees which addresses
/// are leased. Durable when it returns.
///
/// # Errors
/// [`OwnedError`]. After [`OwnedError::Write`] the file is as it was, or it is gone.
pub fn change<R>(
    leases: &Leases,
    state_dir: &Path,
    space: &AddressSpace,
    change: impl FnOnce(&mut Owned, &Leased<'_>) -> R,
) -> Result<R, OwnedError> {
    let path = path(state_dir, space);
    let failed = |source| OwnedError::Write {
        path: path.clone(),
        source,
    };
    node::file::make_directories(trust::parent(&path)).map_err(failed)?;
    let (answer, is_changed) = leases.locked(space, |leased| -> Result<_, OwnedError> {
        let before = Owned::read(state_dir, space)?;
        let mut owned = before.clone();
        let answer = change(&mut owned, leased);
        let is_changed = owned != before;
        if is_changed {
            let text = serde_json::to_vec(&owned).map_err(|e| failed(e.into()))?;
            if text.len() as u64 > MAX_BYTES {
                let why = format!("it would be longer than {MAX_BYTES} bytes");
                return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, why)));
            }
            node::file::replace_in_boot(&path, text).map_err(failed)?;
        }
        Ok((answer, is_changed))
    })??;
    if is_changed && let Err(error) = sync(&path) {
        let _ = leases.locked(space, |_| std::fs::remove_file(&path));
        return Err(failed(error));
    }
    Ok(answer)
}

/// Removes the file of a space of which this node owns nothing.
///
/// # Errors
/// [`OwnedError`]: it cannot be read or removed.
pub fn remove_empty(
    leases: &Leases,
    state_dir: &Path,
    space: &AddressSpace,
) -> Result<(), OwnedError> {
    let path = path(state_dir, space);
    leases.locked(space, |_| {
        if !Owned::read(state_dir, space)?.parts.is_empty() {
            return Ok(());
        }
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(OwnedError::Write { path, source })
            }
            _ => Ok(()),
        }
    })?
}

/// Another change may have come in between: its file is synced then.
fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_data()?;
    File::open(trust::parent(path))?.sync_all()
}

/// The file of a space.
#[must_use]
pub fn path(state_dir: &Path, space: &AddressSpace) -> PathBuf {
    state_dir.join(DIRECTORY).join(space.file_name())
}

impl Owned {
    fn none(space: &AddressSpace) -> Self {
        Self {
            format: FORMAT,
            store: space.store.clone(),
            network_name: space.network_name.clone(),
            ..Self::default()
        }
    }

    /// Reads what is owned of a space: without a file, nothing.
    ///
    /// # Errors
    /// [`OwnedError::Read`]: the file is not one of ours.
    pub fn read(state_dir: &Path, space: &AddressSpace) -> Result<Self, OwnedError> {
        let path = path(state_dir, space);
        let read = || -> Result<Self, String> {
            let text = trust::read(&path, MAX_BYTES).map_err(|error| error.to_string())?;
            let Some(text) = text else {
                return Ok(Self::none(space));
            };
            let owned = match serde_json::from_slice::<Self>(&text) {
                // A power failure cut it: no file, no parts. The agent asks for them again.
                Err(error) if error.is_eof() || error.is_syntax() => return Ok(Self::none(space)),
                owned => owned.map_err(|error| error.to_string())?,
            };
            if owned.format != FORMAT {
                return Err(format!(
                    "it has format {}, this program knows {FORMAT}: install all programs of one release",
                    owned.format
                ));
            }
            match (&owned.store, &owned.network_name) == (&space.store, &space.network_name) {
                true => Ok(owned),
                false => Err("it is of another space".to_owned()),
            }
        };
        read().map_err(|why| OwnedError::Read { path, why })
    }

    /// The parts from which a node with this name leases in this boot.
    fn usable<'o>(
        &'o self,
        node: &str,
        boot: &'o str,
    ) -> impl Iterator<Item = (IpNetwork, &'o OwnedPart)> {
        let parts = self.parts.iter().filter(move |(_, part)| part.boot == boot);
        let is_own = self.node == node;
        parts
            .filter(move |_| is_own)
            .map(|(cidr, part)| (*cidr, part))
    }

    /// A range, of which only addresses are given that the node owns.
    #[must_use]
    pub fn cut(&self, range: &Range, node: &str, boot: &str) -> Range {
        let parts = self.usable(node, boot);
        let own = parts.filter(|(cidr, part)| part.is_of(range, *cidr));
        let networks: Vec<IpNetwork> = own.map(|(cidr, _)| cidr).collect();
        range.within(&networks)
    }

    /// The network of the node's own of a range that is divided so.
    #[must_use]
    pub fn network_of(&self, range: &Range, node: &str, boot: &str) -> Option<IpNetwork> {
        range.per_node()?;
        let mut parts = self.usable(node, boot);
        let found =
            parts.find(|(cidr, part)| part.is_of(range, *cidr) && range.size_within(*cidr) > 0);
        found.map(|(cidr, _)| cidr)
    }

    /// Whether an address is in one of the parts.
    #[must_use]
    pub fn covers(&self, address: IpAddr, node: &str, boot: &str) -> bool {
        let mut parts = self.usable(node, boot);
        parts.any(|(cidr, _)| cidr.contains(address))
    }

    /// Whether the node may lease an address of a range, also one that the range excludes. It never
    /// leases the gateway of its network.
    #[must_use]
    pub fn has(&self, range: &Range, address: IpAddr, node: &str, boot: &str) -> bool {
        let mut parts = self.usable(node, boot);
        range.gateway_of(address) != Some(address)
            && parts.any(|(cidr, part)| cidr.contains(address) && part.is_of(range, cidr))
    }
}

impl OwnedPart {
    /// Whether addresses of a range are leased from it: a network of the node's own is for the ranges
    /// that are divided so, and for no other one.
    fn is_of(&self, range: &Range, cidr: IpNetwork) -> bool {
        let divided = range.per_node().map(|of| OwnedNetwork {
            gateway: gateway_in(of, cidr),
        });
        let fits = range.per_node().is_none_or(|of| of.prefix == cidr.prefix());
        fits && self.network == divided
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::Use;
    use node_wire::{Gateway, PerNode};

    fn space() -> AddressSpace {
        AddressSpace::new("default", Some("blue"))
    }

    fn part(id: &str) -> OwnedPart {
        OwnedPart {
            id: id.into(),
            boot: "b1".into(),
            ..OwnedPart::default()
        }
    }

    fn cidr(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn state(&self) -> PathBuf {
            self.0.path().join("state")
        }

        fn leases(&self) -> Leases {
            Leases::open(self.0.path(), "b1").unwrap()
        }

        fn own(&self, parts: &[&str]) {
            let own = |owned: &mut Owned, _: &Leased<'_>| {
                owned.node = "n1".into();
                owned
                    .parts
                    .extend(parts.iter().map(|text| (cidr(text), part("7"))));
            };
            change(&self.leases(), &self.state(), &space(), own).unwrap();
        }
    }

    fn range(text: &str) -> Range {
        Range::whole(cidr(text))
    }

    #[test]
    fn what_is_written_is_read() {
        let place = Place::new();
        let none = Owned::read(&place.state(), &space()).unwrap();
        assert!(none.parts.is_empty());
        place.own(&["10.0.0.16/28", "fd00::40/122"]);
        let read = Owned::read(&place.state(), &space()).unwrap();
        assert_eq!(read.parts.len(), 2);
        assert_eq!(spaces(&place.state()).unwrap(), [space()]);
        let whole = range("10.0.0.0/24");
        assert_eq!(read.cut(&whole, "n1", "b1").size(), 16);
        assert_eq!(
            read.cut(&whole, "n2", "b1").size(),
            0,
            "another node's name"
        );
        assert_eq!(read.cut(&whole, "n1", "b2").size(), 0, "another boot");
    }

    #[test]
    fn a_part_is_given_back_by_who_sees_its_leases() {
        let place = Place::new();
        place.own(&["10.0.0.16/28"]);
        let leases = place.leases();
        let subnet = leases.open_subnet_of_test("default+blue", "10.0.0");
        std::fs::write(subnet.join("17"), "").unwrap();
        std::fs::write(subnet.join("18-5"), "").unwrap();
        std::fs::write(subnet.join("99"), "").unwrap();
        let alone = leases.open_subnet_of_test("default+blue+10.0.0.0-24", "10.0.0");
        std::fs::write(alone.join("18"), "").unwrap();
        let other = leases.open_subnet_of_test("default+", "10.0.0");
        std::fs::write(other.join("19"), "").unwrap();
        let used = change(&leases, &place.state(), &space(), |owned, leased| {
            let used = leased.of(cidr("10.0.0.16/28")).unwrap();
            if used.is_empty() {
                owned.parts.clear();
            }
            used
        });
        let [first, second] = ["10.0.0.17", "10.0.0.18"].map(|text| text.parse().unwrap());
        assert_eq!(used.unwrap(), [(first, Use::Leased), (second, Use::Leased)]);
        assert_eq!(
            Owned::read(&place.state(), &space()).unwrap().parts.len(),
            1
        );
    }

    #[test]
    fn a_nodes_network_gives_what_its_range_says_and_no_other_range() {
        let of = |gateway| PerNode {
            prefix: 29,
            gateway: Some(gateway),
        };
        let mut owned = Owned::none(&space());
        owned.node = "n1".into();
        let network = OwnedNetwork {
            gateway: Some("10.0.0.9".parse().unwrap()),
        };
        let own = OwnedPart {
            network: Some(network),
            ..part("7")
        };
        owned.parts.insert(cidr("10.0.0.8/29"), own);
        let divided = |of| range("10.0.0.0/24").divided(Some(of)).unwrap();
        let fits = divided(of(Gateway::First));
        // Neither first nor last, not the gateway.
        assert_eq!(owned.cut(&fits, "n1", "b1").size(), 5);
        let other = divided(of(Gateway::Last));
        assert_eq!(owned.cut(&other, "n1", "b1").size(), 0);
        assert_eq!(owned.cut(&range("10.0.0.0/24"), "n1", "b1").size(), 0);
        let has = |text: &str| owned.has(&fits, text.parse().unwrap(), "n1", "b1");
        assert!(has("10.0.0.10") && !has("10.0.0.9"));
    }

    #[test]
    fn what_is_not_such_a_file_is_refused() {
        let place = Place::new();
        place.own(&["10.0.0.16/28"]);
        let path = path(&place.state(), &space());
        for (text, says) in [
            (
                r#"{"format": 2, "store": "default", "node": "", "parts": {}}"#,
                "format 2",
            ),
            (
                r#"{"format": 1, "store": "x", "node": "", "parts": {}}"#,
                "another space",
            ),
            (
                r#"{"format": 1, "store": "default", "node": "", "parts": {"10/28": {}}}"#,
                "invalid",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Owned::read(&place.state(), &space())
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{error}");
        }
        // After a power failure.
        for text in ["", "{\"format\": 1, ", "\0\0\0\0"] {
            std::fs::write(&path, text).unwrap();
            let owned = Owned::read(&place.state(), &space()).unwrap();
            assert!(owned.parts.is_empty());
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        let error = Owned::read(&place.state(), &space())
            .unwrap_err()
            .to_string();
        assert!(error.contains("is a link"), "{error}");
    }
}
