//! The result as one HTML page that needs nothing else: no script, no network. It has the matrix, whose
//! cells lead to the tests; the rest is text as on a terminal.

use super::text::{faults, summary};
use super::{Results, Test};
use crate::findings::list;

/// The page. Everything that a cluster or a pod wrote is escaped.
pub(super) fn page(results: &Results) -> String {
    let title = format!("RDMA verification: {}", escape(&results.context));
    let mut about = format!(
        "{}\n{}; networks: {}; rdmactl {}\n",
        summary(results),
        results.started,
        results.networks.join(", "),
        env!("CARGO_PKG_VERSION")
    );
    if let Some(ended) = &results.ended {
        about += &format!("Not complete: {ended}.\n");
    }
    let about = escape(&format!("{about}\n{}", list(&faults(results), true)));
    let tests: String = results.tests.iter().enumerate().map(log).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}, {}</title>\n\
         <style>\n{}</style>\n<h1>{title}</h1>\n<pre id=\"faults\">{about}</pre>\n{}<h2>Tests</h2>\n\
         {tests}</html>\n",
        results.started,
        include_str!("page.css"),
        table(results)
    )
}

/// Each cell leads to the log of its test.
fn table(results: &Results) -> String {
    let rails = results.matrix.rails.iter();
    let rails: String = rails
        .map(|rail| format!("<th>{}</th>", escape(rail)))
        .collect();
    let rows = results.matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| {
            let (class, text) = (cell.verdict.word().to_lowercase(), escape(&cell.text));
            let test = cell.tests.first().map(|number| format!("test-{number}"));
            let anchor = test.unwrap_or_else(|| "faults".to_owned());
            format!("<td class=\"{class}\"><a href=\"#{anchor}\">{text}</a></td>")
        });
        let (node, cells) = (escape(node), cells.collect::<String>());
        format!("<tr><th>{node}</th>{cells}</tr>\n")
    });
    let rows: String = rows.collect();
    format!(
        "<table>\n<thead><tr><th>Node</th>{rails}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n"
    )
}

/// A test. The anchor is inside: going there opens it.
fn log((number, test): (usize, &Test)) -> String {
    let mut text = list(&test.tested.outcomes, true);
    for table in &test.tested.measurements {
        let (step, object) = (table.step, &table.object);
        text += &format!("\n{step}, {object}: bytes, iterations, peak and average in Gb/s\n");
        text.extend(table.rows.iter().map(|row| {
            let (bytes, iterations) = (row.bytes, row.iterations);
            let (peak, average) = (row.peak, row.average);
            format!("{bytes:>8} {iterations:>8} {peak:>9.2} {average:>9.2}\n")
        }));
    }
    format!(
        "<details><summary>{}, round {}</summary>\n<pre id=\"test-{number}\">{}</pre>\n</details>\n",
        escape(&test.nodes.join(" and ")),
        test.round,
        escape(&text)
    )
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let text = text.replace('>', "&gt;").replace('"', "&quot;");
    text.replace('\'', "&#39;")
}
