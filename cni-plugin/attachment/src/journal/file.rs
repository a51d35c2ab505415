//! Locking and removing the journal's files.

use std::{
    fs::{self, DirBuilder, File},
    hash::Hasher,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use fnv::FnvHasher;
use netlink::socket::observer;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
};
use node::trust;

use super::{Error, Kind};

/// The first pause between two attempts at a lock; each next one is longer.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// The longest pause between two attempts at a lock.
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Removes a file; one that is gone is removed.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e)
            if !matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Err(Error::file("remove", path, e))
        }
        _ => Ok(()),
    }
}

/// Opens the file at `path` for reading and writing with `options`, with its directory where that is
/// missing.
pub(super) fn open_to_write(
    path: &Path,
    options: &mut fs::OpenOptions,
) -> Result<File, trust::Error> {
    let failed = |attempt, path: &Path, source| trust::Error::Io {
        attempt,
        path: path.to_owned(),
        source,
    };
    let mut opened = trust::open(path, options.read(true).write(true))?;
    if opened.is_none() {
        // For root alone: a record says which netdev is to be given what name.
        let directory = trust::parent(path);
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory);
        made.map_err(|e| failed("make", directory, e))?;
        opened = trust::open(path, options)?;
    }
    opened.ok_or_else(|| failed("open", path, io::ErrorKind::NotFound.into()))
}

/// Bytes of a file to lock, all of it with a length of 0.
#[expect(
    clippy::cast_possible_truncation,
    reason = "numbers of the kernel from 0 to 2"
)]
fn range(kind: libc::c_int, start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// Holds all locks in the file at `path` while the returned file is open; none without a file. It may
/// be removed then: a call that waits for it takes the new one.
///
/// # Errors
/// A call holds one of them.
pub fn hold_all(path: &Path) -> io::Result<Option<File>> {
    let file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK, 0, 0)))?;
    Ok(Some(file))
}

/// Who else may hold a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    Exclusive,
    Shared,
}

/// A lock of the journal, held. It ends when each process that shares it has closed the file.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Has the programs that this process runs hold the lock as well. So an IPAM program that
    /// outlives an ADD, killed by the runtime, leases nothing after DEL has released.
    pub fn share_with_programs(&self) -> Result<(), Error> {
        let shared = fcntl(&self.file, FcntlArg::F_SETFD(FdFlag::empty()));
        let failed = |errno: Errno| Error::file("share the lock", &self.path, errno.into());
        shared.map(drop).map_err(failed)
    }

    /// The lock of this name in the file at `path`, for one alone.
    ///
    /// # Errors
    /// [`Kind::Locked`] where another has it for longer than `timeout`.
    pub fn exclusive(path: &Path, name: &str, timeout: Duration) -> Result<Self, Error> {
        Self::take(path, name, Sharing::Exclusive, timeout)
    }

    /// Locks one byte of the file at `path`, which is made and stays. The byte is the one that `name`
    /// hashes to, of 2^62. A byte is locked for an open file (`F_OFD_SETLK`), so threads exclude each
    /// other as processes do.
    ///
    /// A file system that takes no writes any more gives shared locks alone: a DEL returns what it
    /// can, and no ADD can record anything there.
    pub(super) fn take(
        path: &Path,
        name: &str,
        sharing: Sharing,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let (file, is_writable) = match open_to_write(path, File::options().create(true)) {
            Err(e) if e.kind() == Some(io::ErrorKind::ReadOnlyFilesystem) => {
                let file = trust::open(path, File::options().read(true))?;
                (file.ok_or(e)?, false)
            }
            opened => (opened?, true),
        };
        let kind = match (sharing, is_writable) {
            (Sharing::Exclusive, true) => libc::F_WRLCK,
            _ => libc::F_RDLCK,
        };
        let mut hasher = FnvHasher::default();
        hasher.write(name.as_bytes());
        let range = range(kind, (hasher.finish() >> 2).cast_signed(), 1);
        let started = Instant::now();
        let mut pause = FIRST_RETRY_INTERVAL;
        loop {
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&range)) {
                Ok(_) => {
                    // Removed or replaced meanwhile: others lock the file that has the name now.
                    let (own, named) = (file.metadata(), path.symlink_metadata());
                    let same = |(a, b): (std::fs::Metadata, std::fs::Metadata)| {
                        use std::os::unix::fs::MetadataExt as _;
                        (a.dev(), a.ino()) == (b.dev(), b.ino())
                    };
                    if !own.ok().zip(named.ok()).is_some_and(same) {
                        let left = timeout.saturating_sub(started.elapsed());
                        return Self::take(path, name, sharing, left);
                    }
                    if let Some(observer) = observer().filter(|_| pause > FIRST_RETRY_INTERVAL) {
                        let micros = started.elapsed().as_micros();
                        observer(&format_args!("waited {micros} µs for the lock of {name}"));
                    }
                    let path = path.to_owned();
                    return Ok(Lock { file, path });
                }
                Err(Errno::EAGAIN | Errno::EACCES) if started.elapsed() < timeout => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(MAX_RETRY_INTERVAL);
                }
                Err(Errno::EAGAIN | Errno::EACCES) => {
                    let what = format!(
                        "another call holds the lock of {name} for more than {} s (fuser -v {} lists \
                         the calls)",
                        timeout.as_secs(),
                        path.display()
                    );
                    return Err(Error::of(Kind::Locked, what).with_details(
                        "an ADD or DEL of the same container and interface, or of the same netdev, is \
                         running, or an IPAM program that it ran; try again",
                    ));
                }
                Err(e) => return Err(Error::file("lock", path, e.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn take(path: &Path, name: &str, sharing: Sharing) -> Result<Lock, Error> {
        Lock::take(path, name, sharing, Duration::from_millis(5))
    }

    #[test]
    fn only_a_regular_file_is_locked() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("target"), "kept").unwrap();
        symlink(place.path().join("target"), place.path().join("link")).unwrap();
        fs::create_dir(place.path().join("directory")).unwrap();
        for name in ["link", "directory"] {
            let path = place.path().join(name);
            let error = take(&path, "nic", Sharing::Exclusive).unwrap_err();
            assert_eq!(error.code, cni_wire::Code::State, "{name}: {error}");
        }
        assert_eq!(fs::read(place.path().join("target")).unwrap(), b"kept");
    }

    #[test]
    fn a_lock_excludes_another_of_its_name_and_no_other() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("state/lock");
        let held = take(&path, "nic", Sharing::Exclusive).unwrap();
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            let error = take(&path, "nic", sharing).unwrap_err();
            assert_eq!(error.kind, Kind::Locked, "{error}");
            assert!(error.to_string().contains("nic"), "{error}");
        }
        take(&path, "other", Sharing::Exclusive).unwrap();
        drop(held);
        let _shared = take(&path, "nic", Sharing::Shared).unwrap();
        let _again = take(&path, "nic", Sharing::Shared).unwrap();
        assert!(take(&path, "nic", Sharing::Exclusive).is_err());
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    /// An IPAM program that a killed ADD ran keeps the attachment's lock.
    #[test]
    fn a_shared_lock_outlives_the_process_that_took_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let run = |lock: Lock| {
            let mut program = std::process::Command::new("sleep");
            let program = program.arg("60").spawn().unwrap();
            drop(lock);
            program
        };
        let mut alone = run(take(&path, "alone", Sharing::Exclusive).unwrap());
        take(&path, "alone", Sharing::Exclusive).unwrap();
        let shared = take(&path, "nic", Sharing::Exclusive).unwrap();
        shared.share_with_programs().unwrap();
        let mut program = run(shared);
        assert!(take(&path, "nic", Sharing::Exclusive).is_err());
        for program in [&mut program, &mut alone] {
            program.kill().unwrap();
            program.wait().unwrap();
        }
        Lock::take(&path, "nic", Sharing::Exclusive, Duration::from_secs(10)).unwrap();
    }
}
