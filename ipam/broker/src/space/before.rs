//! Leases of a store of whereabouts' objects that the networks of a space used before: their addresses
//! are not given until they end.
//!
//! The policy names that store (`after`). What is read of it here is what its pools and reservations
//! have of the space's network name, and goes into the grants ([`ipam::grants::Grant::except`]).
//!
//! # Why no address is given twice
//! A network changes to the new store at one time for the cluster, when its object is changed; other
//! networks of the space may change later. An ADD that had read the old object may still be on its way,
//! on any node. So a broker that gives the first block of a range waits for [`Timing::settle`], longer
//! than such an ADD takes, before it reads the old store and grants the block; until then ADDs
//! get code 11. From there on leases of the old store in the range only end. A range that the node had
//! a block of when the broker started has waited already. Networks whose ranges have addresses in common
//! change together.
//!
//! Whoever changes a network back to the old store, while pods have leases of the new one, takes
//! addresses that are in use: that store does not look here. When leases come in a range that has
//! waited, the range waits again before it gets another block.
//!
//! [`Timing::settle`]: super::Timing::settle

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam::whereabouts::{address_of_reservation, network_name_of_pool, pool_name};
use ipnetwork::IpNetwork;
use node_wire::{Failure, FailureKind};
use tokio::time::Instant;

use super::claim::RangeKey;
use super::{Worker, failure, size};
use crate::api::ApiError;
use crate::api::whereabouts::{Objects, PoolObject};

/// The store that a space's networks used before.
#[derive(Debug, Clone)]
pub struct StoreBefore {
    /// Its name in the policy.
    pub name: String,
    /// Its objects.
    pub objects: Objects,
}

/// What is known of the leases there.
#[derive(Debug)]
pub(super) struct Before {
    store: StoreBefore,
    /// Blocks that the node had when the broker started: whole ones are of ranges that waited.
    blocks: Vec<IpNetwork>,
    /// Since when a range waits for ADDs of the old store to end.
    waits: BTreeMap<RangeKey, Instant>,
    /// Ranges that waited, and were read behind that.
    settled: BTreeSet<RangeKey>,
    read: Option<Instant>,
    leases: BTreeSet<IpAddr>,
}

impl Before {
    /// Of a space of which the node has blocks.
    pub(super) fn new(store: StoreBefore, blocks: Vec<IpNetwork>) -> Self {
        Self {
            store,
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
            self.settled.retain(|range| !range.has(*address));
            self.blocks.retain(|block| !block.contains(*address));
        }
        self.leases = leases;
        self.read = Some(Instant::now());
    }

    fn has_waited(&self, range: &RangeKey) -> bool {
        let is_whole = |block: &IpNetwork| range.within(*block) == u128::from(size(*block));
        self.settled.contains(range) || self.blocks.iter().any(is_whole)
    }

    fn within(&self, network: IpNetwork) -> impl Iterator<Item = &IpAddr> {
        self.leases.range(network.network()..=network.broadcast())
    }
}

impl Worker {
    /// Refuses to claim for a range until its leases of the store before are known to be all there.
    pub(super) async fn settle_before(&mut self, range: &RangeKey) -> Result<(), Failure> {
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
                "{} comes after store {:?}, which may have ADDs on their way: this node gives the first \
                 addresses of the range in {} s",
                self.space,
                before.store.name,
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
        format!(
            "cannot read the leases of the store before (stores.{store}.after of the policy): {error}"
        )
    }

    /// Reads the leases of the store before. Those that were known stay so where that fails.
    async fn read_before(&mut self) -> Result<(), Failure> {
        let Some(before) = &mut self.before else {
            return Ok(());
        };
        let name = self.space.network_name.as_deref();
        match leases(&before.store.objects, name).await {
            Ok(leases) => {
                before.take(leases);
                Ok(())
            }
            Err(error) => {
                let failure = failure(&error);
                Err(Failure::new(failure.kind, self.unread_before(&error)))
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
        match self.own.is_empty() {
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
    pub(super) fn room(&self, range: &RangeKey, block: IpNetwork) -> u128 {
        let leased = self.leased_before(block);
        let leased = leased.iter().filter(|address| range.has(**address));
        range.within(block).saturating_sub(leased.count() as u128)
    }

    /// How many addresses of a range are leased in the store before, for people.
    pub(super) fn explain_before(&self, range: &RangeKey) -> String {
        let Some(before) = &self.before else {
            return String::new();
        };
        let leases = before.leases.iter();
        match leases.filter(|address| range.has(**address)).count() {
            0 => String::new(),
            leased => format!(
                ", {leased} of its addresses are leased in store {:?}",
                before.store.name
            ),
        }
    }

    /// Refuses an address that is leased in the store before.
    pub(super) fn check_before(&self, address: IpAddr) -> Result<(), Failure> {
        match &self.before {
            Some(before) if before.leases.contains(&address) => {
                let why = format!(
                    "{address} is leased in store {:?}, which this store comes after; it can be had when that \
                     lease has ended",
                    before.store.name
                );
                Err(Failure::new(FailureKind::HeldByAnotherNode, why))
            }
            _ => Ok(()),
        }
    }
}

/// The addresses that are leased under a network name. A lease is in its pool; a reservation alone is
/// one that is about to come or to go.
async fn leases(
    objects: &Objects,
    network_name: Option<&str>,
) -> Result<BTreeSet<IpAddr>, ApiError> {
    let mut leases = BTreeSet::new();
    objects
        .each_pool(|pool| leases.extend(leases_of(&pool, network_name)))
        .await?;
    objects
        .each_reservation_name(|reservation| {
            leases.extend(address_of_reservation(&reservation, network_name));
        })
        .await?;
    Ok(leases)
}

/// The addresses of a pool, if it is of a network name.
fn leases_of(pool: &PoolObject, network_name: Option<&str>) -> Vec<IpAddr> {
    let Ok(range) = pool.spec.range.parse::<IpNetwork>() else {
        return Vec::new();
    };
    let name = &pool.metadata.name;
    let is_of = match network_name {
        None => *name == pool_name(range, None),
        Some(_) => network_name_of_pool(name, range) == network_name,
    };
    let offsets = pool.spec.allocations.keys().filter(|_| is_of);
    offsets
        .filter_map(|offset| ipam::whereabouts::address(range, offset.parse().ok()?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn leases_of_a_pool_are_those_of_its_network_name() {
        let pool = |name: &str| -> PoolObject {
            serde_json::from_value(json!({
                "apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": name},
                "spec": {"range": "10.0.0.0/24", "allocations": {
                    "5": {"id": "c1", "podref": "ml/a"}, "300": {"id": "c2", "podref": "ml/b"},
                    "x": {"id": "c3", "podref": "ml/c"}}},
            }))
            .unwrap()
        };
        let five: Vec<IpAddr> = vec![[10, 0, 0, 5].into()];
        assert_eq!(leases_of(&pool("10.0.0.0-24"), None), five);
        assert_eq!(leases_of(&pool("blue-10.0.0.0-24"), Some("blue")), five);
        assert!(leases_of(&pool("blue-10.0.0.0-24"), None).is_empty());
        assert!(leases_of(&pool("10.0.0.0-24"), Some("blue")).is_empty());
    }
}
