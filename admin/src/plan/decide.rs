//! What a cluster's configuration should be, by the facts of its nodes: which HCAs are for pods, which
//! nodes are equal, which pool serves whom, what the policy says of rails. Pure.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use hca::LinkLayer;
use ipnetwork::IpNetwork;
use rdma_device_plugin::candidate::{Candidate, FunctionKind, link_type, without_node_guid};
use rdma_device_plugin::words::word;
use serde_json::{Value, json};

use super::network::{self, Network};
use super::read::{Hca, Node};
use super::select::{Keys, selector};

/// What the administrator knows and the nodes do not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub mode: Option<Mode>,
    pub range: Option<IpNetwork>,
    pub per_node_prefix: Option<u8>,
    pub vlan: Option<u16>,
}

/// How pods get HCAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Mode {
    /// Each HCA has shares
    Shared,
    /// Each HCA is for one pod
    Exclusive,
    /// The same, chosen next to the pod's GPUs
    Late,
}

/// A configuration, to be written down.
#[derive(Debug)]
pub(crate) struct Plan<'n> {
    pub groups: Vec<Group<'n>>,
    pub pools: Vec<Pool>,
    pub networks: Vec<Network>,
    pub policy: Value,
    /// What was guessed.
    pub assumed: Vec<String>,
    pub warnings: Vec<String>,
}

/// Nodes with the same HCAs, GPUs and rails at the same PCI locations.
#[derive(Debug)]
pub(crate) struct Group<'n> {
    pub nodes: Vec<&'n Node>,
    /// HCAs for pods in the order of their identities: positions in the node's list, with rails.
    pub chosen: Vec<(usize, u32)>,
    /// The others, and why.
    pub left_out: Vec<(usize, LeftOut)>,
    pub is_shared: bool,
}

/// Why an HCA is not for pods: the reason, and what differs from node to node.
pub(crate) type LeftOut = (&'static str, String);

/// A pool, with its groups.
#[derive(Debug)]
pub(crate) struct Pool {
    pub resource: String,
    pub mode: Mode,
    pub select: Keys,
    /// Its HCAs do not serve `rdma_cm`.
    pub is_verbs_only: bool,
    /// Some nodes have no such HCA.
    pub is_optional: bool,
    /// Positions of its groups.
    pub groups: Vec<usize>,
    /// Why pods need no network, if so.
    pub without_network: Option<&'static str>,
}

impl Group<'_> {
    pub(crate) fn hcas(&self) -> impl Iterator<Item = (&Hca, u32)> {
        self.nodes.iter().flat_map(|node| self.chosen_of(node))
    }

    /// Of the first node, which stands for all in comments.
    pub(crate) fn first(&self) -> Option<&Node> {
        self.nodes.first().copied()
    }

    fn chosen_of<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = (&'a Hca, u32)> {
        let chosen = self.chosen.iter();
        chosen.filter_map(|(index, rail)| Some((node.hcas.get(*index)?, *rail)))
    }

    fn link(&self) -> &'static str {
        self.hcas().next().map_or("other", |(hca, _)| link(hca))
    }

    fn has_gpus(&self) -> bool {
        self.nodes.iter().any(|node| !node.gpus.is_empty())
    }

    /// Most HCAs of a node on one rail.
    pub(crate) fn most_on_a_rail(&self) -> usize {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        self.chosen
            .iter()
            .for_each(|(_, rail)| *counts.entry(*rail).or_default() += 1);
        counts.into_values().max().unwrap_or_default()
    }
}

/// The configuration of a cluster of these nodes.
///
/// # Errors
/// A flag does not fit what the nodes have.
pub(crate) fn plan<'n>(nodes: &'n [Node], options: &Options) -> anyhow::Result<Plan<'n>> {
    let groups = groups(nodes, options.mode);
    let mut warnings = Vec::new();
    for group in groups.iter().filter(|group| group.chosen.is_empty()) {
        warnings.push(format!("{} has no HCA for pods", names(&group.nodes)));
    }
    let mut pools = pools(&groups, options.mode, &mut warnings);
    let (networks, mut assumed) = network::networks(&mut pools, &groups, nodes, options)?;
    let mut policy = json!({"version": 1, "stores": {"default": {"type": "kubernetes"}}});
    let mut put = |key: &str, value: Value| {
        policy
            .as_object_mut()
            .map(|policy| policy.insert(key.to_owned(), value));
    };
    if networks.iter().any(|network| network.needs_rails) {
        match rails(&groups) {
            Some(rails) => put("rails", json!(rails)),
            None => warnings.push(
                "one PCI address and one netdev name are on different rails of different nodes, so \
                 policy.json cannot number the rails: rename the netdevs after their rails"
                    .to_owned(),
            ),
        }
    }
    if networks.iter().any(|network| network.has_leased_addresses) {
        put("fabricAddresses", json!("static"));
    }
    if let Some(vlan) = options.vlan {
        put("allow", json!({"vf": {"vlan": [vlan]}}));
    }
    if networks.iter().any(|network| network.rails > 1)
        && groups
            .iter()
            .any(|group| group.hcas().any(|(hca, _)| !is_named(hca)))
    {
        assumed.push(
            "rails are numbered by PCI address: check that NICs with one number are on one switch \
             or subnet; else correct rails in policy.json"
                .to_owned(),
        );
    }
    Ok(Plan {
        groups,
        pools,
        networks,
        policy,
        assumed,
        warnings,
    })
}

fn groups<'n>(nodes: &'n [Node], mode: Option<Mode>) -> Vec<Group<'n>> {
    let mut groups: BTreeMap<Vec<String>, Group<'n>> = BTreeMap::new();
    for node in nodes {
        let group = of_node(node, mode);
        let of_hca = |(index, hca): (usize, &Hca)| {
            let facts = &hca.facts;
            let pci = facts.pci.as_ref();
            let device = pci.map(|pci| (pci.address, pci.vendor, pci.device));
            let rail = group.chosen.iter().find(|(chosen, _)| *chosen == index);
            let left_out = group.left_out.iter().find(|(left, _)| *left == index);
            let why = left_out.map(|(_, (why, _))| why);
            let rate = rate(node, hca);
            format!(
                "{device:?} {:?} {} {rate} {rail:?} {:?} {why:?}",
                facts.drivers(),
                link(hca),
                hca.gpus
            )
        };
        let mut key: Vec<String> = node.hcas.iter().enumerate().map(of_hca).collect();
        key.extend(node.gpus.clone());
        groups
            .entry(key)
            .or_insert_with(|| Group {
                nodes: Vec::new(),
                ..group
            })
            .nodes
            .push(node);
    }
    let mut groups: Vec<Group<'n>> = groups.into_values().collect();
    groups.sort_by(|a, b| {
        a.first()
            .map(|node| &node.name)
            .cmp(&b.first().map(|node| &node.name))
    });
    groups
}

/// A node as a group of its own.
fn of_node(node: &Node, mode: Option<Mode>) -> Group<'_> {
    let exclusively = choose(node, false);
    let (usable, _) = &exclusively;
    let is_enough = match usable.as_slice() {
        [] => false,
        [only] => only.facts.function().kind == FunctionKind::Vf || !can_be_shared(only),
        _ => true,
    };
    let is_shared = mode.map_or(node.gpus.is_empty() && !is_enough, |mode| {
        mode == Mode::Shared
    });
    let (chosen, left_out) = if is_shared {
        choose(node, true)
    } else {
        exclusively
    };
    let position = |hca: &Hca| node.hcas.iter().position(|one| std::ptr::eq(one, hca));
    let left_out = left_out
        .into_iter()
        .filter_map(|(hca, why)| Some((position(hca)?, why)));
    let numbered = number(&chosen).into_iter();
    let chosen = numbered.filter_map(|(hca, rail)| Some((position(hca)?, rail)));
    Group {
        nodes: vec![node],
        chosen: chosen.collect(),
        left_out: left_out.collect(),
        is_shared,
    }
}

/// The HCAs of a node for pods, and the others.
fn choose(node: &Node, is_shared: bool) -> (Vec<&Hca>, Vec<(&Hca, LeftOut)>) {
    let mut left_out = Vec::new();
    let mut usable = Vec::new();
    for hca in &node.hcas {
        match obstacle(hca, is_shared) {
            Some(why) => left_out.push((hca, why)),
            None => usable.push(hca),
        }
    }
    let near = |hca: &Hca| !hca.gpus.is_empty();
    let fabric = |hca: &Hca| (link(hca), rate(node, hca));
    // Soft RoCE is for nodes without RDMA hardware.
    let is_hardware = |hca: &Hca| hca.facts.function().kind != FunctionKind::Software;
    let rank = |hca: &&&Hca| {
        let same = usable.iter().filter(|one| fabric(one) == fabric(hca));
        let count = same.filter(|one| near(one)).count();
        (
            is_hardware(hca),
            count > 0,
            rate(node, hca),
            count,
            link(hca),
        )
    };
    let best = usable.iter().max_by_key(rank).map(|hca| fabric(hca));
    let of_best = |hca: &Hca| Some(fabric(hca)) == best;
    let some_near = usable.iter().any(|hca| of_best(hca) && near(hca));
    let some_on_rail = usable.iter().any(|hca| of_best(hca) && hca.rail.is_some());
    let mut chosen = Vec::new();
    for hca in usable {
        let (link, rate) = fabric(hca);
        let why = if !of_best(hca) {
            Some((
                "not of the fastest fabric",
                format!("{link}, {} Gb/s", rate / 1000),
            ))
        } else if some_near && !near(hca) && !is_named(hca) {
            Some((
                "no GPU is next to it",
                "for storage or other traffic".to_owned(),
            ))
        } else if some_on_rail && hca.rail.is_none() {
            Some((
                "it is on no rail",
                "for storage or other traffic".to_owned(),
            ))
        } else {
            None
        };
        match why {
            Some(why) => left_out.push((hca, why)),
            None => chosen.push(hca),
        }
    }
    (chosen, left_out)
}

fn obstacle(hca: &Hca, is_shared: bool) -> Option<LeftOut> {
    let facts = &hca.facts;
    let vfs = facts.virtual_functions();
    if let Some(reserved) = facts.reserved() {
        return Some(("it serves the platform", reserved.to_string()));
    }
    if let Some(uplink) = &hca.uplink {
        return Some(("the node itself needs it", uplink.clone()));
    }
    if let Some(why) = facts.fault.as_ref().or(hca.obstacle.as_ref()) {
        return Some(("it cannot be used", why.clone()));
    }
    match is_shared {
        true if facts.owner().is_some() => Some((
            "it is a part of another HCA",
            "which is shared as a whole".to_owned(),
        )),
        true if !can_be_shared(hca) => Some((
            "it cannot be shared",
            "its interface is another function".to_owned(),
        )),
        false if vfs > 0 => Some(("its VFs are for pods", format!("it has {vfs}"))),
        false if !facts.bond_names.is_empty() => {
            Some(("it is a part of a bond", facts.bond_names.join(", ")))
        }
        _ => None,
    }
}

/// Whether a child of its netdev, or its verbs alone, can be one of several pods.
fn can_be_shared(hca: &Hca) -> bool {
    !hca.apart && link(hca) != link_type(LinkLayer::Unknown)
}

pub(crate) fn link(hca: &Hca) -> &'static str {
    let mut ports = hca.facts.ports();
    link_type(
        ports
            .next()
            .map_or(LinkLayer::Unknown, |port| port.link_layer),
    )
}

/// The highest rate of the node's HCAs of this model: a port that is down reports any. In Mb/s.
pub(crate) fn rate(node: &Node, hca: &Hca) -> u32 {
    let model = |hca: &Hca| {
        let pci = hca.facts.pci.as_ref();
        (
            pci.map(|pci| (pci.vendor, pci.device)),
            hca.facts.function().kind,
            link(hca),
        )
    };
    let same = node.hcas.iter().filter(|one| model(one) == model(hca));
    let ports = same.flat_map(|one| one.facts.ports());
    ports
        .filter_map(|port| Some(port.rate.as_ref()?.mbps))
        .max()
        .unwrap_or_default()
}

fn is_named(hca: &Hca) -> bool {
    hca.rail.is_some_and(|(_, is_named)| is_named)
}

/// The rails that names say, else from 0 in the order of physical functions.
fn number<'n>(chosen: &[&'n Hca]) -> Vec<(&'n Hca, u32)> {
    let order = |hca: &Hca| {
        let rail = hca.rail.map_or(u32::MAX, |(rail, _)| rail);
        (
            rail,
            hca.facts.pf(),
            hca.facts.pf().is_none().then(|| hca.facts.id.clone()),
        )
    };
    let ordered: BTreeSet<_> = chosen.iter().map(|hca| order(hca)).collect();
    let position = |hca: &Hca| ordered.iter().position(|one| *one == order(hca));
    let by_name = chosen.iter().all(|hca| is_named(hca));
    let number = |hca: &Hca| match (hca.rail, by_name) {
        (Some((rail, _)), true) => rail,
        _ => position(hca)
            .and_then(|number| u32::try_from(number).ok())
            .unwrap_or_default(),
    };
    chosen.iter().map(|hca| (*hca, number(hca))).collect()
}

/// How far groups are parted at last: each has a pool of its own.
const LAST: u8 = 2;

/// Pools: one for each kind of link where one selector chooses its HCAs on all nodes; else one for each
/// rate, with GPUs and without; else one for each group.
fn pools(groups: &[Group<'_>], mode: Option<Mode>, warnings: &mut Vec<String>) -> Vec<Pool> {
    let speed = |group: &Group<'_>| {
        let rate = |node: &Node| group.hcas().map(|(hca, _)| rate(node, hca)).max();
        (group.first().and_then(rate), group.has_gpus())
    };
    for level in 0..=LAST {
        let mut parts: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        let with_hcas = groups.iter().enumerate();
        for (index, group) in with_hcas.filter(|(_, group)| !group.chosen.is_empty()) {
            let speed = (level > 0).then(|| speed(group));
            let own = (level == LAST).then_some(index);
            let part = parts.entry((group.link(), group.is_shared, speed, own));
            part.or_default().push(index);
        }
        let parts = parts.into_values();
        let made: Vec<(Vec<usize>, Option<Pool>)> = parts
            .map(|part| (part.clone(), pool(&part, groups, mode, level == LAST)))
            .collect();
        let unserved = made.iter().filter(|(_, pool)| pool.is_none());
        let unserved: Vec<&Node> = unserved
            .flat_map(|(part, _)| part.iter().filter_map(|index| groups.get(*index)))
            .flat_map(|group| group.nodes.clone())
            .collect();
        if !unserved.is_empty() && level < LAST {
            continue;
        }
        if !unserved.is_empty() {
            warnings.push(format!(
                "no selector chooses the HCAs of {} and no other: write their pool by hand",
                names(&unserved)
            ));
        }
        let mut pools: Vec<Pool> = made.into_iter().filter_map(|(_, pool)| pool).collect();
        name_apart(&mut pools);
        return pools;
    }
    Vec::new()
}

fn pool(part: &[usize], all: &[Group<'_>], mode: Option<Mode>, by_address: bool) -> Option<Pool> {
    let groups: Vec<&Group<'_>> = part.iter().filter_map(|index| all.get(*index)).collect();
    let first = groups.first()?;
    let mode = mode.unwrap_or(match first.is_shared {
        true => Mode::Shared,
        false if groups.iter().any(|group| group.has_gpus()) => Mode::Late,
        false => Mode::Exclusive,
    });
    let is_shared = mode == Mode::Shared;
    let wanted: Vec<&Candidate> = groups
        .iter()
        .flat_map(|group| group.hcas())
        .map(|(hca, _)| &hca.facts)
        .collect();
    let hcas = all
        .iter()
        .flat_map(|group| &group.nodes)
        .flat_map(|node| &node.hcas);
    // The daemon leaves these out of each such pool by itself.
    let is_excluded = |hca: &Hca| {
        let of_host = hca.uplink.is_some() || hca.facts.virtual_functions() > 0;
        hca.facts.reserved().is_some() || (!is_shared && of_host)
    };
    let is_wanted = |hca: &Hca| wanted.iter().any(|one| std::ptr::eq(*one, &hca.facts));
    let others: Vec<&Candidate> = hcas
        .filter(|hca| !is_excluded(hca) && !is_wanted(hca))
        .map(|hca| &hca.facts)
        .collect();
    let select = selector(&wanted, &others, is_shared, by_address)?;
    let is_verbs_only = first.link() == link_type(LinkLayer::Unknown);
    let driver = wanted
        .first()?
        .drivers()
        .into_iter()
        .next()
        .unwrap_or_default();
    let is_cloud = is_verbs_only
        || groups
            .iter()
            .all(|group| group.hcas().all(|(hca, _)| hca.apart));
    let are_vfs = wanted
        .iter()
        .all(|hca| hca.function().kind == FunctionKind::Vf);
    let name = match mode {
        _ if is_cloud => driver.trim_start_matches("vmw_"),
        Mode::Shared => "hca",
        Mode::Exclusive if are_vfs => "vf",
        Mode::Exclusive | Mode::Late => "nic",
    };
    let served: usize = groups.iter().map(|group| group.nodes.len()).sum();
    let nodes: usize = all.iter().map(|group| group.nodes.len()).sum();
    Some(Pool {
        resource: format!("rdma/{name}"),
        mode,
        select,
        is_verbs_only,
        is_optional: served < nodes,
        groups: part.to_vec(),
        without_network: None,
    })
}

/// Gives pools of one name different ones.
fn name_apart(pools: &mut [Pool]) {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for pool in pools {
        let count = seen.entry(pool.resource.clone()).or_default();
        *count += 1;
        if *count > 1 {
            pool.resource = format!("{}-{count}", pool.resource);
        }
    }
}

/// `rails` of the policy, which is the same on all nodes: by PCI address, else by netdev.
fn rails(groups: &[Group<'_>]) -> Option<BTreeMap<String, u32>> {
    let by = |key: &dyn Fn(&Candidate) -> Option<String>| {
        let mut rails = BTreeMap::new();
        for (hca, rail) in groups.iter().flat_map(Group::hcas) {
            let before = rails.insert(key(&hca.facts)?, rail);
            if before.is_some_and(|before| before != rail) {
                return None;
            }
        }
        Some(rails)
    };
    by(&|hca| Some(hca.id.to_string()))
        .or_else(|| by(&|hca| Some(hca.netdev_names().next()?.to_owned())))
}

/// Whether a NIC's position among the chosen ones is its rail on each of these nodes.
pub(crate) fn are_positions(groups: &[&Group<'_>], rails: &BTreeSet<u32>) -> bool {
    groups.iter().all(|group| {
        let numbers = group.chosen.iter().map(|(_, rail)| *rail);
        numbers.eq(0..u32::try_from(rails.len()).unwrap_or(u32::MAX))
    })
}

/// Names of nodes, at most three of them.
pub(crate) fn names(nodes: &[&Node]) -> String {
    let shown: Vec<&str> = nodes
        .iter()
        .take(3)
        .map(|node| node.name.as_str())
        .collect();
    match nodes.len().saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// What a person should know of an HCA that is for pods.
pub(crate) fn remarks(hca: &Hca) -> Vec<String> {
    let is_down = !hca.facts.elsewhere
        && hca.facts.ports().next().is_some()
        && !hca.facts.ports().any(hca::Port::is_active);
    let devices = hca.facts.rdma_devices.iter();
    let guids = devices.filter_map(|device| Some(without_node_guid(device)?.0.to_owned()));
    let down = is_down.then(|| "no active port".to_owned());
    guids.chain(down).collect()
}

/// The kind of function, as a word.
pub(crate) fn kind(hca: &Hca) -> String {
    word(&hca.facts.function().kind)
}
