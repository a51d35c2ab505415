//! Which HCAs a pool has, and which it excludes.

use super::*;

#[test]
fn nothing_is_listed_where_there_is_nothing() {
    let node = Node::new(|_| {});
    let shared = "resource: rdma/b, mode: shared, select: { functions: [pf] }";
    for config in [legacy(1000, r#""vendors": ["15b3"]"#), native(&[shared])] {
        let snapshot = node.pools(&config).snapshots.remove(0);
        assert!(snapshot.listing().devices.is_empty());
        assert_eq!(snapshot.count(), UnitCounts::default());
    }
}

#[test]
fn an_hca_in_two_pools_belongs_to_the_first_unless_both_share() {
    let node = Node::new(two_nics);
    let exclusive = "resource: rdma/x, mode: exclusive, select: { functions: [pf] }";
    let shared = "resource: rdma/s, mode: shared, shares: 1, select: { ifNames: [ens1] }";
    let both_shared = "resource: rdma/t, mode: shared, shares: 1, select: { ifNames: [ens1] }";

    let pools = node.pools(&native(&[shared, exclusive, both_shared]));
    assert_eq!(pools.snapshots[0].members().len(), 1);
    assert_eq!(ids(&pools.snapshots[1]), ["0000:86:00.0"]);
    assert_eq!(pools.snapshots[2].members().len(), 1);
    assert_eq!(
        pools.excluded,
        [Excluded {
            resource: ResourceName::parse("rdma/x").unwrap(),
            id: "0000:3b:00.0".parse().unwrap(),
            reason: Reason::Claimed(ResourceName::parse("rdma/s").unwrap()),
        }]
    );
    assert!(
        pools.excluded[0]
            .to_string()
            .contains("narrow the selectors")
    );
}

#[test]
fn an_exclusive_pool_spares_uplinks_and_functions_that_have_vfs() {
    let node = Node::new(|tree| {
        two_nics(tree);
        tree.pci(&PciSpec {
            address: "0000:5e:00.0",
            ..PciSpec::MLX5
        });
        tree.rdma(&RdmaSpec {
            name: "mlx5_2",
            on: On::Pci("0000:5e:00.0"),
            ..RdmaSpec::default()
        });
        tree.vf(
            "0000:5e:00.0",
            0,
            &PciSpec {
                address: "0000:5e:00.2",
                ..PciSpec::MLX5
            },
        );
        tree.rdma(&RdmaSpec {
            name: "mlx5_3",
            on: On::Pci("0000:5e:00.2"),
            ..RdmaSpec::default()
        });
        tree.netdev(&NetdevSpec {
            name: "bond0",
            kind: "bond",
            lowers: &["ens2"],
            ..NetdevSpec::default()
        });
    });
    node.tree.default_route("bond0");
    let rule = "mode: exclusive, select: { rdmaDevices: [\"*\"] }";
    let pools = node.pools(&native(&[&format!("resource: rdma/a, {rule}")]));
    assert_eq!(ids(&pools.snapshots[0]), ["0000:3b:00.0", "0000:5e:00.2"]);
    let excluded: Vec<String> = pools.excluded.iter().map(ToString::to_string).collect();
    assert!(
        excluded[0].contains("0000:86:00.0") && excluded[0].contains("needs ens2: bond0"),
        "{excluded:?}"
    );
    assert!(
        excluded[1].contains("0000:5e:00.0") && excluded[1].contains("1 virtual functions"),
        "{excluded:?}"
    );

    let pools = node.pools(&native(&[&format!(
        "resource: rdma/a, exclude: [], {rule}"
    )]));
    assert_eq!(pools.snapshots[0].members().len(), 4);
    assert!(pools.excluded.is_empty());
}

#[test]
fn sharing_is_off_while_the_rdma_subsystem_gives_devices_away_whole() {
    let node = Node::new(|tree| {
        two_nics(tree);
        tree.rdma_core(false);
    });
    let config = native(&[
        "resource: rdma/s, mode: shared, shares: 1, select: { ifNames: [ens1] }",
        "resource: rdma/x, mode: exclusive, select: { ifNames: [ens2] }",
    ]);
    let pools = node.pools(&config);
    assert_eq!(
        pools.snapshots[0].count(),
        UnitCounts {
            healthy: 0,
            unhealthy: 1
        }
    );
    assert!(matches!(
        pools.snapshots[0].members()[0].health.worst(),
        Some(UnhealthyReason::NetnsMode(reason)) if reason.contains("rdma system set netns shared")
    ));
    assert_eq!(
        pools.snapshots[1].count(),
        UnitCounts {
            healthy: 1,
            unhealthy: 0
        }
    );
}

#[test]
fn an_exclusive_pool_offers_nothing_while_uplinks_are_unknown() {
    let node = Node::new(two_nics);
    node.tree.remove("/proc/1/net");
    let host = node.tree.host();
    let seen = HostSnapshot::scan(&host, &[], &[], hca::topology::gpu::read).unwrap();
    let select = "select: { functions: [pf] }";
    let exclusive = native(&[&format!("resource: rdma/a, mode: exclusive, {select}")]);
    let shared = native(&[&format!(
        "resource: rdma/a, mode: shared, shares: 1, {select}"
    )]);
    let allowed = native(&[&format!(
        "resource: rdma/a, mode: exclusive, exclude: [pfsWithVfs], {select}"
    )]);
    let offered = pools(&exclusive, &seen, &[]);
    assert!(offered.snapshots[0].members().is_empty());
    let said = offered.excluded[0].to_string();
    assert!(said.contains("set hostNetwork: true"), "{said}");
    assert_eq!(pools(&shared, &seen, &[]).snapshots[0].members().len(), 2);
    assert_eq!(pools(&allowed, &seen, &[]).snapshots[0].members().len(), 2);
}

#[test]
fn a_scalable_function_is_seen_and_kept_out_of_old_vendor_pools() {
    let node = Node::new(|tree| {
        tree.pci(&PciSpec::MLX5);
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            ..RdmaSpec::default()
        });
        tree.subfunction("0000:3b:00.0", "mlx5_core.sf.4", 88);
        tree.rdma(&RdmaSpec {
            name: "mlx5_1",
            on: On::Auxiliary("mlx5_core.sf.4"),
            ..RdmaSpec::default()
        });
    });
    let old = node
        .pools(&legacy(1, r#""vendors": ["15b3"]"#))
        .snapshots
        .remove(0);
    assert_eq!(old.members().len(), 1);
    let aux = config::parse(
        r#"{"resourceList": [{"resourceName": "sf", "deviceType": "auxNetDevice", "selectors":
            {"isRdma": true, "auxTypes": ["sf"], "rootDevices": ["0000:3b:00.0#80-90"]}}]}"#,
    );
    let pools = node.pools(&aux.unwrap());
    assert_eq!(ids(&pools.snapshots[0]), ["mlx5_core.sf.4"]);
    let answer = allocate(&pools.snapshots[0], &["mlx5_core.sf.4".into()]).unwrap();
    assert_eq!(answer.envs["PCIDEVICE_INTEL_COM_SF"], "mlx5_core.sf.4");
    assert_eq!(answer.envs["RDMA_DEVICES_INTEL_COM_SF"], "mlx5_1");
}

#[test]
fn every_function_of_dual_port_cards_is_an_hca() {
    let node = Node::new(oci_h100);
    let config = native(&["resource: rdma/a, mode: exclusive, select: { rdmaDevices: [\"*\"] }"]);
    assert_eq!(node.pools(&config).snapshots[0].members().len(), 16);
}

#[test]
fn a_pool_with_late_binding_shares_no_hca_and_needs_cdi() {
    let node = Node::new(two_nics);
    let late = "resource: rdma/l, mode: exclusive, binding: late, select: { functions: [pf] }";
    let shared = "resource: rdma/s, mode: shared, shares: 1, select: { ifNames: [ens1] }";
    let alone = node.pools(&native(&[late]));
    let healthy = |snapshot: &Snapshot| {
        let members = snapshot.members().iter();
        members.filter(|member| member.health.is_healthy()).count()
    };
    assert_eq!(healthy(&alone.snapshots[0]), 2);
    // Whichever comes first, the other pool is served, and nothing is offered twice.
    for order in [[late, shared], [shared, late]] {
        let pools = node.pools(&native(&order));
        for snapshot in &pools.snapshots {
            let expected = usize::from(snapshot.late().is_none());
            assert_eq!(healthy(snapshot), expected, "{}", snapshot.resource());
        }
        assert!(
            pools.remarks[0].contains("rdma/l is withheld: 0000:3b:00.0 is chosen by rdma/s, too"),
            "{:?}",
            pools.remarks
        );
    }
}

/// With RDMA LAG one HCA stands for both members of a bond.
#[test]
fn a_bond_and_its_members_select_their_hca() {
    let node = Node::new(|tree| {
        two_nics(tree);
        tree.hide_rdma("mlx5_1");
        tree.netdev(&NetdevSpec {
            name: "bond0",
            kind: "bond",
            lowers: &["ens1", "ens2"],
            ..NetdevSpec::default()
        });
    });
    let selected = |select: &str| {
        let pool = format!("resource: rdma/a, mode: exclusive, select: {{ {select} }}");
        ids(&node.pools(&native(&[&pool])).snapshots[0])
    };
    for name in ["bond0", "ens1", "ens2"] {
        for key in ["ifNames", "pfNames"] {
            let found = selected(&format!("{key}: [{name}]"));
            assert_eq!(found, ["0000:3b:00.0"], "{key}: {name}");
        }
    }
    let apart = Node::new(|tree| {
        two_nics(tree);
        tree.netdev(&NetdevSpec {
            name: "bond0",
            kind: "bond",
            lowers: &["ens1", "ens2"],
            ..NetdevSpec::default()
        });
    });
    let pools = native(&["resource: rdma/a, mode: exclusive, select: { ifNames: [ens2] }"]);
    assert_eq!(
        ids(&apart.pools(&pools).snapshots[0]),
        ["0000:86:00.0"],
        "each member has an HCA of its own"
    );
}
