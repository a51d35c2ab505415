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
use crate::output::{Ended, Outcome, complain};
use decide::Options;
use render::Target;

/// Writes pools, policy and networks for what the nodes of a cluster have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml && kubectl apply -f rdma.yaml\n\
    What it would change: kubectl rdma plan | kubectl diff -f -\n\
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
        let (nodes, silent) = read::nodes(answers);
        if nodes.is_empty() {
            bail!("no node to plan for: {}", silent.join("; "));
        }
        let mut plan = decide::plan(&nodes, &self.options)?;
        let is_whole = silent.is_empty();
        plan.warnings.splice(0..0, silent);
        let target = self.target(&flags.kubectl)?;
        let file = render::objects(&plan, &target);
        for (word, lines) in [("assumed", &plan.assumed), ("warning", &plan.warnings)] {
            lines
                .iter()
                .for_each(|line| complain(&format!("{word}: {line}")));
        }
        let document = json!({
            "objects": objects("the plan", &file)?, "assumed": plan.assumed, "warnings": plan.warnings,
        });
        global.say(document, || render::head(&plan) + &file);
        Ok(Outcome::good_if(is_whole))
    }

    /// Where the objects go, by the volumes of the daemon's `DaemonSet`.
    fn target(&self, cluster: &Kubectl) -> anyhow::Result<Target> {
        let sets = cluster.list::<Value>("daemonsets")?;
        let is_ours =
            |set: &&Value| text_at(set, "/spec/template/spec/containers/0/name") == CONTAINER;
        let ours = sets.iter().find(is_ours);
        let volumes = ours.and_then(|set| set.pointer("/spec/template/spec/volumes")?.as_array());
        let mut volumes = volumes.into_iter().flatten();
        let config = volumes.find(|volume| volume["name"] == "config");
        let config = config.map(|volume| text_at(volume, "/configMap/name"));
        Ok(Target {
            daemon: ours.map_or(CONTAINER, name_of).to_owned(),
            config_map: config
                .filter(|name| !name.is_empty())
                .unwrap_or(CONTAINER)
                .to_owned(),
            namespace: cluster.namespace.clone(),
            networks: self.network_namespace.clone(),
        })
    }
}

#[cfg(test)]
mod tests;
