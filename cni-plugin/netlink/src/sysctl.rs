//! Per-interface settings below `/proc/sys/net`.
//!
//! The kernel shows a thread that opens such a file the settings of the namespace the thread
//! is in, whatever `/proc` it goes through; so these functions are called from within
//! [`Namespace::enter`](super::Namespace::enter). Paths are put together from the interface's
//! name as it is: in the dotted notation of sysctl(8) a name like `eth0.100` would become two.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{AT_FDCWD, OFlag, openat},
    sys::stat::Mode,
};

use super::{Error, Name, Result};

/// The directories that have one for each interface.
const GROUPS: [&str; 4] = ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"];

/// The directories beside those of interfaces: the settings of all, and of those to come. The kernel
/// refuses such a name for an interface with IPv6 (`sysctl_dev_name_is_allowed()`), but a pod can
/// give it to one whose MTU is too small for that: its settings have no directory then.
pub const OF_NO_INTERFACE: [&str; 2] = ["all", "default"];

/// The directory of an interface's settings.
///
/// # Errors
/// Its name is that of a directory which is of no interface.
fn directory(proc: &Path, group: &str, interface: &Name) -> io::Result<PathBuf> {
    if OF_NO_INTERFACE.iter().any(|name| interface == *name) {
        let why = "has no settings of its own: the directory of this name is of others";
        let why = format!("interface {interface} {why}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(proc.join("sys/net").join(group).join(interface))
}

/// Writes a setting.
///
/// # Errors
/// The file is not there (IPv6 is off, or the key is newer than the kernel), is read-only, or
/// the kernel refuses the value.
pub fn write(proc: &Path, group: &str, interface: &Name, key: &str, value: &str) -> Result<()> {
    let what = format_args!("write {value} to {group}/{interface}/{key}");
    directory(proc, group, interface)
        .and_then(|directory| {
            // Not by open(), which in musl is two system calls.
            let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
            let file = openat(AT_FDCWD, &directory.join(key), flags, Mode::empty())?;
            File::from(file).write_all(value.as_bytes())
        })
        .map_err(|e| Error::call(what, e))
}

/// All settings of an interface that can be read, as `group/key` and value.
///
/// # Errors
/// A directory that is there cannot be listed.
pub fn read_all(proc: &Path, interface: &Name) -> Result<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    for group in GROUPS {
        let Ok(directory) = directory(proc, group, interface) else {
            continue;
        };
        let opened = File::open(&directory).and_then(|dir| Ok((dir, fs::read_dir(&directory)?)));
        let unlisted = |e| Error::call(format_args!("list {}", directory.display()), e);
        let (dir, entries) = match opened {
            Ok(opened) => opened,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(unlisted(e)),
        };
        for entry in entries {
            let Ok(key) = entry.map_err(unlisted)?.file_name().into_string() else {
                continue;
            };
            // stable_secret cannot be read before it is written; it then has no value to keep.
            if let Ok(value) = read_at(&dir, Path::new(&key)) {
                settings.insert(format!("{group}/{key}"), value);
            }
        }
    }
    Ok(settings)
}

/// More than a number has digits.
const VALUE_BYTES: usize = 256;

/// A setting in three system calls: an interface has some 140 of them, and a move reads all.
fn read_at(directory: impl AsFd, file: &Path) -> io::Result<String> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let mut file = File::from(openat(directory, file, flags, Mode::empty())?);
    let mut value = vec![0; VALUE_BYTES];
    let bytes = file.read(&mut value)?;
    value.truncate(bytes);
    // The kernel gives a value that fits whole (`proc_sys_call_handler()`).
    if bytes == VALUE_BYTES {
        file.read_to_end(&mut value)?;
    }
    let value = String::from_utf8(value).map_err(io::Error::other)?;
    Ok(value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_all_interfaces_are_not_those_of_one_with_that_name() {
        let root = tempfile::tempdir().unwrap();
        let proc = root.path();
        for name in ["all", "default", "eth1"] {
            let directory = proc.join("sys/net/ipv4/conf").join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("forwarding"), "0\n").unwrap();
        }
        for name in OF_NO_INTERFACE {
            let name = Name::from(name);
            write(proc, "ipv4/conf", &name, "forwarding", "1").unwrap_err();
            assert!(read_all(proc, &name).unwrap().is_empty());
        }
        write(proc, "ipv4/conf", &"eth1".into(), "forwarding", "1").unwrap();
        let value = "7 ".repeat(VALUE_BYTES);
        fs::write(proc.join("sys/net/ipv4/conf/eth1/long"), &value).unwrap();
        assert_eq!(
            read_all(proc, &Name::from("eth1")).unwrap(),
            BTreeMap::from([
                ("ipv4/conf/forwarding".to_owned(), "1".to_owned()),
                ("ipv4/conf/long".to_owned(), value.trim().to_owned()),
            ])
        );
        let forwarding =
            |name| fs::read_to_string(proc.join("sys/net/ipv4/conf").join(name).join("forwarding"));
        assert_eq!(forwarding("eth1").unwrap(), "1\n");
        assert_eq!(forwarding("all").unwrap(), "0\n");
        assert_eq!(forwarding("default").unwrap(), "0\n");
    }
}
