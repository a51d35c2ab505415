//! Networks are checked before a pod asks for them, with the policy that a node has.
//!
//! ADD's own `decide` judges them, without a NIC. What depends on a node's links is checked on a host
//! only, as STATUS does; what depends on a pod's allocation is not checked.

use std::{collections::BTreeSet, path::PathBuf};

use attachment::{Error, addresses, node::Places};
use cni_wire::{Code, Command, Environment, NetworkConfig, Request, env, text};
use hca::{HcaId, Host};
use ipam::{leases::LeaseError, plugin::Plugin};
use node::policy::{FabricAddresses, Policy};
use serde::Serialize;
use serde_json::Value;

use rdma_netdev::{
    addressing::{self, addressing},
    command::status,
    config::{Attach, Config, Devices, RdmaRequirement, Target},
    decide::refusals,
    facts::{Facts, name_of},
};

/// The names under which this plugin is called: its own, and that of the RDMA CNI plugin, in whose
/// place it may stand.
const TYPES: [&str; 2] = ["rdma-netdev", "rdma"];
/// By this annotation Multus asks the kubelet for the pod's unit, and passes `deviceID`.
const RESOURCE_NAME: &str = "k8s.v1.cni.cncf.io/resourceName";

/// A network of the file.
#[derive(Debug)]
pub(crate) struct Network {
    /// `namespace/name`, or the configuration's name.
    pub name: String,
    /// The resource whose unit decides.
    pub resource: Option<String>,
    /// The configuration, or why there is none.
    config: Result<Value, String>,
}

/// What was found about a network; its document.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CheckedNetwork {
    network: String,
    resource: Option<String>,
    attach: Option<String>,
    ipam: Option<String>,
    ranges: Vec<String>,
    notes: Vec<String>,
    /// Why it would be refused.
    #[serde(skip)]
    pub errors: Vec<String>,
}

/// The host that a network is checked on.
#[derive(Clone, Copy)]
pub(crate) struct NetworkHost<'a> {
    pub cni_path: &'a [PathBuf],
    pub roots: &'a Host,
    /// HCAs with several netdevs, all of them here, that are offered as the network's resource.
    pub hcas: &'a [HcaId],
}

/// Checks a network with the node's policy.
pub(crate) fn check(
    network: &Network,
    policy: &Policy,
    places: &Places,
    host: Option<NetworkHost<'_>>,
) -> CheckedNetwork {
    let mut found = CheckedNetwork {
        network: network.name.clone(),
        resource: network.resource.clone(),
        ..CheckedNetwork::default()
    };
    let ours = match plugins(network) {
        Ok(ours) => ours,
        Err(error) => {
            found.errors.push(error);
            return found;
        }
    };
    if ours.is_empty() {
        found
            .notes
            .push("no plugin of it is rdma-netdev: not checked".to_owned());
    }
    for plugin in ours {
        check_plugin(network, &plugin, policy, places, host, &mut found);
    }
    found
}

fn check_plugin(
    network: &Network,
    plugin: &Value,
    policy: &Policy,
    places: &Places,
    host: Option<NetworkHost<'_>>,
    found: &mut CheckedNetwork,
) {
    let read = || -> Result<(Request, Config), Error> {
        let request = Request {
            env: Environment {
                command: Command::Status,
                attachment: None,
                netns: None,
                args: env::Args::default(),
                path: host.map(|host| host.cni_path.to_vec()).unwrap_or_default(),
                netns_override: false,
            },
            config: NetworkConfig::parse(plugin.to_string().as_bytes())?,
        };
        let config = Config::read(&request, &policy.pkeys)?;
        Ok((request, config))
    };
    let (request, config) = match read() {
        Ok(read) => read,
        Err(error) => return found.errors.push(error.to_string()),
    };
    let before = found.errors.len();
    found.notes.extend(config.notes.iter().cloned());
    notes(&config, network, found);
    found.notes.extend(left_behind(&request, &config, policy));
    let by_unit = network.resource.is_some() || config.allocation.is_some();
    found.attach = Some(attach(&config, by_unit));
    // Neither of the two hides the other.
    let mut ranges = None;
    found.note(|_| Ok(request.config.dns().map(drop)?));
    found.note(|found| {
        ranges = check_addresses(&request, &config, policy, places, found)?;
        Ok(())
    });
    let kind = request.config.ipam_type().ok().flatten();
    let facts = Facts {
        by_unit,
        for_one: kind
            .filter(|kind| !addresses::is_own(kind))
            .map(|kind| addresses::serves_one(kind).into()),
        ranges,
        ..Facts::without_pod(policy, &places.policy)
    };
    let refused = refusals(&config, &facts).into_iter();
    found.errors.extend(refused.map(|error| error.to_string()));
    let by_hca = config.device.is_none() && config.master.is_none();
    if let (true, Some(host)) = (by_hca && config.attach != Attach::RdmaOnly, host) {
        found.errors.extend(unclear_netdevs(host, config.port));
    }
    if host.is_some() && found.errors.len() == before {
        found.note(|found| {
            let subject = format!("validate {}", network.name);
            match request.command_exists_in_version() {
                Ok(()) => found.notes.extend(status::run(places, subject, &request)?),
                Err(error) => {
                    found
                        .notes
                        .extend(status::check(places, subject, &request)?.2);
                    found.notes.push(format!("the IPAM is not asked: {error}"));
                }
            }
            Ok(())
        });
    }
}

/// Why ADD would not know which netdev of an HCA is meant.
fn unclear_netdevs(host: NetworkHost<'_>, port: Option<u32>) -> Vec<String> {
    let netdev = |hca: &HcaId| name_of(host.roots, &Target::Hca(hca.clone()), port);
    let unclear = host.hcas.iter().filter_map(|hca| netdev(hca).err());
    unclear.map(|error| error.to_string()).collect()
}

fn notes(config: &Config, network: &Network, found: &mut CheckedNetwork) {
    if config.rdma == RdmaRequirement::Required {
        let note = "rdma required is refused on nodes that are not in exclusive mode";
        found.notes.push(note.to_owned());
    }
    if config.accept_ra && config.source_routing.wanted != Some(false) {
        found.notes.push(
            "acceptRA: the default route of router advertisements is left out where the pod has one; \
             with sourceRouting false it is not"
                .to_owned(),
        );
    }
    if let (Some(master), Some(resource)) = (&config.master, &network.resource) {
        found.notes.push(format!(
            "a pod whose unit of {resource} is another HCA than that of {master} is refused; without \
             master the child is made on the netdev of the unit"
        ));
    }
}

/// What a move without an IPAM leaves on the host.
fn left_behind(request: &Request, config: &Config, policy: &Policy) -> Option<String> {
    let takes_the_hosts =
        config.attach == Attach::Move && matches!(request.config.ipam_type(), Ok(None));
    (takes_the_hosts && policy.fabric_addresses == FabricAddresses::Leased).then(|| {
        "without ipam the pod gets the netdev's own addresses; those with a lifetime (valid_lft) stay on \
         the host, unless the node's policy has \"fabricAddresses\": \"static\""
            .to_owned()
    })
}

/// Checks the IPAM's configuration. Returns the rails for which it has ranges.
fn check_addresses(
    request: &Request,
    config: &Config,
    policy: &Policy,
    places: &Places,
    found: &mut CheckedNetwork,
) -> Result<Option<BTreeSet<u32>>, Error> {
    let Some(kind) = request.config.ipam_type()? else {
        return Ok(None);
    };
    found.ipam = Some(kind.to_owned());
    addresses::allowed_by(&policy.allow.ipam, &places.policy, kind)?;
    if !addresses::is_own(kind) {
        let note = format!("ipam of type {kind}: its keys are not checked here");
        found.notes.push(note);
        return Ok(None);
    }
    let own = Plugin::new(policy.clone(), &places.root, places.node.as_deref());
    let read = own.config(request)?;
    let ignored = read.ignored.iter();
    found
        .notes
        .extend(ignored.map(|key| format!("ipam.{key} has no effect here")));
    found.notes.extend(read.notes.iter().cloned());
    if !policy.stores.contains_key(&read.store) {
        let unknown = LeaseError::unknown_store(policy, &read.store);
        return Err(Error::new(Code::Policy, &unknown).with_details(unknown.remedy()));
    }
    let examples = read.examples()?;
    addresses::check_answer(examples.iter())?;
    for leased in examples {
        let request = addressing::Request {
            ifname: "net1",
            rail: config.rail,
            config,
            mtu: config.mtu,
            leased: Some(&leased),
            moved: None,
        };
        addressing(&[request], &addressing::Pod::default())?;
    }
    let ranges = read.all_ranges();
    found
        .ranges
        .extend(ranges.map(|range| range.subnet().to_string()));
    Ok(read.rails())
}

impl CheckedNetwork {
    fn note(&mut self, check: impl FnOnce(&mut Self) -> Result<(), Error>) {
        let failed = check(self).err();
        self.errors.extend(failed.map(|error| error.to_string()));
    }
}

/// What the pod gets, in a few words.
fn attach(config: &Config, by_unit: bool) -> String {
    let of = match (&config.master, by_unit) {
        (Some(master), _) => format!(" on {master}"),
        (None, true) if config.devices == Devices::All => " of all allocated units".to_owned(),
        (None, true) => " of the allocated unit".to_owned(),
        (None, false) => String::new(),
    };
    format!("{}{of}", config.attach.as_str())
}

impl Network {
    /// A `NetworkAttachmentDefinition`, a conflist or a configuration; `place` names one that has no
    /// name.
    pub(crate) fn of(object: &Value, place: &str) -> Self {
        if object.get("kind").is_some() {
            return of_definition(object);
        }
        let name = object.get("name").and_then(Value::as_str);
        Self {
            name: name.unwrap_or(place).to_owned(),
            resource: None,
            config: Ok(object.clone()),
        }
    }
}

fn of_definition(object: &Value) -> Network {
    let shown = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let name = shown("/metadata/name").unwrap_or_default();
    let namespace = shown("/metadata/namespace").unwrap_or("default");
    let annotations = object.pointer("/metadata/annotations");
    let resource = annotations.and_then(|all| all.get(RESOURCE_NAME)?.as_str());
    Network {
        name: format!("{namespace}/{name}"),
        resource: resource.map(str::to_owned),
        config: config_of(object),
    }
}

fn config_of(object: &Value) -> Result<Value, String> {
    let text = |key: &str| match object.pointer(&format!("/{}", key.replace('.', "/"))) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(format!("{key} is not text")),
    };
    let name = text("metadata.name")?.ok_or("metadata.name is missing")?;
    text("metadata.namespace")?;
    // Without one, Multus reads a file of the node that has the network's name.
    let Some(config) = text("spec.config")? else {
        return Ok(Value::Null);
    };
    let mut config: Value = serde_json::from_str(config)
        .map_err(|error| format!("spec.config is not JSON: {error}"))?;
    if let Some(map) = config.as_object_mut() {
        map.entry("name").or_insert_with(|| name.into());
    }
    Ok(config)
}

/// The configurations of this plugin in a network, as the runtime passes them.
fn plugins(network: &Network) -> Result<Vec<Value>, String> {
    let config = network.config.as_ref().map_err(String::clone)?;
    let Some(list) = config.get("plugins") else {
        return Ok([config.clone()].into_iter().filter(is_ours).collect());
    };
    let list = list.as_array().ok_or("plugins is not a list")?;
    let ours = list.iter().filter(|plugin| is_ours(plugin));
    Ok(ours
        .map(|plugin| {
            let mut plugin = plugin.clone();
            for key in ["name", "cniVersion"] {
                if let (Some(map), Some(value)) = (plugin.as_object_mut(), config.get(key)) {
                    map.insert(key.into(), value.clone());
                }
            }
            plugin
        })
        .collect())
}

fn is_ours(plugin: &Value) -> bool {
    let kind = plugin.get("type").and_then(Value::as_str);
    kind.is_some_and(|kind| TYPES.contains(&kind))
}

impl CheckedNetwork {
    /// For a person; without the errors.
    pub(crate) fn text(&self) -> String {
        let line = |what: &str| format!("{}: {}\n", self.network, text::printable(what));
        let mut text = String::new();
        if let (Some(attach), true) = (&self.attach, self.errors.is_empty()) {
            let addresses = match &self.ipam {
                None => "no addresses".to_owned(),
                Some(ipam) if self.ranges.is_empty() => format!("addresses by {ipam}"),
                Some(ipam) => format!("addresses by {ipam} of {}", self.ranges.join(", ")),
            };
            text += &line(&format!("{attach}; {addresses}"));
        }
        for note in &self.notes {
            text += &line(&format!("note: {note}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn checked(text: &str) -> (String, CheckedNetwork) {
        let place = tempfile::tempdir().unwrap();
        let policy = Policy::default();
        let places = Places {
            root: place.path().to_owned(),
            policy: "/etc/rdma-netdev/policy.json".into(),
            node: Some("n1".into()),
        };
        let network = Network::of(&serde_json::from_str(text).unwrap(), "x");
        let found = check(&network, &policy, &places, None);
        (network.name, found)
    }

    fn one(config: &str) -> CheckedNetwork {
        checked(config).1
    }

    #[test]
    fn a_network_without_a_port_is_refused_for_an_hca_with_several_netdevs() {
        let refused = |lay: fn(&hca_trees::Tree), port| {
            let directory = tempfile::tempdir().unwrap();
            let tree = hca_trees::Tree::new(directory.path());
            lay(&tree);
            let hcas = [hca_trees::ports::CARD.parse().unwrap()];
            let host = NetworkHost {
                cni_path: &[],
                roots: &tree.host(),
                hcas: &hcas,
            };
            unclear_netdevs(host, port).concat()
        };
        let several = refused(hca_trees::ports::four_planes, None);
        assert!(several.contains("has several netdevs"), "{several}");
        let dark = refused(hca_trees::ports::four_planes, Some(1));
        assert!(dark.contains("no netdev on port 1"), "{dark}");
        assert_eq!(refused(hca_trees::ports::four_planes, Some(12)), "");
    }

    #[test]
    fn a_definition_is_checked_by_the_resource_of_its_annotation() {
        let definition = |annotations: Value| {
            let config = r#"{"cniVersion": "1.0.0", "type": "rdma-netdev", "attach": "move",
                "ipam": {"type": "rdma-ipam", "range": "10.9.0.0/24"}}"#;
            let mut object = json!({"kind": "NetworkAttachmentDefinition",
                "metadata": {"name": "rails", "namespace": "ml"}, "spec": {"config": config}});
            object["metadata"]["annotations"] = annotations;
            object.to_string()
        };
        let with = || json!({RESOURCE_NAME: "rdma/nic"});
        let (name, found) = checked(&definition(with()));
        assert_eq!((name.as_str(), &found.errors), ("ml/rails", &Vec::new()));
        assert_eq!(found.attach.as_deref(), Some("move of the allocated unit"));
        assert_eq!(found.ranges, ["10.9.0.0/24"]);
        let all = definition(with()).replace(r#"\"move\""#, r#"\"move\", \"devices\": \"all\""#);
        let (_, found) = checked(&all);
        assert_eq!(found.attach.as_deref(), Some("move of all allocated units"));
        let (_, found) = checked(&definition(json!({})));
        assert!(found.errors[0].contains(RESOURCE_NAME), "{found:?}");
    }

    #[test]
    fn a_definition_needs_a_name_and_its_config_is_text() {
        let config = r#"{"cniVersion": "1.0.0", "type": "macvlan"}"#;
        for (metadata, spec, expected) in [
            (json!({"name": "a"}), json!({"config": config}), None),
            (json!({"name": "a"}), json!({}), None),
            (
                json!({"name": "a"}),
                json!({"config": {}}),
                Some("spec.config is not text"),
            ),
            (
                json!({}),
                json!({"config": config}),
                Some("metadata.name is missing"),
            ),
            (
                json!({"name": 1}),
                json!({"config": config}),
                Some("metadata.name is not text"),
            ),
            (
                json!({"name": "a", "namespace": []}),
                json!({"config": config}),
                Some("metadata.namespace is not text"),
            ),
        ] {
            let kind = "NetworkAttachmentDefinition";
            let object = json!({"kind": kind, "metadata": metadata, "spec": spec});
            let found = one(&object.to_string()).errors;
            assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
            let expected = expected.unwrap_or_default();
            assert!(
                found.iter().all(|error| error.contains(expected)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn what_add_would_refuse_is_refused_with_the_policys_word() {
        for (keys, expected) in [
            (
                r#""attach": "macvlan", "master": "e0", "ipam": {"type": "host-local"}"#,
                "allow.ipam",
            ),
            (
                r#""attach": "macvlan", "master": "e0", "ipam": {"type": "rdma-netdev"}"#,
                "not an IPAM plugin",
            ),
            (
                r#""attach": "macvlan", "master": "e0", "ipam": {"type": "dhcp"}"#,
                "ipam.type: dhcp",
            ),
            (
                r#""master": "e0", "atach": "macvlan""#,
                "did you mean \"attach\"",
            ),
            (r#""master": "e0""#, "attach is missing"),
            (
                r#""attach": "move", "device": "e0", "mode": "bridge""#,
                "mode",
            ),
            (r#""attach": "macvlan", "device": "e0""#, "device"),
            (
                r#""attach": "macvlan", "master": "e0", "ipam": {"type": "rdma-ipam", "range": "10.0.0.0/33"}"#,
                "10.0.0.0/33",
            ),
            (
                r#""attach": "macvlan", "master": "e0", "ipam": {"type": "rdma-ipam", "range": "10.0.0.0/24", "store": "nfs"}"#,
                "nfs",
            ),
        ] {
            let list = format!(
                r#"{{"cniVersion": "1.0.0", "name": "x", "plugins": [{{"type": "rdma-netdev", {keys}}}]}}"#
            );
            let found = one(&list);
            assert!(
                found.errors.iter().any(|e| e.contains(expected)),
                "{keys}: {found:?}"
            );
        }
    }

    #[test]
    fn a_master_beside_a_resource_is_noted() {
        let network = |keys: &str| {
            let config = format!(
                r#"{{"cniVersion": "1.0.0", "type": "rdma-netdev", "attach": "macvlan"{keys}}}"#
            );
            one(
                &json!({"kind": "NetworkAttachmentDefinition", "metadata": {"name": "x",
                "annotations": {RESOURCE_NAME: "rdma/a"}}, "spec": {"config": config}})
                .to_string(),
            )
        };
        let found = network(r#", "master": "e0""#);
        assert!(found.errors.is_empty(), "{found:?}");
        assert!(
            found
                .notes
                .iter()
                .any(|note| note.contains("unit of rdma/a")),
            "{found:?}"
        );
        let found = network("");
        assert!(
            found.errors.is_empty() && found.notes.is_empty(),
            "{found:?}"
        );
    }

    #[test]
    fn a_network_with_ranges_of_rails_says_its_rail() {
        let of = |keys: &str| {
            one(&format!(
                r#"{{"cniVersion": "1.0.0", "name": "x", "type": "rdma-netdev", "attach": "macvlan", "master": "e0", {keys}
                "ipam": {{"type": "rdma-ipam", "ranges": {{"0": {{"range": "10.0.0.0/24"}}}}}}}}"#
            ))
        };
        for (keys, expected) in [
            ("", "the rail of the NIC is unknown"),
            (r#""rail": 1,"#, "nothing for rail 1"),
            (r#""rail": 300,"#, "rail"),
        ] {
            let found = of(keys);
            assert!(
                found.errors.iter().any(|e| e.contains(expected)),
                "{keys}: {found:?}"
            );
        }
        let found = of(r#""rail": 0,"#);
        assert!(found.errors.is_empty(), "{found:?}");
    }

    #[test]
    fn plugins_of_others_are_not_judged() {
        let found =
            one(r#"{"cniVersion": "1.0.0", "name": "x", "type": "macvlan", "master": "e0"}"#);
        assert!(
            found.errors.is_empty() && found.notes[0].contains("not checked"),
            "{found:?}"
        );
        let broken = r#"{"kind": "NetworkAttachmentDefinition", "metadata": {"name": "x"},
            "spec": {"config": "{"}}"#;
        assert!(one(broken).errors[0].starts_with("spec.config is not JSON"));
    }
}
