//! What the nodes answered, as the facts that a plan is made from.

use std::collections::BTreeMap;

use cni_wire::text::printable;
use hca::{HcaId, Netdev, PciAddress};
use rdma_device_plugin::candidate::Candidate;
use serde::Deserialize;
use serde_json::Value;

use crate::discover::{Document, HostAddress};

/// A node.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub name: String,
    /// In the order of their identities.
    pub hcas: Vec<Hca>,
    /// Titles of its GPUs.
    pub gpus: Vec<String>,
    pub addresses: Vec<HostAddress>,
    /// Its RDMA subsystem is in exclusive mode.
    pub exclusive_netns: bool,
}

/// An HCA of a node.
#[derive(Debug, Clone)]
pub(crate) struct Hca {
    pub facts: Candidate,
    /// Why the node itself needs it.
    pub uplink: Option<String>,
    /// Why its device nodes cannot be used.
    pub obstacle: Option<String>,
    /// GPUs that it is one of the nearest NICs of.
    pub gpus: Vec<usize>,
    /// The rail of its physical function, and whether a netdev's name says it.
    pub rail: Option<(u32, bool)>,
    /// The least MTU of its netdevs; none while they are not visible.
    pub mtu: Option<u32>,
    /// Addresses of its netdevs.
    pub addresses: Vec<HostAddress>,
    /// Its netdev stands on another function, as that of a cloud's virtual NIC.
    pub apart: bool,
}

/// A node that has no part in the plan, and why.
pub(crate) type Silent = (String, String);

#[derive(Deserialize)]
struct Topology {
    gpus: Vec<Gpu>,
    nics: Vec<Nic>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Gpu {
    model: Option<String>,
    #[serde(default)]
    nearest_nics: Vec<usize>,
}

#[derive(Deserialize)]
struct Nic {
    hca: HcaId,
    physical: PciAddress,
    rail: Option<Rail>,
}

#[derive(Deserialize)]
struct Rail {
    number: u32,
    source: String,
}

/// The nodes of documents of `kubectl rdma discover --json` and `kubectl rdma topology --json`, or of
/// the same commands of `rdmactl` on one node, which is called `name`.
///
/// # Errors
/// A document is neither.
pub(crate) fn nodes(documents: &[Value], name: &str) -> anyhow::Result<(Vec<Node>, Vec<Silent>)> {
    let mut answers: BTreeMap<String, [Option<Result<Value, String>>; 2]> = BTreeMap::new();
    let mut add = |node: &str, document: &Value, error: Option<&str>| {
        let [discover, topology] = answers.entry(printable(node)).or_default();
        let known = error.map_or_else(|| Ok(document.clone()), |error| Err(printable(error)));
        match (document.get("hcas"), document.get("gpus")) {
            (Some(_), _) => *discover = Some(known),
            (_, Some(_)) => *topology = Some(known),
            // It failed: of which command does not matter.
            _ if discover.is_none() => *discover = Some(known),
            _ => *topology = Some(known),
        }
    };
    for document in documents {
        match document.get("nodes").and_then(Value::as_array) {
            Some(nodes) => nodes.iter().for_each(|node| {
                let text = |key: &str| node.get(key).and_then(Value::as_str);
                let name = text("node").unwrap_or("-");
                add(name, &node["document"], text("error"));
            }),
            None if document.get("hcas").or(document.get("gpus")).is_some() => {
                add(name, document, None);
            }
            None => anyhow::bail!(
                "a file is not what \"kubectl rdma discover --json\" or \"kubectl rdma topology \
                 --json\" prints"
            ),
        }
    }
    let (mut nodes, mut silent) = (Vec::new(), Vec::new());
    for (name, [discover, topology]) in answers {
        let missing = || Err("one of discover and topology is missing".to_owned());
        let both = discover.unwrap_or_else(missing);
        let both = both.and_then(|one| Ok((one, topology.unwrap_or_else(missing)?)));
        match both.and_then(|(discover, topology)| node(&name, &discover, &topology)) {
            Ok(node) => nodes.push(node),
            Err(error) => silent.push((name, error)),
        }
    }
    Ok((nodes, silent))
}

fn node(name: &str, discover: &Value, topology: &Value) -> Result<Node, String> {
    let unread = |error: serde_json::Error| printable(&format!("its answer is not read: {error}"));
    let document = Document::deserialize(discover).map_err(unread)?;
    let topology = Topology::deserialize(topology).map_err(unread)?;
    if document.candidates.len() != document.hcas.len() {
        return Err("its daemon is older than this program: update the DaemonSet".to_owned());
    }
    let netdevs = document.inventory.get("netdevs").cloned();
    let netdevs: Vec<Netdev> =
        serde_json::from_value(netdevs.unwrap_or_default()).map_err(unread)?;
    let mut hcas = Vec::new();
    for (facts, shown) in document.candidates.into_iter().zip(&document.hcas) {
        // A VF is where its physical function is.
        let mut nics = topology.nics.iter();
        let nic = nics.position(|nic| nic.hca == facts.id).or_else(|| {
            let mut nics = topology.nics.iter();
            nics.position(|nic| Some(nic.physical) == facts.pf())
        });
        let gpus = topology.gpus.iter().enumerate();
        let near = gpus.filter(|(_, gpu)| nic.is_some_and(|nic| gpu.nearest_nics.contains(&nic)));
        let own = |name: &str| facts.netdev_names().any(|own| own == name);
        let here = netdevs.iter().filter(|netdev| own(&netdev.name));
        let function = facts.pci.as_ref().map(|pci| pci.address);
        hcas.push(Hca {
            uplink: shown.uplink.clone(),
            obstacle: shown.nodes.iter().find_map(|node| node.obstacle.clone()),
            gpus: near.map(|(ordinal, _)| ordinal).collect(),
            rail: nic.and_then(|nic| {
                let rail = topology.nics.get(nic)?.rail.as_ref()?;
                Some((rail.number, rail.source == "name"))
            }),
            mtu: here.clone().map(|netdev| netdev.mtu).min(),
            apart: function.is_some() && here.clone().any(|netdev| netdev.pci != function),
            addresses: (document.addresses.iter())
                .filter(|address| address.netdev.as_deref().is_some_and(own))
                .cloned()
                .collect(),
            facts,
        });
    }
    hcas.sort_by(|a, b| a.facts.id.cmp(&b.facts.id));
    let title = |gpu: Gpu| gpu.model.unwrap_or_else(|| "GPU".to_owned());
    Ok(Node {
        name: name.to_owned(),
        hcas,
        gpus: topology.gpus.into_iter().map(title).collect(),
        addresses: document.addresses,
        exclusive_netns: document.inventory.get("netnsMode") == Some(&"exclusive".into()),
    })
}
