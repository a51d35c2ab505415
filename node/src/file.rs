//! Files that others read at any moment: a reader sees the old content or the new one, never half
//! of either, and a loss of power leaves one of both.
//!
//! A process can die between any two system calls: until the rename the file is as it was. What a
//! killed writer leaves is `.NAME.RANDOM.new`; who lists the directory passes over names that begin
//! with a dot. The random number parts writers that meet: threads share a process ID, and so do
//! processes of two containers that mount one directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::statfs::Statfs;

use crate::random::random64;

/// Which file a path names: its successor by rename, and the same file written in place, are others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    /// The same, of the inode: a rename is its last change.
    changed: (i64, i64),
}

impl FileId {
    /// The file at a path; `None` where there is none.
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|meta| Self::of_metadata(&meta))
    }

    /// The file that was opened.
    pub fn of_metadata(meta: &fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Replaces a file, or creates it with mode 0644 less the umask. Its directory must exist.
///
/// # Errors
/// What the kernel said. The file is as it was, unless the error says that it was replaced: then only
/// its directory could not be synced.
pub fn replace(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    put(path, 0o644, content.as_ref(), |file, beside| {
        file.sync_data()?;
        fs::rename(beside, path)
    })?;
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let synced = File::open(directory.unwrap_or(Path::new("."))).and_then(|file| file.sync_all());
    synced.map_err(|error| {
        let why = "the file was replaced, but a loss of power may bring the old one back";
        io::Error::new(error.kind(), format!("{why}: {error}"))
    })
}

/// Creates a file with mode 0600 less the umask, with its content, unless there is one of its name.
/// Of several processes that create one name, one succeeds. Its directory must exist. The file
/// survives the end of this process, not a loss of power: for what is of this boot alone.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if there is one; what the kernel said. No file is made then.
pub fn create(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    put(path, 0o600, content.as_ref(), |_, beside| {
        // Fails where the name exists, as a rename would not.
        fs::hard_link(beside, path)?;
        let _ = fs::remove_file(beside);
        Ok(())
    })
}

/// Writes a new file in the directory of `path`, of a name that no other process chooses, and calls
/// `place`. Where that fails the new file is removed.
fn put(
    path: &Path,
    mode: u32,
    content: &[u8],
    place: impl FnOnce(&File, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let (Some(name), Some(directory)) = (path.file_name(), path.parent()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let beside = directory.join(format!(".{}.{:016x}.new", name.display(), random64()));
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&beside)?;
    let placed = file.write_all(content).and_then(|()| place(&file, &beside));
    placed.inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

/// Replaces a file as [`replace`] does, without its promise for a loss of power: for what is of this
/// boot alone.
///
/// # Errors
/// What the kernel said; the file is as it was.
pub fn replace_in_boot(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    put(path, 0o644, content.as_ref(), |_, beside| {
        fs::rename(beside, path)
    })
}

/// How old what a killed writer left is before it is removed: a slow disk may still have a writer.
const LEFTOVER_AGE: Duration = Duration::from_secs(3600);

/// Removes what killed writers left in a directory ([`replace`]).
///
/// # Errors
/// What the kernel said. A directory that is not there has no leftovers.
pub fn remove_leftovers(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let is_leftover = entry.file_name().to_str().is_some_and(is_leftover_name);
        // Another process may be faster.
        let Ok(meta) = entry.metadata() else { continue };
        let age = meta.modified()?.elapsed().unwrap_or_default();
        if is_leftover && meta.is_file() && age >= LEFTOVER_AGE {
            match fs::remove_file(entry.path()) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether a file name is that of what a killed writer left ([`replace`]).
pub fn is_leftover_name(name: &str) -> bool {
    let stem = name.strip_prefix('.').and_then(|n| n.strip_suffix(".new"));
    let random = stem.and_then(|stem| stem.rsplit_once('.'));
    random.is_some_and(|(_, random)| {
        random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// Makes a directory and those above it, each synced into the one above it.
pub fn make_directories(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let above = match above {
        Some(above) => {
            make_directories(above)?;
            above
        }
        None => Path::new("."),
    };
    match fs::create_dir(path) {
        // By another process just now; synced here, too, for what is written into it.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        other => other?,
    }
    File::open(above)?.sync_all()
}

/// Opens a regular file for reading. What else is in its place, such as a FIFO without a writer, or
/// a device, is refused and never waited for.
///
/// # Errors
/// What the kernel said, or that it is not a regular file.
pub fn open_regular(path: &Path) -> io::Result<(File, fs::Metadata)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let meta = file.metadata()?;
    if meta.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok((file, meta))
}

/// The file system's number (`include/uapi/linux/magic.h`): 32 bits, in a field whose width and
/// sign are the C library's.
#[must_use]
pub fn file_system_magic(statfs: &Statfs) -> u32 {
    u32::try_from(i128::from(statfs.filesystem_type().0) & 0xFFFF_FFFF).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        replace(&path, "1").unwrap();
        replace(&path, "2").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "2");
        fs::create_dir_all(dir.path().join("b/full")).unwrap();
        replace(&dir.path().join("b"), "3").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn one_of_several_creators_succeeds_and_its_content_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let made: Vec<usize> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|writer| {
                    let path = &path;
                    scope.spawn(move || create(path, writer.to_string()).map(|()| writer))
                })
                .collect();
            let ended = writers.into_iter().map(|writer| writer.join().unwrap());
            ended.filter_map(Result::ok).collect()
        });
        assert_eq!(made.len(), 1);
        assert_eq!(fs::read_to_string(&path).unwrap(), made[0].to_string());
        let again = create(&path, "x").unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn directories_are_made_once_and_never_in_place_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/c");
        make_directories(&path).unwrap();
        make_directories(&path).unwrap();
        assert!(path.is_dir());
        fs::write(path.join("file"), "").unwrap();
        make_directories(&path.join("file")).unwrap_err();
        make_directories(&path.join("file/d")).unwrap_err();
    }

    #[test]
    fn writers_that_meet_leave_one_whole_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let content = |writer: usize| format!("{writer}").repeat(1000);
        replace(&path, content(0)).unwrap();
        let failures = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|writer| {
                    let (path, content) = (&path, &content);
                    scope.spawn(move || -> io::Result<()> {
                        for _ in 0..50 {
                            replace(path, content(writer))?;
                            let found = fs::read_to_string(path)?;
                            let first = found.chars().next().map(String::from);
                            assert_eq!(found, first.unwrap_or_default().repeat(1000));
                            assert_eq!(found.len(), 1000);
                        }
                        Ok(())
                    })
                })
                .collect();
            let ended = writers.into_iter().map(|writer| writer.join().unwrap());
            ended.filter_map(Result::err).collect::<Vec<_>>()
        });
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_old_files_of_killed_writers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let long_ago = std::time::SystemTime::now() - 2 * LEFTOVER_AGE;
        let left = [".a.0123456789abcdef.new", ".a.b.0123456789abcdef.new"];
        let others = [
            "a",
            ".a.1.new",
            ".a.0123456789abcdef",
            "a.0123456789abcdef.new",
        ];
        for name in left.iter().chain(&others) {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_modified(long_ago).unwrap();
        }
        File::create(dir.path().join(".young.0123456789abcdef.new")).unwrap();
        remove_leftovers(dir.path()).unwrap();
        remove_leftovers(&dir.path().join("none")).unwrap();
        let stays = |name: &str| dir.path().join(name).exists();
        assert!(!left.into_iter().any(stays));
        assert!(others.into_iter().all(stays));
        assert!(stays(".young.0123456789abcdef.new"));
    }
}
