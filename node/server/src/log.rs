//! Log lines on stderr.

use tracing::Level;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;

/// Starts logging; only the first call of a process counts.
pub(crate) fn start(level: Level, json: bool) {
    let lines = fmt()
        .with_writer(std::io::stderr)
        .with_max_level(LevelFilter::from_level(level));
    // A second start finds a subscriber in place, which is the one to keep.
    let _ = if json {
        lines.json().flatten_event(true).try_init()
    } else {
        lines.with_ansi(false).with_target(false).try_init()
    };
}
