//! The result as one HTML page that needs nothing else: no script, no network.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::matrix::{Cell, Matrix};
use super::text::faults;
use super::{Results, Test};
use crate::report::alike;
use crate::verdict::{Outcome, Verdict};

/// The page. Everything that a cluster or a pod wrote is escaped.
pub(super) fn page(results: &Results, matrix: &Matrix) -> String {
    let title = format!("RDMA verification: {}", escape(&results.context));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}, {}</title>\n<style>\n{}</style>\n</head>\n<body>\n",
        escape(&results.started),
        include_str!("page.css")
    );
    head(&mut page, &title, results, matrix);
    table(&mut page, matrix);
    attention(&mut page, matrix);
    page += "<h2>Tests</h2>\n";
    for (number, test) in results.tests.iter().enumerate() {
        log(&mut page, number, test, results);
    }
    page + "</body>\n</html>\n"
}

fn head(page: &mut String, title: &str, results: &Results, matrix: &Matrix) {
    *page += &format!("<header>\n<h1>{title}</h1>\n<p class=\"counts\">\n");
    for (verdict, count) in matrix.counts() {
        let class = class(verdict);
        *page += &format!("<span class=\"badge {class}\">{count}</span>\n");
    }
    *page += "</p>\n";
    if let Some(ended) = results.ended.as_deref().map(escape) {
        *page += &format!("<p class=\"note\">Not complete: {ended}.</p>\n");
    }
    let mut versions = BTreeSet::from([concat!("rdmactl ", env!("CARGO_PKG_VERSION")).to_owned()]);
    versions.extend(
        results
            .nodes
            .iter()
            .map(|node| format!("kubelet {}", node.kubelet)),
    );
    let versions: Vec<String> = versions.into_iter().rev().collect();
    let (seconds, tests, rounds) = (results.seconds, results.tests.len(), results.rounds);
    let facts = [
        ("Started", results.started.clone()),
        (
            "Took",
            format!("{seconds} s, {tests} tests, {rounds} rounds"),
        ),
        ("Nodes", results.nodes.len().to_string()),
        ("Rails", matrix.rails.len().to_string()),
        ("Networks", results.networks.join(", ")),
        ("Versions", versions.join(", ")),
    ];
    let fact = |(name, value): (&str, String)| (name.to_owned(), escape(&value));
    *page += "<dl class=\"facts\">\n";
    for (name, value) in facts.map(fact) {
        *page += &format!("<div><dt>{name}</dt><dd>{value}</dd></div>\n");
    }
    *page += "</dl>\n</header>\n";
}

/// The faults and what to do, as the terminal shows them.
fn attention(page: &mut String, matrix: &Matrix) {
    let faults = faults(matrix);
    let heading = match faults.is_empty() {
        true => "Nothing needs attention",
        false => "What needs attention",
    };
    let _ = writeln!(page, "<h2 id=\"faults\">{heading}</h2>");
    for outcome in &faults {
        step(page, outcome, "fault");
    }
}

/// A step with its findings; those that say the same of several objects together.
fn step(page: &mut String, outcome: &Outcome, class: &str) {
    let (id, title) = (outcome.id, escape(outcome.title));
    let _ = writeln!(page, "<h3>{id} <span class=\"dim\">{title}</span></h3>");
    for (finding, objects) in alike(&outcome.findings, true) {
        let (verdict, why) = (badge(finding.verdict), escape(&finding.why));
        let lines = [objects.join(", ")].into_iter().chain(finding.read);
        let lines: Vec<String> = lines.map(|line| escape(&line)).collect();
        let lines = lines.join("<br>");
        *page +=
            &format!("<div class=\"{class}\"><p>{verdict} {why}</p><p class=\"dim\">{lines}</p>");
        if let Some(remedy) = &finding.remedy {
            let _ = write!(page, "<p><strong>Do:</strong> {}</p>", escape(remedy));
        }
        *page += "</div>\n";
    }
}

fn table(page: &mut String, matrix: &Matrix) {
    *page += "<h2>Nodes and rails</h2>\n<div class=\"matrix\" tabindex=\"0\">\n<table>\n\
              <thead><tr><th scope=\"col\">Node</th>";
    for rail in &matrix.rails {
        let _ = write!(page, "<th scope=\"col\">{}</th>", escape(rail));
    }
    *page += "</tr></thead>\n<tbody>\n";
    for (node, cells) in matrix.rows() {
        let node = escape(node);
        let _ = write!(page, "<tr><th scope=\"row\" title=\"{node}\">{node}</th>");
        for cell in cells {
            let (class, link) = (class(cell.verdict), link(cell));
            *page += &format!("<td class=\"{class}\">{link}</td>");
        }
        *page += "</tr>\n";
    }
    *page += "</tbody>\n</table>\n</div>\n";
}

/// The cell's word, which leads to the log of its test.
fn link(cell: &Cell) -> String {
    let text = escape(&cell.text);
    match cell.tests.first() {
        Some(number) => format!("<a href=\"#test-{number}\">{text}</a>"),
        None => format!("<a href=\"#faults\">{text}</a>"),
    }
}

/// A test, open where it has a fault. The anchor is inside: going there opens it.
fn log(page: &mut String, number: usize, test: &Test, results: &Results) {
    let outcomes = test.climbed.outcomes.iter();
    let worst = outcomes.map(|outcome| outcome.verdict).max();
    let worst = worst.unwrap_or(Verdict::NotApplicable);
    let is_fault = worst >= Verdict::Unknown;
    let open = if is_fault { " open" } else { "" };
    let [server, client] = test.nodes.map(|at| escape(results.name(at)));
    let _ = writeln!(
        page,
        "<details{open}><summary><span>{server} and {client}</span> <span class=\"dim\">round {}</span> \
         {}</summary>\n<div class=\"log\" id=\"test-{number}\">",
        test.round,
        badge(worst)
    );
    for outcome in &test.climbed.outcomes {
        step(page, outcome, "finding");
        let tables = test.climbed.measurements.iter();
        for table in tables.filter(|table| table.rung == outcome.id) {
            let object = escape(&table.object);
            *page += &format!("<pre>{object}: bytes, iterations, peak and average in Gb/s\n");
            for row in &table.rows {
                let (peak, average) = (row.peak, row.average);
                let _ = write!(page, "{:>8} {:>8}", row.bytes, row.iterations);
                let _ = writeln!(page, " {peak:>9.2} {average:>9.2}");
            }
            *page += "</pre>\n";
        }
    }
    *page += "</div>\n</details>\n";
}

fn badge(verdict: Verdict) -> String {
    let (class, word) = (class(verdict), verdict.word());
    format!("<span class=\"badge {class}\">{word}</span>")
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Warn => "warn",
        Verdict::Fail => "fail",
        Verdict::Unknown => "unknown",
        Verdict::NotApplicable => "none",
    }
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let text = text.replace('>', "&gt;").replace('"', "&quot;");
    text.replace('\'', "&#39;")
}
