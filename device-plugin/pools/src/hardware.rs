//! The hardware of HCAs, as the daemon's status shows it. Pure.

use std::collections::BTreeSet;

use hca::inventory::FunctionKind;
use hca::port::LinkLayer;
use hca::topology::{Machine, Nic};
use hca::{Hca, HcaId, Port, RdmaDevice};
use node_wire::status::{HostHca, HostPort, NearGpu};

use crate::history::Memory;
use crate::snapshot::Snapshot;

/// All HCAs but virtual and scalable functions that no pool has: a card can have a thousand.
pub(crate) fn list(
    candidates: &[Hca],
    machine: &Machine,
    pools: &[Snapshot],
    memory: &Memory,
) -> Vec<HostHca> {
    let members = pools.iter().flat_map(|pool| pool.members());
    let pooled: BTreeSet<&HcaId> = members.map(|member| &member.hca.id).collect();
    let is_slice = |hca: &Hca| matches!(hca.function().kind, FunctionKind::Vf | FunctionKind::Sf);
    let shown = candidates
        .iter()
        .filter(|hca| pooled.contains(&hca.id) || !is_slice(hca));
    let mut shown: Vec<HostHca> = shown
        .map(|hca| {
            let nic = machine.nics.iter().find(|nic| nic.hca.id == hca.id);
            HostHca {
                rail: memory.rail(&hca.id),
                gpus: nic.map(|nic| nearest(machine, nic)).unwrap_or_default(),
                ..describe(hca)
            }
        })
        .collect();
    shown.sort_by(|one, other| one.id.cmp(&other.id));
    shown
}

/// The GPUs that are nearest to a NIC.
fn nearest(machine: &Machine, nic: &Nic) -> Vec<NearGpu> {
    let class = |gpu: &hca::topology::Gpu| machine.distance(&gpu.place, &nic.place).class;
    let least = machine.gpus.iter().map(class).min();
    let near = machine.gpus.iter().filter(|gpu| Some(class(gpu)) == least);
    near.map(|gpu| NearGpu {
        gpu: gpu.place.address.to_string(),
        class: class(gpu).label().to_owned(),
    })
    .collect()
}

fn describe(hca: &Hca) -> HostHca {
    let first = |of: fn(&RdmaDevice) -> Option<&String>| hca.rdma_devices.iter().find_map(of);
    let pci = hca.pci.as_ref();
    HostHca {
        id: hca.id.to_string(),
        function: hca.function().kind.word().to_owned(),
        device: pci.map(|pci| format!("{:04x}:{:04x}", pci.vendor, pci.device)),
        rdma_devices: hca.rdma_names().into_iter().map(str::to_owned).collect(),
        board: first(|device| device.board_id.as_ref()).cloned(),
        firmware: first(|device| device.firmware.as_ref()).cloned(),
        numa_node: hca.numa_node(),
        rail: None,
        gpus: Vec::new(),
        ports: hca
            .ports()
            .map(|(device, port)| describe_port(hca, device, port))
            .collect(),
    }
}

fn describe_port(hca: &Hca, device: &RdmaDevice, port: &Port) -> HostPort {
    let netdev = hca.netdev_of(port);
    let guid = match port.link_layer {
        LinkLayer::InfiniBand => port.guid(),
        // A GID of RoCE goes with the netdev's address.
        LinkLayer::Ethernet | LinkLayer::Unknown => device.node_guid,
    };
    HostPort {
        name: format!("{}:{}", device.name, port.number),
        netdev: netdev.map(|netdev| netdev.name.clone()),
        link_layer: port.link_layer.word().to_owned(),
        state: port.state.to_string(),
        rate_mbps: port.rate.as_ref().map(|rate| rate.mbps),
        mtu: netdev.map(|netdev| netdev.mtu),
        guid: guid.map(|guid| guid.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};

    use super::*;

    #[test]
    fn an_hca_is_shown_with_its_ports_and_nearest_gpus() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        machine::a4(&tree);
        let host = tree.host();
        let inventory = hca::inventory(&host).unwrap();
        let gpus = hca::topology::gpu::places(&host).unwrap();
        let machine = Machine::read(&host, &inventory, gpus).unwrap();
        let shown = list(&inventory.hcas, &machine, &[], &Memory::default());
        assert_eq!(shown.len(), 8);
        let first = &shown[0];
        assert_eq!(first.function, "pf");
        let near = first.gpus.iter().map(|near| (&*near.gpu, &*near.class));
        let near: Vec<_> = near.collect();
        assert_eq!(near, [("0000:8f:00.0", "PIX"), ("0000:90:00.0", "PIX")]);
        let [port] = first.ports.as_slice() else {
            panic!("{first:?}")
        };
        assert_eq!((&*port.link_layer, &*port.state), ("ether", "ACTIVE"));
        assert!(port.netdev.is_some() && port.mtu.is_some() && port.rate_mbps.is_some());
    }

    #[test]
    fn a_virtual_function_is_shown_only_in_a_pool() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        hca_trees::cloud::vf_without_guid(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        let vfs = inventory.hcas.iter().filter(|hca| hca.owner().is_some());
        assert!(vfs.count() > 0);
        let shown = list(
            &inventory.hcas,
            &Machine::default(),
            &[],
            &Memory::default(),
        );
        assert!(shown.iter().all(|hca| hca.function != "vf"), "{shown:?}");
    }
}
