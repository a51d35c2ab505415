//! What becomes of each key of a network: read, refused or noted. Pure.

use cni_wire::{Code, Error, Section, text::bounded};
use node::spelling;
use serde_json::Value;

/// The keys that are read here, and those that every plugin has. docs/reference.md explains each.
pub const KEYS: &[&str] = &[
    "acceptRA",
    "args",
    "attach",
    "bcqueuelen",
    "capabilities",
    "cniVersion",
    "dad",
    "device",
    "deviceID",
    "devices",
    "dns",
    "guid",
    "hwaddr",
    "ibKubernetesEnabled",
    "ipam",
    "kernelpath",
    "linkLocal",
    "link_state",
    "mac",
    "master",
    "max_tx_rate",
    "min_tx_rate",
    "mode",
    "mtu",
    "name",
    "names",
    "pciBusID",
    "pkey",
    "port",
    "prevResult",
    "rail",
    "rails",
    "rdma",
    "rdmaDevice",
    "runtimeConfig",
    "spoofchk",
    "trust",
    "type",
    "umcast",
    "vlan",
    "vlanProto",
    "vlanQoS",
];

/// Those of [`KEYS`] that change neither which NIC is meant, nor addresses, nor isolation: a slip
/// in one is noted.
const HARMLESS: &[&str] = &["bcqueuelen", "dad", "dns", "mtu", "names", "umcast"];

/// Keys of other plugins that change where packets go, isolation, addresses or who may send, and
/// are not done here; each with what to do instead.
const REFUSED: &[(&[&str], &str)] = &[
    (
        &["vlanId", "vlanTrunk", "trunk"],
        "set vlan for a VF that is moved, or name a VLAN netdev as master",
    ),
    (
        &["macspoofchk", "mac_spoof_chk"],
        "set spoofchk for a VF that is moved",
    ),
    (
        &["linkInContainer"],
        "name a netdev of the host as master; for a child of an interface that the pod has, use the \
         reference macvlan or ipvlan plugin",
    ),
    (
        &["portIsolation"],
        "set it on the bridge port (bridge link set dev PORT isolated on)",
    ),
    (
        &["ingressRate", "egressRate", "bandwidth"],
        "set max_tx_rate, in Mbit/s, for a VF that is moved",
    ),
    (
        &["infinibandGUID"],
        "set guid, or the capability infinibandGUID, with which the runtime passes a pod's GUID",
    ),
    (
        &["rdmaIsolation"],
        "set rdma to required, which moves the RDMA device into the pod, or to off, which leaves it",
    ),
    (
        &[
            "range",
            "ipRanges",
            "subnet",
            "addresses",
            "gateway",
            "ips",
            "routes",
        ],
        "put it into ipam",
    ),
    (
        &["dhcp"],
        "leases of DHCP are not renewed in a pod; set ipam to rdma-ipam, whereabouts, host-local or static",
    ),
    (
        &["table", "gateways", "vrf", "vrfname", "rules"],
        "set rails for a routing table of the interface's own",
    ),
    (
        &["interface", "neighbors", "forwarding", "hardwareAddr"],
        "this is a key of DRANET; set attach, mtu, mac, rails and ipam",
    ),
    (
        &[
            "sysctl",
            "ipMasq",
            "isGateway",
            "isDefaultGateway",
            "portMappings",
            "links",
        ],
        "chain the plugin that does it behind this one",
    ),
];

/// Those that a runtime, or a pod's annotation, adds for a capability of the network.
const OF_RUNTIMES: &[&str] = &["bandwidth", "portMappings"];

/// Keys of other plugins that resemble one of the above and are noted, as all further ones are.
const FOREIGN: &[&str] = &[
    "cniVersions",
    "ifName",
    "ingressBurst",
    "linksInContainer",
    "node",
    "ports",
];

/// How many unknown keys are compared with ours: a comparison costs time, and a network may have
/// as many keys as it likes.
const MAX_COMPARED: usize = 48;
/// The longest key or value in a message.
const MAX_SHOWN_BYTES: usize = 64;

/// The notes about keys without effect, of the configuration and of what runtime and pod add to it.
///
/// # Errors
/// Code 2: a key asks for something that is not done here; code 7: a key resembles one whose value
/// must not be lost.
pub(super) fn check(root: &Section<'_>, added: &[Section<'_>]) -> Result<Vec<String>, Error> {
    for section in added {
        let asked = section.entries();
        for (key, value) in asked.filter(|(key, _)| is_among(key, OF_RUNTIMES)) {
            refuse(section, key, value)?;
        }
    }
    let of_others = REFUSED.iter().flat_map(|(keys, _)| keys.iter());
    let all: Vec<&str> = KEYS.iter().chain(of_others).copied().collect();
    let (mut notes, mut compared) = (Vec::new(), 0);
    for (key, value) in root.entries() {
        // A key with a slash is of a namespace of its own, as the specification's extensions are.
        if is_among(key, KEYS) || key.contains('/') {
            continue;
        }
        refuse(root, key, value)?;
        let shown = bounded(key, MAX_SHOWN_BYTES);
        let nearest =
            match is_among(key, &all) || is_among(key, FOREIGN) || compared == MAX_COMPARED {
                true => None,
                false => {
                    compared += 1;
                    spelling::nearest(key, &all)
                }
            };
        notes.push(match nearest {
            None => format!("{shown} has no effect here"),
            Some(meant) if HARMLESS.contains(&meant) => {
                format!("unknown key {shown:?} has no effect; did you mean {meant:?}?")
            }
            Some(meant) => {
                let unknown = format!("unknown key {shown:?}; did you mean {meant:?}?");
                return Err(Error::new(Code::InvalidConfig, unknown).with_details(
                    "correct the key, or leave it out; its value would have no effect",
                ));
            }
        });
    }
    Ok(notes)
}

/// As the sections read keys: Go's decoder does not mind the case.
fn is_among(key: &str, keys: &[&str]) -> bool {
    keys.iter().any(|known| known.eq_ignore_ascii_case(key))
}

fn refuse(section: &Section<'_>, key: &str, value: &Value) -> Result<(), Error> {
    match REFUSED.iter().find(|(keys, _)| is_among(key, keys)) {
        Some((_, remedy)) if !asks_for_nothing(value) => {
            let value = bounded(&value.to_string(), MAX_SHOWN_BYTES);
            let msg = format!(
                "{}: rdma-netdev does not support this key ({value})",
                section.path_of(key)
            );
            Err(Error::new(Code::UnsupportedField, msg).with_details(remedy))
        }
        _ => Ok(()),
    }
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(keys: Value) -> Result<Vec<String>, Error> {
        check(&Section::root(keys.as_object().unwrap()), &[])
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
            ("railss", "rails"),
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
    fn a_slip_in_a_harmless_key_is_noted() {
        for (written, meant) in [
            ("mtuu", "mtu"),
            ("bcqueulen", "bcqueuelen"),
            ("umcats", "umcast"),
        ] {
            let notes = read(json!({ written: 1 })).unwrap();
            assert!(
                notes[0].contains(written) && notes[0].contains(meant),
                "{notes:?}"
            );
        }
    }

    #[test]
    fn what_another_plugin_would_do_is_refused_with_key_and_remedy() {
        for (key, remedy) in REFUSED
            .iter()
            .flat_map(|(keys, remedy)| keys.iter().map(move |k| (k, remedy)))
        {
            let error = read(json!({ *key: "on" })).unwrap_err();
            assert_eq!(error.code, Code::UnsupportedField, "{key}");
            assert!(
                error.msg.contains(key) && error.msg.contains("on"),
                "{error}"
            );
            assert!(error.details.contains(*remedy), "{error}");
            for nothing in [json!(0), json!(false), json!(""), json!([])] {
                assert_eq!(read(json!({ *key: nothing })).unwrap().len(), 1, "{key}");
            }
            assert_eq!(read(json!({ *key: null })), Ok(Vec::new()));
        }
        let added = json!({"portMappings": [{"hostPort": 80}]});
        let added = [Section::root(added.as_object().unwrap())];
        assert!(check(&Section::root(json!({}).as_object().unwrap()), &added).is_err());
    }

    #[test]
    fn other_keys_are_noted_and_those_of_a_namespace_passed_over() {
        for key in FOREIGN
            .iter()
            .chain(&["logLevel", "promisc", "comment", "x"])
        {
            let notes = read(json!({ *key: 1 })).unwrap_or_else(|e| panic!("{key}: {e}"));
            assert_eq!(notes, [format!("{key} has no effect here")]);
        }
        let silent = json!({"cni.dev/valid-attachments": [], "example.com/mtu": 1, "MTU": 9000, "Master": "e1"});
        assert_eq!(read(silent), Ok(Vec::new()));
    }

    #[test]
    fn only_the_first_unknown_keys_are_compared() {
        let with_unknown_keys = |count: usize| {
            let mut keys: serde_json::Map<String, Value> = (0..count)
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
        let of_others = REFUSED.iter().flat_map(|(keys, _)| keys.iter());
        let explained = |key: &&&str| {
            // Written by runtimes, never by a person.
            ["args", "prevResult", "runtimeConfig"].contains(*key)
                || page.contains(&format!("`{key}`"))
                || page.contains(&format!("\"{key}\""))
        };
        let missing: Vec<_> = KEYS
            .iter()
            .chain(of_others)
            .filter(|key| !explained(key))
            .collect();
        assert!(missing.is_empty(), "not in docs/reference.md: {missing:?}");
    }

    #[test]
    fn every_key_is_in_the_tables_once() {
        let of_others = REFUSED.iter().flat_map(|(keys, _)| keys.iter());
        let all: Vec<String> = KEYS
            .iter()
            .chain(of_others)
            .chain(FOREIGN)
            .map(|key| key.to_ascii_lowercase())
            .collect();
        let distinct: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(HARMLESS.iter().all(|key| KEYS.contains(key)));
    }
}
