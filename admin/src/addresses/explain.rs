//! `rdmactl addresses explain`: what a configuration means, and which address is next.

use super::Scope;
use crate::documents::{is_definition, name_of, objects};
use crate::output::{Ended, Outcome, complain, text_of};
use anyhow::{Context, Result, bail};
use clap::Args;
use cni_wire::{Command, Environment, NetworkConfig, Request, env};
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

/// One range of the network.
struct Explained<'c> {
    range: &'c Range,
    rail: Option<u32>,
    survey: Survey,
    /// The store was used before.
    is_used: bool,
    because: String,
}

impl Explain {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let plugin = scope.plugin()?;
        let (place, text) = text_of(&self.config)?;
        let config = one_plugin(&place, &text)?;
        let config = NetworkConfig::parse(&config).with_context(|| format!("explain {place}"))?;
        let env = Environment {
            command: Command::Status,
            attachment: None,
            netns: None,
            args: env::Args::default(),
            path: Vec::new(),
            netns_override: false,
        };
        let request = Request { env, config };
        let asked = plugin.config(&request)?;
        let rails: Vec<u32> = asked.rails().into_iter().flatten().collect();
        let config = asked.for_all_rails()?;
        let store = plugin.open_existing(&config.store)?;
        let surveys = match &store {
            Some(store) => plugin.survey(&config, &request, store)?,
            None => unused(&config.ranges, config.overlapping),
        };
        let explained = config.ranges.iter().zip(surveys).enumerate();
        let explained = explained.map(|(number, (range, survey))| Explained {
            range,
            rail: (config.places.get(number)).and_then(|at| rails.get(at.interface).copied()),
            because: match store {
                Some(_) => because(&survey),
                None => "no address was ever leased here".to_owned(),
            },
            is_used: store.is_some(),
            survey,
        });
        let ranges: Vec<Explained<'_>> = explained.collect();
        let profile = match config.profile {
            Profile::Strict => "strict",
            Profile::Compatible => "compatible",
        };
        let unique = match config.overlapping {
            true => "all ranges of the network name",
            false => "this range alone",
        };
        let document = json!({
            "profile": profile,
            "store": config.store,
            "networkName": config.network_name,
            "uniqueAmong": unique,
            "ignoredKeys": config.ignored,
            "ranges": ranges.iter().map(Explained::document).collect::<Vec<_>>(),
        });
        scope.global.say(document, || {
            let store = &config.store;
            let mut text =
                format!("profile {profile}, store {store:?}, addresses unique among {unique}\n");
            if !config.ignored.is_empty() {
                text += &format!("ignored keys: {}\n", config.ignored.join(", "));
            }
            text + &ranges.iter().map(Explained::text).collect::<String>()
        });
        Ok(Outcome::Good)
    }
}

impl Explained<'_> {
    /// The parts that addresses are given of.
    fn gives(&self) -> Vec<String> {
        let v4 = self.range.subnet().is_ipv4();
        self.range
            .spans()
            .iter()
            .map(|span| span.show(v4))
            .collect()
    }

    fn document(&self) -> Value {
        let (first, last) = self.range.window();
        let mut document = json!({
            "range": self.range.subnet(),
            "first": first,
            "last": last,
            "gives": self.gives(),
            "size": self.range.size().to_string(),
            "next": self.survey.next,
            "leased": self.is_used.then(|| self.survey.leased.to_string()),
            "coolingDown": self.is_used.then(|| self.survey.cooling_down.to_string()),
            "because": self.because,
        });
        if let (Some(map), Some(rail)) = (document.as_object_mut(), self.rail) {
            map.insert("rail".into(), rail.into());
        }
        document
    }

    fn text(&self) -> String {
        let (range, gives) = (self.range, self.gives());
        let rail = self.rail.map(|rail| format!("rail {rail}, "));
        let (subnet, size, parts) = (range.subnet(), range.size(), gives.len());
        let rail = rail.unwrap_or_default();
        let mut text = format!("{rail}range {subnet}: {size} addresses in {parts} parts\n");
        text.extend(gives.iter().map(|part| format!("  {part}\n")));
        let next = self
            .survey
            .next
            .map_or("none".to_owned(), |next| next.to_string());
        text + &format!("  next: {next}, because {}\n", self.because)
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

/// The next address of each range in a store that was never used: the lowest that no range
/// before it gets.
fn unused(ranges: &[Range], overlapping: bool) -> Vec<Survey> {
    let mut given: Vec<(IpNetwork, IpAddr)> = Vec::new();
    let survey = |range: &Range| {
        let subnet = range.subnet();
        let addresses = range.spans().iter().flat_map(|span| span.first..=span.last);
        let mut addresses = addresses.map(|address| from_bits(subnet.is_ipv4(), address));
        let next = addresses.find(|address| {
            let mut given = given.iter();
            !given.any(|(of, other)| other == address && (overlapping || *of == subnet))
        });
        given.extend(next.map(|address| (subnet, address)));
        Survey {
            next,
            leased: 0,
            cooling_down: 0,
            of_earlier_parts: 0,
            still_cooling_down: false,
            unreadable: 0,
        }
    };
    ranges.iter().map(survey).collect()
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
