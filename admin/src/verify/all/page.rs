//! The result as one HTML page that needs nothing else: no script, no network.

use super::text::{faults, summary};
use super::{Results, Test};
use crate::report::{self, Style};
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
        summary(results),
        escape(&networks),
        env!("CARGO_PKG_VERSION")
    );
    if let Some(ended) = &results.ended {
        page += &format!("<p class=\"note\">Not complete: {}.</p>\n", escape(ended));
    }
    let faults = faults(results);
    if !faults.is_empty() {
        page += "<h2 id=\"faults\">What needs attention</h2>\n";
        page += &steps(&faults);
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

/// Steps with their findings, as in a terminal.
fn steps(outcomes: &[Outcome]) -> String {
    let text = report::list(outcomes, true, Style::Plain);
    format!("<pre>{}</pre>\n", escape(&text))
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
    format!(
        "<details{open}><summary>{} <span class=\"dim\">round {}</span> <span class=\"{}\">{}</span></summary>\n\
         <div class=\"log\" id=\"test-{number}\">\n{}</div>\n</details>\n",
        escape(&test.nodes.join(" and ")),
        test.round,
        class(worst),
        worst.word(),
        steps(outcomes)
    )
}

fn class(verdict: Verdict) -> String {
    verdict.word().to_lowercase()
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let text = text.replace('>', "&gt;").replace('"', "&quot;");
    text.replace('\'', "&#39;")
}
