//! Locking and removing the journal's files.

use std::{
    fs::{self, DirBuilder, File, Metadata},
    hash::Hasher,
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use netlink::socket::observer;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
};
use node::trust;

use super::{Error, Kind};

/// The first pause between two attempts at a lock; each next one is longer.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// The longest pause between two attempts at a lock, or two looks at a record.
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Removes a file; one that is gone is removed.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match fs::remove_file(path).map_err(|e| (e.kind(), e)) {
        Ok(()) | Err((NotFound | NotADirectory, _)) => Ok(()),
        Err((_, e)) => Err(Error::file("remove", path, e)),
    }
}

/// Opens the file at `path` for reading and writing with `flags`, made where it is missing, with its
/// directory.
pub(super) fn open_to_write(path: &Path, flags: OFlag) -> Result<File, trust::Error> {
    let flags = flags | OFlag::O_CREAT | OFlag::O_RDWR;
    let mut opened = trust::open(path, flags)?;
    if opened.is_none() {
        make_directory(trust::parent(path))?;
        opened = trust::open(path, flags)?;
    }
    opened.ok_or_else(|| refused("open", path)(io::ErrorKind::NotFound.into()))
}

/// For root alone: a record says which netdev is to be given what name.
pub(super) fn make_directory(path: &Path) -> Result<(), trust::Error> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(refused("make", path))
}

fn refused(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> trust::Error {
    let path = path.to_owned();
    move |source| trust::Error::Io {
        attempt,
        path,
        source,
    }
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

/// The byte of a file that stands for a name, of 2^62. A pod chooses a part of some names, so the hash
/// has a key that a pod cannot know: inode and time of creation of the file, which is never written.
#[expect(deprecated, reason = "the only hash of std that takes a key")]
fn byte_of(name: &str, file: &Metadata) -> i64 {
    let created = (file.mtime() << 30) ^ file.mtime_nsec();
    let mut hasher = std::hash::SipHasher::new_with_keys(file.ino(), created.cast_unsigned());
    hasher.write(name.as_bytes());
    (hasher.finish() >> 2).cast_signed()
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
pub enum Sharing {
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
        Self::take(path, &[name], Sharing::Exclusive, timeout)
    }

    /// Locks one byte of the file at `path` for each name; the file is made and stays. Bytes are locked
    /// for an open file (`F_OFD_SETLK`), so threads exclude each other as processes do; and in their
    /// order, so that two calls never wait for each other.
    ///
    /// A file system that takes no writes any more gives shared locks alone: a DEL returns what it
    /// can, and no ADD can record anything there.
    pub(super) fn take(
        path: &Path,
        names: &[&str],
        sharing: Sharing,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let started = Instant::now();
        loop {
            let (file, kind) = match open_to_write(path, OFlag::empty()) {
                Err(e) if e.kind() == Some(io::ErrorKind::ReadOnlyFilesystem) => {
                    let file = trust::open(path, OFlag::O_RDONLY)?;
                    (file.ok_or(e)?, libc::F_RDLCK)
                }
                opened => match sharing {
                    Sharing::Exclusive => (opened?, libc::F_WRLCK),
                    Sharing::Shared => (opened?, libc::F_RDLCK),
                },
            };
            let unread = |e| Error::file("read the status of", path, e);
            let own = file.metadata().map_err(unread)?;
            let mut bytes: Vec<(i64, &str)> = names
                .iter()
                .map(|name| (byte_of(name, &own), *name))
                .collect();
            bytes.sort_unstable();
            for (byte, name) in bytes {
                wait(&file, path, &range(kind, byte, 1), name, started, timeout)?;
            }
            // Removed or replaced meanwhile: others lock the file that has the name now.
            match path.symlink_metadata() {
                Ok(named) if (named.dev(), named.ino()) == (own.dev(), own.ino()) => {
                    let path = path.to_owned();
                    return Ok(Lock { file, path });
                }
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(unread(e)),
                _ => {}
            }
        }
    }
}

/// Locks a byte, which stands for `name`, until `timeout` after `started`.
fn wait(
    file: &File,
    path: &Path,
    range: &libc::flock,
    name: &str,
    started: Instant,
    timeout: Duration,
) -> Result<(), Error> {
    let mut pause = FIRST_RETRY_INTERVAL;
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(range)) {
            Ok(_) => {
                if let Some(observer) = observer().filter(|_| pause > FIRST_RETRY_INTERVAL) {
                    let micros = started.elapsed().as_micros();
                    observer(&format_args!("waited {micros} µs for the lock of {name}"));
                }
                return Ok(());
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn take(path: &Path, name: &str, sharing: Sharing) -> Result<Lock, Error> {
        Lock::take(path, &[name], sharing, Duration::from_millis(5))
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
        Lock::exclusive(&path, "nic", Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn several_names_are_locked_together_or_not_at_all() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let both = |names: [&str; 2]| {
            Lock::take(&path, &names, Sharing::Exclusive, Duration::from_millis(5))
        };
        let held = both(["a", "b"]).unwrap();
        for name in ["a", "b"] {
            take(&path, name, Sharing::Shared).unwrap_err();
        }
        both(["b", "c"]).unwrap_err();
        take(&path, "c", Sharing::Exclusive).unwrap();
        drop(held);
        both(["a", "a"]).unwrap();
    }

    #[test]
    fn the_byte_of_a_name_is_another_in_each_file() {
        let place = tempfile::tempdir().unwrap();
        for file in ["a", "b"] {
            fs::write(place.path().join(file), "").unwrap();
        }
        let byte = |file| byte_of("nic", &fs::metadata(place.path().join(file)).unwrap());
        assert_eq!(byte("a"), byte("a"));
        assert_ne!(byte("a"), byte("b"));
    }

    #[test]
    fn a_call_that_waited_takes_the_file_that_has_the_name_now() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let held = take(&path, "nic", Sharing::Exclusive).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| Lock::exclusive(&path, "nic", Duration::from_secs(10)));
            std::thread::sleep(Duration::from_millis(50));
            fs::remove_file(&path).unwrap();
            drop(held);
            let _waited = waiting.join().unwrap().unwrap();
            assert!(take(&path, "nic", Sharing::Exclusive).is_err());
        });
    }
}
