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
use serde_json::{Value, json};

use crate::documents::{name_of, objects};
use crate::global::{Global, Kubectl};
use crate::output::{Ended, Outcome, complain, say, say_json, text_of};
use decide::Options;
use render::{CONFIG_MAP, LABEL};

/// The resource of networks.
const NETWORKS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

/// Writes pools, policy and networks for what the nodes have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml && kubectl apply -f rdma.yaml\n\
    Run again with the same flags, it prints what would change; --all prints the file.\n\
    Exit status: 0 planned, or no difference; 1 a node did not answer, or differences; 2 wrong usage."
)]
pub(crate) struct Plan {
    /// What "kubectl rdma discover --json" and "kubectl rdma topology --json" printed, instead of nodes
    #[arg(num_args = 2, value_names = ["DISCOVER", "TOPOLOGY"])]
    files: Vec<PathBuf>,
    #[command(flatten)]
    options: Options,
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
        let plan = decide::plan(&nodes, &self.options)?;
        warnings.extend(plan.warnings.iter().cloned());
        let daemon = cluster.map_or("kube-system", |cluster| &cluster.namespace);
        let namespaces = [daemon, self.network_namespace.as_str()];
        let planned = objects("the plan", &render::text(&plan, &[], namespaces))?;
        let (mut changes, mut lost, mut is_configured) = (Vec::new(), Vec::new(), true);
        for object in &planned {
            let title = compare::title(object);
            let present = cluster.map_or(Ok(None), |cluster| self.present(cluster, object));
            let present = present.unwrap_or_else(|error| {
                let loss = "applying this file may remove keys of it";
                warnings.push(format!("cannot read {title}, so {loss}: {error:#}"));
                None
            });
            let labels = present
                .iter()
                .filter_map(|one| one.pointer("/metadata/labels"));
            is_configured &= labels
                .filter_map(|all| all.get(LABEL.0))
                .any(|one| *one == LABEL.1);
            let planned = compare::keys(object);
            for present in present.iter().map(compare::keys) {
                let removed = present.keys().filter(|key| !planned.contains_key(*key));
                lost.extend(
                    removed.map(|key| format!("{title} has {key}, which this file removes")),
                );
                let lines = compare::difference(&present, &planned);
                changes.extend((!lines.is_empty()).then(|| (title.clone(), lines)));
            }
        }
        let shows_changes = is_configured && !self.all;
        warnings.extend(lost.into_iter().filter(|_| !shows_changes));
        for line in &warnings {
            complain(&format!("warning: {line}"));
        }
        let ended = Outcome::good_if(silent.is_empty() && (changes.is_empty() || !shows_changes));
        if global.json {
            let (key, value) = match shows_changes {
                true => ("differences", json!(changes)),
                false => ("objects", json!(planned)),
            };
            say_json(json!({key: value, "assumed": plan.assumed, "warnings": warnings}));
        } else if shows_changes && changes.is_empty() {
            say("no difference\n");
        } else if shows_changes {
            for (title, lines) in changes {
                let lines: Vec<String> = lines.iter().map(|line| printable(line) + "\n").collect();
                say(&format!("{title}\n{}", lines.concat()));
            }
        } else {
            for line in &plan.assumed {
                complain(&format!("assumed: {line}"));
            }
            say(&render::text(&plan, &warnings, namespaces));
        }
        Ok(ended)
    }

    /// An object as the cluster has it.
    fn present(&self, cluster: &Kubectl, object: &Value) -> anyhow::Result<Option<Value>> {
        match name_of(object) {
            CONFIG_MAP => cluster.get("configmaps", CONFIG_MAP),
            name => cluster
                .in_namespace(&self.network_namespace)
                .get(NETWORKS, name),
        }
    }
}

#[cfg(test)]
mod tests;
