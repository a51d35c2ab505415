//! A plan as a file for `kubectl apply -f`, with comments that say why. Pure.

use std::collections::BTreeMap;

use cni_wire::text::printable;
use rdma_device_plugin::candidate::without_node_guid;
use rdma_device_plugin::words::word;
use serde_json::{Value, json};

use super::decide::{Group, Mode, Plan, Pool, names};
use super::network::{Network, needs_network};
use super::read::{Hca, Node};

/// The label of objects that a plan wrote, and its value.
pub(crate) const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "kubectl-rdma");
/// The daemon's configuration.
pub(crate) const CONFIG_MAP: &str = "rdma-device-plugin";

/// Of a line of JSON.
const WIDTH: usize = 80;

const SHARED: &str = "  mode: shared
  # A unit is a share of an HCA. Without slots the GID table limits their number.
";
const EXCLUSIVE: &str = "  mode: exclusive
  # A unit is one HCA for one pod.
  policy: numa
";
const LATE: &str = "  mode: exclusive
  # The daemon chooses a pod's HCAs next to its GPUs. It needs /var/run/cdi, as by overlay late.
  binding: late
  # Slots that no network attaches are bound when the container starts.
  bindAtStart: true
  # false: a pod starts also if a closer HCA exists but is not free.
  strict: true
";

/// The file, for the namespaces of the daemon and of the networks.
pub(crate) fn text(plan: &Plan<'_>, warnings: &[String], namespaces: [&str; 2]) -> String {
    let mut text = comment("Written by kubectl rdma plan; after a look: kubectl apply -f FILE");
    for line in warnings {
        text += &comment(&format!("WARNING: {line}"));
    }
    for line in &plan.assumed {
        text += &comment(&format!("ASSUMED: {line}"));
    }
    for (number, group) in (1..).zip(&plan.groups) {
        let names = names(&group.nodes);
        text += &format!("#\n{}", comment(&format!("Group {number}: {names}")));
        text.extend(group.nodes.first().map(|node| group_text(group, node)));
    }
    let [daemon, networks] = namespaces;
    let metadata = metadata(CONFIG_MAP, daemon);
    let pools: String = plan.pools.iter().map(pool_text).collect();
    text += &format!("---\napiVersion: v1\nkind: ConfigMap\n{metadata}data:\n  config.yaml: |\n");
    text += &indented(&format!("version: 1\npools:\n{pools}"));
    let restart = "rollout restart daemonset/rdma-device-plugin";
    let restart = format!("After a change: kubectl --namespace {daemon} {restart}");
    let policy = indented(&pretty(&json!(plan.policy), ""));
    text += &format!("  {}  policy.json: |\n{policy}", comment(&restart));
    text.extend(
        plan.networks
            .iter()
            .map(|network| network_text(network, networks)),
    );
    text
}

/// HCAs and GPUs of a group, by its first node.
fn group_text(group: &Group<'_>, node: &Node) -> String {
    let count = node.gpus.len();
    let gpus = node
        .gpus
        .first()
        .map(|gpu| comment(&format!("  {count} GPUs: {gpu}")));
    let mut text = gpus.unwrap_or_else(|| comment("  no GPU"));
    if node.hcas.is_empty() {
        text += &comment("  no RDMA device");
    }
    for (index, hca) in node.hcas.iter().enumerate() {
        let Some(rail) = group.chosen.get(&index) else {
            continue;
        };
        text += &format!("#   rail {rail}: {}", printable(&title(hca)));
        let gpus: Vec<String> = hca.gpus.iter().map(ToString::to_string).collect();
        if !gpus.is_empty() {
            text += &format!(", next to GPU {}", gpus.join(" "));
        }
        let mut devices = hca.facts.rdma_devices.iter();
        text.extend(devices.find_map(|one| Some(format!("; {}", without_node_guid(one)?.0))));
        text += "\n";
    }
    let mut left_out: BTreeMap<&String, Vec<&Hca>> = BTreeMap::new();
    for (index, why) in &group.left_out {
        left_out
            .entry(why)
            .or_default()
            .extend(node.hcas.get(*index));
    }
    for (why, hcas) in left_out {
        text += &comment(&format!("  not for pods: {why}:"));
        for hca in hcas {
            text += &comment(&format!("    {}", title(hca)));
        }
    }
    text
}

fn title(hca: &Hca) -> String {
    let (facts, pci) = (&hca.facts, hca.facts.pci.as_ref());
    let netdevs: Vec<&str> = facts.netdev_names().collect();
    let netdevs = if netdevs.is_empty() {
        "no netdev"
    } else {
        &netdevs.join(" ")
    };
    let device = pci.map(|pci| format!(" {:04x}:{:04x}", pci.vendor, pci.device));
    let (device, rate) = (device.unwrap_or_default(), hca.rate / 1000);
    let (names, kind) = (facts.rdma_names().join(" "), word(&hca.kind));
    format!(
        "{names} {} {netdevs},{device} {kind} {} {rate}G",
        facts.id, hca.link
    )
}

fn pool_text(pool: &Pool<'_>) -> String {
    let groups: Vec<String> = pool
        .groups
        .iter()
        .map(|one| (one + 1).to_string())
        .collect();
    let mut text = format!("# Groups: {}\n", groups.join(", "));
    if !needs_network(pool) {
        text += "# Pods need no network: without netdevs, verbs work in shared RDMA mode.\n";
    }
    text += &format!("- resource: {}\n", pool.resource);
    text += match pool.mode {
        Mode::Shared => SHARED,
        Mode::Exclusive => EXCLUSIVE,
        Mode::Late => LATE,
    };
    if pool.hcas.iter().all(|hca| hca.link == "other") {
        text += "  # These do not use rdma_cm.\n  nodes: { required: [uverbs] }\n";
    } else if pool.mode == Mode::Late {
        text += "  # NCCL_IB_HCA, NCCL_IB_GID_INDEX and UCX_NET_DEVICES in the containers.\n";
        text += "  environment: true\n";
    }
    if pool.is_optional {
        text += "  # Nodes of other groups do not offer it.\n  optional: true\n";
    }
    let mut keys = Vec::new();
    for (key, values) in &pool.select {
        let is_word = |text: &str| text.bytes().all(|c| c.is_ascii_lowercase());
        let quoted = |text: &String| {
            if is_word(text) {
                text.clone()
            } else {
                json!(text).to_string()
            }
        };
        let values: Vec<String> = values.iter().map(quoted).collect();
        keys.push(format!("{key}: [{}]", values.join(", ")));
    }
    text + &format!("  select: {{ {} }}\n", keys.join(", "))
}

fn network_text(network: &Network, namespace: &str) -> String {
    let comments: String = network.comments.iter().map(|line| comment(line)).collect();
    let metadata = metadata(&network.name, namespace);
    let annotation = format!("k8s.v1.cni.cncf.io/resourceName: {}", network.resource);
    let config = json!({"cniVersion": "1.0.0", "name": network.name, "plugins": [network.plugin]});
    let config = indented(&pretty(&config, ""));
    let kind = "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition";
    let metadata = format!("{metadata}  annotations: {{{annotation}}}");
    format!("---\n{comments}{kind}\n{metadata}\nspec:\n  config: |\n{config}")
}

fn metadata(name: &str, namespace: &str) -> String {
    let (label, value) = LABEL;
    let namespace = json!(namespace);
    format!("metadata:\n  name: {name}\n  namespace: {namespace}\n  labels: {{{label}: {value}}}\n")
}

/// A comment; nothing in it ends the line or steers a terminal.
fn comment(text: &str) -> String {
    format!("# {}\n", printable(text))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// JSON with what contains no object on one line, and keys in order, numbers as such.
fn pretty(value: &Value, margin: &str) -> String {
    let inner = format!("{margin}  ");
    let mut is_nested = false;
    let mut part = |value: &Value| {
        let text = pretty(value, &inner);
        is_nested |= value.is_object() || text.contains('\n');
        text
    };
    let (open, close, parts) = match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(key, _)| (key.parse::<u32>().ok(), *key));
            let fields = fields.into_iter();
            let parts = fields.map(|(key, value)| format!("{}: {}", json!(key), part(value)));
            ("{", "}", parts.collect::<Vec<_>>())
        }
        Value::Array(items) => ("[", "]", items.iter().map(part).collect()),
        _ => return value.to_string(),
    };
    match is_nested || parts.concat().len() > WIDTH {
        true => {
            let separator = format!(",\n{inner}");
            format!("{open}\n{inner}{}\n{margin}{close}", parts.join(&separator))
        }
        false => format!("{open}{}{close}", parts.join(", ")),
    }
}
