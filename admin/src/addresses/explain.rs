//! `rdmactl addresses explain`: what a configuration means, and which address is next.

use super::Scope;
use crate::documents::{is_definition, name_of, objects};
use crate::output::{Ended, Outcome, complain, say, say_json};
use anyhow::{Context, Result, bail};
use clap::Args;
use cni_wire::{Command, Environment, NetworkConfig, Request, env};
use ipam::config::Config;
use ipam::range::{Range, from_bits};
use ipam::store::Survey;
use ipnetwork::IpNetwork;
use node::policy::Profile;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct Explain {
    /// File with a network configuration, a conflist or a `NetworkAttachmentDefinition`
    /// (JSON or YAML; of several, the first by name), or - for standard input
    config: PathBuf,
}

impl Explain {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let plugin = scope.plugin()?;
        let request = self.request()?;
        let asked = plugin.config(&request)?;
        let rails: Vec<u32> = asked.rails().into_iter().flatten().collect();
        let config = asked.for_all_rails()?;
        let rail_of = |range: usize| rails.get(config.places.get(range)?.interface);
        let store = plugin.open_existing(&config.store)?;
        let ranges = &config.ranges;
        let next: Vec<Value> = match &store {
            Some(store) => plugin
                .survey(&config, &request, store)?
                .iter()
                .map(found)
                .collect(),
            None => unused(ranges, config.overlapping),
        };
        let described = ranges.iter().zip(next).enumerate();
        let ranges: Vec<Value> = described
            .map(|(number, (range, next))| describe(range, next, rail_of(number)))
            .collect();
        let value = json!({
            "profile": if config.profile == Profile::Strict { "strict" } else { "compatible" },
            "store": config.store,
            "networkName": config.network_name,
            "uniqueAmong": unique(&config),
            "ignoredKeys": config.ignored,
            "ranges": ranges,
        });
        if scope.global.json {
            say_json(value);
        } else {
            say(&text(&config, &value));
        }
        Ok(Outcome::Good)
    }

    fn request(&self) -> Result<Request> {
        let (place, text) = self.read()?;
        let env = Environment {
            command: Command::Status,
            attachment: None,
            netns: None,
            args: env::Args::default(),
            path: Vec::new(),
            netns_override: false,
        };
        let config = one_plugin(&place, &text)?;
        let config = NetworkConfig::parse(&config).with_context(|| format!("explain {place}"))?;
        Ok(Request { env, config })
    }

    /// What the text is called in messages, and the text.
    fn read(&self) -> Result<(String, String)> {
        if self.config.as_os_str() == "-" {
            let text = std::io::read_to_string(std::io::stdin().lock());
            return Ok((
                "standard input".to_owned(),
                text.context("read standard input")?,
            ));
        }
        let place = self.config.display().to_string();
        let text =
            std::fs::read_to_string(&self.config).with_context(|| format!("read {place}"))?;
        Ok((place, text))
    }
}

/// The configuration of the plugin that has an `ipam`, out of whatever holds it.
fn one_plugin(place: &str, text: &str) -> Result<Vec<u8>> {
    let document = one_network(place, objects(place, text)?)?;
    let (place, config) = match is_definition(&document) {
        false => (place.to_owned(), document),
        true => {
            let name = name_of(&document);
            let place = format!("{place}: NetworkAttachmentDefinition {name}");
            let config = document
                .pointer("/spec/config")
                .and_then(Value::as_str)
                .with_context(|| format!("{place} has no spec.config"))?;
            let mut config: Value = serde_json::from_str(config)
                .with_context(|| format!("{place}: spec.config is not JSON"))?;
            if let Some(map) = config.as_object_mut() {
                map.entry("name").or_insert_with(|| name.into());
            }
            (place, config)
        }
    };
    let Some(plugins) = config.get("plugins").and_then(Value::as_array) else {
        if !config.is_object() {
            bail!("{place} is no network configuration: it is not a JSON object");
        }
        // As it is written: of a key that is there twice, the reader of configurations decides.
        return Ok(match serde_json::from_str::<Value>(text) {
            Ok(same) if same == config => text.as_bytes().to_vec(),
            _ => config.to_string().into_bytes(),
        });
    };
    let mut plugin = plugins
        .iter()
        .find(|plugin| plugin.get("ipam").is_some_and(Value::is_object))
        .with_context(|| format!("{place}: no plugin of the list has an ipam"))?
        .clone();
    if let Some(map) = plugin.as_object_mut() {
        for key in ["name", "cniVersion"] {
            if let Some(of_the_list) = config.get(key) {
                map.insert(key.into(), of_the_list.clone());
            }
        }
    }
    Ok(plugin.to_string().into_bytes())
}

/// The document to explain: the only one, or of several objects the first
/// NetworkAttachmentDefinition by name, which is said.
fn one_network(place: &str, mut objects: Vec<Value>) -> Result<Value> {
    let count = objects.len();
    if count < 2 {
        let only = objects.pop();
        return only.with_context(|| format!("{place} is empty"));
    }
    objects.retain(is_definition);
    objects.sort_by_cached_key(|object| name_of(object).to_owned());
    let names: Vec<String> = objects
        .iter()
        .map(|object| name_of(object).to_owned())
        .collect();
    let Some(first) = objects.into_iter().next() else {
        bail!("{place} has {count} documents, and none is a NetworkAttachmentDefinition");
    };
    if let [explained, _, ..] = names.as_slice() {
        complain(&format!(
            "{place} has the networks {}; this explains {explained}",
            names.join(", ")
        ));
    }
    Ok(first)
}

fn unique(config: &Config) -> &'static str {
    if config.overlapping {
        "all ranges of the network name"
    } else {
        "this range alone"
    }
}

fn describe(range: &Range, next: Value, rail: Option<&u32>) -> Value {
    let (first, last) = range.window();
    let v4 = range.subnet().is_ipv4();
    let parts: Vec<String> = range.spans().iter().map(|span| span.show(v4)).collect();
    let mut value = json!({
        "range": range.subnet(),
        "first": first,
        "last": last,
        "gives": parts,
        "size": range.size().to_string(),
    });
    if let (Some(map), Value::Object(next)) = (value.as_object_mut(), next) {
        map.extend(next);
        if let Some(rail) = rail {
            map.insert("rail".into(), json!(rail));
        }
    }
    value
}

/// The next address by what is in the store.
fn found(survey: &Survey) -> Value {
    json!({
        "next": survey.next,
        "leased": survey.leased.to_string(),
        "coolingDown": survey.cooling_down.to_string(),
        "because": because(survey),
    })
}

/// The next address of each range in a store that was never used: the lowest that no range
/// before it gets.
fn unused(ranges: &[Range], overlapping: bool) -> Vec<Value> {
    let mut given: Vec<(IpNetwork, IpAddr)> = Vec::new();
    let next = ranges.iter().map(|range| {
        let subnet = range.subnet();
        let is_given = |address: &IpAddr| {
            let mut given = given.iter();
            given.any(|(of, other)| other == address && (overlapping || *of == subnet))
        };
        let spans = range.spans().iter();
        let addresses = spans.flat_map(|span| span.first..=span.last);
        let mut addresses = addresses.map(|address| from_bits(subnet.is_ipv4(), address));
        let next = addresses.find(|address| !is_given(address));
        given.extend(next.map(|address| (subnet, address)));
        json!({"next": next, "because": "no address was ever leased here"})
    });
    next.collect()
}

fn because(survey: &Survey) -> String {
    let mut before = format!(
        "{} lower ones are leased and {} are cooling down",
        survey.leased, survey.cooling_down
    );
    let earlier = survey.of_earlier_parts;
    if earlier > 0 {
        before += &format!(", and ranges before this one get {earlier}");
    }
    let is_lowest = (survey.leased, survey.cooling_down, earlier) == (0, 0, 0);
    let mut because = match (survey.next, survey.still_cooling_down) {
        (Some(_), false) if is_lowest => "it is the lowest".to_owned(),
        (Some(_), false) => format!("it is the lowest that is free: {before}"),
        (Some(_), true) => format!("nothing else is free, it was released first: {before}"),
        (None, _) if earlier > 0 => {
            "every address is leased, or a range before this one gets it".to_owned()
        }
        (None, _) => "every address is leased".to_owned(),
    };
    if survey.unreadable > 0 {
        because += &format!(
            "; {} parts cannot be read, see rdmactl addresses fsck",
            survey.unreadable
        );
    }
    because
}

fn text(config: &Config, value: &Value) -> String {
    let mut out = format!(
        "profile {}, store {:?}, addresses unique among {}\n",
        value["profile"].as_str().unwrap_or_default(),
        config.store,
        unique(config)
    );
    if !config.ignored.is_empty() {
        out += &format!("ignored keys: {}\n", config.ignored.join(", "));
    }
    for range in value["ranges"].as_array().into_iter().flatten() {
        let get = |key: &str| match &range[key] {
            Value::String(text) => text.clone(),
            Value::Null => "none".to_owned(),
            other => other.to_string(),
        };
        let gives = range["gives"].as_array().map_or(0, Vec::len);
        if let Some(rail) = range.get("rail") {
            out += &format!("rail {rail}, ");
        }
        out += &format!(
            "range {}: {} addresses in {gives} parts\n",
            get("range"),
            get("size")
        );
        for part in range["gives"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
        {
            out += &format!("  {part}\n");
        }
        out += &format!("  next: {}, because {}\n", get("next"), get("because"));
    }
    out
}
