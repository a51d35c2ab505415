//! The result for a terminal, and as one JSON document.

use serde_json::{Value, json};

use super::Results;
use super::matrix::{Cell, Matrix, PODS};
use crate::report::{self, Style};
use crate::verdict::{Finding, Outcome, Verdict};
use crate::verify::ladder::{self, Rung};

/// The matrix, the faults with their remedies, and counts.
pub(super) fn text(results: &Results, matrix: &Matrix, style: Style) -> String {
    let rails = matrix.rails.iter().map(String::as_str);
    let header: Vec<&str> = std::iter::once("NODE").chain(rails).collect();
    let rows = matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| cell.text.as_str());
        std::iter::once(node)
            .chain(cells)
            .map(node::table::cell)
            .collect()
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
            while let Some(first) = faults.first().copied() {
                let says = |cell: &Cell| (cell.finding.why.clone(), cell.only_with.clone());
                let alike = |cell: &&&Cell| says(cell) == says(first);
                let rails: Vec<&str> = faults
                    .iter()
                    .filter(alike)
                    .map(|c| c.rail.as_str())
                    .collect();
                let rails = match rails.len() == cells.len() {
                    true => String::new(),
                    false => format!(" {}", rails.join(",")),
                };
                let with = match first.only_with.is_empty() {
                    true => String::new(),
                    false => format!(" (only with {})", first.only_with.join(", ")),
                };
                let finding = Finding {
                    read: Vec::new(),
                    ..first.finding.clone()
                };
                findings.push(finding.on(format!("{node}{rails}{with}")));
                faults.retain(|cell| says(cell) != says(first));
            }
        }
        Outcome::new(step.0, step.1, findings)
    };
    let outcomes = [PODS, ENDS, PING, RPING, WRITE_BW, GPU].map(of_step);
    outcomes
        .into_iter()
        .filter(|outcome| !outcome.findings.is_empty())
        .collect()
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
        let count = |verdict| {
            self.cells
                .iter()
                .filter(|cell| cell.verdict == verdict)
                .count()
        };
        let counts = words.map(|(verdict, word)| (verdict, count(verdict), word));
        let counts = counts.into_iter().filter(|(_, count, _)| *count > 0);
        counts
            .map(|(verdict, count, word)| (verdict, format!("{count} {word}")))
            .collect()
    }
}
