//! The inventory of machines laid out of files: adapters that no virtual machine has.

#![expect(clippy::unwrap_used, reason = "a test may stop at what it cannot do")]

use hca::tree::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};
use hca::unit::HcaId;
use hca::{Inventory, PciAddress, PortId};

struct Machine {
    _directory: tempfile::TempDir,
    tree: Tree,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        tree.rdma_core(true);
        Self {
            _directory: directory,
            tree,
        }
    }

    /// The inventory, after checking that the fast look-up of every netdev agrees with it.
    fn inventory(&self) -> Inventory {
        let inventory = hca::inventory(&self.tree.host()).unwrap();
        for netdev in &inventory.netdevs {
            assert_eq!(
                self.ports_of(&netdev.name),
                inventory
                    .ports_of_netdev(&netdev.name)
                    .iter()
                    .map(PortId::to_string)
                    .collect::<Vec<_>>(),
                "the fast look-up and the inventory disagree on {}",
                netdev.name
            );
        }
        inventory
    }

    fn ports_of(&self, netdev: &str) -> Vec<String> {
        let ports = hca::lookup::ports_of_netdev(&self.tree.host(), netdev).unwrap();
        ports.iter().map(PortId::to_string).collect()
    }

    fn on_pci(&self, address: &str) -> (Vec<String>, Vec<String>) {
        let found = hca::lookup::on_pci(&self.tree.host(), pci(address)).unwrap();
        (
            found.netdevs.into_iter().map(|n| n.name).collect(),
            found.rdma_devices,
        )
    }
}

fn pci(address: &str) -> PciAddress {
    address.parse().unwrap()
}

const PF0: &str = "0000:3b:00.0";
const PF1: &str = "0000:3b:00.1";

/// A dual-port ConnectX: two functions, each with a netdev and an RDMA device of one port.
fn two_functions(machine: &Machine) {
    for (address, netdev, phys, rdma, guid, mac, dev_port) in [
        (
            PF0,
            "ens1f0np0",
            "p0",
            "mlx5_0",
            "b859:9f03:0000:0001",
            "b8:59:9f:00:00:01",
            0,
        ),
        (
            PF1,
            "ens1f1np1",
            "p1",
            "mlx5_1",
            "b859:9f03:0000:0002",
            "b8:59:9f:00:00:02",
            1,
        ),
    ] {
        machine.tree.pci(&PciSpec {
            address,
            numa_node: 1,
            ..PciSpec::MLX5
        });
        machine.tree.netdev(&NetdevSpec {
            name: netdev,
            on: On::Pci(address),
            mac,
            phys_port_name: phys,
            dev_port,
            ..NetdevSpec::default()
        });
        machine.tree.rdma(&RdmaSpec {
            name: rdma,
            on: On::Pci(address),
            node_guid: guid,
            ..RdmaSpec::default()
        });
    }
}

#[test]
fn each_function_of_a_dual_port_card_is_a_device_of_its_own() {
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
    assert_eq!(device.hca_type.as_deref(), Some("MT4129"));
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.numa_node(), Some(1));
    assert_eq!(device.ports[0].active_mtu, Some(4096));
    assert_eq!(HcaId::of(device), Ok(HcaId::Pci(pci(PF1))));
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
    assert!(inventory.netdevs_by_mac(&mac).eq(by_mac.iter()));
}

#[test]
fn two_ports_of_one_device_are_told_apart_by_dev_port() {
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
    let umad: Vec<u32> = device
        .char_devices
        .umad
        .iter()
        .map(|(port, _)| *port)
        .collect();
    assert_eq!(umad, [1, 2], "the nodes of both ports");
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
        port.pkeys,
        [(0, 0xffff), (2, 0x8001)],
        "empty slots left out"
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
fn an_ipoib_child_has_the_port_of_its_parent_but_is_not_the_ports_netdev() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
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
        name: "ib0.8001",
        lowers: &["ib0"],
        ..ib0
    });
    machine.tree.rdma(&RdmaSpec {
        on: On::Pci(PF0),
        ports: &[PortSpec::INFINIBAND],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    assert_eq!(
        inventory.rdma_devices[0].ports[0].netdev.as_deref(),
        Some("ib0")
    );
    assert_eq!(machine.ports_of("ib0.8001"), ["mlx5_0/1"]);
    assert_eq!(machine.on_pci(PF0).0, ["ib0"]);
    assert!(inventory.netdev("ib0.8001").unwrap().is_child());
}

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
        inventory.rdma_devices[0].ports[0].netdev.as_deref(),
        Some("ens1np0")
    );
    assert!(machine.ports_of("ens1_0").is_empty());
    assert!(machine.ports_of("ens1sf4").is_empty());
    assert_eq!(machine.on_pci(PF0).0, ["ens1np0"]);
}

#[test]
fn a_virtual_function_is_told_from_its_physical_one() {
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

    let found = hca::lookup::on_auxiliary(&machine.tree.host(), sf).unwrap();
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
    assert_eq!(inventory.rdma_on_pci(pci(PF0)).count(), 1);
    assert_eq!(inventory.netdevs_on_pci(pci(PF0)).count(), 1);
    assert_eq!(inventory.rdma_on_auxiliary(sf).count(), 1);
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

    for device in &inventory.rdma_devices {
        assert_eq!(device.netdevs().count(), 0, "{}", device.name);
        assert!(device.char_devices.uverbs.is_some(), "{}", device.name);
    }
    let efa = inventory.rdma_device("efa_0").unwrap();
    assert_eq!((efa.board_id.as_ref(), efa.firmware.as_ref()), (None, None));
    assert_eq!(HcaId::of(efa).unwrap().to_string(), "0000:10:1b.0");
    assert_eq!(machine.on_pci(PF0), (vec![], vec!["mlx5_0".into()]));
}

#[test]
fn an_rdma_function_beside_its_nic_is_found_by_its_gids() {
    let machine = Machine::new();
    // vmxnet3 is function 0, the paravirtual RDMA device function 1 of the same card.
    machine.tree.pci(&PciSpec {
        address: "0000:0b:00.0",
        driver: "vmxnet3",
        ..PciSpec::MLX5
    });
    machine.tree.pci(&PciSpec {
        address: "0000:0b:00.1",
        driver: "vmw_pvrdma",
        ..PciSpec::MLX5
    });
    machine.tree.netdev(&NetdevSpec {
        name: "ens192",
        on: On::Pci("0000:0b:00.0"),
        mac: "00:50:56:00:00:01",
        ..NetdevSpec::default()
    });
    machine.tree.rdma(&RdmaSpec {
        name: "vmw_pvrdma0",
        on: On::Pci("0000:0b:00.1"),
        ports: &[PortSpec {
            gids: &[(0, "fe80::250:56ff:fe00:1", "RoCE v2", "ens192")],
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    assert_eq!(
        inventory.rdma_devices[0].ports[0].netdev.as_deref(),
        Some("ens192")
    );
    assert_eq!(machine.ports_of("ens192"), ["vmw_pvrdma0/1"]);
}

#[test]
fn a_plain_nic_is_not_rdma_capable_whatever_it_is_called() {
    let machine = Machine::new();
    two_functions(&machine);
    machine.tree.pci(&PciSpec {
        address: "0000:01:00.0",
        driver: "igb",
        ..PciSpec::MLX5
    });
    machine.tree.netdev(&NetdevSpec {
        name: "eth1",
        on: On::Pci("0000:01:00.0"),
        mac: "52:54:00:00:00:09",
        ..NetdevSpec::default()
    });
    machine.tree.netdev(&NetdevSpec {
        name: "br0",
        kind: "bridge",
        lowers: &["eth1"],
        ..NetdevSpec::default()
    });
    // mlx5_1's netdev was moved into a pod, where it is called eth1 too.
    machine.tree.hide_netdev("ens1f1np1");
    let gids = "/sys/class/infiniband/mlx5_1/ports/1";
    machine.tree.file(
        format!("{gids}/gids/0"),
        "fe80:0000:0000:0000:ba59:9fff:fe00:0002",
    );
    machine
        .tree
        .file(format!("{gids}/gid_attrs/ndevs/0"), "eth1");
    let inventory = machine.inventory();

    assert!(machine.ports_of("eth1").is_empty());
    assert!(machine.ports_of("br0").is_empty());
    let device = inventory.rdma_device("mlx5_1").unwrap();
    assert_eq!(device.ports[0].netdev, None, "its netdev is elsewhere");
    assert!(
        inventory.netdev("br0").is_some(),
        "a master of a netdev on hardware"
    );
}

#[test]
fn a_device_moved_to_another_namespace_is_remembered_by_its_node() {
    let machine = Machine::new();
    two_functions(&machine);
    machine.tree.rdma_core(false);
    machine.tree.hide_rdma("mlx5_1");
    machine.tree.hide_netdev("ens1f1np1");
    let inventory = machine.inventory();

    assert_eq!(inventory.netns_mode, Some(hca::NetnsMode::Exclusive));
    assert_eq!(inventory.rdma_devices.len(), 1);
    let elsewhere = &inventory.elsewhere[0];
    assert_eq!(
        (elsewhere.rdma_device.as_str(), elsewhere.pci),
        ("mlx5_1", Some(pci(PF1)))
    );
    assert_eq!(elsewhere.uverbs.name, "uverbs1");
    assert!(
        hca::rdma::read(&machine.tree.host(), "mlx5_1")
            .unwrap_err()
            .is_missing()
    );
}

#[test]
fn a_large_gid_table_is_read_only_as_far_as_it_is_filled() {
    let machine = Machine::new();
    machine.tree.pci(&PciSpec {
        address: PF0,
        ..PciSpec::MLX5
    });
    machine.tree.netdev(&NetdevSpec {
        name: "ens1",
        on: On::Pci(PF0),
        ..NetdevSpec::default()
    });
    machine.tree.rdma(&RdmaSpec {
        on: On::Pci(PF0),
        ports: &[PortSpec {
            gid_slots: 1024,
            gids: &[
                (0, "fe80::ba59:9fff:fe00:1", "IB/RoCE v1", "ens1"),
                (1, "fe80::ba59:9fff:fe00:1", "RoCE v2", "ens1"),
                (40, "::ffff:10.0.0.1", "IB/RoCE v1", "ens1"),
                (41, "::ffff:10.0.0.1", "RoCE v2", "ens1"),
                (900, "::ffff:10.0.0.9", "RoCE v2", "net1"),
                (901, "::ffff:10.0.0.9", "RoCE v2", "net2"),
                (902, "2001:db8::9", "RoCE v2", "net2"),
            ],
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    let table = &machine.inventory().rdma_devices[0].ports[0].gids;
    assert_eq!(table.slots, 1024);
    let indexes: Vec<u32> = table.entries.iter().map(|entry| entry.index).collect();
    assert_eq!(
        indexes,
        [0, 1, 40, 41],
        "small gaps are crossed, long ones end the walk"
    );

    // An address somebody asks for is found wherever it is.
    let port = PortId {
        device: "mlx5_0".into(),
        port: 1,
    };
    let find = |ip: &str, netdev| {
        let found =
            hca::gid::find_roce_v2(&machine.tree.host(), &port, ip.parse().unwrap(), netdev)
                .unwrap();
        found.map(|entry| entry.index)
    };
    assert_eq!(
        find("10.0.0.1", None),
        Some(41),
        "not the v1 entry before it"
    );
    assert_eq!(find("10.0.0.9", Some("net2")), Some(901));
    assert_eq!(find("2001:db8::9", None), Some(902));
    assert_eq!(find("10.0.0.9", Some("net3")), None);
    assert_eq!(find("10.0.0.77", None), None);
    let gone = PortId {
        device: "mlx5_9".into(),
        port: 1,
    };
    let error = hca::gid::find_roce_v2(
        &machine.tree.host(),
        &gone,
        "10.0.0.1".parse().unwrap(),
        None,
    );
    assert!(error.unwrap_err().is_missing());
}

#[test]
fn a_device_that_goes_away_during_the_walk_is_left_out() {
    let machine = Machine::new();
    two_functions(&machine);
    machine.tree.link(
        "/sys/class/infiniband/mlx5_9",
        "/sys/devices/virtual/infiniband/mlx5_9",
    );
    machine
        .tree
        .link("/sys/class/net/ens9", "/sys/devices/virtual/net/ens9");
    let names: Vec<String> = machine
        .inventory()
        .rdma_devices
        .into_iter()
        .map(|device| device.name)
        .collect();
    assert_eq!(names, ["mlx5_0", "mlx5_1"]);
}

#[test]
fn attributes_a_driver_lacks_do_not_hide_the_device() {
    let machine = Machine::new();
    two_functions(&machine);
    for attribute in [
        "node_guid",
        "node_type",
        "ports/1/state",
        "ports/1/rate",
        "ports/1/gids",
    ] {
        machine
            .tree
            .remove(format!("/sys/class/infiniband/mlx5_0/{attribute}"));
    }
    machine
        .tree
        .remove(format!("/sys/bus/pci/devices/{PF0}/numa_node"));
    let inventory = machine.inventory();
    let device = inventory.rdma_device("mlx5_0").unwrap();
    assert_eq!((device.node_guid, device.numa_node()), (None, None));
    assert_eq!(device.ports[0].state, hca::PortState::Unknown);
    assert_eq!(device.ports[0].netdev.as_deref(), Some("ens1f0np0"));
}

#[test]
fn a_host_without_rdma_is_empty_and_one_without_sysfs_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    let inventory = hca::inventory(&tree.host()).unwrap();
    assert!(inventory.rdma_devices.is_empty());
    assert_eq!((inventory.netns_mode, inventory.rdma_cm), (None, None));

    let error = hca::inventory(&hca::Host::at(directory.path().join("nothing"))).unwrap_err();
    assert!(error.to_string().contains("sysfs mount"), "{error}");
}
