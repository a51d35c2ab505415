//! Watching directories by inotify.

use std::fmt;
use std::path::Path;

use nix::errno::Errno;
use notify::{ErrorKind, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

/// Why a directory cannot be watched.
#[derive(Debug)]
pub(crate) struct Error(notify::Error);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // inotify_init(2) and inotify_add_watch(2): which limit is which number.
        let code = match &self.0.kind {
            ErrorKind::Io(error) => error.raw_os_error().map(Errno::from_raw),
            ErrorKind::MaxFilesWatch => Some(Errno::ENOSPC),
            _ => None,
        };
        let remedy = match code {
            Some(Errno::EMFILE) => {
                "; the user has no inotify instance left, raise fs.inotify.max_user_instances"
            }
            Some(Errno::ENOSPC) => {
                "; the user has no inotify watch left, raise fs.inotify.max_user_watches"
            }
            _ => "",
        };
        write!(f, "{}{remedy}", self.0)
    }
}

impl std::error::Error for Error {}

/// Calls `wake` for every change in a directory (not below it), until the watcher is dropped.
///
/// Many changes may come as one call and one change as many: what they are is for the caller to
/// find out.
///
/// # Errors
/// The directory does not exist, or the kernel has no inotify instance left for this user.
pub(crate) fn directory(
    path: &Path,
    wake: impl Fn() + Send + 'static,
) -> Result<RecommendedWatcher, Error> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let only_read = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(_)));
        if !only_read {
            wake();
        }
    })
    .map_err(Error)?;
    watcher
        .watch(path, RecursiveMode::NonRecursive)
        .map_err(Error)?;
    Ok(watcher)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exhausted_limit_is_named() {
        let said = |code: Errno| {
            let error = std::io::Error::from_raw_os_error(code as i32);
            Error(notify::Error::io(error)).to_string()
        };
        assert!(said(Errno::EMFILE).contains("fs.inotify.max_user_instances"));
        assert!(said(Errno::ENOSPC).contains("fs.inotify.max_user_watches"));
        assert!(!said(Errno::ENOENT).contains("fs.inotify"));
    }
}
