//! Leases of a store of whereabouts' objects that the networks of a space used before: their addresses
//! are not given until they end.
//!
//! The policy names that store (`after`). What is read of it here is what its pools and reservations
//! have of the space's network name, and goes into the grants ([`ipam::grants::Grant::except`]).
//!
//! # Why no address is given twice
//! Networks change to the new store at one time for the cluster, when their object is changed. An ADD
//! that had read the old one may still be on its way, on any node. So a broker that gives the first
//! block of a space waits for [`Timing::settle`], longer than such an ADD takes, before it reads the old
//! store and grants a block; until then ADDs are told to try again. From there on leases of the old
//! store only end. A space that this node has blocks of has waited already.
//!
//! Whoever changes a network back to the old store, while pods have leases of the new one, takes
//! addresses that are in use: that store does not look here.
//!
//! [`Timing::settle`]: super::Timing::settle

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipam::whereabouts::{address_of_reservation, network_name_of_pool, pool_name};
use ipnetwork::IpNetwork;
use node_wire::{Failure, FailureKind};
use tokio::time::Instant;

use super::claim::RangeKey;
use super::{Worker, failure};
use crate::api::ApiError;
use crate::api::whereabouts::{Objects, PoolObject};

/// How often it is read which leases ended, as long as there are some in this node's blocks.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);

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
    /// Since when the space waits for ADDs of the old store to end; `None` before the first question.
    waits_since: Option<Instant>,
    /// Whether it waited.
    is_settled: bool,
    read: Option<Instant>,
    leases: BTreeSet<IpAddr>,
}

impl Before {
    /// Of a space of which the node has blocks, or not yet.
    pub(super) fn new(store: StoreBefore, has_blocks: bool) -> Self {
        Self {
            store,
            waits_since: None,
            is_settled: has_blocks,
            read: None,
            leases: BTreeSet::new(),
        }
    }

    fn within(&self, network: IpNetwork) -> impl Iterator<Item = &IpAddr> {
        self.leases.range(network.network()..=network.broadcast())
    }
}

impl Worker {
    /// Refuses to claim until leases of the store before are known to be all there.
    pub(super) async fn settle_before(&mut self) -> Result<(), Failure> {
        let Some(before) = &mut self.before else {
            return Ok(());
        };
        if !before.is_settled {
            let since = *before.waits_since.get_or_insert_with(Instant::now);
            let left = self.shared.timing.settle.saturating_sub(since.elapsed());
            if !left.is_zero() {
                let why = format!(
                    "{} comes after store {:?}, which may have ADDs on their way: this node gives the first \
                     addresses in {} s",
                    self.space,
                    before.store.name,
                    left.as_secs() + 1
                );
                return Err(Failure::new(FailureKind::ClusterUnavailable, why));
            }
            before.is_settled = true;
            before.read = None;
        }
        self.read_before().await.map_err(|error| {
            let failure = failure(&error);
            Failure::new(failure.kind, self.unread_before(&error))
        })
    }

    /// That the leases of the store before cannot be read.
    pub(super) fn unread_before(&self, error: &ApiError) -> String {
        let store = &self.space.store;
        format!(
            "cannot read the leases of the store before (stores.{store}.after of the policy): {error}"
        )
    }

    /// Reads the leases of the store before, unless they are known.
    async fn read_before(&mut self) -> Result<(), ApiError> {
        let Some(before) = self.before.as_mut().filter(|before| before.read.is_none()) else {
            return Ok(());
        };
        let name = self.space.network_name.as_deref();
        let objects = &before.store.objects;
        let mut leases = BTreeSet::new();
        objects
            .each_pool(|pool| leases.extend(leases_of(&pool, name)))
            .await?;
        objects
            .each_reservation_name(|reservation| {
                leases.extend(address_of_reservation(&reservation, name));
            })
            .await?;
        before.leases = leases;
        before.read = Some(Instant::now());
        Ok(())
    }

    /// Reads which leases of the store before ended, if any are in this node's blocks.
    pub(super) async fn refresh_before(&mut self) -> Result<(), ApiError> {
        let has_exceptions = self.grants.blocks.iter().any(|one| !one.except.is_empty());
        let Some(before) = &mut self.before else {
            return Ok(());
        };
        let is_old = |read: Instant| read.elapsed() >= REFRESH_INTERVAL;
        if has_exceptions && before.read.is_some_and(is_old) {
            before.read = None;
        }
        // Without blocks nobody asks, and the first question reads.
        if !self.own.is_empty() {
            self.read_before().await?;
        }
        Ok(())
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
