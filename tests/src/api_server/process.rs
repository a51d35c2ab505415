//! One of the two programs, with its log.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::{READY_INTERVAL, READY_TIMEOUT};

/// A running program; dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Its log is `NAME.log` in the directory, continued at each start.
    pub(super) fn spawn(
        mut command: Command,
        directory: &Path,
        name: &'static str,
    ) -> Result<Self> {
        let log = directory.join(name).with_extension("log");
        let file = OpenOptions::new().create(true).append(true).open(&log)?;
        let child = command
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", command.get_program().display()))?;
        Ok(Self { name, child, log })
    }

    /// Asks until it is so. Gives up when the program ended or the time is over; an error of the
    /// question counts as not yet.
    pub(super) fn wait_until_ready(
        &mut self,
        mut is_ready: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "{} ended with {status}; it said: {}",
                    self.name,
                    self.last_words()
                );
            }
            if is_ready().unwrap_or(false) {
                return Ok(());
            }
            if Instant::now() >= end {
                bail!(
                    "{} is not ready after {READY_TIMEOUT:?}; it said: {}",
                    self.name,
                    self.last_words()
                );
            }
            std::thread::sleep(READY_INTERVAL);
        }
    }

    pub(super) fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill")?;
        self.child.wait()?;
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines
            .get(lines.len().saturating_sub(8)..)
            .unwrap_or_default()
            .join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
