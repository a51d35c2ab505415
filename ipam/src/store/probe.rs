//! Whether a directory's file system keeps the promises the store stands on:
//! a name is created once, a second name of a file is the same file, a rename
//! moves exactly one name, and a listing after one's own change shows it.
//!
//! No lock is taken anywhere in the store, so mount options about locks
//! (`nolock`, `local_lock`) do not matter here. What does is tried out in a
//! directory of its own, which goes away afterwards; a probe that was killed
//! leaves a `probe-*` directory that fsck removes.

use super::StoreError;
use super::dir::{Dir, DirError, meta_of};
use nix::errno::Errno;
use node::file::file_system_magic;
use node::random::random64;
use std::path::Path;

/// How probe directories are called.
pub(crate) const PREFIX: &str = "probe-";

/// Why a mount that is for reading only is unfit.
pub(crate) const READ_ONLY: &str = "it is mounted read-only";

/// What kind of file system it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) name: String,
    /// Whether what is written outlives this machine: other machines see it.
    /// Then a lease must be on the server before it counts. On a file system of
    /// this machine alone, a crash that loses a lease has ended its pod as well.
    pub(crate) shared: bool,
    /// What to warn the administrator of although it works.
    pub(crate) warning: Option<String>,
}

/// File systems of one machine: magic numbers of statfs(2) and names.
const LOCAL: [(u32, &str); 9] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58F6, "ramfs"),
    (0xF2F5_2010, "f2fs"),
    (0x2FC1_2FC1, "zfs"),
    (0xCA45_1A4E, "bcachefs"),
    (0x794C_7630, "overlay"),
];
/// File systems that are known not to keep the promises.
const UNFIT: [(u32, &str); 4] = [
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb3"),
    (0x517B, "smbfs"),
    (0x5346_414F, "afs"),
];
const NFS: u32 = 0x6969;
const FUSE: u32 = 0x6573_5546;
/// FUSE file systems over object stores or with emulated renames.
const UNFIT_FUSE: [&str; 8] = [
    "gcsfuse",
    "s3fs",
    "goofys",
    "mountpoint-s3",
    "geesefs",
    "rclone",
    "sshfs",
    "blobfuse2",
];

/// Reads what is mounted where the store lies; `root` is the prefix of `/proc`.
pub(crate) fn file_system(dir: &Dir, root: &Path) -> Result<FileSystem, StoreError> {
    let statfs = dir.file_system()?;
    let magic = file_system_magic(&statfs);
    let device = dir.stat_self()?.st_dev;
    let mount = mount_of(root, device);
    classify(magic, mount.as_ref()).map_err(|why| StoreError::Unfit {
        path: dir.path().to_owned(),
        why,
    })
}

/// The same of a file system that was probed in this boot: without reading
/// the mounts, of which a node may have thousands.
pub(crate) fn known(dir: &Dir, name: &str) -> Result<FileSystem, StoreError> {
    let magic = file_system_magic(&dir.file_system()?);
    let local = LOCAL.iter().find(|(known, _)| *known == magic);
    Ok(FileSystem {
        name: local.map_or(name, |(_, local)| local).to_owned(),
        shared: local.is_none(),
        warning: None,
    })
}

/// A line of mountinfo: type and options.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    kind: String,
    options: String,
}

fn mount_of(root: &Path, device: u64) -> Option<Mount> {
    let text = std::fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let number = format!(
        "{}:{}",
        nix::sys::stat::major(device),
        nix::sys::stat::minor(device)
    );
    text.lines()
        .filter_map(|line| parse_mount(line, &number))
        .next_back()
}

/// `36 35 98:0 /root /mount rw,noatime shared:1 - nfs4 server:/x rw,vers=4.2,hard`
/// (Documentation/filesystems/proc.rst, 3.5).
fn parse_mount(line: &str, number: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    if left.get(2) != Some(&number) {
        return None;
    }
    let mut right = right.split(' ');
    let kind = right.next()?.to_owned();
    let options = [left.get(5).copied(), right.nth(1)]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>();
    Some(Mount {
        kind,
        options: options.join(","),
    })
}

fn classify(magic: u32, mount: Option<&Mount>) -> Result<FileSystem, String> {
    let option = |wanted: &str| {
        mount.is_some_and(|mount| mount.options.split(',').any(|option| option == wanted))
    };
    if option("ro") {
        return Err(READ_ONLY.to_owned());
    }
    if let Some((_, name)) = UNFIT.iter().find(|(known, _)| *known == magic) {
        return Err(format!("{name} has no hard links that every server keeps"));
    }
    if let Some((_, name)) = LOCAL.iter().find(|(known, _)| *known == magic) {
        let warning = (*name == "overlay")
            .then(|| "the store lies on an overlay: leases vanish with this container".to_owned());
        return Ok(FileSystem {
            name: (*name).to_owned(),
            shared: false,
            warning,
        });
    }
    let kind = mount.map_or("unknown", |mount| mount.kind.as_str());
    if magic == NFS {
        if option("vers=2") {
            return Err("NFS version 2 has no exclusive create".to_owned());
        }
        let warning = (option("soft") || option("softerr")).then(|| {
            "the NFS mount is soft: an ADD may fail although the server did it; mount it hard"
                .to_owned()
        });
        return Ok(FileSystem {
            name: kind.to_owned(),
            shared: true,
            warning,
        });
    }
    if magic == FUSE {
        let sub = kind.strip_prefix("fuse.").unwrap_or(kind);
        if UNFIT_FUSE.contains(&sub) {
            return Err(format!("{sub} has no atomic links and renames"));
        }
        let warning =
            format!("whether {kind} keeps names exclusive between nodes is not known here");
        return Ok(FileSystem {
            name: kind.to_owned(),
            shared: true,
            warning: Some(warning),
        });
    }
    Ok(FileSystem {
        name: kind.to_owned(),
        shared: true,
        warning: None,
    })
}

/// Tries the promises out.
///
/// # Errors
/// [`StoreError::Unfit`] naming the one that is not kept, or what could not be tried.
pub(crate) fn try_out(root: &Dir) -> Result<(), StoreError> {
    let name = format!("{PREFIX}{:016x}", random64());
    let dir = root.open_or_make(&name, false)?;
    remove_leftovers(root, &dir);
    let tried = promises(&dir);
    let removed = remove(root, &name);
    if let Some(broken) = tried? {
        return Err(StoreError::Unfit {
            path: root.path().to_owned(),
            why: broken.to_owned(),
        });
    }
    removed?;
    Ok(())
}

/// Older than this in seconds, what a probe made is that of one that was killed.
const LEFTOVER_SECONDS: i64 = 3600;

/// Removes what killed probes left, by the file server's clock. What stays is left for fsck.
fn remove_leftovers(root: &Dir, new: &Dir) {
    let now = new.stat_self().map_or(i64::MIN, |stat| stat.st_mtime);
    for name in root.names().unwrap_or_default() {
        let is_old = || {
            let meta = root.meta(&name).ok().flatten();
            meta.is_some_and(|meta| meta.modified < now.saturating_sub(LEFTOVER_SECONDS))
        };
        if name.starts_with(PREFIX) && is_old() {
            let _ = remove(root, &name);
        }
    }
}

/// Removes a file or a directory of files.
pub(super) fn remove(root: &Dir, name: &str) -> Result<bool, DirError> {
    if root.unlink(name).is_ok() {
        return Ok(true);
    }
    if let Some(dir) = root.open(name)? {
        for left in dir.names()? {
            dir.unlink(&left)?;
        }
    }
    root.remove_dir(name)
}

/// The first promise that is not kept.
fn promises(dir: &Dir) -> Result<Option<&'static str>, DirError> {
    let Some(file) = dir.create("a", b"probe\n", false)? else {
        return Ok(Some("a new directory has files"));
    };
    let (meta, foreign) = dir
        .identity(&file)
        .map_err(dir.failed("read the owner of", "a"))?;
    if foreign.is_some() {
        return Ok(Some(
            "files made here do not belong to the directory's owner: the file server squashes this node's root; export with no_root_squash",
        ));
    }
    if dir.create("a", b"again\n", false)?.is_some() {
        return Ok(Some("a name can be created twice"));
    }
    match dir.link("a", dir, "b") {
        Ok(true) => {}
        Ok(false) => return Ok(Some("a fresh name is taken")),
        Err(error) if is_without_links(error.source) => return Ok(Some("it has no hard links")),
        Err(error) => return Err(error),
    }
    if meta_of(&file).map_or(0, |meta| meta.links) != 2 {
        return Ok(Some("it does not count a file's names"));
    }
    if dir.link("a", dir, "b")? {
        return Ok(Some("a name can be linked twice"));
    }
    if !dir.meta("b")?.is_some_and(|b| b.same_file(&meta)) {
        return Ok(Some("two names of a file are two files"));
    }
    if !dir.rename("b", "c")? || dir.meta("b")?.is_some() || dir.rename("b", "c")? {
        return Ok(Some("a rename leaves the old name behind"));
    }
    let mut names = dir.names()?;
    names.sort_unstable();
    if names != ["a", "c"] {
        return Ok(Some("a listing does not show one's own changes"));
    }
    Ok(None)
}

/// What the kernel says where a file system has no hard links (link(2): EPERM; overlays and
/// servers: EOPNOTSUPP, ENOSYS, EMLINK). A full disk, for one, says nothing of links.
fn is_without_links(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EMLINK
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, options: &str) -> Mount {
        Mount {
            kind: kind.into(),
            options: options.into(),
        }
    }

    #[test]
    fn a_sound_directory_passes_and_stays_clean() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_path(place.path()).unwrap();
        try_out(&dir).unwrap();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        assert!(file_system(&dir, Path::new("/")).is_ok());
    }

    #[test]
    fn what_a_killed_probe_left_goes_with_the_next_one() {
        let place = tempfile::tempdir().unwrap();
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
        let leave = |name: &str, age: Option<std::time::SystemTime>| {
            let path = place.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("a"), "probe").unwrap();
            let dir = std::fs::File::open(&path).unwrap();
            age.into_iter()
                .for_each(|time| dir.set_modified(time).unwrap());
        };
        leave("probe-0123456789abcdef", Some(old));
        leave("probe-of-another-node", None);
        leave("leases", Some(old));
        try_out(&Dir::open_path(place.path()).unwrap()).unwrap();
        let left = std::fs::read_dir(place.path()).unwrap().flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["leases", "probe-of-another-node"]);
    }

    #[test]
    fn a_link_that_fails_for_another_reason_says_nothing_of_hard_links() {
        for errno in [Errno::EPERM, Errno::EOPNOTSUPP, Errno::EMLINK] {
            assert!(is_without_links(errno), "{errno}");
        }
        for errno in [
            Errno::ENOSPC,
            Errno::EDQUOT,
            Errno::EIO,
            Errno::EROFS,
            Errno::ESTALE,
        ] {
            assert!(!is_without_links(errno), "{errno}");
        }
    }

    #[test]
    fn mounts_are_judged_by_name() {
        let nfs = |options: &str| classify(NFS, Some(&mount("nfs4", options)));
        assert!(
            nfs("rw,vers=4.2,hard,local_lock=all")
                .unwrap()
                .warning
                .is_none()
        );
        assert!(nfs("rw,vers=4.2,hard").unwrap().shared);
        assert!(
            nfs("rw,vers=3,soft")
                .unwrap()
                .warning
                .unwrap()
                .contains("soft")
        );
        assert!(nfs("rw,vers=2").is_err() && nfs("ro,vers=4.2").is_err());
        assert!(!classify(0xEF53, None).unwrap().shared);
        assert!(classify(0xFF53_4D42, None).unwrap_err().contains("cifs"));
        assert!(classify(FUSE, Some(&mount("fuse.gcsfuse", "rw"))).is_err());
        assert!(
            classify(FUSE, Some(&mount("fuse.glusterfs", "rw")))
                .unwrap()
                .warning
                .is_some()
        );
        assert!(
            classify(0x00C3_6400, Some(&mount("ceph", "rw")))
                .unwrap()
                .shared
        );
    }

    #[test]
    fn mountinfo_lines_are_read() {
        let line = "36 35 0:52 / /mnt rw,noatime shared:1 master:2 - nfs4 srv:/x rw,vers=4.1,soft";
        let read = parse_mount(line, "0:52").unwrap();
        assert_eq!(read, mount("nfs4", "rw,noatime,rw,vers=4.1,soft"));
        assert_eq!(parse_mount(line, "0:53"), None);
        assert_eq!(parse_mount("junk", "0:52"), None);
    }
}
