//! Watching directories by inotify.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::errno::Errno;
use notify::{ErrorKind, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

/// Why a directory cannot be watched.
#[derive(Debug)]
struct Error(notify::Error);

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

/// A directory that is watched (not what is below it). One that was itself replaced sends no event
/// any more, so it is looked for every now and then.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    watched: Option<((u64, u64), RecommendedWatcher)>,
    unwatched: Option<String>,
}

impl Watch {
    /// Watches the directory that has this path now, if there is one. `wake` is called for every
    /// change. Many changes may come as one call and one change as many: what they are is for the
    /// caller to find out.
    ///
    /// Returns why it cannot be watched, where that is another reason than before.
    pub(crate) fn renew(
        &mut self,
        path: &Path,
        wake: impl Fn() + Send + 'static,
    ) -> Option<String> {
        let now = std::fs::metadata(path).ok();
        let now = now.map(|meta| (meta.dev(), meta.ino()));
        if self.watched.as_ref().map(|(id, _)| *id) == now {
            return None;
        }
        self.watched = None;
        match (now?, directory(path, wake)) {
            (id, Ok(watcher)) => {
                self.watched = Some((id, watcher));
                self.unwatched = None;
                None
            }
            (_, Err(error)) => {
                let error = Some(error.to_string());
                let before = std::mem::replace(&mut self.unwatched, error.clone());
                (before != error).then_some(error)?
            }
        }
    }
}

fn directory(path: &Path, wake: impl Fn() + Send + 'static) -> Result<RecommendedWatcher, Error> {
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
