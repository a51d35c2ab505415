//! The journal's files.
//!
//! ```text
//! <stateDir>/attachments/<network>@<container>@<interface>   one record each
//! <stateDir>/devices/<netdev>                                who a moved netdev belongs to
//! <stateDir>/locks/<netdev>                                  held while it changes hands
//! ```
//!
//! Safe to be killed anywhere. A record is created under its final name and written at once,
//! and nothing is changed before that has succeeded: a file that is empty or cut off says that
//! nothing was done, and is removed by whoever finds it. The same goes for a claim, which is
//! read and written only with the netdev's lock held. A record is changed by renaming another
//! over it; what is left of one that never got that far has the record's name in its own and
//! goes with it. Locks are the kernel's and end with the process; their files stay, as removing
//! one would let two hold "the" lock.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use cni_wire::{AttachmentId, Code, ContainerId, Error, IfName};
use serde::{Deserialize, Serialize};

use super::{Record, record::VERSION};
use crate::netdev::snapshot::Identity;

/// How long another attachment of the same netdev may take before the runtime is told to try
/// again: a move and a restoration, several times over.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// The longest name a file may have (`NAME_MAX`), less what stands before it while a record is
/// changed.
const LONGEST: usize = 255 - NEW.len();
/// Stands before the name of a record that is to replace another.
const NEW: &str = ".new-";
/// A record is some ten kilobytes with the sysctls of a moved netdev.
const MAX_RECORD: u64 = 16 << 20;

/// The name of an attachment's record.
///
/// Neither network names nor container IDs have an `@`, so it reads back in one way only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// The name for an attachment; none when a file cannot be named so.
    pub fn of(network: &str, id: &AttachmentId) -> Option<Key> {
        let name = format!("{network}@{}@{}", id.container_id, id.ifname);
        (name.len() <= LONGEST).then_some(Key(name))
    }

    /// Network and attachment of a record's name.
    pub fn parse(name: &str) -> Option<(Key, String, AttachmentId)> {
        if name.starts_with(NEW) {
            return None;
        }
        let mut parts = name.splitn(3, '@');
        let (network, container, ifname) = (parts.next()?, parts.next()?, parts.next()?);
        let id = AttachmentId {
            container_id: ContainerId::parse(container).ok()?,
            ifname: IfName::parse(ifname).ok()?,
        };
        Some((Key(name.to_owned()), network.to_owned(), id))
    }

    /// The file's name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Who a moved netdev belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Format of this file.
    pub version: u32,
    /// The attachment's record.
    pub owner: String,
    /// The kernel's boot ID.
    pub boot: String,
}

/// The journal of a node.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// A netdev's lock, held.
#[derive(Debug)]
pub struct Lock {
    // Closing the file lets go of the lock.
    _file: File,
}

impl Store {
    /// The journal below a state directory; nothing is touched yet.
    pub fn at(directory: &Path) -> Self {
        Store {
            directory: directory.to_owned(),
        }
    }

    fn attachments(&self) -> PathBuf {
        self.directory.join("attachments")
    }

    fn devices(&self) -> PathBuf {
        self.directory.join("devices")
    }

    /// The record of an attachment; none when there is none, or one that was never finished.
    ///
    /// # Errors
    /// Code 105: it cannot be read, or a newer version of this program wrote it.
    pub fn read(&self, key: &Key) -> Result<Option<Record>, Error> {
        let path = self.attachments().join(&key.0);
        let Some(text) = read_file(&path)? else {
            return Ok(None);
        };
        // Only the version is sure to be there in every version.
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        match serde_json::from_slice::<Head>(&text) {
            Ok(head) if head.version > VERSION => Err(state(format!(
                "{} has version {} of the journal, this program knows {VERSION}",
                path.display(),
                head.version
            ))
            .with_details("upgrade rdma-netdev on this node again; it was newer before")),
            Ok(_) => serde_json::from_slice(&text).map(Some).map_err(|e| {
                state(format!("{} is damaged: {e}", path.display())).with_details(
                    "nothing can be restored from it; look at the netdev, then remove the file",
                )
            }),
            // Cut off while it was written: nothing was changed after that.
            Err(_) => Ok(None),
        }
    }

    /// Writes the record of a new attachment.
    ///
    /// # Errors
    /// Code 103 when there is one; code 105 when it cannot be written. Nothing is left then.
    pub fn create(&self, key: &Key, record: &Record) -> Result<(), Error> {
        let path = self.attachments().join(&key.0);
        let mut file = match create_new(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make_directory(&self.attachments())?;
                create_new(&path)
            }
            done => done,
        }
        .map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::new(
                Code::Exists,
                format!(
                    "{} is attached to network {} already",
                    record.owner(),
                    record.network
                ),
            )
            .with_details("the runtime must DEL it first"),
            _ => state(format!("write {}: {e}", path.display())),
        })?;
        let written = serde_json::to_vec(record)
            .map_err(io::Error::from)
            .and_then(|text| file.write_all(&text));
        written.map_err(|e| {
            // What is left is empty or cut off, which says the same as no file.
            let _ = fs::remove_file(&path);
            state(format!("write {}: {e}", path.display()))
        })
    }

    /// Writes a record in the place of the one there is.
    ///
    /// # Errors
    /// Code 105; the old one is there then.
    pub fn replace(&self, key: &Key, record: &Record) -> Result<(), Error> {
        let path = self.attachments().join(&key.0);
        let new = self.attachments().join(format!("{NEW}{}", key.0));
        serde_json::to_vec(record)
            .map_err(io::Error::from)
            .and_then(|text| write_over(&new, &text))
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|e| {
                // The record that was there is there.
                let _ = fs::remove_file(&new);
                state(format!("write {}: {e}", path.display()))
            })
    }

    /// Removes a record; one that is gone is removed.
    ///
    /// # Errors
    /// Code 105.
    pub fn forget(&self, key: &Key) -> Result<(), Error> {
        remove(&self.attachments().join(format!("{NEW}{}", key.0)))?;
        remove(&self.attachments().join(&key.0))
    }

    /// The names of all records.
    ///
    /// # Errors
    /// Code 105: the directory cannot be listed.
    pub fn list(&self) -> Result<Vec<(Key, String, AttachmentId)>, Error> {
        let directory = self.attachments();
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(state(format!("list {}: {e}", directory.display()))),
        };
        let mut keys: Vec<_> = entries
            .filter_map(|entry| Key::parse(entry.ok()?.file_name().to_str()?))
            .collect();
        keys.sort();
        Ok(keys)
    }

    /// Whether a record could be written now.
    ///
    /// # Errors
    /// Code 50 with the reason.
    pub fn check_writable(&self) -> Result<(), Error> {
        let directory = self.attachments();
        make_directory(&directory)
            .and_then(|()| {
                let probe = directory.join(format!(".probe-{}", std::process::id()));
                create_new(&probe)
                    .and_then(|mut file| file.write_all(b"{}"))
                    .and_then(|()| fs::remove_file(&probe))
                    .map_err(|e| state(format!("write {}: {e}", probe.display())))
            })
            .map_err(|e| Error {
                code: Code::Unavailable,
                ..e
            })
    }

    /// Holds the lock of a netdev: while it changes hands nobody else may give or take it.
    ///
    /// # Errors
    /// Code 11 when another holds it for too long; code 105 when there can be no lock.
    pub fn lock(&self, identity: &Identity) -> Result<Lock, Error> {
        self.lock_file(&identity.key())
    }

    /// Locks the moves of RDMA devices: each hands out a number of a character device, which two
    /// at a time could swap.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn lock_rdma(&self) -> Result<Lock, Error> {
        self.lock_file("rdma")
    }

    fn lock_file(&self, name: &str) -> Result<Lock, Error> {
        let directory = self.directory.join("locks");
        let path = directory.join(name);
        let open = || {
            OpenOptions::new()
                .create(true)
                .append(true)
                .mode(0o600)
                .open(&path)
        };
        let file = match open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make_directory(&directory)?;
                open()
            }
            done => done,
        }
        .map_err(|e| state(format!("open {}: {e}", path.display())))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_PATIENCE => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(
                        Code::TryAgain,
                        format!("another attachment holds {} for too long", path.display()),
                    ));
                }
                Err(TryLockError::Error(e)) => {
                    return Err(state(format!("lock {}: {e}", path.display())));
                }
            }
        }
    }

    /// Who a netdev belongs to. Ask with its lock held.
    ///
    /// # Errors
    /// Code 105: the claim cannot be read.
    pub fn claim(&self, identity: &Identity) -> Result<Option<Claim>, Error> {
        let path = self.devices().join(identity.key());
        let Some(text) = read_file(&path)? else {
            return Ok(None);
        };
        // Cut off while it was written: the netdev was not touched after that.
        let Ok(claim) = serde_json::from_slice::<Claim>(&text) else {
            return Ok(None);
        };
        if claim.version > VERSION {
            return Err(state(format!(
                "{} was written by a newer version",
                path.display()
            )));
        }
        Ok(Some(claim))
    }

    /// Makes an attachment the owner of a netdev. Call with its lock held.
    ///
    /// # Errors
    /// Code 105.
    pub fn take(&self, identity: &Identity, key: &Key, boot: &str) -> Result<(), Error> {
        let claim = Claim {
            version: VERSION,
            owner: key.0.clone(),
            boot: boot.to_owned(),
        };
        let path = self.devices().join(identity.key());
        let write = || {
            let text = serde_json::to_vec(&claim)?;
            write_over(&path, &text)
        };
        match write() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make_directory(&self.devices())?;
                write()
            }
            done => done,
        }
        .map_err(|e| state(format!("write {}: {e}", path.display())))
    }

    /// Makes a netdev nobody's. Call with its lock held.
    ///
    /// # Errors
    /// Code 105.
    pub fn release(&self, identity: &Identity) -> Result<(), Error> {
        remove(&self.devices().join(identity.key()))
    }
}

fn state(msg: String) -> Error {
    Error::new(Code::State, msg)
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn read_file(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_RECORD).read_to_end(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(state(format!("read {}: {e}", path.display()))),
    }
}

fn write_over(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(text)
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e)
            if !matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Err(state(format!("remove {}: {e}", path.display())))
        }
        _ => Ok(()),
    }
}

/// For root alone: a record says which netdev is to be given what name.
fn make_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|e| state(format!("make {}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::record::Netns;

    fn id(container: &str, ifname: &str) -> AttachmentId {
        AttachmentId {
            container_id: ContainerId::parse(container).unwrap(),
            ifname: IfName::parse(ifname).unwrap(),
        }
    }

    fn record() -> Record {
        Record {
            version: VERSION,
            network: "rail0".into(),
            container_id: "c1".into(),
            ifname: "net1".into(),
            pod: Some("default/a".into()),
            created: 1,
            boot: "b".into(),
            netns: Netns {
                path: "/run/netns/a".into(),
                device: 4,
                inode: 5,
            },
            moved: None,
            child: None,
            rdma: Vec::new(),
            rules: Vec::new(),
            ipam: None,
        }
    }

    fn store() -> (tempfile::TempDir, Store, Key) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::at(&dir.path().join("state"));
        (dir, store, Key::of("rail0", &id("c1", "net1")).unwrap())
    }

    #[test]
    fn a_record_is_read_until_it_is_forgotten() {
        let (_dir, store, key) = store();
        assert_eq!(store.read(&key).unwrap(), None);
        assert!(store.list().unwrap().is_empty());
        store.create(&key, &record()).unwrap();
        assert_eq!(store.read(&key).unwrap(), Some(record()));
        assert_eq!(
            store.create(&key, &record()).unwrap_err().code,
            Code::Exists
        );
        let changed = Record {
            created: 2,
            ..record()
        };
        fs::write(store.attachments().join(".new-rail0@c1@net1"), "{\"ver").unwrap();
        store.replace(&key, &changed).unwrap();
        assert_eq!(store.read(&key).unwrap(), Some(changed));
        assert_eq!(
            store.list().unwrap(),
            [(key.clone(), "rail0".into(), id("c1", "net1"))]
        );
        fs::write(store.attachments().join(".new-rail0@c1@net1"), "{\"ver").unwrap();
        store.forget(&key).unwrap();
        store.forget(&key).unwrap();
        assert_eq!(store.read(&key).unwrap(), None);
        assert_eq!(fs::read_dir(store.attachments()).unwrap().count(), 0);
    }

    #[test]
    fn a_record_that_was_cut_off_says_that_nothing_was_done() {
        let (_dir, store, key) = store();
        store.create(&key, &record()).unwrap();
        let path = store.attachments().join(key.as_str());
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(store.read(&key).unwrap(), None, "{length} bytes");
        }
    }

    #[test]
    fn a_newer_record_is_refused_by_name() {
        let (_dir, store, key) = store();
        store.create(&key, &record()).unwrap();
        let path = store.attachments().join(key.as_str());
        fs::write(&path, r#"{"version": 2, "what": "ever"}"#).unwrap();
        let error = store.read(&key).unwrap_err();
        assert_eq!(error.code, Code::State);
        assert!(error.msg.contains("version 2"), "{error}");
        fs::write(&path, r#"{"version": 1, "what": "ever"}"#).unwrap();
        assert!(store.read(&key).unwrap_err().msg.contains("damaged"));
    }

    #[test]
    fn an_unwritable_directory_leaves_nothing() {
        let (dir, _, key) = store();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let store = Store::at(&file);
        assert_eq!(store.create(&key, &record()).unwrap_err().code, Code::State);
        assert_eq!(store.check_writable().unwrap_err().code, Code::Unavailable);
        store.forget(&key).unwrap();
    }

    #[test]
    fn names_read_back_in_one_way_only() {
        let odd = id("c", "a@b");
        let key = Key::of("net", &odd).unwrap();
        assert_eq!(
            Key::parse(key.as_str()),
            Some((key.clone(), "net".into(), odd))
        );
        assert_eq!(Key::parse("no-record"), None);
        assert_eq!(Key::parse(".probe-7"), None);
        assert_eq!(Key::parse(".new-rail0@c1@net1"), None);
        assert_eq!(Key::of(&"n".repeat(250), &id("c", "net1")), None);
    }

    #[test]
    fn a_netdev_has_one_owner_at_a_time() {
        let (_dir, store, key) = store();
        let nic = Identity {
            bus_device: Some("0000:3b:00.0".into()),
            ..Identity::default()
        };
        let lock = store.lock(&nic).unwrap();
        assert_eq!(store.claim(&nic).unwrap(), None);
        store.take(&nic, &key, "b").unwrap();
        assert_eq!(store.claim(&nic).unwrap().unwrap().owner, key.as_str());
        let other = Identity {
            bus_device: Some("0000:3b:00.1".into()),
            ..Identity::default()
        };
        assert_eq!(store.claim(&other).unwrap(), None);
        fs::write(store.devices().join(nic.key()), "{\"version\": 1, \"ow").unwrap();
        assert_eq!(store.claim(&nic).unwrap(), None, "cut off");
        store.release(&nic).unwrap();
        assert_eq!(store.claim(&nic).unwrap(), None);
        drop(lock);
        store.lock(&nic).unwrap();
    }
}
