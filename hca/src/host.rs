//! The roots of the host under inspection, and the few ways this crate reads below them.
//!
//! Every path starts at a root of [`Host`], so a test can stand on a tree of files and a
//! daemon in a container on `/host`. Reading follows three rules:
//!
//! - An attribute the kernel does not offer for this object is `None`, not an error: sysfs
//!   answers `ENOENT` for attributes a driver lacks, `EINVAL` for `speed` of a NIC that is down
//!   and for the attributes of an empty GID entry, `ENODEV` while a device is being removed.
//! - Anything else is an [`Error`]: taking it for "no such device" would make healthy hardware
//!   vanish. Most of them (`EIO`, `ETIMEDOUT`, `EBUSY`, `EACCES`) are of one object and say nothing
//!   about others ([`Error::is_of_one_object`]); `EMFILE`, `ENFILE`, `ENOMEM` and a root that is not
//!   there are of the whole scan.
//! - A name that comes from configuration is that of no object unless it is one path component.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

use crate::address::{Guid, PciAddress};

/// Where this host's kernel file systems are.
///
/// ```
/// let host = hca::Host::at("/host");
/// assert_eq!(host.sys, std::path::Path::new("/host/sys"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The sysfs mount, usually `/sys`.
    pub sys: PathBuf,
    /// The device directory, usually `/dev`.
    pub dev: PathBuf,
    /// The proc mount, usually `/proc`.
    pub proc: PathBuf,
}

/// Why the host could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, link or directory is there but cannot be read.
    #[error("read {path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The object asked for does not exist on this host, or not in this network namespace.
    #[error(
        "{kind} {name} does not exist on this host, or not in this network namespace (searched {path})"
    )]
    Missing {
        /// Kind of object, such as `netdev` or `PCI device`.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The path that was searched.
        path: PathBuf,
    },
}

impl Error {
    /// True when the object asked for is simply not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// True when the failure is that of the one object that was read: firmware that does not answer,
    /// a driver that is busy. The rest of the host can be read all the same.
    #[must_use]
    pub fn is_of_one_object(&self) -> bool {
        match self {
            Self::Read { source, .. } => {
                let of_all = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
                source
                    .raw_os_error()
                    .is_none_or(|code| !of_all.contains(&Errno::from_raw(code)))
            }
            Self::Missing { .. } => true,
        }
    }
}

/// What a thread reads at this moment, for others to see: a read that firmware or a driver keeps
/// waiting cannot say so itself.
#[derive(Debug, Default)]
pub struct Progress(Mutex<Current>);

#[derive(Debug, Default)]
struct Current {
    path: PathBuf,
    /// Since when an attribute is read; `None` for another file, and between two reads.
    attribute_since: Option<Instant>,
    is_abandoned: bool,
}

/// An object of which the read of an attribute does not end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hung {
    /// Directory of the object.
    pub object: PathBuf,
    /// The attribute.
    pub attribute: PathBuf,
}

impl Progress {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path that is being read; empty between two reads.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.current().path.clone()
    }

    /// The object whose attribute is being read for this long, or by a read that was abandoned.
    /// `None` also for a directory of objects.
    #[must_use]
    pub fn hung_for(&self, limit: Duration) -> Option<Hung> {
        let current = self.current();
        let since = current.attribute_since?;
        (current.is_abandoned || since.elapsed() >= limit).then_some(())?;
        Some(Hung {
            object: object_of(&current.path)?,
            attribute: current.path.clone(),
        })
    }

    /// Has every later read of an attribute fail, so that the thread ends once the present one does.
    pub fn abandon(&self) {
        self.current().is_abandoned = true;
    }

    fn enter(&self, path: &Path, hung: &[Hung]) -> io::Result<()> {
        let mut current = self.current();
        if current.is_abandoned {
            return Err(io::Error::other("nothing waits for this read any more"));
        }
        if let Some(hung) = hung.iter().find(|hung| path.starts_with(&hung.object)) {
            return Err(io::Error::other(format!(
                "the read of {} does not end: firmware or a driver does not answer",
                hung.attribute.display()
            )));
        }
        path.clone_into(&mut current.path);
        current.attribute_since = Some(Instant::now());
        Ok(())
    }
}

/// Classes with a directory of attributes for each device.
const CLASSES: [&str; 4] = ["infiniband", "infiniband_verbs", "infiniband_mad", "net"];

/// The directory of the object that has an attribute: a class device, else a PCI function.
fn object_of(attribute: &Path) -> Option<PathBuf> {
    let is_class_device = |directory: &&Path| {
        let class = directory.parent().and_then(Path::file_name);
        class.is_some_and(|class| CLASSES.iter().any(|known| class == *known))
    };
    let is_function = |directory: &&Path| {
        let name = directory.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.parse::<PciAddress>().is_ok())
    };
    let above = || attribute.ancestors().skip(1);
    let object = above().find(is_class_device).or(above().find(is_function));
    object.map(Path::to_owned)
}

thread_local! {
    static PROGRESS: RefCell<Option<(Arc<Progress>, Vec<Hung>)>> = const { RefCell::new(None) };
}

/// Runs `read` and shows each path that it reads in `progress`. An attribute of an object that hangs
/// already is not read: it is an error of that object. Only reads of this thread are meant.
pub fn with_progress<T>(progress: &Arc<Progress>, hung: Vec<Hung>, read: impl FnOnce() -> T) -> T {
    PROGRESS.with_borrow_mut(|current| *current = Some((progress.clone(), hung)));
    let result = read();
    PROGRESS.with_borrow_mut(|current| *current = None);
    result
}

/// Shows a path that is read next and is not an attribute of hardware.
pub fn show(path: &Path) {
    PROGRESS.with_borrow(|current| {
        if let Some((progress, _)) = current {
            let mut current = progress.current();
            path.clone_into(&mut current.path);
            current.attribute_since = None;
        }
    });
}

/// Reads an attribute, or a directory of them, where others see it.
fn shown<T>(path: &Path, read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    PROGRESS.with_borrow(|current| match current {
        Some((progress, hung)) => progress.enter(path, hung),
        None => Ok(()),
    })?;
    let result = read();
    show(Path::new(""));
    result
}

/// Result of reading the host.
pub type Result<T> = std::result::Result<T, Error>;

impl Host {
    /// The running system: `/sys`, `/dev`, `/proc`.
    #[must_use]
    pub fn live() -> Self {
        Self::at("/")
    }

    /// The system whose root directory is `prefix`, such as `/host` in a container.
    #[must_use]
    pub fn at(prefix: impl AsRef<Path>) -> Self {
        let prefix = prefix.as_ref();
        Self {
            sys: prefix.join("sys"),
            dev: prefix.join("dev"),
            proc: prefix.join("proc"),
        }
    }

    /// `<sys>/class/<class>`.
    pub(crate) fn class(&self, class: &str) -> PathBuf {
        self.sys.join("class").join(class)
    }

    /// The real directory of an RDMA device; `Missing` if there is none.
    pub(crate) fn rdma_device(&self, name: &str) -> Result<PathBuf> {
        self.entry("RDMA device", &self.class("infiniband"), name)
    }

    /// The real directory of a netdev; `Missing` if there is none.
    pub(crate) fn netdev(&self, name: &str) -> Result<PathBuf> {
        self.entry("netdev", &self.class("net"), name)
    }

    /// The real directory of a PCI function; `Missing` if there is none.
    pub(crate) fn pci(&self, address: PciAddress) -> Result<PathBuf> {
        let directory = self.sys.join("bus/pci/devices");
        self.entry("PCI device", &directory, &address.to_string())
    }

    /// The real directory of a device on the auxiliary bus; `Missing` if there is none.
    pub(crate) fn auxiliary(&self, name: &str) -> Result<PathBuf> {
        let directory = self.sys.join("bus/auxiliary/devices");
        self.entry("auxiliary device", &directory, name)
    }

    /// That no RDMA device has this node GUID.
    pub(crate) fn no_node_guid(&self, guid: Guid) -> Error {
        Error::Missing {
            kind: "RDMA device with node GUID",
            name: guid.to_string(),
            path: self.class("infiniband"),
        }
    }

    fn entry(&self, kind: &'static str, directory: &Path, name: &str) -> Result<PathBuf> {
        let found = match is_component(name) {
            true => follow(directory, name)?,
            false => None,
        };
        found.ok_or_else(|| Error::Missing {
            kind,
            name: name.to_owned(),
            path: directory.join(name),
        })
    }
}

/// True for a name that is exactly one normal path component.
fn is_component(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(components.next(), Some(Component::Normal(c)) if c == name)
        && components.next().is_none()
        && !name.contains('\0')
}

/// True for errors by which sysfs says "this object has no such attribute (any more)".
fn means_absent(error: &io::Error) -> bool {
    let Some(code) = error.raw_os_error() else {
        return false;
    };
    matches!(
        Errno::from_raw(code),
        Errno::ENOENT
            | Errno::ENOTDIR
            | Errno::EINVAL
            | Errno::ENODEV
            | Errno::ENXIO
            | Errno::ENODATA
            | Errno::EOPNOTSUPP
    )
}

fn absent_is_none<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if means_absent(&error) => Ok(None),
        Err(source) => Err(Error::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Takes an object that went away meanwhile for `None`.
pub(crate) fn present<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if error.is_missing() => Ok(None),
        result => result.map(Some),
    }
}

/// The attribute's text without surrounding white space; `None` if absent or empty.
///
/// sysfs attributes fit a page and come in one read, so one buffer and one read serve: an
/// inventory is a thousand of these.
pub(crate) fn attribute(directory: &Path, name: &str) -> Result<Option<String>> {
    let path = directory.join(name);
    let mut page = [0; 4096];
    let length = loop {
        let read = shown(&path, || open(&path)?.read(&mut page));
        match read {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => break absent_is_none(&path, result)?.unwrap_or(0),
        }
    };
    let text = String::from_utf8_lossy(page.get(..length).unwrap_or(&page));
    let text = text.trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// Opens a file for reading. [`fs::File::open`] is two system calls with musl.
fn open(path: &Path) -> io::Result<fs::File> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    Ok(openat(AT_FDCWD, path, flags, Mode::empty())?.into())
}

/// A binary attribute's bytes; `None` if it is absent, or kept for root and this process is not.
pub(crate) fn bytes_if_permitted(directory: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = directory.join(name);
    match shown(&path, || fs::read(&path)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        // A device that does not answer: its driver gives up after a while.
        Err(error) if error.raw_os_error() == Some(libc::ETIMEDOUT) => Ok(None),
        result => absent_is_none(&path, result),
    }
}

/// An attribute that is a number or another type with a text form; `None` also if it does not parse.
pub(crate) fn parsed<T: std::str::FromStr>(directory: &Path, name: &str) -> Result<Option<T>> {
    Ok(attribute(directory, name)?.and_then(|text| text.parse().ok()))
}

/// An attribute in hexadecimal with or without `0x`; `None` also if it does not parse.
pub(crate) fn hexadecimal(directory: &Path, name: &str) -> Result<Option<u32>> {
    Ok(attribute(directory, name)?.and_then(|text| {
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        u32::from_str_radix(digits, 16).ok()
    }))
}

/// Names in a directory in their natural order; empty if there is no such directory.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = unsorted_names(directory)?;
    names.sort_by_cached_key(|name| natural_key(name));
    Ok(names)
}

/// Names in a directory as the kernel lists them; empty if there is no such directory.
pub(crate) fn unsorted_names(directory: &Path) -> Result<Vec<String>> {
    let entries = shown(directory, || fs::read_dir(directory));
    let Some(entries) = absent_is_none(directory, entries)? else {
        return Ok(Vec::new());
    };
    let mut names = Vec::new();
    for entry in entries {
        let Some(entry) = absent_is_none(directory, entry)? else {
            break;
        };
        // Kernel names are ASCII; a name that is not UTF-8 cannot be one of them.
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

/// Names in a directory that are numbers, in order; empty if there is no such directory.
pub(crate) fn indexes(directory: &Path) -> Result<Vec<u32>> {
    let names = unsorted_names(directory)?;
    let mut indexes: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    indexes.sort_unstable();
    Ok(indexes)
}

/// A sort key by which names are ordered as people count: digit runs compare as numbers, so
/// `mlx5_2` precedes `mlx5_10`.
pub(crate) fn natural_key(name: &str) -> (Vec<(String, u128)>, String) {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let (text, tail) = split_where(rest, |c| c.is_ascii_digit());
        let (digits, tail) = split_where(tail, |c| !c.is_ascii_digit());
        parts.push((text.to_owned(), digits.parse().unwrap_or(u128::MAX)));
        rest = tail;
    }
    (parts, name.to_owned())
}

fn split_where(text: &str, at: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(at).unwrap_or(text.len()))
}

/// The last component of a symbolic link's target; `None` if there is no such link.
pub(crate) fn link_name(directory: &Path, name: &str) -> Result<Option<String>> {
    let path = directory.join(name);
    let target = absent_is_none(&path, fs::read_link(&path))?;
    Ok(target.and_then(|t| t.file_name().and_then(|n| n.to_str()).map(str::to_owned)))
}

/// The directory that a link in `directory` leads to, or the entry itself if it is one;
/// `None` if there is no directory.
///
/// `directory` must be free of links itself. Links of sysfs are relative and lead through none,
/// so `..` can be taken off the text: two system calls instead of one for each component.
pub(crate) fn follow(directory: &Path, name: &str) -> Result<Option<PathBuf>> {
    let path = directory.join(name);
    let real = match fs::read_link(&path) {
        Ok(target) => {
            let mut real = directory.to_owned();
            for component in target.components() {
                match component {
                    Component::ParentDir => {
                        real.pop();
                    }
                    Component::Normal(name) => real.push(name),
                    _ => {}
                }
            }
            real
        }
        // Not a link.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => path,
        Err(error) => return absent_is_none(&path, Err(error)),
    };
    // `/sys/class/net/bonding_masters` is a file among netdevs.
    let found = absent_is_none(&real, fs::metadata(&real))?;
    Ok(found.filter(fs::Metadata::is_dir).map(|_| real))
}

/// True if there is something of this name.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    Ok(absent_is_none(path, fs::metadata(path))?.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_path_in_it_is_refused() {
        let host = Host::at("/");
        for name in ["", ".", "..", "../net", "a/b", "/etc", "a/", "./a", "a\0"] {
            let error = host.netdev(name).unwrap_err();
            assert!(error.is_missing(), "{name:?}: {error}");
        }
    }

    #[test]
    fn a_missing_object_is_named_with_the_path_that_was_searched() {
        let error = Host::at("/nonexistent").netdev("ens1").unwrap_err();
        assert!(error.is_missing());
        assert_eq!(
            error.to_string(),
            "netdev ens1 does not exist on this host, or not in this network namespace (searched \
             /nonexistent/sys/class/net/ens1)"
        );
    }

    #[test]
    fn an_attribute_that_hangs_is_its_objects_error_alone() {
        let function = "/sys/devices/pci0000:d7/0000:d8:00.0";
        let device = format!("{function}/infiniband/mlx5_1");
        for (attribute, object) in [
            (format!("{device}/ports/1/rate"), Some(device.as_str())),
            (format!("{function}/numa_node"), Some(function)),
            ("/sys/class/infiniband".into(), None),
            ("/var/lib/rdma-netdev/bindings".into(), None),
        ] {
            assert_eq!(
                object_of(Path::new(&attribute)).as_deref(),
                object.map(Path::new)
            );
        }
        let directory = tempfile::tempdir().unwrap();
        let device = |name: &str| {
            let device = directory.path().join("infiniband").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("rate"), "1").unwrap();
            device
        };
        let (hangs, answers) = (device("mlx5_0"), device("mlx5_1"));
        let hung = || Hung {
            object: hangs.clone(),
            attribute: hangs.join("ports/1/state"),
        };
        let progress = Arc::new(Progress::default());
        let read =
            |device: &Path| with_progress(&progress, vec![hung()], || attribute(device, "rate"));
        let error = read(&hangs).unwrap_err();
        assert!(error.is_of_one_object());
        assert!(error.to_string().contains("ports/1/state"), "{error}");
        assert_eq!(read(&answers).unwrap().as_deref(), Some("1"));
        // Between two reads nothing hangs.
        assert_eq!(progress.hung_for(Duration::ZERO), None);
        progress.abandon();
        assert!(read(&answers).is_err());
    }

    #[test]
    fn errors_of_the_process_are_not_taken_for_absent_hardware() {
        for (errno, of_one_object) in [
            (Errno::EMFILE, false),
            (Errno::ENFILE, false),
            (Errno::ENOMEM, false),
            (Errno::EACCES, true),
            (Errno::ELOOP, true),
            (Errno::EIO, true),
            (Errno::ETIMEDOUT, true),
            (Errno::EBUSY, true),
        ] {
            let source = io::Error::from(errno);
            assert!(!means_absent(&source), "{errno}");
            let error = Error::Read {
                path: "/sys/x".into(),
                source,
            };
            assert_eq!(error.is_of_one_object(), of_one_object, "{errno}");
        }
        for errno in [
            Errno::ENOENT,
            Errno::EINVAL,
            Errno::ENODEV,
            Errno::EOPNOTSUPP,
        ] {
            assert!(means_absent(&io::Error::from(errno)), "{errno}");
        }
    }

    #[test]
    fn a_read_shows_its_path_while_it_lasts() {
        let progress = Arc::new(Progress::default());
        let path = Path::new("/sys/x/state");
        let read = || shown(path, || Ok(progress.path()));
        assert_eq!(with_progress(&progress, Vec::new(), read).unwrap(), path);
        assert_eq!(progress.path(), Path::new(""));
        // Another thread, or nobody who asks.
        assert_eq!(read().unwrap(), Path::new(""));
    }

    #[test]
    fn names_are_ordered_as_people_count() {
        let mut names = vec![
            "mlx5_10",
            "mlx5_2",
            "mlx5_bond_0",
            "ib1",
            "ib0",
            "eth01",
            "eth1",
        ];
        names.sort_by_key(|name| natural_key(name));
        assert_eq!(
            names,
            [
                "eth01",
                "eth1",
                "ib0",
                "ib1",
                "mlx5_2",
                "mlx5_10",
                "mlx5_bond_0"
            ]
        );
    }
}
