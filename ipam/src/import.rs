//! Reading what other IPAM plugins left: host-local's directories, whereabouts'
//! objects. Pure but for the one function that reads a directory; what is found
//! is a plan, and leasing it is the store's business.

use crate::range::{self, bits, from_bits};
use crate::whereabouts::normalized;
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

/// What whereabouts' objects say.
#[derive(Debug, Default)]
pub struct Plan {
    /// Addresses to take over.
    pub leases: Vec<Planned>,
    /// What was skipped, or needs a check afterwards: for people.
    pub remarks: Vec<String>,
}

/// A `NodeSlicePool`: the range that is cut, and which node has which slice.
#[derive(Debug)]
struct Slices<'v> {
    name: &'v str,
    range: IpNetwork,
    slices: Vec<(&'v str, IpNetwork)>,
}

/// The leases in whereabouts' objects, as `kubectl get -o yaml` or `-o json`
/// prints them: `IPPool`s, and the reservations that no pool has.
///
/// What stands before the range in a pool's name is a `network_name`, a node, or
/// both, with no separator between them. `NodeSlicePool` objects name the
/// nodes; without them, each must be among `network_names`.
///
/// # Errors
/// [`ImportError`] naming the object that cannot be made sense of, and the pools
/// that give one address to two holders.
pub fn whereabouts(documents: &[Value], network_names: &[String]) -> Result<Plan, ImportError> {
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
    let mut slices = Vec::new();
    for object in &objects {
        match text_at(object, "/kind") {
            Some("NodeSlicePool") => slices.push(node_slices(object)?),
            Some("IPPool" | "OverlappingRangeIPReservation") => {}
            other => {
                let why = match other {
                    Some(_) => "it is none of whereabouts' objects",
                    None => "it has no kind",
                };
                let why = format!("{why}: IPPool, NodeSlicePool, OverlappingRangeIPReservation");
                return Err(wrong(name_of(object), why));
            }
        }
    }
    let of_kind = |kind: &'static str| {
        objects
            .iter()
            .filter(move |object| text_at(object, "/kind") == Some(kind))
    };
    let mut import = Whereabouts {
        slices,
        network_names,
        planned: BTreeMap::new(),
        ranges: Vec::new(),
        doubles: Vec::new(),
        remarks: Vec::new(),
    };
    for object in of_kind("IPPool") {
        import.pool(object)?;
    }
    for object in of_kind("OverlappingRangeIPReservation") {
        import.reservation(object);
    }
    if !import.doubles.is_empty() {
        let why = format!(
            "addresses with two holders; find out which pod is alive and delete the other's \
             record: {}",
            import.doubles.join("; ")
        );
        return Err(wrong("IPPool", why));
    }
    Ok(Plan {
        leases: import
            .planned
            .into_values()
            .map(|(planned, _)| planned)
            .collect(),
        remarks: import.remarks,
    })
}

fn name_of(object: &Value) -> String {
    let kind = text_at(object, "/kind").unwrap_or("object");
    format!(
        "{kind} {}",
        text_at(object, "/metadata/name").unwrap_or("without name")
    )
}

fn network(text: &str) -> Option<IpNetwork> {
    match range::with_length(text) {
        Some((address, Some(length))) => {
            let range = IpNetwork::new(address, length).ok()?;
            IpNetwork::new(range.network(), range.prefix()).ok()
        }
        _ => None,
    }
}

fn node_slices(object: &Value) -> Result<Slices<'_>, ImportError> {
    let text = text_at(object, "/spec/range").unwrap_or_default();
    let range = network(text)
        .ok_or_else(|| wrong(name_of(object), format!("spec.range {text:?} is no CIDR")))?;
    let allocations = object
        .pointer("/status/allocations")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let slice = |slice| {
        let node = text_at(slice, "/nodeName").filter(|node| !node.is_empty())?;
        Some((node, network(text_at(slice, "/sliceRange")?)?))
    };
    Ok(Slices {
        name: text_at(object, "/metadata/name").unwrap_or_default(),
        range,
        slices: allocations.filter_map(slice).collect(),
    })
}

/// One import in progress.
struct Whereabouts<'v> {
    slices: Vec<Slices<'v>>,
    network_names: &'v [String],
    /// By network name and address, with the pool's name.
    planned: BTreeMap<(Option<String>, IpAddr), (Planned, String)>,
    ranges: Vec<(IpNetwork, Option<String>)>,
    doubles: Vec<String>,
    remarks: Vec<String>,
}

impl Whereabouts<'_> {
    /// The name of a pool is `[network-][node-]range`, with ':' and '/' written '-'
    /// (and "0" after a ':' at the end).
    fn pool(&mut self, object: &Value) -> Result<(), ImportError> {
        let place = name_of(object);
        let text = text_at(object, "/spec/range").unwrap_or_default();
        let range = network(text)
            .ok_or_else(|| wrong(&place, format!("spec.range {text:?} is no CIDR")))?;
        let name = text_at(object, "/metadata/name").unwrap_or_default();
        let prefix = name
            .strip_suffix(&normalized(text))
            .map(|rest| rest.trim_end_matches('-'));
        let whose = self
            .whose(prefix.unwrap_or_default(), range)
            .map_err(|why| wrong(&place, why))?;
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
            let planned = Planned {
                address,
                range: whose.range,
                network_name: whose.network_name.clone(),
                node: whose.node.clone(),
                container: text_at(record, "/id").unwrap_or_default().to_owned(),
                interface: text_at(record, "/ifname").map(str::to_owned),
                pod: text_at(record, "/podref").and_then(podref),
            };
            self.plan(planned, name);
        }
        self.ranges.push((whose.range, whose.network_name));
        Ok(())
    }

    fn plan(&mut self, planned: Planned, pool: &str) {
        let key = (planned.network_name.clone(), planned.address);
        match self.planned.get(&key) {
            None => {
                self.planned.insert(key, (planned, pool.to_owned()));
            }
            Some((other, of)) => {
                let same = |a: &Planned, b: &Planned| {
                    a.container == b.container && a.interface == b.interface && a.pod == b.pod
                };
                if !same(other, &planned) {
                    self.doubles.push(format!(
                        "{} is {} in {of} and {} in {pool}",
                        planned.address,
                        holder_of(other),
                        holder_of(&planned)
                    ));
                }
            }
        }
    }

    /// Network name, node and whole range of a pool, by what stands before the range
    /// in its name. A `NodeSlicePool` is called by its network's `network_name`, where
    /// it has one.
    fn whose(&self, prefix: &str, range: IpNetwork) -> Result<Whose, String> {
        let mut found: Vec<Whose> = Vec::new();
        let mut ends_with_a_node = false;
        for slices in &self.slices {
            for (node, slice) in &slices.slices {
                let network_name = match prefix.strip_suffix(node) {
                    Some("") => None,
                    Some(rest) if rest.ends_with('-') => rest.strip_suffix('-'),
                    Some(_) | None => continue,
                };
                ends_with_a_node = true;
                let whose = Whose {
                    network_name: network_name.map(str::to_owned),
                    node: Some((*node).to_owned()),
                    range: slices.range,
                };
                let fits = network_name.is_none_or(|name| name == slices.name);
                if fits && *slice == range && !found.contains(&whose) {
                    found.push(whose);
                }
            }
        }
        let declared = self.network_names.iter().any(|known| known == prefix);
        let no_node = !self.slices.is_empty() && !ends_with_a_node;
        match found.len() {
            1 => Ok(found.remove(0)),
            0 if prefix.is_empty() || declared || no_node => Ok(Whose {
                network_name: Some(prefix.to_owned()).filter(|name| !name.is_empty()),
                node: None,
                range,
            }),
            0 => Err(format!(
                "{prefix:?} before its range is a network_name, or a node that has a slice: \
                 export NodeSlicePools too, or say --network-name {prefix}"
            )),
            _ => Err(format!(
                "{prefix:?} before its range is a node, with or without a network_name, in more \
                 than one way: import the networks one by one"
            )),
        }
    }

    /// A reservation adds what its pool lacks; most say what the pool says. One
    /// that no pool has is held all the same: its pod may live, and no DEL may
    /// follow.
    fn reservation(&mut self, object: &Value) {
        let place = name_of(object);
        let name = text_at(object, "/metadata/name").unwrap_or_default();
        let Some((address, network_name)) = reserved(name, &self.ranges) else {
            self.remarks.push(format!(
                "{place}: not imported, its name is no address of any pool in the file"
            ));
            return;
        };
        let key = (network_name.clone(), address);
        if self.planned.contains_key(&key) {
            return;
        }
        let range = (self.ranges.iter())
            .find(|(range, of)| range.contains(address) && *of == network_name)
            .map(|(range, _)| *range);
        let Some(range) = range else { return };
        let container = text_at(object, "/spec/containerid").unwrap_or_default();
        let planned = Planned {
            address,
            range,
            network_name,
            node: None,
            container: match container {
                // whereabouts never writes it.
                "" => format!("reservation-{}", address.to_string().replace(':', "-")),
                id => id.to_owned(),
            },
            interface: text_at(object, "/spec/ifname")
                .filter(|name| !name.is_empty())
                .map(str::to_owned),
            pod: text_at(object, "/spec/podref").and_then(podref),
        };
        self.remarks.push(format!(
            "{place}: {}, but no pool has it; it is held until rdma-ipam release {address}, \
             because that pod may be alive",
            holder_of(&planned)
        ));
        self.planned.insert(key, (planned, place));
    }
}

/// Whose addresses a pool has.
#[derive(Debug, PartialEq, Eq)]
struct Whose {
    network_name: Option<String>,
    node: Option<String>,
    range: IpNetwork,
}

fn holder_of(planned: &Planned) -> String {
    match &planned.pod {
        Some((namespace, name)) => format!("pod {namespace}/{name}'s"),
        None => format!("container {:?}'s", planned.container),
    }
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
            let name = normalized(range);
            let mut allocations = json!({});
            allocations[offset] = record.clone();
            let planned = whereabouts(&[ip_pool(&name, range, allocations)], &[])
                .unwrap()
                .leases;
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
                whereabouts(
                    &[ip_pool("192.168.1.0-24", "192.168.1.0/24", allocations)],
                    &[]
                )
                .is_err(),
                "{offset}"
            );
        }
    }

    #[test]
    fn names_contain_networks_and_addresses() {
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
            whereabouts(&[list], &["test".to_owned()]).map(|plan| (plan.leases, plan.remarks))
        };
        let leased = |name: &str| {
            let (mut leases, remarks) = of(name).unwrap();
            assert!(remarks[0].contains("rdma-ipam release"), "{remarks:?}");
            leases.remove(0)
        };
        assert_eq!(leased("10.1.2.3").network_name, None);
        assert_eq!(leased("10.1.2.3").container, "reservation-10.1.2.3");
        assert_eq!(
            leased("test-10.1.2.3").network_name.as_deref(),
            Some("test")
        );
        assert_eq!(
            leased("fd00-1--5").address,
            "fd00:1::5".parse::<IpAddr>().unwrap()
        );
        for stray in ["192.168.1.5", "junk"] {
            let (leases, remarks) = of(stray).unwrap();
            assert_eq!((leases.len(), remarks.len()), (0, 1), "{stray}");
            assert!(remarks[0].contains("not imported"), "{remarks:?}");
        }
        let pod = json!({"kind": "Pod", "metadata": {"name": "x"}});
        assert!(whereabouts(&[pod], &[]).is_err());
    }

    fn node_slice_pool(name: &str, range: &str, slices: &[(&str, &str)]) -> Value {
        let allocations: Vec<Value> = slices
            .iter()
            .map(|(node, slice)| json!({"nodeName": node, "sliceRange": slice}))
            .collect();
        json!({"kind": "NodeSlicePool", "metadata": {"name": name},
               "spec": {"range": range}, "status": {"allocations": allocations}})
    }

    #[test]
    fn pools_of_node_slices_name_their_node() {
        let slices = [
            ("7", "10.0.0.0/12"),
            ("gpu-7", "10.16.0.0/12"),
            ("", "10.32.0.0/12"),
        ];
        let net = node_slice_pool("net", "10.0.0.0/10", &slices);
        let blue = node_slice_pool("blue", "10.0.0.0/10", &slices);
        let record = json!({"5": {"id": "c1", "podref": "a/b"}});
        for (name, range, expected) in [
            ("7-10.0.0.0-12", "10.0.0.0/12", (None, Some("7"))),
            ("gpu-7-10.16.0.0-12", "10.16.0.0/12", (None, Some("gpu-7"))),
            (
                "blue-gpu-7-10.16.0.0-12",
                "10.16.0.0/12",
                (Some("blue"), Some("gpu-7")),
            ),
            ("red-10.0.0.0-10", "10.0.0.0/10", (Some("red"), None)),
        ] {
            let pool = ip_pool(name, range, record.clone());
            let documents = [net.clone(), blue.clone(), pool];
            let planned = whereabouts(&documents, &[]).unwrap().leases;
            let got = (
                planned[0].network_name.as_deref(),
                planned[0].node.as_deref(),
            );
            assert_eq!(got, expected, "{name}");
            let whole: IpNetwork = "10.0.0.0/10".parse().unwrap();
            assert_eq!(planned[0].range, whole, "{name}: of the whole range");
        }
    }

    #[test]
    fn a_pool_that_may_be_a_slice_is_refused() {
        let record = json!({"5": {"id": "c1", "podref": "a/b"}});
        let pool = ip_pool("gpu-7-10.0.0.0-12", "10.0.0.0/12", record);
        let refused = whereabouts(std::slice::from_ref(&pool), &[]).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("NodeSlicePools") && text.contains("--network-name gpu-7"));
        let declared = whereabouts(std::slice::from_ref(&pool), &["gpu-7".to_owned()]).unwrap();
        assert_eq!(declared.leases[0].network_name.as_deref(), Some("gpu-7"));
        // A node's name, but not its slice.
        let slices = node_slice_pool("net", "10.0.0.0/10", &[("7", "10.16.0.0/12")]);
        assert!(whereabouts(&[slices, pool], &[]).is_err());
    }

    #[test]
    fn an_address_with_two_holders_is_said_and_neither_is_dropped() {
        let record = |pod: &str| json!({"5": {"id": pod, "podref": pod, "ifname": "net1"}});
        let small = ip_pool("10.0.0.0-24", "10.0.0.0/24", record("ml/a"));
        let large = ip_pool("10.0.0.0-16", "10.0.0.0/16", record("ml/b"));
        let text = whereabouts(&[small.clone(), large], &[])
            .unwrap_err()
            .to_string();
        for part in ["10.0.0.5", "ml/a", "ml/b", "10.0.0.0-24", "10.0.0.0-16"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let again = ip_pool("10.0.0.0-16", "10.0.0.0/16", record("ml/a"));
        assert_eq!(whereabouts(&[small, again], &[]).unwrap().leases.len(), 1);
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
        let plan = whereabouts(&[pool, again], &[]).unwrap();
        assert_eq!((plan.leases.len(), plan.remarks.len()), (1, 0));
        assert_eq!(plan.leases[0].container, "c1");
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
