//! Watching directories by inotify.

use std::path::Path;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

/// Calls `wake` for every change in a directory (not below it), until the watcher is dropped.
///
/// Many changes may come as one call and one change as many: what they are is for the caller to
/// look up.
///
/// # Errors
/// The directory does not exist, or the kernel has no inotify instance left for this user.
pub fn directory(
    path: &Path,
    wake: impl Fn() + Send + 'static,
) -> notify::Result<RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let only_read = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(_)));
        if !only_read {
            wake();
        }
    })?;
    watcher.watch(path, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}
