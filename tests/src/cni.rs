//! Calling a CNI plugin as a runtime does: environment, configuration on
//! stdin, one JSON document back.
//!
//! Deliberately apart from `cni-wire`: a mistake in the product's reading of
//! the protocol must not be repeated here.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::netns::Netns;

/// One attachment's environment; [`Call::run`] may be used for every command of its life.
#[derive(Debug, Clone)]
pub struct Call {
    /// The plugin's executable.
    pub plugin: PathBuf,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`; empty as a runtime gives it when the sandbox is gone.
    pub netns: PathBuf,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_PATH`.
    pub path: OsString,
    /// `CNI_ARGS`; left out of the environment if empty.
    pub args: String,
    /// Name of the namespace to start the plugin in, which plays the host; the test's own if none.
    pub host: Option<String>,
    /// Further environment of the plugin.
    pub envs: Vec<(OsString, OsString)>,
}

/// What a plugin answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Call {
    /// An attachment of `ifname` in the namespace file `netns`; the plugin's
    /// own directory is its `CNI_PATH`.
    #[must_use]
    pub fn new(plugin: &Path, container_id: &str, netns: &Path, ifname: &str) -> Self {
        Self {
            plugin: plugin.to_path_buf(),
            container_id: container_id.to_owned(),
            netns: netns.to_path_buf(),
            ifname: ifname.to_owned(),
            path: plugin
                .parent()
                .map(|path| path.as_os_str().to_owned())
                .unwrap_or_default(),
            args: String::new(),
            host: None,
            envs: Vec::new(),
        }
    }

    /// The same, started inside `host`.
    #[must_use]
    pub fn on_host(mut self, host: &Netns) -> Self {
        self.host = Some(host.name().to_owned());
        self
    }

    /// The same, with one more environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.envs.push((name.into(), value.into()));
        self
    }

    /// The process to start for `command` (`ADD`, `DEL`, ...), with nothing of
    /// the caller's environment but `PATH`.
    #[must_use]
    pub fn command(&self, command: &str) -> Command {
        let mut process = match &self.host {
            None => Command::new(&self.plugin),
            Some(host) => {
                let mut process = Command::new("ip");
                process.args(["netns", "exec", host]).arg(&self.plugin);
                process
            }
        };
        process.env_clear();
        if let Some(path) = std::env::var_os("PATH") {
            process.env("PATH", path);
        }
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &self.container_id)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_PATH", &self.path)
            .envs(self.envs.iter().map(|(name, value)| (name, value)));
        if !self.args.is_empty() {
            process.env("CNI_ARGS", &self.args);
        }
        process
    }

    /// Runs the plugin with `stdin` as its configuration.
    ///
    /// # Errors
    /// It could not be started or talked to; a refusal by the plugin is an [`Answer`].
    pub fn run(&self, command: &str, stdin: &[u8]) -> Result<Answer> {
        answer(&mut self.command(command), stdin)
    }
}

/// Runs `process` with `stdin` and collects what it says.
///
/// # Errors
/// It could not be started or waited for.
pub fn answer(process: &mut Command, stdin: &[u8]) -> Result<Answer> {
    let mut child = process
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", process.get_program().display()))?;
    if let Some(mut input) = child.stdin.take() {
        // A plugin that answers without reading (VERSION) has closed the pipe already.
        let _ = input.write_all(stdin);
    }
    let output = child.wait_with_output().context("wait for the plugin")?;
    Ok(Answer {
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

impl Answer {
    /// The result of a successful call; null if it printed nothing, as DEL does.
    ///
    /// # Errors
    /// The plugin failed (its error is the message), or printed more or other than one document.
    pub fn success(&self) -> Result<Value> {
        if !self.status.success() {
            bail!(
                "plugin: {}: {}{}",
                self.status,
                self.stdout.trim(),
                self.stderr.trim()
            );
        }
        self.document()
    }

    /// Code and message of a refused call: error object on stdout, exit status not zero.
    ///
    /// # Errors
    /// The plugin succeeded, or its error object breaks the spec.
    pub fn refusal(&self) -> Result<(u64, String)> {
        if self.status.success() {
            bail!("plugin succeeded: {}", self.stdout.trim());
        }
        let error = self.document()?;
        let code = error.get("code").and_then(Value::as_u64);
        let message = error.get("msg").and_then(Value::as_str);
        match (code, message, error.get("cniVersion")) {
            (Some(code), Some(message), Some(_)) => Ok((code, message.to_owned())),
            _ => bail!(
                "no CNI error object: {error} (stderr: {})",
                self.stderr.trim()
            ),
        }
    }

    fn document(&self) -> Result<Value> {
        if self.stdout.trim().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("plugin printed no JSON document: {:?}", self.stdout))
    }
}
