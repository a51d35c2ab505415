//! What an administrator should know and the runtime's answer has no place for.
//!
//! One line for each event, to the policy's file or to stderr, which runtimes show for failed
//! calls. Never on stdout, and never a reason to fail: who cannot log goes on.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    time::{SystemTime, UNIX_EPOCH},
};

use ipam::policy::{Log as Policy, LogLevel};

/// Where events go.
#[derive(Debug)]
pub struct Log {
    level: LogLevel,
    file: Option<File>,
    subject: String,
}

impl Log {
    /// As the policy says; `subject` stands at the head of each line.
    pub fn open(policy: &Policy, subject: String) -> Self {
        let file = policy.file.as_ref().and_then(|path| {
            OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o640)
                .custom_flags(libc::O_NOFOLLOW)
                .open(path)
                .ok()
        });
        Log {
            level: policy.level,
            file,
            subject,
        }
    }

    /// What an administrator should look at.
    pub fn warn(&self, text: impl fmt::Display) {
        self.write(LogLevel::Warn, "warn", &text);
    }

    /// A change of state.
    pub fn info(&self, text: impl fmt::Display) {
        self.write(LogLevel::Info, "info", &text);
    }

    /// Why, for whoever searches for a fault.
    pub fn debug(&self, text: impl fmt::Display) {
        self.write(LogLevel::Debug, "debug", &text);
    }

    fn write(&self, level: LogLevel, word: &str, text: &dyn fmt::Display) {
        if level > self.level {
            return;
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // One write for the line: lines of other processes do not come in between.
        let line = format!(
            "{}.{:03} {word} rdma-netdev[{}] {}: {text}\n",
            now.as_secs(),
            now.subsec_millis(),
            std::process::id(),
            self.subject
        );
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => io::stderr().lock().write_all(line.as_bytes()),
        };
    }
}
