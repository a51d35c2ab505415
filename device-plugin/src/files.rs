//! The files that other programs and the next daemon read, kept as they should be: of the node's state,
//! CDI specifications of pools, device information.
//!
//! A disk can be full, read-only or slow for a while, and a file can be removed or replaced. So what is
//! wanted of each directory is compared with what is there at each plan and at each pulse of the loop, until
//! both are the same. A directory that hangs keeps no other one waiting. Killed anywhere, a file is the old
//! one or the new one (`node::file`).

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use attachment::cdi_file::{CdiDirectory, CdiError};
use node::file;

use crate::binding::store;
use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// How long a plan waits for its files.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// A directory with files of ours.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Directory {
    /// The state directory that the node's policy names.
    State,
    /// The daemon's own.
    Own(PathBuf),
    Cdi,
    DeviceInfo,
}

/// What a file must be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub content: String,
    /// Whether one that is not there stays so.
    pub only_if_present: bool,
    /// What is missing as long as it cannot be written.
    pub consequence: &'static str,
}

/// Whether an entry of the directory goes, by its name.
pub(crate) type IsStale = Arc<dyn Fn(&str, &Metadata) -> bool + Send + Sync>;

/// What there should be in a directory.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// By their names.
    pub files: BTreeMap<String, File>,
    /// Which other entries go; none where that is not known.
    pub stale: Option<IsStale>,
    /// Whether it is a fault if the directory cannot be made or is not to be trusted.
    pub needs_directory: bool,
}

impl Wanted {
    /// Files, and nothing goes.
    pub(crate) fn of(files: BTreeMap<String, File>) -> Self {
        Self {
            files,
            stale: None,
            needs_directory: true,
        }
    }
}

impl fmt::Debug for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.files).finish()
    }
}

/// What cannot be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Why nothing can be written to the directory.
    pub directory: Option<String>,
    /// By the name of the file.
    pub files: BTreeMap<String, String>,
}

/// What there should be on the node.
#[derive(Debug)]
pub(crate) struct Files {
    paths: Arc<NodePaths>,
    all: BTreeMap<Directory, Kept>,
    readers: Readers,
}

#[derive(Debug)]
struct Kept {
    wanted: Arc<Wanted>,
    /// Compares, and writes what differs.
    writer: Reader<Faults>,
}

impl Files {
    /// No file yet.
    pub(crate) fn new(paths: Arc<NodePaths>, readers: &Readers) -> Self {
        Self {
            paths,
            all: BTreeMap::new(),
            readers: readers.clone(),
        }
    }

    /// From now on there should be these files in a directory. What was wanted before and is not any more
    /// goes only if it is stale.
    pub(crate) fn want(&mut self, directory: Directory, wanted: Wanted) {
        let what = match &directory {
            Directory::State => "the writing of the node's files".to_owned(),
            Directory::Own(path) => format!("the writing of files in {}", path.display()),
            Directory::Cdi => format!("the work in {}", self.paths.cdi_dir.display()),
            Directory::DeviceInfo => "the writing of device information".to_owned(),
        };
        let wanted = Arc::new(wanted);
        let readers = &self.readers;
        let kept = self.all.entry(directory).or_insert_with(|| Kept {
            wanted: wanted.clone(),
            writer: readers.reader("files", what, SETTLE_TIMEOUT),
        });
        kept.wanted = wanted;
    }

    /// Starts to compare all directories.
    pub(crate) fn compare(&self) {
        for (directory, kept) in &self.all {
            kept.writer.start(self.work(directory, kept));
        }
    }

    /// Compares all directories. Returns when that is done or late, but for device information, which no
    /// list waits for.
    pub(crate) async fn settle(&self) {
        for (directory, kept) in &self.all {
            if *directory == Directory::DeviceInfo {
                kept.writer.start(self.work(directory, kept));
                continue;
            }
            // The readers report what is late.
            let _ = kept.writer.read(self.work(directory, kept)).await;
        }
    }

    fn work(&self, directory: &Directory, kept: &Kept) -> impl FnOnce() -> Faults + Send + 'static {
        let (paths, wanted) = (self.paths.clone(), kept.wanted.clone());
        let is_first = kept.writer.last().is_none();
        let directory = directory.clone();
        move || compare(&paths, &directory, &wanted, is_first)
    }

    /// What cannot be written in a directory.
    pub(crate) fn faults_in(&self, directory: &Directory) -> Faults {
        let Some(kept) = self.all.get(directory) else {
            return Faults::default();
        };
        match kept.writer.late() {
            Some(late) => Faults {
                directory: Some(format!("{} has not ended", late.what)),
                ..Faults::default()
            },
            None => kept
                .writer
                .last()
                .map(|last| last.value)
                .unwrap_or_default(),
        }
    }

    /// What cannot be written, for people.
    pub(crate) fn faults(&self) -> Vec<String> {
        let of_directory = |(directory, kept): (&Directory, &Kept)| {
            let faults = self.faults_in(directory);
            let files = faults.files.into_iter().map(|(name, error)| {
                let file = kept.wanted.files.get(&name);
                let consequence = file.map_or("", |file| file.consequence);
                format!("{error}; {consequence}")
            });
            // The readers report a directory that hangs.
            let whole = faults.directory.filter(|_| kept.writer.late().is_none());
            whole.into_iter().chain(files).collect::<Vec<_>>()
        };
        self.all.iter().flat_map(of_directory).collect()
    }
}

/// Compares what is wanted with what is there, and writes and removes what differs.
fn compare(paths: &NodePaths, directory: &Directory, wanted: &Wanted, is_first: bool) -> Faults {
    let whole = |error: &dyn fmt::Display| Faults {
        directory: Some(error.to_string()),
        ..Faults::default()
    };
    let (path, flag) = match directory {
        Directory::State => (paths.state_dir(), "stateDir"),
        Directory::Own(path) => (path.clone(), "--state-dir"),
        Directory::Cdi => (paths.cdi_dir.clone(), "--cdi-dir"),
        Directory::DeviceInfo => (paths.device_info_dir.clone(), "--device-info-dir"),
    };
    hca::host::show(&path);
    if is_first {
        remove_leftovers(&path);
        // Written by others of this program, which look at no other file.
        if *directory == Directory::State {
            remove_leftovers(&path.join("stores"));
            remove_leftovers(&paths.run_dir.join(store::DIRECTORY));
        }
    }
    let mut faults = match directory {
        Directory::Cdi => match open_cdi(&path, wanted.needs_directory) {
            // What was checked, whatever has its name by now.
            Ok(Some(open)) => compare_in(&open.below(""), wanted, |path, text| {
                file::replace_in_boot(path, text)
            }),
            Ok(None) => Faults::default(),
            Err(error) => whole(&error),
        },
        Directory::State => compare_in(&path, wanted, |path, text| file::replace(path, text)),
        Directory::Own(_) | Directory::DeviceInfo => match fs::create_dir_all(&path) {
            Ok(()) => compare_in(&path, wanted, |path, text| file::replace(path, text)),
            Err(error) => whole(&format_args!("make {}: {error}", path.display())),
        },
    };
    let remedy = format!("; mount the host's directory there, or name it with {flag}");
    faults
        .directory
        .iter_mut()
        .for_each(|text| *text += &remedy);
    for (name, error) in &mut faults.files {
        *error = format!("write {}: {error}", path.join(name).display());
    }
    faults
}

/// The directory of CDI files; none where none is needed and none can be used.
fn open_cdi(path: &Path, is_needed: bool) -> Result<Option<CdiDirectory>, CdiError> {
    match is_needed {
        true => CdiDirectory::create(path).map(Some),
        false => Ok(CdiDirectory::open(path).ok()),
    }
}

fn compare_in(
    directory: &Path,
    wanted: &Wanted,
    replace: fn(&Path, &str) -> io::Result<()>,
) -> Faults {
    let mut faults = Faults::default();
    for (name, file) in &wanted.files {
        let path = directory.join(name);
        if has(&path, &file.content) || (file.only_if_present && !path.exists()) {
            continue;
        }
        if let Err(error) = replace(&path, &file.content) {
            faults.files.insert(name.clone(), error.to_string());
        }
    }
    let Some(stale) = &wanted.stale else {
        return faults;
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_stale = || entry.metadata().is_ok_and(|meta| stale(name, &meta));
        if wanted.files.contains_key(name) || !is_stale() {
            continue;
        }
        match fs::remove_file(entry.path()) {
            Ok(()) => tracing::info!(name, "removed a file that no pod uses"),
            Err(error) => tracing::warn!(name, %error, "cannot remove a file that no pod uses"),
        }
    }
    faults
}

/// Whether a regular file has this content.
fn has(path: &Path, content: &str) -> bool {
    let Ok((file, meta)) = file::open_regular(path) else {
        return false;
    };
    let mut known = String::new();
    meta.len() == content.len() as u64
        && file.take(meta.len()).read_to_string(&mut known).is_ok()
        && known == content
}

/// Removes what killed writers left.
fn remove_leftovers(directory: &Path) {
    if let Err(error) = file::remove_leftovers(directory) {
        tracing::debug!(directory = %directory.display(), %error, "cannot remove leftovers");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn files(directory: &Path) -> Files {
        let paths = Arc::new(NodePaths::all_in(directory));
        Files::new(paths, &Readers::default())
    }

    fn wanted(files: &[(&str, &str)]) -> Wanted {
        let file = |(name, content): &(&str, &str)| {
            let file = File {
                content: (*content).into(),
                only_if_present: false,
                consequence: "no program can read it",
            };
            ((*name).to_owned(), file)
        };
        Wanted::of(files.iter().map(file).collect())
    }

    #[tokio::test]
    async fn a_removed_or_unwritable_file_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("state");
        let path = own.join("a");
        // In the place of its directory there is a file.
        fs::write(&own, "").unwrap();
        let mut files = files(dir.path());
        files.want(Directory::Own(own.clone()), wanted(&[("a", "1\n")]));
        files.settle().await;
        let faults = files.faults();
        assert!(
            faults.len() == 1 && faults[0].contains("--state-dir"),
            "{faults:?}"
        );
        fs::remove_file(&own).unwrap();
        for _ in 0..2 {
            files.settle().await;
            assert_eq!(files.faults(), [""; 0]);
            assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
            fs::remove_file(&path).unwrap();
        }
        // A FIFO in the file's place is replaced; to read it would wait for a writer.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        files.settle().await;
        assert_eq!(files.faults(), [""; 0]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        files.settle().await;
        let faults = files.faults();
        assert!(faults[0].contains("state/a: ") && faults[0].ends_with("no program can read it"));
    }

    #[tokio::test]
    async fn only_a_changed_specification_is_written_and_only_stale_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(dir.path());
        let path = |name: &str| dir.path().join(name);
        let inode = || {
            fs::metadata(path("rdma-device-plugin-pool-a.json"))
                .unwrap()
                .ino()
        };
        for foreign in ["nvidia.com_gpu.json", "rdma-device-plugin-pool-x.yaml"] {
            fs::write(path(foreign), "{}").unwrap();
        }
        let (a, b) = (
            "rdma-device-plugin-pool-a.json",
            "rdma-device-plugin-pool-b.json",
        );
        files.want(Directory::Cdi, wanted(&[(a, "1"), (b, "1")]));
        files.settle().await;
        let first = inode();
        files.settle().await;
        assert_eq!(inode(), first);
        let stale: IsStale = Arc::new(|name, _| attachment::cdi_file::is_of_pool(name));
        let mut changed = wanted(&[(a, "2")]);
        changed.stale = Some(stale);
        files.want(Directory::Cdi, changed);
        files.settle().await;
        assert_ne!(inode(), first);
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        left.sort_by_key(fs::DirEntry::file_name);
        let left: Vec<_> = left.iter().map(fs::DirEntry::file_name).collect();
        assert_eq!(
            left,
            ["nvidia.com_gpu.json", a, "rdma-device-plugin-pool-x.yaml"]
        );
        assert_eq!(files.faults_in(&Directory::Cdi), Faults::default());
    }

    #[tokio::test]
    async fn a_specification_directory_that_is_a_file_is_named_with_its_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut files = files(file.path());
        files.want(Directory::Cdi, wanted(&[]));
        files.settle().await;
        let fault = files.faults_in(&Directory::Cdi).directory.unwrap();
        assert!(fault.contains("--cdi-dir"), "{fault}");
    }
}
