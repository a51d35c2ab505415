//! How far two PCI functions are from each other, in the words of `nvidia-smi topo -m`.
//!
//! The class says which parts of the machine a peer-to-peer transfer crosses. It follows from
//! the two functions' places in the PCI tree and from the NUMA layout alone; nothing is measured.

use std::fmt;

use serde::{Serialize, Serializer};

use super::numa::Numa;
use crate::pci::{PciAddress, PciFunction};

/// What lies between two PCI functions, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// The function itself.
    X,
    /// At most one PCIe switch, or two functions of one card.
    Pix,
    /// Several PCIe switches, but no host bridge.
    Pxb,
    /// A host bridge: the CPU forwards between two of its root ports.
    Phb,
    /// The link between host bridges of one NUMA node.
    Node,
    /// The link between NUMA nodes of one CPU package (sub-NUMA clustering, NPS). `nvidia-smi`
    /// has no word for it and says `SYS`, and so does [`Class::label`].
    Sock,
    /// The link between CPU packages.
    Sys,
}

impl Class {
    /// All classes, nearest first.
    pub const ALL: [Self; 7] = [
        Self::X,
        Self::Pix,
        Self::Pxb,
        Self::Phb,
        Self::Node,
        Self::Sock,
        Self::Sys,
    ];

    /// The distance as a number from 0 (`X`) to 6 (`SYS`), to be summed over pairs.
    #[must_use]
    pub fn rank(self) -> u8 {
        self as u8
    }

    /// The word of `nvidia-smi topo -m`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::X => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sock | Self::Sys => "SYS",
        }
    }

    /// The exact name: like the label, but with `SOCK` apart from `SYS`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sock => "SOCK",
            other => other.label(),
        }
    }

    /// True if traffic stays below the host bridge. Up to here NCCL lets the NIC read GPU memory
    /// by default (`NCCL_NET_GDR_LEVEL`); beyond, it copies through host memory.
    #[must_use]
    pub fn is_peer_to_peer(self) -> bool {
        self <= Self::Pxb
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl Serialize for Class {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A class and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Distance {
    /// The class.
    pub class: Class,
    /// True if the firmware does not say which NUMA node a function belongs to, so that the
    /// class is the cautious guess.
    pub assumed: bool,
}

impl Distance {
    /// A class that is certain.
    #[must_use]
    pub fn sure(class: Class) -> Self {
        Self {
            class,
            assumed: false,
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.assumed { "?" } else { "" };
        f.pad(&format!("{}{mark}", self.class.label()))
    }
}

/// Where a function sits: all that its distance to others depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PciLocation {
    /// The function.
    pub address: PciAddress,
    /// The root complex it hangs below, such as `pci0000:20`; `None` if sysfs does not show it.
    pub root: Option<String>,
    /// Bridges from the root port down, then the function itself as last element.
    pub chain: Vec<PciAddress>,
    /// NUMA node; `None` where the firmware does not say.
    pub numa: Option<u32>,
    /// Where its DMA to and from GPUs comes from, if that is another function (Data Direct of a
    /// `ConnectX-8` on a Grace CPU).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_direct: Option<Box<Self>>,
}

impl PciLocation {
    /// The place of a function that sysfs described.
    #[must_use]
    pub fn of(function: &PciFunction) -> Self {
        Self {
            address: function.address,
            root: function.root.clone(),
            chain: function.chain.clone(),
            numa: function.numa_node,
            data_direct: None,
        }
    }

    /// Name of what the function shares with its `PIX` neighbours: the upstream port of its
    /// switch, the root port above a lone card, or the root complex of a function without any
    /// bridge above it (a flat virtual machine).
    #[must_use]
    pub fn switch(&self) -> String {
        match self.chain.as_slice() {
            [.., switch, _, _] | [switch, _] => switch.to_string(),
            _ => self
                .root
                .clone()
                .unwrap_or_else(|| self.address.to_string()),
        }
    }
}

/// Classifies the path between two functions; the shorter one where there is a second by Data
/// Direct.
#[must_use]
pub fn distance(a: &PciLocation, b: &PciLocation, numa: &Numa) -> Distance {
    let second = |from: &PciLocation, to: &PciLocation| {
        let function = from.data_direct.as_deref()?;
        Some(between(function, to, numa))
    };
    let others = [second(a, b), second(b, a)].into_iter().flatten();
    others.fold(between(a, b, numa), Ord::min)
}

fn between(a: &PciLocation, b: &PciLocation, numa: &Numa) -> Distance {
    if a.address == b.address {
        return Distance::sure(Class::X);
    }
    if a.address.card() == b.address.card() {
        return Distance::sure(Class::Pix);
    }
    if a.root.is_some() && a.root == b.root {
        return Distance::sure(below_one_root(&a.chain, &b.chain));
    }
    // Memory of a GPU that is a NUMA node of its own is as near as the CPU it hangs on.
    let cpus = |place: &PciLocation| place.numa.map(|node| numa.nearest_cpus(node));
    match (cpus(a), cpus(b)) {
        (Some(x), Some(y)) if x == y => Distance::sure(Class::Node),
        (Some(x), Some(y)) if numa.same_package(x, y) => Distance::sure(Class::Sock),
        (Some(_), Some(_)) => Distance::sure(Class::Sys),
        // One node for all: a device without one is on it.
        _ if numa.nodes_with_cpus() <= 1 => Distance::sure(Class::Node),
        _ => Distance {
            class: Class::Sys,
            assumed: true,
        },
    }
}

fn below_one_root(a: &[PciAddress], b: &[PciAddress]) -> Class {
    let common = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    // Below a switch's upstream port come its downstream port and the device: two members.
    // One member means a device right below a shared bridge. More means another switch.
    match a.len().max(b.len()) - common {
        _ if common == 0 => Class::Phb,
        0..=2 => Class::Pix,
        _ => Class::Pxb,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function below these bridges, given by their bus numbers.
    fn place(root: &str, chain: &[&str], numa: i32) -> PciLocation {
        let chain: Vec<PciAddress> = chain.iter().map(|a| a.parse().unwrap()).collect();
        PciLocation {
            address: *chain.last().unwrap(),
            root: Some(root.to_owned()),
            chain,
            numa: u32::try_from(numa).ok(),
            data_direct: None,
        }
    }

    fn class(a: &PciLocation, b: &PciLocation, numa: &Numa) -> Class {
        let forth = distance(a, b, numa);
        assert_eq!(forth, distance(b, a, numa), "a distance has no direction");
        assert!(!forth.assumed);
        forth.class
    }

    #[test]
    fn functions_of_one_card_are_pix_whatever_is_above_them() {
        let a = place("pci0000:00", &["0000:00:01.0", "0000:3b:00.0"], 0);
        let b = place("pci0000:00", &["0000:00:01.0", "0000:3b:00.1"], 0);
        assert_eq!(class(&a, &b, &Numa::default()), Class::Pix);
        assert_eq!(class(&a, &a, &Numa::default()), Class::X);
        let flat = place("pci0000:00", &["0000:00:05.0"], 0);
        let function = place("pci0000:00", &["0000:00:05.1"], 0);
        assert_eq!(class(&flat, &function, &Numa::default()), Class::Pix);
    }

    #[test]
    fn one_switch_is_pix_two_are_pxb() {
        let (port, up) = ("0000:20:00.0", "0000:21:00.0");
        let gpu = place("pci0000:20", &[port, up, "0000:22:00.0", "0000:23:00.0"], 0);
        let nic = place("pci0000:20", &[port, up, "0000:22:01.0", "0000:24:00.0"], 0);
        assert_eq!(class(&gpu, &nic, &Numa::default()), Class::Pix);
        let behind = [
            "0000:22:02.0",
            "0000:25:00.0",
            "0000:26:00.0",
            "0000:27:00.0",
        ];
        let far = place("pci0000:20", &[[port, up].as_slice(), &behind].concat(), 0);
        assert_eq!(class(&gpu, &far, &Numa::default()), Class::Pxb);
    }

    #[test]
    fn a_vf_on_another_device_number_is_pix_with_its_pf() {
        let pf = place("pci0000:3a", &["0000:3a:00.0", "0000:3b:00.0"], 0);
        let vf = place("pci0000:3a", &["0000:3a:00.0", "0000:3b:01.2"], 0);
        assert_eq!(class(&pf, &vf, &Numa::default()), Class::Pix);
    }

    #[test]
    fn root_ports_of_one_complex_are_phb() {
        let a = place("pci0000:00", &["0000:00:01.0", "0000:01:00.0"], 0);
        let b = place("pci0000:00", &["0000:00:02.0", "0000:02:00.0"], 0);
        assert_eq!(class(&a, &b, &Numa::default()), Class::Phb);
        // A flat virtual machine has no ports at all.
        let c = place("pci0000:10", &["0000:10:1c.0"], 0);
        let d = place("pci0000:10", &["0000:10:1b.0"], 0);
        assert_eq!(class(&c, &d, &Numa::default()), Class::Phb);
    }

    #[test]
    fn different_roots_are_distinguished_by_numa_and_package() {
        let at = |root: &str, bus: &str, numa| place(root, &[bus], numa);
        let near = at("pci0001:00", "0001:00:00.0", 0);
        let same = at("pci0002:00", "0002:00:00.0", 0);
        let other = at("pci0003:00", "0003:00:00.0", 1);
        let quadrants = Numa::for_test(&[(0, 0), (1, 0), (2, 1), (3, 1)]);
        let sockets = Numa::for_test(&[(0, 0), (1, 1)]);
        assert_eq!(class(&near, &same, &sockets), Class::Node);
        assert_eq!(class(&near, &other, &sockets), Class::Sys);
        assert_eq!(class(&near, &other, &quadrants), Class::Sock);
    }

    #[test]
    fn an_unknown_numa_node_is_only_a_guess_where_there_are_several() {
        let a = place("pci0001:00", &["0001:00:00.0"], -1);
        let b = place("pci0002:00", &["0002:00:00.0"], 0);
        let one = Numa::for_test(&[(0, 0)]);
        assert_eq!(distance(&a, &b, &one), Distance::sure(Class::Node));
        let two = Numa::for_test(&[(0, 0), (1, 1)]);
        let guess = distance(&a, &b, &two);
        assert_eq!(
            guess,
            Distance {
                class: Class::Sys,
                assumed: true
            }
        );
        assert_eq!(guess.to_string(), "SYS?");
    }

    #[test]
    fn functions_without_a_known_root_do_not_count_as_neighbours() {
        let mut a = place("pci0000:00", &["0000:01:00.0"], 0);
        let mut b = place("pci0000:00", &["0000:02:00.0"], 0);
        (a.root, b.root) = (None, None);
        assert_eq!(
            class(&a, &b, &Numa::for_test(&[(0, 0), (1, 1)])),
            Class::Node
        );
    }

    #[test]
    fn memory_of_a_gpu_is_where_its_cpu_is() {
        // Two Grace CPUs, each with two GPUs whose memory is a node without CPUs.
        let rows: [&[u32]; 6] = [
            &[10, 40, 80, 80, 120, 120],
            &[40, 10, 120, 120, 80, 80],
            &[80, 120, 10, 120, 160, 160],
            &[80, 120, 120, 10, 160, 160],
            &[120, 80, 160, 160, 10, 120],
            &[120, 80, 160, 160, 120, 10],
        ];
        let numa = Numa::with_memory_nodes(&["0-71", "72-143", "", "", "", ""], &rows);
        let nic = place("pci0000:00", &["0000:03:00.0"], 0);
        let near = place("pci0009:00", &["0009:06:00.0"], 3);
        let far = place("pci0018:00", &["0018:06:00.0"], 4);
        assert_eq!(class(&nic, &near, &numa), Class::Node);
        assert_eq!(class(&nic, &far, &numa), Class::Sys);
        // One CPU: a function of an unknown node is on it, however many memories there are.
        let one = Numa::with_memory_nodes(&["0-71", ""], &[&[10, 80], &[80, 10]]);
        let unknown = place("pci0002:00", &["0002:03:00.0"], -1);
        assert_eq!(class(&nic, &unknown, &one), Class::Node);
    }

    #[test]
    fn a_nic_is_as_near_as_the_function_that_does_its_dma() {
        let gpu = place(
            "pci0009:00",
            &[
                "0009:00:00.0",
                "0009:01:00.0",
                "0009:02:01.0",
                "0009:06:00.0",
            ],
            0,
        );
        let dma = place(
            "pci0009:00",
            &[
                "0009:00:00.0",
                "0009:01:00.0",
                "0009:02:00.0",
                "0009:03:00.0",
            ],
            0,
        );
        let mut nic = place("pci0000:00", &["0000:00:00.0", "0000:03:00.0"], 0);
        assert_eq!(class(&gpu, &nic, &Numa::default()), Class::Node);
        nic.data_direct = Some(Box::new(dma));
        assert_eq!(class(&gpu, &nic, &Numa::default()), Class::Pix);
        let other = place("pci0002:00", &["0002:00:00.0", "0002:03:00.0"], 0);
        assert_eq!(class(&other, &nic, &Numa::default()), Class::Node);
    }

    #[test]
    fn the_switch_is_what_pix_neighbours_share() {
        let chain = [
            "0000:20:00.0",
            "0000:21:00.0",
            "0000:22:00.0",
            "0000:23:00.0",
        ];
        assert_eq!(place("pci0000:20", &chain, 0).switch(), "0000:21:00.0");
        assert_eq!(place("pci0000:20", &chain[..2], 0).switch(), "0000:20:00.0");
        assert_eq!(place("pci0000:20", &chain[..1], 0).switch(), "pci0000:20");
    }
}
