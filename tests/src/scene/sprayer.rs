//! A process of a pod with a user namespace that forges netlink messages.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bin_under_test::standin;

/// The program `netlink-sprayer` in new user and network namespaces; killed when dropped.
#[derive(Debug)]
pub struct Sprayer(Child);

impl Sprayer {
    /// Starts it with its forgeries, and waits until it sends.
    ///
    /// # Errors
    /// It cannot be started, or ended.
    pub(super) fn start(forgeries: &[&str]) -> Result<Self> {
        let child = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net"])
            .arg(standin("netlink-sprayer")?)
            .args(forgeries)
            .stdout(Stdio::piped())
            .spawn()
            .context("start unshare")?;
        let mut sprayer = Self(child);
        let stdout = sprayer.0.stdout.take().context("no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "netlink-sprayer says {line:?}");
        Ok(sprayer)
    }

    /// Does something to the pod while nothing is sent: `ip` believes forged answers.
    ///
    /// # Errors
    /// It has ended, or `calmly` fails.
    pub fn pausing<T>(&self, calmly: impl FnOnce() -> Result<T>) -> Result<T> {
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        kill(pid, Signal::SIGSTOP)?;
        let stat = format!("/proc/{pid}/stat");
        while !fs::read_to_string(&stat)?.contains(") T ") {
            thread::sleep(Duration::from_micros(200));
        }
        let done = calmly();
        kill(pid, Signal::SIGCONT)?;
        done
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sprayer {
    fn drop(&mut self) {
        // One that has ended needs no signal.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
