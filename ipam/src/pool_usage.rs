//! How full the ranges are that this node leases from.

use crate::leases::{LeaseError, LeaseSpace, Leases, Pool, Use, since_boot};
use ipnetwork::IpNetwork;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// What is used of a range, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub used: u128,
    /// Its addresses that are leased as those of another range.
    pub used_by_others: u128,
    /// Its addresses that are leased, by whichever range.
    pub taken: u128,
    /// Its addresses that cool down after a release.
    pub cooling_down: u128,
}

impl Usage {
    /// Addresses that an ADD may get at once.
    #[must_use]
    pub fn free(&self, pool: &Pool) -> u128 {
        pool.size()
            .saturating_sub(self.taken)
            .saturating_sub(self.cooling_down)
    }
}

/// Each lease counts in one range: in that which its record names. Records are read only where several
/// ranges of a space are in use.
///
/// # Errors
/// The leases cannot be read.
pub fn usage(
    leases: &Leases,
    pools: &[Pool],
    cooldown: Duration,
) -> Result<Vec<Usage>, LeaseError> {
    let mut counts: Vec<Usage> = pools.iter().map(|_| Usage::default()).collect();
    let several = pools.iter().enumerate().any(|(number, pool)| {
        let mut before = pools.iter().take(number);
        before.any(|other| other.space == pool.space)
    });
    let mut ranges: BTreeMap<(LeaseSpace, IpAddr), IpNetwork> = BTreeMap::new();
    if several {
        let listed = leases.list()?.leases.into_iter();
        let of = |lease: crate::lease::Lease| {
            let space = LeaseSpace::of_lease(&lease);
            ((space, lease.address), lease.range)
        };
        ranges = listed.map(of).collect();
    }
    let now = since_boot();
    leases.entries(|space, address, used| {
        let range = several
            .then(|| ranges.get(&(space.clone(), address)))
            .flatten();
        let of_space = pools.iter().zip(&mut counts);
        for (pool, counts) in of_space.filter(|(pool, _)| pool.space == *space) {
            let gives = u128::from(pool.contains(address));
            match used {
                Use::Leased if !several || range == Some(&pool.range) => {
                    counts.used += 1;
                    counts.taken += gives;
                }
                Use::Leased => {
                    counts.used_by_others += gives;
                    counts.taken += gives;
                }
                Use::Freed(at) if now.saturating_sub(at) < cooldown => {
                    counts.cooling_down += gives;
                }
                Use::Freed(_) => {}
            }
        }
    })?;
    Ok(counts)
}
