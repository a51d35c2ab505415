//! The selector of a pool: the plainest that chooses the pool's HCAs on each node, and no other. Checked
//! by the daemon's own matching. Pure.

use std::collections::BTreeSet;

use rdma_device_plugin::candidate::{Candidate, link_type};
use rdma_device_plugin::config::selector::{Match, Selector};
use rdma_device_plugin::words::word;
use serde::Deserialize as _;

/// Keys of a selector with their values, in the order in which they are written.
pub(crate) type Keys = Vec<(&'static str, Vec<String>)>;

/// Chooses all of `wanted` and none of `others`. `by_address` allows PCI addresses, which say nothing
/// of a node that is added later.
pub(crate) fn selector(
    wanted: &[&Candidate],
    others: &[&Candidate],
    is_shared: bool,
    by_address: bool,
) -> Option<Keys> {
    let mut tried = vocabularies(wanted, is_shared);
    if by_address {
        let addresses = |hca: &Candidate| Some(hca.pci.as_ref()?.address.to_string());
        let addresses = all("pciAddresses", wanted, |hca| {
            addresses(hca).into_iter().collect()
        });
        tried.push(addresses.clone());
        tried.push(
            [
                addresses,
                all("deviceIDs", wanted, |hca| device(hca, false)),
            ]
            .concat(),
        );
    }
    tried.into_iter().find(|keys| {
        let is_whole = keys.iter().all(|(_, values)| !values.is_empty());
        let selector = parse(keys).filter(|_| is_whole);
        selector.is_some_and(|selector| {
            wanted.iter().all(|hca| selector.matches(hca) != Match::No)
                && others.iter().all(|hca| selector.matches(hca) == Match::No)
        })
    })
}

fn parse(keys: &Keys) -> Option<Selector> {
    let fields = keys
        .iter()
        .map(|(key, values)| ((*key).to_owned(), values.clone().into()));
    Selector::deserialize(serde_json::Value::Object(fields.collect())).ok()
}

/// From what a fabric is bought by to what a machine happens to have.
fn vocabularies(wanted: &[&Candidate], is_shared: bool) -> Vec<Keys> {
    // A whole NIC that gets VFs later leaves an exclusive pool by itself, and they take its place.
    let mut functions = all("functions", wanted, |hca| vec![word(&hca.function().kind)]);
    functions.retain(|(_, kinds)| kinds.len() == 1 && (is_shared || *kinds != ["pf"]));
    let mut links = all("linkTypes", wanted, |hca| {
        hca.ports()
            .map(|port| link_type(port.link_layer).to_owned())
            .collect()
    });
    let rates = |hca: &Candidate| {
        hca.ports()
            .filter_map(|port| Some(port.rate.as_ref()?.mbps))
            .max()
    };
    let rates: BTreeSet<u32> = wanted.iter().filter_map(|hca| rates(hca)).collect();
    let text = |rate: &u32| match rate % 1000 {
        0 => format!("{}G", rate / 1000),
        _ => format!("{rate}M"),
    };
    let least = rates.iter().take(1).map(|rate| format!(">={}", text(rate)));
    let least = vec![("linkSpeed", least.collect())];
    let exactly = vec![("linkSpeed", rates.iter().map(text).collect())];
    let drivers = all("drivers", wanted, |hca| {
        let function = hca.pci.as_ref().and_then(|pci| pci.driver.clone());
        function
            .or_else(|| hca.drivers().into_iter().next())
            .into_iter()
            .collect()
    });
    let devices = [
        all("vendors", wanted, |hca| device(hca, true)),
        all("deviceIDs", wanted, |hca| device(hca, false)),
    ]
    .concat();
    let names = vec![(
        "ifNames",
        patterns(wanted.iter().map(|hca| hca.netdev_names().collect())),
    )];
    let owners = wanted
        .iter()
        .map(|hca| hca.pf_netdevs.iter().map(String::as_str).collect());
    let owners = vec![("pfNames", patterns(owners))];
    let mut tried = vec![
        [&links, &least].map(Clone::clone).concat(),
        [&links, &exactly].map(Clone::clone).concat(),
        links.clone(),
        drivers.clone(),
        [&drivers, &least].map(Clone::clone).concat(),
        devices.clone(),
        [&devices, &least].map(Clone::clone).concat(),
        names,
        owners,
    ];
    // No configuration can name this link; the driver says it.
    links.retain(|(_, types)| {
        types
            .iter()
            .any(|one| one == link_type(hca::LinkLayer::Unknown))
    });
    if !links.is_empty() {
        tried.drain(..3);
    }
    let with = |keys: Keys| [functions.clone(), keys].concat();
    tried.into_iter().map(with).collect()
}

fn all(
    key: &'static str,
    wanted: &[&Candidate],
    values: impl Fn(&Candidate) -> Vec<String>,
) -> Keys {
    let values: BTreeSet<String> = wanted.iter().flat_map(|hca| values(hca)).collect();
    vec![(key, values.into_iter().collect())]
}

fn device(hca: &Candidate, is_vendor: bool) -> Vec<String> {
    let id = |pci: &hca::PciFunction| if is_vendor { pci.vendor } else { pci.device };
    hca.pci
        .iter()
        .map(|pci| format!("{:04x}", id(pci)))
        .collect()
}

/// Names with each number replaced by `*`; none where an HCA has no name, or one that is a pattern.
fn patterns<'a>(names: impl Iterator<Item = Vec<&'a str>>) -> Vec<String> {
    let mut patterns = BTreeSet::new();
    for names in names {
        let Some(name) = names
            .first()
            .filter(|name| !name.contains(['*', '?', '[', '\\', '#']))
        else {
            return Vec::new();
        };
        let mut pattern = String::new();
        for c in name.chars() {
            match c.is_ascii_digit() {
                true if pattern.ends_with('*') => {}
                true => pattern.push('*'),
                false => pattern.push(c),
            }
        }
        patterns.insert(pattern);
    }
    patterns.into_iter().collect()
}
