//! Small files that programs of the node read, or the next daemon: kept as they should be.
//!
//! A disk can be full, read-only or slow for a while, and a file can be removed or replaced. So one
//! task compares each file with its content at each scan and every [`COMPARE_INTERVAL`], and writes
//! those that differ. What it cannot write is at `/readyz` for as long as that lasts. No task waits
//! for a file longer than [`SETTLE_TIMEOUT`]. Killed anywhere, a file is the old one or the new one
//! (`node::file`).

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use node::file;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node_paths::NodePaths;
use crate::reader::{Reader, Readers};

/// Time between two comparisons that no scan asked for.
const COMPARE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a scan waits for its files.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the state directory that the node's policy names.
    Node(&'static str),
    /// At this path; its directory is made.
    Own(PathBuf),
}

/// A file as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub place: Place,
    pub content: String,
    /// What is missing as long as it cannot be written.
    pub consequence: &'static str,
}

#[derive(Debug, Default)]
struct Wanted {
    generation: u64,
    files: Vec<File>,
}

#[derive(Debug, Default)]
struct Outcome {
    generation: u64,
    faults: Vec<String>,
}

/// Which files there should be.
#[derive(Debug)]
pub(crate) struct StateFiles {
    wanted: watch::Sender<Wanted>,
    outcome: watch::Receiver<Outcome>,
}

/// The task that writes them.
#[derive(Debug)]
pub(crate) struct Writer {
    paths: Arc<NodePaths>,
    wanted: watch::Receiver<Wanted>,
    outcome: watch::Sender<Outcome>,
    reader: Reader,
}

/// No file yet.
pub(crate) fn state_files(paths: Arc<NodePaths>, readers: &Readers) -> (StateFiles, Writer) {
    let wanted = watch::Sender::new(Wanted::default());
    let outcome = watch::Sender::new(Outcome::default());
    let files = StateFiles {
        outcome: outcome.subscribe(),
        wanted,
    };
    let writer = Writer {
        paths,
        wanted: files.wanted.subscribe(),
        outcome,
        reader: readers.reader("state", "the writing of the node's files", SETTLE_TIMEOUT),
    };
    (files, writer)
}

impl StateFiles {
    /// From now on there should be these files. What was wanted before and is not any more stays as
    /// it is.
    pub(crate) fn want(&self, files: Vec<File>) {
        self.wanted.send_modify(|wanted| {
            wanted.generation += 1;
            wanted.files = files;
        });
    }

    /// Waits until the files are as they were wanted last, or cannot be, or are late.
    pub(crate) async fn settled(&mut self) {
        let generation = self.wanted.borrow().generation;
        let settled = self
            .outcome
            .wait_for(|outcome| outcome.generation >= generation);
        let _ = tokio::time::timeout(SETTLE_TIMEOUT, settled).await;
    }

    /// Returns when there is another outcome.
    pub(crate) async fn changed(&mut self) {
        if self.outcome.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// What cannot be written.
    pub(crate) fn faults(&self) -> Vec<String> {
        self.outcome.borrow().faults.clone()
    }
}

impl Writer {
    /// Writes what is wanted until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.wanted.changed() => if changed.is_err() {
                    return stop.cancelled().await;
                },
                () = tokio::time::sleep(COMPARE_INTERVAL) => {}
            }
            let (generation, files) = {
                let wanted = self.wanted.borrow_and_update();
                (wanted.generation, wanted.files.clone())
            };
            let paths = self.paths.clone();
            let written = self.reader.run(move || write_all(&paths, &files));
            let Ok(faults) = written.await else {
                continue;
            };
            self.outcome.send_if_modified(|outcome| {
                for fault in faults
                    .iter()
                    .filter(|fault| !outcome.faults.contains(fault))
                {
                    tracing::warn!("{fault}");
                }
                let news = outcome.faults != faults || outcome.generation != generation;
                *outcome = Outcome { generation, faults };
                news
            });
        }
    }
}

fn write_all(paths: &NodePaths, files: &[File]) -> Vec<String> {
    let mut faults = Vec::new();
    let state_dir = paths.state_dir();
    for file in files {
        let path = match &file.place {
            Place::Node(name) => state_dir.join(name),
            Place::Own(path) => path.clone(),
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
    if let (Place::Own(_), Some(directory)) = (&file.place, path.parent()) {
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
            place: Place::Own(path),
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
        let (mut files, writer) =
            state_files(Arc::new(NodePaths::all_in(dir.path())), &Readers::default());
        let stop = CancellationToken::new();
        let task = tokio::spawn(writer.run(stop.clone()));
        files.want(vec![file(path.clone())]);
        files.settled().await;
        let faults = files.faults();
        assert!(
            faults.len() == 1 && faults[0].contains("state/a") && faults[0].contains("no program"),
            "{faults:?}"
        );
        std::fs::remove_file(dir.path().join("state")).unwrap();
        for _ in 0..2 {
            files.want(vec![file(path.clone())]);
            files.settled().await;
            assert_eq!(files.faults(), [""; 0]);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n");
            std::fs::remove_file(&path).unwrap();
        }
        // A FIFO in the file's place is replaced; to read it would wait for a writer.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        files.want(vec![file(path.clone())]);
        files.settled().await;
        assert_eq!(files.faults(), [""; 0]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n");
        stop.cancel();
        task.await.unwrap();
    }
}
