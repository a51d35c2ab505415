//! Networks of a plan, and the addresses that pods get in them. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, bail, ensure};
use hca::FunctionKind;
use ipam::range::{bits, from_bits};
use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::decide::{Mode, Options, PlanPool};
use super::read::{PlanHca, PlanNode};
use crate::documents::put;

/// Pods of a node on one rail of a shared pool, for which there are addresses.
const SHARED_PODS: usize = 16;

/// A `NetworkAttachmentDefinition`.
#[derive(Debug)]
pub(crate) struct PlanNetwork {
    pub name: String,
    pub resource: String,
    pub plugin: Value,
    /// Reasons of the keys, as comments.
    pub comments: Vec<String>,
    /// Positions of NICs are not their rails.
    pub needs_rails: bool,
    /// NICs keep addresses that DHCP gave to the host.
    pub is_leased: bool,
}

fn has_netdevs(pool: &PlanPool<'_>) -> bool {
    let mut hcas = pool.hcas.iter();
    hcas.all(|hca| hca.facts.netdev_names().next().is_some())
}

/// Without an interface, only the RDMA device can be moved, and only by a network that is not late.
pub(crate) fn needs_network(pool: &PlanPool<'_>) -> bool {
    let moves = pool.mode == Mode::Exclusive && pool.nodes.iter().any(|node| node.exclusive_netns);
    has_netdevs(pool) || (moves && pool.hcas.iter().all(|hca| hca.link() == "infiniband"))
}

/// Nobody asked for other addresses, and NICs move with those they have.
pub(crate) fn may_keep_addresses(pool: &PlanPool<'_>, options: &Options) -> bool {
    let is_asked = options.range.is_some() || options.per_node_prefix.is_some();
    !is_asked && pool.mode != Mode::Shared
}

fn keeps_addresses(pool: &PlanPool<'_>, options: &Options) -> bool {
    // Addresses of a NIC that a pod has are not visible.
    let mut visible = pool.hcas.iter().filter(|hca| hca.mtu.is_some()).peekable();
    let is_visible = visible.peek().is_some();
    may_keep_addresses(pool, options) && is_visible && visible.all(|hca| !hca.addresses.is_empty())
}

/// A network for each pool that needs one, and what was assumed.
///
/// # Errors
/// A flag does not fit what the nodes have.
pub(crate) fn networks(
    pools: &[PlanPool<'_>],
    nodes: &[PlanNode],
    options: &Options,
) -> anyhow::Result<(Vec<PlanNetwork>, Vec<String>)> {
    let (mut networks, mut assumed) = (Vec::new(), Vec::new());
    let leasing = pools
        .iter()
        .filter(|pool| has_netdevs(pool) && !keeps_addresses(pool, options));
    let count = leasing.map(|pool| pool.rails.len() * ports(pool).len());
    let count: usize = count.sum();
    ensure!(
        count > 0 || (options.range.is_none() && options.per_node_prefix.is_none()),
        "--range and --per-node-prefix have no effect: no network of this plan has addresses"
    );
    let whole = |range: IpNetwork| IpNetwork::new(range.network(), range.prefix());
    let mut range = options.range.filter(|_| count > 0).map(whole).transpose()?;
    if options.range.is_none() && count > 0 {
        let free = free_range(nodes, count)
            .context("no private range is free of the nodes' addresses: set --range CIDR")?;
        assumed.push(format!(
            "{free} for pods: no node has an address in it; set yours by --range CIDR"
        ));
        range = Some(free);
    }
    let slices = range.map(|range| split(range, count)).transpose()?;
    let mut slices = slices.into_iter().flatten();
    for pool in pools {
        check_vlan(pool, options)?;
        if keeps_addresses(pool, options) {
            assumed.push(format!(
                "pods of {} keep the addresses that the NICs have on the host; --range CIDR sets others",
                pool.resource
            ));
        }
        for port in ports(pool).into_iter().filter(|_| needs_network(pool)) {
            networks.push(network(pool, port, range, &mut slices, options)?);
        }
    }
    Ok((networks, assumed))
}

/// A VLAN is set through the PF of a VF.
fn check_vlan(pool: &PlanPool<'_>, options: &Options) -> anyhow::Result<()> {
    let has_pf = |hca: &PlanHca| hca.kind() == FunctionKind::Vf && !hca.facts.pf_netdevs.is_empty();
    let is_fit = |hca: &PlanHca| pool.mode != Mode::Shared && has_pf(hca) && hca.link() == "ether";
    let unfit = pool.hcas.iter().find(|hca| !is_fit(hca));
    let (Some(vlan), Some(unfit)) = (options.vlan, unfit) else {
        return Ok(());
    };
    let remedy = match (unfit.link(), pool.mode) {
        ("infiniband", _) => "InfiniBand has partitions: set pkey in a network of your own",
        (_, Mode::Shared) => "a macvlan has no VLAN: make VFs and set --mode exclusive",
        _ => "only VFs whose PF has a netdev on the node: make VFs, or set it on the switch port",
    };
    bail!(
        "--vlan {vlan} cannot be set on {} ({}): {remedy}",
        unfit.names(),
        pool.resource
    )
}

/// The ports that a pool has networks for: those that all of its HCAs have, where these have several
/// netdevs; else none by number.
fn ports(pool: &PlanPool<'_>) -> Vec<Option<u32>> {
    let of_hcas = pool.hcas.iter().map(|hca| hca.ports());
    let common = of_hcas.reduce(|a, b| &a & &b).unwrap_or_default();
    match common.is_empty() {
        true => vec![None],
        false => common.into_iter().map(Some).collect(),
    }
}

fn network(
    pool: &PlanPool<'_>,
    port: Option<u32>,
    whole: Option<IpNetwork>,
    slices: &mut impl Iterator<Item = IpNetwork>,
    options: &Options,
) -> anyhow::Result<PlanNetwork> {
    let link = pool.hcas.first().map_or("other", |hca| hca.link());
    let (is_interface, keeps) = (has_netdevs(pool), keeps_addresses(pool, options));
    let is_several = pool.most_on_rail > 1;
    let mut comments = vec![match is_several || !is_interface {
        true => "A pod names it once for each unit.".to_owned(),
        false => "A pod names it once and gets an interface for each of its HCAs.".to_owned(),
    }];
    let attach = match (is_interface, pool.mode, link) {
        (false, ..) => "rdma-only",
        (_, Mode::Shared, "infiniband") => "ipoib",
        (_, Mode::Shared, _) => "macvlan",
        _ => "move",
    };
    let mut plugin = json!({
        "type": "rdma-netdev", "attach": attach, "capabilities": {"deviceID": true},
    });
    let suffix = port.filter(|_| ports(pool).len() > 1);
    if is_interface && !is_several {
        let names = match (keeps, suffix) {
            (true, _) => "{host}".to_owned(),
            (false, None) => "rdma{rail}".to_owned(),
            (false, Some(port)) => format!("rdma{{rail}}p{port}"),
        };
        put(&mut plugin, "devices", json!("all"));
        put(&mut plugin, "names", json!(names));
    }
    if let Some(port) = port.filter(|_| is_interface) {
        put(&mut plugin, "port", json!(port));
        comments.push(format!("port {port}: these HCAs have several netdevs."));
    }
    let mtu = pool.hcas.iter().filter_map(|hca| hca.mtu).min();
    if let Some(mtu) = mtu.filter(|mtu| *mtu > 1500 && is_interface && link == "ether") {
        put(&mut plugin, "mtu", json!(mtu));
        comments.push(format!(
            "mtu {mtu}: the lowest that these NICs have on the nodes."
        ));
    }
    if let Some(vlan) = options.vlan {
        put(&mut plugin, "vlan", json!(vlan));
    }
    if keeps {
        comments
            .push("Without ipam each NIC keeps the addresses that it has on its node.".to_owned());
    } else if let Some(whole) = whole.filter(|_| is_interface) {
        let mut ranges = BTreeMap::new();
        for rail in &pool.rails {
            let slice = slices.next().context("a rail has no range")?;
            check_size(slice, whole, pool, options)?;
            let mut range = json!({"range": slice});
            if let Some(prefix) = options.per_node_prefix {
                let part = json!({"prefix": prefix, "gateway": "first"});
                put(&mut range, "perNode", part);
            }
            ranges.insert(rail, range);
        }
        let mut ipam = match ranges.pop_first() {
            Some((_, only)) if ranges.is_empty() => only,
            first => {
                ranges.extend(first);
                json!({"ranges": ranges})
            }
        };
        put(&mut ipam, "type", json!("rdma-ipam"));
        let divided = "A node has a network of each range; the first address is its gateway.";
        let flat = "Each range is one subnet without a gateway. Routed fabrics: --per-node-prefix.";
        if options.per_node_prefix.is_some() {
            put(&mut ipam, "routes", json!([{"dst": whole}]));
            comments.push(divided.to_owned());
        } else {
            comments.push(flat.to_owned());
        }
        put(&mut plugin, "ipam", ipam);
        if options.range.is_none() {
            comments.push("ASSUMED: the ranges; --range CIDR sets yours.".to_owned());
        }
    }
    let mut addresses = pool.hcas.iter().flat_map(|hca| &hca.addresses);
    let name = pool.resource.replace('/', "-");
    Ok(PlanNetwork {
        name: suffix.map_or(name.clone(), |port| format!("{name}-p{port}")),
        resource: pool.resource.clone(),
        plugin,
        comments,
        needs_rails: is_interface && !pool.is_in_order && (!is_several || pool.rails.len() > 1),
        is_leased: keeps && addresses.any(|address| address.dynamic),
    })
}

/// Bits of a number that is counted from 0.
fn log2(count: usize) -> u8 {
    let zeros = count.next_power_of_two().trailing_zeros();
    zeros.try_into().unwrap_or(u8::MAX)
}

/// The equal parts of a range, a power of two of them.
fn split(range: IpNetwork, count: usize) -> anyhow::Result<Vec<IpNetwork>> {
    let width: u8 = if range.is_ipv4() { 32 } else { 128 };
    let prefix = range.prefix().saturating_add(log2(count));
    ensure!(
        prefix <= width,
        "--range {range} is too small: it cannot be split into {count} rails"
    );
    let step = 1_u128.checked_shl((width - prefix).into()).unwrap_or(0);
    let first = bits(range.network());
    let part = |index: usize| {
        let address = from_bits(range.is_ipv4(), first + step * index as u128);
        Ok(IpNetwork::new(address, prefix)?)
    };
    (0..count).map(part).collect()
}

/// Whether a rail's part is large enough for its nodes.
fn check_size(
    slice: IpNetwork,
    whole: IpNetwork,
    pool: &PlanPool<'_>,
    options: &Options,
) -> anyhow::Result<()> {
    let width: u8 = if slice.is_ipv4() { 32 } else { 128 };
    let nodes = pool.nodes.len();
    let units = match pool.mode {
        Mode::Shared => SHARED_PODS,
        _ => pool.most_on_rail,
    };
    let needed = match options.per_node_prefix {
        // With a gateway; the ends of a network are not leased, but for a pair.
        Some(prefix) => {
            let spare = log2(if units == 1 { 2 } else { units + 3 });
            ensure!(
                prefix.saturating_add(spare) <= width,
                "--per-node-prefix {prefix} is too long: for {units} addresses of a rail and a gateway a \
                 node needs a /{}",
                width - spare
            );
            prefix.saturating_sub(log2(nodes))
        }
        None => width.saturating_sub(log2(nodes * units + 2)),
    };
    ensure!(
        slice.prefix() <= needed,
        "--range {whole} is too small: {nodes} nodes need a /{needed} of it for each rail, but get {slice}; \
         set a /{} or larger",
        needed.saturating_sub(slice.prefix() - whole.prefix())
    );
    Ok(())
}

/// A network of a node that overlaps a range, and the node.
pub(crate) fn overlapped(nodes: &[PlanNode], range: IpNetwork) -> Option<(&str, IpNetwork)> {
    let networks = nodes.iter().flat_map(|node| {
        let networks = node.addresses.iter();
        networks
            .filter_map(|one| Some((&*node.name, IpNetwork::new(one.address, one.prefix).ok()?)))
    });
    let mut networks = networks;
    networks.find(|(_, one)| one.contains(range.network()) || range.contains(one.network()))
}

/// A private range with a /16 for each of so many rails, which overlaps no network of a node.
fn free_range(nodes: &[PlanNode], count: usize) -> Option<IpNetwork> {
    let prefix = 16_u8.checked_sub(log2(count))?;
    let tens = (64..=255).chain(0..64).map(|second| (10, second));
    let all = tens.chain((16..32).map(|second| (172, second)));
    let aligned = all.filter(|(_, second)| usize::from(*second) % count.next_power_of_two() == 0);
    let address = |(first, second)| IpAddr::V4(Ipv4Addr::new(first, second, 0, 0));
    let mut ranges = aligned.filter_map(|bytes| IpNetwork::new(address(bytes), prefix).ok());
    ranges.find(|range| overlapped(nodes, *range).is_none())
}
