//! `kubectl rdma plan`: writes the configuration of a cluster from what its nodes have.
//!
//! - `read`: facts of the nodes, from the documents of `discover` and `topology`
//! - `decide`, `select`, `network`: the plan, pure
//! - `render`: the file

mod decide;
mod network;
mod read;
mod render;
mod select;

use anyhow::bail;
use serde_json::{Value, json};

use crate::cluster::Flags;
use crate::cluster::ask::CONTAINER;
use crate::documents::{name_of, objects, text_at};
use crate::global::{Global, Kubectl};
use crate::output::{Ended, Outcome, block_on, complain};
use decide::Options;
use render::Target;

/// Writes pools, policy and networks for what the nodes of a cluster have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml && kubectl diff -f rdma.yaml\n\
    kubectl apply -f rdma.yaml\n\
    Exit status: 0 planned, 1 a node did not answer, 2 wrong usage."
)]
pub(crate) struct Plan {
    #[command(flatten)]
    options: Options,
    /// Namespace of the networks
    #[arg(long, value_name = "NAME", default_value = "default")]
    network_namespace: String,
}

impl Plan {
    /// Plans from what nodes answered to `discover` and `topology`.
    pub(crate) fn run(&self, answers: &[Vec<Value>; 2], global: &Global, flags: &Flags) -> Ended {
        let cluster = &flags.kubectl;
        let (nodes, silent) = read::nodes(answers);
        if nodes.is_empty() {
            bail!("no node to plan for: {}", silent.join("; "));
        }
        let mut plan = decide::plan(&nodes, &self.options)?;
        let is_whole = silent.is_empty();
        plan.warnings.splice(0..0, silent);
        if !flags.nodes.is_empty() {
            let line =
                "this plan is for the nodes of --nodes, and the daemon's on all nodes use it";
            plan.warnings.push(line.to_owned());
        }
        let target = self.target(cluster, plan.is_late(), &mut plan.warnings);
        let file = render::objects(&plan, &target);
        for line in &plan.assumed {
            complain(&format!("assumed: {line}"));
        }
        for line in &plan.warnings {
            complain(&format!("warning: {line}"));
        }
        let objects = objects("the plan", &file)?;
        let document =
            json!({"objects": objects, "assumed": plan.assumed, "warnings": plan.warnings});
        global.say(document, || render::head(&plan) + &file);
        Ok(Outcome::good_if(is_whole))
    }

    /// Where the objects go, by the volumes of the daemon's `DaemonSet`.
    fn target(&self, cluster: &Kubectl, is_late: bool, warnings: &mut Vec<String>) -> Target {
        let sets = block_on(cluster.objects(&["daemonsets"])).flatten();
        let sets = sets.unwrap_or_else(|error| {
            let guess = "the name of its ConfigMap is a guess";
            warnings.push(format!(
                "cannot read the daemon's DaemonSet, so {guess}: {error:#}"
            ));
            Vec::new()
        });
        let is_ours =
            |set: &&Value| text_at(set, "/spec/template/spec/containers/0/name") == CONTAINER;
        let ours = sets.iter().find(is_ours);
        let volumes = ours.and_then(|set| set.pointer("/spec/template/spec/volumes")?.as_array());
        let volume = |name| {
            volumes
                .into_iter()
                .flatten()
                .find(|volume| volume["name"] == name)
        };
        if is_late && volumes.is_some() && volume("cdi").is_none() {
            let remedy = "kubectl apply -k manifests/overlays/late";
            warnings.push(format!(
                "late binding needs the CDI directory in the DaemonSet: {remedy}"
            ));
        }
        let config = volume("config").map(|volume| text_at(volume, "/configMap/name"));
        Target {
            daemon: ours.map_or(CONTAINER, name_of).to_owned(),
            config_map: config
                .filter(|name| !name.is_empty())
                .unwrap_or(CONTAINER)
                .to_owned(),
            namespace: cluster.namespace().to_owned(),
            networks: self.network_namespace.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
