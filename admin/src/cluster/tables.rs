//! Answers of all nodes as one table.

use serde_json::{Value, json};

use super::ask::NodeAnswer;
use crate::output::{Columns, columns};

/// The rows of a node's document, or why it has none that can be read.
type Rows = fn(&str, &Value) -> Result<Vec<Value>, String>;

/// A command whose documents of all nodes are one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeTable {
    columns: Columns,
    rows: Rows,
}

impl NodeTable {
    /// The table of a command; `None` if it has none.
    pub(super) fn of(command: &str) -> Option<Self> {
        let (columns, rows): (Columns, Rows) = match command {
            "preflight" => (
                &[
                    ("NODE", "/node"),
                    ("FAIL", "/fail"),
                    ("WARN", "/warn"),
                    ("PASS", "/pass"),
                    ("CHECKS", "/checks"),
                ],
                preflight,
            ),
            "addresses" => (
                &[
                    ("NODE", "/node"),
                    ("ADDRESS", "/address"),
                    ("NETWORK NAME", "/networkName"),
                    ("POD", "/pod"),
                    ("INTERFACE", "/interface"),
                ],
                |_, document| needed(document, "leases").cloned(),
            ),
            _ => return None,
        };
        Some(Self { columns, rows })
    }

    fn rows(&self, answer: &NodeAnswer) -> Option<Result<Vec<Value>, String>> {
        Some((self.rows)(&answer.node, &answer.json()?))
    }

    /// A document without rows that can be read is an error of its node.
    pub(super) fn check(&self, answers: &mut [NodeAnswer]) {
        for answer in answers {
            if let Some(Err(why)) = self.rows(answer) {
                answer.output = Err(format!("its answer is of another version: {why}"));
            }
        }
    }

    /// The answers as text. What nodes share is listed by each of them, and shown once.
    pub(super) fn text(&self, answers: &[NodeAnswer]) -> String {
        let mut all: Vec<Value> = Vec::new();
        for row in answers
            .iter()
            .flat_map(|answer| self.rows(answer))
            .flatten()
            .flatten()
        {
            if !all.contains(&row) {
                all.push(row);
            }
        }
        columns(self.columns, &all)
    }
}

/// A list that each version of the document has.
fn needed<'d>(document: &'d Value, key: &str) -> Result<&'d Vec<Value>, String> {
    (document[key].as_array()).ok_or_else(|| format!("missing list `{key}`"))
}

fn preflight(node: &str, document: &Value) -> Result<Vec<Value>, String> {
    let complains = |check: &&Value| check["verdict"] == "fail" || check["verdict"] == "warn";
    let checks = needed(document, "checks")?.iter().filter(complains);
    let checks: Vec<&Value> = checks.map(|check| &check["id"]).collect();
    let summary = document.get("summary").ok_or("missing `summary`")?;
    let [fail, warn, pass] = ["fail", "warn", "pass"].map(|verdict| summary.get(verdict));
    Ok(vec![
        json!({"node": node, "fail": fail, "warn": warn, "pass": pass, "checks": checks}),
    ])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::ask::Printed;
    use super::*;

    fn answer(node: &str, document: Result<Value, &str>) -> NodeAnswer {
        NodeAnswer {
            node: node.to_owned(),
            pod: format!("plugin-{node}"),
            output: document.map_err(str::to_owned).map(|document| Printed {
                text: document.to_string(),
                complaint: String::new(),
                is_good: true,
            }),
        }
    }

    #[test]
    fn a_document_of_another_version_is_an_error_of_its_node() {
        for command in ["preflight", "addresses"] {
            let view = NodeTable::of(command).unwrap();
            let mut answers = [answer("n1", Ok(json!({"version": 2, "rows": []})))];
            view.check(&mut answers);
            let error = answers[0].output.clone().unwrap_err();
            assert!(
                error.starts_with("its answer is of another version: missing"),
                "{command}: {error}"
            );
            assert!(!view.text(&answers).contains("n1"), "{command}");
        }
    }

    #[test]
    fn a_lease_of_a_shared_store_is_one_row() {
        let lease = json!({"address": "10.0.0.1", "node": "n2", "interface": "net1",
            "pod": {"namespace": "ml", "name": "w-0"}});
        let document = json!({"leases": [lease]});
        let answers = [
            answer("n1", Ok(document.clone())),
            answer("n2", Ok(document)),
        ];
        let text = NodeTable::of("addresses").unwrap().text(&answers);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(
            text.ends_with("n2    10.0.0.1  -             ml/w-0  net1\n"),
            "{text}"
        );
    }

    #[test]
    fn checks_that_complain_are_named() {
        let document = json!({
            "summary": {"fail": 1, "warn": 1, "pass": 40},
            "checks": [{"id": "L01", "verdict": "fail"}, {"id": "M01", "verdict": "pass"},
                       {"id": "G06", "verdict": "warn"}],
        });
        let answer = answer("n1", Ok(document));
        let text = NodeTable::of("preflight").unwrap().text(&[answer]);
        assert!(
            text.ends_with("n1    1     1     40    L01 G06\n"),
            "{text}"
        );
    }

    #[test]
    fn what_a_node_answers_steers_no_terminal() {
        let document = json!({"leases": [{"address": "\u{1b}[2J", "interface": 7}]});
        let text = NodeTable::of("addresses")
            .unwrap()
            .text(&[answer("n1", Ok(document))]);
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
