//! Directories of the store: every system call that touches it goes through here.
//!
//! Names are resolved one component at a time, from an open directory, and no
//! link is ever followed: whoever may write to a shared store may have put a
//! link, a FIFO or a directory where a record is expected. What does not belong
//! to the store's owner is not believed.

#[cfg(test)]
pub(super) use super::tests::simulated as system;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, SFlag};
use nix::unistd::UnlinkatFlags;
use rustix::fs::RawDir;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
pub(super) use system::Fd;

/// The system calls of the store, and the clock and the random numbers by which two of its runs
/// differ. A test build has a directory in memory besides (`tests/simulated.rs`), on which
/// `tests/explore.rs` runs calls in every order.
#[cfg(not(test))]
pub(super) mod system {
    pub(crate) use jiff::Timestamp;
    pub(crate) use nix::fcntl::{open, openat, renameat};
    pub(crate) use nix::sys::stat::{fstat, fstatat, mkdirat, utimensat};
    pub(crate) use nix::unistd::{fsync, linkat, read, unlinkat, write};
    pub(crate) use node::random::random64;
    pub(crate) use std::os::fd::OwnedFd as Fd;
    pub(crate) use std::thread::sleep;
}

/// A directory of the store that is open.
#[derive(Debug)]
pub(crate) struct Dir {
    fd: Fd,
    path: PathBuf,
    owner: u32,
    modified: i64,
}

/// A file's identity and how many names it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) links: u64,
    /// When its content was written, in Unix seconds of the file server.
    pub(crate) modified: i64,
    /// When its content or its names changed, likewise.
    pub(crate) changed: i64,
    /// Of a record: whether it had as many names as it needs. Another file cannot get one of them
    /// then, also if it gets the inode number.
    pub(crate) has_all_names: bool,
}

/// What a name of the store turned out to be.
#[derive(Debug)]
pub(crate) enum Found {
    /// A file of the store's owner, and its content.
    File(Vec<u8>, Meta),
    /// A file of the store's owner that is larger than any record.
    TooLarge(Meta),
    /// Something that is not believed; the reason.
    Foreign(&'static str),
}

/// A call that failed: what, on which object, and what the kernel said.
#[derive(Debug, thiserror::Error)]
#[error("{attempt} {}: {source}", path.display())]
pub struct DirError {
    pub attempt: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: Errno,
}

impl Meta {
    pub(crate) fn same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// The same of a record whose names may all be another's by now.
    pub(crate) fn in_doubt(self) -> Self {
        let has_all_names = false;
        Self {
            has_all_names,
            ..self
        }
    }
}

impl From<&FileStat> for Meta {
    fn from(stat: &FileStat) -> Self {
        // The field types differ between architectures and C libraries.
        #[expect(clippy::useless_conversion, reason = "u64 here, u32 elsewhere")]
        Self {
            device: stat.st_dev.into(),
            inode: stat.st_ino.into(),
            links: stat.st_nlink.into(),
            modified: stat.st_mtime.into(),
            changed: stat.st_ctime.into(),
            has_all_names: false,
        }
    }
}

/// A shard of 256 addresses is read by one call.
const LISTING_BYTES: usize = 32 << 10;
const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_CLOEXEC);

impl Dir {
    /// Opens the store's own directory. The path is the policy's, so links in it
    /// are the administrator's and are followed.
    pub(crate) fn open_path(path: &Path) -> Result<Self, DirError> {
        let failed = |source| DirError {
            attempt: "open store",
            path: path.to_owned(),
            source,
        };
        let fd = system::open(path, DIRECTORY, Mode::empty()).map_err(failed)?;
        let stat = system::fstat(&fd).map_err(failed)?;
        Ok(Self {
            fd,
            path: path.to_owned(),
            owner: stat.st_uid,
            modified: Meta::from(&stat).modified,
        })
    }

    /// The directory of a simulated store.
    #[cfg(test)]
    pub(crate) fn simulated() -> Self {
        Self {
            fd: Fd::root(),
            path: PathBuf::new(),
            owner: 0,
            modified: 0,
        }
    }

    /// The user whose files are believed: the one that the store's directory belongs to.
    pub(crate) fn owner(&self) -> u32 {
        self.owner
    }

    /// A file's identity, and the user that it belongs to, when it is another one.
    pub(crate) fn identity(&self, file: &Fd) -> Result<(Meta, Option<u32>), Errno> {
        let stat = system::fstat(file)?;
        let foreign = (stat.st_uid != self.owner).then_some(stat.st_uid);
        Ok((Meta::from(&stat), foreign))
    }

    /// When its names had changed last, as it was opened, in Unix seconds of the file server.
    pub(crate) fn modified(&self) -> i64 {
        self.modified
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn stat_self(&self) -> Result<FileStat, DirError> {
        system::fstat(&self.fd).map_err(self.failed("read the attributes of", ""))
    }

    pub(crate) fn file_system(&self) -> Result<nix::sys::statfs::Statfs, DirError> {
        nix::sys::statfs::fstatfs(&self.fd).map_err(self.failed("read the file system of", ""))
    }

    /// A directory in this one; `None` when there is no such name. One that is
    /// a link, no directory, or somebody else's is an error.
    pub(crate) fn open(&self, name: &str) -> Result<Option<Self>, DirError> {
        let flags = DIRECTORY | OFlag::O_NOFOLLOW;
        let fd = match system::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => return Ok(None),
            Err(source) => return Err(self.failed("open directory", name)(source)),
        };
        let stat = system::fstat(&fd).map_err(self.failed("read the attributes of", name))?;
        if stat.st_uid != self.owner {
            return Err(self.failed("trust the owner of directory", name)(
                Errno::EPERM,
            ));
        }
        Ok(Some(Self {
            fd,
            path: self.path.join(name),
            owner: self.owner,
            modified: Meta::from(&stat).modified,
        }))
    }

    /// A directory in this one, made if need be; with `durable` its name is synced.
    pub(crate) fn open_or_make(&self, name: &str, durable: bool) -> Result<Self, DirError> {
        // It may be removed between the two calls by somebody who tidies up.
        for _ in 0..4 {
            if let Some(dir) = self.open(name)? {
                return Ok(dir);
            }
            match system::mkdirat(&self.fd, name, Mode::S_IRWXU) {
                // Also one that another node has made just now, and may not have synced.
                Ok(()) | Err(Errno::EEXIST) if durable => self.sync()?,
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(source) => return Err(self.failed("make directory", name)(source)),
            }
        }
        Err(self.failed("keep directory", name)(Errno::ENOENT))
    }

    /// A file's content, read without following anything or waiting for a FIFO.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Option<Found>, DirError> {
        self.read_of(name, limit, true)
    }

    /// The same, whoever the file belongs to. Not to be believed.
    pub(crate) fn read_of_anybody(
        &self,
        name: &str,
        limit: u64,
    ) -> Result<Option<Found>, DirError> {
        self.read_of(name, limit, false)
    }

    fn read_of(&self, name: &str, limit: u64, own_only: bool) -> Result<Option<Found>, DirError> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let fd = match system::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => return Ok(None),
            // O_NOFOLLOW on a link; a socket or a device without driver.
            Err(Errno::ELOOP) => return Ok(Some(Found::Foreign("a symbolic link"))),
            Err(Errno::ENXIO) => return Ok(Some(Found::Foreign("a socket or device"))),
            Err(source) => return Err(self.failed("open", name)(source)),
        };
        let stat = system::fstat(&fd).map_err(self.failed("read the attributes of", name))?;
        match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
            SFlag::S_IFREG => {}
            SFlag::S_IFDIR => return Ok(Some(Found::Foreign("a directory"))),
            SFlag::S_IFIFO => return Ok(Some(Found::Foreign("a FIFO"))),
            _ => return Ok(Some(Found::Foreign("not a regular file"))),
        }
        if own_only && stat.st_uid != self.owner {
            return Ok(Some(Found::Foreign(
                "a file of another owner than the store's",
            )));
        }
        if own_only && stat.st_mode & 0o022 != 0 {
            return Ok(Some(Found::Foreign("a file that others can write to")));
        }
        let meta = Meta::from(&stat);
        let length = usize::try_from(stat.st_size).unwrap_or(0);
        if length as u64 > limit {
            return Ok(Some(Found::TooLarge(meta)));
        }
        let content = read_first(&fd, length).map_err(self.failed("read", name))?;
        Ok(Some(Found::File(content, meta)))
    }

    /// A regular file, open so that its content can be read after its name was removed.
    pub(crate) fn keep_open(&self, name: &str) -> Result<Option<Fd>, DirError> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        match system::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO) => Ok(None),
            Err(source) => Err(self.failed("open", name)(source)),
        }
    }

    /// The content of a record that is open; nothing, where it is larger than any.
    pub(crate) fn content_of(&self, name: &str, file: &Fd) -> Result<Vec<u8>, DirError> {
        let stat = system::fstat(file).map_err(self.failed("read the attributes of", name))?;
        let length = usize::try_from(stat.st_size).unwrap_or(usize::MAX);
        match length as u64 > crate::lease::MAX_BYTES {
            true => Ok(Vec::new()),
            false => read_first(file, length).map_err(self.failed("read", name)),
        }
    }

    /// A new file with content, open for its identity; `None` when the name is
    /// taken. Written through to the server or disk when `durable`.
    pub(crate) fn create(
        &self,
        name: &str,
        content: &[u8],
        durable: bool,
    ) -> Result<Option<Fd>, DirError> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR | Mode::S_IRGRP | Mode::S_IROTH;
        let file = match system::openat(&self.fd, name, flags, mode) {
            Ok(fd) => fd,
            Err(Errno::EEXIST) => return Ok(None),
            Err(source) => return Err(self.failed("create", name)(source)),
        };
        let written = write_all(&file, content).map_err(self.failed("write", name));
        let written = written.and_then(|()| match durable {
            true => system::fsync(&file).map_err(self.failed("sync", name)),
            false => Ok(()),
        });
        if written.is_err() {
            // Nothing refers to it yet; if this fails too, fsck finds an empty record.
            let _ = self.unlink(name);
        }
        written.map(|()| Some(file))
    }

    pub(crate) fn meta(&self, name: &str) -> Result<Option<Meta>, DirError> {
        match system::fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(Meta::from(&stat))),
            Err(Errno::ENOENT) => Ok(None),
            Err(source) => Err(self.failed("read the attributes of", name)(source)),
        }
    }

    /// Gives a file of this directory a second name in `to`; false when that
    /// name is taken. Whether it was taken is the server's word, whatever is cached.
    pub(crate) fn link(&self, name: &str, to: &Self, new: &str) -> Result<bool, DirError> {
        match system::linkat(&self.fd, name, &to.fd, new, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EEXIST) => Ok(false),
            Err(source) => Err(to.failed("link", new)(source)),
        }
    }

    /// Gives a file that this process has open a name in this directory; false when that name
    /// is taken. Unlike [`Self::link`] it cannot hit another file that has got the name by
    /// which it was opened. One that has no name any more cannot get one (`ENOENT`, or
    /// `ESTALE` where another client removed it).
    pub(crate) fn link_file(&self, file: &Fd, new: &str) -> Result<bool, DirError> {
        // linkat(2): the way that needs no CAP_DAC_READ_SEARCH, unlike AT_EMPTY_PATH.
        let open = format!("/proc/self/fd/{}", file.as_raw_fd());
        let follow = AtFlags::AT_SYMLINK_FOLLOW;
        match system::linkat(AT_FDCWD, open.as_str(), &self.fd, new, follow) {
            Ok(()) => Ok(true),
            Err(Errno::EEXIST) => Ok(false),
            Err(source) => Err(self.failed("link", new)(source)),
        }
    }

    /// Renames within this directory; false when `name` is gone already.
    pub(crate) fn rename(&self, name: &str, new: &str) -> Result<bool, DirError> {
        match system::renameat(&self.fd, name, &self.fd, new) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT) => Ok(false),
            Err(source) => Err(self.failed("rename", name)(source)),
        }
    }

    /// Moves whatever has a name, unseen, to another directory.
    pub(crate) fn move_to(&self, name: &str, to: &Self, new: &str) -> Result<(), DirError> {
        system::renameat(&self.fd, name, &to.fd, new).map_err(self.failed("move", name))
    }

    /// Removes a name; gone already is not an error.
    pub(crate) fn unlink(&self, name: &str) -> Result<bool, DirError> {
        match system::unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT) => Ok(false),
            Err(source) => Err(self.failed("remove", name)(source)),
        }
    }

    /// Removes a name if it is still this file. Only a call for the same owner can
    /// put another file there, and runtimes make one such call at a time.
    pub(crate) fn unlink_same(&self, name: &str, file: &Meta) -> Result<bool, DirError> {
        match self.meta(name)? {
            Some(there) if there.same_file(file) => self.unlink(name),
            _ => Ok(false),
        }
    }

    /// Says that a file was written now, by the file server's clock.
    pub(crate) fn touch(&self, name: &str) -> Result<(), DirError> {
        use nix::sys::stat::UtimensatFlags;
        use nix::sys::time::TimeSpec;
        let now = TimeSpec::UTIME_NOW;
        system::utimensat(&self.fd, name, &now, &now, UtimensatFlags::NoFollowSymlink)
            .map_err(self.failed("set the time of", name))
    }

    /// Removes an empty directory; gone already or not empty is not an error.
    pub(crate) fn remove_dir(&self, name: &str) -> Result<bool, DirError> {
        match system::unlinkat(&self.fd, name, UnlinkatFlags::RemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT | Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
            Err(source) => Err(self.failed("remove directory", name)(source)),
        }
    }

    /// All names but `.` and `..`, in no order. Names that are not UTF-8 are not ours.
    pub(crate) fn names(&self) -> Result<Vec<String>, DirError> {
        self.names_that(|_| true)
    }

    /// Those of [`Self::names`] that are wanted.
    pub(crate) fn names_that(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, DirError> {
        // Opened anew: an NFS client may answer from its cache what an open file lists.
        let fd = system::openat(&self.fd, ".", DIRECTORY, Mode::empty());
        self.list(&fd.map_err(self.failed("list", ""))?, wanted)
    }

    /// The names of a directory that was opened just now, once.
    pub(crate) fn first_names(&self) -> Result<Vec<String>, DirError> {
        self.list(&self.fd, |_| true)
    }

    fn list(&self, fd: &Fd, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, DirError> {
        #[cfg(test)]
        if let Some(names) = system::names(fd) {
            let names = names.map_err(self.failed("list", ""))?;
            return Ok(names.into_iter().filter(|name| wanted(name)).collect());
        }
        let mut buffer = Vec::with_capacity(LISTING_BYTES);
        let mut listing = RawDir::new(fd, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = listing.next() {
            let entry = entry
                .map_err(|error| self.failed("list", "")(Errno::from_raw(error.raw_os_error())))?;
            if let Ok(name) = entry.file_name().to_str()
                && !matches!(name, "." | "..")
                && wanted(name)
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Makes names durable on file systems that keep them for other machines.
    pub(crate) fn sync(&self) -> Result<(), DirError> {
        system::fsync(&self.fd).map_err(self.failed("sync", ""))
    }

    /// A file to read and write in place: a hint, never a record.
    pub(crate) fn open_hint(&self, name: &str, create: bool) -> Result<Option<File>, DirError> {
        let mut flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        if create {
            flags |= OFlag::O_CREAT;
        }
        let fd = match system::openat(&self.fd, name, flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => return Ok(None),
            Err(source) => return Err(self.failed("open", name)(source)),
        };
        let stat = system::fstat(&fd).map_err(self.failed("read the attributes of", name))?;
        let regular = stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFREG.bits();
        if !regular || stat.st_uid != self.owner {
            return Err(self.failed("trust", name)(Errno::EPERM));
        }
        Ok(Some(File::from(fd)))
    }

    pub(crate) fn failed(
        &self,
        attempt: &'static str,
        name: &str,
    ) -> impl FnOnce(Errno) -> DirError {
        let path = if name.is_empty() {
            self.path.clone()
        } else {
            self.path.join(name)
        };
        move |source| DirError {
            attempt,
            path,
            source,
        }
    }
}

/// The content of a file of so many bytes: records are written whole, so one call is enough.
fn read_first(file: &Fd, length: usize) -> Result<Vec<u8>, Errno> {
    let mut content = vec![0; length];
    let mut filled = 0;
    while let Some(rest) = content.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match system::read(file, rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    content.truncate(filled);
    Ok(content)
}

fn write_all(file: &Fd, mut content: &[u8]) -> Result<(), Errno> {
    while !content.is_empty() {
        match system::write(file, content) {
            Ok(0) => return Err(Errno::EIO),
            Ok(count) => content = content.get(count..).unwrap_or_default(),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A file's identity by its descriptor.
pub(crate) fn meta_of(file: &Fd) -> Result<Meta, Errno> {
    system::fstat(file).map(|stat| Meta::from(&stat))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn dir() -> (tempfile::TempDir, Dir) {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_path(place.path()).unwrap();
        (place, dir)
    }

    #[test]
    fn a_name_is_created_once() {
        let (_place, dir) = dir();
        assert!(dir.create("a", b"one", true).unwrap().is_some());
        assert!(dir.create("a", b"two", false).unwrap().is_none());
        let Some(Found::File(content, meta)) = dir.read("a", 10).unwrap() else {
            panic!()
        };
        assert_eq!((content.as_slice(), meta.links), (&b"one"[..], 1));
        assert!(dir.link("a", &dir, "b").unwrap());
        assert!(!dir.link("a", &dir, "b").unwrap());
        assert_eq!(dir.meta("b").unwrap().unwrap().links, 2);
        assert!(dir.rename("b", "c").unwrap());
        assert!(!dir.rename("b", "c").unwrap());
        assert!(dir.unlink("c").unwrap());
        assert!(!dir.unlink("c").unwrap());
    }

    #[test]
    fn nothing_hostile_is_followed_or_waited_for() {
        let (place, dir) = dir();
        let at = |name: &str| place.path().join(name);
        symlink("/etc/passwd", at("link")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        std::fs::create_dir(at("dir")).unwrap();
        std::fs::write(at("big"), vec![b'x'; 100]).unwrap();
        symlink("/etc", at("dirlink")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert!(matches!(
            dir.read("big", 50).unwrap(),
            Some(Found::TooLarge(_))
        ));
        for name in ["link", "fifo", "dir", "socket"] {
            let found = dir.read(name, 50).unwrap();
            assert!(
                matches!(found, Some(Found::Foreign(_))),
                "{name}: {found:?}"
            );
        }
        assert!(dir.open("dirlink").is_err() && dir.open("big").is_err());
        assert!(dir.open_hint("link", true).is_err() && dir.open_hint("fifo", true).is_err());
        assert!(dir.open("none").unwrap().is_none() && dir.read("none", 1).unwrap().is_none());
    }

    #[test]
    fn another_owner_is_not_believed() {
        let (place, dir) = dir();
        let at = |name: &str| place.path().join(name);
        std::fs::write(at("file"), "x").unwrap();
        std::fs::create_dir(at("dir")).unwrap();
        // Only root can give files away; others have nothing to fear here.
        if std::os::unix::fs::chown(at("file"), Some(65534), None).is_ok() {
            std::os::unix::fs::chown(at("dir"), Some(65534), None).unwrap();
            assert!(matches!(
                dir.read("file", 9).unwrap(),
                Some(Found::Foreign(_))
            ));
            assert!(dir.open("dir").is_err());
        }
    }
}
