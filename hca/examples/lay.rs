//! Lays a machine of the field as a tree of files, to try the programs on hardware that is not at
//! hand:
//!
//! ```text
//! cargo run -p hca --example lay -- a4 /tmp/a4
//! rdmactl topology --host-root /tmp/a4
//! ```

use hca_trees::{Tree, machine};

type Lay = fn(&Tree);

const MACHINES: [(&str, Lay); 9] = [
    ("a4", machine::a4),
    ("p4d", machine::p4d),
    ("nd-h100", machine::nd_h100),
    ("gb200", machine::gb200),
    ("oci-h100", machine::oci_h100),
    ("egx", machine::egx),
    ("one-near", machine::one_gpu_in_four_near_a_nic),
    ("none-near", machine::no_gpu_near_a_nic),
    ("cascaded", machine::cascaded_switches),
];

fn main() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let names: Vec<&str> = MACHINES.iter().map(|(name, _)| *name).collect();
    let usage = format!(
        "usage: lay MACHINE DIRECTORY, with a machine of {}",
        names.join(", ")
    );
    let [name, directory] = arguments.as_slice() else {
        return Err(usage);
    };
    let (_, lay) = MACHINES
        .iter()
        .find(|(known, _)| known == name)
        .ok_or(usage)?;
    std::fs::create_dir_all(directory).map_err(|error| format!("make {directory}: {error}"))?;
    let tree = Tree::new(directory.as_str());
    tree.file("/proc/sys/kernel/hostname", name);
    tree.rdma_core(true);
    lay(&tree);
    Ok(())
}
