//! Facts of the nodes, from the documents of `discover` and `topology`.

use std::collections::BTreeSet;

use cni_wire::text::{bounded, printable};
use hca::topology::rail::in_name;
use hca::{FunctionKind, Hca, Netdev};
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::discover::{DiscoverDocument, HostAddress};

/// Of a text of a node.
const MAX_TEXT_BYTES: usize = 300;
/// HCAs, NICs and GPUs that a node has at most.
const MAX_DEVICES: usize = 1024;
/// Shorter prefixes are of default routes and mistakes, and would leave no range free.
const MIN_PREFIX: u8 = 8;

/// A node's text for a line of the plan, a warning or an error.
fn text_of(node_text: &str) -> String {
    printable(&bounded(node_text, MAX_TEXT_BYTES))
}

/// A node.
#[derive(Debug, Default)]
pub(crate) struct PlanNode {
    pub name: String,
    /// In the order of their identities.
    pub hcas: Vec<PlanHca>,
    /// Models of its GPUs.
    pub gpus: Vec<String>,
    pub addresses: Vec<HostAddress>,
    /// Its RDMA subsystem is in exclusive mode.
    pub exclusive_netns: bool,
}

/// An HCA of a node.
#[derive(Debug)]
pub(crate) struct PlanHca {
    pub facts: Hca,
    pub kind: FunctionKind,
    pub link: &'static str,
    /// In Mb/s; of one that is down, which reports any, the highest of this model on the node.
    pub rate: u32,
    /// Why no pod can have it, if so.
    pub obstacle: Option<String>,
    /// The node needs it: an exclusive pool excludes it by itself.
    pub is_uplink: bool,
    /// GPUs that it is one of the nearest NICs of.
    pub gpus: Vec<usize>,
    /// The rail of its physical function.
    pub rail: Option<u64>,
    /// A netdev's name says the rail.
    pub is_named: bool,
    /// The least of its netdevs; none while they are not visible.
    pub mtu: Option<u32>,
    /// IPv4 addresses of its netdevs.
    pub addresses: Vec<HostAddress>,
    /// Its netdev stands on another function, as that of a cloud's virtual NIC.
    pub apart: bool,
}

impl PlanHca {
    pub(crate) fn is_active(&self) -> bool {
        self.facts.ports().any(|(_, port)| port.is_active())
    }

    /// Names of its RDMA devices, for a person.
    pub(crate) fn names(&self) -> String {
        text_of(&self.facts.rdma_names().join(" "))
    }

    /// The ports of an HCA with several netdevs: the active ones, or all while none is.
    pub(crate) fn ports(&self) -> BTreeSet<u32> {
        let is_several = self.facts.netdevs.len() > 1;
        let ports = || self.facts.ports().filter(|_| is_several);
        let active = ports().filter(|(_, port)| port.is_active());
        let active: BTreeSet<u32> = active.map(|(_, port)| port.number).collect();
        match active.is_empty() {
            true => ports().map(|(_, port)| port.number).collect(),
            false => active,
        }
    }

    /// Names of its netdevs, for a person.
    pub(crate) fn netdevs(&self) -> String {
        let names = self.facts.netdev_names().collect::<Vec<_>>().join(" ");
        match names.is_empty() {
            true => "no netdev".to_owned(),
            false => text_of(&names),
        }
    }

    /// A pod has its netdevs, which hides their addresses and MTU.
    pub(crate) fn is_away(&self) -> bool {
        self.mtu.is_none() && self.facts.netdev_names().next().is_some()
    }

    /// A virtual NIC of a cloud or hypervisor, which its driver tells from others.
    pub(crate) fn is_virtual(&self) -> bool {
        self.apart || self.link == "other"
    }
}

/// The nodes that answered, and why the others are not in the plan.
pub(crate) fn nodes([discover, topology]: &[Vec<Value>; 2]) -> (Vec<PlanNode>, Vec<String>) {
    let (mut nodes, mut silent) = (Vec::new(), Vec::new());
    for answer in discover {
        let name = text_of(answer["node"].as_str().unwrap_or("-"));
        let keys = ["node", "pod"];
        let is_same = |other: &&Value| keys.iter().all(|key| other[*key] == answer[*key]);
        let other = topology.iter().find(is_same).unwrap_or(&Value::Null);
        let node = match answer["error"].as_str().or(other["error"].as_str()) {
            Some(error) => Err(error.to_owned()),
            None => node(&answer["document"], &other["document"]),
        };
        match node {
            Ok(node) => nodes.push(PlanNode { name, ..node }),
            Err(why) => silent.push((name, text_of(&why))),
        }
    }
    // A node has two pods of the daemon while these are replaced.
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes.dedup_by(|a, b| a.name == b.name);
    silent.retain(|(name, _)| !nodes.iter().any(|node| node.name == *name));
    let silent = silent.into_iter();
    let silent = silent.map(|(name, why)| format!("{name} is not in this plan: {why}"));
    let silent = silent.collect();
    (nodes, silent)
}

fn node(discover: &Value, topology: &Value) -> Result<PlanNode, String> {
    let DiscoverDocument {
        hcas: shown,
        inventory,
        candidates,
        mut addresses,
        ..
    } = DiscoverDocument::deserialize(discover)
        .map_err(|error| format!("its answer of discover: {error}"))?;
    let (Some(gpus), Some(nics)) = (topology["gpus"].as_array(), topology["nics"].as_array())
    else {
        return Err("it has no answer of topology".to_owned());
    };
    if candidates.len() != shown.len() {
        return Err("its daemon is older than this program: update the DaemonSet".to_owned());
    }
    for (what, count) in [
        ("HCAs", candidates.len()),
        ("NICs", nics.len()),
        ("GPUs", gpus.len()),
    ] {
        if count > MAX_DEVICES {
            return Err(format!("it has {count} {what}: more than {MAX_DEVICES}"));
        }
    }
    addresses.retain(|one| one.prefix >= MIN_PREFIX);
    let netdevs = Vec::<Netdev>::deserialize(inventory.get("netdevs").unwrap_or(&Value::Null));
    let netdevs = netdevs.map_err(|error| format!("its netdevs: {error}"))?;
    let (mut hcas, mut ids) = (Vec::new(), BTreeSet::new());
    for (facts, shown) in candidates.into_iter().zip(shown) {
        if !ids.insert(facts.id.clone()) {
            return Err(format!("it has HCA {} twice", facts.id));
        }
        // A VF is where its physical function is.
        let (id, pf) = (json!(facts.id), json!(facts.pf()));
        let nic = nics.iter().position(|nic| nic["hca"] == id);
        let nic = nic.or_else(|| nics.iter().position(|nic| nic["physical"] == pf));
        let is_near = |gpu: &Value| {
            let nearest = gpu["nearestNics"].as_array();
            nearest.is_some_and(|nearest| nic.is_some_and(|nic| nearest.contains(&json!(nic))))
        };
        let rail = nic
            .and_then(|nic| nics.get(nic))
            .map_or(&Value::Null, |nic| &nic["rail"]);
        // Also of a netdev that a pod has now.
        let names = facts.pf_netdevs.iter().map(String::as_str);
        let named = names
            .chain(facts.netdev_names())
            .find_map(in_name)
            .map(u64::from);
        let rail = named.or(rail["number"].as_u64());
        if let Some(rail) = rail.filter(|rail| *rail > u8::MAX.into()) {
            return Err(format!(
                "HCA {} is on rail {rail}, above {}",
                facts.id,
                u8::MAX
            ));
        }
        let is_own = |name: &str| facts.netdev_names().any(|own| own == name);
        let own: Vec<&Netdev> = netdevs
            .iter()
            .filter(|netdev| is_own(&netdev.name))
            .collect();
        let function = facts.pci.as_ref().map(|pci| pci.address);
        let unusable = shown.nodes.into_iter().find_map(|node| node.obstacle);
        let obstacle = match (facts.reserved(), &shown.uplink) {
            (Some(reserved), _) => Some(reserved.to_string()),
            (_, Some(uplink)) => Some(format!("for the node itself: {uplink}")),
            _ => facts.fault.clone().or(unusable),
        };
        let of_host = addresses.iter().filter(|one| one.address.is_ipv4());
        hcas.push(PlanHca {
            kind: facts.function().kind,
            link: facts.link_layer().word(),
            rate: facts
                .ports()
                .filter_map(|(_, port)| Some(port.rate.as_ref()?.mbps))
                .max()
                .unwrap_or(0),
            obstacle: obstacle.map(|why| text_of(&why)),
            is_uplink: shown.uplink.is_some(),
            gpus: (0..gpus.len())
                .filter(|gpu| gpus.get(*gpu).is_some_and(is_near))
                .collect(),
            rail,
            is_named: named.is_some(),
            mtu: own.iter().map(|netdev| netdev.mtu).min(),
            apart: function.is_some()
                && !own.is_empty()
                && own.iter().all(|netdev| netdev.pci != function),
            addresses: of_host
                .filter(|one| one.netdev.as_deref().is_some_and(is_own))
                .cloned()
                .collect(),
            facts,
        });
    }
    let model = |hca: &PlanHca| {
        let pci = hca.facts.pci.as_ref();
        (pci.map(|pci| (pci.vendor, pci.device)), hca.kind, hca.link)
    };
    let rates: Vec<_> = hcas.iter().map(|hca| (model(hca), hca.rate)).collect();
    for hca in &mut hcas {
        let same = rates.iter().filter(|(other, _)| *other == model(hca));
        if !hca.is_active() {
            hca.rate = same.map(|(_, rate)| *rate).max().unwrap_or(0);
        }
    }
    hcas.sort_by(|a, b| a.facts.id.cmp(&b.facts.id));
    let title = |gpu: &Value| text_of(gpu["model"].as_str().unwrap_or("GPU"));
    Ok(PlanNode {
        name: String::new(),
        hcas,
        gpus: gpus.iter().map(title).collect(),
        addresses,
        exclusive_netns: inventory.get("netnsMode") == Some(&json!("exclusive")),
    })
}
