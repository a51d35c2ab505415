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
    let mut text =
        "# Written by kubectl rdma plan. Check what is ASSUMED, then: kubectl apply -f FILE\n"
            .to_owned();
    for line in warnings {
        text += &comment(&format!("WARNING: {line}"));
    }
    for line in &plan.assumed {
        text += &comment(&format!("ASSUMED: {line}"));
    }
    for (index, group) in plan.groups.iter().enumerate() {
        let (count, names) = (group.nodes.len(), names(&group.nodes));
        text += &format!(
            "#\n{}",
            comment(&format!("Group {} ({count}): {names}", index + 1))
        );
        text += &group
            .nodes
            .first()
            .map(|node| group_text(group, node))
            .unwrap_or_default();
    }
    let [daemon, networks] = namespaces;
    text += &format!(
        "---\napiVersion: v1\nkind: ConfigMap\n{}data:\n",
        metadata(CONFIG_MAP, daemon)
    );
    let pools: String = plan.pools.iter().map(pool_text).collect();
    let pools = if pools.is_empty() {
        "pools: []\n".to_owned()
    } else {
        format!("pools:\n{pools}")
    };
    text += &format!(
        "  config.yaml: |\n{}",
        indented(&format!("version: 1\n{pools}"))
    );
    text += &format!(
        "  {}",
        comment("The policy of a node changes when its daemon starts again:")
    );
    let restart =
        format!("kubectl --namespace {daemon} rollout restart daemonset/rdma-device-plugin");
    text += &format!("  {}", comment(&restart));
    text += &format!(
        "  policy.json: |\n{}",
        indented(&pretty(&json!(plan.policy), ""))
    );
    plan.networks.iter().fold(text, |text, network| {
        text + &network_text(network, networks)
    })
}

/// HCAs and GPUs of a group, by its first node.
fn group_text(group: &Group<'_>, node: &Node) -> String {
    let gpus = node.gpus.first().map_or("none".to_owned(), |gpu| {
        format!("{} x {gpu}", node.gpus.len())
    });
    let mut text = comment(&format!("  GPUs: {gpus}"));
    for (index, hca) in node.hcas.iter().enumerate() {
        let Some(rail) = group.chosen.get(&index) else {
            continue;
        };
        let near = if hca.gpus.is_empty() {
            String::new()
        } else {
            format!(
                ", next to GPU {}",
                format!("{:?}", hca.gpus).trim_matches(['[', ']'])
            )
        };
        let mut devices = hca.facts.rdma_devices.iter();
        let guid = devices.find_map(|device| Some(format!("; {}", without_node_guid(device)?.0)));
        text += &comment(&format!(
            "  rail {rail}: {}{near}{}",
            title(hca),
            guid.unwrap_or_default()
        ));
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
        "no netdev".to_owned()
    } else {
        netdevs.join(" ")
    };
    let device = pci
        .map(|pci| format!(" {:04x}:{:04x}", pci.vendor, pci.device))
        .unwrap_or_default();
    let (names, id, kind) = (facts.rdma_names().join(" "), &facts.id, word(&hca.kind));
    format!(
        "{names} {id} {netdevs},{device} {kind} {} {}G",
        hca.link,
        hca.rate / 1000
    )
}

fn pool_text(pool: &Pool<'_>) -> String {
    let groups: Vec<String> = pool
        .groups
        .iter()
        .map(|index| (index + 1).to_string())
        .collect();
    let mut text = format!("# Groups: {}\n", groups.join(", "));
    if !needs_network(pool) {
        text += "# Pods need no network: these HCAs have no netdev, and in shared RDMA mode verbs work without.\n";
    }
    text += &format!("- resource: {}\n", pool.resource);
    text += match pool.mode {
        Mode::Shared => {
            "  # A unit is a share of an HCA; without slots the GID table limits their number.\n  mode: shared\n"
        }
        Mode::Exclusive => {
            "  # A unit is one HCA for one pod.\n  mode: exclusive\n  policy: numa\n"
        }
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
    let quoted = |text: &String| {
        if text.bytes().all(|c| c.is_ascii_lowercase()) {
            text.clone()
        } else {
            json!(text).to_string()
        }
    };
    let list = |values: &[String]| values.iter().map(quoted).collect::<Vec<_>>().join(", ");
    let keys: Vec<String> = pool
        .select
        .iter()
        .map(|(key, values)| format!("{key}: [{}]", list(values)))
        .collect();
    text + &format!("  select: {{ {} }}\n", keys.join(", "))
}

fn network_text(network: &Network, namespace: &str) -> String {
    let comments: String = network.comments.iter().map(|line| comment(line)).collect();
    let config = json!({"cniVersion": "1.0.0", "name": network.name, "plugins": [network.plugin]});
    format!(
        "---\n{comments}apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\n{}  annotations: \
         {{k8s.v1.cni.cncf.io/resourceName: {}}}\nspec:\n  config: |\n{}",
        metadata(&network.name, namespace),
        network.resource,
        indented(&pretty(&config, ""))
    )
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
