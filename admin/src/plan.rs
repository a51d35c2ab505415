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
use render::{CONFIG_MAP, LABEL};

/// The resource of networks.
const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// Writes pools, policy and networks for what the nodes have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml && kubectl apply -f rdma.yaml\n\
    In a cluster that has the planned objects it prints what would change; --all prints the file.\n\
    Exit status: 0 planned, or no difference; 1 a node did not answer, or differences; 2 wrong usage."
)]
pub(crate) struct Plan {
    /// What "kubectl rdma discover --json" and "kubectl rdma topology --json" printed, instead of nodes
    #[arg(num_args = 2, value_names = ["DISCOVER", "TOPOLOGY"])]
    files: Vec<PathBuf>,
    /// How pods get HCAs [default: late with GPUs, exclusive with several HCAs or VFs, else shared]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Addresses of pods; each rail gets an equal part [default: a private range without nodes]
    #[arg(long, value_name = "CIDR")]
    range: Option<IpNetwork>,
    /// A node has a network of this length in each range: for fabrics that route to nodes
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
        let documents = self.documents()?.context(
            "rdmactl plan needs two files, DISCOVER and TOPOLOGY; kubectl rdma plan asks the nodes of a cluster",
        )?;
        self.print(&documents, global, None)
    }

    /// The files, if some are named.
    pub(crate) fn documents(&self) -> anyhow::Result<Option<[Value; 2]>> {
        let [discover, topology] = self.files.as_slice() else {
            return Ok(None);
        };
        let read = |file: &PathBuf| -> anyhow::Result<Value> {
            let (place, text) = text_of(file)?;
            serde_json::from_str(&text).with_context(|| format!("{place} is not JSON"))
        };
        Ok(Some([read(discover)?, read(topology)?]))
    }

    /// Plans from what nodes answered, and compares with what the cluster has.
    pub(crate) fn print(
        &self,
        documents: &[Value; 2],
        global: &Global,
        cluster: Option<&Kubectl>,
    ) -> Ended {
        let [discover, topology] = documents;
        let (nodes, silent) = read::nodes(discover, topology);
        let mut warnings: Vec<String> = silent
            .iter()
            .map(|(node, why)| format!("{node} is not in this plan: {why}"))
            .collect();
        if nodes.is_empty() {
            bail!("no node to plan for: {}", warnings.join("; "));
        }
        let options = Options {
            mode: self.mode,
            range: self.range,
            per_node_prefix: self.per_node_prefix,
            vlan: self.vlan,
        };
        let plan = decide::plan(&nodes, &options)?;
        warnings.extend(plan.warnings.iter().cloned());
        let daemon = cluster.map_or("kube-system", |cluster| &cluster.namespace);
        let namespaces = [daemon, self.network_namespace.as_str()];
        let planned = objects("the plan", &render::text(&plan, &[], namespaces))?;
        let mut pairs = Vec::new();
        for object in &planned {
            let present: Option<Value> = match (cluster, name_of(object)) {
                (None, _) => None,
                (Some(cluster), CONFIG_MAP) => cluster.get("configmaps", CONFIG_MAP)?,
                (Some(cluster), name) => cluster
                    .in_namespace(&self.network_namespace)
                    .get(NETWORKS, name)?,
            };
            pairs.push((object, present));
        }
        let is_ours = |object: &Value| {
            let labels = object.pointer("/metadata/labels");
            labels.and_then(|labels| labels.get(LABEL.0)) == Some(&LABEL.1.into())
        };
        let is_configured = pairs
            .iter()
            .all(|(_, present)| present.as_ref().is_some_and(is_ours));
        let (mut changes, mut lost) = (Vec::new(), Vec::new());
        for (object, present) in pairs {
            let (Some(present), title) = (present, compare::title(object)) else {
                continue;
            };
            let (present, planned) = (compare::keys(&present), compare::keys(object));
            let removed = present.keys().filter(|key| !planned.contains_key(*key));
            lost.extend(removed.map(|key| format!("{title} has {key}, which this file removes")));
            let lines = compare::difference(&present, &planned);
            changes.extend((!lines.is_empty()).then_some((title, lines)));
        }
        let shows_changes = is_configured && !self.all;
        warnings.extend(lost.into_iter().filter(|_| !shows_changes));
        warnings
            .iter()
            .for_each(|line| complain(&format!("warning: {line}")));
        let ended = Outcome::good_if(silent.is_empty() && (changes.is_empty() || !shows_changes));
        if global.json {
            let key = if shows_changes {
                "differences"
            } else {
                "objects"
            };
            let value = if shows_changes {
                json!(changes)
            } else {
                json!(planned)
            };
            say_json(json!({key: value, "assumed": plan.assumed, "warnings": warnings}));
        } else if shows_changes {
            if changes.is_empty() {
                say("no difference\n");
            }
            for (title, lines) in changes {
                let lines: Vec<String> = lines.iter().map(|line| printable(line) + "\n").collect();
                say(&format!("{title}\n{}", lines.concat()));
            }
        } else {
            plan.assumed
                .iter()
                .for_each(|line| complain(&format!("assumed: {line}")));
            say(&render::text(&plan, &warnings, namespaces));
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests;
