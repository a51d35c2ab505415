//! Documents in a directory that nodes share.
//!
//! ```text
//! <dir>/FORMAT                       {"format": 1}
//! <dir>/<space>/<subnet>/<epoch>     10.56.3.0-24/17: the document as JSON
//! ```
//! The document is the file with the highest number. A compare-and-swap links a whole new file to the
//! next number, which one writer alone can do, and lists the directory again: a file that is higher
//! means that it was built on an old list, or that another writer went on from it. So a link proves
//! nothing by itself, and no rename or lock does on a share. The winner removes the files below the one
//! before its own. Nothing here reads a clock.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ipam::space::AddressSpace;
use ipam::subnet::{Document, subnet_of};
use ipnetwork::IpNetwork;
use nix::errno::Errno;
use node::random::random64;

use crate::api::News;
use crate::backend::{BackendError, Read, Swap};

/// A document of 256 parts, each with four wants, is shorter.
const MAX_BYTES: u64 = 1 << 20;
/// How often a list that is old by the time its file is opened is read again.
const MAX_LISTS: usize = 8;

/// A directory of documents.
#[derive(Debug, Clone)]
pub struct Directory(PathBuf);

/// Why a document cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("{attempt} {}: {source}", path.display())]
    Io {
        attempt: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{}: {why}", path.display())]
    Wrong { path: PathBuf, why: String },
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    let path = path.to_owned();
    move |source| DirectoryError::Io {
        attempt,
        path,
        source,
    }
}

impl Directory {
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn space(&self, space: &AddressSpace) -> PathBuf {
        // Nodes may call the store differently.
        self.0.join(match &space.network_name {
            None => "default".to_owned(),
            Some(name) => format!("net.{name}"),
        })
    }

    fn subnet(&self, space: &AddressSpace, subnet: IpNetwork) -> PathBuf {
        let name = format!("{}-{}", subnet.network(), subnet.prefix());
        self.space(space).join(name)
    }

    /// The spaces of which there is a directory.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn spaces(&self, store: &str) -> Result<Vec<AddressSpace>, DirectoryError> {
        let entries = fs::read_dir(&self.0).map_err(failed("list", &self.0))?;
        let mut spaces = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed("list", &self.0))?.file_name();
            let name = name.to_str().unwrap_or_default();
            let network_name = name.strip_prefix("net.");
            if name == "default" || network_name.is_some_and(node::identity::is_name) {
                spaces.push(AddressSpace::new(store, network_name));
            }
        }
        Ok(spaces)
    }

    /// The subnets of a space that have a document, in no order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn subnets(&self, space: &AddressSpace) -> Result<Vec<IpNetwork>, DirectoryError> {
        let path = self.space(space);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed("list", &path))?,
        };
        let mut subnets = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed("list", &path))?.file_name();
            let parsed = name.to_str().and_then(|name| {
                let subnet: IpNetwork = name.replacen('-', "/", 1).parse().ok()?;
                (subnet_of(subnet.ip()) == subnet).then_some(subnet)
            });
            subnets.extend(parsed);
        }
        Ok(subnets)
    }

    /// The documents in which a node may have parts: all of them. The directory must be a store.
    ///
    /// # Errors
    /// It is none, or cannot be read.
    pub fn documents(&self, store: &str) -> Result<Vec<News>, BackendError> {
        ipam::directory::check(self.path())?;
        let mut found = Vec::new();
        for space in self.spaces(store)? {
            let subnets = self.subnets(&space)?.into_iter();
            found.extend(subnets.map(|subnet| News {
                space: space.clone(),
                subnet,
            }));
        }
        Ok(found)
    }

    /// Reads a document: an empty one where there is none.
    ///
    /// # Errors
    /// The directory cannot be read, or the file is not such a document.
    pub fn read(&self, space: &AddressSpace, subnet: IpNetwork) -> Result<Read, DirectoryError> {
        let directory = self.subnet(space, subnet);
        for _ in 0..MAX_LISTS {
            let Some(version) = epochs(&directory)?.pop() else {
                return Ok(Read::none(space, subnet));
            };
            let path = directory.join(version.to_string());
            let text = match read_file(&path) {
                Ok(text) => text,
                // Removed by a writer that went on from it.
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        || error.raw_os_error() == Some(Errno::ESTALE as i32) =>
                {
                    continue;
                }
                Err(error) => return Err(failed("read", &path)(error)),
            };
            return match parse(&text, space, subnet) {
                Ok(document) => Ok(Read {
                    document,
                    version,
                    labels: BTreeMap::new(),
                }),
                Err(why) => Err(DirectoryError::Wrong { path, why }),
            };
        }
        let why = "other nodes change it faster than it can be read".to_owned();
        Err(DirectoryError::Wrong {
            path: directory,
            why,
        })
    }

    /// Replaces a document that was read with this version.
    ///
    /// # Errors
    /// What the kernel said; it is not known then whether the document was replaced.
    pub fn swap(
        &self,
        space: &AddressSpace,
        version: u64,
        document: &Document,
    ) -> Result<Swap, DirectoryError> {
        let directory = self.subnet(space, document.subnet);
        if version == 0 {
            let mut builder = DirBuilder::new();
            let made = builder.recursive(true).mode(0o700).create(&directory);
            made.map_err(failed("make", &directory))?;
            sync(&self.0)?;
            sync(&self.space(space))?;
        }
        let next = version + 1;
        let (aside, target) = (
            directory.join(format!(".{:016x}.new", random64())),
            directory.join(next.to_string()),
        );
        let linked = write_and_link(&aside, &target, document);
        let _ = fs::remove_file(&aside);
        if !linked? {
            return Ok(Swap::Lost);
        }
        sync(&directory)?;
        let all = epochs(&directory)?;
        if all.last() != Some(&next) {
            return Ok(Swap::Lost);
        }
        for old in all.iter().filter(|epoch| **epoch < version) {
            let _ = fs::remove_file(directory.join(old.to_string()));
        }
        Ok(Swap::Won(next))
    }
}

/// Whether the new file has the name now.
fn write_and_link(
    aside: &Path,
    target: &Path,
    document: &Document,
) -> Result<bool, DirectoryError> {
    let text = serde_json::to_vec_pretty(document).map_err(|error| DirectoryError::Wrong {
        path: aside.to_owned(),
        why: error.to_string(),
    })?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(aside);
    let mut file = file.map_err(failed("make", aside))?;
    let written = file.write_all(&text).and_then(|()| file.sync_all());
    written.map_err(failed("write", aside))?;
    match fs::hard_link(aside, target) {
        Ok(()) => Ok(true),
        // An NFS client that asks again does not know its own link.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let names = fs::metadata(aside).map_err(failed("read the status of", aside))?;
            Ok(names.nlink() > 1)
        }
        Err(error) => Err(failed("link", target)(error)),
    }
}

/// The versions in a directory, which is opened anew, ascending.
fn epochs(directory: &Path) -> Result<Vec<u64>, DirectoryError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed("list", directory))?,
    };
    let mut epochs = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed("list", directory))?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
        epochs.extend(number.filter(|number| *name == *number.to_string()));
    }
    epochs.sort_unstable();
    Ok(epochs)
}

fn parse(text: &[u8], space: &AddressSpace, subnet: IpNetwork) -> Result<Document, String> {
    let mut document: Document = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let name = space.network_name.as_deref().unwrap_or_default();
    if document.subnet != subnet || document.network_name != name {
        return Err(format!(
            "it is the document of {}, network_name {:?}",
            document.subnet, document.network_name
        ));
    }
    document.store.clone_from(&space.store);
    Ok(document)
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let (file, _) = node::file::open_regular(path)?;
    let mut text = Vec::new();
    if file.take(MAX_BYTES + 1).read_to_end(&mut text)? as u64 > MAX_BYTES {
        let why = format!("it is longer than {MAX_BYTES} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}

fn sync(directory: &Path) -> Result<(), DirectoryError> {
    let synced = File::open(directory).and_then(|file| file.sync_all());
    synced.map_err(failed("sync", directory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::subnet::Part;

    fn space() -> AddressSpace {
        AddressSpace::new("shared", Some("blue"))
    }

    fn subnet() -> IpNetwork {
        "10.56.3.0/24".parse().unwrap()
    }

    fn made() -> (tempfile::TempDir, Directory) {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::new(place.path());
        ipam::directory::init(place.path()).unwrap();
        (place, directory)
    }

    fn with_part(mut document: Document, piece: &str) -> Document {
        let part = Part {
            node: "a".into(),
            ..Part::default()
        };
        document.parts.insert(piece.parse().unwrap(), part);
        document
    }

    fn names(place: &Path) -> Vec<String> {
        let entries = fs::read_dir(place.join("net.blue/10.56.3.0-24")).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_document_is_replaced_by_who_read_its_last_version() {
        let (place, directory) = made();
        let empty = directory.read(&space(), subnet()).unwrap();
        assert_eq!((empty.version, empty.document.parts.len()), (0, 0));
        let first = with_part(empty.document.clone(), "10.56.3.0/28");
        assert_eq!(directory.swap(&space(), 0, &first).unwrap(), Swap::Won(1));
        let second = with_part(empty.document, "10.56.3.16/28");
        assert_eq!(directory.swap(&space(), 0, &second).unwrap(), Swap::Lost);
        let read = directory.read(&space(), subnet()).unwrap();
        assert_eq!((read.version, &read.document), (1, &first));
        for version in 1..5 {
            let swap = directory.swap(&space(), version, &second).unwrap();
            assert_eq!(swap, Swap::Won(version + 1));
        }
        assert_eq!(names(place.path()), ["4", "5"]);
        // A writer whose list was so old that the next number is free again.
        assert_eq!(directory.swap(&space(), 1, &first).unwrap(), Swap::Lost);
        assert_eq!(directory.read(&space(), subnet()).unwrap().document, second);
        assert_eq!(directory.swap(&space(), 5, &first).unwrap(), Swap::Won(6));
        assert_eq!(names(place.path()), ["5", "6"]);
        assert_eq!(directory.subnets(&space()).unwrap(), [subnet()]);
        let other = AddressSpace::new("shared", None);
        assert_eq!(directory.subnets(&other).unwrap(), []);
    }

    #[test]
    fn one_of_several_writers_wins_each_version() {
        let (_place, directory) = made();
        let won: Vec<u64> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|writer| {
                    let directory = &directory;
                    scope.spawn(move || {
                        let mut won = Vec::new();
                        for turn in 0..20 {
                            let read = directory.read(&space(), subnet()).unwrap();
                            let mut next = Document::empty("shared", "blue", subnet());
                            let piece = format!("10.56.3.{}/32", writer * 20 + turn);
                            next = with_part(next, &piece);
                            next.parts.extend(read.document.parts);
                            match directory.swap(&space(), read.version, &next) {
                                Ok(Swap::Won(version)) => won.push(version),
                                Ok(Swap::Lost | Swap::Denied(_)) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        won
                    })
                })
                .collect();
            let ended = writers.into_iter();
            ended.flat_map(|writer| writer.join().unwrap()).collect()
        });
        let mut distinct = won.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), won.len());
        let read = directory.read(&space(), subnet()).unwrap();
        // Each that won is in the last one; one that was gone on from counts as lost.
        assert!(read.document.parts.len() >= won.len());
        assert!(read.version >= won.len() as u64);
    }

    #[test]
    fn a_link_that_was_made_though_its_answer_says_otherwise_counts() {
        let (place, directory) = made();
        let document = directory.read(&space(), subnet()).unwrap().document;
        let (aside, target) = (place.path().join("aside"), place.path().join("1"));
        assert!(write_and_link(&aside, &target, &document).unwrap());
        fs::remove_file(&aside).unwrap();
        assert!(!write_and_link(&aside, &target, &document).unwrap());
        // As if the client had linked it, and asked again.
        fs::remove_file(&target).unwrap();
        fs::hard_link(&aside, &target).unwrap();
        assert_eq!(fs::metadata(&aside).unwrap().nlink(), 2);
    }

    #[test]
    fn what_is_not_ours_is_refused_by_its_path() {
        let (place, directory) = made();
        ipam::directory::init(place.path()).unwrap();
        let path = place.path().join("net.blue/10.56.3.0-24");
        fs::create_dir_all(&path).unwrap();
        for (text, why) in [
            ("", "EOF"),
            (
                r#"{"store": "s", "networkName": "red", "subnet": "10.56.3.0/24"}"#,
                "network_name \"red\"",
            ),
            (
                r#"{"store": "s", "networkName": "blue", "subnet": "10.56.4.0/24"}"#,
                "10.56.4.0/24",
            ),
        ] {
            fs::write(path.join("7"), text).unwrap();
            let error = directory.read(&space(), subnet()).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("/7"), "{error}");
        }
        fs::write(
            place.path().join(ipam::directory::FORMAT_FILE),
            r#"{"format": 2}"#,
        )
        .unwrap();
        let error = ipam::directory::check(place.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("format 2, this program knows 1"), "{error}");
        fs::remove_file(place.path().join(ipam::directory::FORMAT_FILE)).unwrap();
        let error = ipam::directory::check(place.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("rdmactl addresses init"), "{error}");
    }
}
