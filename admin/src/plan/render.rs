//! A plan as Helm values, with comments that give the reasons, and as the objects that the chart would
//! make of them. Pure.

use cni_wire::text::printable;
use serde_json::{Value, json};

use super::decide::{ClusterPlan, Group, Mode, PlanPool, names};
use super::network::{PlanNetwork, needs_network};
use super::read::PlanHca;
use crate::documents::{definition, merge, name_of, put};
use crate::node_guid;

/// Of a mapping or list on one line.
const WIDTH: usize = 60;

const SHARED: &str = "    mode: shared
    # A unit is a share of an HCA. The HCA's GID table limits their number.
";
const EXCLUSIVE: &str = "    mode: exclusive
    # A unit is one HCA for one pod.
    policy: numa
";
const LATE: &str = "    mode: exclusive
    # The daemon chooses a pod's HCAs next to its GPUs.
    binding: late
    # Slots that no network attaches are bound when the container starts.
    bindAtStart: true
    # false: a pod starts also if a closer HCA exists but is not free.
    strict: true
";

/// Where the plan goes.
pub(crate) struct Target {
    /// The Helm release, if Helm installed the daemon.
    pub release: Option<String>,
    /// The daemon's `DaemonSet` and its namespace.
    pub daemon: String,
    pub namespace: String,
    /// Namespace of the networks.
    pub networks: String,
    /// The installed policy.
    pub policy: Value,
}

/// Helm values.
pub(crate) fn values(plan: &ClusterPlan<'_>, target: &Target) -> String {
    let Target {
        release, namespace, ..
    } = target;
    let release = release.as_deref().unwrap_or("rdma-netdev");
    let usage = [
        "Helm values, written by kubectl rdma plan. Read them, then run, with the other values files of \
         the release:",
        &format!("  helm upgrade --install {release} CHART --namespace {namespace} -f FILE"),
        "Without Helm: kubectl rdma plan --manifests",
    ];
    let mut text = head(plan, &usage) + "pools:\n  version: 1\n  pools:\n";
    text.extend(plan.pools.iter().map(pool_text));
    text += &format!("policy:{}", yaml(&plan.policy, "  "));
    if !plan.networks.is_empty() {
        text += "networks:\n";
    }
    for network in &plan.networks {
        text += &network_text(network, &target.networks);
    }
    text
}

/// The objects of such values.
pub(crate) fn objects(values: &Value, target: &Target) -> Vec<Value> {
    let labels = json!({"app.kubernetes.io/managed-by": "kubectl-rdma"});
    let name = format!("{}-plan", target.daemon);
    let mut policy = target.policy.clone();
    merge(&mut policy, &values["policy"]);
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": target.namespace},
        "data": {"pools.json": format!("{:#}\n", values["pools"]), "policy.json": format!("{policy:#}\n")},
    })];
    let networks = values["networks"].as_object().into_iter().flatten();
    objects.extend(networks.map(|(name, network)| definition(name, network)));
    for object in &mut objects {
        if let Some(metadata) = object.get_mut("metadata") {
            put(metadata, "labels", labels.clone());
        }
    }
    objects
}

/// The objects as a file.
pub(crate) fn manifests(plan: &ClusterPlan<'_>, objects: &[Value], target: &Target) -> String {
    let Target {
        daemon, namespace, ..
    } = target;
    let usage = [
        "Objects, written by kubectl rdma plan --manifests. Read them, then run:",
        "  kubectl apply -f FILE",
        "If the policy has changed, run also:",
        &format!("  kubectl --namespace {namespace} rollout restart daemonset/{daemon}"),
    ];
    let mut text = head(plan, &usage);
    for object in objects {
        let name = name_of(object);
        let network = plan.networks.iter().find(|network| network.name == name);
        text += "---\n";
        let comments = network.into_iter().flat_map(|network| &network.comments);
        text.extend(comments.map(|line| comment("", line)));
        text += yaml(object, "").trim_start();
    }
    text
}

/// What a person reads first.
fn head(plan: &ClusterPlan<'_>, usage: &[&str]) -> String {
    let mut lines: Vec<String> = usage.iter().map(|line| (*line).to_owned()).collect();
    let warnings = plan.warnings.iter().map(|line| format!("WARNING: {line}"));
    let assumed = plan.assumed.iter().map(|line| format!("ASSUMED: {line}"));
    lines.extend(warnings.chain(assumed));
    for (number, group) in (1..).zip(&plan.groups) {
        lines.push(String::new());
        lines.push(format!("Group {number}: {}", names(&group.nodes)));
        lines.extend(group_lines(group));
    }
    lines.iter().map(|line| comment("", line)).collect()
}

/// GPUs and HCAs of a group, by its first node.
fn group_lines(group: &Group<'_>) -> Vec<String> {
    let Some(node) = group.nodes.first() else {
        return Vec::new();
    };
    let gpus = node.gpus.first();
    let gpus = gpus.map(|gpu| format!("  {} GPUs: {gpu}", node.gpus.len()));
    let mut lines = vec![gpus.unwrap_or_else(|| "  no GPU".to_owned())];
    if node.hcas.is_empty() {
        lines.push("  no RDMA device".to_owned());
    }
    for (hca, usage) in node.hcas.iter().zip(&group.usage) {
        let mut line = match usage {
            Ok(rail) => format!("  rail {rail}: {}", title(hca)),
            Err(why) => format!("  not for pods: {}: {why}", title(hca)),
        };
        let gpus: Vec<String> = hca.gpus.iter().map(ToString::to_string).collect();
        if usage.is_ok() && !gpus.is_empty() {
            line += &format!(", next to GPU {}", gpus.join(" "));
        }
        let problem = hca.facts.rdma_devices.iter().find_map(node_guid::missing);
        line.extend(
            problem
                .filter(|_| usage.is_ok())
                .map(|(problem, _)| format!("; {problem}")),
        );
        lines.push(line);
    }
    lines
}

fn title(hca: &PlanHca) -> String {
    let facts = &hca.facts;
    let device = facts
        .pci
        .as_ref()
        .map(|pci| format!(" {:04x}:{:04x}", pci.vendor, pci.device));
    let (device, rate) = (device.unwrap_or_default(), hca.rate / 1000);
    let (names, netdevs, kind) = (hca.names(), hca.netdevs(), hca.kind().word());
    format!(
        "{names} {} {netdevs},{device} {kind} {} {rate}G",
        facts.id,
        hca.link()
    )
}

fn pool_text(pool: &PlanPool<'_>) -> String {
    let groups: Vec<String> = pool
        .groups
        .iter()
        .map(|one| (one + 1).to_string())
        .collect();
    let mut text = comment("  ", &format!("Groups: {}", groups.join(", ")));
    if !needs_network(pool) {
        let why = "Pods need no network: without netdevs, verbs work in shared RDMA mode.";
        text += &comment("  ", why);
    }
    text += &format!("  - resource: {}\n", scalar(&pool.resource));
    text += match pool.mode {
        Mode::Shared => SHARED,
        Mode::Exclusive => EXCLUSIVE,
        Mode::Late => LATE,
    };
    if pool.hcas.iter().all(|hca| hca.link() == "other") {
        text += "    # These do not use rdma_cm.\n    nodes: {required: [uverbs]}\n";
    } else if pool.mode == Mode::Late {
        text += "    # NCCL_IB_HCA, NCCL_IB_GID_INDEX and UCX_NET_DEVICES in the containers.\n";
        text += "    environment: true\n";
    }
    if pool.is_optional {
        text += "    # Nodes of other groups do not offer it.\n    optional: true\n";
    }
    let key = |(key, values): &(&str, Vec<String>)| format!("{key}: {}", flow(&json!(values)));
    let keys: Vec<String> = pool.select.iter().map(key).collect();
    text + &format!("    select: {{{}}}\n", keys.join(", "))
}

fn network_text(network: &PlanNetwork, namespace: &str) -> String {
    let comments = network.comments.iter().map(|line| comment("  ", line));
    let value = json!({
        "namespace": namespace, "resourceName": network.resource, "plugins": [network.plugin],
    });
    let (comments, name) = (comments.collect::<String>(), scalar(&network.name));
    format!("{comments}  {name}:{}", yaml(&value, "    "))
}

/// A comment; nothing in it ends the line or steers a terminal.
fn comment(margin: &str, text: &str) -> String {
    let line = format!("{margin}# {}", printable(text));
    format!("{}\n", line.trim_end())
}

/// A value after its key: on the same line if it is short, else below it.
fn yaml(value: &Value, margin: &str) -> String {
    match value {
        Value::String(text) if text.contains('\n') => {
            let lines: String = (text.lines().map(|line| format!("{margin}{line}\n"))).collect();
            format!(" |\n{lines}")
        }
        Value::Object(fields) if !is_short(value) => {
            let field = |(key, value): (&String, _)| {
                let value = yaml(value, &format!("{margin}  "));
                format!("{margin}{}:{value}", scalar(key))
            };
            let fields: String = fields.iter().map(field).collect();
            format!("\n{fields}")
        }
        Value::Array(items) if !is_short(value) => {
            let item = |item| {
                let item = yaml(item, &format!("{margin}  "));
                format!("{margin}- {}", item.trim_start())
            };
            format!("\n{}", items.iter().map(item).collect::<String>())
        }
        _ => format!(" {}\n", flow(value)),
    }
}

/// It fits on one line.
fn is_short(value: &Value) -> bool {
    let text = flow(value);
    text.len() <= WIDTH && !text.contains("\\n")
}

/// A value on one line.
fn flow(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let field = |(key, value): (&String, _)| format!("{}: {}", scalar(key), flow(value));
            let fields: Vec<String> = fields.iter().map(field).collect();
            format!("{{{}}}", fields.join(", "))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(flow).collect();
            format!("[{}]", items.join(", "))
        }
        Value::String(text) => scalar(text),
        other => other.to_string(),
    }
}

/// A string, quoted unless YAML of each version reads the word as a string.
pub(super) fn scalar(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let words = ["true", "false", "yes", "no", "on", "off", "y", "n", "null"];
    let is_word = text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(is_plain);
    match is_word && !words.iter().any(|word| text.eq_ignore_ascii_case(word)) {
        true => text.to_owned(),
        false => json!(text).to_string(),
    }
}
