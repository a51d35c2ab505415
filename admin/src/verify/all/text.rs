//! The result for a terminal, and as one JSON document.

use serde_json::{Value, json};

use super::Results;
use super::matrix::{Cell, Matrix, PODS};
use crate::report::{self, Style};
use crate::verdict::{Outcome, Verdict};
use crate::verify::ladder::{self, Rung};

/// The matrix, the faults with their remedies, and counts.
pub(super) fn text(results: &Results, matrix: &Matrix, style: Style) -> String {
    let rails = matrix.rails.iter().map(String::as_str);
    let header: Vec<&str> = std::iter::once("NODE").chain(rails).collect();
    let rows = matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| cell.text.as_str());
        let row = std::iter::once(node).chain(cells);
        row.map(node::table::cell).collect()
    });
    let table = node::table::table(&header, &rows.collect::<Vec<_>>());
    let faults = report::list(&faults(matrix), true, style);
    let blank = if faults.is_empty() { "" } else { "\n" };
    let counts = matrix.counts().into_iter().map(|(_, count)| count);
    format!(
        "{table}{blank}{faults}\n{} nodes, {} rails: {}; {} tests in {} rounds, {} s\n",
        results.nodes.len(),
        matrix.rails.len(),
        counts.collect::<Vec<_>>().join(", "),
        results.tests.len(),
        results.rounds,
        results.seconds
    )
}

/// The faults by step; those that say the same of several rails of a node once.
pub(super) fn faults(matrix: &Matrix) -> Vec<Outcome> {
    use ladder::{ENDS, GPU, PING, RPING, WRITE_BW};
    let of_step = |step: Rung| {
        let mut findings = Vec::new();
        for (node, cells) in matrix.rows() {
            let is_fault = |cell: &&Cell| cell.rung == step && cell.verdict >= Verdict::Unknown;
            let mut faults: Vec<&Cell> = cells.iter().filter(is_fault).collect();
            while let Some(&first) = faults.first() {
                let says_the_same = |cell: &mut &Cell| {
                    (&cell.finding.why, &cell.only_with) == (&first.finding.why, &first.only_with)
                };
                let same = faults.extract_if(.., says_the_same);
                let rails: Vec<&str> = same.map(|cell| cell.rail.as_str()).collect();
                let mut object = node.to_owned();
                if rails.len() < cells.len() {
                    object += &format!(" {}", rails.join(","));
                }
                if !first.only_with.is_empty() {
                    object += &format!(" (only with {})", first.only_with.join(", "));
                }
                let mut finding = first.finding.clone().on(object);
                finding.read.clear();
                findings.push(finding);
            }
        }
        Outcome::new(step.0, step.1, findings)
    };
    let outcomes = [PODS, ENDS, PING, RPING, WRITE_BW, GPU]
        .into_iter()
        .map(of_step);
    let is_fault = |outcome: &Outcome| !outcome.findings.is_empty();
    outcomes.filter(is_fault).collect()
}

/// Everything as one document.
pub(super) fn document(results: &Results, matrix: &Matrix) -> Value {
    let nodes = results.nodes.iter().map(|node| {
        let pod = node.pod.as_ref().map(|pod| &pod.name);
        json!({"name": node.name, "pod": pod, "kubelet": node.kubelet, "finding": node.fault})
    });
    let tests = results.tests.iter().map(|test| {
        json!({
            "round": test.round,
            "nodes": test.nodes.map(|at| results.name(at)),
            "checks": test.climbed.outcomes,
            "measurements": test.climbed.measurements,
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
    })
}

impl Matrix {
    /// Each node with its cells.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&str, &[Cell])> {
        let rows = self.cells.chunks(self.rails.len().max(1));
        rows.map(|cells| (cells.first().map_or("", |cell| &cell.node), cells))
    }

    /// How many cells stand how, in words; without verdicts that none has.
    pub(super) fn counts(&self) -> Vec<(Verdict, String)> {
        let words = [
            (Verdict::Fail, "failed"),
            (Verdict::Warn, "with a warning"),
            (Verdict::Unknown, "unknown or not tested"),
            (Verdict::Pass, "passed"),
        ];
        let counts = words.into_iter().filter_map(|(verdict, word)| {
            let cells = self.cells.iter().filter(|cell| cell.verdict == verdict);
            let count = cells.count();
            (count > 0).then(|| (verdict, format!("{count} {word}")))
        });
        counts.collect()
    }
}
