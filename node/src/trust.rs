//! Which files of the node are trusted. The programs act as root on what they say.
//!
//! A trusted file is regular, belongs to root or to the user that this program runs as (who gains
//! nothing by it), and is not writable for group or others. It is opened without following a link
//! and without waiting for a FIFO, and judged by its descriptor. Directories are judged in the same
//! way, with those above them: who can write to one of them can replace the file.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

/// Why a file or directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{attempt} {}: {source}", path.display())]
    Io {
        attempt: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Others than root may have written it, or can write to it.
    #[error("{} is not trusted: it {why}", path.display())]
    Untrusted {
        /// The file, or a directory above it.
        path: PathBuf,
        why: &'static str,
    },
    /// It is larger than any file of its kind.
    #[error("{} is larger than {limit} bytes", path.display())]
    TooLarge {
        path: PathBuf,
        /// Bytes that it may have.
        limit: u64,
    },
}

impl Error {
    fn io(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Error::Io {
            attempt,
            path,
            source,
        }
    }

    fn untrusted(path: &Path) -> impl FnOnce(&'static str) -> Self {
        let path = path.to_owned();
        move |why| Error::Untrusted { path, why }
    }

    /// What the kernel refused with, if it did.
    #[must_use]
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Error::Io { source, .. } => Some(source.kind()),
            Error::Untrusted { .. } | Error::TooLarge { .. } => None,
        }
    }
}

/// The whole of a trusted file; `None` if there is none.
///
/// # Errors
/// [`Error`]; no more than `limit` bytes of it are read.
pub fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
    match open(path, OFlag::O_RDONLY)? {
        Some(mut file) => content(path, &mut file, limit).map(Some),
        None => Ok(None),
    }
}

/// The rest of an open file, which has at most `limit` bytes; `path` is for messages.
///
/// # Errors
/// [`Error::TooLarge`]; what the kernel said.
pub fn content(path: &Path, file: &mut File, limit: u64) -> Result<Vec<u8>, Error> {
    // Room for a usual file, so that it is read at once.
    let mut text = Vec::with_capacity(4096);
    let read = file.take(limit + 1).read_to_end(&mut text);
    match read.map_err(Error::io("read", path))? as u64 > limit {
        true => Err(Error::TooLarge {
            path: path.to_owned(),
            limit,
        }),
        false => Ok(text),
    }
}

/// Opens a trusted file, with mode 0600 where `flags` make it; `None` if there is none.
pub fn open(path: &Path, flags: OFlag) -> Result<Option<File>, Error> {
    let untrusted = Error::untrusted(path);
    // Not by open(), which in musl is two system calls.
    let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    match openat(AT_FDCWD, path, flags, mode).map(File::from) {
        Ok(file) => {
            let meta = file
                .metadata()
                .map_err(Error::io("read the status of", path))?;
            let judged = match meta.is_file() {
                true => judge(&meta),
                false => Err("is not a regular file"),
            };
            judged.map(|()| Some(file)).map_err(untrusted)
        }
        Err(Errno::ENOENT) => Ok(None),
        Err(Errno::ELOOP) => Err(untrusted("is a link")),
        // A FIFO without a reader, a socket or a device; a directory that is to be written.
        Err(Errno::ENXIO | Errno::EISDIR) => Err(untrusted("is not a regular file")),
        Err(errno) => Err(Error::io("open", path)(errno.into())),
    }
}

/// The directory that a file is in.
#[must_use]
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Checks a directory and those above it, as it is written and where links above it lead. One that
/// is missing is trusted: root makes it.
///
/// # Errors
/// [`Error::Untrusted`] with the directory; what the kernel said.
pub fn check_directory(path: &Path) -> Result<(), Error> {
    check_one(path)?;
    let above = parent(path);
    if check_above(above)? {
        let real = above.canonicalize();
        check_above(&real.map_err(Error::io("resolve the links of", above))?)?;
    }
    Ok(())
}

pub fn check_one(path: &Path) -> Result<(), Error> {
    let Some(meta) = status(path, fs::symlink_metadata(path))? else {
        return Ok(());
    };
    let judged = match (meta.is_symlink(), meta.is_dir()) {
        (true, _) => Err("is a link"),
        (false, false) => Err("is not a directory"),
        (false, true) => judge(&meta),
    };
    judged.map_err(Error::untrusted(path))
}

/// Checks directories on the way to a trusted one; true where one of them is a link. Other users
/// cannot remove or rename what is root's in a sticky directory.
fn check_above(path: &Path) -> Result<bool, Error> {
    let mut linked = false;
    for directory in path.ancestors().filter(|path| *path != Path::new("")) {
        let Some(mut meta) = status(directory, fs::symlink_metadata(directory))? else {
            continue;
        };
        if meta.is_symlink() {
            linked = true;
            match status(directory, fs::metadata(directory))? {
                Some(target) => meta = target,
                None => continue,
            }
        }
        if meta.is_dir() && meta.mode() & nix::libc::S_ISVTX == 0 {
            judge(&meta).map_err(Error::untrusted(directory))?;
        }
    }
    Ok(linked)
}

fn status(path: &Path, read: io::Result<Metadata>) -> Result<Option<Metadata>, Error> {
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        read => read
            .map(Some)
            .map_err(Error::io("read the status of", path)),
    }
}

/// Whether only root, or the user that this program runs as, can write to a file or directory.
///
/// # Errors
/// Which rule it breaks, in words that follow "it".
pub fn judge(meta: &Metadata) -> Result<(), &'static str> {
    if meta.uid() != 0 && meta.uid() != nix::unistd::geteuid().as_raw() {
        Err("does not belong to root")
    } else if meta.mode() & 0o022 != 0 {
        Err("is writable for group or others")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "text").unwrap();
        chmod(&path, 0o644);
        (dir, path)
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn refused(path: &Path) -> String {
        read(path, 4).unwrap_err().to_string()
    }

    #[test]
    fn a_trusted_file_is_read_up_to_its_limit() {
        let (dir, path) = place();
        assert_eq!(read(&path, 4).unwrap().as_deref(), Some(&b"text"[..]));
        assert!(
            read(&path, 3)
                .unwrap_err()
                .to_string()
                .contains("larger than 3 bytes")
        );
        assert_eq!(read(&dir.path().join("none"), 4).unwrap(), None);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(3 << 30)
            .unwrap();
        assert!(refused(&path).contains("larger"));
        // It says that it has no bytes, and has some.
        assert!(read(Path::new("/proc/self/maps"), 4).is_err());
    }

    #[test]
    fn only_a_regular_file_of_roots_alone_is_opened() {
        let (dir, path) = place();
        for mode in [0o664, 0o646, 0o666] {
            chmod(&path, mode);
            assert!(refused(&path).contains("writable"), "{mode:o}");
        }
        chmod(&path, 0o600);
        let at = |name: &str| dir.path().join(name);
        symlink(&path, at("link")).unwrap();
        symlink("/nonexistent", at("dangling")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        for name in ["link", "dangling"] {
            assert!(refused(&at(name)).contains("is a link"), "{name}");
        }
        for name in ["fifo", "socket", "directory"] {
            assert!(
                refused(&at(name)).contains("is not a regular file"),
                "{name}"
            );
            let written = open(&at(name), OFlag::O_CREAT | OFlag::O_WRONLY);
            assert!(written.is_err(), "{name}");
        }
        // Needs root; without it chown fails and nothing is to be shown.
        if chown(&path, Some(65534), None).is_ok() {
            assert!(refused(&path).contains("does not belong to root"));
        }
    }

    #[test]
    fn a_directory_is_judged_with_those_above_it() {
        let (dir, file) = place();
        let (above, own) = (dir.path().join("above"), dir.path().join("above/own"));
        check_directory(&own).unwrap();
        fs::create_dir_all(&own).unwrap();
        check_directory(&own).unwrap();
        let refused = |path: &Path, why: &str| {
            let error = check_directory(path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        for path in [&own, &above] {
            for mode in [0o775, 0o757] {
                chmod(path, mode);
                refused(&own, "is writable");
            }
            chmod(path, 0o755);
        }
        chmod(&own, 0o1777);
        refused(&own, "is writable");
        chmod(&own, 0o700);
        chmod(&above, 0o1777);
        check_directory(&own).unwrap();
        chmod(&above, 0o755);
        // A link above leads elsewhere, which is judged as well.
        let link = dir.path().join("link");
        symlink(&above, &link).unwrap();
        check_directory(&link.join("own")).unwrap();
        chmod(&above, 0o777);
        refused(&link.join("own"), "is writable");
        chmod(&above, 0o755);
        refused(&link, "is a link");
        refused(&file, "is not a directory");
    }
}
