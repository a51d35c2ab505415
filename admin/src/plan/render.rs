//! A plan as a file for `kubectl apply -f`, with comments that say why. Pure.

use cni_wire::text::printable;
use serde_json::{Value, json};

use super::decide::{Group, Mode, Plan, Pool, kind, link, names, rate, remarks};
use super::network::Network;
use super::read::{Hca, Node, Silent};
use super::select::Keys;

/// What is not a part of the plan itself.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    /// Namespace of the daemon.
    pub namespace: &'a str,
    /// Namespace of the networks.
    pub network_namespace: &'a str,
}

/// The label of objects that a plan wrote, and its value.
pub(crate) const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "kubectl-rdma");
/// The daemon's configuration.
pub(crate) const CONFIG_MAP: &str = "rdma-device-plugin";
/// Width of a line of JSON.
const WIDTH: usize = 96;

/// The file.
pub(crate) fn text(
    plan: &Plan<'_>,
    silent: &[Silent],
    warnings: &[String],
    place: &Place<'_>,
) -> String {
    let mut text = head(plan, silent, warnings);
    let (label, value) = LABEL;
    let labels = format!("labels: {{{label}: {value}}}");
    let namespace = json!(place.namespace);
    text += &format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {CONFIG_MAP}\n  namespace: \
         {namespace}\n  {labels}\ndata:\n  config.yaml: |\n    version: 1\n    pools:\n"
    );
    for pool in &plan.pools {
        text += &indented(&pool_text(pool), 4);
    }
    if plan.pools.is_empty() {
        // A file without pools is refused.
        text = text.replace("    pools:\n", "    pools: []\n");
    }
    text += &comment(
        "Nodes take a changed policy when the daemon's pods start again: kubectl --namespace \
         kube-system rollout restart daemonset/rdma-device-plugin",
        2,
    );
    text += &format!(
        "  policy.json: |\n{}",
        indented(&pretty(&plan.policy, 0), 4)
    );
    for network in &plan.networks {
        text += &network_text(network, &labels, place);
    }
    text
}

fn head(plan: &Plan<'_>, silent: &[Silent], warnings: &[String]) -> String {
    let mut lines = vec![
        "Pools, policy and networks by \"kubectl rdma plan\", from what the nodes have. Check the lines \
         with ASSUMED"
            .to_owned(),
        "and WARNING, then: kubectl apply -f FILE".to_owned(),
    ];
    let (warned, assumed) = (plan.warnings.iter().chain(warnings), plan.assumed.iter());
    lines.extend(
        silent
            .iter()
            .map(|(node, why)| format!("WARNING: {node} is not in this plan: {why}")),
    );
    lines.extend(warned.map(|one| format!("WARNING: {one}")));
    lines.extend(assumed.map(|one| format!("ASSUMED: {one}")));
    for (index, group) in plan.groups.iter().enumerate() {
        lines.push(String::new());
        let nodes = group.nodes.len();
        lines.push(format!(
            "Group {}: {nodes} {}: {}",
            index + 1,
            plural(nodes, "node"),
            names(&group.nodes)
        ));
        lines.extend(
            group
                .first()
                .into_iter()
                .flat_map(|node| group_lines(group, node)),
        );
    }
    lines.iter().map(|line| comment(line, 0)).collect()
}

/// HCAs and GPUs of a group, by its first node.
fn group_lines(group: &Group<'_>, node: &Node) -> Vec<String> {
    let mut lines = Vec::new();
    let gpus = node.gpus.len();
    match node.gpus.first() {
        Some(model) => lines.push(format!("  {gpus} {}: {model}", plural(gpus, "GPU"))),
        None => lines.push("  no GPU".to_owned()),
    }
    for (index, rail) in &group.chosen {
        let Some(hca) = node.hcas.get(*index) else {
            continue;
        };
        let near: Vec<String> = hca.gpus.iter().map(ToString::to_string).collect();
        let near = match near.as_slice() {
            [] => String::new(),
            near => format!(", next to {} {}", plural(near.len(), "GPU"), near.join(" ")),
        };
        let remarks: String = remarks(hca).iter().map(|one| format!("; {one}")).collect();
        lines.push(format!(
            "  rail {rail}: {}{near}{remarks}",
            title(node, hca)
        ));
    }
    for (index, (why, detail)) in &group.left_out {
        let Some(hca) = node.hcas.get(*index) else {
            continue;
        };
        lines.push(format!(
            "  not for pods: {}: {why}: {detail}",
            title(node, hca)
        ));
    }
    lines
}

fn title(node: &Node, hca: &Hca) -> String {
    let facts = &hca.facts;
    let netdevs: Vec<&str> = facts.netdev_names().collect();
    let model = facts
        .pci
        .as_ref()
        .map(|pci| format!(" {:04x}:{:04x}", pci.vendor, pci.device));
    format!(
        "{} {} ({}){} {} {} {} Gb/s",
        facts.rdma_names().join(" "),
        facts.id,
        if netdevs.is_empty() {
            "no netdev".to_owned()
        } else {
            netdevs.join(" ")
        },
        model.unwrap_or_default(),
        kind(hca),
        link(hca),
        rate(node, hca) / 1000
    )
}

fn pool_text(pool: &Pool) -> String {
    let groups: Vec<String> = pool
        .groups
        .iter()
        .map(|index| (index + 1).to_string())
        .collect();
    let mut text = comment(
        &format!(
            "For {} {}.",
            plural(groups.len(), "group"),
            groups.join(", ")
        ),
        0,
    );
    if let Some(why) = pool.without_network {
        text += &comment(&format!("{why}."), 0);
    }
    text += &format!("- resource: {}\n", scalar(&pool.resource));
    let keys = match pool.mode {
        Mode::Shared => {
            comment(
                "A unit is a share of one HCA. Without slots, its GID table limits them.",
                2,
            ) + "  mode: shared\n"
        }
        Mode::Exclusive => {
            comment("A unit is one HCA, for one pod.", 2) + "  mode: exclusive\n  policy: numa\n"
        }
        Mode::Late => {
            comment(
                "The daemon chooses the HCAs of a pod next to its GPUs. It writes them to /var/run/cdi: \
                 install it with manifests/overlays/late, or with cdi of the chart.",
                2,
            ) + "  mode: exclusive\n  binding: late\n"
                + &comment(
                    "Slots that no network attaches are bound when the container starts.",
                    2,
                )
                + "  bindAtStart: true\n"
                + &comment(
                    "NCCL_IB_HCA, NCCL_IB_GID_INDEX and UCX_NET_DEVICES for the containers.",
                    2,
                )
                + "  environment: true\n"
                + &comment(
                    "false: a pod starts also if a closer HCA exists but is not free.",
                    2,
                )
                + "  strict: true\n"
        }
    };
    text += &keys;
    if pool.is_verbs_only {
        text += "  nodes: { required: [uverbs] }\n";
    }
    if pool.is_optional {
        text += &comment("Nodes of other groups do not offer it.", 2);
        text += "  optional: true\n";
    }
    text + &format!("  select: {{ {} }}\n", flow(&pool.select))
}

fn flow(keys: &Keys) -> String {
    let key = |(key, values): &(&str, Vec<String>)| {
        let values: Vec<String> = values.iter().map(|value| scalar(value)).collect();
        format!("{key}: [{}]", values.join(", "))
    };
    keys.iter().map(key).collect::<Vec<_>>().join(", ")
}

/// A word as it is, anything else quoted.
fn scalar(text: &str) -> String {
    let is_word = text.starts_with(|c: char| c.is_ascii_lowercase())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_/-".contains(c))
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text);
    if is_word {
        text.to_owned()
    } else {
        json!(text).to_string()
    }
}

fn network_text(network: &Network, labels: &str, place: &Place<'_>) -> String {
    let mut text = "---\n".to_owned();
    text += &network
        .comments
        .iter()
        .map(|line| comment(line, 0))
        .collect::<String>();
    if network.is_assumed {
        text += &comment("ASSUMED: ranges; --range CIDR sets others.", 0);
    }
    let config = json!({"cniVersion": "1.0.0", "name": network.name, "plugins": [network.plugin]});
    let namespace = json!(place.network_namespace);
    text + &format!(
        "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata:\n  name: {}\n  \
         namespace: {namespace}\n  {labels}\n  annotations: {{k8s.v1.cni.cncf.io/resourceName: {}}}\nspec:\n  \
         config: |\n{}",
        scalar(&network.name),
        scalar(&network.resource),
        indented(&pretty(&config, 0), 4)
    )
}

/// A comment; nothing in it ends the line or steers a terminal.
fn comment(text: &str, indent: usize) -> String {
    let text = printable(text);
    let (margin, mut lines) = (" ".repeat(indent), String::new());
    let mut line = "#".to_owned();
    let start = text.len() - text.trim_start().len();
    line += &" ".repeat(start);
    for word in text.split_whitespace() {
        if line.len() + word.len() >= WIDTH + 4 && line.trim_end() != "#" {
            lines += &format!("{margin}{}\n", line.trim_end());
            line = format!("#{}", " ".repeat(start + 2));
        }
        line += &format!(" {word}");
    }
    lines + &format!("{margin}{}\n", line.trim_end())
}

fn indented(text: &str, indent: usize) -> String {
    let margin = " ".repeat(indent);
    text.lines()
        .map(|line| format!("{margin}{line}\n"))
        .collect()
}

/// JSON in which what fits a line is on one; keys that are numbers in their order.
fn pretty(value: &Value, indent: usize) -> String {
    let line = inline(value);
    let (inner, margin) = (" ".repeat(indent + 2), " ".repeat(indent));
    let is_short = line.len() + indent <= WIDTH - 24 && indent > 0;
    match value {
        Value::Object(_) if !is_short => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{inner}{}: {}", json!(key), pretty(value, indent + 2))
            };
            let entries: Vec<String> = sorted(value).into_iter().map(entry).collect();
            format!("{{\n{}\n{margin}}}", entries.join(",\n"))
        }
        Value::Array(items) if !is_short => {
            let items = items
                .iter()
                .map(|item| format!("{inner}{}", pretty(item, indent + 2)));
            format!("[\n{}\n{margin}]", items.collect::<Vec<_>>().join(",\n"))
        }
        _ => line,
    }
}

fn inline(value: &Value) -> String {
    match value {
        Value::Object(object) if !object.is_empty() => {
            let entry =
                |(key, value): (&String, &Value)| format!("{}: {}", json!(key), inline(value));
            let entries: Vec<String> = sorted(value).into_iter().map(entry).collect();
            format!("{{ {} }}", entries.join(", "))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(inline).collect();
            format!("[{}]", items.join(", "))
        }
        other => other.to_string(),
    }
}

fn sorted(value: &Value) -> Vec<(&String, &Value)> {
    let mut entries: Vec<_> = value.as_object().into_iter().flatten().collect();
    entries.sort_by_key(|(key, _)| (key.parse::<u32>().ok(), (*key).clone()));
    entries
}

fn plural(count: usize, noun: &str) -> String {
    if count == 1 {
        noun.to_owned()
    } else {
        format!("{noun}s")
    }
}
