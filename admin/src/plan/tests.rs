//! Plans of the corpus of machines: files in tests/plans, which a person reads. `UPDATE_PLANS=1`
//! writes them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, Tree, cloud, machine, ports};
use pools::host_snapshot::HostSnapshot;

use super::*;
use crate::discover::HostAddress;
use crate::documents;
use crate::topology;
use crate::validate::Validate;
use decide::Mode;
use read::{PlanHca, PlanNode};

type Lay = fn(&Tree);

const MACHINES: [(&str, Lay); 23] = [
    ("a4", machine::a4),
    ("azure-nd-gb300", cloud::azure_nd_gb300),
    ("azure-nd-h100", cloud::azure_nd_h100),
    ("cabled-on-port-2", ports::cabled_on_port_2),
    ("cascaded-switches", machine::cascaded_switches),
    ("egx", machine::egx),
    ("erdma", cloud::erdma),
    ("four-planes", ports::four_planes),
    ("gb200", machine::gb200),
    ("gb300", machine::gb300),
    ("gke", cloud::gke),
    ("hgx-b200", cloud::hgx_b200),
    ("multiport-eswitch", ports::multiport_eswitch),
    ("no-gpu-near-a-nic", machine::no_gpu_near_a_nic),
    ("oci", cloud::oci),
    (
        "one-gpu-in-four-near-a-nic",
        machine::one_gpu_in_four_near_a_nic,
    ),
    ("other-vendors", cloud::other_vendors),
    ("p4d", machine::p4d),
    ("p5", cloud::p5),
    ("pvrdma", cloud::pvrdma),
    ("two-ports", two_ports),
    ("vf-without-guid", cloud::vf_without_guid),
    ("xdr-with-smi", ports::xdr_with_smi),
];

/// A node without GPUs: two ports of a NIC for pods, another NIC for the node itself.
fn two_ports(tree: &Tree) {
    for (number, (address, netdev, port)) in [
        ("0000:17:00.0", "eno1", SLOW),
        ("0000:3b:00.0", "ens1f0np0", PortSpec::ROCE),
        ("0000:3b:00.1", "ens1f1np1", PortSpec::ROCE),
    ]
    .into_iter()
    .enumerate()
    {
        let spec = PciSpec {
            address,
            numa_node: 0,
            ..PciSpec::MLX5
        };
        tree.nic(&spec, &format!("mlx5_{number}"), netdev, &[port]);
    }
    tree.default_route("eno1");
}

const SLOW: PortSpec<'static> = PortSpec {
    rate: "25 Gb/sec (1X EDR)",
    ..PortSpec::ROCE
};

/// Two InfiniBand HCAs with IPoIB.
fn ipoib(tree: &Tree) {
    for (number, address) in ["0000:3b:00.0", "0000:86:00.0"].into_iter().enumerate() {
        let spec = PciSpec {
            address,
            class: 0x02_0700,
            ..PciSpec::MLX5
        };
        tree.nic(
            &spec,
            &format!("mlx5_{number}"),
            "",
            &[PortSpec::INFINIBAND],
        );
        tree.netdev(&NetdevSpec {
            name: &format!("ib{number}"),
            on: On::Pci(address),
            link_type: 32,
            mac: "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:00:00:01",
            ..NetdevSpec::default()
        });
    }
}

/// What a node of files answers.
fn answer(node: &str, lay: impl Fn(&Tree), change: impl Fn(&mut PlanNode)) -> Value {
    // A tree is thousands of files: in memory where that can be.
    let directory = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    let tree = Tree::new(directory.path());
    tree.rdma_core(true);
    lay(&tree);
    let mut scanned = HostSnapshot::scan(&tree.host(), &[], &[], hca::topology::gpu::read).unwrap();
    scanned.uplinks = tree.uplinks();
    // Nodes of a tree are plain files.
    scanned
        .nodes
        .values_mut()
        .for_each(|node| *node = hca::chardev::Node::Ready);
    let no_policy = directory.path().join("policy.json");
    let (machine, _) = topology::machine(scanned.machine.clone(), &no_policy);
    let mut facts = PlanNode::of(&scanned, &scanned.inventory.hcas, &machine, Vec::new());
    change(&mut facts);
    json!({"node": node, "document": {"facts": facts}})
}

/// Values and manifests.
fn both(answers: &[Value], options: &Options) -> anyhow::Result<[String; 2]> {
    let (nodes, silent) = read::nodes(answers);
    let mut plan = decide::plan(&nodes, options)?;
    plan.warnings.splice(0..0, silent);
    let target = Target {
        release: None,
        daemon: "rdma-netdev".to_owned(),
        namespace: "kube-system".to_owned(),
        networks: "default".to_owned(),
        policy: documents::default_policy(),
    };
    let values = render::values(&plan, &target);
    let objects = render::objects(&documents::documents("values", &values)?[0], &target);
    let manifests = render::manifests(&plan, &objects, &target);
    assert_eq!(
        documents::objects("manifests", &manifests)?,
        objects,
        "{manifests}"
    );
    Ok([values, manifests])
}

fn planned(answers: &[Value], options: &Options) -> anyhow::Result<String> {
    both(answers, options).map(|[values, _]| values)
}

/// DHCP gives GKE's NICs their addresses.
fn leased(document: &mut PlanNode) {
    let hcas = document.hcas.iter();
    let netdevs = hcas.flat_map(|hca| hca.facts.netdev_names().map(str::to_owned));
    let address = |(index, netdev)| HostAddress {
        netdev: Some(netdev),
        address: [10, 1, u8::try_from(index).unwrap(), 2].into(),
        prefix: 32,
        dynamic: true,
    };
    document.addresses = netdevs.enumerate().map(address).collect();
}

/// Two equal nodes.
fn of_machine(name: &str, lay: Lay) -> Vec<Value> {
    let first = match name {
        "gke" | "erdma" => answer("node-1", lay, leased),
        _ => answer("node-1", lay, |_| {}),
    };
    let mut second = first.clone();
    second["node"] = json!("node-2");
    vec![first, second]
}

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    global: Global,
    #[command(flatten)]
    validate: Validate,
}

fn validate(file: &Path) {
    let line = Line::try_parse_from(["validate", file.to_str().unwrap()]).unwrap();
    let ended = line.validate.run(&line.global);
    assert!(
        matches!(ended, Ok(Exit::Good)),
        "{}: {ended:?}",
        file.display()
    );
}

fn check(name: &str, text: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/plans/{name}.yaml"));
    if std::env::var_os("UPDATE_PLANS").is_some() {
        fs::write(&file, text).unwrap();
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        text,
        kept,
        "{} differs: UPDATE_PLANS=1 writes it, then read it",
        file.display()
    );
    validate(&file);
}

#[test]
fn each_machine_has_the_plan_that_was_read() {
    for (name, lay) in MACHINES {
        check(
            name,
            &planned(&of_machine(name, lay), &Options::default()).unwrap(),
        );
    }
}

/// The plan of a machine with flags, which validate accepts.
fn valid(documents: &[Value], options: &Options) -> String {
    let both = both(documents, options).unwrap();
    for text in &both {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, text).unwrap();
        validate(file.path());
    }
    let [values, _] = both;
    values
}

fn refused(lay: Lay, options: &Options) -> String {
    planned(&of_machine("", lay), options)
        .unwrap_err()
        .to_string()
}

fn range(text: &str) -> Options {
    Options {
        range: Some(text.parse().unwrap()),
        ..Options::default()
    }
}

#[test]
fn unequal_nodes_share_a_pool_and_a_silent_one_is_named() {
    let mut nodes = Vec::new();
    nodes.push(answer("gpu-2", machine::a4, |_| {}));
    nodes.push(answer("gpu-1", machine::a4, |_| {}));
    nodes.push(answer("edge-1", machine::egx, |_| {}));
    let silent =
        json!({"node": "gpu-3", "document": null, "error": "no answer within 60 s\n- x: y"});
    nodes.push(silent);
    let [text, manifests] = both(&nodes, &Options::default()).unwrap();
    check("two-kinds", &text);
    check("two-kinds-manifests", &manifests);
    nodes.reverse();
    assert_eq!(
        planned(&nodes, &Options::default()).unwrap(),
        text,
        "the order of answers"
    );
}

#[test]
fn fabrics_of_two_links_are_two_pools() {
    let nodes = vec![
        answer("a", cloud::hgx_b200, |_| {}),
        answer("b", machine::a4, |_| {}),
        answer("c", cloud::p5, |_| {}),
    ];
    let text = valid(&nodes, &Options::default());
    for expected in [
        "- resource: rdma/nic\n",
        "- resource: rdma/nic-2\n",
        "- resource: rdma/efa\n",
        "  optional: true\n",
        "select: {linkTypes: [infiniband], linkSpeed: [\">=400G\"]}",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(text.matches("resourceName:").count(), 1, "{text}");
}

#[test]
fn a_selector_chooses_no_nic_of_other_nodes() {
    // The 100G ports are of the fabric on one node, and for storage on the other.
    let lay = |address: &'static str, netdev: &'static str, others: &[&str]| {
        let storage = move |tree: &Tree| {
            machine::a4(tree);
            let spec = PciSpec {
                address,
                ..PciSpec::MLX5
            };
            tree.nic(&spec, "mlx5_9", netdev, &[PortSpec::ROCE]);
        };
        let egx = |tree: &Tree| {
            machine::egx(tree);
            for name in ["mlx5_0", "mlx5_1"] {
                let rate = "100 Gb/sec (4X EDR)";
                tree.file(format!("/sys/class/infiniband/{name}/ports/1/rate"), rate);
            }
        };
        let others = others.iter().map(|name| answer(name, egx, |_| {}));
        let nodes = std::iter::once(answer("a", storage, |_| {}))
            .chain(others)
            .collect::<Vec<_>>();
        valid(&nodes, &Options::default())
    };
    let text = lay("0000:5e:00.0", "eno9", &["b"]);
    assert!(
        text.contains("select: {ifNames: [\"ens*f*\", \"gpu*rdma*\"]}"),
        "{text}"
    );
    let text = lay("0000:5e:00.0", "ens9f0", &["b"]);
    assert!(
        text.contains("select: {linkTypes: [ether], linkSpeed: [\">=400G\"]}"),
        "{text}"
    );
    assert!(
        text.contains("select: {pciAddresses: [\"0000:37:00.0\", \"0000:37:00.1\"]}"),
        "{text}"
    );
    assert!(text.contains("- resource: rdma/nic-2\n"), "{text}");
    for (others, odd) in [(&["b"][..], "b"), (&["b", "c"], "a")] {
        let text = lay("0000:37:00.0", "ens9f0", others);
        let warning = format!("WARNING: no selector chooses the HCAs of {odd} and no others");
        assert!(text.contains(&warning), "{text}");
    }
}

#[test]
fn a_range_is_split_by_rail_and_must_be_large_enough() {
    let oci = of_machine("oci", cloud::oci);
    let text = valid(&oci, &range("10.8.0.0/13"));
    assert!(
        text.contains("\"15\": {range: \"10.15.128.0/17\"}"),
        "{text}"
    );
    assert!(!text.contains("ASSUMED:"), "{text}");
    assert_eq!(
        refused(cloud::oci, &range("10.8.0.0/28")),
        "--range 10.8.0.0/28 is too small: 2 nodes need a /30 of it for each rail, but get 10.8.0.0/32; set \
         a /26 or larger"
    );
    assert!(refused(cloud::oci, &range("10.8.0.0/30")).contains("cannot be split into 16 rails"));
    valid(&oci, &range("10.8.0.0/26"));
}

#[test]
fn a_network_for_each_node_has_its_gateway_and_routes() {
    let options = Options {
        per_node_prefix: Some(31),
        ..range("10.8.0.0/16")
    };
    let text = valid(&of_machine("a4", machine::a4), &options);
    assert!(
        text.contains("perNode: {prefix: 31, gateway: first}"),
        "{text}"
    );
    assert!(text.contains("{dst: \"10.8.0.0/16\"}"), "{text}");
    let too_long = Options {
        per_node_prefix: Some(32),
        ..range("10.8.0.0/16")
    };
    assert!(refused(machine::a4, &too_long).contains("a node needs a /31"));
    let too_many = Options {
        per_node_prefix: Some(19),
        ..range("10.8.0.0/16")
    };
    assert!(refused(machine::a4, &too_many).contains("2 nodes need a /18"));
}

#[test]
fn a_vlan_is_for_vfs_whose_pf_is_there() {
    let vlan = Options {
        vlan: Some(100),
        ..range("10.8.0.0/13")
    };
    let text = valid(&of_machine("oci", cloud::oci), &vlan);
    assert!(
        text.contains("vlan: 100\n") && text.contains("allow: {vf: {vlan: [100]}}"),
        "{text}"
    );
    for (lay, mode, expected) in [
        (machine::a4 as Lay, None, "make VFs"),
        (machine::a4, Some(Mode::Shared), "a macvlan has no VLAN"),
        (ipoib, None, "InfiniBand has partitions"),
    ] {
        let error = refused(
            lay,
            &Options {
                mode,
                ..vlan.clone()
            },
        );
        assert!(
            error.starts_with("--vlan 100 cannot be set on mlx5_0") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn the_mode_decides_what_a_pod_gets() {
    for (lay, mode, expected) in [
        (ipoib as Lay, Mode::Shared, "attach: ipoib\n"),
        (ipoib, Mode::Exclusive, "attach: move\n"),
        (two_ports, Mode::Shared, "attach: macvlan\n"),
        (
            cloud::oci,
            Mode::Shared,
            "functions: [pf], linkTypes: [ether]",
        ),
        (cloud::hgx_b200, Mode::Exclusive, "Pods need no network"),
    ] {
        let options = Options {
            mode: Some(mode),
            ..Options::default()
        };
        let text = valid(&of_machine("", lay), &options);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let exclusive = |node: &mut PlanNode| node.exclusive_netns = true;
    let node = answer("a", cloud::hgx_b200, exclusive);
    let options = Options {
        mode: Some(Mode::Exclusive),
        ..Options::default()
    };
    let text = valid(std::slice::from_ref(&node), &options);
    assert!(text.contains("attach: rdma-only\n"), "{text}");
    let text = valid(&[node], &Options::default());
    assert!(
        text.contains("WARNING: rdma/nic needs RDMA subsystems in shared mode"),
        "{text}"
    );
}

#[test]
fn an_hca_with_several_netdevs_has_a_network_for_each_cabled_port() {
    let options = Options {
        mode: Some(Mode::Exclusive),
        ..Options::default()
    };
    let planes = valid(&of_machine("", ports::four_planes), &options);
    for port in [3, 6, 9, 12] {
        assert!(planes.contains(&format!("rdma-nic-p{port}")), "{planes}");
        assert!(
            planes.contains(&format!("        port: {port}\n")),
            "{planes}"
        );
    }
    assert_eq!(planes.matches("        port: ").count(), 4, "{planes}");
    let cabled = valid(&of_machine("", ports::cabled_on_port_2), &options);
    assert!(
        cabled.contains("        port: 2\n") && !cabled.contains("-p2"),
        "{cabled}"
    );
    let xdr = valid(&of_machine("", ports::xdr_with_smi), &options);
    assert!(!xdr.contains("port:") && !xdr.contains("smi1"), "{xdr}");
}

#[test]
fn an_assumed_range_has_no_address_of_a_node() {
    let node = |networks: &[(u8, u8)]| {
        let networks = networks.to_vec();
        answer("a", machine::a4, move |document| {
            let address = |(second, prefix): &(u8, u8)| HostAddress {
                netdev: None,
                address: [10, *second, 0, 1].into(),
                prefix: *prefix,
                dynamic: false,
            };
            document.addresses = networks.iter().map(address).collect();
        })
    };
    for (networks, expected) in [
        (&[(64, 24)][..], "10.72.0.0/13 for pods"),
        (&[(64, 10)], "10.128.0.0/13 for pods"),
        (&[(0, 8)], "172.16.0.0/13 for pods"),
    ] {
        let text = valid(&[node(networks)], &Options::default());
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn nodes_that_number_rails_otherwise_need_them_in_the_policy() {
    // On one node the storage NIC is the first of the addresses, on the other a NIC is missing.
    let nodes = vec![
        answer("a", machine::a4, |_| {}),
        answer("b", machine::one_gpu_in_four_near_a_nic, |_| {}),
    ];
    let text = valid(&nodes, &Options::default());
    assert!(text.contains("  rails:\n"), "{text}");
    assert!(text.contains("\"0000:91:00.0\": 0"), "{text}");
    assert!(text.contains("\"0000:b1:00.0\": 1"), "{text}");
}

#[test]
fn what_a_node_answers_ends_no_comment() {
    let evil = answer("a\n- b", machine::egx, |document| {
        for hca in &mut document.hcas {
            for netdev in &mut hca.facts.netdevs {
                netdev.name = "x\n---\nkind: Pod\u{1b}[2J".to_owned();
            }
        }
    });
    let text = valid(&[evil], &Options::default());
    assert!(
        !text.contains("\nkind: Pod") && !text.contains('\u{1b}') && !text.contains("\n- b"),
        "{text}"
    );
    let (nodes, silent) = read::nodes(&[json!({"node": "a", "document": {"facts": {"hcas": 7}}})]);
    assert!(
        nodes.is_empty() && silent[0].contains("plan: its answer of discover"),
        "{silent:?}"
    );
}

#[test]
fn a_nic_that_a_pod_has_changes_no_plan() {
    // Its netdev and the addresses of it are not visible.
    let take = |hca: &mut PlanHca| (hca.mtu, hca.apart) = (None, false);
    let taken = |node: &mut PlanNode| {
        leased(node);
        let away = |name: Option<&str>| name == Some("gpu3rdma0");
        node.addresses.retain(|one| !away(one.netdev.as_deref()));
        let hcas = node.hcas.iter_mut();
        let mut hcas = hcas.filter(|hca| hca.facts.netdev_names().any(|name| away(Some(name))));
        take(hcas.next().unwrap());
    };
    let nodes = ["node-1", "node-2"].map(|name| match name {
        "node-1" => answer(name, cloud::gke, taken),
        _ => answer(name, cloud::gke, leased),
    });
    let text = planned(&nodes, &Options::default()).unwrap();
    check("gke", &text);

    let taken = answer("a", two_ports, |document| {
        document.hcas.iter_mut().for_each(take);
    });
    let text = valid(&[taken], &Options::default());
    assert!(text.contains("WARNING: NICs of a are in pods"), "{text}");
}

#[test]
fn a_node_that_changes_the_network_of_all_is_named() {
    let odd = |document: &mut PlanNode| {
        leased(document);
        document.addresses.pop();
        let hcas = document.hcas.iter_mut();
        hcas.for_each(|hca| hca.mtu = Some(1400));
    };
    let nodes = vec![
        answer("a", cloud::gke, leased),
        answer("b", cloud::gke, odd),
    ];
    let text = valid(&nodes, &Options::default());
    for expected in [
        "WARNING: rdma/nic: MTU 1400 on NICs of b, up to 9000 on others: the network gets the lowest",
        "WARNING: rdma/nic: NICs of b have no address on the host, unlike others: the plan has a range",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn nodes_without_hcas_for_pods_get_no_file_and_no_pool() {
    let uplink = |tree: &Tree| {
        tree.nic(&PciSpec::MLX5, "mlx5_0", "eno1", &[PortSpec::ROCE]);
        tree.default_route("eno1");
    };
    let alone = [answer("a", uplink, |_| {})];
    let error = planned(&alone, &Options::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("(for the node itself: eno1: it carries the node's default route)"),
        "{error}"
    );
    let nodes = ["a", "b", "c"].map(|name| match name {
        "a" => answer(name, uplink, |_| {}),
        "b" => answer(name, |_: &Tree| {}, |_| {}),
        _ => answer(name, machine::egx, |_| {}),
    });
    let text = valid(&nodes, &Options::default());
    assert_eq!(text.matches("WARNING").count(), 1, "{text}");
    for expected in [
        "WARNING: a: no HCA is for pods",
        "no RDMA device",
        "  optional: true\n",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn a_broken_node_changes_nothing_for_the_others() {
    let healthy = ["a", "b", "c"].map(|name| answer(name, machine::egx, |_| {}));
    let expected = valid(&healthy, &Options::default());
    let select = expected.lines().find(|line| line.contains("select:"));
    // Two of the GPUs fell off the bus; the device nodes of an HCA are missing.
    let sick = answer("b", machine::egx, |node| {
        let gpus = (0..node.gpus.len()).collect();
        node.hcas.iter_mut().for_each(|hca| hca.gpus.clear());
        node.hcas[0].gpus = gpus;
    });
    let faulty = answer("c", machine::egx, |node| {
        node.hcas[1].obstacle = Some("no uverbs node".to_owned());
    });
    for (broken, is_chosen) in [(sick, true), (faulty, false)] {
        let nodes = vec![healthy[0].clone(), healthy[2].clone(), broken];
        let nodes = nodes.into_iter().enumerate().map(|(index, mut answer)| {
            answer["node"] = json!(format!("n{index}"));
            answer
        });
        let text = valid(&nodes.collect::<Vec<_>>(), &Options::default());
        assert_eq!(
            text.lines().find(|line| line.contains("select:")),
            select,
            "{text}"
        );
        assert!(!text.contains("WARNING"), "{text}");
        assert_eq!(text.contains("not for pods"), !is_chosen, "{text}");
    }
}

#[test]
fn a_port_that_is_down_does_not_lower_the_speed() {
    let down = |tree: &Tree| {
        machine::egx(tree);
        let port = "/sys/class/infiniband/mlx5_0/ports/1";
        tree.file(format!("{port}/rate"), "10 Gb/sec (4X SDR)");
        tree.file(format!("{port}/state"), "1: DOWN");
    };
    let text = valid(&[answer("a", down, |_| {})], &Options::default());
    assert!(text.contains("linkSpeed: [\">=100G\"]"), "{text}");
    assert!(
        text.contains("WARNING: no port of mlx5_0 (0000:37:00.0) is active"),
        "{text}"
    );
}

#[test]
fn a_range_suffices_is_of_no_node_and_has_an_effect() {
    let many = answer("n", two_ports, |_| {});
    let named = |index: u32| {
        let mut answer = many.clone();
        answer["node"] = json!(format!("n{index}"));
        answer
    };
    let many: Vec<Value> = (0..100).map(named).collect();
    let error = planned(&many, &range("10.8.0.0/25"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("100 nodes need a /25 of it for each rail, but get 10.8.0.0/26"),
        "{error}"
    );
    planned(&many, &range("10.8.0.0/24")).unwrap();

    let text = valid(&of_machine("gke", cloud::gke), &range("10.0.0.0/12"));
    assert!(text.contains("WARNING: --range overlaps 10.1."), "{text}");
    let error = refused(cloud::hgx_b200, &range("10.8.0.0/16"));
    assert!(
        error.starts_with("--range and --per-node-prefix have no effect"),
        "{error}"
    );
}

#[test]
fn a_node_with_two_pods_is_planned_once() {
    let one = answer("a", machine::egx, |_| {});
    let mut silent = json!({"node": "a", "pod": "ending", "error": "its pod is ending"});
    silent["document"] = Value::Null;
    let two = [silent, one.clone()];
    let alone = planned(&[one], &Options::default()).unwrap();
    assert_eq!(planned(&two, &Options::default()).unwrap(), alone);
}

#[test]
fn a_driver_of_any_name_is_not_in_the_values() {
    let names = |document: &mut PlanNode| {
        for hca in &mut document.hcas {
            let pci = hca.facts.pci.as_mut().unwrap();
            pci.driver = Some("efa\u{2028}\u{85}\u{9b}2J\u{1f600}".to_owned());
        }
    };
    let nodes = vec![answer("a", cloud::p5, names)];
    let text = valid(&nodes, &Options::default());
    let values = &text[text.find("\npools:").unwrap()..];
    let is_plain = |c: char| c == '\n' || (' '..='~').contains(&c);
    assert!(values.chars().all(is_plain), "{values}");
    assert!(values.contains("resource: rdma/nic\n"), "{values}");
}

#[test]
fn the_driver_of_most_nodes_names_the_resource() {
    let renamed = |document: &mut PlanNode| {
        for hca in &mut document.hcas {
            hca.facts.pci.as_mut().unwrap().driver = Some("Other".to_owned());
        }
    };
    let nodes = vec![
        answer("a", machine::p4d, renamed),
        answer("b", machine::p4d, |_| {}),
        answer("c", machine::p4d, |_| {}),
    ];
    let text = valid(&nodes, &Options::default());
    assert!(text.contains("resource: rdma/efa\n"), "{text}");
    let text = valid(&nodes[..1], &Options::default());
    assert!(text.contains("resource: rdma/other\n"), "{text}");
}

#[test]
fn a_node_with_an_impossible_answer_is_left_out_by_name() {
    let far = |node: &mut PlanNode| node.hcas[0].rail = Some(256);
    let healthy = answer("a", machine::egx, |_| {});
    let alone = planned(std::slice::from_ref(&healthy), &Options::default()).unwrap();
    let both = [healthy, answer("b", machine::egx, far)];
    let text = planned(&both, &Options::default()).unwrap();
    let warning = "# WARNING: b is not in this plan: HCA 0000:37:00.0 is on rail 256, above 255\n";
    assert!(text.contains(warning), "{text}");
    assert_eq!(text.replace(warning, ""), alone);
}

#[test]
fn an_address_of_the_whole_internet_takes_no_range() {
    let whole = |document: &mut PlanNode| {
        document.addresses = vec![HostAddress {
            netdev: None,
            address: [10, 0, 0, 1].into(),
            prefix: 0,
            dynamic: false,
        }];
    };
    let nodes = [answer("a", machine::egx, whole)];
    let text = planned(&nodes, &Options::default()).unwrap();
    assert!(text.contains("10.64.0.0/"), "{text}");
}

#[test]
fn a_long_text_of_a_node_is_cut() {
    let long = |document: &mut PlanNode| {
        document.hcas[0].obstacle = Some("x".repeat(100_000));
        document.hcas[0].facts.rdma_devices[0].name = "y".repeat(100_000);
        document.hcas[0].facts.netdevs[0].name = "z".repeat(100_000);
        document.gpus[0] = "g".repeat(100_000);
    };
    let node = answer(&"n".repeat(100_000), machine::egx, long);
    let text = planned(&[node], &Options::default()).unwrap();
    assert!(text.contains("bytes cut"), "{text}");
    let longest = text.lines().map(str::len).max();
    assert!(longest < Some(2_000), "{longest:?}");
}

#[test]
fn yaml_reads_each_text_as_that_text() {
    for text in [
        "on", "NO", "null", "0x1f", "12e4", "1021", "0:1", "a: b", "~", "", "x\n#y", "é",
    ] {
        let yaml = format!("{}: {}", render::scalar(text), render::scalar(text));
        assert_eq!(
            documents::documents("x", &yaml).unwrap(),
            [json!({ text: text })],
            "{yaml}"
        );
    }
    assert_eq!(
        [render::scalar("ens2f0"), render::scalar("on")],
        ["ens2f0", "\"on\""]
    );
}
