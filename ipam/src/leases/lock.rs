//! The one lock of the node's leases.
//!
//! It belongs to the open file (`flock`), so threads exclude each other as processes do, and it ends
//! with its holder. Who waits longer than [`LIMIT`] fails, and names the holder.

use super::LeaseError;
use rustix::io::Errno;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// How long a call waits: a holder makes some dozen system calls on a file system in memory.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// The text of the holder has always this length.
const WIDTH: usize = 24;

/// Held for as long as the value lives.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn take(path: &Path, limit: Duration) -> Result<Self, LeaseError> {
        let failed = |attempt| {
            move |error: io::Error| LeaseError::Io {
                attempt,
                path: path.to_owned(),
                source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            }
        };
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_CLOEXEC)
            .open(path);
        let mut file = opened.map_err(failed("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(failed("lock")(error)),
            Err(TryLockError::WouldBlock) => {
                file = wait(file, path, limit)?.map_err(failed("lock"))?;
            }
        }
        let holder = format!("process {}", std::process::id());
        // For the message of who waits in vain.
        let _ = file.write_all_at(format!("{holder:<WIDTH$}\n").as_bytes(), 0);
        Ok(Self { _file: file })
    }
}

/// Waits in a thread of its own, which ends with the process or when it gets the lock.
fn wait(file: File, path: &Path, limit: Duration) -> Result<io::Result<File>, LeaseError> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let locked = file.lock().map(|()| file);
        // Nobody may wait any longer; the file is closed then.
        let _ = sender.send(locked);
    });
    receiver
        .recv_timeout(limit)
        .map_err(|_| LeaseError::Locked {
            path: path.to_owned(),
            seconds: limit.as_secs(),
            holder: std::fs::read_to_string(path)
                .map(|text| text.trim().to_owned())
                .ok()
                .filter(|text| !text.is_empty())
                .unwrap_or_else(|| "an unknown process".to_owned()),
        })
}
