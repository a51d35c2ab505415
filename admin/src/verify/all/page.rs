//! The result as one HTML page that needs nothing else: no script, no network.

use super::text::{faults, summary};
use super::{Results, Test};
use crate::findings::alike;
use crate::verdict::{Outcome, Verdict};

/// The page. Everything that a cluster or a pod wrote is escaped.
pub(super) fn page(results: &Results) -> String {
    let title = format!("RDMA verification: {}", escape(&results.context));
    let (started, networks) = (&results.started, results.networks.join(", "));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}, {started}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
         <p>{}</p>\n<p class=\"dim\">{started}; networks: {}; rdmactl {}</p>\n",
        include_str!("page.css"),
        escape(&summary(results)),
        escape(&networks),
        env!("CARGO_PKG_VERSION")
    );
    if let Some(ended) = &results.ended {
        page += &format!("<p class=\"note\">Not complete: {}.</p>\n", escape(ended));
    }
    let faults = faults(results);
    if !faults.is_empty() {
        page += "<h2 id=\"faults\">What needs attention</h2>\n";
        page.extend(faults.iter().map(step));
    }
    page += &table(results);
    page += "<h2>Tests</h2>\n";
    page.extend(results.tests.iter().enumerate().map(log));
    page + "</body>\n</html>\n"
}

/// Each cell leads to the log of its test.
fn table(results: &Results) -> String {
    let rails = results.matrix.rails.iter();
    let rails = rails.map(|rail| format!("<th scope=\"col\">{}</th>", escape(rail)));
    let rows = results.matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| {
            let (class, text) = (class(cell.verdict), escape(&cell.text));
            let test = cell.tests.first().map(|number| format!("test-{number}"));
            let anchor = test.unwrap_or_else(|| "faults".to_owned());
            format!("<td class=\"{class}\"><a href=\"#{anchor}\">{text}</a></td>")
        });
        let (node, cells) = (escape(node), cells.collect::<String>());
        format!("<tr><th scope=\"row\" title=\"{node}\">{node}</th>{cells}</tr>\n")
    });
    let (rails, rows) = (rails.collect::<String>(), rows.collect::<String>());
    format!(
        "<h2>Nodes and rails</h2>\n<div class=\"matrix\" tabindex=\"0\">\n<table>\n\
         <thead><tr><th scope=\"col\">Node</th>{rails}</tr></thead>\n<tbody>\n{rows}</tbody>\n\
         </table>\n</div>\n"
    )
}

/// A step with its findings; those that say the same of several objects together.
fn step(outcome: &Outcome) -> String {
    let title = escape(outcome.title);
    let mut text = format!(
        "<h3>{} <span class=\"dim\">{title}</span></h3>\n",
        outcome.id
    );
    for (finding, objects) in alike(&outcome.findings, true) {
        let (badge, why) = (badge(finding.verdict), escape(&finding.why));
        text += &format!("<div class=\"finding\"><p>{badge} {why}</p><p class=\"dim\">");
        let lines = [objects.join(", ")].into_iter().chain(finding.read);
        text.extend(lines.map(|line| escape(&line) + "<br>"));
        let remedy = finding.remedy.map(|remedy| escape(&remedy));
        let remedy = remedy.map(|remedy| format!("<p><strong>Do:</strong> {remedy}</p>"));
        text += &format!("</p>{}</div>\n", remedy.unwrap_or_default());
    }
    text
}

/// A test, open where it has a fault. The anchor is inside: going there opens it.
fn log((number, test): (usize, &Test)) -> String {
    let outcomes = &test.tested.outcomes;
    let worst = outcomes.iter().map(|outcome| outcome.verdict).max();
    let worst = worst.unwrap_or(Verdict::NotApplicable);
    let open = if worst >= Verdict::Unknown {
        " open"
    } else {
        ""
    };
    let mut text = format!(
        "<details{open}><summary><span>{}</span> <span class=\"dim\">round {}</span> {}</summary>\n\
         <div class=\"log\" id=\"test-{number}\">\n",
        escape(&test.nodes.join(" and ")),
        test.round,
        badge(worst)
    );
    text.extend(outcomes.iter().map(step));
    for table in &test.tested.measurements {
        let (step, object) = (table.step, escape(&table.object));
        text += &format!("<pre>{step}, {object}: bytes, iterations, peak and average in Gb/s\n");
        text.extend(table.rows.iter().map(|row| {
            let (peak, average) = (row.peak, row.average);
            format!(
                "{:>8} {:>8} {peak:>9.2} {average:>9.2}\n",
                row.bytes, row.iterations
            )
        }));
        text += "</pre>\n";
    }
    text + "</div>\n</details>\n"
}

fn badge(verdict: Verdict) -> String {
    let (class, word) = (class(verdict), verdict.word());
    format!("<span class=\"badge {class}\">{word}</span>")
}

fn class(verdict: Verdict) -> String {
    verdict.word().to_lowercase()
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let text = text.replace('>', "&gt;").replace('"', "&quot;");
    text.replace('\'', "&#39;")
}
