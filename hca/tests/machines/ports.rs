//! Ports and their netdevs: one and two ports, both link layers, none at all.

use hca::unit::HcaId;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec};

use crate::{Machine, PF0, PF1, pci, two_functions};

#[test]
fn each_function_of_a_dual_port_card_is_a_device() {
    let machine = Machine::new();
    two_functions(&machine);
    let inventory = machine.inventory();

    assert_eq!(machine.ports_of("ens1f0np0"), ["mlx5_0/1"]);
    assert_eq!(
        machine.ports_of("ens1f1np1"),
        ["mlx5_1/1"],
        "port 1 although dev_port is 1"
    );
    assert_eq!(
        machine.on_pci(PF1),
        (vec!["ens1f1np1".into()], vec!["mlx5_1".into()])
    );

    let device = inventory.rdma_device("mlx5_1").unwrap();
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.pci.as_ref().unwrap().numa_node, Some(1));
    assert_eq!(device.ports[0].active_mtu, Some(4096));
    assert_eq!(HcaId::of(device), Some(HcaId::Pci(pci(PF1))));
    assert_eq!(
        inventory.rdma_cm.as_ref().unwrap().number.to_string(),
        "10:124"
    );

    let mac = "b8:59:9f:00:00:02".parse().unwrap();
    let by_mac = hca::lookup::netdevs_by_mac(&machine.tree.host(), &mac).unwrap();
    assert_eq!(
        by_mac.iter().map(|n| n.name.as_str()).collect::<Vec<_>>(),
        ["ens1f1np1"]
    );
}

#[test]
fn two_ports_of_one_device_are_distinguished_by_dev_port() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
        driver: "mlx4_core",
        ..PciSpec::MLX5
    });
    for (name, dev_port) in [("ens1d1", 1), ("ens1", 0)] {
        machine.tree.netdev(&NetdevSpec {
            name,
            on: On::Pci(PF0),
            dev_port,
            ..NetdevSpec::default()
        });
    }
    machine.tree.rdma(&RdmaSpec {
        name: "mlx4_0",
        on: On::Pci(PF0),
        ports: &[PortSpec::ROCE, PortSpec::DOWN],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let device = inventory.rdma_device("mlx4_0").unwrap();
    assert_eq!(
        device.netdevs().collect::<Vec<_>>(),
        ["ens1", "ens1d1"],
        "in order of port"
    );
    assert_eq!(machine.ports_of("ens1"), ["mlx4_0/1"]);
    assert_eq!(machine.ports_of("ens1d1"), ["mlx4_0/2"]);
    assert!(device.port(1).unwrap().is_active());
    assert!(!device.port(2).unwrap().is_active());
    let umad = device.char_devices.umad.iter();
    let ports: Vec<u32> = umad.filter_map(|node| node.port).collect();
    assert_eq!(ports, [1, 2], "the nodes of both ports");
}

#[test]
fn a_port_of_each_link_layer_finds_its_own_netdev() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
        driver: "mlx4_core",
        ..PciSpec::MLX5
    });
    let ipoib = "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:00:00:01";
    machine.tree.netdev(&NetdevSpec {
        name: "ib0",
        on: On::Pci(PF0),
        mac: ipoib,
        link_type: 32,
        mtu: 2044,
        ..NetdevSpec::default()
    });
    machine.tree.netdev(&NetdevSpec {
        name: "ens1d1",
        on: On::Pci(PF0),
        dev_port: 1,
        ..NetdevSpec::default()
    });
    machine.tree.rdma(&RdmaSpec {
        name: "mlx4_0",
        on: On::Pci(PF0),
        ports: &[
            PortSpec {
                pkeys: &[0xffff, 0, 0x8001],
                ..PortSpec::INFINIBAND
            },
            PortSpec::ROCE,
        ],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let device = inventory.rdma_device("mlx4_0").unwrap();
    assert_eq!(device.netdevs().collect::<Vec<_>>(), ["ib0", "ens1d1"]);
    let port = device.port(1).unwrap();
    assert_eq!((port.lid, port.sm_lid, port.active_mtu), (7, 1, None));
    assert_eq!(
        super::pkeys(port),
        [(0, 0xffff), (2, 0x8001)],
        "empty entries left out"
    );
    let guid = inventory
        .netdev("ib0")
        .unwrap()
        .mac
        .as_ref()
        .unwrap()
        .port_guid()
        .unwrap();
    assert_eq!(guid.to_string(), "b859:9f03:0000:0001");
}

#[test]
fn an_ipoib_child_has_its_parents_port_and_is_not_its_netdev() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
        driver: "mlx4_core",
        ..PciSpec::MLX5
    });
    let ib0 = NetdevSpec {
        name: "ib0",
        on: On::Pci(PF0),
        link_type: 32,
        ..NetdevSpec::default()
    };
    machine.tree.netdev(&ib0);
    machine.tree.netdev(&NetdevSpec {
        name: "ib1",
        dev_port: 1,
        ..ib0
    });
    // A child does not show its port, and depending on the kernel not its hardware either.
    for (name, on) in [("ib1.8001", On::Pci(PF0)), ("ib1.8002", On::Nothing)] {
        machine.tree.netdev(&NetdevSpec { name, on, ..ib0 });
        let parent = hca::netdev::read(&machine.tree.host(), "ib1").unwrap();
        machine
            .tree
            .file(format!("/sys/class/net/{name}/iflink"), parent.ifindex);
    }
    machine.tree.rdma(&RdmaSpec {
        name: "mlx4_0",
        on: On::Pci(PF0),
        ports: &[PortSpec::INFINIBAND, PortSpec::INFINIBAND],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let device = &inventory.rdma_devices().next().unwrap();
    assert_eq!(device.netdevs().collect::<Vec<_>>(), ["ib0", "ib1"]);
    assert_eq!(machine.on_pci(PF0).0, ["ib0", "ib1"]);
    for child in ["ib1.8001", "ib1.8002"] {
        assert!(inventory.netdev(child).unwrap().is_child(), "{child}");
        assert_eq!(machine.ports_of(child), ["mlx4_0/2"], "{child}");
    }
}

#[test]
fn a_device_without_a_netdev_is_complete_without_one() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: "0000:10:1b.0",
        vendor: 0x1d0f,
        driver: "efa",
        ..PciSpec::MLX5
    });
    machine.tree.rdma(&RdmaSpec {
        name: "efa_0",
        on: On::Pci("0000:10:1b.0"),
        node_type: "7: unspecified",
        vendor_attributes: false,
        ports: &[PortSpec {
            link_layer: "Unspecified",
            ..PortSpec::ROCE
        }],
        mad: false,
        ..RdmaSpec::default()
    });
    // A port without IPoIB loaded.
    machine.tree.pci(&PciSpec {
        address: PF0,
        ..PciSpec::MLX5
    });
    machine.tree.rdma(&RdmaSpec {
        on: On::Pci(PF0),
        ports: &[PortSpec::INFINIBAND],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    for device in inventory.rdma_devices() {
        assert_eq!(device.netdevs().count(), 0, "{}", device.name);
        assert!(device.char_devices.uverbs.is_some(), "{}", device.name);
    }
    let efa = inventory.rdma_device("efa_0").unwrap();
    assert_eq!((efa.board_id.as_ref(), efa.firmware.as_ref()), (None, None));
    assert_eq!(HcaId::of(efa).unwrap().to_string(), "0000:10:1b.0");
    assert_eq!(machine.on_pci(PF0), (vec![], vec!["mlx5_0".into()]));
}
