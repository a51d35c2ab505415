//! The units of a pool: how many, their identities, what each stands for.

use super::*;

#[test]
fn units_of_an_old_file_have_all_hcas() {
    let node = Node::new(two_nics);
    let pools = node.pools(&legacy(1000, r#""vendors": ["15b3"]"#));
    let snapshot = &pools.snapshots[0];
    assert_eq!(snapshot.resource().as_str(), "rdma/a");
    assert_eq!(
        snapshot.count(),
        UnitCounts {
            healthy: 1000,
            unhealthy: 0
        }
    );
    let listed = snapshot.listing().devices;
    assert_eq!(
        listed.iter().map(|d| &d.id).collect::<BTreeSet<_>>().len(),
        1000
    );
    assert!(listed.iter().all(|device| device.topology.is_none()));
    let first = &listed[0].id;
    let given = paths(snapshot, &[first]);
    assert_eq!(
        given,
        [
            "/dev/infiniband/uverbs0",
            "/dev/infiniband/rdma_cm",
            "/dev/infiniband/umad0",
            "/dev/infiniband/issm0",
            "/dev/infiniband/uverbs1",
            "/dev/infiniband/umad2",
            "/dev/infiniband/issm2",
        ]
    );
    // Two units give no more than one, as ever.
    assert_eq!(paths(snapshot, &[first, &listed[1].id]), given);
    let answer = allocate(snapshot, std::slice::from_ref(first)).unwrap();
    assert!(
        answer
            .devices
            .iter()
            .all(|device| device.permissions == "rw")
    );
    assert_eq!(answer.envs["RDMA_DEVICES_RDMA_A"], "mlx5_0,mlx5_1");
}

#[test]
fn a_slot_gives_one_hca_and_carries_its_numa_node() {
    let node = Node::new(two_nics);
    let pools = node.pools(&native(&[
        "resource: rdma/b, mode: shared, shares: 3, select: { functions: [pf] }",
    ]));
    let snapshot = &pools.snapshots[0];
    let tag = hca::unit::PoolTag::of("rdma/b");
    let expected: Vec<String> = ["0000:3b:00.0", "0000:86:00.0"]
        .iter()
        .flat_map(|hca| (0..3).map(move |slot| format!("{hca}_{tag}_{slot}")))
        .collect();
    assert_eq!(ids(snapshot), expected);
    let numa = |device: &Device| device.topology.as_ref().unwrap().nodes[0].id;
    let nodes: Vec<i64> = snapshot.listing().devices.iter().map(numa).collect();
    assert_eq!(nodes, [0, 0, 0, 1, 1, 1]);
    assert_eq!(
        paths(snapshot, &[&expected[4]]),
        ["/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm"]
    );
    // Slots of both: the connection manager once.
    assert_eq!(
        paths(snapshot, &[&expected[0], &expected[4], &expected[5]]),
        [
            "/dev/infiniband/uverbs0",
            "/dev/infiniband/rdma_cm",
            "/dev/infiniband/uverbs1"
        ]
    );
}

#[test]
fn an_exclusive_hca_is_one_unit_by_its_address() {
    let node = Node::new(two_nics);
    let text = "resource: rdma/c, mode: exclusive, excludeTopology: true, nodes: { optional: [umad] }, \
                select: { ifNames: [ens2] }";
    let pools = node.pools(&native(&[text]));
    assert_eq!(ids(&pools.snapshots[0]), ["0000:86:00.0"]);
    assert!(pools.snapshots[0].listing().devices[0].topology.is_none());
    assert_eq!(
        paths(&pools.snapshots[0], &["0000:86:00.0"]),
        [
            "/dev/infiniband/uverbs1",
            "/dev/infiniband/rdma_cm",
            "/dev/infiniband/umad2"
        ]
    );
    let answer = allocate(&pools.snapshots[0], &["0000:86:00.0".into()]).unwrap();
    assert_eq!(answer.envs["PCIDEVICE_RDMA_C"], "0000:86:00.0");
    let info: serde_json::Value =
        serde_json::from_str(&answer.envs["PCIDEVICE_RDMA_C_INFO"]).unwrap();
    assert_eq!(
        info,
        serde_json::json!({"0000:86:00.0": {
            "generic": {"deviceID": "0000:86:00.0"},
            "rdma": {
                "uverbs": "/dev/infiniband/uverbs1", "umad": "/dev/infiniband/umad2",
                "rdma_cm": "/dev/infiniband/rdma_cm", "rdma_dev": "mlx5_1"
            }
        }})
    );
}

#[test]
fn foreign_and_unknown_units_are_refused_by_name() {
    let node = Node::new(two_nics);
    let config = native(&[
        "resource: rdma/a, mode: shared, shares: 2, select: { functions: [pf] }",
        "resource: rdma/b, mode: shared, shares: 9, select: { functions: [pf] }",
    ]);
    let pools = node.pools(&config);
    let other = ids(&pools.snapshots[1])[0].clone();
    let beyond = ids(&pools.snapshots[0])[1].replace("_1", "_2");
    for id in [
        other.as_str(),
        &beyond,
        "0000:3b:00.0",
        "pool_3e71787e_0",
        "",
        "0",
        "../x",
    ] {
        let error = allocate(&pools.snapshots[0], &[id.into()]).unwrap_err();
        assert!(error.contains("has no unit"), "{id}: {error}");
        assert!(error.to_string().contains("rdma/a has no unit"), "{error}");
    }
}

#[test]
fn shares_follow_the_gid_table_and_more_than_it_holds_is_remarked() {
    let node = Node::new(|tree| {
        tree.pci(&PciSpec::MLX5);
        let both = [
            (
                0,
                "fe80:0000:0000:0000:ba59:9fff:fe00:0001",
                "IB/RoCE v1",
                "ens1",
            ),
            (
                1,
                "fe80:0000:0000:0000:ba59:9fff:fe00:0001",
                "RoCE v2",
                "ens1",
            ),
        ];
        tree.rdma(&RdmaSpec {
            on: On::Pci("0000:3b:00.0"),
            ports: &[PortSpec {
                gids: &both,
                gid_entries: 256,
                ..PortSpec::ROCE
            }],
            ..RdmaSpec::default()
        });
    });
    let pool = |shares: &str| {
        native(&[&format!(
            "resource: rdma/a, mode: shared, {shares} select: {{ functions: [pf] }}"
        )])
    };
    let derived = node.pools(&pool(""));
    assert_eq!(derived.snapshots[0].count().healthy, 63);
    assert!(derived.remarks.is_empty());
    let asked = node.pools(&pool("shares: 64,"));
    assert_eq!(asked.snapshots[0].count().healthy, 64);
    assert!(
        asked.remarks[0].contains("room for the addresses of about 63 pods"),
        "{:?}",
        asked.remarks
    );
    let old = config::parse(
        r#"{"configList": [{"resourceName": "a", "selectors": {"vendors": ["15b3"]}}]}"#,
    );
    assert_eq!(node.pools(&old.unwrap()).snapshots[0].count().healthy, 63);
}

#[test]
fn one_message_holds_the_list_whatever_is_asked_for() {
    let member = |index: u32| Member {
        shares: MAX_UNITS,
        health: Health::from([UnhealthyReason::Gone]),
        ..Member::example(Hca {
            pci: Some(function("0000:3b:00.0", Some(255))),
            ..named(&format!("{}.sf.{}", "a".repeat(30), u32::MAX - index), &[])
        })
    };
    let config = native(&[&format!(
        "resource: rdma/a, mode: shared, shares: {MAX_UNITS}, select: {{ functions: [pf] }}"
    )]);
    for hcas in [1, 2, 100] {
        let mut members: Vec<Member> = (0..hcas).map(member).collect();
        let mut remarks = Vec::new();
        let units = units(&config.pools[0], &mut members, &mut remarks);
        let pool = Arc::new(config.pools[0].clone());
        let snapshot = Snapshot::new(pool, units, members, Arc::default());
        let bytes = snapshot.listing().encoded_len();
        assert!(bytes <= MESSAGE_BYTES, "{hcas} HCAs: {bytes}");
        assert!(
            bytes * 10 >= MESSAGE_BYTES * 7 || remarks.is_empty(),
            "{hcas} HCAs: {bytes}"
        );
    }
    // The most that an old file may ask for.
    let node = Node::new(two_nics);
    let snapshot = node
        .pools(&legacy(MAX_POOLED_UNITS, r#""vendors": ["15b3"]"#))
        .snapshots
        .remove(0);
    assert!(snapshot.listing().encoded_len() <= MESSAGE_BYTES);
    let mut longest = snapshot.clone();
    for member in longest.members_mut() {
        let why = "no unit can be delivered".to_owned();
        member.health.add(UnhealthyReason::Delivery(why));
    }
    assert!(longest.listing().encoded_len() <= MESSAGE_BYTES);
}

#[test]
fn units_are_the_same_after_a_restart_and_a_renaming() {
    let config =
        native(&["resource: rdma/a, mode: shared, shares: 2, select: { functions: [pf] }"]);
    let before = Node::new(two_nics).pools(&config).snapshots.remove(0);
    let renamed = Node::new(|tree| {
        for (address, rdma, above) in [
            ("0000:86:00.0", "rocep134s0", "pci0000:85"),
            ("0000:3b:00.0", "rocep59s0", "pci0000:3a"),
        ] {
            tree.pci(&PciSpec {
                address,
                above,
                ..PciSpec::MLX5
            });
            tree.rdma(&RdmaSpec {
                name: rdma,
                on: On::Pci(address),
                ..RdmaSpec::default()
            });
        }
    });
    assert_eq!(ids(&renamed.pools(&config).snapshots[0]), ids(&before));
}

#[test]
fn identities_are_unique_over_all_resources_of_a_node() {
    let node = Node::new(a4);
    let config = config::parse(
        r#"{"configList": [
            {"resourceName": "a", "rdmaHcaMax": 100, "selectors": {"vendors": ["15b3"]}},
            {"resourceName": "b", "rdmaHcaMax": 100, "selectors": {"vendors": ["15b3"]}}]}"#,
    );
    let mut all = BTreeSet::new();
    let mine = native(&[
        "resource: rdma/c, mode: shared, shares: 50, select: { functions: [pf] }",
        "resource: rdma/d, mode: shared, shares: 50, select: { functions: [pf] }",
    ]);
    let snapshots = [
        node.pools(&config.unwrap()).snapshots,
        node.pools(&mine).snapshots,
    ]
    .concat();
    let units: Vec<String> = snapshots.iter().flat_map(ids).collect();
    assert_eq!(units.len(), 200 + 2 * 8 * 50);
    assert!(
        units
            .iter()
            .all(|id| id.len() <= hca::unit::MAX_LENGTH && all.insert(id.clone()))
    );
}

#[test]
fn what_the_administrator_says_of_hcas_reaches_the_container() {
    let node = Node::new(two_nics);
    let config = config::parse(
        r#"{"resourceList": [{"resourceName": "a", "selectors": {"isRdma": true, "needVhostNet": true},
            "additionalInfo": {"*": {"fabric": "east", "rail": "?"}, "0000:86:00.0": {"rail": "1"}}}]}"#,
    );
    let config = config.unwrap();
    for device in ["/dev/vhost-net", "/dev/net/tun"] {
        node.tree.file(device, "");
    }
    let snapshot = node.pools(&config).snapshots.remove(0);
    let answer = allocate(&snapshot, &["0000:86:00.0".into()]).unwrap();
    let info: serde_json::Value =
        serde_json::from_str(&answer.envs["PCIDEVICE_INTEL_COM_A_INFO"]).unwrap();
    assert_eq!(
        info["0000:86:00.0"]["extraInfo"],
        serde_json::json!({"fabric": "east", "rail": "1"})
    );
    let paths: Vec<&str> = answer
        .devices
        .iter()
        .map(|device| device.host_path.as_str())
        .collect();
    assert!(
        paths.ends_with(&["/dev/vhost-net", "/dev/net/tun"]),
        "{paths:?}"
    );
    assert_eq!(
        info["0000:86:00.0"]["vhost"],
        serde_json::json!({"net-mount": "/dev/vhost-net", "tun-mount": "/dev/net/tun"})
    );
    // Nodes that the host does not have would make the runtime refuse the container.
    node.tree.remove("/dev/vhost-net");
    let pools = node.pools(&config);
    let answer = allocate(&pools.snapshots[0], &["0000:86:00.0".into()]).unwrap();
    assert!(
        answer
            .devices
            .iter()
            .all(|device| device.host_path.contains("infiniband"))
    );
    assert!(!answer.envs["PCIDEVICE_INTEL_COM_A_INFO"].contains("vhost"));
    assert!(
        pools.remarks[0].contains("load vhost_net"),
        "{:?}",
        pools.remarks
    );
}

#[test]
fn a_hyphen_in_a_resource_name_stays_in_the_sriov_plugins_variables() {
    let node = Node::new(two_nics);
    let config = config::parse(
        r#"{"resourceList": [{"resourceName": "sriov-net", "selectors": {"isRdma": true}}]}"#,
    )
    .unwrap();
    let answer = allocate(&node.pools(&config).snapshots[0], &["0000:86:00.0".into()]).unwrap();
    let mut names: Vec<&str> = answer.envs.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "PCIDEVICE_INTEL_COM_SRIOV-NET",
            "PCIDEVICE_INTEL_COM_SRIOV-NET_INFO",
            "PCIDEVICE_INTEL_COM_SRIOV_NET",
            "PCIDEVICE_INTEL_COM_SRIOV_NET_INFO",
            "RDMA_DEVICES_INTEL_COM_SRIOV_NET",
        ]
    );
}
