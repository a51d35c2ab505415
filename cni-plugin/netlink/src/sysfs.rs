//! sysfs as a namespace shows it. In exclusive mode an RDMA device is seen only there, and its
//! GID table nowhere else.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::{Error, Namespace, Result};

/// A mount of sysfs that is in no directory and ends with this value.
#[derive(Debug)]
pub struct Sysfs(OwnedFd);

impl Sysfs {
    /// The sysfs of a namespace: a new mount shows the one its maker is in.
    ///
    /// # Errors
    /// The namespace cannot be entered, or the kernel is older than 5.2.
    pub fn of(namespace: &Namespace, own: &Namespace) -> Result<Sysfs> {
        let mount = || {
            let context = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let read_only = MountAttrFlags::MOUNT_ATTR_RDONLY;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, read_only)
        };
        let what = format_args!("mount the sysfs of {}", namespace.path().display());
        let mounted = namespace.enter(own, mount)?.map(Sysfs);
        mounted.map_err(|e| Error::call(what, e))
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}
