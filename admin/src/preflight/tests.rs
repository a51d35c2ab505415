//! All of preflight on hosts made of files: what is read, and not only how it is judged.

mod node_tree;

use hca_trees::{NetdevSpec, On, PciSpec, RdmaSpec, Tree, cloud, machine};

use super::check::Check;
use super::*;
use crate::verdict::Verdict;
use node_tree::Node;

#[test]
fn a_fit_node_passes_what_a_tree_of_files_can_show() {
    let node = Node::fit();
    let verdicts = node.verdicts();
    let of = |wanted: Verdict| {
        let ids = verdicts
            .iter()
            .filter(|(_, verdict)| **verdict == wanted)
            .map(|(id, _)| *id);
        ids.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(Verdict::Fail), "");
    assert_eq!(of(Verdict::Warn), "");
    assert_eq!(
        of(Verdict::Unknown),
        // Only the running kernel shows flow control.
        "Q02"
    );
    assert_eq!(
        of(Verdict::NotApplicable),
        "A01 A02 A05 A06 H02 H03 L04 L09 L13 L14 M04 P12 R02 R05"
    );
}

/// Breaks one thing on a node, which the check with this id has to find.
type Break = (&'static str, fn(&Node));

/// On a node where all else is as it should be.
fn each_is_found(breaks: &[Break]) {
    let node = Node::fit();
    for (id, break_it) in breaks {
        break_it(&node);
        let selection = Selection::new(&[(*id).to_owned()], &[]).unwrap();
        let outcomes = run(&node.context(node.settings(), None), &selection);
        assert!(
            outcomes[0].verdict >= Verdict::Warn,
            "{id} does not see it: {outcomes:?}"
        );
        node.restore();
    }
    assert_eq!(node.complaints(), Vec::<&str>::new(), "all is as before");
}

#[test]
fn what_is_wrong_with_modules_is_found() {
    each_is_found(&[
        ("M01", |node| node.take("/sys/module/rdma_ucm")),
        ("M02", |node| {
            node.take("/sys/bus/pci/devices/0000:91:00.0/driver")
        }),
        ("M04", |node| {
            node.take("/run/mellanox");
            node.put("/run/mellanox/drivers/other", "");
        }),
        ("M08", |node| {
            node.put("/proc/sys/kernel/osrelease", "5.4.0-190-generic")
        }),
    ]);
}

#[test]
fn what_is_wrong_with_links_is_found() {
    each_is_found(&[
        ("L01", |node| {
            node.put("/sys/class/net/gpu1rdma0/carrier", 0)
        }),
        ("L02", |node| {
            node.put("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
        }),
        ("L03", |node| {
            node.put(
                "/sys/class/infiniband/mlx5_1/ports/1/phys_state",
                "2: Polling",
            )
        }),
        ("L05", |node| {
            node.put("/sys/class/net/gpu1rdma0/speed", 100_000)
        }),
        ("L06", |node| node.put("/sys/class/net/gpu1rdma0/mtu", 4300)),
        ("L07", |node| node.put("/sys/class/net/gpu1rdma0/mtu", 1500)),
    ]);
}

#[test]
fn what_is_wrong_with_gids_is_found() {
    each_is_found(&[("G01", |node| {
        node.put(
            "/sys/class/infiniband/mlx5_1/ports/1/gid_attrs/types/3",
            "IB/RoCE v1",
        )
    })]);
}

#[test]
fn what_is_wrong_with_pcie_is_found() {
    each_is_found(&[
        ("P01", |node| {
            node.put("/sys/bus/pci/devices/0000:91:00.0/current_link_width", 8)
        }),
        ("P03", |node| {
            node.config("0000:8e:02.0", 0x2810, Some(0x001d))
        }),
        ("P05", |node| {
            node.put(
                "/sys/bus/pci/devices/0000:91:00.0/iommu_group/type",
                "DMA-FQ",
            )
        }),
        ("P06", |node| node.config("0000:91:00.0", 0x2936, None)),
    ]);
}

#[test]
fn what_is_wrong_with_gpudirect_is_found() {
    each_is_found(&[
        ("D01", |node| node.take("/proc/driver/nvidia/version")),
        ("D03", |node| node.put("/proc/kallsyms", "0 T printk")),
        ("D07", |node| {
            node.put("/proc/800/environ", "MOFED_ENABLED=true\0")
        }),
    ]);
}

#[test]
fn what_is_wrong_with_runtime_is_found() {
    each_is_found(&[
        ("R01", |node| {
            node.put(
                "/proc/700/limits",
                "Max locked memory         8388608 8388608 bytes",
            );
        }),
        ("R04", |node| node.take("/dev/infiniband/uverbs3")),
        ("R06", |node| {
            node.put("/etc/containerd/config.toml", "enable_cdi = false")
        }),
    ]);
}

#[test]
fn what_is_wrong_with_rails_is_found() {
    each_is_found(&[("A03", |node| {
        node.put("/proc/sys/net/ipv4/conf/gpu1rdma0/rp_filter", 1)
    })]);
}

#[test]
fn what_is_wrong_with_qos_is_found() {
    each_is_found(&[
        ("Q01", |node| {
            node.put("/sys/class/net/gpu1rdma0/qos/trust", "pcp")
        }),
        ("Q03", |node| {
            node.put("/sys/class/net/gpu1rdma0/ecn/roce_np/enable/3", 0)
        }),
        ("Q04", |node| {
            node.put(
                "/sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_tos",
                0,
            )
        }),
    ]);
}

#[test]
fn what_is_wrong_with_kubernetes_is_found() {
    each_is_found(&[
        ("K01", |node| {
            node.take("/var/lib/kubelet/device-plugins/kubelet.sock")
        }),
        ("K03", |node| {
            node.put("/etc/kubelet.yaml", "topologyManagerPolicy: none")
        }),
        ("K07", |node| {
            let text =
                r#"{"Data":{"RegisteredDevices":{"a/x":["0000:91:00.0"],"a/y":["0000:91:00.0"]}}}"#;
            node.put(
                "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
                text,
            );
        }),
        ("K08", |node| node.take("/opt/cni/bin/rdma-ipam")),
        ("K09", |node| node.put("/etc/rdma-netdev/policy.json", "{")),
    ]);
}

#[test]
fn rails_in_one_subnet_need_settings_of_their_own() {
    let mut node = Node::fit();
    node.prefix = 16;
    let complaints = node.complaints();
    assert!(
        complaints.contains(&"A01") && complaints.contains(&"A02"),
        "{complaints:?}"
    );
}

#[test]
fn a_configuration_says_which_nics_have_to_be_in_order() {
    let node = Node::fit();
    node.tree
        .set_port_state("mlx5_7", 1, "1: DOWN", "2: Polling");
    let with_pool = |devices: &[&str]| {
        let membership = Membership {
            resource: "rdma/rails".to_owned(),
            shared: true,
            units: 1000,
        };
        let of_device = devices
            .iter()
            .map(|device| ((*device).to_owned(), vec![membership.clone()]));
        let pools = Pools {
            of_device: of_device.collect(),
            ..Pools::default()
        };
        node.verdicts_with(node.settings(), Some(pools))
    };
    let without = with_pool(&["mlx5_0"]);
    assert_eq!(
        without["L02"],
        Verdict::Pass,
        "the port that is down is in no pool"
    );
    assert_eq!(without["G06"], Verdict::Warn, "1000 units do not fit");
    assert_eq!(with_pool(&["mlx5_0", "mlx5_7"])["L02"], Verdict::Fail);
}

#[test]
fn a_node_that_lost_an_hca_is_not_fit() {
    let node = Node::fit();
    let expecting = |number: &str| {
        let mut settings = node.settings();
        settings.expected = vec![number.parse().unwrap()];
        let verdicts = node.verdicts_with(settings, None);
        (verdicts["H01"], verdicts["H03"])
    };
    let all = node.context(node.settings(), None).snapshot;
    let all = all.inventory.rdma_devices.len();
    assert_eq!(expecting(&all.to_string()).1, Verdict::Pass);
    node.tree
        .set_port_state("mlx5_7", 1, "1: DOWN", "2: Polling");
    assert_eq!(expecting(&all.to_string()).1, Verdict::Fail);
    assert_eq!(expecting(&(all - 1).to_string()).1, Verdict::Pass);
    node.take("/sys/class/infiniband");
    assert_eq!(expecting("1"), (Verdict::Fail, Verdict::Fail));
}

#[test]
fn functions_of_nvswitches_are_not_counted_as_hcas() {
    let node = Node::bare();
    cloud::hgx_b200(&node.tree);
    let usable = |number: usize| {
        let mut settings = node.settings();
        settings.expected = vec![number.to_string().parse().unwrap()];
        node.verdicts_with(settings, None)["H03"]
    };
    // Eight NICs and the bond for storage.
    assert_eq!((usable(9), usable(10)), (Verdict::Pass, Verdict::Fail));
}

#[test]
fn a_node_without_any_of_it_fails_for_that_alone() {
    let node = Node::bare();
    let tree = &node.tree;
    let on = On::Pci("0000:00:03.0");
    let spec = PciSpec {
        address: "0000:00:03.0",
        above: "pci0000:00",
        vendor: 0x1af4,
        device: 0x1041,
        driver: "virtio-pci",
        total_vfs: 0,
        ..PciSpec::MLX5
    };
    tree.pci(&spec);
    tree.netdev(&NetdevSpec {
        name: "eth0",
        on,
        ..NetdevSpec::default()
    });
    assert_eq!(node.complaints(), ["H01"]);
}

#[test]
fn soft_roce_on_a_plain_nic_does_not_fail() {
    let node = Node::bare();
    let tree = &node.tree;
    tree.rdma_core(true);
    for module in ["ib_core", "ib_uverbs", "rdma_ucm", "rdma_rxe"] {
        tree.file(format!("/sys/module/{module}/refcnt"), 1);
    }
    tree.netdev(&NetdevSpec {
        name: "eth1",
        mtu: 1500,
        ..NetdevSpec::default()
    });
    let gids: &[(u32, &str, &str, &str)] = &[(
        0,
        "fe80:0000:0000:0000:5054:00ff:fe00:0001",
        "RoCE v2",
        "eth1",
    )];
    let ports = &[hca_trees::PortSpec {
        gids,
        ..hca_trees::PortSpec::ROCE
    }];
    tree.rdma(&RdmaSpec {
        name: "rxe0",
        soft_parent: "eth1",
        ports,
        ..RdmaSpec::default()
    });
    node.null_node("infiniband_verbs/uverbs0", "uverbs0");
    node.null_node("misc/rdma_cm", "rdma_cm");
    let failed: Vec<&str> = node
        .verdicts()
        .into_iter()
        .filter(|(_, v)| *v == Verdict::Fail)
        .map(|(id, _)| id)
        .collect();
    assert_eq!(failed, Vec::<&str>::new());
}

#[test]
fn the_pools_of_a_configuration_name_their_devices_and_units() {
    let directory = tempfile::tempdir().unwrap();
    let tree = Tree::new(directory.path());
    machine::a4(&tree);
    let config = config::parse(
        r#"{"configList": [
            {"resourceName": "rails", "rdmaHcaMax": 1000,
             "selectors": {"ifNames": ["gpu0rdma0", "gpu7rdma0"]}},
            {"resourceName": "none", "rdmaHcaMax": 1, "selectors": {"ifNames": ["eth9"]}}]}"#,
    );
    let host = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
    let nowhere = Path::new("/nonexistent/policy.json");
    let pools = pools(&config.unwrap(), &host, nowhere, &tree.host());
    let devices: Vec<&str> = pools.of_device.keys().map(String::as_str).collect();
    assert_eq!(devices, ["mlx5_0", "mlx5_7"]);
    let expected = Membership {
        resource: "rdma/rails".to_owned(),
        shared: true,
        units: 1000,
    };
    assert_eq!(pools.of_device["mlx5_7"], [expected]);
    let hcas = |resource: &str| pools.hcas[resource].len();
    assert_eq!((hcas("rdma/rails"), hcas("rdma/none")), (2, 0));
}

/// A case of a check's test: the check, the facts, the worst verdict, and words of its reason.
pub(super) type Case<F> = (&'static str, F, Verdict, &'static str);

/// Proves a subject's checks by cases, and that each check is seen both content and not.
pub(super) fn prove<F: std::fmt::Debug>(checks: &[Check<F>], cases: &[Case<F>]) {
    for (id, facts, verdict, words) in cases {
        let check = checks.iter().find(|check| check.id == *id).unwrap();
        let findings = (check.judge)(facts).unwrap_or_else(|only| vec![only]);
        let worst = findings.iter().max_by_key(|finding| finding.verdict);
        let said = worst.map_or(Verdict::NotApplicable, |finding| finding.verdict);
        assert_eq!(said, *verdict, "{id} of {facts:?}: {findings:?}");
        let named = worst.is_none_or(|finding| finding.why.contains(words));
        assert!(named, "{id}: {findings:?} does not say {words:?}");
        let helpless = findings
            .iter()
            .find(|f| f.verdict >= Verdict::Warn && f.remedy.is_none());
        assert!(
            helpless.is_none(),
            "{id} does not say what to do: {helpless:?}"
        );
    }
    for check in checks {
        let of = |wanted: fn(Verdict) -> bool| {
            cases
                .iter()
                .any(|(id, _, verdict, _)| *id == check.id && wanted(*verdict))
        };
        assert!(
            of(|verdict| verdict == Verdict::Pass),
            "{} is never seen to pass",
            check.id
        );
        assert!(
            of(|verdict| verdict >= Verdict::Warn),
            "{} is never seen to complain",
            check.id
        );
    }
}
