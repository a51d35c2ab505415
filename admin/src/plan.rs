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

use anyhow::bail;
use cni_wire::text::printable;
use serde_json::{Value, json};

use crate::cluster::Flags;
use crate::cluster::ask::CONTAINER;
use crate::documents::{name_of, objects, text_at};
use crate::global::{Global, Kubectl};
use crate::kubectl::NETWORKS;
use crate::output::{Ended, Outcome, complain};
use decide::Options;
use render::{LABEL, Target};

/// Writes pools, policy and networks for what the nodes of a cluster have.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "kubectl rdma plan > rdma.yaml && kubectl apply -f rdma.yaml\n\
    Run again with the same flags, it prints what would change; --all prints the file.\n\
    Exit status: 0 planned, or no difference; 1 a node did not answer, or differences; 2 wrong usage."
)]
pub(crate) struct Plan {
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
    /// Plans from what nodes answered to `discover` and `topology`, and compares with what the cluster has.
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
        let planned = objects("the plan", &file)?;
        let (mut changes, mut removed, mut is_configured) = (Vec::new(), Vec::new(), true);
        for object in &planned {
            let title = compare::title(object);
            let resource = if object["kind"] == "ConfigMap" {
                "configmaps"
            } else {
                NETWORKS
            };
            let namespace = text_at(object, "/metadata/namespace");
            let present = cluster
                .in_namespace(namespace)
                .get::<Value>(resource, name_of(object));
            let present = present.unwrap_or_else(|error| {
                let loss = "applying this file may remove keys of it";
                plan.warnings
                    .push(format!("cannot read {title}, so {loss}: {error:#}"));
                None
            });
            is_configured &= (present.iter()).any(|one| {
                one.pointer("/metadata/labels")
                    .is_some_and(|all| all[LABEL.0] == LABEL.1)
            });
            let lines = present.map(|present| compare::difference(&present, object));
            let lines = lines.unwrap_or_default();
            for value in lines.iter().filter_map(|line| line.strip_prefix("- ")) {
                removed.push(format!("{title} has {value}, which this file removes"));
            }
            changes.extend((!lines.is_empty()).then_some((title, lines)));
        }
        let shows_changes = is_configured && !self.all;
        let (key, value) = match shows_changes {
            true => ("differences", json!(changes)),
            false => ("objects", json!(planned)),
        };
        if !shows_changes {
            plan.warnings.append(&mut removed);
            plan.assumed
                .iter()
                .for_each(|line| complain(&format!("assumed: {line}")));
        }
        plan.warnings
            .iter()
            .for_each(|line| complain(&format!("warning: {line}")));
        let is_good = is_whole && (changes.is_empty() || !shows_changes);
        let document = json!({key: value, "assumed": plan.assumed, "warnings": plan.warnings});
        global.say(document, || match shows_changes {
            false => render::head(&plan) + &file,
            true if changes.is_empty() => "no difference\n".to_owned(),
            true => {
                let lines = |(title, lines): (String, Vec<String>)| [vec![title], lines].concat();
                let lines = changes.into_iter().flat_map(lines);
                lines.map(|line| printable(&line) + "\n").collect()
            }
        });
        Ok(Outcome::good_if(is_good))
    }

    /// Where the objects go, by the volumes of the daemon's `DaemonSet`.
    fn target(&self, cluster: &Kubectl, is_late: bool, warnings: &mut Vec<String>) -> Target {
        let sets = cluster.list::<Value>("daemonsets").unwrap_or_else(|error| {
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
