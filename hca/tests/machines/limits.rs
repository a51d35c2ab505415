//! Large tables, hardware that goes away, and hosts with little to see.

use hca::PortId;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};

use crate::{Machine, PF0, two_functions};

#[test]
fn tables_are_read_to_their_end_whatever_gaps_they_have() {
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
    let mut pkeys = [0; 101];
    (pkeys[0], pkeys[100]) = (0xffff, 0x8001);
    machine.tree.rdma(&RdmaSpec {
        on: On::Pci(PF0),
        ports: &[PortSpec {
            gid_entries: 1024,
            gids: &[
                (0, "fe80::ba59:9fff:fe00:1", "IB/RoCE v1", "ens1"),
                (1, "fe80::ba59:9fff:fe00:1", "RoCE v2", "ens1"),
                (30, "::ffff:10.0.0.1", "IB/RoCE v1", "ens1"),
                (31, "::ffff:10.0.0.1", "RoCE v2", "ens1"),
                (900, "::ffff:10.0.0.9", "RoCE v2", "net1"),
                (901, "::ffff:10.0.0.9", "RoCE v2", "net2"),
                (902, "2001:db8::9", "RoCE v2", "net2"),
            ],
            pkeys: &pkeys,
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();
    let port = &inventory.rdma_devices().next().unwrap().ports[0];
    assert_eq!(super::pkeys(port), [(0, 0xffff), (100, 0x8001)]);
    let table = &port.gids;
    assert_eq!(table.size, 1024);
    let indexes: Vec<u32> = table.entries.iter().map(|entry| entry.index).collect();
    assert_eq!(indexes, [0, 1, 30, 31, 900, 901, 902]);

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
        Some(31),
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
    let inventory = machine.inventory();
    let names = inventory.rdma_devices().map(|device| &device.name);
    let names: Vec<&String> = names.collect();
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
    let numa_node = device.pci.as_ref().and_then(|pci| pci.numa_node);
    assert_eq!((device.node_guid, numa_node), (None, None));
    assert_eq!(device.ports[0].state, hca::PortState::Unknown);
    assert_eq!(device.ports[0].netdev.as_deref(), Some("ens1f0np0"));
}

#[test]
fn no_rdma_is_empty_and_no_sysfs_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    let inventory = hca::inventory(&tree.host()).unwrap();
    assert!(inventory.rdma_devices().next().is_none());
    assert_eq!((inventory.netns_mode, inventory.rdma_cm), (None, None));

    let error = hca::inventory(&hca::Host::at(directory.path().join("nothing"))).unwrap_err();
    assert!(error.to_string().contains("sysfs mount"), "{error}");
}
