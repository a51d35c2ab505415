//! What the tests say of each node's rails. Pure functions.
//!
//! A test counts against the end of which the larger share of tests is as bad as this one, and against
//! both if these are equal.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::text::PODS;
use super::{Results, Test, TestedNode};
use crate::verdict::{Finding, Verdict};
use crate::verify::steps::{ENDS, Tested};

/// A rail of a node.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Cell {
    pub node: String,
    /// The interface of its pod.
    pub rail: String,
    pub verdict: Verdict,
    /// The same in a word or two.
    pub text: String,
    /// Best average of `ib_write_bw` in Gb/s, in the step that decided.
    pub gbps: Option<f64>,
    /// The step that decided.
    pub step: &'static str,
    /// Why, and what to do.
    pub finding: Finding,
    /// Its tests by their index, the one that decided first.
    pub tests: Vec<usize>,
}

/// All of them.
#[derive(Debug, Default, Serialize)]
pub(super) struct Matrix {
    /// Names of the columns.
    pub rails: Vec<String>,
    /// Row by row, one for each node and rail.
    pub cells: Vec<Cell>,
}

impl Matrix {
    /// Each node with its cells.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&str, &[Cell])> {
        let rows = self.cells.chunks(self.rails.len().max(1));
        rows.map(|cells| (cells.first().map_or("", |cell| &cell.node), cells))
    }
}

/// One rail of one test, as an end sees it.
struct Seen<'a> {
    test: usize,
    finding: &'a Finding,
    step: &'static str,
    gbps: Option<f64>,
    partner: Key<'a>,
}

/// A node and its rail.
type Key<'a> = (&'a str, &'a str);
type AllSeen<'a> = BTreeMap<Key<'a>, Vec<Seen<'a>>>;

/// Judges the tests.
pub(super) fn judge(results: &Results) -> Matrix {
    let all = all_seen(&results.tests);
    let rails = results.nodes.values().flat_map(|node| node.end.rails());
    // rdma10 comes after rdma9.
    let rails: BTreeSet<(usize, String)> = rails.map(|rail| (rail.len(), rail)).collect();
    let mut rails: Vec<String> = rails.into_iter().map(|(_, rail)| rail).collect();
    if rails.is_empty() {
        rails.push("-".to_owned());
    }
    let nodes = results.nodes.iter();
    let cells = nodes.flat_map(|(name, node)| {
        let cell = |rail: &String| cell((name, rail), node, &results.tests, &all);
        rails.iter().map(cell).collect::<Vec<_>>()
    });
    let cells = cells.collect();
    Matrix { rails, cells }
}

fn cell(key: Key<'_>, node: &TestedNode, tests: &[Test], all: &AllSeen<'_>) -> Cell {
    let is_dead = (node.finding.as_ref()).is_some_and(|finding| finding.verdict == Verdict::Fail);
    if let Some(cell) = tested(key, all).filter(|_| !is_dead) {
        return cell;
    }
    let object = format!("{} {}", key.0, key.1);
    let mut faults = node.end.faults();
    faults.extend(node.shortage.as_deref());
    let (step, finding) = match &node.finding {
        Some(finding) if is_dead => (ENDS.0, finding.clone()),
        Some(finding) => (PODS.0, finding.clone()),
        None if node.end.rails().any(|rail| rail == key.1) => {
            let finding = Finding::unknown("no partner that answered has this rail");
            (PODS.0, finding.on(object))
        }
        None if faults.is_empty() => {
            let finding = Finding::not_applicable("its pod has no such interface");
            (ENDS.0, finding.on(object))
        }
        None => {
            let finding = Finding::fail(faults.join("; "), super::remedy(key.0));
            (ENDS.0, finding.on(object))
        }
    };
    let tests = tests.iter().enumerate().rev();
    let of_node = tests.filter(|(_, test)| test.nodes.iter().any(|name| name == key.0));
    // The one in which it did not answer is the last.
    let tests = of_node.map(|(number, _)| number).collect();
    Cell::new(key, step, finding, None, tests)
}

impl Cell {
    fn new(
        (node, rail): Key<'_>,
        step: &'static str,
        mut finding: Finding,
        gbps: Option<f64>,
        tests: Vec<usize>,
    ) -> Self {
        let word = finding.verdict.word();
        let rate = gbps.map(|gbps| match gbps < 10.0 {
            true => format!("{gbps:.2} Gb/s"),
            false => format!("{gbps:.0} Gb/s"),
        });
        let text = match (finding.verdict, rate) {
            (Verdict::Pass, Some(rate)) => rate,
            (_, Some(rate)) => format!("{word} {rate}"),
            (Verdict::Pass, None) => word.to_owned(),
            (Verdict::NotApplicable, None) => "-".to_owned(),
            _ if step == PODS.0 => "not tested".to_owned(),
            _ => format!("{word} {step}"),
        };
        finding.read.clear();
        Self {
            node: node.to_owned(),
            rail: rail.to_owned(),
            verdict: finding.verdict,
            text,
            gbps,
            step,
            finding,
            tests,
        }
    }
}

fn tested(key: Key<'_>, all: &AllSeen<'_>) -> Option<Cell> {
    let seen = all.get(&key)?;
    // How many tests are as bad, and how many there are.
    let share = |key: &Key<'_>, verdict: Verdict| {
        let seen = all.get(key).map_or(&[][..], Vec::as_slice);
        let bad = seen.iter().filter(|seen| seen.finding.verdict >= verdict);
        (bad.count(), seen.len())
    };
    let counts = |seen: &&Seen<'_>| {
        let verdict = seen.finding.verdict;
        let ((bad, of), (other, other_of)) = (share(&key, verdict), share(&seen.partner, verdict));
        bad * other_of >= other * of
    };
    let counted: Vec<&Seen<'_>> = seen.iter().filter(counts).collect();
    let rank = |seen: &Seen<'_>| (seen.finding.verdict, seen.gbps);
    let worst = |worst, next| {
        if rank(next) > rank(worst) {
            next
        } else {
            worst
        }
    };
    let decided = counted.iter().copied().reduce(worst)?;
    let verdict = decided.finding.verdict;
    let is_better = |seen: &Seen<'_>| seen.finding.verdict < verdict;
    let mut only_with = BTreeSet::new();
    if seen.iter().any(is_better) {
        let deciding = counted.iter().filter(|seen| !is_better(seen));
        only_with.extend(deciding.map(|seen| seen.partner.0));
    }
    let mut object = format!("{} {}", key.0, key.1);
    if !only_with.is_empty() {
        let only_with: Vec<&str> = only_with.into_iter().collect();
        object += &format!(" (only with {})", only_with.join(", "));
    }
    let tests = seen.iter().map(|seen| seen.test);
    let others = tests.filter(|test| *test != decided.test);
    let tests = std::iter::once(decided.test).chain(others).collect();
    let finding = decided.finding.clone().on(object);
    Some(Cell::new(key, decided.step, finding, decided.gbps, tests))
}

/// What the tests found, by node and rail.
fn all_seen(tests: &[Test]) -> AllSeen<'_> {
    let mut all = AllSeen::new();
    for (number, test) in tests.iter().enumerate() {
        let [server, client] = test.nodes.each_ref().map(String::as_str);
        for (object, [ours, theirs]) in &test.tested.pairs {
            let Some((step, finding)) = decisive(&test.tested, object) else {
                continue;
            };
            let tables = test.tested.measurements.iter();
            let tables = tables.filter(|table| table.object == *object && table.step == step);
            let rows = tables.flat_map(|table| &table.rows);
            let gbps = rows.map(|row| row.average).reduce(f64::max);
            let (one, other) = ((server, ours.as_str()), (client, theirs.as_str()));
            for (end, partner) in [(one, other), (other, one)] {
                let seen = Seen {
                    test: number,
                    finding,
                    step,
                    gbps,
                    partner,
                };
                all.entry(end).or_default().push(seen);
            }
        }
    }
    all
}

/// The worst that the steps found of a pair of ports. Of faults the first: what comes after it was not
/// tried. Of what passed the last.
fn decisive<'a>(tested: &'a Tested, object: &str) -> Option<(&'static str, &'a Finding)> {
    let steps = tested.outcomes.iter();
    let found = steps.flat_map(|step| step.findings.iter().map(|finding| (step.id, finding)));
    let of_pair = found.filter(|(_, finding)| finding.object.as_deref() == Some(object));
    of_pair.reduce(|worst, next| {
        let (at, now) = (worst.1.verdict, next.1.verdict);
        let is_worse = now > at || (now == at && now <= Verdict::Pass);
        if is_worse { next } else { worst }
    })
}

#[cfg(test)]
mod tests {
    use super::super::Test;
    use super::*;
    use crate::verdict::Outcome;
    use crate::verify::ends::Port;
    use crate::verify::perftest::PerftestRow;
    use crate::verify::steps::{self, Measurement, Step};

    /// Tests of nodes `a` to `d` on one rail: what `ping` and `write-bw` found, and the bandwidth.
    fn results(tests: &[(&str, Finding, f64)]) -> Results {
        let names = ["a", "b", "c", "d"];
        let port = Port {
            device: "x".to_owned(),
            port: 1,
            netdev: Some("rdma0".to_owned()),
            mtu: None,
            gid_index: None,
            address: None,
            rate: None,
            soft: false,
        };
        let node = |name: &str| {
            let mut node = TestedNode::default();
            node.end.ports = vec![port.clone()];
            (name.to_owned(), node)
        };
        let test = |(pair, bandwidth, average): &(&str, Finding, f64)| {
            let (step, title) = steps::WRITE_BW;
            let row = PerftestRow {
                bytes: 65536,
                iterations: 1,
                peak: 400.0,
                average: *average,
            };
            let outcome = |(id, title): Step, finding: Finding| {
                Outcome::new(id, title, vec![finding.on("rdma0 (x/1)")])
            };
            Test {
                round: 1,
                nodes: [&pair[..1], &pair[1..]].map(str::to_owned),
                tested: Tested {
                    outcomes: vec![
                        outcome(steps::PING, Finding::pass("there and back")),
                        outcome((step, title), bandwidth.clone()),
                    ],
                    measurements: vec![Measurement {
                        step,
                        object: "rdma0 (x/1)".to_owned(),
                        rows: vec![row],
                    }],
                    pairs: vec![(
                        "rdma0 (x/1)".to_owned(),
                        ["rdma0", "rdma0"].map(str::to_owned),
                    )],
                    ends: Default::default(),
                },
            }
        };
        Results {
            nodes: names.map(node).into(),
            tests: tests.iter().map(test).collect(),
            ..Results::default()
        }
    }

    fn texts(tests: &[(&str, Finding, f64)]) -> Vec<String> {
        let matrix = judge(&results(tests));
        assert_eq!(matrix.rails, ["rdma0"]);
        let text = |cell: &Cell| {
            let object = cell.finding.object.as_deref().unwrap_or_default();
            let partners = object
                .split_once(" (only with ")
                .map(|(_, partners)| partners);
            match partners {
                None => cell.text.clone(),
                Some(partners) => format!("{} with {}", cell.text, partners.trim_end_matches(')')),
            }
        };
        matrix.cells.iter().map(text).collect()
    }

    #[test]
    fn a_fault_counts_against_the_end_that_never_did_better() {
        let pass = || Finding::pass("97 %");
        let (fail, warn) = (Finding::fail("no", "x"), Finding::warn("slow", "x"));
        let fine = ("cd", pass(), 390.0);
        for (tests, expected) in [
            (
                vec![("ab", pass(), 380.4), ("ac", pass(), 390.2), fine.clone()],
                ["390 Gb/s", "380 Gb/s", "390 Gb/s", "390 Gb/s"],
            ),
            (
                vec![
                    ("ab", fail.clone(), 0.0),
                    ("ac", fail.clone(), 0.0),
                    ("bd", pass(), 391.0),
                    fine.clone(),
                ],
                ["FAIL 0.00 Gb/s", "391 Gb/s", "390 Gb/s", "391 Gb/s"],
            ),
            (
                vec![
                    ("ab", warn.clone(), 201.0),
                    ("ac", warn, 200.0),
                    ("bd", pass(), 391.0),
                    fine.clone(),
                ],
                ["WARN 201 Gb/s", "391 Gb/s", "390 Gb/s", "391 Gb/s"],
            ),
            (
                vec![
                    ("ab", fail.clone(), 0.0),
                    ("ac", pass(), 392.0),
                    ("bd", pass(), 391.0),
                ],
                [
                    "FAIL 0.00 Gb/s with b",
                    "FAIL 0.00 Gb/s with a",
                    "392 Gb/s",
                    "391 Gb/s",
                ],
            ),
            (
                vec![
                    ("ab", fail.clone(), 0.0),
                    ("ac", fail.clone(), 0.0),
                    ("ad", pass(), 392.0),
                    ("bd", pass(), 391.0),
                    fine,
                ],
                [
                    "FAIL 0.00 Gb/s with b, c",
                    "391 Gb/s",
                    "390 Gb/s",
                    "392 Gb/s",
                ],
            ),
            (
                vec![("ab", fail, 0.0), ("cd", pass(), 390.0)],
                ["FAIL 0.00 Gb/s", "FAIL 0.00 Gb/s", "390 Gb/s", "390 Gb/s"],
            ),
        ] {
            assert_eq!(texts(&tests), expected, "{tests:?}");
        }
    }

    #[test]
    fn a_rail_that_was_not_tested_says_why() {
        let mut results = results(&[
            ("ab", Finding::pass("97 %"), 390.0),
            ("cd", Finding::pass("97 %"), 390.0),
        ]);
        let finding = |results: &mut Results, name: &str, finding: Finding| {
            results.nodes.get_mut(name).unwrap().finding = Some(finding);
        };
        finding(&mut results, "a", Finding::fail("no answer", "look"));
        finding(&mut results, "b", Finding::unknown("no room"));
        results.tests[1].tested.pairs.clear();
        let end = &mut results.nodes.get_mut("d").unwrap().end;
        end.ports.clear();
        end.left = vec!["x/1: DOWN".to_owned()];
        let matrix = judge(&results);
        let cells: Vec<(&str, &str, &[usize])> = matrix
            .cells
            .iter()
            .map(|cell| {
                (
                    cell.text.as_str(),
                    cell.finding.why.as_str(),
                    cell.tests.as_slice(),
                )
            })
            .collect();
        assert_eq!(
            cells,
            [
                ("FAIL ends", "no answer", &[0][..]),
                ("390 Gb/s", "97 %", &[0]),
                ("not tested", "no partner that answered has this rail", &[1]),
                ("FAIL ends", "x/1: DOWN", &[1]),
            ]
        );
        let node = results.nodes.get_mut("d").unwrap();
        node.end.left.clear();
        node.shortage = Some("0 of 1".to_owned());
        assert_eq!(judge(&results).cells[3].finding.why, "0 of 1");
        results.nodes.get_mut("d").unwrap().shortage = None;
        assert_eq!(judge(&results).cells[3].text, "-");
    }
}
