//! What is shown of a node's topology: the machine, the pods that have its devices, and remarks.

use std::collections::{BTreeMap, BTreeSet};

use hca::topology::{Distance, Gpu, Machine, Nic, PciLocation};
use hca::{Host, PciAddress};
use serde_json::{Value, json};

use crate::documents::put;
use crate::pcie_link::PcieLink;

/// All that the faces show.
#[derive(Debug, Default)]
pub(super) struct View {
    /// GPUs, NICs, NUMA nodes.
    pub machine: Machine,
    /// PCIe links of GPUs and NICs.
    pub links: BTreeMap<PciAddress, PcieLink>,
    /// Pods by HCA and by the PCI address of a GPU.
    pub pods: BTreeMap<String, BTreeSet<String>>,
    /// Further remarks, such as why the kubelet did not answer.
    pub remarks: Vec<String>,
}

impl View {
    /// A machine, with the links of its devices.
    pub(super) fn of(host: &Host, machine: Machine) -> Self {
        let gpus = machine.gpus.iter().map(|gpu| gpu.place.address);
        let nics = machine.nics.iter().map(|nic| nic.place.address);
        let link = |address| (address, PcieLink::read(host, address));
        Self {
            links: gpus.chain(nics).map(link).collect(),
            machine,
            ..Self::default()
        }
    }

    /// The PCIe link of the function at a place.
    pub(super) fn link(&self, place: &PciLocation) -> PcieLink {
        let link = self.links.get(&place.address);
        link.copied().unwrap_or_default()
    }

    /// Pods that have an HCA or a GPU.
    pub(super) fn pods_with(&self, device: impl ToString) -> Vec<&str> {
        let pods = self.pods.get(&device.to_string()).into_iter().flatten();
        pods.map(String::as_str).collect()
    }

    /// What a person should know about this node, one sentence each.
    pub(super) fn notes(&self) -> Vec<String> {
        let machine = &self.machine;
        let mut notes = Vec::new();
        if hides_switches(machine) {
            let note = "each device has a root complex of its own: the hypervisor hides the \
                        switches. topology.ncclTopology of the pools names a file that describes them, \
                        for late binding";
            notes.push(note.to_owned());
        }
        for nic in &machine.nics {
            if let Some(rail) = &nic.rail
                && let Some((source, number)) = &rail.differs
            {
                notes.push(format!(
                    "{} is on rail {} by {}, but would be on rail {number} by {}: check that all \
                     nodes agree, or number rails by rails of the node's policy",
                    nic.title(),
                    rail.number,
                    rail.source.description(),
                    source.description()
                ));
            }
        }
        let nowhere =
            |place: &PciLocation| place.numa.is_none() && machine.numa.nodes_with_cpus() > 1;
        let gpus = machine.gpus.iter().filter(|gpu| nowhere(&gpu.place));
        let gpus = gpus.map(|gpu| format!("GPU{}", gpu.ordinal));
        let nics = machine
            .nics
            .iter()
            .filter(|nic| nowhere(&nic.place))
            .map(Nic::title);
        let unknown: Vec<String> = gpus.chain(nics).collect();
        if !unknown.is_empty() {
            notes.push(format!(
                "the firmware does not state the NUMA node of {}: cells with a question mark are \
                 cautious guesses",
                unknown.join(", ")
            ));
        }
        if !machine.unplaced.is_empty() {
            notes.push(format!(
                "not on any PCI device, so without a place here: {}",
                machine.unplaced.join(", ")
            ));
        }
        notes.extend(self.remarks.iter().cloned());
        notes
    }

    /// The whole as one document.
    pub(super) fn document(&self) -> Value {
        let machine = &self.machine;
        let gpus: Vec<&PciLocation> = machine.gpus.iter().map(|gpu| &gpu.place).collect();
        let nics: Vec<&PciLocation> = machine.nics.iter().map(|nic| &nic.place).collect();
        let gpu = |gpu: &Gpu| {
            let mut entry = json!(gpu);
            put(&mut entry, "link", json!(self.link(&gpu.place)));
            put(
                &mut entry,
                "nearestNics",
                json!(nearest_nics(machine, &gpu.place)),
            );
            put(&mut entry, "pod", json!(self.pods_with(gpu.place.address)));
            entry
        };
        let nic = |nic: &Nic| {
            let hca = &nic.hca;
            json!({
                "hca": hca.id,
                "place": nic.place,
                "physical": nic.physical(),
                "card": (!nic.is_slice()).then_some(nic.place.address.card()),
                "rdmaDevices": hca.rdma_names(),
                "elsewhere": hca.elsewhere,
                "netdevs": hca.netdev_names().collect::<Vec<_>>(),
                "linkLayer": hca.link_layer(),
                "rateMbps": hca.rate_mbps(),
                "link": self.link(&nic.place),
                "rail": nic.rail,
                "pod": self.pods_with(&hca.id),
            })
        };
        json!({
            "gpus": machine.gpus.iter().map(gpu).collect::<Vec<_>>(),
            "nics": machine.nics.iter().map(nic).collect::<Vec<_>>(),
            "numa": machine.numa,
            "unplaced": machine.unplaced,
            "distances": {
                "gpuNic": self.distances(&gpus, &nics),
                "gpuGpu": self.distances(&gpus, &gpus),
                "nicNic": self.distances(&nics, &nics),
            },
            "notes": self.notes(),
        })
    }

    /// What people call these NICs.
    pub(super) fn names(&self, nics: &[usize]) -> Vec<String> {
        let nics = nics.iter().filter_map(|nic| self.machine.nics.get(*nic));
        nics.map(Nic::title).collect()
    }

    fn distances(&self, rows: &[&PciLocation], columns: &[&PciLocation]) -> Vec<Vec<Distance>> {
        let row = |a: &&PciLocation| {
            columns
                .iter()
                .map(|b| self.machine.distance(a, b))
                .collect()
        };
        rows.iter().map(row).collect()
    }
}

/// Positions of the NICs that are nearest to a place.
pub(crate) fn nearest_nics(machine: &Machine, place: &PciLocation) -> Vec<usize> {
    let to = |nic: &Nic| machine.distance(place, &nic.place).class;
    let least = machine.nics.iter().map(to).min();
    let nics = machine.nics.iter().enumerate();
    nics.filter(|(_, nic)| Some(to(nic)) == least)
        .map(|(index, _)| index)
        .collect()
}

/// True if each function has a root complex of its own, as hypervisors present passed-through devices: the
/// tree then shows nothing about switches, and an override is worth having.
fn hides_switches(machine: &Machine) -> bool {
    let gpus = machine.gpus.iter().map(|gpu| &gpu.place);
    let nics = machine.nics.iter().map(|nic| &nic.place);
    let places: Vec<&PciLocation> = gpus.chain(nics).collect();
    let alone = |place: &&PciLocation| {
        place.chain.len() == 1 && places.iter().filter(|p| p.root == place.root).count() == 1
    };
    machine.gpus.len() > 1 && !machine.nics.is_empty() && places.iter().all(alone)
}
