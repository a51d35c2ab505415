//! Faults at every system call: what `strace` saw of one run, and the arguments
//! that make the next run die or fail there.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// One system call of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// Its name.
    pub call: String,
    /// Which of the calls of that name it was, from 1.
    pub occurrence: usize,
    /// The line, without its result, for messages.
    pub line: String,
}

/// The arguments that record a run into `log`.
#[must_use]
pub fn record(log: &Path) -> Vec<String> {
    [
        "strace",
        "-f",
        "-qq",
        "-s",
        "256",
        "-o",
        &log.to_string_lossy(),
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The arguments that kill a run before it does `point`.
#[must_use]
pub fn kill_at(point: &Point) -> Vec<String> {
    inject(point, "signal=SIGKILL")
}

/// The arguments that make `point` fail with an error, undone.
#[must_use]
pub fn fail_at(point: &Point, error: &str) -> Vec<String> {
    inject(point, &format!("error={error}"))
}

fn inject(point: &Point, what: &str) -> Vec<String> {
    let inject = format!("inject={}:{what}:when={}", point.call, point.occurrence);
    // Without a trace filter all calls are stopped at, and counted.
    ["strace", "-f", "-qq", "-o", "/dev/null", "-e", &inject]
        .map(str::to_owned)
        .to_vec()
}

/// The calls in a log, in their order, from the program's own start on.
///
/// # Errors
/// The log cannot be read.
pub fn points(log: &Path) -> Result<Vec<Point>> {
    let text = fs::read_to_string(log).with_context(|| log.display().to_string())?;
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut points = Vec::new();
    for line in text.lines() {
        // `1234  openat(AT_FDCWD, "x", O_RDONLY) = 3`; exits and signals have no '('.
        let line = line
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .trim_start();
        let Some((call, _)) = line.split_once('(') else {
            continue;
        };
        if call.is_empty() || !call.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            continue;
        }
        let occurrence = counts.entry(call.to_owned()).or_default();
        *occurrence += 1;
        let shown = line.rsplit_once(" = ").map_or(line, |(left, _)| left);
        points.push(Point {
            call: call.to_owned(),
            occurrence: *occurrence,
            line: shown.trim_end().to_owned(),
        });
    }
    // The program that was started is there only after its execve.
    Ok(points
        .into_iter()
        .filter(|point| point.call != "execve")
        .collect())
}
