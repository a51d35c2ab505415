//! Pools of hosts made of files.

mod clouds;
mod health;
mod members;
mod ports;
mod units;

use std::collections::BTreeSet;

use hca_trees::machine::{a4, oci_h100};
use hca_trees::{NetdevSpec, On, PciSpec, PortSpec, RdmaSpec, Tree};
use kubelet_api::deviceplugin::Device;
use prost::Message;

use super::*;
use crate::allocate::allocate;
use crate::config::{self, MAX_POOLED_UNITS, MAX_UNITS};
use crate::example::scan;
use crate::example::{function, named};
use node_wire::status::UnitCounts;

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
        scan(&self.tree)
    }

    fn pools(&self, config: &Config) -> Pools {
        pools(config, &self.scan(), &[])
    }
}

fn pools(config: &Config, seen: &HostSnapshot, previous: &[Snapshot]) -> Pools {
    let previous: Vec<_> = previous.iter().cloned().map(Arc::new).collect();
    let candidates = seen.inventory.hcas.clone();
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
