//! Outcomes as text, grouped by verdict, and as one JSON document with all findings.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::verdict::{Finding, Outcome, Verdict};

/// Verdicts, worst first, as the line of counts names them.
const ORDER: [(Verdict, &str); 5] = [
    (Verdict::Fail, "failed"),
    (Verdict::Warn, "with a warning"),
    (Verdict::Unknown, "unknown"),
    (Verdict::Pass, "passed"),
    (Verdict::NotApplicable, "not applicable"),
];

/// How many checks ended with each verdict.
fn count(outcomes: &[Outcome], verdict: Verdict) -> usize {
    let same = outcomes.iter().filter(|outcome| outcome.verdict == verdict);
    same.count()
}

/// Ids of the checks that failed, with `strict` also of those with a warning.
pub(crate) fn faults(outcomes: &[Outcome], strict: bool) -> Vec<&'static str> {
    let least = if strict { Verdict::Warn } else { Verdict::Fail };
    let faults = outcomes.iter().filter(|outcome| outcome.verdict >= least);
    faults.map(|outcome| outcome.id).collect()
}

/// One line: the sum of it all.
fn summary(outcomes: &[Outcome]) -> String {
    let verdicts = outcomes.iter().map(|outcome| outcome.verdict);
    format!("{}: {}", counted(outcomes.len(), "check"), counts(verdicts))
}

/// A number of things: "1 check", "2 checks".
pub(crate) fn counted(count: usize, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

/// How many there are of each, in words.
pub(crate) fn counts(verdicts: impl Iterator<Item = Verdict> + Clone) -> String {
    let count = |(verdict, word): (Verdict, &str)| {
        let count = verdicts.clone().filter(|one| *one == verdict).count();
        (count > 0).then(|| format!("{count} {word}"))
    };
    let counts: Vec<String> = ORDER.into_iter().filter_map(count).collect();
    counts.join(", ")
}

/// Text: failed checks, then warnings, each with its objects, what was read and what to do; then
/// one line of counts. With `all`, every check in its order, with all findings.
pub(crate) fn text(outcomes: &[Outcome], all: bool) -> String {
    let text = list(outcomes, all);
    let blank = if text.is_empty() { "" } else { "\n" };
    let rest = if all { "" } else { " (--all shows each)" };
    format!("{text}{blank}{}{rest}\n", summary(outcomes))
}

/// The same without the counts.
pub(crate) fn list(outcomes: &[Outcome], all: bool) -> String {
    let mut text = String::new();
    let width = outcomes.iter().map(|o| o.id.len()).max().unwrap_or(0);
    let mut shown: Vec<&Outcome> = (outcomes.iter())
        .filter(|outcome| all || outcome.verdict >= Verdict::Warn)
        .collect();
    if !all {
        shown.sort_by_key(|outcome| std::cmp::Reverse(outcome.verdict));
    }
    for outcome in &shown {
        let (id, verdict, title) = (outcome.id, outcome.verdict.word(), outcome.title);
        let _ = writeln!(text, "{id:width$} {verdict:7} {title}");
        for group in alike(&outcome.findings, all) {
            finding(&mut text, &group);
        }
    }
    text
}

/// Findings that say the same about several objects, together; faults only, unless all are wanted.
fn alike(findings: &[Finding], all: bool) -> Vec<(Finding, Vec<String>)> {
    let mut groups: Vec<(Finding, Vec<String>)> = Vec::new();
    for finding in findings
        .iter()
        .filter(|f| all || f.verdict >= Verdict::Warn)
    {
        let mut alone = finding.clone();
        let object = alone.object.take();
        match groups.iter_mut().find(|(known, _)| *known == alone) {
            Some((_, objects)) => objects.extend(object),
            None => groups.push((alone, object.into_iter().collect())),
        }
    }
    groups
}

/// Objects named in a line before the rest is only counted.
const NAMED: usize = 8;

/// The first of many words, and how many more there are.
pub(crate) fn some_of(words: &[impl AsRef<str>], most: usize, between: &str) -> String {
    let first: Vec<&str> = words.iter().take(most).map(AsRef::as_ref).collect();
    match words.len() - first.len() {
        0 => first.join(between),
        more => format!("{} and {more} more", first.join(between)),
    }
}

fn finding(text: &mut String, (finding, objects): &(Finding, Vec<String>)) {
    let mut who = some_of(objects, NAMED, ", ");
    if !who.is_empty() {
        who.push_str(": ");
    }
    let _ = writeln!(text, "            {who}{}", finding.why);
    for line in &finding.read {
        let _ = writeln!(text, "              read  {}", line.replace('\n', " "));
    }
    if let Some(remedy) = &finding.remedy {
        let _ = writeln!(text, "              do    {remedy}");
    }
}

/// Everything as one document.
pub(crate) fn document(outcomes: &[Outcome]) -> Value {
    json!({
        "checks": outcomes,
        "summary": {
            "fail": count(outcomes, Verdict::Fail),
            "warn": count(outcomes, Verdict::Warn),
            "unknown": count(outcomes, Verdict::Unknown),
            "pass": count(outcomes, Verdict::Pass),
            "notApplicable": count(outcomes, Verdict::NotApplicable),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> Vec<Outcome> {
        let warning = Finding::warn("only 1024 bytes", "raise the MTU").read("mtu", 1500);
        vec![
            Outcome {
                id: "L07",
                title: "RoCE messages have their full size",
                verdict: Verdict::Warn,
                findings: vec![
                    warning.clone().on("mlx5_0/1"),
                    warning.on("mlx5_1/1"),
                    Finding::pass("fine").on("mlx5_2/1"),
                ],
            },
            Outcome {
                id: "M01",
                title: "the RDMA core is in the kernel",
                verdict: Verdict::Pass,
                findings: vec![Finding::pass("it is")],
            },
        ]
    }

    #[test]
    fn objects_with_the_same_fault_are_named_together() {
        assert_eq!(
            text(&outcomes(), false),
            "L07 WARN    RoCE messages have their full size\n            \
             mlx5_0/1, mlx5_1/1: only 1024 bytes\n              read  mtu: 1500\n              \
             do    raise the MTU\n\n2 checks: 1 with a warning, 1 passed (--all shows each)\n"
        );
        assert!(text(&outcomes(), true).contains("mlx5_2/1: fine"));
    }

    #[test]
    fn failures_come_before_warnings() {
        let mut outcomes = outcomes();
        outcomes.push(Outcome {
            id: "R01",
            title: "containers may lock memory",
            verdict: Verdict::Fail,
            findings: vec![Finding::fail("64 KiB", "raise the limit")],
        });
        let text = text(&outcomes, false);
        assert!(text.starts_with("R01 FAIL"), "{text}");
        assert!(!text.contains("M01"), "{text}");
    }

    #[test]
    fn one_check_is_not_several() {
        let text = text(&outcomes()[1..], true);
        assert!(text.ends_with("\n1 check: 1 passed\n"), "{text}");
    }

    #[test]
    fn the_document_has_every_finding() {
        let document = document(&outcomes());
        assert_eq!(document["summary"]["warn"], 1);
        assert_eq!(document["checks"][0]["findings"][2]["verdict"], "pass");
        assert_eq!(
            document["checks"][0]["findings"][0]["remedy"],
            "raise the MTU"
        );
        assert_eq!(document["checks"][1]["verdict"], "pass");
    }
}
