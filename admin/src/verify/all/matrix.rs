//! What the tests say of each node's rails. Pure functions.
//!
//! A fault counts against the end that never did better with another partner. If both did, it counts
//! against the one with more faults, and against both if these are as many.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Node, Results};
use crate::verdict::{Finding, Verdict};
use crate::verify::ladder::{self, Climbed, Rung};

/// Why there is no test of a node.
pub(super) const PODS: Rung = ("pods", "each node is tested");

/// A rail of a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Cell {
    /// The node.
    pub node: String,
    /// The interface of its pod.
    pub rail: String,
    /// How it stands.
    pub verdict: Verdict,
    /// The same in a word or two.
    pub text: String,
    /// Best average of `ib_write_bw` in Gb/s.
    pub gbps: Option<f64>,
    /// The step that decided.
    #[serde(serialize_with = "id_of")]
    pub rung: Rung,
    /// Why, and what to do.
    pub finding: Finding,
    /// The partners with which it fails, if it does better with others.
    pub only_with: Vec<String>,
    /// Its tests by their index, the one that decided first.
    pub tests: Vec<usize>,
}

fn id_of<S: serde::Serializer>(rung: &Rung, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(rung.0)
}

/// All of them.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Matrix {
    /// Names of the columns.
    pub rails: Vec<String>,
    /// Row by row, one for each node and rail.
    pub cells: Vec<Cell>,
}

/// One rail of one test, as an end sees it.
struct Seen<'a> {
    test: usize,
    finding: &'a Finding,
    rung: Rung,
    gbps: Option<f64>,
    partner: Key<'a>,
}

/// A node and its rail.
type Key<'a> = (&'a str, &'a str);
type AllSeen<'a> = BTreeMap<Key<'a>, Vec<Seen<'a>>>;

/// Judges the tests.
pub(super) fn judge(results: &Results) -> Matrix {
    let all = all_seen(results);
    let rails = results.tests.iter().flat_map(|test| &test.climbed.rails);
    let rails: BTreeSet<&str> = rails.flatten().map(String::as_str).collect();
    let mut rails: Vec<&str> = rails.into_iter().collect();
    // rdma10 comes after rdma9.
    rails.sort_by_key(|rail| (rail.len(), *rail));
    if rails.is_empty() {
        rails.push("-");
    }
    let cell = |at: usize, node: &Node, rail: &str| {
        let key = (node.name.as_str(), rail);
        let seen = all.get(&key).map_or(&[][..], Vec::as_slice);
        match &node.fault {
            Some(fault) if fault.verdict == Verdict::Fail => {
                Cell::new(key, ladder::ENDS, "FAIL ends", fault.clone())
            }
            Some(fault) if seen.is_empty() => Cell::new(key, PODS, "not tested", fault.clone()),
            _ if seen.is_empty() => absent(results, at, key),
            _ => tested(key, seen, &all),
        }
    };
    let mut cells = Vec::new();
    for (at, node) in results.nodes.iter().enumerate() {
        for rail in &rails {
            let mut cell = cell(at, node, rail);
            if cell.tests.is_empty() {
                let tests = results.tests_of(at).map(|(number, _)| number);
                cell.tests.extend(tests);
                // The one in which it did not answer is the last.
                cell.tests.reverse();
            }
            cells.push(cell);
        }
    }
    let rails = rails.into_iter().map(str::to_owned).collect();
    Matrix { rails, cells }
}

impl Cell {
    fn new((node, rail): Key<'_>, rung: Rung, text: &str, finding: Finding) -> Self {
        Self {
            node: node.to_owned(),
            rail: rail.to_owned(),
            verdict: finding.verdict,
            text: text.to_owned(),
            gbps: None,
            rung,
            finding: Finding {
                object: None,
                ..finding
            },
            only_with: Vec::new(),
            tests: Vec::new(),
        }
    }
}

/// Of a rail that the node does not have, or no partner.
fn absent(results: &Results, at: usize, key: Key<'_>) -> Cell {
    let tests = || results.tests_of(at).map(|(_, test)| test);
    let ends = || tests().flat_map(|test| test.nodes.iter().zip(&test.climbed.rails));
    let mut rails = ends()
        .filter(|(of, _)| **of == at)
        .flat_map(|(_, rails)| rails);
    if rails.any(|rail| rail == key.1) {
        let finding = Finding::unknown("no partner that answered has this rail");
        return Cell::new(key, PODS, "not tested", finding);
    }
    let left = tests().flat_map(|test| test.nodes.iter().zip(&test.climbed.left));
    let left = left.filter(|(of, _)| **of == at).map(|(_, left)| left);
    let pod = results.nodes.get(at).and_then(|node| node.pod.as_ref());
    let mut left = left.chain(pod.map(|pod| &pod.withheld));
    match left.find(|left| !left.is_empty()) {
        Some(left) => {
            let remedy = format!("kubectl rdma status --nodes {}", key.0);
            let finding = Finding::fail(left.join("; "), remedy);
            Cell::new(key, ladder::ENDS, "FAIL ends", finding)
        }
        None => {
            let finding = Finding::not_applicable("its pod has no such interface");
            Cell::new(key, ladder::ENDS, "-", finding)
        }
    }
}

fn tested(key: Key<'_>, seen: &[Seen<'_>], all: &AllSeen<'_>) -> Cell {
    let standing = |key: &Key<'_>| {
        let seen = all.get(key).map_or(&[][..], Vec::as_slice);
        let verdicts = seen.iter().map(|seen| seen.finding.verdict);
        let faults = verdicts.clone().filter(|verdict| *verdict > Verdict::Pass);
        (verdicts.min(), faults.count())
    };
    let (best, faults) = standing(&key);
    let counts = |seen: &&Seen<'_>| {
        let verdict = Some(seen.finding.verdict);
        let (other_best, other_faults) = standing(&seen.partner);
        best == verdict || (other_best < verdict && faults >= other_faults)
    };
    let counted: Vec<&Seen<'_>> = seen.iter().filter(counts).collect();
    let worst = counted.iter().map(|seen| seen.finding.verdict).max();
    let is_worst = |seen: &&Seen<'_>| Some(seen.finding.verdict) == worst;
    let deciding = counted.into_iter().filter(is_worst);
    let decided = deciding.clone().reduce(|best, seen| {
        let is_faster = worst == Some(Verdict::Pass) && best.gbps < seen.gbps;
        if is_faster { seen } else { best }
    });
    let Some(decided) = decided else {
        return Cell::new(key, PODS, "-", Finding::not_applicable("it was not tested"));
    };
    let rung = decided.rung.0;
    let (verdict, word) = (decided.finding.verdict, decided.finding.verdict.word());
    let text = match (verdict, decided.gbps) {
        (Verdict::Pass, Some(gbps)) => format!("{gbps:.0} Gb/s"),
        (Verdict::Warn, Some(gbps)) if rung != ladder::PING.0 => format!("{word} {gbps:.0} Gb/s"),
        (Verdict::Pass | Verdict::NotApplicable, _) => word.to_owned(),
        _ => format!("{word} {rung}"),
    };
    let tests = seen.iter().map(|seen| seen.test);
    let others = tests.filter(|test| *test != decided.test);
    let partners: BTreeSet<&str> = deciding.map(|seen| seen.partner.0).collect();
    let partners = partners.into_iter().filter(|_| best < worst);
    Cell {
        gbps: decided.gbps,
        only_with: partners.map(str::to_owned).collect(),
        tests: std::iter::once(decided.test).chain(others).collect(),
        ..Cell::new(key, decided.rung, &text, decided.finding.clone())
    }
}

/// What the tests found, by node and rail.
fn all_seen(results: &Results) -> AllSeen<'_> {
    let mut all = AllSeen::new();
    for (number, test) in results.tests.iter().enumerate() {
        let [server, client] = test.nodes.map(|at| results.name(at));
        for (object, [ours, theirs]) in &test.climbed.pairs {
            let Some((rung, finding)) = decisive(&test.climbed, object) else {
                continue;
            };
            let average = |id: &str| {
                let tables = test.climbed.measurements.iter();
                let tables = tables.filter(|table| table.object == *object && table.rung == id);
                let rows = tables.flat_map(|table| &table.rows);
                rows.map(|row| row.average).reduce(f64::max)
            };
            let gbps = average(rung.0).or_else(|| average(ladder::WRITE_BW.0));
            let (one, other) = ((server, ours.as_str()), (client, theirs.as_str()));
            for (end, partner) in [(one, other), (other, one)] {
                let seen = Seen {
                    test: number,
                    finding,
                    rung,
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
fn decisive<'a>(climbed: &'a Climbed, object: &str) -> Option<(Rung, &'a Finding)> {
    let steps = climbed.outcomes.iter();
    let steps = steps.filter(|step| step.id != ladder::ENDS.0);
    let found = steps.flat_map(|step| {
        let findings = step.findings.iter();
        let of = findings.filter(|finding| finding.object.as_deref() == Some(object));
        of.map(|finding| ((step.id, step.title), finding))
    });
    found.reduce(|worst, next| {
        let (at, now) = (worst.1.verdict, next.1.verdict);
        let is_worse = now > at || (now == at && now <= Verdict::Pass);
        if is_worse { next } else { worst }
    })
}

#[cfg(test)]
mod tests {
    use super::super::Test;
    use super::super::plan::Pod;
    use super::*;
    use crate::verdict::Outcome;
    use crate::verify::ladder::Measurement;
    use crate::verify::perftest::Row;

    /// Tests of nodes `a` to `d` on one rail: what `ping` and `write-bw` found, and the bandwidth.
    fn results(tests: &[(&str, Finding, f64)]) -> Results {
        let names = ["a", "b", "c", "d"];
        let node = |name: &str| Node {
            name: name.to_owned(),
            kubelet: String::new(),
            pod: None,
            fault: None,
        };
        let test = |(pair, bandwidth, average): &(&str, Finding, f64)| {
            let at = |name: &str| names.iter().position(|known| *known == name).unwrap();
            let (rung, title) = ladder::WRITE_BW;
            let row = Row {
                bytes: 65536,
                iterations: 1,
                peak: 400.0,
                average: *average,
            };
            let outcome = |(id, title): Rung, finding: Finding| {
                Outcome::new(id, title, vec![finding.on("rdma0 (x/1)")])
            };
            Test {
                round: 1,
                nodes: [at(&pair[..1]), at(&pair[1..])],
                climbed: Climbed {
                    outcomes: vec![
                        outcome(ladder::PING, Finding::pass("there and back")),
                        outcome((rung, title), bandwidth.clone()),
                    ],
                    measurements: vec![Measurement {
                        rung,
                        object: "rdma0 (x/1)".to_owned(),
                        rows: vec![row],
                    }],
                    pairs: vec![(
                        "rdma0 (x/1)".to_owned(),
                        ["rdma0", "rdma0"].map(str::to_owned),
                    )],
                    rails: [vec!["rdma0".to_owned()], vec!["rdma0".to_owned()]],
                    left: Default::default(),
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
        let text = |cell: &Cell| match cell.only_with.is_empty() {
            true => cell.text.clone(),
            false => format!("{} with {}", cell.text, cell.only_with.join(",")),
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
                ["FAIL write-bw", "391 Gb/s", "390 Gb/s", "391 Gb/s"],
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
                    "FAIL write-bw with b",
                    "FAIL write-bw with a",
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
                ["FAIL write-bw with b,c", "391 Gb/s", "390 Gb/s", "392 Gb/s"],
            ),
            (
                vec![("ab", fail, 0.0), ("cd", pass(), 390.0)],
                ["FAIL write-bw", "FAIL write-bw", "390 Gb/s", "390 Gb/s"],
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
        results.nodes[0].fault = Some(Finding::fail("no answer", "look"));
        results.nodes[1].fault = Some(Finding::unknown("no room"));
        results.tests[1].climbed.pairs.clear();
        results.tests[1].climbed.rails[1].clear();
        results.tests[1].climbed.left[1] = vec!["x/1: DOWN".to_owned()];
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
        results.tests[1].climbed.left[1].clear();
        assert_eq!(judge(&results).cells[3].text, "-");
        results.nodes[3].pod = Some(Pod {
            name: "d".to_owned(),
            gpu: false,
            withheld: vec!["1 of 2 rdma/nic cannot be used".to_owned()],
            object: serde_json::Value::Null,
        });
        let cell = &judge(&results).cells[3];
        assert_eq!(cell.text, "FAIL ends");
        assert_eq!(cell.finding.why, "1 of 2 rdma/nic cannot be used");
    }
}
