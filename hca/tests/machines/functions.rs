//! What one adapter is divided into: VFs, representors, sub-functions, bonds.

use hca::unit::HcaId;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec};

use crate::{Machine, PF0, PF1, pci, two_functions};

#[test]
fn representors_are_neither_a_ports_netdev_nor_rdma_capable() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
        ..PciSpec::MLX5
    });
    // The representor comes first in order of name and of index.
    for (name, phys_port_name) in [
        ("ens1_0", "pf0vf0"),
        ("ens1sf4", "c1pf0sf4"),
        ("ens1np0", "p0"),
    ] {
        machine.tree.netdev(&NetdevSpec {
            name,
            on: On::Pci(PF0),
            phys_port_name,
            ..NetdevSpec::default()
        });
    }
    machine.tree.rdma(&RdmaSpec {
        on: On::Pci(PF0),
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    assert_eq!(
        inventory.rdma_devices().next().unwrap().ports[0]
            .netdev
            .as_deref(),
        Some("ens1np0")
    );
    assert!(machine.ports_of("ens1_0").is_empty());
    assert!(machine.ports_of("ens1sf4").is_empty());
    assert_eq!(machine.on_pci(PF0).0, ["ens1np0"]);
}

#[test]
fn a_virtual_function_is_distinguished_from_its_physical_one() {
    let machine = Machine::new();
    two_functions(&machine);
    let vf = "0000:3b:08.2";
    machine.tree.vf(
        PF1,
        0,
        &PciSpec {
            address: vf,
            device: 0x101e,
            ..PciSpec::MLX5
        },
    );
    machine.tree.netdev(&NetdevSpec {
        name: "ens1f1v0",
        on: On::Pci(vf),
        ..NetdevSpec::default()
    });
    machine.tree.rdma(&RdmaSpec {
        name: "mlx5_2",
        on: On::Pci(vf),
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let function = inventory
        .rdma_device("mlx5_2")
        .unwrap()
        .pci
        .as_ref()
        .unwrap();
    assert_eq!(
        function.sriov,
        hca::pci::Sriov::Virtual {
            physical: pci(PF1),
            index: Some(0)
        }
    );
    assert_eq!(
        machine.on_pci(vf),
        (vec!["ens1f1v0".into()], vec!["mlx5_2".into()])
    );
    assert_eq!(machine.on_pci(PF1).1, ["mlx5_1"], "the PF's own alone");
}

#[test]
fn a_sub_function_is_a_nic_of_its_own() {
    let machine = Machine::new();
    two_functions(&machine);
    let sf = "mlx5_core.sf.4";
    machine.tree.subfunction(PF0, sf, 88);
    machine.tree.netdev(&NetdevSpec {
        name: "ens1f0s88",
        on: On::Auxiliary(sf),
        ..NetdevSpec::default()
    });
    machine.tree.rdma(&RdmaSpec {
        name: "mlx5_4",
        on: On::Auxiliary(sf),
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let device = inventory.rdma_device("mlx5_4").unwrap();
    assert_eq!(device.auxiliary.as_deref(), Some(sf));
    assert_eq!(device.subfunction, Some(88));
    assert_eq!(
        device.pci.as_ref().unwrap().address,
        pci(PF0),
        "where it is in the machine"
    );
    assert_eq!(HcaId::of(device).unwrap().to_string(), sf);
    assert_eq!(machine.ports_of("ens1f0s88"), ["mlx5_4/1"]);

    let id: HcaId = sf.parse().unwrap();
    let found = hca::lookup::on_hca(&machine.tree.host(), &id).unwrap();
    assert_eq!(
        (
            found.netdevs[0].name.as_str(),
            found.rdma_devices[0].as_str()
        ),
        ("ens1f0s88", "mlx5_4")
    );
    assert_eq!(
        machine.on_pci(PF0),
        (vec!["ens1f0np0".into()], vec!["mlx5_0".into()])
    );
    let function = inventory.hca(&HcaId::Pci(pci(PF0))).unwrap();
    assert_eq!(function.rdma_names(), ["mlx5_0"]);
    assert_eq!(inventory.netdevs_on_pci(pci(PF0)).count(), 1);
    let on_sf = |device: &&hca::RdmaDevice| device.auxiliary.as_deref() == Some(sf);
    assert_eq!(inventory.rdma_devices().filter(on_sf).count(), 1);
}

#[test]
fn a_bond_has_the_port_of_the_device_that_spans_it() {
    let machine = Machine::new();
    for (address, name, mac) in [
        (PF0, "ens1f0np0", "b8:59:9f:00:00:01"),
        (PF1, "ens1f1np1", "b8:59:9f:00:00:02"),
    ] {
        machine.tree.pci(&PciSpec {
            address,
            ..PciSpec::MLX5
        });
        machine.tree.netdev(&NetdevSpec {
            name,
            on: On::Pci(address),
            mac,
            ..NetdevSpec::default()
        });
    }
    machine.tree.netdev(&NetdevSpec {
        name: "bond0",
        kind: "bond",
        lowers: &["ens1f0np0", "ens1f1np1"],
        ..NetdevSpec::default()
    });
    machine.tree.netdev(&NetdevSpec {
        name: "bond0.7",
        kind: "vlan",
        lowers: &["bond0"],
        ..NetdevSpec::default()
    });
    // With RDMA LAG one device stands for both ports, on the first function.
    machine.tree.rdma(&RdmaSpec {
        name: "mlx5_bond_0",
        on: On::Pci(PF0),
        ports: &[PortSpec {
            gids: &[
                (0, "fe80::ba59:9fff:fe00:0001", "IB/RoCE v1", "bond0"),
                (3, "::ffff:10.0.0.1", "RoCE v2", "bond0.7"),
            ],
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    assert_eq!(machine.ports_of("bond0"), ["mlx5_bond_0/1"]);
    assert_eq!(machine.ports_of("bond0.7"), ["mlx5_bond_0/1"]);
    assert!(
        machine.ports_of("ens1f1np1").is_empty(),
        "its function has no RDMA device"
    );
    let member = inventory.netdev("ens1f1np1").unwrap();
    assert_eq!(member.master.as_deref(), Some("bond0"));
    assert_eq!(
        member.mac.as_ref().unwrap().to_string(),
        "b8:59:9f:00:00:01",
        "the bond's"
    );
    assert_eq!(
        member.permanent_mac.as_ref().unwrap().to_string(),
        "b8:59:9f:00:00:02"
    );
    assert_eq!(
        inventory.netdev("bond0").unwrap().kind.as_deref(),
        Some("bond")
    );
    assert!(inventory.netdev("bond0.7").is_some(), "known by its GID");
    let hca = hca::HcaId::Pci(pci(PF0));
    let spanning = inventory.hca(&hca).unwrap();
    assert_eq!(spanning.netdevs.len(), 1);
    assert_eq!(spanning.bond_names, ["bond0", "ens1f1np1"]);
    for upper in ["bond0", "bond0.7"] {
        let found = hca::lookup::hardware_of_netdev(&machine.tree.host(), upper).unwrap();
        assert!(found.hcas.contains(&hca), "{upper}: {found:?}");
    }
}

#[test]
fn json_has_numbers_and_addresses_as_people_write_them() {
    let machine = Machine::new();
    two_functions(&machine);
    let vf = PciSpec {
        address: "0000:3b:08.2",
        ..PciSpec::MLX5
    };
    machine.tree.vf(PF1, 0, &vf);
    let json = serde_json::to_value(machine.inventory()).unwrap();

    assert_eq!(json["netnsMode"], "shared");
    assert_eq!(json["rdmaCm"]["number"], "10:124");
    let device = &json["hcas"][1]["rdmaDevices"][0];
    assert_eq!(device["nodeGuid"], "b859:9f03:0000:0002");
    assert_eq!(device["pci"]["address"], PF1);
    assert_eq!(device["pci"]["vendor"], "0x15b3");
    assert_eq!(device["pci"]["class"], "0x020000");
    assert_eq!(
        device["pci"]["sriov"]["functions"][0]["address"],
        vf.address
    );
    assert_eq!(device["charDevices"]["umad"][0]["port"], 1);
    assert_eq!(device["charDevices"]["umad"][0]["number"], "231:2");
    let port = &device["ports"][0];
    assert_eq!(port["rate"], "100 Gb/sec (4X EDR)");
    assert_eq!(port["pkeys"][0]["key"], "0xffff");
    assert_eq!(json["netdevs"][1]["mac"], "b8:59:9f:00:00:02");
}
