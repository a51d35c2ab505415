//! RDMA devices and netdevs that do not stand on the same hardware, or not in the same namespace.

use hca::HcaId;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec};

use crate::{Machine, PF1, pci, two_functions};

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
        inventory.rdma_devices().next().unwrap().ports[0]
            .netdev
            .as_deref(),
        Some("ens192")
    );
    assert_eq!(machine.ports_of("ens192"), ["vmw_pvrdma0/1"]);
    let hca = HcaId::Pci(pci("0000:0b:00.1"));
    let names = |netdevs: &[hca::Netdev]| -> Vec<String> {
        netdevs.iter().map(|netdev| netdev.name.clone()).collect()
    };
    assert_eq!(names(&inventory.hca(&hca).unwrap().netdevs), ["ens192"]);
    let found = hca::lookup::on_hca(&machine.tree.host(), &hca).unwrap();
    assert_eq!(names(&found.netdevs), ["ens192"]);
    let found = hca::lookup::hardware_of_netdev(&machine.tree.host(), "ens192").unwrap();
    assert!(found.hcas.contains(&hca), "{found:?}");
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
    assert_eq!(inventory.rdma_devices().count(), 1);
    let away = inventory.hca(&HcaId::Pci(pci(PF1)));
    let away = away.expect("the unit keeps its name");
    assert!(away.elsewhere && !away.is_read());
    assert_eq!(away.rdma_names(), ["mlx5_1"]);
    assert_eq!(away.pci.as_ref().map(|pci| pci.address), Some(pci(PF1)));
    let nodes = &away.rdma_devices[0].char_devices;
    assert_eq!(nodes.uverbs.as_ref().unwrap().name, "uverbs1");
    assert!(
        hca::rdma::read(&machine.tree.host(), "mlx5_1")
            .unwrap_err()
            .is_missing()
    );
}

#[test]
fn an_iwarp_device_that_names_no_netdev_is_matched_by_address() {
    let machine = Machine::new();
    let mac = "52:54:00:00:01:01";
    machine.tree.netdev(&NetdevSpec {
        name: "eth0",
        mac,
        ..NetdevSpec::default()
    });
    machine.tree.netdev(&NetdevSpec {
        name: "eth0.5",
        mac,
        kind: "vlan",
        lowers: &["eth0"],
        ..NetdevSpec::default()
    });
    // As Linux 6.1 shows siw: the GID is the address, no netdev is named.
    machine.tree.rdma(&RdmaSpec {
        name: "siw0",
        node_type: "4: RNIC",
        node_guid: "5054:00ff:fe00:0101",
        vendor_attributes: false,
        mad: false,
        ports: &[PortSpec {
            gids: &[(
                0,
                "5254:0000:0101:0000:0000:0000:0000:0000",
                "IB/RoCE v1",
                "",
            )],
            gid_entries: 1,
            pkeys: &[],
            ..PortSpec::ROCE
        }],
        ..RdmaSpec::default()
    });
    let inventory = machine.inventory();

    let siw = inventory.rdma_device("siw0").unwrap();
    assert_eq!(siw.netdevs().collect::<Vec<_>>(), ["eth0"]);
    assert!(siw.is_soft());
    let id = HcaId::of(siw).unwrap();
    let found = hca::lookup::on_hca(&machine.tree.host(), &id).unwrap();
    assert_eq!(found.netdevs[0].name, "eth0");
    assert_eq!(found.rdma_devices, ["siw0"]);
    let other: HcaId = "guid-0000000000000001".parse().unwrap();
    let error = hca::lookup::on_hca(&machine.tree.host(), &other).unwrap_err();
    assert!(error.is_missing(), "{error}");
    assert_eq!(machine.ports_of("eth0"), ["siw0/1"]);
    assert_eq!(
        machine.ports_of("eth0.5"),
        ["siw0/1"],
        "by way of the netdev below it"
    );
}
