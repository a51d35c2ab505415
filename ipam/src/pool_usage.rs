//! How full the pools of a store are.

use std::time::Duration;

use crate::store::{Pool, Store, StoreError};

/// What is used of a pool, in addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub used: u128,
    /// Its addresses that are leased as those of another range.
    pub used_by_others: u128,
    /// Its addresses that are leased, by whichever range.
    pub taken: u128,
    /// Its addresses that rest after a release.
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

/// Each lease counts in one pool: in that which its record names. Only where several
/// pools have its address, the record is read.
pub fn usage(store: &Store, pools: &[Pool], cooldown: Duration) -> Result<Vec<Usage>, StoreError> {
    let now = u128::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0);
    let mut counts: Vec<Usage> = pools.iter().map(|_| Usage::default()).collect();
    store.entries(false, |entry| {
        let is_of = |pool: &Pool| {
            pool.network_name == entry.network_name && entry.may_be_of(pool.range, pool.overlapping)
        };
        let several = pools.iter().filter(|pool| is_of(pool)).count() > 1;
        let range = match several && entry.freed.is_none() {
            true => entry.range(),
            false => None,
        };
        for (pool, counts) in pools
            .iter()
            .zip(&mut counts)
            .filter(|(pool, _)| is_of(pool))
        {
            let gives = u128::from(pool.contains(entry.address));
            match entry.freed {
                None if !several || range == Some(pool.range) => {
                    counts.used += 1;
                    counts.taken += gives;
                }
                None => {
                    counts.used_by_others += gives;
                    counts.taken += gives;
                }
                Some(freed) if u128::from(freed).abs_diff(now) < cooldown.as_millis() => {
                    counts.cooling_down += gives;
                }
                Some(_) => {}
            }
        }
        Ok(())
    })?;
    Ok(counts)
}
