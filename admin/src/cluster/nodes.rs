//! What the API knows of all nodes: their `RdmaNode`s, as one table. No node is asked.

use anyhow::{anyhow, bail};
use node_wire::rdma_node::NodeState;
use serde::{Deserialize as _, Serialize};
use serde_json::{Value, json};

use super::Flags;
use super::ask::silent_nodes;
use crate::documents::name_of;
use crate::global::Global;
use crate::kubectl::RDMA_NODES;
use crate::output::{Ended, Exit, page, table};
use crate::state_rows::{HCAS, RESOURCES, TOPOLOGY, hcas, resources, topology};

/// A node and its state.
#[derive(Debug, Default, Serialize)]
pub(crate) struct KnownNode {
    pub node: String,
    pub state: NodeState,
}

/// A table of nodes: its columns, and the rows of one node.
pub(super) type View = (&'static str, fn(&NodeState) -> Vec<Vec<String>>);

/// The tables of a command.
pub(super) fn views(command: &str, is_wide: bool) -> Vec<View> {
    match command {
        "discover" => vec![(HCAS, hcas)],
        "topology" => vec![(TOPOLOGY, topology)],
        _ if is_wide => vec![(RESOURCES, resources), (HCAS, hcas)],
        _ => vec![(RESOURCES, resources)],
    }
}

/// The nodes that were chosen, by name, and of which others the object cannot be read.
///
/// # Errors
/// There are none, one that was named is not there, or what kubectl says.
pub(crate) async fn read(flags: &Flags) -> anyhow::Result<(Vec<KnownNode>, Vec<String>)> {
    const ELSE: &str = "rdma-agent writes them (value rdmaNodes.enabled of the chart); without them, \
                        run rdmactl on the node";
    let objects = flags.kubectl.objects(&[RDMA_NODES]).await;
    let objects = objects.map_err(|error| {
        let error = format!("{error:#}");
        match error.contains("resource type") {
            true => anyhow!("no RdmaNodes: {error}: {ELSE}"),
            false => anyhow!("{error}"),
        }
    })?;
    let (mut nodes, mut unread) = (Vec::new(), Vec::new());
    for object in objects {
        let node = name_of(&object).to_owned();
        if !flags.nodes.is_empty() && !flags.nodes.contains(&node) {
            continue;
        }
        let status = object.get("status").unwrap_or(&Value::Null);
        match NodeState::deserialize(status) {
            Ok(state) => nodes.push(KnownNode { node, state }),
            Err(error) => unread.push(format!(
                "{node}: its RdmaNode is of another version: {error}"
            )),
        }
    }
    for node in &flags.nodes {
        let is_unread = unread
            .iter()
            .any(|one| one.starts_with(&format!("{node}: ")));
        if !is_unread && !nodes.iter().any(|known| known.node == *node) {
            bail!("no RdmaNode {node}: {ELSE}");
        }
    }
    if nodes.is_empty() && unread.is_empty() {
        bail!("no RdmaNode objects: {ELSE}");
    }
    nodes.sort_by(|a, b| a.node.cmp(&b.node));
    Ok((nodes, unread))
}

/// Prints tables of nodes, below them what is wrong.
pub(super) async fn print(views: &[View], flags: &Flags, global: &Global) -> Ended {
    let (nodes, unread) = read(flags).await?;
    let silent = silent_nodes(flags).await;
    let is_silent = |known: &&KnownNode| silent.contains(&known.node);
    let notes = nodes.iter().filter(is_silent).map(|known| {
        let node = &known.node;
        format!("{node}: its kubelet does not report: this was known of it before")
    });
    let all = nodes.len() + unread.len();
    let is_wrong = |known: &&KnownNode| is_silent(known) || !known.state.problems.is_empty();
    let wrong = unread.len() + nodes.iter().filter(is_wrong).count();
    let problems = nodes.iter().flat_map(|known| {
        let problems = known.state.problems.iter();
        problems.map(move |problem| format!("{}: {problem}", known.node))
    });
    let notes: Vec<String> = unread.into_iter().chain(notes).chain(problems).collect();
    global.say(json!({"nodes": nodes, "notes": notes}), || {
        text(views, &nodes, &notes)
    });
    match wrong {
        0 => Ok(Exit::Good),
        wrong => bail!("{wrong} of {all} nodes have a problem"),
    }
}

fn text(views: &[View], nodes: &[KnownNode], notes: &[String]) -> String {
    let of_view = |(header, rows): &View| {
        let rows = nodes.iter().flat_map(|known| {
            let mut rows = rows(&known.state);
            if rows.is_empty() {
                rows.push(vec!["-".to_owned(); header.split("  ").count()]);
            }
            let with_node = |row| [vec![known.node.clone()], row].concat();
            rows.into_iter().map(with_node).collect::<Vec<_>>()
        });
        table(&format!("NODE  {header}"), rows)
    };
    page(views.iter().map(of_view).collect(), notes)
}

#[cfg(test)]
mod tests {
    use node_wire::rdma_node::ResourceState;

    use super::*;

    #[test]
    fn nodes_are_rows_and_their_problems_lines() {
        let resource = ResourceState {
            name: "rdma/nic".into(),
            mode: "exclusive".into(),
            nics: 7,
            expected: 8,
            healthy: 7,
            units: 8,
            healthy_units: 7,
            allocated_units: 4,
            ..ResourceState::default()
        };
        let known = |node: &str, resources: Vec<ResourceState>, problem: &[&str]| KnownNode {
            node: node.into(),
            state: NodeState {
                resources,
                problems: problem.iter().map(|&text| text.to_owned()).collect(),
                ..NodeState::default()
            },
        };
        let nodes = [
            known("n1", vec![resource], &[]),
            known("n2", Vec::new(), &[]),
        ];
        let notes = ["n1: \u{1b}[2J".to_owned()];
        assert_eq!(
            text(&views("status", false), &nodes, &notes),
            "NODE  RESOURCE  MODE       NICS  EXPECTED  HEALTHY  UNITS   ALLOCATED\n\
             n1    rdma/nic  exclusive  7     8         7        7 of 8  4\n\
             n2    -         -          -     -         -        -       -\n\n\
             n1: \\u{1b}[2J\n"
        );
    }
}
