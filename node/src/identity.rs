//! Which machine this is: node name, machine ID, boot ID.
//!
//! Only reads. A boot ID is unique to one boot of one machine; a machine ID to
//! one installation. Leases carry both, so that a lease of an earlier boot is
//! known to be over, and is not confused with one of another machine that
//! happens to have the same name.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

/// This machine, as leases name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    pub name: String,
    /// `/etc/machine-id`; empty where there is none.
    pub machine: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
    root: PathBuf,
}

/// The boot ID could not be read, or the name cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Without a boot ID no program can know when a lease is over.
    #[error("read boot ID {}: {source}", path.display())]
    Boot { path: PathBuf, source: io::Error },
    /// The name cannot be part of a path.
    #[error("node name {0:?} has other than letters, digits, '-', '_' and '.'")]
    Name(String),
}

impl NodeIdentity {
    /// Reads below `root` (`/` on a live host).
    ///
    /// # Errors
    /// [`IdentityError`]: no boot ID, or a name that cannot be used.
    pub fn read(root: &Path, name: &str) -> Result<Self, IdentityError> {
        if !is_name(name) {
            return Err(IdentityError::Name(name.to_owned()));
        }
        let path = root.join("proc").join(BOOT_ID);
        let boot = read_word(&path).map_err(|source| IdentityError::Boot { path, source })?;
        let machine = read_word(&root.join("etc/machine-id")).unwrap_or_default();
        Ok(Self {
            name: name.to_owned(),
            machine,
            boot,
            root: root.to_owned(),
        })
    }

    /// When this boot began, in Unix seconds: what was written before is of an
    /// earlier one. `None` when the kernel does not say.
    #[must_use]
    pub fn booted(&self) -> Option<i64> {
        let stat = std::fs::read_to_string(self.root.join("proc/stat")).ok()?;
        stat.lines()
            .find_map(|line| line.strip_prefix("btime "))?
            .trim()
            .parse()
            .ok()
    }
}

/// The boot ID, which changes with each boot; empty where the kernel does not report it.
/// `proc` is the mount of procfs.
#[must_use]
pub fn boot_id(proc: &Path) -> String {
    read_word(&proc.join(BOOT_ID)).unwrap_or_default()
}

/// Whether something was recorded in another boot than the present one, by the IDs of both. Where
/// either is empty, nothing can be said of another boot.
#[must_use]
pub fn is_other_boot(recorded: &str, now: &str) -> bool {
    !recorded.is_empty() && !now.is_empty() && recorded != now
}

/// Below the mount of procfs (`drivers/char/random.c`).
const BOOT_ID: &str = "sys/kernel/random/boot_id";

/// Whether a text can be one component of a path in the store: letters, digits
/// and `-`, `_`, `.`, not beginning with a dot, at most 253 bytes.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    text.len() <= 253
        && bytes
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// In three system calls; [`std::fs::read_to_string`] has seven.
fn read_word(path: &Path) -> io::Result<String> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let mut text = [0; 64];
    let length = File::from(openat(AT_FDCWD, path, flags, Mode::empty())?).read(&mut text)?;
    Ok(word(&String::from_utf8_lossy(
        text.get(..length).unwrap_or(&text),
    )))
}

fn word(text: &str) -> String {
    text.trim()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .take(64)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_without_an_id_is_not_another_one() {
        assert!(is_other_boot("a", "b"));
        for (recorded, now) in [("a", "a"), ("", "a"), ("a", ""), ("", "")] {
            assert!(!is_other_boot(recorded, now), "{recorded:?} {now:?}");
        }
    }

    #[test]
    fn a_machine_is_read_from_its_tree() {
        let root = tempfile::tempdir().unwrap();
        assert!(matches!(
            NodeIdentity::read(root.path(), "n"),
            Err(IdentityError::Boot { .. })
        ));
        let random = root.path().join("proc/sys/kernel/random");
        std::fs::create_dir_all(&random).unwrap();
        std::fs::write(random.join("boot_id"), "0b00-7\n").unwrap();
        std::fs::write(root.path().join("proc/stat"), "cpu 1 2\nbtime 1763600000\n").unwrap();
        let node = NodeIdentity::read(root.path(), "n").unwrap();
        assert_eq!((node.boot.as_str(), node.machine.as_str()), ("0b00-7", ""));
        assert_eq!(node.booted(), Some(1_763_600_000));
        assert!(matches!(
            NodeIdentity::read(root.path(), "a/b"),
            Err(IdentityError::Name(_))
        ));
    }
}
