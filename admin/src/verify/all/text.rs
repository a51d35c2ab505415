//! The result for a terminal.

use super::Results;
use crate::findings;
use crate::verdict::{Outcome, Verdict};
use crate::verify::steps::{CHOICE, ENDS, Step};

/// The step of rails that were not tested.
pub(super) const PODS: Step = ("pods", "each node is tested");

/// The matrix, the faults with their remedies, and counts.
pub(super) fn text(results: &Results) -> String {
    let rails = results.matrix.rails.iter().map(String::as_str);
    let header: Vec<&str> = std::iter::once("NODE").chain(rails).collect();
    let rows = results.matrix.rows().map(|(node, cells)| {
        let cells = cells.iter().map(|cell| cell.text.as_str());
        let row = std::iter::once(node).chain(cells);
        row.map(node::table::cell).collect()
    });
    let table = node::table::table(&header, &rows.collect::<Vec<_>>());
    let faults = findings::list(&faults(results), true);
    let blank = if faults.is_empty() { "" } else { "\n" };
    format!("{table}{blank}{faults}\n{}\n", summary(results))
}

/// One line: the sum of it all.
pub(super) fn summary(results: &Results) -> String {
    let verdicts = results.matrix.cells.iter().map(|cell| cell.verdict);
    let count = findings::counted;
    let cordoned = match results.cordoned.as_slice() {
        [] => String::new(),
        names => format!("; left out because cordoned: {}", names.join(", ")),
    };
    format!(
        "{}, {}: {}; {} in {}, {} s{cordoned}",
        count(results.nodes.len(), "node"),
        count(results.matrix.rails.len(), "rail"),
        findings::counts(verdicts),
        count(results.tests.len(), "test"),
        count(results.rounds, "round"),
        results.seconds
    )
}

/// The faults by step; what is said of a whole node once.
pub(super) fn faults(results: &Results) -> Vec<Outcome> {
    let outcomes = [PODS, ENDS].into_iter().chain(CHOICE).map(|(id, title)| {
        let cells = results.matrix.cells.iter();
        let faults = cells.filter(|cell| cell.step == id && cell.verdict >= Verdict::Unknown);
        let mut findings: Vec<_> = faults.map(|cell| cell.finding.clone()).collect();
        findings.dedup();
        Outcome::new(id, title, findings)
    });
    let is_fault = |outcome: &Outcome| !outcome.findings.is_empty();
    outcomes.filter(is_fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_test_is_not_several() {
        let results = Results {
            rounds: 1,
            seconds: 7,
            ..Results::default()
        };
        let text = summary(&results);
        assert_eq!(text, "0 nodes, 0 rails: ; 0 tests in 1 round, 7 s");
        let results = Results {
            cordoned: vec!["n3".to_owned(), "n4".to_owned()],
            ..results
        };
        let text = summary(&results);
        assert!(
            text.ends_with("7 s; left out because cordoned: n3, n4"),
            "{text}"
        );
    }
}
