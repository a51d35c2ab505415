//! From the text of the policy file to [`Policy`]: strict, or salvaging. What a key may be is a
//! function that its field names; each says the rule that a wrong value breaks.

use super::{
    MAX_RAIL, MAX_VLAN, Policy, PolicyError, Selector, StoreBounds, StoreKind, StorePolicy,
    partition_key, port_guid,
};

use crate::{duration, identity, pattern::Pattern};
use cni_wire::json::{self, Value};
use ipnetwork::IpNetwork;
use serde::de::{Deserialize, Deserializer, Error as _};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// The whole file, every key and value in order.
pub(super) fn policy(path: &Path, text: &[u8]) -> Result<Policy, PolicyError> {
    let policy = json::parse(text).and_then(decode);
    policy.map_err(|fault| PolicyError::Content {
        path: path.to_owned(),
        fault,
    })
}

/// Each top-level key that is in order by itself, defaults for the rest.
pub(super) fn salvage(text: &[u8]) -> Policy {
    let mut policy = Policy::default();
    let Ok(Value::Object(mut fields)) = json::parse(text) else {
        return policy;
    };
    // Those first by whose names others are written.
    fields.sort_by_key(|(key, _)| key != "pkeys");
    let mut good: Vec<(String, Value)> = Vec::new();
    for (key, value) in fields {
        // The last of two that are in order: so it was in force where repeated keys were read.
        let others = good.iter().filter(|(other, _)| *other != key).cloned();
        let more: Vec<_> = others.chain([(key.clone(), value)]).collect();
        if let Ok(read) = decode(Value::Object(more.clone())) {
            (policy, good) = (read, more);
        }
    }
    policy
}

pub(super) fn has_key(key: &str) -> bool {
    json::keys_of::<Policy>().contains(&key)
}

fn decode(mut document: Value) -> Result<Policy, json::Error> {
    // Partitions of `allow.pkeys` may have names of `pkeys`.
    let mut names = document.get_mut("pkeys").cloned();
    let allowed = document
        .get_mut("allow")
        .and_then(|allow| allow.get_mut("pkeys"));
    if let Some(Value::Array(allowed)) = allowed {
        for partition in allowed {
            if let Value::String(name) = partition
                && let Some(key) = names.as_mut().and_then(|names| names.get_mut(name))
            {
                *partition = key.clone();
            }
        }
    }
    json::decode_strictly(&document)
}

/// What `read` makes of a value; where it makes nothing of it, `rule` says what the value must be.
fn checked<'de, D: Deserializer<'de>, T: Deserialize<'de>, U>(
    deserializer: D,
    rule: &str,
    read: impl FnOnce(T) -> Option<U>,
) -> Result<U, D::Error> {
    let value = T::deserialize(deserializer).ok().and_then(read);
    value.ok_or_else(|| D::Error::custom(rule))
}

/// Functions that read a value of the first type, make the second one of it by the last expression, and
/// say the rule where that makes nothing of it.
macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident: $from:ty => $to:ty, $rule:literal, $read:expr;)*) => {$(
        $(#[$doc])*
        pub(super) fn $name<'de, D: Deserializer<'de>>(from: D) -> Result<$to, D::Error> {
            checked(from, $rule, $read as fn($from) -> Option<$to>)
        }
    )*};
}

readers! {
    version: u64 => u64, "this program reads version 1 only",
        |version| (version == 1).then_some(version);

    name: String => Option<String>,
        "must be a name of letters, digits, '-', '.' and '_', which begins with a letter, a digit or '_'",
        |name| identity::is_name(&name).then_some(Some(name));

    /// As Kubernetes takes them.
    label: String => Option<String>,
        "must be a label's value: at most 63 letters, digits, '-', '.' and '_', the first and last one a letter or digit",
        |text| is_label(&text).then_some(Some(text));

    networks: Vec<String> => Option<Vec<IpNetwork>>,
        "must be a list of networks, as in [\"10.0.0.0/8\"]",
        |texts| not_empty(texts, |text| network(&text)).map(Some);

    network_names: Vec<String> => Option<Vec<String>>,
        "must be a list of names, \"\" for networks without network_name",
        |names| not_empty(names, Some).map(Some);

    cooldown: String => Duration,
        "must be a duration of at most a day, as in \"30s\", \"2m\" or \"0\"",
        |text| duration::parse(&text).filter(|d| *d <= Duration::from_secs(86_400));

    /// Those of `allow.pkeys`, whose names were replaced before.
    partitions: Vec<Partition> => Option<Vec<u16>>,
        "must be a list of partition keys (\"0x8001\") and names of \"pkeys\"",
        |list| Some(Some(list.into_iter().map(|Partition(key)| key).collect()));

    guids: Vec<String> => Vec<RangeInclusive<u64>>,
        "must be a list of GUIDs and ranges such as \"02:00:00:00:00:00:00:00-02:ff:ff:ff:ff:ff:ff:ff\"",
        |texts| texts.iter().map(|text| guid_range(text)).collect();

    vlans: Vec<serde_json::Value> => Vec<RangeInclusive<u16>>,
        "must be a list of VLANs (0 to 4094) and ranges such as \"100-199\"",
        |values| values.iter().map(vlan_range).collect();

    /// Names of programs in `CNI_PATH`, never paths.
    ipam_programs: Vec<String> => Vec<String>,
        "must be a list of names of IPAM programs, without \"/\"",
        |names| {
            let is_program = |name: &String| !name.is_empty() && !name.contains('/');
            names.iter().all(is_program).then_some(names)
        };

    patterns: Vec<String> => Vec<Pattern>,
        "must be a list, not empty, of words, or patterns of \"*\", \"?\" and sets such as \"[0-3]\"",
        |words| not_empty(words, |word| pattern(&word));

    /// Without regard to the case of hexadecimal digits, and to a prefix.
    hex_patterns: Vec<String> => Vec<Pattern>,
        "must be a list, not empty, of hexadecimal numbers, or patterns of \"*\", \"?\" and \"[0-3]\"",
        |words| not_empty(words, |word| {
            pattern(&word).and(pattern(&word.trim_start_matches("0x").to_ascii_lowercase()))
        });
}

fn is_label(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    let (first, last) = (text.chars().next(), text.chars().next_back());
    first.is_some_and(is_plain)
        && last.is_some_and(is_plain)
        && text.len() <= 63
        && text.chars().all(|c| is_plain(c) || "-._".contains(c))
}

/// All elements, each of which must be something; none of an empty list.
fn not_empty<T, U>(list: Vec<T>, read: impl Fn(T) -> Option<U>) -> Option<Vec<U>> {
    let read: Option<Vec<U>> = list.into_iter().map(read).collect();
    read.filter(|list| !list.is_empty())
}

fn pattern(word: &str) -> Option<Pattern> {
    (!word.is_empty()).then(|| Pattern::parse(word).ok())?
}

fn guid_range(text: &str) -> Option<RangeInclusive<u64>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = port_guid(first)?..=port_guid(last)?;
    (!range.is_empty()).then_some(range)
}

fn vlan_range(value: &serde_json::Value) -> Option<RangeInclusive<u16>> {
    let number = value.to_string();
    let text = value.as_str().unwrap_or(&number);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().ok()?..=last.parse().ok()?;
    (!range.is_empty() && *range.end() <= MAX_VLAN).then_some(range)
}

/// An absolute path without `..`: the path that is used is the one in the file.
pub(super) fn absolute_path<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: From<PathBuf>,
{
    let plain = |path: &PathBuf| {
        path.is_absolute() && !path.components().any(|c| c == Component::ParentDir)
    };
    let rule = "must be an absolute path without \"..\"";
    checked(from, rule, |text: String| {
        Some(PathBuf::from(text)).filter(plain).map(T::from)
    })
}

/// Those of the file and the default one.
pub(super) fn stores<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, StorePolicy>, D::Error> {
    let mut stores = Policy::default().stores;
    stores.extend(BTreeMap::<String, StorePolicy>::deserialize(from)?);
    // Its documents name the node, not the store: each store would free what the other one has.
    let mut directories = BTreeMap::new();
    for (name, store) in &stores {
        if let StoreKind::Directory(directory) = &store.kind
            && let Some(other) = directories.insert(directory, name)
        {
            return Err(D::Error::custom(format!(
                "{other:?} and {name:?} have the same \"directory\": give each one of its own"
            )));
        }
    }
    Ok(stores)
}

/// The keys of stores of all types.
#[derive(Default, serde::Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct StoreKeys {
    r#type: Option<StoreType>,
    #[serde(deserialize_with = "absolute_path")]
    directory: Option<PathBuf>,
    #[serde(deserialize_with = "networks")]
    ranges: Option<Vec<IpNetwork>>,
    #[serde(deserialize_with = "network_names")]
    network_names: Option<Vec<String>>,
}

#[derive(Clone, Copy, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum StoreType {
    File,
    Kubernetes,
}

impl TryFrom<StoreKeys> for StorePolicy {
    type Error = String;

    fn try_from(keys: StoreKeys) -> Result<Self, String> {
        let kind = match (keys.r#type, keys.directory) {
            (Some(StoreType::File), None) => StoreKind::Node,
            (Some(StoreType::File), Some(directory)) => StoreKind::Directory(directory),
            (Some(StoreType::Kubernetes), None) => StoreKind::Kubernetes,
            (Some(StoreType::Kubernetes), Some(_)) => {
                return Err("a store of type \"kubernetes\" cannot have a \"directory\"".to_owned());
            }
            (None, _) => return Err("must have a \"type\", \"file\" or \"kubernetes\"".to_owned()),
        };
        Ok(StorePolicy {
            kind,
            bounds: StoreBounds {
                ranges: keys.ranges,
                network_names: keys.network_names,
            },
        })
    }
}

/// A network with its prefix length.
pub(super) fn network(text: &str) -> Option<IpNetwork> {
    text.contains('/').then(|| text.parse().ok())?
}

/// Names that no number could be taken for.
pub(super) fn partition_names<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, u16>, D::Error> {
    let partitions = BTreeMap::<String, Partition>::deserialize(from)?;
    let named = |(name, Partition(key)): (String, Partition)| {
        if name.is_empty() || partition_key(&Value::String(name.clone())).is_some() {
            let rule = format!("the name {name:?} must not be a hexadecimal number itself");
            return Err(D::Error::custom(rule));
        }
        Ok((name, key))
    };
    partitions.into_iter().map(named).collect()
}

struct Partition(u16);

impl<'de> Deserialize<'de> for Partition {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rule = "must be a partition key such as \"0x8001\"";
        checked(from, rule, |key| partition_key(&key).map(Self))
    }
}

pub(super) struct Rail(pub(super) u32);

impl<'de> Deserialize<'de> for Rail {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rule = "must be the number of a rail, from 0 to 255";
        checked(from, rule, |rail| (rail <= MAX_RAIL).then_some(Self(rail)))
    }
}

pub(super) fn selectors<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Vec<Selector>>, D::Error> {
    let selectors = Vec::<Selector>::deserialize(from)?;
    if selectors.contains(&Selector::default()) {
        return Err(D::Error::custom("each selector must ask for something"));
    }
    Ok(Some(selectors))
}

#[cfg(test)]
mod tests {
    use super::super::{AllowVf, FabricAddresses, LogLevel, Profile};
    use super::*;

    fn parse(text: &str) -> Result<Policy, PolicyError> {
        policy(Path::new("/etc/rdma-netdev/policy.json"), text.as_bytes())
    }

    #[test]
    fn every_key_arrives() {
        let policy = parse(
            r#"{
              "version": 1, "node": "gpu-7", "stateDir": "/srv/state",
              "stores": {"shared": {"type": "file", "directory": "/mnt/leases",
                  "ranges": ["10.0.0.0/8"], "networkNames": ["blue", ""]}},
              "ipam": {"profile": "compatible", "cooldown": "2m"},
              "allow": {"nonRdma": true, "uplinks": true, "passthru": true, "virtual": true,
                        "unallocated": true, "requestExcluded": true,
                        "inactivePartitions": true, "ipam": ["rdma-ipam", "host-local"],
                        "vf": {"guid": ["0200000000000000-02:00:00:00:00:00:00:ff", "00:11:22:33:44:55:66:77"],
                               "vlan": ["100-199", 7, "0"], "vlanQoS": true, "link_state": true},
                        "netdevs": [{"ifNames": ["ens*"], "vendors": ["0x15B3"]}]},
              "rails": {"0000:3b:00.0": 0, "ens2*": 7},
              "block": "su-3",
              "fabricAddresses": "static",
              "log": {"file": "/var/log/rdma.log", "level": "debug"}
            }"#,
        )
        .unwrap();
        assert_eq!(policy.node.as_deref(), Some("gpu-7"));
        assert_eq!(policy.state_dir, Path::new("/srv/state"));
        let names: Vec<_> = policy.stores.keys().map(String::as_str).collect();
        assert_eq!(names, ["default", "shared"]);
        let shared = StorePolicy {
            kind: StoreKind::Directory("/mnt/leases".into()),
            bounds: StoreBounds {
                ranges: Some(vec!["10.0.0.0/8".parse().unwrap()]),
                network_names: Some(vec!["blue".into(), String::new()]),
            },
        };
        assert_eq!(policy.stores["shared"], shared);
        assert_eq!(policy.ipam.profile, Some(Profile::Compatible));
        assert_eq!(policy.ipam.cooldown, Duration::from_secs(120));
        assert!(policy.allow.non_rdma && policy.allow.uplinks);
        assert!(policy.allow.passthru && policy.allow.virtual_links && policy.allow.unallocated);
        assert!(policy.allow.request_excluded && policy.allow.inactive_partitions);
        let vf = AllowVf {
            guid: vec![
                0x0200_0000_0000_0000..=0x0200_0000_0000_00ff,
                0x0011_2233_4455_6677..=0x0011_2233_4455_6677,
            ],
            vlan: vec![100..=199, 7..=7, 0..=0],
            vlan_qos: true,
            link_state: true,
            ..AllowVf::default()
        };
        assert_eq!(policy.allow.vf, vf);
        assert_eq!(policy.allow.ipam, ["rdma-ipam", "host-local"]);
        let nic = super::super::Candidate {
            if_name: "ens1",
            vendor: Some("15b3"),
            ..Default::default()
        };
        assert!(policy.allow.selects(&nic));
        assert!(!policy.allow.selects(&super::super::Candidate {
            if_name: "eth0",
            ..nic
        }));
        let rail = policy.rails.of(&super::super::RailCandidate {
            hca: "0000:5e:00.0",
            netdev: "ens2f0",
            addresses: &[],
        });
        assert_eq!(rail, Ok(Some(7)));
        assert_eq!(policy.fabric_addresses, FabricAddresses::Static);
        assert_eq!(policy.block.as_deref(), Some("su-3"));
        for block in ["", "a b", "-a", "a.", &"a".repeat(64)] {
            let refused = parse(&serde_json::json!({"block": block}).to_string());
            assert!(refused.unwrap_err().to_string().contains("label's value"));
        }
        assert_eq!(policy.log.level, LogLevel::Debug);
    }

    #[test]
    fn partitions_have_names_that_no_number_is_taken_for() {
        let policy = parse(
            r#"{"allow": {"pkeys": ["storage", "0x0002"]}, "pkeys": {"storage": "0x8001", "mpi": 32771}}"#,
        )
        .unwrap();
        assert_eq!(policy.pkeys["storage"], 0x8001);
        assert_eq!(policy.pkeys["mpi"], 0x8003);
        assert_eq!(policy.allow.pkeys, Some(vec![0x8001, 2]));
        assert_eq!(parse(r#"{"pkeys": {"mpi": 1}}"#).unwrap().allow.pkeys, None);
        for (text, word) in [
            (
                r#"{"pkeys": {"cafe": "0x8001"}}"#,
                "pkeys: the name \"cafe\"",
            ),
            (r#"{"pkeys": {"mpi": "0x8000"}}"#, "pkeys.mpi"),
            (r#"{"allow": {"pkeys": ["storage"]}}"#, "allow.pkeys"),
            (r#"{"allow": {"pkeys": "0x8001"}}"#, "allow.pkeys"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_one_that_was_meant() {
        for (text, key, meant) in [
            (r#"{"statedir": "/x"}"#, "statedir", "stateDir"),
            (
                r#"{"ipam": {"cooldwon": "3s"}}"#,
                "ipam.cooldwon",
                "cooldown",
            ),
            (
                r#"{"allow": {"nonRDMA": true}}"#,
                "allow.nonRDMA",
                "nonRdma",
            ),
            (
                r#"{"allow": {"netdevs": [{"ifnames": ["a"]}]}}"#,
                "allow.netdevs[0].ifnames",
                "ifNames",
            ),
            (
                r#"{"stores": {"a": {"type": "file", "directroy": "/b"}}}"#,
                "stores.a.directroy",
                "directory",
            ),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(
                message.contains(key) && message.contains(meant),
                "{message}"
            );
        }
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_rule() {
        for (text, part) in [
            (r#"{"version": 2}"#, "version 1 only"),
            (r#"{"node": "a b"}"#, "node: must be a name"),
            (r#"{"node": "-x"}"#, "node: must be a name"),
            (r#"{"node": ".x"}"#, "node: must be a name"),
            (r#"{"node": ""}"#, "node: must be a name"),
            (r#"{"stateDir": "relative"}"#, "absolute path"),
            (r#"{"stateDir": "/a/../b"}"#, "absolute path"),
            (
                r#"{"stores": {"a": {"type": "etcd"}}}"#,
                "stores.a.type: must be \"file\" or \"kubernetes\", found the string \"etcd\"",
            ),
            (
                r#"{"stores": {"a": {"directory": "/b"}}}"#,
                "stores.a: must have a \"type\"",
            ),
            (
                r#"{"stores": {"a": null}}"#,
                "stores.a: expected a value, found null",
            ),
            (
                r#"{"node": "a", "node": "b"}"#,
                "node: the key is there twice",
            ),
            (
                r#"{"rails": {"ens1": 1, "ens1": 1}}"#,
                "rails.ens1: the key is there twice",
            ),
            (
                r#"{"stores": {"a": {"type": "file", "directory": "/b", "ranges": ["10.0.0.0"]}}}"#,
                "stores.a.ranges: must be a list of networks",
            ),
            (
                r#"{"stores": {"a": {"type": "file", "directory": "/b", "networkNames": "x"}}}"#,
                "stores.a.networkNames: must be a list of names",
            ),
            (
                r#"{"stores": {"a": {"type": "file", "directory": "b"}}}"#,
                "stores.a.directory: must be an absolute path",
            ),
            (
                r#"{"stores": {"a": {"type": "file", "directory": "/d/b"},
                               "b": {"type": "file", "directory": "/d/b/"}}}"#,
                "stores: \"a\" and \"b\" have the same \"directory\"",
            ),
            (r#"{"stores": []}"#, "stores: expected an object"),
            (r#"{"ipam": {"cooldown": "30"}}"#, "duration"),
            (r#"{"ipam": {"cooldown": 30}}"#, "duration"),
            (r#"{"ipam": {"cooldown": "99999h"}}"#, "duration"),
            (
                r#"{"ipam": {"profile": "lenient"}}"#,
                "\"strict\" or \"compatible\"",
            ),
            (r#"{"allow": {"uplinks": "yes"}}"#, "true or false"),
            (
                r#"{"allow": {"unallocated": 1}}"#,
                "allow.unallocated: expected true or false",
            ),
            (
                r#"{"allow": {"vf": ["guid"]}}"#,
                "allow.vf: expected an object",
            ),
            (r#"{"allow": {"vf": {"vlans": []}}}"#, "vlan"),
            (
                r#"{"allow": {"vf": {"trust": "on"}}}"#,
                "allow.vf.trust: expected true or false",
            ),
            (
                r#"{"allow": {"vf": {"vlan": ["0-4095"]}}}"#,
                "allow.vf.vlan: must be a list",
            ),
            (
                r#"{"allow": {"vf": {"vlan": ["7-6"]}}}"#,
                "allow.vf.vlan: must be a list",
            ),
            (
                r#"{"allow": {"vf": {"vlan": [-1]}}}"#,
                "allow.vf.vlan: must be a list",
            ),
            (
                r#"{"allow": {"vf": {"guid": ["0200000000000009-0200000000000008"]}}}"#,
                "allow.vf.guid: must be a list",
            ),
            (
                r#"{"allow": {"vf": {"guid": ["0000000000000000-0200000000000008"]}}}"#,
                "allow.vf.guid: must be a list",
            ),
            (
                r#"{"allow": {"ipam": "static"}}"#,
                "must be a list of names",
            ),
            (
                r#"{"allow": {"ipam": ["/opt/cni/bin/dhcp"]}}"#,
                "without \"/\"",
            ),
            (r#"{"allow": {"netdevs": [{}]}}"#, "must ask for something"),
            (r#"{"allow": {"netdevs": [{"ifNames": []}]}}"#, "not empty"),
            (
                r#"{"allow": {"netdevs": [{"ifNames": ["eth[9-0]"]}]}}"#,
                "patterns",
            ),
            (r#"{"rails": ["ens1"]}"#, "rails: expected an object"),
            (
                r#"{"rails": {"ens1": "0"}}"#,
                "rails.ens1: must be the number",
            ),
            (r#"{"rails": {"ens1": 256}}"#, "from 0 to 255"),
            (r#"{"rails": {"10.0.0.0/99": 0}}"#, "or a network"),
            (r#"{"log": {"level": "loud"}}"#, "log.level"),
            (r#"{"log": {"file": "x"}}"#, "absolute"),
            ("[]", ": expected an object, found a list"),
            ("{", "EOF"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn a_store_has_a_type_and_the_keys_of_its_type() {
        let read = |store: &str| {
            let text = format!(r#"{{"stores": {{"default": {store}}}}}"#);
            policy(Path::new("p"), text.as_bytes()).map(|policy| policy.stores["default"].clone())
        };
        for (store, kind) in [
            (r#"{"type": "kubernetes"}"#, StoreKind::Kubernetes),
            (r#"{"type": "file"}"#, StoreKind::Node),
            (
                r#"{"type": "file", "directory": "/s"}"#,
                StoreKind::Directory("/s".into()),
            ),
        ] {
            assert_eq!(read(store).unwrap().kind, kind);
        }
        for (wrong, says) in [
            (r#"{"type": "kubernetes", "directory": "/s"}"#, "directory"),
            (r#"{"type": "kubernetes", "blocks": {}}"#, "blocks"),
            (r#"{"type": "nfs"}"#, "type"),
            ("{}", "type"),
        ] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_wrong_file_still_names_the_directories_of_the_leases() {
        let text = br#"{"stateDir": "/srv", "typo": 1, "ipam": {"cooldown": 3},
            "stores": {"default": {"type": "file", "directory": "/mnt"}}}"#;
        let policy = salvage(text);
        assert_eq!(policy.state_dir, Path::new("/srv"));
        assert_eq!(
            policy.stores.get("default"),
            Some(&StorePolicy::of(StoreKind::Directory("/mnt".into())))
        );
        assert_eq!(policy.ipam, Policy::default().ipam);
        assert_eq!(salvage(b"garbage"), Policy::default());
        let repeated = br#"{"stateDir": "/a", "stateDir": "/b", "stateDir": 7}"#;
        assert_eq!(salvage(repeated).state_dir, Path::new("/b"));
    }
}
