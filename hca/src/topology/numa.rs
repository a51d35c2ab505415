//! The NUMA layout: which nodes there are, and which of them share a CPU package.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::host::{self, Host, Result};

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: u32,
    /// Its CPUs as the kernel's list (`0-55,112-167`); empty for a node of memory only.
    pub cpus: String,
    /// Physical package of its first CPU; `None` without CPUs or in virtual machines that do
    /// not say.
    pub package: Option<u32>,
    /// Firmware's distance to each node, in order of node; 10 is the node itself (ACPI SLIT).
    pub distances: Vec<u32>,
}

/// All NUMA nodes, in order of number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Numa {
    /// The nodes; empty on a kernel without NUMA.
    pub nodes: Vec<NumaNode>,
}

impl Numa {
    /// The node with this number.
    #[must_use]
    pub fn node(&self, id: u32) -> Option<&NumaNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// True if two different nodes are parts of one CPU package.
    ///
    /// Decided by the package of their CPUs; for a node without CPUs by the firmware's
    /// distances, if those have more than one level between nodes and this one is the least.
    #[must_use]
    pub fn same_package(&self, a: u32, b: u32) -> bool {
        let (Some(x), Some(y)) = (self.node(a), self.node(b)) else {
            return false;
        };
        if let (Some(p), Some(q)) = (x.package, y.package) {
            return p == q;
        }
        let from = |m: u32| self.nodes.iter().map(move |node| (m, node.id));
        let pairs = self.nodes.iter().flat_map(|node| from(node.id));
        let apart = pairs.filter(|(m, n)| m != n);
        let levels: BTreeSet<u32> = apart.filter_map(|(m, n)| self.distance(m, n)).collect();
        let between = self.distance(a, b);
        between.is_some() && levels.len() > 1 && between.as_ref() == levels.first()
    }

    /// The firmware's distance between two nodes.
    #[must_use]
    pub fn distance(&self, from: u32, to: u32) -> Option<u32> {
        let column = self.nodes.iter().position(|node| node.id == to)?;
        self.node(from)?.distances.get(column).copied()
    }

    /// How many nodes have CPUs; all of them where none says which it has. The others are memory
    /// alone: of a GPU on a coherent link, of a CXL device, or high-bandwidth memory.
    #[must_use]
    pub fn nodes_with_cpus(&self) -> usize {
        let some = self.nodes.iter().filter(|node| !node.cpus.is_empty());
        match some.count() {
            0 => self.nodes.len(),
            count => count,
        }
    }

    /// The node whose CPUs are nearest to a node: itself if it has any, or if the firmware's
    /// distances do not single one out.
    #[must_use]
    pub fn nearest_cpus(&self, id: u32) -> u32 {
        if self.node(id).is_none_or(|node| !node.cpus.is_empty()) {
            return id;
        }
        let with_cpus = self.nodes.iter().filter(|node| !node.cpus.is_empty());
        let mut by_distance: Vec<(u32, u32)> = with_cpus
            .filter_map(|node| Some((self.distance(id, node.id)?, node.id)))
            .collect();
        by_distance.sort_unstable();
        match by_distance.as_slice() {
            [(_, only)] => *only,
            [(least, nearest), (next, _), ..] if least < next => *nearest,
            _ => id,
        }
    }

    /// Reads the layout.
    ///
    /// # Errors
    /// [`host::Error::Read`] if sysfs cannot be read.
    pub fn read(host: &Host) -> Result<Self> {
        let directory = host.sys.join("devices/system/node");
        let mut nodes = Vec::new();
        for name in host::names(&directory)? {
            let Some(id) = name.strip_prefix("node").and_then(|id| id.parse().ok()) else {
                continue;
            };
            let node = directory.join(&name);
            let cpus = host::attribute(&node, "cpulist")?.unwrap_or_default();
            let cpu = first_cpu(&cpus).map(|cpu| format!("devices/system/cpu/cpu{cpu}/topology"));
            // -1 where the architecture does not say: it does not parse as u32.
            let package = cpu.map(|cpu| host::parsed(&host.sys.join(cpu), "physical_package_id"));
            let distances = host::attribute(&node, "distance")?.unwrap_or_default();
            let distances = distances
                .split_whitespace()
                .filter_map(|d| d.parse().ok())
                .collect();
            nodes.push(NumaNode {
                id,
                cpus,
                package: package.transpose()?.flatten(),
                distances,
            });
        }
        Ok(Self { nodes })
    }
}

/// The first number of a kernel CPU list.
fn first_cpu(list: &str) -> Option<u32> {
    list.split([',', '-']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Numa {
        /// Nodes with their CPUs and distances, for tests.
        pub(crate) fn with_memory_nodes(cpus: &[&str], rows: &[&[u32]]) -> Self {
            let node = |(id, (cpus, row)): (usize, (&&str, &&[u32]))| NumaNode {
                id: id.try_into().unwrap_or(u32::MAX),
                cpus: (*cpus).to_owned(),
                package: (!cpus.is_empty()).then(|| id.try_into().unwrap_or(u32::MAX)),
                distances: row.to_vec(),
            };
            Self {
                nodes: cpus.iter().zip(rows).enumerate().map(node).collect(),
            }
        }

        /// Nodes with their packages, for tests.
        pub(crate) fn for_test(nodes: &[(u32, u32)]) -> Self {
            let node = |&(id, package)| NumaNode {
                id,
                cpus: String::new(),
                package: Some(package),
                distances: Vec::new(),
            };
            Self {
                nodes: nodes.iter().map(node).collect(),
            }
        }
    }

    fn memory_only(rows: &[&[u32]]) -> Numa {
        let node = |(id, row): (usize, &&[u32])| NumaNode {
            id: id.try_into().unwrap(),
            cpus: String::new(),
            package: None,
            distances: row.to_vec(),
        };
        Numa {
            nodes: rows.iter().enumerate().map(node).collect(),
        }
    }

    #[test]
    fn packages_decide_where_they_are_known() {
        let numa = Numa::for_test(&[(0, 0), (1, 0), (2, 1)]);
        assert!(numa.same_package(0, 1));
        assert!(!numa.same_package(1, 2));
        assert!(!numa.same_package(0, 9));
    }

    #[test]
    fn distances_decide_for_nodes_without_cpus() {
        let quadrants = memory_only(&[
            &[10, 12, 32, 32],
            &[12, 10, 32, 32],
            &[32, 32, 10, 12],
            &[32, 32, 12, 10],
        ]);
        assert!(quadrants.same_package(0, 1));
        assert!(!quadrants.same_package(1, 2));
        // Two sockets have one level between them: it says nothing about packages.
        let sockets = memory_only(&[&[10, 21], &[21, 10]]);
        assert!(!sockets.same_package(0, 1));
    }

    #[test]
    fn a_node_of_memory_has_the_cpus_that_are_nearest() {
        let rows: [&[u32]; 4] = [
            &[10, 40, 80, 120],
            &[40, 10, 120, 80],
            &[80, 120, 10, 160],
            &[120, 80, 160, 10],
        ];
        let grace = Numa::with_memory_nodes(&["0-71", "72-143", "", ""], &rows);
        assert_eq!([0, 1, 2, 3].map(|id| grace.nearest_cpus(id)), [0, 1, 0, 1]);
        assert_eq!(grace.nodes_with_cpus(), 2);
        assert_eq!(grace.nearest_cpus(9), 9, "not a node of this machine");
        let between: [&[u32]; 3] = [&[10, 20, 30], &[20, 10, 30], &[30, 30, 10]];
        let shared = Numa::with_memory_nodes(&["0-7", "8-15", ""], &between);
        assert_eq!(shared.nearest_cpus(2), 2, "as near to one as to the other");
        assert_eq!(memory_only(&rows).nodes_with_cpus(), 4);
    }

    #[test]
    fn the_first_cpu_of_a_list() {
        assert_eq!(first_cpu("0-55,112-167"), Some(0));
        assert_eq!(first_cpu("7"), Some(7));
        assert_eq!(first_cpu(""), None);
    }
}
