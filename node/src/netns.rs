//! Whether a network namespace that a lease names is still there.
//!
//! Only reads, and answers "unknown" wherever it cannot be sure: a directory that
//! is not mounted into a container resembles namespaces that are gone.

use crate::file::file_system_magic;
use nix::errno::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `NSFS_MAGIC` of include/uapi/linux/magic.h.
const NSFS: u32 = 0x6e73_6673;

/// What became of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Netns {
    Present,
    /// Its path is gone, or leads to another namespace.
    Gone,
    /// It is not known; the reason.
    Unknown(&'static str),
}

/// Reads the path that the runtime gave, below `root`, and compares with the inode number that
/// ADD recorded. `proc` is the host's, whatever `root` is.
///
/// Runtimes name `/var/run/netns`, and `/var/run` is a link to `/run` on nearly every host, but need
/// not be in the file system of a container, where `/run/netns` is what is mounted. Where it is no
/// link, all namespaces would seem gone there. So one is gone from there only if it is not among the
/// host's mounts either.
#[must_use]
pub fn read(root: &Path, proc: &Path, path: &str, inode: Option<u64>) -> Netns {
    let named = read_at(root, path, inode);
    let (Netns::Unknown(NO_DIRECTORY), Some(rest)) = (&named, path.strip_prefix("/var/run/"))
    else {
        return named;
    };
    match read_at(root, &format!("/run/{rest}"), inode) {
        Netns::Gone => match inode.map(|inode| is_mounted(proc, inode)) {
            Some(Ok(false)) => Netns::Gone,
            Some(Ok(true)) => Netns::Present,
            Some(Err(_)) | None => Netns::Unknown("the host's mounts cannot be read"),
        },
        found => found,
    }
}

const NO_DIRECTORY: &str = "its directory does not exist here";

fn read_at(root: &Path, path: &str, inode: Option<u64>) -> Netns {
    let Some(relative) = path.strip_prefix('/') else {
        return Netns::Unknown("a relative path");
    };
    if relative.starts_with("proc/") {
        return Netns::Unknown("a process' namespace, seen from another process");
    }
    if relative.split('/').any(|part| part == "..") {
        return Netns::Unknown("a path with ..");
    }
    let at = root.join(relative);
    match std::fs::metadata(&at) {
        Ok(meta) => match inode {
            Some(inode) if inode == meta.ino() => Netns::Present,
            // Seen without its mount it is a plain file, whose number says nothing.
            Some(_) if is_namespace(&at) => Netns::Gone,
            Some(_) => Netns::Unknown("a file that is not a namespace"),
            None => Netns::Present,
        },
        Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => {
            match at.parent().map(std::fs::read_dir) {
                Some(Ok(_)) => Netns::Gone,
                _ => Netns::Unknown(NO_DIRECTORY),
            }
        }
        Err(_) => Netns::Unknown("it cannot be read"),
    }
}

/// Whether a namespace is mounted anywhere on the host, by the table of its first process; the
/// fourth field of a line is what is mounted, `net:[INODE]` for these (`proc_pid_mountinfo(5)`).
///
/// # Errors
/// The table cannot be read, or is no other than this process' own: the first process is then one of
/// this container, not the host's. Numbers of mounts, the first field, are the kernel's: no two
/// namespaces have one in common.
fn is_mounted(proc: &Path, inode: u64) -> std::io::Result<bool> {
    let table = std::fs::read_to_string(proc.join("1/mountinfo"))?;
    let own = std::fs::read_to_string(proc.join("self/mountinfo"))?;
    let number = |line: &str| line.split(' ').next().map(str::to_owned);
    let first = own.lines().next().and_then(number);
    if first.is_none() || table.lines().any(|line| number(line) == first) {
        return Err(std::io::Error::other("it is this process' own"));
    }
    let wanted = format!("net:[{inode}]");
    Ok(table
        .lines()
        .any(|line| line.split(' ').nth(3) == Some(wanted.as_str())))
}

fn is_namespace(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|fs| file_system_magic(&fs) == NSFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_counts_only_where_presence_would_show() {
        let root = tempfile::tempdir().unwrap();
        let read = |path, inode| read(root.path(), root.path(), path, inode);
        assert!(
            matches!(read("/run/netns/a", Some(1)), Netns::Unknown(_)),
            "no directory"
        );
        std::fs::create_dir_all(root.path().join("run/netns")).unwrap();
        assert_eq!(read("/run/netns/a", Some(1)), Netns::Gone);
        std::fs::write(root.path().join("run/netns/a"), "").unwrap();
        assert!(
            matches!(read("/run/netns/a", Some(1)), Netns::Unknown(_)),
            "not mounted here"
        );
        let inode = std::fs::metadata(root.path().join("run/netns/a"))
            .unwrap()
            .ino();
        assert_eq!(read("/run/netns/a", Some(inode)), Netns::Present);
        assert_eq!(read("/run/netns/a", None), Netns::Present);
        for path in ["/proc/7/ns/net", "run/netns/a", "/run/../run/netns/b", ""] {
            assert!(matches!(read(path, Some(1)), Netns::Unknown(_)), "{path}");
        }
    }

    #[test]
    fn another_namespace_at_the_path_is_another() {
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/proc/self/ns/net", root.path().join("ns")).unwrap();
        assert_eq!(
            read(root.path(), root.path(), "/ns", Some(own)),
            Netns::Present
        );
        assert_eq!(
            read(root.path(), root.path(), "/ns", Some(own + 1)),
            Netns::Gone
        );
    }

    /// As in the daemon's container, on a host whose /var/run is a directory of its own.
    #[test]
    fn a_namespace_that_the_host_has_mounted_elsewhere_is_not_gone() {
        let container = tempfile::tempdir().unwrap();
        let proc = tempfile::tempdir().unwrap();
        let read = |inode| read(container.path(), proc.path(), "/var/run/netns/a", inode);
        assert!(matches!(read(Some(1)), Netns::Unknown(_)), "no directory");
        std::fs::create_dir_all(container.path().join("run/netns")).unwrap();
        assert!(matches!(read(Some(1)), Netns::Unknown(_)), "no table");
        let host = "22 1 0:21 / /proc rw shared:5 - proc proc rw\n\
             431 24 0:4 net:[4026532281] /var/run/netns/a rw shared:220 - nsfs nsfs rw\n";
        let write = |of: &str, table: &str| {
            std::fs::create_dir_all(proc.path().join(of)).unwrap();
            std::fs::write(proc.path().join(of).join("mountinfo"), table).unwrap();
        };
        let own = "871 640 0:52 / / ro - overlay overlay ro\n";
        write("1", own);
        write("self", own);
        assert!(
            matches!(read(Some(1)), Netns::Unknown(_)),
            "no host's table"
        );
        write("1", host);
        assert_eq!(read(Some(4_026_532_281)), Netns::Present);
        assert_eq!(read(Some(402_653_228)), Netns::Gone);
        assert!(matches!(read(None), Netns::Unknown(_)), "no number");
        std::fs::create_dir_all(container.path().join("var/run/netns")).unwrap();
        assert_eq!(read(Some(4_026_532_281)), Netns::Gone, "its own directory");
    }

    #[test]
    fn the_link_that_hosts_have_leads_there() {
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("run/netns")).unwrap();
        std::os::unix::fs::symlink("/proc/self/ns/net", root.path().join("run/netns/a")).unwrap();
        let state = read(root.path(), root.path(), "/var/run/netns/a", Some(own));
        assert_eq!(state, Netns::Present);
    }
}
