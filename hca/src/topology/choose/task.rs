//! What a set of NICs costs, and the set that costs least.

use std::collections::{BTreeMap, BTreeSet};

use super::{Pair, Request};
use crate::pci::PciAddress;
use crate::topology::assign::{self, Edge};
use crate::topology::distance::{Class, Distance};
use crate::topology::machine::Machine;
use crate::topology::nic::Nic;

/// The costs of a set, most important first, then the positions of its NICs among the usable ones,
/// ascending: lowest rails first.
type Cost = ([u32; 5], Vec<usize>);

/// A request with everything that its evaluation needs, read once.
pub(super) struct Task<'a> {
    machine: &'a Machine,
    request: &'a Request,
    /// NICs that may be given, by rail.
    usable: Vec<usize>,
    /// The request's GPUs (rows) to the machine's NICs (columns).
    distances: Vec<Vec<Distance>>,
    /// What becomes less useful when a part of it is used: NICs of it, and what that costs.
    wholes: Vec<Whole>,
}

/// A NUMA node, switch or card, all of whose NICs are free.
struct Whole {
    nics: BTreeSet<usize>,
    damage: u32,
}

impl<'a> Task<'a> {
    pub(super) fn new(machine: &'a Machine, request: &'a Request, mut usable: Vec<usize>) -> Self {
        // VFs of one physical function are alike: no more of them are tried than asked for.
        let mut alike: BTreeMap<_, usize> = BTreeMap::new();
        usable.retain(|nic| {
            let kind = machine.nics.get(*nic);
            let kind = kind.map(|nic| (nic.physical(), nic.is_slice(), nic.rail_order()));
            let number = alike.entry(kind).or_default();
            *number += 1;
            *number <= request.count || request.include.contains(nic)
        });
        let gpus = request.gpus.iter().filter_map(|gpu| machine.gpus.get(*gpu));
        let distances = gpus
            .map(|gpu| {
                let to = |nic: &Nic| machine.distance(&gpu.place, &nic.place);
                machine.nics.iter().map(to).collect()
            })
            .collect();
        Self {
            machine,
            request,
            usable,
            distances,
            wholes: wholes(machine, request),
        }
    }

    /// The cheapest of the sets that are grown from a NIC of each switch.
    pub(super) fn best(&self) -> Vec<usize> {
        let Request { count, include, .. } = self.request;
        let included: Vec<usize> = include.iter().copied().collect();
        if included.len() >= *count {
            return included;
        }
        let mut starts = BTreeMap::new();
        for nic in self.usable.iter().filter(|nic| !include.contains(nic)) {
            if let Some(known) = self.machine.nics.get(*nic) {
                let switch = (known.place.numa, known.place.switch());
                starts.entry(switch).or_insert(*nic);
            }
        }
        let grown = starts
            .into_values()
            .map(|start| self.grown([included.as_slice(), &[start]].concat()));
        grown.min_by_key(|set| self.cost(set)).unwrap_or_default()
    }

    /// A good set that begins with these NICs: grow the cheapest, then exchange.
    fn grown(&self, mut set: Vec<usize>) -> Vec<usize> {
        while set.len() < self.request.count {
            let next = self
                .usable
                .iter()
                .filter(|nic| !set.contains(nic))
                .min_by_key(|nic| self.cost(&[set.as_slice(), &[**nic]].concat()));
            match next {
                Some(nic) => set.push(*nic),
                None => break,
            }
        }
        let mut cost = self.cost(&set);
        while let Some((less, better)) = self.exchange(&set, &cost) {
            (cost, set) = (less, better);
        }
        set
    }

    /// The best set that differs in one NIC, if it is cheaper.
    fn exchange(&self, set: &[usize], cost: &Cost) -> Option<(Cost, Vec<usize>)> {
        let mut best: Option<(Cost, Vec<usize>)> = None;
        for (position, out) in set.iter().enumerate() {
            if self.request.include.contains(out) {
                continue;
            }
            for candidate in self.usable.iter().filter(|nic| !set.contains(nic)) {
                let mut other = set.to_vec();
                if let Some(nic) = other.get_mut(position) {
                    *nic = *candidate;
                }
                let price = self.cost(&other);
                if price < *best.as_ref().map_or(cost, |(least, _)| least) {
                    best = Some((price, other));
                }
            }
        }
        best
    }

    fn cost(&self, set: &[usize]) -> Cost {
        let mut order: Vec<usize> = set
            .iter()
            .filter_map(|nic| self.usable.iter().position(|u| u == nic))
            .collect();
        order.sort_unstable();
        let damage = self.damage(set);
        if self.distances.is_empty() {
            let nodes = self.distinct(set, |nic| nic.place.numa);
            let switches = self.distinct(set, |nic| nic.place.switch());
            return ([nodes, switches, damage, 0, 0], order);
        }
        let pairs = self.pairs(set);
        let classes = pairs
            .iter()
            .map(|pair| u32::from(pair.distance.class.rank()));
        let surplus = set
            .iter()
            .filter(|nic| pairs.iter().all(|pair| pair.nic != **nic));
        let surplus = surplus.map(|nic| u32::from(self.nearest_gpu(*nic).rank()));
        let mismatch = pairs.iter().map(|pair| self.mismatch(pair.gpu, pair.nic));
        let worst = classes.clone().max().unwrap_or_default();
        let numbers = [worst, classes.sum(), surplus.sum(), damage, mismatch.sum()];
        (numbers, order)
    }

    /// Serves each GPU from this set.
    pub(super) fn pairs(&self, set: &[usize]) -> Vec<Pair> {
        let gpus = self.distances.len();
        if gpus == 0 || set.is_empty() {
            return Vec::new();
        }
        // With fewer NICs than GPUs each NIC has as many places as its share.
        let share = gpus.div_ceil(set.len());
        let places: Vec<usize> = set
            .iter()
            .flat_map(|nic| std::iter::repeat_n(*nic, share))
            .collect();
        let edge = |gpu: usize, row: &[Distance], nic: usize| Edge {
            class: row.get(nic).map_or(Class::Sys, |distance| distance.class),
            nearest: self.nearest_gpu(nic),
            mismatch: self.mismatch(gpu, nic),
        };
        let gpus = || self.request.gpus.iter().zip(&self.distances);
        let rows: Vec<Vec<Edge>> = gpus()
            .map(|(gpu, row)| places.iter().map(|nic| edge(*gpu, row, *nic)).collect())
            .collect();
        let assigned = assign::assign(&rows);
        gpus()
            .zip(assigned)
            .filter_map(|((gpu, row), place)| {
                let nic = *places.get(place)?;
                let distance = *row.get(nic)?;
                let nearest = row.iter().map(|distance| distance.class).min()?;
                let gpu_itself = self.machine.gpus.get(*gpu)?;
                let direct = gpu_itself.is_direct_at(distance.class);
                // C2C does not count: where another NIC is nearer, that one has the full rate.
                let aligned = distance.class.is_peer_to_peer() || distance.class <= nearest;
                Some(Pair {
                    gpu: *gpu,
                    nic,
                    distance,
                    direct,
                    aligned,
                })
            })
            .collect()
    }

    fn nearest_gpu(&self, nic: usize) -> Class {
        self.distances
            .iter()
            .filter_map(|row| row.get(nic))
            .map(|distance| distance.class)
            .min()
            .unwrap_or(Class::Sys)
    }

    fn mismatch(&self, gpu: usize, nic: usize) -> u32 {
        let ordinal = self.machine.gpus.get(gpu).map_or(0, |gpu| gpu.ordinal);
        self.machine
            .nics
            .get(nic)
            .map_or(0, |nic| nic.rail_order().abs_diff(ordinal).min(1_000))
    }

    fn damage(&self, set: &[usize]) -> u32 {
        let broken = self.wholes.iter().filter(|whole| {
            let used = set.iter().filter(|nic| whole.nics.contains(nic)).count();
            used > 0 && used < whole.nics.len()
        });
        broken.map(|whole| whole.damage).sum()
    }

    fn distinct<K: Ord>(&self, set: &[usize], key: impl Fn(&Nic) -> K) -> u32 {
        let nics = set.iter().filter_map(|nic| self.machine.nics.get(*nic));
        u32::try_from(nics.map(key).collect::<BTreeSet<K>>().len()).unwrap_or(u32::MAX)
    }
}

/// NUMA nodes, switches and cards with several NICs of the pool, none of them allocated.
fn wholes(machine: &Machine, request: &Request) -> Vec<Whole> {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Key {
        Numa(Option<u32>),
        Switch(String),
        Card(PciAddress),
    }
    let mut parts: BTreeMap<Key, BTreeSet<usize>> = BTreeMap::new();
    for (index, nic) in machine.nics.iter().enumerate() {
        if request.barred.contains(&index) {
            continue;
        }
        let mut add = |key| parts.entry(key).or_default().insert(index);
        add(Key::Numa(nic.place.numa));
        add(Key::Switch(nic.place.switch()));
        if !nic.is_slice() {
            add(Key::Card(nic.place.address.card()));
        }
    }
    parts
        .into_iter()
        .filter(|(_, nics)| nics.len() > 1 && nics.is_disjoint(&request.taken))
        .map(|(key, nics)| Whole {
            nics,
            damage: if matches!(key, Key::Numa(_)) { 10 } else { 1 },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::choose::{choose, usable};
    use hca_trees::{PciSpec, Tree, cloud, machine};

    fn scan(lay: impl Fn(&Tree)) -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let host = crate::Host::at(directory.path());
        let inventory = crate::inventory(&host).unwrap();
        Machine::read(
            &host,
            &inventory,
            crate::topology::gpu::read(&host).unwrap(),
        )
        .unwrap()
    }

    fn task<'a>(machine: &'a Machine, request: &'a Request) -> Task<'a> {
        Task::new(machine, request, usable(machine, request).unwrap())
    }

    /// Calls `visit` with each set of `count` of these NICs.
    fn each_set(
        nics: &[usize],
        count: usize,
        set: &mut Vec<usize>,
        visit: &mut dyn FnMut(&[usize]),
    ) {
        if set.len() == count {
            return visit(set);
        }
        for (position, nic) in nics.iter().enumerate() {
            set.push(*nic);
            each_set(&nics[position + 1..], count, set, visit);
            set.pop();
        }
    }

    /// The least cost of all sets, by trying each.
    fn least(task: &Task<'_>) -> Cost {
        let Request { count, include, .. } = task.request;
        let mut least: Option<Cost> = None;
        each_set(&task.usable, *count, &mut Vec::new(), &mut |set| {
            if include.iter().all(|nic| set.contains(nic)) {
                let cost = task.cost(set);
                least = least.take().into_iter().chain([cost]).min();
            }
        });
        least.unwrap()
    }

    #[test]
    fn on_a_free_node_the_choice_is_as_good_as_trying_everything() {
        for lay in [
            machine::a4,
            machine::p4d,
            machine::one_gpu_in_four_near_a_nic,
        ] {
            let machine = scan(lay);
            for mask in (0_u32..1 << machine.gpus.len()).step_by(5) {
                let gpus = 0..machine.gpus.len();
                let gpus: BTreeSet<usize> = gpus.filter(|gpu| mask & 1 << gpu != 0).collect();
                for count in 1..=machine.nics.len() {
                    let request = Request {
                        count,
                        gpus: gpus.clone(),
                        ..Request::default()
                    };
                    let task = task(&machine, &request);
                    assert!(task.cost(&task.best()) <= least(&task), "{request:?}");
                }
            }
        }
    }

    /// Without GPUs the choice has as few NUMA nodes as the best, and at most one switch more.
    #[test]
    fn beside_other_pods_the_choice_is_as_near_as_the_best() {
        let mut seed = 0x9e37_79b9_u64;
        let mut random = move |below: usize| {
            // xorshift64
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % 1_000_003).unwrap() % below
        };
        for lay in [machine::a4, machine::oci_h100, cloud::hgx_b200] {
            let machine = scan(lay);
            let all = machine.nics.len();
            for round in 0..60 {
                let gpus = (0..machine.gpus.len()).filter(|_| round % 3 > 0 && random(2) == 0);
                let gpus: BTreeSet<usize> = gpus.collect();
                let mut taken: BTreeSet<usize> = (0..all).filter(|_| random(3) == 0).collect();
                while all - taken.len() > 9 {
                    taken.insert(random(all));
                }
                let free: Vec<usize> = (0..all).filter(|nic| !taken.contains(nic)).collect();
                if free.is_empty() {
                    continue;
                }
                let include = (random(4) == 0).then(|| free[random(free.len())]);
                let request = Request {
                    count: 1 + random(free.len()),
                    gpus,
                    include: include.into_iter().collect(),
                    taken,
                    ..Request::default()
                };
                let task = task(&machine, &request);
                let (least, found) = (least(&task), task.cost(&task.best()));
                let (least, found) = (least.0, found.0);
                assert_eq!(found[0], least[0], "{request:?}");
                match request.gpus.is_empty() {
                    true => assert!(found[1] <= least[1] + 1, "{request:?}"),
                    false => assert_eq!(found[1..3], least[1..3], "{request:?}"),
                }
            }
        }
    }

    #[test]
    fn of_virtual_functions_of_one_card_the_first_is_chosen() {
        let machine = scan(|tree| {
            machine::a4(tree);
            for (number, bus) in ["91", "98", "c6", "cd"].into_iter().enumerate() {
                let pf = format!("0000:{bus}:00.0");
                let real = std::fs::canonicalize(tree.path(format!("/sys/bus/pci/devices/{pf}")));
                let above = real.unwrap().parent().unwrap().to_owned();
                let above = above
                    .strip_prefix(tree.path("/sys/devices"))
                    .unwrap()
                    .to_owned();
                for index in 0..32 {
                    let address = format!("0000:{bus}:{:02x}.{}", 1 + index / 8, index % 8);
                    let spec = PciSpec {
                        address: &address,
                        above: above.to_str().unwrap(),
                        numa_node: i32::from(number >= 2),
                        ..PciSpec::MLX5
                    };
                    tree.vf(&pf, index, &spec);
                    let on = hca_trees::On::Pci(&address);
                    let name = format!("mlx5_{}", 10 + u32::try_from(number).unwrap() * 32 + index);
                    tree.rdma(&hca_trees::RdmaSpec {
                        name: &name,
                        on,
                        ..Default::default()
                    });
                }
            }
        });
        assert_eq!(machine.nics.len(), 8 + 4 * 32);
        let physical = (0..machine.nics.len()).filter(|nic| !machine.nics[*nic].is_slice());
        let request = Request {
            count: 4,
            gpus: [0, 2, 4, 6].into(),
            barred: physical.collect(),
            ..Request::default()
        };
        let task = task(&machine, &request);
        assert_eq!(task.usable.len(), 4 * request.count);
        let choice = choose(&machine, &request).unwrap();
        assert!(
            choice
                .pairs
                .iter()
                .all(|pair| pair.distance.class == Class::Pix)
        );
        let buses: Vec<u8> = choice
            .nics
            .iter()
            .map(|nic| machine.nics[*nic].place.address.bus)
            .collect();
        assert_eq!(buses, [0x91, 0x98, 0xc6, 0xcd], "one VF of each card");
        assert!(choice.nics.iter().all(|nic| {
            let address = machine.nics[*nic].place.address;
            (address.device, address.function) == (1, 0)
        }));
    }
}
