//! Keys of a network that are none of ours and resemble one.

use cni_wire::{Code, Error, Section};
use node::spelling;

/// The keys that are read here, and those that every plugin has. docs/CONFIG.md explains each.
pub(super) const KEYS: &[&str] = &[
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
    "hwaddr",
    "ipam",
    "kernelpath",
    "linkInContainer",
    "linkLocal",
    "mac",
    "master",
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
    "type",
    "umcast",
];

/// Keys of the reference plugins, of those for SR-IOV, InfiniBand and bonds, and of Multus. A
/// configuration that was written for them goes on working, however much a key resembles ours.
const FOREIGN_KEYS: &[&str] = &[
    "allmulti",
    "allMulti",
    "binDir",
    "bridge",
    "clusterNetwork",
    "cniDir",
    "confDir",
    "dataDir",
    "defaultNetworks",
    "delegates",
    "disableCheck",
    "disableContainerInterface",
    "disableGC",
    "dpdkMode",
    "enabledad",
    "failOverMac",
    "forceAddress",
    "globalNamespaces",
    "guid",
    "hairpinMode",
    "ibKubernetesEnabled",
    "ifname",
    "ifName",
    "ips",
    "ipMasq",
    "ipMasqBackend",
    "isDefaultGateway",
    "isGateway",
    "kubeconfig",
    "linkMode",
    "link_state",
    "links",
    "linksInContainer",
    "loadOnlyVersions",
    "logFile",
    "logLevel",
    "logOptions",
    "logToStderr",
    "mac_spoof_chk",
    "macspoofchk",
    "max_tx_rate",
    "miimon",
    "min_tx_rate",
    "multusNamespace",
    "namespaceIsolation",
    "node",
    "owner",
    "group",
    "plugins",
    "portIsolation",
    "ports",
    "preserveDefaultVlan",
    "promisc",
    "promiscMode",
    "rate",
    "rdmaIsolation",
    "readinessindicatorfile",
    "resourceName",
    "routes",
    "selinuxcontext",
    "sysctl",
    "spoofchk",
    "systemNamespaces",
    "table",
    "trunk",
    "trust",
    "txQLen",
    "uplinkInterface",
    "vf",
    "vfs",
    "vlan",
    "vlanId",
    "vlanID",
    "vlanProto",
    "vlanQoS",
    "vlanTrunk",
    "vrfname",
    "xmitHashPolicy",
];

/// How many unknown keys are compared with ours: a comparison costs time, and a network may have
/// as many keys as it likes.
const MAX_COMPARED: usize = 48;

/// Refuses keys that are not ours but resemble one.
pub(super) fn refuse(root: &Section<'_>) -> Result<(), Error> {
    let unknown = root.keys().filter(|key| {
        // As the sections read them: Go's decoder does not mind the case.
        let is = |known: &&str| known.eq_ignore_ascii_case(key);
        // A key with a slash is of a namespace of its own, as the specification's extensions are.
        !(KEYS.iter().any(is) || FOREIGN_KEYS.iter().any(is) || key.contains('/'))
    });
    for key in unknown.take(MAX_COMPARED) {
        if let Some(meant) = spelling::nearest(key, KEYS) {
            return Err(Error::new(
                Code::InvalidConfig,
                format!("unknown key {key:?}; did you mean {meant:?}?"),
            )
            .with_details("correct the key, or leave it out; its value would have no effect"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(keys: Value) -> Result<(), Error> {
        refuse(&Section::root(keys.as_object().unwrap()))
    }

    #[test]
    fn a_key_that_resembles_one_of_ours_is_refused_with_both_names() {
        for (written, meant) in [
            ("atach", "attach"),
            ("mtuu", "mtu"),
            ("linkInContaner", "linkInContainer"),
            ("link_in_container", "linkInContainer"),
            ("masters", "master"),
            ("pciBusId0", "pciBusID"),
            ("rdmaDevices", "rdmaDevice"),
            ("kernelPaht", "kernelpath"),
            ("railss", "rails"),
        ] {
            let error = read(json!({ written: "x" })).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig, "{written}");
            let both = error.msg.contains(&format!("{written:?}"))
                && error.msg.contains(&format!("{meant:?}"));
            assert!(both, "{error}");
        }
    }

    #[test]
    fn keys_of_other_plugins_pass() {
        for &key in FOREIGN_KEYS {
            read(json!({ key: 1 })).unwrap_or_else(|e| panic!("{key}: {e}"));
        }
        for key in [
            "cni.dev/valid-attachments",
            "example.com/mtu",
            "io.cilium",
            "comment",
            "x",
        ] {
            read(json!({ key: [] })).unwrap_or_else(|e| panic!("{key}: {e}"));
        }
        // Read as ours, whatever their case.
        read(json!({"MTU": 9000, "Master": "eth1"})).unwrap();
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
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/CONFIG.md");
        let page = std::fs::read_to_string(page).unwrap();
        let explained = |key: &&&str| {
            // Written by runtimes, never by a person.
            ["args", "prevResult", "runtimeConfig"].contains(*key)
                || page.contains(&format!("`{key}`"))
                || page.contains(&format!("\"{key}\""))
        };
        let missing: Vec<_> = KEYS.iter().filter(|key| !explained(key)).collect();
        assert!(missing.is_empty(), "not in docs/CONFIG.md: {missing:?}");
    }

    #[test]
    fn every_known_key_is_known_once() {
        let folded: std::collections::BTreeSet<String> =
            KEYS.iter().map(|key| key.to_ascii_lowercase()).collect();
        assert_eq!(folded.len(), KEYS.len());
        assert!(
            FOREIGN_KEYS
                .iter()
                .all(|key| !folded.contains(&key.to_ascii_lowercase()))
        );
    }
}
