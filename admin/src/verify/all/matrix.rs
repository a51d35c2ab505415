//! What the tests say of each node's rails. Pure functions.
//!
//! A fault counts against the end that never did better, and against both if both did with others.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Results, TestedNode};
use crate::verdict::{Finding, Verdict};
use crate::verify::ladder::{self, Rung};

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
    let rails: BTreeSet<&str> = all.keys().map(|(_, rail)| *rail).collect();
    let mut rails: Vec<&str> = rails.into_iter().collect();
    // rdma10 comes after rdma9.
    rails.sort_by_key(|rail| (rail.len(), *rail));
    if rails.is_empty() {
        rails.push("-");
    }
    let cell = |(at, node): (usize, &TestedNode), rail: &str| {
        let key = (node.name.as_str(), rail);
        let seen = all.get(&key).map_or(&[][..], Vec::as_slice);
        match &node.fault {
            Some(fault) if seen.is_empty() || fault.verdict == Verdict::Fail => {
                let (rung, text) = match fault.verdict {
                    Verdict::Fail => (ladder::ENDS, "FAIL ends"),
                    _ => (PODS, "not tested"),
                };
                let fault = fault.clone().on(&node.name);
                Cell::new(key, rung, text, fault, results.tests_of(at))
            }
            _ if seen.is_empty() => absent(results, at, key),
            _ => tested(key, seen, &all),
        }
    };
    let nodes = results.nodes.iter().enumerate();
    let row = |node| rails.iter().map(move |rail| (node, *rail));
    let cells = nodes
        .flat_map(row)
        .map(|(node, rail)| cell(node, rail))
        .collect();
    let rails = rails.iter().map(|&rail| rail.to_owned()).collect();
    Matrix { rails, cells }
}

impl Cell {
    fn new(key: Key<'_>, rung: Rung, text: &str, finding: Finding, tests: Vec<usize>) -> Self {
        Self {
            node: key.0.to_owned(),
            rail: key.1.to_owned(),
            verdict: finding.verdict,
            text: text.to_owned(),
            gbps: None,
            rung,
            finding,
            tests,
        }
    }
}

/// Of a rail that other nodes have.
fn absent(results: &Results, at: usize, key: Key<'_>) -> Cell {
    let (node, rail) = key;
    let tests = results.tests_of(at);
    let left = tests.iter().find_map(|&number| {
        let test = results.tests.get(number)?;
        let ends = test.nodes.iter().zip(&test.left);
        let mut left = ends.filter(|(of, left)| **of == at && !left.is_empty());
        left.next().map(|(_, left)| left.join("; "))
    });
    let object = format!("{node} {rail}");
    match left {
        Some(left) => {
            let remedy = format!("kubectl rdma status --nodes {node}");
            let finding = Finding::fail(left, remedy).on(object);
            Cell::new(key, ladder::ENDS, "FAIL ends", finding, tests)
        }
        None => {
            let finding = Finding::not_applicable("its pod has no such interface").on(object);
            Cell::new(key, ladder::ENDS, "-", finding, tests)
        }
    }
}

fn tested(key: Key<'_>, seen: &[Seen<'_>], all: &AllSeen<'_>) -> Cell {
    let best = |key: &Key<'_>| all.get(key)?.iter().map(|seen| seen.finding.verdict).min();
    let own = best(&key);
    let counts = |seen: &&Seen<'_>| {
        let verdict = Some(seen.finding.verdict);
        verdict == own || best(&seen.partner) < verdict
    };
    let counted: Vec<&Seen<'_>> = seen.iter().filter(counts).collect();
    let worst = counted.iter().map(|seen| seen.finding.verdict).max();
    let worst = worst.unwrap_or(Verdict::NotApplicable);
    let deciding: Vec<&&Seen<'_>> = (counted.iter())
        .filter(|seen| seen.finding.verdict == worst)
        .collect();
    let decided = deciding.iter().copied().reduce(|best, seen| {
        let is_better = worst == Verdict::Pass && seen.gbps > best.gbps;
        if is_better { seen } else { best }
    });
    let (node, rail) = key;
    let Some(decided) = decided else {
        let finding = Finding::unknown("it was not tested").on(node);
        return Cell::new(key, PODS, "not tested", finding, Vec::new());
    };
    let mut object = format!("{node} {rail}");
    if own < Some(worst) {
        let partners: Vec<&str> = deciding.iter().map(|seen| seen.partner.0).collect();
        object += &format!(" (with {} only)", partners.join(", "));
    }
    let (rung, gbps) = (decided.rung.0, decided.gbps);
    let rate = gbps.map(|gbps| format!("{gbps:.0} Gb/s"));
    let text = match (worst, &rate) {
        (Verdict::Pass, Some(rate)) => rate.clone(),
        (Verdict::Warn, Some(rate)) if rung != ladder::PING.0 => format!("WARN {rate}"),
        (Verdict::Pass | Verdict::NotApplicable, _) => worst.word().to_owned(),
        _ => format!("{} {rung}", worst.word()),
    };
    let others = seen
        .iter()
        .map(|seen| seen.test)
        .filter(|test| *test != decided.test);
    let tests = std::iter::once(decided.test).chain(others).collect();
    let finding = decided.finding.clone().on(object);
    let cell = Cell::new(key, decided.rung, &text, finding, tests);
    Cell { gbps, ..cell }
}

/// What the tests found, by node and rail.
fn all_seen(results: &Results) -> AllSeen<'_> {
    let mut all = AllSeen::new();
    for (number, test) in results.tests.iter().enumerate() {
        let [server, client] = test.nodes.map(|at| results.name(at));
        for (object, [ours, theirs]) in &test.pairs {
            let steps = test
                .checks
                .iter()
                .filter(|check| check.id != ladder::ENDS.0);
            let found = steps.flat_map(|check| {
                let findings = check.findings.iter();
                let of = findings.filter(|finding| finding.object.as_ref() == Some(object));
                of.map(|finding| ((check.id, check.title), finding))
            });
            let found: Vec<(Rung, &Finding)> = found.collect();
            let worst = found.iter().map(|(_, finding)| finding.verdict).max();
            let mut worst = found
                .iter()
                .filter(|(_, finding)| Some(finding.verdict) == worst);
            // Of faults the first: what comes after it was not tried. Of what passed the last.
            let decided = match worst
                .clone()
                .any(|(_, finding)| finding.verdict > Verdict::Pass)
            {
                true => worst.next(),
                false => worst.next_back(),
            };
            let Some((rung, finding)) = decided else {
                continue;
            };
            let average = |id: &str| {
                let tables = test.measurements.iter();
                let tables = tables.filter(|table| table.object == *object && table.rung == id);
                let rows = tables.flat_map(|table| &table.rows);
                rows.map(|row| row.average).reduce(f64::max)
            };
            let gbps = average(rung.0).or_else(|| average(ladder::WRITE_BW.0));
            let (one, other) = ((server, ours.as_str()), (client, theirs.as_str()));
            for (end, partner) in [(one, other), (other, one)] {
                all.entry(end).or_default().push(Seen {
                    test: number,
                    finding,
                    rung: *rung,
                    gbps,
                    partner,
                });
            }
        }
    }
    all
}
