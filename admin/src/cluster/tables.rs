//! Answers of all nodes as one table; below it the nodes that did not answer.

use cni_wire::text::printable;
use node::table::{cell, table};
use serde::Deserialize as _;
use serde_json::Value;

use super::ask::Answer;
use crate::{pods, status};

/// The rows that a node's document comes to.
type Rows = fn(&Value) -> Vec<Vec<String>>;

/// A command whose documents of all nodes are one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    /// The column NODE comes first.
    header: &'static [&'static str],
    rows: Rows,
    /// Each node lists what nodes share, and its rows name their own node.
    is_shared: bool,
}

impl View {
    /// The table of a command; `None` if it has none.
    pub(super) fn of(command: &str) -> Option<Self> {
        let (header, rows): (&[&str], Rows) = match command {
            "status" => (&status::UNITS_HEADER, status),
            "pods" => (&pods::HEADER, pods),
            "topology" => (&["GPU", "NEAREST NICS", "POD"], topology),
            "discover" => (&["DEVICE", "NETDEV", "HCA", "NUMA", "RESOURCES"], discover),
            "preflight" => (&["FAIL", "WARN", "PASS", "CHECKS"], preflight),
            "attachments" => (
                &["POD", "INTERFACE", "NETWORK", "KIND", "NETDEV", "NETNS"],
                attachments,
            ),
            "addresses" => (&["ADDRESS", "NETWORK NAME", "POD", "INTERFACE"], leases),
            _ => return None,
        };
        Some(Self {
            header,
            rows,
            is_shared: command == "addresses",
        })
    }

    /// The answers as text, with the notes of each node.
    pub(super) fn text(&self, answers: &[Answer]) -> String {
        let mut all: Vec<Vec<String>> = Vec::new();
        for answer in answers {
            let Some(document) = answer.json() else {
                continue;
            };
            let mut of_node = (self.rows)(&document);
            if self.is_shared {
                of_node.retain(|row| !all.contains(row));
                all.extend(of_node);
                continue;
            }
            if of_node.is_empty() {
                of_node.push(vec!["-".to_owned(); self.header.len()]);
            }
            all.extend(of_node.into_iter().map(|row| {
                let node = std::iter::once(cell(&answer.node));
                node.chain(row).collect::<Vec<String>>()
            }));
        }
        let mut header = vec!["NODE"];
        header.extend(self.header);
        let mut text = table(&header, &all);
        for answer in answers {
            let document = answer.json().unwrap_or_default();
            // Of a topology the notes say how to read it, on each node the same.
            let notes = list(&document["notes"]).filter(|_| document.get("distances").is_none());
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

fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn shown(value: &Value) -> String {
    cell(&word(value))
}

fn words(value: &Value) -> String {
    cell(&list(value).map(word).collect::<Vec<_>>().join(" "))
}

fn status(document: &Value) -> Vec<Vec<String>> {
    let document = status::Document::deserialize(document);
    let units = document.map(|document| document.units).unwrap_or_default();
    units.iter().map(status::units_row).collect()
}

fn pods(document: &Value) -> Vec<Vec<String>> {
    let document = pods::Document::deserialize(document).unwrap_or_default();
    document.pods.iter().map(pods::columns).collect()
}

fn attachments(document: &Value) -> Vec<Vec<String>> {
    let keys = [
        "pod",
        "interface",
        "network",
        "kind",
        "netdev",
        "netnsState",
    ];
    let row = |one: &Value| keys.map(|key| shown(&one[key])).to_vec();
    list(&document["attachments"]).map(row).collect()
}

fn topology(document: &Value) -> Vec<Vec<String>> {
    let nics: Vec<&Value> = list(&document["nics"]).collect();
    let title = |nic: &Value| {
        let first = |key: &str| nic.get(key).and_then(|names| list(names).next()).map(word);
        first("rdmaDevices")
            .or_else(|| first("netdevs"))
            .unwrap_or_else(|| word(&nic["hca"]))
    };
    let row = |(index, gpu): (usize, &Value)| {
        let near: Vec<usize> = list(&gpu["nearestNics"])
            .filter_map(|nic| usize::try_from(nic.as_u64()?).ok())
            .collect();
        let class = near.first().and_then(|nic| {
            let distances = document.pointer("/distances/gpuNic")?;
            let distance = distances.get(index)?.get(*nic)?;
            Some(word(&distance["class"]))
        });
        let names = near
            .iter()
            .filter_map(|nic| nics.get(*nic))
            .map(|nic| title(nic));
        let nearest: Vec<String> = class.into_iter().chain(names).collect();
        vec![
            format!("GPU{}", shown(&gpu["ordinal"])),
            cell(&nearest.join(" ")),
            words(&gpu["pod"]),
        ]
    };
    list(&document["gpus"]).enumerate().map(row).collect()
}

fn discover(document: &Value) -> Vec<Vec<String>> {
    let row = |hca: &Value| {
        vec![
            words(&hca["rdmaDevices"]),
            match hca["inAnotherNetns"] == true {
                true => "in a pod".to_owned(),
                false => words(&hca["netdevs"]),
            },
            shown(&hca["id"]),
            shown(&hca["numaNode"]),
            words(&hca["resources"]),
        ]
    };
    list(&document["hcas"]).map(row).collect()
}

fn preflight(document: &Value) -> Vec<Vec<String>> {
    let count = |key: &str| cell(&document["summary"].get(key).map(word).unwrap_or_default());
    let complains = list(&document["checks"])
        .filter(|check| check["verdict"] == "fail" || check["verdict"] == "warn")
        .map(|check| word(&check["id"]));
    let ids = cell(&complains.collect::<Vec<_>>().join(" "));
    vec![vec![count("fail"), count("warn"), count("pass"), ids]]
}

fn leases(document: &Value) -> Vec<Vec<String>> {
    let row = |lease: &Value| {
        let pod = match &lease["pod"] {
            Value::Object(pod) => {
                let part = |key: &str| pod.get(key).map(word).unwrap_or_default();
                format!("{}/{}", part("namespace"), part("name"))
            }
            other => word(other),
        };
        vec![
            shown(&lease["node"]),
            shown(&lease["address"]),
            shown(&lease["networkName"]),
            cell(&pod),
            shown(&lease["interface"]),
        ]
    };
    list(&document["leases"]).map(row).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::ask::Printed;
    use super::*;

    fn answer(node: &str, document: Result<Value, &str>) -> Answer {
        Answer {
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
    fn nodes_are_rows_and_those_that_did_not_answer_are_named() {
        let units = json!({"resource": "rdma/a", "healthy": 8, "unhealthy": 0, "held": 2, "kubelet": "listening"});
        let answers = [
            answer(
                "n1",
                Ok(json!({"units": [units], "addresses": [], "notes": ["pod x: far"]})),
            ),
            answer("n2", Err("container not found")),
            answer("n3", Ok(json!({"units": [], "addresses": [], "notes": []}))),
        ];
        assert_eq!(
            View::of("status").unwrap().text(&answers),
            "NODE  RESOURCE  HEALTHY  UNHEALTHY  HELD  KUBELET\n\
             n1    rdma/a    8        0          2     listening\n\
             n3    -         -        -          -     -\n\
             n1: pod x: far\n"
        );
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
            "checks": [{"id": "L02", "verdict": "fail"}, {"id": "M01", "verdict": "pass"},
                       {"id": "G06", "verdict": "warn"}],
        });
        let answer = answer("n1", Ok(document));
        let text = View::of("preflight").unwrap().text(&[answer]);
        assert!(
            text.ends_with("n1    1     1     40    L02 G06\n"),
            "{text}"
        );
    }

    #[test]
    fn what_a_node_answers_steers_no_terminal() {
        let document = json!({"hcas": [{"rdmaDevices": ["\u{1b}[2J"], "id": 7, "netdevs": "x"}]});
        let text = View::of("discover")
            .unwrap()
            .text(&[answer("n1", Ok(document))]);
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
