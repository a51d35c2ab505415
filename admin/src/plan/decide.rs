//! A cluster's configuration from the facts of its nodes: HCAs for pods, groups of equal nodes, pools,
//! rails of the policy. Pure.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use clap::ValueEnum;
use hca::FunctionKind;
use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::network::{self, PlanNetwork};
use super::read::{PlanHca, PlanNode};
use super::select::{Keys, is_plain, selector};
use crate::documents::put;
use crate::findings::some_of;

/// Why an HCA of the fabric is not for pods.
const ASIDE: &str = "no GPU is next to it: for storage or other traffic";

/// What the administrator knows and the nodes do not.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// How pods get HCAs [default: late with GPUs, exclusive with several HCAs or VFs, else shared]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Addresses of pods; each rail gets an equal part [default: an unused private range]
    #[arg(long, value_name = "CIDR")]
    pub range: Option<IpNetwork>,
    /// Prefix length of each node's own network, for fabrics that route to nodes
    #[arg(long, value_name = "LENGTH", value_parser = clap::value_parser!(u8).range(16..=128))]
    pub per_node_prefix: Option<u8>,
    /// VLAN of VFs
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4094))]
    pub vlan: Option<u16>,
}

/// How pods get HCAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Each HCA has shares
    Shared,
    /// Each HCA is for one pod
    Exclusive,
    /// As exclusive; the HCAs are chosen next to the pod's GPUs
    Late,
}

/// The configuration of a cluster.
#[derive(Debug)]
pub(crate) struct ClusterPlan<'n> {
    pub groups: Vec<Group<'n>>,
    pub pools: Vec<PlanPool<'n>>,
    pub networks: Vec<PlanNetwork>,
    pub policy: Value,
    /// What was guessed.
    pub assumed: Vec<String>,
    pub warnings: Vec<String>,
}

/// Nodes with the same HCAs, GPUs and rails at the same PCI locations.
#[derive(Debug, Clone)]
pub(crate) struct Group<'n> {
    pub nodes: Vec<&'n PlanNode>,
    /// Of each HCA its rail, or why it is not for pods.
    pub usage: Vec<Result<u64, String>>,
    pub is_shared: bool,
}

/// A pool, with all HCAs of it.
#[derive(Debug)]
pub(crate) struct PlanPool<'n> {
    pub resource: String,
    pub mode: Mode,
    pub select: Keys,
    /// Positions of its groups.
    pub groups: Vec<usize>,
    pub nodes: Vec<&'n PlanNode>,
    pub hcas: Vec<&'n PlanHca>,
    pub rails: BTreeSet<u64>,
    /// Most HCAs of a node on one rail.
    pub most_on_rail: usize,
    /// The position of an HCA in the pool is its rail, on each node.
    pub is_in_order: bool,
    /// Some nodes have no such HCA.
    pub is_optional: bool,
}

impl<'n> Group<'n> {
    /// HCAs for pods, with their rails.
    fn hcas(&self) -> impl Iterator<Item = (&'n PlanHca, u64)> {
        let hcas = self
            .nodes
            .iter()
            .flat_map(|node| node.hcas.iter().zip(&self.usage));
        hcas.filter_map(|(hca, usage)| Some((hca, *usage.as_ref().ok()?)))
    }

    fn rails(&self) -> impl Iterator<Item = u64> {
        self.usage.iter().flatten().copied()
    }

    fn has_gpus(&self) -> bool {
        self.nodes.iter().any(|node| !node.gpus.is_empty())
    }
}

/// The configuration of a cluster of these nodes.
///
/// # Errors
/// A flag does not fit what the nodes have.
pub(crate) fn plan<'n>(
    nodes: &'n [PlanNode],
    options: &Options,
) -> anyhow::Result<ClusterPlan<'n>> {
    let mut groups = groups(nodes, options.mode);
    let mut odd = Vec::new();
    let pools = loop {
        match pools(&groups, options.mode) {
            Ok(pools) => break pools,
            // Plan for the others without this group.
            Err(index) => odd.push(groups.remove(index)),
        }
    };
    let reasons = groups.iter().flat_map(|group| &group.usage);
    let reasons: BTreeSet<&String> = reasons.filter_map(|one| one.as_ref().err()).collect();
    let reasons: Vec<&str> = reasons.into_iter().take(5).map(String::as_str).collect();
    ensure!(
        !pools.is_empty(),
        "no HCA of these nodes is for pods ({}); rdmactl discover on a node shows its RDMA devices",
        reasons.join("; ")
    );
    let mut warnings = Vec::new();
    for group in &groups {
        if !group.usage.is_empty() && group.rails().next().is_none() {
            warnings.push(format!("{}: no HCA is for pods", names(&group.nodes)));
        }
    }
    for group in &odd {
        warnings.push(format!(
            "no selector chooses the HCAs of {} and no others: give these nodes a release of their \
             own, by nodeSelector",
            names(&group.nodes)
        ));
    }
    let chosen = pools.iter().flat_map(|pool| &pool.hcas);
    for hca in chosen.filter(|hca| !hca.is_active()) {
        let (names, id) = (hca.names(), &hca.facts.id);
        warnings.push(format!("no port of {names} ({id}) is active"));
    }
    for pool in &pools {
        let is_for_shared = pool.mode == Mode::Shared || !network::needs_network(pool);
        if is_for_shared && pool.nodes.iter().any(|node| node.exclusive_netns) {
            let remedy = "rdma system set netns shared";
            let needs = "needs RDMA subsystems in shared mode, and some are in exclusive mode";
            warnings.push(format!("{} {needs}: {remedy}", pool.resource));
        }
    }
    warnings.extend(pools.iter().flat_map(|pool| unequal(pool, options)));
    let overlap = (options.range).and_then(|range| network::overlapped(nodes, range));
    warnings.extend(overlap.map(|(node, used)| format!("--range overlaps {used} of {node}")));
    let is_away = |group: &&Group<'_>| {
        group.hcas().next().is_some() && group.hcas().all(|(hca, _)| hca.is_away())
    };
    let away = groups.iter().filter(is_away);
    let away: Vec<&PlanNode> = away.flat_map(|group| group.nodes.clone()).collect();
    if !away.is_empty() {
        let effect = "so their MTU and addresses are unknown: check mode, mtu and ipam";
        warnings.push(format!("NICs of {} are in pods, {effect}", names(&away)));
    }
    let (networks, mut assumed) = network::networks(&pools, nodes, options)?;
    let mut policy = json!({"version": 1});
    if networks.iter().any(|network| network.needs_rails) {
        match rails(&groups) {
            Some(rails) => put(&mut policy, "rails", json!(rails)),
            None => warnings.push(
                "policy.rails is not set: nodes have different rails at the same PCI address and at the \
                 same netdev name; rename the netdevs after their rails"
                    .to_owned(),
            ),
        }
    }
    if networks.iter().any(|network| network.is_leased) {
        put(&mut policy, "fabricAddresses", json!("static"));
    }
    if let Some(vlan) = options.vlan {
        put(&mut policy, "allow", json!({"vf": {"vlan": [vlan]}}));
    }
    let is_guessed =
        |pool: &PlanPool<'_>| pool.rails.len() > 1 && pool.hcas.iter().any(|hca| !hca.is_named);
    if !networks.is_empty() && pools.iter().any(is_guessed) {
        assumed.push(
            "rails are numbered by PCI address: check that NICs of one rail are in one subnet on all \
             nodes, else correct policy.rails"
                .to_owned(),
        );
    }
    groups.extend(odd);
    Ok(ClusterPlan {
        groups,
        pools,
        networks,
        policy,
        assumed,
        warnings,
    })
}

/// Settings of NICs that are not the same on all nodes, and change what the pool's network does.
fn unequal(pool: &PlanPool<'_>, options: &Options) -> Vec<String> {
    let on = |is_meant: &dyn Fn(&PlanHca) -> bool| {
        let is_here = |node: &&&PlanNode| {
            let mut hcas = node.hcas.iter().filter(|hca| is_meant(hca));
            hcas.any(|hca| pool.hcas.iter().any(|own| std::ptr::eq(*own, hca)))
        };
        let nodes: Vec<&PlanNode> = pool.nodes.iter().filter(is_here).copied().collect();
        names(&nodes)
    };
    let mut warnings = Vec::new();
    let of_ethernet = pool.hcas.iter().filter(|hca| hca.link() == "ether");
    let mtus: BTreeSet<u32> = of_ethernet.filter_map(|hca| hca.mtu).collect();
    if let (Some(low), Some(high), 2..) = (mtus.first(), mtus.last(), mtus.len()) {
        let nodes = on(&|hca| hca.mtu == Some(*low));
        warnings.push(format!(
            "{}: MTU {low} on NICs of {nodes}, up to {high} on others: the network gets the lowest",
            pool.resource
        ));
    }
    let has_address = |hca: &PlanHca| !hca.addresses.is_empty();
    let lacks = |hca: &PlanHca| hca.mtu.is_some() && !has_address(hca);
    let keeps = network::may_keep_addresses(pool, options);
    if keeps
        && pool.hcas.iter().any(|hca| has_address(hca))
        && pool.hcas.iter().any(|hca| lacks(hca))
    {
        warnings.push(format!(
            "{}: NICs of {} have no address on the host, unlike others: the plan has a range for all",
            pool.resource,
            on(&lacks)
        ));
    }
    warnings
}

fn groups(nodes: &[PlanNode], mode: Option<Mode>) -> Vec<Group<'_>> {
    let mut groups: BTreeMap<String, Group<'_>> = BTreeMap::new();
    let votes = votes(nodes);
    for node in nodes {
        let mut own = group(node, mode, &votes);
        let mut key = format!("{:?}", node.gpus);
        for (hca, usage) in node.hcas.iter().zip(&own.usage) {
            let pci = hca.facts.pci.as_ref();
            let device = pci.map(|pci| (pci.address, pci.vendor, pci.device));
            let (rail, is_usable) = (usage.as_ref().ok(), hca.obstacle.is_none());
            let place = (hca.link(), hca.rate, &hca.gpus, rail, is_usable);
            key += &format!("{device:?}{:?}{place:?}", hca.facts.drivers());
        }
        let known = groups.entry(key);
        known
            .and_modify(|known| known.nodes.append(&mut own.nodes))
            .or_insert(own);
    }
    let mut groups: Vec<Group<'_>> = groups.into_values().collect();
    groups.sort_by_key(|group| group.nodes.first().map(|node| &node.name));
    groups
}

/// Identity, device, link and rate of an HCA.
type Model = (String, Option<(u16, u16)>, &'static str, u32);
/// Nodes where such an HCA is for pods, less those where no GPU is next to it.
type Votes = BTreeMap<Model, i64>;

fn model(hca: &PlanHca) -> Model {
    let pci = hca.facts.pci.as_ref();
    let device = pci.map(|pci| (pci.vendor, pci.device));
    (hca.facts.id.to_string(), device, hca.link(), hca.rate)
}

fn votes(nodes: &[PlanNode]) -> Votes {
    let mut votes = Votes::new();
    for node in nodes {
        let usage = usage(node, false, &Votes::new());
        for (hca, usage) in node.hcas.iter().zip(usage) {
            *votes.entry(model(hca)).or_default() += match usage {
                Ok(_) => 1,
                Err(why) => -i64::from(why == ASIDE),
            };
        }
    }
    votes
}

/// A node as a group of its own.
fn group<'n>(node: &'n PlanNode, mode: Option<Mode>, votes: &Votes) -> Group<'n> {
    let group = |is_shared| Group {
        nodes: vec![node],
        usage: usage(node, is_shared, votes),
        is_shared,
    };
    let exclusive = group(false);
    let hcas: Vec<_> = exclusive.hcas().collect();
    let is_enough = match hcas.as_slice() {
        [(only, _)] => only.kind() == FunctionKind::Vf || only.is_virtual(),
        hcas => !hcas.is_empty(),
    };
    match mode {
        Some(Mode::Exclusive | Mode::Late) => exclusive,
        None if is_enough || !node.gpus.is_empty() => exclusive,
        _ => group(true),
    }
}

/// The HCAs of the fastest fabric that has GPUs next to it are for pods.
fn usage(node: &PlanNode, is_shared: bool, votes: &Votes) -> Vec<Result<u64, String>> {
    let obstacle = |hca: &PlanHca| {
        hca.obstacle
            .clone()
            .or(unfit(hca, is_shared).map(str::to_owned))
    };
    let usable: Vec<&PlanHca> = node
        .hcas
        .iter()
        .filter(|hca| obstacle(hca).is_none())
        .collect();
    let fabric = |hca: &PlanHca| (hca.link(), hca.rate);
    let rank = |hca: &PlanHca| {
        let mut near = usable.iter().filter(|one| !one.gpus.is_empty());
        let is_near = near.any(|one| fabric(one) == fabric(hca));
        // Soft RoCE is for nodes without RDMA hardware.
        (
            hca.kind() != FunctionKind::Software,
            is_near,
            hca.rate,
            hca.link(),
        )
    };
    let best = usable.iter().map(|hca| rank(hca)).max();
    let is_near = best.is_some_and(|(_, is_near, ..)| is_near);
    let is_best = |hca: &PlanHca| Some(rank(hca)) == best;
    let has_rails = usable.iter().any(|hca| is_best(hca) && hca.rail.is_some());
    // A node that lost a GPU is configured as the majority of nodes.
    let is_aside = |hca: &PlanHca| match votes.get(&model(hca)) {
        Some(votes) if *votes != 0 => *votes < 0,
        _ if hca.is_named => false,
        _ => (is_near && hca.gpus.is_empty()) || (has_rails && hca.rail.is_none()),
    };
    let chosen = usable.iter().filter(|hca| is_best(hca) && !is_aside(hca));
    let by_name = chosen.clone().all(|hca| hca.is_named);
    let is_numbered = chosen.clone().all(|hca| hca.rail.is_some());
    let place = |hca: &PlanHca| (hca.rail.filter(|_| is_numbered), hca.facts.pf());
    let rails: BTreeSet<_> = chosen.map(|hca| place(hca)).collect();
    let usage = |hca: &PlanHca| match obstacle(hca) {
        Some(why) => Err(why),
        None if !is_best(hca) => Err("not on the fabric for pods".to_owned()),
        None if is_aside(hca) => Err(ASIDE.to_owned()),
        None => {
            let order = rails.iter().take_while(|rail| **rail != place(hca)).count() as u64;
            Ok(hca.rail.filter(|_| by_name).unwrap_or(order))
        }
    };
    node.hcas.iter().map(usage).collect()
}

/// Why an HCA does not fit the mode.
fn unfit(hca: &PlanHca, is_shared: bool) -> Option<&'static str> {
    let facts = &hca.facts;
    Some(match is_shared {
        true if facts.owner().is_some() => "a part of another HCA, which is shared as a whole",
        true if hca.is_virtual() => "a cloud's virtual NIC, which cannot be shared",
        false if facts.virtual_functions() > 0 => "its VFs are for pods",
        false if !facts.bond_names.is_empty() => "a port of a bond, which a move would break",
        _ => return None,
    })
}

/// One pool for each kind of link where one selector chooses its HCAs on all nodes; else one for each
/// rate, with GPUs and without; else one for each group. The error is the group to leave out if one
/// remains without a pool.
fn pools<'n>(groups: &[Group<'n>], mode: Option<Mode>) -> Result<Vec<PlanPool<'n>>, usize> {
    let mut level = 0;
    loop {
        let is_last = level == 2;
        let mut parts: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            let Some((hca, _)) = group.hcas().next() else {
                continue;
            };
            let speed = (level > 0).then_some((hca.rate, group.has_gpus()));
            let key = (hca.link(), group.is_shared, speed, is_last.then_some(index));
            parts.entry(key).or_default().push(index);
        }
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let (mut pools, mut unserved) = (Vec::new(), Vec::new());
        for part in parts.into_values() {
            let Some(mut pool) = pool(&part, groups, mode, is_last) else {
                unserved.extend(part);
                continue;
            };
            let count = seen.entry(pool.resource.clone()).or_default();
            *count += 1;
            if *count > 1 {
                pool.resource += &format!("-{count}");
            }
            pools.push(pool);
        }
        let size = |index: &usize| groups.get(*index).map(|group| group.nodes.len());
        match unserved.into_iter().min_by_key(size) {
            None => return Ok(pools),
            Some(smallest) if is_last => {
                // Leave out a smaller group instead, if that group alone prevents a selector.
                let is_in_the_way = |index: &usize| {
                    let mut others = groups.to_vec();
                    if let Some(group) = others.get_mut(*index) {
                        group.nodes.clear();
                    }
                    pool(&[smallest], &others, mode, true).is_some()
                };
                let mut smaller = (0..groups.len()).filter(|index| size(index) < size(&smallest));
                return Err(smaller.find(is_in_the_way).unwrap_or(smallest));
            }
            Some(_) => level += 1,
        }
    }
}

fn pool<'n>(
    part: &[usize],
    all: &[Group<'n>],
    mode: Option<Mode>,
    by_address: bool,
) -> Option<PlanPool<'n>> {
    let groups: Vec<&Group<'n>> = part.iter().filter_map(|index| all.get(*index)).collect();
    let mode = mode.unwrap_or(match groups.first()?.is_shared {
        true => Mode::Shared,
        false if groups.iter().any(|group| group.has_gpus()) => Mode::Late,
        false => Mode::Exclusive,
    });
    let is_shared = mode == Mode::Shared;
    let hcas = groups.iter().flat_map(|group| group.hcas());
    let hcas: Vec<&'n PlanHca> = hcas.map(|(hca, _)| hca).collect();
    let wanted: BTreeSet<*const PlanHca> =
        hcas.iter().map(|hca| std::ptr::from_ref(*hca)).collect();
    let others = all.iter().flat_map(|group| &group.nodes);
    let mut others: Vec<&PlanHca> = others.flat_map(|node| &node.hcas).collect();
    // The daemon excludes some from each such pool by itself, and offers none that is unhealthy.
    let is_excluded = |hca: &PlanHca| hca.is_uplink || hca.facts.virtual_functions() > 0;
    others.retain(|hca| {
        let is_sick = hca.obstacle.is_some() && !hca.is_uplink;
        let is_free =
            !is_sick && hca.facts.reserved().is_none() && (is_shared || !is_excluded(hca));
        is_free && !wanted.contains(&std::ptr::from_ref(*hca))
    });
    let name = match mode {
        _ if hcas.iter().all(|hca| hca.is_virtual()) => &driver(&groups),
        Mode::Shared => "hca",
        Mode::Exclusive if hcas.iter().all(|hca| hca.kind() == FunctionKind::Vf) => "vf",
        Mode::Exclusive | Mode::Late => "nic",
    };
    let rails: BTreeSet<u64> = groups.iter().flat_map(|group| group.rails()).collect();
    let most_on_rail = |group: &&Group<'_>| {
        let own: BTreeSet<u64> = group.rails().collect();
        group.rails().count().div_ceil(own.len().max(1))
    };
    let in_order = |group: &&Group<'_>| group.rails().eq(0..rails.len() as u64);
    let nodes: Vec<_> = groups
        .iter()
        .flat_map(|group| group.nodes.clone())
        .collect();
    Some(PlanPool {
        resource: format!("rdma/{name}"),
        mode,
        select: selector(&hcas, &others, is_shared, by_address)?,
        groups: part.to_vec(),
        most_on_rail: groups.iter().map(most_on_rail).max().unwrap_or(0),
        is_in_order: groups.iter().all(in_order),
        is_optional: nodes.len() < all.iter().map(|group| group.nodes.len()).sum(),
        nodes,
        hcas,
        rails,
    })
}

/// The driver of most nodes' HCAs, as a name of a resource and of a network; `nic` where it cannot be one.
fn driver(groups: &[&Group<'_>]) -> String {
    let name = |hca: &PlanHca| {
        let driver = hca.facts.drivers().into_iter().next()?.to_lowercase();
        Some(driver.trim_start_matches("vmw_").to_owned())
    };
    let mut nodes: BTreeMap<String, usize> = BTreeMap::new();
    for group in groups {
        for node in &group.nodes {
            let hcas = node.hcas.iter().zip(&group.usage);
            let hcas = hcas.filter(|(_, usage)| usage.is_ok());
            let drivers: BTreeSet<String> = hcas.filter_map(|(hca, _)| name(hca)).collect();
            for driver in drivers {
                *nodes.entry(driver).or_default() += 1;
            }
        }
    }
    let most = nodes.into_iter().max_by_key(|(_, count)| *count);
    let is_name = |driver: &String| {
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let is_end = |c: char| c.is_ascii_alphanumeric();
        (1..=32).contains(&driver.len())
            && driver.chars().all(is_plain)
            && driver.starts_with(is_end)
            && driver.ends_with(is_end)
    };
    let driver = most.map(|(driver, _)| driver).filter(is_name);
    driver.unwrap_or_else(|| "nic".to_owned())
}

/// `rails` of the policy, which is the same on all nodes: by PCI address, else by netdev.
fn rails(groups: &[Group<'_>]) -> Option<BTreeMap<String, u64>> {
    let by = |key: fn(&PlanHca) -> Option<String>| {
        let mut rails = BTreeMap::new();
        for (hca, rail) in groups.iter().flat_map(Group::hcas) {
            let known = *rails.entry(key(hca)?).or_insert(rail);
            (known == rail).then_some(())?;
        }
        Some(rails)
    };
    by(|hca| Some(hca.facts.id.to_string())).or_else(|| {
        by(|hca| {
            hca.facts
                .netdev_names()
                .next()
                .filter(|name| is_plain(name))
                .map(str::to_owned)
        })
    })
}

/// Names of nodes, at most three of them.
pub(crate) fn names(nodes: &[&PlanNode]) -> String {
    let names: Vec<&str> = nodes.iter().map(|node| &*node.name).collect();
    some_of(&names, 3, ", ")
}
