//! Log lines on stderr.

use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// A library that logs each failure that it returns; who asked it says it.
const REPEATS: &str = "kube_client";

/// Starts logging; only the first call of a process counts.
pub(crate) fn start(level: Level, json: bool) {
    let of_library = match level > Level::INFO {
        true => LevelFilter::from_level(level),
        false => LevelFilter::OFF,
    };
    let targets = Targets::new()
        .with_default(level)
        .with_target(REPEATS, of_library);
    let lines = fmt()
        .with_writer(std::io::stderr)
        .with_max_level(LevelFilter::from_level(level));
    // A second start finds a subscriber in place, which is the one to keep.
    let _ = if json {
        let lines = lines.json().flatten_event(true).finish();
        lines.with(targets).try_init()
    } else {
        let lines = lines.with_ansi(false).with_target(false).finish();
        lines.with(targets).try_init()
    };
}
