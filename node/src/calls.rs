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
//! the process. The write is less than a page, which Linux writes whole. A file of another length
//! or version is started anew.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

pub use cni_wire::{Code, Command};

/// The directory below the root of the host's files.
const DIRECTORY: &str = "run/rdma-netdev";
/// Begins the file: what it is, and the version of what follows.
const MAGIC: u64 = u64::from_le_bytes(*b"rdmacni1");
/// The commands that are counted, in the file's order.
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
/// Codes of failures, in the file's order; others are counted together after them.
const CODES: [Code; 18] = [
    Code::IncompatibleVersion,
    Code::UnsupportedField,
    Code::UnknownContainer,
    Code::InvalidEnvironment,
    Code::Io,
    Code::Decode,
    Code::InvalidConfig,
    Code::InvalidNetns,
    Code::TryAgain,
    Code::Unavailable,
    Code::UnavailableLimited,
    Code::Kernel,
    Code::Policy,
    Code::Exhausted,
    Code::Exists,
    Code::Differs,
    Code::State,
    Code::Internal,
];
/// Successes, failures by code, failures by any other code.
const ENDINGS: usize = 1 + CODES.len() + 1;
/// Those, the buckets, and the sum of durations in microseconds.
const WORDS_OF_COMMAND: usize = ENDINGS + BOUNDS.len() + 1 + 1;
const WORDS: usize = 1 + COMMANDS.len() * WORDS_OF_COMMAND;
const BYTES: usize = WORDS * 8;

/// How often the lock is tried.
const LOCK_TRIES: u32 = 10;
/// Between two tries; the lock is held for a few microseconds.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_micros(100);

/// The counters of one program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calls {
    words: [u64; WORDS],
}

/// How calls of a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Success,
    Failure(Code),
    /// With a code that has no counter of its own.
    OtherFailure,
}

/// How long the calls of a command took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Durations {
    /// Calls by the bounds of [`BOUNDS`], each in one bucket; the last one has no bound.
    pub buckets: [u64; BOUNDS.len() + 1],
    pub sum: Duration,
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
    let Some(command) = COMMANDS.iter().position(|known| *known == command) else {
        return Ok(());
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)?;
    if !lock(&file) {
        return Ok(());
    }
    let mut calls = Calls::of(&file)?.unwrap_or_else(Calls::zero);
    calls.add(command, code, took);
    file.write_all_at(&calls.bytes(), 0)?;
    if file.metadata()?.len() != BYTES as u64 {
        file.set_len(BYTES as u64)?;
    }
    Ok(())
}

fn lock(file: &File) -> bool {
    for _ in 0..LOCK_TRIES {
        if file.try_lock().is_ok() {
            return true;
        }
        thread::sleep(LOCK_RETRY_INTERVAL);
    }
    false
}

impl Calls {
    fn zero() -> Self {
        let mut words = [0; WORDS];
        words[0] = MAGIC;
        Self { words }
    }

    /// Reads a program's counters; `None` where it was never called since the node booted, or the
    /// file is none of this version.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => Self::of(&file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(file: &File) -> io::Result<Option<Self>> {
        let mut bytes = [0; BYTES];
        if file.metadata()?.len() != BYTES as u64 {
            return Ok(None);
        }
        file.read_exact_at(&mut bytes, 0)?;
        let mut words = [0; WORDS];
        let (chunks, _) = bytes.as_chunks::<8>();
        for (word, chunk) in words.iter_mut().zip(chunks) {
            *word = u64::from_le_bytes(*chunk);
        }
        Ok((words.first() == Some(&MAGIC)).then_some(Self { words }))
    }

    fn bytes(&self) -> Vec<u8> {
        self.words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    }

    fn add(&mut self, command: usize, code: Option<Code>, took: Duration) {
        let ending = match code {
            None => 0,
            Some(code) => {
                let known = CODES.iter().position(|known| *known == code);
                known.map_or(ENDINGS - 1, |position| position + 1)
            }
        };
        let bucket = BOUNDS.iter().position(|bound| took <= *bound);
        let bucket = ENDINGS + bucket.unwrap_or(BOUNDS.len());
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let first = 1 + command * WORDS_OF_COMMAND;
        for (offset, more) in [(ending, 1), (bucket, 1), (WORDS_OF_COMMAND - 1, micros)] {
            if let Some(word) = self.words.get_mut(first + offset) {
                *word = word.saturating_add(more);
            }
        }
    }

    fn of_command(&self, command: Command) -> &[u64] {
        let position = COMMANDS.iter().position(|known| *known == command);
        let first = position.map_or(WORDS, |position| 1 + position * WORDS_OF_COMMAND);
        self.words
            .get(first..first + WORDS_OF_COMMAND)
            .unwrap_or_default()
    }

    /// How often calls of a command ended in each way; ways that did not occur are left out, but
    /// for success.
    #[must_use]
    pub fn endings(&self, command: Command) -> Vec<(Ending, u64)> {
        let endings = std::iter::once(Ending::Success)
            .chain(CODES.map(Ending::Failure))
            .chain(std::iter::once(Ending::OtherFailure));
        let counted = endings.zip(self.of_command(command).iter().copied());
        counted
            .filter(|(ending, count)| *ending == Ending::Success || *count > 0)
            .collect()
    }

    /// How long calls of a command took.
    #[must_use]
    pub fn durations(&self, command: Command) -> Durations {
        let words = self.of_command(command);
        let mut buckets = [0; BOUNDS.len() + 1];
        for (bucket, word) in buckets.iter_mut().zip(words.iter().skip(ENDINGS)) {
            *bucket = *word;
        }
        Durations {
            buckets,
            sum: Duration::from_micros(words.last().copied().unwrap_or(0)),
        }
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
        count(&file, Command::Add, Some(Code::Other(4711)), ms(1));
        count(&file, Command::Del, None, ms(30));
        count(&file, Command::Version, None, ms(30));
        let calls = Calls::read(&file).unwrap().unwrap();
        assert_eq!(
            calls.endings(Command::Add),
            [
                (Ending::Success, 2),
                (Ending::Failure(Code::Exhausted), 1),
                (Ending::OtherFailure, 1)
            ]
        );
        let durations = calls.durations(Command::Add);
        assert_eq!(durations.buckets, [1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(durations.sum, ms(60_018));
        assert_eq!(calls.endings(Command::Del), [(Ending::Success, 1)]);
        assert_eq!(calls.endings(Command::Gc), [(Ending::Success, 0)]);
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
        let [(_, successes)] = calls.endings(Command::Add)[..] else {
            panic!("{calls:?}");
        };
        // One that did not get the lock is not counted; none is counted twice or lost to another.
        assert!(
            successes <= counted as u64 && successes > 50,
            "{successes} of {counted}"
        );
    }

    #[test]
    fn what_is_no_file_of_this_version_is_started_anew() {
        let place = tempfile::tempdir().unwrap();
        let file = file_in(place.path(), "rdma-netdev");
        for text in [vec![0; BYTES], b"short".to_vec(), vec![7; 2 * BYTES]] {
            fs::write(&file, text).unwrap();
            assert_eq!(Calls::read(&file).unwrap(), None);
            count(&file, Command::Add, None, Duration::ZERO);
            let calls = Calls::read(&file).unwrap().unwrap();
            assert_eq!(calls.endings(Command::Add), [(Ending::Success, 1)]);
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
        assert_eq!(calls.endings(Command::Add), [(Ending::Success, 1)]);
    }
}
