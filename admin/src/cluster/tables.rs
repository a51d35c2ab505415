//! Answers of all nodes as one table; below it the nodes that did not answer.

use cni_wire::text::printable;
use node::table::cell;
use serde_json::Value;

use super::ask::NodeAnswer;
use crate::output::table;

/// The rows of a document, or why it has none that can be read.
type Rows = Result<Vec<Vec<String>>, String>;

/// A command whose documents of all nodes are one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    /// The column NODE comes first.
    header: &'static str,
    /// The rows of a node's document.
    rows: fn(&Value) -> Rows,
    /// Each node lists what nodes share, and its rows name their own node.
    is_shared: bool,
}

impl View {
    /// The table of a command; `None` if it has none.
    pub(super) fn of(command: &str) -> Option<Self> {
        let (header, rows): (_, fn(&Value) -> Rows) = match command {
            "preflight" => ("FAIL  WARN  PASS  CHECKS", preflight),
            "addresses" => ("ADDRESS  NETWORK NAME  POD  INTERFACE", addresses),
            _ => return None,
        };
        Some(Self {
            header,
            rows,
            is_shared: command == "addresses",
        })
    }

    /// A document without rows that can be read is an error of its node.
    pub(super) fn check(&self, answers: &mut [NodeAnswer]) {
        for answer in answers {
            if let Some(Err(why)) = answer.json().map(|document| (self.rows)(&document)) {
                answer.output = Err(format!("its answer is of another version: {why}"));
            }
        }
    }

    /// The answers as text, with the notes of each node.
    pub(super) fn text(&self, answers: &[NodeAnswer]) -> String {
        let mut all: Vec<Vec<String>> = Vec::new();
        for answer in answers {
            let rows = answer.json().map(|document| (self.rows)(&document));
            let Some(Ok(mut of_node)) = rows else {
                continue;
            };
            if self.is_shared {
                of_node.retain(|row| !all.contains(row));
                all.extend(of_node);
                continue;
            }
            if of_node.is_empty() {
                of_node.push(vec!["-".to_owned(); self.header.split("  ").count()]);
            }
            all.extend(of_node.into_iter().map(|row| {
                let node = std::iter::once(cell(&answer.node));
                node.chain(row).collect::<Vec<String>>()
            }));
        }
        let mut text = table(&format!("NODE  {}", self.header), all);
        for answer in answers {
            let document = answer.json().unwrap_or_default();
            let notes = document.get("notes").into_iter().flat_map(list);
            for note in notes.map(word) {
                text += &format!("{}: {}\n", cell(&answer.node), printable(&note));
            }
        }
        text
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A list that each version of the document has.
fn needed<'d>(document: &'d Value, key: &str) -> Result<&'d Vec<Value>, String> {
    (document[key].as_array()).ok_or_else(|| format!("missing list `{key}`"))
}

fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Array(list) => list.iter().map(word).collect::<Vec<_>>().join(" "),
        Value::Object(pod) if pod.contains_key("namespace") => {
            format!("{}/{}", word(&value["namespace"]), word(&value["name"]))
        }
        other => other.to_string(),
    }
}

fn shown(value: &Value) -> String {
    cell(&word(value))
}

fn fields(one: &Value, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| shown(&one[*name])).collect()
}

fn addresses(document: &Value) -> Rows {
    let names = ["node", "address", "networkName", "pod", "interface"];
    let leases = needed(document, "leases")?.iter();
    Ok(leases.map(|one| fields(one, &names)).collect())
}

fn preflight(document: &Value) -> Rows {
    let complains = |check: &&Value| check["verdict"] == "fail" || check["verdict"] == "warn";
    let ids = needed(document, "checks")?.iter().filter(complains);
    let ids = ids.map(|check| word(&check["id"]));
    let mut row = fields(&document["summary"], &["fail", "warn", "pass"]);
    row.push(cell(&ids.collect::<Vec<_>>().join(" ")));
    Ok(vec![row])
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
            let view = View::of(command).unwrap();
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
        let text = View::of("addresses").unwrap().text(&answers);
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
        let text = View::of("preflight").unwrap().text(&[answer]);
        assert!(
            text.ends_with("n1    1     1     40    L01 G06\n"),
            "{text}"
        );
    }

    #[test]
    fn what_a_node_answers_steers_no_terminal() {
        let document = json!({"leases": [{"address": "\u{1b}[2J", "interface": 7}]});
        let text = View::of("addresses")
            .unwrap()
            .text(&[answer("n1", Ok(document))]);
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
