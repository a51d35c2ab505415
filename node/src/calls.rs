//! How often a CNI program was called, how its calls ended and how long they took: a small file of
//! counters that the program itself adds to and the daemon reads, so that no daemon is in the way
//! of a call.
//!
//! The file is in `/run`, in the directory of the daemon's socket: only root can write there, a
//! reboot starts at zero as it does for every counter of the kernel, and nothing is synced. Where
//! that directory is missing nothing is counted. Each call adds with one read and one write below
//! a lock (`flock`) that is held for these two alone. A program that does not get the lock within
//! [`LOCK_TRIES`] tries is not counted: a call never waits for a statistic.
//!
//! Killed between the read and the write a program leaves the file as it was; the lock goes with
//! the process. The write is less than a page, which Linux writes whole, and never shorter than what
//! it replaces, because counters only grow. A file that cannot be read is started anew.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

pub use cni_wire::{Code, Command};
use serde::{Deserialize, Serialize};

/// The directory below the root of the host's files.
const DIRECTORY: &str = "run/rdma-netdev";
/// A file of counters has less.
const MAX_BYTES: u64 = 4096;
/// The commands that are counted.
pub const COMMANDS: [Command; 5] = [
    Command::Add,
    Command::Del,
    Command::Check,
    Command::Status,
    Command::Gc,
];
/// Upper bounds of the histogram of durations. Calls that took longer are in the last bucket,
/// which has none.
pub const BOUNDS: [Duration; 10] = [
    Duration::from_millis(2),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
];
/// How often the lock is tried.
const LOCK_TRIES: u32 = 10;
/// Between two tries; the lock is held for a few microseconds.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_micros(100);

/// The counters of one program, by the names of commands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls(BTreeMap<String, CommandCalls>);

/// The calls of one command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandCalls {
    pub successes: u64,
    /// By the numbers of their codes; those without a name here are counted together as 0.
    pub failures: BTreeMap<u32, u64>,
    /// Calls by the bounds of [`BOUNDS`], each in one bucket; the last one has no bound.
    pub buckets: [u64; BOUNDS.len() + 1],
    /// How long they took together.
    pub micros: u64,
}

/// The file of a program's counters; `root` is the directory below which the host's files are.
#[must_use]
pub fn file_of(root: &Path, program: &str) -> PathBuf {
    file_in(&root.join(DIRECTORY), program)
}

/// The same in the directory of the daemon's socket.
#[must_use]
pub fn file_in(directory: &Path, program: &str) -> PathBuf {
    directory.join(format!("{program}.calls"))
}

/// Counts one call that ended after `took`. What fails here is no concern of the call.
pub fn count(file: &Path, command: Command, code: Option<Code>, took: Duration) {
    let _ = add(file, command, code, took);
}

fn add(path: &Path, command: Command, code: Option<Code>, took: Duration) -> io::Result<()> {
    if !COMMANDS.contains(&command) {
        return Ok(());
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)?;
    if !retry_lock(|| file.try_lock()) {
        return Ok(());
    }
    let mut calls = Calls::of(&file)?.unwrap_or_default();
    calls.add(command, code, took);
    let text = serde_json::to_vec(&calls)?;
    file.write_all_at(&text, 0)?;
    if file.metadata()?.len() > text.len() as u64 {
        file.set_len(text.len() as u64)?;
    }
    Ok(())
}

fn retry_lock(lock: impl Fn() -> Result<(), TryLockError>) -> bool {
    for _ in 0..LOCK_TRIES {
        if lock().is_ok() {
            return true;
        }
        thread::sleep(LOCK_RETRY_INTERVAL);
    }
    false
}

impl Calls {
    /// Reads a program's counters; `None` where it was never called since the node booted, or the
    /// file cannot be read.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => {
                // Without the lock a counter may be read in the middle of a write.
                retry_lock(|| file.try_lock_shared());
                Self::of(&file)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(file: &File) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text).ok())
    }

    fn add(&mut self, command: Command, code: Option<Code>, took: Duration) {
        let calls = self.0.entry(command.as_str().to_owned()).or_default();
        let ending = match code {
            None => &mut calls.successes,
            Some(code) if code.is_known() => calls.failures.entry(code.0).or_default(),
            Some(_) => calls.failures.entry(0).or_default(),
        };
        *ending = ending.saturating_add(1);
        let bucket = BOUNDS.iter().position(|bound| took <= *bound);
        if let Some(bucket) = calls.buckets.get_mut(bucket.unwrap_or(BOUNDS.len())) {
            *bucket = bucket.saturating_add(1);
        }
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        calls.micros = calls.micros.saturating_add(micros);
    }

    /// Those of one command.
    #[must_use]
    pub fn of_command(&self, command: Command) -> CommandCalls {
        self.0.get(command.as_str()).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn calls_are_counted_by_ending_and_duration() {
        let place = tempfile::tempdir().unwrap();
        let file = file_in(place.path(), "rdma-netdev");
        assert_eq!(Calls::read(&file).unwrap(), None);
        let ms = Duration::from_millis;
        count(&file, Command::Add, None, ms(7));
        count(&file, Command::Add, None, ms(10));
        count(&file, Command::Add, Some(Code::Exhausted), ms(60_000));
        count(&file, Command::Add, Some(Code(4711)), ms(1));
        count(&file, Command::Del, None, ms(30));
        count(&file, Command::Version, None, ms(30));
        let calls = Calls::read(&file).unwrap().unwrap();
        let added = CommandCalls {
            successes: 2,
            failures: BTreeMap::from([(0, 1), (Code::Exhausted.0, 1)]),
            buckets: [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1],
            micros: 60_018_000,
        };
        assert_eq!(calls.of_command(Command::Add), added);
        assert_eq!(calls.of_command(Command::Del).successes, 1);
        assert_eq!(calls.of_command(Command::Gc), CommandCalls::default());
    }

    #[test]
    fn the_fullest_file_is_less_than_a_page() {
        const MANY: u64 = 1_000_000_000_000;
        let most = CommandCalls {
            successes: MANY,
            failures: (980..1000).map(|code| (code, MANY)).collect(),
            buckets: [MANY; BOUNDS.len() + 1],
            micros: MANY,
        };
        let commands = COMMANDS.map(|command| (command.as_str().to_owned(), most.clone()));
        let text = serde_json::to_vec(&Calls(commands.into())).unwrap();
        assert!((text.len() as u64) < MAX_BYTES, "{}", text.len());
    }

    #[test]
    fn programs_at_once_lose_no_call() {
        let place = tempfile::tempdir().unwrap();
        let file = file_in(place.path(), "rdma-netdev");
        // Each as a process of its own would, with a file of its own.
        let mut counted = 0;
        thread::scope(|scope| {
            let add = || (0..50).filter(|_| add(&file, Command::Add, None, Duration::ZERO).is_ok());
            let threads: Vec<_> = (0..2).map(|_| scope.spawn(move || add().count())).collect();
            counted = threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum();
        });
        let calls = Calls::read(&file).unwrap().unwrap();
        let successes = calls.of_command(Command::Add).successes;
        // One that did not get the lock is not counted; none is counted twice or lost to another.
        assert!(
            successes <= counted as u64 && successes > 50,
            "{successes} of {counted}"
        );
    }

    #[test]
    fn a_file_that_cannot_be_read_is_started_anew() {
        let place = tempfile::tempdir().unwrap();
        let file = file_in(place.path(), "rdma-netdev");
        for text in [vec![0; 1000], b"{".to_vec(), vec![b' '; 5000]] {
            fs::write(&file, text).unwrap();
            assert_eq!(Calls::read(&file).unwrap(), None);
            count(&file, Command::Add, None, Duration::ZERO);
            let calls = Calls::read(&file).unwrap().unwrap();
            assert_eq!(calls.of_command(Command::Add).successes, 1);
        }
    }

    #[test]
    fn without_the_directory_and_through_a_link_nothing_is_counted() {
        let place = tempfile::tempdir().unwrap();
        count(
            &place.path().join("no/such.calls"),
            Command::Add,
            None,
            Duration::ZERO,
        );
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        let (link, target) = (place.path().join("x.calls"), place.path().join("shadow"));
        fs::write(&target, "root:x").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        count(&link, Command::Add, None, Duration::ZERO);
        assert_eq!(fs::read_to_string(&target).unwrap(), "root:x");
    }

    #[test]
    fn a_held_lock_delays_a_call_by_little() {
        let place = tempfile::tempdir().unwrap();
        let file = file_in(place.path(), "rdma-netdev");
        count(&file, Command::Add, None, Duration::ZERO);
        let holder = File::open(&file).unwrap();
        holder.lock().unwrap();
        let started = std::time::Instant::now();
        count(&file, Command::Add, None, Duration::ZERO);
        assert!(started.elapsed() < Duration::from_secs(1));
        drop(holder);
        let calls = Calls::read(&file).unwrap().unwrap();
        assert_eq!(calls.of_command(Command::Add).successes, 1);
    }
}
