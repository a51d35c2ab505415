//! What becomes of each key of a network: read, refused or noted. Pure.

use cni_wire::{
    Code, Error, Section,
    json::{Value, keys_of, resolve, same_key},
    text::bounded,
};
use node::spelling;
use serde::de::DeserializeOwned;

use super::{Config, Keys, SHARED, invalid};

/// The keys that are read here, and those that every plugin has. docs/reference.md explains each.
pub fn all() -> Vec<&'static str> {
    let shared: Vec<&str> = SHARED.split(' ').collect();
    [keys_of::<Keys>(), keys_of::<Config>(), &shared].concat()
}

/// Keys of other plugins that change where packets go, isolation, addresses or who may send, and
/// that are not supported here, with the remedy. Those of the last row resemble keys that are read here,
/// and are noted, as all further ones are.
const FOREIGN: &[&str] = &[
    "vlanId vlanTrunk trunk: set vlan for a VF that is moved, or name a VLAN netdev as master",
    "macspoofchk mac_spoof_chk: set spoofchk for a VF that is moved",
    "linkInContainer: name a netdev of the host as master; for a child of an interface that the pod \
      has, use the reference macvlan or ipvlan plugin",
    "portIsolation: set it on the bridge port (bridge link set dev PORT isolated on)",
    "ingressRate egressRate bandwidth: set max_tx_rate, in Mbit/s, for a VF that is moved",
    "infinibandGUID: set guid, or the capability infinibandGUID, with which the runtime passes a pod's \
      GUID",
    "rdmaIsolation: set rdma to required, which moves the RDMA device into the pod, or to off, which \
      leaves it",
    "range ipRanges subnet addresses gateway ips routes: put it into ipam",
    "dhcp: leases of DHCP are not renewed in a pod; set ipam to rdma-ipam, whereabouts, host-local or \
      static",
    "table gateways vrf vrfname rules: set sourceRouting for a routing table of the interface's own",
    "rails: set sourceRouting for a routing table of each interface; rails are a key of the node's \
      policy",
    "interface neighbors forwarding hardwareAddr: this is a key of DRANET; set attach, mtu, mac, \
      sourceRouting and ipam",
    "sysctl ipMasq isGateway isDefaultGateway portMappings links: chain the plugin that does it behind \
      this one",
    "cniVersions ifName ingressBurst linksInContainer node ports",
];

/// The keys of each row, and the remedy; none for keys that are noted.
fn foreign() -> impl Iterator<Item = (&'static str, &'static str)> {
    FOREIGN
        .iter()
        .map(|row| row.split_once(": ").unwrap_or((row, "")))
}

/// Those that a runtime, or a pod's annotation, adds for a capability of the network.
const OF_RUNTIMES: &[&str] = &["bandwidth", "portMappings"];

/// How many keys without effect are compared with ours: a comparison costs time, and a network may
/// have as many keys as it likes.
const MAX_COMPARED: usize = 48;
/// The longest key or value in a message.
const MAX_SHOWN_BYTES: usize = 64;

/// The notes about keys without effect, of the configuration and of what runtime and pod add to it.
///
/// # Errors
/// Code 2: a key asks for something that is not supported here; code 7: a key resembles one whose value
/// must not be lost.
pub(super) fn check(root: &Section<'_>, added: &[&Section<'_>]) -> Result<Vec<String>, Error> {
    for section in added {
        for key in OF_RUNTIMES {
            if let Some(value) = section.value(key) {
                refuse(section, key, value)?;
            }
        }
    }
    let read = all();
    let of_others = foreign().flat_map(|(keys, _)| keys.split(' '));
    let comparable: Vec<&str> = read.iter().copied().chain(of_others).collect();
    let mut notes = Vec::new();
    for (key, value) in root.entries() {
        // A key with a slash is of a namespace of its own, as the specification's extensions are.
        if key.contains('/') || resolve(&read, key).is_some() {
            continue;
        }
        let is_foreign = refuse(root, key, value)?;
        let shown = bounded(key, MAX_SHOWN_BYTES);
        if !is_foreign
            && notes.len() < MAX_COMPARED
            && let Some(meant) = spelling::nearest(key, &comparable)
        {
            let unknown = format!("unknown key {shown:?}; did you mean {meant:?}?");
            let remedy = "correct the key, or leave it out; its value would have no effect";
            return Err(invalid(unknown, remedy));
        }
        notes.push(format!("{shown} has no effect here"));
    }
    Ok(notes)
}

/// Refuses a key of another plugin whose value asks for something. The answer is whether it is one.
fn refuse(section: &Section<'_>, key: &str, value: &Value) -> Result<bool, Error> {
    let is_among = |keys: &str| keys.split(' ').any(|foreign| same_key(key, foreign));
    match foreign().find(|(keys, _)| is_among(keys)) {
        Some((_, remedy)) if !remedy.is_empty() && !asks_for_nothing(value) => {
            let (path, value) = (section.path_of(key), value.describe());
            let value = bounded(&value, MAX_SHOWN_BYTES);
            let msg = format!("{path}: rdma-netdev does not support this key ({value})");
            Err(Error::advise(Code::UnsupportedField, msg, remedy))
        }
        found => Ok(found.is_some()),
    }
}

/// Of an object the keys that a type has, as this type.
///
/// # Errors
/// Code 7 naming the key that has another type, or that is there twice.
pub(super) fn read<T: DeserializeOwned>(root: &Section<'_>) -> Result<T, Error> {
    let (entries, known) = (root.entries(), keys_of::<T>());
    let own = entries.filter(|(key, _)| resolve(known, key).is_some());
    let own = own.map(|(key, value)| (key.to_owned(), value.clone()));
    Section::root(&Value::Object(own.collect())).read()
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use cni_wire::json;
    use serde_json::{Map, Value, json};

    use super::*;

    fn read(keys: Value) -> Result<Vec<String>, Error> {
        check(&Section::root(&json::parse(keys.to_string()).unwrap()), &[])
    }

    fn foreign() -> impl Iterator<Item = (&'static str, &'static str)> {
        super::foreign().flat_map(|(keys, remedy)| keys.split(' ').map(move |key| (key, remedy)))
    }

    #[test]
    fn a_key_that_resembles_one_of_ours_is_refused_with_both_names() {
        for (written, meant) in [
            ("atach", "attach"),
            ("linkInContaner", "linkInContainer"),
            ("link_in_container", "linkInContainer"),
            ("masters", "master"),
            ("pciBusId0", "pciBusID"),
            ("rdmaDevices", "rdmaDevice"),
            ("kernelPaht", "kernelpath"),
            ("sourceRoute", "sourceRouting"),
            ("mtuu", "mtu"),
            ("umcats", "umcast"),
            ("vlan_qos", "vlanQoS"),
            ("spoofcheck", "spoofchk"),
        ] {
            let error = read(json!({ written: "x" })).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig, "{written}");
            let both = error.msg.contains(&format!("{written:?}"))
                && error.msg.contains(&format!("{meant:?}"));
            assert!(both, "{error}");
        }
    }

    #[test]
    fn what_another_plugin_would_do_is_refused_with_key_and_remedy() {
        for (key, remedy) in foreign().filter(|(_, remedy)| !remedy.is_empty()) {
            let error = read(json!({ key: "on" })).unwrap_err();
            assert_eq!(error.code, Code::UnsupportedField, "{key}");
            assert!(
                error.msg.contains(key) && error.msg.contains("on"),
                "{error}"
            );
            assert!(error.details.contains(remedy), "{error}");
            for nothing in [json!(0), json!(false), json!(""), json!([])] {
                assert_eq!(read(json!({ key: nothing })).unwrap().len(), 1, "{key}");
            }
            assert_eq!(read(json!({ key: null })), Ok(Vec::new()));
        }
        let added = json!({"portMappings": [{"hostPort": 80}]});
        let added = json::parse(added.to_string()).unwrap();
        assert!(check(&Section::absent(""), &[&Section::root(&added)]).is_err());
        let old = read(json!({"rails": true})).unwrap_err();
        assert!(old.details.contains("sourceRouting"), "{old}");
    }

    #[test]
    fn other_keys_are_noted_and_those_of_a_namespace_passed_over() {
        let noted = foreign().filter(|(_, remedy)| remedy.is_empty());
        let noted = noted.map(|(key, _)| key);
        for key in noted.chain(["logLevel", "promisc", "comment", "x"]) {
            let notes = read(json!({ key: 1 })).unwrap_or_else(|e| panic!("{key}: {e}"));
            assert_eq!(notes, [format!("{key} has no effect here")]);
        }
        let silent = json!({"cni.dev/valid-attachments": [], "example.com/mtu": 1, "MTU": 9000, "Master": "e1"});
        assert_eq!(read(silent), Ok(Vec::new()));
    }

    #[test]
    fn only_the_first_unknown_keys_are_compared() {
        let with_unknown_keys = |count: usize| {
            let mut keys: Map<String, Value> = (0..count)
                .map(|n| (format!("AAAAAAAA{n:05}"), json!(1)))
                .collect();
            keys.insert("atach".into(), json!("move"));
            read(Value::Object(keys))
        };
        assert!(with_unknown_keys(MAX_COMPARED - 1).is_err());
        assert!(with_unknown_keys(MAX_COMPARED).is_ok());
    }

    #[test]
    fn every_key_is_explained_in_the_docs() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference.md");
        let page = std::fs::read_to_string(page).unwrap();
        let refused = foreign().filter(|(_, remedy)| !remedy.is_empty());
        let refused = refused.map(|(key, _)| key).filter(|key| *key != "rails");
        let explained = |key: &&str| {
            // Written by runtimes, never by a person.
            ["args", "prevResult", "runtimeConfig"].contains(key)
                || page.contains(&format!("`{key}`"))
                || page.contains(&format!("\"{key}\""))
        };
        let keys = all().into_iter().chain(refused);
        let missing: Vec<_> = keys.filter(|key| !explained(key)).collect();
        assert!(missing.is_empty(), "not in docs/reference.md: {missing:?}");
    }

    #[test]
    fn every_key_is_in_the_tables_once() {
        let keys = all().into_iter().chain(foreign().map(|(key, _)| key));
        let all: Vec<String> = keys.map(str::to_ascii_lowercase).collect();
        let distinct: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
