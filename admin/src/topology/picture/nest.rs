//! The nesting of boxes: NUMA nodes hold host bridges, those hold switches, those hold devices.
//!
//! Only boxes that show something are kept: a bridge with a single thing below it is no box.

use std::collections::{BTreeMap, BTreeSet};

use hca::PciAddress;
use hca::topology::{Machine, NumaNode, Place};

/// What a box stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// The whole node.
    Machine,
    /// A CPU package with several NUMA nodes.
    Package,
    /// A NUMA node.
    Numa,
    /// A root complex.
    HostBridge,
    /// A PCIe switch, or a bridge shared by several devices.
    Switch,
    /// A card with several functions.
    Card,
}

/// A box or a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    /// A box with what is in it.
    Box {
        /// What it stands for.
        kind: Kind,
        /// What is written on it.
        label: String,
        /// What is in it.
        items: Vec<Item>,
    },
    /// A GPU, by its position.
    Gpu(usize),
    /// A NIC, by its position.
    Nic(usize),
}

/// The boxes of a machine.
#[must_use]
pub(super) fn nest(machine: &Machine, title: &str) -> Item {
    let gpus = machine
        .gpus
        .iter()
        .enumerate()
        .map(|(i, gpu)| (&gpu.place, Item::Gpu(i)));
    let nics = machine
        .nics
        .iter()
        .enumerate()
        .map(|(i, nic)| (&nic.place, Item::Nic(i)));
    let mut by_node: BTreeMap<Option<u32>, Vec<(&Place, Item)>> = BTreeMap::new();
    for node in machine
        .numa
        .nodes
        .iter()
        .filter(|node| !node.cpus.is_empty())
    {
        by_node.entry(Some(node.id)).or_default();
    }
    for (place, item) in gpus.chain(nics) {
        // A node of memory alone is drawn as that of its CPU.
        let node = place.numa.map(|id| machine.numa.nearest_cpus(id));
        by_node.entry(node).or_default().push((place, item));
    }
    let boxes: Vec<(Option<u32>, Item)> = by_node
        .into_iter()
        .map(|(id, devices)| {
            let node = id.and_then(|id| machine.numa.node(id));
            (
                node.and_then(|node| node.package),
                numa_box(id, node, devices),
            )
        })
        .collect();
    Item::Box {
        kind: Kind::Machine,
        label: title.to_owned(),
        items: packages(boxes),
    }
}

/// Puts NUMA nodes of one package in a box, if any package has several.
fn packages(nodes: Vec<(Option<u32>, Item)>) -> Vec<Item> {
    let packages: BTreeSet<Option<u32>> = nodes.iter().map(|(package, _)| *package).collect();
    if packages.len() == nodes.len() || packages.len() < 2 {
        return nodes.into_iter().map(|(_, item)| item).collect();
    }
    let mut boxes: BTreeMap<Option<u32>, Vec<Item>> = BTreeMap::new();
    for (package, item) in nodes {
        boxes.entry(package).or_default().push(item);
    }
    boxes
        .into_iter()
        .map(|(package, items)| {
            let label = package.map_or("CPU package unknown".to_owned(), |id| {
                format!("CPU package {id}")
            });
            Item::Box {
                kind: Kind::Package,
                label,
                items,
            }
        })
        .collect()
}

fn numa_box(id: Option<u32>, node: Option<&NumaNode>, devices: Vec<(&Place, Item)>) -> Item {
    let mut label = match id {
        Some(id) => format!("NUMA node {id}"),
        None => "NUMA node not stated by the firmware".to_owned(),
    };
    if let Some(node) = node.filter(|node| !node.cpus.is_empty()) {
        label.push_str(&format!(" · CPUs {}", node.cpus));
    }
    let mut roots: BTreeMap<Option<&str>, Bridge> = BTreeMap::new();
    for (place, item) in devices {
        let bridges = place
            .chain
            .split_last()
            .map_or([].as_slice(), |(_, bridges)| bridges);
        roots
            .entry(place.root.as_deref())
            .or_default()
            .insert(bridges, place.address, item);
    }
    let items = roots
        .into_iter()
        .flat_map(|(root, bridge)| {
            let label =
                root.map_or_else(|| "root unknown".to_owned(), |r| format!("host bridge {r}"));
            // Devices without a known root have nothing in common.
            if root.is_none() {
                bridge.into_items()
            } else {
                vec![bridge.boxed(Kind::HostBridge, label)]
            }
        })
        .collect();
    Item::Box {
        kind: Kind::Numa,
        label,
        items,
    }
}

/// A bridge while devices are hung below it.
#[derive(Debug, Default)]
struct Bridge {
    bridges: BTreeMap<PciAddress, Bridge>,
    devices: Vec<(PciAddress, Item)>,
}

impl Bridge {
    fn insert(&mut self, path: &[PciAddress], address: PciAddress, item: Item) {
        match path.split_first() {
            Some((first, rest)) => {
                self.bridges
                    .entry(*first)
                    .or_default()
                    .insert(rest, address, item);
            }
            None => self.devices.push((address, item)),
        }
    }

    /// What is below, with single chains of bridges left out.
    fn into_items(self) -> Vec<Item> {
        let one_card = self.devices.len() > 1
            && self.bridges.is_empty()
            && self.devices.windows(2).all(|pair| match pair {
                [(a, _), (b, _)] => hca::topology::distance::same_card(*a, *b),
                _ => true,
            });
        let card = self.devices.first().map(|(address, _)| *address);
        let devices = self.devices.into_iter().map(|(_, item)| item);
        let mut items: Vec<Item> = match card {
            Some(card) if one_card => {
                let label = format!(
                    "card {:04x}:{:02x}:{:02x}",
                    card.domain, card.bus, card.device
                );
                vec![Item::Box {
                    kind: Kind::Card,
                    label,
                    items: devices.collect(),
                }]
            }
            _ => devices.collect(),
        };
        for (address, bridge) in self.bridges {
            items.push(bridge.boxed(Kind::Switch, switch_label(address)));
        }
        items
    }

    /// A box around what is below, or the thing itself if there is but one.
    fn boxed(self, kind: Kind, label: String) -> Item {
        let mut items = self.into_items();
        if items.len() == 1
            && let Some(only) = items.pop()
        {
            return only;
        }
        Item::Box { kind, label, items }
    }
}

fn switch_label(address: PciAddress) -> String {
    // The domain of pairs that an override gives.
    if address.domain == u32::MAX {
        "pair".to_owned()
    } else {
        format!("switch {address}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hca::topology::Wanted;
    use hca_trees::{Tree, machine};

    fn scan(lay: impl Fn(&Tree)) -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        Machine::read(&tree.host(), &inventory, &Wanted::default()).unwrap()
    }

    /// The boxes as text, one word a box.
    fn words(item: &Item) -> String {
        match item {
            Item::Gpu(index) => format!("g{index}"),
            Item::Nic(index) => format!("n{index}"),
            Item::Box { kind, items, .. } => {
                let inside: Vec<String> = items.iter().map(words).collect();
                format!("{kind:?}[{}]", inside.join(" "))
            }
        }
    }

    #[test]
    fn the_smallest_box_around_two_devices_is_their_class() {
        for (lay, expected) in [
            (
                machine::a4 as fn(&Tree),
                "Machine[Numa[Switch[g0 g1 n0 n1] Switch[g2 g3 n2 n3]] \
                 Numa[Switch[g4 g5 n4 n5] Switch[g6 g7 n6 n7]]]",
            ),
            (
                machine::p4d,
                "Machine[Numa[HostBridge[g0 g1 n0] HostBridge[g2 g3 n1]] \
                 Numa[HostBridge[g4 g5 n2] HostBridge[g6 g7 n3]]]",
            ),
            (machine::egx, "Machine[Numa[g0 Card[n0 n1]] Numa[g1 g2 g3]]"),
            (
                machine::cascaded_switches,
                "Machine[Numa[Switch[Switch[g1 n1] g0 n0]] Numa[Switch[Switch[g3 n3] g2 n2]]]",
            ),
        ] {
            let nested = words(&nest(&scan(lay), "node"));
            let sorted = |text: &str| {
                let mut words: Vec<&str> = text.split(['[', ']', ' ']).collect();
                words.sort_unstable();
                words.join(" ")
            };
            assert_eq!(sorted(&nested), sorted(expected), "{nested}");
            if !expected.contains("Switch[Switch") {
                assert_eq!(nested, expected);
            }
        }
    }

    #[test]
    fn nodes_of_one_package_are_in_one_box() {
        let lay = |tree: &Tree| {
            machine::a4(tree);
            for (node, package) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
                let first = node * 8;
                tree.file(
                    format!("/sys/devices/system/node/node{node}/cpulist"),
                    first,
                );
                let topology = format!("/sys/devices/system/cpu/cpu{first}/topology");
                tree.file(format!("{topology}/physical_package_id"), package);
            }
        };
        let nested = words(&nest(&scan(lay), "node"));
        assert!(nested.starts_with("Machine[Package[Numa["), "{nested}");
        assert!(nested.ends_with("Package[Numa[] Numa[]]]"), "{nested}");
    }
}
