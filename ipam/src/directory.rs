//! A directory in which nodes share documents of subnets is one by its file `FORMAT`: a share that is not
//! mounted has none.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// `{"format": 1}`
pub const FORMAT_FILE: &str = "FORMAT";
const FORMAT: u64 = 1;
/// In bytes.
const MAX_FORMAT: u64 = 4096;

/// Why a directory is none of ours.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", path.display())]
pub struct NotOurs {
    path: PathBuf,
    why: String,
}

#[derive(Deserialize)]
struct FormatFile {
    format: u64,
}

/// Makes an existing directory one of ours. Done before, it does nothing.
///
/// # Errors
/// It cannot be written, or it is one of another format.
pub fn init(directory: &Path) -> Result<(), NotOurs> {
    let path = directory.join(FORMAT_FILE);
    let text = format!("{{\"format\": {FORMAT}}}\n");
    let made = match node::file::create(&path, text) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    };
    let made = made.and_then(|()| File::open(directory)?.sync_all());
    made.map_err(|error| NotOurs {
        path,
        why: format!("make it: {error}"),
    })?;
    check(directory)
}

/// # Errors
/// The directory is not one of ours, as the mount point of a share that is not mounted.
pub fn check(directory: &Path) -> Result<(), NotOurs> {
    let path = directory.join(FORMAT_FILE);
    let read = || -> Result<(), String> {
        let opened = node::file::open_regular(&path).or_else(|error| match error.kind() {
            // An NFS client remembers for half a minute that there was none, until the directory is opened.
            ErrorKind::NotFound => {
                let _ = File::open(directory)?;
                node::file::open_regular(&path)
            }
            _ => Err(error),
        });
        let (file, _) = match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let why = "there is no such file: mount the share; or prepare the directory, once for \
                           all nodes: rdmactl addresses init";
                return Err(why.to_owned());
            }
            opened => opened.map_err(|error| error.to_string())?,
        };
        let mut text = Vec::new();
        let read = file.take(MAX_FORMAT).read_to_end(&mut text);
        read.map_err(|error| error.to_string())?;
        let file: FormatFile = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        match file.format {
            FORMAT => Ok(()),
            other => Err(format!(
                "it has format {other}, this program knows {FORMAT}: install all programs of one release"
            )),
        }
    };
    read().map_err(|why| NotOurs { path, why })
}
