//! Reads the kubelet's checkpoint ([`pools::checkpoint`]), which may be on a disk that hangs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use node::file::FileId;
use pools::checkpoint::{Checkpoint, FILE, allocated_nodes, read};

use crate::reader::{Reader, Readers};

/// How long the file may take to be read.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the checkpoint on a thread of its own: it may be on a disk that hangs.
#[derive(Debug)]
pub(crate) struct CheckpointReader {
    reader: Reader,
    directory: PathBuf,
}

impl CheckpointReader {
    pub(crate) fn new(readers: &Readers, directory: &Path) -> Self {
        let what = "the read of the kubelet's checkpoint";
        Self {
            reader: readers.reader("checkpoint", what, TIMEOUT),
            directory: directory.to_owned(),
        }
    }

    /// Where the checkpoint is.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join(FILE)
    }

    async fn run<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Result<T, String> {
        let directory = self.directory.clone();
        let read = self.reader.run(move || {
            hca::host::show(&directory);
            read(&directory)
        });
        read.await.map_err(|late| late.to_string())
    }

    /// The file as it is now; `None` where there is none, or where it cannot be told in time.
    pub(crate) async fn file_id(&self) -> Option<FileId> {
        let read = self.run(|directory| FileId::of(&directory.join(FILE)));
        read.await.ok().flatten()
    }

    /// The checkpoint; read again if its file is not the one that is `known`.
    pub(crate) async fn read(
        &self,
        known: Option<Checkpoint>,
    ) -> Result<Option<Checkpoint>, String> {
        self.run(|directory| read(directory, known)).await?
    }

    /// Paths of the device nodes that containers were allocated with these units of a resource.
    pub(crate) async fn allocated_nodes(
        &self,
        resource: String,
        units: Vec<String>,
    ) -> Result<Vec<BTreeSet<String>>, String> {
        let read = self.run(move |directory| {
            let units: BTreeSet<&String> = units.iter().collect();
            allocated_nodes(directory, &resource, |ids| *ids == units)
        });
        read.await?
    }
}
