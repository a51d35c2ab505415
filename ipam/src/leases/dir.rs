//! The directory of leases: each system call on it is here. Paths are relative to it, and are made of
//! checked names.

use super::LeaseError;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

/// A directory that is open.
#[derive(Debug)]
pub(super) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// Which file a name is. Valid for as long as one of its names is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Inode(u64);

/// The names of 256 addresses are read by one call.
const LISTING_BYTES: usize = 32 << 10;
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

impl Dir {
    /// None where there is no such directory.
    pub(super) fn open_path(path: &Path) -> Result<Option<Self>, LeaseError> {
        let opened = rustix::fs::openat(rustix::fs::CWD, path, DIRECTORY, Mode::empty());
        absent_is_none(opened)
            .map(|fd| {
                fd.map(|fd| Self {
                    fd,
                    path: path.to_owned(),
                })
            })
            .map_err(|source| LeaseError::Io {
                attempt: "open",
                path: path.to_owned(),
                source,
            })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The names in a directory; none where there is no directory.
    pub(super) fn names(&self, path: &str) -> Result<Option<Vec<String>>, LeaseError> {
        let opened = rustix::fs::openat(&self.fd, path, DIRECTORY, Mode::empty());
        let Some(fd) = absent_is_none(opened).map_err(self.failed("open directory", path))? else {
            return Ok(None);
        };
        let mut names = Vec::new();
        let mut buffer = vec![MaybeUninit::uninit(); LISTING_BYTES];
        let mut entries = RawDir::new(fd, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(self.failed("list", path))?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(text(name));
            }
        }
        Ok(Some(names))
    }

    /// Makes a directory, unless it is there.
    pub(super) fn make(&self, path: &str) -> Result<(), LeaseError> {
        kill::point();
        match rustix::fs::mkdirat(&self.fd, path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(source) => Err(self.failed("make directory", path)(source)),
        }
    }

    /// A file and its content; none where there is no such name.
    pub(super) fn read(
        &self,
        name: &str,
        limit: u64,
    ) -> Result<Option<(Vec<u8>, Inode)>, LeaseError> {
        let not_a_record = |what: String| LeaseError::NotARecord {
            path: self.path.join(name),
            what,
        };
        let fd = match rustix::fs::openat(&self.fd, name, FILE, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(not_a_record("it is a symbolic link".to_owned())),
            opened => opened.map_err(self.failed("open", name))?,
        };
        let failed = || self.failed("read", name);
        let stat = rustix::fs::fstat(&fd).map_err(failed())?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(not_a_record("it is not a regular file".to_owned()));
        }
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        if length > limit {
            return Err(not_a_record(format!("it is larger than {limit} bytes")));
        }
        let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
        let mut filled = 0;
        while let Some(rest) = content.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match rustix::io::read(&fd, rest).map_err(failed())? {
                0 => break,
                count => filled += count,
            }
        }
        content.truncate(filled);
        Ok(Some((content, Inode::of(&stat))))
    }

    /// Which file has a name; none where there is none.
    pub(super) fn inode(&self, name: &str) -> Result<Option<Inode>, LeaseError> {
        let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = absent_is_none(stat).map_err(self.failed("read the status of", name))?;
        Ok(stat.as_ref().map(Inode::of))
    }

    /// Writes a file, whatever there was of its name.
    pub(super) fn write(&self, name: &str, content: &[u8]) -> Result<(), LeaseError> {
        kill::point();
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = || self.failed("write", name);
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&self.fd, name, flags, mode).map_err(failed())?;
        kill::point();
        let mut rest = content;
        while !rest.is_empty() {
            let count = rustix::io::write(&fd, rest).map_err(failed())?;
            rest = rest.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Gives a file another name, in place of whatever has that name.
    pub(super) fn rename(&self, name: &str, new: &str) -> Result<(), LeaseError> {
        kill::point();
        rustix::fs::renameat(&self.fd, name, &self.fd, new).map_err(self.failed("rename", name))
    }

    /// Gives a file another name, in a directory that is made where it is missing.
    pub(super) fn place(&self, name: &str, new: &str) -> Result<(), LeaseError> {
        match self.rename(name, new) {
            Err(LeaseError::Io {
                source: Errno::NOENT,
                ..
            }) => {
                self.make_above(new)?;
                self.rename(name, new)
            }
            renamed => renamed,
        }
    }

    /// Gives a file a further name. Its directory is made where it is missing.
    pub(super) fn link(&self, name: &str, new: &str) -> Result<(), LeaseError> {
        let link = || {
            kill::point();
            rustix::fs::linkat(&self.fd, name, &self.fd, new, AtFlags::empty())
        };
        let linked = match link() {
            Err(Errno::NOENT) => {
                self.make_above(new)?;
                link()
            }
            linked => linked,
        };
        linked.map_err(self.failed("link", new))
    }

    /// Makes the directories above a name.
    pub(super) fn make_above(&self, name: &str) -> Result<(), LeaseError> {
        let above = name.match_indices('/').map(|(at, _)| name.split_at(at).0);
        above.into_iter().try_for_each(|above| self.make(above))
    }

    /// Removes a name; one that is gone is removed.
    pub(super) fn remove(&self, name: &str) -> Result<(), LeaseError> {
        kill::point();
        let removed = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty());
        absent_is_none(removed)
            .map(drop)
            .map_err(self.failed("remove", name))
    }

    /// Removes a directory in this one if it is empty.
    pub(super) fn remove_if_empty(&self, name: &str) -> Result<bool, LeaseError> {
        kill::point();
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(source) => Err(self.failed("remove directory", name)(source)),
        }
    }

    fn failed(&self, attempt: &'static str, name: &str) -> impl FnOnce(Errno) -> LeaseError {
        let path = self.path.join(name);
        move |source| LeaseError::Io {
            attempt,
            path,
            source,
        }
    }
}

impl Inode {
    fn of(stat: &Stat) -> Self {
        Self(stat.st_ino)
    }
}

fn absent_is_none<T>(result: rustix::io::Result<T>) -> rustix::io::Result<Option<T>> {
    match result {
        Err(Errno::NOENT) => Ok(None),
        other => other.map(Some),
    }
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

/// Where a test kills a call.
#[cfg(not(test))]
mod kill {
    pub(super) fn point() {}
}

/// A test kills a call before its n-th change of a directory: it unwinds, and its lock is let go, as
/// the kernel does it.
#[cfg(test)]
pub(super) mod kill {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    pub(super) struct Killed;

    pub(super) fn point() {
        match LEFT.get() {
            Some(0) => std::panic::resume_unwind(Box::new(Killed)),
            left => LEFT.set(left.map(|left| left - 1)),
        }
    }

    /// What a call answered; none where it was killed before its change of this number.
    pub(in crate::leases) fn before<T>(number: u32, call: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(number));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        LEFT.set(None);
        match ended {
            Ok(answer) => Some(answer),
            Err(why) if why.is::<Killed>() => None,
            Err(why) => std::panic::resume_unwind(why),
        }
    }
}
