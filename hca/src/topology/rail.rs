//! The rail of a NIC: which of the parallel networks of a GPU fabric it belongs to.
//!
//! Rails have to be numbered alike on all nodes, since rank `n` of one node talks to rank `n` of
//! another over rail `n`. The number in the netdev's name counts most, which somebody chose on purpose, then the order of PCI addresses.
//!
//! A NIC for storage or management is on no rail, and takes no number from those that are. Which
//! NICs these are is known by names, where two or more NICs have a rail's name (a NIC whose netdev a
//! pod has shows no name, and counts as before), else by the GPUs: where at least half of the NICs
//! share a switch with one, the others are on no rail.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::pci::PciAddress;
use crate::unit::is_number;

/// A rail number with its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rail {
    /// The number, from 0.
    pub number: u32,
    /// Where it comes from.
    pub source: Source,
    /// The number that a weaker source gives, where it is another one: shown, since the
    /// nodes of a cluster may then disagree.
    pub differs: Option<(Source, u32)>,
}

/// Where a rail number comes from, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// `rails` of the node's policy.
    Policy,
    /// Digits of the netdev's name.
    Name,
    /// Position among the NICs by PCI address.
    Order,
}

impl Source {
    /// The source, for a message.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Policy => "the node's policy",
            Self::Name => "the netdev's name",
            Self::Order => "the order of PCI addresses",
        }
    }
}

/// What is known about one NIC's rail. A VF or sub-function has the rail of its physical function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clues<'a> {
    /// The physical function.
    pub address: PciAddress,
    /// Names of its netdevs.
    pub netdevs: Vec<&'a str>,
    /// It shares a PCIe switch with a GPU.
    pub near_gpu: bool,
}

/// Numbers the rails of NICs, in the order given; `None` for a NIC that is on no rail.
#[must_use]
pub fn number(nics: &[Clues<'_>]) -> Vec<Option<Rail>> {
    // A VF's netdev is named by the kernel: its physical function's name speaks for it.
    let mut functions: BTreeMap<PciAddress, (Vec<&str>, bool)> = BTreeMap::new();
    for nic in nics {
        let (netdevs, near_gpu) = functions.entry(nic.address).or_default();
        netdevs.extend(&nic.netdevs);
        *near_gpu |= nic.near_gpu;
    }
    let named = |netdevs: &[&str]| netdevs.iter().find_map(|name| in_name(name));
    let is_named = |netdevs: &Vec<&str>| named(netdevs).is_some();
    let by_name = functions.values().filter(|one| is_named(&one.0)).count() >= 2;
    let near = functions.values().filter(|one| one.1).count();
    let by_gpu = near > 0 && near * 2 >= functions.len();
    let on_rail = functions
        .iter()
        .filter(|(_, (netdevs, near_gpu))| match by_name {
            true => netdevs.is_empty() || is_named(netdevs),
            false => *near_gpu || !by_gpu,
        });
    let order: BTreeMap<PciAddress, u32> = on_rail.map(|(address, _)| *address).zip(0..).collect();
    let rail = |nic: &Clues<'_>| {
        let by_name = named(&functions.get(&nic.address)?.0).map(|n| (Source::Name, n));
        let by_order = order.get(&nic.address).map(|n| (Source::Order, *n));
        let (source, number) = by_name.or(by_order)?;
        Some(Rail {
            number,
            source,
            differs: by_order.filter(|(_, n)| *n != number),
        })
    };
    nics.iter().map(rail).collect()
}

/// The rail number in a netdev name that follows a known custom: `gpu3rdma0` (clouds),
/// `rdma_r3` and `eth_r3` (NVIDIA's launch kit), `rdma3`, `rail3`. Names of the kernel and of
/// systemd (`ens3f1np1`, `ib3`) are full of digits that mean something else.
#[must_use]
pub fn in_name(name: &str) -> Option<u32> {
    let of_cloud = name
        .strip_prefix("gpu")
        .and_then(|rest| rest.split_once("rdma"));
    if let Some((gpu, index)) = of_cloud
        && is_number(gpu)
        && is_number(index)
    {
        return gpu.parse().ok();
    }
    let digits_at = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (stem, digits) = name.split_at_checked(digits_at)?;
    let known = stem.ends_with("_r") || matches!(stem, "rdma" | "rail" | "rail-" | "rail_");
    if known { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_carry_a_rail() {
        let rails = [
            ("gpu3rdma0", Some(3)),
            ("gpu12rdma1", Some(12)),
            ("rdma_r7", Some(7)),
            ("eth_r0", Some(0)),
            ("rdma3", Some(3)),
            ("rail-4", Some(4)),
            ("rdma", None),
            ("gpurdma0", None),
            ("gpu3rdmax", None),
            ("ens3f1np1", None),
            ("ib3", None),
            ("eth2", None),
            ("rdma99999999999", None),
            ("", None),
            ("é3", None),
        ];
        for (name, rail) in rails {
            assert_eq!(in_name(name), rail, "{name}");
        }
    }

    #[test]
    fn the_name_beats_the_order() {
        let address = |n| PciAddress {
            domain: 0,
            bus: n,
            device: 0,
            function: 0,
        };
        let clue = |bus, netdevs: &[&'static str]| Clues {
            address: address(bus),
            netdevs: netdevs.to_vec(),
            near_gpu: false,
        };
        let rails = number(&[
            clue(0x20, &["gpu1rdma0"]),
            clue(0x10, &["gpu0rdma0"]),
            clue(0x30, &[]),
            clue(0x00, &["ens3f0np0"]),
        ]);
        let plain = |number, source| {
            Some(Rail {
                number,
                source,
                differs: None,
            })
        };
        assert_eq!(rails[0], plain(1, Source::Name));
        assert_eq!(rails[1], plain(0, Source::Name));
        assert_eq!(rails[2], plain(2, Source::Order), "its netdev is in a pod");
        assert_eq!(rails[3], None, "storage: the others have names of rails");
    }

    #[test]
    fn nics_away_from_the_gpus_take_no_number_where_most_are_near_one() {
        let clue = |bus, near_gpu| Clues {
            address: PciAddress {
                domain: 0,
                bus,
                device: 0,
                function: 0,
            },
            netdevs: Vec::new(),
            near_gpu,
        };
        let numbers = |nics: &[Clues<'_>]| -> Vec<Option<u32>> {
            let rails = number(nics).into_iter();
            rails.map(|rail| rail.map(|rail| rail.number)).collect()
        };
        let storage_first = [clue(1, false), clue(2, true), clue(3, true)];
        assert_eq!(numbers(&storage_first), [None, Some(0), Some(1)]);
        let one_of_three = [clue(1, true), clue(2, false), clue(3, false)];
        assert_eq!(numbers(&one_of_three), [Some(0), Some(1), Some(2)]);
        assert_eq!(numbers(&one_of_three[1..]), [Some(0), Some(1)]);
    }

    #[test]
    fn a_name_against_the_order_is_reported() {
        let address = |n| PciAddress {
            domain: 0,
            bus: n,
            device: 0,
            function: 0,
        };
        let rails = number(&[Clues {
            address: address(0x10),
            netdevs: vec!["rdma_r5"],
            near_gpu: false,
        }]);
        let rail = rails[0].as_ref().unwrap();
        assert_eq!(rail.number, 5);
        assert_eq!(rail.differs, Some((Source::Order, 0)));
    }

    #[test]
    fn functions_with_one_physical_function_share_its_rail() {
        let address = |n| PciAddress {
            domain: 0,
            bus: n,
            device: 0,
            function: 0,
        };
        let clue = |bus, netdevs: &[&'static str]| Clues {
            address: address(bus),
            netdevs: netdevs.to_vec(),
            near_gpu: false,
        };
        let rails = number(&[
            clue(0x10, &["ens1f0v3"]),
            clue(0x10, &["rail6"]),
            clue(0x20, &[]),
        ]);
        assert_eq!(
            rails.iter().flatten().map(|r| r.number).collect::<Vec<_>>(),
            [6, 6, 1]
        );
    }
}
