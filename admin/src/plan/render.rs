//! A plan as a file for `kubectl apply -f`, with comments that say why. Pure.

use cni_wire::text::printable;
use rdma_device_plugin::candidate::without_node_guid;
use rdma_device_plugin::words::word;
use serde_json::{Value, json};

use super::decide::{Group, Mode, Plan, Pool, names};
use super::network::{Network, needs_network};
use super::read::Hca;

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

/// Where the objects go.
pub(crate) struct Target {
    /// The daemon's `DaemonSet` and `ConfigMap`, and their namespace.
    pub daemon: String,
    pub config_map: String,
    pub namespace: String,
    /// Namespace of the networks.
    pub networks: String,
}

/// What a person reads first.
pub(crate) fn head(plan: &Plan<'_>) -> String {
    let mut text =
        comment("Written by kubectl rdma plan. Read it, then run: kubectl apply -f FILE");
    text.extend(
        plan.warnings
            .iter()
            .map(|line| comment(&format!("WARNING: {line}"))),
    );
    text.extend(
        plan.assumed
            .iter()
            .map(|line| comment(&format!("ASSUMED: {line}"))),
    );
    for (number, group) in (1..).zip(&plan.groups) {
        text += &format!(
            "#\n{}",
            comment(&format!("Group {number}: {}", names(&group.nodes)))
        );
        text += &group_text(group);
    }
    text
}

/// The objects.
pub(crate) fn objects(plan: &Plan<'_>, target: &Target) -> String {
    let Target {
        daemon,
        namespace,
        config_map,
        networks,
    } = target;
    let metadata = metadata(config_map, namespace);
    let pools: String = plan.pools.iter().map(pool_text).collect();
    let config = indented(&format!("version: 1\npools:\n{pools}"));
    let restart = format!("kubectl --namespace {namespace} rollout restart daemonset/{daemon}");
    let restart = comment(&format!("After a change: {restart}"));
    let policy = indented(&pretty(&json!(plan.policy), ""));
    let networks: String = plan
        .networks
        .iter()
        .map(|network| network_text(network, networks))
        .collect();
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\n{metadata}data:\n  config.yaml: |\n{config}  \
         {restart}  policy.json: |\n{policy}{networks}"
    )
}

/// GPUs and HCAs of a group, by its first node.
fn group_text(group: &Group<'_>) -> String {
    let Some(node) = group.nodes.first() else {
        return String::new();
    };
    let gpus = node
        .gpus
        .first()
        .map(|gpu| comment(&format!("  {} GPUs: {gpu}", node.gpus.len())));
    let mut text = gpus.unwrap_or_else(|| comment("  no GPU"));
    if node.hcas.is_empty() {
        text += &comment("  no RDMA device");
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
        let problem = hca.facts.rdma_devices.iter().find_map(without_node_guid);
        line.extend(
            problem
                .filter(|_| usage.is_ok())
                .map(|(problem, _)| format!("; {problem}")),
        );
        text += &comment(&line);
    }
    text
}

fn title(hca: &Hca) -> String {
    let facts = &hca.facts;
    let netdevs = match facts.netdev_names().collect::<Vec<_>>().join(" ") {
        names if names.is_empty() => "no netdev".to_owned(),
        names => names,
    };
    let device = facts
        .pci
        .as_ref()
        .map(|pci| format!(" {:04x}:{:04x}", pci.vendor, pci.device));
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
    let key = |(key, values): &(&str, Vec<String>)| format!("{key}: {}", ascii(&json!(values)));
    let keys: Vec<String> = pool.select.iter().map(key).collect();
    text + &format!("  select: {{ {} }}\n", keys.join(", "))
}

fn network_text(network: &Network, namespace: &str) -> String {
    let Network {
        name,
        resource,
        plugin,
        comments,
        ..
    } = network;
    let comments: String = comments.iter().map(|line| comment(line)).collect();
    let (metadata, plugin) = (metadata(name, namespace), pretty(&json!(plugin), "  "));
    let config = format!(
        "{{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"{name}\",\n  \"plugins\": [{plugin}]\n}}"
    );
    format!(
        "---\n{comments}apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\n{metadata}  \
         annotations: {{k8s.v1.cni.cncf.io/resourceName: {resource}}}\nspec:\n  config: |\n{}",
        indented(&config)
    )
}

fn metadata(name: &str, namespace: &str) -> String {
    let (name, namespace) = (ascii(&json!(name)), ascii(&json!(namespace)));
    format!(
        "metadata:\n  name: {name}\n  namespace: {namespace}\n  \
         labels: {{app.kubernetes.io/managed-by: kubectl-rdma}}\n"
    )
}

/// A comment; nothing in it ends the line or steers a terminal.
fn comment(text: &str) -> String {
    format!("# {}\n", printable(text))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// JSON in which nothing ends a line of YAML or steers a terminal.
fn ascii(value: &Value) -> String {
    let escaped = |c: char| match c {
        ' '..='~' => c.to_string(),
        _ => (c.encode_utf16(&mut [0; 2]).iter())
            .map(|unit| format!("\\u{unit:04x}"))
            .collect(),
    };
    value.to_string().chars().map(escaped).collect()
}

/// JSON whose short objects are on one line, and keys in order, numbers as such.
fn pretty(value: &Value, margin: &str) -> String {
    let Value::Object(fields) = value else {
        return ascii(value);
    };
    let inner = format!("{margin}  ");
    let mut fields: Vec<_> = fields.iter().collect();
    fields.sort_by_key(|(key, _)| (key.parse::<u32>().ok(), *key));
    let part = |(key, value)| format!("{}: {}", ascii(&json!(key)), pretty(value, &inner));
    let parts: Vec<String> = fields.into_iter().map(part).collect();
    match parts.concat().len() > WIDTH {
        true => format!(
            "{{\n{inner}{}\n{margin}}}",
            parts.join(&format!(",\n{inner}"))
        ),
        false => format!("{{{}}}", parts.join(", ")),
    }
}
