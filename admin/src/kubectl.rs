//! The API's objects, by `kubectl`.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use cni_wire::text::printable;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use crate::global::Kubectl;

/// Resources, as `kubectl get` names them.
pub(crate) const NODES: &str = "nodes";
pub(crate) const RDMA_NODES: &str = "rdmanodes.rdma-netdev.io";
pub(crate) const SUBNETS: &str = "addresssubnets.rdma-netdev.io";
pub(crate) const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// kubectl gives up by itself after this.
const REQUEST_TIMEOUT: &str = "--request-timeout=30s";
/// A list takes several requests.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);
/// A program that prints so much does not end by itself.
const MOST_BYTES: u64 = 128 << 20;

#[derive(Deserialize)]
struct List {
    items: Vec<Value>,
}

impl Kubectl {
    /// Objects, by further words of `kubectl get`.
    ///
    /// # Errors
    /// What kubectl printed, or that it printed something else than a list.
    pub(crate) async fn objects(&self, words: &[&str]) -> anyhow::Result<Vec<Value>> {
        let arguments = [&["get"], words, &["--output=json"]].concat();
        let printed = self.printed(&arguments, b"").await?;
        let list: List = serde_json::from_slice(&printed)
            .with_context(|| format!("read what kubectl printed of {}", words.join(" ")))?;
        Ok(list.items)
    }

    /// `create` or `replace`: each object is written as the API has it now, or not at all.
    ///
    /// # Errors
    /// What kubectl printed.
    pub(crate) async fn write(&self, verb: &str, objects: &[Value]) -> anyhow::Result<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let arguments = [verb, "--filename=-"];
        self.printed(&arguments, list.as_bytes()).await.map(drop)
    }

    /// What kubectl prints.
    ///
    /// # Errors
    /// What it printed instead.
    pub(crate) async fn printed(
        &self,
        arguments: &[&str],
        input: &[u8],
    ) -> anyhow::Result<Vec<u8>> {
        let all = [&[REQUEST_TIMEOUT], arguments].concat();
        let output = self.run(&all, input, CALL_TIMEOUT).await?;
        let words = arguments.iter().take_while(|word| !word.starts_with('-'));
        let words: Vec<&str> = words.take(2).copied().collect();
        let (is_done, words) = (output.status.success(), words.join(" "));
        ensure!(is_done, "kubectl {words}: {}", last_line(&output));
        Ok(output.stdout)
    }

    /// Runs kubectl.
    ///
    /// # Errors
    /// As [`output_of`].
    pub(crate) async fn run(
        &self,
        arguments: &[&str],
        input: &[u8],
        most: Duration,
    ) -> anyhow::Result<Output> {
        let mut command = Command::new(&self.kubectl);
        let command = command.args(self.arguments()).args(arguments);
        output_of(command, input, most).await
    }
}

/// Runs a program; one that ends without reading its input says why by itself.
///
/// # Errors
/// It cannot be started, takes longer, or prints without end.
pub(crate) async fn output_of(
    command: &mut Command,
    input: &[u8],
    most: Duration,
) -> anyhow::Result<Output> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.kill_on_drop(true).spawn();
    let program = command.as_std().get_program().display().to_string();
    let mut child = child.with_context(|| format!("start {program}; is it in the PATH?"))?;
    let stdin = child.stdin.take();
    let write = async {
        if let Some(mut stdin) = stdin {
            let _ = stdin.write_all(input).await;
        }
        Ok(())
    };
    let (stdout, stderr) = (bytes(child.stdout.take()), bytes(child.stderr.take()));
    let both = async {
        let ((), stdout, stderr) = tokio::try_join!(write, stdout, stderr)?;
        let status = child.wait().await?;
        Ok::<_, anyhow::Error>(Output {
            status,
            stdout,
            stderr,
        })
    };
    let ended = tokio::time::timeout(most, both).await;
    let ended = ended.map_err(|_| anyhow!("no answer within {} s", most.as_secs()))?;
    ended.with_context(|| format!("wait for {program}"))
}

async fn bytes(pipe: Option<impl AsyncRead + Unpin>) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(MOST_BYTES).read_to_end(&mut bytes).await?;
    }
    let is_whole = (bytes.len() as u64) < MOST_BYTES;
    ensure!(is_whole, "it printed {} MiB", MOST_BYTES >> 20);
    Ok(bytes)
}

/// The last line that a program printed. Of a command in a pod it is the command's own: kubectl exec
/// adds how it ended.
pub(crate) fn last_line(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].join(&b'\n');
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let last = lines.next_back();
    let last = match last {
        Some(ended) if ended.starts_with("command terminated with exit code") => {
            lines.next_back().or(last)
        }
        _ => last,
    };
    let nothing = || format!("it printed nothing ({})", output.status);
    last.map_or_else(nothing, printable)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn the_last_line_is_that_of_the_command_in_the_pod() {
        let ended = "command terminated with exit code 1";
        let last = |stderr: &str| {
            last_line(&Output {
                status: ExitStatus::from_raw(256),
                stdout: Vec::new(),
                stderr: stderr.into(),
            })
        };
        assert_eq!(last(&format!("a\nit is late\n{ended}\n")), "it is late");
        assert_eq!(last(&format!("{ended}\n")), ended);
    }
}
