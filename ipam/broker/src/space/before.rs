//! Leases of whereabouts, which the networks of a space used before: their addresses are not leased
//! here until those leases end. The policy names the namespace of its objects (`after`); they are only
//! read, and go into [`crate::grants::Grant::except`].
//!
//! An ADD of whereabouts that read the network before it changed may still run, on any node. So a
//! broker that claims the first block of a range waits for [`Timing::settle`], longer than whereabouts
//! lets an ADD run, before it reads the objects and grants the block. Until then ADDs get code 11; from
//! then on leases of whereabouts in the range only end. A range of which the node had a block at the
//! start has waited. When new leases come, the range waits again before another block. Networks with
//! common addresses change together.
//!
//! [`Timing::settle`]: super::Timing::settle

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam::whereabouts::{address_of_reservation, owner_of_pool};
use ipnetwork::IpNetwork;
use node_wire::{Failure, FailureKind};
use tokio::time::Instant;

use super::Worker;
use crate::api::ApiError;
use crate::api::whereabouts::{PoolObject, WhereaboutsObjects};
use ipam::range::Range;

/// What is known of the leases there.
#[derive(Debug)]
pub(super) struct Before {
    objects: WhereaboutsObjects,
    /// Whether a name that stands before the range in the name of a pool is a node's.
    nodes: BTreeMap<String, bool>,
    /// Blocks that the node had when the broker started: whole ones are of ranges that waited.
    blocks: Vec<IpNetwork>,
    /// Since when a range waits for ADDs of the old store to end.
    waits: BTreeMap<Range, Instant>,
    /// Ranges that waited, and were read behind that.
    settled: BTreeSet<Range>,
    read: Option<Instant>,
    leases: BTreeSet<IpAddr>,
}

impl Before {
    /// Of a space of which the node has blocks.
    pub(super) fn new(objects: WhereaboutsObjects, blocks: Vec<IpNetwork>) -> Self {
        Self {
            objects,
            nodes: BTreeMap::new(),
            blocks,
            waits: BTreeMap::new(),
            settled: BTreeSet::new(),
            read: None,
            leases: BTreeSet::new(),
        }
    }

    /// What was read just now. A range that waited gets leases only from networks that are of the old
    /// store still, or again.
    fn take(&mut self, leases: BTreeSet<IpAddr>) {
        let is_first = self.read.is_none();
        let came = leases.difference(&self.leases).filter(|_| !is_first);
        for address in came {
            self.settled.retain(|range| !range.gives(*address));
            self.waits.retain(|range, _| !range.gives(*address));
            self.blocks.retain(|block| !block.contains(*address));
        }
        self.leases = leases;
        self.read = Some(Instant::now());
    }

    /// The node lost a block: an administrator removes those of a range that went back to whereabouts, so
    /// the range waits again.
    pub(super) fn unsettle(&mut self, block: IpNetwork) {
        self.settled.retain(|range| range.size_within(block) == 0);
        self.waits.retain(|range, _| range.size_within(block) == 0);
        self.blocks.retain(|other| *other != block);
    }

    /// The addresses that are leased under a network name. A lease is in its pool; a reservation alone
    /// is one that is about to come or to go.
    async fn list(&mut self, network_name: Option<&str>) -> Result<BTreeSet<IpAddr>, ApiError> {
        let mut pools = Vec::new();
        let each = |pool: PoolObject| pools.extend(leases_of(&pool));
        self.objects.each_pool(each).await?;
        let mut leases = BTreeSet::new();
        let each = |name: String| leases.extend(address_of_reservation(&name, network_name));
        self.objects.each_reservation_name(each).await?;
        for (owner, of_pool) in pools {
            let Some(node) = slice(&owner, network_name) else {
                continue;
            };
            let is_of_space = match self.nodes.get(node) {
                _ if node.is_empty() => true,
                Some(is_node) => *is_node,
                None => {
                    let is_node = self.objects.is_node(node).await?;
                    self.nodes.insert(node.to_owned(), is_node);
                    is_node
                }
            };
            if is_of_space {
                leases.extend(of_pool);
            }
        }
        Ok(leases)
    }

    fn has_waited(&self, range: &Range) -> bool {
        let is_whole = |block: &IpNetwork| gives_all_of(range, *block);
        self.settled.contains(range) || self.blocks.iter().any(is_whole)
    }

    fn within(&self, network: IpNetwork) -> impl Iterator<Item = &IpAddr> {
        self.leases.range(network.network()..=network.broadcast())
    }
}

impl Worker {
    /// Refuses to claim for a range until its leases of the store before are known to be all there.
    pub(super) async fn settle_before(&mut self, range: &Range) -> Result<(), Failure> {
        self.read_old_before().await?;
        let settle = self.shared.timing.settle;
        let Some(before) = &mut self.before else {
            return Ok(());
        };
        if before.has_waited(range) {
            return Ok(());
        }
        let since = *before
            .waits
            .entry(range.clone())
            .or_insert_with(Instant::now);
        let left = settle.saturating_sub(since.elapsed());
        if !left.is_zero() {
            let why = format!(
                "{} comes after whereabouts, of which an ADD may still run: this node leases the first \
                 addresses of the range in {} s",
                self.space,
                left.as_secs() + 1
            );
            return Err(Failure::new(FailureKind::ClusterUnavailable, why));
        }
        self.read_before().await?;
        if let Some(before) = &mut self.before {
            before.waits.remove(range);
            before.settled.insert(range.clone());
        }
        Ok(())
    }

    /// That the leases of the store before cannot be read.
    fn unread_before(&self, error: &ApiError) -> String {
        let store = &self.space.store;
        format!("cannot read whereabouts' objects (stores.{store}.after of the policy): {error}")
    }

    /// Reads the leases of the store before. Those that were known stay so where that fails.
    async fn read_before(&mut self) -> Result<(), Failure> {
        let Some(before) = &mut self.before else {
            return Ok(());
        };
        let name = self.space.network_name.as_deref();
        match before.list(name).await {
            Ok(leases) => {
                before.take(leases);
                Ok(())
            }
            Err(error) => {
                let why = self.unread_before(&error);
                Err(Failure::new(Failure::from(error).kind, why))
            }
        }
    }

    /// The same, if that was long ago.
    async fn read_old_before(&mut self) -> Result<(), Failure> {
        let reread = self.shared.timing.reread;
        let read = self.before.as_ref().and_then(|before| before.read);
        match read {
            Some(read) if read.elapsed() < reread => Ok(()),
            _ => self.read_before().await,
        }
    }

    /// Reads which leases of the store before ended, if this node has blocks. Without, the next question
    /// reads.
    pub(super) async fn refresh_before(&mut self) -> Result<(), Failure> {
        match self.blocks.own.is_empty() {
            true => Ok(()),
            false => self.read_old_before().await,
        }
    }

    /// Whether it is known which addresses of a block are leased in the store before.
    pub(super) fn knows_before(&self) -> bool {
        let before = self.before.as_ref();
        before.is_none_or(|before| before.read.is_some())
    }

    /// The addresses of a block that are leased in the store before.
    pub(super) fn leased_before(&self, block: IpNetwork) -> Vec<IpAddr> {
        let before = self.before.iter();
        before
            .flat_map(|before| before.within(block))
            .copied()
            .collect()
    }

    /// How many addresses of a range in a block can be given.
    pub(super) fn room(&self, range: &Range, block: IpNetwork) -> u128 {
        room(range, block, &self.leased_before(block))
    }

    /// How many addresses of a range are leased in the store before, for people.
    pub(super) fn explain_before(&self, range: &Range) -> String {
        let Some(before) = &self.before else {
            return String::new();
        };
        let leases = before.leases.iter();
        match leases.filter(|address| range.gives(**address)).count() {
            0 => String::new(),
            leased => format!(", whereabouts leases {leased} of its addresses"),
        }
    }

    /// Refuses an address that is leased in the store before.
    pub(super) fn check_before(&self, address: IpAddr) -> Result<(), Failure> {
        match &self.before {
            Some(before) if before.leases.contains(&address) => {
                let why = format!(
                    "whereabouts leases {address}; a pod can have it when that lease has ended"
                );
                Err(Failure::new(FailureKind::HeldByAnotherNode, why))
            }
            _ => Ok(()),
        }
    }
}

/// A node's network has no room while a pod has the address of its gateway.
fn room(range: &Range, block: IpNetwork, leased: &[IpAddr]) -> u128 {
    if range
        .gateway_of(block.network())
        .is_some_and(|gateway| leased.contains(&gateway))
    {
        return 0;
    }
    let own = range.within(&[block]);
    let leased = leased.iter().filter(|address| own.gives(**address));
    own.size().saturating_sub(leased.count() as u128)
}

/// Whether a range gives each address for pods of a block.
fn gives_all_of(range: &Range, block: IpNetwork) -> bool {
    let whole = Range::whole(block).divided(range.per_node());
    let size = whole.map_or(0, |whole| whole.size_within(block));
    size > 0 && range.size_within(block) == size
}

/// The leases of a pool, and the name that stands before its range in the pool's name.
fn leases_of(pool: &PoolObject) -> Option<(String, Vec<IpAddr>)> {
    let range: IpNetwork = pool.spec.range.parse().ok()?;
    let owner = owner_of_pool(&pool.metadata.name, range)?;
    let offsets = pool.spec.allocations.keys();
    let leases = offsets.filter_map(|at| ipam::whereabouts::address(range, at.parse().ok()?));
    Some((owner.to_owned(), leases.collect()))
}

/// The name of the node whose slice a pool may be, if it is not the pool of the whole range; `None` of a
/// pool of another network name.
fn slice<'o>(owner: &'o str, network_name: Option<&str>) -> Option<&'o str> {
    match network_name {
        None => Some(owner),
        Some(name) if name == owner => Some(""),
        Some(name) => owner.strip_prefix(name)?.strip_prefix('-'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_nodes_network_is_whole_without_its_gateway() {
        let range = |per_node| {
            let range = Range::whole("10.0.0.0/24".parse().unwrap());
            range.divided(per_node).unwrap()
        };
        let per_node = node_wire::PerNode {
            prefix: 29,
            gateway: Some(node_wire::Gateway::First),
        };
        let block = "10.0.0.8/29".parse().unwrap();
        assert!(gives_all_of(&range(None), block));
        assert!(gives_all_of(&range(Some(per_node)), block));
        let part = range(Some(per_node)).without(&["10.0.0.10/32".parse().unwrap()]);
        assert!(!gives_all_of(&part, block));
        assert!(!gives_all_of(&range(None), "10.0.1.8/29".parse().unwrap()));
        let room =
            |per_node, leased: &str| room(&range(per_node), block, &[leased.parse().unwrap()]);
        assert_eq!(room(Some(per_node), "10.0.0.10"), 4);
        assert_eq!(room(Some(per_node), "10.0.0.9"), 0, "its gateway");
        assert_eq!(
            room(Some(per_node), "10.0.0.15"),
            5,
            "no pod gets the last one"
        );
        assert_eq!(room(None, "10.0.0.9"), 7);
    }

    #[test]
    fn leases_are_read_from_the_pool_of_a_range_and_of_a_slice() {
        let pool = |name: &str| -> Option<(String, Vec<IpAddr>)> {
            let pool = serde_json::from_value(json!({
                "apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": name},
                "spec": {"range": "10.0.0.0/24", "allocations": {
                    "5": {"id": "c1", "podref": "ml/a"}, "300": {"id": "c2", "podref": "ml/b"},
                    "x": {"id": "c3", "podref": "ml/c"}}},
            }));
            leases_of(&pool.unwrap())
        };
        let five: Vec<IpAddr> = vec![[10, 0, 0, 5].into()];
        for owner in ["", "blue", "n1", "blue-n1"] {
            let before = if owner.is_empty() { "" } else { "-" };
            let name = format!("{owner}{before}10.0.0.0-24");
            assert_eq!(pool(&name), Some((owner.to_owned(), five.clone())));
        }
        assert_eq!(pool("10.0.0.0-25"), None);
        for (owner, network_name, node) in [
            ("", None, Some("")),
            ("n1", None, Some("n1")),
            ("", Some("blue"), None),
            ("blue", Some("blue"), Some("")),
            ("blue-n1", Some("blue"), Some("n1")),
            ("bluen1", Some("blue"), None),
            ("red", Some("blue"), None),
        ] {
            assert_eq!(slice(owner, network_name), node, "{owner} {network_name:?}");
        }
    }
}
