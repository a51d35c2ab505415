//! The few lines a CNI call has to say besides its answer.

use crate::policy::{Log, LogLevel};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

/// A warning, to the policy's file or to stderr, which runtimes show for failures.
pub(crate) fn warn(log: &Log, text: &str) {
    if log.level < LogLevel::Warn {
        return;
    }
    let line = format!(
        "{} warn rdma-ipam: {}\n",
        jiff::Timestamp::now(),
        text.escape_debug()
    );
    // Nobody is there to be told that a log line could not be written.
    let _ = match &log.file {
        Some(path) => OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(nix::fcntl::OFlag::O_NOFOLLOW.bits())
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes())),
        None => std::io::stderr().lock().write_all(line.as_bytes()),
    };
}
