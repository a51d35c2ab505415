//! Networks of a plan, and the addresses that pods get in them. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, bail, ensure};
use hca::LinkLayer;
use ipam::range::{bits, from_bits};
use ipnetwork::IpNetwork;
use rdma_device_plugin::candidate::{FunctionKind, link_type};
use serde_json::{Map, Value, json};

use super::decide::{Group, Mode, Options, Pool, are_positions, link};
use super::read::{Hca, Node};

/// Private networks, from which ranges are taken where no node has an address.
const PRIVATE: [([u8; 2], u8); 5] = [
    ([10, 64], 10),
    ([10, 128], 10),
    ([10, 192], 10),
    ([10, 0], 10),
    ([172, 16], 12),
];
/// Prefix of a rail's range in these.
const RAIL_PREFIX: u8 = 16;
/// Addresses of a node's block in a store of type `kubernetes`.
const BLOCK: u64 = 16;

/// A `NetworkAttachmentDefinition`.
#[derive(Debug)]
pub(crate) struct Network {
    pub name: String,
    pub resource: String,
    /// The plugin's keys.
    pub plugin: Value,
    /// Why they are so.
    pub comments: Vec<String>,
    pub rails: usize,
    /// Positions of NICs are not their rails.
    pub needs_rails: bool,
    /// NICs keep addresses that DHCP gave to the host.
    pub has_leased_addresses: bool,
    /// Its ranges are a guess.
    pub is_assumed: bool,
}

/// A pool's groups and rails.
struct Part<'p> {
    pool: &'p mut Pool,
    groups: Vec<&'p Group<'p>>,
    rails: BTreeSet<u32>,
    keeps_addresses: bool,
}

impl Part<'_> {
    fn hcas(&self) -> impl Iterator<Item = &Hca> {
        self.groups
            .iter()
            .flat_map(|group| group.hcas())
            .map(|(hca, _)| hca)
    }

    /// Most HCAs of a node on one rail.
    fn most_on_a_rail(&self) -> usize {
        let most = self.groups.iter().map(|group| group.most_on_a_rail());
        most.max().unwrap_or_default()
    }

    fn link(&self) -> &'static str {
        self.hcas().next().map_or("other", link)
    }
}

/// A network for each pool that needs one, and what was assumed.
///
/// # Errors
/// A flag does not fit what the nodes have.
pub(crate) fn networks(
    pools: &mut [Pool],
    groups: &[Group<'_>],
    nodes: &[Node],
    options: &Options,
) -> anyhow::Result<(Vec<Network>, Vec<String>)> {
    let mut parts = Vec::new();
    for pool in pools {
        let groups: Vec<&Group<'_>> = pool
            .groups
            .iter()
            .filter_map(|one| groups.get(*one))
            .collect();
        let numbers = groups
            .iter()
            .flat_map(|group| group.chosen.iter().map(|(_, rail)| *rail));
        let rails = numbers.collect();
        let mut part = Part {
            pool,
            groups,
            rails,
            keeps_addresses: false,
        };
        part.pool.without_network = without_network(&part);
        if let Some(vlan) = options.vlan {
            check_vlan(&part, vlan)?;
        }
        let has_address = |hca: &Hca| hca.addresses.iter().any(|one| one.address.is_ipv4());
        part.keeps_addresses = options.range.is_none()
            && part.pool.mode != Mode::Shared
            && part.hcas().all(has_address);
        if part.pool.without_network.is_none() {
            parts.push(part);
        }
    }
    let mut assumed = Vec::new();
    let leasing = parts
        .iter()
        .filter(|part| !part.keeps_addresses && has_netdevs(part));
    let count: usize = leasing.map(|part| part.rails.len()).sum();
    let range = match options.range {
        _ if count == 0 => None,
        Some(range) => Some(range),
        None => {
            let range = free_range(nodes, count).context(
                "every private range has an address of a node: name a range of pods' addresses by \
                 --range CIDR",
            )?;
            assumed.push(format!(
                "{range} for the addresses of pods, in which no node has an address; --range CIDR \
                 sets another one"
            ));
            Some(range)
        }
    };
    let slices = range
        .map(|range| split(range, count))
        .transpose()?
        .unwrap_or_default();
    let mut slices = slices.into_iter();
    let mut made = Vec::new();
    for part in &parts {
        let network = network(part, range, &mut slices, options)?;
        if part.keeps_addresses {
            assumed.push(format!(
                "pods of network {} keep the addresses that the NICs have on the host; --range CIDR \
                 gives them others",
                network.name
            ));
        }
        made.push(network);
    }
    Ok((made, assumed))
}

fn has_netdevs(part: &Part<'_>) -> bool {
    part.hcas()
        .all(|hca| hca.facts.netdev_names().next().is_some())
}

/// Why the pods of a pool need no network, if so.
fn without_network(part: &Part<'_>) -> Option<&'static str> {
    let mut nodes = part.groups.iter().flat_map(|group| &group.nodes);
    match () {
        () if has_netdevs(part) => None,
        () if part.link() == link_type(LinkLayer::Unknown) => {
            Some("Pods need no network: these HCAs have no netdev")
        }
        // Of late binding the network cannot be rdma-only.
        () if part.pool.mode == Mode::Exclusive && nodes.any(|node| node.exclusive_netns) => None,
        () => Some(
            "Pods need no network: without IPoIB these HCAs have no netdev, and in shared RDMA mode \
             verbs work without an interface",
        ),
    }
}

/// A VLAN is set through the PF of a VF.
fn check_vlan(part: &Part<'_>, vlan: u16) -> anyhow::Result<()> {
    let resource = &part.pool.resource;
    let remedy = match part.pool.mode {
        Mode::Shared => {
            "a macvlan has none of its own: make VFs and plan with --mode exclusive, or make \
                         a VLAN netdev on the host and set it as master of your own network"
        }
        _ if part.link() != link_type(LinkLayer::Ethernet) => {
            "InfiniBand has partitions: set pkey in your own network"
        }
        _ => {
            "a VLAN is set through the PF of a VF, which must have a netdev on the node: make VFs, or \
              set the VLAN on the switch port"
        }
    };
    let has_pf = |hca: &Hca| {
        let facts = &hca.facts;
        facts.function().kind == FunctionKind::Vf && !facts.pf_netdevs.is_empty()
    };
    let fits = part.pool.mode != Mode::Shared && part.hcas().all(has_pf);
    let unfit = part
        .hcas()
        .find(|hca| !has_pf(hca))
        .map(|hca| hca.facts.rdma_names().join(" "));
    ensure!(
        fits,
        "--vlan {vlan} cannot be set for {resource} ({}): {remedy}",
        unfit.unwrap_or_else(|| "shared".to_owned())
    );
    Ok(())
}

fn network(
    part: &Part<'_>,
    whole: Option<IpNetwork>,
    slices: &mut impl Iterator<Item = IpNetwork>,
    options: &Options,
) -> anyhow::Result<Network> {
    let pool = &part.pool;
    let mut comments = Vec::new();
    let mut plugin = Map::new();
    let mut put = |key: &str, value: Value| {
        plugin.insert(key.to_owned(), value);
    };
    put("type", json!("rdma-netdev"));
    put("capabilities", json!({"deviceID": true}));
    let is_several = part.most_on_a_rail() > 1;
    let is_interface = has_netdevs(part);
    put(
        "attach",
        match (is_interface, pool.mode, part.link()) {
            (false, ..) => json!("rdma-only"),
            (_, Mode::Shared, "infiniband") => json!("ipoib"),
            (_, Mode::Shared, _) => json!("macvlan"),
            _ => json!("move"),
        },
    );
    if !is_interface {
        comments.push("The RDMA device moves: without IPoIB there is no interface.".to_owned());
    } else if is_several {
        comments
            .push("Name it once for each unit: several HCAs of a node are on one rail.".to_owned());
    } else {
        let names = if part.keeps_addresses {
            "{host}"
        } else {
            "rdma{rail}"
        };
        put("devices", json!("all"));
        put("names", json!(names));
        comments.push("Name it once in a pod: an interface for each HCA of the pod.".to_owned());
    }
    let mtu = part.hcas().filter_map(|hca| hca.mtu).min();
    if let Some(mtu) = mtu.filter(|mtu| *mtu > 1500 && is_interface && part.link() == "ether") {
        put("mtu", json!(mtu));
        comments.push(format!("mtu {mtu}: the lowest of these NICs on the nodes."));
    }
    if let Some(vlan) = options.vlan {
        put("vlan", json!(vlan));
    }
    let is_leased = is_interface && !part.keeps_addresses;
    if part.keeps_addresses {
        comments.push("No ipam: each NIC keeps the addresses that it has on its node.".to_owned());
    }
    if let Some(whole) = whole.filter(|_| is_leased) {
        let mut ranges = Map::new();
        for rail in &part.rails {
            let slice = slices.next().context("a rail has no range")?;
            check_size(slice, whole, part, options)?;
            let mut range = json!({"range": slice});
            if let (Some(prefix), Some(range)) = (options.per_node_prefix, range.as_object_mut()) {
                range.insert(
                    "perNode".to_owned(),
                    json!({"prefix": prefix, "gateway": "first"}),
                );
            }
            ranges.insert(rail.to_string(), range);
        }
        let mut ipam = match (ranges.len(), ranges.values_mut().next()) {
            (1, Some(Value::Object(only))) => std::mem::take(only),
            _ => Map::from_iter([("ranges".to_owned(), Value::Object(ranges))]),
        };
        ipam.insert("type".to_owned(), json!("rdma-ipam"));
        if options.per_node_prefix.is_some() {
            ipam.insert("routes".to_owned(), json!([{"dst": whole}]));
            comments.push(
                "Each node has a network of each range; its first address is the gateway."
                    .to_owned(),
            );
        } else {
            comments.push(
                "Each rail is one subnet without a gateway; --per-node-prefix is for routed fabrics."
                    .to_owned(),
            );
        }
        put("ipam", Value::Object(ipam));
    }
    let is_dynamic = |hca: &Hca| {
        hca.addresses
            .iter()
            .any(|one| one.address.is_ipv4() && one.dynamic)
    };
    let needs_rails = is_interface
        && !are_positions(&part.groups, &part.rails)
        && (!is_several || part.rails.len() > 1);
    Ok(Network {
        name: pool.resource.replace('/', "-"),
        resource: pool.resource.clone(),
        comments,
        rails: if is_interface { part.rails.len() } else { 0 },
        needs_rails,
        has_leased_addresses: part.keeps_addresses && part.hcas().any(is_dynamic),
        is_assumed: is_leased && options.range.is_none(),
        plugin: Value::Object(plugin),
    })
}

/// The equal parts of a range, a power of two of them.
fn split(range: IpNetwork, count: usize) -> anyhow::Result<Vec<IpNetwork>> {
    let longer = u8::try_from(count.next_power_of_two().trailing_zeros())?;
    let v4 = range.is_ipv4();
    let width: u8 = if v4 { 32 } else { 128 };
    let prefix = range.prefix().saturating_add(longer);
    ensure!(
        prefix <= width,
        "--range {range} is too small: it cannot be split into {count} rails"
    );
    let first = bits(range.network());
    let step = 1_u128
        .checked_shl((width - prefix).into())
        .unwrap_or_default();
    let part = |index: usize| {
        let address = from_bits(v4, first + step * u128::try_from(index)?);
        Ok(IpNetwork::new(address, prefix)?)
    };
    (0..count).map(part).collect()
}

/// Whether a rail's part is large enough for its nodes.
fn check_size(
    slice: IpNetwork,
    whole: IpNetwork,
    part: &Part<'_>,
    options: &Options,
) -> anyhow::Result<()> {
    let width: u8 = if slice.is_ipv4() { 32 } else { 128 };
    let nodes: u64 = part
        .groups
        .iter()
        .map(|group| group.nodes.len() as u64)
        .sum();
    let log2 =
        |count: u64| u8::try_from(count.next_power_of_two().trailing_zeros()).unwrap_or(u8::MAX);
    let units = match part.pool.mode {
        Mode::Shared => BLOCK,
        Mode::Exclusive | Mode::Late => part.most_on_a_rail() as u64,
    };
    let needed = match options.per_node_prefix {
        Some(prefix) => {
            let spare = width.saturating_sub(prefix);
            // The first and the last address of a network larger than a pair are not leased.
            let usable = match spare {
                0 | 1 => 1_u64 << spare,
                _ => 1_u64.checked_shl(spare.into()).unwrap_or(u64::MAX) - 2,
            };
            ensure!(
                prefix <= width && usable > units,
                "--per-node-prefix {prefix} is too long: a node needs {units} addresses of a rail and a \
                 gateway"
            );
            prefix.saturating_sub(log2(nodes))
        }
        None => width.saturating_sub(log2(nodes * units + 2)),
    };
    if slice.prefix() > needed {
        let rails = slice.prefix() - whole.prefix();
        bail!(
            "--range {whole} is too small: each rail gets a /{} of it, but {nodes} nodes need a \
             /{needed}; name a /{} or larger",
            slice.prefix(),
            needed.saturating_sub(rails)
        );
    }
    Ok(())
}

/// A private range for so many rails that overlaps no network of a node.
fn free_range(nodes: &[Node], count: usize) -> Option<IpNetwork> {
    let shorter = u8::try_from(count.next_power_of_two().trailing_zeros()).ok()?;
    let prefix = RAIL_PREFIX.checked_sub(shorter)?;
    let used = nodes.iter().flat_map(|node| &node.addresses);
    let used: BTreeSet<IpNetwork> = used
        .filter_map(|one| IpNetwork::new(one.address, one.prefix).ok())
        .collect();
    let overlaps = |range: &IpNetwork| {
        used.iter()
            .any(|one| range.contains(one.network()) || one.contains(range.network()))
    };
    PRIVATE
        .into_iter()
        .filter(|(_, within)| prefix >= *within)
        .find_map(|([a, b], within)| {
            let base = u32::from(Ipv4Addr::new(a, b, 0, 0));
            let mut ranges = (0..1_u32 << (prefix - within)).filter_map(|index| {
                let address = IpAddr::V4((base + (index << (32 - prefix))).into());
                IpNetwork::new(address, prefix).ok()
            });
            ranges.find(|range| !overlaps(range))
        })
}
