//! A directory that stands for the host's root, with the machine's own kernel file systems and a `/run`
//! of its own: so that a case has leases that no other one has.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Makes it; one that is there stays.
///
/// # Errors
/// It cannot be made.
pub fn make(root: &Path) -> Result<()> {
    if root.join("proc").exists() {
        return Ok(());
    }
    fs::create_dir_all(root.join("run")).with_context(|| root.display().to_string())?;
    fs::create_dir_all(root.join("etc"))?;
    for name in [
        "proc",
        "sys",
        "dev",
        "var",
        "tmp",
        "run/netns",
        "etc/machine-id",
    ] {
        symlink(Path::new("/").join(name), root.join(name))?;
    }
    Ok(())
}

/// The directory of the leases of this boot below a root.
#[must_use]
pub fn leases(root: &Path) -> PathBuf {
    let boot = node::identity::boot_id(&root.join("proc"));
    root.join("run/rdma-netdev/leases").join(boot)
}

/// All files below a directory, sorted.
#[must_use]
pub fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => directories.push(entry.path()),
                _ => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}

/// Whether a file in a directory of leases says that an address is leased; what was freed is not one.
#[must_use]
pub fn is_lease(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()))
}
