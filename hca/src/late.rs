//! Reads that may hang, with a limit: firmware, a driver, a disk whose server is gone.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::host::{Progress, with_progress};

/// A read that is past its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    pub what: String,
    pub started: Instant,
    /// Empty if it is not known.
    pub path: PathBuf,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is late: ", self.what)?;
        match self.path.as_os_str().is_empty() {
            true => f.write_str("it has not ended")?,
            false => write!(f, "{} has not answered", self.path.display())?,
        }
        let seconds = self.started.elapsed().as_secs();
        write!(
            f,
            " for {seconds} s; firmware, a driver or a file server hangs, or the node is overloaded"
        )
    }
}

impl std::error::Error for Late {}

/// Reads on a thread of its own, for who has nothing else to do: waits at most `limit`. Nothing can
/// interrupt such a read, so the process ends without it.
///
/// # Errors
/// The read does not end, or its thread cannot be started.
pub fn wait<R: Send + 'static>(
    what: &str,
    limit: Duration,
    read: impl FnOnce() -> R + Send + 'static,
) -> Result<R, Late> {
    let progress = Arc::new(Progress::default());
    let (sender, value) = mpsc::channel();
    let (started, own) = (Instant::now(), progress.clone());
    let work = move || drop(sender.send(with_progress(&own, Vec::new(), read)));
    // Without a thread the sender is dropped, and nothing comes.
    let _ = std::thread::Builder::new().name("read".into()).spawn(work);
    value.recv_timeout(limit).map_err(|_| Late {
        what: what.to_owned(),
        started,
        path: progress.path(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_gives_up_and_names_the_path() {
        let late = wait("the scan", Duration::from_millis(200), || {
            crate::host::show("/share/state".as_ref());
            loop {
                std::thread::park();
            }
        })
        .unwrap_err();
        let text = late.to_string();
        assert!(
            text.starts_with("the scan is late: /share/state has not answered"),
            "{text}"
        );
        assert_eq!(wait("the scan", Duration::from_millis(200), || 1), Ok(1));
    }
}
