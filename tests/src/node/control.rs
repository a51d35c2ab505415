//! The socket by which a node is driven: one request and one reply, each a
//! line of JSON, per connection.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::{Node, Output, PodView};
use crate::kubelet::{Node as Resources, Pod};

/// What a node can be asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// The Node object's extended resources.
    Node,
    /// The pods there are.
    Pods,
    /// Run the Pods of a manifest.
    RunPod {
        /// YAML; objects of other kinds in it are passed over.
        manifest: String,
        /// For so long a sandbox that the runtime fails to make is tried again.
        retry_seconds: u64,
    },
    /// Run a command in a container.
    Exec {
        /// `namespace/name`.
        pod: String,
        /// The first unless named.
        container: Option<String>,
        /// Program and arguments.
        command: Vec<String>,
        /// How long it may take.
        seconds: u64,
    },
    /// Delete a pod.
    DeletePod {
        /// `namespace/name`.
        pod: String,
        /// Only for the kubelet: its processes run on.
        force: bool,
    },
    /// Stop a container and start it again.
    RestartContainer {
        /// `namespace/name`.
        pod: String,
        /// The container.
        container: String,
    },
    /// Kill the kubelet and start it again; pods run on.
    RestartKubelet,
}

/// What a node replies.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To `Node`.
    Node(Resources),
    /// To `Pods` and `RunPod`.
    Pods(Vec<PodView>),
    /// To `Exec`.
    Output(Output),
    /// It is done.
    Done,
    /// It failed, and why.
    Failed(String),
}

/// Serves requests for ever, each on a thread of its own.
///
/// # Errors
/// The socket cannot be bound or accepted on.
pub fn serve(node: Node, socket: &Path) -> Result<()> {
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory)?;
    }
    // Left by a node that was killed.
    let _ = std::fs::remove_file(socket);
    let listener =
        UnixListener::bind(socket).with_context(|| format!("bind {}", socket.display()))?;
    let node = Arc::new(node);
    for stream in listener.incoming() {
        let stream = stream.context("accept a request")?;
        let node = Arc::clone(&node);
        thread::spawn(move || {
            if let Err(error) = converse(&node, stream) {
                tracing::warn!(error = format!("{error:#}"), "request not answered");
            }
        });
    }
    Ok(())
}

/// Sends one request and waits for its reply.
///
/// # Errors
/// No server is there, or the request failed.
pub fn ask(socket: &Path, request: &Request) -> Result<Reply> {
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!(
            "no node on {}: is `kubelet-standin serve` running?",
            socket.display()
        )
    })?;
    writeln!(stream, "{}", serde_json::to_string(request)?)?;
    let mut line = String::new();
    BufReader::new(stream)
        .read_line(&mut line)
        .context("read the node's reply")?;
    match serde_json::from_str(&line).context("the node ended without a reply")? {
        Reply::Failed(error) => bail!(error),
        reply => Ok(reply),
    }
}

fn converse(node: &Node, mut stream: UnixStream) -> Result<()> {
    let mut line = String::new();
    BufReader::new(stream.try_clone()?).read_line(&mut line)?;
    let request = serde_json::from_str(&line).context("read the request")?;
    let reply = fulfil(node, request).unwrap_or_else(|error| Reply::Failed(format!("{error:#}")));
    writeln!(stream, "{}", serde_json::to_string(&reply)?)?;
    Ok(())
}

fn fulfil(node: &Node, request: Request) -> Result<Reply> {
    Ok(match request {
        Request::Node => Reply::Node(node.resources()?),
        Request::Pods => Reply::Pods(node.pods()?),
        Request::RunPod {
            manifest,
            retry_seconds,
        } => {
            let pods = Pod::from_manifest(&manifest)?;
            if pods.is_empty() {
                bail!("there is no Pod in the manifest");
            }
            let retry = Duration::from_secs(retry_seconds);
            let run = pods.iter().map(|pod| node.run_pod(pod, retry));
            Reply::Pods(run.collect::<Result<_>>()?)
        }
        Request::Exec {
            pod,
            container,
            command,
            seconds,
        } => {
            let timeout = Duration::from_secs(seconds);
            Reply::Output(node.exec(&pod, container.as_deref(), &command, timeout)?)
        }
        Request::DeletePod { pod, force } => {
            match force {
                true => node.forget_pod(&pod)?,
                false => node.delete_pod(&pod)?,
            }
            Reply::Done
        }
        Request::RestartContainer { pod, container } => {
            node.restart_container(&pod, &container)?;
            Reply::Done
        }
        Request::RestartKubelet => {
            node.restart_kubelet()?;
            Reply::Done
        }
    })
}
