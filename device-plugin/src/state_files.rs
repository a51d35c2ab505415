//! Small files that programs of the node read, or the next daemon: kept as they should be.
//!
//! A disk can be full, read-only or slow for a while, and a file can be removed or replaced. So each
//! file is compared with its content at each scan and each pulse of the loop, and written where it
//! differs. What cannot be written is at `/readyz` for as long as that lasts. Killed anywhere, a file is
//! the old one or the new one (`node::file`).

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use node::file;

use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// How long a scan waits for its files.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FilePath {
    /// In the state directory that the node's policy names.
    Node(&'static str),
    /// At this path; its directory is made.
    Own(PathBuf),
}

/// A file and the content that it must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub place: FilePath,
    pub content: String,
    /// What is missing as long as it cannot be written.
    pub consequence: &'static str,
}

/// The files that there should be.
#[derive(Debug)]
pub(crate) struct StateFiles {
    paths: Arc<NodePaths>,
    wanted: Arc<[File]>,
    /// Writes them. Its value is what cannot be written.
    writer: Reader<Vec<String>>,
}

impl StateFiles {
    /// No file yet.
    pub(crate) fn new(paths: Arc<NodePaths>, readers: &Readers) -> Self {
        let what = "the writing of the node's files";
        Self {
            paths,
            wanted: Arc::default(),
            writer: readers.reader("state", what, SETTLE_TIMEOUT),
        }
    }

    /// From now on there should be these files. What was wanted before and is not any more stays as
    /// it is. Returns whether the first one is to be another one than before.
    pub(crate) fn want(&mut self, files: Vec<File>) -> bool {
        let is_new = self.wanted.first() != files.first();
        self.wanted = files.into();
        is_new
    }

    /// Starts to write those that differ.
    pub(crate) fn compare(&self) {
        let (paths, files) = (self.paths.clone(), self.wanted.clone());
        self.writer.start(move || write_all(&paths, &files));
    }

    /// Writes those that differ. Returns when they are written, or cannot be, or are late.
    pub(crate) async fn settled(&self) {
        let (paths, files) = (self.paths.clone(), self.wanted.clone());
        let written = self.writer.read(move || write_all(&paths, &files));
        // The readers report a read without an answer.
        let _ = written.await;
    }

    /// What cannot be written.
    pub(crate) fn faults(&self) -> Vec<String> {
        self.writer
            .last()
            .map(|last| last.value)
            .unwrap_or_default()
    }
}

fn write_all(paths: &NodePaths, files: &[File]) -> Vec<String> {
    let mut faults = Vec::new();
    let state_dir = paths.state_dir();
    for file in files {
        let path = match &file.place {
            FilePath::Node(name) => state_dir.join(name),
            FilePath::Own(path) => path.clone(),
        };
        hca::host::show(&path);
        if let Err(error) = write(&path, file) {
            let (path, consequence) = (path.display(), file.consequence);
            faults.push(format!("write {path}: {error}; {consequence}"));
        }
    }
    faults
}

fn write(path: &Path, file: &File) -> io::Result<()> {
    if has(path, &file.content) {
        return Ok(());
    }
    if let (FilePath::Own(_), Some(directory)) = (&file.place, path.parent()) {
        std::fs::create_dir_all(directory)?;
    }
    file::replace(path, &file.content)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: PathBuf) -> File {
        File {
            place: FilePath::Own(path),
            content: "1\n".into(),
            consequence: "no program can read it",
        }
    }

    #[tokio::test]
    async fn a_removed_or_unwritable_file_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/a");
        // In the place of its directory there is a file.
        std::fs::write(dir.path().join("state"), "").unwrap();
        let paths = Arc::new(NodePaths::all_in(dir.path()));
        let mut files = StateFiles::new(paths, &Readers::default());
        files.want(vec![file(path.clone())]);
        files.settled().await;
        let faults = files.faults();
        assert!(
            faults.len() == 1 && faults[0].contains("state/a") && faults[0].contains("no program"),
            "{faults:?}"
        );
        std::fs::remove_file(dir.path().join("state")).unwrap();
        for _ in 0..2 {
            files.settled().await;
            assert_eq!(files.faults(), [""; 0]);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n");
            std::fs::remove_file(&path).unwrap();
        }
        // A FIFO in the file's place is replaced; to read it would wait for a writer.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        files.settled().await;
        assert_eq!(files.faults(), [""; 0]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n");
    }
}
