//! HCAs with several ports or RDMA devices.

use hca::{Hca, HcaId, Inventory};
use hca_trees::{Tree, ports};

use crate::{Machine, PF1, pci};

fn scan(lay: fn(&Tree)) -> (Machine, Inventory) {
    let machine = Machine::new();
    lay(&machine.tree);
    let inventory = machine.inventory();
    (machine, inventory)
}

fn card(inventory: &Inventory) -> &Hca {
    inventory.hca(&HcaId::Pci(pci(ports::CARD))).unwrap()
}

/// Numbers of the ports that carry data, with their netdevs.
fn data_ports(hca: &Hca) -> Vec<(u32, &str)> {
    let ports = hca.ports();
    ports
        .map(|(_, port)| (port.number, port.netdev.as_deref().unwrap_or("-")))
        .collect()
}

#[test]
fn a_sub_device_is_part_of_its_hca_and_carries_no_data() {
    let (machine, inventory) = scan(ports::xdr_with_smi);
    let hca = card(&inventory);
    assert_eq!(hca.rdma_names(), ["mlx5_0"]);
    assert_eq!(hca.sub_devices.len(), 1);
    assert_eq!(data_ports(hca), [(1, "ibs192")]);
    assert_eq!(hca.port_names(), ["mlx5_0:1"]);
    assert_eq!(inventory.rdma_devices().count(), 1);
    assert_eq!(machine.on_pci(ports::CARD).1, ["mlx5_0"]);
    assert_eq!(machine.ports_of("ibs192"), ["mlx5_0/1"]);
    let nodes = hca::chardev::of_hca(&machine.tree.host(), &hca.id, &["mlx5_0"]).unwrap();
    assert_eq!(nodes.keys().collect::<Vec<_>>(), ["mlx5_0"]);
}

#[test]
fn a_sub_device_stays_behind_when_a_pod_takes_the_hca() {
    let (machine, _) = scan(ports::xdr_with_smi);
    machine.tree.rdma_core(false);
    machine.tree.hide_rdma("mlx5_0");
    let inventory = machine.inventory();
    let hca = card(&inventory);
    assert!(hca.elsewhere && !hca.is_read());
    assert_eq!(hca.rdma_names(), ["mlx5_0"]);
}

#[test]
fn each_plane_has_the_netdev_that_its_gids_name() {
    let (machine, inventory) = scan(ports::four_planes);
    let hca = card(&inventory);
    let expected = [
        (3, "eth_r0_p0"),
        (6, "eth_r0_p1"),
        (9, "eth_r0_p2"),
        (12, "eth_r0_p3"),
    ];
    assert_eq!(data_ports(hca), expected);
    let names = ["mlx5_0:3", "mlx5_0:6", "mlx5_0:9", "mlx5_0:12"];
    assert_eq!(hca.port_names(), names);
    for (port, netdev) in expected {
        assert_eq!(machine.ports_of(netdev), [format!("mlx5_0/{port}")]);
    }
    let found = hca::lookup::on_hca(&machine.tree.host(), &hca.id).unwrap();
    let found: Vec<String> = found.netdevs.into_iter().map(|n| n.name).collect();
    assert_eq!(found, hca.netdev_names().collect::<Vec<_>>());
    assert_eq!(found.len(), 4);
}

#[test]
fn a_port_can_have_the_netdev_of_another_function() {
    let (machine, inventory) = scan(ports::multiport_eswitch);
    let hca = card(&inventory);
    assert_eq!(data_ports(hca), [(1, "ens1f0np0"), (2, "ens1f1np1")]);
    assert_eq!(machine.ports_of("ens1f1np1"), ["mlx5_0/2"]);
    let found = hca::lookup::hardware_of_netdev(&machine.tree.host(), "ens1f1np1").unwrap();
    assert!(found.hcas.contains(&hca.id), "{found:?}");
    // A pod has one of them.
    machine.tree.hide_netdev("ens1f1np1");
    let inventory = machine.inventory();
    assert_eq!(data_ports(card(&inventory)), [(1, "ens1f0np0")]);
    assert!(inventory.hca(&HcaId::Pci(pci(PF1))).is_none());
}

#[test]
fn the_port_with_the_cable_is_the_one_to_use() {
    let (machine, inventory) = scan(ports::cabled_on_port_2);
    let hca = card(&inventory);
    assert_eq!(data_ports(hca), [(1, "ens1"), (2, "ens1d1")]);
    assert_eq!(hca.port_names(), ["mlx4_0:2"]);
    assert_eq!(machine.ports_of("ens1d1"), ["mlx4_0/2"]);
    machine
        .tree
        .set_port_state("mlx4_0", 2, "1: DOWN", "2: Polling");
    let inventory = machine.inventory();
    assert_eq!(card(&inventory).port_names(), ["mlx4_0:1", "mlx4_0:2"]);
}
