//! Throw-away network namespaces, made and entered with `ip` as an administrator would.
//!
//! `ip netns exec` also mounts a `/sys` of the namespace, so a program started
//! by [`Netns::command`] sees in `/sys/class/net` what it sees over netlink. A
//! namespace can thus play the part of a whole host.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

/// A named network namespace; dropping it deletes it with what is left in it.
#[derive(Debug)]
pub struct Netns {
    name: String,
    path: PathBuf,
    /// The host's root for programs that are started inside.
    root: Option<PathBuf>,
}

impl Netns {
    /// Programs that are started inside find the host's files below `root`.
    pub fn set_root(&mut self, root: PathBuf) {
        self.root = Some(root);
    }

    /// Makes a namespace with a name of its own (`<stem>-<pid>-<n>`) and its loopback up.
    ///
    /// # Errors
    /// `ip` cannot make it: not root, or no namespaces here.
    pub fn new(stem: &str) -> Result<Self> {
        Self::made(stem, |name| vec!["add".to_owned(), name.to_owned()])
    }

    /// Gives the namespace that a process is in such a name.
    ///
    /// # Errors
    /// `ip` cannot name it: no such process.
    pub fn of_process(stem: &str, pid: u32) -> Result<Self> {
        Self::made(stem, |name| {
            vec!["attach".to_owned(), name.to_owned(), pid.to_string()]
        })
    }

    fn made(stem: &str, verb: impl FnOnce(&str) -> Vec<String>) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{stem}-{}-{count}", process::id());
        run(Command::new("ip").arg("netns").args(verb(&name)))?;
        let path = Path::new("/run/netns").join(&name);
        let netns = Self {
            name,
            path,
            root: None,
        };
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// The name, as `ip netns` lists it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace file, as a runtime gives it in `CNI_NETNS`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that will run `program` inside, with a `/sys` of this namespace.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.name])
            .arg(program.as_ref());
        if let Some(root) = &self.root {
            command.env("RDMA_HOST_ROOT", root);
        }
        command
    }

    /// Runs `ip <arguments>` inside (split at white space) and returns what it printed.
    ///
    /// # Errors
    /// `ip` failed; the message has its words.
    pub fn ip(&self, arguments: &str) -> Result<String> {
        run(Command::new("ip")
            .args(["-netns", &self.name])
            .args(arguments.split_whitespace()))
    }

    /// Runs `ip -json <arguments>` inside and returns the list it printed.
    ///
    /// # Errors
    /// `ip` failed, or printed no JSON.
    pub fn ip_json(&self, arguments: &str) -> Result<serde_json::Value> {
        let text = self.ip(&format!("-json -details {arguments}"))?;
        if text.trim().is_empty() {
            return Ok(serde_json::Value::Array(Vec::new()));
        }
        serde_json::from_str(&text).with_context(|| format!("read the output of ip {arguments}"))
    }

    /// Runs `inside` on a thread of its own in the namespace: for sockets.
    ///
    /// # Errors
    /// The namespace cannot be entered, or `inside` fails.
    pub fn enter<T: Send>(&self, inside: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let file = File::open(&self.path)
            .with_context(|| format!("open namespace {}", self.path.display()))?;
        thread::scope(|scope| {
            let inside = scope.spawn(move || {
                setns(file, CloneFlags::CLONE_NEWNET).context("enter the namespace")?;
                inside()
            });
            inside
                .join()
                .unwrap_or_else(|_| bail!("panicked in namespace {}", self.name))
        })
    }

    /// Deletes the namespace before its time, as when a pod dies with its sandbox.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn delete(&self) -> Result<()> {
        run(Command::new("ip").args(["netns", "del", &self.name])).map(drop)
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        if self.path.exists() {
            // Nothing to do about a failure here; the name is unique, so it disturbs no other case.
            let _ = self.delete();
        }
    }
}

/// Runs a command to its end and returns its stdout.
///
/// # Errors
/// It cannot be started, or fails; the message has the command and its stderr.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim(),
            String::from_utf8_lossy(&output.stdout).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
