//! Opening and entering network namespaces.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    io, iter,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::{fs::MetadataExt, net::UnixDatagram},
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, OFlag, openat},
    sched::{CloneFlags, setns},
    sys::stat::Mode,
};

use super::{Error, Result, Socket};

/// A network namespace, held open.
#[derive(Debug)]
pub struct Namespace {
    file: File,
    id: Id,
    path: PathBuf,
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

/// `NS_GET_USERNS` and `NS_GET_PARENT` (include/uapi/linux/nsfs.h): the user namespace that owns a
/// namespace, and the one that a user namespace was made in.
const NS_GET_USERNS: libc::Ioctl = 0xb701;
const NS_GET_PARENT: libc::Ioctl = 0xb702;

/// What one of these two answers; none above the caller's own user namespace.
fn above(file: &File, request: libc::Ioctl) -> Option<File> {
    // SAFETY: the request takes no argument, and the descriptor is open for the call.
    let opened = unsafe { libc::ioctl(file.as_raw_fd(), request) };
    // SAFETY: the kernel opened it for this call, and nothing else has it.
    (opened >= 0).then(|| unsafe { File::from_raw_fd(opened) })
}

/// `include/uapi/asm-generic/socket.h`, since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The directories of processes in `/proc`, or of threads in a process' `task`.
fn tasks(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_task = |name: &OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    entries
        .filter(move |entry| is_task(&entry.file_name()))
        .map(|entry| entry.path())
}

/// The directories of a process' threads. A directory has a link more than two for each in it
/// (`proc_task_getattr()`), so that of a process with one thread its own is enough.
fn threads(process: PathBuf) -> Vec<PathBuf> {
    let all = process.join("task");
    match fs::metadata(&all) {
        Ok(metadata) if metadata.nlink() == 3 => vec![process],
        _ => tasks(&all).collect(),
    }
}

/// The inode in the target of a namespace link, `net:[4026531840]`.
fn inode_in(link: &Path) -> Option<u64> {
    let number = link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?;
    number.parse().ok()
}

impl Namespace {
    /// The namespaces in which processes are, by their first thread, each once, without those whose
    /// inodes were `seen`. What of a process cannot be read is passed over: it may have ended. One by
    /// one: a node may have more of them than a process may have open files.
    pub fn of_processes(proc: &Path, seen: BTreeSet<u64>) -> impl Iterator<Item = Self> + use<> {
        Self::of_tasks(tasks(proc), seen)
    }

    /// The namespaces in which any thread is, likewise. Takes as long as the node has threads.
    pub fn of_threads(proc: &Path, seen: BTreeSet<u64>) -> impl Iterator<Item = Self> + use<> {
        Self::of_tasks(tasks(proc).flat_map(threads), seen)
    }

    fn of_tasks(
        tasks: impl Iterator<Item = PathBuf>,
        mut seen: BTreeSet<u64>,
    ) -> impl Iterator<Item = Self> {
        tasks.filter_map(move |task| {
            let path = task.join("ns/net");
            // Most processes share theirs with others. The files of all namespaces are in one file
            // system, so that inodes are enough.
            let link = fs::read_link(&path).ok()?;
            if inode_in(&link).is_some_and(|inode| seen.contains(&inode)) {
                return None;
            }
            let namespace = Self::open(&path).ok().flatten()?;
            seen.insert(namespace.id.inode).then_some(namespace)
        })
    }

    /// The namespace the calling thread is in.
    pub fn current(proc: &Path) -> Result<Self> {
        let path = proc.join("thread-self/ns/net");
        Self::open(&path)?.ok_or_else(|| {
            Error::call(
                format_args!("open this process' network namespace {}", path.display()),
                io::Error::from(io::ErrorKind::NotFound),
            )
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
            Err(
                Errno::ENOENT
                | Errno::ESRCH
                | Errno::ENOTDIR
                | Errno::EINVAL
                | Errno::ENXIO
                | Errno::ELOOP
                | Errno::ENAMETOOLONG,
            ) => return Ok(None),
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
        }))
    }

    pub fn id(&self) -> Id {
        self.id
    }

    /// A number that no other namespace of this boot has or had (`SO_NETNS_COOKIE`).
    ///
    /// # Errors
    /// The namespace cannot be entered, or the kernel's refusal.
    pub fn cookie(&self, own: &Namespace) -> Result<u64> {
        let asked = || -> io::Result<u64> {
            let socket = UnixDatagram::unbound()?;
            let mut cookie = 0_u64;
            let mut length: libc::socklen_t = 8;
            // SAFETY: the socket is open, and the kernel writes at most `length` bytes to `cookie`,
            // which has as many.
            let asked = unsafe {
                libc::getsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    SO_NETNS_COOKIE,
                    (&raw mut cookie).cast(),
                    &raw mut length,
                )
            };
            match asked {
                0 => Ok(cookie),
                _ => Err(io::Error::last_os_error()),
            }
        };
        let what = || format!("identify network namespace {}", self.path.display());
        self.enter(own, asked)?.map_err(|e| Error::call(what(), e))
    }

    /// Whether the user namespace of a pod owns it, or one that was made in that: only so can the pod move
    /// links to it. False for a pod without a user namespace of its own, whose is that of `host`.
    pub fn is_owned_with(&self, pod: &Namespace, host: &Namespace) -> bool {
        let id = |user: File| user.metadata().map(|m| (m.dev(), m.ino())).ok();
        let owner = |namespace: &Namespace| above(&namespace.file, NS_GET_USERNS);
        let of_pod = owner(pod).and_then(id);
        let mut users = iter::successors(owner(self), |user| above(user, NS_GET_PARENT));
        of_pod.is_some()
            && of_pod != owner(host).and_then(id)
            && users.any(|user| id(user) == of_pod)
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
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|e| {
            Error::call(
                format_args!("enter network namespace {}", self.path.display()),
                e,
            )
        })?;
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
        self.enter(own, Socket::open)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_a_process_are_read_where_it_has_several() {
        let proc = tempfile::tempdir().unwrap();
        let process = proc.path().join("7");
        fs::create_dir_all(process.join("task/7")).unwrap();
        assert_eq!(threads(process.clone()), std::slice::from_ref(&process));
        fs::create_dir(process.join("task/8")).unwrap();
        let mut found = threads(process.clone());
        found.sort();
        assert_eq!(found, [process.join("task/7"), process.join("task/8")]);
        assert!(threads(proc.path().join("8")).is_empty(), "it ended");
        // This process has more than one thread while tests run.
        let seen = thread::spawn(|| threads("/proc/self".into()))
            .join()
            .unwrap();
        assert!(seen.len() > 1, "{seen:?}");
    }

    #[test]
    fn a_namespace_that_was_seen_is_not_opened() {
        let proc = Path::new("/proc");
        let link = fs::read_link("/proc/self/ns/net").unwrap();
        let own = inode_in(&link).unwrap();
        assert_eq!(inode_in(Path::new("net:[7]")), Some(7));
        assert_eq!(inode_in(Path::new("pid:[7]")), None);
        let has_own = |found: Vec<Namespace>| found.iter().any(|found| found.id.inode == own);
        let seen = BTreeSet::from([own]);
        assert!(has_own(
            Namespace::of_processes(proc, BTreeSet::new()).collect()
        ));
        assert!(!has_own(
            Namespace::of_processes(proc, seen.clone()).collect()
        ));
        assert!(!has_own(Namespace::of_threads(proc, seen).collect()));
    }
}
