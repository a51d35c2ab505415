//! `rdmactl report`: one archive of what support needs. Each part is what a command printed: answers of this
//! program, our objects of the cluster, logs of our containers. `contents.json` says what was asked, and
//! what failed and why. Nothing is asked that has another program's text.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use cni_wire::text::printable;
use flate2::{Compression, write::GzEncoder};
use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use nix::fcntl::OFlag;
use node::document::versioned;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::global::{Global, within_limit};
use crate::kubectl::{last_line, output_of};
use crate::output::{Ended, Exit, block_on, complain};

/// Writes one archive of what support needs: versions, configurations, answers of the other commands, logs
/// of our containers.
#[derive(Debug, Args)]
#[command(
    after_help = "As kubectl rdma report it has all nodes, and of the cluster our DaemonSet and its pods, \
    our ConfigMap, AddressSubnets, and our plugins' keys of networks. It reads no \
    Secrets, no pods of users and no values of environment variables.\n\
    Exit status: 0 the archive has everything, 1 it lacks something or cannot be written, 2 wrong usage."
)]
pub(crate) struct Report {
    /// The archive, a new file [default: rdma-report-DATE-TIME.tar.gz]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
}

/// What a node is asked. The first shows whether it answers at all.
const QUESTIONS: &str = "status pods discover topology preflight addresses";
/// Fields that are kept of each object.
const FIELDS: &str = "apiVersion kind metadata.name metadata.namespace metadata.uid metadata.labels \
    metadata.generation metadata.creationTimestamp metadata.deletionTimestamp";
/// What is read of a log.
pub(crate) const LOG_BYTES: u64 = 10 << 20;
const ADVICE: &str = "Read it before you send it on: it names nodes, pods, addresses and images.";

/// A command whose output is a file of the archive.
pub(crate) struct ReportPart {
    pub file: String,
    pub argv: Vec<String>,
    pub form: Form,
}

/// What a command prints.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Text,
    /// A JSON document of one of our programs, or a version.
    Document,
    /// Objects of the cluster: what is kept of each that is meant.
    Objects(fn(&Value) -> Option<Value>),
}

/// The report as it is written.
pub(crate) struct Collection {
    to: PathBuf,
    tar: tar::Builder<GzEncoder<File>>,
    created: Timestamp,
    contents: Vec<Value>,
    /// How long a command may take.
    pub timeout: Duration,
    /// Commands at one time.
    pub parallel: usize,
}

impl Report {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let mut collection = self.open()?;
        let policy = global.policy().unwrap_or_default();
        let name = policy.node_name(global.node_name().as_deref());
        let program = std::env::args().next().unwrap_or_default();
        let [root, file] = [&global.host_root, &global.policy].map(|path| path.display());
        let mut before = vec![
            program,
            format!("--host-root={root}"),
            format!("--policy={file}"),
        ];
        before.extend(global.node_name().map(|name| format!("--node-name={name}")));
        block_on(collection.gather(questions(&name, &before)))??;
        for (file, from) in [
            ("policy.json", Some(&global.policy)),
            ("cni.log", policy.log.file.as_ref()),
        ] {
            let Some(from) = from.filter(|from| from.symlink_metadata().is_ok()).cloned() else {
                continue;
            };
            let (file, place) = (path(&["nodes", &name, file]), from.display().to_string());
            match within_limit(&place, move || tail(&from)).flatten() {
                Ok(text) => collection.add(&file, &place, &text, None)?,
                Err(error) => collection.lack(&file, &place, &format!("{error:#}")),
            }
        }
        collection.finish(global)
    }

    /// Creates the file.
    pub(crate) fn open(&self) -> Result<Collection> {
        let created = Timestamp::now();
        let name = format!("{}.tar.gz", top(created));
        let to = self.file.clone().unwrap_or_else(|| name.clone().into());
        ensure!(
            to != Path::new("-"),
            "the archive is a file: name one, or none for {name}"
        );
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let opened = options.open(&to);
        let opened = opened.with_context(|| format!("create the new file {}", to.display()))?;
        Ok(Collection {
            to,
            tar: tar::Builder::new(GzEncoder::new(opened, Compression::default())),
            created,
            contents: Vec::new(),
            timeout: Duration::from_secs(60),
            parallel: 4,
        })
    }
}

/// The end of a regular file. Others may write to a log's directory: a link in it is not followed.
fn tail(path: &Path) -> Result<String> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut options = File::options();
    let mut file = options.read(true).custom_flags(flags.bits()).open(path)?;
    let meta = file.metadata()?;
    ensure!(meta.is_file(), "it is not a regular file");
    let start = meta.len().saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn top(created: Timestamp) -> String {
    format!("rdma-report-{}", created.strftime("%Y%m%d-%H%M%S"))
}

/// What a node is asked, behind the words that lead to its program.
pub(crate) fn questions(node: &str, before: &[String]) -> Vec<ReportPart> {
    let part = |question: &str| {
        let words = [question, "--json"].map(str::to_owned);
        ReportPart {
            file: path(&["nodes", node, &format!("{question}.json")]),
            argv: before.iter().cloned().chain(words).collect(),
            form: Form::Document,
        }
    };
    QUESTIONS.split(' ').map(part).collect()
}

/// A path in the archive. What others named (nodes, pods, containers) is one component of it, never a path.
pub(crate) fn path(components: &[&str]) -> String {
    let safe = |name: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let plain = |c: char| if plain(c) { c } else { '_' };
        let name: String = name.chars().take(200).map(plain).collect();
        match name.is_empty() || name.starts_with('.') {
            true => format!("_{name}"),
            false => name,
        }
    };
    components.iter().map(safe).collect::<Vec<_>>().join("/")
}

/// The fields of an object that every part keeps, and those that `paths` name, such as
/// `spec.containers.image`. A path goes through lists, and ends at a value that is kept whole.
pub(crate) fn keep(object: &Value, paths: &str) -> Value {
    let paths = FIELDS.split_whitespace().chain(paths.split_whitespace());
    fields(object, &paths.collect::<Vec<_>>())
}

fn fields(value: &Value, paths: &[&str]) -> Value {
    let field = |(key, value): (&String, &Value)| {
        let below = paths
            .iter()
            .filter_map(|path| path.strip_prefix(key.as_str()));
        let below: Vec<&str> = below.collect();
        if below.contains(&"") {
            return Some((key.clone(), value.clone()));
        }
        let below = below.iter().filter_map(|path| path.strip_prefix('.'));
        let below: Vec<&str> = below.collect();
        let is_named = !below.is_empty() && (value.is_object() || value.is_array());
        is_named.then(|| (key.clone(), fields(value, &below)))
    };
    match value {
        Value::Array(items) => items.iter().map(|item| fields(item, paths)).collect(),
        Value::Object(all) => Value::Object(all.iter().filter_map(field).collect()),
        _ => Value::Null,
    }
}

/// What is kept of a command's output. A command that found something ends with 1 and prints its results.
fn read(form: Form, output: &Output) -> Result<Value> {
    if !output.status.success() && output.stdout.is_empty() {
        let why = last_line(output);
        // The cluster does not have this kind, so it has no objects of it.
        if matches!(form, Form::Objects(..)) && why.contains("doesn't have a resource type") {
            return Ok(json!({"items": []}));
        }
        bail!(why);
    }
    if matches!(form, Form::Text) {
        return Ok(String::from_utf8_lossy(&output.stdout).into());
    }
    let document: Value =
        serde_json::from_slice(&output.stdout).context("its answer is not a JSON document")?;
    let Form::Objects(kept) = form else {
        return Ok(document);
    };
    let items = document.get("items").and_then(Value::as_array);
    let items: Vec<Value> = items.into_iter().flatten().filter_map(kept).collect();
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": items}))
}

impl Collection {
    /// Runs the commands, and adds what they print as it comes. Returns the files that were read, with their
    /// objects.
    ///
    /// # Errors
    /// The archive cannot be written. A command that fails is a part that is missing.
    pub(crate) async fn gather(&mut self, parts: Vec<ReportPart>) -> Result<Vec<(String, Value)>> {
        let timeout = self.timeout;
        let calls = stream::iter(parts).map(|part| async move {
            let mut words = part.argv.iter();
            let mut command = Command::new(words.next().map_or("", String::as_str));
            let output = output_of(command.args(words), b"", timeout).await;
            (part, output)
        });
        let mut calls = pin!(calls.buffer_unordered(self.parallel));
        let mut documents = Vec::new();
        while let Some((ReportPart { file, argv, form }, output)) = calls.next().await {
            let asked = argv.join(" ");
            match output.and_then(|output| Ok((read(form, &output)?, output))) {
                Ok((document, output)) => {
                    let text = document.as_str().map(str::to_owned);
                    let text = text.unwrap_or_else(|| format!("{document:#}\n"));
                    let failed = !output.status.success();
                    let note = failed.then(|| last_line(&output));
                    self.add(&file, &asked, &text, note)?;
                    let is_kept = matches!(form, Form::Objects(..));
                    documents.push((file, if is_kept { document } else { Value::Null }));
                }
                Err(error) => self.lack(&file, &asked, &format!("{error:#}")),
            }
        }
        Ok(documents)
    }

    fn add(&mut self, file: &str, asked: &str, text: &str, note: Option<String>) -> Result<()> {
        self.contents
            .push(json!({"file": file, "asked": asked, "note": note}));
        self.write(file, text)
    }

    /// Notes a part that is missing.
    pub(crate) fn lack(&mut self, file: &str, asked: &str, error: &str) {
        complain(&format!("{file} is missing: {error}"));
        self.contents
            .push(json!({"file": file, "asked": asked, "error": error}));
    }

    fn write(&mut self, file: &str, text: &str) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(self.created.as_second().unsigned_abs());
        let path = format!("{}/{file}", top(self.created));
        let written = self.tar.append_data(&mut header, path, text.as_bytes());
        written.with_context(|| format!("write {}", self.to.display()))
    }

    /// Writes the contents, and says what the archive has.
    ///
    /// # Errors
    /// The archive cannot be written.
    pub(crate) fn finish(mut self, global: &Global) -> Ended {
        let is_missing = |part: &&Value| part.get("error").is_some();
        let missing = self.contents.iter().filter(is_missing).count();
        let parts = self.contents.len() - missing;
        let contents = json!({
            "programVersion": env!("CARGO_PKG_VERSION"), "created": self.created,
            "missing": missing, "parts": std::mem::take(&mut self.contents),
        });
        self.write("contents.json", &format!("{:#}\n", versioned(contents)))?;
        let file = printable(&self.to.display().to_string());
        let gzip = self.tar.into_inner();
        let ended = gzip.and_then(|gzip| gzip.finish()?.flush());
        ended.with_context(|| format!("write {file}"))?;
        let bytes = self.to.metadata().map_or(0, |metadata| metadata.len());
        let document = json!({"file": file, "bytes": bytes, "parts": parts, "missing": missing});
        global.say(document, || {
            let size = bytes.div_ceil(1024);
            let counts = format!("{parts} parts, {missing} missing; contents.json lists them");
            format!("{file}: {size} KiB, {counts}.\n{ADVICE}\n")
        });
        Ok(Exit::good_if(missing == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_fields_are_kept() {
        let pod = json!({
            "metadata": {"name": "p", "managedFields": [1], "annotations": {"vault/token": "planted"}},
            "spec": {"containers": [{"name": "c", "env": [
                {"name": "A", "value": "planted"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]},
            "status": "planted",
        });
        let paths = "spec.containers.name spec.containers.env.name spec.containers.env.valueFrom status.phase";
        let expected = json!({
            "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "env": [
                {"name": "A"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]},
        });
        assert_eq!(keep(&pod, paths), expected);
    }

    #[test]
    fn a_name_is_never_a_path() {
        for (name, expected) in [
            ("gpu-1.example", "nodes/gpu-1.example/status.json"),
            ("..", "nodes/_../status.json"),
            ("../../etc", "nodes/_.._.._etc/status.json"),
            ("/etc", "nodes/_etc/status.json"),
            ("", "nodes/_/status.json"),
            ("a\n\u{1b}\0ä", "nodes/a____/status.json"),
        ] {
            assert_eq!(path(&["nodes", name, "status.json"]), expected);
        }
        assert_eq!(path(&[&"x".repeat(999)]).len(), 200);
    }
}
