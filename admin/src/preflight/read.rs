//! Readers of files: a value, its absence, or the right or mount that is missing.

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use super::context::Context;
use super::engine::{Fact, Unread};

/// Most of a file that is read, unless its check says otherwise.
const MOST_BYTES: u64 = 4 << 20;

/// Files of other processes that only their owner reads need this; other files need root.
const RIGHT_OVER_PROCESSES: &str = "CAP_SYS_PTRACE";

/// Text of a file without white space around it; `None` if the host has no such file.
pub(super) fn text(context: &Context, path: &Path) -> Fact<Option<String>> {
    let bytes = present(context, path, bytes(path))?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
}

/// The same of a file that the host must have.
pub(super) fn required(context: &Context, path: &Path) -> Fact<String> {
    text(context, path)?.ok_or_else(|| Unread(format!("{} does not exist", path.display())))
}

/// A file's content: what is not a regular file is not opened, and nothing is waited for.
pub(super) fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    up_to(path, MOST_BYTES)
}

/// The same of a file of at most this size.
pub(super) fn up_to(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let (file, _) = node::file::open_regular(path)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!("it is larger than {most} bytes"))),
        false => Ok(bytes),
    }
}

/// Names in a directory; `None` if the host has none.
pub(super) fn names(context: &Context, path: &Path) -> Fact<Option<Vec<String>>> {
    let names = std::fs::read_dir(path).map(|entries| {
        let mut names: Vec<String> = (entries.flatten())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    });
    present(context, path, names)
}

/// What was read; `None` where the host's own file systems say that it does not exist.
pub(super) fn present<T>(context: &Context, path: &Path, read: io::Result<T>) -> Fact<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => match is_in_sight(context, path) {
            true => Ok(None),
            false => Err(Unread(format!(
                "{} is not mounted here: run rdmactl on the node",
                path.display()
            ))),
        },
        // A process that ended meanwhile.
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
        Err(error) => Err(refused(context, path, &error)),
    }
}

pub(super) fn refused(context: &Context, path: &Path, error: &io::Error) -> Unread {
    let path_text = path.display();
    if error.kind() != ErrorKind::PermissionDenied {
        return Unread(format!("cannot read {path_text}: {error}"));
    }
    let right = match path.starts_with(&context.host.proc) {
        true => RIGHT_OVER_PROCESSES,
        false => "root",
    };
    Unread(format!(
        "cannot read {path_text}: needs {right}; run rdmactl as root on the node"
    ))
}

/// Whether the absence of a path is the host's: a container sees all of `/sys` and `/proc` or
/// nothing, and of `/dev`, `/etc`, `/run` and `/var` only what is mounted.
fn is_in_sight(context: &Context, path: &Path) -> bool {
    let host = &context.host;
    let whole = [(&host.sys, "class"), (&host.proc, "sys")];
    context.settings.root == Path::new("/")
        || whole
            .iter()
            .any(|(top, sign)| path.starts_with(top) && top.join(sign).symlink_metadata().is_ok())
}
