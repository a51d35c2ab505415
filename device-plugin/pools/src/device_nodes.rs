//! The character devices of one HCA and the state of each one's node: which nodes a container gets,
//! and what stands in the way.
//!
//! They come from a scan of the host, or are read for this HCA alone at the moment at which a
//! container gets them. Both ways end in the same decision.

use std::collections::BTreeMap;

use hca::chardev::{self, CharDevice, CharDevices, Node};
use hca::{Hca, Host};

use crate::config::{NodeClass, NodeRule};
use crate::host_snapshot::{HostSnapshot, obstacle};
use crate::snapshot::DeviceNode;
use crate::words::word;

/// The character devices of one HCA at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HcaDevices {
    /// By RDMA device, in the order of the HCA.
    of_devices: Vec<(String, CharDevices)>,
    rdma_cm: Option<CharDevice>,
    /// The state of each node, by its name below the device directory.
    states: BTreeMap<String, Node>,
}

impl HcaDevices {
    /// Those of an HCA as a scan found them.
    pub fn scanned(hca: &Hca, seen: &HostSnapshot) -> Self {
        let devices = hca.rdma_devices.iter();
        let of_devices = devices.map(|one| (one.name.clone(), one.char_devices.clone()));
        Self {
            of_devices: of_devices.collect(),
            rdma_cm: seen.inventory.rdma_cm.clone(),
            states: seen.nodes.clone(),
        }
    }

    /// Reads those of an HCA as they are now, by the names that a scan found.
    ///
    /// # Errors
    /// [`hca::Error`]: the HCA is not on this host, or sysfs cannot be read.
    pub fn read(host: &Host, hca: &Hca) -> hca::Result<Self> {
        let rdma_devices = hca.rdma_names();
        let mut found = chardev::of_hca(host, &hca.id, &rdma_devices)?;
        let mut of_devices = Vec::new();
        for name in rdma_devices {
            of_devices.extend(found.remove_entry(name));
        }
        of_devices.extend(found);
        let rdma_cm = chardev::rdma_cm(host)?;
        let all = of_devices.iter().flat_map(|(_, devices)| devices.iter());
        let states = all
            .chain(&rdma_cm)
            .map(|device| (device.dev_name(), device.node()))
            .collect();
        Ok(Self {
            of_devices,
            rdma_cm,
            states,
        })
    }

    /// Names of the RDMA devices.
    pub fn rdma_devices(&self) -> impl Iterator<Item = &str> {
        self.of_devices.iter().map(|(name, _)| name.as_str())
    }

    /// The nodes that a container gets, and what is missing of those it must have.
    pub fn nodes(&self, rule: &NodeRule) -> (Vec<DeviceNode>, Option<String>) {
        let mut present = Vec::new();
        let mut lacking = None;
        for class in NodeClass::ALL {
            if !rule.includes(class) {
                continue;
            }
            let required = rule.required.contains(&class);
            let devices = self.of_class(class);
            if devices.is_empty() && required {
                let hint = match class {
                    NodeClass::Uverbs => "; load ib_uverbs",
                    NodeClass::RdmaCm => {
                        "; load rdma_ucm, or set nodes.required: [uverbs] for HCAs that do without it, \
                         such as EFA"
                    }
                    NodeClass::Umad | NodeClass::Issm => "; load ib_umad",
                    NodeClass::Ucm => "; kernels since 5.16 have none",
                };
                lacking.get_or_insert(format!("no {} device{hint}", word(&class)));
            }
            for device in devices {
                match obstacle(&self.states, device) {
                    None => present.push(DeviceNode {
                        class,
                        path: format!("/dev/{}", device.dev_name()),
                    }),
                    Some(obstacle) if required => {
                        lacking.get_or_insert(obstacle);
                    }
                    Some(_) => {}
                }
            }
        }
        (present, lacking)
    }

    fn of_class(&self, class: NodeClass) -> Vec<&CharDevice> {
        if class == NodeClass::RdmaCm {
            return self.rdma_cm.iter().collect();
        }
        let mut devices = Vec::new();
        for (_, all) in &self.of_devices {
            match class {
                NodeClass::Uverbs => devices.extend(&all.uverbs),
                NodeClass::Umad => devices.extend(&all.umad),
                NodeClass::Issm => devices.extend(&all.issm),
                NodeClass::Ucm => devices.extend(&all.ucm),
                NodeClass::RdmaCm => {}
            }
        }
        devices
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{On, RdmaSpec, Tree, machine};

    use super::*;
    use crate::example::scan;

    #[test]
    fn what_is_read_for_one_hca_is_what_a_scan_finds() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(true);
        machine::a4(&tree);
        // On no bus: soft RoCE.
        tree.rdma(&RdmaSpec {
            name: "rxe0",
            on: On::Nothing,
            ..RdmaSpec::default()
        });
        let seen = scan(&tree);
        assert_eq!(seen.inventory.rdma_devices().count(), 9);
        for hca in &seen.inventory.hcas {
            let mut read = HcaDevices::read(&tree.host(), hca).unwrap();
            read.states
                .values_mut()
                .for_each(|node| *node = Node::Ready);
            let scanned = HcaDevices::scanned(hca, &seen);
            for rule in [NodeRule::verbs(), NodeRule::everything()] {
                let nodes = read.nodes(&rule);
                assert!(!nodes.0.is_empty() && nodes.1.is_none(), "{nodes:?}");
                assert_eq!(nodes, scanned.nodes(&rule), "{}", hca.id);
            }
        }
    }

    #[test]
    fn nodes_of_an_hca_that_was_moved_are_those_of_now() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        tree.rdma_core(false);
        machine::a4(&tree);
        let seen = scan(&tree);
        let mut hcas = seen.inventory.hcas.iter();
        let hca = hcas.find(|hca| hca.rdma_names() == ["mlx5_3"]).unwrap();
        let function = tree.path(format!("/sys/bus/pci/devices/{}", hca.id));
        let verbs = function.join("infiniband_verbs");
        // The kernel makes them anew in the pod's namespace, with the lowest free number.
        std::fs::rename(verbs.join("uverbs3"), verbs.join("uverbs11")).unwrap();
        std::fs::write(verbs.join("uverbs11/dev"), "231:203").unwrap();
        tree.hide_rdma("mlx5_3");
        let read = HcaDevices::read(&tree.host(), hca).unwrap();
        assert_eq!(read.rdma_devices().collect::<Vec<_>>(), ["mlx5_3"]);
        // udev has not made it yet.
        let (nodes, lacking) = read.nodes(&NodeRule::verbs());
        assert!(nodes.is_empty());
        assert!(lacking.unwrap().contains("uverbs11 does not exist"));
        let scanned = HcaDevices::scanned(hca, &seen);
        let (nodes, _) = scanned.nodes(&NodeRule::verbs());
        assert!(
            nodes
                .iter()
                .any(|node| node.path == "/dev/infiniband/uverbs3")
        );
        // Unplugged.
        std::fs::remove_dir_all(&verbs).unwrap();
        let gone = HcaDevices::read(&tree.host(), hca).unwrap();
        let lacking = gone.nodes(&NodeRule::verbs()).1.unwrap();
        assert!(lacking.contains("no uverbs device"), "{lacking}");
    }
}
