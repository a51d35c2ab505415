//! `kubectl rdma plan`: writes the configuration of a cluster from what its nodes have.
//!
//! - `read`: facts of the nodes, from their documents of `discover`
//! - `decide`, `select`, `network`: the plan, pure
//! - `render`: the file

mod decide;
mod network;
pub(crate) mod read;
mod render;
mod select;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::Flags;
use crate::documents::{default_policy, documents, name_of, text_at};
use crate::global::{Global, Kubectl};
use crate::output::{Ended, Exit, block_on, complain};
use decide::Options;
use render::Target;

/// Writes pools, policy and networks for what the nodes of a cluster have.
#[derive(Debug, clap::Args)]
#[command(after_help = "kubectl rdma plan > values.yaml\n\
    helm upgrade --install rdma-netdev CHART --namespace kube-system -f values.yaml\n\
    Exit status: 0 planned, 1 a node did not answer, 2 wrong usage.")]
pub(crate) struct Plan {
    /// Write objects for kubectl apply, not Helm values
    #[arg(long)]
    manifests: bool,
    #[command(flatten)]
    options: Options,
    /// Namespace of the networks
    #[arg(long, value_name = "NAME", default_value = "default")]
    network_namespace: String,
}

impl Plan {
    /// Plans from what nodes answered to `discover`.
    pub(crate) fn run(&self, answers: &[Value], global: &Global, flags: &Flags) -> Ended {
        let (nodes, silent) = read::nodes(answers);
        if nodes.is_empty() {
            bail!("no node to plan for: {}", silent.join("; "));
        }
        let mut plan = decide::plan(&nodes, &self.options)?;
        let is_whole = silent.is_empty();
        plan.warnings.splice(0..0, silent);
        if !flags.nodes.is_empty() {
            let line = "this plan is for the nodes of --nodes, but the daemons of all nodes use it";
            plan.warnings.push(line.to_owned());
        }
        let target = self.target(flags, &mut plan.warnings);
        let values = render::values(&plan, &target);
        let parsed = documents("the plan", &values)?;
        let objects = render::objects(parsed.first().unwrap_or(&Value::Null), &target);
        for line in &plan.assumed {
            complain(&format!("assumed: {line}"));
        }
        for line in &plan.warnings {
            complain(&format!("warning: {line}"));
        }
        let document =
            json!({"objects": objects, "assumed": plan.assumed, "warnings": plan.warnings});
        global.say(document, || match self.manifests {
            true => render::manifests(&plan, &objects, &target),
            false => values,
        });
        Ok(Exit::good_if(is_whole))
    }

    /// Where the plan goes, by the daemon's `DaemonSet`.
    fn target(&self, flags: &Flags, warnings: &mut Vec<String>) -> Target {
        let cluster = &flags.kubectl;
        let selector = format!("--selector={}", flags.selector);
        let sets = block_on(cluster.objects(&["daemonsets", &selector])).flatten();
        let sets = sets.unwrap_or_else(|error| {
            let guess = "the names of its release and ConfigMap are a guess";
            warnings.push(format!(
                "cannot read the daemon's DaemonSet, so {guess}: {error:#}"
            ));
            Vec::new()
        });
        let ours = sets.first();
        if let [first, _, ..] = sets.as_slice() {
            warnings.push(format!(
                "several DaemonSets, and this is for {}: select one by --selector \
                 app.kubernetes.io/instance=RELEASE",
                name_of(first)
            ));
        }
        let daemon = ours.map_or("rdma-netdev", name_of);
        let policy = installed_policy(cluster, daemon).unwrap_or_else(|error| {
            warnings.push(format!(
                "with --manifests, policy.json has the keys of the plan and the default store only: {error:#}"
            ));
            default_policy()
        });
        let release = ours.map(|set| text_at(set, "/metadata/labels/app.kubernetes.io~1instance"));
        Target {
            release: release.filter(|name| !name.is_empty()).map(str::to_owned),
            daemon: daemon.to_owned(),
            namespace: cluster.namespace().to_owned(),
            networks: self.network_namespace.clone(),
            policy,
        }
    }
}

/// The policy in the daemon's `ConfigMap`.
fn installed_policy(cluster: &Kubectl, daemon: &str) -> anyhow::Result<Value> {
    let get = [
        "get",
        "configmap",
        "--ignore-not-found",
        "--output=json",
        "--",
        daemon,
    ];
    let printed = block_on(cluster.printed(&get, b""))??;
    ensure!(!printed.is_empty(), "ConfigMap {daemon} does not exist");
    let map: Value = serde_json::from_slice(&printed)?;
    serde_json::from_str(text_at(&map, "/data/policy.json"))
        .with_context(|| format!("ConfigMap {daemon}: policy.json"))
}

#[cfg(test)]
mod tests;
