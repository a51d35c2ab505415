//! Per-interface settings below `/proc/sys/net`.
//!
//! The kernel shows a thread that opens such a file the settings of the namespace the thread
//! is in, whatever `/proc` it goes through; so these functions are called from within
//! [`Namespace::enter`](super::Namespace::enter). Paths are put together from the interface's
//! name as it is: in the dotted notation of sysctl(8) a name like `eth0.100` would become two.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use super::{Error, Name, Result};

/// The directories that have one for each interface.
pub const GROUPS: [&str; 4] = ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"];

fn file(proc: &Path, group: &str, interface: impl AsRef<Path>, key: &str) -> PathBuf {
    proc.join("sys/net").join(group).join(interface).join(key)
}

/// Writes a setting.
///
/// # Errors
/// The file is not there (IPv6 is off, or the key is newer than the kernel), is read-only, or
/// the kernel refuses the value.
pub fn write(
    proc: &Path,
    group: &str,
    interface: impl AsRef<Path>,
    key: &str,
    value: &str,
) -> Result<()> {
    let path = file(proc, group, interface, key);
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|e| Error::call(format_args!("write {value} to {}", path.display()), e))
}

/// Writes a setting that the kernel may not have.
///
/// # Errors
/// As [`write`], but a missing file is no error.
pub fn write_if_there(
    proc: &Path,
    group: &str,
    interface: impl AsRef<Path>,
    key: &str,
    value: &str,
) -> Result<()> {
    match write(proc, group, interface, key, value) {
        Err(e) if e.is(libc::ENOENT) => Ok(()),
        done => done,
    }
}

/// Reads a setting; none when the kernel does not have it or does not tell.
pub fn read(proc: &Path, group: &str, interface: impl AsRef<Path>, key: &str) -> Option<String> {
    fs::read_to_string(file(proc, group, interface, key))
        .ok()
        .map(|text| text.trim().to_owned())
}

/// All settings of an interface that can be read, as `group/key` and value.
///
/// # Errors
/// A directory that is there cannot be listed.
pub fn read_all(proc: &Path, interface: &Name) -> Result<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    for group in GROUPS {
        let directory = proc.join("sys/net").join(group).join(interface);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(Error::call(format_args!("list {}", directory.display()), e)),
        };
        for entry in entries.flatten() {
            let Ok(key) = entry.file_name().into_string() else {
                continue;
            };
            // stable_secret cannot be read before it is written; it then has no value to keep.
            if let Some(value) = read(proc, group, interface, &key) {
                settings.insert(format!("{group}/{key}"), value);
            }
        }
    }
    Ok(settings)
}
