//! The `ipam` object of a network configuration: whereabouts' keys, with its
//! meaning, plus `store`.
//!
//! Pure. `compatible` reads as whereabouts does, `strict` refuses what cannot
//! be meant, an unknown key by name with the nearest known one. Keys that steer
//! whereabouts' own datastore, election, slices and log are accepted and ignored: leases
//! are where the node's policy says. DEL needs none of this but the store's name.

mod rails;
mod request;

pub use rails::{AddressPosition, RailRange};
pub use request::{Source, requested};

use crate::range::{self, Range, Spec};
use cni_wire::{Code, Dns, Error, IpConfig, NetworkConfig, Route, Section};
use node::policy::{Policy, Profile};
use node::spelling;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Keys that mean something here.
pub const KEYS: [&str; 15] = [
    "type",
    "store",
    "range",
    "range_start",
    "range_end",
    "exclude",
    PER_NODE,
    "ipRanges",
    "ranges",
    "gateway",
    "routes",
    "dns",
    "addresses",
    "network_name",
    "enable_overlapping_ranges",
];
/// Keys of whereabouts that mean nothing here.
const IGNORED: [&str; 18] = [
    "log_file",
    "log_level",
    "leader_lease_duration",
    "leader_renew_deadline",
    "leader_retry_period",
    "configuration_path",
    "kubernetes",
    "sleep_for_race",
    "reconciler_cron_expression",
    "datastore",
    "etcd_host",
    "etcd_username",
    "etcd_password",
    "etcd_key_file",
    "etcd_cert_file",
    "etcd_ca_cert_file",
    "fast_ipam",
    SLICE,
];
/// Where it is to matter, the store has blocks.
const SLICE: &str = "node_slice_size";
const RANGE_KEYS: [&str; 5] = ["range", "range_start", "range_end", "exclude", PER_NODE];
const PER_NODE: &str = "perNode";

/// The store a configuration uses unless it names another.
pub const DEFAULT_STORE: &str = "default";

/// More ranges than this are refused: each is an address, a pool and files of the store for
/// every pod. A pod with one address of each family on sixteen rails has 32.
const MAX_RANGES: usize = 64;

/// What an `ipam` object asks for, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// The profile it was read in.
    pub profile: Profile,
    /// `store`: which of the policy's stores holds the leases.
    pub store: String,
    /// One address is given from each, in this order.
    pub ranges: Vec<Range>,
    /// `ranges`: the ranges of each rail, for an attachment with several interfaces; empty where
    /// all have those above.
    pub by_rail: BTreeMap<u32, Vec<RailRange>>,
    /// Gateways that belong to one range alone, by its number; empty but for several interfaces.
    pub gateways: Vec<Option<IpAddr>>,
    /// Which interface gets the address of a range, by its number; empty but for several interfaces.
    pub places: Vec<AddressPosition>,
    /// `network_name`: apart from other names, the same address may be leased again.
    pub network_name: Option<String>,
    /// `enable_overlapping_ranges`: an address is leased once in all ranges of
    /// the network name, not once in each.
    pub overlapping: bool,
    pub gateway: Option<IpAddr>,
    /// `addresses`: the same for every pod, and not leased.
    pub fixed: Vec<IpConfig>,
    pub routes: Vec<Route>,
    pub dns: Dns,
    pub ignored: Vec<String>,
    /// In profile compatible: what is done otherwise than by whereabouts, and keys that nobody reads.
    pub notes: Vec<String>,
}

/// The name of the store a configuration uses, however wrong the rest of it is.
#[must_use]
pub fn store_name(config: &NetworkConfig) -> String {
    config
        .ipam()
        .ok()
        .and_then(|ipam| ipam.text("store").ok().flatten().map(str::to_owned))
        .unwrap_or_else(|| DEFAULT_STORE.to_owned())
}

/// The profile a configuration is read in: the policy's, else by the name the
/// IPAM was called by.
///
/// # Errors
/// Code 7 when `ipam.type` is missing or not ours.
pub fn profile(config: &NetworkConfig, policy: &Policy) -> Result<Profile, Error> {
    let by_type = match config.ipam_type()? {
        Some("rdma-ipam") => Profile::Strict,
        Some("whereabouts") => Profile::Compatible,
        Some(other) => {
            return Err(Error::new(
                Code::InvalidConfig,
                format!("ipam.type: {other:?} is another plugin"),
            )
            .with_details("this is rdma-ipam, which also answers to whereabouts"));
        }
        None => return Err(Error::new(Code::InvalidConfig, "ipam.type is missing")),
    };
    Ok(policy.ipam.profile.unwrap_or(by_type))
}

impl Config {
    /// Reads the `ipam` object. `flat` is whereabouts' flat file, whose values
    /// stand in for what the object leaves out.
    ///
    /// # Errors
    /// Code 7 for a wrong value, naming key, value and rule; code 2 for an
    /// unknown key in the strict profile.
    pub fn read(
        config: &NetworkConfig,
        flat: &Section<'_>,
        policy: &Policy,
    ) -> Result<Self, Error> {
        let profile = profile(config, policy)?;
        let ipam = config.ipam()?;
        let strict = profile == Profile::Strict;
        if strict {
            refuse_unknown(&ipam, &all_keys())?;
        }
        let keys = Merged { ipam: &ipam, flat };
        // DEL reads it leniently.
        ipam.text("store")?;
        let gateway = match keys.text("gateway")? {
            Some((section, _)) => gateway(section, profile)?,
            None => None,
        };
        let (fixed, routes) = (fixed(&keys, strict)?, routes(&keys)?);
        let reserved = reserved(gateway, &fixed, &routes);
        keys.text(SLICE)?;
        let read = Self {
            profile,
            store: store_name(config),
            ranges: ranges(&keys, &reserved, profile)?,
            by_rail: rails::read(&ipam, &reserved, profile)?,
            gateways: Vec::new(),
            places: Vec::new(),
            network_name: network_name(&keys)?,
            overlapping: overlapping(&keys, strict)?,
            gateway,
            fixed,
            routes,
            dns: keys.section("dns")?.decode()?,
            ignored: ignored(&ipam),
            notes: Vec::new(),
        };
        read.check(&ipam)?;
        Ok(Self {
            notes: read.notes(&ipam, &reserved)?,
            ..read
        })
    }

    /// The gateway that goes with an address of the range of this number: that of the range alone, of
    /// the node's network, or the one value there is for all.
    #[must_use]
    pub fn gateway_of(&self, number: usize, address: IpAddr) -> Option<IpAddr> {
        let own = self.gateways.get(number).copied().flatten();
        own.or_else(|| self.ranges.get(number)?.gateway_of(address))
            .or_else(|| self.gateway_for(address))
    }

    /// Whether pods never get this address: it is a router's, or in `addresses`. `number` is that of its
    /// range.
    #[must_use]
    pub fn is_reserved(&self, number: usize, address: IpAddr) -> bool {
        self.gateway_of(number, address) == Some(address)
            || reserved(self.gateway, &self.fixed, &self.routes).contains(&address)
    }

    /// The gateway that goes with an address: the one value there is, but in
    /// the strict profile not for an address of the other family.
    fn gateway_for(&self, address: IpAddr) -> Option<IpAddr> {
        self.gateway.filter(|gateway| {
            self.profile == Profile::Compatible || gateway.is_ipv4() == address.is_ipv4()
        })
    }

    fn check(&self, ipam: &Section<'_>) -> Result<(), Error> {
        if self.profile == Profile::Strict && self.all_ranges().next().is_none() {
            return Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "{}: neither range nor ipRanges, nor ranges by rail",
                    ipam.path()
                ),
            )
            .with_details("name at least one range, as in \"range\": \"10.0.0.0/24\""));
        }
        let mut ranges = self.ranges.iter();
        if ranges
            .any(|range| has_own_gateway(range) && self.gateway_for(range.subnet().ip()).is_some())
        {
            return Err(ipam.wrong("gateway", BESIDE_PER_NODE));
        }
        if let Some(gateway) = self.gateway
            && self.profile == Profile::Strict
            && self.families().all(|v4| v4 != gateway.is_ipv4())
        {
            return Err(ipam
                .wrong("gateway", format_args!("{gateway} is of another family than the addresses"))
                .with_details("correct it, or add a range of its family; a next hop of another family stands in routes"));
        }
        Ok(())
    }

    /// In profile compatible, what whereabouts would do otherwise, and the keys that nobody reads.
    fn notes(&self, ipam: &Section<'_>, reserved: &[IpAddr]) -> Result<Vec<String>, Error> {
        if self.profile == Profile::Strict {
            return Ok(Vec::new());
        }
        let would_lease = |address: &&IpAddr| {
            let mut ranges = self.all_ranges();
            ranges.any(|range| range.subnet().contains(**address))
        };
        let addresses = reserved.iter().filter(would_lease);
        let note = |address: &IpAddr| {
            format!("{address} is a gateway, a next hop or one of ipam.addresses: it is not leased")
        };
        let mut notes: Vec<String> = addresses.map(note).collect();
        notes.dedup();
        notes.extend(unknown(ipam, &all_keys()).map(|key| without_effect(ipam, key, &KEYS)));
        for entry in ipam.sections("ipRanges")? {
            let keys = unknown(&entry, &RANGE_KEYS);
            notes.extend(keys.map(|key| without_effect(&entry, key, &RANGE_KEYS)));
        }
        Ok(notes)
    }

    fn families(&self) -> impl Iterator<Item = bool> {
        let ranges = self.ranges.iter().map(|range| range.subnet().is_ipv4());
        ranges.chain(self.fixed.iter().map(|ip| ip.address.is_ipv4()))
    }
}

const BESIDE_PER_NODE: &str = "stands beside perNode.gateway; leave one of them out";

fn has_own_gateway(range: &Range) -> bool {
    range.per_node().is_some_and(|of| of.gateway.is_some())
}

/// A key of the object, or of the flat file where the object leaves it out.
struct Merged<'s, 'a> {
    ipam: &'s Section<'a>,
    flat: &'s Section<'a>,
}

impl<'a> Merged<'_, 'a> {
    fn text(&self, key: &str) -> Result<Option<(&Section<'a>, &'a str)>, Error> {
        for section in [self.ipam, self.flat] {
            if let Some(text) = section.text(key)? {
                return Ok(Some((section, text)));
            }
        }
        Ok(None)
    }

    fn sections(&self, key: &str) -> Result<Vec<Section<'a>>, Error> {
        let inline = self.ipam.sections(key)?;
        if inline.is_empty() {
            self.flat.sections(key)
        } else {
            Ok(inline)
        }
    }

    fn section(&self, key: &str) -> Result<Section<'a>, Error> {
        let inline = self.ipam.section(key)?;
        if inline.is_empty() {
            self.flat.section(key)
        } else {
            Ok(inline)
        }
    }
}

fn ranges(
    keys: &Merged<'_, '_>,
    reserved: &[IpAddr],
    profile: Profile,
) -> Result<Vec<Range>, Error> {
    let strict = profile == Profile::Strict;
    let mut ranges = Vec::new();
    if let Some((section, text)) = keys.text("range")? {
        ranges.push(one_range(section, text, reserved, profile)?);
    } else if strict
        && let Some(key) = RANGE_KEYS
            .into_iter()
            .find(|k| keys.ipam.value(k).is_some())
    {
        return Err(keys.ipam.wrong(
            key,
            "stands without range; in ipRanges each entry has its own",
        ));
    }
    let further = keys.sections("ipRanges")?;
    let count = ranges.len() + further.len();
    if count > MAX_RANGES {
        let rule = format!("{count} ranges; one attachment has at most {MAX_RANGES}");
        return Err(keys.ipam.wrong("ipRanges", rule).with_details(
            "a pod gets one address of each range: leave those that it does not need",
        ));
    }
    for section in further {
        if strict {
            refuse_unknown(&section, &RANGE_KEYS)?;
        }
        match section.text("range")? {
            Some(text) => ranges.push(one_range(&section, text, reserved, profile)?),
            None if strict => {
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!("{} is missing", section.path_of("range")),
                ));
            }
            None => {}
        }
    }
    Ok(ranges)
}

fn one_range(
    section: &Section<'_>,
    range: &str,
    reserved: &[IpAddr],
    profile: Profile,
) -> Result<Range, Error> {
    let exclude: Vec<String> = section.get("exclude")?.unwrap_or_default();
    let exclude: Vec<&str> = exclude.iter().map(String::as_str).collect();
    let start = section.text("range_start")?;
    let end = section.text("range_end")?;
    let spec = Spec {
        range,
        start,
        end,
        exclude: &exclude,
        reserved,
        per_node: section.get(PER_NODE)?,
    };
    Range::new(&spec, profile)
        .map_err(|error| Error::new(Code::InvalidConfig, error.to_string()).context(section.path()))
}

fn gateway(section: &Section<'_>, profile: Profile) -> Result<Option<IpAddr>, Error> {
    let read = |text| {
        let wrong = || section.wrong("gateway", format_args!("{text:?} is not an address"));
        address(text, profile).ok_or_else(wrong)
    };
    section.text("gateway")?.map(read).transpose()
}

/// An address; in the strict profile without leading zeros.
fn address(text: &str, profile: Profile) -> Option<IpAddr> {
    let strict = profile == Profile::Strict;
    range::address(text).filter(|_| !(strict && range::has_leading_zero(text)))
}

fn network_name(keys: &Merged<'_, '_>) -> Result<Option<String>, Error> {
    let Some((section, name)) = keys.text("network_name")? else {
        return Ok(None);
    };
    let mut bytes = name.bytes();
    // It names a directory and, for whereabouts, a Kubernetes object.
    let fits = name.len() <= 63
        && bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if !fits {
        let rule = "is not a network name: a letter or digit, then at most 62 letters, digits, '-', '_', '.'";
        return Err(section.wrong("network_name", format_args!("{name:?} {rule}")));
    }
    Ok(Some(name.to_owned()))
}

fn overlapping(keys: &Merged<'_, '_>, strict: bool) -> Result<bool, Error> {
    const KEY: &str = "enable_overlapping_ranges";
    Ok(match keys.ipam.get(KEY)? {
        Some(inline) => inline,
        // whereabouts ignores the flat file's value
        None if strict => keys.flat.get(KEY)?.unwrap_or(true),
        None => true,
    })
}

fn fixed(keys: &Merged<'_, '_>, strict: bool) -> Result<Vec<IpConfig>, Error> {
    keys.sections("addresses")?
        .iter()
        .map(|section| {
            let text: String = section.require("address")?;
            let address = cni_wire::cidr(&text).map_err(|e| section.wrong("address", e))?;
            let gateway = gateway(section, Profile::Compatible)?;
            if strict && gateway == Some(address.ip()) {
                let rule = format!("{} is the address itself", address.ip());
                return Err(section.wrong("gateway", rule));
            }
            Ok(IpConfig {
                address,
                gateway,
                interface: None,
            })
        })
        .collect()
}

/// Addresses that are not leased: those of routers, and those that each pod of the network has.
fn reserved(gateway: Option<IpAddr>, fixed: &[IpConfig], routes: &[Route]) -> Vec<IpAddr> {
    let fixed = fixed
        .iter()
        .flat_map(|ip| [Some(ip.address.ip()), ip.gateway]);
    let next_hops = routes.iter().map(|route| route.gw);
    let all = fixed.chain(next_hops).chain([gateway]);
    all.flatten().collect()
}

fn routes(keys: &Merged<'_, '_>) -> Result<Vec<Route>, Error> {
    keys.sections("routes")?
        .iter()
        .map(Section::decode)
        .collect()
}

fn ignored(ipam: &Section<'_>) -> Vec<String> {
    let known = |key: &&str| IGNORED.iter().any(|known| known.eq_ignore_ascii_case(key));
    ipam.keys().filter(known).map(str::to_owned).collect()
}

fn all_keys() -> Vec<&'static str> {
    [&KEYS[..], &IGNORED[..]].concat()
}

/// The keys of a section that are none of the known ones, in any case of letters.
fn unknown<'s>(
    section: &'s Section<'_>,
    known: &'s [&'static str],
) -> impl Iterator<Item = &'s str> {
    let is_known = |key: &str| known.iter().any(|one| one.eq_ignore_ascii_case(key));
    section.keys().filter(move |key| !is_known(key))
}

fn without_effect(section: &Section<'_>, key: &str, known: &[&'static str]) -> String {
    let path = section.path_of(key);
    match spelling::nearest(key, known) {
        Some(nearest) => format!("{path} has no effect here; did you mean {nearest:?}?"),
        None => format!("{path} has no effect here"),
    }
}

fn refuse_unknown(section: &Section<'_>, known: &[&'static str]) -> Result<(), Error> {
    let Some(key) = unknown(section, known).next() else {
        return Ok(());
    };
    let error = Error::new(
        Code::UnsupportedField,
        format!("{}: unknown key", section.path_of(key)),
    );
    Err(match spelling::nearest(key, known) {
        Some(nearest) => error.with_details(format!("did you mean {nearest:?}?")),
        None => error.with_details(format!("known keys: {}", known.join(", "))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read_with(ipam: &Value, flat: &Value) -> Result<Config, Error> {
        let text = json!({"cniVersion": "1.0.0", "name": "rail", "ipam": ipam}).to_string();
        let config = NetworkConfig::parse(text.as_bytes()).unwrap();
        Config::read(
            &config,
            &Section::root(&cni_wire::json::parse(flat.to_string()).unwrap()),
            &Policy::default(),
        )
    }

    pub(super) fn strict(mut ipam: Value) -> Result<Config, Error> {
        ipam["type"] = json!("rdma-ipam");
        read_with(&ipam, &json!({}))
    }

    fn lenient(mut ipam: Value) -> Result<Config, Error> {
        ipam["type"] = json!("whereabouts");
        read_with(&ipam, &json!({}))
    }

    #[test]
    fn the_type_chooses_the_profile_unless_the_policy_does() {
        let range = json!({"range": "10.0.0.0/24"});
        assert_eq!(strict(range.clone()).unwrap().profile, Profile::Strict);
        assert_eq!(lenient(range).unwrap().profile, Profile::Compatible);
        let text = json!({"cniVersion": "1.0.0", "name": "a", "ipam": {"type": "whereabouts"}})
            .to_string();
        let config = NetworkConfig::parse(text.as_bytes()).unwrap();
        let mut policy = Policy::default();
        policy.ipam.profile = Some(Profile::Strict);
        assert_eq!(profile(&config, &policy), Ok(Profile::Strict));
        assert!(read_with(&json!({"type": "host-local"}), &json!({})).is_err());
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_one_that_was_meant() {
        let error = strict(json!({"range": "10.0.0.0/24", "excludes": []})).unwrap_err();
        assert_eq!(error.code, Code::UnsupportedField);
        assert_eq!(error.details, "did you mean \"exclude\"?");
        let ranges = json!([{"range": "10.0.0.0/24", "rnage_end": "10.0.0.7"}]);
        let error = strict(json!({"ipRanges": ranges})).unwrap_err();
        assert_eq!(error.msg, "ipam.ipRanges[0].rnage_end: unknown key");
    }

    #[test]
    fn profile_compatible_notes_keys_that_nobody_reads() {
        let config = lenient(
            json!({"range": "10.0.0.0/24", "rangeStart": "10.0.0.9", "Exclude": [],
            "log_level": "debug", "ipRanges": [{"range": "fd00::/64", "omit": []}]}),
        );
        assert_eq!(
            config.unwrap().notes,
            [
                "ipam.rangeStart has no effect here; did you mean \"range_start\"?",
                "ipam.ipRanges[0].omit has no effect here",
            ]
        );
    }

    #[test]
    fn keys_of_the_datastore_are_ignored_by_name() {
        let config = strict(json!({
            "range": "10.0.0.0/24", "leader_lease_duration": 1500, "log_file": "/etc/passwd",
            "kubernetes": {"kubeconfig": "/x"},
        }))
        .unwrap();
        assert_eq!(
            config.ignored,
            ["leader_lease_duration", "log_file", "kubernetes"]
        );
    }

    #[test]
    fn wrong_values_are_refused_with_key_value_and_rule() {
        for (ipam, part) in [
            (json!({}), "neither range nor ipRanges"),
            (
                json!({"range": "10.0.0.0"}),
                "ipam: range: \"10.0.0.0\" is not a CIDR",
            ),
            (json!({"range": 5}), "ipam.range"),
            (
                json!({"range": "10.0.0.0/24", "exclude": "10.0.0.1"}),
                "ipam.exclude",
            ),
            (
                json!({"range": "10.0.0.0/24", "exclude": ["x"]}),
                "ipam: exclude[0]: \"x\"",
            ),
            (
                json!({"exclude": ["10.0.0.1"], "ipRanges": [{"range": "10.0.0.0/24"}]}),
                "stands without range",
            ),
            (
                json!({"ipRanges": [{}]}),
                "ipam.ipRanges[0].range is missing",
            ),
            (
                json!({"range": "10.0.0.0/24", "gateway": "foo"}),
                "ipam.gateway: \"foo\"",
            ),
            (
                json!({"range": "10.0.0.0/24", "gateway": "10.0.0.01"}),
                "ipam.gateway: \"10.0.0.01\"",
            ),
            (
                json!({"range": "127.0.0.0/8"}),
                "ipam: range: 127.0.0.0/8 has addresses of 127.0.0.0/8",
            ),
            (
                json!({"range": "10.0.0.0/24", "network_name": "../etc"}),
                "is not a network name",
            ),
            (
                json!({"range": "10.0.0.0/24", "node_slice_size": 26}),
                "ipam.node_slice_size",
            ),
            (
                json!({"range": "10.0.0.0/24", "enable_overlapping_ranges": "no"}),
                "enable_overlapping",
            ),
            (
                json!({"range": "10.0.0.0/24", "routes": [{"gw": "10.0.0.1"}]}),
                "ipam.routes[0].dst",
            ),
            (
                json!({"range": "10.0.0.0/24", "addresses": [{"address": "10.0.0.1"}]}),
                "addresses[0].address",
            ),
        ] {
            let error = strict(ipam.clone()).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig, "{ipam}");
            assert!(error.msg.contains(part), "{ipam}: {}", error.msg);
        }
    }

    #[test]
    fn addresses_of_routers_and_of_each_pod_are_not_leased() {
        let ipam = json!({"range": "10.0.0.0/28", "ipRanges": [{"range": "fd00::/125"}],
            "gateway": "10.0.0.1", "addresses": [
                {"address": "10.0.0.2/28", "gateway": "10.0.0.3"}, {"address": "fd00::1/125"}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.4"}, {"dst": "::/0", "gw": "fd00::2"}]});
        let lowest = |config: &Config| -> Vec<String> {
            let ranges = config.all_ranges();
            ranges
                .map(|range| range.lowest().unwrap().to_string())
                .collect()
        };
        let read = strict(ipam.clone()).unwrap();
        assert_eq!(lowest(&read), ["10.0.0.5", "fd00::3"]);
        assert!(read.is_reserved(0, "10.0.0.4".parse().unwrap()));
        // Not as whereabouts, which is noted.
        let read = lenient(ipam).unwrap();
        assert_eq!(lowest(&read), ["10.0.0.5", "fd00::3"]);
        assert_eq!(read.notes.len(), 6, "{:?}", read.notes);
        let rails = json!({"ranges": {"0": {"range": "10.0.0.0/28"}},
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}]});
        assert_eq!(lowest(&strict(rails).unwrap()), ["10.0.0.2"]);
        let own = json!({"range": "10.0.0.0/28", "addresses": [
            {"address": "10.0.0.2/28", "gateway": "10.0.0.2"}]});
        let error = strict(own).unwrap_err();
        assert!(error.msg.contains("the address itself"), "{}", error.msg);
    }

    #[test]
    fn each_range_says_how_nodes_divide_it() {
        let per_node = json!({"prefix": 31, "gateway": "first"});
        let config = strict(json!({"range": "10.0.0.0/24", "perNode": per_node,
            "ipRanges": [{"range": "fd00::/64", "perNode": {"prefix": 120, "gateway": 9}}, {"range": "10.2.0.0/24"}],
            "gateway": "10.2.0.1"}));
        // It would be the gateway of the first range, too.
        let error = config.unwrap_err();
        assert_eq!(error.msg.split(':').next(), Some("ipam.gateway"), "{error}");
        let config = strict(json!({"range": "10.0.0.0/24", "perNode": per_node,
            "ipRanges": [{"range": "fd00::/64", "perNode": {"prefix": 120, "gateway": 9}}, {"range": "10.2.0.0/24"}]}));
        let config = config.unwrap();
        let gateway = |number: usize, address: &str| {
            let gateway = config.gateway_of(number, address.parse().unwrap());
            gateway.map(|gateway| gateway.to_string())
        };
        assert_eq!(gateway(0, "10.0.0.7"), Some("10.0.0.6".into()));
        assert_eq!(gateway(1, "fd00::105"), Some("fd00::109".into()));
        assert_eq!(gateway(2, "10.2.0.5"), None);
        assert!(config.is_reserved(0, "10.0.0.6".parse().unwrap()));
        let shown: Vec<String> = config.examples().unwrap()[0]
            .ips
            .iter()
            .map(|ip| format!("{} {:?}", ip.address, ip.gateway))
            .collect();
        assert_eq!(shown[0], "10.0.0.1/31 Some(10.0.0.0)");
        for (ipam, part) in [
            (
                json!({"range": "10.0.0.0/24", "perNode": {"prefix": 16}}),
                "ipam: perNode: prefix 16",
            ),
            (
                json!({"range": "10.0.0.0/24", "perNode": {"prefix": 31, "gateway": "middle"}}),
                "ipam.perNode.gateway: gateway is not first, last or a number",
            ),
            (
                json!({"range": "10.0.0.0/24", "perNode": {"length": 31}}),
                "ipam.perNode",
            ),
            (
                json!({"range": "10.0.0.0/24", "perNode": 31}),
                "ipam.perNode",
            ),
            (
                json!({"perNode": per_node, "ipRanges": [{"range": "10.0.0.0/24"}]}),
                "stands without range",
            ),
            (
                json!({"ranges": {"0": {"range": "10.0.0.0/24"}}, "perNode": per_node}),
                "ipam.perNode",
            ),
            (
                json!({"ranges": {"0": {"range": "10.0.0.0/24", "gateway": "10.0.0.1", "perNode": per_node}}}),
                "ipam.ranges.0.gateway",
            ),
        ] {
            let error = strict(ipam.clone()).unwrap_err();
            assert!(error.msg.contains(part), "{ipam}: {}", error.msg);
        }
        let rails = strict(json!({"ranges": {
            "0": {"range": "10.0.0.0/24", "perNode": per_node},
            "1": {"range": "10.1.0.0/24", "perNode": {"prefix": 30, "gateway": "last"}}}}));
        let rails = rails.unwrap().for_rails(&[0, 1]).unwrap();
        let prefixes: Vec<u8> = rails.ranges.iter().map(Range::prefix).collect();
        assert_eq!(prefixes, [31, 30]);
        assert_eq!(
            rails.gateway_of(1, [10, 1, 0, 5].into()),
            Some([10, 1, 0, 6].into())
        );
    }

    #[test]
    fn an_attachment_has_at_most_64_ranges() {
        let ranges = |count: usize| {
            let ranges: Vec<Value> = (0..count)
                .map(|n| json!({"range": format!("10.0.{n}.0/24")}))
                .collect();
            json!({"range": "10.1.0.0/24", "ipRanges": ranges})
        };
        assert_eq!(strict(ranges(63)).unwrap().ranges.len(), 64);
        for error in [strict(ranges(64)), lenient(ranges(2000))].map(Result::unwrap_err) {
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with("ipam.ipRanges: "), "{}", error.msg);
            assert!(error.msg.contains("at most 64"), "{}", error.msg);
        }
    }

    #[test]
    fn the_flat_file_fills_what_is_left_out() {
        let flat = json!({"gateway": "10.9.9.9", "enable_overlapping_ranges": false, "range": "10.1.0.0/24"});
        let read = |kind: &str, mut ipam: Value| {
            ipam["type"] = json!(kind);
            read_with(&ipam, &flat).unwrap()
        };
        let config = read("whereabouts", json!({"range": "10.0.0.0/24"}));
        assert_eq!(config.gateway, Some("10.9.9.9".parse().unwrap()));
        assert_eq!(config.ranges[0].subnet().to_string(), "10.0.0.0/24");
        assert!(
            config.overlapping,
            "the compatible profile heeds the flat file here"
        );
        let config = read("rdma-ipam", json!({"gateway": "10.0.0.1"}));
        assert_eq!(config.ranges[0].subnet().to_string(), "10.1.0.0/24");
        assert!(!config.overlapping);
    }

    #[test]
    fn a_gateway_serves_its_own_family_when_strict() {
        let dual = json!({"ipRanges": [{"range": "10.0.0.0/24"}, {"range": "fd00::/64"}],
            "gateway": "10.0.0.1"});
        let six = "fd00::1".parse().unwrap();
        assert_eq!(strict(dual.clone()).unwrap().gateway_for(six), None);
        assert!(lenient(dual).unwrap().gateway_for(six).is_some());
    }

    #[test]
    fn the_store_is_known_whatever_else_is_wrong() {
        for (text, store) in [
            (
                r#"{"cniVersion":"1.0.0","name":"a","ipam":{"store":"shared","range":7}}"#,
                "shared",
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"a","ipam":{"store":7}}"#,
                DEFAULT_STORE,
            ),
            (
                r#"{"cniVersion":"1.0.0","name":"a","ipam":[]}"#,
                DEFAULT_STORE,
            ),
            (r#"{"cniVersion":"1.0.0","name":"a"}"#, DEFAULT_STORE),
        ] {
            assert_eq!(
                store_name(&NetworkConfig::parse(text.as_bytes()).unwrap()),
                store,
                "{text}"
            );
        }
    }
}
