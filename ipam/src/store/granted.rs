//! The blocks that one call of a Kubernetes store goes by.
//!
//! Each address space's file is read once, before anything is chosen, and looked at once more
//! after everything is linked (see [`crate::grants`] for why that is enough).
//! How much of a block is in use, the broker reads here.

use super::dir::Dir;
use super::name::{self, LeaseName};
use super::release::now;
use super::take::{Part, Space};
use super::{Finding, Store, StoreError};
use crate::block::AddressSpace;
use crate::grants::{Grant, Grants, Reading};
use crate::lease::Lease;
use crate::range::{Range, bits};
use ipnetwork::IpNetwork;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::rc::Rc;

/// Of a store whose blocks the cluster gives: where they are noted.
#[derive(Debug, Clone)]
pub(super) struct BlockFiles {
    /// Name of the store in the policy.
    pub(super) store: String,
    /// The directory with one file for each address space.
    pub(super) directory: PathBuf,
    /// Networks that are not cut into blocks.
    pub(super) static_networks: Vec<IpNetwork>,
}

impl BlockFiles {
    fn space(&self, space: &Space) -> AddressSpace {
        AddressSpace::new(&self.store, space.network_name.as_deref())
    }

    fn is_static(&self, address: IpAddr) -> bool {
        let mut networks = self.static_networks.iter();
        networks.any(|network| network.contains(address))
    }

    /// The blocks of all address spaces of the store.
    fn all(&self) -> Result<Vec<Grants>, StoreError> {
        let all = crate::grants::read_all(&self.directory, &self.store)?;
        Ok(all.into_iter().map(|(_, grants)| grants).collect())
    }
}

/// What this node's blocks do not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Whom the addresses are unique among.
    pub space: AddressSpace,
    /// The range, as the network has it.
    pub range: Range,
    /// The one address that is wanted, if it is a certain one.
    pub address: Option<IpAddr>,
    /// Whether the address is of a network that is not cut into blocks: it is wanted by itself.
    pub single: bool,
    /// How many addresses are wanted.
    pub count: u32,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.range.subnet();
        match self.address {
            Some(address) => write!(f, "{address} is in none of this node's blocks of {range}"),
            None => write!(f, "{range}: this node's addresses are used up"),
        }
    }
}

/// The blocks of this node, as one call found them; of any other store than a Kubernetes store,
/// every address is as good as another.
pub(super) struct Granted<'s> {
    files: Option<&'s BlockFiles>,
    boot: &'s str,
    read: RefCell<BTreeMap<Option<String>, Rc<Reading>>>,
}

impl<'s> Granted<'s> {
    pub(super) fn new(store: &'s Store) -> Self {
        Self {
            files: store.blocks.as_ref(),
            boot: &store.node.boot,
            read: RefCell::default(),
        }
    }

    fn of(&self, space: &Space) -> Result<Option<Rc<Reading>>, StoreError> {
        let Some(files) = self.files else {
            return Ok(None);
        };
        if let Some(read) = self.read.borrow().get(&space.network_name) {
            return Ok(Some(read.clone()));
        }
        let mut reading = Reading::new(&files.directory, &files.space(space))?;
        reading.grants = reading.grants.of_boot(self.boot);
        let reading = Rc::new(reading);
        let name = space.network_name.clone();
        self.read.borrow_mut().insert(name, reading.clone());
        Ok(Some(reading))
    }

    /// A range, of which only the blocks' addresses are given.
    pub(super) fn cut(&self, space: &Space, range: Range) -> Result<Range, StoreError> {
        Ok(match self.of(space)? {
            Some(reading) => {
                let grants = &reading.grants;
                let range = grants.cut(&self.unasked(range));
                match grants.exceptions() {
                    none if none.is_empty() => range,
                    exceptions => range.without(&exceptions),
                }
            }
            None => range,
        })
    }

    /// A range, of which no address is given that is given on request only.
    fn unasked(&self, range: Range) -> Range {
        match self.files {
            Some(files) if !files.static_networks.is_empty() => {
                range.without(&files.static_networks)
            }
            _ => range,
        }
    }

    /// Whether this node may lease an address for a part.
    pub(super) fn has(&self, part: &Part, address: IpAddr) -> Result<bool, StoreError> {
        Ok(self
            .of(&part.space)?
            .is_none_or(|reading| reading.grants.may_lease(&part.range, address)))
    }

    /// The error of a part for which no address was found.
    pub(super) fn explain(
        &self,
        error: StoreError,
        part: &Part,
        address: Option<IpAddr>,
        count: usize,
    ) -> StoreError {
        match (error, self.files) {
            (StoreError::Exhausted { .. }, Some(files)) => StoreError::NeedsBlock(Box::new(Need {
                space: files.space(&part.space),
                range: self.unasked(part.range.clone()),
                single: address.is_some_and(|address| files.is_static(address)),
                address,
                count: u32::try_from(count).unwrap_or(u32::MAX),
            })),
            (error, _) => error,
        }
    }

    /// That a part wants an address which is in none of the blocks.
    pub(super) fn needs(&self, part: &Part, address: IpAddr) -> StoreError {
        let exhausted = StoreError::Exhausted {
            range: part.range.subnet().to_string(),
            why: String::new(),
        };
        self.explain(exhausted, part, Some(address), 1)
    }

    /// The last look: of the leases that the call is about to answer, the first whose block this
    /// node does not have any longer.
    pub(super) fn lost<'l>(
        &self,
        parts: &[Part],
        leases: impl Iterator<Item = (usize, &'l Lease)>,
    ) -> Result<Option<(usize, StoreError)>, StoreError> {
        let Some(files) = self.files else {
            return Ok(None);
        };
        let mut now: BTreeMap<Option<String>, Grants> = BTreeMap::new();
        for (name, reading) in self.read.borrow().iter() {
            let grants = match reading.is_current() {
                true => reading.grants.clone(),
                false => {
                    let space = AddressSpace::new(&files.store, name.as_deref());
                    Grants::read(&files.directory, &space)?.of_boot(self.boot)
                }
            };
            now.insert(name.clone(), grants);
        }
        for (number, lease) in leases {
            let Some(part) = parts.get(number) else {
                continue;
            };
            let grants = now.get(&part.space.network_name);
            if !grants.is_some_and(|grants| grants.may_lease(&part.range, lease.address)) {
                return Ok(Some((number, self.needs(part, lease.address))));
            }
        }
        Ok(None)
    }
}

/// How much of a block is in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockUse {
    /// Addresses that are leased, ascending.
    pub held: Vec<IpAddr>,
    /// How many addresses were released and cool down.
    pub cooling_down: usize,
}

/// When the directories that have a block's leases had changed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockStamp {
    /// Seconds and nanoseconds of each, by the file system's clock; `None` of one that is not there.
    times: Vec<Option<(i64, i64)>>,
}

impl BlockStamp {
    /// Whether a later change has another stamp, for certain: a file system's clock may stand still
    /// for some milliseconds. `now` in Unix seconds.
    #[must_use]
    pub fn is_settled(&self, now: i64) -> bool {
        self.times
            .iter()
            .flatten()
            .all(|(seconds, _)| *seconds < now.saturating_sub(1))
    }
}

/// A block of this node, and what of it is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeBlock {
    /// `network_name` of its address space.
    pub network_name: Option<String>,
    /// The block, as the cluster gave it.
    pub grant: Grant,
    /// What of it is in use.
    pub used: BlockUse,
}

/// A lease in no block of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outside {
    /// `network_name` of its address space.
    pub network_name: Option<String>,
    pub address: IpAddr,
    /// Its entry in the store.
    pub path: PathBuf,
}

impl Outside {
    /// What fsck says of it.
    #[must_use]
    pub fn finding(self) -> Finding {
        let what = format!(
            "{} is in no block of this node: another node may give it to a pod, too; let the pod that has it here end",
            self.address
        );
        Finding::strange(self.path, what)
    }
}

impl Store {
    /// This node's blocks, by network name and address; `None` of a store that is no Kubernetes
    /// store.
    ///
    /// # Errors
    /// When the store, or which blocks the node has, cannot be read.
    pub fn node_blocks(&self) -> Result<Option<Vec<NodeBlock>>, StoreError> {
        let Some(files) = &self.blocks else {
            return Ok(None);
        };
        let mut blocks = Vec::new();
        for grants in files.all()? {
            for grant in &grants.blocks {
                blocks.push(NodeBlock {
                    network_name: grants.network_name().map(str::to_owned),
                    used: self.block_use(grants.network_name(), grant.block)?,
                    grant: grant.clone(),
                });
            }
        }
        blocks.sort_by(|a, b| {
            (&a.network_name, a.grant.block).cmp(&(&b.network_name, b.grant.block))
        });
        Ok(Some(blocks))
    }

    /// Leases in blocks that this node does not have: another node may give the same addresses. One that
    /// was exported to whereabouts, so that no further pod gets it, is in its block.
    pub fn outside_blocks(&self) -> Result<Vec<Outside>, StoreError> {
        let Some(files) = &self.blocks else {
            return Ok(Vec::new());
        };
        let all: BTreeMap<Option<String>, Grants> = files
            .all()?
            .into_iter()
            .map(|grants| (grants.network_name().map(str::to_owned), grants))
            .collect();
        let mut outside = Vec::new();
        self.entries(false, |entry| {
            let blocks = all.get(&entry.network_name);
            let mut blocks = blocks.iter().flat_map(|grants| &grants.blocks);
            if entry.freed.is_none() && !blocks.any(|grant| grant.block.contains(entry.address)) {
                outside.push(Outside {
                    network_name: entry.network_name,
                    address: entry.address,
                    path: entry.path,
                });
            }
            Ok(())
        })?;
        Ok(outside)
    }

    /// The directories that may have leases of a block.
    fn shards_of_block(
        &self,
        network_name: Option<&str>,
        block: IpNetwork,
    ) -> impl Iterator<Item = Result<Option<Rc<Dir>>, StoreError>> {
        let (first, last) = (bits(block.network()), bits(block.broadcast()));
        let space = name::space(network_name);
        (name::shard_number(first)..=name::shard_number(last)).map(move |number| {
            let shard = name::shard(block.is_ipv4(), number);
            self.open_below(&["leases", &space, &shard])
        })
    }

    /// When leases of a block came or went last: much cheaper than [`Store::block_use`].
    pub fn block_stamp(
        &self,
        network_name: Option<&str>,
        block: IpNetwork,
    ) -> Result<BlockStamp, StoreError> {
        let mut times = Vec::new();
        for dir in self.shards_of_block(network_name, block) {
            let stat = dir?.map(|dir| dir.stat_self()).transpose()?;
            times.push(stat.map(|stat| (stat.st_mtime, stat.st_mtime_nsec)));
        }
        Ok(BlockStamp { times })
    }

    /// What of a block is in use on this node. A lease that is there from before the call until
    /// after it is seen.
    pub fn block_use(
        &self,
        network_name: Option<&str>,
        block: IpNetwork,
    ) -> Result<BlockUse, StoreError> {
        let cooldown = u64::try_from(self.cooldown.as_millis()).unwrap_or(u64::MAX);
        let rested = now().saturating_sub(cooldown);
        let (mut held, mut resting) = (BTreeSet::new(), BTreeSet::new());
        for dir in self.shards_of_block(network_name, block) {
            let Some(dir) = dir? else {
                continue;
            };
            for name in dir.names()? {
                let Some(lease) = LeaseName::parse(&name) else {
                    continue;
                };
                if !block.contains(lease.address) {
                    continue;
                }
                match lease.freed {
                    None => held.insert(lease.address),
                    Some(freed) if freed > rested => resting.insert(lease.address),
                    Some(_) => false,
                };
            }
        }
        Ok(BlockUse {
            cooling_down: resting.difference(&held).count(),
            held: held.into_iter().collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grants::directory;
    use crate::lease::Holder;
    use crate::range::Spec;
    use crate::store::{Order, Refused};
    use node::identity::NodeIdentity;
    use node::policy::{BlockLength, Policy, Profile, StoreBounds, StoreKind, StorePolicy};
    use node_wire::{Gateway, PerNode};
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    fn open(place: &Path) -> Store {
        std::fs::create_dir_all(place.join("store")).unwrap();
        let store = StorePolicy {
            directory: place.join("store"),
            kind: StoreKind::Kubernetes {
                blocks: BlockLength::default(),
                static_networks: vec!["10.0.0.128/25".parse().unwrap()],
                after: None,
            },
            bounds: StoreBounds::default(),
        };
        let mut policy = Policy {
            state_dir: place.join("state"),
            ..Policy::default()
        };
        policy.stores.insert("default".into(), store);
        let node = NodeIdentity::read(Path::new("/"), "n1").unwrap();
        Store::open(&policy, "default", node, Path::new("/")).unwrap()
    }

    fn grant(place: &Path, network_name: Option<&str>, blocks: &[&str]) {
        let space = AddressSpace::new("default", network_name);
        let mut grants = Grants::none(&space);
        grants.blocks = blocks
            .iter()
            .map(|block| Grant {
                block: block.parse().unwrap(),
                uid: "8f".into(),
                epoch: 1,
                per_node: None,
                except: Vec::new(),
                boot: node::identity::boot_id(Path::new("/proc")),
            })
            .collect();
        let directory = directory(&place.join("state"), "default");
        grants.write(&directory, &space).unwrap();
    }

    fn order(container: &str, range: &str, requested: Option<&str>) -> Order {
        let spec = Spec {
            range,
            ..Spec::default()
        };
        let mut holder: Holder = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24").holder;
        holder.pod = None;
        holder.node = "n1".into();
        holder.container = container.to_owned();
        holder.boot = NodeIdentity::read(Path::new("/"), "n1").unwrap().boot;
        Order {
            holder,
            profile: Profile::Strict,
            parts: vec![Part {
                interface: None,
                range: Range::new(&spec, Profile::Strict).unwrap(),
                space: Space {
                    network_name: None,
                    overlapping: true,
                },
                like: None,
                requested: requested.map(|address| address.parse().unwrap()),
            }],
        }
    }

    fn address(taken: Result<Vec<Lease>, Refused>) -> String {
        taken.unwrap()[0].address.to_string()
    }

    fn need(taken: Result<Vec<Lease>, Refused>) -> Need {
        match taken.unwrap_err().error {
            StoreError::NeedsBlock(need) => *need,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn only_addresses_of_the_nodes_blocks_are_given() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let range = "10.0.0.0/24";
        let missing = need(store.take(&order("a", range, None)));
        assert_eq!((missing.address, missing.count), (None, 1));
        assert_eq!(missing.range.subnet().to_string(), range);
        // Of another address space.
        grant(place.path(), Some("blue"), &["10.0.0.0/28"]);
        need(store.take(&order("a", range, None)));
        grant(
            place.path(),
            None,
            &["10.0.0.64/31", "fd00::/122", "10.0.0.16/31"],
        );
        assert_eq!(address(store.take(&order("a", range, None))), "10.0.0.16");
        assert_eq!(address(store.take(&order("b", range, None))), "10.0.0.17");
        assert_eq!(address(store.take(&order("c", range, None))), "10.0.0.64");
        assert_eq!(address(store.take(&order("a", range, None))), "10.0.0.16");
        assert_eq!(address(store.take(&order("d", range, None))), "10.0.0.65");
        need(store.take(&order("e", range, None)));
        let held = store
            .block_use(None, "10.0.0.16/31".parse().unwrap())
            .unwrap();
        assert_eq!(held.held.len(), 2);
        let blue = store.block_use(Some("blue"), "10.0.0.16/31".parse().unwrap());
        assert_eq!(blue.unwrap(), BlockUse::default());
    }

    #[test]
    fn a_nodes_network_gives_what_its_range_says_and_no_other_range() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let per_node = |gateway| PerNode {
            prefix: 30,
            gateway: Some(gateway),
        };
        let order = |container: &str, per_node: Option<PerNode>| {
            let mut order = order(container, "10.0.0.0/24", None);
            let range = order.parts[0].range.clone().divided(per_node);
            order.parts[0].range = range.unwrap();
            order
        };
        let space = AddressSpace::new("default", None);
        let mut grants = Grants::none(&space);
        grants.blocks.push(Grant {
            block: "10.0.0.4/30".parse().unwrap(),
            uid: "8f".into(),
            epoch: 1,
            per_node: Some(per_node(Gateway::First)),
            except: Vec::new(),
            boot: node::identity::boot_id(Path::new("/proc")),
        });
        let directory = directory(&place.path().join("state"), "default");
        grants.write(&directory, &space).unwrap();
        // The broker says why.
        need(store.take(&order("a", None)));
        need(store.take(&order("a", Some(per_node(Gateway::Last)))));
        let first = order("a", Some(per_node(Gateway::First)));
        let taken = store.take(&first).unwrap();
        assert_eq!(
            (taken[0].address, taken[0].prefix),
            ([10, 0, 0, 6].into(), 30)
        );
        assert_eq!(store.take(&first).unwrap()[0].address, taken[0].address);
        let full = need(store.take(&order("b", Some(per_node(Gateway::First)))));
        assert_eq!(full.range.per_node(), Some(per_node(Gateway::First)));
        let mut asked = order("b", Some(per_node(Gateway::Last)));
        asked.parts[0].requested = Some([10, 0, 0, 5].into());
        need(store.take(&asked));
        let pools = store.pools().unwrap();
        assert_eq!(pools[0].per_node, Some(per_node(Gateway::First)));
    }

    #[test]
    fn a_lease_that_whereabouts_has_too_is_in_its_block() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.16/31"]);
        let leased = store.take(&order("a", "10.0.0.0/24", None)).unwrap();
        let space = AddressSpace::new("default", None);
        let directory = directory(&place.path().join("state"), "default");
        let mut grants = Grants::read(&directory, &space).unwrap();
        grants.blocks[0].except = vec![leased[0].address];
        grants.write(&directory, &space).unwrap();
        assert!(store.outside_blocks().unwrap().is_empty());
        grant(place.path(), None, &["10.0.0.64/31"]);
        assert_eq!(store.outside_blocks().unwrap().len(), 1);
    }

    #[test]
    fn all_interfaces_of_an_order_are_counted() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.16/31"]);
        let mut several = order("a", "10.0.0.0/24", None);
        let part = several.parts[0].clone();
        several.parts = ["net1", "net2", "net3"]
            .map(|interface| Part {
                interface: Some(interface.to_owned()),
                ..part.clone()
            })
            .to_vec();
        assert_eq!(need(store.take(&several)).count, 3);
        let missing = several.parts.pop().unwrap();
        store.take(&several).unwrap();
        several.parts.push(missing);
        assert_eq!(need(store.take(&several)).count, 1);
    }

    #[test]
    fn hints_do_not_grow_with_the_changes_of_blocks() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let blocks = ["10.0.0.16/31", "10.0.0.64/31", "10.0.0.32/31"];
        for count in 1..=blocks.len() {
            grant(place.path(), None, &blocks[..count]);
            for pod in 0..2 {
                let order = order(&format!("c{count}-{pod}"), "10.0.0.0/24", None);
                store.take(&order).unwrap();
            }
            need(store.take(&order("full", "10.0.0.0/24", None)));
        }
        let hints = std::fs::read_dir(place.path().join("store/hints/default")).unwrap();
        assert_eq!(hints.count(), 1, "one table for all of them");
    }

    #[test]
    fn a_requested_address_needs_its_block() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.0/28"]);
        let asked = order("a", "10.0.0.0/24", Some("10.0.0.77"));
        let missing = need(store.take(&asked));
        assert_eq!(missing.address, Some("10.0.0.77".parse().unwrap()));
        assert!(
            missing.to_string().contains("10.0.0.77 is in none"),
            "{missing}"
        );
        grant(place.path(), None, &["10.0.0.0/28", "10.0.0.64/28"]);
        assert_eq!(address(store.take(&asked)), "10.0.0.77");
    }

    #[test]
    fn a_block_of_an_earlier_boot_is_not_leased_from_and_stays_the_nodes() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.0/28"]);
        let first = order("a", "10.0.0.0/24", None);
        let lease = address(store.take(&first));
        let directory = directory(&place.path().join("state"), "default");
        let space = AddressSpace::new("default", None);
        let mut grants = Grants::read(&directory, &space).unwrap();
        grants.blocks[0].boot = "before".to_owned();
        grants.write(&directory, &space).unwrap();
        need(store.take(&order("b", "10.0.0.0/24", None)));
        need(store.take(&order("b", "10.0.0.0/24", Some("10.0.0.9"))));
        need(store.take(&first));
        assert!(store.room(&first).is_err());
        assert!(store.outside_blocks().unwrap().is_empty());
        let blocks = store.node_blocks().unwrap().unwrap();
        assert_eq!(blocks[0].used.held, [lease.parse::<IpAddr>().unwrap()]);
        let holder = &first.holder;
        store
            .give_back("a", &holder.interface, &holder.network)
            .unwrap();
        let used = store.node_blocks().unwrap().unwrap().remove(0).used;
        assert_eq!((used.held.len(), used.cooling_down), (0, 1));
    }

    #[test]
    fn a_static_address_is_given_on_request_only() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let range = "10.0.0.0/24";
        let missing = need(store.take(&order("a", range, Some("10.0.0.200"))));
        assert!(missing.single);
        // What is wanted unasked is none of them.
        let missing = need(store.take(&order("a", range, None)));
        assert!(!missing.single && !missing.range.gives("10.0.0.200".parse().unwrap()));
        assert_eq!(missing.range.size(), 127);
        grant(place.path(), None, &["10.0.0.200/32"]);
        need(store.take(&order("b", range, None)));
        let taken = store.take(&order("a", range, Some("10.0.0.200")));
        assert_eq!(address(taken), "10.0.0.200");
    }

    #[test]
    fn a_lease_in_a_block_that_is_gone_is_not_answered_again() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.0/28"]);
        let first = order("a", "10.0.0.0/24", None);
        let lease = address(store.take(&first));
        grant(place.path(), None, &["10.0.0.16/28"]);
        let missing = need(store.take(&first));
        assert_eq!(
            missing.address.map(|address| address.to_string()),
            Some(lease)
        );
        // It stays its owner's, for DEL or until the block is back, and fsck shows it.
        let found = store.fsck(false, Duration::ZERO).unwrap().findings;
        let found: Vec<&str> = found.iter().map(|problem| &*problem.finding.what).collect();
        assert!(
            found[0].starts_with("10.0.0.1 is in no block of this node"),
            "{found:?}"
        );
        let blocks = store.node_blocks().unwrap().unwrap();
        assert_eq!((blocks.len(), blocks[0].used.held.len()), (1, 0));
        assert_eq!(store.held("a", &first.holder.interface).unwrap().len(), 1);
    }

    #[test]
    fn room_is_what_the_blocks_have() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let ordered = order("a", "10.0.0.0/24", None);
        let room = || store.room(&ordered).map_err(|refused| refused.error);
        assert!(matches!(room(), Err(StoreError::NeedsBlock(_))));
        grant(place.path(), None, &["10.0.0.16/31"]);
        room().unwrap();
        std::fs::write(place.path().join("state/blocks/default/default"), "{").unwrap();
        assert!(matches!(room(), Err(StoreError::Grants(_))));
    }

    #[test]
    fn released_addresses_of_a_block_cool_down() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.0/28"]);
        let ordered = order("a", "10.0.0.0/24", None);
        store.take(&ordered).unwrap();
        let holder = &ordered.holder;
        store
            .give_back(&holder.container, &holder.interface, &holder.network)
            .unwrap();
        let used = store
            .block_use(None, "10.0.0.0/28".parse().unwrap())
            .unwrap();
        assert_eq!((used.held.len(), used.cooling_down), (0, 1));
    }

    #[test]
    fn a_blocks_stamp_changes_with_its_leases() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        grant(place.path(), None, &["10.0.0.0/28"]);
        let stamp = |block: &str| store.block_stamp(None, block.parse().unwrap()).unwrap();
        let before = stamp("10.0.0.0/28");
        assert!(before.is_settled(0));
        store.take(&order("a", "10.0.0.0/24", None)).unwrap();
        let after = stamp("10.0.0.0/28");
        assert_ne!(before, after);
        assert_eq!(after, stamp("10.0.0.0/28"));
        let now = jiff::Timestamp::now().as_second();
        assert!(!after.is_settled(now) && after.is_settled(now + 3));
        assert_eq!(stamp("10.0.1.0/28"), before);
        assert_eq!(stamp("10.0.0.0/23").times.len(), 2);
    }

    /// The broker's way of giving a block back, against ADDs and DELs without a pause.
    #[test]
    fn no_address_is_answered_from_a_block_that_was_given_back() {
        let place = tempfile::tempdir().unwrap();
        open(place.path());
        let block = "10.0.0.0/28";
        let (given_back, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let (answered, returned) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let until = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let store = open(place.path());
                while !over.load(Ordering::SeqCst) {
                    grant(place.path(), None, &[block]);
                    std::thread::yield_now();
                    grant(place.path(), None, &[]);
                    let used = store.block_use(None, block.parse().unwrap()).unwrap();
                    if !used.held.is_empty() {
                        continue;
                    }
                    given_back.store(true, Ordering::SeqCst);
                    returned.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(1));
                    given_back.store(false, Ordering::SeqCst);
                }
            });
            let pods = ["a", "b"].map(|container| {
                let (given_back, answered, returned) = (&given_back, &answered, &returned);
                let place = place.path();
                scope.spawn(move || {
                    let store = open(place);
                    let ordered = order(container, "10.0.0.0/24", None);
                    let holder = &ordered.holder;
                    while Instant::now() < until
                        && (answered.load(Ordering::SeqCst) < 500
                            || returned.load(Ordering::SeqCst) < 50)
                    {
                        if store.take(&ordered).is_ok() {
                            // Held from here on: the broker sees it, or it has not answered.
                            assert!(!given_back.load(Ordering::SeqCst), "two nodes have it");
                            answered.fetch_add(1, Ordering::SeqCst);
                        }
                        store
                            .give_back(container, &holder.interface, &holder.network)
                            .unwrap();
                    }
                })
            });
            let ends = pods.map(std::thread::ScopedJoinHandle::join);
            over.store(true, Ordering::SeqCst);
            for end in ends {
                end.unwrap();
            }
        });
        assert!(answered.into_inner() > 0 && returned.into_inner() > 0);
    }
}
