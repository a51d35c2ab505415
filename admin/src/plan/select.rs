//! The selector of a pool: the most general one that matches exactly the pool's HCAs on each node,
//! checked with the daemon's matching. Pure.

use std::collections::BTreeSet;

use pools::config::selector::{Match, Selector};
use serde::Deserialize as _;

use super::read::PlanHca;

/// Keys of a selector with their values, in the order in which they are written.
pub(crate) type Keys = Vec<(&'static str, Vec<String>)>;

/// From general to specific. The last two do not match HCAs of nodes that are added later.
const VOCABULARIES: [&[&str]; 12] = [
    &["linkTypes", "linkSpeed"],
    &["linkTypes", "linkSpeed of these"],
    &["linkTypes"],
    &["drivers"],
    &["drivers", "linkSpeed"],
    &["vendors", "deviceIDs"],
    &["vendors", "deviceIDs", "linkSpeed"],
    &["ifNames"],
    &["pfNames"],
    &["linkTypes", "ifNames"],
    &["pciAddresses"],
    &["pciAddresses", "deviceIDs"],
];

/// Chooses all of `wanted` and none of `others`.
pub(crate) fn selector(
    wanted: &[&PlanHca],
    others: &[&PlanHca],
    is_shared: bool,
    by_address: bool,
) -> Option<Keys> {
    let tried = if by_address { 12 } else { 10 };
    // Virtual NICs of clouds are known by their driver; no configuration can name some links.
    let is_cloud = wanted.iter().all(|hca| hca.is_virtual());
    let tried = VOCABULARIES
        .iter()
        .take(tried)
        .skip(if is_cloud { 3 } else { 0 });
    // A whole NIC that gets VFs later leaves an exclusive pool by itself, and they take its place.
    let mut functions = vec![("functions", values("functions", wanted))];
    functions.retain(|(_, kinds)| kinds.len() == 1 && (is_shared || *kinds != ["pf"]));
    let key = |key: &&'static str| (key.split(' ').next().unwrap_or(key), values(key, wanted));
    // An HCA that is down joins the pool when it is up.
    let live: Vec<&PlanHca> = wanted
        .iter()
        .copied()
        .filter(|hca| hca.is_active())
        .collect();
    let mut tried = tried.map(|keys| {
        functions
            .iter()
            .cloned()
            .chain(keys.iter().map(key))
            .collect()
    });
    tried.find(|keys: &Keys| {
        let fields = keys
            .iter()
            .map(|(key, values)| ((*key).to_owned(), values.clone().into()));
        let fields = serde_json::Value::Object(fields.collect());
        let is_whole = keys.iter().all(|(_, values)| !values.is_empty());
        Selector::deserialize(fields).is_ok_and(|selector| {
            let chooses = |hca: &&PlanHca| selector.matches(&hca.facts) != Match::No;
            is_whole && live.iter().all(chooses) && !others.iter().any(chooses)
        })
    })
}

/// The values of a key, each once; empty if an HCA has none.
fn values(key: &str, wanted: &[&PlanHca]) -> Vec<String> {
    let mut found = BTreeSet::new();
    for hca in wanted {
        let (facts, pci) = (&hca.facts, hca.facts.pci.as_ref());
        let value = match key {
            "functions" => Some(hca.kind().word().to_owned()),
            "linkTypes" => Some(hca.link().to_owned()),
            // A port that is down reports any rate.
            "linkSpeed" => {
                let live = wanted.iter().filter(|hca| hca.is_active());
                let rate = live.map(|hca| hca.rate).min();
                rate.or(Some(hca.rate))
                    .filter(|rate| *rate > 0)
                    .map(|rate| format!(">={}", speed(rate)))
            }
            "linkSpeed of these" => Some(hca.rate).filter(|rate| *rate > 0).map(speed),
            "drivers" => pci
                .and_then(|pci| pci.driver.clone())
                .or_else(|| facts.drivers().pop())
                .filter(|driver| is_plain(driver)),
            "vendors" => pci.map(|pci| format!("{:04x}", pci.vendor)),
            "deviceIDs" => pci.map(|pci| format!("{:04x}", pci.device)),
            "ifNames" => facts.netdev_names().next().and_then(pattern),
            "pfNames" => facts.pf_netdevs.first().and_then(|name| pattern(name)),
            _ => pci.map(|pci| pci.address.to_string()),
        };
        let Some(value) = value else {
            return Vec::new();
        };
        found.insert(value);
    }
    found.into_iter().collect()
}

fn speed(mbps: u32) -> String {
    match mbps % 1000 {
        0 => format!("{}G", mbps / 1000),
        _ => format!("{mbps}M"),
    }
}

/// A name with `*` for each number.
fn pattern(name: &str) -> Option<String> {
    let mut pattern = name.replace(|c: char| c.is_ascii_digit(), "*");
    while pattern.contains("**") {
        pattern = pattern.replace("**", "*");
    }
    is_plain(name).then_some(pattern)
}

/// An ordinary name, which is written into a file as it is.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    name.len() <= 63 && name.chars().all(is_plain)
}
