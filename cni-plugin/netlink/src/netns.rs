//! Opening and entering network namespaces.

use std::{
    fs::File,
    io::ErrorKind,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno::{EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO, ESRCH},
    fcntl::{AT_FDCWD, OFlag, openat},
    sched::{CloneFlags, setns},
    sys::stat::Mode,
};

use super::{Error, Result, Socket};

/// A network namespace, held open.
#[derive(Debug)]
pub struct Namespace {
    pub(crate) file: File,
    pub(crate) id: Id,
    pub(crate) path: PathBuf,
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fake: Option<(super::fake::Kernel, String)>,
}

/// What identifies a namespace while it lives: device and inode of the namespace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`; used again for another namespace once this one is gone.
    pub inode: u64,
}

/// `NS_GET_NSTYPE` (include/uapi/linux/nsfs.h): what kind of namespace a file is.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// Whether a file is a network namespace's: no other takes the request.
fn is_network_namespace(file: &File) -> bool {
    // SAFETY: the request takes no argument, and the descriptor is open for the call.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    kind == libc::CLONE_NEWNET
}

impl Namespace {
    /// The namespace the calling thread is in.
    pub fn current(proc: &Path) -> Result<Self> {
        let path = proc.join("thread-self/ns/net");
        Self::open(&path)?.ok_or_else(|| {
            let what = format_args!("open this process' network namespace {}", path.display());
            Error::call(what, ErrorKind::NotFound)
        })
    }

    /// Opens a namespace by its path; none when the path is gone or is not a namespace any more,
    /// as when a bind mount was undone and its file stayed behind.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let what = || format!("open network namespace {}", path.display());
        // A path below /proc of a dead process: ESRCH; one whose parent is a file: ENOTDIR.
        // What is not a namespace must not make the caller wait either: a FIFO would. Not by open(),
        // which in musl is two system calls.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let file = match openat(AT_FDCWD, path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(ENOENT | ESRCH | ENOTDIR | EINVAL | ENXIO | ELOOP | ENAMETOOLONG) => {
                return Ok(None);
            }
            Err(e) => return Err(Error::call(what(), e)),
        };
        if !is_network_namespace(&file) {
            return Ok(None);
        }
        let meta = file.metadata().map_err(|e| Error::call(what(), e))?;
        Ok(Some(Namespace {
            file,
            id: Id {
                device: meta.dev(),
                inode: meta.ino(),
            },
            path: path.to_owned(),
            #[cfg(any(test, feature = "fake"))]
            fake: None,
        }))
    }

    pub fn id(&self) -> Id {
        self.id
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's number, for a netlink attribute that names a namespace.
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Runs `act` with the thread in this namespace, then returns to `own`, the
    /// thread's namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered (no privilege, or it is not a network namespace).
    ///
    /// # Panics
    /// When the way back fails: a thread that went on in a pod's namespace would take the
    /// pod's netdevs for the host's.
    pub fn enter<T>(&self, own: &Namespace, act: impl FnOnce() -> T) -> Result<T> {
        #[cfg(any(test, feature = "fake"))]
        if self.is_fake() {
            return Ok(act());
        }
        let what = format_args!("enter network namespace {}", self.path.display());
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|e| Error::call(what, e))?;
        let done = act();
        own.go_back(&self.path);
        Ok(done)
    }

    /// Entering a namespace asks for memory, so it can fail for a moment.
    fn go_back(&self, from: &Path) {
        let enter = || setns(&self.file, CloneFlags::CLONE_NEWNET);
        let entered = enter().or_else(|_| {
            thread::sleep(Duration::from_millis(10));
            enter()
        });
        #[expect(clippy::panic, reason = "no work is safe in the wrong namespace")]
        if let Err(e) = entered {
            panic!("return from network namespace {}: {e}", from.display());
        }
    }

    /// A socket that belongs to this namespace.
    pub fn socket(&self, own: &Namespace) -> Result<Socket> {
        #[cfg(any(test, feature = "fake"))]
        if let Some((kernel, name)) = &self.fake {
            return Ok(kernel.socket(name));
        }
        self.enter(own, Socket::open)?
    }
}
