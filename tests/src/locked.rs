//! Locks that a case holds so that a program under test waits.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Result;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// Locks every byte of the file, which is made if it is not there (OFD locks; fcntl(2)).
///
/// # Errors
/// The file cannot be opened, or another holds a lock on it.
pub fn locked(path: &Path) -> Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)?;
    let whole = libc::flock {
        l_type: libc::F_WRLCK.try_into()?,
        l_whence: libc::SEEK_SET.try_into()?,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&whole))?;
    Ok(file)
}
