//! Pools of hosts made of files.

use std::collections::BTreeSet;

use hca::tree::machine::{a4, oci_h100};
use hca::tree::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};
use kubelet_api::deviceplugin::Device;
use prost::Message;

use super::*;
use crate::allocate::{self, allocate};
use crate::candidate::gather;
use crate::config::{self, MAX_POOLED_UNITS, MAX_UNITS};
use crate::snapshot::Counts;

/// A host whose device nodes are all as they should be.
struct Node {
    tree: Tree,
    _dir: tempfile::TempDir,
}

impl Node {
    fn new(lay: impl FnOnce(&Tree)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        lay(&tree);
        Self { tree, _dir: dir }
    }

    fn scan(&self) -> HostSnapshot {
        let mut seen = HostSnapshot::make(&self.tree.host(), &[]).unwrap();
        // Nodes of a tree are plain files.
        seen.nodes
            .values_mut()
            .for_each(|node| *node = hca::chardev::Node::Ready);
        seen
    }

    fn pools(&self, config: &Config) -> Pools {
        pools(config, &self.scan(), &[])
    }
}

fn pools(config: &Config, seen: &HostSnapshot, previous: &[Snapshot]) -> Pools {
    let previous: Vec<_> = previous.iter().cloned().map(Arc::new).collect();
    let (candidates, _) = gather::list(&seen.inventory, &seen.functions);
    assemble(config, &candidates, seen, &previous)
}

fn two_nics(tree: &Tree) {
    for (index, numa_node) in [(0, 0), (1, 1)] {
        let address = ["0000:3b:00.0", "0000:86:00.0"][index];
        tree.pci(&PciSpec {
            address,
            numa_node,
            above: ["pci0000:3a", "pci0000:85"][index],
            ..PciSpec::MLX5
        });
        tree.netdev(&NetdevSpec {
            name: ["ens1", "ens2"][index],
            on: On::Pci(address),
            ..NetdevSpec::default()
        });
        tree.rdma(&RdmaSpec {
            name: ["mlx5_0", "mlx5_1"][index],
            on: On::Pci(address),
            ..RdmaSpec::default()
        });
    }
}

/// A configuration of our own format with one pool for each text.
fn native(pools: &[&str]) -> Config {
    let pools: Vec<String> = pools
        .iter()
        .map(|pool| format!("- {{ {pool} }}\n"))
        .collect();
    config::parse(&format!("version: 1\npools:\n{}", pools.concat())).unwrap()
}

fn legacy(units: u32, selectors: &str) -> Config {
    config::parse(&format!(
        r#"{{"configList": [{{"resourceName": "a", "rdmaHcaMax": {units}, "selectors": {{{selectors}}}}}]}}"#
    ))
    .unwrap()
}

fn ids(snapshot: &Snapshot) -> Vec<String> {
    snapshot
        .listing()
        .devices
        .into_iter()
        .map(|device| device.id)
        .collect()
}

fn paths(snapshot: &Snapshot, ids: &[&str]) -> Vec<String> {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let answer = allocate(snapshot, &ids).unwrap();
    answer
        .devices
        .into_iter()
        .map(|device| device.host_path)
        .collect()
}

#[test]
fn an_old_file_offers_what_it_offered_and_gives_all_hcas_to_each_unit() {
    let node = Node::new(two_nics);
    let pools = node.pools(&legacy(1000, r#""vendors": ["15b3"]"#));
    let snapshot = &pools.snapshots[0];
    assert_eq!(snapshot.resource().as_str(), "rdma/a");
    assert_eq!(
        snapshot.count(),
        Counts {
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
        "resource: rdma/b, mode: shared, slots: 3, select: { functions: [pf] }",
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
        "resource: rdma/a, mode: shared, slots: 2, select: { functions: [pf] }",
        "resource: rdma/b, mode: shared, slots: 9, select: { functions: [pf] }",
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
        assert!(matches!(error, allocate::Error::Unknown { .. }), "{id}");
        assert!(error.to_string().contains("rdma/a has no unit"), "{error}");
    }
}

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
        error.contains("no rdma_cm device; load rdma_ucm"),
        "{error}"
    );
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
        Counts {
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
    let Health::Unhealthy(UnhealthyReason::Port(reason)) = &pools.snapshots[0].members()[0].health
    else {
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
fn an_exclusive_unit_whose_netdev_is_set_down_is_healthy_and_lost_carrier_is_not() {
    let exclusive = native(&["resource: rdma/a, mode: exclusive, select: { functions: [pf] }"]);
    let shared = native(&["resource: rdma/a, mode: shared, slots: 1, select: { functions: [pf] }"]);
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
fn an_infiniband_vf_without_its_guid_is_healthy_while_its_netdev_is_down() {
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
fn a_pool_of_all_hcas_gives_hcas_whose_port_is_down_as_long_as_one_is_up() {
    let node = Node::new(two_nics);
    node.tree
        .file("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
    let config = native(&[
        "resource: rdma/a, mode: shared, policy: all-hcas, slots: 2, \
         nodes: { optional: [umad] }, select: { vendors: [15b3] }",
    ]);
    let snapshot = node.pools(&config).snapshots.remove(0);
    assert_eq!(
        snapshot.count(),
        Counts {
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
        Counts {
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
    let config = native(&["resource: rdma/a, mode: shared, slots: 2, select: { functions: [pf] }"]);
    let before = node.pools(&config).snapshots;
    let mut seen = node.scan();
    let gone = seen.inventory.rdma_devices.pop().unwrap();
    let after = pools(&config, &seen, &before).snapshots;
    assert_eq!(ids(&after[0]), ids(&before[0]));
    assert_eq!(
        after[0].count(),
        Counts {
            healthy: 2,
            unhealthy: 2
        }
    );
    assert_eq!(
        after[0].members()[1].health,
        Health::Unhealthy(UnhealthyReason::Gone)
    );
    assert!(!after[0].lists_the_same(&before[0]));
    seen.inventory.rdma_devices.push(gone);
    let back = pools(&config, &seen, &after).snapshots;
    assert!(back[0].lists_the_same(&before[0]));
}

#[test]
fn nothing_is_listed_where_there_is_nothing() {
    let node = Node::new(|_| {});
    let shared = "resource: rdma/b, mode: shared, select: { functions: [pf] }";
    for config in [legacy(1000, r#""vendors": ["15b3"]"#), native(&[shared])] {
        let snapshot = node.pools(&config).snapshots.remove(0);
        assert!(snapshot.listing().devices.is_empty());
        assert_eq!(snapshot.count(), Counts::default());
    }
}

#[test]
fn an_hca_in_two_pools_belongs_to_the_first_unless_both_share() {
    let node = Node::new(two_nics);
    let exclusive = "resource: rdma/x, mode: exclusive, select: { functions: [pf] }";
    let shared = "resource: rdma/s, mode: shared, slots: 1, select: { ifNames: [ens1] }";
    let both_shared = "resource: rdma/t, mode: shared, slots: 1, select: { ifNames: [ens1] }";

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
    node.tree.file(
        "/proc/1/net/route",
        "Iface Destination Gateway Flags RefCnt Use Metric Mask\n\
         bond0 00000000 010011AC 0003 0 0 0 00000000\n",
    );
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
        "resource: rdma/s, mode: shared, slots: 1, select: { ifNames: [ens1] }",
        "resource: rdma/x, mode: exclusive, select: { ifNames: [ens2] }",
    ]);
    let pools = node.pools(&config);
    assert_eq!(
        pools.snapshots[0].count(),
        Counts {
            healthy: 0,
            unhealthy: 1
        }
    );
    assert!(matches!(
        &pools.snapshots[0].members()[0].health,
        Health::Unhealthy(UnhealthyReason::NetnsMode(reason)) if reason.contains("rdma system set netns shared")
    ));
    assert_eq!(
        pools.snapshots[1].count(),
        Counts {
            healthy: 1,
            unhealthy: 0
        }
    );
}

#[test]
fn slots_follow_the_gid_table_and_more_than_it_holds_is_remarked() {
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
                gid_slots: 256,
                ..PortSpec::ROCE
            }],
            ..RdmaSpec::default()
        });
    });
    let pool = |slots: &str| {
        native(&[&format!(
            "resource: rdma/a, mode: shared, {slots} select: {{ functions: [pf] }}"
        )])
    };
    let derived = node.pools(&pool(""));
    assert_eq!(derived.snapshots[0].count().healthy, 63);
    assert!(derived.remarks.is_empty());
    let asked = node.pools(&pool("slots: 64,"));
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
fn an_exclusive_pool_offers_nothing_while_uplinks_are_unknown() {
    let node = Node::new(two_nics);
    node.tree.remove("/proc/1/net/route");
    let select = "select: { functions: [pf] }";
    let exclusive = native(&[&format!("resource: rdma/a, mode: exclusive, {select}")]);
    let shared = native(&[&format!(
        "resource: rdma/a, mode: shared, slots: 1, {select}"
    )]);
    let allowed = native(&[&format!(
        "resource: rdma/a, mode: exclusive, exclude: [pfsWithVfs], {select}"
    )]);
    let pools = node.pools(&exclusive);
    assert!(pools.snapshots[0].members().is_empty());
    let said = pools.excluded[0].to_string();
    assert!(
        said.contains("is not known: read ") && said.contains("proc/net/route"),
        "{said}"
    );
    assert_eq!(node.pools(&shared).snapshots[0].members().len(), 2);
    assert_eq!(node.pools(&allowed).snapshots[0].members().len(), 2);
}

#[test]
fn one_message_holds_the_list_whatever_is_asked_for() {
    let member = |index: u32| Member {
        id: format!("{}.sf.{}", "a".repeat(30), u32::MAX - index)
            .parse()
            .unwrap(),
        rdma_devices: Vec::new(),
        netdevs: Vec::new(),
        nodes: Vec::new(),
        numa_node: Some(255),
        place: None,
        pf_address: None,
        slots: MAX_UNITS,
        health: Health::Unhealthy(UnhealthyReason::Gone),
    };
    let config = native(&[&format!(
        "resource: rdma/a, mode: shared, slots: {MAX_UNITS}, select: {{ functions: [pf] }}"
    )]);
    for hcas in [1, 2, 100] {
        let mut members: Vec<Member> = (0..hcas).map(member).collect();
        let mut remarks = Vec::new();
        let shape = shape(&config.pools[0], &[], &mut members, &mut remarks);
        let terms = Arc::new(Terms::of(&config.pools[0], Delivery::default()));
        let snapshot = Snapshot::new(terms, shape, members, Arc::default());
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
    let longest = snapshot.undeliverable("no unit can be delivered").listing();
    assert!(longest.encoded_len() <= MESSAGE_BYTES);
}

#[test]
fn units_are_the_same_after_a_restart_and_a_renaming() {
    let config = native(&["resource: rdma/a, mode: shared, slots: 2, select: { functions: [pf] }"]);
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
        "resource: rdma/c, mode: shared, slots: 50, select: { functions: [pf] }",
        "resource: rdma/d, mode: shared, slots: 50, select: { functions: [pf] }",
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

#[test]
fn every_function_of_dual_port_cards_is_an_hca() {
    let node = Node::new(oci_h100);
    let config = native(&["resource: rdma/a, mode: exclusive, select: { rdmaDevices: [\"*\"] }"]);
    assert_eq!(node.pools(&config).snapshots[0].members().len(), 16);
}
