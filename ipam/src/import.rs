//! Reading what other IPAM plugins left: host-local's directories, whereabouts'
//! objects. Pure but for the one function that reads a directory; what is found
//! is a plan, and leasing it is the store's business.

use crate::range::{self, bits, from_bits};
use ipnetwork::IpNetwork;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// One address to take over.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Planned {
    /// The address.
    pub address: IpAddr,
    /// The range it belongs to.
    pub range: IpNetwork,
    /// `network_name`, where the object names one.
    pub network_name: Option<String>,
    /// The node, where the object names one.
    pub node: Option<String>,
    /// Container ID.
    pub container: String,
    /// Interface; whereabouts' old records have none.
    pub interface: Option<String>,
    /// Namespace and name of the pod.
    pub pod: Option<(String, String)>,
}

/// Why nothing can be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A directory or file cannot be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Something in it cannot be made sense of.
    #[error("{place}: {why}")]
    Record {
        /// Object or file.
        place: String,
        /// What is wrong.
        why: String,
    },
}

fn wrong(place: impl Into<String>, why: impl Into<String>) -> ImportError {
    ImportError::Record {
        place: place.into(),
        why: why.into(),
    }
}

/// The leases of a host-local directory, `/var/lib/cni/networks/<network>`: a
/// file for each address, holding container ID and interface on a line each.
/// Empty files, which a crash leaves, are not imported; their names are answered.
///
/// # Errors
/// [`ImportError`] for what cannot be read or belongs to none of `ranges`.
pub fn host_local(
    directory: &Path,
    ranges: &[IpNetwork],
) -> Result<(Vec<Planned>, Vec<String>), ImportError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ImportError::Read { path, source }
    };
    let (mut planned, mut empty) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).map_err(failed(directory))? {
        let path = entry.map_err(failed(directory))?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip.") {
            continue;
        }
        let address: IpAddr = name
            .replace('_', ":")
            .parse()
            .map_err(|_| wrong(&name, "is no address"))?;
        let Some(range) = ranges.iter().find(|range| range.contains(address)) else {
            return Err(wrong(name, "lies in none of the ranges given"));
        };
        let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
        let mut lines = text.lines().map(str::trim);
        let Some(container) = lines.next().filter(|line| !line.is_empty()) else {
            empty.push(name);
            continue;
        };
        planned.push(Planned {
            address,
            range: *range,
            network_name: None,
            node: None,
            container: container.to_owned(),
            // Files of old releases have the container only; its interface was eth0.
            interface: Some(
                lines
                    .next()
                    .filter(|l| !l.is_empty())
                    .unwrap_or("eth0")
                    .to_owned(),
            ),
            pod: None,
        });
    }
    planned.sort_by_key(|planned| planned.address);
    Ok((planned, empty))
}

/// The leases in whereabouts' objects, as `kubectl get -o yaml` or `-o json`
/// prints them: `IPPool`s, and the reservations that no pool has. Pools of node
/// slices are named after their nodes, which `NodeSlicePool` objects tell.
///
/// # Errors
/// [`ImportError`] naming the object that cannot be made sense of.
pub fn whereabouts(documents: &[Value]) -> Result<Vec<Planned>, ImportError> {
    let mut objects = Vec::new();
    for document in documents {
        match text_at(document, "/kind") {
            Some(list) if list.ends_with("List") => {
                objects.extend(
                    document
                        .pointer("/items")
                        .and_then(Value::as_array)
                        .into_iter()
                        .flatten(),
                );
            }
            _ => objects.push(document),
        }
    }
    let nodes: Vec<&str> = objects
        .iter()
        .filter_map(|object| object.pointer("/status/allocations")?.as_array())
        .flatten()
        .filter_map(|slice| text_at(slice, "/nodeName"))
        .filter(|node| !node.is_empty())
        .collect();
    let mut planned: BTreeMap<(Option<String>, IpAddr), Planned> = BTreeMap::new();
    let mut ranges = Vec::new();
    for object in &objects {
        if text_at(object, "/kind") == Some("IPPool") {
            ranges.push(pool(object, &nodes, &mut planned)?);
        }
    }
    for object in objects {
        match text_at(object, "/kind") {
            Some("IPPool" | "NodeSlicePool") => {}
            Some("OverlappingRangeIPReservation") => reservation(object, &ranges, &mut planned)?,
            other => {
                let why = format!("kind {other:?} is not whereabouts'");
                return Err(wrong(name_of(object), why));
            }
        }
    }
    Ok(planned.into_values().collect())
}

fn name_of(object: &Value) -> String {
    let kind = text_at(object, "/kind").unwrap_or("object");
    format!(
        "{kind} {}",
        text_at(object, "/metadata/name").unwrap_or("without name")
    )
}

/// The name of a pool is `[network-][node-]range`, with ':' and '/' written '-'
/// (and "0" after a ':' at the end).
fn pool(
    object: &Value,
    nodes: &[&str],
    planned: &mut BTreeMap<(Option<String>, IpAddr), Planned>,
) -> Result<(IpNetwork, Option<String>), ImportError> {
    let place = name_of(object);
    let text = text_at(object, "/spec/range").unwrap_or_default();
    let range = match range::with_length(text) {
        Some((address, Some(length))) => IpNetwork::new(address, length).ok(),
        _ => None,
    };
    let range = range.ok_or_else(|| wrong(&place, format!("spec.range {text:?} is no CIDR")))?;
    let range = IpNetwork::new(range.network(), range.prefix()).unwrap_or(range);
    let name = text_at(object, "/metadata/name").unwrap_or_default();
    let prefix = name
        .strip_suffix(&object_name(text))
        .map(|rest| rest.trim_end_matches('-'));
    let (network_name, node) = network_and_node(prefix.unwrap_or_default(), nodes);
    for (offset, record) in object
        .pointer("/spec/allocations")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let place = format!("{place}, allocation {offset}");
        let address = offset
            .parse::<u128>()
            .ok()
            .and_then(|offset| bits(range.network()).checked_add(offset))
            .map(|bits| from_bits(range.is_ipv4(), bits))
            .filter(|address| range.contains(*address))
            .ok_or_else(|| wrong(&place, format!("is no offset in {range}")))?;
        let container = text_at(record, "/id").unwrap_or_default();
        planned.insert(
            (network_name.clone(), address),
            Planned {
                address,
                range,
                network_name: network_name.clone(),
                node: node.clone(),
                container: container.to_owned(),
                interface: text_at(record, "/ifname").map(str::to_owned),
                pod: text_at(record, "/podref").and_then(podref),
            },
        );
    }
    Ok((range, network_name))
}

/// What stands before the range in a pool's name.
fn network_and_node(prefix: &str, nodes: &[&str]) -> (Option<String>, Option<String>) {
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    for node in nodes {
        if let Some(network) = prefix.strip_suffix(node)
            && (network.is_empty() || network.ends_with('-'))
        {
            return (some(network.trim_end_matches('-')), some(node));
        }
    }
    (some(prefix), None)
}

/// A reservation adds what its pool lacks; most say what the pool says.
fn reservation(
    object: &Value,
    ranges: &[(IpNetwork, Option<String>)],
    planned: &mut BTreeMap<(Option<String>, IpAddr), Planned>,
) -> Result<(), ImportError> {
    let place = name_of(object);
    let name = text_at(object, "/metadata/name").unwrap_or_default();
    let (address, network_name) = reserved(name, ranges)
        .ok_or_else(|| wrong(&place, "its name is no address of any pool in the file"))?;
    let key = (network_name.clone(), address);
    if planned.contains_key(&key) {
        return Ok(());
    }
    let found = ranges
        .iter()
        .find(|(range, of)| range.contains(address) && *of == network_name);
    let Some((range, _)) = found else {
        return Err(wrong(place, format!("no pool in the file has {address}")));
    };
    planned.insert(
        key,
        Planned {
            address,
            range: *range,
            network_name,
            node: None,
            container: text_at(object, "/spec/containerid")
                .unwrap_or_default()
                .to_owned(),
            interface: text_at(object, "/spec/ifname").map(str::to_owned),
            pod: text_at(object, "/spec/podref").and_then(podref),
        },
    );
    Ok(())
}

/// The address that a reservation's name stands for. The name alone is
/// ambiguous ("-" is ':' or part of a network name), the pools are not.
fn reserved(
    name: &str,
    ranges: &[(IpNetwork, Option<String>)],
) -> Option<(IpAddr, Option<String>)> {
    let mut networks: Vec<Option<String>> = ranges.iter().map(|(_, name)| name.clone()).collect();
    networks.push(None);
    networks.iter().find_map(|network| {
        let rest = match network {
            None => name,
            Some(network) => name.strip_prefix(network.as_str())?.strip_prefix('-')?,
        };
        let address: IpAddr = rest
            .parse()
            .ok()
            .or_else(|| rest.replace('-', ":").parse().ok())?;
        let fits =
            |(range, of): &(IpNetwork, Option<String>)| range.contains(address) && of == network;
        ranges.iter().any(fits).then(|| (address, network.clone()))
    })
}

fn text_at<'v>(value: &'v Value, pointer: &str) -> Option<&'v str> {
    value.pointer(pointer)?.as_str()
}

/// How whereabouts writes a range or an address as an object's name.
fn object_name(text: &str) -> String {
    let name = text.replace([':', '/'], "-");
    if text.ends_with(':') {
        name + "0"
    } else {
        name
    }
}

fn podref(text: &str) -> Option<(String, String)> {
    let (namespace, name) = text.split_once('/')?;
    Some((namespace.to_owned(), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ip_pool(name: &str, range: &str, allocations: Value) -> Value {
        json!({"kind": "IPPool", "metadata": {"name": name},
               "spec": {"range": range, "allocations": allocations}})
    }

    #[test]
    fn offsets_are_of_128_bits() {
        let record = json!({"id": "c1", "podref": "a/b", "ifname": "net1"});
        for (range, offset, address) in [
            ("192.168.1.0/24", "1", "192.168.1.1"),
            ("192.168.3.0/16", "1024", "192.168.4.0"),
            (
                "2001:db8::/64",
                "9223372036854775809",
                "2001:db8::8000:0:0:1",
            ),
            (
                "2001:db8::/32",
                "39614081257132168796771975168",
                "2001:db8:8000::",
            ),
        ] {
            let name = object_name(range);
            let mut allocations = json!({});
            allocations[offset] = record.clone();
            let planned = whereabouts(&[ip_pool(&name, range, allocations)]).unwrap();
            assert_eq!(planned[0].address, address.parse::<IpAddr>().unwrap());
            assert_eq!(
                (
                    planned[0].container.as_str(),
                    planned[0].network_name.as_deref()
                ),
                ("c1", None)
            );
            assert_eq!(planned[0].pod, Some(("a".into(), "b".into())));
        }
        for offset in ["256", "-1", "x", "340282366920938463463374607431768211456"] {
            let mut allocations = json!({});
            allocations[offset] = record.clone();
            assert!(
                whereabouts(&[ip_pool("p", "192.168.1.0/24", allocations)]).is_err(),
                "{offset}"
            );
        }
    }

    #[test]
    fn names_tell_networks_and_addresses() {
        let none = json!({});
        let pools = [
            ip_pool("10.0.0.0-8", "10.0.0.0/8", none.clone()),
            ip_pool("test-10.0.0.0-8", "10.0.0.0/8", none.clone()),
            ip_pool("fd00-1---64", "fd00:1::/64", none),
        ];
        let of = |name: &str| {
            let reservation = json!({"kind": "OverlappingRangeIPReservation",
                "metadata": {"name": name}, "spec": {"podref": "a/b", "ifname": "net1"}});
            let list =
                json!({"kind": "List", "items": [pools[0], pools[1], pools[2], reservation]});
            whereabouts(&[list]).map(|mut planned| planned.remove(0))
        };
        assert_eq!(of("10.1.2.3").unwrap().network_name, None);
        assert_eq!(
            of("test-10.1.2.3").unwrap().network_name.as_deref(),
            Some("test")
        );
        assert_eq!(
            of("fd00-1--5").unwrap().address,
            "fd00:1::5".parse::<IpAddr>().unwrap()
        );
        assert!(of("192.168.1.5").is_err() && of("junk").is_err());
        assert!(whereabouts(&[json!({"kind": "Pod", "metadata": {"name": "x"}})]).is_err());
    }

    #[test]
    fn pools_of_node_slices_name_their_node() {
        let slices = json!({"kind": "NodeSlicePool", "metadata": {"name": "net"},
            "status": {"allocations": [{"nodeName": "gpu-7", "sliceRange": "10.0.0.0/10"}, {"nodeName": ""}]}});
        let record = json!({"5": {"id": "c1", "podref": "a/b"}});
        for (name, network, node) in [
            ("gpu-7-10.0.0.0-10", None, Some("gpu-7")),
            ("blue-gpu-7-10.0.0.0-10", Some("blue"), Some("gpu-7")),
            ("blue-10.0.0.0-10", Some("blue"), None),
        ] {
            let pool = ip_pool(name, "10.0.0.0/10", record.clone());
            let planned = whereabouts(&[slices.clone(), pool]).unwrap();
            let got = (
                planned[0].network_name.as_deref(),
                planned[0].node.as_deref(),
            );
            assert_eq!(got, (network, node), "{name}");
        }
    }

    #[test]
    fn a_reservation_repeats_its_pool() {
        let pool = ip_pool(
            "10.0.0.0-24",
            "10.0.0.0/24",
            json!({"5": {"id": "c1", "podref": "a/b"}}),
        );
        let again = json!({"kind": "OverlappingRangeIPReservation", "metadata": {"name": "10.0.0.5"},
            "spec": {"podref": "a/b"}});
        let planned = whereabouts(&[pool, again]).unwrap();
        assert_eq!(planned.len(), 1);
        assert_eq!(planned[0].container, "c1");
    }

    #[test]
    fn host_local_files_are_read() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
        write("10.0.0.5", "c1\r\neth0");
        write("10.0.0.6", "c2\n");
        write("10.0.0.7", "");
        write("fd00__9", "c3\r\nnet1");
        write("lock", "");
        write("last_reserved_ip.0", "10.0.0.7");
        let ranges = ["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()];
        let (planned, empty) = host_local(place.path(), &ranges).unwrap();
        let got: Vec<_> = planned
            .iter()
            .map(|p| (p.container.as_str(), p.interface.as_deref()))
            .collect();
        assert_eq!(
            got,
            [
                ("c1", Some("eth0")),
                ("c2", Some("eth0")),
                ("c3", Some("net1"))
            ]
        );
        assert_eq!(empty, ["10.0.0.7"]);
        assert!(host_local(place.path(), &ranges[..1]).is_err());
        write("junk", "");
        assert!(host_local(place.path(), &ranges).is_err());
    }
}
