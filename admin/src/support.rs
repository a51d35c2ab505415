//! `rdmactl report`: one archive of what support needs. Each part is what a command printed: answers of this
//! program, objects of the cluster, logs. `contents.json` says what was asked, and what failed and why.
//!
//! - [`redact`]: what is kept of objects and texts; no secret is
//! - [`archive`]: the file, and safe names in it

pub(crate) mod archive;
pub(crate) mod redact;

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Args;
use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use node::document::versioned;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::global::{Global, within_limit};
use crate::kubectl::{bounded_output_of, last_line};
use crate::output::{self, Ended, Outcome, block_on, chain, complain};
use archive::{Archive, path};

/// Writes one archive of what support needs: versions, configurations, what status, discover, topology,
/// preflight and the like answer, logs, events. Secrets and values of environment variables are left out.
#[derive(Debug, Args)]
#[command(
    after_help = "As kubectl rdma report it has all nodes and the cluster's objects, and needs the right to read \
    them: without it the archive has the rest. Secrets are not read.\n\
    Exit status: 0 the archive has everything, 1 it lacks something or could not be written, 2 wrong usage."
)]
pub(crate) struct Report {
    /// The archive, "-" for standard output [default: rdma-report-DATE-TIME.tar.gz]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
}

/// What each node is asked. The first shows whether it answers at all.
pub(crate) const QUESTIONS: [&str; 8] = [
    "status",
    "pods",
    "discover",
    "topology",
    "preflight",
    "attachments",
    "addresses",
    "--version",
];

/// What one part may have: of what nodes print, and of what the API has.
const NODE_BYTES: u64 = 16 << 20;
const OBJECT_BYTES: u64 = 64 << 20;
/// What is read of a log, from its end.
pub(crate) const LOG_BYTES: u64 = 10 << 20;

/// How a command is called.
pub(crate) struct Source {
    pub program: String,
    /// Flags of each call.
    pub flags: Vec<String>,
    pub timeout: Duration,
    /// Calls at one time.
    pub parallel: usize,
}

/// A command whose output is a file of the archive.
pub(crate) struct Part {
    pub file: String,
    pub arguments: Vec<String>,
    pub form: Form,
}

/// What a command prints, and what is kept of it.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    /// A text.
    Text,
    /// A document of one of our programs, or a version.
    Document,
    /// Objects of the cluster: the ones that are meant, and which of their fields.
    Objects(fn(&Value, &Collection) -> bool, &'static [&'static str]),
}

/// The report as it is written.
pub(crate) struct Collection {
    file: Option<PathBuf>,
    archive: Archive,
    contents: Vec<Value>,
    missing: usize,
    /// Resources that our pools offer.
    pub resources: BTreeSet<String>,
    /// UIDs of the objects whose events are of interest.
    pub uids: BTreeSet<String>,
}

impl Report {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let mut collection = self.open()?;
        let policy = global.policy().unwrap_or_default();
        let name = policy.node_name(global.node_name().as_deref());
        let mut flags = vec![
            format!("--host-root={}", global.host_root.display()),
            format!("--policy={}", global.policy.display()),
        ];
        flags.extend(global.node_name().map(|name| format!("--node-name={name}")));
        let source = Source {
            program: std::env::args()
                .next()
                .unwrap_or_else(|| "rdmactl".to_owned()),
            flags,
            timeout: Duration::from_secs(60),
            parallel: 4,
        };
        block_on(collection.gather(&source, questions(&name, &QUESTIONS, &[])))??;
        for (file, from) in [
            ("policy.json", Some(&global.policy)),
            ("cni.log", policy.log.file.as_ref()),
        ] {
            let Some(from) = from.filter(|from| from.exists()) else {
                continue;
            };
            let (place, owned) = (from.display().to_string(), from.clone());
            let text = within_limit(&place, move || tail(&owned)).flatten();
            let text = text
                .map(|text| redact::text(&text))
                .map_err(|error| chain(&error));
            collection.add(path(&["nodes", &name, file]), place, text, None)?;
        }
        collection.finish(global)
    }

    /// Opens the file, which must be new unless it was named.
    pub(crate) fn open(&self) -> anyhow::Result<Collection> {
        let now = Timestamp::now();
        let top = format!("rdma-report-{}", now.strftime("%Y%m%d-%H%M%S"));
        let is_stdout = self.file.as_deref() == Some(Path::new("-"));
        let file = self
            .file
            .clone()
            .unwrap_or_else(|| format!("{top}.tar.gz").into());
        let to: Box<dyn Write> = match is_stdout {
            true => Box::new(output::stdout()?),
            false => {
                let mut options = OpenOptions::new();
                options.write(true).mode(0o600);
                match self.file {
                    Some(_) => options.create(true).truncate(true),
                    None => options.create_new(true),
                };
                let opened = options.open(&file);
                Box::new(opened.with_context(|| format!("create {}", file.display()))?)
            }
        };
        Ok(Collection {
            file: (!is_stdout).then_some(file),
            archive: Archive::new(to, top, now.as_second().unsigned_abs()),
            contents: Vec::new(),
            missing: 0,
            resources: BTreeSet::new(),
            uids: BTreeSet::new(),
        })
    }
}

/// What a node is asked, behind the words that lead to its program.
pub(crate) fn questions(node: &str, questions: &[&str], before: &[&str]) -> Vec<Part> {
    let part = |question: &&str| {
        let (file, words, form) = match *question {
            "--version" => ("version.txt".to_owned(), vec!["--version"], Form::Text),
            name => (format!("{name}.json"), vec![name, "--json"], Form::Document),
        };
        Part {
            file: path(&["nodes", node, &file]),
            arguments: before
                .iter()
                .chain(&words)
                .map(|&word| word.to_owned())
                .collect(),
            form,
        }
    };
    questions.iter().map(part).collect()
}

fn tail(file: &Path) -> anyhow::Result<String> {
    let mut file = File::open(file)?;
    let start = file.metadata()?.len().saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Collection {
    /// Runs the commands, and adds what they print as it comes. Returns the files that were read, with their
    /// objects.
    ///
    /// # Errors
    /// The archive cannot be written. A command that fails is a part that is missing.
    pub(crate) async fn gather(
        &mut self,
        source: &Source,
        parts: Vec<Part>,
    ) -> anyhow::Result<Vec<(String, Value)>> {
        let run = stream::iter(parts).map(|part| async {
            let mut command = Command::new(&source.program);
            command.args(&source.flags).args(&part.arguments);
            let most = match part.form {
                Form::Objects(..) => OBJECT_BYTES,
                Form::Text | Form::Document => NODE_BYTES,
            };
            let output = bounded_output_of(&mut command, b"", source.timeout, most).await;
            (part, output)
        });
        let mut outputs = pin!(run.buffer_unordered(source.parallel));
        let mut documents = Vec::new();
        while let Some((part, output)) = outputs.next().await {
            let asked = part.arguments.join(" ");
            let read = output.and_then(|output| {
                let document = self.read(part.form, &output)?;
                Ok((
                    document,
                    (!output.status.success()).then(|| last_line(&output)),
                ))
            });
            match read {
                Ok((document, note)) => {
                    let text = match &document {
                        Value::String(text) => text.clone(),
                        document => format!("{document:#}\n"),
                    };
                    self.add(part.file.clone(), asked, Ok(text), note)?;
                    let is_kept = matches!(part.form, Form::Objects(..));
                    documents.push((part.file, if is_kept { document } else { Value::Null }));
                }
                Err(error) => self.add(part.file, asked, Err(chain(&error)), None)?,
            }
        }
        Ok(documents)
    }

    /// What is kept of a command's output. A command that found something ends with 1 and prints its results.
    fn read(&self, form: Form, output: &Output) -> anyhow::Result<Value> {
        let failed = || anyhow!("{}", last_line(output));
        if !output.status.success() && output.stdout.is_empty() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            // Of what a cluster does not have there are no objects.
            return match form {
                Form::Objects(..) if stderr.contains("doesn't have a resource type") => {
                    Ok(json!({"items": []}))
                }
                _ => Err(failed()),
            };
        }
        if matches!(form, Form::Text) {
            return Ok(redact::text(&String::from_utf8_lossy(&output.stdout)).into());
        }
        let document: Value =
            serde_json::from_slice(&output.stdout).context("its answer is not a JSON document")?;
        let Form::Objects(is_meant, paths) = form else {
            return Ok(redact::document(document));
        };
        let items = match document.get("items") {
            Some(items) => items.as_array().map(Vec::as_slice).unwrap_or_default(),
            None => std::slice::from_ref(&document),
        };
        let items = items.iter().filter(|item| is_meant(item, self));
        let items = items.map(|item| redact::document(redact::keep(item, paths)));
        Ok(json!({"apiVersion": "v1", "kind": "List", "items": items.collect::<Vec<_>>()}))
    }

    /// Adds a part that was read, or why it is missing.
    ///
    /// # Errors
    /// The archive cannot be written.
    pub(crate) fn add(
        &mut self,
        mut file: String,
        asked: String,
        text: Result<String, String>,
        note: Option<String>,
    ) -> anyhow::Result<()> {
        let error = match text {
            Ok(text) => {
                let added = self.archive.add(file, text.as_bytes());
                file = added.context("write the archive")?;
                None
            }
            Err(error) => {
                self.missing += 1;
                complain(&format!("{file} is missing: {error}"));
                Some(redact::text(&error))
            }
        };
        let note = note.map(|note| redact::text(&note));
        self.contents
            .push(json!({"file": file, "asked": asked, "error": error, "note": note}));
        Ok(())
    }

    /// Writes the contents and says what the archive has.
    ///
    /// # Errors
    /// The archive cannot be written.
    pub(crate) fn finish(mut self, global: &Global) -> Ended {
        let parts = self.contents.len() - self.missing;
        let document = json!({
            "programVersion": env!("CARGO_PKG_VERSION"),
            "created": Timestamp::now(),
            "parts": parts,
            "missing": self.missing,
            "contents": self.contents,
        });
        let text = format!("{:#}\n", versioned(document));
        let written = self
            .archive
            .add("contents.json".to_owned(), text.as_bytes());
        written
            .and_then(|_| self.archive.finish())
            .context("write the archive")?;
        let outcome = Outcome::good_if(self.missing == 0);
        let counts = format!("{parts} parts, {} missing", self.missing);
        let Some(file) = &self.file else {
            complain(&format!("{counts}. {ADVICE}"));
            return Ok(outcome);
        };
        let bytes = std::fs::metadata(file).map_or(0, |file| file.len());
        let document =
            json!({"file": file, "bytes": bytes, "parts": parts, "missing": self.missing});
        global.say(document, || {
            let file = cni_wire::text::printable(&file.display().to_string());
            format!(
                "{file}: {} KiB, {counts}; contents.json lists them.\n{ADVICE}\n",
                bytes.div_ceil(1024)
            )
        });
        Ok(outcome)
    }
}

const ADVICE: &str = "Read it before you send it on: it names nodes, pods, addresses and images.";
