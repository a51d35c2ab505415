//! Facts for Node Feature Discovery, whose local source makes node labels of files with lines
//! `name=value`.
//!
//! Only what the node has, not how it is doing: a label that flaps moves pods about. Files whose
//! name begins with a dot are passed over by its reader, so a new one comes in whole.

use std::collections::BTreeSet;

use hca::inventory::Inventory;
use hca::{LinkLayer, NetnsMode};

/// Name of our file.
pub(crate) const FILE: &str = "rdma-device-plugin";

/// The lines; labels get the prefix `feature.node.kubernetes.io/` from their reader. An HCA that a
/// pod holds in a namespace of its own counts, though its ports cannot be seen.
#[must_use]
pub(crate) fn lines(inventory: &Inventory) -> String {
    let devices = &inventory.rdma_devices;
    let count = devices.len() + inventory.elsewhere.len();
    let mut lines = vec![
        format!("rdma-hca.present={}", count > 0),
        format!("rdma-hca.count={count}"),
    ];
    if let Some(mode) = inventory.netns_mode {
        let mode = match mode {
            NetnsMode::Shared => "shared",
            NetnsMode::Exclusive => "exclusive",
        };
        lines.push(format!("rdma-hca.netns-mode={mode}"));
    }
    let ports = || devices.iter().flat_map(|device| &device.ports);
    for (layer, word) in [
        (LinkLayer::Ethernet, "ethernet"),
        (LinkLayer::InfiniBand, "infiniband"),
    ] {
        if ports().any(|port| port.link_layer == layer) {
            lines.push(format!("rdma-hca.{word}=true"));
        }
    }
    let drivers: BTreeSet<&str> = devices.iter().filter_map(|d| d.driver.as_deref()).collect();
    let drivers = drivers.into_iter();
    lines.extend(drivers.map(|driver| format!("rdma-hca.driver.{driver}=true")));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use hca::tree::{PciSpec, PortSpec, Tree};

    use super::*;

    #[test]
    fn a_node_is_described_by_what_it_has() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path().to_owned());
        tree.sockets(&["0-3"]);
        tree.rdma_core(true);
        tree.nic(&PciSpec::MLX5, "mlx5_0", "rdma0", &[PortSpec::ROCE]);
        let host = hca::Host::at(directory.path());
        let text = lines(&hca::inventory(&host).unwrap());
        for line in [
            "rdma-hca.present=true",
            "rdma-hca.count=1",
            "rdma-hca.ethernet=true",
            "rdma-hca.driver.mlx5_core=true",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in {text}");
        }
        // What Node Feature Discovery takes for the name of a label and for its value.
        for line in text.lines() {
            let (name, value) = line.split_once('=').unwrap();
            for word in [name, value] {
                let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
                assert!(word.len() <= 63 && word.chars().all(fits), "{line}");
            }
        }
    }

    #[test]
    fn a_node_without_hcas_says_so() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("sys/class")).unwrap();
        let host = hca::Host::at(directory.path());
        let text = lines(&hca::inventory(&host).unwrap());
        assert_eq!(text, "rdma-hca.present=false\nrdma-hca.count=0\n");
    }
}
