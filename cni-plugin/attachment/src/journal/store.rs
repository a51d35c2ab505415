//! The journal's files, and its locks.
//!
//! ```text
//! <stateDir>/attachments/<network>@<container>@<interface>   one record each
//! <stateDir>/devices/<netdev>                                a link to the record of its attachment
//! <stateDir>/lock                                            all locks, each a byte of it
//! ```
//!
//! Safe to be killed anywhere. A record is written as `.new-<record>`, then renamed to its name: it is
//! whole or absent. Nothing is synced: an empty or cut file is from a boot that ended with a power failure.
//!
//! Locks are the kernel's and end with the process. A netdev's is held while it changes hands or its
//! claim is read, and shared while a child is made on it. An attachment's is held by ADD, DEL and GC,
//! and by the IPAM program that they run.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Write},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, symlink},
    },
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};

use cni_wire::{AttachmentId, Code, ContainerId, IfName};
use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use node::trust;
use serde::Deserialize;
use serde_json::error::Category;

use super::{
    Error, Kind, Record,
    file::{Lock, Sharing, make_directory, open_to_write, remove},
    record::VERSION,
};
use crate::netdev::snapshot::Identity;

/// How long another attachment of the same netdev may take before the call fails with "try
/// again": a move and a restoration, several times over.
const NETDEV_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest name a file may have (`NAME_MAX`), less what stands before it while a record is
/// changed.
const MAX_RECORD_NAME_BYTES: usize = 255 - NEW.len();
/// The file of all locks.
const LOCK: &str = "lock";
/// Stands before the name of a record while it is written.
const NEW: &str = ".new-";
/// The most bytes of a record. Usual are some ten kilobytes with the sysctls of a
/// moved netdev; the network configuration is in it, too.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// The name of an attachment's record.
///
/// Neither network names nor container IDs have an `@`, so it reads back in one way only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// The name for an attachment; none when a file cannot be named so.
    pub fn of(network: &str, id: &AttachmentId) -> Option<Key> {
        let name = format!("{network}@{}@{}", id.container_id, id.ifname);
        (name.len() <= MAX_RECORD_NAME_BYTES).then_some(Key(name))
    }

    /// Network and attachment of a record's name.
    pub fn parse(name: &str) -> Option<(Key, String, AttachmentId)> {
        if name.starts_with('.') {
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

    /// The name of its container and interface, whatever the network: that of the lock.
    fn attachment(&self) -> &str {
        let at = self.0.find('@');
        at.and_then(|at| self.0.get(at..)).unwrap_or(&self.0)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// All records there are: those that can be read, and of the others the attachment and what is wrong.
pub type Records = (Vec<(Key, Record)>, Vec<(AttachmentId, Error)>);

/// The journal of a node.
#[derive(Clone, Debug)]
pub struct Journal {
    directory: PathBuf,
    trusted: OnceLock<()>,
}

impl Journal {
    /// The journal below a state directory; nothing is touched yet.
    pub fn at(directory: &Path) -> Self {
        Journal {
            directory: directory.to_owned(),
            trusted: OnceLock::new(),
        }
    }

    /// Whether the journal is there: the first record makes it.
    pub fn exists(&self) -> bool {
        self.attachments().is_dir()
    }

    fn attachments(&self) -> PathBuf {
        self.directory.join("attachments")
    }

    fn devices(&self) -> PathBuf {
        self.directory.join("devices")
    }

    fn lock_name(&self, name: &str, timeout: Duration) -> Result<Lock, Error> {
        Lock::exclusive(&self.directory.join(LOCK), name, timeout)
    }

    /// Whether only root, or the user this program runs as, can change what the journal says: a
    /// record names netdevs and what they are to be given. A directory that is not there is made
    /// by the first record. Nothing is read before; asked once.
    pub fn check_owner(&self) -> Result<(), Error> {
        if self.trusted.get().is_none() {
            trust::check_directory(&self.directory)?;
            for directory in [self.attachments(), self.devices()] {
                trust::check_one(&directory)?;
            }
        }
        self.trusted.get_or_init(|| ());
        Ok(())
    }

    /// The record of an attachment; none when there is none, or one that was never finished.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or a newer version of this program wrote it.
    pub fn read(&self, key: &Key) -> Result<Option<Record>, Error> {
        match self.read_complete(key) {
            Err(e) if e.kind == Kind::Incomplete => Ok(None),
            read => read,
        }
    }

    fn read_complete(&self, key: &Key) -> Result<Option<Record>, Error> {
        self.check_owner()?;
        let path = self.attachments().join(&key.0);
        let Some(text) = trust::read(&path, MAX_RECORD_BYTES)? else {
            return Ok(None);
        };
        let unreadable = |e: serde_json::Error| match e.classify() {
            Category::Eof => Error {
                kind: Kind::Incomplete,
                ..Error::new(
                    Code::State,
                    format_args!(
                        "{} is not complete: the machine stopped while it was written",
                        path.display()
                    ),
                )
            },
            _ => Error::new(
                Code::State,
                format_args!("{} is damaged: {e}", path.display()),
            )
            .with_details(
                "nothing can be restored from it; check the netdev, then remove the file",
            ),
        };
        // Only the version is sure to be there in every version.
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let read = serde_json::from_slice::<Record>(&text);
        let version = match &read {
            Ok(record) => record.version,
            Err(_) => serde_json::from_slice(&text).map_or(0, |head: Head| head.version),
        };
        if version > VERSION {
            let what = format!(
                "{} has version {version} of the journal, this program knows {VERSION}",
                path.display()
            );
            return Err(Error::new(Code::State, what)
                .with_details("upgrade rdma-netdev on this node again; it was newer before"));
        }
        read.map(Some).map_err(unreadable)
    }

    /// All records, by name. One that cannot be used does not hide the others.
    pub fn records(&self) -> Result<Records, Error> {
        hca::host::show(&self.directory);
        let (mut records, mut unreadable) = (Vec::new(), Vec::new());
        for (key, network, id) in self.list()? {
            match self.read_complete(&key) {
                Ok(Some(record)) => records.push((key, record)),
                // Forgotten since it was listed.
                Ok(None) => {}
                Err(error) => {
                    let error = error.context(format_args!("{id} of {network}"));
                    unreadable.push((id, error));
                }
            }
        }
        Ok((records, unreadable))
    }

    /// Writes a record, in the place of one that is there. Call with the attachment's lock held.
    ///
    /// # Errors
    /// It is too large, or the file system's; what was there is there then.
    pub fn write(&self, key: &Key, record: &Record) -> Result<(), Error> {
        let path = self.attachments().join(&key.0);
        let failed = |e| Error::file("write", &path, e);
        let text = serde_json::to_vec(record).map_err(|e| failed(e.into()))?;
        if text.len() as u64 > MAX_RECORD_BYTES {
            let (path, bytes) = (path.display(), text.len());
            let what = format!(
                "{path} would have {bytes} bytes, and a record has at most {MAX_RECORD_BYTES}"
            );
            return Err(Error::new(Code::State, what).with_details(
                "make the network configuration and CNI_ARGS smaller; both are kept in it",
            ));
        }
        let new = self.attachments().join(format!("{NEW}{}", key.0));
        let mut file = open_to_write(&new, OFlag::O_TRUNC)?;
        let written = file.write_all(&text);
        written.and_then(|()| fs::rename(&new, &path)).map_err(|e| {
            let _ = fs::remove_file(&new);
            failed(e)
        })
    }

    /// Removes a record; one that is gone is removed.
    pub fn forget(&self, key: &Key) -> Result<(), Error> {
        remove(&self.attachments().join(format!("{NEW}{}", key.0)))?;
        remove(&self.attachments().join(&key.0))
    }

    /// Waits at most for `timeout` until DEL of an attachment has ended. False when its record is there as it
    /// was.
    ///
    /// # Errors
    /// The directory cannot be watched: root has no inotify instances left, or as the kernel says.
    pub fn wait_for_del(&self, key: &Key, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + timeout;
        let directory = self.attachments();
        let path = directory.join(&key.0);
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        match watch.add_watch(
            &directory,
            AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_TO,
        ) {
            // Without a directory there is no record.
            Err(Errno::ENOENT) => return Ok(true),
            watched => watched?,
        };
        // Watched before it is looked for, so no end is missed. The end of the directory is an event as
        // well. DEL replaces a record of which something is left.
        let inode = || match fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(|file| Some(file.ino())),
        };
        let first = inode()?;
        loop {
            if first.is_none() || inode()? != first {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], left) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            match watch.read_events() {
                Ok(_) | Err(Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The names of all records.
    pub fn list(&self) -> Result<Vec<(Key, String, AttachmentId)>, Error> {
        self.check_owner()?;
        let directory = self.attachments();
        let failed = |e| Error::file("list", &directory, e);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed(e)),
        };
        let mut keys = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            keys.extend(name.to_str().and_then(Key::parse));
        }
        keys.sort();
        Ok(keys)
    }

    /// Whether a record could be written now.
    pub fn check_writable(&self) -> Result<(), Error> {
        let probe = self.attachments().join(".probe");
        let mut file = open_to_write(&probe, OFlag::empty())?;
        let written = file.write_all(b"{}");
        written.map_err(|e| Error::file("write", &probe, e))?;
        remove(&probe)
    }

    /// Holds the lock of a container's interface, of whatever network: no ADD or DEL of it runs
    /// meanwhile. Waits at most for `timeout`.
    ///
    /// # Errors
    /// [`Kind::Locked`] when another holds it for longer; the file system's.
    pub fn lock_attachment(&self, key: &Key, timeout: Duration) -> Result<Lock, Error> {
        self.lock_name(key.attachment(), timeout)
    }

    /// Holds the lock of a netdev: while it changes hands no other process may give or take it.
    ///
    /// # Errors
    /// [`Kind::Locked`] when another holds it for too long; the file system's.
    pub fn lock(&self, identity: &Identity) -> Result<Lock, Error> {
        self.lock_all([identity], Sharing::Exclusive)
    }

    /// Holds the locks of several netdevs, whatever their order. Shared, they stay where they are while
    /// children are made on them and recorded; others may do so at the same time.
    ///
    /// # Errors
    /// As [`Journal::lock`]; none of them is held then.
    pub fn lock_all<'a>(
        &self,
        identities: impl IntoIterator<Item = &'a Identity>,
        sharing: Sharing,
    ) -> Result<Lock, Error> {
        let keys: Vec<String> = identities.into_iter().map(Identity::key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let path = self.directory.join(LOCK);
        Lock::take(&path, &keys, sharing, NETDEV_LOCK_TIMEOUT)
    }

    /// Locks the moves of RDMA devices: each hands out a number of a character device, which two
    /// at a time could swap.
    pub fn lock_rdma(&self) -> Result<Lock, Error> {
        self.lock_name("rdma", NETDEV_LOCK_TIMEOUT)
    }

    /// The attachment that a netdev belongs to. Ask with its lock held.
    ///
    /// # Errors
    /// The claim cannot be read.
    pub fn claimant(&self, identity: &Identity) -> Result<Option<Key>, Error> {
        self.check_owner()?;
        let path = self.devices().join(identity.key());
        let claim = match fs::read_link(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            claim => claim.map_err(|e| Error::file("read", &path, e))?,
        };
        let name = claim.file_name().and_then(OsStr::to_str);
        Ok(name.and_then(Key::parse).map(|(key, ..)| key))
    }

    /// Makes an attachment the owner of a netdev. Call with its lock held.
    pub fn take(&self, identity: &Identity, key: &Key) -> Result<(), Error> {
        // One that has it already has changed it, and must not be cut off now.
        if self.claimant(identity)?.as_ref() == Some(key) {
            return Ok(());
        }
        let path = self.devices().join(identity.key());
        make_directory(&self.devices())?;
        remove(&path)?;
        let record = Path::new("../attachments").join(&key.0);
        symlink(record, &path).map_err(|e| Error::file("write", &path, e))
    }

    /// Removes the claim of a netdev. Call with its lock held.
    pub fn release(&self, identity: &Identity) -> Result<(), Error> {
        remove(&self.devices().join(identity.key()))
    }
}

#[cfg(test)]
mod tests;
