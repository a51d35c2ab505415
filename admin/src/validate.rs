//! `rdmactl validate`: files are checked before they are applied. What a file is, its content says:
//! pools of the device plugin (ours or the peers'), a node's policy, networks, or objects of Kubernetes
//! or values of the chart that contain them.

mod configuration;
mod network;

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use clap::Args;
use cni_wire::text::printable;
use hca::HcaId;
use node::policy::Policy;
use pools::config::flags::{Defaults, NodeAddresses, config_file};
use pools::config::{self, Config};
use pools::pool::Pools;
use pools::snapshot::Snapshot;
use serde_json::{Map, Value, json};

use crate::documents::{
    default_policy, definition, documents, is_definition, merge, name_of, objects, put,
};
use crate::global::{Global, NODE};
use crate::on_host::OnHost;
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
    /// Also check on this node: the HCAs of each pool, the STATUS of each network from cniVersion 1.1.0 on
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
    /// What nothing can be made of, and why.
    Wrong(String),
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
            true => Some(OnHost::scan(
                global,
                &self.addresses.node_addresses,
                &global.policy,
            )?),
            false => None,
        };
        let mut documents = Vec::new();
        let (mut parts, mut refused) = (0, 0);
        for file in &self.files {
            let (place, text) = text_of(file)?;
            let parts_of_file = parts_of_file(&place, &text);
            // A policy in the file is the one that its networks will meet.
            let policy = parts_of_file.iter().find_map(|(place, part)| match part {
                Part::Policy(text) => Policy::parse(Path::new(place), text.as_bytes()).ok(),
                _ => None,
            });
            let policy = policy.map_or_else(|| global.policy(), Ok);
            let pools = host
                .as_ref()
                .and_then(|host| Some(host.pools(&self.pools(&parts_of_file)?)));
            for (place, part) in parts_of_file {
                let known = (host.as_ref(), pools.as_ref());
                let checked = self.check(&place, part, global, &policy, known)?;
                parts += 1;
                refused += usize::from(!checked.errors.is_empty());
                if global.json {
                    documents.push(checked.document);
                    continue;
                }
                let lines = checked.text.lines().map(|line| printable(line) + "\n");
                say(&lines.collect::<String>());
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

    /// The pools of the file, else those of the node.
    fn pools(&self, parts: &[(String, Part)]) -> Option<Config> {
        let of_file = parts.iter().find_map(|(_, part)| match part {
            Part::Pools(text) => config::parse_with(text, &self.defaults).ok(),
            _ => None,
        });
        of_file.or_else(|| config::load(&config_file(None).ok()?, &self.defaults).ok())
    }

    fn check(
        &self,
        place: &str,
        part: Part,
        global: &Global,
        policy: &anyhow::Result<Policy>,
        (host, pools): (Option<&OnHost>, Option<&Pools>),
    ) -> anyhow::Result<Checked> {
        let (kind, mut checked) = match part {
            Part::Pools(text) => (
                "pools",
                configuration::check(place, &text, &self.defaults, host),
            ),
            Part::Policy(text) => ("policy", check_policy(place, &text)),
            Part::Network(object) => {
                let policy = policy.as_ref().map_err(|error| anyhow!("{error:#}"))?;
                let network = network::Network::of(&object, place);
                let is_asked =
                    |one: &&Snapshot| network.resource.as_deref() == Some(one.resource().as_str());
                let snapshots = pools.into_iter().flat_map(|pools| &pools.snapshots);
                let members = snapshots.filter(is_asked).flat_map(|one| one.members());
                let is_here = |netdev: &hca::Netdev| {
                    host.is_some_and(|host| host.scanned.inventory.netdev(&netdev.name).is_some())
                };
                let several = members.map(|member| &member.hca);
                let several =
                    several.filter(|hca| hca.netdevs.len() > 1 && hca.netdevs.iter().all(is_here));
                let hcas: Vec<HcaId> = several.map(|hca| hca.id.clone()).collect();
                let roots = global.host();
                let on_host = self.on_host.then_some(network::NetworkHost {
                    cni_path: &self.cni_path,
                    roots: &roots,
                    hcas: &hcas,
                });
                let found = network::check(&network, policy, &global.places(), on_host);
                let checked = Checked {
                    text: found.text(),
                    document: json!(found),
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
            Part::Wrong(why) => {
                let checked = Checked {
                    errors: vec![why],
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
fn parts_of_file(place: &str, text: &str) -> Vec<(String, Part)> {
    let mut parts = parts_of(place, text);
    if parts.iter().all(|(_, part)| matches!(part, Part::Other(_))) {
        let why = "nothing to check".to_owned();
        parts.push((place.to_owned(), Part::Wrong(why)));
    }
    parts
}

/// The parts of a document or of several.
fn parts_of(place: &str, text: &str) -> Vec<(String, Part)> {
    let Ok(objects) = objects(place, text) else {
        // What is neither YAML nor JSON gets the message of a reader that names the line.
        return vec![(place.to_owned(), Part::Pools(text.to_owned()))];
    };
    let mut parts = Vec::new();
    let is_alone = objects.len() == 1;
    for object in objects {
        let kind = object.get("kind").and_then(Value::as_str);
        let part = match kind {
            Some("ConfigMap") => {
                parts.extend(parts_of_map(place, &object));
                continue;
            }
            Some(_) if is_definition(&object) => Part::Network(object),
            Some(kind) => Part::Other(format!("an object of kind {kind}")),
            None if !is_alone => Part::Wrong(
                "it has several documents, and one is not an object of Kubernetes: the programs read one \
                 document of a file"
                    .to_owned(),
            ),
            None if is_values(&object) => {
                parts.extend(values(place, text, &object));
                continue;
            }
            None => plain(&object, text.to_owned()).unwrap_or_else(|| {
                Part::Wrong(
                    "it is not a file of this project: pools (configList, resourceList or pools), a \
                     policy, a network (type or plugins), an object of Kubernetes, or Helm values with \
                     pools, policy or networks"
                        .to_owned(),
                )
            }),
        };
        parts.push((place.to_owned(), part));
    }
    parts
}

/// Keys of a `ConfigMap` that our programs read, or those that they replace.
const MAP_KEYS: [&str; 3] = ["pools.json", "policy.json", "config.json"];

/// The parts of a `ConfigMap`. What is not ours under a key of its own is not checked.
fn parts_of_map(place: &str, map: &Value) -> Vec<(String, Part)> {
    let name = format!("{place}: ConfigMap {}", name_of(map));
    let mut parts = Vec::new();
    let data = match map.get("data") {
        None | Some(Value::Null) => return parts,
        Some(Value::Object(data)) => data,
        Some(_) => return vec![(name, Part::Wrong("data is not a map".to_owned()))],
    };
    for (key, value) in data {
        let place = format!("{name} {key}");
        let is_known = MAP_KEYS.contains(&key.as_str());
        let Some(text) = value.as_str() else {
            let why = format!("data.{key} is not text: write | after the key");
            parts.push((place, Part::Wrong(why)));
            continue;
        };
        let found = match is_known || documents(&place, text).is_ok() {
            true => parts_of(&place, text),
            false => Vec::new(),
        };
        let is_ours = |(_, part): &(String, Part)| !matches!(part, Part::Wrong(_));
        if is_known || (!found.is_empty() && found.iter().all(is_ours)) {
            parts.extend(found);
        } else {
            parts.push((place, Part::Other("a key of another program".to_owned())));
        }
    }
    parts
}

/// Whether these are Helm values: their `pools` are a mapping, too.
fn is_values(object: &Value) -> bool {
    let is_map = |key| object.get(key).is_some_and(Value::is_object);
    ["pools", "policy", "networks"].into_iter().any(is_map)
}

/// The documents that the chart makes of its values.
fn values(file: &str, text: &str, values: &Value) -> Vec<(String, Part)> {
    let mut parts = Vec::new();
    let mut map = |key: &str| match values.get(key) {
        Some(Value::Object(map)) => map.clone(),
        None | Some(Value::Null) => Map::new(),
        Some(_) => {
            let why = format!("{key} is not a map");
            parts.push((format!("{file}: {key}"), Part::Wrong(why)));
            Map::new()
        }
    };
    let [pools, changes, networks] = ["pools", "policy", "networks"].map(&mut map);
    if !pools.is_empty() {
        // As the file has them, mistakes have their lines.
        let written = Some(block(text, "pools")).filter(|_| pools.contains_key("version"));
        let pools = Value::Object(pools);
        let is_whole = |text: &String| {
            documents(file, text).is_ok_and(|all| all.first() == Some(&pools) && all.len() == 1)
        };
        let pools = written
            .filter(is_whole)
            .unwrap_or_else(|| format!("{pools:#}"));
        parts.push((format!("{file}: pools"), Part::Pools(pools)));
    }
    if !changes.is_empty() {
        let mut policy = default_policy();
        merge(&mut policy, &Value::Object(changes));
        let policy = Part::Policy(format!("{policy:#}"));
        parts.push((format!("{file}: policy"), policy));
    }
    for (name, network) in networks {
        // Its other keys are checked by the chart's schema.
        let plugins = network.get("plugins").and_then(Value::as_array);
        let is_network = plugins.is_some_and(|all| !all.is_empty());
        let part = match is_network {
            true => Part::Network(definition(&name, &network)),
            false => Part::Wrong("plugins is not a list of plugins".to_owned()),
        };
        parts.push((format!("{file}: network {name}"), part));
    }
    parts
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
        let parts = parts_of_file("f", text);
        let kind = |(_, part)| match part {
            Part::Pools(_) => "pools",
            Part::Policy(_) => "policy",
            Part::Network(_) => "network",
            Part::Other(_) => "other",
            Part::Wrong(_) => "wrong",
        };
        parts.into_iter().map(kind).collect()
    }

    /// Why parts of a file are wrong.
    fn faults(text: &str) -> Vec<String> {
        let parts = parts_of_file("f", text).into_iter();
        let fault = |(_, part)| match part {
            Part::Wrong(why) => Some(why),
            _ => None,
        };
        parts.filter_map(fault).collect()
    }

    #[test]
    fn a_value_of_a_config_map_that_is_not_text_is_a_mistake() {
        let text = "kind: ConfigMap\nmetadata: {name: c}\ndata:\n  pools.json:\n    version: 1\n    pools: []\n";
        assert_eq!(
            faults(text),
            ["data.pools.json is not text: write | after the key"]
        );
        assert_eq!(faults("kind: ConfigMap\ndata: x\n"), ["data is not a map"]);
    }

    #[test]
    fn a_key_of_another_program_stops_nothing() {
        let text = "kind: ConfigMap\ndata:\n  ca.crt: |\n    -----BEGIN\n    : [\n  a.txt: words\n  \
                    my.yaml: |\n    version: 1\n    pools: []\n  pools.json: words\n---\nkind: \
                    NetworkAttachmentDefinition\n";
        // In the order of the keys.
        assert_eq!(kinds(text), ["other", "other", "pools", "wrong", "network"]);
    }

    #[test]
    fn a_file_in_which_nothing_is_checked_is_a_mistake() {
        for text in [
            "",
            "# nothing\n",
            "kind: Secret\n",
            "kind: ConfigMap\n",
            "pools: {}\n",
        ] {
            assert_eq!(faults(text), ["nothing to check"], "{text}");
        }
    }

    #[test]
    fn values_that_the_chart_does_not_read_are_mistakes() {
        for (text, expected) in [
            ("networks: {a: {}}", "plugins is not a list of plugins"),
            ("networks: {a: x}", "plugins is not a list of plugins"),
            ("policy: {}\nnetworks: []", "networks is not a map"),
        ] {
            let found = faults(text);
            assert!(found[0].contains(expected), "{text}: {found:?}");
        }
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
                vec!["wrong"],
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
                "kind: ConfigMap\nmetadata: {name: c}\ndata:\n  pools.json: |\n    version: 1\n    pools: []\n  \
                 policy.json: |\n    {\"stores\": {}}\n",
                vec!["pools", "policy"],
            ),
            ("pools: [", vec!["pools"]),
            (
                "image: {tag: x}\npolicy: {}\npools: {configList: []}\nnetworks: {a: {plugins: [{}]}}\n",
                vec!["pools", "network"],
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
            parts_of("f", values),
            parts,
            "lines of pools are those of the file"
        );
        let found = faults("{\"stores\": {}}\n---\n{\"stores\": {}}\n");
        assert!(found[1].contains("several documents"), "{found:?}");
        let found = faults("a: 1\n");
        assert!(
            found[0].contains("is not a file of this project"),
            "{found:?}"
        );
    }
}
