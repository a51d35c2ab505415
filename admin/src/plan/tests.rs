//! Plans of the corpus of machines: files in tests/plans, which a person reads. `UPDATE_PLANS=1`
//! writes them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use hca_trees::{Tree, cloud, machine};
use rdma_device_plugin::candidate::gather;
use rdma_device_plugin::host_snapshot::HostSnapshot;

use super::*;
use crate::discover::{Document, HostAddress};
use crate::topology;
use crate::validate::Validate;

type Lay = fn(&Tree);

const MACHINES: [(&str, Lay); 17] = [
    ("a4", machine::a4),
    ("azure-nd-h100", cloud::azure_nd_h100),
    ("cascaded-switches", machine::cascaded_switches),
    ("egx", machine::egx),
    ("erdma", cloud::erdma),
    ("gb200", machine::gb200),
    ("gb300", machine::gb300),
    ("gke", cloud::gke),
    ("hgx-b200", cloud::hgx_b200),
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
    ("vf-without-guid", cloud::vf_without_guid),
];

/// What a node of files answers.
fn answers(node: &str, lay: Lay, change: impl Fn(&mut Document)) -> [Value; 2] {
    let directory = tempfile::tempdir().unwrap();
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
    let (candidates, _) = gather::list(&scanned.inventory);
    let mut document = Document::of(&scanned, &candidates, None);
    change(&mut document);
    let topology = topology::document_of(scanned.machine);
    [json!(document), topology].map(|document| json!({"node": node, "document": document}))
}

/// The documents of `kubectl rdma discover --json` and `topology --json`.
fn documents(nodes: Vec<[Value; 2]>) -> [Value; 2] {
    let of =
        |which: usize| json!({"nodes": nodes.iter().map(|node| &node[which]).collect::<Vec<_>>()});
    [of(0), of(1)]
}

fn planned([discover, topology]: &[Value; 2], options: &Options) -> anyhow::Result<String> {
    let (nodes, silent) = read::nodes(discover, topology);
    let plan = decide::plan(&nodes, options)?;
    let silent = silent.iter().map(|(node, why)| format!("{node}: {why}"));
    let warnings: Vec<String> = silent.chain(plan.warnings.iter().cloned()).collect();
    Ok(render::text(&plan, &warnings, ["kube-system", "default"]))
}

/// DHCP gives GKE's NICs their addresses.
fn leased(document: &mut Document) {
    let netdevs = document.hcas.iter().flat_map(|hca| hca.netdevs.clone());
    let address = |(index, netdev)| HostAddress {
        netdev: Some(netdev),
        address: [10, 1, u8::try_from(index).unwrap(), 2].into(),
        prefix: 32,
        dynamic: true,
    };
    document.addresses = netdevs.enumerate().map(address).collect();
}

/// Two equal nodes.
fn of_machine(name: &str, lay: Lay) -> [Value; 2] {
    let first = match name {
        "gke" | "erdma" => answers("node-1", lay, leased),
        _ => answers("node-1", lay, |_| {}),
    };
    let second = first.clone().map(|mut answer| {
        answer["node"] = json!("node-2");
        answer
    });
    documents(vec![first, second])
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
        matches!(ended, Ok(Outcome::Good)),
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
