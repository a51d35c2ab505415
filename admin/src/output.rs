//! What every command prints, and how it ends.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use cni_wire::text::printable;
use ipam::leases::LeaseError;
use node::document::versioned;
use serde_json::Value;

/// How a command ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Exit {
    /// All is good.
    Good,
    /// Nothing was found, or something has a problem.
    Found,
}

impl Exit {
    /// Of a command that lists problems.
    pub(crate) fn good_if(good: bool) -> Self {
        if good { Self::Good } else { Self::Found }
    }
}

/// What a command returns.
pub(crate) type Ended = anyhow::Result<Exit>;

/// The program, as a person calls it.
fn program() -> &'static str {
    match crate::cluster::is_meant(std::env::args_os().next().as_ref()) {
        true => "kubectl rdma",
        false => "rdmactl",
    }
}

/// The exit status of a command; an error is printed.
pub(crate) fn ended(ended: Ended) -> ExitCode {
    match ended {
        Ok(Exit::Good) => ExitCode::SUCCESS,
        Ok(Exit::Found) => ExitCode::FAILURE,
        Err(error) => match error.downcast_ref::<clap::Error>() {
            Some(error) => error.exit(),
            None => {
                complain(&chain(&error));
                ExitCode::FAILURE
            }
        },
    }
}

/// Wrong usage that the parser does not see.
pub(crate) fn wrong_usage(text: &str) -> anyhow::Error {
    clap::Error::raw(
        clap::error::ErrorKind::ArgumentConflict,
        format!("{text}\n"),
    )
    .into()
}

/// The error and its causes, each once: some messages already end with the text of their cause. With
/// the remedy, where the leases are at fault.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = error.chain().fold(String::new(), |mut text, cause| {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&cause);
        }
        text
    });
    let store = error.chain().find_map(|cause| cause.downcast_ref());
    if let Some(remedy) = store.map(LeaseError::remedy) {
        text += &format!(" ({remedy})");
    }
    text
}

/// The one place that prints results. A reader that has seen enough (`| head`) is not an error.
pub(crate) fn say(text: &str) {
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

/// Prints the table under a header, whose titles are separated by two spaces.
pub(crate) fn table(header: &str, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let titles: Vec<&str> = header.split("  ").collect();
    let rows: Vec<_> = rows.into_iter().collect();
    node::table::table(&titles, &rows)
}

/// Columns of a list of documents: titles, and where a document has the value (RFC 6901).
pub(crate) type Columns = &'static [(&'static str, &'static str)];

/// Documents as a table.
pub(crate) fn columns(columns: Columns, documents: &[Value]) -> String {
    let titles: Vec<&str> = columns.iter().map(|column| column.0).collect();
    let row = |document: &Value| {
        let values = columns.iter().map(|column| document.pointer(column.1));
        values
            .map(|value| node::table::cell(&value.map(words).unwrap_or_default()))
            .collect()
    };
    node::table::table(&titles, &documents.iter().map(row).collect::<Vec<_>>())
}

/// A value in a cell.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Array(list) => list.iter().map(words).collect::<Vec<_>>().join(" "),
        Value::Object(pod) if pod.contains_key("namespace") => {
            format!("{}/{}", words(&value["namespace"]), words(&value["name"]))
        }
        other => other.to_string(),
    }
}

/// Tables, and below them what is worth knowing; an empty line between them.
pub(crate) fn page<'n>(tables: Vec<String>, notes: impl IntoIterator<Item = &'n String>) -> String {
    let notes = notes
        .into_iter()
        .map(|note| printable(note) + "\n")
        .collect();
    let mut blocks = [tables, vec![notes]].concat();
    blocks.retain(|block| !block.is_empty());
    blocks.join("\n")
}

/// A cell of what may be absent.
pub(crate) fn optional(value: Option<impl ToString>) -> String {
    let text = value.map(|value| value.to_string());
    node::table::cell(&text.unwrap_or_default())
}

/// Prints a document with its version.
pub(crate) fn say_json(document: Value) {
    say(&format!("{:#}\n", versioned(document)));
}

/// Runs what waits for programs.
///
/// # Errors
/// No timer can be made.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    Ok(runtime.context("start")?.block_on(work))
}

/// A line for the person, beside the results; a text in it cannot begin another.
pub(crate) fn complain(text: &str) {
    let _ = io::stderr().lock().write_all(line(text).as_bytes());
}

fn line(text: &str) -> String {
    format!("{}: {}\n", program(), printable(text))
}

/// Asks on the terminal, unless `yes` was said.
///
/// # Errors
/// Standard input is not a terminal.
pub(crate) fn confirmed(yes: bool, question: &str) -> anyhow::Result<bool> {
    Ok(yes || node::terminal::confirm(program(), &printable(question))?)
}

/// The text of a file and what to call it; `-` is standard input.
///
/// # Errors
/// It cannot be read.
pub(crate) fn text_of(file: &Path) -> anyhow::Result<(String, String)> {
    if file == Path::new("-") {
        let text = io::read_to_string(io::stdin().lock()).context("read standard input")?;
        return Ok(("standard input".to_owned(), text));
    }
    let place = file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(|| format!("read {place}"))?;
    Ok((place, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_the_leases_is_printed_with_its_remedy() {
        let fault = LeaseError::NotARecord {
            path: "/run/a".into(),
            what: "empty".into(),
        };
        let (text, remedy) = (fault.to_string(), fault.remedy());
        let error = anyhow::Error::from(fault).context("open the store");
        assert_eq!(chain(&error), format!("open the store: {text} ({remedy})"));
        assert_eq!(chain(&anyhow::anyhow!("no such thing")), "no such thing");
    }

    #[test]
    fn a_fault_of_a_node_forges_no_line() {
        let line = line("n1: no answer\nrdmactl: all is good\u{1b}[2J");
        assert_eq!(
            line,
            "rdmactl: n1: no answer\\nrdmactl: all is good\\u{1b}[2J\n"
        );
    }

    #[test]
    fn a_cause_that_is_in_the_message_is_printed_once() {
        let error = anyhow::anyhow!("b").context("a: b").context("c");
        assert_eq!(chain(&error), "c: a: b");
    }
}
