//! From the text of the policy file to [`Policy`]: strict, or salvaging.

use super::{
    Allow, BlockLength, DEFAULT_STORE_DIRECTORY, FabricAddresses, Ipam, Log, LogLevel, MAX_RAIL,
    Policy, PolicyError, Profile, Rails, Selector, Store, StoreBounds, StoreKind, partition_key,
    port_guid,
    rails::{Entry, Nic},
};
use crate::{duration, pattern::Pattern, spelling};
use ipnetwork::IpNetwork;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Keys of a policy.
pub const KEYS: [&str; 11] = [
    "version",
    "node",
    "stateDir",
    "cdiDir",
    "stores",
    "ipam",
    "allow",
    "rails",
    "pkeys",
    "fabricAddresses",
    "log",
];
const ALLOW_KEYS: [&str; 11] = [
    "nonRdma",
    "uplinks",
    "netdevs",
    "ipam",
    "passthru",
    "virtual",
    "unallocated",
    "requestExcluded",
    "pkeys",
    "inactivePartitions",
    "vf",
];
const SELECTOR_KEYS: [&str; 7] = [
    "ifNames",
    "pciAddresses",
    "vendors",
    "deviceIDs",
    "drivers",
    "linkTypes",
    "rdmaDevices",
];

/// A block has at most 2 to the power of this many addresses.
const MAX_BLOCK_BITS: u32 = 16;

/// The whole file, every key and value in order.
pub(super) fn policy(path: &Path, text: &[u8]) -> Result<Policy, PolicyError> {
    let reader = Reader { path };
    let object = reader.object(text)?;
    reader.known("", &object, &KEYS)?;
    let mut policy = Policy::default();
    for (key, value) in in_order(&object) {
        reader.key(&mut policy, key, value)?;
    }
    Ok(policy)
}

/// Each top-level key that is in order by itself, defaults for the rest.
pub(super) fn salvage(path: &Path, text: &[u8]) -> Policy {
    let reader = Reader { path };
    let mut policy = Policy::default();
    for (key, value) in reader.object(text).iter().flat_map(in_order) {
        // A wrong key leaves its default: that is what salvaging is.
        let _ = reader.key(&mut policy, key, value);
    }
    policy
}

/// The keys of the file, those first by whose names others are written.
fn in_order(object: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    object.get_key_value("pkeys").into_iter().chain(object)
}

/// A label of RFC 1123. It becomes part of a path of the API.
fn is_namespace(name: &&str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(fits)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn object(&self, text: &[u8]) -> Result<Map<String, Value>, PolicyError> {
        serde_json::from_slice(text).map_err(|error| PolicyError::Syntax {
            path: self.path.to_owned(),
            why: error.to_string(),
        })
    }

    fn key(&self, policy: &mut Policy, key: &str, value: &Value) -> Result<(), PolicyError> {
        match key {
            "version" if value.as_u64() == Some(1) => Ok(()),
            "version" => Err(self.wrong(key, value, "this program reads version 1 only")),
            "node" => self.node(value).map(|node| policy.node = Some(node)),
            "stateDir" => self
                .directory(key, value)
                .map(|path| policy.state_dir = path),
            "cdiDir" => self.directory(key, value).map(|path| policy.cdi_dir = path),
            "stores" => self.stores(value).map(|stores| policy.stores = stores),
            "ipam" => self.ipam(value).map(|ipam| policy.ipam = ipam),
            "allow" => (self.allow(value, &policy.pkeys)).map(|allow| policy.allow = allow),
            "pkeys" => self.pkeys(value).map(|pkeys| policy.pkeys = pkeys),
            "rails" => self.rails(value).map(|rails| policy.rails = rails),
            "fabricAddresses" if value == "static" => {
                policy.fabric_addresses = FabricAddresses::Static;
                Ok(())
            }
            "fabricAddresses" => Err(self.wrong(key, value, "must be \"static\", or left out")),
            "log" => self.log(value).map(|log| policy.log = log),
            // Refused by `known`; salvaging passes over it.
            _ => Ok(()),
        }
    }

    fn node(&self, value: &Value) -> Result<String, PolicyError> {
        let name = value.as_str().filter(|name| crate::identity::is_name(name));
        let rule = "must be a name of letters, digits, '-', '.' and '_', which begins with a letter, \
                    a digit or '_'";
        name.map(str::to_owned)
            .ok_or_else(|| self.wrong("node", value, rule))
    }

    fn stores(&self, value: &Value) -> Result<BTreeMap<String, Store>, PolicyError> {
        let mut stores = Policy::default().stores;
        for (name, value) in self.map("stores", value)? {
            let store = self.store(name, value)?;
            stores.insert(name.clone(), store);
        }
        Ok(stores)
    }

    fn store(&self, name: &str, value: &Value) -> Result<Store, PolicyError> {
        let at = format!("stores.{name}");
        let object = self.map(&at, value)?;
        let keys: &[&str] = match object.get("type").and_then(Value::as_str) {
            Some("file") => &["id", "shared"],
            Some("kubernetes") => &["blocks", "static", "after"],
            _ => {
                let kind = object.get("type").unwrap_or(&Value::Null);
                let rule = "must be \"file\" or \"kubernetes\"";
                return Err(self.wrong(&format!("{at}.type"), kind, rule));
            }
        };
        let common = ["type", "directory", "ranges", "networkNames"];
        self.known(&at, object, &[&common, keys].concat())?;
        let directory = object.get("directory");
        let kind = match keys {
            ["blocks", ..] => StoreKind::Kubernetes {
                static_networks: self.networks(&at, object, "static")?.unwrap_or_default(),
                blocks: match object.get("blocks") {
                    Some(blocks) => self.blocks(&format!("{at}.blocks"), blocks)?,
                    None => BlockLength::default(),
                },
                after: match object.get("after") {
                    None => None,
                    Some(after) => Some(self.after(&format!("{at}.after"), after)?),
                },
            },
            _ => StoreKind::File {
                id: self.store_id(&at, object)?,
                shared: self.boolean(&format!("{at}.shared"), object.get("shared"))?,
            },
        };
        let directory = match (directory, &kind) {
            // Of the default store the built-in one; each other store beside it.
            (None, StoreKind::Kubernetes { .. }) if name == "default" => {
                PathBuf::from(DEFAULT_STORE_DIRECTORY)
            }
            (directory, _) => {
                let directory = directory.unwrap_or(&Value::Null);
                self.directory(&format!("{at}.directory"), directory)?
            }
        };
        Ok(Store {
            directory,
            kind,
            bounds: self.bounds(&at, object)?,
        })
    }

    /// The namespace of whereabouts' objects.
    fn after(&self, at: &str, value: &Value) -> Result<String, PolicyError> {
        let object = self.map(at, value)?;
        self.known(at, object, &["whereabouts"])?;
        let namespace = object.get("whereabouts").unwrap_or(&Value::Null);
        let text = namespace.as_str().filter(is_namespace);
        text.map(str::to_owned).ok_or_else(|| {
            let rule =
                "must be the namespace of whereabouts' objects: at most 63 of a-z, 0-9 and '-'";
            self.wrong(&format!("{at}.whereabouts"), namespace, rule)
        })
    }

    fn store_id(
        &self,
        at: &str,
        store: &Map<String, Value>,
    ) -> Result<Option<String>, PolicyError> {
        match store.get("id") {
            None => Ok(None),
            Some(Value::String(id)) if crate::identity::is_name(id) => Ok(Some(id.clone())),
            Some(other) => {
                let rule = "must be a store's identity, as rdmactl addresses shows it";
                Err(self.wrong(&format!("{at}.id"), other, rule))
            }
        }
    }

    fn boolean(&self, at: &str, value: Option<&Value>) -> Result<bool, PolicyError> {
        match value {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(self.wrong(at, other, "must be true or false")),
        }
    }

    /// Lengths of blocks, which the file says in addresses.
    fn blocks(&self, at: &str, value: &Value) -> Result<BlockLength, PolicyError> {
        let object = self.map(at, value)?;
        self.known(at, object, &["ipv4", "ipv6"])?;
        let mut blocks = BlockLength::default();
        for (key, longest, length) in [
            ("ipv4", 32, &mut blocks.ipv4),
            ("ipv6", 128, &mut blocks.ipv6),
        ] {
            let Some(value) = object.get(key) else {
                continue;
            };
            let addresses = value.as_u64().filter(|count| count.is_power_of_two());
            *length = addresses
                .map(u64::trailing_zeros)
                .filter(|bits| *bits <= MAX_BLOCK_BITS)
                .and_then(|bits| u8::try_from(longest - bits).ok())
                .ok_or_else(|| {
                    let rule = "must be a count of addresses: 1, 2, 4 and so on, at most 65536";
                    self.wrong(&format!("{at}.{key}"), value, rule)
                })?;
        }
        Ok(blocks)
    }

    fn bounds(&self, at: &str, store: &Map<String, Value>) -> Result<StoreBounds, PolicyError> {
        let rule = "must be a list of names, \"\" for networks without network_name";
        let names = self.texts(at, store, "networkNames", rule)?;
        Ok(StoreBounds {
            ranges: self.networks(at, store, "ranges")?,
            network_names: names.map(|names| names.into_iter().map(str::to_owned).collect()),
        })
    }

    /// A list of networks of a store, if it has one.
    fn networks(
        &self,
        at: &str,
        store: &Map<String, Value>,
        key: &str,
    ) -> Result<Option<Vec<IpNetwork>>, PolicyError> {
        let rule = "must be a list of networks, as in [\"10.0.0.0/8\"]";
        let Some(texts) = self.texts(at, store, key, rule)? else {
            return Ok(None);
        };
        let networks: Option<Vec<IpNetwork>> = texts.into_iter().map(network).collect();
        let value = store.get(key).unwrap_or(&Value::Null);
        let wrong = || self.wrong(&format!("{at}.{key}"), value, rule);
        networks.map(Some).ok_or_else(wrong)
    }

    /// A list of texts of a store, not empty, if it has one.
    fn texts<'v>(
        &self,
        at: &str,
        store: &'v Map<String, Value>,
        key: &str,
        rule: &'static str,
    ) -> Result<Option<Vec<&'v str>>, PolicyError> {
        let Some(value) = store.get(key) else {
            return Ok(None);
        };
        let list = value.as_array().filter(|list| !list.is_empty());
        let texts: Option<Vec<&str>> =
            list.and_then(|list| list.iter().map(Value::as_str).collect());
        let wrong = || self.wrong(&format!("{at}.{key}"), value, rule);
        texts.map(Some).ok_or_else(wrong)
    }

    fn ipam(&self, value: &Value) -> Result<Ipam, PolicyError> {
        let object = self.map("ipam", value)?;
        self.known("ipam", object, &["profile", "cooldown", "flatFile"])?;
        let mut ipam = Policy::default().ipam;
        match object.get("profile") {
            None => {}
            Some(name) if name == "strict" => ipam.profile = Some(Profile::Strict),
            Some(name) if name == "compatible" => ipam.profile = Some(Profile::Compatible),
            Some(other) => {
                let rule = "must be \"strict\" or \"compatible\"";
                return Err(self.wrong("ipam.profile", other, rule));
            }
        }
        if let Some(value) = object.get("cooldown") {
            let rule = "must be a duration of at most a day, as in \"30s\", \"2m\" or \"0\"";
            ipam.cooldown = value
                .as_str()
                .and_then(duration::parse)
                .filter(|d| *d <= Duration::from_secs(86_400))
                .ok_or_else(|| self.wrong("ipam.cooldown", value, rule))?;
        }
        if let Some(value) = object.get("flatFile") {
            ipam.flat_file = Some(self.directory("ipam.flatFile", value)?);
        }
        Ok(ipam)
    }

    fn allow(&self, value: &Value, pkeys: &BTreeMap<String, u16>) -> Result<Allow, PolicyError> {
        let object = self.map("allow", value)?;
        self.known("allow", object, &ALLOW_KEYS)?;
        let flag = |key: &str| match object.get(key) {
            None => Ok(false),
            Some(Value::Bool(on)) => Ok(*on),
            Some(other) => Err(self.wrong(&format!("allow.{key}"), other, "must be true or false")),
        };
        let netdevs = match object.get("netdevs") {
            None => None,
            Some(Value::Array(list)) => Some(
                list.iter()
                    .enumerate()
                    .map(|(i, v)| self.selector(i, v))
                    .collect::<Result<_, _>>()?,
            ),
            Some(other) => {
                return Err(self.wrong("allow.netdevs", other, "must be a list of selectors"));
            }
        };
        Ok(Allow {
            non_rdma: flag("nonRdma")?,
            uplinks: flag("uplinks")?,
            netdevs,
            ipam: self.ipam_programs(object.get("ipam"))?,
            passthru: flag("passthru")?,
            virtual_links: flag("virtual")?,
            unallocated: flag("unallocated")?,
            request_excluded: flag("requestExcluded")?,
            pkeys: self.allowed_pkeys(object.get("pkeys"), pkeys)?,
            inactive_partitions: flag("inactivePartitions")?,
            guids: self.guids(object.get("vf"))?,
        })
    }

    /// Names that no number could be taken for.
    fn pkeys(&self, value: &Value) -> Result<BTreeMap<String, u16>, PolicyError> {
        let pkey = |(name, value): (&String, &Value)| {
            let at = format!("pkeys.{name}");
            if name.is_empty() || partition_key(&Value::String(name.clone())).is_some() {
                let rule = "must have a name that is not a hexadecimal number itself";
                return Err(self.wrong(&at, value, rule));
            }
            let rule = "must be a partition key such as \"0x8001\"";
            let key = partition_key(value).ok_or_else(|| self.wrong(&at, value, rule))?;
            Ok((name.clone(), key))
        };
        self.map("pkeys", value)?.iter().map(pkey).collect()
    }

    fn allowed_pkeys(
        &self,
        value: Option<&Value>,
        names: &BTreeMap<String, u16>,
    ) -> Result<Option<Vec<u16>>, PolicyError> {
        let Some(value) = value else {
            return Ok(None);
        };
        let rule = "must be a list of partition keys (\"0x8001\") and names of \"pkeys\"";
        let wrong = |value: &Value| self.wrong("allow.pkeys", value, rule);
        let pkey = |value: &Value| {
            let named = value.as_str().and_then(|name| names.get(name)).copied();
            named
                .or_else(|| partition_key(value))
                .ok_or_else(|| wrong(value))
        };
        let list = value.as_array().ok_or_else(|| wrong(value))?;
        list.iter().map(pkey).collect::<Result<_, _>>().map(Some)
    }

    fn guids(&self, value: Option<&Value>) -> Result<Vec<RangeInclusive<u64>>, PolicyError> {
        let Some(value) = value else {
            return Ok(Vec::new());
        };
        let object = self.map("allow.vf", value)?;
        self.known("allow.vf", object, &["guid"])?;
        let range = |range: &Value| {
            let text = range.as_str()?;
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let range = port_guid(first)?..=port_guid(last)?;
            (!range.is_empty()).then_some(range)
        };
        let value = object.get("guid").unwrap_or(&Value::Null);
        let list = value.as_array();
        let guids = list.and_then(|list| list.iter().map(range).collect());
        let rule = "must be a list of GUIDs and ranges such as \
                    \"02:00:00:00:00:00:00:00-02:ff:ff:ff:ff:ff:ff:ff\"";
        guids.ok_or_else(|| self.wrong("allow.vf.guid", value, rule))
    }

    fn rails(&self, value: &Value) -> Result<Rails, PolicyError> {
        let entry = |(key, value): (&String, &Value)| {
            let at = format!("rails.{key}");
            let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
            let rail = number.filter(|rail| *rail <= MAX_RAIL).ok_or_else(|| {
                self.wrong(&at, value, "must be the number of a rail, from 0 to 255")
            })?;
            let nic = Nic::parse(key).ok_or_else(|| {
                let rule = "must have a PCI address, a netdev's name or pattern, or a network \
                            (10.1.0.0/24) as its key";
                self.wrong(&at, value, rule)
            })?;
            Ok::<_, PolicyError>(Entry {
                key: key.clone(),
                nic,
                rail,
            })
        };
        let entries = self.map("rails", value)?.iter().map(entry);
        Ok(Rails(entries.collect::<Result<_, _>>()?))
    }

    /// Names of programs in `CNI_PATH`, never paths.
    fn ipam_programs(&self, value: Option<&Value>) -> Result<Vec<String>, PolicyError> {
        let Some(value) = value else {
            return Ok(Allow::default().ipam);
        };
        let rule = "must be a list of names of IPAM programs, without \"/\"";
        let wrong = |value: &Value| self.wrong("allow.ipam", value, rule);
        let name = |value: &Value| {
            value
                .as_str()
                .filter(|name| !name.is_empty() && !name.contains('/'))
                .map(str::to_owned)
                .ok_or_else(|| wrong(value))
        };
        let list = value.as_array().ok_or_else(|| wrong(value))?;
        list.iter().map(name).collect()
    }

    fn selector(&self, index: usize, value: &Value) -> Result<Selector, PolicyError> {
        let at = format!("allow.netdevs[{index}]");
        let object = self.map(&at, value)?;
        self.known(&at, object, &SELECTOR_KEYS)?;
        let words = |key: &str, hex: bool| -> Result<Vec<Pattern>, PolicyError> {
            let rule = "must be a list of strings that are not empty";
            let wrong = |value: &Value| self.wrong(&format!("{at}.{key}"), value, rule);
            let Some(value) = object.get(key) else {
                return Ok(Vec::new());
            };
            let list = value.as_array().filter(|list| !list.is_empty());
            let pattern = |v: &Value| {
                let word = v
                    .as_str()
                    .filter(|w| !w.is_empty())
                    .ok_or_else(|| wrong(v))?;
                let parsed = if hex {
                    Pattern::parse(&word.trim_start_matches("0x").to_ascii_lowercase())
                } else {
                    Pattern::parse(word)
                };
                let rule = "must be words, or patterns of \"*\", \"?\" and sets such as \"[0-3]\"";
                parsed.map_err(|_| self.wrong(&format!("{at}.{key}"), v, rule))
            };
            list.ok_or_else(|| wrong(value))?
                .iter()
                .map(pattern)
                .collect()
        };
        let selector = Selector {
            if_names: words("ifNames", false)?,
            pci_addresses: words("pciAddresses", false)?,
            vendors: words("vendors", true)?,
            device_ids: words("deviceIDs", true)?,
            drivers: words("drivers", false)?,
            link_types: words("linkTypes", false)?,
            rdma_devices: words("rdmaDevices", false)?,
        };
        if selector == Selector::default() {
            return Err(self.wrong(&at, value, "a selector must ask for something"));
        }
        Ok(selector)
    }

    fn log(&self, value: &Value) -> Result<Log, PolicyError> {
        let object = self.map("log", value)?;
        self.known("log", object, &["file", "level"])?;
        let file = match object.get("file") {
            None => None,
            Some(value) => Some(self.directory("log.file", value)?),
        };
        let level = match object.get("level").map(Value::as_str) {
            None => LogLevel::default(),
            Some(Some("error")) => LogLevel::Error,
            Some(Some("warn")) => LogLevel::Warn,
            Some(Some("info")) => LogLevel::Info,
            Some(Some("debug")) => LogLevel::Debug,
            Some(_) => {
                let value = object.get("level").unwrap_or(&Value::Null);
                let rule = "must be \"error\", \"warn\", \"info\" or \"debug\"";
                return Err(self.wrong("log.level", value, rule));
            }
        };
        Ok(Log { file, level })
    }

    /// An absolute path without `..`, so that what is written is what is used.
    fn directory(&self, key: &str, value: &Value) -> Result<PathBuf, PolicyError> {
        let plain = |path: &PathBuf| {
            path.is_absolute()
                && !path
                    .components()
                    .any(|c| c == std::path::Component::ParentDir)
        };
        value
            .as_str()
            .map(PathBuf::from)
            .filter(plain)
            .ok_or_else(|| self.wrong(key, value, "must be an absolute path without \"..\""))
    }

    fn map<'v>(&self, key: &str, value: &'v Value) -> Result<&'v Map<String, Value>, PolicyError> {
        value
            .as_object()
            .ok_or_else(|| self.wrong(key, value, "must be an object"))
    }

    fn known(
        &self,
        at: &str,
        object: &Map<String, Value>,
        known: &[&'static str],
    ) -> Result<(), PolicyError> {
        let dot = if at.is_empty() { "" } else { "." };
        match spelling::unknown(object, known).into_iter().next() {
            None => Ok(()),
            Some((key, nearest)) => Err(PolicyError::UnknownKey {
                path: self.path.to_owned(),
                key: format!("{at}{dot}{key}"),
                nearest,
            }),
        }
    }

    fn wrong(&self, key: &str, value: &Value, rule: &'static str) -> PolicyError {
        let value = match value {
            Value::Null => "absent or null".to_owned(),
            value => value.to_string(),
        };
        PolicyError::Value {
            path: self.path.to_owned(),
            key: key.to_owned(),
            value,
            rule,
        }
    }
}

/// A network with its prefix length.
pub(super) fn network(text: &str) -> Option<IpNetwork> {
    text.contains('/').then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Policy, PolicyError> {
        policy(Path::new("/etc/rdma-netdev/policy.json"), text.as_bytes())
    }

    #[test]
    fn every_key_arrives() {
        let policy = parse(
            r#"{
              "version": 1, "node": "gpu-7", "stateDir": "/srv/state",
              "stores": {"shared": {"type": "file", "directory": "/mnt/leases", "shared": true,
                  "ranges": ["10.0.0.0/8"], "networkNames": ["blue", ""]}},
              "ipam": {"profile": "compatible", "cooldown": "2m"},
              "allow": {"nonRdma": true, "uplinks": true, "passthru": true, "virtual": true,
                        "unallocated": true, "requestExcluded": true,
                        "inactivePartitions": true, "ipam": ["rdma-ipam", "host-local"],
                        "vf": {"guid": ["0200000000000000-02:00:00:00:00:00:00:ff", "00:11:22:33:44:55:66:77"]},
                        "netdevs": [{"ifNames": ["ens*"], "vendors": ["0x15B3"]}]},
              "rails": {"0000:3b:00.0": 0, "ens2*": 7},
              "fabricAddresses": "static",
              "log": {"file": "/var/log/rdma.log", "level": "debug"}
            }"#,
        )
        .unwrap();
        assert_eq!(policy.node.as_deref(), Some("gpu-7"));
        assert_eq!(policy.state_dir, Path::new("/srv/state"));
        let names: Vec<_> = policy.stores.keys().map(String::as_str).collect();
        assert_eq!(names, ["default", "shared"]);
        let shared = Store {
            directory: "/mnt/leases".into(),
            kind: StoreKind::File {
                id: None,
                shared: true,
            },
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
        assert_eq!(
            policy.allow.guids,
            [
                0x0200_0000_0000_0000..=0x0200_0000_0000_00ff,
                0x0011_2233_4455_6677..=0x0011_2233_4455_6677
            ]
        );
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
            (r#"{"pkeys": {"cafe": "0x8001"}}"#, "pkeys.cafe"),
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
                "stores.a.type: must be \"file\" or \"kubernetes\", not \"etcd\"",
            ),
            (
                r#"{"stores": {"a": {"type": "file"}}}"#,
                "stores.a.directory",
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
                r#"{"stores": {"a": {"type": "file", "directory": "/b", "shared": "yes"}}}"#,
                "stores.a.shared: must be true or false",
            ),
            (r#"{"stores": []}"#, "must be an object"),
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
                "allow.unallocated: must be true or false",
            ),
            (
                r#"{"allow": {"vf": ["guid"]}}"#,
                "allow.vf: must be an object",
            ),
            (r#"{"allow": {"vf": {"vlan": []}}}"#, "vlan"),
            (r#"{"allow": {"vf": {}}}"#, "allow.vf.guid: must be a list"),
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
            (r#"{"rails": ["ens1"]}"#, "rails: must be an object"),
            (
                r#"{"rails": {"ens1": "0"}}"#,
                "rails.ens1: must be the number",
            ),
            (r#"{"rails": {"ens1": 256}}"#, "from 0 to 255"),
            (r#"{"rails": {"10.0.0.0/99": 0}}"#, "or a network"),
            (r#"{"log": {"level": "loud"}}"#, "log.level"),
            (r#"{"log": {"file": "x"}}"#, "absolute"),
            ("[]", "expected a map"),
            ("{", "EOF"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn a_kubernetes_store_has_blocks_and_a_built_in_directory() {
        let read = |store: &str| {
            let text = format!(r#"{{"stores": {{"default": {store}}}}}"#);
            policy(Path::new("p"), text.as_bytes()).map(|policy| policy.stores["default"].clone())
        };
        let plain = read(r#"{"type": "kubernetes"}"#).unwrap();
        assert_eq!(plain.directory, Path::new(DEFAULT_STORE_DIRECTORY));
        let blocks = BlockLength {
            ipv4: 28,
            ipv6: 122,
        };
        let kind = StoreKind::Kubernetes {
            blocks,
            static_networks: Vec::new(),
            after: None,
        };
        assert_eq!(plain.kind, kind);
        let text = r#"{"type": "kubernetes", "directory": "/srv", "static": ["10.0.0.0/26"],
                       "blocks": {"ipv4": 1, "ipv6": 65536}}"#;
        let other = read(text).unwrap();
        let blocks = BlockLength {
            ipv4: 32,
            ipv6: 112,
        };
        let kind = StoreKind::Kubernetes {
            blocks,
            static_networks: vec!["10.0.0.0/26".parse().unwrap()],
            after: None,
        };
        assert_eq!(other.kind, kind);
        for (wrong, says) in [
            (r#"{"type": "kubernetes", "id": "x"}"#, "id"),
            (r#"{"type": "kubernetes", "shared": true}"#, "shared"),
            (
                r#"{"type": "file", "directory": "/s", "blocks": {}}"#,
                "blocks",
            ),
            (
                r#"{"type": "kubernetes", "blocks": {"ipv4": 24}}"#,
                "blocks.ipv4",
            ),
            (
                r#"{"type": "kubernetes", "blocks": {"ipv4": 131072}}"#,
                "blocks.ipv4",
            ),
            (
                r#"{"type": "kubernetes", "blocks": {"ipv6": 0}}"#,
                "blocks.ipv6",
            ),
            (
                r#"{"type": "kubernetes", "static": ["10.0.0.1"]}"#,
                "static",
            ),
            (
                r#"{"type": "kubernetes", "static": ["10.0.0.1"]}"#,
                "static",
            ),
            (r#"{"type": "nfs"}"#, "type"),
        ] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        // A second store has no built-in directory.
        let text = br#"{"stores": {"blue": {"type": "kubernetes"}}}"#;
        let error = policy(Path::new("p"), text).unwrap_err().to_string();
        assert!(error.contains("stores.blue.directory"), "{error}");
    }

    #[test]
    fn a_kubernetes_store_comes_after_whereabouts_objects_of_a_namespace() {
        let read = |store: &str| {
            let text = format!(r#"{{"stores": {{"default": {store}}}}}"#);
            policy(Path::new("p"), text.as_bytes())
        };
        let namespace = r#"{"type": "kubernetes", "after": {"whereabouts": "net-1"}}"#;
        match &read(namespace).unwrap().stores["default"].kind {
            StoreKind::Kubernetes { after, .. } => assert_eq!(after.as_deref(), Some("net-1")),
            other => panic!("{other:?}"),
        }
        for (after, says) in [
            ("1", "default.after"),
            (r#""whereabouts""#, "default.after"),
            ("{}", "default.after.whereabouts"),
            (r#"{"whereabouts": "-a"}"#, "default.after.whereabouts"),
            (r#"{"whereabouts": "a/b"}"#, "default.after.whereabouts"),
            (r#"{"whereabouts": "a", "host-local": "b"}"#, "host-local"),
        ] {
            let store = format!(r#"{{"type": "kubernetes", "after": {after}}}"#);
            let error = read(&store).unwrap_err().to_string();
            assert!(error.contains(says), "{after}: {error}");
        }
        let file = r#"{"type": "file", "directory": "/d", "after": {"whereabouts": "a"}}"#;
        let error = read(file).unwrap_err().to_string();
        assert!(error.contains("default.after"), "{error}");
    }

    #[test]
    fn a_wrong_file_still_names_the_directories_of_the_leases() {
        let text = br#"{"stateDir": "/srv", "typo": 1, "ipam": {"cooldown": 3},
            "stores": {"default": {"type": "file", "directory": "/mnt"}}}"#;
        let policy = salvage(Path::new("p"), text);
        assert_eq!(policy.state_dir, Path::new("/srv"));
        assert_eq!(policy.stores.get("default"), Some(&Store::file("/mnt")));
        assert_eq!(policy.ipam, Policy::default().ipam);
        assert_eq!(salvage(Path::new("p"), b"garbage"), Policy::default());
    }
}
