//! Locking and removing the journal's files.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use node::trust;

use super::Error;

/// The first pause between two attempts at a lock; each next one is longer.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// The longest pause between two attempts at a lock.
const MAX_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// What is called for each lock that had to be waited for.
type Observer = Box<dyn Fn(&Path, Duration) + Send + Sync>;

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Has `observer` called with the file of each lock that this process waits for, and how long it
/// waited. The first observer stays.
pub fn observe_locks(observer: impl Fn(&Path, Duration) + Send + Sync + 'static) {
    let _ = OBSERVER.set(Box::new(observer));
}

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

/// Removes a file that a killed call left. One that a call holds the lock of is that call's.
pub(super) fn remove_left(path: &Path) -> Result<(), Error> {
    match trust::open(path, File::options().read(true)) {
        Ok(Some(file)) => match file.try_lock() {
            Ok(()) => {
                drop(Passing {
                    file,
                    path: path.to_owned(),
                });
                Ok(())
            }
            Err(TryLockError::WouldBlock) => Ok(()),
            Err(TryLockError::Error(e)) => Err(Error::file("lock", path, e)),
        },
        Ok(None) => Ok(()),
        // No call makes what cannot be locked.
        Err(_) => remove(path),
    }
}

/// For root alone: a record says which netdev is to be given what name.
pub(super) fn make_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|e| Error::file("make", path, e))
}

/// Opens the file at `path` for writing, made where it is missing, with its directory. On a file
/// system that takes no writes any more one that is there can still be locked, so that a DEL
/// returns what it can.
pub(super) fn open_to_lock(path: &Path) -> Result<File, Error> {
    let attempt = || trust::open(path, File::options().create(true).append(true));
    let opened = match attempt() {
        Err(e) if e.kind() == Some(io::ErrorKind::ReadOnlyFilesystem) => {
            trust::open(path, File::options().read(true))?
        }
        Ok(None) => {
            make_directory(trust::parent(path))?;
            attempt()?
        }
        opened => opened?,
    };
    opened.ok_or_else(|| Error::file("open", path, io::ErrorKind::NotFound.into()))
}

/// How a lock is asked for: [`File::try_lock`] or [`File::try_lock_shared`].
pub(super) type TryLock = fn(&File) -> Result<(), TryLockError>;

/// Waits for the lock of an open file until `timeout` after `started`.
pub(super) fn lock(
    file: &File,
    path: &Path,
    try_lock: TryLock,
    started: Instant,
    timeout: Duration,
) -> Result<(), Error> {
    let mut pause = FIRST_RETRY_INTERVAL;
    loop {
        match try_lock(file) {
            Ok(()) => {
                if let Some(observer) = OBSERVER.get().filter(|_| pause > FIRST_RETRY_INTERVAL) {
                    observer(path, started.elapsed());
                }
                return Ok(());
            }
            Err(TryLockError::WouldBlock) if started.elapsed() < timeout => {
                thread::sleep(pause);
                pause = (pause * 2).min(MAX_RETRY_INTERVAL);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked {
                    path: path.to_owned(),
                    waited: timeout,
                });
            }
            Err(TryLockError::Error(e)) => return Err(Error::file("lock", path, e)),
        }
    }
}

/// A file that is locked, and that goes with its lock.
#[derive(Debug)]
pub(super) struct Passing {
    pub(super) file: File,
    pub(super) path: PathBuf,
}

impl Passing {
    /// Locks the file at `path`, which is made.
    pub(super) fn lock(path: &Path, timeout: Duration) -> Result<Self, Error> {
        let started = Instant::now();
        loop {
            let file = open_to_lock(path)?;
            lock(&file, path, File::try_lock, started, timeout)?;
            let locked = Passing {
                file,
                path: path.to_owned(),
            };
            // Whoever held it before removed it: the lock of a file without a name locks nothing.
            if locked.is_named()? {
                return Ok(locked);
            }
        }
    }

    /// Whether its path still names it.
    fn is_named(&self) -> Result<bool, Error> {
        let failed = |e| Error::file("read the status of", &self.path, e);
        let own = self.file.metadata().map_err(failed)?;
        match fs::symlink_metadata(&self.path) {
            Ok(there) => Ok((there.dev(), there.ino()) == (own.dev(), own.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failed(e)),
        }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        // With the lock still held: the next one finds no file and makes one.
        if self.is_named().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("target"), "kept").unwrap();
        symlink(place.path().join("target"), place.path().join("link")).unwrap();
        fs::create_dir(place.path().join("directory")).unwrap();
        for name in ["link", "directory"] {
            let path = place.path().join(name);
            let error = open_to_lock(&path).unwrap_err();
            assert!(matches!(error, Error::File(_)), "{name}: {error}");
        }
        assert_eq!(fs::read(place.path().join("target")).unwrap(), b"kept");
    }

    #[test]
    fn what_a_killed_call_left_goes_and_what_a_call_holds_stays() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("new");
        remove_left(&path).unwrap();
        let held = Passing::lock(&path, Duration::ZERO).unwrap();
        remove_left(&path).unwrap();
        assert!(path.exists(), "a call holds it");
        drop(held);
        fs::write(&path, "left").unwrap();
        remove_left(&path).unwrap();
        assert!(!path.exists());
        symlink("/nowhere", &path).unwrap();
        remove_left(&path).unwrap();
        assert!(path.symlink_metadata().is_err(), "a link is no lock");
    }

    #[test]
    fn a_lock_that_is_held_is_named_after_the_time_limit() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let _held = Passing::lock(&path, Duration::ZERO).unwrap();
        let error = Passing::lock(&path, Duration::from_millis(5)).unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error}");
    }
}
