//! GPU–NIC pairs that the PCI tree does not show.
//!
//! A hypervisor that passes each device through on a root of its own (Azure's VMBus, some KVM
//! set-ups) leaves nothing in sysfs but NUMA nodes. Where the administrator knows the machine,
//! pairs can be given: by list, by order within each NUMA node, or by netdev names that carry the
//! GPU's number. A pair is then placed as if below one switch of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use super::distance::Place;
use super::machine::Machine;
use super::nic::Nic;
use super::rail;
use crate::pci::PciAddress;

/// Where GPU–NIC pairs come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pairing {
    /// The first GPU of each NUMA node with its first card, and so on, in order of PCI address;
    /// several to one where their numbers divide.
    ByOrder,
    /// `gpu<N>rdma<M>` belongs to GPU `N`.
    ByName,
    /// GPU ordinals with the physical functions of their NICs.
    Listed(Vec<(u32, PciAddress)>),
}

impl FromStr for Pairing {
    type Err = &'static str;

    /// `order`, `names`, or a list such as `0=0101:00:00.0,1=0102:00:00.0`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let pair = |pair: &str| -> Option<(u32, PciAddress)> {
            let (gpu, nic) = pair.split_once('=')?;
            Some((gpu.parse().ok()?, nic.parse().ok()?))
        };
        Ok(match text {
            "order" => Self::ByOrder,
            "names" => Self::ByName,
            list => Self::Listed(list.split(',').map(pair).collect::<Option<_>>().ok_or(
                "expected \"order\", \"names\" or a list such as 0=0101:00:00.0,1=0102:00:00.0",
            )?),
        })
    }
}

/// Why the machine cannot be paired so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The numbers do not divide.
    #[error(
        "pair by order: {numa} has {gpus} GPUs and {cards} NICs, neither number divides the \
         other; name the pairs instead"
    )]
    Uneven {
        /// The NUMA node in words.
        numa: String,
        /// GPUs on it.
        gpus: usize,
        /// NICs on it, a dual-port card counting once.
        cards: usize,
    },
    /// No netdev has such a name.
    #[error(
        "pair by name: no netdev of a NIC is named gpu<N>rdma<M>; those of NICs here are {names}"
    )]
    NoNames {
        /// The names there are.
        names: String,
    },
    /// There is no such GPU.
    #[error("{nic} is paired with GPU {gpu}, but there are only {gpus} GPUs")]
    NoSuchGpu {
        /// The NIC.
        nic: String,
        /// The GPU's ordinal.
        gpu: u32,
        /// GPUs there are.
        gpus: usize,
    },
    /// There is no such NIC.
    #[error("GPU {gpu} is paired with {nic}, which is not a NIC of this machine")]
    NoSuchNic {
        /// The NIC's address.
        nic: PciAddress,
        /// The GPU's ordinal.
        gpu: u32,
    },
}

impl Machine {
    /// Places GPUs and NICs in pairs, whatever sysfs says.
    ///
    /// # Errors
    /// [`Error`] if the machine does not have what the pairing speaks of; nothing is changed then.
    pub fn pair(&mut self, pairing: &Pairing) -> Result<(), Error> {
        let pairs = match pairing {
            Pairing::ByOrder => by_order(self)?,
            Pairing::ByName => by_name(self)?,
            Pairing::Listed(pairs) => listed(self, pairs)?,
        };
        let mut places = BTreeMap::new();
        for (number, pair) in (0_u32..).zip(pairs) {
            let functions = pair.gpus.iter().chain(&pair.nics);
            places.extend(functions.map(|address| (*address, below_switch(number, *address))));
        }
        self.place(&places);
        Ok(())
    }

    /// Puts functions elsewhere in the tree; their NUMA nodes stay where the new place does not
    /// say. A VF goes with its physical function. Returns the addresses that this machine has
    /// neither as GPU nor as NIC.
    pub fn place(&mut self, places: &BTreeMap<PciAddress, Place>) -> Vec<PciAddress> {
        let mut unknown: BTreeSet<PciAddress> = places.keys().copied().collect();
        for gpu in &mut self.gpus {
            if let Some(place) = places.get(&gpu.place.address) {
                unknown.remove(&gpu.place.address);
                move_to(&mut gpu.place, place);
            }
        }
        for nic in &mut self.nics {
            // A file may know a dual-port card by its first function alone.
            let names = [Some(nic.place.address), Some(nic.physical), nic.card];
            let known = names.iter().flatten().find_map(|name| places.get(name));
            if let Some(place) = known {
                unknown.remove(&place.address);
                move_to(&mut nic.place, place);
            }
        }
        unknown.into_iter().collect()
    }
}

fn move_to(place: &mut Place, new: &Place) {
    // Who gives a place means the GPU that it is next to: nothing else decides then.
    place.data_direct = None;
    place.root.clone_from(&new.root);
    place.chain.clone_from(&new.chain);
    if let Some(last) = place.chain.last_mut() {
        *last = place.address;
    }
    place.numa = new.numa.or(place.numa);
}

/// A place below a switch that does not exist. No hardware has domain `ffffffff`.
fn below_switch(number: u32, address: PciAddress) -> Place {
    let [_, _, bus, low] = number.to_be_bytes();
    let switch = PciAddress {
        domain: u32::MAX,
        bus,
        device: low & 0x1f,
        function: low >> 5,
    };
    Place {
        address,
        root: Some(format!("pair{number}")),
        chain: vec![switch, address],
        numa: None,
        data_direct: None,
    }
}

#[derive(Debug, Default)]
struct Together {
    gpus: Vec<PciAddress>,
    nics: Vec<PciAddress>,
}

fn by_order(machine: &Machine) -> Result<Vec<Together>, Error> {
    let mut pairs = Vec::new();
    let nodes: BTreeSet<Option<u32>> = machine.gpus.iter().map(|gpu| gpu.place.numa).collect();
    for node in nodes {
        let gpus: Vec<PciAddress> = machine
            .gpus
            .iter()
            .filter(|gpu| gpu.place.numa == node)
            .map(|gpu| gpu.place.address)
            .collect();
        let mut cards: BTreeMap<PciAddress, Vec<PciAddress>> = BTreeMap::new();
        for nic in machine.nics.iter().filter(|nic| nic.place.numa == node) {
            if let Some(card) = nic.card {
                cards.entry(card).or_default().push(nic.place.address);
            }
        }
        if cards.is_empty() {
            continue;
        }
        let groups = gpus.len().min(cards.len());
        if !gpus.len().is_multiple_of(groups) || !cards.len().is_multiple_of(groups) {
            let numa = node.map_or("no NUMA node".to_owned(), |n| format!("NUMA node {n}"));
            return Err(Error::Uneven {
                numa,
                gpus: gpus.len(),
                cards: cards.len(),
            });
        }
        let cards: Vec<Vec<PciAddress>> = cards.into_values().collect();
        pairs.extend(
            gpus.chunks(gpus.len() / groups)
                .zip(cards.chunks(cards.len() / groups))
                .map(|(gpus, cards)| Together {
                    gpus: gpus.to_vec(),
                    nics: cards.concat(),
                }),
        );
    }
    Ok(pairs)
}

fn by_name(machine: &Machine) -> Result<Vec<Together>, Error> {
    let named = |nic: &Nic| {
        nic.netdevs
            .iter()
            .find_map(|name| rail::gpu_and_index(name))
    };
    let pairs: Vec<(u32, PciAddress)> = machine
        .nics
        .iter()
        .filter_map(|nic| named(nic).map(|(gpu, _)| (gpu, nic.place.address)))
        .collect();
    if pairs.is_empty() {
        let names: Vec<&str> = machine
            .nics
            .iter()
            .flat_map(|nic| &nic.netdevs)
            .map(String::as_str)
            .collect();
        let names = if names.is_empty() {
            "none".to_owned()
        } else {
            names.join(", ")
        };
        return Err(Error::NoNames { names });
    }
    listed(machine, &pairs)
}

fn listed(machine: &Machine, pairs: &[(u32, PciAddress)]) -> Result<Vec<Together>, Error> {
    let mut together: BTreeMap<u32, Together> = BTreeMap::new();
    for (ordinal, address) in pairs {
        let known = |nic: &&Nic| nic.place.address == *address;
        let nic = machine.nics.iter().find(known);
        let nic = nic.ok_or(Error::NoSuchNic {
            nic: *address,
            gpu: *ordinal,
        })?;
        let gpu = machine.gpus.iter().find(|gpu| gpu.ordinal == *ordinal);
        let gpu = gpu.ok_or_else(|| Error::NoSuchGpu {
            nic: nic.title(),
            gpu: *ordinal,
            gpus: machine.gpus.len(),
        })?;
        let entry = together.entry(*ordinal).or_default();
        entry.gpus = vec![gpu.place.address];
        entry.nics.push(*address);
    }
    Ok(together.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Class, Wanted};
    use crate::tree::{Tree, machine};

    fn scan(lay: impl Fn(&Tree)) -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let inventory = crate::inventory(&tree.host()).unwrap();
        Machine::read(&tree.host(), &inventory, &Wanted::default()).unwrap()
    }

    fn pix(machine: &Machine) -> Vec<(u32, String)> {
        let mut near = Vec::new();
        for gpu in &machine.gpus {
            for nic in &machine.nics {
                if machine.distance(&gpu.place, &nic.place).class == Class::Pix {
                    near.push((gpu.ordinal, nic.title()));
                }
            }
        }
        near
    }

    #[test]
    fn several_gpus_share_a_nic_by_order_where_their_numbers_divide() {
        let mut p4d = scan(machine::p4d);
        p4d.pair(&Pairing::ByOrder).unwrap();
        let expected = [0, 0, 1, 1, 2, 2, 3, 3].into_iter().enumerate();
        let expected: Vec<_> = expected
            .map(|(gpu, efa)| (u32::try_from(gpu).unwrap(), format!("efa_{efa}")))
            .collect();
        assert_eq!(pix(&p4d), expected);
    }

    #[test]
    fn a_dual_port_card_is_paired_as_one() {
        let mut oci = scan(machine::oci_h100);
        oci.pair(&Pairing::ByOrder).unwrap();
        assert_eq!(pix(&oci).len(), 16);
        assert_eq!(pix(&oci)[3], (1, "mlx5_3".to_owned()));
    }

    #[test]
    fn numbers_that_do_not_divide_are_refused() {
        let mut machine = scan(machine::one_gpu_in_four_near_a_nic);
        machine.gpus[0].place.numa = Some(1);
        machine.nics[0].place.numa = Some(1);
        let before = machine.clone();
        assert_eq!(
            machine.pair(&Pairing::ByOrder).unwrap_err().to_string(),
            "pair by order: NUMA node 1 has 3 GPUs and 2 NICs, neither number divides the other; \
             name the pairs instead"
        );
        assert_eq!(machine, before);
    }

    #[test]
    fn names_pair_gpus_with_the_nics_made_for_them() {
        let mut a4 = scan(machine::a4);
        a4.pair(&Pairing::ByName).unwrap();
        let expected: Vec<_> = (0..8).map(|n| (n, format!("mlx5_{n}"))).collect();
        assert_eq!(
            pix(&a4),
            expected,
            "nearer than the tree knows: one NIC for one GPU"
        );

        let error = scan(machine::egx).pair(&Pairing::ByName).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("those of NICs here are ens2f0, ens2f1"),
            "{error}"
        );
    }

    #[test]
    fn a_list_of_pairs_must_be_of_this_machine() {
        let mut nd = scan(machine::nd_h100);
        let nic = |text: &str| text.parse::<PciAddress>().unwrap();
        nd.pair(&Pairing::Listed(vec![(7, nic("0101:00:00.0"))]))
            .unwrap();
        assert_eq!(pix(&nd), [(7, "mlx5_0".to_owned())]);
        let error = nd
            .pair(&Pairing::Listed(vec![(8, nic("0101:00:00.0"))]))
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "mlx5_0 is paired with GPU 8, but there are only 8 GPUs"
        );
        let error = nd
            .pair(&Pairing::Listed(vec![(0, nic("0000:01:00.0"))]))
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "GPU 0 is paired with 0000:01:00.0, which is not a NIC of this machine"
        );
    }

    #[test]
    fn places_of_absent_functions_are_reported() {
        let mut nd = scan(machine::nd_h100);
        let absent: PciAddress = "0000:01:00.0".parse().unwrap();
        let places = BTreeMap::from([(absent, below_switch(1, absent))]);
        assert_eq!(nd.place(&places), [absent]);
    }
}
