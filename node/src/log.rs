//! The log of the CNI programs: what an administrator should know and the answer to the runtime has
//! no place for.
//!
//! ```text
//! 2026-03-01T12:00:00.123Z warn rdma-netdev[4711] ADD rail0 net1 of container c1: text
//! ```
//!
//! One line for each event, to the policy's file or to stderr, which runtimes show for failed calls.
//! Never on stdout, and never a reason to fail: who cannot log goes on. Names, variables and what
//! other programs say stand in it escaped, so that none of them can forge a line, command a terminal
//! or fill the disk.

use crate::policy::{self, LogLevel};
use cni_wire::text::{bounded, printable};
use cni_wire::{Code, Command, Error, Request};
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

/// The most bytes of a subject.
const MAX_SUBJECT_BYTES: usize = 512;
/// The most bytes of a text of level debug.
const MAX_DEBUG_BYTES: usize = 8 << 10;
/// The most bytes of a text of any other level: it repeats what a network or an environment says.
const MAX_TEXT_BYTES: usize = 2 << 10;
/// The most bytes of what a failed call ended with.
const MAX_FAILURE_BYTES: usize = 1 << 10;
/// The most bytes of all lines but those of level debug: a call may have a warning for each of
/// thousands of addresses.
const MAX_LOG_BYTES: usize = 32 << 10;

/// Where the events of one program go, and what they are about.
#[derive(Debug, Clone)]
pub struct Log {
    level: LogLevel,
    target: Arc<Target>,
    program: &'static str,
    subject: String,
}

/// Opened by the first event: most calls have none.
#[derive(Debug)]
struct Target {
    path: Option<PathBuf>,
    file: OnceLock<Option<File>>,
    /// Of [`MAX_LOG_BYTES`].
    bytes_left: AtomicUsize,
}

/// What a call is about: command, network, interface and container.
#[must_use]
pub fn subject(request: &Request) -> String {
    let (command, network) = (request.command().as_str(), &request.config.name);
    match &request.env.attachment {
        Some(id) => format!("{command} {network} {id}"),
        None => format!("{command} {network}"),
    }
}

impl Log {
    /// As the policy says. `program` and `subject` stand in each line.
    #[must_use]
    pub fn new(policy: &policy::Log, program: &'static str, subject: &str) -> Self {
        let target = Target {
            path: policy.file.clone(),
            file: OnceLock::new(),
            bytes_left: AtomicUsize::new(MAX_LOG_BYTES),
        };
        Self {
            level: policy.level,
            target: Arc::new(target),
            program,
            subject: bounded(&printable(subject), MAX_SUBJECT_BYTES),
        }
    }

    /// The same log, about something else.
    #[must_use]
    pub fn about(&self, subject: &str) -> Self {
        Self {
            subject: bounded(&printable(subject), MAX_SUBJECT_BYTES),
            ..self.clone()
        }
    }

    /// Whether events of a level are written.
    #[must_use]
    pub fn writes(&self, level: LogLevel) -> bool {
        level <= self.level
    }

    /// A call that did not do what it was to do.
    pub fn error(&self, text: impl Display) {
        self.write(LogLevel::Error, "error", &text);
    }

    /// The error that a call of the runtime ends with, so that an operator finds it on the node. As
    /// a warning where the runtime tries again (code 11), and for STATUS, which it asks every few
    /// seconds.
    pub fn failure(&self, command: Command, error: &Error) {
        // It contains text of a network's configuration.
        let said = bounded(&error.to_string(), MAX_FAILURE_BYTES);
        let text = format_args!("failed with code {}: {said}", error.code.0);
        match (command, error.code) {
            (Command::Status, _) | (_, Code::TryAgain) => self.warn(text),
            _ => self.error(text),
        }
    }

    /// What an administrator should check.
    pub fn warn(&self, text: impl Display) {
        self.write(LogLevel::Warn, "warn", &text);
    }

    pub fn info(&self, text: impl Display) {
        self.write(LogLevel::Info, "info", &text);
    }

    /// A step on the way.
    pub fn debug(&self, text: impl Display) {
        self.write(LogLevel::Debug, "debug", &text);
    }

    fn write(&self, level: LogLevel, word: &str, text: &dyn Display) {
        if !self.writes(level) {
            return;
        }
        let mut line = self.line(level, word, text);
        if level != LogLevel::Debug {
            let bytes = &self.target.bytes_left;
            let left = bytes.load(Ordering::Relaxed);
            bytes.store(left.saturating_sub(line.len()), Ordering::Relaxed);
            if left == 0 {
                return;
            }
            if left < line.len() {
                line = self.line(level, word, &"the rest of this call is not logged");
            }
        }
        let file = self.target.file.get_or_init(|| {
            let path = self.target.path.as_deref()?;
            open(path)
                .inspect_err(|why| {
                    let text = format!("log.file {} is not written: {why}", path.display());
                    let _ = io::stderr()
                        .lock()
                        .write_all(&self.line(level, "warn", &text));
                })
                .ok()
        });
        // A line of the log that could not be written cannot be reported anywhere.
        let _ = match file {
            Some(file) => (&*file).write_all(&line),
            None => io::stderr().lock().write_all(&line),
        };
    }

    /// One buffer for one write: lines of other processes do not come in between.
    fn line(&self, level: LogLevel, word: &str, text: &dyn Display) -> Vec<u8> {
        let limit = match level {
            LogLevel::Debug => MAX_DEBUG_BYTES,
            _ => MAX_TEXT_BYTES,
        };
        let text = bounded(&printable(&text.to_string()), limit);
        format!(
            "{:.3} {word} {}[{}] {}: {text}\n",
            jiff::Timestamp::now(),
            self.program,
            std::process::id(),
            self.subject
        )
        .into_bytes()
    }
}

fn open(path: &Path) -> Result<File, String> {
    // A FIFO in the file's place must not stop the call, and a link must not lead elsewhere.
    let flags = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .custom_flags(flags.bits())
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(code) if code == nix::errno::Errno::ELOOP as i32 => "it is a link".to_owned(),
            _ => error.to_string(),
        })?;
    match file.metadata() {
        Ok(meta) if meta.is_file() => Ok(file),
        Ok(_) => Err("it is not a regular file".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(file: &Path, level: LogLevel) -> Log {
        let policy = policy::Log {
            file: Some(file.to_owned()),
            level,
        };
        Log::new(&policy, "program", "ADD net1\n of \u{1b}c1")
    }

    #[test]
    fn an_event_is_one_line_that_nothing_in_it_can_break() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = log(&path, LogLevel::Info);
        log.debug("not written");
        assert!(!path.exists(), "opened for nothing");
        log.warn("a\nb\r\u{9b}31m");
        log.about("DEL").info("x".repeat(1 << 20));
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        let (time, rest) = lines[0].split_once(' ').unwrap();
        let millis: jiff::Timestamp = time.parse().unwrap();
        assert!(
            time.len() == "2026-03-01T12:00:00.123Z".len(),
            "{time} {millis}"
        );
        let expected = format!(
            "warn program[{}] ADD net1\\n of \\u{{1b}}c1: a\\nb\\r\\u{{9b}}31m",
            std::process::id()
        );
        assert_eq!(rest, expected);
        assert!(lines[1].contains(" info ") && lines[1].contains("] DEL: xxx"));
        assert!(lines[1].len() < 3 << 10 && lines[1].ends_with("bytes cut)"));
    }

    #[test]
    fn one_call_does_not_fill_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = log(&path, LogLevel::Debug);
        for number in 0..10_000 {
            log.about("ADD").warn(number);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() < MAX_LOG_BYTES + 200, "{}", text.len());
        assert!(
            text.ends_with(": the rest of this call is not logged\n"),
            "{text}"
        );
        log.debug("a step");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with(": a step\n"), "{text}");
    }

    #[test]
    fn a_file_that_is_none_is_not_written_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        for path in [
            &fifo,
            &link,
            &dir.path().to_owned(),
            &dir.path().join("no/file"),
        ] {
            log(path, LogLevel::Warn).warn("to stderr");
            assert!(open(path).is_err(), "{}", path.display());
        }
        assert!(!elsewhere.exists(), "a link was followed");
    }
}
