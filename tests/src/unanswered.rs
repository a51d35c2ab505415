//! A file system whose server does not answer, as a hard NFS mount after its server went away:
//! every call on it waits until the mount is dropped or the caller is killed.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The mount; gone when dropped.
#[derive(Debug)]
pub struct Unanswered {
    directory: PathBuf,
    /// The server's end of FUSE, which is never read.
    _server: File,
}

impl Unanswered {
    /// Mounts it on a directory.
    ///
    /// # Errors
    /// The kernel has no FUSE, or the caller is not root.
    pub fn on(directory: &Path) -> Result<Self> {
        let server = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .context("/dev/fuse")?;
        // fs/fuse/inode.c, fuse_parse_param.
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            server.as_raw_fd()
        );
        mount(
            Some("unanswered"),
            directory,
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .with_context(|| format!("mount FUSE on {}", directory.display()))?;
        Ok(Self {
            directory: directory.to_owned(),
            _server: server,
        })
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let _ = umount2(&self.directory, MntFlags::MNT_DETACH);
    }
}
