//! Requests to the API server and to etcd's JSON gateway, by `curl`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The longest a single answer may take.
const ANSWER_TIMEOUT_SECONDS: &str = "30";
/// How long a server may refuse requests because it is not ready for them.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);
const BUSY_INTERVAL: Duration = Duration::from_millis(200);

/// Whom requests go to, and as whom.
#[derive(Debug, Clone)]
pub struct Client {
    url: String,
    authority: PathBuf,
    /// Path of certificate and key without `.crt` and `.key`.
    identity: Option<PathBuf>,
}

/// What came back.
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// The object, the `Status` of a refusal, or a string where it was no JSON.
    pub body: Value,
}

/// How a PATCH is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// RFC 7396.
    Merge,
    /// Server-side apply.
    Apply,
}

impl Response {
    /// The object.
    ///
    /// # Errors
    /// The server refused; the message has its reason.
    pub fn expect_success(self) -> Result<Value> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        bail!("{} {}: {}", self.status, self.reason(), self.message())
    }

    /// `reason` of a refusal: `AlreadyExists`, `Conflict`, `Expired`, …; empty otherwise.
    fn reason(&self) -> &str {
        self.body["reason"].as_str().unwrap_or_default()
    }

    fn message(&self) -> String {
        match &self.body["message"] {
            Value::String(message) => message.clone(),
            _ => self.body.to_string(),
        }
    }
}

impl Client {
    pub(super) fn new(url: &str, authority: &Path, identity: Option<&Path>) -> Self {
        Self {
            url: url.to_owned(),
            authority: authority.to_owned(),
            identity: identity.map(Path::to_owned),
        }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Reads an object or a list.
    ///
    /// # Errors
    /// There was no answer. A refusal is an answer.
    pub fn get(&self, path: &str) -> Result<Response> {
        self.request("GET", path, None)
    }

    /// Creates an object in a collection.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn post(&self, path: &str, body: &Value) -> Result<Response> {
        self.request("POST", path, Some(("application/json", body)))
    }

    /// Changes part of an object.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn patch(&self, path: &str, patch: Patch, body: &Value) -> Result<Response> {
        let kind = match patch {
            Patch::Merge => "application/merge-patch+json",
            // JSON is YAML.
            Patch::Apply => "application/apply-patch+yaml",
        };
        self.request("PATCH", path, Some((kind, body)))
    }

    /// Deletes an object.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn delete(&self, path: &str) -> Result<Response> {
        self.request("DELETE", path, None)
    }

    fn curl(&self, method: &str, path: &str) -> Command {
        let mut curl = Command::new("curl");
        // To curl by its own name the server answers with JSON of several lines.
        curl.args(["--disable", "--silent", "--show-error", "--noproxy", "*"])
            .args(["--user-agent", "e2e"])
            .args(["--globoff", "--connect-timeout", ANSWER_TIMEOUT_SECONDS])
            .args(["--request", method])
            .arg(format!("{}{path}", self.url));
        if self.url.starts_with("https") {
            curl.arg("--cacert").arg(&self.authority);
        }
        if let Some(identity) = &self.identity {
            curl.arg("--cert").arg(identity.with_extension("crt"));
            curl.arg("--key").arg(identity.with_extension("key"));
        }
        curl
    }

    /// A request, which a server that is not ready for it has refused unread (429) is made again, as
    /// every client of Kubernetes does.
    fn request(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Result<Response> {
        let started = Instant::now();
        loop {
            let response = self.request_once(method, path, body)?;
            if response.status != 429 || started.elapsed() > BUSY_TIMEOUT {
                return Ok(response);
            }
            thread::sleep(BUSY_INTERVAL);
        }
    }

    fn request_once(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Response> {
        let mut curl = self.curl(method, path);
        curl.args(["--max-time", ANSWER_TIMEOUT_SECONDS])
            .args(["--write-out", "\n%{http_code}"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some((kind, _)) = body {
            curl.args(["--header", &format!("Content-Type: {kind}")])
                .args(["--data-binary", "@-"]);
        }
        let mut child = curl.spawn().context("start curl")?;
        // curl reads all of its input before it says anything.
        let mut stdin = child.stdin.take().context("curl's input")?;
        if let Some((_, body)) = body {
            stdin.write_all(body.to_string().as_bytes())?;
        }
        drop(stdin);
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!(
                "{method} {}{path}: {}",
                self.url,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let text = String::from_utf8(output.stdout)?;
        let (body, status) = text.rsplit_once('\n').context("curl names no status")?;
        Ok(Response {
            status: status.parse()?,
            body: serde_json::from_str(body).unwrap_or_else(|_| Value::from(body)),
        })
    }
}
