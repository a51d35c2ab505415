//! `kubectl rdma plan`: writes the configuration of a cluster from what its nodes have.
//!
//! - `read`: facts of the nodes, from the documents of `discover` and `topology`
//! - `decide`, `select`, `network`: the plan, pure
//! - `render`: the file
//! - `compare`: what it would change in the cluster

mod compare;
mod decide;
mod network;
mod read;
mod render;
mod select;

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use cni_wire::text::printable;
use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use crate::documents::{name_of, objects};
use crate::global::{Global, Kubectl};
use crate::output::{Ended, Outcome, complain, say, say_json, text_of};
use decide::{Mode, Options};
use render::{CONFIG_MAP, LABEL, Place};

/// The resource of networks.
const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// Writes pools, policy and networks for what the nodes have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml; kubectl apply -f rdma.yaml\n\
    In a cluster that has the planned networks it prints what would change; --all prints the file.\n\
    Without a cluster: FILE is what \"kubectl rdma discover --json\" and \"kubectl rdma topology --json\" \
    printed.\n\
    Exit status: 0 planned, or no difference; 1 a node did not answer, or differences; 2 wrong usage."
)]
pub(crate) struct Plan {
    /// Plan from these answers of nodes; - is standard input
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How pods get HCAs [default: late with GPUs, exclusive with several HCAs or VFs, else shared]
    #[arg(long, value_enum, value_name = "MODE")]
    mode: Option<Mode>,
    /// Addresses of pods; each rail gets an equal part [default: a private range without nodes]
    #[arg(long, value_name = "CIDR")]
    range: Option<IpNetwork>,
    /// Each node has a network of this length in each range, for fabrics that route to nodes
    #[arg(long, value_name = "LENGTH", value_parser = clap::value_parser!(u8).range(16..=128))]
    per_node_prefix: Option<u8>,
    /// VLAN of VFs
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4094))]
    vlan: Option<u16>,
    /// Namespace of the networks
    #[arg(long, value_name = "NAME", default_value = "default")]
    network_namespace: String,
    /// Print the file also if the cluster is configured
    #[arg(long)]
    all: bool,
}

impl Plan {
    /// Plans from files.
    pub(crate) fn run(&self, global: &Global) -> Ended {
        if self.files.is_empty() {
            bail!(
                "rdmactl plan reads files: plan a cluster by kubectl rdma plan, or name the answers of \
                 rdmactl discover --json and rdmactl topology --json"
            );
        }
        let mut documents = Vec::new();
        for file in &self.files {
            let (place, text) = text_of(file)?;
            let document = serde_json::from_str(&text);
            documents.push(document.with_context(|| format!("{place} is not JSON"))?);
        }
        self.print(&documents, global, None)
    }

    /// Whether nodes need not be asked.
    pub(crate) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Plans from what nodes answered, and compares with what the cluster has.
    pub(crate) fn print(
        &self,
        documents: &[Value],
        global: &Global,
        cluster: Option<&Kubectl>,
    ) -> Ended {
        let name = global.node_name().unwrap_or_else(|| "this node".to_owned());
        let (nodes, silent) = read::nodes(documents, &name)?;
        for (node, why) in &silent {
            complain(&format!("{node} is not in the plan: {why}"));
        }
        if nodes.is_empty() {
            bail!("no node answered: there is nothing to plan from");
        }
        let options = Options {
            mode: self.mode,
            range: self
                .range
                .map(|range| IpNetwork::new(range.network(), range.prefix()))
                .transpose()?,
            per_node_prefix: self.per_node_prefix,
            vlan: self.vlan,
        };
        let plan = decide::plan(&nodes, &options)?;
        let place = Place {
            namespace: cluster.map_or("kube-system", |cluster| &cluster.namespace),
            network_namespace: &self.network_namespace,
        };
        let planned = objects("the plan", &render::text(&plan, &silent, &[], &place))?;
        let present = match cluster {
            Some(cluster) => self.present(cluster, &planned)?,
            None => planned.iter().map(|_| None).collect(),
        };
        let ended = Outcome::good_if(silent.is_empty());
        if !self.all && present.iter().all(|one| one.as_ref().is_some_and(is_ours)) {
            return Ok(say_difference(&present, &planned, global.json).max(ended));
        }
        let mut lost = Vec::new();
        for (present, planned) in present.iter().flatten().zip(&planned) {
            let keys = compare::dropped(&compare::content(present), &compare::content(planned));
            let title = compare::title(planned);
            lost.extend(
                keys.iter()
                    .map(|key| format!("{title} has {key}, which this file removes")),
            );
        }
        for line in plan.warnings.iter().chain(&lost) {
            complain(&format!("warning: {line}"));
        }
        for line in &plan.assumed {
            complain(&format!("assumed: {line}"));
        }
        match global.json {
            true => say_json(json!({
                "objects": planned, "assumed": plan.assumed,
                "warnings": plan.warnings.iter().chain(&lost).collect::<Vec<_>>(),
            })),
            false => say(&render::text(&plan, &silent, &lost, &place)),
        }
        Ok(ended)
    }

    /// The objects of the plan as the cluster has them.
    fn present(&self, cluster: &Kubectl, planned: &[Value]) -> anyhow::Result<Vec<Option<Value>>> {
        let networks = cluster.in_namespace(&self.network_namespace);
        let get = |object: &Value| match name_of(object) {
            CONFIG_MAP => cluster.get("configmaps", CONFIG_MAP),
            name => networks.get(NETWORKS, name),
        };
        planned
            .iter()
            .map(get)
            .collect::<Result<_, _>>()
            .context("read what the cluster has; --all with files needs no cluster")
    }
}

fn is_ours(object: &Value) -> bool {
    let labels = object.pointer("/metadata/labels");
    labels
        .and_then(|labels| labels.get(LABEL.0))
        .is_some_and(|value| value == LABEL.1)
}

/// Prints what applying the plan would change.
fn say_difference(present: &[Option<Value>], planned: &[Value], is_json: bool) -> Outcome {
    let mut changes = Vec::new();
    for (present, planned) in present.iter().flatten().zip(planned) {
        let lines = compare::difference(&compare::content(present), &compare::content(planned));
        if !lines.is_empty() {
            changes.push((compare::title(planned), lines));
        }
    }
    if is_json {
        let change =
            |(object, lines): &(String, Vec<String>)| json!({"object": object, "lines": lines});
        say_json(json!({"differences": changes.iter().map(change).collect::<Vec<_>>()}));
    } else if changes.is_empty() {
        say("no difference\n");
    }
    for (object, lines) in changes.iter().filter(|_| !is_json) {
        let lines: Vec<String> = lines.iter().map(|line| printable(line) + "\n").collect();
        say(&format!("{object}\n{}", lines.concat()));
    }
    Outcome::good_if(changes.is_empty())
}

#[cfg(test)]
mod tests;
