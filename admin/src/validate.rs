//! `rdmactl validate`: files are checked before they are applied. What a file is, its content says:
//! pools of the device plugin (ours or the peers'), a node's policy, networks, or objects of Kubernetes
//! or values of the chart that contain them.

mod pools;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use node::policy::Policy;
use rdma_device_plugin::candidate::{Candidate, memory};
use rdma_device_plugin::cli::{Defaults, NodeAddresses};
use rdma_device_plugin::host_snapshot::HostSnapshot;
use rdma_netdev::validate as network;
use serde_json::{Value, json};

use crate::documents::{
    default_policy, definition, documents, is_definition, merge, name_of, objects, put,
};
use crate::global::{Global, NODE};
use crate::output::{Ended, Exit, complain, say, say_json, text_of};

/// Checks pools, policies, networks and NetworkAttachmentDefinitions, also in ConfigMaps and Helm values.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 valid, 1 something is refused or, with --on-host, a pool that is not \
    optional has no healthy HCA here, 2 wrong usage."
)]
#[expect(clippy::doc_markdown, reason = "it is the help that people read")]
pub(crate) struct Validate {
    /// Files (JSON or YAML), or - for standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Also check on this node: the HCAs of each pool, the STATUS of each network
    #[arg(long, help_heading = NODE)]
    on_host: bool,
    /// Directories of CNI programs, for --on-host
    #[arg(
        long,
        help_heading = NODE,
        value_name = "DIR,…",
        env = "CNI_PATH",
        value_delimiter = ':',
        default_value = "/opt/cni/bin"
    )]
    cni_path: Vec<PathBuf>,
    #[command(flatten)]
    defaults: Defaults,
    #[command(flatten, next_help_heading = NODE)]
    addresses: NodeAddresses,
}

/// What a file, or a part of it, is.
#[derive(Debug, PartialEq)]
enum Part {
    /// Pools of the device plugin, as text: mistakes are named with their line.
    Pools(String),
    /// A node's policy, as text.
    Policy(String),
    /// A network configuration, a conflist or a NetworkAttachmentDefinition.
    Network(Value),
    /// What is not checked, in words.
    Other(String),
}

/// What was found of a part.
#[derive(Debug, Default)]
struct Checked {
    text: String,
    errors: Vec<String>,
    document: Value,
}

impl Validate {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let host = match self.on_host {
            true => {
                let scanned = global.scan(&self.addresses.node_addresses)?;
                let (hcas, _) = memory::list(&scanned, &global.policy, &global.host());
                Some((scanned, hcas))
            }
            false => None,
        };
        let mut documents = Vec::new();
        let (mut parts, mut refused) = (0, 0);
        for file in &self.files {
            let (place, text) = text_of(file)?;
            if text.trim().is_empty() {
                bail!("{place} is empty");
            }
            let parts_of_file = parts_of(&place, &text)?;
            // A policy in the file is the one that its networks will meet.
            let policy = parts_of_file.iter().find_map(|(place, part)| match part {
                Part::Policy(text) => Policy::parse(Path::new(place), text.as_bytes()).ok(),
                _ => None,
            });
            let policy = policy.map_or_else(|| global.policy(), Ok);
            for (place, part) in parts_of_file {
                let checked = self.check(&place, part, global, &policy, host.as_ref())?;
                parts += 1;
                refused += usize::from(!checked.errors.is_empty());
                if global.json {
                    documents.push(checked.document);
                    continue;
                }
                say(&checked.text);
                for error in &checked.errors {
                    complain(&format!("{place}: {error}"));
                }
            }
        }
        if global.json {
            say_json(json!({"files": documents}));
        }
        match refused {
            0 => Ok(Exit::Good),
            refused => bail!("{refused} of {parts} checked parts would be refused"),
        }
    }

    fn check(
        &self,
        place: &str,
        part: Part,
        global: &Global,
        policy: &anyhow::Result<Policy>,
        host: Option<&(HostSnapshot, Vec<Candidate>)>,
    ) -> anyhow::Result<Checked> {
        let (kind, mut checked) = match part {
            Part::Pools(text) => ("pools", pools::check(place, &text, &self.defaults, host)),
            Part::Policy(text) => ("policy", check_policy(place, &text)),
            Part::Network(object) => {
                let policy = policy.as_ref().map_err(|error| anyhow!("{error:#}"))?;
                let on_host = self.on_host.then_some(self.cni_path.as_slice());
                let network = network::Network::of(&object, place);
                let found = network::check(&network, policy, &global.places(), on_host);
                let checked = Checked {
                    text: found.text(&network),
                    document: found.document(&network),
                    errors: found.errors,
                };
                ("network", checked)
            }
            Part::Other(what) => {
                let checked = Checked {
                    text: format!("{place}: not checked: {what}\n"),
                    ..Checked::default()
                };
                ("other", checked)
            }
        };
        let document = &mut checked.document;
        put(document, "file", place.into());
        put(document, "kind", kind.into());
        put(document, "valid", checked.errors.is_empty().into());
        put(document, "errors", json!(checked.errors));
        Ok(checked)
    }
}

/// The parts of a file, with what to call each.
fn parts_of(place: &str, text: &str) -> anyhow::Result<Vec<(String, Part)>> {
    let Ok(objects) = objects(place, text) else {
        // What is neither YAML nor JSON gets the message of a reader that names the line.
        return Ok(vec![(place.to_owned(), Part::Pools(text.to_owned()))]);
    };
    let mut parts = Vec::new();
    let is_alone = objects.len() == 1;
    for object in objects {
        let kind = object.get("kind").and_then(Value::as_str);
        match kind {
            Some("ConfigMap") => {
                let data = object.get("data").and_then(Value::as_object);
                for (key, value) in data.into_iter().flatten() {
                    let place = format!("{place}: ConfigMap {} {key}", name_of(&object));
                    parts.extend(parts_of(&place, value.as_str().unwrap_or_default())?);
                }
            }
            Some(_) if is_definition(&object) => {
                parts.push((place.to_owned(), Part::Network(object)))
            }
            Some(kind) => {
                let what = format!("an object of kind {kind}");
                parts.push((place.to_owned(), Part::Other(what)));
            }
            None if !is_alone => bail!(
                "{place} has several documents, and one is not an object of Kubernetes: the programs read \
                 one document of a file"
            ),
            None if is_values(&object) => parts.extend(values(place, text, &object)),
            None => {
                let part = plain(&object, text.to_owned());
                let part = part.with_context(|| {
                    format!(
                        "{place} is not a file of this project: pools (configList, resourceList or \
                         pools), a policy, a network (type or plugins), an object of Kubernetes, or Helm \
                         values with pools, policy or networks"
                    )
                })?;
                parts.push((place.to_owned(), part));
            }
        }
    }
    Ok(parts)
}

/// Keys that whereabouts.conf has and no other file that is checked here.
const FLAT_FILE_KEYS: &[&str] = &[
    "configuration_path",
    "datastore",
    "enable_overlapping_ranges",
    "etcd_host",
    "ipRanges",
    "kubernetes",
    "log_file",
    "range",
    "reconciler_cron_expression",
];

/// Whether these are Helm values: their `pools` are a mapping, too.
fn is_values(object: &Value) -> bool {
    let is_map = |key| object.get(key).is_some_and(Value::is_object);
    ["pools", "policy", "networks"].into_iter().any(is_map)
}

/// The documents that the chart makes of its values.
fn values(file: &str, text: &str, values: &Value) -> Vec<(String, Part)> {
    let is_set = |value: &&Value| value.as_object().is_some_and(|map| !map.is_empty());
    let pools = values.get("pools").filter(is_set).map(|pools| {
        // As the file has them, mistakes have their lines.
        let written = Some(block(text, "pools")).filter(|_| pools.get("version").is_some());
        let written =
            written.filter(|text| documents(file, text).is_ok_and(|all| all == [pools.clone()]));
        let pools = written.unwrap_or_else(|| format!("{pools:#}"));
        (format!("{file}: pools"), Part::Pools(pools))
    });
    let policy = values.get("policy").filter(is_set).map(|changes| {
        let mut policy = default_policy();
        merge(&mut policy, changes);
        let policy = Part::Policy(format!("{policy:#}"));
        (format!("{file}: policy"), policy)
    });
    let networks = values.get("networks").and_then(Value::as_object);
    let networks = networks.into_iter().flatten().map(|(name, network)| {
        let network = Part::Network(definition(name, network));
        (format!("{file}: network {name}"), network)
    });
    pools.into_iter().chain(policy).chain(networks).collect()
}

/// The lines below a top-level key; each other line is empty.
fn block(text: &str, key: &str) -> String {
    let mut is_below = false;
    let line = |line: &str| {
        let is_key = line.starts_with(|c: char| !c.is_whitespace() && c != '#');
        if is_key {
            is_below = line.trim_end().strip_suffix(':') == Some(key);
        }
        match is_below && !is_key {
            true => format!("{line}\n"),
            false => "\n".to_owned(),
        }
    };
    text.lines().map(line).collect()
}

/// What a file is that is not an object of Kubernetes.
fn plain(object: &Value, text: String) -> Option<Part> {
    let fields = object.as_object()?;
    let has = |names: &[&str]| {
        let mut keys = fields.keys();
        keys.any(|key| names.iter().any(|name| key.eq_ignore_ascii_case(name)))
    };
    if has(&["configList", "resourceList", "pools"]) {
        return Some(Part::Pools(text));
    }
    if has(&["type", "plugins"]) {
        return Some(Part::Network(object.clone()));
    }
    let of_policy = fields.keys().filter(|key| Policy::has_key(key));
    match of_policy.collect::<Vec<_>>().as_slice() {
        [] if has(FLAT_FILE_KEYS) => {
            let what =
                "the flat file of whereabouts; rdma-ipam reads it for networks of type whereabouts";
            Some(Part::Other(what.to_owned()))
        }
        [] => None,
        // Pools have a version, too, and of the two only pools may be YAML.
        [key] if *key == "version" && serde_json::from_str::<Value>(&text).is_err() => {
            Some(Part::Pools(text))
        }
        _ => Some(Part::Policy(text)),
    }
}

fn check_policy(place: &str, text: &str) -> Checked {
    let mut checked = Checked::default();
    match Policy::parse(Path::new(place), text.as_bytes()) {
        Ok(policy) => {
            let stores: Vec<&str> = policy.stores.keys().map(String::as_str).collect();
            checked.text = format!("{place}: a policy with the stores {}\n", stores.join(", "));
            checked.document = json!({"stores": stores});
        }
        Err(error) => checked.errors.push(error.with_remedy()),
    }
    checked
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<&'static str> {
        let parts = parts_of("f", text).unwrap();
        let kind = |(_, part)| match part {
            Part::Pools(_) => "pools",
            Part::Policy(_) => "policy",
            Part::Network(_) => "network",
            Part::Other(_) => "other",
        };
        parts.into_iter().map(kind).collect()
    }

    #[test]
    fn the_content_of_a_file_says_what_it_is() {
        for (text, expected) in [
            ("version: 1\npools: []\n", vec!["pools"]),
            ("{\"configlist\": []}", vec!["pools"]),
            ("version: 1\npols: []\n", vec!["pools"]),
            ("{\"allow\": {\"uplinks\": true}}", vec!["policy"]),
            ("{\"version\": 1}", vec!["policy"]),
            (
                "{\"datastore\": \"kubernetes\", \"log_level\": \"debug\", \"gateway\": \"10.0.0.1\"}",
                vec!["other"],
            ),
            (
                "{\"cniVersion\": \"1.0.0\", \"name\": \"n\", \"type\": \"rdma-netdev\"}",
                vec!["network"],
            ),
            (
                "kind: NetworkAttachmentDefinition\n---\nkind: Secret\n",
                vec!["network", "other"],
            ),
            (
                "kind: ConfigMap\nmetadata: {name: c}\ndata:\n  config.yaml: |\n    version: 1\n    pools: []\n  \
                 policy.json: |\n    {\"stores\": {}}\n",
                vec!["pools", "policy"],
            ),
            ("pools: [", vec!["pools"]),
            (
                "image: {tag: x}\npolicy: {}\npools: {configList: []}\nnetworks: {a: {}, b: {}}\n",
                vec!["pools", "network", "network"],
            ),
        ] {
            assert_eq!(kinds(text), expected, "{text}");
        }
        let values = "policy:\n  version: 1\n# Rails\npools:\n  version: 1\n  pools: []\n";
        let parts = [
            (
                "f: pools".to_owned(),
                Part::Pools("\n\n\n\n  version: 1\n  pools: []\n".to_owned()),
            ),
            (
                "f: policy".to_owned(),
                Part::Policy(format!("{:#}", default_policy())),
            ),
        ];
        assert_eq!(
            parts_of("f", values).unwrap(),
            parts,
            "lines of pools are those of the file"
        );
        let error = parts_of("f", "{\"stores\": {}}\n---\n{\"stores\": {}}\n").unwrap_err();
        assert!(error.to_string().contains("several documents"), "{error}");
        let error = parts_of("f", "a: 1\n").unwrap_err();
        assert!(error.to_string().contains("is not a file of this project"));
    }
}
