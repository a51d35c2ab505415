//! Facts of the nodes: each says them in its document of `discover`.

use std::collections::BTreeSet;

use cni_wire::text::{bounded, printable};
use hca::topology::rail::in_name;
use hca::topology::{Gpu, Machine};
use hca::{FunctionKind, Hca, Netdev, NetnsMode};
use pools::host_snapshot::HostSnapshot;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::discover::{HostAddress, uplink};
use crate::topology::nearest_nics;

/// Of a text of a node.
const MAX_TEXT_BYTES: usize = 300;
/// Shorter prefixes are of default routes and mistakes, and would leave no range free.
const MIN_PREFIX: u8 = 8;

/// A node's text for a line of the plan, a warning or an error.
fn text_of(node_text: &str) -> String {
    printable(&bounded(node_text, MAX_TEXT_BYTES))
}

/// What a node has, as it says in the document of `discover`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PlanNode {
    #[serde(skip)]
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
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PlanHca {
    pub facts: Hca,
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
    /// Its netdev stands on another function, as that of a cloud's virtual NIC.
    pub apart: bool,
    /// In Mb/s; of one that is down, which reports any, the highest of this model on the node.
    #[serde(skip)]
    pub rate: u32,
    /// IPv4 addresses of its netdevs.
    #[serde(skip)]
    pub addresses: Vec<HostAddress>,
}

impl PlanNode {
    /// What a scan found. `machine` has the rails of the node's policy.
    pub(crate) fn of(
        scanned: &HostSnapshot,
        hcas: &[Hca],
        machine: &Machine,
        addresses: Vec<HostAddress>,
    ) -> Self {
        let nearest: Vec<Vec<usize>> = (machine.gpus.iter())
            .map(|gpu| nearest_nics(machine, &gpu.place))
            .collect();
        let hca = |facts: &Hca| PlanHca::of(facts.clone(), scanned, machine, &nearest);
        let model = |gpu: &Gpu| gpu.model.clone().unwrap_or_else(|| "GPU".to_owned());
        Self {
            name: String::new(),
            hcas: hcas.iter().map(hca).collect(),
            gpus: machine.gpus.iter().map(model).collect(),
            addresses,
            exclusive_netns: scanned.inventory.netns_mode == Some(NetnsMode::Exclusive),
        }
    }

    /// What a node answered, as far as it is possible, with what follows from it.
    fn read(name: String, document: &Value) -> Result<Self, String> {
        let Some(facts) = document.get("facts") else {
            return Err("its daemon is of another version than this program".to_owned());
        };
        let node = Self::deserialize(facts);
        let mut node = node.map_err(|error| format!("its answer of discover: {error}"))?;
        node.name = name;
        node.gpus.iter_mut().for_each(|gpu| *gpu = text_of(gpu));
        node.addresses.retain(|one| one.prefix >= MIN_PREFIX);
        node.hcas.sort_by(|a, b| a.facts.id.cmp(&b.facts.id));
        for hca in &mut node.hcas {
            if let Some(rail) = hca.rail.filter(|rail| *rail > u8::MAX.into()) {
                let (id, most) = (&hca.facts.id, u8::MAX);
                return Err(format!("HCA {id} is on rail {rail}, above {most}"));
            }
            hca.obstacle = hca.obstacle.take().map(|why| text_of(&why));
            let is_own = |one: &&HostAddress| {
                let netdev = one.netdev.as_deref();
                one.address.is_ipv4() && hca.facts.netdev_names().any(|own| Some(own) == netdev)
            };
            hca.addresses = node.addresses.iter().filter(is_own).cloned().collect();
        }
        let rates: Vec<_> = node
            .hcas
            .iter()
            .map(|hca| (hca.model(), hca.own_rate()))
            .collect();
        for hca in &mut node.hcas {
            let same = rates.iter().filter(|(model, _)| *model == hca.model());
            let highest = same.map(|(_, rate)| *rate).max();
            hca.rate = match hca.is_active() {
                true => hca.own_rate(),
                false => highest.unwrap_or(0),
            };
        }
        Ok(node)
    }
}

impl PlanHca {
    fn of(facts: Hca, scanned: &HostSnapshot, machine: &Machine, nearest: &[Vec<usize>]) -> Self {
        // A VF is where its physical function is.
        let mut nics = machine.nics.iter();
        let nic = nics.position(|nic| nic.hca.id == facts.id);
        let mut nics = machine.nics.iter();
        let nic = nic.or_else(|| nics.position(|nic| Some(nic.physical()) == facts.pf()));
        let rail = nic.and_then(|nic| machine.nics.get(nic)?.rail.as_ref());
        // Also of a netdev that a pod has now.
        let names = facts.pf_netdevs.iter().map(String::as_str);
        let named = names.chain(facts.netdev_names()).find_map(in_name);
        let netdevs = facts.netdev_names();
        let netdevs = netdevs.filter_map(|name| scanned.inventory.netdev(name));
        let netdevs: Vec<&Netdev> = netdevs.collect();
        let function = facts.pci.as_ref().map(|pci| pci.address);
        let uplink = uplink(&facts, scanned);
        let nodes = (facts.rdma_devices.iter()).flat_map(|device| device.char_devices.iter());
        let unusable = nodes.into_iter().find_map(|node| scanned.obstacle(node));
        let needed = uplink
            .as_ref()
            .map(|why| format!("for the node itself: {why}"));
        let reserved = facts.reserved().map(|why| why.to_string());
        Self {
            obstacle: reserved.or(needed).or(facts.fault.clone()).or(unusable),
            is_uplink: uplink.is_some(),
            gpus: (0..)
                .zip(nearest)
                .filter(|(_, nics)| nic.is_some_and(|nic| nics.contains(&nic)))
                .map(|(gpu, _)| gpu)
                .collect(),
            rail: named.map(u64::from).or(rail.map(|rail| rail.number.into())),
            is_named: named.is_some(),
            mtu: netdevs.iter().map(|netdev| netdev.mtu).min(),
            apart: function.is_some()
                && !netdevs.is_empty()
                && netdevs.iter().all(|netdev| netdev.pci != function),
            rate: 0,
            addresses: Vec::new(),
            facts,
        }
    }

    pub(crate) fn kind(&self) -> FunctionKind {
        self.facts.function().kind
    }

    pub(crate) fn link(&self) -> &'static str {
        self.facts.link_layer().word()
    }

    fn model(&self) -> (Option<(u16, u16)>, FunctionKind, &'static str) {
        let pci = self.facts.pci.as_ref();
        let device = pci.map(|pci| (pci.vendor, pci.device));
        (device, self.kind(), self.link())
    }

    fn own_rate(&self) -> u32 {
        let ports = self.facts.ports();
        let rates = ports.filter_map(|(_, port)| Some(port.rate.as_ref()?.mbps));
        rates.max().unwrap_or(0)
    }

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
        self.apart || self.link() == "other"
    }
}

/// The nodes that answered to `discover`, and why the others are not in the plan.
pub(crate) fn nodes(answers: &[Value]) -> (Vec<PlanNode>, Vec<String>) {
    let (mut nodes, mut silent) = (Vec::new(), Vec::new());
    for answer in answers {
        let name = text_of(answer["node"].as_str().unwrap_or("-"));
        let node = match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => PlanNode::read(name.clone(), &answer["document"]),
        };
        match node {
            Ok(node) => nodes.push(node),
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
