//! Which units are healthy: nodes, ports, links, and what is gone.

use super::*;

#[test]
fn what_lacks_a_required_node_is_listed_unhealthy_with_the_reason() {
    let node = Node::new(two_nics);
    let config = native(&["resource: rdma/a, mode: exclusive, select: { functions: [pf] }"]);
    let mut seen = node.scan();
    seen.nodes
        .insert("infiniband/uverbs1".into(), hca::chardev::Node::Missing);
    let pools = pools(&config, &seen, &[]);
    let health: Vec<String> = pools.snapshots[0]
        .listing()
        .devices
        .into_iter()
        .map(|device| device.health)
        .collect();
    assert_eq!(health, ["Healthy", "Unhealthy"]);
    let error = allocate(&pools.snapshots[0], &["0000:86:00.0".into()])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("node /dev/infiniband/uverbs1 does not exist"),
        "{error}"
    );

    seen.inventory.rdma_cm = None;
    let pools = super::tests::pools(&config, &seen, &[]);
    let error = allocate(&pools.snapshots[0], &["0000:3b:00.0".into()])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no rdma_cm device; load rdma_ucm, or set nodes.required: [uverbs]"),
        "{error}"
    );
}

#[test]
fn an_hca_whose_netdev_carries_a_child_is_unhealthy() {
    let node = Node::new(two_nics);
    let config = native(&["resource: rdma/a, mode: exclusive, select: { functions: [pf] }"]);
    let seen = node.scan();
    let candidates = seen.inventory.hcas.clone();
    let world = World {
        children: [("0000:86:00.0".parse().unwrap(), "ens2 carries one".into())].into(),
        ..World::default()
    };
    let pools = assemble_on(&config, &candidates, &seen, &[], &world, &Held::new());
    let members = pools.snapshots[0].members().iter();
    let health: Vec<Health> = members.map(|member| member.health.clone()).collect();
    let child = UnhealthyReason::Child("ens2 carries one".into());
    assert_eq!(health, [Health::default(), Health::from([child])]);
}

#[test]
fn what_an_old_file_needs_is_less_than_that_plugin_asks_for() {
    // Without umad, and a NIC of a vendor that has none at all.
    let node = Node::new(|tree| {
        tree.pci(&PciSpec {
            address: "0000:3b:00.0",
            vendor: 0x8086,
            driver: "irdma",
            ..PciSpec::MLX5
        });
        tree.rdma(&RdmaSpec {
            name: "irdma0",
            on: On::Pci("0000:3b:00.0"),
            node_type: "4: RNIC",
            mad: false,
            ..RdmaSpec::default()
        });
    });
    let pools = node.pools(&legacy(5, r#""vendors": ["8086"]"#));
    assert_eq!(
        pools.snapshots[0].count(),
        UnitCounts {
            healthy: 5,
            unhealthy: 0
        }
    );
}

#[test]
fn ports_decide_health_and_are_named() {
    let node = Node::new(|tree| {
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            ports: &[PortSpec::DOWN, PortSpec::DOWN],
            ..RdmaSpec::default()
        });
    });
    let config = native(&["resource: rdma/a, mode: exclusive, select: { functions: [pf] }"]);
    let pools = node.pools(&config);
    let [UnhealthyReason::Port(reason)] = pools.snapshots[0].members()[0].health.reasons() else {
        panic!("{:?}", pools.snapshots[0].members()[0].health);
    };
    assert_eq!(
        reason,
        "no active port: mlx5_0/1 is DOWN (Disabled), mlx5_0/2 is DOWN (Disabled)"
    );
    // One of two is enough.
    node.tree
        .file("/sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE");
    assert!(
        node.pools(&config).snapshots[0].members()[0]
            .health
            .is_healthy()
    );
}

/// A function with a netdev that is up or down and one port.
fn one_function(link_layer: &'static str, up: bool, state: &'static str) -> Node {
    Node::new(|tree| {
        tree.pci(&PciSpec::MLX5);
        tree.netdev(&NetdevSpec {
            name: "ens1",
            on: On::Pci(PciSpec::MLX5.address),
            up,
            link_type: if link_layer == "InfiniBand" { 32 } else { 1 },
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            on: On::Pci(PciSpec::MLX5.address),
            ports: &[PortSpec {
                state,
                phys_state: "3: Disabled",
                link_layer,
                ..PortSpec::ROCE
            }],
            ..RdmaSpec::default()
        });
    })
}

#[test]
fn port_state_makes_no_unit_of_the_peers_formats_unhealthy() {
    let rsdp = legacy(3, r#""vendors": ["15b3"]"#);
    let sdp = config::parse(
        r#"{"resourceList": [{"resourceName": "a", "selectors": {"isRdma": true}}]}"#,
    )
    .unwrap();
    for config in [rsdp, sdp] {
        for link_layer in ["Ethernet", "InfiniBand"] {
            for up in [false, true] {
                let node = one_function(link_layer, up, "1: DOWN");
                let counts = node.pools(&config).snapshots[0].count();
                assert!(
                    counts.healthy > 0 && counts.unhealthy == 0,
                    "{link_layer}, up {up}: {counts:?}"
                );
            }
        }
    }
}

#[test]
fn an_exclusive_unit_is_unhealthy_without_carrier_and_not_when_set_down() {
    let exclusive = native(&["resource: rdma/a, mode: exclusive, select: { functions: [pf] }"]);
    let shared =
        native(&["resource: rdma/a, mode: shared, shares: 1, select: { functions: [pf] }"]);
    let healthy = |config: &Config, link_layer, up| {
        let node = one_function(link_layer, up, "1: DOWN");
        node.pools(config).snapshots[0].count().healthy == 1
    };
    assert!(healthy(&exclusive, "Ethernet", false));
    assert!(!healthy(&exclusive, "Ethernet", true), "carrier is lost");
    // No CNI plugin sets the link of a shared HCA up for a pod.
    assert!(!healthy(&shared, "Ethernet", false));
    // The netdev of an InfiniBand PF says nothing about its port.
    assert!(!healthy(&exclusive, "InfiniBand", false));
}

#[test]
fn an_infiniband_vf_without_a_guid_is_healthy() {
    let lay = |up: bool| {
        Node::new(|tree| {
            tree.pci(&PciSpec::MLX5);
            let vf = PciSpec {
                address: "0000:3b:00.2",
                ..PciSpec::MLX5
            };
            tree.pci(&vf);
            tree.vf(PciSpec::MLX5.address, 0, &vf);
            tree.netdev(&NetdevSpec {
                name: "ibs1v0",
                on: On::Pci(vf.address),
                up,
                link_type: 32,
                ..NetdevSpec::default()
            });
            tree.rdma(&RdmaSpec {
                name: "mlx5_2",
                on: On::Pci(vf.address),
                ports: &[PortSpec {
                    state: "1: DOWN",
                    ..PortSpec::INFINIBAND
                }],
                ..RdmaSpec::default()
            });
        })
    };
    let config = native(&["resource: rdma/a, mode: exclusive, select: { functions: [vf] }"]);
    let count = |up| lay(up).pools(&config).snapshots[0].count();
    assert_eq!((count(false).healthy, count(false).unhealthy), (1, 0));
    assert_eq!((count(true).healthy, count(true).unhealthy), (0, 1));
}

#[test]
fn units_of_all_hcas_are_healthy_while_one_port_is_up() {
    let node = Node::new(two_nics);
    node.tree
        .file("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
    let config = native(&[
        "resource: rdma/a, mode: shared, policy: all-hcas, shares: 2, \
         nodes: { optional: [umad] }, select: { vendors: [15b3] }",
    ]);
    let snapshot = node.pools(&config).snapshots.remove(0);
    assert_eq!(
        snapshot.count(),
        UnitCounts {
            healthy: 2,
            unhealthy: 0
        }
    );
    let unit = &ids(&snapshot)[0];
    assert!(paths(&snapshot, &[unit]).contains(&"/dev/infiniband/uverbs1".to_owned()));
    node.tree
        .file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    let snapshot = node.pools(&config).snapshots.remove(0);
    assert_eq!(
        snapshot.count(),
        UnitCounts {
            healthy: 0,
            unhealthy: 2
        }
    );
    let error = allocate(&snapshot, std::slice::from_ref(unit))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mlx5_0/1 is DOWN") && error.contains("mlx5_1/1 is DOWN"),
        "{error}"
    );
}

#[test]
fn what_disappears_stays_listed_and_comes_back() {
    let node = Node::new(two_nics);
    let config =
        native(&["resource: rdma/a, mode: shared, shares: 2, select: { functions: [pf] }"]);
    let before = node.pools(&config).snapshots;
    let mut seen = node.scan();
    let gone = seen.inventory.hcas.pop().unwrap();
    let after = pools(&config, &seen, &before).snapshots;
    assert_eq!(ids(&after[0]), ids(&before[0]));
    assert_eq!(
        after[0].count(),
        UnitCounts {
            healthy: 2,
            unhealthy: 2
        }
    );
    assert_eq!(
        after[0].members()[1].health,
        Health::from([UnhealthyReason::Gone])
    );
    assert!(!after[0].lists_the_same(&before[0]));
    seen.inventory.hcas.push(gone);
    let back = pools(&config, &seen, &after).snapshots;
    assert!(back[0].lists_the_same(&before[0]));
}
