//! CDI files of slots and of pools: their directory is opened once and not through a link, so that what is
//! written or removed is in the directory that was checked, whatever is put in its place meanwhile.
//!
//! The CNI plugin removes those of slots, the daemon writes and removes all of them. A file is replaced by a rename,
//! so a container runtime reads a whole one or none.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::fcntl::OFlag;

/// What the names of all files of slots begin with.
pub const PREFIX: &str = "rdma-device-plugin-slot_";
/// What the names of all files of pools begin with.
pub const POOL_PREFIX: &str = "rdma-device-plugin-pool-";

#[derive(Debug)]
pub struct CdiDirectory {
    path: PathBuf,
    open: File,
}

/// Why a CDI directory or a file in it cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {cause}", path.display())]
pub struct CdiError {
    what: &'static str,
    path: PathBuf,
    cause: io::Error,
}

impl CdiError {
    /// Whether there is no such directory.
    pub fn is_missing(&self) -> bool {
        self.cause.kind() == io::ErrorKind::NotFound
    }
}

/// Whether a name is that of a slot's file.
pub fn is_name(name: &str) -> bool {
    begins_with(name, PREFIX)
}

fn begins_with(name: &str, prefix: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    name.starts_with(prefix)
        && name.ends_with(".json")
        && name.len() <= 255
        && name.bytes().all(fits)
}

/// Whether a name is that of a pool's file.
pub fn is_of_pool(name: &str) -> bool {
    begins_with(name, POOL_PREFIX)
}

fn is_ours(name: &str) -> bool {
    is_name(name) || is_of_pool(name)
}

impl CdiDirectory {
    /// Opens a directory that is there.
    ///
    /// # Errors
    /// It is missing, a link, of another user than root and this process's, or others can write to
    /// it.
    pub fn open(path: &Path) -> Result<Self, CdiError> {
        let failed = |cause| CdiError {
            what: "open the CDI directory",
            path: path.to_owned(),
            cause,
        };
        let open = OpenOptions::new()
            .read(true)
            .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).bits())
            .open(path)
            .map_err(|cause| match cause.raw_os_error() {
                Some(libc::ELOOP | libc::ENOTDIR) => failed(io::Error::other(
                    "it is a link or no directory; a container runtime may read another one",
                )),
                _ => failed(cause),
            })?;
        let meta = open.metadata().map_err(failed)?;
        ::node::trust::judge(&meta).map_err(|why| failed(io::Error::other(format!("it {why}"))))?;
        Ok(CdiDirectory {
            path: path.to_owned(),
            open,
        })
    }

    /// The same, and makes the directory if it is missing.
    pub fn create(path: &Path) -> Result<Self, CdiError> {
        match Self::open(path) {
            Err(error) if error.is_missing() => {}
            opened => return opened,
        }
        std::fs::create_dir_all(path).map_err(|cause| CdiError {
            what: "make the CDI directory",
            path: path.to_owned(),
            cause,
        })?;
        Self::open(path)
    }

    /// A path that leads to the open directory, whatever has its name now.
    pub fn below(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.open.as_raw_fd())).join(name)
    }

    fn failed(&self, what: &'static str, name: &str) -> impl FnOnce(io::Error) -> CdiError {
        let path = self.path.join(name);
        move |cause| CdiError { what, path, cause }
    }

    /// The text of a file; none where there is no such file.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, CdiError> {
        match std::fs::read(self.below(name)) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.failed("read the CDI file", name)(e)),
        }
    }

    /// Puts a file in place whole.
    ///
    /// # Errors
    /// It is not the name of a file of ours, or what the kernel said.
    pub fn write(&self, name: &str, text: &str) -> Result<(), CdiError> {
        let written = match is_ours(name) {
            true => ::node::file::replace_in_boot(&self.below(name), text),
            false => Err(io::ErrorKind::InvalidInput.into()),
        };
        written.map_err(self.failed("write the CDI file", name))
    }

    /// Removes a file. One that is not there is removed.
    ///
    /// # Errors
    /// It is not the name of a file of ours, or what the kernel said.
    pub fn remove(&self, name: &str) -> Result<(), CdiError> {
        let removed = match is_ours(name) {
            true => std::fs::remove_file(self.below(name)),
            false => Err(io::ErrorKind::InvalidInput.into()),
        };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("remove the CDI file", name)(e))
            }
            _ => Ok(()),
        }
    }

    /// Names of all files of ours that begin so: [`PREFIX`] or [`POOL_PREFIX`].
    pub fn names(&self, prefix: &str) -> Result<Vec<String>, CdiError> {
        let entries = std::fs::read_dir(self.below(""));
        let entries = entries.map_err(self.failed("list the CDI directory", ""))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.filter(|name| begins_with(name, prefix)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    const NAME: &str = "rdma-device-plugin-slot_3e71787e_0-0123456789abcdef.json";

    #[test]
    fn only_names_of_ours_are_written_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cdi = CdiDirectory::create(&dir.path().join("a/cdi")).unwrap();
        cdi.write(NAME, "{}").unwrap();
        assert_eq!(cdi.read(NAME).unwrap().as_deref(), Some(&b"{}"[..]));
        fs::write(dir.path().join("a/cdi/nvidia.json"), "{}").unwrap();
        for name in [
            "nvidia.json",
            "../x.json",
            "",
            "rdma-device-plugin-slot_/../nvidia.json",
            "rdma-device-plugin-slot_3e71787e_0.yaml",
        ] {
            assert!(cdi.write(name, "{}").is_err(), "{name}");
            assert!(cdi.remove(name).is_err(), "{name}");
        }
        assert_eq!(cdi.names(PREFIX).unwrap(), [NAME]);
        cdi.remove(NAME).unwrap();
        cdi.remove(NAME).unwrap();
        assert_eq!(cdi.read(NAME).unwrap(), None);
        assert!(dir.path().join("a/cdi/nvidia.json").exists());
    }

    #[test]
    fn a_directory_that_is_a_link_or_open_to_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        fs::create_dir(&real).unwrap();
        symlink(&real, dir.path().join("link")).unwrap();
        let refused = CdiDirectory::create(&dir.path().join("link")).unwrap_err();
        assert!(refused.to_string().contains("it is a link"), "{refused}");
        fs::set_permissions(&real, Permissions::from_mode(0o777)).unwrap();
        let refused = CdiDirectory::open(&real).unwrap_err();
        assert!(refused.to_string().contains("writable"), "{refused}");
        assert!(
            CdiDirectory::open(&dir.path().join("none"))
                .unwrap_err()
                .is_missing()
        );
    }

    #[test]
    fn a_directory_that_is_replaced_by_a_link_later_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let (place, victim) = (dir.path().join("cdi"), dir.path().join("victim"));
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join(NAME), "victim's").unwrap();
        let cdi = CdiDirectory::create(&place).unwrap();
        cdi.write(NAME, "ours").unwrap();
        fs::rename(&place, dir.path().join("moved")).unwrap();
        symlink(&victim, &place).unwrap();
        cdi.remove(NAME).unwrap();
        assert_eq!(fs::read_to_string(victim.join(NAME)).unwrap(), "victim's");
        assert!(!dir.path().join("moved").join(NAME).exists());
    }
}
