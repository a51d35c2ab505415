//! The result for a terminal, and as one JSON document.

use serde_json::{Value, json};

use super::Results;
use super::matrix::{Cell, Matrix, PODS};
use crate::report::{self, Style};
use crate::verdict::{Outcome, Verdict};
use crate::verify::ladder::{self, Rung};

/// The matrix, the faults with their remedies, and counts.
pub(super) fn text(results: &Results, matrix: &Matrix, style: Style) -> String {
    let header: Vec<&str> = std::iter::once("NODE")
        .chain(matrix.rails.iter().map(String::as_str))
        .collect();
    let rows = matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| node::table::cell(&cell.text));
        std::iter::once(node::table::cell(node))
            .chain(cells)
            .collect()
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let table = node::table::table(&header, &rows);
    let faults = report::list(&faults(matrix), true, style);
    let blank = if faults.is_empty() { "" } else { "\n" };
    format!("{table}{blank}{faults}\n{}\n", counts(results, matrix))
}

/// The faults by step, each once.
pub(super) fn faults(matrix: &Matrix) -> Vec<Outcome> {
    const STEPS: [Rung; 6] = [
        PODS,
        ladder::ENDS,
        ladder::PING,
        ladder::RPING,
        ladder::WRITE_BW,
        ladder::GPU,
    ];
    let of_step = |step: Rung| {
        let mut findings = Vec::new();
        for cell in matrix
            .cells
            .iter()
            .filter(|cell| cell.rung == step && cell.is_fault())
        {
            let mut finding = cell.finding.clone();
            finding.read.clear();
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
        Outcome::new(step.0, step.1, findings)
    };
    let outcomes = STEPS.into_iter().map(of_step);
    outcomes
        .filter(|outcome| !outcome.findings.is_empty())
        .collect()
}

/// One line: the sum of it all.
pub(super) fn counts(results: &Results, matrix: &Matrix) -> String {
    let words = [
        (Verdict::Fail, "failed"),
        (Verdict::Warn, "with a warning"),
        (Verdict::Unknown, "unknown or not tested"),
        (Verdict::Pass, "passed"),
    ];
    let counts = words.map(|(verdict, word)| (matrix.count(verdict), word));
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let counts: Vec<String> = counts
        .map(|(count, word)| format!("{count} {word}"))
        .collect();
    format!(
        "{} nodes, {} rails: {}; {} tests in {} rounds, {} s",
        results.nodes.len(),
        matrix.rails.len(),
        counts.join(", "),
        results.tests.len(),
        results.rounds,
        results.seconds
    )
}

/// Everything as one document.
pub(super) fn document(results: &Results, matrix: &Matrix) -> Value {
    let nodes = results.nodes.iter().map(|node| {
        json!({"name": node.name, "pod": node.pod, "kubelet": node.kubelet, "finding": node.fault})
    });
    let tests = results.tests.iter().map(|test| {
        json!({
            "round": test.round,
            "nodes": test.nodes.map(|at| results.name(at)),
            "checks": test.checks,
            "measurements": test.measurements,
        })
    });
    json!({
        "started": results.started,
        "seconds": results.seconds,
        "context": results.context,
        "networks": results.networks,
        "rounds": results.rounds,
        "plannedRounds": results.planned,
        "ended": results.ended,
        "nodes": nodes.collect::<Vec<_>>(),
        "rails": matrix.rails,
        "cells": matrix.cells,
        "tests": tests.collect::<Vec<_>>(),
        "summary": {
            "fail": matrix.count(Verdict::Fail),
            "warn": matrix.count(Verdict::Warn),
            "unknown": matrix.count(Verdict::Unknown),
            "pass": matrix.count(Verdict::Pass),
            "notApplicable": matrix.count(Verdict::NotApplicable),
        },
    })
}

impl Matrix {
    /// Each node with its cells.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&str, &[Cell])> {
        let rows = self.cells.chunks(self.rails.len().max(1));
        rows.map(|cells| (cells.first().map_or("", |cell| &cell.node), cells))
    }

    pub(super) fn count(&self, verdict: Verdict) -> usize {
        self.cells
            .iter()
            .filter(|cell| cell.verdict == verdict)
            .count()
    }
}

impl Cell {
    /// Somebody has to look at it.
    pub(super) fn is_fault(&self) -> bool {
        self.verdict >= Verdict::Unknown
    }
}
